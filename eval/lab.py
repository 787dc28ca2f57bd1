"""Code that the scripts of this folder share: flags, loading, benchmarks, results, tables."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple, TypeVar, cast

import typer
from torch import Tensor

import selfspec
from selfspec.api.speculator import Speculator
from selfspec.cli.base import bar
from selfspec.cli.main import main
from selfspec.errors import InvalidOption, SelfspecError
from selfspec.eval import report
from selfspec.eval.bench import Bench, Contender
from selfspec.eval.results import ANSWERS, Answer, BenchOptions, Question, failures, load_suite
from selfspec.files import local_path, write
from selfspec.heads.exit_heads import ExitHeads, logit_lens
from selfspec.hub.models import load_model, machine
from selfspec.model.backbone import Backbone

Output = Annotated[Path, typer.Option(parser=local_path, metavar="FOLDER", help="Results folder.")]
Model = Annotated[str | None, typer.Option(help="Folder, file or hub id; else the bundled one.")]
Heads = Annotated[str | None, typer.Option(help="Folder or name. Default: the model's own.")]
Dtype = Annotated[str | None, typer.Option(help="Default: chosen by selfspec.")]
Suite = Annotated[str, typer.Option(help="Name of a suite, or a JSONL file of prompts.")]
Questions = Annotated[Path | None, typer.Option(help="File of a suite that is not built in.")]
Limit = Annotated[int | None, typer.Option(help="Questions, spread evenly over the suite.")]
NewTokens = Annotated[int, typer.Option(min=2, help="Maximum new tokens per answer.")]
Repeats = Annotated[int, typer.Option(min=1, help="Runs in turns; medians are reported.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of every runtime.")]
Numbers = Annotated[str, typer.Option(help="Numbers, separated by commas.")]

PLAIN = Contender(label="plain", method="plain", setting={"speculate": False})

Item = TypeVar("Item")
Ask = Callable[[Mapping[str, Any]], dict[str, Any]]


class Shape(NamedTuple):
    """Sizes of a Llama, by their names in its config."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int

    @property
    def keys(self) -> int:
        """Width of a token's keys over all heads; the values have the same."""
        return self.hidden_size // self.num_attention_heads * self.num_key_value_heads

    @property
    def weights(self) -> int:
        """Weights that a step reads: layers and unembedding."""
        width = self.hidden_size
        layer = 2 * width * (width + self.keys) + 3 * width * self.intermediate_size
        return self.num_hidden_layers * layer + self.vocab_size * width

    @property
    def eagle3(self) -> int:
        """Weights of an EAGLE-3 head: fusion of three states, a layer of two, an LM head."""
        width = self.hidden_size
        layer = 3 * width * (width + self.intermediate_size) + 4 * width * self.keys
        return 3 * width * width + layer + width * min(DRAFT_VOCABULARY, self.vocab_size)


DRAFT_VOCABULARY = 32_000  # of EAGLE-3

SHAPES = {
    "smollm2-135m": Shape(576, 1536, 30, 9, 3, 49152, 8192),
    "llama-3.2-1b": Shape(2048, 8192, 16, 32, 8, 128256, 8192),
    "llama-3.2-3b": Shape(3072, 8192, 28, 24, 8, 128256, 8192),
    "llama-2-7b": Shape(4096, 11008, 32, 32, 32, 32000, 4096),
    "llama-3.1-8b": Shape(4096, 14336, 32, 32, 8, 128256, 8192),
    "llama-3.1-70b": Shape(8192, 28672, 80, 64, 8, 128256, 8192),
}


def expected_tokens(chance: Any, drafts: int) -> Any:
    """Tokens that a round of k drafts commits, each kept with chance a: (1 - a^(k+1)) / (1 - a)."""
    return sum(chance**kept for kept in range(drafts + 1))


def run(*commands: Callable[..., object]) -> None:
    """Run a function with the command line's flags; of several, the one that the first word names.

    Errors that a user can fix are one line, without a traceback.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    for function in commands:
        app.command()(function)
    try:
        app()
    except SelfspecError as error:
        sys.exit(str(error))


def selfspec_command(*words: str) -> None:
    """Run `selfspec WORDS` in this process. Raises RuntimeError if it fails."""
    if main(words):
        raise RuntimeError(shlex.join(["selfspec", *words]))


def command() -> str:
    """`python -m eval.NAME` with its arguments; absolute paths become names."""
    spec = sys.modules["__main__"].__spec__
    program = ["-m", spec.name.removesuffix(".__main__")] if spec else [Path(sys.argv[0]).name]
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return shlex.join(["python", *program, *words])


def numbers(text: str, kind: Callable[[str], Item]) -> list[Item]:
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError as error:
        raise InvalidOption(f"{text!r}: expected numbers, separated by commas") from error


def prompts(suite: str, questions: Path | None = None, limit: int | None = None) -> list[str]:
    return [question.turns[0] for question in load_suite(suite, questions, limit)]


def load(
    model: str | Path | None = None,
    heads: str | None = None,
    dtype: str | None = None,
    executor: str = "auto",
    *,
    numbers: bool = False,
) -> Speculator:
    """Load a model with its weights as stored; `numbers`: with de-quantised weights."""
    base = selfspec.load(model, heads=heads, dtype=dtype, executor="auto" if numbers else executor)
    if not numbers:
        return base
    plain, tokenizer, files = load_model(model, dtype=base.backbone.dtype)
    exit_heads = base.heads or "none"
    return selfspec.wrap(plain, tokenizer, heads=exit_heads, label=files.label, executor=executor)


def first_turns(suite: str, questions: Path | None, limit: int | None) -> list[Question]:
    """Questions cut to their first turn: later ones need answers. References fit the last turn."""
    return [
        replace(q, turns=q.turns[:1], reference=q.reference if len(q.turns) == 1 else None)
        for q in load_suite(suite, questions, limit)
    ]


def untrained_heads(
    backbone: Backbone, layer: int, head_type: str, draft_ids: Tensor | None = None
) -> ExitHeads:
    """Untrained heads of one exit layer, over `draft_ids` alone if given."""
    config = replace(
        logit_lens(backbone.unembedding, backbone.num_layers, "").config,
        exit_layers=(layer,),
        head_type=head_type,
        draft_vocab_size=None if draft_ids is None else len(draft_ids),
        defaults={},
    )
    return ExitHeads(config, backbone.unembedding, draft_ids)


@contextmanager
def json_process(command: Sequence[str], **options: Any) -> Iterator[Ask]:
    """Start a process that answers JSON lines. Raises InvalidOption if it cannot or ends."""
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
        )
    except OSError as error:
        raise InvalidOption(f"cannot run {command[0]}: {error.strerror}") from error
    with child as process:
        stdin, stdout = cast(IO[str], process.stdin), cast(IO[str], process.stdout)

        def ask(request: Mapping[str, Any]) -> dict[str, Any]:
            print(json.dumps(request), file=stdin, flush=True)
            if not (line := stdout.readline()):
                raise InvalidOption(f"{command[0]} has ended: see its error above")
            answer: dict[str, Any] = json.loads(line)
            return answer

        try:
            yield ask
        finally:
            stdin.close()


def track(items: Sequence[Item], name: str, unit: str = "questions") -> Iterator[Item]:
    with bar(name, unit) as show:
        for done, item in enumerate(items):
            show(done, len(items), str(getattr(item, "id", "")))
            yield item
        show(len(items), len(items))


def run_bench(
    output: Path,
    speculator: Speculator,
    questions: Sequence[Question],
    contenders: Sequence[Contender],
    options: BenchOptions,
) -> list[Answer]:
    """Answers of all contenders, measured as by `selfspec bench`.

    The same command continues a stopped run. Raises InvalidOption for a folder of another run.
    """
    backbone = speculator.backbone
    model = {"dtype": str(backbone.dtype), "executor": backbone.executor_name}
    facts = {
        "run": {"command": command(), "model": speculator.label, **model, **options.record()},
        "options": speculator.options.described(),
        "machine": machine(),
    }
    report.begin_results(output, json.loads(json.dumps(facts)))
    with bar("bench", "questions") as show:
        runner = Bench(speculator=speculator, options=options)
        answers = runner.measure(questions, contenders, output / ANSWERS, show)
    if missing := failures(answers):
        raise SystemExit("\n".join(missing))
    return answers


def table(header: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table; the first column holds words, the others figures."""
    head = list(map(str, header))
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *(map(str, row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def finish(output: Path, summary: Mapping[str, Any], text: str) -> None:
    """Write `summary.json`, with the command and the machine, and `table.md`; print the latter."""
    facts = {"command": command(), "machine": machine(), **summary}
    write(output / "summary.json", json.dumps(facts, indent=2) + "\n")
    write(output / "table.md", text)
    print(text, end="")
