"""Every error that this project raises on purpose.

    AprilError
    ├── SettingsError            a setting is unknown, out of bounds, or contradicts another
    ├── DataError                a prompt, a label or a data file can't be used
    ├── WeightsError             published weights are missing, outside the root, or not what the manifest says
    ├── RequestError             a request can't be carried out as it was sent
    │   ├── NotFoundError        the id is unknown
    │   ├── ConflictError        the request contradicts what has happened
    │   │   ├── FencedError      the caller was superseded by a newer epoch
    │   │   ├── TransitionError  the state machine has no such transition
    │   │   └── LengthError      an append named another length than is stored
    │   └── UnauthorizedError    the bearer token is missing or wrong
    ├── UnavailableError         a part that is needed doesn't answer now; trying again later is right
    │   └── BufferFullError      an admission has no room now; nothing was changed
    ├── RedisUnfitError          the Redis can't keep the promises (eviction, wrong password)
    ├── EngineError              an engine failed a request or an install
    │   └── EngineDeadError      the engine's process is gone
    ├── RewardError              a reward could not be computed; the sample is FAILED, never scored zero
    └── TrainingError            the trainer can't go on

Each class carries the HTTP status and a slug for RFC 9457 problem documents; the message is one sentence that says
what to do.
"""

from typing import ClassVar


class AprilError(Exception):
    """Base of all errors raised on purpose; `str(error)` is one sentence that says what to do."""

    status: ClassVar[int] = 500
    slug: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 1


class SettingsError(AprilError):
    """A setting is unknown, out of bounds, or contradicts another."""

    status, slug, exit_code = 422, "settings", 2


class DataError(AprilError):
    """A prompt, a label or a data file can't be used."""

    status, slug, exit_code = 422, "data", 2


class WeightsError(AprilError):
    """Published weights are missing, outside the root, or not what their manifest says."""

    status, slug = 422, "weights"


class RequestError(AprilError):
    """A request can't be carried out as it was sent."""

    status, slug = 400, "request"


class NotFoundError(RequestError):
    """The id in the request is unknown."""

    status, slug = 404, "not-found"


class ConflictError(RequestError):
    """The request contradicts what has happened."""

    status, slug = 409, "conflict"


class FencedError(ConflictError):
    """The caller was superseded: a newer service, trainer or worker owns what it tried to change."""

    slug = "fenced"


class TransitionError(ConflictError):
    """The state machine has no such transition."""

    slug = "transition"


class LengthError(ConflictError):
    """An append named another length than is stored."""

    slug = "length"


class UnauthorizedError(RequestError):
    """The bearer token is missing or wrong."""

    status, slug = 401, "unauthorized"


class UnavailableError(AprilError):
    """A part that is needed doesn't answer now; trying again later is right."""

    status, slug = 503, "unavailable"


class BufferFullError(UnavailableError):
    """An admission has no room now; nothing was changed."""

    slug = "buffer-full"


class RedisUnfitError(AprilError):
    """The Redis can't keep the promises of the buffer."""

    status, slug, exit_code = 503, "redis-unfit", 2


class EngineError(AprilError):
    """An engine failed a request or an install."""

    status, slug = 502, "engine"


class EngineDeadError(EngineError):
    """The engine's process is gone."""

    slug = "engine-dead"


class RewardError(AprilError):
    """A reward could not be computed."""

    slug = "reward"


class TrainingError(AprilError):
    """The trainer can't go on."""

    slug = "training"
