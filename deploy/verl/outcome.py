"""What becomes of a parameter of verl."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from deploy.verl.overrides import Override

ACTOR, MODEL, ROLLOUT, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout", "ref"))


class Status(StrEnum):
    """What a row of the table says."""

    CARRIED = "carried"
    CHANGED = "changed"
    ADDED = "added"
    NOT_CARRIED = "not carried"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`sets`: our settings and their values, empty if nothing is carried; `reason`: what a user should know."""

    status: Status
    sets: Mapping[str, Any] = field(default_factory=dict[str, Any])
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Script:
    """All overrides of a script, for rules that depend on more than one."""

    overrides: Mapping[str, Override]

    def value(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default` if the script does not say or only running it would."""
        override = self.overrides.get(key)
        if override is None or override.unknown or override.problem or override.mark == "~":
            return default
        return override.value

    def has(self, key: str) -> bool:
        """Whether the script sets `key`."""
        return key in self.overrides

    @property
    def has_critic(self) -> bool:
        """Whether a critic takes part; verl's own default estimator is gae."""
        return self.value("algorithm.adv_estimator", "gae") == "gae"

    @property
    def dynamic(self) -> bool:
        """Whether verl bounds micro-batches in tokens."""
        return self.value("actor_rollout_ref.actor.use_dynamic_bsz", False) is True


Rule = Callable[[Any, Script], Outcome]


def carry(name: str, note: str = "") -> Rule:
    """The same value under `name`."""
    return lambda value, _: Outcome(Status.CARRIED, {name: value}, note)


def change(name: str, convert: Callable[[Any], Any], reason: str) -> Rule:
    """Another value under `name`; the status says carried where it comes out the same."""

    def rule(value: Any, _: Script) -> Outcome:
        converted = convert(value)
        if converted == value:
            return Outcome(Status.CARRIED, {name: converted})
        return Outcome(Status.CHANGED, {name: converted}, reason)

    return rule


def leave(reason: str) -> Rule:
    """Nothing; `reason` says where it has its place, or why it has none."""
    return lambda _value, _script: Outcome(Status.NOT_CARRIED, {}, reason)


def only_if(neutral: Any, reason: str, otherwise: str) -> Rule:
    """Nothing: with the value `neutral` that is what happens here anyway (`reason`), else it is lost (`otherwise`)."""
    return lambda value, _: Outcome(Status.NOT_CARRIED, {}, reason if value == neutral else otherwise)
