"""What a killed run goes on from: a fit's whole state in one file, and records of any run.

Comes in: named tensors and a record. Goes out: the same, bit for bit. Called by `fit`; `record_of`
by all that read records again. The only randomness of a fit, the order of batches, follows from its
seed and step, so nothing else is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from selfspec import files
from selfspec.errors import InvalidData, InvalidOption, first_line
from selfspec.typed import annotations_of, check_keys, check_types, shown
from selfspec.untrusted import parse_json

FILE = "checkpoint.safetensors"

_RECORD = "selfspec"  # what marks a file as ours has to stand near its beginning
_MOST_SHOWN = 100  # characters of an option and its two values

Kind = TypeVar("Kind")


def record_of(kind: type[Kind], values: Any) -> Kind:
    """A dataclass made of plain values from a file, their names and types checked.

    Raises InvalidOption naming the first entry that is wrong.
    """
    if not isinstance(values, dict):
        raise InvalidOption(f"it is {shown(values)}, expected a mapping")
    hints = annotations_of(kind)
    check_keys(values, hints, "entry")
    check_types(values, hints)
    try:
        return kind(**values)
    except TypeError as error:  # an entry is missing
        raise InvalidOption(first_line(error).partition("() ")[2]) from error


def save(path: Path, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
    """Replace the checkpoint at `path`. Raises CannotWrite, with the one before it whole."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with files.replacing(path) as new:
        save_file(whole, new, {_RECORD: json.dumps(record)})


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and record. Raises InvalidData if damaged."""
    try:
        with safe_open(path, "pt") as file:
            record = parse_json((file.metadata() or {})[_RECORD], "its record")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
    except (OSError, SafetensorError, InvalidData, KeyError, RuntimeError) as error:
        raise damaged(path, error) from error
    if not isinstance(record, dict) or not isinstance(record.get("job"), dict):
        raise damaged(path, "it does not say of what")
    return tensors, record


def damaged(path: Path, reason: object) -> InvalidData:
    """What to raise for a file that a fit cannot go on from."""
    words = " ".join(str(reason).split())
    return InvalidData(f"{path} is no checkpoint: {words}. Remove it to start over")


def remove(workplace: Path) -> None:
    """Delete the checkpoint, and its folder if nothing else is in it. Raises CannotWrite."""
    path = workplace / FILE
    if not path.is_symlink() and path.is_file():
        path.unlink(missing_ok=True)
    with suppress(OSError):
        workplace.rmdir()


def require_same(
    place: Path, begun_with: Mapping[str, Any], given: Mapping[str, Any], way_out: str
) -> None:
    """Raise InvalidOption naming the first entry in which a run is not the one begun at `place`.

    `way_out` is what one may do there besides giving the same options or another --output.
    """
    for name in sorted(begun_with.keys() | given.keys()):
        before, now = begun_with.get(name), given.get(name)
        if before != now:
            words = f"{name} {before}, not {now}"
            words = words if len(words) <= _MOST_SHOWN else f"another {name}"
            raise InvalidOption(
                f"{place} was begun with {words}. Give the same options to go on, another "
                f"--output, or {way_out}"
            )
