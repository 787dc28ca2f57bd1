"""Flags that several commands share: derived from the options, merged with a YAML file.

Comes in: the option dataclasses. Goes out: `with_flags`, which gives a command those flags, and
`settings`, which turns what was given into keyword arguments of the facade. Flags have no defaults
of their own, so that the order flag > YAML file > heads > built-in holds.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from selfspec import config
from selfspec.config import SpeculationOptions, check_keys
from selfspec.errors import InvalidOption

Command = Callable[..., None]

_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", list[str]: "TEXT"}


@dataclass(frozen=True)
class Flag:
    """One option of the command line, which is also a YAML key."""

    name: str
    """Keyword of the facade; the flag is its kebab-case."""
    hint: Any
    """Type of the value, as annotated in Python."""
    help: str
    aliases: tuple[str, ...] = ()

    @property
    def long_name(self) -> str:
        """As typed: `--max-new-tokens`."""
        return "--" + self.name.replace("_", "-")

    def parameter(self) -> inspect.Parameter:
        """The parameter that typer reads; None where the flag is not given."""
        names = [self.long_name, *self.aliases]
        if self.hint is bool:
            names[0] += f"/--no-{names[0][2:]}"
        many = any(get_origin(member) is tuple for member in members(self.hint))
        annotation = str if many else members(self.hint)[0]
        metavar = "N[,N..]" if many else _METAVARS.get(annotation)
        option = typer.Option(*names, help=self.help, metavar=metavar)
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[annotation | None, option],
        )


def described(options: type) -> dict[str, str]:
    """What the docstring below each field of a dataclass in `config` says, on one line."""
    module = ast.parse(inspect.getsource(config))
    body = next(
        n.body for n in module.body if isinstance(n, ast.ClassDef) and n.name == options.__name__
    )
    texts = {}
    for entry, below in itertools.pairwise(body):
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    texts[entry.target.id] = " ".join(text.split())
    return texts


def speculation_flags() -> tuple[Flag, ...]:
    """One flag per field of SpeculationOptions."""
    hints, texts = get_type_hints(SpeculationOptions), described(SpeculationOptions)
    flags = []
    for entry in fields(SpeculationOptions):
        text = texts[entry.name]
        if entry.default is not None and hints[entry.name] is not bool:
            text = f"{text} Built in: {entry.default}."
        flags.append(Flag(entry.name, hints[entry.name], text))
    return tuple(flags)


LOADING = (
    Flag("model", str, "Hub id, folder or .gguf file; without it the bundled default model."),
    Flag("heads", str, "Exit heads: a folder, a known name, a hub id, or logit-lens."),
    Flag("dtype", str, "float32, bfloat16 (the default), float16 or float64."),
    Flag("device", str, "cpu, cuda, cuda:1, or auto to spread the layers over all devices."),
    Flag("attn_implementation", str, "sdpa (the default) or eager."),
    Flag("executor", str, "auto (the default), generic, or packed: a faster copy for the CPU."),
)

SPECULATION = speculation_flags()

GENERATION = (
    Flag("max_new_tokens", int, f"Tokens at most; {config.DEFAULT_MAX_NEW_TOKENS} if not given."),
    Flag("min_new_tokens", int, "Tokens at least."),
    Flag("stop_strings", list[str], "End the answer behind this text; repeatable.", ("--stop",)),
    Flag("do_sample", bool, "Draw tokens; implied by the next four."),
    Flag("temperature", float, "Divides the logits, above 0."),
    Flag("top_k", int, "Draw from this many of the most likely tokens."),
    Flag("top_p", float, "Draw from the most likely tokens that sum to this, in (0, 1]."),
    Flag("min_p", float, "Leave out tokens less likely than this times the likeliest."),
    Flag("repetition_penalty", float, "Above 1 makes tokens that are there already less likely."),
    Flag("seed", int, "Makes drawing repeatable."),
)
SAMPLING = frozenset({"temperature", "top_k", "top_p", "min_p"})

SHARED = (*LOADING, *SPECULATION, *GENERATION)


@dataclass(frozen=True)
class Settings:
    """Keyword arguments of the facade, by the function that takes them; only what was given."""

    loading: dict[str, Any] = field(default_factory=dict)
    speculation: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)


def with_flags(command: Command) -> Command:
    """Give a command the SHARED flags; it gets them as one dict, its keyword `flags`."""
    signature = inspect.signature(command, eval_str=True)
    own = [entry for entry in signature.parameters.values() if entry.name != "flags"]
    names = [flag.name for flag in SHARED]

    @functools.wraps(command)
    def wrapper(**given: Any) -> None:
        flags = {name: given.pop(name) for name in names}
        command(**given, flags=flags)

    shared = [flag.parameter() for flag in SHARED]
    wrapper.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]  # typer reads the flags here
    wrapper.__annotations__ = {entry.name: entry.annotation for entry in [*own, *shared]}
    return wrapper


def settings(file: Path | None, flags: dict[str, Any]) -> Settings:
    """Flags over the keys of a YAML file. Raises InvalidOption for unknown keys, wrong types."""
    given = {key: value for key, value in flags.items() if value is not None and value != []}
    merged = (read_yaml(file) if file else {}) | given
    hints = {flag.name: flag.hint for flag in SHARED}
    values = {name: typed(name, value, hints[name]) for name, value in merged.items()}
    generation = _picked(values, GENERATION)
    if generation.get("max_new_tokens", 1) < 1:
        found = generation["max_new_tokens"]
        raise InvalidOption(f"max_new_tokens is {found}, expected at least 1. Ask for more tokens")
    if SAMPLING & generation.keys():
        generation.setdefault("do_sample", True)
    return Settings(_picked(values, LOADING), _picked(values, SPECULATION), generation)


def read_yaml(file: Path) -> dict[str, Any]:
    """Option names and values; dashes count as underscores. Raises InvalidOption."""
    import yaml

    try:
        loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"cannot read the config {file}: {error}") from error
    except yaml.YAMLError as error:
        raise InvalidOption(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise InvalidOption(
            f"{file} holds a {type(loaded).__name__}, expected `option: value` lines"
        )
    values = {str(key).replace("-", "_"): value for key, value in loaded.items()}
    check_keys(values, (flag.name for flag in SHARED), f"key in {file}:")
    return values


def members(hint: Any) -> tuple[Any, ...]:
    """The types in a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def typed(name: str, value: Any, hint: Any) -> Any:
    """`value` as `hint` says; text is parsed. Raises InvalidOption if no reading fits."""
    for member in members(hint):
        try:
            return _CONVERTERS[get_origin(member) or member](value, member)
        except (TypeError, ValueError):
            continue
    expected = " or ".join(_described(member) for member in members(hint))
    raise InvalidOption(f"{name} is {value!r}, expected {expected}")


def _picked(values: dict[str, Any], flags: Iterable[Flag]) -> dict[str, Any]:
    return {flag.name: values[flag.name] for flag in flags if flag.name in values}


def _number(value: Any, member: Any) -> Any:
    """Int or float; a whole number where the type is int, and never a bool."""
    number = member(value)
    if isinstance(value, bool) or (not isinstance(value, str) and number != value):
        raise ValueError(value)
    return number


def _exactly(value: Any, member: Any) -> Any:
    if not isinstance(value, member):
        raise TypeError(value)
    return value


def _sequence(value: Any, member: Any) -> Any:
    """A list or tuple, text with commas, or one item on its own."""
    entry, *_ = get_args(member)
    container = get_origin(member)
    items: Sequence[Any]
    if isinstance(value, str):
        items = value.split(",") if container is tuple else [value]
    else:
        items = value if isinstance(value, list | tuple) else [value]
    if not items:
        raise ValueError(value)
    return container(_CONVERTERS[entry](item, entry) for item in items)


def _nothing(value: Any, _member: Any) -> None:
    if value is not None:
        raise TypeError(value)


_CONVERTERS: dict[Any, Callable[[Any, Any], Any]] = {
    bool: _exactly,
    str: _exactly,
    int: _number,
    float: _number,
    tuple: _sequence,
    list: _sequence,
    types.NoneType: _nothing,
}


def _described(member: Any) -> str:
    words = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}
    if get_origin(member) in (tuple, list):
        return f"a list (each {words[get_args(member)[0]]})"
    return words.get(member, "nothing")
