"""`april buffer`: looking into a run's buffer, checking it, and moving it to another Redis.

Always true: none of these claims the run, so the service goes on undisturbed; what only reads makes no run either.
"""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from deploy.console import run_reporting_errors
from protocol.samples import Group, Sample
from protocol.settings import RunSettings, load_settings
from protocol.states import GroupState

OVERRIDES: dict[str, Any] = {"ignore_unknown_options": True, "allow_interspersed_args": True}
FILE = click.Path(path_type=Path, dir_okay=False)
LISTED_STATES = (GroupState.OPEN, GroupState.READY, GroupState.LEASED)  # of the others no groups are kept


@click.group(name="buffer")
def buffer_group() -> None:
    """Look into a run's continuation buffer, check it, move it."""


def _options(function: Any) -> Any:
    function = click.argument("overrides", nargs=-1, metavar="[--section.field=value]...")(function)
    return click.option("--json", "json_file", type=FILE, help="Write the report as JSON.")(function)


_RUN = click.argument("run_toml", type=click.Path(path_type=Path), metavar="RUN.toml")


@buffer_group.command(context_settings=OVERRIDES)
@_RUN
@_options
def stats(run_toml: Path, overrides: tuple[str, ...], json_file: Path | None) -> None:
    """Counts of groups and samples, steps, epochs, capacity, counters."""

    async def work(buffer: Any) -> None:
        snapshot = await buffer.snapshot()
        facts: dict[str, Any] = {
            "groups": snapshot.ledger.model_dump() | {"error": snapshot.ledger.error},
            "samples": {state.value: count for state, count in snapshot.samples.items()},
            "dropped": {reason.value: count for reason, count in snapshot.dropped.items() if count},
            "steps": {
                "leased": list(snapshot.leased_steps),
                "trained": snapshot.trained_step,
                "durable": snapshot.durable_step,
                "batches offered": snapshot.offered,
            },
            "policy": {"active": snapshot.active_version, "newest": snapshot.newest_version},
            "epochs": {"service": snapshot.service_epoch, "trainer": snapshot.trainer_epoch},
            "held": {"groups": snapshot.held_groups, "bytes": snapshot.held_bytes},
            "pool": snapshot.pool.model_dump(mode="json") | {"error": snapshot.pool.error},
            "counters": dict(sorted(snapshot.counters.items())),
        }
        _print_facts(facts)
        _write_json(json_file, facts | {"cursor": snapshot.cursor})

    _with_buffer(run_toml, overrides, work)


@buffer_group.command(name="list", context_settings=OVERRIDES)
@click.option("--state", type=click.Choice([s.value for s in LISTED_STATES]), help="Only groups in this state.")
@_RUN
@_options
def list_groups(run_toml: Path, overrides: tuple[str, ...], state: str | None, json_file: Path | None) -> None:
    """Groups that are open, ready or leased, by order of admission."""

    async def work(buffer: Any) -> None:
        rows = [row async for row in _rows(buffer) if state in (None, row["state"])]
        _print_rows("Groups", rows)
        _write_json(json_file, rows)

    _with_buffer(run_toml, overrides, work)


@buffer_group.command(context_settings=OVERRIDES)
@_RUN
@click.argument("record_id", metavar="ID")
@_options
def show(run_toml: Path, record_id: str, overrides: tuple[str, ...], json_file: Path | None) -> None:
    """A group (g000000012) or a sample (g000000012.003) with its segments, versions and reward."""

    async def work(buffer: Any) -> None:
        if "." in record_id:
            (sample,) = await buffer.samples([record_id])
            facts = _describe_sample(sample)
        else:
            (group,) = await buffer.groups([record_id])
            facts = _describe_group(group)
        click.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        _write_json(json_file, facts)

    _with_buffer(run_toml, overrides, work)


@buffer_group.command(context_settings=OVERRIDES)
@_RUN
@_options
def verify(run_toml: Path, overrides: tuple[str, ...], json_file: Path | None) -> None:
    """Count everything again from the raw records; ends with 1 if they and the ledger differ."""

    async def work(buffer: Any) -> None:
        recount = await buffer.recount()
        stored, counted = recount.stored.model_dump(), recount.counted.model_dump()
        _print_rows("Ledger", [{"groups": name, "stored": stored[name], "counted": counted[name]} for name in stored])
        for fault in recount.faults:
            click.echo(f"fault: {fault}")
        click.echo(f"{len(recount.faults)} faults" if recount.faults else "everything agrees")
        _write_json(json_file, {"stored": stored, "counted": counted, "faults": list(recount.faults)})
        if recount.faults:
            sys.exit(1)

    _with_buffer(run_toml, overrides, work)


@buffer_group.command(name="export", context_settings=OVERRIDES)
@_RUN
@click.argument("file", type=FILE, metavar="FILE")
@_options
def export_file(run_toml: Path, file: Path, overrides: tuple[str, ...], json_file: Path | None) -> None:
    """Write the run's whole state to FILE; the run must rest (drain it, stop its service)."""

    async def work(buffer: Any) -> None:
        from buffer.transfer import export_run

        num_keys = await export_run(buffer.store, file)
        num_bytes = (await asyncio.to_thread(file.stat)).st_size
        click.echo(f"{num_keys} keys, {num_bytes:,} bytes written to {file}")
        _write_json(json_file, {"num_keys": num_keys, "num_bytes": num_bytes})

    _with_buffer(run_toml, overrides, work)


@buffer_group.command(name="import", context_settings=OVERRIDES)
@_RUN
@click.argument("file", type=FILE, metavar="FILE")
@_options
def import_file(run_toml: Path, file: Path, overrides: tuple[str, ...], json_file: Path | None) -> None:
    """Write the state in FILE to the Redis of RUN.toml, which must not have this run; then count it again."""

    def work() -> None:
        faults = asyncio.run(_import(load_settings(run_toml, overrides), file, json_file))
        if faults:
            sys.exit(1)

    run_reporting_errors(work)


async def _import(settings: RunSettings, file: Path, json_file: Path | None) -> Sequence[str]:
    from buffer.open import open_store
    from buffer.reading import Reading
    from buffer.recount import Recounter
    from buffer.transfer import import_run

    store, server = await open_store(settings)
    try:
        num_keys = await import_run(store, file)
        recount, snapshot = await Recounter(store).recount(), await Reading(store).snapshot()
    finally:
        await store.link.close()
        if server is not None:
            server.stop()
    for fault in recount.faults:
        click.echo(f"fault: {fault}")
    click.echo(f"{num_keys} keys, {snapshot.ledger.admitted} groups, {len(recount.faults)} faults")
    _write_json(json_file, {"num_keys": num_keys, "faults": list(recount.faults)})
    return recount.faults


def _with_buffer(run_toml: Path, overrides: tuple[str, ...], use: Callable[[Any], Awaitable[None]]) -> None:
    async def work() -> None:
        async with _opened(load_settings(run_toml, overrides)) as buffer:
            await use(buffer)

    run_reporting_errors(lambda: asyncio.run(work()))


@asynccontextmanager
async def _opened(settings: RunSettings) -> AsyncGenerator[Any]:
    from buffer.open import open_buffer

    buffer, server = await open_buffer(settings, create=False)
    try:
        yield buffer.impatient()
    finally:
        await buffer.close()
        if server is not None:
            server.stop()


async def _rows(buffer: Any) -> AsyncGenerator[dict[str, Any]]:
    for group in await buffer.open_groups():
        yield {
            "group": group.group_id,
            "state": group.state.value,
            "step": None,
            "admitted at": group.admitted_version,
            "oldest": group.oldest_version,
            "samples": group.num_samples,
            "scored": group.num_scored,
            "failed": group.num_failed,
        }
    for lease in await buffer.batch_leases():
        for group in await buffer.groups(lease.group_ids):
            states = [sample.state.value for sample in group.samples]
            yield {
                "group": group.group_id,
                "state": group.state.value,
                "step": group.step,
                "admitted at": group.admitted_version,
                "oldest": None,
                "samples": len(states),
                "scored": states.count("scored"),
                "failed": states.count("failed"),
            }


def _describe_group(group: Group) -> dict[str, Any]:
    return {
        "group": group.group_id,
        "state": group.state.value,
        "step": group.step,
        "drop_reason": group.drop_reason,
        "admitted_version": group.admitted_version,
        "prompt": {"id": group.prompt.prompt_id, "text": group.prompt.text, "num_tokens": len(group.prompt.token_ids)},
        "samples": [_describe_sample(sample) for sample in group.samples],
    }


def _describe_sample(sample: Sample) -> dict[str, Any]:
    return {
        "sample": sample.sample_id,
        "state": sample.state.value,
        "num_tokens": sample.num_tokens,
        "num_resumes": sample.num_resumes,
        "num_failures": sample.num_failures,
        "finish_reason": sample.finish_reason.value if sample.finish_reason else None,
        "fail_reason": sample.fail_reason.value if sample.fail_reason else None,
        "error": sample.error,
        "reward": {"value": sample.reward.value, "parts": sample.reward.parts} if sample.reward else None,
        "segments": [
            {
                "start": segment.start,
                "version": segment.version,
                "kv_kept": segment.kv_kept,
                "tokens": segment.tokens.tolist(),
                "logprobs": [round(float(logprob), 6) for logprob in segment.logprobs],
            }
            for segment in sample.segments
        ],
    }


def _print_facts(facts: dict[str, Any]) -> None:
    table = Table(show_header=False)
    for section, values in facts.items():
        for name, value in _shown(values):
            table.add_row(section, name, value)
            section = ""
        table.add_section()
    Console().print(table)


def _shown(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        yield name, f"{value:,}" if isinstance(value, int) else str(value)


def _print_rows(title: str, rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        click.echo("none")
        return
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    Console().print(table)


def _write_json(path: Path | None, value: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
