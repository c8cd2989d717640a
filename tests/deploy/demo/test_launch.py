"""What the demo says of where to look."""

import json

import pytest

from deploy.demo import launch
from protocol.settings import RunSettings


def _notes(capsys: pytest.CaptureFixture[str], **service: object) -> list[dict[str, str]]:
    settings = RunSettings(service=service, trainer={"service_url": "http://127.0.0.1:4711"})
    launch._tell_address(settings)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_address_of_the_page_is_a_note_that_programs_can_read(capsys: pytest.CaptureFixture[str]) -> None:
    page, top = _notes(capsys)
    assert page["event"] == "note"
    assert page["url"] == "http://127.0.0.1:4711/dashboard"
    assert page["url"] in page["text"]
    assert "april top http://127.0.0.1:4711" in top["text"]


def test_a_path_prefix_and_a_page_that_is_off_are_minded(capsys: pytest.CaptureFixture[str]) -> None:
    assert _notes(capsys, root_path="/april")[0]["url"] == "http://127.0.0.1:4711/april/dashboard"
    (top,) = _notes(capsys, dashboard=False)
    assert "dashboard" not in top["text"]
