"""Weights that lie in a mapped file: gives their memory back, and keeps their values.

transformers maps a safetensors file and hands out views of it where no dtype has to be changed.
What nobody has written to is then in memory only because somebody read it; let go, it is read from
the file again when somebody asks. So the model stays whole while its packed copy takes its place.
Linux only: elsewhere nothing is let go. Called by the backbone.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from torch import nn

_MAPPINGS = Path("/proc/self/smaps")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+)")  # addresses, ..., inode
_CHANGED = re.compile(r"(?:Anonymous|Swap): +[1-9]")


class FilePages:
    """What this process has mapped from files and never written to, at the time this is made."""

    def __init__(self) -> None:
        self._ranges = list(_unchanged()) if sys.platform == "linux" else []

    def release(self, module: nn.Module) -> None:
        """Give back the memory of parameters that only repeat a file; others stay as they are."""
        for weight in module.parameters():
            weight = getattr(weight, "blocks", weight)
            start, end = weight.data_ptr(), weight.data_ptr() + weight.nbytes
            if weight.is_contiguous() and any(
                low <= start and end <= high for low, high in self._ranges
            ):
                _let_go(start, end)


def _unchanged() -> Iterator[tuple[int, int]]:
    """First and last address of each mapping of a file without a page of the process's own.

    A page that was written to is a copy in memory alone, which letting go would lose.
    """
    try:
        text = _MAPPINGS.read_text(encoding="utf-8", errors="replace")
    except OSError:  # no /proc, or not for us
        return
    for mapping in re.split(r"\n(?=[0-9a-f]+-)", text):
        header = _MAPPING.match(mapping)
        if header and header[3] != "0" and not _CHANGED.search(mapping):
            yield int(header[1], 16), int(header[2], 16)


def _let_go(start: int, end: int) -> None:
    """Whole pages between two addresses. Should the kernel refuse, they stay in memory."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    size = end // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size > 0:
        _madvise()(first, size, mmap.MADV_DONTNEED)


@cache
def _madvise() -> Callable[[int, int, int], int]:
    """The C library's; looked up once, for it is called for each weight."""
    found = ctypes.CDLL(None).madvise
    found.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return found
