"""From the files of a trace to samples and rounds.

Always true of a `Trace`: it is of one run; a sample's length is what its last attempt ended with, even if the lines of
earlier attempts are gone; a sample is finished or it is right-censored at that length; one that went on in a later
group under another id is one sample, of the group that started it; one that still runs is as long as was last written
of it, and how many run of which nothing was written is in the notes; lengths are those under one budget, whatever the
budgets were that the lives of the service had: a shorter one only says that a response is at least so long.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from protocol.errors import DataError
from rollout_service.tuning.trace_records import (
    LINE,
    SCHEMA,
    SCHEMA_VERSION,
    AttemptLine,
    Header,
    InstallLine,
    LengthLine,
    LostLine,
    MomentLine,
    Record,
    RoundLine,
    RunningLine,
    RunningSample,
    ScoreLine,
    TracedLimits,
    TrainedLine,
)
from rollout_service.tuning.trace_writer import trace_folder

FINISHED = frozenset({"stop", "length"})
GZIP = b"\x1f\x8b"


@dataclass(slots=True)
class TracedSample:
    """One response. `num_tokens`: its length if `finished`, else what it had when it was last seen.

    `budget`: the `max_response_length` in force when it was last seen; None if it is not known.
    """

    sample_id: str
    group_id: str
    prompt_id: str
    source: str
    prompt_tokens: int
    num_tokens: int
    finished: bool
    reward: float | None = None
    failed: str | None = None
    attempts: list[AttemptLine] = field(default_factory=list[AttemptLine])
    budget: int | None = None


@dataclass(slots=True)
class Trace:
    """One run, over all lives of its service. `limits` are those of the last one."""

    run: str
    limits: TracedLimits | None
    samples: list[TracedSample]
    rounds: list[RoundLine]
    trained: list[TrainedLine]
    installs: list[InstallLine]
    notes: list[str]

    @property
    def name(self) -> str:
        """What it is, for a report."""
        return f"the trace of {self.run}" if self.limits is not None else self.run

    @property
    def finished(self) -> list[TracedSample]:
        """Samples whose length is known."""
        return [sample for sample in self.samples if sample.finished]


def read_trace(path: Path, budget: int | None = None) -> Trace:
    """Read a trace file, a folder of them, or a run's folder. Raises DataError with what is wrong and where.

    Lengths are under `budget` (`max_response_length`); None is that of the last life.
    """
    files = trace_files(path)
    builder = _Builder()
    for file in files:
        if (data := _read(file, builder.notes)) is not None:
            builder.add_file(file, _lines(file, data, builder.notes))
    return builder.build(budget)


def trace_files(path: Path) -> list[Path]:
    """The files of a trace, oldest first."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"there is no trace at {path}: name a run's folder, its trace folder, or a trace file")
    for folder in (trace_folder(path), path):
        if files := sorted(folder.glob("*.jsonl")):
            return files
        if any(folder.glob("*.jsonl.gz")):
            raise DataError(f"the trace in {folder} is packed by gzip: unpack it with `gzip -d`, it is read as it is")
    raise DataError(
        f"{path} has no trace: the service writes one to {trace_folder(path)} unless trace.enabled = false; run it"
    )


def _read(file: Path, notes: list[str]) -> bytes | None:
    """The bytes of a file; None if the service took it away meanwhile, as it does with the oldest."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        notes.append(f"{file.name}: it was removed while the trace was read, as the oldest beyond trace.max_files")
        return None
    except OSError as error:
        raise DataError(f"can't read {file} ({error.strerror}); check the path and its permissions") from error
    if data.startswith(GZIP):
        raise DataError(f"{file} is packed by gzip: unpack it with `gzip -d`, and name what comes out")
    return data


def _lines(file: Path, data: bytes, notes: list[str]) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, without a torn last one."""
    whole, newline, torn = data.rpartition(b"\n")
    if torn:
        notes.append(f"{file.name}: the last line is torn and was left out")
    if newline:
        yield from enumerate(whole.split(b"\n"), 1)


class _Builder:
    """Collects lines; the header of each file comes before its records."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._runs: dict[str, Path] = {}
        self._limits: TracedLimits | None = None
        self._samples: dict[str, TracedSample] = {}
        self._former: dict[str, str] = {}  # id of a sample that went on -> the id that it was started under
        self._scores: list[ScoreLine] = []
        self._rounds: dict[int, RoundLine] = {}
        self._trained: list[TrainedLine] = []
        self._installs: list[InstallLine] = []
        self._num_lengths = 0
        self._running: dict[str, tuple[RunningSample, int | None]] = {}  # last written of, and the budget then
        self._moment_at = 0.0
        self._num_running = 0  # at the last moment, without those that have left since

    def add_file(self, file: Path, lines: Iterable[tuple[int, bytes]]) -> None:
        """One file."""
        has_header = False
        for number, line in lines:
            if not has_header:
                self._header(file, line)
                has_header = True
                continue
            try:
                self._record(LINE.validate_json(line))
            except ValidationError as error:
                raise DataError(
                    f"{file}, line {number} is not a line of a trace ({error.errors()[0]['msg']}); "
                    "take that file out of the folder, or leave out the line"
                ) from error
        if not has_header:
            self.notes.append(f"{file.name}: it is empty and was passed over")

    def _header(self, file: Path, line: bytes) -> None:
        try:
            header = LINE.validate_json(line)
        except ValidationError as error:
            if (found := error.errors()[0])["loc"][:1] == ("header",):
                field = ".".join(str(part) for part in found["loc"][1:])
                raise DataError(
                    f"the header of {file} has no use: {field}: {found['msg']}; read it with the version of april that "
                    "wrote it"
                ) from error
            header = None
        if not isinstance(header, Header) or header.schema_name != SCHEMA:
            raise DataError(
                f"{file} is not a trace of this project: its first line is no header; lengths from elsewhere are read "
                "by `april trace convert`"
            )
        if header.version != SCHEMA_VERSION:
            raise DataError(
                f"{file} has version {header.version} of the trace's schema, this version of april reads "
                f"{SCHEMA_VERSION}: read it with the one that wrote it"
            )
        self._runs.setdefault(header.run, file)
        if len(self._runs) > 1:
            raise DataError(
                f"the folder mixes traces of the runs {' and '.join(sorted(self._runs))}: name one run's folder, or "
                "move the files apart"
            )
        self._limits = header.limits or self._limits

    def _record(self, line: Header | Record) -> None:
        match line:
            case AttemptLine():
                self._attempt(line)
            case ScoreLine():
                self._scores.append(line)
            case RoundLine():
                self._rounds[line.round] = line
            case TrainedLine():
                self._trained.append(line)
            case InstallLine():
                self._installs.append(line)
            case LengthLine():
                self._length(line)
            case LostLine(num_lines=num_lines):
                self.notes.append(f"{num_lines} lines were lost to a slow disk")
            case MomentLine(at=at, values=values):
                self._moment_at, self._num_running = at, int(values.get("running") or 0)
            case RunningLine(samples=samples):
                self._running |= {sample.sample: (sample, self._budget) for sample in samples}
            case Header():
                self.notes.append("a header inside a file was passed over")

    def _attempt(self, line: AttemptLine) -> None:
        if line.continued_from is not None:
            self._former[line.sample] = self._started_as(line.continued_from)
        sample = self._samples.get(self._started_as(line.sample))
        if sample is None:
            self._former.pop(line.sample, None)  # its earlier attempts are in no file: it is known from here on
            sample = TracedSample(line.sample, line.group, line.prompt, line.source, line.prompt_tokens, 0, False)
            self._samples[line.sample] = sample
        sample.attempts.append(line)
        sample.num_tokens = line.before + sum(segment.num_tokens for segment in line.segments)
        sample.finished = line.end in FINISHED
        sample.budget = self._budget
        self._running.pop(line.sample, None)
        self._num_running -= line.started_at <= self._moment_at

    @property
    def _budget(self) -> int | None:
        return self._limits.max_response_length if self._limits else None

    def _still_running(self) -> None:
        """Samples that no line says the end of."""
        for line, budget in self._running.values():
            if line.continued_from is not None:
                self._former[line.sample] = self._started_as(line.continued_from)
            sample = self._samples.get(self._started_as(line.sample))
            if sample is None:
                group = line.sample.rpartition(".")[0]
                sample = TracedSample(line.sample, group, line.prompt, line.source, line.prompt_tokens, 0, False)
                self._samples[line.sample] = sample
            sample.num_tokens = max(sample.num_tokens, line.num_tokens)
            sample.finished, sample.budget = False, budget
        if self._running:
            self.notes.append(f"{len(self._running)} responses still run and count as longer than when last written of")
        if (num_missing := self._num_running - len(self._running)) > 0:
            self.notes.append(
                f"{num_missing} responses that run are not in the trace yet: until they are, lengths are biased short "
                "(`/v1/pictures/tail` of the service counts them)"
            )

    def _started_as(self, sample_id: str) -> str:
        return self._former.get(sample_id, sample_id)

    def _length(self, line: LengthLine) -> None:
        self._num_lengths += 1
        sample_id = f"{line.prompt}.{self._num_lengths}"
        self._samples[sample_id] = TracedSample(
            sample_id, line.prompt, line.prompt, line.source, line.prompt_tokens, line.num_tokens, line.finished
        )

    def build(self, budget: int | None) -> Trace:
        """What came together. Scores of samples whose attempts are gone have no use here."""
        for score in self._scores:
            if (sample := self._samples.get(self._started_as(score.sample))) is not None:
                sample.reward, sample.failed = score.reward, score.failed
        if not self._runs:
            raise DataError("the trace is empty: it has no header yet; let the service run for a second")
        self._still_running()
        budget = self._budget if budget is None else budget
        if budget is not None:
            self.notes += put_under(budget, self._samples.values())
        return Trace(
            run=next(iter(self._runs)),
            limits=self._limits,
            samples=list(self._samples.values()),
            rounds=[self._rounds[number] for number in sorted(self._rounds)],
            trained=self._trained,
            installs=self._installs,
            notes=self.notes,
        )


def put_under(budget: int, samples: Iterable[TracedSample]) -> list[str]:
    """Lengths as they would be under `budget`, and notes on how many others had been cut by another one."""
    num_cut = num_beyond = 0
    for sample in samples:
        if sample.budget is None or sample.budget == budget:
            continue
        if sample.num_tokens > budget:
            sample.num_tokens, sample.finished = budget, True
            num_beyond += 1
        elif sample.finished and sample.attempts[-1].end == "length" and sample.budget < budget:
            sample.finished = False
            num_cut += 1
    notes: list[str] = []
    if num_cut:
        notes.append(
            f"{num_cut} responses ended at an older max_response_length below {budget}: they count as at least so long"
        )
    if num_beyond:
        notes.append(f"{num_beyond} responses of another max_response_length count as cut at the present one, {budget}")
    return notes
