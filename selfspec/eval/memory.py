"""How much memory a piece of work needs at its peak, beyond what the process held before.

On a CUDA device the allocator's own count, exact. On Linux the kernel's: it keeps the highest
resident size, which is set back first; its counters may lag by some pages. Elsewhere nothing can be
said. Called by `bench`.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_SET_BACK = "5"
"""What makes the kernel forget the highest resident size: proc(5)."""


class Memory(NamedTuple):
    """In bytes."""

    before: int
    """Held when the work began: weights, all copies of them, libraries."""
    growth: int
    """At the peak, beyond `before`."""


def peak_of(work: Callable[[], object], device: torch.device) -> Memory | None:
    """Run `work` and say what it needed; None where that cannot be measured."""
    gc.collect()
    if device.type == "cuda":
        return _on_cuda(work, device)
    try:
        _trim()
        _RESET.write_text(_SET_BACK, encoding="ascii")
        before = _resident("VmRSS")
        work()
        peak = _resident("VmHWM")
    except (OSError, LookupError):
        return None
    return Memory(before, max(peak - before, 0))


def _on_cuda(work: Callable[[], object], device: torch.device) -> Memory:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return Memory(before, torch.cuda.max_memory_allocated(device) - before)


def _trim() -> None:
    """Give freed memory back, or what ran before would leave room that nothing counts."""
    with suppress(OSError, AttributeError):  # glibc has it, other C libraries do not
        ctypes.CDLL(None).malloc_trim(0)


def _resident(name: str) -> int:
    """VmRSS (now) or VmHWM (highest), in bytes. Raises OSError or LookupError without Linux."""
    lines = dict(
        line.split(":", 1) for line in _STATUS.read_text(encoding="ascii").splitlines() if line
    )
    return 1024 * int(lines[name].split()[0])
