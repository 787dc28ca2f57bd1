"""Chat templates for models without one: their texts, ends of turns, and refused templates."""

from __future__ import annotations

import logging
import re
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import GGUFReader
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from selfspec.api import chat_template as templates
from selfspec.api.chat_template import NO_END, TurnEnd, apply_template
from selfspec.api.speculator import wrap
from selfspec.errors import InvalidOption, InvalidPrompt, SelfspecError
from selfspec.heads.exit_heads import ExitHeads
from selfspec.hub import models as hub
from tests.api.test_text import byte_level_bpe
from tests.models import make_model
from tests.talks import TEMPLATE, dialogue

TALK = dialogue("Q", "A", "Q2", rule="S")
WRITTEN = {
    "alpaca": "<s>S\n\n### Instruction:\nQ\n\n### Response:A</s>\n\n### Instruction:\nQ2\n\n"
    "### Response:",
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n"
    "<|im_start|>assistant\nA<|im_end|>\n<|im_start|>user\nQ2<|im_end|>\n<|im_start|>assistant\n",
    "llama-2": "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nQ [/INST] A </s><s>[INST] Q2 [/INST]",
    "vicuna": "<s>S USER: Q ASSISTANT: A</s>USER: Q2 ASSISTANT:",
    "zephyr": "<|system|>\nS</s>\n<|user|>\nQ</s>\n<|assistant|>\nA</s>\n<|user|>\nQ2</s>\n"
    "<|assistant|>\n",
}
"""Expected texts, written by hand from the sources that the template files name."""


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer without a template, with the special tokens that the templates use."""
    bpe = byte_level_bpe()
    bpe.add_tokens(["<s>", "</s>"], special_tokens=True)
    bpe.bos_token, bpe.eos_token = "<s>", "</s>"
    assert bpe.chat_template is None
    return bpe


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("llama", vocab_size=300)


@pytest.mark.parametrize("name", templates.NAMES)
def test_turns_match_the_source(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    write = templates.with_template(tokenizer, templates.read(name)).apply_chat_template
    two, three, four = (
        str(write(TALK[:count], tokenize=False, add_generation_prompt=count != 3))
        for count in (2, 3, 4)
    )
    assert four == WRITTEN[name]
    assert three.startswith(two)
    assert four.startswith(three)
    assert "Source: " in templates.read(name)
    assert templates.name_of(templates.read(name)) == name


def test_a_turn_ends_with_a_token_or_with_text(tokenizer: PreTrainedTokenizerFast) -> None:
    chatml = templates.with_template(tokenizer, templates.read("chatml"))
    alpaca = templates.with_template(tokenizer, templates.read("alpaca"))
    assert templates.turn_end(alpaca) == NO_END
    assert templates.turn_end(chatml) == TurnEnd(text="<|im_end|>")
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    assert templates.turn_end(chatml) == TurnEnd(token=len(tokenizer) - 1)
    one_line = templates.read("chatml").replace(r"\n", "")
    chatml.chat_template = one_line
    assert templates.turn_end(chatml) == TurnEnd(token=len(tokenizer) - 1)
    last = "(eos_token if loop.last else '<|im_end|>')"
    chatml.chat_template = one_line.replace("'<|im_end|>'", last)
    assert templates.turn_end(chatml) == NO_END
    alpaca.eos_token = None
    assert templates.turn_end(alpaca) == TurnEnd(text="### Instruction:")


def test_a_template_belongs_to_one_speculator_and_its_token_ends_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(InvalidPrompt, match=r"loaded with none.*--raw, /v1/completions"):
        wrap(model, tokenizer).generate(TALK)
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    end = len(tokenizer) - 1
    speculator = wrap(model, tokenizer, chat_template="chatml")
    call = speculator.call(TALK, {"max_new_tokens": 4})
    assert tokenizer.decode(call.input_ids[0]) == WRITTEN["chatml"]
    assert tokenizer.chat_template is None
    assert call.end_tokens == {end}
    assert speculator.call("a", {"raw": True}).end_tokens == frozenset()
    tokens = speculator.call(TALK, {"eos_token_id": 5}).end_tokens
    assert tokens == {5}
    model.generation_config.eos_token_id = 7
    options: Any = {"generation_config": GenerationConfig(max_new_tokens=4)}
    assert speculator.call(TALK, options).end_tokens == {end, 7}
    model.generation_config.eos_token_id = None


def test_read_ahead_compiles_a_grammar_for_the_end_tokens_in_use(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    speculator = wrap(model, tokenizer, chat_template="chatml")
    speculator.read_ahead({"json_schema": True})
    monkeypatch.setattr("selfspec.api.request.check_grammar", lambda _: 1 // 0)
    speculator.call(TALK, {"json_schema": True, "max_new_tokens": 4})


def test_a_text_that_ends_turns_is_a_stop_string(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    loop = "{% for m in messages %}{{ m.content }}"
    plain = wrap(model, tokenizer, chat_template=loop + "{% endfor %}")
    text = plain.generate("the cat", max_new_tokens=30).text
    end = next(word for word in text[4:].split() if word.isascii() and "'" not in word)
    ending = "{% if m.role == 'assistant' %}" + repr(end)[1:-1] + "\n{% endif %}{% endfor %}"
    speculator = wrap(model, tokenizer, chat_template=loop + ending)
    assert speculator.turn_end == TurnEnd(text=end)
    answer = speculator.generate("the cat", max_new_tokens=30)
    assert answer.stop_reason == "stop"
    assert answer.text == text.partition(end)[0]
    assert tokenizer.decode(answer.token_ids) == answer.text + end
    assert "".join(speculator.stream("the cat", max_new_tokens=30)) == answer.text
    assert speculator.generate("the cat", raw=True, max_new_tokens=30).text == text
    config = GenerationConfig(max_new_tokens=30, stop_strings=text[2])
    earlier = speculator.generate("the cat", generation_config=config)
    assert len(earlier.token_ids) < len(answer.token_ids)


def test_an_end_token_is_not_shown_though_it_is_not_special(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    speculator = wrap(model, tokenizer)
    ids = speculator.generate("the cat", max_new_tokens=30).token_ids
    end = next(token for place, token in enumerate(ids[4:], 4) if token not in ids[:place])
    options: Any = {"max_new_tokens": 30, "eos_token_id": end}
    shown = speculator.generate("the cat", **options)
    assert shown.text == tokenizer.decode(shown.token_ids)  # an ordinary word as the end token
    tokenizer.add_tokens([str(tokenizer.convert_ids_to_tokens(end))])
    hidden = speculator.generate("the cat", **options)
    assert hidden.token_ids == shown.token_ids
    assert hidden.text == tokenizer.decode(hidden.token_ids[:-1])
    assert "".join(speculator.stream("the cat", **options)) == hidden.text


def test_heads_bring_the_template_of_their_text_and_another_is_named(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    heads = wrap(model, heads="logit-lens").heads
    assert isinstance(heads, ExitHeads)
    heads.config = replace(heads.config, chat_template=templates.read("vicuna"))
    speculator = wrap(model, tokenizer, heads=heads)
    assert tokenizer.decode(speculator.call(TALK, {}).input_ids[0]) == WRITTEN["vicuna"]
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        other = wrap(model, tokenizer, heads=heads, chat_template="llama-2")
    assert "fitted with the chat template vicuna, not llama-2" in caplog.text
    assert tokenizer.decode(other.call(TALK, {}).input_ids[0]) == WRITTEN["llama-2"]


TIME, MEMORY = "it ran for more than 1.5 s", "it fills the memory"
BROKEN = {
    "{% for %}": "line 1 is no chat template: Expected an expression",
    "{{ messages[0].content": "is no chat template: unexpected end of template",
    "{{ ''.__class__.__mro__ }}": "access to attribute '__class__'",
    "{{ namespace(_a=1) }}": "a namespace cannot have '_a'",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}": "a namespace cannot have '__class__'",
    "{{ messages.append(1) }}": "access to attribute 'append'",
    "{{ raise_exception('no' * 100000) }}": "is no chat template: nononono",
    "hello {{ bos_token }}": "does not show what the user says",
    "{{ messages[0].content }}" + " " * (1 << 16): "characters, a chat template at most",
}
HOSTILE = {
    "{{ 10**(10**9) }}": TIME,
    "{% macro f(n) %}{% for i in 'ab' %}{{ f(n - 1) }}{% endfor %}{% endmacro %}{{ f(99) }}": "",
    "{{ 'a' * 10**10 }}": MEMORY,
    "{{ '%1000000000d' % 1 }}": MEMORY,
    "{{ ('a' * 60000) | replace('a', 'a' * 60000) }}": MEMORY,
    "{% set n = namespace(s='a') %}{% for i in 'a' * 99 %}{% set n.s = n.s * 2 %}{% endfor %}": "",
    "{{ 'a' * 9000000 }}": "it writes more than 1,",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
    "{{ " + "(" * 30000 + "1" + ")" * 30000 + " }}": "",
    "{% if 1 %}" * 5000: "",
}
"""Words of each error; empty where they depend on chance or on the version of Python."""


@pytest.mark.parametrize("text", [*BROKEN, *HOSTILE])
def test_a_broken_or_hostile_template_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match=re.escape((BROKEN | HOSTILE)[text])) as caught:
        templates.read(text)
    assert len(str(caught.value)) < 1000


def test_the_template_of_heads_is_checked_too(tokenizer: PreTrainedTokenizerFast) -> None:
    heads: Any = SimpleNamespace(config=SimpleNamespace(chat_template="hello"))
    with pytest.raises(InvalidOption, match="of the heads is no chat template: it does not show"):
        templates.choose_template(tokenizer, None, heads, "tiny")


def test_a_hostile_template_blocks_nothing_else(tokenizer: PreTrainedTokenizerFast) -> None:
    kinds = resource.RLIMIT_AS, resource.RLIMIT_DATA
    limits = [*map(resource.getrlimit, kinds)]
    good = templates.with_template(tokenizer, templates.read("chatml"))
    bad = templates.with_template(tokenizer, "{{ 10**(10**9) }}")
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(apply_template, bad, TALK) for _ in range(3)]
        texts = [apply_template(good, TALK, add_generation_prompt=True) for _ in range(20)]
        assert not any(future.done() for future in futures)
        reasons = [str(future.exception()) for future in futures]
    assert {*texts} == {WRITTEN["chatml"]}
    assert all(TIME in reason for reason in reasons)
    assert limits == [*map(resource.getrlimit, kinds)]


def test_a_dead_renderer_is_replaced(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = templates.with_template(tokenizer, templates.read("chatml"))
    text = apply_template(clone, TALK)
    for child in templates._idle:
        child.kill()
        child.wait()
    with monkeypatch.context() as patch:  # as with too many open files: not the messages' fault
        patch.setattr("sys.executable", "/no/such/program")
        with pytest.raises(SelfspecError, match=r"templates: No such file or directory$") as caught:
            apply_template(clone, TALK)
    assert not isinstance(caught.value, InvalidPrompt)
    assert apply_template(clone, TALK) == text


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1.5}}}
TALKS: list[list[dict[str, Any]]] = [
    TALK,
    [{"role": "user", "content": "caf\u00e9 \U0001f600 \u2028 <|im_end|> {{ 1 }} \\ \" '"}],
    [{"role": "user", "content": ""}, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
    [{"role": "assistant", "content": "a", "thinking": "b", "at": {"x": None}, "n": (1, 2)}],
]
EVERY_PART = """
{%- set n = namespace(seen=[], name='\u00e9') -%}
{% macro said(m) %}{% generation %}{{ m.content | trim | default('none', true) }}{% endgeneration %}
{% endmacro %}
{% for m in messages %}
  {% if loop.index > 3 %}{% break %}{% endif %}
  {% if m.content is none %}{% continue %}{% endif %}
  {% set n.seen = n.seen + [m.role] %}
    {{ said(m) }} {{ m | tojson }} {{ m | tojson(indent=2) }} {{ m.reasoning_content }}
    {{ m.content[:1] ~ 2 ** 3 ~ 'ab' * 2 ~ '%3d' % 1 ~ '{:>3}'.format(1) }}
{% endfor %}
{{ n.seen | join(', ') }} {{ tools is none }} {{ tools | tojson }} {{ documents }}
{{ dict(a=1) }} {{ strftime_now('%Y') }} {{ range(3) | list }} {{ bos_token }}{{ eos_token }}
{% if add_generation_prompt %}ask{% endif %}"""


@pytest.fixture(scope="module")
def default_template() -> str:
    fields = GGUFReader(hub.default_model_file()).fields
    return str(fields["tokenizer.chat_template"].contents())


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("talk", range(len(TALKS)))
@pytest.mark.parametrize("name", [*templates.NAMES, "default model", "ten words", "every part"])
def test_texts_are_those_of_transformers(
    name: str,
    talk: int,
    tools: Any,
    asks: bool,
    tokenizer: PreTrainedTokenizerFast,
    default_template: str,
) -> None:
    sources = {"ten words": TEMPLATE, "every part": EVERY_PART, "default model": default_template}
    clone = templates.with_template(tokenizer, sources.get(name) or templates.read(name))
    options: Any = {"tools": tools, "add_generation_prompt": asks}
    try:
        expected = clone.apply_chat_template(TALKS[talk], tokenize=False, **options)
    except Exception as error:  # noqa: BLE001  # of the template
        reason = " ".join(str(error).split())
        with pytest.raises(InvalidPrompt, match=re.escape(reason)):
            apply_template(clone, TALKS[talk], **options)
    else:
        assert apply_template(clone, TALKS[talk], **options) == expected


THINKS = (
    "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %} <no>"
    "{% endif %} {{ documents }}"
)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"enable_thinking": False},
        {"enable_thinking": True, "documents": [{"text": "caf\u00e9"}]},
    ],
    ids=str,
)
def test_variables_reach_the_template(
    variables: dict[str, Any], tokenizer: PreTrainedTokenizerFast
) -> None:
    clone = templates.with_template(tokenizer, THINKS)
    expected = clone.apply_chat_template(TALK, tokenize=False, **variables)
    assert apply_template(clone, TALK, variables=variables) == expected
    for name in ("enable_thinkin", "messages"):
        with pytest.raises(InvalidOption, match=f"has {name}, which"):
            apply_template(clone, TALK, variables={**variables, name: 1})


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("lmsys/vicuna-7b-v1.5", "vicuna"),
        ("meta-llama/Llama-2-13b-chat-hf", "llama-2"),
        ("meta-llama/Llama-2-13b-hf", ""),
        ("/zephyr/models/gpt2/", ""),
        ("teknium/OpenHermes-2-Mistral-7B", "chatml"),
    ],
)
def test_the_name_of_a_model_suggests_its_template(model: str, name: str) -> None:
    assert templates.suggestion(model) == name
