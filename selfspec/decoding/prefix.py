"""How far two texts agree."""

from __future__ import annotations

from collections.abc import Sequence


def common(old: Sequence[int], new: Sequence[int]) -> int:
    """Ids that two texts share from the start."""
    count = min(len(old), len(new))
    if old[:count] == new[:count]:
        return count
    return next(at for at in range(count) if old[at] != new[at])
