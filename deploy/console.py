"""How the commands speak: logs as the settings say, errors as one sentence."""

import errno
import logging
import sys
from collections.abc import Callable, Iterator

from protocol.errors import AprilError
from protocol.masking import secrets_of
from protocol.settings import RunSettings

LOG = logging.getLogger("april")

REMEDIES = {
    errno.ENOSPC: "free space there, or name another folder",
    errno.EDQUOT: "free space there, or name another folder",
    errno.EACCES: "give this user the right to it, or name another place",
    errno.EPERM: "give this user the right to it, or name another place",
    errno.EROFS: "name a place that can be written",
    errno.ENOENT: "make it, or name another",
    errno.EEXIST: "move it away, or name another",
    errno.ENOTDIR: "move away the file that is where a folder should be, or name another place",
    errno.EISDIR: "move away the folder that is where a file should be, or name another place",
    errno.EADDRINUSE: "end what has that port, or set another",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EIO: "look after the disk",
}
GENERAL_REMEDY = "mend that, and start again; logs.level = 'debug' shows where it arose"


def configure_logging(settings: RunSettings | None = None) -> None:
    """Log to standard error: as `settings` say, for people on a terminal and for programs otherwise without any."""
    from protocol.logs import bind_process, configure_logs  # structlog takes a while, and --help needs none of it

    if settings is None:
        configure_logs()
        return
    configure_logs(settings.logs, secrets_of(settings))
    bind_process(run=settings.run.name)


def run_reporting_errors(work: Callable[[], None]) -> None:
    """Run `work`; if it raises one of our errors, or one of the system's, end the process with a sentence for each.

    The exit code is our error's, else 1. Where it arose is logged at debug level.
    """
    errors: list[AprilError | OSError] = []
    try:
        work()
    except* (AprilError, OSError) as group:
        errors = list(_leaves(group))
    if not errors:
        return
    if all(isinstance(error, BrokenPipeError) for error in errors):
        raise errors[0]  # whoever read our output wants no more of it: click ends the process without a word
    for error in errors:
        LOG.debug("an error of class %s ends this process", type(error).__name__, exc_info=error)
        print(f"april: {error if isinstance(error, AprilError) else os_sentence(error)}", file=sys.stderr)
    sys.exit(next((error.exit_code for error in errors if isinstance(error, AprilError)), 1))


def os_sentence(error: OSError) -> str:
    """What the system refused, of which file or address, and what to do about it."""
    names = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    said = error.strerror or str(error) or type(error).__name__
    remedy = REMEDIES.get(error.errno or 0, GENERAL_REMEDY)
    return f"{names}: {said}; {remedy}" if names else f"{said}; {remedy}"


def _leaves(group: BaseExceptionGroup[AprilError | OSError]) -> Iterator[AprilError | OSError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
