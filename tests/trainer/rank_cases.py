"""Short trainings on one or several ranks, with checkpoints and published weights, as data in and data out.

`python -m tests.trainer.rank_cases FILE` runs the cases of a JSON file on the ranks of its launcher; the same function
runs them in a test's own process, which is a single rank.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from protocol.settings import RunSettings
from tests.trainer.factory import make_batch, make_settings
from trainer.checkpoint import Checkpoints
from trainer.critic import Critic
from trainer.deepspeed_config import start_deepspeed
from trainer.distributed import Ranks
from trainer.engine import PolicyEngine
from trainer.identity import has_critic
from trainer.model import load_policy
from trainer.objective import make_objective
from trainer.packing import Bounds, MicroBatch, pack, plan_ranks
from trainer.reference import make_reference
from trainer.update import Updater


@dataclass(frozen=True)
class Case:
    """Restore the newest checkpoint under `run_dir`, if there is one, train `steps` more, and save if `save`.

    `whole`: steps are those of the trainer's own `Updater`, and `metrics` what it reports of each.
    """

    name: str
    run_dir: str
    steps: int = 2
    save: bool = True
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    whole: bool = False


@dataclass(frozen=True)
class Outcome:
    """`losses` and `norms` of each step; `weights` are the published ones before and after."""

    first_step: int
    losses: list[float]
    norms: list[float]
    critic: list[dict[str, float]]
    metrics: list[dict[str, float]]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]


def run_case(case: Case, model_dir: Path, out: Path) -> Outcome:
    """On this rank; the outcome is right on rank 0 and in the folder `out`."""
    settings = make_settings(model_dir, Path(case.run_dir), **case.sections)
    device = start_deepspeed()
    ranks = Ranks(60, settings.actor.ulysses_sequence_parallel_size)
    torch.manual_seed(ranks.rank)
    policy = load_policy(settings, model_dir, device, adapters=True, group=ranks.sequence)
    engine = PolicyEngine(settings, policy, ranks, device)
    critic = Critic(settings, ranks, device) if has_critic(settings) else None
    engines = [engine] if critic is None else [engine, critic.engine]
    checkpoints = Checkpoints(settings, ranks)
    state = checkpoints.restore(engines)
    before = published(engine)
    losses: list[float] = []
    norms: list[float] = []
    of_critic: list[dict[str, float]] = []
    metrics: list[dict[str, float]] = []
    updater = make_updater(settings, engine, critic, ranks) if case.whole else None
    for step in range(state.step + 1, state.step + 1 + case.steps):
        if updater is not None:
            metrics.append(updater.run(make_batch(step=step, version=step), step, step).metrics)
            continue
        micros, num_tokens = micro_batches(step, ranks)
        engine.train(True)
        loss, norm = train_step(engine, micros, num_tokens, settings, ranks)
        losses.append(loss)
        norms.append(norm)
        if critic is not None:
            old = critic.values(micros)
            of_critic.append(critic.update(micros, [m.behaviour * 0.1 for m in micros], old, num_tokens, step))
    if case.save:
        checkpoints.save(engines, state.model_copy(update={"step": state.step + case.steps}))
    outcome = Outcome(state.step + 1, losses, norms, of_critic, metrics, before, published(engine))
    if ranks.is_main:
        write(out / case.name, outcome)
    return outcome


def make_updater(settings: RunSettings, engine: PolicyEngine, critic: Critic | None, ranks: Ranks) -> Updater:
    """As the trainer's entry makes it."""
    needs = make_objective(settings).needs_reference
    reference = make_reference(settings, engine, engine.device, ranks.sequence) if needs else None
    return Updater(settings, engine, reference, ranks, critic)


def micro_batches(step: int, ranks: Ranks, max_tokens: int = 128) -> tuple[list[MicroBatch], int]:
    """This rank's part of the synthetic batch of `step`, and the response tokens of the whole."""
    batch = make_batch(step=step)
    lengths = (batch.sample_offsets[1:] - batch.sample_offsets[:-1]).tolist()
    bins = plan_ranks(lengths, Bounds(max_tokens), ranks.num_replicas)[ranks.replica]
    return [pack(batch, b) for b in bins], int(batch.loss_mask.sum())


def train_step(
    engine: PolicyEngine, micros: Sequence[MicroBatch], num_tokens: int, settings: RunSettings, ranks: Ranks
) -> tuple[float, float]:
    """A policy-gradient step with rewards that the samples' numbers make; the loss over all ranks and the norm."""
    total = 0.0
    for micro in micros:
        rewards = (micro.samples % 3).float() - 1
        loss = -(engine.forward(micro).logprobs * rewards).sum() / num_tokens
        assert engine.backward(loss)
        total += float(loss.detach())
    norm = engine.update(settings.actor.optim.lr, skip=False)
    return float(ranks.total(torch.tensor([total], dtype=torch.float64))[0]), norm


def published(engine: PolicyEngine) -> dict[str, torch.Tensor]:
    """What would be written for the inference engine."""
    return {name: weight.clone() for name, weight in engine.named_weights()}


def write(folder: Path, outcome: Outcome) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(outcome.before, folder / "before.safetensors")
    save_file(outcome.after, folder / "after.safetensors")
    values = {"first_step": outcome.first_step, "losses": outcome.losses, "norms": outcome.norms}
    (folder / "outcome.json").write_text(json.dumps(values | {"critic": outcome.critic, "metrics": outcome.metrics}))


def read(folder: Path) -> Outcome:
    values = json.loads((folder / "outcome.json").read_text())
    tensors = {name: load_file(folder / f"{name}.safetensors") for name in ("before", "after")}
    return Outcome(**values, **tensors)


def run_on_ranks(num_ranks: int, cases: Sequence[Case], model_dir: Path, out: Path) -> dict[str, Outcome]:
    """The cases one after the other on so many ranks of this machine, by `april train`'s own launcher."""
    from deploy.launch_ranks import run_ranks

    out.mkdir(parents=True, exist_ok=True)
    spec = out / "cases.json"
    spec.write_text(json.dumps({"model": str(model_dir), "out": str(out), "cases": [asdict(c) for c in cases]}))
    command = [sys.executable, "-W", "ignore", "-m", "tests.trainer.rank_cases", str(spec)]
    assert run_ranks([command] * num_ranks) == 0
    return {case.name: read(out / case.name) for case in cases}


def main(spec: Path) -> None:
    values = json.loads(spec.read_text())
    torch.set_num_threads(1)
    for case in values["cases"]:
        run_case(Case(**case), Path(values["model"]), Path(values["out"]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
