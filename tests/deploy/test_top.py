"""`april top`: what it says of a status, how it fits a terminal, and what it does when the service comes and goes."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from deploy.cli import main
from deploy.top.changes import changes
from deploy.top.drawing import ASCII, UNICODE, duration, glyphs_for, number, size
from deploy.top.feed import Feed, ServerEvent, server_events
from deploy.top.screen import Screen, laid_out, plain_text
from deploy.top.sections import Section, sections
from deploy.top.seen import MAX_EVENTS, MAX_HISTORY, RATE_WINDOW_S, Seen
from deploy.top.target import Target, find_target
from protocol.errors import DataError, SettingsError, UnauthorizedError, UnavailableError
from protocol.messages import AutotuneStatus, RoundStatus
from protocol.watching import Moments, Wait
from tests.support.service import running_service, service_settings
from tests.support.watched import METRICS, NOW, engine, fake_service, status, tail


def seen(**changed) -> Seen:
    watched = Seen(tail=tail(), moments=Moments(at=[NOW], series={"parked_bytes": [1_250_000.0]}))
    for second in range(5):
        engines = [
            engine(tokens_generated=1000 + 500 * second),
            engine("engine-1", running=4, tokens_generated=300 * second),
        ]
        watched.took(status(**({"engines": engines} | changed)), NOW + second)
    return watched


# What is said


def test_a_snapshot_says_all_there_is_to_say():
    text = plain_text(seen(), "http://there", NOW + 5, 100, UNICODE)
    for words in (
        "demo  up 1 h 2 min  epoch 1  http://there",
        "The tail limits the run: 38 % idle.",
        "→ Raise the ratio.",
        "3/4 ready  target 8  must finish 2  4.2 s",
        "the trainer: for the batch of step 10, 3.0 s",
        "16/32 running",
        "800 tok/s  2 replicas",
        "12/16  v7  500 tok/s  KV 25%",
        "p50 31  p90 120.5  p99 173  max 256  of 1,200 responses",
        "seconds  p50 1.5  p90 –",
        "mean length 40 trained, 61 of all that were started",
        "5 open  3 ready  8 leased  5 samples parked (1.2 MB)  oldest waits 12 s",
        "30 admitted, 13 consumed, 1 dropped  in balance",
        "v7 active  v8 newest  step 7 trained  6 durable  1 offered  leased steps 8 to 9",
        "0: 20%  3-4: 30%  9+: 50%  mean 1.25, bound 4",
        "reward 0.620",
        "1.5  lookahead 1  autotune (shadow) wants 2",
        "slots idle",
    ):
        assert words in text


def test_a_ledger_out_of_balance_comes_first_in_its_section_and_needs_no_colour():
    (section,) = [s for s in sections(seen(ledger_error=2), NOW, 80, UNICODE) if s.label == "buffer"]
    assert "OUT OF BALANCE by 2" in section.lines[0].plain


def test_what_is_not_known_yet_is_not_made_up():
    bare = status(
        verdict=None, waiting=[], waits=["prompts"], round=None, engines=[], trainer_metrics={}, leased_steps=[],
        offered=0, trainer_connected=False, newest_version=7, autotune=AutotuneStatus(mode="off"),
    )  # fmt: skip
    watched = Seen()
    watched.took(bare, NOW)
    text = plain_text(watched, "x", NOW, 80, UNICODE)
    assert "no trainer yet" in text
    assert "for prompts" in text
    assert "service.watch = false" in text
    assert not any(line.startswith(("tail", "lag", "step", "engines")) for line in text.splitlines())


def test_a_clock_that_jumps_makes_nothing_negative():
    watched = seen(waiting=[Wait(who="a", waits_for="b", since=NOW + 500)])
    watched.took(status(), NOW - 1000)
    watched.lost("gone", NOW)
    text = plain_text(watched, "x", NOW - 5000, 80, UNICODE)
    assert "AWAY for 0.0 s" in text
    assert "-" not in text.split("AWAY for")[1].split(":")[0]


# How it fits


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("height", [1, 2, 5, 12, 24, 40, 60])
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_the_screen_is_never_larger_than_the_terminal(width, height, glyphs):
    watched = seen()
    watched.lost("a very long reason " * 20, NOW)
    console = Console(width=width, height=height, force_terminal=True, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(Screen(watched, "http://there", NOW, glyphs, keys="q quit"), end="")
    lines = captured.get().split("\n")
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    if glyphs is ASCII:
        assert captured.get().isascii()


def test_an_ordinary_terminal_shows_every_section_and_the_keys():
    console = Console(width=80, height=24)
    lines = Screen(seen(), "http://there", NOW, UNICODE, keys="q quit").lines(console.width, console.height)
    labels = {line.plain[:8].strip() for line in lines[1:-1]} - {""}
    assert {"verdict", "round", "waits", "engines", "tail", "buffer", "policy", "lag", "step", "ratio"} <= labels
    assert lines[-1].plain == "q quit"
    assert len(lines) == 24


def test_every_section_gets_its_least_before_one_gets_more():
    from rich.text import Text

    made = [Section(name, [Text(f"{name}{n}") for n in range(5)], least=2, grows=name == "b") for name in "abc"]
    assert [line.plain.split()[-1] for line in laid_out(made, 7)] == ["a0", "a1", "a2", "b0", "b1", "c0", "c1"]
    assert len(laid_out(made, 100)) == 15
    assert [line.plain.split()[-1] for line in laid_out(made, 3)] == ["a0", "a1", "b0"]


@pytest.mark.parametrize(
    ("encoding", "glyphs"), [("utf-8", UNICODE), ("ascii", ASCII), ("latin-1", ASCII), (None, ASCII)]
)
def test_a_terminal_without_unicode_gets_none(encoding, glyphs):
    assert glyphs_for(encoding) is glyphs
    assert glyphs_for("no-such-encoding") is ASCII


def test_numbers_as_people_read_them():
    assert [duration(s) for s in (-5, 7.25, 59, 192, 18180, 190000)] == [
        "0.0 s", "7.2 s", "59 s", "3 min 12 s", "5 h 3 min", "2 d 4 h",
    ]  # fmt: skip
    assert [duration(s) for s in (9.96, 59.6)] == ["10 s", "1 min 0 s"]
    assert [size(b) for b in (999.6, 999_960)] == ["1.0 KB", "1.0 MB"]
    assert [number(v) for v in (9.996, 999.96, -999.96)] == ["10.0", "1,000", "-1,000"]
    assert [size(b) for b in (12, 1500, 2_500_000, 10**18)] == ["12 B", "1.5 KB", "2.5 MB", "1000000.0 TB"]
    assert [number(v) for v in (None, 3.0, 12.34, 0.1234, 12345.6)] == ["–", "3", "12.3", "0.123", "12,346"]
    assert UNICODE.bar(3, 4, 8) == "██████░░"
    assert UNICODE.bar(9, 0, 4) == "░░░░"
    assert UNICODE.curve([0, 1, 2], 2) == "▅█"
    assert UNICODE.curve([], 5) == ""


# What happened


def test_differences_of_two_statuses_are_events():
    before, now = status(), status(
        round=RoundStatus(round=10, started_s_ago=0, target_groups=8, num_ready=0, num_must_finish=1),
        active_version=8, newest_version=9, trained_step=8, durable_step=8, paused=True, ledger_error=3,
        settings=status().settings | {"ratio": 2.0}, counters={"dropped:stale": 3, "resumes": 4},
        engines=[engine(num_restarts=1), engine("engine-1", alive=False), engine("engine-2")],
    )  # fmt: skip
    assert changes(before, now) == [
        "round 10 began, 1 groups must finish",
        "policy v9 was published",
        "policy v8 is active",
        "step 8 is trained, reward 0.620",
        "steps up to 8 are in a checkpoint",
        "engine-0 was restarted",
        "engine-1 is dead",
        "engine-2 joined",
        "ratio 1.5 → 2",
        "paused",
        "2 groups were dropped: stale",
        "THE LEDGER IS OUT OF BALANCE by 3",
    ]
    assert changes(now, now) == []
    assert changes(before, status(service_epoch=2, trained_step=0)) == ["the service started again (epoch 2)"]


def test_what_is_remembered_is_bounded_and_a_restarted_replica_makes_no_negative_rate():
    watched = Seen()
    for second in range(MAX_HISTORY + 50):
        watched.took(status(active_version=second, newest_version=second), NOW + second)
    assert len(watched.running) == len(watched.rates) == MAX_HISTORY
    watched.took(status(engines=[engine(tokens_generated=900_000)]), NOW + MAX_HISTORY + 49.01)
    assert max(watched.rates) < 900_000, "two statuses that come close together make no peak"
    assert len(watched.events) == MAX_EVENTS
    watched.took(status(engines=[engine(tokens_generated=5)]), NOW + MAX_HISTORY + 60)
    assert watched.tokens_per_s("engine-0") is None
    watched.took(status(engines=[engine(tokens_generated=105)]), NOW + MAX_HISTORY + 60 + RATE_WINDOW_S)
    assert watched.tokens_per_s("engine-0") == pytest.approx(100 / RATE_WINDOW_S)


# The feed


async def _lines(text: str) -> AsyncIterator[str]:
    for line in text.split("\n"):
        yield line


async def test_server_sent_events_by_the_standard():
    text = ": hello\n\nevent: status\ndata: {\ndata: }\nid: 4\nretry: 1000\n\n"
    text += "data:x\n\nevent: nothing\n\nevent: torn\ndata: y"
    assert [event async for event in server_events(_lines(text))] == [
        ServerEvent("status", "{\n}"),
        ServerEvent("message", "x"),
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def _until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  the feed tells what it did by what it remembers only
            await asyncio.sleep(0.01)


async def test_a_service_that_goes_and_comes_back_is_followed_without_anybodys_help(monkeypatch):
    monkeypatch.setattr("deploy.top.feed.RETRY_S", 0.05)
    port, watched = free_port(), Seen()
    feed = Feed(Target(f"http://127.0.0.1:{port}"), watched)
    with fake_service(port):
        await feed.first()
        await feed.pictures()
    assert watched.status is not None
    assert watched.tail == tail()
    following = asyncio.create_task(feed.follow())
    await _until(lambda: watched.away_since is not None)
    assert watched.away_why == "nothing listens there"
    with fake_service(port) as (handler, _):
        handler.status = status(service_epoch=2)
        await _until(lambda: watched.status is not None and watched.status.service_epoch == 2)
        await _until(lambda: handler.streams > 2)  # each stream that ends is opened again
    texts = [event.text for event in watched.events]
    assert texts[0].startswith("the service is away")
    assert "the service started again (epoch 2)" in texts
    following.cancel()
    await feed.close()


async def test_what_a_user_must_mend_is_raised_and_what_passes_is_not(monkeypatch):
    monkeypatch.setattr("deploy.top.feed.RETRY_S", 0.01)
    with fake_service() as (handler, url):
        watched = Seen()
        feed = Feed(Target(url), watched)
        handler.code = 503
        with pytest.raises(UnavailableError, match="it starts"):
            await feed.first()
        await feed.first(starting=True)
        assert watched.away_why == "it starts"
        handler.code = 401
        with pytest.raises(UnauthorizedError, match="APRIL_SERVICE__TOKEN"):
            await feed.follow()
        handler.code = 404
        with pytest.raises(DataError, match="no rollout service"):
            await feed.follow()
        await feed.close()


async def test_why_redis_is_away_is_shown_in_its_own_words():
    with fake_service() as (_, url):
        watched = Seen()
        feed = Feed(Target(url), watched)
        why = 'the master "mymäster" doesn\'t answer'
        await feed._heard(ServerEvent("unavailable", json.dumps(why)))
        assert watched.away_why == why
        await feed.close()


# The command


def test_the_command_prints_a_snapshot_where_there_is_no_terminal(tmp_path: Path):
    with fake_service() as (_, url):
        done = CliRunner().invoke(main, ["top", url, "--json", str(tmp_path / "top.json")])
    assert done.exit_code == 0, done.output
    assert "The tail limits the run" in done.output
    document = json.loads((tmp_path / "top.json").read_text())
    assert document["status"]["trained_step"] == 7
    assert document["tail"]["num_finished"] == 1200
    assert document["moments"] is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["http://127.0.0.1:1"], "start one by `april serve`"),
        (["127.0.0.1:1"], "no rollout service answers at http://127.0.0.1:1"),
        (["ftp://x"], "begins with http:// or https://"),
        (["http://127.0.0.1:99999"], "'http://127.0.0.1:99999' is no address of a service"),
        (["127.0.0.1:65536"], "a port up to 65535"),
        (["http://127.0.0.1:1", "--json", "/no/such/folder/top.json"], "can't write /no/such/folder/top.json"),
        (["http://host:port"], "is no address of a service"),
        (["http://"], "is no address of a service"),
        (["missing.toml"], "missing.toml does not exist"),
        (["--trainer.service_urll=http://127.0.0.1:1"], "did you mean trainer.service_url?"),
    ],
)
def test_mistakes_are_one_sentence(words, sentence):
    done = CliRunner().invoke(main, ["top", "--once", *words])
    assert done.exit_code != 0
    assert sentence in done.output
    assert "Traceback" not in done.output


def test_the_target_comes_from_an_address_a_file_or_the_environment(tmp_path: Path, monkeypatch):
    toml = tmp_path / "run.toml"
    toml.write_text('[trainer]\nservice_url = "http://far:1"\n[service]\ntoken = "from-file"\n')
    assert find_target(str(toml)) == Target("http://far:1", "from-file")
    assert find_target(None) == Target("http://127.0.0.1:8040", None)
    monkeypatch.setenv("APRIL_SERVICE__TOKEN", "from-env")
    assert find_target("there:8040/".rstrip("/")) == Target("http://there:8040", "from-env")
    assert "from-env" not in repr(find_target("there:8040"))
    assert Target("http://user:secret@x").shown == "http://********@x"
    with pytest.raises(SettingsError):
        find_target("gopher://x")


async def test_a_real_service_is_understood(tmp_path: Path):
    settings = service_settings(tmp_path)
    async with running_service(settings) as service:

        class Here(Target):
            def client(self):
                return service.client

        watched = Seen()
        feed = Feed(Here("http://test"), watched)
        headers = await service.open_trainer()
        for step in (1, 2, 3):
            await service.batch(step, headers)
            await service.publish(step, headers)
            body = {"step": step, "metrics": METRICS}
            (await service.client.post("/v1/trainers/metrics", json=body, headers=headers)).raise_for_status()
        await feed.first()
        await feed.pictures()
    assert watched.status is not None
    assert watched.status.trained_step == 3
    assert watched.tail is not None
    assert watched.tail.num_finished > 0
    text = plain_text(watched, "here", NOW, 100, UNICODE)
    assert f"{watched.status.ledger.admitted:,} admitted" in text
    assert f"of {watched.tail.num_finished:,} responses" in text
    assert "reward 0.620" in text
