"""`selfspec generate --prompts FILE --output FILE`: many prompts in, an answer a line out.

Answers are written beside the output as they come; the same command goes on behind them. When all
are there they become the output, in the order of the prompts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from selfspec import files, untrusted
from selfspec.cli import common, progress, sizes
from selfspec.cli.settings import Settings
from selfspec.errors import CannotWrite, InvalidData, SelfspecError

if TYPE_CHECKING:
    from selfspec.api.speculator import Speculator
    from selfspec.api.stream import Generation

Messages = str | list[dict[str, str]]

MOST_TEXTS = 32
"""As the engine has it, which takes torch to ask."""

MADE_BY = "selfspec generate"


def read(path: Path, *, system: str | None, raw: bool) -> list[Messages]:
    """The prompts of a file: a line each, `{"prompt": "…"}` or `{"messages": […]}`.

    Raises InvalidData naming the line, also for a file without prompts.
    """
    found = [
        _prompt(text, f"{path}, line {number}", system, raw=raw)
        for number, text in untrusted.json_lines(path, common.MOST_PROMPT_BYTES)
    ]
    if not found:
        raise InvalidData(f'{path} holds no prompts. Give lines like {{"prompt": "…"}}')
    return found


def _prompt(text: str, where: str, system: str | None, *, raw: bool) -> Messages:
    line = untrusted.parse_json(text, where)
    keys = sorted(line) if isinstance(line, dict) else None
    if keys not in (["messages"], ["prompt"]):
        held = "no object" if keys is None else f"the keys {', '.join(keys) or 'none'}"
        raise InvalidData(f'{where} holds {held}, expected one of "prompt" and "messages"')
    value = line[keys[0]]
    if keys == ["messages"]:
        if raw or system is not None or not isinstance(value, list):
            wrong = (
                "is no list" if not isinstance(value, list) else "stand beside --raw or --system"
            )
            raise InvalidData(f'{where}: "messages" {wrong}. Give "prompt", or leave that out')
        return value
    if not isinstance(value, str) or not value.strip():
        raise InvalidData(f'{where}: "prompt" is no text, or empty')
    return value if raw else common.conversation(value, system)


class Room(NamedTuple):
    """How many prompts are answered at once, and the memory for their keys and values."""

    texts: int
    kv_memory: int | None

    @classmethod
    def of(cls, texts: int | None, kv_memory: str | None) -> Room:
        """From flags; None: built in. Raises InvalidOption for what is no size."""
        size = None if kv_memory is None else sizes.parsed("kv_memory", kv_memory)
        return cls(MOST_TEXTS if texts is None else texts, size)


def answer(
    prompts: list[Messages], asked: Settings, output: Path, room: Room, *, overwrite: bool
) -> dict[str, Any]:
    """Write the answers; returns counts. Raises what `Speculator.generate` raises, and CannotWrite.

    A prompt that cannot be answered has a line that says why.
    """
    with files.locked(output):
        files.check_file(output, overwrite=overwrite)  # another run may have ended since
        run = _Run.of(output, {"prompts": prompts} | asdict(asked), overwrite=overwrite)
        speculator = common.load(asked)
        with progress.bar("generate", "answers") as show:
            show(len(run.lines), len(prompts), found=True)
            for line in _answers(speculator, prompts, asked, room, run):
                run.add(line)
                show(len(run.lines), len(prompts))
        return run.finish()


def _answers(
    speculator: Speculator, prompts: list[Messages], asked: Settings, room: Room, run: _Run
) -> Iterator[dict[str, Any]]:
    """Lines of prompts that have none yet, as they are complete."""
    numbers = [number for number in range(len(prompts)) if number not in run.lines]
    options = dict(asked.generation)
    seed = options.pop("seed", None)
    for number, found in speculator.generate_each(
        (prompts[number] for number in numbers),
        most=room.texts,
        kv_memory=room.kv_memory,
        seeds=None if seed is None else (seed + number for number in numbers),
        **options,
    ):
        yield _line(numbers[number], found)


def _line(number: int, found: Generation | SelfspecError) -> dict[str, Any]:
    if isinstance(found, SelfspecError):
        return {"index": number, "made_by": MADE_BY, "error": str(found)}
    return {
        "index": number,
        "made_by": MADE_BY,
        "text": found.text,
        "token_ids": found.token_ids,
        "stop_reason": found.stop_reason,
        "stats": found.stats.to_dict(),
    }


@dataclass
class _Run:
    """What is written so far."""

    output: Path
    partial: Path
    lines: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, output: Path, asked: dict[str, Any], *, overwrite: bool) -> _Run:
        """Begun anew, or gone on with.

        With `overwrite` a run with other prompts or options gives way; without, it and a damaged
        file raise CannotWrite.
        """
        run = cls(output, output.with_name(f"{output.name}.partial"))
        mark = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()
        head = json.dumps({"made_by": MADE_BY, "asked": mark})
        if files.check_file(run.partial, overwrite=True).exists():
            first, *lines = _complete_lines(run.partial)
            if first == head:
                run.lines = dict(_answered(text, run.partial) for text in lines)
            elif not overwrite:
                raise CannotWrite(
                    f"{run.partial} belongs to a run with other prompts or options. Go on with "
                    "those, or remove it"
                )
        files.write(run.partial, "".join(f"{text}\n" for text in (head, *run.lines.values())))
        return run

    def add(self, line: dict[str, Any]) -> None:
        """One more answer."""
        text = json.dumps(line, ensure_ascii=False)
        files.append(self.partial, text)
        self.lines[line["index"]] = text

    def finish(self) -> dict[str, Any]:
        """All answers, in the order of their prompts, become the output."""
        lines = [self.lines[number] for number in sorted(self.lines)]
        files.write(self.output, "".join(f"{line}\n" for line in lines))
        self.partial.unlink()
        found = [json.loads(line) for line in lines]
        tokens = sum(len(line.get("token_ids", ())) for line in found)
        return {
            "answers": len(found),
            "errors": sum("error" in line for line in found),
            "tokens": tokens,
        }


def _complete_lines(path: Path) -> list[str]:
    """The first, maybe empty, and those behind it; a last one that a killed run cut off is none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CannotWrite(f"cannot go on with {path}: {error.strerror}") from error
    return text[: text.rfind("\n") + 1].split("\n")[:-1] or [""]


def _answered(text: str, path: Path) -> tuple[int, str]:
    """Which prompt a line answers. Raises CannotWrite for what is no such line."""
    with suppress(InvalidData):
        line = untrusted.parse_json(text, str(path))
        if isinstance(line, dict) and isinstance(line.get("index"), int):
            return line["index"], text
    raise CannotWrite(f"{path} is damaged. Remove it to begin anew")
