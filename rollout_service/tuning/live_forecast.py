"""The forecast of lengths of a running service.

Always true: it is told of every finished response of this process once, and at the start of each round of all
unfinished ones; what it says of a sample is of the tokens that the sample has now.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from buffer.keys import split_sample_id
from protocol.samples import Prompt
from rollout_service.scheduler.admission import Outlook
from rollout_service.tuning.forecast import LengthForecast


class Progress(Protocol):
    """A sample that runs."""

    @property
    def num_tokens(self) -> int:
        """Response tokens up to now."""
        ...


class LiveForecast:
    """Implements `Forecast` over what runs and what is parked."""

    def __init__(
        self,
        group_samples: int,
        running: Mapping[str, tuple[Progress, object]],
        prompt_of: Mapping[str, Prompt],
        upcoming: Callable[[int], Sequence[Prompt]],
    ) -> None:
        self._lengths = LengthForecast(group_samples)
        self._running = running
        self._prompt_of = prompt_of
        self._upcoming = upcoming
        self._parked: dict[str, int] = {}

    @property
    def parked_tokens(self) -> int:
        """Response tokens of what is parked."""
        return sum(count for sample_id, count in self._parked.items() if sample_id not in self._running)

    def outlook(self, prompt: Prompt) -> Outlook:
        """What a new group of this prompt is expected to be."""
        return self._lengths.outlook(prompt.prompt_id, prompt.data_source, len(prompt.token_ids))

    def restored(self, samples: Iterable[tuple[str, int]]) -> None:
        """Parked samples with their tokens, as the buffer held them."""
        self._parked.update(samples)

    def parked(self, sample_id: str) -> None:
        """A running sample is set aside."""
        if entry := self._running.get(sample_id):
            self._parked[sample_id] = entry[0].num_tokens

    def finished(self, sample_id: str) -> None:
        """A running sample finished, and is still known as running; one that failed in the buffer alone is not."""
        self._parked.pop(sample_id, None)
        prompt = self._prompt_of.get(split_sample_id(sample_id)[0])
        entry = self._running.get(sample_id)
        if prompt is not None and entry is not None:
            self._lengths.finished(prompt.prompt_id, prompt.data_source, entry[0].num_tokens)

    def closed(self, sample_ids: Iterable[str]) -> None:
        """A group is not in flight any more."""
        for sample_id in sample_ids:
            self._parked.pop(sample_id, None)

    def new_round(self) -> None:
        """Everything that is unfinished now is longer than what it has."""
        known = ((self._prompt_of.get(split_sample_id(s)[0]), count) for s, count in self._parked.items())
        self._lengths.unfinished((prompt.data_source, count) for prompt, count in known if prompt and count)

    def remaining(self, sample_id: str) -> float:
        """Tokens that an unfinished sample is expected to get."""
        prompt = self._prompt_of.get(split_sample_id(sample_id)[0])
        if prompt is None:
            return 0.0
        entry = self._running.get(sample_id)
        count = entry[0].num_tokens if entry else self._parked.get(sample_id, 0)
        return self._lengths.remaining(prompt.prompt_id, prompt.data_source, count)

    def upcoming(self, count: int) -> list[float]:
        """Tokens that the longest sample of each of the next `count` prompts is expected to have."""
        return [self.outlook(prompt).longest for prompt in self._upcoming(count)]
