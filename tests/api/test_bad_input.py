"""Careless and hostile input to the Python API: each error is one line, never a raw error."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GenerationConfig, LlamaForCausalLM

from selfspec import errors
from selfspec.api import speculator as facade
from selfspec.api.speculator import Speculator
from selfspec.config import GenerateOptions, SpeculationOptions
from selfspec.errors import HeadsMismatch, InvalidOption, InvalidPrompt, SelfspecError
from selfspec.heads.exit_heads import logit_lens
from selfspec.options import Exit
from tests.bad_input import IDS, INF, NAN, VOCAB, Strange, check, small_model, speaking
from tests.models import addressless, make_model, random_ids, wrapped
from tests.talks import dialogue

load: Any = facade.load
wrap: Any = facade.wrap


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model()


@pytest.fixture(scope="module")
def speculator(model: Any) -> Speculator:
    return speaking(model)


# --- prompts


PROMPTS: dict[str, Any] = {
    "none": None,
    "bytes": b"hello",
    "dict": {"input_ids": IDS},
    "generator": (token for token in IDS),
    "object": Strange(),
    "path": Path("prompt.txt"),
    "empty text": "",
    "blanks": " \n\t ",
    "half a character": "\ud800",
    "empty list": [],
    "floats": [1.0, 2.0],
    "text and ids": ["hello", 5],
    "lists of ids": [[1, 2], [3, 4]],
    "arrays": [np.array([1, 2]), np.array([3])],
    "tensors in a list": [torch.tensor(1)],
    "negative id": [-1, 5],
    "id beyond the vocabulary": [5, VOCAB],
    "id beyond 64 bits": [2**64],
    "float tensor": torch.tensor([1.0, 2.0]),
    "tensor without dimensions": torch.tensor(5),
    "tensor of three dimensions": torch.ones(1, 2, 3, dtype=torch.long),
    "empty tensor": torch.empty(0, dtype=torch.long),
    "meta tensor": torch.empty(1, 3, dtype=torch.long, device="meta"),
    "sparse tensor": torch.tensor([[1, 0, 2]]).to_sparse(),
    "several rows": torch.tensor([IDS, IDS]),
    "message without role": [{"content": "hi"}],
    "content of a number": dialogue(3),
    "content of parts": dialogue([{"type": "text", "text": "hi"}]),
    "content with half a character": dialogue("\ud800"),
    "a role the template refuses": [{"role": "robot", "content": "hi"}],
}
BATCHES = {"empty list", "several rows", "lists of ids", "arrays"}  # several prompts, by name
ADVICE = {
    "lists of ids": "generate_batch",
    "arrays": "generate_batch",
    "generator": "generate_each",
    "path": "path.read_text()",
    "bytes": "prompt.decode()",
    "dict": "Give its input_ids",
}
"""The advice for common mistakes, by name in PROMPTS."""


@pytest.mark.parametrize("name", PROMPTS)
def test_wrong_prompts_are_refused_with_advice(name: str, speculator: Speculator) -> None:
    calls: list[Any] = [speculator.generate, speculator.session().generate]
    for call in calls if name in BATCHES else [*calls, speculator.generate_batch]:
        with pytest.raises((InvalidPrompt, InvalidOption)) as caught:
            call(PROMPTS[name], max_new_tokens=2)
        check(caught.value)
        assert ADVICE.get(name, "") in str(caught.value)


@pytest.mark.parametrize("name", sorted(BATCHES))
def test_several_prompts_are_answered_by_a_batch(name: str, speculator: Speculator) -> None:
    answers = speculator.generate_batch(PROMPTS[name], max_new_tokens=2, do_sample=False)
    singles = [speculator.generate(one, max_new_tokens=2, do_sample=False) for one in PROMPTS[name]]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in singles]


@pytest.mark.parametrize(
    "prompt",
    [
        *(IDS, tuple(IDS), np.array(IDS), np.array([IDS], dtype=np.uint16), list(np.array(IDS))),
        *(np.array(IDS, dtype=">i4"), np.array(IDS[::-1])[::-1]),
        *(torch.tensor([IDS], dtype=dtype) for dtype in (torch.int32, torch.uint8)),
        torch.tensor(IDS),
    ],
    ids=addressless,
)
def test_ids_of_any_integer_type_are_read(prompt: Any, speculator: Speculator) -> None:
    expected = speculator.generate(torch.tensor([IDS]), max_new_tokens=4).token_ids
    assert speculator.generate(prompt, max_new_tokens=4).token_ids == expected


def test_a_tool_call_message_needs_no_content(speculator: Speculator) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    messages: Any = [*dialogue("hi"), call, *dialogue("and?")]
    assert speculator.generate(messages, max_new_tokens=2).token_ids


# --- options of generate


def options(name: str, *values: Any, **others: Any) -> list[dict[str, Any]]:
    return [{name: value} | others for value in values]


KEYWORDS = errors.annotations_of(GenerateOptions)
STRANGE = ["x", b"x", 0.5, NAN, INF, True, [5], ["a"], [None], [[1.5]], {}, object()]


@pytest.mark.parametrize("name", KEYWORDS)
def test_a_keyword_takes_its_type_or_gives_advice(name: str, speculator: Speculator) -> None:
    for value in STRANGE:
        try:
            generate(speculator, {"max_new_tokens": 2, "do_sample": True} | {name: value})
        except SelfspecError as error:
            check(error)
        else:
            assert errors.fits(value, KEYWORDS[name]), value


UNMEANT: dict[str, tuple[Any, ...]] = {
    "max_new_tokens": (0, -1),
    "max_length": (0, 2),
    **dict.fromkeys(("min_new_tokens", "min_length", "max_time", "no_repeat_ngram_size"), (-1,)),
    **dict.fromkeys(("top_p", "min_p", "typical_p"), (-0.1, 1.5)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), ([VOCAB], [-1], [10**30])),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), (VOCAB, -1)),
    "num_return_sequences": (0, -1, 2),
    "temperature": (-1.0, 1e-42),
    "top_k": (-1,),
    "repetition_penalty": (0.0, -1.0),
    "bad_words_ids": ([], [[-1]], [[VOCAB]]),
    "sequence_bias": ([], [[[VOCAB], 1.0]], [[[5]]], {}),
    "eos_token_id": (VOCAB + 3,),
    "exponential_decay_length_penalty": ((1, 2.0),),
    "stop_strings": ([""], ""),
    **dict.fromkeys(
        ("stopping_criteria", "logits_processor"),
        ([lambda _one, _two, _too_many: None], [InvalidOption]),
    ),
    "prefix_allowed_tokens_fn": (
        *(lambda _row, _ids, tokens=tokens: tokens for tokens in ([], [VOCAB], ["a"])),
    ),
    "attention_mask": (
        *(torch.ones(1, 9), torch.ones(3), torch.zeros(1, 3), torch.tensor([[1, 1, 0]])),
        *(np.ones((1, 3)), torch.full((1, 3), 2), torch.tensor([[NAN, 1.0, 1.0]])),
        *(torch.tensor([[1, 0, 1]]), torch.ones(1, 3, 3)),
    ),
    "generation_config": ({"max_new_tokens": 3},),
    "streamer": (print,),
    "seed": (2**64, -(2**64)),
    "drafter": ("none at all", "ngram+draft-model"),  # more of these: tests/test_options.py
    **{"controller": ("fast",), "costs": (Exit(),), "acceptance": ("always",)},
}
"""Values of the right types that make no sense, for this model or for any."""

OPTIONS: list[dict[str, Any]] = [
    *({name: value, "do_sample": True} for name, values in UNMEANT.items() for value in values),
    *({"drafter": {"exit": {"layers": layers}}} for layers in (9, [5, 2])),
    *({"drafter": {"exit": {"max_depth": depth}}} for depth in (3, 99)),
    {"drafter": {"exit": {"threshold": [0.5] * 3}}},
    # former keywords, keywords of other libraries, and misspelt ones
    *({name: 2} for name in ("exit_layers", "lenience", "max_tokens", "temprature", "num_beams")),
    *({"position_ids": torch.arange(3)}, {"inputs_embeds": torch.zeros(1, 3, 32)}),
]

CONFIGS: list[dict[str, Any]] = [
    *options("max_new_tokens", "5", 2.5),
    *options("temperature", "hot", do_sample=True),
    *options("top_k", "x", do_sample=True),
    *options("stop_strings", ["x", ""], 5),
    *({name: "x"} for name in ("eos_token_id", "bad_words_ids", "guidance_scale")),
    *({name: 3} for name in ("num_return_sequences", "num_beams")),
    {"cache_implementation": "quantized"},
    {"output_scores": True},
]

# --- options of a whole speculator

LOOPS: list[dict[str, Any]] = [
    *options("streamer", 5),  # a keyword of `generate` alone
    *options("strings", 5, [5], [""]),
    *options("drafter", "fast"),
    *({"exit_threshold": 0.5}, {"temperature": 0.5}),
]
WRAPS: list[dict[str, Any]] = [
    *options("drafter", "exit:layers=9", "fast", None),
    *options("exit_layers", [2]),
    *options("max_tokens", 5),
    *options("executor", "fast", 5, None),
]
MANY: list[dict[str, Any]] = [
    *({"prompts": prompts} for prompts in (None, 5, "one prompt", b"x", {"role": "user"})),
    *({"most": value} for value in ("x", 0, 1.5, None)),
    *({"kv_memory": value} for value in ("1GB", -1)),
    *({"seeds": value} for value in (5, "x")),
    *({"temprature": 0.5}, {"drafter": "ngrm"}),
]
NAMELESS: list[Any] = [None, 5, "speculate", ["speculate"], [("speculate", 1)]]


def test_more_pinned_positions_than_memory_could_hold_are_refused(model: Any) -> None:
    pinned = wrap(model, executor="generic", heads="logit-lens", pinned=True)
    with pytest.raises(InvalidOption, match="pinned passes would look at") as caught:
        pinned.generate(IDS, max_new_tokens=10**9)
    check(caught.value)


def generate(speculator: Speculator, values: dict[str, Any]) -> None:
    keywords: dict[str, Any] = ({} if "max_length" in values else {"max_new_tokens": 4}) | values
    speculator.generate(torch.tensor([IDS]), **keywords)


def with_config(speculator: Speculator, values: dict[str, Any]) -> None:
    config = GenerationConfig(max_new_tokens=3)
    for name, value in values.items():
        setattr(config, name, value)
    speculator.generate(torch.tensor([IDS]), generation_config=config)


def many(speculator: Speculator, values: dict[str, Any]) -> None:
    """Call `generate_each`, which must refuse before its first answer."""
    keywords: dict[str, Any] = {"prompts": [IDS], "max_new_tokens": 2} | values
    speculator.generate_each(**keywords)


REFUSED = {
    generate: OPTIONS,
    with_config: CONFIGS,
    lambda speculator, values: speculator.hf(**values): LOOPS,
    lambda speculator, values: wrap(speculator.model, **{"heads": "logit-lens"} | values): WRAPS,
    many: MANY,
    lambda _, values: SpeculationOptions().updated(values): NAMELESS,
}


@pytest.mark.parametrize(
    ("call", "values"),
    [(call, values) for call, table in REFUSED.items() for values in table],
    ids=addressless,
)
def test_senseless_values_are_refused_with_advice(
    call: Callable[[Speculator, dict[str, Any]], None],
    values: dict[str, Any],
    speculator: Speculator,
) -> None:
    with pytest.raises(SelfspecError) as caught:
        call(speculator, values)
    check(caught.value)


def test_numpy_numbers_are_accepted(speculator: Speculator) -> None:
    plain: Any = {"max_new_tokens": 4, "temperature": 0.5, "seed": 3}
    numpy: Any = {"max_new_tokens": np.int64(4), "temperature": np.float32(0.5), "seed": np.int8(3)}
    answers = [speculator.generate(IDS, **options).token_ids for options in (plain, numpy)]
    assert answers[0] == answers[1]


# --- state after bad input


def test_after_bad_input_speculator_and_session_answer_as_before(speculator: Speculator) -> None:
    session, ids = speculator.session(), random_ids(9, vocab_size=VOCAB)
    expected = session.generate(ids, max_new_tokens=6).token_ids
    for prompt in (None, [VOCAB], "\ud800"):
        with pytest.raises(SelfspecError):
            session.generate(prompt, max_new_tokens=3)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(SelfspecError):
        session.generate(ids, prefix_allowed_tokens_fn=lambda _row, _ids: [])
    assert session.generate(ids, max_new_tokens=6).token_ids == expected
    assert speculator.generate(ids, max_new_tokens=6).token_ids == expected


# --- arguments that `wrap` and `load` refuse


def meta_model(part: str) -> Any:
    """A model of which a part has no numbers."""
    model: Any = make_model("llama")
    model.get_submodule(part).to("meta")
    return model


def bert() -> Any:
    sizes: Any = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(**sizes, intermediate_size=16, vocab_size=32))


def other_heads() -> Any:
    backbone = wrapped("llama", num_hidden_layers=4)
    return logit_lens(backbone.unembedding, backbone.num_layers, "other")


def asked(model: Any, **options: Any) -> Any:
    return speaking(model).call(IDS, options)  # type: ignore[arg-type]  # the mistake


def with_ends(model: Any, *ends: Any) -> None:
    for end in ends:
        with_config(wrap(model), {"eos_token_id": end})


class Holder(torch.nn.Module):
    """A user's module around a model, with some of its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = make_model("llama")
        self.config, self.generate = self.inner.config, self.inner.generate


PROCESSOR = SimpleNamespace(tokenizer=None)  # holds a tokenizer, but is none
FLAT: Any = {"logits_processor": [lambda _, scores: scores[0]]}

Call = Callable[[Any], Any]
WRONG: list[tuple[Call, str]] = [
    (lambda _: wrap(None), "model is of type NoneType.*selfspec.load"),
    (lambda _: wrap("gpt2"), "model is of type str.*expected a causal"),
    (lambda _: wrap(LlamaForCausalLM), "model is a class, LlamaForCausalLM"),
    (lambda _: wrap(bert()), "model is of type BertForMaskedLM"),
    (lambda _: wrap(Holder()), "model is of type Holder.*expected a causal"),
    *(
        (lambda _, part=part: wrap(meta_model(part)), "on the meta.*from_pretrained")
        for part in ("", "model.embed_tokens", "model.layers.2.mlp", "model.norm", "lm_head")
    ),
    (lambda model: wrap(model, "gpt2"), "tokenizer is of type str.*AutoTokenizer"),
    (lambda model: wrap(model, PROCESSOR), "tokenizer is of type SimpleNamespace"),
    (lambda model: wrap(model, heads=3), "heads are of type int.*selfspec heads"),
    (lambda model: asked(model, attention_mask=[[1]]), "attention_mask is of type list, exp"),
    (lambda model: wrap(model, draft_model="x"), "draft_model is of type str"),
    (lambda model: wrap(model, colour=3), "unknown option 'colour'"),
    (lambda model: wrap(model, head="logit-lens"), "Did you mean heads"),
    (lambda model: asked(model, stop=5), "Did you mean stop_strings"),
    (lambda model: with_ends(model, [[2]], "2"), "config, eos_token_id is '2', expected a whole"),
    (lambda model: wrap(model).generate(IDS, acceptance="lenient"), "do_sample"),
    (lambda model: asked(model, max_tokens=5), "Did you mean max_new_tokens"),
    (lambda model: asked(model, chat_template_kwargs={"a": 1}), "kwargs needs text in a chat temp"),
    (lambda model: speaking(model).hf(streamer=None), r"for model\.generate itself"),
    (lambda model: speaking(model).hf(stop_strings="a"), r"hf\(strings=\.\.\.\)"),
    (lambda model: speaking(model)("hi"), r"custom_generate=speculator\.hf"),
    (lambda model: wrap(model, chat_template="chatml"), "template needs a token"),
    (lambda model: wrap(model).generate(IDS, json_schema=True, eos_token_id=5), "grammar needs a"),
    (lambda model: wrap(model).generate(IDS, **FLAT), r"gives .\d+., expected scores"),
    (lambda model: wrap(model).generate(IDS, stop_strings="a"), "strings need a tokenizer"),
    (lambda model: load(model), r"use selfspec\.wrap\(model\)"),
    (lambda _: load(3), "model is of type int"),
    (lambda _: load(""), "model is empty"),
    (lambda _: load(device=[]), "device is .., expected text"),
    (lambda _: load(datastore=3), "datastore is 3, expected text"),
    (lambda _: load(device="xla"), "arguments from the 'XLA' backend$"),
    (lambda _: load(attn_implementation=3), "attn_implementation is 3"),
    (lambda _: load(dtype="float8_e4m3fn"), "dtype is 'float8_e4m3fn', expected"),
    (lambda _: load(dtype="int8"), "dtype is 'int8', expected float32"),
    (lambda _: load(dtype="cuda"), "dtype is 'cuda', expected float32"),
]
CASES: list[tuple[Call, type[SelfspecError], str]] = [
    *((call, InvalidOption, words) for call, words in WRONG),
    (lambda model: wrap(model, heads="none-such"), errors.HeadsNotFound, "Known: "),
    (
        lambda model: wrap(model, heads=other_heads()),
        HeadsMismatch,
        r"heads fit other .* \(96, 32, 4\), the model has \(280, 32, 6\)\. .*selfspec fit",
    ),
    *(
        (
            lambda _, n=count: wrap(make_model("llama", max_position_embeddings=n)),
            errors.UnsupportedModel,
            f"max_position_embeddings of the model's config is {count}, expected 1 or more",
        )
        for count in (0, 10**30)
    ),
    (lambda model: speaking(model).generate(dialogue("a"), raw=True), InvalidPrompt, "raw is for"),
    (lambda model: wrap(model).generate("hello"), InvalidPrompt, "in words needs a tokenizer"),
    (lambda model: wrap(model).generate(dialogue("hi")), InvalidPrompt, "needs a tokenizer"),
]


@pytest.mark.parametrize(("call", "kind", "words"), CASES, ids=[words for *_, words in CASES])
def test_errors_name_the_value_and_the_remedy(
    call: Call, kind: type[SelfspecError], words: str, model: Any
) -> None:
    with pytest.raises(kind, match=words):
        call(model)


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, pickle.dumps])
@pytest.mark.parametrize("part", ["backbone", "heads", "session", "engine", "hf", "runtime"])
def test_objects_that_hold_a_model_are_not_copied(
    how: Callable[[Any], Any], part: str, speculator: Speculator
) -> None:
    member = getattr(speculator, part)
    member = member() if part in ("session", "engine", "hf") else member
    for holder in (speculator, member):
        if how is copy.copy and holder is not speculator.backbone:
            continue  # shares the model, as it should
        with pytest.raises(TypeError, match=r"wrap the copy: selfspec\.wrap\(") as caught:
            how(holder)
        assert "\n" not in str(caught.value)


def test_a_wrapped_model_can_be_copied_and_the_copy_runs(model: Any) -> None:
    speculators = [wrap(one, heads="logit-lens") for one in (model, copy.deepcopy(model))]
    answers = [one.generate(IDS, max_new_tokens=8).token_ids for one in speculators]
    assert answers[0] == answers[1]
