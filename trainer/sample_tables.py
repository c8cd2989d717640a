"""A few samples of each step as text, for people: prompt, response, reward, and which versions wrote it.

Always true: which samples are shown depends on the run's seed and the step alone, so a step that is replayed shows the
same ones; the best and the worst reward are among them where there is room, because they are what one looks for; a
tokenizer that can't be loaded costs the text and never the run.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from protocol.batch import Batch, SegmentSpan
from protocol.settings import RunSettings

LOG = logging.getLogger("april.trainer")

COLUMNS = ("sample", "reward", "tokens", "finish", "versions", "prompt", "response")
MAX_CHARS = 20_000  # of one prompt or response: trackers refuse or choke on cells of megabytes


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One sample as text. `versions`: which versions wrote how many tokens, in order, such as `3×41 → 4×12`."""

    sample: str
    reward: float
    tokens: int
    finish: str
    versions: str
    prompt: str
    response: str

    def cells(self) -> list[Any]:
        """Values in the order of COLUMNS."""
        values = asdict(self)
        return [values[name] for name in COLUMNS]


class SampleReader:
    """Picks and decodes `trainer.log_samples` samples of a batch."""

    def __init__(self, settings: RunSettings) -> None:
        self._num_samples = settings.trainer.log_samples
        self._seed = settings.run.seed
        self._folder = settings.model.tokenizer_path or settings.model.path
        self._tokenizer: Any = None
        self._tried = False

    def read(self, step: int, batch: Batch) -> list[SampleRow]:
        """The rows of `step`, in the batch's order."""
        return [self._row(batch, i) for i in pick_samples(batch.rewards.tolist(), self._num_samples, self._seed, step)]

    def _row(self, batch: Batch, i: int) -> SampleRow:
        start, end = (int(batch.sample_offsets[i + k]) for k in (0, 1))
        middle = start + int(batch.prompt_lengths[i])
        header = batch.header.samples[i]
        return SampleRow(
            sample=header.sample_id,
            reward=float(batch.rewards[i]),
            tokens=end - middle,
            finish=header.finish_reason.value,
            versions=version_spans(header.segments),
            prompt=self._text(batch.tokens[start:middle].tolist()),
            response=self._text(batch.tokens[middle:end].tolist()),
        )

    def _text(self, ids: list[int]) -> str:
        tokenizer = self._loaded()
        text = " ".join(map(str, ids)) if tokenizer is None else str(tokenizer.decode(ids))
        return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} … ({len(text) - MAX_CHARS} characters more)"

    def _loaded(self) -> Any:
        if not self._tried and self._folder is not None:
            self._tried = True
            self._tokenizer = _load_tokenizer(self._folder)
        return self._tokenizer


def pick_samples(rewards: Sequence[float], num_samples: int, seed: int, step: int) -> list[int]:
    """Indices of at most `num_samples` samples: the best, the worst, then others drawn from (seed, step)."""
    order = np.random.default_rng((seed, step)).permutation(len(rewards)).tolist()
    if num_samples > 1 and len(rewards) > 1:
        extremes = [max(order, key=lambda i: rewards[i]), min(reversed(order), key=lambda i: rewards[i])]
        order = extremes + [i for i in order if i not in extremes]
    return sorted(order[:num_samples])


def version_spans(segments: Sequence[SegmentSpan]) -> str:
    """`3×41 → 4×12`: 41 tokens by version 3, then 12 by version 4; segments of one version in a row count as one."""
    runs: list[tuple[int, int]] = []
    for segment in segments:
        num_tokens = segment.end - segment.start
        if runs and runs[-1][0] == segment.version:
            num_tokens += runs.pop()[1]
        runs.append((segment.version, num_tokens))
    return " → ".join(f"{version}×{num_tokens}" for version, num_tokens in runs)


def markdown_table(rows: Sequence[SampleRow]) -> str:
    """The rows as a Markdown table, each cell one line."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(_cell(value) for value in row.cells())} |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return escaped.replace("\r", "").replace("\n", "<br>")


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        LOG.warning("samples are shown as token ids, because %s holds no tokenizer that loads: %s", folder, error)
        return None
