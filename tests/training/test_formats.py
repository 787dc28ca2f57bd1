from __future__ import annotations

import gzip
import json
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from selfspec.errors import InvalidData
from selfspec.training import text
from selfspec.training.text import Reader, encoded, messages_of, rendered, rows
from tests.talks import WORDS, make_tokenizer

TALK = [
    {"role": "system", "content": "c"},
    {"role": "user", "content": "a b"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "a a"},
]
SHARED = [{"from": "system", "value": "c"}] + [
    {"from": name, "value": entry["content"]}
    for name, entry in zip(("human", "gpt", "user", "chatgpt"), TALK[1:], strict=True)
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer()


def parsed(path: Path, **options: Any) -> list[Any]:
    return list(Reader(path, lambda record: record["n"], **options))


# --- records


@pytest.mark.parametrize(
    "record", [{"messages": TALK}, {"conversations": SHARED}, {"conversations": TALK}]
)
def test_messages_and_sharegpt_are_the_same_conversation(
    record: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> None:
    assert messages_of(record) == TALK
    ids, answers = encoded(record, tokenizer)
    said = [[WORDS[token] for token in ids[first:end]] for first, end in answers]
    assert said == [["b", "<end>"], ["a", "a", "<end>"]]
    whole: Any = tokenizer.apply_chat_template(TALK, return_dict=True)
    assert list(ids) == whole["input_ids"]


def test_every_token_of_a_text_but_the_first_is_to_be_learned(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    assert encoded({"text": "a b c"}, tokenizer) == ((7, 8, 9), ((1, 3),))


def test_ids_come_with_one_answer_or_with_several() -> None:
    assert encoded({"input_ids": [5, 6, 7], "answer_start": 2}, None) == ((5, 6, 7), ((2, 3),))
    several = {"input_ids": [5, 6, 7, 8], "answers": [[1, 2], [2, 4]], "messages": "not read"}
    assert encoded(several, None) == ((5, 6, 7, 8), ((1, 2), (2, 4)))


def test_turns_are_questions_without_answers(tokenizer: PreTrainedTokenizerBase) -> None:
    record = {"turns": ["a", "b"], "question_id": 1}
    assert [(turn["role"], turn["content"]) for turn in messages_of(record)] == [
        ("user", "a"),
        ("user", "b"),
    ]
    with pytest.raises(InvalidData, match="--regenerate"):
        encoded(record, tokenizer)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({}, "holds nothing, expected input_ids"),
        ({"prose": "a"}, "holds prose, expected input_ids"),
        ({"conversations": []}, "conversations that are no list with at least one"),
        ({"conversations": 5}, "conversations that are no list"),
        ({"conversations": [5]}, "without text as its value"),
        ({"conversations": [{"from": "bot", "value": "a"}]}, "role 'bot', expected system, user,"),
        ({"conversations": [{"from": ["gpt"], "value": "a"}]}, r"role \['gpt'\]"),
        ({"conversations": [{"role": "gpt", "content": "a"}]}, "role 'gpt'"),
        ({"conversations": [{"from": "gpt", "value": "a"}]}, "begins with the assistant"),
        ({"messages": [{"role": "human", "content": "a"}]}, "role 'human', expected system"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "without text as its content"),
        ({"text": 5}, "text that is no string"),
        ({"text": "a\udfff"}, "text that is no string"),
        ({"text": "a"}, "text of 1 tokens, expected at least 2"),
        ({"input_ids": [1, 2], "answers": 7}, r"answers 7, expected rising pairs"),
        ({"input_ids": [1, 2], "answers": [1]}, "rising pairs"),
        ({"input_ids": [1, 2], "answers": [[0, 1]]}, "rising pairs"),
        ({"input_ids": [1, 2], "answers": [[1, 3]]}, r"in 1\.\.2"),
        ({"input_ids": [1, 2], "answers": [[1, True]]}, "rising pairs"),
        ({"input_ids": [1, 2, 3], "answers": [[2, 3], [1, 2]]}, "rising pairs"),
    ],
)
def test_a_bad_record_is_refused_with_the_reason(
    record: dict[str, Any], reason: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(InvalidData, match=reason) as caught:
        encoded(record, tokenizer)
    assert "\n" not in str(caught.value)


def test_records_without_turns_have_no_messages() -> None:
    records: list[dict[str, Any]] = [{"text": "a"}, {}, {"turns": []}, {"turns": [5]}]
    for record in records:
        with pytest.raises(InvalidData):
            messages_of(record)


def test_text_and_messages_need_a_tokenizer() -> None:
    for record in ({"text": "a b"}, {"messages": TALK}):
        with pytest.raises(InvalidData, match="Give input_ids"):
            encoded(record, None)


def test_what_the_template_refuses_is_a_reason() -> None:
    picky = make_tokenizer()
    picky.chat_template = "{{ raise_exception('no system here') }}"
    with pytest.raises(InvalidData, match="does not take these messages: no system here"):
        rendered(picky, TALK, add_generation_prompt=False)


# --- sources


def test_lines_are_read_with_their_numbers_and_empty_ones_are_none(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 1}\r\n\n{"n": 2}')
    assert [place for place, _ in rows(path)] == ["line 1", "line 3"]
    assert parsed(path) == [1, 2]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz", "a.txt"])
def test_any_name_may_hold_lines(tmp_path: Path, name: str) -> None:
    content = b'{"n": 1}\n{"n": 2}\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert parsed(tmp_path / name) == [1, 2]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_an_array_is_read_item_by_item(tmp_path: Path, name: str) -> None:
    content = b' [{"n": 1},\n {"n": 2}, "text", 5]'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert [place for place, _ in rows(tmp_path / name)] == [f"item {n}" for n in (1, 2, 3, 4)]
    with pytest.raises(InvalidData, match="item 3 holds a str, expected an object"):
        parsed(tmp_path / name)
    assert parsed(tmp_path / name, skip_bad_rows=True) == [1, 2]


def test_a_broken_array_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"n": 1}, ')
    with pytest.raises(InvalidData, match=r"a\.json is not JSON: "):
        parsed(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"n": 1', "line 2 is not JSON: "),
        (b'{"n": "\xff"}', "line 2 is not JSON: 'utf-8' codec"),
        (b"[" * 100_000, "line 2 is not JSON: "),
        (b'"text"', "line 2 holds a str, expected an object"),
    ],
)
def test_a_bad_line_stops_or_is_counted(
    tmp_path: Path, line: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n' + line + b'\n{"n": 2}\n[]\n')
    with pytest.raises(InvalidData) as caught:
        parsed(path)
    assert str(caught.value).startswith(f"{path}, {reason}")
    reader = Reader(path, lambda record: record["n"], skip_bad_rows=True)
    assert (list(reader), reader.skipped) == ([1, 2], 2)
    with caplog.at_level(logging.WARNING):
        reader.report()
    assert caplog.messages[0].startswith(f"{path}: skipped 2 bad rows, the first: {reason}")


def test_nothing_skipped_is_nothing_reported(caplog: pytest.LogCaptureFixture) -> None:
    Reader("a.jsonl", lambda record: record).report()
    assert not caplog.messages


@pytest.mark.parametrize("name", ["none.jsonl", "data/none.json", "./none", "/none/at/all"])
def test_a_missing_file_is_not_taken_for_a_data_set(name: str) -> None:
    with pytest.raises(InvalidData, match=f"cannot read {Path(name)}: .*No such file"):
        next(rows(name))


# --- data sets


@pytest.fixture
def data_sets(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for the package datasets: what `load_dataset` gives, by name."""
    known: dict[str, Any] = {}

    def load_dataset(name: str, *, split: str) -> Any:
        assert split == "train"
        if name not in known:
            raise FileNotFoundError(f"no {name}\nhere")
        return known[name]

    fake = ModuleType("datasets")
    vars(fake).update(load_dataset=load_dataset, exceptions=ModuleType("exceptions"))
    vars(fake.exceptions).update(DatasetsError=RuntimeError)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return known


def test_a_hub_id_and_a_folder_are_data_sets(tmp_path: Path, data_sets: dict[str, Any]) -> None:
    for name in ("someone/some-talks", "talks", str(tmp_path)):
        data_sets[name] = [{"n": 1}, {"n": 2}]
        assert list(rows(name)) == [("row 1", {"n": 1}), ("row 2", {"n": 2})]
    assert list(Reader(Path("someone/some-talks"), lambda record: record["n"])) == [1, 2]


def test_a_data_set_that_cannot_be_loaded_is_one_line(data_sets: dict[str, Any]) -> None:
    with pytest.raises(InvalidData) as caught:
        list(rows("someone/else"))
    assert str(caught.value) == "cannot read the data set someone/else: no someone/else"


def test_without_the_package_the_line_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InvalidData, match=r'pip install "selfspec\[train\]"'):
        list(text.rows("someone/some-talks"))


def test_the_real_package_reads_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "train.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    ((place, row),) = rows(tmp_path / "in")
    assert (place, messages_of(row)) == ("row 1", TALK)
