"""The most memory that a stretch of work needed: of the GPU if there is one, else of this process."""

from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # of clear_refs, see proc(5)


class PeakMemory:
    """From `start` on: bytes at the peak, and how far that is above what was held at the start."""

    def __init__(self) -> None:
        self._before = 0

    def start(self) -> None:
        """Forget earlier peaks."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            CLEAR_REFS.write_text(RESET_PEAK)
            self._before = _field("VmRSS")

    def peak(self) -> int:
        """Bytes."""
        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _field("VmHWM")

    def above(self) -> int:
        """Bytes of the peak beyond what was held at the start."""
        return self.peak() - self._before


def _field(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no {name}")
