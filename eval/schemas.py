"""Answers that follow a schema: are they valid, and how much do drafts gain on them?

    python -m eval.schemas --suite spec-bench --questions FILE --output eval/results/schemas

Five schemas times 40 questions, greedy, each with drafts and without, in random order. Behind the
prompt's own pass: times as fast as plain decoding; drafts by who made them. All texts are compared
with plain decoding's, and validated by the jsonschema package. Exit code 1 where a text differs or
is not valid.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import typer

import selfspec
from eval.called import command
from selfspec.api.speculator import Speculator
from selfspec.cli import progress
from selfspec.cli.env import machine
from selfspec.eval.results import SIX_TASKS, load_suite, ratio_interval
from selfspec.files import write


def thing(**fields: Any) -> dict[str, Any]:
    """An object with just these fields."""
    return {
        "type": "object",
        "properties": fields,
        "required": [*fields],
        "additionalProperties": False,
    }


SHORT = {"type": "string", "maxLength": 24}
LONG = {"type": "string", "maxLength": 120}

SCHEMAS = {
    "class": thing(
        category={"enum": ["question", "request", "complaint"]}, confident={"type": "boolean"}
    ),
    "call": thing(
        name={"const": "search_the_web"},
        arguments=thing(query=LONG, language={"enum": ["en", "de", "fr"]}, safe={"const": True}),
    ),
    "person": thing(
        first_name=SHORT, last_name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 120}
    ),
    "review": thing(
        summary=LONG,
        rating=thing(usefulness={"enum": [1, 2, 3]}, readability={"enum": [1, 2, 3]}),
        recommended={"type": "boolean"},
    ),
    "list": {
        "type": "array",
        "items": thing(title=SHORT, importance={"enum": ["low", "medium", "high"]}),
        "minItems": 2,
        "maxItems": 4,
    },
}


@dataclass
class Found:
    """With drafts and without, on all requests of a schema."""

    seconds: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    tokens: int = 0
    rounds: int = 0
    equal: int = 0
    valid: int = 0
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)


def main(
    output: Annotated[Path | None, typer.Option(help="Results folder.")] = None,
    model: str | None = None,
    heads: str | None = None,
    suite: str = SIX_TASKS,
    questions: Annotated[Path | None, typer.Option(help="The suite's file.")] = None,
    limit: Annotated[int, typer.Option(help="Questions, spread over the suite.")] = 40,
) -> None:
    """Ask every question for every schema."""
    speculator = selfspec.load(model, heads=heads)
    asked = load_suite(suite, questions, limit)
    found = {name: Found() for name in SCHEMAS}
    answer(speculator, "Hello", SCHEMAS["class"], Found())  # what is made once is not timed
    with progress.bar("schemas", "requests") as show:
        for number, question in enumerate(asked):
            for place, (name, schema) in enumerate(SCHEMAS.items()):
                show(number * len(SCHEMAS) + place, len(asked) * len(SCHEMAS), name)
                prompt = f"{question.turns[0][:600]}\n\nAnswer in JSON ({name})."
                answer(speculator, prompt, schema, found[name])
    summary = {
        "command": command(),
        "machine": machine(),
        "dtype": str(speculator.backbone.dtype),
        "executor": speculator.backbone.executor_name,
        "requests": len(asked) * len(SCHEMAS),
        "options": speculator.options.described(),
        "found": {name: figures(one) for name, one in [*found.items(), ("all", whole(found))]},
    }
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        write(output / "summary.json", json.dumps(summary, indent=2) + "\n")
        write(output / "table.md", as_text(summary))
    print(as_text(summary), end="")
    together = summary["found"]["all"]  # type: ignore[index]  # a dict
    if together["equal"] < summary["requests"] or together["valid"] < summary["requests"]:
        raise SystemExit(1)


def answer(speculator: Speculator, prompt: str, schema: Any, found: Found) -> None:
    """One request both ways, in an order that depends on it alone."""
    made = {}
    for speculate in random.Random(prompt).sample([True, False], 2):
        made[speculate] = speculator.generate(
            prompt, json_schema=schema, max_new_tokens=400, do_sample=False, speculate=speculate
        )
        found.seconds[speculate].append(made[speculate].stats.decode_s)
    stats = made[True].stats
    found.tokens += stats.new_tokens - 1
    found.rounds += stats.rounds
    found.drafted += stats.drafted_by_source
    found.accepted += stats.accepted_by_source
    found.equal += made[True].token_ids == made[False].token_ids
    found.valid += is_valid(made[True].text, schema) and made[True].stop_reason == "eos"


def is_valid(text: str, schema: Any) -> bool:
    """By another package than the one that made the mask."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def whole(found: dict[str, Found]) -> Found:
    """All schemas together."""
    total = Found()
    for one in found.values():
        for speculate, seconds in one.seconds.items():
            total.seconds[speculate] += seconds
        total.tokens, total.rounds = total.tokens + one.tokens, total.rounds + one.rounds
        total.equal, total.valid = total.equal + one.equal, total.valid + one.valid
        total.drafted += one.drafted
        total.accepted += one.accepted
    return total


def figures(found: Found) -> dict[str, Any]:
    """Ready for JSON."""
    plain, ours = found.seconds[False], found.seconds[True]
    return {
        "requests": len(ours),
        "valid": found.valid,
        "equal": found.equal,
        "tokens": found.tokens,
        "plain_tokens_per_s": found.tokens / sum(plain),
        "tokens_per_s": found.tokens / sum(ours),
        "times_plain": sum(plain) / sum(ours),
        "interval": ratio_interval(plain, ours),
        "tokens_per_verification": found.tokens / found.rounds,
        "drafted": dict(found.drafted),
        "accepted": dict(found.accepted),
    }


def as_text(summary: dict[str, Any]) -> str:
    """A table."""
    lines = [
        f"`{summary['command']}`",
        "",
        f"{summary['machine']['cpu']}, {summary['executor']}, {summary['dtype']}; seconds behind "
        "the prompt's pass.",
        "",
        "| schema | valid | texts equal | tokens/s plain | with drafts | times plain (95 %) "
        "| tokens per verification | grammar's drafts kept | others' |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, one in summary["found"].items():
        low, high = one["interval"]
        drafted, accepted = Counter(one["drafted"]), Counter(one["accepted"])
        others = (accepted.total() - accepted["grammar"], drafted.total() - drafted["grammar"])
        lines.append(
            f"| {name} | {one['valid']} of {one['requests']} | {one['equal']} "
            f"| {one['plain_tokens_per_s']:.0f} | {one['tokens_per_s']:.0f} "
            f"| {one['times_plain']:.2f} ({low:.2f} to {high:.2f}) "
            f"| {one['tokens_per_verification']:.2f} "
            f"| {accepted['grammar']} of {drafted['grammar']} | {others[0]} of {others[1]} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
