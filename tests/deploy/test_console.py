"""How a command ends by an error: a sentence for each, and its exit code."""

import errno
import logging
from collections.abc import Callable

import pytest

from deploy.console import run_reporting_errors
from protocol.errors import DataError


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code", "sentences"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), 1,
         ["/x/y: No space left on device; free space there, or name another folder"]),
        (FileExistsError(errno.EEXIST, "File exists", "a"), 1, ["a: File exists; move it away, or name another"]),
        (FileNotFoundError(errno.ENOENT, "No such file", "a", None, "b"), 1, ["a -> b: No such file; make it"]),
        (OSError("can't load it"), 1, ["can't load it; mend that, and start again"]),
        (ExceptionGroup("", [OSError(errno.EIO, "io"), ExceptionGroup("", [DataError("no rows")])]), 2,
         ["io; look after the disk", "no rows"]),
    ],
)  # fmt: skip
def test_an_error_of_the_system_is_a_sentence(
    error: Exception, code: int, sentences: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_reporting_errors(raising(error))
    assert ended.value.code == code
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(sentences)
    for line, sentence in zip(told, sentences, strict=True):
        assert line.startswith(f"april: {sentence}")


def test_where_it_arose_is_told_at_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "april")
    with pytest.raises(SystemExit):
        run_reporting_errors(raising(OSError(errno.EIO, "io")))
    assert "Traceback" in caplog.text
    assert "in work" in caplog.text


@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, "Broken pipe"), ValueError("ours")])
def test_others_pass(error: Exception) -> None:
    with pytest.raises(type(error)):
        run_reporting_errors(raising(error))
