from __future__ import annotations

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.api.chat_template import having, read
from selfspec.errors import InvalidData
from selfspec.training.text import Turns, end_ids
from tests.api.test_text import byte_level_bpe
from tests.authors import prompt_ids
from tests.models import make_model
from tests.talks import WORDS, make_tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer()


def words(ids: list[int]) -> str:
    return " ".join(WORDS[token] for token in ids)


def test_headers_end_where_the_user_starts(tokenizer: PreTrainedTokenizerBase) -> None:
    turns = Turns.of(tokenizer)
    assert words(turns.header()) == "<start> user"
    assert words(turns.header("a b")) == "<start> user a b"
    assert turns.messages() == []
    system = Turns.of(tokenizer, "c c")
    assert words(system.header()) == "<start> system c c <end> <line> <start> user"
    assert system.messages() == [{"role": "system", "content": "c c"}]


def test_prompts_are_what_the_template_writes(tokenizer: PreTrainedTokenizerBase) -> None:
    turns = Turns.of(tokenizer, "c")
    messages = [*turns.messages(), {"role": "user", "content": "a b"}]
    assert turns.first_prompt("a b") == prompt_ids(tokenizer, messages)
    said = turns.first_prompt("a b") + [WORDS.index(word) for word in ("b", "<end>")]
    messages += [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    whole, start = prompt_ids(tokenizer, messages), turns.next_header(said)
    assert turns.next_prompt(said, "c") == whole
    assert whole[: len(start) + 1] == [*start, WORDS.index("c")]


def test_an_end_token_that_the_template_does_not_write_stays(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    turns = Turns.of(tokenizer)
    said = [*turns.first_prompt("a"), WORDS.index("<unused>")]
    assert words(turns.next_header(said)[len(said) :]) == "<end> <line> <start> user"


def test_special_tokens_and_the_templates_own_end_a_question(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    assert {WORDS[token] for token in Turns.of(tokenizer).question_ends()} == {
        "<start>",
        "<end>",
        "<unused>",
    }
    tokenizer.add_tokens(["[/Q]"])  # not special, but the template ends questions with it
    tokenizer.chat_template = "{% for m in messages %}[Q] {{ m.content }} [/Q] {% endfor %}"
    own = tokenizer.convert_tokens_to_ids("[/Q]")
    assert own in Turns.of(tokenizer).question_ends()


def test_a_continuation_is_the_text_behind_a_start(tokenizer: PreTrainedTokenizerBase) -> None:
    turns = Turns.of(tokenizer)
    new = [WORDS.index(word) for word in ("b", "c", "<end>")]
    assert turns.continuation(turns.header("a"), new).split() == ["b", "c"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "no chat template"),
        ("{{ messages[0].role }}", "shows a turn 0 times"),
        ("{% for m in messages %}{{ m.content }} {{ m.content }}{% endfor %}", "a turn 2 times"),
        ("{{ raise_exception('no') }}", "does not take these messages: no"),
    ],
)
def test_a_template_that_cannot_be_taken_apart_is_refused(
    tokenizer: PreTrainedTokenizerBase, template: str | None, reason: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(InvalidData, match=reason):
        Turns.of(tokenizer)
    with pytest.raises(InvalidData, match="no chat template"):
        Turns.of(None)


def test_end_tokens_are_the_models_and_the_tokenizers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert end_ids(model, tokenizer) == {1}
    for configured in (7, [7, 1], [7]):
        ending = make_model("llama")
        assert ending.generation_config is not None
        ending.generation_config.eos_token_id = configured
        assert end_ids(ending, tokenizer) == {1, 7}
    tokenizer.eos_token = None
    with pytest.raises(InvalidData, match="no end token"):
        end_ids(model, tokenizer)


def test_a_user_turn_ends_where_a_template_without_end_tokens_begins_the_answer() -> None:
    tokenizer = having(byte_level_bpe(), read("vicuna"))
    turns = Turns.of(tokenizer)
    header = turns.header()
    said = turns.ids("What is a cat? ASSISTANT: It is")
    assert turns.question(header, said) == "What is a cat? "
    assert turns.question(header, turns.ids("What is a cat?")) is None
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    assert turns.question(header, [*turns.ids("What is a cat?"), end]) == "What is a cat?"
    prompt = turns.first_prompt("Q")
    assert str(turns.tokenizer.decode(prompt)).endswith(" USER: Q ASSISTANT:")
    more = turns.next_prompt([*prompt, *turns.ids(" A"), end], "R")
    assert str(turns.tokenizer.decode(more)).endswith("ASSISTANT: A<end>USER: R ASSISTANT:")
