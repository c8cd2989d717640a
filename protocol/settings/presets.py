"""Named sets of correction settings, and when to use each.

Names follow what is done: TIS is truncated importance sampling, IS the same without a cap. A preset sets only fields
of the section `algorithm`, and a field that is given beside it wins.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Preset(StrEnum):
    """A named set of correction settings."""

    UNCORRECTED = "uncorrected"
    BEHAVIOUR_CLIP = "behaviour_clip"
    BEHAVIOUR_GEOMETRIC_REJECTION = "behaviour_geometric_rejection"
    TOKEN_TIS = "token_tis"  # noqa: S105  the level is a token's, it is no password
    VERSION_RUN_TIS = "version_run_tis"
    SEQUENCE_TIS = "sequence_tis"
    SEQUENCE_IS = "sequence_is"
    ICEPOP = "icepop"
    GEOMETRIC_REJECTION = "geometric_rejection"
    K3_REJECTION_TOKEN_TIS = "k3_rejection_token_tis"  # noqa: S105
    CHEAP_PROXIMAL = "cheap_proximal"


@dataclass(frozen=True, slots=True)
class PresetInfo:
    """When to use a preset, and the fields of `algorithm` that it sets."""

    use: str
    fields: dict[str, Any]


_GEOMETRIC = {
    "rejection": "k1",
    "rejection_level": "sequence",
    "rejection_reduce": "mean",
    "rejection_lower": 0.99,
    "rejection_upper": 1.01,
}

PRESETS: Mapping[Preset, PresetInfo] = {
    preset: PresetInfo(use=use, fields=fields)
    for preset, use, fields in (
        (Preset.UNCORRECTED, "to see what a correction does, or when lag is 0: no correction", {"correction": "none"}),
        (
            Preset.BEHAVIOUR_CLIP,
            "when lag is small and the forward pass is dear: PPO's own clip is the trust region around the writer",
            {"correction": "behaviour"},
        ),
        (
            Preset.BEHAVIOUR_GEOMETRIC_REJECTION,
            "as behaviour_clip for long responses: a response that drifted by more than 1 % a token is left out",
            {"correction": "behaviour", **_GEOMETRIC},
        ),
        (
            Preset.TOKEN_TIS,
            "to start with: low variance, a small bias; what the defaults are",
            {"correction": "decoupled", "correction_level": "token", "correction_cap": 2.0},
        ),
        (
            Preset.VERSION_RUN_TIS,
            "when a response was parked and resumed: one weight for each stretch that one version wrote",
            {"correction": "decoupled", "correction_level": "version_run", "correction_cap": 2.0},
        ),
        (
            Preset.SEQUENCE_TIS,
            "when responses are short (tens of tokens): little bias, the variance is bounded by the cap",
            {"correction": "decoupled", "correction_level": "sequence", "correction_cap": 2.0},
        ),
        (
            Preset.SEQUENCE_IS,
            "to check another preset's bias on short responses: unbiased, of unbounded variance",
            {"correction": "decoupled", "correction_level": "sequence", "correction_cap": 0.0},
        ),
        (
            Preset.ICEPOP,
            "when engine and trainer disagree on a few tokens (mixture of experts, half precision): those are left out",
            {"correction": "decoupled", "correction_level": "token", "correction_band": (0.5, 5.0)},
        ),
        (
            Preset.GEOMETRIC_REJECTION,
            "when long responses drift as a whole: capped token weights, and a response that drifted by more than 1 % "
            "a token is left out",
            {"correction": "decoupled", "correction_level": "token", "correction_cap": 2.0, **_GEOMETRIC},
        ),
        (
            Preset.K3_REJECTION_TOKEN_TIS,
            "as geometric_rejection where drift goes both ways within a response and cancels in its mean",
            {
                "correction": "decoupled",
                "correction_level": "token",
                "correction_cap": 2.0,
                "rejection": "k3",
                "rejection_level": "sequence",
                "rejection_reduce": "mean",
                "rejection_upper": 0.01,
            },
        ),
        (
            Preset.CHEAP_PROXIMAL,
            "when several updates are made on a batch and a forward pass is dear: the proximal policy is interpolated",
            {
                "correction": "decoupled",
                "correction_level": "token",
                "correction_cap": 2.0,
                "proximal": "loglinear",
            },
        ),
    )
}
