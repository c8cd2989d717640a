"""The answer that a response gives, for maj@k, read in worker processes that can be killed.

A vote is a 48-bit digest of the answer in one form of what reads the same: it fits exactly into the number that a
scorer's process replies, so that answers are read where scorers are, under the same time-out, and a regular expression
or an algebra that hangs costs a vote and not the service.
"""

import hashlib
import logging
from functools import partial
from typing import Any

from protocol.errors import AprilError
from protocol.settings import RunSettings
from rollout_service.rewards.extract import extract_answer
from rollout_service.rewards.interface import Scorer, ScoringTask
from rollout_service.rewards.mathematics import prepare_math_verify
from rollout_service.rewards.pool import ScorerPool
from rollout_service.rewards.process import ScorerConfig
from rollout_service.rewards.registry import AUTO, scorer_for
from rollout_service.rewards.scorer import LabelError
from rollout_service.rewards.text import GSM8K_MARKER, find_numbers, normalise

VOTE_SPEC = "rollout_service.evaluation_answers:vote"
VOTE_BYTES = 6  # exact in a float; two of a prompt's answers meet once in 10^14
NO_VOTE = -1.0
BOXED = "\\boxed{"

log = logging.getLogger(__name__)


class AnswerReader:
    """Votes of responses. Its process starts with the first evaluation that needs it and ends by `close`."""

    def __init__(self, settings: RunSettings) -> None:
        reward, pattern = settings.reward, settings.evaluation.answer_pattern
        config = ScorerConfig(VOTE_SPEC, {"scorer": reward.name, "options": reward.settings, "pattern": pattern})
        self._make_pool = partial(ScorerPool, config, 1, reward.timeout_s)
        self._pool: Scorer | None = None

    async def start(self) -> None:
        """Start the process, unless it runs. Raises DataError if it can't be loaded."""
        if self._pool is None:
            pool = self._make_pool()
            await pool.start()
            self._pool = pool

    async def vote(self, task: ScoringTask) -> int | None:
        """What a response votes for; None if it has no answer, or none that can be read in time."""
        assert self._pool is not None, "an evaluation starts the reader before its samples"
        try:
            number = (await self._pool.score(task)).value
        except AprilError as error:
            log.warning("the answer of %s can't be read: %s", task.sample_id, error)
            return None
        return None if number == NO_VOTE else int(number)

    async def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            await self._pool.close()


def vote(task: ScoringTask, *, scorer: str, options: dict[str, Any], pattern: str | None) -> float:
    """Digest of the answer, NO_VOTE without one. Runs in a worker, as a scorer."""
    answer = read_answer(task, scorer, options, pattern)
    if not answer:
        return NO_VOTE
    return float(int.from_bytes(hashlib.blake2b(answer.encode("utf-8", "replace"), digest_size=VOTE_BYTES).digest()))


def read_answer(task: ScoringTask, scorer: str, options: dict[str, Any], pattern: str | None) -> str | None:
    """The answer where the scorer looks for it, in one form of what reads the same.

    `pattern`, if it is set, is looked for instead. Of a scorer of one's own it is not known where it looks: there the
    answer is in the last `<answer>` or `\\boxed{}`.
    """
    if pattern is not None:
        return normalise(extract_answer(task.response, pattern))
    name = _scorer_name(scorer, task.data_source)
    if name == "gsm8k":
        return _number(task.response, bool(options.get("only_marked", False)))
    if name == "math_verify":
        return _expression(task.response)
    if name in ("exact_match", "reasoning_gym"):
        ignore_case = name == "reasoning_gym" or bool(options.get("ignore_case", True))
        return normalise(extract_answer(task.response, options.get("pattern")), ignore_case)
    return _marked(task.response)


def _scorer_name(scorer: str, data_source: str) -> str | None:
    """The built-in scorer of a sample; None if it is a function of the user's."""
    if ":" in scorer:
        return None
    try:
        return scorer_for(data_source) if scorer == AUTO else scorer
    except LabelError:
        return None


def _number(response: str, only_marked: bool) -> str | None:
    """The number that the GSM8K scorer compares."""
    before, marker, after = response.rpartition(GSM8K_MARKER)
    if only_marked and not marker:
        return None
    numbers = find_numbers(after)[:1] if marker else find_numbers(after or before)[-1:]
    return format(numbers[0].normalize(), "f") if numbers else None


def _expression(response: str) -> str | None:
    """What math-verify reads, as its algebra writes it: 1/2 and \\frac12 are one answer."""
    prepare_math_verify("")
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its alarms are off
    found = parse(response, parsing_timeout=None)  # pyright: ignore[reportArgumentType]  # declared int, None is documented
    return str(found[0]) if found else None


def _marked(response: str) -> str | None:
    if "</answer>" in response:
        return normalise(extract_answer(response, None))
    start = response.rfind(BOXED)
    return normalise(_braced(response[start + len(BOXED) :])) if start >= 0 else None


def _braced(text: str) -> str:
    """`text` up to the brace that closes the one before it."""
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if not depth:
            return text[:i]
    return text
