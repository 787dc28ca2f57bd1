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
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import jsonschema
import pandas as pd
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
    table = pd.DataFrame(found).T.rename_axis("schema").to_markdown(floatfmt=".6g")
    summary = {
        "dtype": str(speculator.backbone.dtype),
        "executor": speculator.backbone.executor_name,
        "requests": len(answers),
        "options": speculator.options.described(),
        "found": found,
    }
    text = f"`{lab.command()}`; seconds behind the prompt's pass.\n\n{table}\n"
    lab.finish(output, summary, text)
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
    """Of a schema: speeds, and drafts by who made them."""
    plain, ours = zip(*((one.plain_s, one.drafts_s) for one in answers), strict=True)
    stats = [one.stats for one in answers]
    tokens = sum(one.new_tokens - 1 for one in stats)
    drafted = sum((one.drafted_by_source for one in stats), Counter[str]())
    accepted = sum((one.accepted_by_source for one in stats), Counter[str]())
    low, high = ratio_interval(plain, ours)
    return {
        "requests": len(answers),
        "valid": sum(one.valid for one in answers),
        "texts equal": sum(one.equal for one in answers),
        "tokens": tokens,
        "tokens/s, plain": tokens / sum(plain),
        "tokens/s": tokens / sum(ours),
        "times plain": sum(plain) / sum(ours),
        "low": low,
        "high": high,
        "tokens per verification": tokens / sum(one.rounds for one in stats),
        "grammar's drafts": drafted["grammar"],
        "kept": accepted["grammar"],
        "others' drafts": drafted.total() - drafted["grammar"],
        "others kept": accepted.total() - accepted["grammar"],
    }


if __name__ == "__main__":
    lab.run(main)
