"""OpenAI's own client, and example programs, against a live server."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessage

from eval import serving
from eval.serving import question
from selfspec.api.speculator import Speculator, wrap
from selfspec.errors import HeadsNotFound, InvalidOption
from selfspec.eval.concurrency import Load
from selfspec.serve.options import ServeOptions
from selfspec.serve.protocol import ChatBody, Refused, TextBody, invalid_body, refusal_of
from tests.api.test_text import TEMPLATE, metaspace
from tests.models import make_model
from tests.serve.live import CHAT, JSON, TEXT, Running, answers, running, streaming, wait_until
from tests.test_readme import fenced

TOOLS = Path(__file__).parents[2] / "docs" / "guides" / "tools.md"
ASK = [{"role": "user", "content": "Name two planets and one river."}]
LIMIT = {"max_tokens": 20, "temperature": 0.0}
BODY = {"messages": ASK, **LIMIT}


def chat(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": None, "messages": ASK, **LIMIT, **more})


def joined(chunks: Iterable[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_an_answer_is_that_of_generate(client: openai.OpenAI, server: Running) -> None:
    answer = chat(client, max_tokens=30)
    expected = server.speculator.generate(ASK, max_new_tokens=30, do_sample=False)
    (choice,) = answer.choices
    assert choice.message.content == expected.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == ("stop" if expected.stop_reason == "eos" else "length")
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.prompt_tokens == expected.stats.prompt_tokens
    assert answer.model == server.speculator.label
    drafts = answer.usage.speculation
    assert drafts["num_accepted_tokens"] <= drafts["num_draft_tokens"]
    assert drafts["rounds"] + drafts["num_accepted_tokens"] >= len(expected.token_ids) - 1
    assert drafts["lossless"]


def test_a_stream_joins_to_the_same_text(client: openai.OpenAI) -> None:
    answer = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    *body, last = chunks
    assert joined(body) == answer.choices[0].message.content
    ends = [chunk.choices[0].finish_reason for chunk in body]
    assert [end for end in ends if end] == [answer.choices[0].finish_reason]
    assert last.choices == []
    assert last.usage.completion_tokens == answer.usage.completion_tokens
    assert all(chunk.usage is None for chunk in body)
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize(
    ("asked", "temperature"),
    [
        ({}, None),
        ({"top_p": 1.0, "top_k": 0, "n": 1, "seed": None}, None),
        ({"temperature": 0, "seed": 3, "n": 2}, None),
        ({"temperature": 0.7}, 0.7),
        *(({name: value}, 1.0) for name, value in {"top_p": 0.9, "top_k": 5, "min_p": 0.1}.items()),
        *(({name: 2}, 1.0) for name in ("n", "seed")),
    ],
)
def test_sampling_follows_the_request(asked: dict[str, Any], temperature: float | None) -> None:
    choice, *_ = TextBody(prompt="One", **asked).choices(ServeOptions(), 9)
    assert choice.options["do_sample"] == (temperature is not None)
    assert choice.options.get("temperature") == temperature


def test_choices_use_consecutive_seeds(client: openai.OpenAI, server: Running) -> None:
    settings: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9}
    answer = chat(client, n=3, seed=7, max_tokens=4, **settings)
    generate = partial(server.speculator.generate, max_new_tokens=4, do_sample=True, top_k=0)
    expected = [generate(ASK, min_p=0.0, seed=seed, **settings).text for seed in (7, 8, 9)]
    assert len(set(expected)) == 3
    assert [choice.message.content for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = ["", "", ""]
    for chunk in chat(client, n=3, seed=7, max_tokens=4, stream=True, **settings):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == expected


def test_a_stop_ends_the_text_and_is_no_part_of_it(client: openai.OpenAI) -> None:
    content = chat(client).choices[0].message.content
    stop = content[8:11]
    answer = chat(client, stop=[stop, "never there"])
    assert answer.choices[0].message.content == content[: content.find(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert joined(chat(client, stop=stop, stream=True)) == content[: content.find(stop)]
    options: dict[str, Any] = {"prompt": "One\nTwo\nThree\n", "max_tokens": 8, "temperature": 0}
    for stop, extra, text, end in (
        ("\nFour", {}, "Four\nFive\nSix\n", "length"),  # a stop does not begin within the prompt
        ("<|im_start|>", {"logit_bias": {"1": 100}}, "", "stop"),  # a token that no text shows
    ):
        (choice,) = client.completions.create(model=None, stop=stop, **options, **extra).choices
        assert (choice.text[: len(text)], choice.finish_reason) == (text, end)


def test_completions_take_text_or_ids_one_or_several(
    client: openai.OpenAI, server: Running
) -> None:
    generate = partial(server.speculator.generate, max_new_tokens=8, do_sample=False)
    ids, texts = [[504, 3575], [1, 2, 3]], ["One, two,", "Red, green,"]
    cases: list[tuple[Any, list[Any]]] = [(texts[0], texts[:1]), (texts, texts)]
    for prompt, prompts in [*cases, (ids[0], ids[:1]), (ids, ids)]:
        answer = client.completions.create(
            model=server.speculator.label, prompt=prompt, max_tokens=8, temperature=0
        )
        expected = [generate(one, raw=True).text for one in prompts]
        assert [choice.text for choice in answer.choices] == expected
    body: Any = {"prompt": ["a", "b", "a"], "n": 2, "max_tokens": 1}
    usage = client.completions.create(model=server.speculator.label, **body).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 6)


def test_ids_continue_a_text_as_its_words_do() -> None:
    """Even where decoding strips the first space of a text."""
    tokenizer = metaspace()
    tokenizer.chat_template = TEMPLATE
    speculator = wrap(make_model("llama", vocab_size=4), tokenizer)
    with running(speculator, max_prompt_tokens=1) as server:
        for prompt in ("hello", [0]):
            body = {"prompt": prompt, "max_tokens": 1, "logit_bias": {"1": 100}}
            assert server.post(body, TEXT).json()["choices"][0]["text"] == " world"
        assert server.post({"prompt": [0, 0]}, TEXT).json()["error"]["param"] == "prompt"


def test_models_and_health(client: openai.OpenAI, server: Running) -> None:
    (model,) = client.models.list().data
    assert model.id == server.speculator.label
    assert client.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError, match=r"the model '\.\./.*passwd' is not here"):
        client.models.retrieve("../../etc/passwd")
    assert httpx.get(f"{server.address}/health").json()["status"] == "ok"
    for path in ("/", "/health", "/metrics", "/v1/models"):
        assert httpx.head(f"{server.address}{path}").status_code == 200


SCHEMA = {"name": "a", "schema": {"type": "objekt"}}
IMAGE = [{"type": "image_url", "text": "a"}]
TOOL = {"type": "function", "function": {"name": "f"}}
ARRAY = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"top_logprobs": 2}, None),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [ARRAY]}, "tools[0].function.parameters"),
        ({"tools": [TOOL] * 2}, None),
        ({"tool_choice": "required"}, None),
        ({"tools": [TOOL], "tool_choice": {**TOOL, "function": {"name": "g"}}}, None),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, "response_format"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"temprature": 1}, "temprature"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 129}, "n"),
        ({"stop": ["a" * 129]}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"best_of": 2}, "best_of"),
        ({"stop": 5}, "stop"),
        ({"logit_bias": {str(token): "" for token in range(1025)}}, "logit_bias"),
        ({"top_p": 0}, "top_p"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [*ASK, {"role": "tool", "content": "1", "tool_call_id": "a"}]}, "messages"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": IMAGE}]}, "messages[0].content[0].type"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"speculation": {"drafter": "wish"}}, "speculation.drafter"),
        ({"speculation": {"drafter": "+".join(["ngram"] * 99)}}, "speculation.drafter"),
        ({"speculation": {"drafter": "ngram:size=9"}}, "speculation.drafter"),
        ({"speculation": {"controller": "heuristic:longest=65"}}, "speculation.controller"),
        ({"speculation": {"model": "x"}}, "speculation.model"),
        ({"n": 128, "messages": ASK * 5_000}, "messages"),  # beyond the context length
        ({"model": "gpt-4o"}, "model"),
    ],
)
def test_unsupported_fields_are_refused_by_name(
    server: Running, more: dict[str, Any], field: str | None
) -> None:
    answer = server.post({**BODY, **more})
    error = answer.json()["error"]
    assert error["param"] == field
    code = "model_not_found" if field == "model" else None
    if "maximum context length is" in error["message"]:
        code = "context_length_exceeded"
    assert (answer.status_code, error["code"]) == (404 if field == "model" else 400, code)
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert "\n" not in error["message"]
    assert ("Did you mean temperature?" in error["message"]) == (field == "temprature")


def test_too_many_answers_are_refused_before_they_are_made() -> None:
    with pytest.raises(Refused, match="12800000 answers at once, expected at most 160"):
        TextBody(prompt=["a"] * 100_000, n=128).choices(ServeOptions(), 9)


def test_one_call_at_a_time_and_names_reach_the_template() -> None:
    named, result = {**ASK[0], "name": "Ann"}, {"role": "tool", "content": None}
    parts = {"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]}
    body = ChatBody(messages=[named, result, parts], parallel_tool_calls=False)  # type: ignore[list-item]  # as in JSON
    (choice,) = body.choices(ServeOptions(), 9)
    turns = [named, {**result, "content": ""}, {"role": "user", "content": "a\nb"}]
    assert (choice.most_calls, choice.prompt) == (1, turns)


def test_validation_of_a_million_errors_stops_early() -> None:
    messages = [{"role": "user", "content": [{}] * 1000}] * 1000
    for kind, body, start in (
        (TextBody, {"prompt": [{}] * 1000}, "prompt[0]"),
        (TextBody, {"prompt": [1, 2, "a", "b"]}, "prompt[2]"),  # a text or ids
        (TextBody, {"prompt": []}, "prompt is wrong: List should have"),
        (TextBody, dict.fromkeys(map(str, range(2000)), 1), "the body"),
        (ChatBody, {"messages": messages}, "messages[0].content[0].type"),
    ):
        with pytest.raises(pydantic.ValidationError) as error:
            kind.model_validate(body)
        assert error.value.error_count() < 10
        assert str(invalid_body(error.value)).startswith(start)


def test_a_slowly_read_body_blocks_nobody(small: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    original, goes_on = TextBody.choices, threading.Event()
    monkeypatch.setattr(TextBody, "choices", lambda *a: goes_on.wait(20) and original(*a))
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(small.post, {"prompt": "One", "max_tokens": 1}, TEXT)
        answers(small)
        goes_on.set()
        assert slow.result().status_code == 200


def test_an_unavailable_drafter_is_the_requests_fault() -> None:
    error = refusal_of(HeadsNotFound("drafter exit needs exit heads"))
    assert (error.status, error.field) == (400, "speculation.drafter")
    assert refusal_of(InvalidOption("Lower max_new_tokens")).message == "Lower max_tokens"


def said(more: bytes) -> bytes:
    return b'{"messages": [{"role": "user", "content": "a"}], ' + more + b"}"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        *(
            ("POST", "/v1/chat/completions", body, 400)
            for body in (
                *(b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000),
                b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
                *(said(b'"stop": "\\ud800"'), said(b'"model": "\\ud800"')),
                *(said(b'"n": ' + b"9" * 5000), said(b'"temperature": NaN')),
            )
        ),
        ("POST", "/v1/chat/completions", b"x" * 5_000_000, 413),
        ("GET", "/nothing", b"", 404),
        ("POST", "/v1/completions/", b"", 404),
        ("GET", "/v1/chat/completions", b"", 405),
        ("POST", "/v1/files", b"", 404),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_bad_body_or_path_is_refused(
    server: Running, method: str, path: str, body: bytes, status: int
) -> None:
    url = f"{server.address}{path}"
    answer = httpx.request(method, url, content=body, headers=JSON, timeout=60)
    assert answer.status_code == status
    assert answer.headers.get("allow") == ("POST" if status == 405 else None)
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "ChatBody" not in answer.json()["error"]["message"]
    assert ("Use /v1/chat/completions" in answer.json()["error"]["message"]) == (status == 404)


NOTHING = {"logprobs": False, "tools": None, "stop": None, "response_format": {"type": "text"}}
BREAK = {"cache_control": {"type": "ephemeral"}}  # LiteLLM passes it on
CACHED = [{"role": "user", **BREAK, "content": [{"type": "text", "text": "Hi.", **BREAK}]}]
SAID = ChatCompletionMessage(role="assistant", content="Mars.")
WEBUI = {"model": "LlamaForCausalLM", "messages": ASK}


@pytest.mark.parametrize(
    "body",
    [
        {**BODY, "user": "someone", "safety_identifier": "b"},
        {**BODY, "messages": CACHED, "prompt_cache_key": "a", "prompt_cache_retention": "24h"},
        {**BODY, "store": True},  # as in OpenAI's own examples
        {**BODY, "n": 2, "best_of": 2, "stop": ["a"] * 16},
        {**BODY, "presence_penalty": 0, **NOTHING},
        {**BODY, "top_k": -1, "repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": False},
        # Open WebUI: an answer, one with the settings of a chat, a title
        {**WEBUI, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2},
        {**BODY, "stream": True, "stream_options": {"include_obfuscation": False}},
        {**BODY, **WEBUI, "min_p": 0.1, "logit_bias": {"5": 1}, "seed": 0, "stop": ["."]},
        {**WEBUI, "stream": False, "max_completion_tokens": 2},
        {**BODY, "messages": [*ASK, SAID.model_dump(), *ASK]},  # an answer, sent back
    ],
)
def test_requests_of_common_clients_are_accepted(small: Running, body: dict[str, Any]) -> None:
    assert small.post(body, Authorization="Bearer none").status_code == 200


def test_variables_reach_the_chat_template(small: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, name = small.speculator.tokenizer, "chat_template_kwargs"
    text = (
        "{{ messages[0].content }}{% if enable_thinking %} Think {{ reasoning_effort }}.{% endif %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", text)
    lengths = []
    for thinks in (False, True):
        options: Any = {name: {"enable_thinking": thinks}}
        answer = small.speculator.generate(ASK, max_new_tokens=2, **options)
        usage = small.post({**BODY, **options}).json()["usage"]
        assert usage["prompt_tokens"] == answer.stats.prompt_tokens
        lengths.append(usage["prompt_tokens"])
    assert lengths[0] < lengths[1]
    more = {"reasoning_effort": "high", name: {"enable_thinking": True}}
    usage = small.post({**BODY, **more}).json()["usage"]
    assert usage["prompt_tokens"] == lengths[1] + len("high")  # a token is a letter
    error = small.post({**BODY, name: {"thinks": True}}).json()["error"]
    assert error["param"] == name
    assert "has thinks, which" in error["message"]


SPECULATION: list[Any] = [
    True,
    False,
    {"drafter": "ngram"},
    {"drafter": None, "never_slower": False},
    # the largest values that a request may give
    {"drafter": "ngram:size=8,max_tokens=16"},
    {"drafter": "exit:max_tokens=16,guesses=4,max_rows=32"},
    {"drafter": "successors:max_tokens=16,guesses=4,max_rows=32"},
    {"drafter": "lookahead:level=4,window=4,guesses=4"},
    {"controller": "gammatune:longest=16,shortest=16"},
]


def test_sixteen_at_once_get_the_same_texts_as_alone(small: Running) -> None:
    prompts = [f"Tell me {count} things about the number {count}." for count in range(16)]
    generate = partial(small.speculator.generate, max_new_tokens=20, do_sample=False)
    alone = [generate(prompt).text for prompt in prompts]

    def over_http(number: int) -> str:
        body = {**BODY, "messages": [{"role": "user", "content": prompts[number]}]}
        answer = small.post({**body, "speculation": SPECULATION[number % len(SPECULATION)]})
        return str(answer.json()["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(over_http, range(16))) == alone


def test_the_queue_is_bounded(tiny: Speculator) -> None:
    with running(tiny, concurrency=1, queue=1) as small, ThreadPoolExecutor(1) as pool:
        with streaming(small):
            second = pool.submit(small.post, BODY)
            wait_until(lambda: small.writer.open_choices == 2)
            third = small.post(BODY)
            assert third.status_code == 429
            assert third.headers["retry-after"] == "1"
            assert third.json()["error"]["type"] == "rate_limit_error"
        assert second.result().status_code == 200


def test_a_server_with_keys_requires_one(default: Speculator) -> None:
    with running(default, keys=("first", "second"), timeout=0.001) as guarded:
        for header in (None, "Bearer wrong", "Bearer", "Basic first", "Bearer fïrst"):
            headers: Any = {} if header is None else {b"Authorization": header.encode()}
            answer = httpx.post(f"{guarded.address}{CHAT}", json=BODY, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        answer = guarded.post(BODY, Authorization="Bearer second")
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["finish_reason"] == "length"  # the timeout cuts it
        assert answer.json()["usage"]["completion_tokens"] < 20
        for path, status in (("/health", 200), ("/metrics", 401), ("/v1/models", 401)):
            assert httpx.get(f"{guarded.address}{path}").status_code == status


@pytest.mark.parametrize("package", ["langchain_openai", "llama_index"])
def test_programs_of_the_docs_print_the_texts_of_generate(
    server: Running, package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(package)
    (program,) = (block for block in fenced("py", TOOLS.read_text()) if package in block)
    exec(program.replace("http://127.0.0.1:8000", server.address), {})
    prompts = ("Name two planets.", "Name two rivers.")
    generate = partial(server.speculator.generate, do_sample=False, max_new_tokens=20)
    texts = [generate(prompt).text for prompt in prompts]
    assert capsys.readouterr().out == "\n".join(texts)


# --- the figures of eval/serving.py

PROMPTS = ["Name a river.", "Count to five.", "Say hello."]


def test_a_load_counts_the_tokens_of_usage(small: Running) -> None:
    load = Load(texts=2)
    requests = [question(text, 6, **serving.STREAMED) for text in (*PROMPTS, *PROMPTS[:2])]
    serving.run_load(small.address, requests, load)
    alone = [
        small.speculator.generate(PROMPTS[index % 3], max_new_tokens=6, do_sample=False)
        for index in range(5)
    ]
    assert load.tokens == sum(len(answer.token_ids) for answer in alone)
    assert len(load.first_s) == 5
    assert 0 < sum(load.gaps_s) < load.texts * load.seconds


def test_an_error_ends_the_measurement(small: Running) -> None:
    requests = [question("Hello", 4, temperature=9)]
    with pytest.raises(RuntimeError, match=r"status 400.*temperature"):
        serving.run_load(small.address, requests, Load(texts=1))


def test_ours_is_compared_with_the_best_peer() -> None:
    def load(method: str, seconds: float) -> Load:
        return Load(method=method, texts=4, seconds=seconds, tokens=60, first_s=[0.1, 0.3])

    loads = [load(serving.OURS, 1), load(serving.THEIRS, 6), load(serving.BATCHING, 3)]
    assert serving.relative_rates(loads) == {4: 3.0}


def test_differing_answers_are_found(small: Running) -> None:
    alone = [
        serving.without_server(small.speculator, number, prompt, 6)
        for number, prompt in enumerate(PROMPTS)
    ]
    token, logprob = alone[1].logprobs[-1]
    off_by_a_bit = [*alone[1].logprobs[:-1], (token, math.nextafter(logprob, 0.0))]
    wrong = [alone[0], replace(alone[1], logprobs=off_by_a_bit), alone[2]]
    for expected, differing in ((alone, []), (wrong, [1])):
        report = serving.compare(small.address, PROMPTS, expected, 6, 2, speculation=True)
        assert list(report["differing"]) == differing
        assert (report["answers"], report["sampled"], report["streams"]) == (3, 1, 1)
