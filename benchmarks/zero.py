"""ZeRO stages and ranks on the demo's policy: the same losses, checkpoints for any number of ranks, weights that serve.

For each stage, and for adapters, on one and on two ranks: two steps from given batches and a checkpoint; then the other
number of ranks goes on from it for a third. What was published after that is installed in the real engine, which
samples from it. Three chains are closed, all in float32:

- losses and gradient norms, against the same three steps without ZeRO on one rank, never interrupted;
- the log-probs that the trainer gives a batch, against those that the published file gives it;
- the log-probs that the engine says of its own samples, against those that the published file gives them.
"""

import json
import tempfile
from collections import deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.learning import make_group, sample_batch
from benchmarks.report import report
from benchmarks.rollouts import Rollout, Sampler
from benchmarks.zero_parts.serving import serve_all
from benchmarks.zero_parts.training import Case, Outcome, run_settings, train_cases
from deploy.demo.base_policy import default_cache_dir, make_base_policy
from deploy.demo.byte_model import make_tokenizer
from deploy.demo.task import HELD_OUT_SEED, ChainSum, chain_sums
from protocol.batch import Batch, build_batch, decode_batch, encode_batch
from trainer.model import LM_PREFIX, PolicyModel, load_policy
from trainer.packing import pack
from trainer.publish import WEIGHTS_NAME

STEPS_BEFORE, STEPS = 2, 3
RANKS = (1, 2)
NUM_PROMPTS, MAX_TOKENS = 16, 256
LORA: dict[str, Any] = {"lora_rank": 8, "lora_alpha": 32}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    **{f"ZeRO {stage}": {"deepspeed": {"zero_stage": stage}} for stage in range(4)},
    "ZeRO 0, LoRA": {"model": LORA},
    "ZeRO 3, LoRA": {"model": LORA, "deepspeed": {"zero_stage": 3}},
}
# Float32: sums in another order, and Adam divides by gradients that are only rounding noise in places.
TOLERANCES = {"loss apart": 1e-6, "norm apart": 1e-5, "published apart": 5e-5, "engine apart": 1e-4}

Rows = list[dict[str, Any]]


def zero_table(base: Path, folder: Path) -> Rows:
    """One row for each variant and number of ranks."""
    batches = _write_batches(base, folder)
    straight = train_cases(1, _cases(folder / "straight", STEPS), base, batches, folder / "out-straight")
    outcomes: dict[int, list[tuple[Outcome, Outcome]]] = {}
    for num_ranks in RANKS:
        other = sum(RANKS) - num_ranks
        runs = folder / f"ranks-{num_ranks}"
        before = train_cases(num_ranks, _cases(runs, STEPS_BEFORE), base, batches, folder / f"out-{num_ranks}")
        after = train_cases(other, _cases(runs, STEPS), base, batches, folder / f"out-{num_ranks}-{other}")
        outcomes[num_ranks] = list(zip(before, after, strict=True))
    found = [(name, ranks, i) for i, name in enumerate(VARIANTS) for ranks in RANKS]
    items = list(islice(chain_sums(HELD_OUT_SEED, held_out=True), NUM_PROMPTS))
    tokenizer = make_tokenizer()
    prompts: list[list[int]] = [tokenizer.encode(item.prompt) for item in items]
    settings = run_settings(base, folder / "engine", {"engine": {"num_threads": 1}})
    served = serve_all(settings, [outcomes[r][i][1].published for _, r, i in found], prompts, MAX_TOKENS)
    policy = load_policy(settings, base, torch.device("cpu")).eval()
    return [
        {"variant": name, "ranks": ranks, "then": sum(RANKS) - ranks}
        | _apart(*outcomes[ranks][i], straight[0 if "LoRA" not in name else list(VARIANTS).index("ZeRO 0, LoRA")])
        | _as_published(policy, outcomes[ranks][i][1], batches[-1], items, rollouts)
        for (name, ranks, i), rollouts in zip(found, served, strict=True)
    ]


def _cases(folder: Path, last_step: int) -> list[Case]:
    named = [(name.replace(" ", "-").replace(",", ""), sections) for name, sections in VARIANTS.items()]
    return [Case(name, str(folder / name), last_step, sections) for name, sections in named]


def _write_batches(base: Path, folder: Path) -> list[Path]:
    """The demo's policy on its task: a batch for each step, and the probe."""
    sampler = Sampler(Qwen3ForCausalLM.from_pretrained(base, dtype=torch.float32))
    weights = load_file(base / WEIGHTS_NAME)
    generator, prompts = torch.Generator().manual_seed(0), chain_sums(1, held_out=False)
    paths = [folder / f"batch-{step}.safetensors" for step in range(1, STEPS + 2)]
    for step, path in enumerate(paths, start=1):
        path.write_bytes(encode_batch(sample_batch(sampler, deque([(0, weights)]), prompts, step, generator)))
    return paths


def _apart(before: Outcome, after: Outcome, straight: Outcome) -> dict[str, Any]:
    """Of three steps in two runs from three in one."""
    assert (before.first_step, after.first_step) == (1, STEPS_BEFORE + 1), "the second run went on from the first"
    losses, norms = before.losses + after.losses, before.norms + after.norms
    return {
        "loss": losses[-1],
        "loss apart": max(abs(a - b) for a, b in zip(losses, straight.losses, strict=True)),
        "norm apart": max(abs(a - b) / b for a, b in zip(norms, straight.norms, strict=True)),
    }


def _as_published(
    policy: PolicyModel, after: Outcome, probe: Path, items: Sequence[ChainSum], rollouts: Sequence[Rollout]
) -> dict[str, Any]:
    """Largest differences between log-probs of the published file and those of the trainer and of the engine."""
    weights = {f"{LM_PREFIX}{name}": weight for name, weight in load_file(after.published / WEIGHTS_NAME).items()}
    _, unexpected = policy.load_state_dict(weights, strict=False)
    assert not unexpected, "published names are the model's own"
    of_probe = _logprobs(policy, decode_batch(probe.read_bytes()))
    groups = [make_group(f"g{i}", i, item, [rollouts[i]], 1) for i, item in enumerate(items)]
    sampled = build_batch("zero", 1, 0, groups)
    micro = pack(sampled, range(sampled.num_samples))
    of_engine = (_logprobs(policy, sampled) - micro.behaviour).abs()
    return {
        "published apart": float((of_probe - after.logprobs).abs().max()),
        "tokens served": len(of_engine),
        "engine apart": float(of_engine.max()),
        "engine apart, mean": float(of_engine.mean()),
    }


@torch.no_grad()
def _logprobs(policy: PolicyModel, batch: Batch) -> torch.Tensor:
    return policy(pack(batch, range(batch.num_samples))).logprobs


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the table as JSON.")
def main(json_file: Path | None) -> None:
    """Print the table, and whether each row is within the tolerances."""
    disable_progress_bar()
    base = make_base_policy(default_cache_dir())
    with tempfile.TemporaryDirectory() as folder:
        rows = zero_table(base, Path(folder))
    for row in rows:
        row["within"] = all(row[name] <= limit for name, limit in TOLERANCES.items())
    report(f"{STEPS_BEFORE} steps, saved, 1 step on the other number of ranks, served", rows, json_file)
    print(json.dumps({"tolerances": TOLERANCES, "all within": all(row["within"] for row in rows)}))


if __name__ == "__main__":
    main()
