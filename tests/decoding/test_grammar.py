"""Answers under a grammar: valid, equal with all drafts; forced tokens are drafted."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerFast

from selfspec.api.request import Grammars
from selfspec.api.speculator import Speculator, wrap
from selfspec.config import Grammar, grammar_of, grammar_of_schema
from selfspec.decoding.acceptance import Draft
from selfspec.decoding.drafters.ngram import GrammarDrafter
from selfspec.decoding.sampling import GrammarMask
from selfspec.errors import InvalidOption
from selfspec.model.backbone import Backbone
from tests.api.test_text import byte_level_bpe
from tests.ladder import deep_heads
from tests.laws import Text
from tests.models import make_model, random_ids
from tests.talks import make_tokenizer

VOCAB_SIZE = 384
"""Of the model; the tokenizer has fewer."""
JSON = [
    json.dumps({"name": name, "age": age, "tags": ["red", "green"], "ok": True})
    for name, age in (("Ada", 36), ("Alan", 41), ("Grace", 85))
]
"""What the tokenizer was trained on."""

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}

DRAFTS: list[dict[str, Any]] = [
    {"drafter": "exit:threshold=0.01,layers=3"},
    {"drafter": "exit:threshold=0.001,layers=0,guesses=3", "never_slower": False},
    {"drafter": "exit:threshold=0.01,layers=3,guesses=3", "never_slower": False},
    {"drafter": "ngram"},
    {"drafter": "ngram+exit:threshold=0.01"},
    {"drafter": "exit", "pinned": True},
    {"drafter": "lookahead", "never_slower": False},
]


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    return byte_level_bpe(JSON, VOCAB_SIZE - 16)


@pytest.fixture(scope="module")
def model(words: PreTrainedTokenizerFast) -> Speculator:
    """A float64 speculator, whose choices rows cannot change."""
    llama: Any = make_model("llama", torch.float64, vocab_size=VOCAB_SIZE)
    llama.generation_config.eos_token_id = words.eos_token_id
    heads = deep_heads(Backbone(llama, executor="generic"))
    return wrap(llama, words, heads=heads, executor="generic")


def allowed(words: PreTrainedTokenizerFast, text: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether a fresh matcher accepts the tokens after the text."""
    matcher = LLMatcher(from_tokenizer(words, n_vocab=VOCAB_SIZE), grammar_of_schema(PERSON).text)
    return bool(matcher.consume_tokens([*text, *tokens]))


@pytest.mark.parametrize("drafts", DRAFTS, ids=str)
@pytest.mark.parametrize("drawing", [{}, {"do_sample": True, "seed": 5}], ids=["greedy", "seeded"])
def test_an_answer_follows_its_schema_with_any_drafter(
    model: Speculator, drafts: dict[str, Any], drawing: dict[str, Any]
) -> None:
    options: Any = {"json_schema": PERSON, "max_new_tokens": 120, **drawing}
    plain = model.generate("A person:", speculate=False, **options)
    answer = model.generate("A person:", **options, **drafts)
    jsonschema.validate(json.loads(answer.text), PERSON)
    assert answer.stop_reason == "eos"
    assert answer.token_ids == plain.token_ids
    drafted, kept = answer.stats.drafted_by_source, answer.stats.accepted_by_source
    assert drafted["grammar"] == kept["grammar"] > 4  # forced tokens: keys, quotes, brackets
    assert answer.stats.rounds < plain.stats.rounds - kept["grammar"] // 2


@pytest.mark.parametrize("drafts", DRAFTS[:5], ids=str)
def test_no_draft_breaks_the_grammar(
    model: Speculator, words: PreTrainedTokenizerFast, drafts: dict[str, Any]
) -> None:
    stream = model.stream("A person:", json_schema=PERSON, max_new_tokens=120, **drafts)
    text: list[int] = []
    checks = 0
    for entry in (stream.drain(), stream.rounds)[1]:
        draft = Draft.of(entry.draft_tokens, entry.parents)
        for index, source in enumerate(entry.sources):
            assert allowed(words, text, draft.tokens_to(index))
            checks += source != "grammar"
        text += entry.tokens
    assert checks or drafts == {"drafter": "ngram"}


FIELDS: dict[str, dict[str, Any]] = {
    "number": {"type": "integer", "minimum": -5, "maximum": 99},
    "flag": {"type": "boolean"},
    "nothing": {"type": "null"},
    "b c": {"enum": ["a b", 1.5, None]},
    "text": {"type": "string", "maxLength": 4},
    "Ω": {"type": "string", "pattern": "^[0-9]{2}-[xyz]$"},
    "sure": {"const": {"deep": [1, "é"]}},
}


def every_schema() -> list[dict[str, Any]]:
    """A schema of each kind, an array of each, and an object of all."""
    arrays = [{"type": "array", "items": field, "maxItems": 2} for field in FIELDS.values()]
    closed = {"required": sorted(FIELDS), "additionalProperties": False}
    return [*FIELDS.values(), *arrays, {"type": "object", "properties": FIELDS} | closed]


@pytest.mark.parametrize(("seed", "schema"), enumerate(every_schema()))
def test_any_schema_is_followed(model: Speculator, schema: dict[str, Any], seed: int) -> None:
    options: Any = {"json_schema": schema, "max_new_tokens": 300, "do_sample": True, "seed": seed}
    answer = model.generate("Write:", drafter="ngram+exit:threshold=0.01", **options)
    assert answer.stop_reason == "eos"
    jsonschema.validate(json.loads(answer.text), schema)
    assert answer.token_ids == model.generate("Write:", speculate=False, **options).token_ids


def mask(words: PreTrainedTokenizerFast, grammar: Grammar) -> GrammarMask:
    return Grammars(words, VOCAB_SIZE).mask(grammar, [int(words.eos_token_id)], 3)


def test_forced_tokens_end_with_the_end_token(words: PreTrainedTokenizerFast) -> None:
    grammar: Any = grammar_of({"grammar": 'start: ("yes" | "no") ", of course."'})
    grammar_mask = mask(words, grammar)
    forced = grammar_mask.forced_tokens(words("yes")["input_ids"], 50)
    assert words.decode(forced) == ", of course.<end>"
    assert grammar_mask.forced_tokens(words("yes")["input_ids"], 2) == forced[:2]
    assert grammar_mask.forced_tokens([], 5) == []
    assert grammar_mask.forced_tokens([], 0) == []


def test_forced_tokens_are_the_trunk_despite_any_rival(words: PreTrainedTokenizerFast) -> None:
    grammar_mask = mask(words, grammar_of_schema(PERSON))
    drafter = GrammarDrafter(grammar_mask, 0, 2)
    opening = Text([0] * grammar_mask.start + words('{"')["input_ids"])
    draft = drafter.propose(opening, 9, rival=5.0)
    assert len(draft.tokens) == 2
    assert {(token.source, token.chance) for token in draft.proposed} == {("grammar", 1.0)}
    assert drafter.propose(opening, 1).tokens == draft.tokens[:1]
    assert drafter.propose(opening, 0).tokens == []
    free = Text([0] * grammar_mask.start + words('{"name": "A')["input_ids"])
    assert drafter.propose(free, 9).tokens == []


def test_each_row_of_a_batch_follows_the_grammar(model: Speculator) -> None:
    ids = torch.cat([random_ids(5, seed=seed) for seed in (1, 2)])
    options: Any = {"json_schema": PERSON, "max_new_tokens": 120, "num_return_sequences": 2}
    options |= {"do_sample": True, "seed": 3}
    texts = [answer.text for answer in model.generate_batch(ids, **options)]
    assert len({*texts}) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json_schema": {"type": "objekt"}}, "^json_schema is not supported: Invalid type"),
        ({"json_schema": {"not": {}}}, "Unimplemented keys"),
        ({"json_schema": False}, "^json_schema is False, expected a schema"),
        ({"json_schema": {"a": {1, 2}}}, "^json_schema cannot be read"),
        ({"grammar": "start: foo"}, "unknown name"),
        ({"grammar": ""}, "Empty grammar"),
        ({"grammar": "start: /a/", "json_schema": True}, "Leave one of them out"),
        ({"json_schema": True, "eos_token_id": -1}, "^json_schema needs an end token. Set eos"),
        ({"json_schema": {"$ref": "#"}}, "be followed: NoExtensionBias. Give a simpler one$"),
        ({"grammar": "start: /(a{1000}){1000}/"}, "be followed: lexer error: [^{]*simpler one$"),
        ({"json_schema": PERSON, "min_new_tokens": 150}, "rules out every token"),
        ({"json_schema": PERSON, "forced_eos_token_id": 0, "max_new_tokens": 3}, "rules out every"),
    ],
    ids=[*map(str, range(12))],
)
def test_unusable_grammars_are_refused(
    model: Speculator, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidOption, match=message) as error:
        model.generate("A", **options)
    assert "\n" not in str(error.value)


def test_a_missing_package_or_an_unsuitable_tokenizer_is_named(
    model: Speculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidOption, match=r"used with this tokenizer, \w+: [^\n]+$"):
        Grammars(make_tokenizer(), VOCAB_SIZE).mask(grammar_of_schema(True), [1])
    with pytest.raises(InvalidOption, match="its tokenizer has 10 tokens, the model 9"):
        Grammars(make_tokenizer(), 9).mask(grammar_of_schema(True), [1])
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidOption, match=r"pip install 'selfspec\[serve\]'"):
        model.generate("A", json_schema=True)
