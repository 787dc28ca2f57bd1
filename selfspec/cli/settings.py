"""The flags of commands that generate, and what they set in the facade."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from selfspec import config
from selfspec.api import structure
from selfspec.cli.flags import Flag, grouped, merged, option_flags
from selfspec.config import OPTION_NAMES, SpeculationOptions
from selfspec.errors import InvalidOption
from selfspec.untrusted import read_json, read_text

_USUAL = frozenset(
    {
        *("model", "heads", "speculate", "drafter", "max_new_tokens"),
        *("temperature", "seed", "stop_strings", "json_schema"),
    }
)
"""Of the flags below, those that --help lists."""

CHAT_TEMPLATE = Flag(
    "chat_template",
    str,
    "For models that bring none: alpaca, chatml, llama-2, vicuna, zephyr or a Jinja file.",
)

LOADING = grouped(
    "Model",
    (
        Flag("model", str, "Hub id, folder or .gguf file; without it the bundled default model."),
        Flag("heads", str, "Exit heads: a folder, a known name, a hub id, logit-lens, or none."),
        Flag(
            "dtype",
            str,
            "float32, bfloat16, float16 (drafts need --pinned) or float64. Built in: bfloat16, "
            "for a .gguf file float32 where products in bfloat16 are slow.",
        ),
        Flag("device", str, "cpu, cuda, cuda:1, or auto to spread the layers over all devices."),
        Flag("attn_implementation", str, "sdpa (the default) or eager."),
        CHAT_TEMPLATE,
        Flag("draft_model", str, "A smaller model with the same tokens, which drafts."),
        Flag("executor", str, "auto (the default), generic, fused (CPU), cuda-graph (GPU)."),
    ),
    _USUAL,
)

_NESTED = {
    **dict.fromkeys(("drafter", "controller", "acceptance"), "KIND[:KEY=VALUE,..]"),
    "prices": "KEY=VALUE,..",
}
"""Options with settings of their own: text on the command line, text or a mapping in YAML."""

SPECULATION = grouped(
    "Drafts",
    (
        replace(flag, metavar=_NESTED[flag.name], hint=str | dict) if flag.name in _NESTED else flag
        for flag in option_flags(SpeculationOptions, OPTION_NAMES)
    ),
    _USUAL,
)

GENERATION = grouped(
    "Answer",
    (
        Flag(
            "max_new_tokens", int, f"Tokens at most; {config.DEFAULT_MAX_NEW_TOKENS} if not given."
        ),
        Flag("min_new_tokens", int, "Tokens at least."),
        Flag(
            "stop_strings", list[str], "End the answer behind this text; repeatable.", ("--stop",)
        ),
        Flag("do_sample", bool, "Draw tokens; implied by the next four."),
        Flag("temperature", float, "Divides the logits; 0 is greedy."),
        Flag("top_k", int, "Draw from this many of the most likely tokens."),
        Flag("top_p", float, "Draw from the most likely tokens that sum to this, in (0, 1]."),
        Flag("min_p", float, "Leave out tokens less likely than this times the likeliest."),
        Flag(
            "repetition_penalty", float, "Above 1 makes tokens that are there already less likely."
        ),
        Flag("presence_penalty", float, "Lowers scores of tokens that the answer has already."),
        Flag("frequency_penalty", float, "The same, for each time that it has them."),
        Flag("json_schema", str, "JSON that follows the schema in this file.", metavar="FILE"),
        Flag("grammar", str, "Text that follows the Lark grammar in this file.", metavar="FILE"),
        Flag("seed", int, "Makes drawing repeatable."),
    ),
    _USUAL,
)

_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda value: value >= 1, "at least 1. Ask for more tokens"),
    "min_new_tokens": (lambda value: value >= 0, "at least 0"),
    "temperature": (lambda value: value >= 0.0, "at least 0"),
    "top_k": (lambda value: value >= 0, "at least 0"),
    "top_p": (lambda value: 0.0 < value <= 1.0, "in (0, 1]"),
    "min_p": (lambda value: 0.0 <= value <= 1.0, "in [0, 1]"),
    "repetition_penalty": (lambda value: value > 0.0, "above 0"),
    "seed": (lambda value: -(2**63) <= value < 2**64, "at most 64 bits"),
}

SHARED = (*LOADING, *SPECULATION, *GENERATION)


@dataclass(frozen=True)
class Settings:
    """Keyword arguments of the facade, by the function that takes them; only what was given."""

    loading: dict[str, Any] = field(default_factory=dict)
    speculation: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)


def settings(file: Path | None, flags: dict[str, Any]) -> Settings:
    """Flags over the keys of a YAML file. Raises InvalidOption for unknown keys, wrong types."""
    return sorted_settings(merged(file, flags, SHARED))


def sorted_settings(values: dict[str, Any]) -> Settings:
    """Values by who takes them; others than SHARED are left out. Raises InvalidOption."""
    generation = picked(values, GENERATION)
    for name, (holds, expected) in _RANGES.items():
        if name in generation and not holds(generation[name]):
            raise InvalidOption(f"{name} is {generation[name]}, expected {expected}")
    _read_structure(generation)
    return Settings(picked(values, LOADING), picked(values, SPECULATION), generation)


def _read_structure(generation: dict[str, Any]) -> None:
    """Files become what they hold. Raises InvalidData, and InvalidOption as `generate` would."""
    for name, read in (("json_schema", read_json), ("grammar", read_text)):
        if name in generation:
            generation[name] = read(Path(generation[name]))
    if (grammar := structure.wanted(generation)) is not None:
        structure.check(grammar)


def picked(values: dict[str, Any], flags: Iterable[Flag]) -> dict[str, Any]:
    """Those of the values that `flags` name."""
    return {flag.name: values[flag.name] for flag in flags if flag.name in values}
