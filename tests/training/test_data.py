from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from selfspec.errors import InvalidData
from selfspec.model.backbone import Backbone
from selfspec.training import text
from selfspec.training.text import Conversation, padded, planned
from tests.models import VOCAB_SIZE
from tests.talks import WORDS, make_talks, make_tokenizer


@pytest.fixture(scope="module")
def talks(backbone: Backbone) -> list[Conversation]:
    return make_talks(backbone.model)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer()


def read(path: Path, *lines: str, tokenizer: Any = None, **limits: Any) -> list[Conversation]:
    path.write_text("".join(f"{line}\n" for line in lines))
    sizes = {"vocab_size": VOCAB_SIZE, "max_length": 64} | limits
    return text.read_conversations(path, tokenizer, **sizes)


GOOD = '{"input_ids": [1, 2, 3, 4], "answer_start": 2, "messages": []}'


def test_ids_are_read_as_they_are_from_plain_and_gzipped_lines(tmp_path: Path) -> None:
    plain = read(tmp_path / "a.jsonl", GOOD, GOOD)
    assert plain == [Conversation((1, 2, 3, 4), ((2, 4),))] * 2
    zipped = tmp_path / "a.jsonl.gz"
    zipped.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert text.read_conversations(zipped, None, vocab_size=VOCAB_SIZE, max_length=64) == plain


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is not JSON: Expecting property name"),
        ("[1]", "holds a list"),
        ('{"prose": "hello"}', "holds prose, expected input_ids"),
        ('{"input_ids": "12", "answer_start": 1}', "whole numbers"),
        ('{"input_ids": [1, true], "answer_start": 1}', "whole numbers"),
        ('{"input_ids": [1, 2]}', "answer_start None"),
        ('{"input_ids": [1, 2], "answer_start": 0}', "answer_start 0, expected 1..1"),
        ('{"input_ids": [1, 2], "answer_start": 2}', "answer_start 2, expected 1..1"),
        ('{"input_ids": [1, 96], "answer_start": 1}', "token id 96, expected 0..95"),
        ('{"input_ids": [1, -2], "answer_start": 1}', "token id -2, expected"),
        (json.dumps({"input_ids": [1] * 65, "answer_start": 1}), "65 tokens, at most 64"),
        ('{"messages": []}', "at least one message"),
        ('{"input_ids": [1], "answers": []}', "1 tokens, expected at least 2"),
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
            text.read_conversations(path, None, vocab_size=VOCAB_SIZE, max_length=64)
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
    line = '{"messages": [{"role": "user", "content": "a"}]}'
    with pytest.raises(InvalidData, match="there is no tokenizer"):
        read(tmp_path / "a.jsonl", line)
    bare = make_tokenizer()
    bare.chat_template = None
    with pytest.raises(InvalidData, match="Give --chat-template"):
        read(tmp_path / "a.jsonl", line, tokenizer=bare)


def test_reading_stops_behind_max_tokens(tmp_path: Path) -> None:
    assert len(read(tmp_path / "a.jsonl", *[GOOD] * 5, max_tokens=3)) == 2


def test_a_twentieth_is_held_out_and_one_conversation_is_too_few(talks: list[Conversation]) -> None:
    train, held_out = text.split(talks * 5)
    assert (len(train), held_out) == (57, talks[-3:])
    with pytest.raises(InvalidData, match="too few"):
        text.split(talks[:1])


def test_batches_hold_every_conversation_once_within_the_limit(talks: list[Conversation]) -> None:
    plan = planned(talks, 64)
    assert sorted(talk.ids for group in plan for talk in group) == sorted(t.ids for t in talks)
    assert all(padded(group).ids.numel() <= 64 for group in plan)
    assert len(plan) < len(talks)


def test_a_position_predicts_the_token_behind_it() -> None:
    batch = padded(
        [Conversation((5, 6, 7, 8, 9), ((1, 2), (3, 5))), Conversation((5, 6), ((1, 2),))]
    )
    assert batch.predicts.int().tolist() == [[1, 0, 1, 1, 0], [1, 0, 0, 0, 0]]


def test_the_draft_vocabulary_is_special_then_frequent_then_low() -> None:
    counts = Counter({7: 3, 3: 2, 5: 1})
    assert text.draft_vocabulary(counts, 3, {50}, 60).tolist() == [3, 7, 50]
    assert text.draft_vocabulary(counts, 6, {50, 2}, 60).tolist() == [0, 2, 3, 5, 7, 50]
    assert len(text.draft_vocabulary(counts, 60, (), 60)) == 60


def test_special_tokens_without_a_role_count_too(tokenizer: PreTrainedTokenizerBase) -> None:
    assert text.special_ids(tokenizer) == {0, 1, 3}
