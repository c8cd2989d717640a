"""How the commands speak: logs as the settings say, errors as one sentence."""

import sys
from collections.abc import Callable, Iterator

from protocol.errors import AprilError
from protocol.masking import secrets_of
from protocol.settings import RunSettings


def configure_logging(settings: RunSettings | None = None) -> None:
    """Log to standard error: as `settings` say, for people on a terminal and for programs otherwise without any."""
    from protocol.logs import bind_process, configure_logs  # structlog takes a while, and --help needs none of it

    if settings is None:
        configure_logs()
        return
    configure_logs(settings.logs, secrets_of(settings))
    bind_process(run=settings.run.name)


def run_reporting_errors(work: Callable[[], None]) -> None:
    """Run `work`; end the process with a sentence and the error's exit code if it raises one of ours."""
    try:
        work()
    except* AprilError as group:
        errors = list(_leaves(group))
        for error in errors:
            print(f"april: {error}", file=sys.stderr)
        sys.exit(errors[0].exit_code)


def _leaves(group: BaseExceptionGroup[AprilError]) -> Iterator[AprilError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
