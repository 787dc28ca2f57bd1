"""Where the flat options of earlier versions are now: for errors, and for the heads of then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from selfspec.errors import InvalidOption
from selfspec.options.controllers import CONTROLLERS
from selfspec.options.rules import ACCEPTANCE
from selfspec.typed import check_keys

MOVED = {
    "exit_layers": ("drafter", "exit", "layers"),
    "exit_threshold": ("drafter", "exit", "threshold"),
    "anneal_strength": ("drafter", "exit", "anneal_strength"),
    "max_draft_depth": ("drafter", "exit", "max_depth"),
    "max_draft_tokens": ("drafter", "exit", "max_tokens"),
    "ngram_size": ("drafter", "ngram", "size"),
    "ngram_draft_tokens": ("drafter", "ngram", "max_tokens"),
    "shortest_draft": ("controller", "gammatune", "shortest"),
    "longest_draft": ("controller", "gammatune", "longest"),
    "controller_threshold": ("controller", "threshold", "threshold"),
    "gammatune_rate": ("controller", "gammatune", "rate"),
    "gammatune_step": ("controller", "gammatune", "step"),
    "confidence_weights": ("controller", "cm-asd", "weights"),
    "margin_scale": ("controller", "cm-asd", "margin_scale"),
    "length_scale": ("controller", "cm-asd", "scale"),
    "lenience": ("acceptance", "lenient", "lenience"),
    "cm_asd_reading": ("acceptance", "cm-asd", "reading"),
    "top_beta": ("acceptance", "cm-asd", "top_beta"),
    "tolerance": ("acceptance", "cm-asd", "tolerance"),
    "tolerance_gain": ("acceptance", "cm-asd", "tolerance_gain"),
    "entropy_threshold": ("acceptance", "easd", "entropy"),
    "overlap_threshold": ("acceptance", "easd", "overlap"),
    "overlap_tokens": ("acceptance", "easd", "tokens"),
    "row_cost": ("prices", "", "row"),
    "head_cost": ("prices", "", "head"),
    "block_cost": ("prices", "", "block"),
}
"""Old name: option, kind, setting."""


def hint(name: str) -> str | None:
    """What to write instead of an old name, or None for a name that never was."""
    if name not in MOVED:
        return None
    option, kind, setting = MOVED[name]
    value = f"{kind}:{setting}=.." if kind else f"{setting}=.."
    return f"It is part of {option} now. Give --{option} {value}, in Python {option}='{value}'"


def check_names(names: Iterable[str], known: Iterable[str], kind: str) -> None:
    """`check_keys` for option names: for an old one the error says where it is now."""
    known = list(known)
    for name in names:
        if name not in known and (words := hint(str(name))) is not None:
            raise InvalidOption(f"unknown {kind} {name!r}. {words}")
    check_keys(names, known, kind)


def nested(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of heads of format version 1 or 2 in today's form; today's pass unchanged."""
    found = {name: value for name, value in defaults.items() if name not in MOVED}
    moved: dict[str, dict[str, Any]] = {}
    for name, value in defaults.items():
        if name in MOVED:
            option, kind, setting = MOVED[name]
            own = option in ("drafter", "prices") or kind == "easd"
            moved.setdefault((kind or option) if own else option, {})[setting] = value
    every: dict[str, Mapping[str, type]] = {"controller": CONTROLLERS, "acceptance": ACCEPTANCE}
    for option, kinds in every.items():
        settings, chosen = moved.pop(option, {}), found.get(option)
        if isinstance(chosen, str) and chosen in kinds:
            known = {entry.name for entry in fields(kinds[chosen])} & settings.keys()
            found[option] = {chosen: {name: settings[name] for name in known}}
    return moved | found
