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
from typing import Annotated, Any

import jsonschema
import pandas as pd
import typer

from eval import lab
from selfspec.api.speculator import Speculator
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
    answers = pd.DataFrame(
        answer(speculator, question.turns[0][:600], name)
        for question in lab.each(load_suite(suite, questions, limit), "schemas")
        for name in SCHEMAS
    )
    every = pd.concat([answers, answers.assign(schema="all")])
    found = {str(name): figures(group) for name, group in every.groupby("schema", sort=False)}
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
    if not (answers.equal & answers.valid).all():
        raise SystemExit(1)


def answer(speculator: Speculator, text: str, name: str) -> dict[str, Any]:
    """One request both ways, in an order that depends on it alone: a row of figures."""
    prompt = f"{text}\n\nAnswer in JSON ({name})."
    asked = {"json_schema": SCHEMAS[name], "max_new_tokens": 400, "do_sample": False}
    made = {
        speculate: speculator.generate(prompt, **asked, speculate=speculate)
        for speculate in random.Random(prompt).sample([True, False], 2)
    }
    plain, ours = made[False], made[True]
    drafted, accepted = ours.stats.drafted_by_source, ours.stats.accepted_by_source
    return {
        "schema": name,
        "plain_s": plain.stats.decode_s,
        "drafts_s": ours.stats.decode_s,
        "tokens": ours.stats.new_tokens - 1,
        "rounds": ours.stats.rounds,
        "equal": ours.token_ids == plain.token_ids,
        "valid": ours.stop_reason == "eos" and is_valid(ours.text, SCHEMAS[name]),
        "grammar's drafts": drafted["grammar"],
        "kept": accepted["grammar"],
        "others' drafts": drafted.total() - drafted["grammar"],
        "others kept": accepted.total() - accepted["grammar"],
    }


def is_valid(text: str, schema: Any) -> bool:
    """By another package than the one that made the mask."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def figures(answers: pd.DataFrame) -> dict[str, Any]:
    """The figures of a schema: speeds behind the prompt's pass, and drafts by who made them."""
    sums = answers.drop(columns="schema").sum()
    low, high = ratio_interval(answers.plain_s, answers.drafts_s)
    return {
        "requests": len(answers),
        "valid": int(sums.valid),
        "texts equal": int(sums.equal),
        "tokens": int(sums.tokens),
        "tokens/s, plain": sums.tokens / sums.plain_s,
        "tokens/s": sums.tokens / sums.drafts_s,
        "times plain": sums.plain_s / sums.drafts_s,
        "low": low,
        "high": high,
        "tokens per verification": sums.tokens / sums.rounds,
        **{name: int(sums[name]) for name in answers if name.endswith(("drafts", "kept"))},
    }


if __name__ == "__main__":
    lab.run(main)
