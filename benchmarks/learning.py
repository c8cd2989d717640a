"""One cell of the comparison of corrections: the demo's policy learns from data of a forced lag.

The trainer's own updater and engine; only the service is left out, so that the lag is what the cell says and not what
a scheduler makes of it. Each response is begun by the weights of `lag` steps ago and, at a token drawn at random,
handed to those of half as many: what parking and resuming does. At lag 0 all is written by the newest weights.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from benchmarks.rollouts import Rollout, Sampler
from deploy.demo.byte_model import make_tokenizer
from deploy.demo.task import DATA_SOURCE, HELD_OUT_SEED, ChainSum, chain_sums, score
from protocol.batch import Batch, build_batch
from protocol.samples import Group, Prompt, Reward, Sample, Segment
from protocol.settings import RunSettings
from protocol.states import FinishReason, GroupState, SampleState
from trainer.distributed import Ranks
from trainer.engine import PolicyEngine
from trainer.model import load_policy
from trainer.update import Updater

NUM_PROMPTS, NUM_SAMPLES, MAX_TOKENS = 16, 8, 256  # the demo's
MEAN_CUT = 16  # tokens before a response is handed over: about the middle of the demo's median response
# At the demo's own rate, with one update a batch, lag does not hurt: this is where it does.
LEARNING_RATE = 3e-4
NUM_UPDATES = 4
TOKENIZER = make_tokenizer()
METHODS: dict[str, dict[str, Any]] = {
    "none": {"correction": "none"},
    "behaviour": {"correction": "behaviour"},
    "decoupled/token": {"preset": "token_tis"},
    "decoupled/version_run": {"preset": "version_run_tis"},
}
WATCHED = (
    "importance/ess",
    "importance/clipped_share",
    "off_policy/kl_behaviour_proximal",
    "actor/pg_clipfrac",
    "actor/grad_norm",
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: a correction, a forced lag, a seed."""

    method: str
    lag: int
    seed: int
    steps: int = 30

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.method.replace('/', '-')}-lag{self.lag}-seed{self.seed}"


def cell_settings(cell: Cell, base: Path, folder: Path) -> RunSettings:
    """The demo's, with the cell's correction and a step size at which lag matters."""
    return RunSettings.model_validate(
        {
            "run": {"name": "correction", "dir": folder, "seed": cell.seed},
            "model": {"path": base},
            "data": {"train_batch_size": NUM_PROMPTS, "max_prompt_length": 96, "max_response_length": MAX_TOKENS},
            "rollout": {"n": NUM_SAMPLES},
            "algorithm": METHODS[cell.method],
            "actor": {
                "ppo_max_token_len_per_gpu": 4096,
                "ppo_mini_batch_size": NUM_PROMPTS // NUM_UPDATES,
                "clip_ratio_high": 0.28,
                "optim": {"lr": LEARNING_RATE, "weight_decay": 0.0},
            },
            "trainer": {"total_training_steps": cell.steps},
        }
    )


def run_cell(cell: Cell, base: Path, folder: Path, ranks: Ranks, num_held_out: int = 512) -> dict[str, Any]:
    """Train, and measure on held-out expressions; what it gives is JSON."""
    began = time.perf_counter()
    settings = cell_settings(cell, base, folder)
    torch.manual_seed(cell.seed)
    device = torch.device("cpu")
    engine = PolicyEngine(settings, load_policy(settings, base, device), ranks, device)
    engine.train(True)
    updater = Updater(settings, engine, None, ranks)
    sampler = Sampler(Qwen3ForCausalLM.from_pretrained(base, dtype=torch.float32))
    generator = torch.Generator().manual_seed(cell.seed)
    held_out = list(islice(chain_sums(HELD_OUT_SEED, held_out=True), num_held_out))
    prompts = chain_sums(1000 + cell.seed, held_out=False)
    history: deque[tuple[int, dict[str, Tensor]]] = deque([(0, _weights(engine))], maxlen=cell.lag + 1)
    before = _held_out_reward(sampler, history[-1], held_out)
    steps: list[dict[str, float]] = []
    for step in range(1, cell.steps + 1):
        batch = sample_batch(sampler, history, prompts, step, generator)
        report = updater.run(batch, step, step - 1)
        steps.append(
            {"reward": float(batch.rewards.mean()), "skipped": report.num_skipped}
            | {name: report.metrics[name] for name in WATCHED if np.isfinite(report.metrics.get(name, np.nan))}
        )
        history.append((step, _weights(engine)))
    return asdict(cell) | {
        "learning_rate": LEARNING_RATE,
        "num_updates": NUM_UPDATES,
        "reward_before": before,
        "reward_after": _held_out_reward(sampler, history[-1], held_out),
        "steps_detail": steps,
        "seconds": time.perf_counter() - began,
    }


def _weights(engine: PolicyEngine) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in engine.named_weights()}


def sample_batch(
    sampler: Sampler,
    history: deque[tuple[int, dict[str, Tensor]]],
    prompts: Iterator[ChainSum],
    step: int,
    generator: torch.Generator,
) -> Batch:
    """A batch for `step`.

    `history` has the newest weights last and those of `lag` steps ago first, fewer at the start of the run.
    """
    items = list(islice(prompts, NUM_PROMPTS))
    rollouts = [Rollout(_encode(item.prompt)) for item in items for _ in range(NUM_SAMPLES)]
    cuts = torch.empty(len(rollouts)).exponential_(1 / MEAN_CUT, generator=generator).ceil().clamp(max=MAX_TOKENS)
    version, weights = history[0]
    sampler.hold(weights, version)
    sampler.extend(rollouts, [int(c) for c in cuts] if len(history) > 1 else [MAX_TOKENS] * len(rollouts), generator)
    version, weights = history[len(history) - 1 - (len(history) - 1) // 2]
    sampler.hold(weights, version)
    sampler.extend(rollouts, [MAX_TOKENS] * len(rollouts), generator)
    groups = [
        make_group(f"{step}-{g}", g, item, rollouts[g * NUM_SAMPLES : (g + 1) * NUM_SAMPLES], step)
        for g, item in enumerate(items)
    ]
    return build_batch("correction", step, step - 1, groups)


def make_group(name: str, index: int, item: ChainSum, rollouts: Sequence[Rollout], step: int) -> Group:
    """The group of `item`, with `rollouts` as its scored samples."""
    samples = tuple(_sample(name, i, rollout, item) for i, rollout in enumerate(rollouts))
    prompt = Prompt(name, tuple(rollouts[0].prompt), str(item.answer), DATA_SOURCE)
    return Group(name, index, prompt, GroupState.LEASED, min(r.versions[0] for r in rollouts), samples, step)


def _sample(group: str, index: int, rollout: Rollout, item: ChainSum) -> Sample:
    segments: list[Segment] = []
    start = 0
    for version, run in groupby(rollout.versions):
        end = start + len(list(run))
        tokens = np.asarray(rollout.tokens[start:end], np.int32)
        segments.append(Segment(start, version, tokens, np.asarray(rollout.logprobs[start:end], np.float32)))
        start = end
    return Sample(
        sample_id=f"{group}/{index}",
        group_id=group,
        index=index,
        state=SampleState.SCORED,
        segments=tuple(segments),
        num_resumes=len(segments) - 1,
        finish_reason=_finish(rollout),
        reward=Reward(_reward(rollout, item), {}),
    )


def _held_out_reward(sampler: Sampler, newest: tuple[int, dict[str, Tensor]], items: list[ChainSum]) -> float:
    sampler.hold(newest[1], newest[0])
    rollouts = [Rollout(_encode(item.prompt)) for item in items]
    # The same draws for every cell: what differs is the policy.
    sampler.extend(rollouts, [MAX_TOKENS] * len(rollouts), torch.Generator().manual_seed(0))
    return float(np.mean([_reward(r, item) for r, item in zip(rollouts, items, strict=True)]))


def _encode(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def _finish(rollout: Rollout) -> FinishReason:
    return FinishReason.STOP if rollout.ended else FinishReason.LENGTH


def _reward(rollout: Rollout, item: ChainSum) -> float:
    (text,) = TOKENIZER.batch_decode([rollout.tokens], skip_special_tokens=True)
    return score(DATA_SOURCE, text, str(item.answer), {"finish_reason": _finish(rollout)})["score"]
