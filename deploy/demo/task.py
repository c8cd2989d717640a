"""The demo's task: one-digit sums of very different length, solved term by term.

The prompt is an expression whose terms carry letters, the response the running sums and then the answer:

    a3b-5c+0d+6        a3b-5=-2c+0=-2d+6=4#4

Always true: which expressions are held out follows from the text of an expression alone, so neither the base policy's
worked solutions nor the training prompts, whatever their seed and number, contain a held-out one. This module loads
neither torch nor transformers, because scorer processes import it.
"""

import hashlib
import itertools
import re
import string
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from protocol.errors import DataError, RewardError
from protocol.settings import RunSettings
from protocol.states import FinishReason

DATA_SOURCE = "demo/chain_sum"
# (share, fewest terms, most terms): most expressions are short and a tenth is long, which makes the tail of lengths.
MIXTURE = ((0.45, 2, 6), (0.30, 7, 10), (0.15, 11, 15), (0.10, 20, 30))
LABELS = string.ascii_lowercase + string.ascii_uppercase  # one a term; the longest expression has 30
HELD_OUT_SHARE = 0.1  # leaves enough of the 200 two-term expressions on either side
TRAIN_SEED = 1  # the prompts are the demo's, the same in every run; `run.seed` shuffles them
HELD_OUT_SEED = 2
GENERATOR_BLOCK = 1024  # expressions taken from one generator before it is seeded anew
ANSWER = re.compile(r"[^#]*#(-?[0-9]{1,6})")  # one answer, at the very end


@dataclass(frozen=True, slots=True)
class ChainSum:
    """One expression: the first term, then an operator and a digit each; all as signed values."""

    terms: tuple[int, ...]
    signs: tuple[str, ...]
    answer: int

    @property
    def parts(self) -> tuple[str, ...]:
        """The labelled terms, such as `a3`, `b-5`."""
        return tuple(
            f"{label}{sign}{term}" for label, sign, term in zip(LABELS, ("", *self.signs), self.terms, strict=False)
        )

    @property
    def sums(self) -> tuple[int, ...]:
        """Running sums, one a term."""
        signed = (-t if s == "-" else t for s, t in zip(("", *self.signs), self.terms, strict=True))
        return tuple(itertools.accumulate(signed))

    @property
    def prompt(self) -> str:
        """What the policy is asked."""
        return "".join(self.parts) + "\n"

    @property
    def held_out(self) -> bool:
        """Whether this expression is for evaluation only."""
        digest = hashlib.sha256(self.prompt.encode()).digest()
        return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64

    def solution(self, num_terms: int | None = None) -> str:
        """The worked solution; with `num_terms`, one that stops after so many terms and reports what it has.

        `num_terms` = 0 answers directly, without any working.
        """
        if num_terms == 0:
            return f"#{self.answer}"
        count = len(self.terms) if num_terms is None else num_terms
        working = "".join(
            f"{part}={total}" for part, total in zip(self.parts[1:count], self.sums[1:count], strict=True)
        )
        return f"{self.parts[0]}{working}#{self.sums[count - 1]}"


def chain_sums(seed: int, held_out: bool) -> Iterator[ChainSum]:
    """An endless sequence of expressions in the proportions of `MIXTURE`, made by reasoning-gym's `chain_sum`."""
    rng = Random(seed)  # noqa: S311  a data set, not a secret
    generators = [_generate(Random(rng.getrandbits(64)), low, high, held_out) for _, low, high in MIXTURE]  # noqa: S311
    shares = [share for share, _, _ in MIXTURE]
    while True:
        yield next(rng.choices(generators, shares)[0])


def rows(settings: RunSettings) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out prompts, for `data.source`; the two sets are disjoint."""
    train = itertools.islice(chain_sums(TRAIN_SEED, held_out=False), settings.data.num_train_prompts)
    held_out = itertools.islice(chain_sums(HELD_OUT_SEED, held_out=True), settings.data.num_val_prompts)
    return (
        [_row(f"train-{i}", item) for i, item in enumerate(train)],
        [_row(f"held-out-{i}", item) for i, item in enumerate(held_out)],
    )


def score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None
) -> dict[str, float]:
    """The reward, for `reward.name`: 1 only if the response ended by itself and its one answer is right.

    `extra_info["finish_reason"]` says how the response ended; `solution_str` is its text without special tokens.
    The parts tell a wrong answer from one that never came.
    """
    if data_source != DATA_SOURCE:
        raise RewardError(f"{data_source!r} is not {DATA_SOURCE!r}; name another scorer in reward.name")
    if extra_info is None or "finish_reason" not in extra_info:
        raise RewardError("the demo's scorer needs extra_info['finish_reason']; pass how the response ended")
    ended = extra_info["finish_reason"] == FinishReason.STOP
    answer = ANSWER.fullmatch(solution_str)
    right = answer is not None and int(answer[1]) == int(ground_truth)
    return {"score": float(ended and right), "right": float(right), "ended": float(ended)}


def _row(row_id: str, item: ChainSum) -> dict[str, Any]:
    return {"id": row_id, "prompt": item.prompt, "ground_truth": str(item.answer), "data_source": DATA_SOURCE}


def _generate(rng: Random, low: int, high: int, held_out: bool) -> Iterator[ChainSum]:
    with warnings.catch_warnings():
        # A library below reasoning-gym is compiled with a SyntaxWarning the first time that it is imported.
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
    while True:
        # A generator draws item i from seed + i: seeds far apart keep two blocks from overlapping.
        block = reasoning_gym.create_dataset(
            "chain_sum",
            min_terms=low,
            max_terms=high,
            min_digits=1,
            max_digits=1,
            size=GENERATOR_BLOCK,
            seed=rng.getrandbits(62),
        )
        yield from (item for item in map(_parse, block) if item.held_out == held_out)


def _parse(item: dict[str, Any]) -> ChainSum:
    words = item["metadata"]["expression"].split()
    parsed = ChainSum(tuple(map(int, words[::2])), tuple(words[1::2]), int(item["answer"]))
    if parsed.sums[-1] != parsed.answer or len(parsed.terms) > len(LABELS):
        raise DataError(
            f"reasoning-gym's chain_sum gave {item!r}, which this demo can't read; install reasoning-gym 0.1"
        )
    return parsed
