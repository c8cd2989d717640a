"""Small synthetic batches, built the way the service builds them."""

from pathlib import Path
from typing import Any

import numpy as np

from protocol.batch import Batch, build_batch
from protocol.samples import Group, Prompt, Reward, Sample, Segment
from protocol.settings import RunSettings
from protocol.states import FinishReason, GroupState, SampleState

VOCABULARY = 200  # below the tiny model's


def make_sample(rng: np.random.Generator, group: str, index: int, length: int, versions: tuple[int, ...]) -> Sample:
    """A scored sample of `length` tokens, cut evenly into one segment for each of `versions`."""
    bounds = np.linspace(0, length, len(versions) + 1).astype(int)
    segments = tuple(
        Segment(
            int(a),
            version,
            rng.integers(0, VOCABULARY, b - a).astype(np.int32),
            -rng.uniform(4, 7, b - a).astype(np.float32),
        )
        for a, b, version in zip(bounds[:-1], bounds[1:], versions, strict=True)
    )
    return Sample(
        sample_id=f"{group}/{index}",
        group_id=group,
        index=index,
        state=SampleState.SCORED,
        segments=segments,
        num_resumes=len(versions) - 1,
        finish_reason=FinishReason.STOP if index % 2 else FinishReason.LENGTH,
        reward=Reward(float(rng.integers(0, 2)), {}),
    )


def make_batch(
    step: int = 1, num_groups: int = 4, n: int = 4, version: int = 0, max_length: int = 40, seed: int | None = None
) -> Batch:
    """A batch of `num_groups` groups; every third sample spans two versions where there are two."""
    rng = np.random.default_rng(step if seed is None else seed)
    groups: list[Group] = []
    for g in range(num_groups):
        name = f"s{step}-g{g}"
        prompt = Prompt(name, tuple(rng.integers(0, VOCABULARY, rng.integers(3, 9)).tolist()), "?", "test")
        samples = tuple(
            make_sample(
                rng,
                name,
                i,
                int(rng.integers(2, max_length)),
                (version - 1, version) if version and (g * n + i) % 3 == 0 else (version,),
            )
            for i in range(n)
        )
        groups.append(Group(name, g, prompt, GroupState.LEASED, version, samples, step))
    return build_batch("test", step, version, groups)


def make_settings(model_dir: Path, folder: Path, **sections: dict[str, Any]) -> RunSettings:
    """Settings of a small run in `folder`; `sections` are merged over."""
    values: dict[str, dict[str, Any]] = {
        "run": {"name": "test", "dir": folder},
        "model": {"path": model_dir},
        "data": {"train_batch_size": 4, "max_prompt_length": 16, "max_response_length": 64},
        "rollout": {"n": 4},
        "actor": {"ppo_max_token_len_per_gpu": 256, "logits_chunk_tokens": 64, "optim": {"lr": 1e-3}},
        "trainer": {"total_training_steps": 3, "save_freq": 2, "logger": ["jsonl"], "wait_timeout_s": 30.0},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return RunSettings(**values)  # pyright: ignore[reportArgumentType]
