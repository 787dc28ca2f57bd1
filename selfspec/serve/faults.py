"""Where an error came from, without what it says: its message may hold what somebody wrote."""

from __future__ import annotations

import traceback


def places(error: BaseException) -> str:
    """The error's kind and the lines of code it came through, those of its causes first."""
    before = error.__cause__ or error.__context__
    lines = [places(before), "\nwhich led to\n"] if before is not None else []
    lines += traceback.format_tb(error.__traceback__)
    return "".join(lines) + type(error).__name__
