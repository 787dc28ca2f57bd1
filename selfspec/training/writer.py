"""Lines that grow batch by batch, in a file that can be killed at any moment and continued.

Comes in: batches of lines. Goes out: OUTPUT, plain or gzipped, and OUTPUT.run.json, which says how
it is made and how many of its bytes are whole batches. Called by `selfgen`.
"""

from __future__ import annotations

import copy
import gzip
import json
import logging
import os
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from selfspec import files
from selfspec.errors import CannotWrite, InvalidData, InvalidOption
from selfspec.training.formats import Reader, encoded
from selfspec.untrusted import read_json

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
"""1: counts were not kept by family."""


DROPPED = {
    "duplicates": "duplicates",
    "alike": "answers that were there nearly so",
    "excluded": "rows with words of an excluded text",
    "unfinished": "user turns without an end",
    "empty": "empty ones",
    "too_long": "too long for the model",
    "bad_rows": "bad rows",
}
"""Why a row is not in the file, and how people read it."""

KEPT = ("rows", "tokens", "answers", "answer_tokens", "loops_cut")
"""What is counted of rows in the file; `tokens` are all of a row, `loops_cut` answers that fell
into a loop, and end with its first turn."""


@dataclass
class Counts:
    """What became of rows, by family of a recipe; rows from elsewhere have the family ""."""

    families: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, family: str, name: str, count: int = 1) -> None:
        """Count one of KEPT or DROPPED."""
        found = self.families.setdefault(family, dict.fromkeys((*KEPT, *DROPPED), 0))
        found[name] += count

    def add_row(self, record: Mapping[str, Any]) -> None:
        """Count a record that goes into the file."""
        ids, answers = encoded(dict(record), None)
        values = (1, len(ids), len(answers), sum(end - first for first, end in answers))
        for name, value in zip(KEPT, (*values, record.get("loops", 0)), strict=True):
            self.add(record.get("family", ""), name, value)

    def total(self, name: str) -> int:
        """Of all families."""
        return sum(found[name] for found in self.families.values())

    def dropped(self) -> dict[str, int]:
        """Of all families, in words for people."""
        return {words: self.total(name) for name, words in DROPPED.items()}

    @property
    def answer_tokens(self) -> int:
        """Tokens of answers in the file."""
        return self.total("answer_tokens")


class Writer:
    """Appends batches of lines; what it holds is what `run.json` counted last."""

    def __init__(
        self, output: Path, options: Mapping[str, Any], versions: Mapping[str, Any]
    ) -> None:
        """Begin a file, or continue one that was begun with the same options.

        Raises InvalidOption for other options, CannotWrite for a file of another origin,
        InvalidData for one that lost lines.
        """
        self.output = check_output(output)
        self._record = _record_of(output)
        plain = json.loads(json.dumps(dict(options)))  # as it will be read: lists, no tuples
        self._state: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "made_by": "selfspec data",
            "options": plain,
            "versions": dict(versions),
            "counts": asdict(Counts()),
            "seeds": [],
            "bytes": 0,
        }
        try:
            if self._record.exists():
                self._resume(plain)
            else:
                self._save()
                self.output.touch()
        except OSError as error:
            raise _cannot_write(output, error) from error

    @property
    def batches(self) -> int:
        """How many are written."""
        return len(self._state["seeds"])

    @property
    def counts(self) -> Counts:
        """Of all batches so far; a copy."""
        return Counts(copy.deepcopy(self._state["counts"]["families"]))

    def append(self, lines: Sequence[str], seed: int, counts: Counts) -> None:
        """Add a batch. Raises CannotWrite if the disk is full; earlier batches stay whole."""
        block = "".join(f"{line}\n" for line in lines).encode()
        if block and self.output.suffix == ".gz":
            block = gzip.compress(block, mtime=0)  # members in a row are one file, and no clock
        size = self._state["bytes"]
        try:
            with self.output.open("ab") as file:
                file.write(block)
                file.flush()
                os.fsync(file.fileno())
            state = {"seeds": [*self._state["seeds"], seed], "counts": asdict(counts)}
            files.write(self._record, _as_json(self._state | state | {"bytes": size + len(block)}))
            self._state |= state | {"bytes": size + len(block)}
        except (OSError, CannotWrite) as error:
            with suppress(OSError):
                os.truncate(self.output, size)  # gives back what a full disk took of the batch
            raise _cannot_write(self.output, error) from error

    def discard_if_empty(self) -> None:
        """Remove what was begun and has no batch: its source could not be read at all."""
        if not self.batches:
            self.output.unlink(missing_ok=True)
            self._record.unlink(missing_ok=True)

    def records(self) -> Iterator[dict[str, Any]]:
        """What is written so far."""
        return iter(Reader(self.output, lambda record: record))

    def _resume(self, options: dict[str, Any]) -> None:
        """Take over what is recorded and cut off what a killed run wrote behind it."""
        found = self._read()
        for name in options | found["options"]:
            before, now = found["options"].get(name), options.get(name)
            if before != now:
                raise InvalidOption(
                    f"{self.output} was begun with {name} {before}, not {now}. Give the same "
                    f"options to continue it, another --output, or remove {self._record} with it"
                )
        changed = {
            k: v for k, v in self._state["versions"].items() if found["versions"].get(k) != v
        }
        if changed:
            logger.warning("%s was begun with other versions than %s", self.output, changed)
        self.output.touch()  # a run may be killed between its record and its file
        size = self.output.stat().st_size
        if size < found["bytes"]:
            raise InvalidData(
                f"{self.output} has {size} bytes, its record says {found['bytes']}. Delete both to "
                "start over"
            )
        self._require_line_end(found["bytes"])
        os.truncate(self.output, found["bytes"])
        self._state = found

    def _require_line_end(self, size: int) -> None:
        """Raise InvalidData unless whole batches end behind `size` bytes: a cut elsewhere loses."""
        with self.output.open("rb") as file:
            if self.output.suffix == ".gz":
                whole = _ends_whole(file, size)
            else:
                file.seek(max(0, size - 1))
                whole = size == 0 or file.read(1) == b"\n"
        if not whole:
            raise InvalidData(
                f"{self._record} says that {size} bytes of {self.output.name} are whole, but no "
                "line ends there. Give another --output"
            )

    def _read(self) -> dict[str, Any]:
        """The record. Raises InvalidData if it is none of this format."""
        try:
            found = read_json(self._record)
            fits = _is_record(found, self._state.keys())
        except InvalidData:
            fits = False
        if not fits:
            raise InvalidData(
                f"{self._record} is no record of this version of selfspec data. Delete it and "
                f"{self.output.name} to start over"
            )
        return dict(found)

    def _save(self) -> None:
        """Replace the record: it is always whole."""
        files.write(self._record, _as_json(self._state))


def check_output(output: str | Path) -> Path:
    """The name of a file that is new, or that its record lets `Writer` continue.

    Asked before a model is loaded. Raises CannotWrite.
    """
    path = Path(output)
    try:
        record = _record_of(path) if path.name else path
        if not path.name or not (path.exists() or record.exists() or path.is_symlink()):
            return files.check_file(output)
        for name in (path, record):
            if name.is_symlink() or (name.exists() and not name.is_file()):
                raise CannotWrite(f"{name} is a link, a folder or a device. Name a file")
        if not record.exists():
            raise CannotWrite(
                f"{path} exists and there is no {record.name} to continue it by. Give another "
                "--output"
            )
    except (OSError, ValueError) as error:
        raise _cannot_write(path, error) from error
    return path


def template_of(output: Path) -> str | None:
    """The chat template that a file of `selfspec data` was written with, if not the model's own."""
    try:
        found = read_json(_record_of(output))
        template = found["options"]["chat_template"]
    except (InvalidData, KeyError, TypeError, ValueError):
        return None
    return template if isinstance(template, str) else None


def _ends_whole(file: IO[bytes], size: int) -> bool:
    """Whether the first `size` bytes are gzip members from end to end."""
    member, inside = zlib.decompressobj(wbits=31), False
    try:
        while size > 0 and (block := file.read(min(size, 1 << 16))):
            size -= len(block)
            while block:
                member.decompress(block)
                block, inside = member.unused_data, not member.eof
                if member.eof:
                    member = zlib.decompressobj(wbits=31)
    except zlib.error:
        return False
    return not inside


def _record_of(output: Path) -> Path:
    return output.with_name(output.name + ".run.json")


def _as_json(state: Mapping[str, Any]) -> str:
    return json.dumps(state, indent=1) + "\n"


def _cannot_write(path: Path, error: Exception) -> CannotWrite:
    if isinstance(error, CannotWrite):
        return error
    reason = getattr(error, "strerror", None) or str(error)
    return CannotWrite(
        f"cannot write {path}: {reason}. What was written before is whole: make room, or name "
        "another place, and run the same command again"
    )


def _is_record(found: Any, keys: Collection[str]) -> bool:
    """Whether JSON is what `Writer` saves, with counts that can be counts."""
    if not isinstance(found, dict) or found.keys() != set(keys):
        return False
    counts, seeds = found["counts"], found["seeds"]
    families = counts.get("families") if isinstance(counts, dict) else None
    if not (isinstance(families, dict) and isinstance(seeds, list)):
        return False
    if not (isinstance(found["options"], dict) and isinstance(found["versions"], dict)):
        return False
    names = {*KEPT, *DROPPED}
    if any(not isinstance(f, dict) or f.keys() != names for f in families.values()):
        return False
    numbers = [number for family in families.values() for number in family.values()]
    numbers += [found["format_version"], found["bytes"], *seeds]
    whole = all(type(number) is int and 0 <= number < 2**63 for number in numbers)
    return whole and found["format_version"] == FORMAT_VERSION
