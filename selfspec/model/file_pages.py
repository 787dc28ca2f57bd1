"""Weights that lie in a mapped file: gives their memory back, and keeps their values.

transformers maps a safetensors file and hands out views of it where no dtype has to be changed.
What nobody has written to is then in memory only because somebody read it; let go, it is read from
the file again when somebody asks. So the model stays whole while a copy for compiled code takes its
place. The same pages tell whether somebody has written to them. Linux only: elsewhere nothing is
let go or known. Called by the backbone and its watch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from torch import nn

_MAPPINGS = Path("/proc/self/smaps")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r(?:..p|-.s) \S+ \S+ (\d+)")
"""Addresses and inode, of a mapping where what this process writes is its own, or nothing."""
_CHANGED = re.compile(r"(?:Anonymous|Swap): +[1-9]")

_PAGES = Path("/proc/self/pagemap")
_ENTRY = 8
"""Bytes about a page there; in the last one bits of: in memory, swapped, of a file."""
_OWN = bytes(byte & 0xC0 != 0 and byte & 0x20 == 0 for byte in range(256))
"""By that byte, whether the page is the process's own: in memory or swapped, and of no file."""


class FilePages:
    """What this process has mapped from files and never written to, at the time this is made."""

    def __init__(self) -> None:
        self._ranges = list(_unchanged()) if sys.platform == "linux" else []

    def release(self, module: nn.Module) -> None:
        """Give back the memory of parameters that only repeat a file; others stay as they are."""
        for weight in module.parameters():
            weight = getattr(weight, "blocks", weight)
            start, end = weight.data_ptr(), weight.data_ptr() + weight.nbytes
            if weight.is_contiguous() and self.around(start, end) is not None:
                _let_go(start, end)

    def around(self, start: int, end: int) -> tuple[int, int] | None:
        """First and last address of the mapping that lies around all of this, or None."""
        found = (one for one in self._ranges if one[0] <= start and end <= one[1])
        return next(found, None)


def written_pages(low: int, high: int) -> Iterator[int]:
    """Addresses of pages between these, which are mapped from a file, that were written to."""
    first = low // mmap.PAGESIZE
    with _PAGES.open("rb", buffering=0) as entries:
        entries.seek(first * _ENTRY)
        own = entries.read((-(-high // mmap.PAGESIZE) - first) * _ENTRY)[_ENTRY - 1 :: _ENTRY]
    own, index = own.translate(_OWN), -1
    while (index := own.find(1, index + 1)) >= 0:
        yield (first + index) * mmap.PAGESIZE


def tells_written(low: int, high: int) -> bool:
    """Whether `written_pages` can be known of a mapping, of which nothing was written to."""
    if sys.byteorder != "little" or not os.access(_PAGES, os.R_OK):
        return False
    ctypes.string_at(low, 1)  # so that there is a page, which some file systems call no file's
    return not any(written_pages(low, high))


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
