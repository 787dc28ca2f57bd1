"""Flags derived from options: what typer reads, merged with a YAML file.

Comes in: option dataclasses. Goes out: `with_flags`, which gives a command their flags, and
`merged`, which lays what was given over the keys of a file. Flags have no defaults of their own, so
that the order flag > YAML file > heads > built-in holds. Imports no torch.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import math
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from selfspec.config import check_keys
from selfspec.errors import InvalidData, InvalidOption
from selfspec.untrusted import read_yaml

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
        if members(self.hint)[0] is bool:
            names[0] += f"/--no-{names[0][2:]}"
        many = [member for member in members(self.hint) if get_origin(member) is tuple]
        annotation = str if many else members(self.hint)[0]
        metavar = _METAVARS.get(get_args(many[0])[0] if many else annotation)
        metavar = f"{metavar}[,{metavar}..]" if many else metavar
        option = typer.Option(*names, help=self.help, metavar=metavar)
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[annotation | None, option],
        )


def option_flags(options: type) -> tuple[Flag, ...]:
    """One flag per field of an option dataclass; its attribute docstring is the help."""
    hints, texts = get_type_hints(options), _attribute_docstrings(options)
    flags = []
    for entry in fields(options):
        text = texts[entry.name]
        if entry.default is not None and hints[entry.name] is not bool:
            text = f"{text} Built in: {entry.default}."
        flags.append(Flag(entry.name, hints[entry.name], text))
    return tuple(flags)


def with_flags(*flags: Flag) -> Callable[[Command], Command]:
    """Give a command flags; it gets those that were given as one dict, its keyword `flags`."""

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [entry for entry in signature.parameters.values() if entry.name != "flags"]
        parameters = [*own, *(flag.parameter() for flag in flags)]

        @functools.wraps(command)
        def wrapper(**given: Any) -> None:
            values = {flag.name: given.pop(flag.name) for flag in flags}
            asked = {name: value for name, value in values.items() if value not in (None, [])}
            command(**given, flags=asked)

        wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads the flags here
        wrapper.__annotations__ = {entry.name: entry.annotation for entry in parameters}
        return wrapper

    return decorate


def merged(file: Path | None, given: dict[str, Any], flags: Sequence[Flag]) -> dict[str, Any]:
    """What was given over the keys of a YAML file, typed; null in the file is a value.

    Raises InvalidOption for unknown keys and wrong types.
    """
    hints = {flag.name: flag.hint for flag in flags}
    values = (_read_yaml(file, hints) if file else {}) | given
    return {name: typed(name, value, hints[name]) for name, value in values.items()}


def members(hint: Any) -> tuple[Any, ...]:
    """The types in a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def typed(name: str, value: Any, hint: Any) -> Any:
    """`value` as `hint` says; text is parsed. Raises InvalidOption if no reading fits."""
    for member in members(hint):
        try:
            return _CONVERTERS[get_origin(member) or member](value, member)
        except (TypeError, ValueError, OverflowError):
            continue
    expected = " or ".join(_described(member) for member in members(hint))
    raise InvalidOption(f"{name} is {value!r}, expected {expected}")


def _read_yaml(file: Path, known: Iterable[str]) -> dict[str, Any]:
    """Option names and values; dashes count as underscores. Raises InvalidOption."""
    try:
        loaded = read_yaml(file)
    except InvalidData as error:
        raise InvalidOption(f"cannot take the config: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise InvalidOption(
            f"{file} holds a {type(loaded).__name__}, expected `option: value` lines"
        )
    values = {str(key).replace("-", "_"): value for key, value in loaded.items()}
    if len(values) < len(loaded):
        raise InvalidOption(f"{file} has a key twice, with a dash and with an underscore")
    check_keys(values, known, f"key in {file}:")
    return values


def _attribute_docstrings(options: type) -> dict[str, str]:
    """What the docstring below each field of a dataclass says, on one line."""
    (tree,) = ast.parse(inspect.getsource(options)).body
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    texts = {}
    for entry, below in itertools.pairwise(body):
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    texts[entry.target.id] = " ".join(text.split())
    return texts


def _number(value: Any, member: Any) -> Any:
    """Int or float; a whole number where the type is int, and never a bool."""
    number = member(value)
    if not math.isfinite(number):
        raise ValueError(value)
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
