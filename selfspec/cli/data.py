"""`selfspec data`: conversations that the model writes, or that others wrote, as JSON lines."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.cli import common, progress, training
from selfspec.cli.flags import Flag, inputs, merged, option_flags, with_flags
from selfspec.errors import InvalidData, InvalidOption, SelfspecError
from selfspec.files import local_path
from selfspec.training.options import DataOptions

if TYPE_CHECKING:
    from selfspec.training.recipe import Passages, Recipe
    from selfspec.training.selfgen import Counts, Source, Writer
    from selfspec.training.text import Reader

FLAGS = (
    Flag("output", str, "File to write, .jsonl or .jsonl.gz. Required. A killed run continues it."),
    Flag(
        "source",
        str,
        "Read conversations: .jsonl, .jsonl.gz, .json, or a data set's id. Without it prompts come "
        "from a recipe.",
        ("--from",),
    ),
    Flag("recipe", str, "YAML file of prompt families; without it the built-in one."),
    Flag("passages", str, "Folder of .txt, .md and .rst files to ask about; de/ for German ones."),
    Flag(
        "questions", str, "File of prompts of your own, a tenth of the rows until all were asked."
    ),
    Flag(
        "exclude",
        str,
        "Files of a benchmark, with commas between: no row shares eight words in a "
        "row with them; those of a recipe none with the built-in suite either.",
    ),
    Flag("endpoint", str, "URL of an OpenAI server that answers in the model's place."),
    *training.MODEL,
    training.SKIP_BAD_ROWS,
    *option_flags(DataOptions),
)


@with_flags(*FLAGS)
def data(*, config: common.ConfigFile = None, flags: dict[str, Any]) -> None:
    """Write the text that heads are fitted to. The model answers prompts of many kinds.

    The same command continues a killed run where it was. On several machines, give each its own
    --shard and --output. How far it is stands in OUTPUT.status.
    """
    asked = merged(config, flags, FLAGS)
    options = training.options_of(DataOptions, asked)
    training.require(asked, "output")
    if "source" in asked and (given := {"recipe", "passages", "questions"} & asked.keys()):
        raise InvalidOption(
            f"{min(given)} with --from: the prompts come from one of them. Drop one"
        )
    if "source" not in asked:
        if options.regenerate:
            raise InvalidOption("regenerate without --from: there is nothing to answer. Give both")
        if options.tokens is None:
            raise InvalidOption("no --tokens. Say how many answer tokens the model should write")
    training.check_given(asked)
    counts = run(asked, options, inputs(asked, config))
    common.emit(f"{asked['output']}: {described(counts)}\n")
    training.say_next("fit", asked, "--data", asked["output"], "--output", "heads")


def run(asked: dict[str, Any], options: DataOptions, reads: list[object]) -> Counts:
    """Load, begin or continue the file, write."""
    from selfspec.training.selfgen import check_output

    check_output(asked["output"], reads)
    with training.writing(asked["output"]):
        return _run(asked, options)


def _run(asked: dict[str, Any], options: DataOptions) -> Counts:
    from selfspec import files
    from selfspec.training import selfgen
    from selfspec.training.recipe import Passages, read_recipe
    from selfspec.training.records import machine
    from selfspec.training.selfgen import Writer

    excluded = excluded_ngrams(asked)
    recipe = None if "source" in asked else read_recipe(_path(asked.get("recipe")))
    languages = () if recipe is None else tuple(recipe.languages)
    passages = Passages(_path(asked.get("passages")), languages)
    base = training.load_base(asked, writes=True)
    recorded = asdict(options) | {
        "source": identity(asked.get("source")),
        "recipe": None if recipe is None else recipe.digest,
        "passages": passages.digest,
        "questions": identity(asked.get("questions")),
        "excluded": hashlib.sha256(repr(sorted(excluded)).encode()).hexdigest()[:16],
        "endpoint": asked.get("endpoint"),
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

        source, reader = source_of(asked, options, base, writer, count, recipe, passages, excluded)
        try:
            for counts in selfgen.write(source, writer, options, excluded):
                rates.add(counts.answer_tokens)
                files.write(writer.status, rates.status(options.tokens))
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
    writer: Writer,
    watch: Callable[[int], None],
    recipe: Recipe | None,
    passages: Passages,
    excluded: set[int],
) -> tuple[Source, Reader[Any] | None]:
    """Where the conversations come from, and the reader of the file if it is one."""
    from selfspec.training.recipe import Prompts
    from selfspec.training.selfgen import Answered, Author, Converted, Written, converted, talk_of
    from selfspec.training.text import Reader

    tokenizer = base.tokenizer
    skip = asked.get("skip_bad_rows", False)
    author: Author | None = None
    if "endpoint" in asked:
        from selfspec.training.endpoint import RemoteAuthor

        author = RemoteAuthor(asked["endpoint"], base.backbone, tokenizer, options, watch)
    elif recipe is not None or options.regenerate:
        author = Author(base.backbone, tokenizer, options, watch)
    if recipe is not None:
        assert author is not None  # noqa: S101  # made above
        own = _own_questions(asked, skip=skip)
        prompts = Prompts(recipe, passages, options.seed, own, invents=author.invents)
        if prompts.left_out:
            why = (
                "no such --passages" if author.invents else "no such --passages, or invented turns"
            )
            common.note(f"selfspec: left out, {why}: {', '.join(prompts.left_out)}")
        return Written(author, prompts, writer.records(), excluded), None
    if author is not None:
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


def _own_questions(asked: dict[str, Any], *, skip: bool) -> list[tuple[str, ...]]:
    """The user's turns of each row of --questions."""
    from selfspec.training.text import Reader, user_turns

    if "questions" not in asked:
        return []
    reader = Reader(asked["questions"], user_turns, skip_bad_rows=skip)
    found = list(reader)
    reader.report()
    return found


def excluded_ngrams(asked: dict[str, Any]) -> set[int]:
    """N-grams of the built-in suite and of the files of --exclude."""
    from selfspec.eval.results import load_suite
    from selfspec.training.selfgen import ngrams
    from selfspec.training.text import Reader, texts_of

    suite = [] if "source" in asked else load_suite()  # rows that a user names are meant
    found = {n for question in suite for text in question.turns for n in ngrams(text)}
    for name in filter(None, asked.get("exclude", "").split(",")):
        for text in Reader(name, texts_of):
            found |= ngrams(text)
    return found


def identity(source: str | None) -> str | None:
    """What tells a file from a changed one: its name and size; a data set by its name."""
    path = _path(source)
    if path is None or not path.is_file():
        return source
    return f"{path.name}, {path.stat().st_size} bytes"


def described(counts: Counts) -> str:
    """Counts in words; what did not occur is left out."""
    answers, loops = counts.total("answers"), counts.total("loops_cut")
    parts = [
        f"{counts.total('rows'):,} conversations",
        f"{counts.answer_tokens:,} answer tokens",
        f"{loops:,} of {answers:,} answers cut where they loop ({loops / max(1, answers):.0%})",
    ]
    words = [f"{count:,} {name}" for name, count in counts.dropped().items() if count]
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
    now: Callable[[], float] = time.perf_counter
    batches: list[tuple[int, float]] = field(default_factory=list)
    """Answer tokens and seconds of each batch of this run."""

    def __post_init__(self) -> None:
        """Begin with what is there."""
        self.written = self.before
        self._began = self._last = self.now()

    def add(self, written: int) -> None:
        """A batch more: the file holds so many answer tokens."""
        now = self.now()
        self.batches.append((written - self.written, now - self._last))
        self.written, self._last = written, now

    def line(self) -> str:
        """Both rates, in words."""
        seconds = max(self.now() - self._began, 1e-9)
        kept = (self.written - self.before) / seconds
        return f"{self.generated / seconds:,.0f} tokens/s, {kept:,.0f} answer tokens/s in the file"

    def status(self, wanted: int | None) -> str:
        """How far it is, for another terminal; a pause, which one batch took, counts for little."""
        rate = statistics.median(tokens / max(took, 1e-9) for tokens, took in self.batches[-9:])
        text = f"{self.written:,} answer tokens, {rate:,.0f} a second"
        if wanted is not None and rate > 0.0:
            left = timedelta(seconds=round(max(0, wanted - self.written) / rate))
            text = f"{text}, {left} left to {wanted:,}"
        return f"{text} ({datetime.now().astimezone():%Y-%m-%d %H:%M})\n"


def _path(name: str | None) -> Path | None:
    return None if name is None else local_path(name)
