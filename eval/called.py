"""How a script was called, for the records that it writes: as one would type it on any machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def command() -> str:
    """`python -m eval.NAME` with its arguments; of a path elsewhere only the name."""
    spec = sys.modules["__main__"].__spec__
    program = ["-m", spec.name.removesuffix(".__main__")] if spec else [Path(sys.argv[0]).name]
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return shlex.join(["python", *program, *words])
