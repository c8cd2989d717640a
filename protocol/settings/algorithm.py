"""Settings of the mathematics: advantages, KL in the reward, overlong responses, off-policy correction."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal, cast

from pydantic import Field, model_validator

from protocol.settings.base import Section
from protocol.settings.presets import PRESETS, Preset

AdvEstimator = Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"]
KlType = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
Level = Literal["token", "version_run", "sequence"]

# Their baseline is the rest of the group, so a group of one has none.
GROUP_ESTIMATORS = frozenset({"grpo", "rloo", "reinforce_plus_plus_baseline"})
TOKEN_ESTIMATORS = frozenset({"gae", "reinforce_plus_plus"})


class Correction(StrEnum):
    """How the loss corrects for tokens that an older policy wrote."""

    NONE = "none"
    BEHAVIOUR = "behaviour"
    DECOUPLED = "decoupled"


class KlCtrlSettings(Section):
    """The coefficient of the KL in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """`fixed`, or `adaptive`: raised while the KL is above `target_kl`, lowered while below."""
    kl_coef: float = Field(default=0.001, ge=0)
    """The coefficient, or where the adaptive one starts."""
    horizon: int = Field(default=10_000, ge=1)
    """Samples over which the adaptive coefficient follows: the larger, the slower."""
    target_kl: float = Field(default=0.1, gt=0)
    """KL a token that the adaptive coefficient steers to."""

    @model_validator(mode="after")
    def _check_start(self) -> "KlCtrlSettings":
        if self.type == "adaptive" and not self.kl_coef:
            raise ValueError("type = 'adaptive' multiplies kl_coef, and 0 stays 0: give kl_coef a value above 0")
        return self


class AlgorithmSettings(Section):
    """Advantages and off-policy correction."""

    adv_estimator: AdvEstimator = "grpo"
    """Advantage estimator: `grpo`, `rloo` and `reinforce_plus_plus_baseline` compare the samples of a group,
    `reinforce_plus_plus` the whole batch, `gae` with a critic."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation in `grpo` (off: Dr.GRPO)."""
    groups_without_spread: Literal["keep", "filter"] = "keep"
    """Groups whose samples all score the same: `keep` them in the loss' mean, or `filter` them out of the update."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount a token, for `gae` and `reinforce_plus_plus`."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """GAE's λ: 1 is the whole return (high variance), 0 the critic's next value (high bias)."""
    use_kl_in_reward: bool = False
    """Subtract `kl_ctrl.kl_coef` times the KL to the reference policy from the reward, token by token."""
    kl_penalty: KlType = "kl"
    """Estimator of the KL in the reward."""
    kl_ctrl: KlCtrlSettings = Field(default_factory=KlCtrlSettings)
    """Its coefficient."""
    overlong_buffer_len: int = Field(default=0, ge=0)
    """DAPO's soft penalty: tokens before `data.max_response_length` over which the reward sinks; 0 is no penalty."""
    overlong_penalty_factor: float = Field(default=1.0, gt=0)
    """What a response of full length loses by it."""
    mask_truncated: bool = False
    """Leave responses that were cut at the maximum length out of the update; they stay in their group's baseline."""
    preset: Preset | None = None
    """Named set of the settings below (docs/corrections.md lists them); a field that is given beside it wins."""
    correction: Correction = Correction.DECOUPLED
    """`decoupled`: the loss around proximal log-probs, weighted by p/b; `behaviour`: ratio to the behaviour policy;
    `none`: biased once lag > 0."""
    correction_level: Level = "token"
    """What one importance weight is the product over: a `token`; a `version_run`, consecutive tokens of a sample that
    one version wrote; the whole `sequence`."""
    correction_cap: float = Field(default=2.0, ge=0)
    """C, the cap of the importance weight; 0 cuts nothing."""
    correction_geometric: bool = False
    """The geometric mean of the ratios in a version run or sequence, not their product."""
    correction_band: tuple[float, float] | None = None
    """IcePop: weights outside [low, high] become 0, in place of the cap."""
    correction_normalise: bool = False
    """Divide the weights by their mean over the mini-batch."""
    rejection: Literal["none", "k1", "k2", "k3"] = "none"
    """Leave out of the policy loss what is too far off-policy by this estimate of the KL; `k1` bounds the ratio p/b."""
    rejection_level: Level = "sequence"
    """What is left out together."""
    rejection_reduce: Literal["mean", "sum", "max"] = "mean"
    """How the estimates of its tokens become one; the `mean` of `k1` bounds the geometric mean of the ratios."""
    rejection_lower: float = Field(default=0.0, ge=0)
    """Smallest ratio kept by `k1`; 0 is 1/`rejection_upper`."""
    rejection_upper: float = Field(default=2.0, gt=0)
    """Largest ratio kept by `k1`; largest estimate kept by `k2` and `k3`."""
    veto: float = Field(default=0.0, ge=0, lt=1)
    """Leave out a whole sample if one of its tokens has p/b below this; 0 never does."""
    proximal: Literal["recompute", "loglinear"] = "recompute"
    """Proximal log-probs: from a forward pass, or interpolated between behaviour and current ones by version."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("preset") not in list(Preset):
            return values  # pyright: ignore[reportUnknownVariableType]
        given = cast(Mapping[str, Any], values)
        return {**PRESETS[Preset(given["preset"])].fields, **given}

    @model_validator(mode="after")
    def _check_correction(self) -> "AlgorithmSettings":
        check_correction(self)
        return self


def check_correction(algorithm: AlgorithmSettings) -> None:
    """Raise `ValueError` with what to do where correction settings contradict each other."""
    band = algorithm.correction_band
    if band is not None and not 0 <= band[0] < band[1]:
        raise ValueError(f"correction_band = {list(band)} must be two numbers, the first smaller and not negative")
    if band is not None and not band[0] <= 1 <= band[1]:
        raise ValueError(
            f"correction_band = {list(band)} leaves out the weight 1, which on-policy tokens have, and so nearly all "
            "of them: give one that holds 1, such as [0.5, 5.0]"
        )
    corrects = algorithm.correction is not Correction.NONE
    if not corrects and (algorithm.rejection != "none" or algorithm.veto or band is not None):
        raise ValueError(
            "correction = 'none' looks at no behaviour log-probs: leave rejection, veto and correction_band off, or "
            "set correction = 'decoupled' or 'behaviour'"
        )
    if algorithm.correction_geometric and algorithm.correction_level == "token":
        raise ValueError("correction_geometric needs correction_level = 'version_run' or 'sequence'")
    if algorithm.rejection == "k1" and algorithm.rejection_level != "token" and algorithm.rejection_reduce == "max":
        raise ValueError("rejection_reduce = 'max' needs rejection = 'k2' or 'k3': k1 has a sign")
    if algorithm.rejection == "k1" and not algorithm.rejection_lower <= 1 <= algorithm.rejection_upper:
        raise ValueError(
            f"rejection = 'k1' keeps ratios from {algorithm.rejection_lower:g} to {algorithm.rejection_upper:g} and "
            "would leave out 1, which on-policy tokens have: set rejection_lower <= 1 <= rejection_upper"
        )
    if algorithm.correction_normalise and algorithm.correction is not Correction.DECOUPLED:
        raise ValueError("correction_normalise needs correction = 'decoupled': the others have no weights")
    if algorithm.proximal == "loglinear":
        _check_loglinear(algorithm)


def _check_loglinear(algorithm: AlgorithmSettings) -> None:
    if algorithm.correction is not Correction.DECOUPLED:
        raise ValueError("proximal = 'loglinear' needs correction = 'decoupled': the others use no behaviour log-probs")
    if algorithm.correction_normalise:
        raise ValueError("correction_normalise needs proximal = 'recompute': the mean is taken before the first update")
    if algorithm.use_kl_in_reward:
        raise ValueError("use_kl_in_reward needs proximal = 'recompute': it is held against the reference")
