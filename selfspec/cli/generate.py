"""`selfspec generate` and `demo`: prompts in, answers out, as text while they come or as JSON."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec import files, untrusted
from selfspec.cli import base
from selfspec.cli.base import GENERATION, LOADING, SHARED, SPECULATION, Asked, with_flags
from selfspec.config import DEFAULT_MAX_NEW_TOKENS
from selfspec.decoding.stats import MODEL
from selfspec.errors import CannotWrite, InvalidData, InvalidOption, SelfspecError
from selfspec.hub.models import heads_name

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import Tensor

    from selfspec.api.speculator import Speculator
    from selfspec.api.stream import Generation

Messages = str | list[dict[str, str]]


@with_flags(*SHARED)
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", help="The question; without it, --file or standard input."
        ),
    ] = None,
    *,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="Read the prompt from a file.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help='Answer many: {"prompt": ".."} a line.'),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Answers to --prompts, a JSON line each."),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", hidden=True, help="Replace an output that is there already."),
    ] = False,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency", metavar="INTEGER", min=1, hidden=True, help="Prompts answered at once."
        ),
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            "--kv-memory",
            metavar="SIZE",
            hidden=True,
            help="For keys and values of many prompts: 500MB, 2GB. Built in: half of what is free.",
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt, without chat template.")
    ] = False,
    system: base.SystemPrompt = None,
    stats: base.ShowStats = None,
    as_json: base.AsJson = False,
    asked: Asked,
) -> None:
    """Answer a prompt, or a file of them. Drafts change no token."""
    if raw and system is not None:
        raise InvalidOption("--raw and --system at once: a raw prompt has no messages")
    options = base.answering(asked) | {"raw": raw}
    if prompts is not None or output is not None:
        if prompt is not None or file is not None:
            raise InvalidOption("--prompts and another prompt at once. Leave one of them out")
        if prompts is None or output is None:
            raise InvalidOption("--prompts and --output go together. Give both")
        room = {
            "most": concurrency or MOST_TEXTS,
            "kv_memory": base.bytes_of("kv_memory", kv_memory),
        }
        files.check_file(output, overwrite=overwrite, reads=(prompts, *base.inputs(asked)))
        found = read(prompts, system=system, raw=raw)
        base.emit(answer_all(found, asked, options, output, room, overwrite=overwrite))
        return
    if concurrency is not None or kv_memory is not None:
        raise InvalidOption("--concurrency and --kv-memory are for --prompts. Leave them out")
    text = base.read_prompt(prompt, file, raw=raw)
    speculator = base.load(asked)
    messages: Messages = text if raw else base.conversation(system, text)
    if as_json:
        answer = speculator.generate(messages, **options)
        base.emit(json.dumps(_described(speculator, answer, asked, options)) + "\n")
    else:
        answer = _write(speculator, messages, options)
        base.say_if_cut(answer, asked)
    if stats is not None:
        base.note(base.statistics(answer, stats))


def _write(speculator: Speculator, messages: Messages, options: dict[str, Any]) -> Generation:
    """Write the answer while it comes, with a newline at its end."""
    last = ""
    stream = speculator.stream(messages, **options)
    for piece in stream:
        base.emit(piece)
        last = piece
    if not last.endswith("\n"):
        base.emit("\n")
    return stream.result


def _described(
    speculator: Speculator, answer: Generation, asked: Asked, options: dict[str, Any]
) -> dict[str, Any]:
    """What `--json` prints."""
    heads = speculator.heads
    found = None if heads is None or heads.folder is None else heads_name(heads.folder)
    return _facts(answer) | {
        "model": speculator.label,
        "heads": None if heads is None else asked.get("heads") or found,
        "options": speculator.options.described() | options,
    }


def _facts(answer: Generation) -> dict[str, Any]:
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "stop_reason": answer.stop_reason,
        "stats": answer.stats.to_dict(),
    }


# --- a file of prompts: answers are written beside the output as they come, and the same command
# goes on behind them; when all are there they become the output, in the order of the prompts

MOST_TEXTS = 32
"""As the engine has it, which takes torch to ask."""

_MADE_BY = {"made_by": "selfspec generate"}


def read(path: Path, *, system: str | None, raw: bool) -> list[Messages]:
    """The prompts of a file: a line each, `{"prompt": "…"}` or `{"messages": […]}`.

    Raises InvalidData naming the line, also for a file without prompts.
    """
    found = [
        _prompt(text, f"{path}, line {number}", system, raw=raw)
        for number, text in untrusted.json_lines(path, base.MOST_PROMPT_BYTES)
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
    if keys == ["prompt"]:
        if not isinstance(value, str) or not value.strip():
            raise InvalidData(f'{where}: "prompt" is no text, or empty')
        return value if raw else base.conversation(system, value)
    if raw or system is not None or not isinstance(value, list):
        wrong = "is no list" if not isinstance(value, list) else "stand beside --raw or --system"
        raise InvalidData(f'{where}: "messages" {wrong}. Give "prompt", or leave that out')
    return value


def answer_all(
    prompts: list[Messages],
    asked: Asked,
    options: dict[str, Any],
    output: Path,
    room: dict[str, Any],
    *,
    overwrite: bool,
) -> str:
    """Write the answers, say how many. Raises what `Speculator.generate` raises, and CannotWrite.

    A prompt that cannot be answered has a line that says why.
    """
    with files.locked(output):
        files.check_file(output, overwrite=overwrite)  # another run may have ended since
        known = {"prompts": prompts, **base.picked(asked, SHARED), **options}
        run = Run.begun(output, known, overwrite=overwrite)
        speculator = base.load(asked)
        numbers = [number for number in range(len(prompts)) if number not in run.lines]
        seed = options.pop("seed", None)
        with base.bar("generate", "answers") as show:
            show(len(run.lines), len(prompts), found=True)
            for place, found in speculator.generate_each(
                (prompts[number] for number in numbers),
                seeds=None if seed is None else (seed + number for number in numbers),
                **room,
                **options,
            ):
                run.add(numbers[place], found)
                show(len(run.lines), len(prompts))
        return run.finish()


@dataclass
class Run:
    """Answers to a file of prompts that are written so far, by number of the prompt."""

    output: Path
    partial: Path
    lines: dict[int, str] = field(default_factory=dict)

    @classmethod
    def begun(cls, output: Path, asked: dict[str, Any], *, overwrite: bool) -> Run:
        """Begun anew, or gone on with.

        With `overwrite` a run with other prompts or options gives way; without, it and a damaged
        file raise CannotWrite.
        """
        run = cls(output, output.with_name(f"{output.name}.partial"))
        mark = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()
        head = json.dumps(_MADE_BY | {"asked": mark})
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

    def add(self, number: int, found: Generation | SelfspecError) -> None:
        """One more answer, or why there is none."""
        facts = {"error": str(found)} if isinstance(found, SelfspecError) else _facts(found)
        text = json.dumps({"index": number, **_MADE_BY, **facts}, ensure_ascii=False)
        files.append(self.partial, text)
        self.lines[number] = text

    def finish(self) -> str:
        """All answers, in the order of their prompts, become the output; says how many."""
        lines = [self.lines[number] for number in sorted(self.lines)]
        files.write(self.output, "".join(f"{line}\n" for line in lines))
        self.partial.unlink()
        found = [json.loads(line) for line in lines]
        tokens = sum(len(line.get("token_ids", ())) for line in found)
        errors = sum("error" in line for line in found)
        failed = f", {errors} without an answer" if errors else ""
        return f"{self.output}: {len(found)} answers, {tokens} tokens{failed}\n"


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


# --- demo

_PROMPT = "Explain in a few sentences how a rainbow forms."
_THEIRS, _OURS = "Hugging Face generate", "selfspec"
_WARM_UP_TOKENS = 4
_NEAR = 0.05
"""A difference in speed that one run does not tell from none."""


@with_flags(*LOADING, *SPECULATION, *(flag for flag in GENERATION if flag.name == "max_new_tokens"))
def demo(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The question.")] = _PROMPT,
    *,
    asked: Asked,
) -> None:
    """Compare with Hugging Face's generate. Both answer one prompt, one after the other.

    In float32 unless --dtype says otherwise: with fewer digits, near ties between tokens may fall
    otherwise in two programs. Exit code 1 if the texts differ.
    """
    count = base.answering(asked).get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    text = base.read_prompt(prompt)
    found = compared(base.load({"dtype": "float32"} | asked), text, count)
    base.emit(found.verdict() + "\n")
    if found.differs_at is not None:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Compared:
    """Two answers to one prompt."""

    theirs: list[int]
    theirs_s: float
    ours: Generation
    ours_s: float

    @property
    def differs_at(self) -> int | None:
        """The first place, from 1, at which the tokens are others; None: they are the same."""
        theirs, ours = self.theirs, self.ours.token_ids
        if theirs == ours:
            return None
        pairs = enumerate(zip(theirs, ours, strict=False), start=1)
        both = min(len(theirs), len(ours))
        return next((place for place, (one, other) in pairs if one != other), both + 1)

    def verdict(self) -> str:
        """In two lines; speeds were measured, so nothing is guessed."""
        same = "same text: yes"
        if self.differs_at is not None:
            same = (
                f"same text: no, token {self.differs_at} is another one (a near tie may be rounded "
                "otherwise; --dtype float64 tells)"
            )
        gain = self.theirs_s / self.ours_s
        words = "about as fast" if gain > 1 - _NEAR else f"{1 / gain:.1f}× slower"
        words = f"{gain:.1f}× faster" if gain > 1 + _NEAR else words
        return f"{self.ours.stats.summary()}\n{same}; {words}"


def compared(speculator: Speculator, text: str, count: int) -> Compared:
    """Both answers, greedy and from the same weights, shown while they are written.

    One after the other, because two at once would share the processor, and warmed up before their
    clocks start.
    """
    from selfspec.api.text import encode
    from selfspec.model.weights import keep_numbers

    keep_numbers(speculator.model)  # theirs runs the model itself, at its best
    ids = encode(speculator.tokenizer, text).to(speculator.backbone.device)
    for write in (theirs, ours):
        write(speculator, ids, _WARM_UP_TOKENS, lambda *_: None)
    with panels((_THEIRS, _OURS), speculator.backbone.num_layers) as panel:
        with panel(_THEIRS) as show:
            start = time.perf_counter()
            their_tokens = theirs(speculator, ids, count, show)
            theirs_s = time.perf_counter() - start
        with panel(_OURS) as show:
            start = time.perf_counter()
            answer = ours(speculator, ids, count, show)
            ours_s = time.perf_counter() - start
    return Compared(their_tokens, theirs_s, answer, ours_s)


Show = Callable[[str, str, int], None]
"""Takes text, and who gave it: a source, and an exit layer."""


def theirs(speculator: Speculator, ids: Tensor, count: int, show: Show) -> list[int]:
    """By transformers' own generate."""
    from transformers import TextStreamer

    from selfspec.eval.methods import METHODS

    class Shown(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: ARG002
            show(text, MODEL, 0)

    tokenizer: Any = speculator.tokenizer
    streamer = Shown(tokenizer, skip_prompt=True, skip_special_tokens=True)
    return METHODS["hugging-face"].decode(speculator, ids, count, {}, streamer).token_ids


def ours(speculator: Speculator, ids: Tensor, count: int, show: Show) -> Generation:
    """By our runtime."""
    stream = speculator.stream(ids, max_new_tokens=count, do_sample=False)
    for piece in stream:
        show(piece, *stream.giver)
    return stream.result


@contextmanager
def panels(
    titles: tuple[str, str], num_layers: int
) -> Iterator[Callable[[str], AbstractContextManager[Show]]]:
    """Two texts while they are written: side by side on a terminal, else one below the other.

    What it gives begins the text of a title; its clock runs while that is open.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if not console.is_terminal:
        yield _below
        return
    side = _Side(titles, num_layers)
    with Live(side, console=console, refresh_per_second=12, vertical_overflow="visible"):
        yield side.begin


@contextmanager
def _below(title: str) -> Iterator[Show]:
    base.emit(f"{title}:\n")
    start = time.perf_counter()
    yield lambda text, *_: base.emit(text)
    base.emit(f"\n({time.perf_counter() - start:.1f} s)\n\n")


class _Side:
    """What the terminal shows now."""

    def __init__(self, titles: tuple[str, str], num_layers: int) -> None:
        self._pieces: dict[str, list[tuple[str, str]]] = {title: [] for title in titles}
        self._clocks = dict.fromkeys(titles, "then")
        self._began = 0.0
        self._running = ""
        self._num_layers = num_layers
        self._sources: dict[str, str] = {}

    @contextmanager
    def begin(self, title: str) -> Iterator[Show]:
        from selfspec.api.givers import Giver

        def show(text: str, source: str, layer: int) -> None:
            giver = Giver(source, layer)
            style = giver.colour(self._num_layers) or ""
            self._pieces[title].append((text, style))
            self._sources.setdefault(giver.words, style)

        self._began, self._running = time.perf_counter(), title
        yield show
        self._tick()
        self._running = ""

    def _tick(self) -> None:
        if self._running:
            self._clocks[self._running] = f"{time.perf_counter() - self._began:.1f} s"

    def __rich__(self) -> RenderableType:
        """Both texts, and what the colours mean."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        self._tick()
        grid = Table.grid(expand=True)
        texts = []
        for title, pieces in self._pieces.items():
            grid.add_column(ratio=1)
            text = Text.assemble(*pieces)
            texts.append(Panel(text, title=title, subtitle=self._clocks[title]))
        grid.add_row(*texts)
        given = Text("given by: ", "dim")
        given.append_text(Text(", ", "dim").join(Text(*one) for one in self._sources.items()))
        return Group(grid, given)
