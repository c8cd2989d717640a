"""What was made for nothing: responses that failed, and groups that were dropped with all that they had.

A group that is dropped is replaced by a new one, so slots that idle while most groups are dropped wait for no tail.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rollout_service.watch.observed import Observed

MIN_WASTED = 4  # responses or groups: fewer fail in any run
NO_FAILURE = ""  # the reason under which a response that has its reward is counted
# What to do about each reason that a response fails for (`protocol.states.FailReason`).
REMEDIES: Mapping[str, str] = {
    "engine_error": "The service's log has what the engine raises.",
    "engine_died": "The service's log says why engines die and of which prompts.",
    "reward_timeout": "Raise reward.timeout_s, or mend the scorer, which hangs on these responses.",
    "reward_error": "Mend the scorer that reward.name names: the service's log has what it raises.",
    "reward_not_finite": "Mend the scorer that reward.name names: it gives rewards that are no finite numbers.",
    "prompt_too_long": "Set data.filter_overlong_prompts = true.",
}
OTHERWISE = "The service's log and april_groups_dropped_total say why."


@dataclass(frozen=True, slots=True)
class Waste:
    """Counts over the rounds that are judged and since. `reason`: what most responses failed for, if any did."""

    num_failed: int
    num_responses: int
    num_dropped: int
    num_groups: int
    reason: str | None

    @property
    def failed_share(self) -> float:
        """Of the responses."""
        return self.num_failed / self.num_responses if self.num_failed >= MIN_WASTED else 0.0

    @property
    def dropped_share(self) -> float:
        """Of the groups."""
        return self.num_dropped / self.num_groups if self.num_dropped >= MIN_WASTED else 0.0

    @property
    def share(self) -> float:
        """Of what was made; a failed response counts alone where its group goes on without it."""
        return max(self.failed_share, self.dropped_share)


def waste_of(seen: Observed) -> Waste:
    """Of what is judged."""
    failed = {reason: count for reason, count in seen.scores.items() if reason != NO_FAILURE}
    num_dropped = seen.num_dropped_now + sum(span.num_dropped for span in seen.rounds)
    return Waste(
        num_failed=sum(failed.values()),
        num_responses=sum(seen.scores.values()),
        num_dropped=num_dropped,
        num_groups=num_dropped + seen.num_ready_now + sum(len(span.ready_s) for span in seen.rounds),
        reason=max(failed, key=lambda reason: failed[reason]) if failed else None,
    )


def failures_text(seen: Observed, lately: str) -> tuple[str, str]:
    """(what limits the run, what to change)."""
    waste = waste_of(seen)
    were = "was" if waste.num_dropped == 1 else "were"
    dropped = f"{waste.num_dropped} of {waste.num_groups} groups {were} dropped in {lately}"
    if waste.reason is None:
        return f"Dropped groups limit the run: {dropped}.", OTHERWISE
    failed = f"{waste.num_failed} of {waste.num_responses} responses failed ({waste.reason})"
    if waste.num_dropped:
        sentence = f"Failures limit the run: {failed}, and {dropped}."
    else:
        sentence = f"Failures limit the run: {failed} in {lately}."
    return sentence, REMEDIES.get(waste.reason, OTHERWISE)
