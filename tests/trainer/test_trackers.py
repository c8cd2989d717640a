"""Trackers: what each is given, that a failing one costs nothing, that secrets stay here."""

import importlib
import importlib.util
import io
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from protocol.batch import SegmentSpan
from protocol.errors import SettingsError
from protocol.settings import RunSettings
from tests.trainer.factory import make_batch, make_settings
from trainer.loggers import (
    ConsoleLogger,
    JsonlLogger,
    Trackers,
    check_libraries,
    make_loggers,
    open_trackers,
    public_settings,
)
from trainer.sample_tables import SampleReader, SampleRow, markdown_table, pick_samples, version_spans
from trainer.trackers import MlflowLogger, TensorboardLogger, WandbLogger, run_id

ROW = SampleRow("g/1", 1.0, 9, "stop", "0×5 → 1×4", "a|b\n", "c<d> [bold]")


@pytest.fixture
def settings(tiny_model_dir: Path, tmp_path: Path) -> RunSettings:
    return make_settings(tiny_model_dir, tmp_path / "run", trainer={"log_samples": 3, "token": "t0psecret"})


class Broken:
    """A tracker whose server is away."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ConnectionError("no server")

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        raise ConnectionError("no server")

    def close(self) -> None:
        raise ConnectionError("no server")


class Kept:
    """A tracker that keeps what it gets."""

    def __init__(self) -> None:
        self.metrics: dict[int, Mapping[str, float]] = {}
        self.samples: dict[int, Sequence[SampleRow]] = {}
        self.closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics[step] = metrics

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        self.samples[step] = rows

    def close(self) -> None:
        self.closed = True


def test_a_failing_tracker_costs_its_line_and_nothing_else(settings: RunSettings, caplog, monkeypatch) -> None:
    kept = Kept()
    trackers = Trackers({"broken": Broken(), "kept": kept}, SampleReader(settings))
    # The trainer's own logger does not hand on what it says, if a test before this one has set it up.
    monkeypatch.setattr("trainer.loggers.LOG", logging.getLogger("tests.trackers"))
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            trackers.log(step, {"a": 1.0})
            trackers.log_samples(step, make_batch())
        trackers.close()
    assert set(kept.metrics) == set(kept.samples) == {1, 2}
    assert kept.closed
    assert len(caplog.records) == 2, "one warning while it fails, one at the end"
    assert "broken recorded nothing at step 1: no server" in caplog.text


def test_sample_rows_are_the_batch_in_words(settings: RunSettings) -> None:
    batch = make_batch(version=3)
    rows = SampleReader(settings).read(7, batch)
    assert len(rows) == 3
    by_id = {h.sample_id: i for i, h in enumerate(batch.header.samples)}
    for row in rows:
        i = by_id[row.sample]
        start, end = batch.sample_offsets[i], batch.sample_offsets[i + 1]
        assert row.reward == batch.rewards[i]
        assert row.tokens == end - start - batch.prompt_lengths[i]
        written = batch.versions[start:end][batch.versions[start:end] >= 0]
        counted = [tuple(map(int, part.split("×"))) for part in row.versions.split(" → ")]
        assert dict(counted) == {int(v): int((written == v).sum()) for v in set(written.tolist())}
    assert {batch.rewards.max(), batch.rewards.min()} <= {row.reward for row in rows}
    assert SampleReader(settings).read(7, batch) == rows, "a replayed step shows the same samples"


def test_text_is_what_the_tokenizer_says(settings: RunSettings, tiny_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    batch = make_batch()
    row = SampleReader(settings).read(1, batch)[0]
    i = [h.sample_id for h in batch.header.samples].index(row.sample)
    start, middle = int(batch.sample_offsets[i]), int(batch.sample_offsets[i] + batch.prompt_lengths[i])
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    assert row.prompt == tokenizer.decode(batch.tokens[start:middle].tolist())


def test_without_a_tokenizer_samples_are_ids(tmp_path: Path) -> None:
    rows = SampleReader(make_settings(tmp_path, tmp_path, trainer={"log_samples": 1})).read(1, make_batch())
    assert all(part.isdigit() for part in rows[0].prompt.split())


@pytest.mark.parametrize("num", [0, 1, 2, 5, 50])
def test_picked_samples_are_distinct_and_hold_the_extremes(num: int) -> None:
    rewards = [0.0, 1.0, 0.5, 0.5, 0.2, 0.9, 0.5, 0.5]
    picked = pick_samples(rewards, num, seed=1, step=3)
    assert len(picked) == len(set(picked)) == min(num, len(rewards))
    if num > 1:
        assert {0, 1} <= set(picked)
    assert pick_samples([], num, 1, 3) == []
    assert len(pick_samples([0.5] * 9, num, 1, 3)) == min(num, 9)


def test_segments_of_one_version_are_one_run() -> None:
    spans = [SegmentSpan(start=a, end=b, version=v, kv_kept=False) for a, b, v in ((0, 3, 1), (3, 5, 1), (5, 9, 2))]
    assert version_spans(spans) == "1×5 → 2×4"


def test_markdown_keeps_one_row_a_sample() -> None:
    lines = markdown_table([ROW]).splitlines()
    assert len(lines) == 3
    assert "a\\|b<br>" in lines[2]
    assert "c&lt;d>" in lines[2]


def test_console_shows_samples_on_a_terminal_only() -> None:
    terminal, pipe = io.StringIO(), io.StringIO()
    ConsoleLogger(3, Console(file=terminal, force_terminal=True, width=60)).log_samples(1, [ROW])
    ConsoleLogger(3, Console(file=pipe, force_terminal=False)).log_samples(1, [ROW])
    assert "[bold]" in terminal.getvalue(), "markup in a response is text"
    assert terminal.getvalue().count("\n") == 1
    assert pipe.getvalue() == ""


def test_jsonl_keeps_samples_in_a_file_of_their_own(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.log(1, {"a": 1.0})
    logger.log_samples(1, [ROW, ROW])
    logger.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [s["step"] for s in samples] == [1, 1]
    assert samples[0]["response"] == ROW.response


@pytest.mark.parametrize(
    ("section", "values", "secret"),
    [
        ("trainer", {"token": "hunter2"}, "hunter2"),
        ("trainer", {"service_url": "http://me:hunter2@host:1"}, "hunter2"),
        ("service", {"token": "hunter2"}, "hunter2"),
        ("buffer", {"password": "hunter2"}, "hunter2"),
        ("buffer", {"url": "redis://me:hunter2@host:6379"}, "hunter2"),
        ("reward", {"settings": {"judge": {"api_key": "hunter2"}, "max_tokens": 3}}, "hunter2"),
        ("engine", {"extra": {"hf_token": "hunter2"}}, "hunter2"),
        ("data", {"reasoning_gym": [{"name": "x", "settings": {"secret": "hunter2"}}]}, "hunter2"),
    ],
)
def test_secrets_never_reach_a_tracker(tmp_path: Path, section: str, values: dict, secret: str) -> None:
    public = public_settings(make_settings(tmp_path, tmp_path, **{section: values}))
    assert secret not in json.dumps(public)
    assert public["actor.optim.lr"] == 1e-3
    if section == "reward":
        assert public["reward.settings.max_tokens"] == 3


def test_tensorboard_has_scalars_settings_and_samples(settings: RunSettings, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorboardLogger(tmp_path / "tb", public_settings(settings))
    logger.log(4, {"reward/mean": 0.5})
    logger.log_samples(4, [ROW])
    logger.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    scalar = events.Scalars("reward/mean")[0]
    assert (scalar.step, scalar.value) == (4, 0.5)
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert ROW.sample in texts["samples/text_summary"]
    assert "actor.optim.lr = 0.001" in texts["settings/text_summary"]
    assert "t0psecret" not in json.dumps(texts)


def test_wandb_offline_continues_its_run(settings: RunSettings, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for step in (1, 2):
        logger = WandbLogger(settings, public_settings(settings))
        logger.log(step, {"reward/mean": 0.5})
        logger.log_samples(step, [ROW])
        logger.close()
    runs = sorted((settings.trainer_dir / "wandb").glob("offline-run-*"))
    name = run_id(settings.trainer_dir, "wandb")
    assert runs
    assert all(run.name.endswith(name) for run in runs), "one run, over restarts"
    assert list((settings.trainer_dir / "wandb").glob("**/samples_*.table.json"))
    stored = b"".join(path.read_bytes() for path in (settings.trainer_dir / "wandb").glob("**/*") if path.is_file())
    assert b"reward/mean" in stored
    assert b"t0psecret" not in stored


def test_wandb_without_a_login_is_one_sentence(settings: RunSettings, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    wandb: Any = importlib.import_module("wandb")
    wandb.teardown()  # a process reads its environment once, and another test may have been offline
    with pytest.raises(SettingsError, match=r"`wandb login`, set WANDB_MODE=offline"):
        WandbLogger(settings, {})


def test_mlflow_in_a_folder_continues_its_run(settings: RunSettings, monkeypatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    public = public_settings(settings) | {"long": "x" * 10_000}
    for step in (1, 2):
        logger = MlflowLogger(settings, public)
        logger.log(step, {f"metric/{i}": float(i) for i in range(600)})
        logger.log_samples(step, [ROW])
        logger.close()
    client = logger._client
    run = client.get_run(run_id(settings.trainer_dir, "mlflow"))
    assert [m.step for m in client.get_metric_history(run.info.run_id, "metric/599")] == [1, 2]
    assert run.data.params["actor.optim.lr"] == "0.001"
    assert run.info.status == "FINISHED"
    assert [a.path for a in client.list_artifacts(run.info.run_id, "samples")] == [
        "samples/step-000001.md",
        "samples/step-000002.md",
    ]
    everything = [p.read_bytes() for p in (settings.trainer_dir / "mlflow").glob("**/*") if p.is_file()]
    assert b"t0psecret" not in b"".join(everything)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")


def test_mlflow_server_that_is_away_is_one_sentence(settings: RunSettings, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "ftp://nowhere")
    with pytest.raises(SettingsError, match="MLflow can't start at ftp://nowhere"):
        MlflowLogger(settings, {})


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_library_names_the_extra(settings: RunSettings, monkeypatch, name: str) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == name else found(module))
    named = settings.model_copy(update={"trainer": settings.trainer.model_copy(update={"logger": ["jsonl", name]})})
    with pytest.raises(
        SettingsError, match=rf"names {name}, which is not installed: install april-rollout\[trackers\]"
    ):
        check_libraries(named)
    with pytest.raises(SettingsError):
        open_trackers(named, 3)


def test_default_trackers_need_no_extra(tmp_path: Path) -> None:
    assert make_settings(tmp_path, tmp_path).trainer.logger == ["jsonl"]
    assert RunSettings().trainer.logger == ["console", "jsonl", "tensorboard"]
    twice = make_loggers(make_settings(tmp_path, tmp_path, trainer={"logger": ["jsonl", "jsonl"]}), 3)
    assert len(twice) == 1
    twice[0].close()


def test_jsonl_ends_a_line_that_was_left_half_written(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_text('{"step": 1, "a"')
    for step in (2, 3):
        logger = JsonlLogger(tmp_path / "metrics.jsonl")
        logger.log(step, {"a": 1.0})
        logger.log_samples(step, [ROW])
        logger.close()
    for name in ("metrics.jsonl", "samples.jsonl"):
        half, *whole = (tmp_path / name).read_text().splitlines()
        assert half == '{"step": 1, "a"'
        assert [json.loads(line)["step"] for line in whole] == [2, 3]


@pytest.mark.parametrize("name", ["jsonl", "tensorboard"])
def test_a_place_that_is_taken_is_one_sentence(tmp_path: Path, name: str) -> None:
    settings = make_settings(tmp_path, tmp_path / "run", trainer={"logger": [name]})
    settings.trainer_dir.mkdir(parents=True)
    if name == "jsonl":
        (settings.trainer_dir / "metrics.jsonl").mkdir()
    else:
        (settings.trainer_dir / "tensorboard").write_text("mine")
    with pytest.raises(SettingsError, match=rf"the tracker {name} can't be opened \(.*: move away .* trainer\.logger"):
        make_loggers(settings, 1)
