"""The service's forecast of lengths inside a simulation: it learns from what has finished there alone."""

from collections.abc import Callable

from rollout_service.scheduler.admission import Outlook
from rollout_service.tuning.forecast import LengthForecast
from rollout_service.tuning.workload import PromptLengths

Progress = Callable[[str], tuple[PromptLengths, int]]  # a sample's prompt, and the tokens that it has
Upcoming = Callable[[int], list[PromptLengths]]  # the next prompts


class SimulatedForecast:
    """Implements `Forecast` over a simulated world."""

    def __init__(self, lengths: LengthForecast, progress: Progress, upcoming: Upcoming) -> None:
        self._lengths = lengths
        self._progress = progress
        self._upcoming = upcoming

    def outlook(self, prompt: PromptLengths) -> Outlook:
        """What a new group of this prompt is expected to be."""
        return self._lengths.outlook(prompt.prompt_id, prompt.data_source, prompt.prompt_tokens)

    def finished(self, prompt: PromptLengths, num_tokens: int) -> None:
        """A response finished."""
        self._lengths.finished(prompt.prompt_id, prompt.data_source, num_tokens)

    def remaining(self, sample_id: str) -> float:
        """Tokens that an unfinished sample is expected to get."""
        prompt, num_tokens = self._progress(sample_id)
        return self._lengths.remaining(prompt.prompt_id, prompt.data_source, num_tokens)

    def upcoming(self, count: int) -> list[float]:
        """Tokens that the longest sample of each of the next `count` prompts is expected to have."""
        return [self.outlook(prompt).longest for prompt in self._upcoming(count)]
