"""A few steps of the trainer on one or several ranks, from given batches, with checkpoints and published weights.

`python -m benchmarks.zero_parts.training FILE` is one rank: it trains the cases of a JSON file one after the other,
each from its newest checkpoint on, and rank 0 writes what came of them beside the file.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from deploy.launch_ranks import run_ranks
from protocol.batch import Batch, decode_batch
from protocol.settings import RunSettings
from trainer.checkpoint import Checkpoints
from trainer.deepspeed_config import start_deepspeed
from trainer.distributed import Ranks
from trainer.engine import PolicyEngine
from trainer.model import load_policy
from trainer.packing import pack
from trainer.publish import write_policy
from trainer.update import Updater

RESULT_NAME = "result.json"
LOGPROBS_NAME = "logprobs.safetensors"
PUBLISHED_NAME = "published"


@dataclass(frozen=True, slots=True)
class Case:
    """A run in `run_dir` that is trained up to `last_step` and saved; `sections` are settings over the demo's."""

    name: str
    run_dir: str
    last_step: int
    sections: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])


@dataclass(frozen=True, slots=True)
class Outcome:
    """`losses` and gradient `norms` of the steps from `first_step` on, the folder of the published weights, and the
    log-probs [R] that the trainer itself gives the probe with them."""

    first_step: int
    losses: list[float]
    norms: list[float]
    published: Path
    logprobs: torch.Tensor


def train_cases(num_ranks: int, cases: Sequence[Case], base: Path, batches: Sequence[Path], out: Path) -> list[Outcome]:
    """The `cases` on so many ranks of this machine; step s trains on `batches[s - 1]`, the last one is the probe."""
    out.mkdir(parents=True)
    spec = out / "cases.json"
    values = {"base": str(base), "batches": [str(b) for b in batches], "cases": [asdict(case) for case in cases]}
    spec.write_text(json.dumps(values))
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.zero_parts.training", str(spec)]
    code = run_ranks([command] * num_ranks)
    if code:
        raise RuntimeError(f"training on {num_ranks} ranks ended with exit code {code}; its output says why")
    return [_read(out / case.name) for case in cases]


def run_settings(base: Path, run_dir: Path, sections: Mapping[str, Mapping[str, Any]]) -> RunSettings:
    """The demo's shape and rate, with `sections` over them."""
    values: dict[str, dict[str, Any]] = {
        "run": {"name": "zero", "dir": run_dir},
        "model": {"path": base},
        "data": {"train_batch_size": 16, "max_prompt_length": 96, "max_response_length": 256},
        "rollout": {"n": 8},
        "actor": {"ppo_max_token_len_per_gpu": 2048, "optim": {"lr": 1e-4, "weight_decay": 0.0}},
    }
    for section, fields in sections.items():
        values[section] = values.get(section, {}) | dict(fields)
    return RunSettings.model_validate(values)


def _run_case(case: Case, base: Path, batches: Sequence[Batch], out: Path) -> None:
    settings = run_settings(base, Path(case.run_dir), case.sections)
    device = start_deepspeed()
    ranks = Ranks(600.0)
    engine = PolicyEngine(settings, load_policy(settings, base, device, adapters=True), ranks, device)
    updater = Updater(settings, engine, None, ranks)
    checkpoints = Checkpoints(settings, ranks)
    state = checkpoints.restore([engine])
    first = state.step + 1
    engine.train(True)
    metrics = [updater.run(batches[step - 1], step, step - 1).metrics for step in range(first, case.last_step + 1)]
    checkpoints.save([engine], state.model_copy(update={"step": case.last_step}))
    write_policy(engine, out / PUBLISHED_NAME if ranks.is_main else None, case.last_step)
    engine.train(False)
    probe = batches[-1]
    logprobs = engine.logprobs(pack(probe, range(probe.num_samples)))  # under ZeRO-3 all ranks do it together
    if ranks.is_main:
        save_file({"logprobs": logprobs}, out / LOGPROBS_NAME)
        losses, norms = ([m[name] for m in metrics] for name in ("actor/pg_loss", "actor/grad_norm"))
        (out / RESULT_NAME).write_text(json.dumps({"first_step": first, "losses": losses, "norms": norms}))


def _read(folder: Path) -> Outcome:
    values = json.loads((folder / RESULT_NAME).read_text())
    return Outcome(**values, published=folder / PUBLISHED_NAME, logprobs=load_file(folder / LOGPROBS_NAME)["logprobs"])


def main(spec: Path) -> None:
    """One rank."""
    values = json.loads(spec.read_text())
    torch.set_num_threads(1)
    batches = [decode_batch(Path(name).read_bytes()) for name in values["batches"]]
    for case in values["cases"]:
        out = spec.parent / case["name"]
        out.mkdir(exist_ok=True)
        _run_case(Case(**case), Path(values["base"]), batches, out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
