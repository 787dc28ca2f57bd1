"""The facade means what Hugging Face means by each keyword, and stops where plain decoding stops.

In float64 all comparisons are exact: tokens must be equal, with drafts accepted and refused.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from selfspec.api.speculator import Speculator, wrap
from selfspec.errors import InvalidOption, InvalidPrompt
from tests.models import make_model, random_ids

NEW_TOKENS = 30


def hugging_face(model: Any, ids: Tensor, **options: Any) -> list[int]:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | options
    return model.generate(ids, **options)[0, ids.shape[1] :].tolist()


def test_end_tokens_and_criteria_stop_in_the_middle_of_an_accepted_block(
    exact: Any,
) -> None:
    # with exits in the last layer but one of a model whose last layer does little, most drafts stay
    model: Any = make_model("llama", torch.float64)
    with torch.no_grad():
        model.model.layers[5].self_attn.o_proj.weight.mul_(1e-3)
        model.model.layers[5].mlp.down_proj.weight.mul_(1e-3)
    easy = wrap(model, heads="logit-lens", drafter="exit:layers=5,threshold=0.01")
    ids = random_ids(13)
    expected = hugging_face(model, ids)
    for count in range(2, 12):
        answer = easy.generate(
            ids,
            max_new_tokens=NEW_TOKENS,
            stopping_criteria=[lambda seen, _, n=count: seen.shape[1] >= 13 + n],
        )
        assert answer.token_ids == expected[:count]
        assert answer.stop_reason == "stop"
        first = expected.index(expected[count - 1])
        ended = easy.generate(ids, max_new_tokens=NEW_TOKENS, eos_token_id=expected[count - 1])
        assert ended.token_ids == expected[: first + 1]
        assert ended.stop_reason == "eos"
        assert easy.generate(ids, max_new_tokens=count).token_ids == expected[:count]
    assert easy.generate(ids, max_new_tokens=NEW_TOKENS).stats.compression_rate > 2


def test_each_row_of_a_left_padded_batch_equals_hugging_face(
    speculator: Speculator, exact: Any
) -> None:
    ids = torch.cat([random_ids(13), random_ids(13, seed=1)])
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": 12,
        "min_new_tokens": 6,
        "repetition_penalty": 1.2,
        "eos_token_id": list(range(30)),
        "pad_token_id": 0,
    }
    expected = exact.generate(ids, do_sample=False, **options)
    found = exact.generate(ids, do_sample=False, custom_generate=speculator.hf(), **options)
    assert torch.equal(found, expected)
    answers = speculator.generate_batch(ids, **options)
    for row, answer in enumerate(answers):
        assert answer.token_ids == expected[row, 13 : 13 + len(answer.token_ids)].tolist()


def test_inside_hugging_faces_generate_tokens_and_output_object_are_its_own(
    speculator: Speculator, exact: Any
) -> None:
    ids = random_ids(13)
    expected = exact.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    found = exact.generate(ids, max_new_tokens=NEW_TOKENS, custom_generate=speculator.hf())
    assert torch.equal(found, expected)
    record = exact.generate(
        ids,
        max_new_tokens=NEW_TOKENS,
        custom_generate=speculator.hf(drafter="exit:threshold=0.5"),
        return_dict_in_generate=True,
    )
    assert torch.equal(record.sequences, expected)


def test_plain_decoding_is_the_same_text_without_drafts(speculator: Speculator) -> None:
    ids = random_ids(13)
    expected = speculator.generate(ids, max_new_tokens=9)
    with speculator.disabled():
        plain = speculator.generate(ids, max_new_tokens=9)
        with speculator.disabled():
            pass
        assert speculator.generate(ids, max_new_tokens=9).stats.drafted == 0
    assert plain.token_ids == expected.token_ids
    assert plain.stats.drafted == 0
    assert speculator.generate(ids, max_new_tokens=9).stats.drafted > 0


def test_a_lossy_rule_is_labelled_and_needs_sampling(speculator: Speculator) -> None:
    ids = random_ids(5)
    lossy = speculator.generate(
        ids, max_new_tokens=5, do_sample=True, acceptance="lenient:lenience=0.5", seed=0
    )
    assert not lossy.stats.lossless
    assert lossy.stats.line().endswith("lossy")
    assert speculator.generate(ids, max_new_tokens=5, do_sample=True, seed=0).stats.lossless
    with pytest.raises(InvalidOption, match="do_sample"):
        speculator.generate(ids, acceptance="lenient:lenience=0.5")


def test_right_padding_is_refused(speculator: Speculator) -> None:
    mask = torch.tensor([[1, 1, 1, 0]])
    with pytest.raises(InvalidPrompt, match="row 0 of the batch is not left-padded"):
        speculator.generate(random_ids(4), attention_mask=mask)


def test_a_pad_token_within_a_single_prompt_is_no_padding(exact: Any) -> None:
    speculator = wrap(exact, heads="logit-lens")
    ids = random_ids(8)
    expected = speculator.generate(ids, max_new_tokens=5).token_ids
    pad = int(ids[0, 3])
    assert speculator.generate(ids, max_new_tokens=5, pad_token_id=pad).token_ids == expected


def test_a_loop_of_another_model_is_refused(speculator: Speculator) -> None:
    other: Any = make_model("llama")
    with pytest.raises(InvalidOption, match="another model"):
        other.generate(random_ids(4), custom_generate=speculator.hf())


def test_many_generations_leave_nothing_behind(speculator: Speculator) -> None:
    def live() -> int:
        gc.collect()
        return sum(isinstance(item, Tensor) for item in gc.get_objects())

    for _ in range(3):
        speculator.generate(random_ids(13), max_new_tokens=5)
    before = live()
    for _ in range(50):
        speculator.generate(random_ids(13), max_new_tokens=5)
    assert live() <= before


def test_heads_speak_up_where_there_are_none(exact: Any, caplog: pytest.LogCaptureFixture) -> None:
    wrap(exact, heads="none")
    assert not caplog.text
    seen = wrap(exact)
    assert "no exit heads for" in caplog.text
    assert "text already seen drafts" in caplog.text
    looping = torch.tensor([[7, 8, 9] * 8])
    answer = seen.generate(looping, max_new_tokens=20)
    assert {*answer.stats.drafted_by_source} <= {"ngram"}
    assert answer.token_ids == seen.generate(looping, max_new_tokens=20, speculate=False).token_ids
    caplog.clear()
    plain = wrap(exact, drafter="exit")
    assert "plain decoding" in caplog.text
    assert plain.generate(random_ids(5), max_new_tokens=5).stats.drafted == 0
    caplog.clear()
    wrap(exact, drafter="none")
    wrap(exact, speculate=False)
    assert not caplog.text


def test_what_python_shows_of_an_answer_is_short(speculator: Speculator) -> None:
    answer = speculator.generate(random_ids(5), max_new_tokens=5)
    assert str(answer) == answer.text
    assert repr(answer).startswith("<Generation '': 5 tokens, ")
    assert "\n" not in repr(answer)
    assert repr(speculator).startswith(
        "<Speculator of LlamaForCausalLM: 6 layers in torch.float64 "
    )
    assert repr(speculator).endswith(", drafter exit>")


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
def test_what_only_drawing_knows_asks_for_it(speculator: Speculator, name: str) -> None:
    value: Any = {"temperature": 1.5, "top_k": 50}.get(name, 0.5)
    asked: Any = {"max_new_tokens": 12, "seed": 3, name: value}
    drawn = speculator.generate(random_ids(5), do_sample=True, **asked).token_ids
    assert speculator.generate(random_ids(5), **asked).token_ids == drawn
    greedy = speculator.generate(random_ids(5), max_new_tokens=12).token_ids
    assert speculator.generate(random_ids(5), do_sample=False, **asked).token_ids == greedy
    at_zero: Any = {**asked, "temperature": 0}
    assert speculator.generate(random_ids(5), **at_zero).token_ids == greedy
