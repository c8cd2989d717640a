"""All ZeRO stages on one and two ranks: the same losses, checkpoints that any number of ranks goes on from. Also of two
ranks that share each sequence.

Tolerances: float32 losses agree to 1e-6 and norms to 1e-5 relative over stages and ranks (measured: 2e-7 and 2e-6); the
weights that a resumed run starts from are those that were saved, bit for bit, however many ranks it has.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import TrainingError
from tests.trainer.rank_cases import Case, Outcome, run_case, run_on_ranks

STAGES = (0, 1, 2, 3)
pytestmark = pytest.mark.filterwarnings("ignore:.torch.*is deprecated")
BF16: dict[str, Any] = {"dtype": "bfloat16"}
# Everything that differs in what is sharded, cast, moved or frozen; each is resumed on another number of ranks.
HARD_CASES: dict[str, dict[str, Any]] = {
    "zero0-bf16": {"model": BF16},
    "zero1-bf16": {"model": BF16, "deepspeed": {"zero_stage": 1}},
    "zero2-bf16-offload": {"model": BF16, "deepspeed": {"zero_stage": 2, "offload_optimizer": True}},
    "zero3-bf16-offload": {
        "model": BF16 | {"enable_gradient_checkpointing": True},
        "deepspeed": {"zero_stage": 3, "offload_optimizer": True, "offload_param": True},
    },
    "zero1-critic": {"algorithm": {"adv_estimator": "gae"}, "deepspeed": {"zero_stage": 1}},
    "zero3-critic": {"algorithm": {"adv_estimator": "gae"}, "deepspeed": {"zero_stage": 3}},
    "zero2-lora": {"model": {"lora_rank": 4}, "deepspeed": {"zero_stage": 2}},
    "zero3-lora": {"model": {"lora_rank": 4}, "deepspeed": {"zero_stage": 3}},
}

# The trainer's whole step where two ranks share each sequence: everything that is summed over ranks is counted once.
KL_IN_REWARD: dict[str, Any] = {
    "use_kl_in_reward": True,
    "kl_ctrl": {"type": "adaptive", "kl_coef": 0.1, "horizon": 99},
}
SHARED_CASES: dict[str, dict[str, Any]] = {
    "shared": {
        "algorithm": {"correction_level": "sequence", "correction_normalise": True},
        "actor": {"entropy_coeff": 0.01, "loss_agg_mode": "seq-mean-token-mean"},
    },
    "shared-zero3-critic": {
        "algorithm": {"adv_estimator": "gae", **KL_IN_REWARD},
        "deepspeed": {"zero_stage": 3},
        "model": {"enable_gradient_checkpointing": True},
    },
    "shared-zero2-lora": {
        "algorithm": KL_IN_REWARD,
        "deepspeed": {"zero_stage": 2},
        "model": {"lora_rank": 4},
    },
}


def shared_case(name: str, run_dir: Path, model_dir: Path, size: int) -> Case:
    sections = with_model(SHARED_CASES[name], model_dir)
    bounds = {
        "ulysses_sequence_parallel_size": size,
        "ppo_mini_batch_size": 2,
        "ppo_max_token_len_per_gpu": 128 // size,
    }
    actor = bounds | sections.get("actor", {})
    return Case(name, str(run_dir / f"{name}-{size}"), save=False, whole=True, sections=sections | {"actor": actor})


def with_model(sections: dict[str, dict[str, Any]], model_dir: Path) -> dict[str, dict[str, Any]]:
    return sections | {"model": {"path": str(model_dir)} | sections.get("model", {})}


def stage_case(name: str, run_dir: Path, stage: int, **values: Any) -> Case:
    return Case(name, str(run_dir), sections={"deepspeed": {"zero_stage": stage}}, **values)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # DeepSpeed's converter takes paths for regular expressions: a name like this must not matter.
    return tmp_path_factory.mktemp("zero+(runs)")


@pytest.fixture(scope="module")
def two_ranks(runs: Path, tiny_model_dir: Path) -> dict[str, Outcome]:
    cases = [stage_case(f"zero{stage}", runs / f"zero{stage}", stage) for stage in STAGES]
    shared = [shared_case(name, runs, tiny_model_dir, 2) for name in SHARED_CASES]
    # Models that share nothing come last: in a process where others do, they are as they were.
    return run_on_ranks(2, [*shared, *cases], tiny_model_dir, runs / "out")


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_trains_alike_on_one_and_two_ranks(
    two_ranks: dict[str, Outcome], tiny_model_dir: Path, tmp_path: Path, stage: int
) -> None:
    two, reference = two_ranks[f"zero{stage}"], two_ranks["zero0"]
    one = run_case(stage_case("one", tmp_path, stage, save=False), tiny_model_dir, tmp_path)
    assert two.losses == pytest.approx(reference.losses, rel=0, abs=1e-6)
    assert one.losses == pytest.approx(reference.losses, rel=0, abs=1e-6)
    assert two.norms == pytest.approx(reference.norms, rel=1e-5)
    assert one.norms == pytest.approx(reference.norms, rel=1e-5)
    moved = torch.cat([(two.after[n] - two.before[n]).abs().flatten() for n in two.after])
    apart = torch.cat([(two.after[n] - one.after[n]).abs().flatten() for n in two.after])
    # Adam divides a gradient by its own size: where that is rounding noise, the sign is, and lr is the error.
    assert apart.mean() < 1e-2 * moved.mean()


@pytest.mark.parametrize("name", SHARED_CASES)
def test_ranks_that_share_a_sequence_train_as_one_that_has_it_whole(
    two_ranks: dict[str, Outcome], tiny_model_dir: Path, tmp_path: Path, name: str
) -> None:
    compare_metrics(two_ranks[name], run_case(shared_case(name, tmp_path, tiny_model_dir, 1), tiny_model_dir, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_four_ranks_in_groups_train_as_one_rank(tiny_model_dir: Path, tmp_path: Path, size: int) -> None:
    """Two replicas of two ranks; and one of four, which is more than there are key-value heads."""
    cases = [shared_case(name, tmp_path, tiny_model_dir, size) for name in SHARED_CASES]
    four = run_on_ranks(4, cases, tiny_model_dir, tmp_path / "four")
    for name in SHARED_CASES:
        one = run_case(shared_case(name, tmp_path / "one", tiny_model_dir, 1), tiny_model_dir, tmp_path / "one")
        compare_metrics(four[name], one)


def compare_metrics(shared: Outcome, whole: Outcome) -> None:
    """Everything that is reported of each step; weights move by what Adam makes of gradients that agree."""
    assert len(shared.metrics) == len(whole.metrics) == 2
    for ours, expected in zip(shared.metrics, whole.metrics, strict=True):
        assert ours == pytest.approx(expected, rel=2e-4, abs=2e-6, nan_ok=True)


@pytest.mark.parametrize(("stage", "resumed_stage"), [(0, 0), pytest.param(1, 2, marks=pytest.mark.slow), (3, 3)])
def test_one_rank_goes_on_from_the_checkpoint_of_two(
    two_ranks: dict[str, Outcome], tiny_model_dir: Path, tmp_path: Path, runs: Path, stage: int, resumed_stage: int
) -> None:
    run_dir = runs / f"zero{stage}"
    files = sorted(str(p) for p in run_dir.rglob("*"))
    case = stage_case("resumed", run_dir, resumed_stage, steps=1, save=False)
    resumed = run_case(case, tiny_model_dir, tmp_path)
    assert resumed.first_step == 3
    saved = two_ranks[f"zero{stage}"].after
    assert all(torch.equal(resumed.before[name], saved[name]) for name in saved)
    straight = run_case(
        stage_case("straight", tmp_path / "straight", stage, steps=3, save=False), tiny_model_dir, tmp_path
    )
    assert resumed.losses == pytest.approx(straight.losses[2:], rel=1e-4)
    # The moments are there, too: a third step from fresh ones would have the size of a first.
    assert resumed.norms == pytest.approx(straight.norms[2:], rel=1e-3)
    apart = torch.cat([(resumed.after[n] - straight.after[n]).abs().flatten() for n in saved])
    assert apart.mean() < 1e-5
    assert sorted(str(p) for p in run_dir.rglob("*")) == files, "the checkpoint is as it was"


def test_a_stage_with_another_layout_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    run_case(stage_case("plain", tmp_path / "run", 0, steps=1), tiny_model_dir, tmp_path)
    with pytest.raises(TrainingError, match=r"deepspeed\.zero_stage was 0 and is 3"):
        run_case(stage_case("sharded", tmp_path / "run", 3, steps=1), tiny_model_dir, tmp_path)


@pytest.mark.slow
def test_two_ranks_go_on_from_the_checkpoint_of_one(tiny_model_dir: Path, tmp_path: Path) -> None:
    def cases(**values: Any) -> list[Case]:
        return [Case(n, str(tmp_path / n), sections=with_model(s, tiny_model_dir), **values) for n, s in named.items()]

    named = HARD_CASES | {"zero1": {"deepspeed": {"zero_stage": 1}}}
    one = {case.name: run_case(case, tiny_model_dir, tmp_path / "one") for case in cases()}
    two = run_on_ranks(2, cases(steps=1), tiny_model_dir, tmp_path / "two")
    for name in named:
        saved, resumed = one[name].after, two[name].before
        assert all(torch.equal(saved[n], resumed[n]) for n in saved), name
        assert two[name].first_step == 3, name
    # And back again: what two ranks have saved, one goes on from.
    back = {case.name: run_case(case, tiny_model_dir, tmp_path / "back") for case in cases(steps=1, save=False)}
    for name in named:
        assert all(torch.equal(two[name].after[n], back[name].before[n]) for n in back[name].before), name
        straight = run_case(
            Case("straight", str(tmp_path / "s" / name), 4, False, with_model(named[name], tiny_model_dir)),
            tiny_model_dir,
            tmp_path / "straight",
        )
        half = named[name].get("model", {}).get("dtype") == "bfloat16"
        together = one[name].losses + two[name].losses + back[name].losses
        assert together == pytest.approx(straight.losses, rel=3e-2 if half else 1e-3), name
