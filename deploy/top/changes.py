"""What happened between two statuses, in a few words each: there is no event log to ask the service for."""

from collections.abc import Iterator

from protocol.messages import EngineStatus, Status

DROPPED = "dropped:"  # prefix of the counters of dropped groups


def changes(before: Status, now: Status) -> list[str]:
    """What happened, in the order in which a run does it; a service that started again is only that."""
    if now.service_epoch != before.service_epoch:
        return [f"the service started again (epoch {now.service_epoch})"]
    return [
        *_of_rounds(before, now),
        *_of_versions(before, now),
        *_of_trainer(before, now),
        *_of_engines(before, now),
        *_of_operator(before, now),
        *_of_trouble(before, now),
    ]


def _of_rounds(before: Status, now: Status) -> Iterator[str]:
    if now.round and (before.round is None or now.round.round > before.round.round):
        yield f"round {now.round.round} began, {now.round.num_must_finish} groups must finish"


def _of_versions(before: Status, now: Status) -> Iterator[str]:
    if now.newest_version > before.newest_version and now.newest_version != now.active_version:
        yield f"policy v{now.newest_version} was published"
    if now.active_version != before.active_version:
        yield f"policy v{now.active_version} is active"


def _of_trainer(before: Status, now: Status) -> Iterator[str]:
    if now.trainer_epoch != before.trainer_epoch:
        yield f"a trainer opened session {now.trainer_epoch}"
    if now.trained_step > before.trained_step:
        reward = now.trainer_metrics.get("reward/mean")
        yield f"step {now.trained_step} is trained" + ("" if reward is None else f", reward {reward:.3f}")
    if now.durable_step > before.durable_step:
        yield f"steps up to {now.durable_step} are in a checkpoint"


def _of_engines(before: Status, now: Status) -> Iterator[str]:
    known = {engine.worker: engine for engine in before.engines}
    for engine in now.engines:
        yield from _of_engine(known.get(engine.worker), engine)


def _of_engine(before: EngineStatus | None, now: EngineStatus) -> Iterator[str]:
    if before is None:
        yield f"{now.worker} joined"
    elif now.num_restarts > before.num_restarts:
        yield f"{now.worker} was restarted"
    elif before.alive and not now.alive:
        yield f"{now.worker} is dead"
    elif now.alive and not before.alive:
        yield f"{now.worker} is back"


def _of_operator(before: Status, now: Status) -> Iterator[str]:
    for name, value in now.settings.items():
        old = before.settings.get(name)
        if old is not None and old != value:
            yield f"{name} {_value(old)} → {_value(value)}"
    if now.paused != before.paused:
        yield "paused" if now.paused else "resumed"
    if now.draining and not before.draining:
        yield "draining"


def _of_trouble(before: Status, now: Status) -> Iterator[str]:
    for name, count in now.counters.items():
        more = count - before.counters.get(name, 0)
        if name.startswith(DROPPED) and more > 0:
            yield f"{more} {'group was' if more == 1 else 'groups were'} dropped: {name.removeprefix(DROPPED)}"
    if now.ledger_error and now.ledger_error != before.ledger_error:
        yield f"THE LEDGER IS OUT OF BALANCE by {now.ledger_error}"


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
