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
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jsonschema
import typer

from eval import lab
from selfspec.api.speculator import Speculator
from selfspec.decoding.stats import GenerationStats
from selfspec.eval.results import SIX_TASKS, load_suite, ratio_interval


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


class Answer(NamedTuple):
    """A request for a schema, with drafts and without."""

    schema: str
    plain_s: float
    """Behind the prompt's pass, like `drafts_s`."""
    drafts_s: float
    stats: GenerationStats
    equal: bool
    valid: bool


def main(
    output: lab.Output,
    model: lab.Model = None,
    heads: lab.Heads = None,
    suite: lab.Suite = SIX_TASKS,
    questions: lab.Questions = None,
    limit: Annotated[int, typer.Option(help="Questions, spread over the suite.")] = 40,
) -> None:
    """Ask every question for every schema."""
    speculator = lab.loaded(model, heads)
    answer(speculator, "Hello", "class")  # what is made once is not timed
    answers = [
        answer(speculator, question.turns[0][:600], name)
        for question in lab.each(load_suite(suite, questions, limit), "schemas")
        for name in SCHEMAS
    ]
    groups = {name: [one for one in answers if one.schema == name] for name in SCHEMAS}
    found = {name: figures(group) for name, group in (groups | {"all": answers}).items()}
    summary = {
        "dtype": str(speculator.backbone.dtype),
        "executor": speculator.backbone.executor_name,
        "requests": len(answers),
        "options": speculator.options.described(),
        "found": found,
    }
    lab.finish(output, summary, as_text(found))
    if not all(one.equal and one.valid for one in answers):
        raise SystemExit(1)


def answer(speculator: Speculator, text: str, name: str) -> Answer:
    """One request both ways, in an order that depends on it alone."""
    prompt = f"{text}\n\nAnswer in JSON ({name})."
    asked = {"json_schema": SCHEMAS[name], "max_new_tokens": 400, "do_sample": False}
    made = {
        speculate: speculator.generate(prompt, **asked, speculate=speculate)
        for speculate in random.Random(prompt).sample([True, False], 2)
    }
    plain, ours = made[False], made[True]
    return Answer(
        schema=name,
        plain_s=plain.stats.decode_s,
        drafts_s=ours.stats.decode_s,
        stats=ours.stats,
        equal=ours.token_ids == plain.token_ids,
        valid=ours.stop_reason == "eos" and is_valid(ours.text, SCHEMAS[name]),
    )


def is_valid(text: str, schema: Any) -> bool:
    """By another package than the one that made the mask."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Of a schema."""
    plain, ours = zip(*((one.plain_s, one.drafts_s) for one in answers), strict=True)
    tokens = sum(one.stats.new_tokens - 1 for one in answers)
    drafted, accepted = Counter[str](), Counter[str]()
    for one in answers:
        drafted += one.stats.drafted_by_source
        accepted += one.stats.accepted_by_source
    return {
        "requests": len(answers),
        "valid": sum(one.valid for one in answers),
        "equal": sum(one.equal for one in answers),
        "tokens": tokens,
        "plain_tokens_per_s": tokens / sum(plain),
        "tokens_per_s": tokens / sum(ours),
        "times_plain": sum(plain) / sum(ours),
        "interval": ratio_interval(plain, ours),
        "tokens_per_verification": tokens / sum(one.stats.rounds for one in answers),
        "drafted": dict(drafted),
        "accepted": dict(accepted),
    }


def as_text(found: Mapping[str, Any]) -> str:
    """Speeds, and drafts by who made them."""
    header = ("schema", "valid", "texts equal", "tokens/s plain", "with drafts")
    header += ("times plain (95 %)", "tokens per verification", "grammar's drafts kept", "others'")
    rows = []
    for name, one in found.items():
        low, high = one["interval"]
        grammar, others = (
            [
                sum(n for who, n in one[kind].items() if (who == "grammar") == is_grammar)
                for kind in ("accepted", "drafted")
            ]
            for is_grammar in (True, False)
        )
        rows.append(
            [
                name,
                f"{one['valid']} of {one['requests']}",
                one["equal"],
                f"{one['plain_tokens_per_s']:.0f}",
                f"{one['tokens_per_s']:.0f}",
                f"{one['times_plain']:.2f} ({low:.2f} to {high:.2f})",
                f"{one['tokens_per_verification']:.2f}",
                *(f"{kept} of {drafted}" for kept, drafted in (grammar, others)),
            ]
        )
    return f"`{lab.command()}`; seconds behind the prompt's pass.\n\n{lab.table(header, rows)}"


if __name__ == "__main__":
    lab.run(main)
