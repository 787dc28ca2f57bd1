"""Structured output, tool calls, logprobs, penalties and explanations, with OpenAI's client."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from selfspec.api.speculator import Speculator
from selfspec.api.text import TokenTexts
from selfspec.decoding.costs import DraftCost
from selfspec.decoding.stats import Round
from selfspec.serve.writer import BARE, TAGGED, Calls, Explanation, format_of
from tests.serve.live import Running, running

ASK = [{"role": "user", "content": "Describe a person as JSON."}]
LIMIT = {"max_tokens": 80, "temperature": 0.0}


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)
    likes: Literal["tea", "coffee"]


def chat(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": None, "messages": ASK, **LIMIT, **more})


def test_a_schema_is_followed_and_drafts_change_nothing(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="SmolLM2-135M-Instruct.Q4_1", messages=ASK, response_format=Person, **LIMIT
    )
    assert isinstance(answer.choices[0].message.parsed, Person)
    assert answer.usage is not None
    drafts = answer.usage.speculation
    assert drafts["sources"]["grammar"]["drafted"] == drafts["sources"]["grammar"]["accepted"] > 3
    schema = {"name": "Person", "schema": Person.model_json_schema()}
    shape = {"type": "json_schema", "json_schema": schema}
    plain = chat(client, response_format=shape, extra_body={"speculation": False})
    assert plain.choices[0].message.content == answer.choices[0].message.content
    chunks = chat(client, response_format=shape, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == (
        answer.choices[0].message.content
    )


def test_an_empty_schema_allows_any_json(client: openai.OpenAI) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "any", "schema": {}}}
    messages = [{"role": "user", "content": "Say hello."}]
    (choice,) = chat(client, messages=messages, response_format=shape).choices
    assert json.loads(choice.message.content) is not None


def test_json_object_mode_writes_an_object(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 4, "logit_bias": {"14704": 8}}
    answer = chat(client, response_format={"type": "json_object"}, max_tokens=60, **settings)
    (choice,) = answer.choices
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_generate(
    client: openai.OpenAI, server: Running, stream: bool
) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "max_tokens": 12}
    expected = server.speculator.generate(ASK, max_new_tokens=12, do_sample=False, logprobs=3)
    assert expected.logprobs is not None
    answer = chat(client, stream=stream, **options)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    content = [token for c in choices if c.logprobs for token in c.logprobs.content]
    assert [token.logprob for token in content] == [token.logprob for token in expected.logprobs]
    assert [[top.logprob for top in token.top_logprobs] for token in content] == [
        [logprob for _, logprob in token.top] for token in expected.logprobs
    ]
    assert "".join(token.token for token in content).startswith(expected.text)
    assert bytes(byte for one in content for byte in one.bytes).decode().startswith(expected.text)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_completions_have_their_own_shape(client: openai.OpenAI, stream: bool) -> None:
    emojis = "Emojis: 😀😃😄😁😆"  # the answer has more of them, three tokens each
    options: dict[str, Any] = {"prompt": emojis, "logprobs": 2, **LIMIT, "max_tokens": 9}
    answer = client.completions.create(model=None, stream=stream, **options)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    text = "".join(choice.text for choice in choices)
    pieces = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for piece in pieces for token in piece.tokens]
    offsets = [offset for piece in pieces for offset in piece.text_offset]
    assert tokens.count("\N{REPLACEMENT CHARACTER}") > 2
    for token, at in zip(tokens, offsets, strict=True):
        assert text[at:].startswith(token) or (token == "\N{REPLACEMENT CHARACTER}" and text[at:])
    assert all(len(top) <= 2 for piece in pieces for top in piece.top_logprobs)
    tops = [max(top.values()) for piece in pieces for top in piece.top_logprobs]
    assert tops == [value for piece in pieces for value in piece.token_logprobs]  # greedy
    options |= {"prompt": "The sky", "temperature": 2.0, "seed": 1, "logprobs": 0}
    drawn = client.completions.create(model=None, **options)
    logprobs = drawn.choices[0].logprobs
    assert [{*top} for top in logprobs.top_logprobs] == [{token} for token in logprobs.tokens]


def test_logprobs_leave_out_the_end_token(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Name a planet."}]
    (choice,) = chat(client, messages=messages, logprobs=True).choices
    assert choice.finish_reason == "stop"
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content


def test_penalties_and_bias_are_those_of_generate(small: Running) -> None:
    def content(**more: Any) -> Any:
        answer = small.post({"messages": ASK, "max_tokens": 30, "temperature": 0, **more})
        return answer.json()["choices"][0]["message"]["content"]

    plain, generate = content(), partial(small.speculator.generate, ASK, do_sample=False)
    for name in ("presence_penalty", "frequency_penalty"):
        penalty: Any = {name: 2.0}
        assert content(**penalty) == generate(max_new_tokens=30, **penalty).text != plain
    first = generate(max_new_tokens=1).token_ids[0]
    assert content(logit_bias={str(first): -100})[:1] != plain[:1]


# Calls

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nFunctions: {{ tools | tojson }}. Call one so: <tool_call>\n"
    '{"name": .., "arguments": {..}}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
FIELDS = {"city": {"$ref": "#/$defs/City"}, "unit": {"enum": ["C", "F"]}}
PARAMETERS = {
    **{"type": "object", "properties": FIELDS, "required": [*FIELDS]},
    "$defs": {"City": {"type": "string", "maxLength": 12}},  # as pydantic writes them
    "additionalProperties": False,
}
GET = {"name": "get_weather", "description": "In a city.", "parameters": PARAMETERS}
WEATHER = {"type": "function", "function": GET}
NOTHING = {"type": "object", "properties": {}}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": NOTHING}}


@pytest.fixture(scope="module")
def caller(default: Speculator) -> Iterator[openai.OpenAI]:
    speculator = copy.copy(default)
    speculator.tokenizer = copy.copy(default.tokenizer)
    assert speculator.tokenizer is not None
    speculator.tokenizer.chat_template = TEMPLATE
    with running(speculator) as server:
        yield openai.OpenAI(base_url=f"{server.address}/v1", api_key="none")


@pytest.mark.parametrize(
    ("wanted", "stream"), [("", False), ("", True), ("get_weather", False), ("get_time", True)]
)
def test_a_required_call_follows_its_schema(
    caller: openai.OpenAI, wanted: str, stream: bool
) -> None:
    choice: Any = {"type": "function", "function": {"name": wanted}} if wanted else "required"
    answer = chat(caller, tools=[WEATHER, TIME], tool_choice=choice, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    replies = [part.delta if stream else part.message for part in choices]
    assert not any(reply.content for reply in replies)
    (call,) = [call for reply in replies for call in reply.tool_calls or ()]
    assert choices[-1].finish_reason == "tool_calls"
    arguments = json.loads(call.function.arguments)
    if not stream:  # the grammar forces most of it
        least = 20 if arguments else 10
        assert answer.usage.speculation["sources"]["grammar"]["accepted"] > least
    assert call.function.name == wanted or not wanted
    if call.function.name == "get_weather":
        jsonschema.validate(arguments, PARAMETERS)
    else:
        assert arguments == {}  # it has no parameters
    talk = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "Rain."},
    ]
    assert chat(caller, messages=talk, tools=[WEATHER, TIME], max_tokens=5).choices[0].finish_reason


CALL = '{"name": "get_time", "arguments": {"a": "<tool_call> } </tool_call>"}}'


@pytest.mark.parametrize(
    ("form", "text", "content", "names"),
    [
        (TAGGED, f"So: <tool_call>\n{CALL}\n</tool_call>", "So: ", ["get_time"]),
        (TAGGED, f"<tool_call>{CALL}</tool_call><tool_call>{CALL}", "", ["get_time"] * 2),
        (TAGGED, f"<tool_call>{CALL}</tool_call>\nSo it is.", "\nSo it is.", ["get_time"]),
        (TAGGED, f"<tool_call>{CALL}}}</tool_call>", None, []),
        (TAGGED, "<tool_call>\nnothing", "<tool_call>\nnothing", []),
        (TAGGED, f"<tool_call>{CALL.replace('time', 'cash')}", None, []),
        (TAGGED, "a <tool", "a <tool", []),
        (BARE, CALL.replace("arguments", "parameters"), "", ["get_time"]),
        (BARE, f"{CALL.replace('arguments', 'parameters')} it is", None, []),
        (BARE, f"It is {CALL}", None, []),
        (BARE, " {not JSON", " {not JSON", []),
        (BARE, "", "", []),
    ],
)
def test_calls_are_parsed_from_text_in_any_pieces(
    form: Any, text: str, content: str | None, names: list[str]
) -> None:
    for size in (1, 3, 1000):
        reader = Calls(form, [TIME])
        shown = "".join(reader.push(text[at : at + size]) for at in range(0, len(text), size))
        rest, calls = reader.end()
        assert shown + rest == (text if content is None else content)
        assert [call["function"]["name"] for call in calls] == names
        single = Calls(form, [TIME], 1)
        single.push(text)
        assert len(single.end()[1]) == min(1, len(names))


def test_a_required_call_that_is_cut_has_part_of_its_arguments(caller: openai.OpenAI) -> None:
    options: dict[str, Any] = {"tools": [TIME, WEATHER], "tool_choice": "required"}
    (choice,) = chat(caller, **options, max_tokens=18).choices
    assert (choice.message.content, choice.finish_reason) == (None, "length")
    assert choice.message.tool_calls[0].function.arguments
    for form in (TAGGED, BARE):
        arguments = '{"a": "}"}'
        text = f'{form.before}{{"name": "get_time", "{form.arguments}": {arguments}}}{form.after}'
        for end in range(len(text)):
            reader = Calls(form, [WEATHER, TIME], must_call=True)
            assert reader.push(text[:end]) == ""
            rest, calls = reader.end()
            assert rest == ""
            assert len(calls) == (end >= text.index(arguments))
            for call in calls:
                assert call["function"]["arguments"] == text[text.index(arguments) : end][:10]


def test_the_format_of_calls_follows_the_template(default: Speculator) -> None:
    tokenizer = copy.copy(default.tokenizer)
    assert tokenizer is not None
    assert format_of(tokenizer) is None
    for template, form in (
        (TEMPLATE, TAGGED),
        ('{{ tools }} {"name": .., "parameters": ..}', BARE),
        ("{{ tools }} in a way of its own", None),
        (None, None),
    ):
        tokenizer.chat_template = template
        assert format_of(tokenizer) is form
    assert format_of(None) is None


# The source of each token: the counts of usage, and the answer's own text

LISTS = [{"role": "user", "content": "Repeat three times: 🦜 red, green, blue 🪁 and grey."}]
EXPLAIN = {"explain": True}


def ask(client: openai.OpenAI, speculation: Any = EXPLAIN, **more: Any) -> Any:
    options = {"messages": LISTS, "max_tokens": 28, **more}
    return chat(client, extra_body={"speculation": speculation}, **options)


def joined(rounds: list[Any]) -> str:
    return "".join(token["text"] for entry in rounds for token in entry["tokens"])


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 0.9, "seed": 3, "n": 2},
        {"stop": ["blue", "\n\n"]},
        {"speculation": {"drafter": "ngram", "explain": True}},
        {"speculation": {"drafter": "none", "explain": True}},
    ],
)
def test_sources_match_usage_and_texts_join(
    client: openai.OpenAI, server: Running, more: dict[str, Any]
) -> None:
    answer = ask(client, **more)
    texts = [""] * len(answer.choices)
    rounds: list[list[Any]] = [[] for _ in texts]
    for chunk in ask(client, stream=True, **more):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            explanation = getattr(choice, "speculation", {"rounds": []})
            rounds[choice.index] += explanation["rounds"]
            assert texts[choice.index].startswith(joined(rounds[choice.index]))
    drafted, accepted, tokens = Counter[str](), Counter[str](), 0
    for choice in answer.choices:
        explanation = choice.speculation["rounds"]
        assert joined(explanation) == choice.message.content == texts[choice.index]
        assert choice.speculation["num_layers"] == server.speculator.backbone.num_layers
        assert explanation == rounds[choice.index]
        first, *others = explanation
        assert (first["steps"], first["drafts"]) == (0, [])
        for entry in others:
            drafted.update(draft["source"] for draft in entry["drafts"])
            accepted.update(draft["source"] for draft in entry["drafts"] if draft["accepted"])
            sources = [token["source"] for token in entry["tokens"]]
            kept = sum(draft["accepted"] for draft in entry["drafts"])
            assert "model" not in sources[:kept]
            assert sources[kept:] in ([], ["model"])
            assert entry["steps"] >= 1
            assert entry["steps"] > 1 or not entry["drafts"]  # heads may give no draft
        tokens += sum(len(entry["tokens"]) for entry in explanation)
    usage = answer.usage.speculation
    assert usage["rounds"] == sum(len(c.speculation["rounds"]) - 1 for c in answer.choices)
    assert tokens == answer.usage.completion_tokens
    assert {
        source: {"drafted": drafted[source], "accepted": accepted[source]} for source in drafted
    } == usage["sources"]
    assert bool(drafted) == (more.get("speculation", EXPLAIN).get("drafter") != "none")


def test_nothing_is_explained_unless_asked(client: openai.OpenAI) -> None:
    answers = [ask(client, wish) for wish in (None, True, False, {"drafter": "ngram"})]
    answers += [ask(client, {"explain": False}), *ask(client, None, stream=True)]
    assert not any(hasattr(c, "speculation") for answer in answers for c in answer.choices)
    with pytest.raises(openai.BadRequestError, match="explain"):
        ask(client, {"explain": 1})


def entry(tokens: list[int], drafts: list[int], kept: list[int], **more: Any) -> Round:
    fields: Any = {"exit_layers": [0] * len(drafts), "sources": ["exit"] * len(drafts)}
    return Round(tokens=tokens, draft_tokens=drafts, kept=kept, ended="unsure", **fields | more)


def test_a_round_waits_for_its_text_and_a_stop_cuts_it() -> None:
    report = Explanation(TokenTexts(None), DraftCost(rows=(0.5, 0.25), head=0.125, num_layers=4))
    report.add(entry([1], [], [], prefill=True), ["on"])
    assert [part["steps"] for part in report.take("on")] == [0]
    report.add(
        entry([2, 3, 4], [2, 3, 9], [0, 1], exit_layers=[2, 1, 0], heads=4), ["e E", "N", "D!"]
    )
    assert report.take("e ") == []  # END may begin here
    report.add(entry([5], [7, 8], [], parents=[-1, -1], sources=["ngram"] * 2), ["?"])
    report.add_rest("!")
    first, second = report.take("", last=True)
    assert [token["text"] for token in first["tokens"]] == ["e ", "", ""]
    assert [token["layer"] for token in first["tokens"]] == [2, 1, None]
    drafts = [(draft["text"], draft["parent"], draft["accepted"]) for draft in first["drafts"]]
    assert drafts == [("<2>", -1, True), ("<3>", 0, True), ("<9>", 1, False)]
    assert first["steps"] == 1 + (0.5 + 0.25 + 0.25) + (2 + 1 + 0) / 4 + 4 * 0.125
    assert [token["text"] for token in second["tokens"]] == [""]
    assert [(draft["parent"], draft["layer"]) for draft in second["drafts"]] == [(-1, None)] * 2
    assert second["steps"] == 1 + 0.5 + 0.25
