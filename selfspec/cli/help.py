"""What `--help` and `--help-all` show: options of a command in groups, and settings of some.

Comes in: option classes and typer's context. Goes out: text. Called by `flags`. Imports no torch.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin

import typer

from selfspec.options.controllers import CONTROLLERS
from selfspec.options.drafters import DRAFTERS
from selfspec.options.parts import Part
from selfspec.options.prices import Prices
from selfspec.options.rules import ACCEPTANCE
from selfspec.options.text import word
from selfspec.options.values import members
from selfspec.typed import annotations_of

_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", list[str]: "TEXT"}

PARTS: dict[str, Mapping[str, type[Part]]] = {
    "drafter": DRAFTERS,
    "controller": CONTROLLERS,
    "acceptance": ACCEPTANCE,
    "prices": {"": Prices},
}
"""Options in parts: their kinds by name."""


def in_groups(context: typer.Context, groups: Mapping[str, str], *, everything: bool) -> str:
    """The help of a command; `groups` by name of an option.

    With `everything` also rare options, and the settings of those that have some.
    """
    command = context.command
    formatter = context.make_formatter()
    command.format_usage(context, formatter)
    command.format_help_text(context, formatter)
    sections: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        if everything:
            parameter.hidden = False  # type: ignore[attr-defined]  # options have it
        if record := parameter.get_help_record(context):
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            heading = groups.get(parameter.name or "", usual)
            sections.setdefault(heading, []).append(record)
    for name in PARTS:
        if everything and name in groups:
            sections[f"Settings of --{name}"] = list(settings(PARTS[name]))
    for heading, rows in sections.items():
        with formatter.section(heading):
            formatter.write_dl(rows)
    return formatter.getvalue().rstrip()


def docstrings(options: type) -> dict[str, str]:
    """The first paragraph below each field of a dataclass, inherited ones too, on one line."""
    texts: dict[str, str] = {}
    for kind in reversed(options.__mro__):
        if not is_dataclass(kind):
            continue
        (tree,) = ast.parse(inspect.getsource(kind)).body
        body = tree.body if isinstance(tree, ast.ClassDef) else []
        for entry, below in itertools.pairwise(body):
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                match below:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        texts[entry.target.id] = " ".join(text.split("\n\n")[0].split())
    return texts


def metavar_of(hint: Any, separator: str) -> str | None:
    """What stands for a value of this type: `N`, or `N[,N..]` for several."""
    many = [member for member in members(hint) if get_origin(member) is tuple]
    one = _METAVARS.get(get_args(many[0])[0] if many else members(hint)[0])
    return f"{one}[{separator}{one}..]" if many else one


def settings(kinds: Mapping[str, type[Part]]) -> Iterator[tuple[str, str]]:
    """Kinds, and their settings below them: a term and what it means."""
    for kind, made in kinds.items():
        if kind:
            yield kind, " ".join((made.__doc__ or "").split())
        built_in, hints, texts = made(), annotations_of(made), docstrings(made)
        for entry in fields(made):  # type: ignore[arg-type]  # all parts are dataclasses
            value = getattr(built_in, entry.name)
            usual = "" if value is None else f" Built in: {word(value)}."
            term = f"{kind}:{entry.name}" if kind else entry.name
            yield f"{term}={metavar_of(hints[entry.name], '/')}", texts[entry.name] + usual
