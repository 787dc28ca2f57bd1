from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from selfspec.backbone import Backbone
from selfspec.errors import InvalidData
from selfspec.training import data
from selfspec.training.data import Conversation, batches, count_batches, padded
from tests.models import VOCAB_SIZE
from tests.talks import WORDS, make_talks, make_tokenizer


@pytest.fixture(scope="module")
def talks(backbone: Backbone) -> list[Conversation]:
    return make_talks(backbone.model)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer()


def read(path: Path, *lines: str, tokenizer: Any = None, **limits: int) -> list[Conversation]:
    path.write_text("".join(f"{line}\n" for line in lines))
    sizes = {"vocab_size": VOCAB_SIZE, "max_length": 64} | limits
    return data.read_conversations(path, tokenizer, **sizes)


GOOD = '{"input_ids": [1, 2, 3, 4], "answer_start": 2, "messages": []}'


def test_ids_are_read_as_they_are_from_plain_and_gzipped_lines(tmp_path: Path) -> None:
    plain = read(tmp_path / "a.jsonl", GOOD, GOOD)
    assert plain == [Conversation((1, 2, 3, 4), ((2, 4),))] * 2
    zipped = tmp_path / "a.jsonl.gz"
    zipped.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert data.read_conversations(zipped, None, vocab_size=VOCAB_SIZE, max_length=64) == plain


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is not JSON: Expecting property name"),
        ("[1]", "holds a list"),
        ('{"text": "hello"}', "holds text, expected input_ids"),
        ('{"input_ids": "12", "answer_start": 1}', "whole numbers"),
        ('{"input_ids": [1, true], "answer_start": 1}', "whole numbers"),
        ('{"input_ids": [1, 2]}', "answer_start None"),
        ('{"input_ids": [1, 2], "answer_start": 0}', "answer_start 0, expected 1..1"),
        ('{"input_ids": [1, 2], "answer_start": 2}', "answer_start 2, expected 1..1"),
        ('{"input_ids": [1, 96], "answer_start": 1}', "token id 96, expected 0..95"),
        ('{"input_ids": [1, -2], "answer_start": 1}', "token id -2, expected"),
        (json.dumps({"input_ids": [1] * 65, "answer_start": 1}), "65 tokens, at most 64"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no answer"),
        ('{"messages": [{"role": "cat", "content": "a"}]}', "role 'cat', expected system"),
        ('{"messages": [{"content": "a"}]}', "role None"),
        ('{"messages": [{"role": "user"}]}', "without text"),
        ('{"messages": ["a"]}', "without text"),
    ],
)
def test_a_bad_line_is_named_with_file_number_and_reason(
    tmp_path: Path, tokenizer: Any, line: str, reason: str
) -> None:
    path = tmp_path / "talks.jsonl"
    with pytest.raises(InvalidData) as caught:
        read(path, GOOD, line, tokenizer=tokenizer)
    assert str(caught.value).startswith(f"{path}, line 2 ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    empty, broken = tmp_path / "empty.jsonl", tmp_path / "broken.jsonl.gz"
    empty.write_text("")
    broken.write_bytes(gzip.compress(GOOD.encode() * 99)[:40])
    for path, reason in ((tmp_path / "no.jsonl", "No such"), (empty, "no conv"), (broken, "ended")):
        with pytest.raises(InvalidData, match=reason) as caught:
            data.read_conversations(path, None, vocab_size=VOCAB_SIZE, max_length=64)
        assert str(path) in str(caught.value)


def test_every_assistant_turn_is_an_answer_up_to_its_end_token(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    turns = [("user", "a b"), ("assistant", "c"), ("user", "b"), ("assistant", "a a")]
    messages = [{"role": role, "content": text} for role, text in turns]
    line = json.dumps({"messages": messages})
    (talk,) = read(tmp_path / "a.jsonl", line, tokenizer=tokenizer)
    said = [[WORDS[i] for i in talk.ids[first:end]] for first, end in talk.answers]
    assert said == [["c", "<end>"], ["a", "a", "<end>"]]


def test_messages_without_a_chat_template_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="no chat template"):
        read(tmp_path / "a.jsonl", '{"messages": [{"role": "user", "content": "a"}]}')


def test_reading_stops_behind_max_tokens(tmp_path: Path) -> None:
    assert len(read(tmp_path / "a.jsonl", *[GOOD] * 5, max_tokens=3)) == 2


def test_a_twentieth_is_held_out_and_one_conversation_is_too_few(talks: list[Conversation]) -> None:
    train, held_out = data.split(talks * 5)
    assert (len(train), held_out) == (57, talks[-3:])
    with pytest.raises(InvalidData, match="too few"):
        data.split(talks[:1])


def test_batches_hold_every_conversation_once_within_the_limit(talks: list[Conversation]) -> None:
    for seed in (None, 0, 1):
        made = list(batches(talks, 64, seed))
        rows = [tuple(row.tolist()) for batch in made for row in batch.ids]
        assert sorted(row[: len(row)] for row in map(_stripped(talks), rows)) == sorted(
            talk.ids for talk in talks
        )
        assert all(batch.ids.numel() <= 64 for batch in made)
        assert len(made) == count_batches(talks, 64) < len(talks)


def _stripped(talks: list[Conversation]) -> Any:
    """A padded row -> the conversation that it begins with."""
    return lambda row: next(talk.ids for talk in talks if row[: len(talk.ids)] == talk.ids)


def test_another_seed_is_another_order(talks: list[Conversation]) -> None:
    orders = [[batch.ids.tolist() for batch in batches(talks, 64, seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_a_position_predicts_the_token_behind_it() -> None:
    batch = padded(
        [Conversation((5, 6, 7, 8, 9), ((1, 2), (3, 5))), Conversation((5, 6), ((1, 2),))]
    )
    assert batch.predicts.int().tolist() == [[1, 0, 1, 1, 0], [1, 0, 0, 0, 0]]


def test_the_draft_vocabulary_is_special_and_frequent_tokens_rising() -> None:
    talk = Conversation((9, 9, 9, 7, 7, 7, 3, 3, 5), ((3, 9),))
    assert data.draft_vocabulary([talk], 3, {50}).tolist() == [3, 7, 50]
    assert data.draft_vocabulary([talk], 80, {50, 2}).tolist() == [2, 3, 5, 7, 50]


def test_special_tokens_without_a_role_count_too(tokenizer: PreTrainedTokenizerBase) -> None:
    assert data.special_ids(tokenizer) == {0, 1, 3}
