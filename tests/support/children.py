"""The processes that a service has started for itself, found as an operator would find them: in /proc."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from tests.support.cluster import Process
from tests.support.mortal_engine import CORE_COMMAND

# Words of a command line. vLLM renames its core where it can; else it is what multiprocessing starts.
ENGINES = (*CORE_COMMAND, "VLLM::EngineCore", "multiprocessing.spawn")
REWARD_WORKERS = ("rollout_service.rewards.worker",)


def children_of(process: Process | None, words: Sequence[str]) -> list[int]:
    """Ids of its direct children whose command line has one of the words; none if it has ended."""
    if process is None or not process.alive:
        return []
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and _parent(folder) == process.popen.pid:
            command = _read(folder / "cmdline").replace("\0", " ").split()
            if any(word in part for word in words for part in command) and "resource_tracker" not in " ".join(command):
                found.append(int(folder.name))
    return sorted(found)


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in RAM."""
    lines = _read(Path(f"/proc/{pid}/status")).splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)


def _parent(folder: Path) -> int:
    fields = _read(folder / "stat").rpartition(")")[2].split()
    return int(fields[1]) if fields else 0


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        return path.read_text(errors="replace")
    return ""
