"""Presets, and combinations of the algorithm that are refused with what to do."""

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import SettingsError
from protocol.settings import RunSettings, dump_settings, load_settings
from protocol.settings.algorithm import GROUP_ESTIMATORS, AlgorithmSettings, Correction
from protocol.settings.presets import PRESETS, Preset

ONE = ("--rollout.n=1",)
DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("preset", list(Preset))
def test_every_preset_sets_what_it_says_and_is_documented(preset: Preset) -> None:
    algorithm = AlgorithmSettings(preset=preset)
    for name, value in PRESETS[preset].fields.items():
        assert getattr(algorithm, name) == value
    row = next(line for line in (DOCS / "corrections.md").read_text().splitlines() if f"| `{preset}` |" in line)
    assert len(PRESETS[preset].use) > 20
    assert PRESETS[preset].use in row


def test_token_tis_is_what_the_defaults_are() -> None:
    assert AlgorithmSettings(preset=Preset.TOKEN_TIS) == AlgorithmSettings().model_copy(
        update={"preset": Preset.TOKEN_TIS}
    )


def test_a_field_beside_a_preset_wins_from_any_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[algorithm]\npreset = "icepop"\ncorrection_level = "sequence"\n')
    monkeypatch.setenv("APRIL_ALGORITHM__VETO", "0.001")
    algorithm = load_settings(file, ["--algorithm.correction_band=[0.2, 3]"]).algorithm
    assert (algorithm.correction_level, algorithm.veto, algorithm.correction_band) == ("sequence", 0.001, (0.2, 3.0))
    assert algorithm.correction is Correction.DECOUPLED


def test_resolved_settings_with_a_preset_resolve_to_themselves() -> None:
    settings = RunSettings(algorithm=AlgorithmSettings(preset=Preset.GEOMETRIC_REJECTION, rejection_upper=1.5))
    again = RunSettings.model_validate(dump_settings(settings))
    assert again.algorithm == settings.algorithm


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"rollout.n": 1, "algorithm.adv_estimator": "rloo"}, "rollout.n must be at least 2 .*'rloo'.*'gae' or"),
        ({"rollout.n": 1}, "'grpo': one sample has no group"),
        ({"algorithm.correction": "none", "algorithm.veto": 0.1}, "looks at no behaviour log-probs"),
        ({"algorithm.correction": "none", "algorithm.rejection": "k1"}, "looks at no behaviour log-probs"),
        ({"algorithm.correction_geometric": True}, "correction_level = 'version_run' or 'sequence'"),
        ({"algorithm.correction_band": [2, 0.5]}, "must be two numbers, the first smaller"),
        ({"algorithm.rejection": "k1", "algorithm.rejection_reduce": "max"}, "needs rejection = 'k2' or 'k3'"),
        (
            {"algorithm.rejection": "k1", "algorithm.rejection_upper": 0.9},
            "set rejection_lower <= 1 <= rejection_upper",
        ),
        ({"algorithm.rejection": "k1", "algorithm.rejection_lower": 3}, "set rejection_lower <= 1 <= rejection_upper"),
        (
            {"algorithm.correction_normalise": True, "algorithm.correction": "behaviour"},
            "needs correction = 'decoupled'",
        ),
        ({"algorithm.proximal": "loglinear", "algorithm.correction": "behaviour"}, "needs correction = 'decoupled'"),
        ({"algorithm.proximal": "loglinear", "algorithm.correction_normalise": True}, "needs proximal = 'recompute'"),
        ({"algorithm.proximal": "loglinear", "algorithm.use_kl_in_reward": True}, "needs proximal = 'recompute'"),
        ({"algorithm.overlong_buffer_len": 99999}, "is more than data.max_response_length"),
        ({"algorithm.mask_truncated": True, "algorithm.use_kl_in_reward": True}, "use actor.use_kl_loss"),
        (
            {
                "rollout.n": 1,
                "algorithm.adv_estimator": "reinforce_plus_plus",
                "algorithm.groups_without_spread": "filter",
            },
            "one sample has no spread",
        ),
        ({"algorithm.preset": "no_such"}, "algorithm.preset"),
    ],
)
def test_a_wrong_combination_is_one_sentence(words: dict[str, Any], message: str) -> None:
    overrides = [f"--{name}={json.dumps(value)}" for name, value in words.items()]
    with pytest.raises(SettingsError, match=message):
        load_settings(None, overrides)


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_one_sample_a_prompt_is_right_where_no_group_is_needed(estimator: str) -> None:
    settings = load_settings(None, [f"--algorithm.adv_estimator={estimator}", *ONE])
    assert settings.rollout.n == 1
    assert estimator not in GROUP_ESTIMATORS
