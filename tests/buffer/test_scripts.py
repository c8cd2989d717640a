"""The Lua files: short, described, and blind to every key that they were not given."""

import re
from pathlib import Path

import pytest

from buffer.keys import RUN_KEYS
from buffer.memory_store import KEPT_CHANGES, KEPT_POLICIES, KEPT_TOMBSTONES
from buffer.scripts import LUA_FOLDER, script_text
from protocol.states import SampleState

MAX_LINES = 40
PRELUDE = sorted((LUA_FOLDER / "prelude").glob("*.lua"))
TRANSITIONS = sorted(LUA_FOLDER.glob("*.lua"))
UNFENCED = {"claim_service", "initialise", "sync"}  # what comes before there is an epoch, and what changes nothing
CALLS = re.compile(r"redis\.call\('(\w+)'(?:, ([^,)]+))?")
KEY_NAMES = re.compile(r"KEYS\[[^]]+\]|IN_STATE(\.\w+|\[.+)|[A-Z_]+|sample|tokens|group|record|key|redis\.call\('TIME'")


@pytest.mark.parametrize("path", [*PRELUDE, *TRANSITIONS], ids=lambda p: p.stem)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", TRANSITIONS, ids=lambda p: p.stem)
def test_transitions_say_what_they_do_and_take(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0] in ("#!lua", "#!lua flags=allow-oom")
    assert lines[1].startswith("-- ")
    assert lines[1].endswith((".", ";"))
    assert lines[2].startswith("-- KEYS: the run's keys")
    assert lines[3].startswith("-- ARGV: ")


@pytest.mark.parametrize("path", TRANSITIONS, ids=lambda p: p.stem)
def test_transitions_check_the_service_before_they_write(path: Path) -> None:
    if path.stem not in UNFENCED:
        body = path.read_text().split("superseded_service(ARGV[1])")
        assert len(body) == 2
        assert not re.search(r"redis\.call\('(H(SET|INCRBY|DEL)|Z(ADD|REM)|[RL]PUSH|UNLINK)", body[0])


@pytest.mark.parametrize("path", [*PRELUDE, *TRANSITIONS], ids=lambda p: p.stem)
def test_scripts_name_no_key_themselves(path: Path) -> None:
    text = path.read_text()
    for command, key in CALLS.findall(text):
        assert command != "KEYS"
        assert command == "TIME" or KEY_NAMES.fullmatch(key), f"{command} {key}"
    for name, value in re.findall(r"local (sample|tokens|group)\b.* = (.+)", text):
        assert "KEYS[" in value, name


def test_the_prelude_knows_the_keys_in_the_order_that_they_are_given() -> None:
    text = PRELUDE[0].read_text()
    names = re.findall(r"[A-Z_]+", text.split("local IN_STATE")[0].split("local ", 1)[1])
    declared = [n.lower() for n in names if n not in ("KEYS",)]
    assert declared == list(RUN_KEYS[: -len(SampleState)])
    positions = {name: int(n) for name, n in re.findall(r"([a-z]+) = KEYS\[(\d+)\]", text)}
    expected = {state.value: RUN_KEYS.index(state.value) + 1 for state in SampleState}
    assert positions == expected
    assert f"local OWN = {len(RUN_KEYS)} " in text


def test_flags_come_first_in_what_is_loaded() -> None:
    for path in TRANSITIONS:
        assert script_text(path.stem).startswith("#!lua")
        assert script_text(path.stem).count("#!lua") == 1


@pytest.mark.parametrize(
    ("name", "kept"),
    [("KEPT_TOMBSTONES", KEPT_TOMBSTONES), ("KEPT_POLICIES", KEPT_POLICIES), ("KEPT_CHANGES", KEPT_CHANGES)],
)
def test_the_twin_keeps_as_much(name: str, kept: int) -> None:
    found = [m for path in (*PRELUDE, *TRANSITIONS) for m in re.findall(rf"local {name} = (\d+)", path.read_text())]
    assert found == [str(kept)]
