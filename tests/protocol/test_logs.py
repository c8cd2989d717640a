"""Logs: one JSON object a line or a sentence for people, ids on every line, and no secret on any."""

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from io import StringIO

import pytest
import structlog
from pydantic import SecretStr
from rich.logging import RichHandler
from rich.text import Text

from protocol import logs
from protocol.logs import bind_process, configure_logs, is_human, json_line, process_fields
from protocol.masking import MASK, mask_text, mask_value, secrets_of
from protocol.settings import RunSettings
from protocol.settings.observing import LogSettings

Written = Callable[[], list[dict[str, object]]]


class Terminal(StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


@contextmanager
def configured(
    monkeypatch: pytest.MonkeyPatch,
    stream: StringIO,
    settings: LogSettings | None = None,
    secrets: tuple[str, ...] = (),
) -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    levels = {name: logging.getLogger(name).level for name in logs.NOISY}
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(logs, "_process", {})
    try:
        configure_logs(settings, secrets)
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        for name, before in levels.items():
            logging.getLogger(name).setLevel(before)
        structlog.reset_defaults()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Generator[Written]:
    """What was logged as JSON so far."""
    stream = StringIO()
    with configured(monkeypatch, stream, secrets=("hush-hush",)):
        yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_object_with_the_keys_that_programs_read(written: Written) -> None:
    logging.getLogger("april.test").warning("a %s of %d", "thing", 3)
    (line,) = written()
    assert list(line) == ["at", "level", "logger", "message"]
    assert line["message"] == "a thing of 3"
    assert line["level"] == "warning"
    assert line["logger"] == "april.test"
    assert isinstance(line["at"], float)


def test_an_event_has_its_fields_under_their_names(written: Written) -> None:
    fields = {"event": "round", "round": 3, "ratio": 1.5, "bubble_share": None, "bad": float("nan")}
    logging.getLogger("april.test").info("round %d is over", 3, extra=fields)
    (line,) = written()
    assert list(line)[:5] == ["at", "level", "logger", "event", "message"]
    assert line["message"] == "round 3 is over"
    assert (line["event"], line["round"], line["ratio"], line["bubble_share"]) == ("round", 3, 1.5, None)
    assert line["bad"] == "nan"  # JSON has no NaN


def test_what_libraries_put_on_every_record_is_left_out(written: Written) -> None:
    extra = {"_ray_timestamp_ns": 1, "vllm_process_name": "MainProcess", "color_message": "x"}
    logging.getLogger("april.test").info("plain", extra=extra)
    assert list(written()[0]) == ["at", "level", "logger", "message"]


def test_structlog_loggers_go_the_same_way(written: Written) -> None:
    structlog.stdlib.get_logger("somebody").bind(step=4).info("saved", took_s=1.5)
    (line,) = written()
    assert (line["event"], line["message"], line["step"], line["took_s"]) == ("saved", "saved", 4, 1.5)
    assert line["logger"] == "somebody"


def test_what_names_the_process_is_on_every_line_of_every_thread(written: Written) -> None:
    bind_process(run="r", service_epoch=2)
    thread = threading.Thread(target=lambda: logging.getLogger("april.test").info("from a thread"))
    thread.start()
    thread.join()
    bind_process(trainer_epoch=5)
    with structlog.contextvars.bound_contextvars(step=8):
        logging.getLogger("april.test").info("from here")
    first, second = written()
    assert (first["run"], first["service_epoch"]) == ("r", 2)
    assert "trainer_epoch" not in first
    assert (second["trainer_epoch"], second["step"]) == (5, 8)
    assert process_fields() == {"run": "r", "service_epoch": 2, "trainer_epoch": 5}


def test_an_error_is_one_line_with_its_traceback(written: Written) -> None:
    try:
        raise ValueError("told hush-hush at redis://user:pw@host/0")
    except ValueError:
        logging.getLogger("april.test").exception("it failed")
    (line,) = written()
    assert line["message"] == "it failed"
    assert "Traceback" in str(line["traceback"])
    assert "ValueError" in str(line["traceback"])
    assert "hush" not in json.dumps(line)
    assert "pw" not in json.dumps(line)


def test_no_secret_is_shown_wherever_it_stands(written: Written) -> None:
    fields = {"event": "x", "token": "abcdef", "tokens": 5, "nested": {"password": "pqrst", "url": "http://a:b@c/d"}}
    logging.getLogger("april.test").info("hush-hush to https://me:mine@there/ and %s", "hush-hush", extra=fields)
    (line,) = written()
    assert line["message"] == f"{MASK} to https://{MASK}@there/ and {MASK}"
    assert line["token"] == MASK
    assert line["tokens"] == 5
    assert line["nested"] == {"password": MASK, "url": f"http://{MASK}@c/d"}


def test_levels_and_noisy_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = StringIO()
    with configured(monkeypatch, stream, LogSettings(level="debug")):
        logging.getLogger("april.test").debug("small")
        logging.getLogger("httpx").info("a line a request")
        logging.getLogger("httpx").warning("something")
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["small", "something"]


def test_people_get_sentences_on_a_terminal_and_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, file = Terminal(), StringIO()
    fields = {"event": "round", "round": 3}
    with configured(monkeypatch, terminal):
        handlers = [h for h in logging.getLogger().handlers if isinstance(h, RichHandler)]
        logging.getLogger("april.test").info("round 3 is over", extra=fields)
        structlog.stdlib.get_logger("x").info("saved", step=4)
    with configured(monkeypatch, file, LogSettings(format="human")):
        logging.getLogger("april.test").info("round 3 is over", extra=fields)
        structlog.stdlib.get_logger("x").info("saved", step=4)
    assert len(handlers) == 1
    shown = Text.from_ansi(terminal.getvalue()).plain
    assert "round 3 is over" in shown
    assert "saved step=4" in shown
    first, second = file.getvalue().splitlines()
    assert first.endswith("info april.test round 3 is over")
    assert second.endswith("info x saved step=4")


@pytest.mark.parametrize(("format_", "tty", "human"), [
    ("auto", True, True), ("auto", False, False), ("json", True, False), ("human", False, True),
])  # fmt: skip
def test_the_format_follows_the_setting_or_the_terminal(format_, tty: bool, human: bool) -> None:
    assert is_human(format_, Terminal() if tty else StringIO()) is human


def test_configuring_twice_shows_each_line_once_and_leaves_others_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, others = StringIO(), logging.NullHandler()
    with configured(monkeypatch, stream):
        logging.getLogger().addHandler(others)
        logging.getLogger().addHandler(logging.StreamHandler(stream))  # as a library's basicConfig does
        configure_logs()
        logging.getLogger("april.test").info("once")
        assert others in logging.getLogger().handlers
    assert len(stream.getvalue().splitlines()) == 1


def test_secrets_of_settings_are_found_by_type_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RunSettings(
        service={"token": "service-token"},
        buffer={"password": "redis-password-1", "sentinel": {"password": SecretStr("redis-password")}},
        trainer={"token": "trainer-token"},
    )
    assert secrets_of(settings) == ("redis-password-1", "redis-password", "service-token", "trainer-token")
    assert mask_text("redis-password-1!", secrets_of(settings)) == f"{MASK}!"
    assert mask_value("key", ["service-token", 3, {"api_key": "x"}], secrets_of(settings)) == [
        MASK,
        3,
        {"api_key": MASK},
    ]


def test_a_line_is_always_json() -> None:
    assert json.loads(json_line({"a": object, "b": float("inf"), "c": "ü\n"})) == {
        "a": "<class 'object'>", "b": "inf", "c": "ü\n",
    }  # fmt: skip


def test_help_needs_no_structlog() -> None:
    script = "import sys; sys.modules['structlog'] = None; import deploy.cli; print('ok')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "ok", done.stderr
