"""Lines that grow batch by batch, in a file that can be killed at any moment and continued.

Comes in: batches of lines. Goes out: OUTPUT, plain or gzipped, and OUTPUT.run.json, which says how
it is made and how many of its bytes are whole batches. Called by `selfgen`.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from selfspec.errors import InvalidData, InvalidOption
from selfspec.training.formats import Reader

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1


@dataclass
class Counts:
    """What became of what was written; the sum of the first six is the number of rows begun."""

    conversations: int = 0
    duplicates: int = 0
    """Dropped: the first user turn was there already."""
    unfinished: int = 0
    """Dropped: the user turn looped, or did not end."""
    empty: int = 0
    """Dropped: the user turn or its first answer has no text."""
    too_long: int = 0
    """Dropped: with its answer it would not fit the model."""
    bad_rows: int = 0
    """Skipped rows of the source."""
    answers: int = 0
    answer_tokens: int = 0
    loops_cut: int = 0
    """Answers that fell into a loop, and end with its first turn."""

    def add(self, answers: Sequence[tuple[int, int]], loops_cut: int = 0) -> None:
        """Add a conversation with answers at [first, end) of its ids."""
        self.conversations += 1
        self.answers += len(answers)
        self.answer_tokens += sum(end - first for first, end in answers)
        self.loops_cut += loops_cut

    @property
    def loop_share(self) -> float:
        """Share of the answers that were cut."""
        return self.loops_cut / self.answers if self.answers else 0.0


class Writer:
    """Appends batches of lines; what it holds is what `run.json` counted last."""

    def __init__(
        self, output: Path, options: Mapping[str, Any], versions: Mapping[str, Any]
    ) -> None:
        """Begin a file, or continue one that was begun with the same options.

        Raises InvalidOption for other options and for a file of another origin, InvalidData for
        one that lost lines.
        """
        self.output = output
        self._record = output.with_name(output.name + ".run.json")
        plain = json.loads(json.dumps(dict(options)))  # as it will be read: lists, no tuples
        self._state: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
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
                self._begin()
        except OSError as error:
            raise InvalidOption(f"cannot write {output}: {error}") from error

    @property
    def batches(self) -> int:
        """How many are written."""
        return len(self._state["seeds"])

    @property
    def counts(self) -> Counts:
        """Of all batches so far; a copy."""
        return Counts(**self._state["counts"])

    def append(self, lines: Sequence[str], seed: int, counts: Counts) -> None:
        """Add a batch. Raises InvalidOption if the disk does not take it."""
        block = "".join(f"{line}\n" for line in lines).encode()
        if block and self.output.suffix == ".gz":
            block = gzip.compress(block, mtime=0)  # members in a row are one file, and no clock
        try:
            with self.output.open("ab") as file:
                file.write(block)
                file.flush()
                os.fsync(file.fileno())
            self._state["seeds"].append(seed)
            self._state["bytes"] += len(block)
            self._state["counts"] = asdict(counts)
            self._save()
        except OSError as error:
            raise InvalidOption(f"cannot write {self.output}: {error}") from error

    def records(self) -> Iterator[dict[str, Any]]:
        """What is written so far."""
        return iter(Reader(self.output, lambda record: record))

    def _begin(self) -> None:
        if self.output.exists():
            raise InvalidOption(
                f"{self.output} exists and there is no {self._record.name} to continue it by. "
                "Give another --output"
            )
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self._save()
        self.output.touch()

    def _resume(self, options: dict[str, Any]) -> None:
        """Take over what is recorded and cut off what a killed run wrote behind it."""
        found = self._read()
        for name in options | found["options"]:
            before, now = found["options"].get(name), options.get(name)
            if before != now:
                raise InvalidOption(
                    f"{self.output} was begun with {name} {before}, not {now}. Give the same "
                    "options to continue it, or another --output"
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
        os.truncate(self.output, found["bytes"])
        self._state = found

    def _read(self) -> dict[str, Any]:
        """The record. Raises InvalidData if it is none of this format."""
        try:
            found = json.loads(self._record.read_bytes())
            fits = found["format_version"] == FORMAT_VERSION and found.keys() == self._state.keys()
            fits = fits and found["counts"].keys() == {entry.name for entry in fields(Counts)}
        except (ValueError, LookupError, TypeError, AttributeError):
            fits = False
        if not fits:
            raise InvalidData(
                f"{self._record} is no record of this version of selfspec data. Delete it and "
                f"{self.output.name} to start over"
            )
        return dict(found)

    def _save(self) -> None:
        """Replace the record: it is always whole."""
        new = self._record.with_name(self._record.name + ".new")
        with new.open("w", encoding="utf-8") as file:
            json.dump(self._state, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._record)
