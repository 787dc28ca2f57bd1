"""`selfspec fit`: conversations in, a folder of exit heads out."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from selfspec.cli import common
from selfspec.cli.flags import Flag, typed
from selfspec.config import check_keys
from selfspec.errors import InvalidOption
from selfspec.training.options import FitOptions

if TYPE_CHECKING:
    from selfspec.training.fit import Fitted, Progress

_FILES = (
    Flag("data", str, "Conversations to fit on: .jsonl or .jsonl.gz. Required."),
    Flag("output", str, "Folder to write the heads to. Required."),
    Flag("validation", str, "Conversations to measure agreement on; else a 20th of the data."),
    Flag("model", str, "Hub id, folder or .gguf file; without it the bundled default model."),
    Flag("base_model", str, "The model's name for the record; else its file or id."),
    Flag("dtype", str, "Of the model and the heads: bfloat16 (the default), float32, ..."),
    Flag("device", str, "cpu, cuda, cuda:1, or auto to spread the layers over all devices."),
)


def _described() -> dict[str, str]:
    """What stands below each field of FitOptions, on one line."""
    (tree,) = ast.parse(inspect.getsource(FitOptions)).body
    texts = {}
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    for entry, below in itertools.pairwise(body):
        match entry, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                texts[name] = " ".join(str(text).split())
    return texts


def _option_flags() -> tuple[Flag, ...]:
    """One flag per field of FitOptions."""
    hints, texts = get_type_hints(FitOptions), _described()
    return tuple(Flag(e.name, hints[e.name], texts[e.name]) for e in fields(FitOptions))


_OPTIONS = _option_flags()
_HINTS = {flag.name: flag.hint for flag in (*_FILES, *_OPTIONS)}


def _with_fit_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give the command its flags; it gets those that were given, as keyword arguments."""
    own = [
        entry
        for entry in inspect.signature(command, eval_str=True).parameters.values()
        if entry.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    parameters = [*own, *(flag.parameter() for flag in (*_FILES, *_OPTIONS))]
    wrapper = functools.wraps(command)(lambda **given: command(**given))
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads the flags here
    wrapper.__annotations__ = {entry.name: entry.annotation for entry in parameters}
    return wrapper


@_with_fit_flags
def fit(*, config: common.ConfigFile = None, **flags: Any) -> None:
    """Fit exit heads to a model on conversations, measure them, and write their folder."""
    asked = merged(config, flags)
    for name in ("data", "output"):
        if name not in asked:
            raise InvalidOption(f"no --{name}. Give the flag, or the key in a --config file")
    options = FitOptions(**{name: asked[name] for name in asked if name in _names(_OPTIONS)})
    fitted = run(asked, options)
    for layer, shares in fitted.metrics["layers"].items():
        common.emit(
            f"layer {layer:>3}  agreement {shares['agreement']:.1%}  of the most confident 25 % "
            f"{shares['agreement_top_25']:.1%}  10 % {shares['agreement_top_10']:.1%}\n"
        )


def run(asked: dict[str, Any], options: FitOptions) -> Fitted:
    """Load, fit, write; this is where torch is imported."""
    from selfspec import hub
    from selfspec.backbone import Backbone
    from selfspec.training import data, fit, records

    model, tokenizer, files = hub.load_model(
        asked.get("model"), dtype=asked.get("dtype", "bfloat16"), device=asked.get("device")
    )
    backbone = Backbone(model, executor="generic")  # the packed one runs single sequences only
    sizes = {
        "vocab_size": backbone.vocab_size,
        "max_length": min(options.batch_tokens, backbone.max_positions),
    }
    path = Path(asked["data"])
    train = data.read_conversations(path, tokenizer, **sizes, max_tokens=options.max_tokens)
    if "validation" in asked:
        held_out = data.read_conversations(Path(asked["validation"]), tokenizer, **sizes)
    else:
        train, held_out = data.split(train)
    base_model = asked.get("base_model", files.label)
    with progress_bar() as progress:
        fitted = fit.fit(
            backbone,
            base_model,
            train,
            held_out,
            options,
            special_ids=data.special_ids(tokenizer),
            data=path.name,
            progress=progress,
        )
    named = {name: asked.get(name) for name in _names(_FILES) if name != "base_model"}
    records.write(
        Path(asked["output"]), fitted, {**named, "base_model": base_model, **_plain(options)}
    )
    return fitted


def merged(file: Path | None, flags: dict[str, Any]) -> dict[str, Any]:
    """Flags over the keys of a YAML file; null there is a value. Raises InvalidOption."""
    given = {name: value for name, value in flags.items() if value is not None}
    values = (_recipe(file) if file else {}) | given
    return {name: typed(name, value, _HINTS[name]) for name, value in values.items()}


def _recipe(file: Path) -> dict[str, Any]:
    """Flag names and values; dashes count as underscores."""
    import yaml

    try:
        loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise InvalidOption(f"cannot read the config {file}: {reason}") from error
    if not isinstance(loaded, dict):
        raise InvalidOption(f"{file} holds no `option: value` lines")
    values = {str(key).replace("-", "_"): value for key, value in loaded.items()}
    check_keys(values, _HINTS, f"key in {file}:")
    return values


@contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None]]:
    """A bar on standard error with the mean loss and the rate."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("fit"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("fit", total=None, loss=float("nan"))

        def advance(progress: Progress) -> None:
            loss = sum(progress.losses.values()) / len(progress.losses)
            bar.update(task, total=progress.steps, completed=progress.step, loss=loss)

        yield advance


def _names(flags: tuple[Flag, ...]) -> list[str]:
    return [flag.name for flag in flags]


def _plain(options: FitOptions) -> dict[str, Any]:
    """Options as YAML has them: lists, no tuples."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(options).items()
    }
