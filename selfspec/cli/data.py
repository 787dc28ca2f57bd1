"""`selfspec data`: conversations that the model writes, or that others wrote, as JSON lines."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.cli import common, progress, training
from selfspec.cli.flags import Flag, merged, option_flags, with_flags
from selfspec.errors import InvalidData, InvalidOption, SelfspecError
from selfspec.files import local_path
from selfspec.training.data_options import DataOptions

if TYPE_CHECKING:
    from selfspec.training.formats import Reader
    from selfspec.training.selfgen import Source
    from selfspec.training.writer import Counts, Writer

FLAGS = (
    Flag("output", str, "File to write, .jsonl or .jsonl.gz. Required. A killed run continues it."),
    Flag(
        "source",
        str,
        "Read conversations: .jsonl, .jsonl.gz, .json, or a data set's id. Without it the model "
        "invents them.",
        ("--from",),
    ),
    Flag("openings", str, "File of beginnings of user turns, one a line, \\n for a line break."),
    *training.MODEL,
    training.SKIP_BAD_ROWS,
    *option_flags(DataOptions),
)


@with_flags(*FLAGS)
def data(*, config: common.ConfigFile = None, flags: dict[str, Any]) -> None:
    """Write the text that heads are fitted to. It is the model's own, or that of a file.

    The same command continues a killed run where it was. On several machines, give each its own
    --shard and --output.
    """
    asked = merged(config, flags, FLAGS)
    options = training.options_of(DataOptions, asked)
    training.require(asked, "output")
    if "source" not in asked:
        if options.regenerate:
            raise InvalidOption("regenerate without --from: there is nothing to answer. Give both")
        if options.tokens is None:
            raise InvalidOption("no --tokens. Say how many answer tokens the model should write")
    training.check_given(asked)
    common.emit(f"{asked['output']}: {described(run(asked, options))}\n")
    training.say_next("fit", asked, "--data", asked["output"], "--output", "heads")


def run(asked: dict[str, Any], options: DataOptions) -> Counts:
    """Load, begin or continue the file, write."""
    from selfspec.training.writer import check_output

    check_output(asked["output"])
    with training.writing(asked["output"]):
        return _run(asked, options)


def _run(asked: dict[str, Any], options: DataOptions) -> Counts:
    from selfspec.training import selfgen
    from selfspec.training.records import machine
    from selfspec.training.writer import Writer

    openings = () if "source" in asked else selfgen.read_openings(_path(asked.get("openings")))
    base = training.load_base(asked, writes=True)
    recorded = asdict(options) | {
        "source": identity(asked.get("source")),
        "openings": hashlib.sha256("\n".join(openings).encode()).hexdigest()[:16],
        "skip_bad_rows": asked.get("skip_bad_rows", False),
        "model": base.name,
        "chat_template": base.chat_template,
        "dtype": str(base.backbone.dtype).removeprefix("torch."),
        "fingerprint": base.backbone.fingerprint,
    }
    del recorded["tokens"]  # a file may grow
    writer = Writer(Path(asked["output"]), recorded, machine())
    rates = Rates(writer.counts.answer_tokens)
    if options.tokens is not None and rates.written >= options.tokens:
        common.note(
            f"selfspec: {asked['output']} is finished: it holds {rates.written:,} answer tokens. "
            "Raise --tokens to go on"
        )
        return writer.counts
    with progress.bar("data", "answer tokens") as show:

        def count(tokens: int) -> None:
            rates.generated += tokens
            show(rates.written, options.tokens, rates.line())

        source, reader = source_of(asked, options, base, openings, writer, count)
        try:
            for counts in selfgen.write(source, writer, options):
                rates.written = counts.answer_tokens
                count(0)
            if "source" in asked and not writer.batches:
                raise InvalidData(f"{asked['source']} holds no conversation. Give another --from")
        except KeyboardInterrupt:
            common.note(f"\n{asked['output']}: the same command continues it")
            raise
        except SelfspecError:
            writer.discard_if_empty()
            raise
    if reader is not None:
        reader.report()
    common.note(f"selfspec: {rates.line()}")
    return writer.counts


def source_of(
    asked: dict[str, Any],
    options: DataOptions,
    base: training.Base,
    openings: tuple[str, ...],
    writer: Writer,
    watch: Callable[[int], None],
) -> tuple[Source, Reader[Any] | None]:
    """Where the conversations come from, and the reader of the file if it is one."""
    from selfspec.training.formats import Reader
    from selfspec.training.given import Answered, Converted, converted, talk_of
    from selfspec.training.selfgen import Author, Invented

    tokenizer = base.tokenizer
    skip = asked.get("skip_bad_rows", False)
    if "source" not in asked:
        author = Author(base.backbone, tokenizer, options, watch)
        return Invented(author, openings, writer.records()), None
    if options.regenerate:
        author = Author(base.backbone, tokenizer, options, watch)
        parse_talk = partial(talk_of, tokenizer=tokenizer, system=options.system)
        talks = Reader(asked["source"], parse_talk, skip_bad_rows=skip)
        return Answered(author, talks, writer.batches), talks
    parse = partial(
        converted,
        tokenizer=tokenizer,
        vocab_size=base.backbone.vocab_size,
        max_length=base.backbone.max_positions,
    )
    rows = Reader(asked["source"], parse, skip_bad_rows=skip)
    return Converted(rows, options, writer.batches), rows


def identity(source: str | None) -> str | None:
    """What tells a file from a changed one: its name and size; a data set by its name."""
    path = _path(source)
    if path is None or not path.is_file():
        return source
    return f"{path.name}, {path.stat().st_size} bytes"


def described(counts: Counts) -> str:
    """Counts in words; what did not occur is left out."""
    loops = f"{counts.loops_cut:,} of {counts.answers:,} answers cut where they loop"
    parts = [
        f"{counts.conversations:,} conversations",
        f"{counts.answer_tokens:,} answer tokens",
        f"{loops} ({counts.loop_share:.0%})",
    ]
    dropped = {
        "duplicates": counts.duplicates,
        "user turns without an end": counts.unfinished,
        "empty ones": counts.empty,
        "too long for the model": counts.too_long,
        "bad rows": counts.bad_rows,
    }
    words = [f"{count:,} {name}" for name, count in dropped.items() if count]
    return ", ".join(parts) + (f"; dropped: {', '.join(words)}" if words else "")


@dataclass
class Rates:
    """Tokens and the time that they took."""

    before: int
    """Answer tokens that earlier runs wrote."""
    written: int = field(init=False)
    """Answer tokens in the file."""
    generated: int = 0
    """Tokens of this run, with user turns and what was dropped."""
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        """Begin with what is there."""
        self.written = self.before

    def line(self) -> str:
        """Both rates, in words."""
        seconds = max(time.perf_counter() - self.began, 1e-9)
        kept = (self.written - self.before) / seconds
        return f"{self.generated / seconds:,.0f} tokens/s, {kept:,.0f} answer tokens/s in the file"


def _path(name: str | None) -> Path | None:
    return None if name is None else local_path(name)
