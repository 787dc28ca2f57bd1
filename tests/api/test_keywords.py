"""Each keyword of Hugging Face's generation has the same effect here, has none, or is refused.

The tables are compared with transformers itself: a field that a later version adds fails a test.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, WatermarkingConfig
from transformers.utils.generic import TransformersKwargs

from selfspec.api import request
from selfspec.api.request import HONOURED, NEUTRAL, REFUSED, refuse_other_decoding
from selfspec.api.speculator import Speculator, wrap
from selfspec.decoding.sampling import Sampler
from selfspec.errors import InvalidOption
from selfspec.model.parts import CACHE
from tests.api.test_text import byte_level_bpe
from tests.models import make_model, random_ids

LENGTH, SEED = 9, 11


def test_every_config_field_is_in_one_table_and_its_default_passes() -> None:
    config = GenerationConfig()
    known = HONOURED | NEUTRAL | REFUSED.keys()
    assert vars(config).keys() <= known, "new: does it change what is decoded?"
    assert len(known) == len(HONOURED) + len(NEUTRAL) + len(REFUSED)
    refuse_other_decoding(config)
    config.update(**GenerationConfig._get_default_generation_params())
    refuse_other_decoding(config)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_fields_of_other_decoding_methods_are_refused_by_name(name: str) -> None:
    config = GenerationConfig()
    setattr(config, name, 7)
    with pytest.raises(InvalidOption, match=f"^{name}=7 is .* generation_config too$"):
        refuse_other_decoding(config)


def test_a_field_of_a_later_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = GenerationConfig.__init__

    def later(self: Any, **options: Any) -> None:
        original(self, **options)
        self.dream_tokens = None

    monkeypatch.setattr(GenerationConfig, "__init__", later)
    config = GenerationConfig()
    refuse_other_decoding(config)
    config.dream_tokens = 3  # type: ignore[attr-defined]  # an invented field
    with pytest.raises(InvalidOption, match=r"^dream_tokens=3 is not known here. Leave it out"):
        refuse_other_decoding(config)


def test_unknown_fields_of_a_models_config_pass(
    speculator: Speculator, exact: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # no warning about keywords that the caller did not give
    monkeypatch.setattr("transformers.generation.utils.logger.warning_once", pytest.fail)
    mine = {"chat_format": "chatml", "max_window_size": 24000}
    config = GenerationConfig(max_new_tokens=5, cache_implementation="static", **mine)
    answer = speculator.generate(random_ids(LENGTH), generation_config=config)
    expected = exact.generate(random_ids(LENGTH), generation_config=config)
    assert answer.token_ids == expected[0, LENGTH:].tolist()


NEUTRAL_VALUES: dict[str, Any] = {
    **{"early_stopping": True, "length_penalty": 2.0, "diversity_penalty": 0.5},
    **{"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic"},
    **{"assistant_confidence_threshold": 0.9, "max_matching_ngram_size": 2},
    **dict.fromkeys(("assistant_lookbehind", "target_lookbehind", "bos_token_id"), 3),
    **{"disable_compile": True, "low_memory": True, "prefill_chunk_size": 4},
    **{"decoder_start_token_id": 3, "max_cache_len": 99, "cache_implementation": "static"},
    # keywords of the forward pass with their default meaning
    **{"logits_to_keep": 1, "use_cache": True, "token_type_ids": None, "output_attentions": None},
    "position_ids": torch.arange(LENGTH)[None],
}


@pytest.mark.parametrize(
    "given",
    [
        *({name: value} for name, value in NEUTRAL_VALUES.items()),
        *({"attention_mask": torch.ones(1, LENGTH, dtype=one)} for one in (torch.long, torch.bool)),
    ],
    ids=str,
)
def test_neutral_fields_change_no_token_of_transformers(
    given: dict[str, Any], speculator: Speculator, exact: Any
) -> None:
    ids, options = random_ids(LENGTH), {"max_new_tokens": 8, "do_sample": False}
    plain = exact.generate(ids, **options)
    assert torch.equal(exact.generate(ids, **given, **options), plain)
    output = exact.generate(ids, custom_generate=speculator.hf(), **given, **options)
    assert torch.equal(output, plain)


HONOURED_VALUES: dict[str, Any] = {
    **{"max_length": LENGTH + 3, "max_new_tokens": 2, "min_length": LENGTH + 8},
    **{"min_new_tokens": 8, "repetition_penalty": 3.0, "encoder_repetition_penalty": 9.0},
    **{"no_repeat_ngram_size": 1, "bad_words_ids": [[token] for token in range(0, 90, 2)]},
    **{"suppress_tokens": list(range(60)), "begin_suppress_tokens": list(range(80))},
    **{"sequence_bias": [[[4], 90.0]], "guidance_scale": 3.0, "forced_eos_token_id": 3},
    **{"watermarking_config": WatermarkingConfig(bias=20.0), "eos_token_id": list(range(60))},
    "exponential_decay_length_penalty": (1, 9.0),
}
"""Fields with values that change the greedy answer to this prompt."""


@pytest.mark.parametrize("name", HONOURED_VALUES)
def test_an_honoured_field_has_the_same_effect_as_in_transformers(
    name: str, speculator: Speculator, exact: Any
) -> None:
    ids, base = random_ids(LENGTH), {"eos_token_id": 95, "max_new_tokens": 10}
    if name.startswith("min_"):
        base["eos_token_id"] = 82  # the third token
    if name == "max_length":
        del base["max_new_tokens"]
    options = base | {name: HONOURED_VALUES[name]}
    expected = exact.generate(ids, do_sample=False, **options)[0, LENGTH:].tolist()
    assert expected != exact.generate(ids, do_sample=False, **base)[0, LENGTH:].tolist()
    if name.startswith("encoder"):  # not a keyword of `generate`
        options = {"generation_config": GenerationConfig(**options)}
    assert speculator.generate(ids, **options).token_ids == expected


OWN_VALUES: dict[str, Any] = HONOURED_VALUES | {
    "max_length": 20,  # the default of transformers
    **{"max_time": 60.0, "temperature": 3.0, "top_k": 3, "top_p": 0.2, "min_p": 0.5},
    **{"top_h": 0.3, "typical_p": 0.2, "epsilon_cutoff": 0.02, "eta_cutoff": 0.02},
    **dict.fromkeys(("do_sample", "renormalize_logits", "remove_invalid_values"), True),
    **{"encoder_no_repeat_ngram_size": 1, "forced_bos_token_id": 3, "num_return_sequences": 3},
    **{"pad_token_id": 298, "return_dict_in_generate": True},
    "stop_strings": ["\N{REPLACEMENT CHARACTER}", "t"],
}
"""A value of each honoured field, as a model's own config may have it."""

SAMPLED = {"temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "do_sample"}
SAMPLED |= {"epsilon_cutoff", "eta_cutoff", "num_return_sequences"}


@pytest.fixture(scope="module")
def own() -> Speculator:
    return wrap(make_model("llama", vocab_size=300), byte_level_bpe())


ALONE = {"max_length", "max_new_tokens", "eos_token_id", "pad_token_id"}
"""Fields whose built-in values could hide the effect of others'."""
DRAWN = SAMPLED - {"do_sample"}


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(
    ("names", "built_in"),
    [(name, False) for name in sorted(HONOURED)]
    + [(name, True) for name in sorted(ALONE)]
    + [(" ".join(sorted(names)), True) for names in (DRAWN, HONOURED - ALONE - DRAWN)],
)
def test_a_models_own_config_means_the_same_as_in_transformers(
    names: str, built_in: bool, ends: bool, own: Speculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The built-in values of most fields are set together."""
    model: Any = own.model
    values = GenerationConfig._get_default_generation_params() if built_in else OWN_VALUES
    ids = random_ids(LENGTH)
    options: Any = {} if names.startswith("max_") else {"max_new_tokens": 11}
    config = model.generation_config
    monkeypatch.setattr(config, "eos_token_id", 3 if ends else None)
    monkeypatch.setattr(config, "pad_token_id", 299)  # not in the prompt, where it would be masked
    monkeypatch.setattr(config, "do_sample", {*names.split()} <= SAMPLED)
    for name in names.split():
        monkeypatch.setattr(config, name, values.get(name))
    if names.startswith("max_") and config.max_new_tokens is config.max_length is None:
        options = {"max_new_tokens": 128}  # our default
    sampler, places = Sampler(LogitsProcessorList(), do_sample=True), itertools.count(LENGTH)

    def ours(probs: Tensor, num_samples: int) -> Tensor:
        """Replace `multinomial`, which maps random numbers to tokens in another way."""
        assert num_samples == 1
        place = next(places)
        seeded = (sampler.seeded(SEED + row, probs.device) for row in range(len(probs)))
        return torch.tensor(
            [[row.draw(law, place)] for row, law in zip(seeded, probs, strict=True)]
        )

    monkeypatch.setattr(torch, "multinomial", ours)
    try:
        output = model.generate(ids, tokenizer=own.tokenizer, **options)
    except RuntimeError:
        with pytest.raises(InvalidOption, match=f"^{names} makes the end token likelier"):
            own.generate(ids, **options)
        return
    answers = own.generate_batch(ids, speculate=False, seed=SEED, **options)
    rows = getattr(output, "sequences", output)[:, LENGTH:].tolist()
    assert len(answers) == len(rows)
    for answer, row in zip(answers, rows, strict=True):
        count = len(answer.token_ids)
        assert answer.token_ids == row[:count]
        assert {*row[count:]} <= {config.pad_token_id}
    drafted = own.generate_batch(ids, seed=SEED, **options)
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in answers]


# Keywords of the model's forward


UNDERSTOOD = {
    *("attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep"),
    *("output_hidden_states", "output_attentions", "output_router_logits", "is_causal"),
}


def test_every_keyword_of_the_forward_is_understood_or_refused(exact: Any) -> None:
    """Covers every keyword that transformers passes on to a decoder's forward."""
    parameters = set(inspect.signature(exact.forward).parameters) - {"kwargs", "input_ids"}
    for name in (parameters | set(TransformersKwargs.__annotations__)) - UNDERSTOOD:
        with pytest.raises(InvalidOption, match=f"^{name} is not supported"):
            request.refuse_model_keywords({name: torch.ones(1, LENGTH)}, random_ids(LENGTH))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("inputs_embeds", torch.ones(1, LENGTH, 32, dtype=torch.float64)),
        ("position_ids", torch.arange(LENGTH)[None] + 3),
        ("position_ids", torch.arange(LENGTH + 2)[None]),
        ("is_causal", False),
        ("num_beams", 4),
    ],
)
def test_hf_refuses_keywords_that_it_would_ignore(
    name: str, value: Any, speculator: Speculator, exact: Any
) -> None:
    options = {"max_new_tokens": 3, "custom_generate": speculator.hf(), name: value}
    for ids in (random_ids(LENGTH), *([None] if name == "inputs_embeds" else [])):
        with pytest.raises(InvalidOption, match=f"^{name}"):
            exact.generate(ids, **options)


@pytest.mark.parametrize(
    ("kind", "text", "marks"),
    [
        (transformers.LlavaConfig, "llama", ()),
        (transformers.Gemma3Config, "gemma3", ("token_type_ids",)),
        (transformers.Qwen2_5_VLConfig, "qwen2", ("mm_token_type_ids",)),  # positions per axis
    ],
)
def test_a_vision_model_answers_text_and_refuses_pictures(
    kind: Any, text: str, marks: tuple[str, ...]
) -> None:
    """transformers passes on token types of pictures even if there are no pictures."""
    vision = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    vision |= {"num_heads": 2, "depth": 1, "out_hidden_size": 32}
    language = make_model(text).config.to_dict()
    if text == "qwen2":
        pytest.importorskip("transformers", "5.24")  # refused in 5.17
        language["rope_parameters"]["mrope_section"] = [1, 1, 2]
    config = kind(text_config=language, vision_config=vision)
    model: Any = transformers.AutoModelForImageTextToText.from_config(config).double().eval()
    ids, loop = random_ids(2 * LENGTH).view(2, -1), wrap(model).hf()
    mask = torch.ones_like(ids).index_fill(1, torch.arange(3), 0)
    zeros: dict[str, Any] = dict.fromkeys(marks, torch.zeros_like(ids))
    for options in (zeros, zeros | {"attention_mask": mask}):
        options["max_new_tokens"] = 8
        expected = model.generate(ids, **options)
        assert torch.equal(model.generate(ids, custom_generate=loop, **options), expected)
    positions = torch.arange(LENGTH).expand(2, -1)  # counts the padding: wrong with this mask
    for name, value in {"position_ids": positions, **dict.fromkeys(marks, ids)}.items():
        with pytest.raises(InvalidOption, match=f"^{name}[, ]"):
            model.generate(ids, custom_generate=loop, **{**options, name: value})
    with pytest.raises(InvalidOption, match="input_ids alone"):
        request.refuse_model_keywords({"mm_encoder_outputs": {"image": ids}}, ids)


@pytest.mark.parametrize("name", [CACHE, "past_key_values", "assistant_model", "synced_gpus"])
def test_keywords_that_a_loop_never_receives_are_refused(
    name: str, speculator: Speculator, exact: Any
) -> None:
    """The loop cannot honour these values; a caller's cache, for one, would stay as it is."""
    value = {"assistant_model": make_model("llama"), "synced_gpus": True}.get(name, DynamicCache())
    options = {name: value, "custom_generate": speculator.hf(), "max_new_tokens": 4}
    with pytest.raises(
        InvalidOption, match=rf"^({name}|{CACHE}) is not supported: it would be ignored"
    ) as caught:
        exact.generate(random_ids(LENGTH), **options)
    assert name in str(caught.value)


def test_refused_keywords_may_have_neutral_values(
    speculator: Speculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Any = speculator.model.generation_config
    monkeypatch.setattr(config, "use_cache", False)  # as left from training
    options: dict[str, Any] = {"max_new_tokens": 3}
    expected = speculator.generate(random_ids(9), **options).token_ids
    options |= {"use_cache": True, "num_beams": 1, "output_scores": None, "synced_gpus": False}
    options["return_dict_in_generate"] = False
    monkeypatch.setattr(config, "num_beams", 4)
    assert speculator.generate(random_ids(9), **options).token_ids == expected
