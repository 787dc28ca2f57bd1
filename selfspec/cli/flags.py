"""Flags derived from options: what typer reads, merged with a YAML file.

Comes in: option dataclasses. Goes out: `with_flags`, which gives a command their flags, and
`merged`, which lays what was given over the keys of a file. Flags have no defaults of their own, so
that the order flag > environment > YAML file > default file > heads > built-in holds. Imports no
torch.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer

from selfspec.cli.help import docstrings, in_groups, metavar_of
from selfspec.config import OPTION_NAMES, check
from selfspec.errors import InvalidData, InvalidOption
from selfspec.options.parts import Part
from selfspec.options.text import laid_over
from selfspec.options.values import members, typed
from selfspec.typed import annotations_of, check_keys
from selfspec.untrusted import read_yaml

Command = Callable[..., None]

_known: set[str] = set()
"""Names of all commands' flags: keys that the default file may hold."""


@dataclass(frozen=True)
class Flag:
    """One option of the command line, which is also a YAML key."""

    name: str
    """Keyword of the facade; the flag is its kebab-case."""
    hint: Any
    """Type of the value, as annotated in Python."""
    help: str
    aliases: tuple[str, ...] = ()
    metavar: str | None = None
    """What stands for the value in the help; None: by its type."""
    group: str = "Options"
    """Where --help-all lists it."""
    rare: bool = False
    """Not listed by --help."""

    @property
    def long_name(self) -> str:
        """As typed: `--max-new-tokens`."""
        return "--" + self.name.replace("_", "-")

    def as_typed(self, value: Any) -> str:
        """As typed for a value: of a switch that is off `--no-all-layers`."""
        return f"--no-{self.long_name[2:]}" if value is False else self.long_name

    @property
    def variable(self) -> str:
        """Of the environment, in place of the flag: `SELFSPEC_MAX_NEW_TOKENS`."""
        return f"SELFSPEC_{self.name.upper()}"

    def parameter(self) -> inspect.Parameter:
        """The parameter that typer reads; None where the flag is not given."""
        names = [self.long_name, *self.aliases]
        if members(self.hint)[0] is bool:
            names[0] += f"/--no-{names[0][2:]}"
        many = [member for member in members(self.hint) if get_origin(member) is tuple]
        annotation = str if many else members(self.hint)[0]
        metavar = self.metavar or metavar_of(self.hint, ",")
        option = typer.Option(
            *names,
            help=self.help,
            metavar=metavar,
            hidden=self.rare,
            envvar=self.variable,
            show_envvar=False,
        )
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[annotation | None, option],
        )


def inputs(asked: Mapping[str, Any], *others: object) -> list[object]:
    """Values that may name files which a command reads: `others`, and all but its outputs."""
    return [*others, *(value for name, value in asked.items() if name not in _OUTPUTS)]


_OUTPUTS = ("output", "html", "png", "svg", "card")


def option_flags(options: type, names: Iterable[str] | None = None) -> tuple[Flag, ...]:
    """A flag per field of an option dataclass, or for `names`; its docstring is the help."""
    hints, texts, built_in = annotations_of(options), docstrings(options), options()
    flags = []
    for name in names or [entry.name for entry in fields(options)]:
        default, hint, text = getattr(built_in, name), hints[name], texts[name]
        if isinstance(default, Part):
            default = default.kind if default.kind != name else None
        if default is not None and hint is not bool:
            text = f"{text} Built in: {default}."
        flags.append(Flag(name, hint, text))
    return tuple(flags)


def grouped(group: str, flags: Iterable[Flag], usual: Collection[str] = ()) -> tuple[Flag, ...]:
    """`flags` under one heading; --help lists those that are `usual`."""
    return tuple(replace(flag, group=group, rare=flag.name not in usual) for flag in flags)


def with_flags(*flags: Flag) -> Callable[[Command], Command]:
    """Give a command flags; it gets those that were given as one dict, its keyword `flags`."""
    _known.update(flag.name for flag in flags)

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [entry for entry in signature.parameters.values() if entry.name != "flags"]
        parameters = [*own, *(flag.parameter() for flag in flags), *_helps(flags)]

        @functools.wraps(command)
        def wrapper(**given: Any) -> None:
            for name in _HELPS:
                given.pop(name)
            values = {flag.name: given.pop(flag.name) for flag in flags}
            asked = {name: value for name, value in values.items() if value not in (None, [])}
            command(**given, flags=asked)

        wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads the flags here
        wrapper.__annotations__ = {entry.name: entry.annotation for entry in parameters}
        return wrapper

    return decorate


_HELPS = {
    "help_all": (["--help-all"], "Show all options."),
    "help_usual": (["-h", "--help"], "Show this message and exit."),
}


def _helps(flags: Sequence[Flag]) -> Iterator[inspect.Parameter]:
    """The flags that show the help of all flags, or of the usual ones, and leave."""
    groups = {flag.name: flag.group for flag in flags}

    def shown(context: typer.Context, parameter: typer.CallbackParam, asked: bool) -> None:
        if asked:
            everything = parameter.name == "help_all"
            typer.echo(in_groups(context, groups, everything=everything))
            raise typer.Exit

    for name, (names, text) in _HELPS.items():
        option = typer.Option(*names, help=text, is_eager=True, callback=shown)
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[bool, option],
        )


def merged(
    file: Path | None, given: dict[str, Any], flags: Sequence[Flag], *, defaults: bool = True
) -> dict[str, Any]:
    """What was given over the keys of a YAML file, and these over the default file's, typed.

    Null in a file is a value. Without `defaults` the default file is left alone. Options with
    settings are merged setting by setting. Raises InvalidOption for unknown keys, wrong types and
    options that no model could make sense of.
    """
    hints = {flag.name: flag.hint for flag in flags}
    merged: dict[str, Any] = {}
    for values in (
        _defaults(hints) if defaults else {},
        _read_yaml(file, hints) if file else {},
        given,
    ):
        above = {name: typed(name, value, hints[name]) for name, value in values.items()}
        check({name: value for name, value in above.items() if name in OPTION_NAMES})
        for name in merged.keys() & above.keys():
            if dict in members(hints[name]):
                above[name] = laid_over(name, merged[name], above[name])
        merged |= above
    return merged


def default_file() -> Path:
    """The user's options for all commands: config.yaml in the folder for that on this system."""
    base = os.environ.get("XDG_CONFIG_HOME")
    folder = Path(base, "selfspec") if base else Path(typer.get_app_dir("selfspec"))
    return folder / "config.yaml"


def _defaults(hints: Collection[str]) -> dict[str, Any]:
    """The default file's keys that this command has; there need be no such file."""
    file = default_file()
    if not file.exists():
        return {}
    return {name: value for name, value in _read_yaml(file, _known).items() if name in hints}


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
