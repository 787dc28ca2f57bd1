"""Rows in common formats become conversations, and conversations become batches.

A damaged row gives an error of one line with file, line and reason; no file is changed.
"""

# mypy: disable-error-code="var-annotated"
# mixed values in a row, for which mypy finds no common type

from __future__ import annotations

import gzip
import json
import logging
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import PreTrainedTokenizerBase

from selfspec.errors import InvalidData, InvalidOption, InvalidPrompt
from selfspec.training import text
from tests.authors import counted
from tests.bad_input import DEEP
from tests.models import VOCAB_SIZE
from tests.talks import WORDS, Talks, dialogue, make_tokenizer

USER, ASSISTANT = dialogue("a", "b")
TALK = dialogue("a b", "b", "c", "a a", rule="c")
SHARED = [{"from": "system", "value": "c"}] + [
    {"from": name, "value": entry["content"]}
    for name, entry in zip(("human", "gpt", "user", "chatgpt"), TALK[1:], strict=True)
]
LINE = b'{"input_ids": [1, 2, 3, 4], "answer_start": 2, "messages": []}\n'


def read(path: Path, *, skip: bool = False, **limits: Any) -> Talks:
    sizes = {"vocab_size": VOCAB_SIZE, "max_length": 64} | limits
    tokenizer = make_tokenizer()
    return text.read_conversations(path, tokenizer, skip_bad_rows=skip, **sizes)


def numbers(path: Path, **options: Any) -> list[Any]:
    return list(text.Reader(path, lambda record: record["n"], **options))


# --- records


@pytest.mark.parametrize(
    "record", [{"messages": TALK}, {"conversations": SHARED}, {"conversations": TALK}]
)
def test_formats_are_equivalent(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Every assistant turn is an answer, up to its end token."""
    assert text.messages_of(record) == TALK
    ((ids, answers),) = text.encode(record, tokenizer)
    texts = [[WORDS[token] for token in ids[first:end]] for first, end in answers]
    assert texts == [["b", "<end>"], ["a", "a", "<end>"]]
    encoding: Any = tokenizer.apply_chat_template(TALK, return_dict=True)
    assert list(ids) == encoding["input_ids"]


@pytest.mark.parametrize(
    ("turns", "answers"),
    [  # an end token only after the last turn, only after users' turns; two; another with more
        ("{{ m.role }} {{ m.content }} {% if loop.last %}<end>{% endif %}", ["b", "a a <end>"]),
        ("{{ m.role }} {{ m.content }} {% if m.role == 'user' %}<end> {% endif %}", ["b", "a a"]),
        ("{{ m.role }} {{ m.content }} <end> c <end> ", ["b <end>", "a a <end>"]),
        ("{{ m.role }} {{ m.content }} <unused> <line> ", ["b <unused>", "a a <unused>"]),
        ("{{ m.role }} {{ m.content if m.role == 'user' }} ", []),
    ],
)
def test_templates_may_end_turns_in_any_way(turns: str, answers: list[str]) -> None:
    """A model stops at its first end token; an answer without tokens is none."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}" + turns + "{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    ).replace("{% if loop.last %}", "{% if loop.last and not add_generation_prompt %}")
    ((ids, spans),) = text.encode({"messages": TALK}, tokenizer)
    assert [" ".join(WORDS[token] for token in ids[first:end]) for first, end in spans] == answers


def test_an_answer_follows_what_the_template_keeps_of_earlier_turns() -> None:
    """Qwen3 drops thoughts before the last question: each such answer has a text of its own."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {% set rest = messages[loop.index :] %}"
        "{% if m.role == 'assistant' and 'user' not in rest | map(attribute='role') %}<unused> "
        "{% endif %}{{ m.content }} <end> {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    talks = text.encode({"messages": [*TALK[1:], TALK[2], TALK[1]]}, tokenizer)
    assert [
        [" ".join(WORDS[token] for token in ids[start:end]) for start, end in [(0, 99), *answers]]
        for ids, answers in talks
    ] == [
        ["user a b <end> assistant <unused> b <end>", "<unused> b <end>"],
        [
            "user a b <end> assistant b <end> user c <end> assistant <unused> a a <end> "
            "assistant <unused> b <end>",
            "<unused> a a <end>",
            "<unused> b <end>",
        ],
    ]


def test_an_answer_follows_thoughts_that_the_prompt_opens() -> None:
    """DeepSeek-R1 opens thoughts in the prompt, and drops all of them from earlier answers."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content.split('<line>')[-1] }} <end> {% endfor %}"
        "{% if add_generation_prompt %}assistant <unused> {% endif %}"
    )
    turns = ["a", "<unused> b <line> c", "b", "a <line> b"]
    talks = text.encode({"messages": dialogue(*turns)}, tokenizer)
    assert [
        [" ".join(WORDS[token] for token in ids[start:end]) for start, end in [(0, 99), *answers]]
        for ids, answers in talks
    ] == [
        ["user a <end> assistant <unused> b <line> c <end>", "b <line> c <end>"],
        [
            "user a <end> assistant c <end> user b <end> assistant <unused> a <line> b <end>",
            "a <line> b <end>",
        ],
    ]


@pytest.mark.parametrize(
    ("record", "ids", "answers"),
    [
        ({"text": "a b c"}, (7, 8, 9), ((1, 3),)),  # every token but the first is learned
        ({"input_ids": [5, 6, 7], "answer_start": 2}, (5, 6, 7), ((2, 3),)),
        ({"input_ids": [5, 6, 7], "answers": [[1, 2], [2, 3]]}, (5, 6, 7), ((1, 2), (2, 3))),
    ],
)
def test_ids_and_text_set_the_learned_tokens(
    record: Any, ids: Any, answers: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert text.encode(record, tokenizer) == [(ids, answers)]


BAD: dict[str, list[Any]] = {
    "is not JSON in UTF-8": [b"{", b'{"n": "\xff"}', '{"n": 1}'.encode("utf-16"), DEEP.encode()],
    "expected an object": [3, None, [{}]],
    "holds nothing, expected input_ids": [{}],
    "holds prose, expected input_ids": [{"prose": "hello"}],
    "no list of whole numbers": [
        {"input_ids": value, "answer_start": 1} for value in (None, "12", [1.0, 2.0], [1, True])
    ],
    "answer_start": [
        *({"input_ids": [1, 2, 3], "answer_start": n} for n in (None, "1", 0, 3, 1.0)),
        {"input_ids": [], "answer_start": 1},
    ],
    "token id": [{"input_ids": [1, n], "answer_start": 1} for n in (-1, 96, 10**40)],
    "tokens, at most 64": [{"input_ids": [1] * 65, "answer_start": 1}],
    "1 tokens, expected at least 2": [{"input_ids": [1], "answers": []}, {"text": "a"}],
    "rising pairs [first, end] in 1..3": [
        {"input_ids": [1, 2, 3], "answers": value}
        for value in (None, [1], [[1]], [[0, 1]], [[1, 9]], [[2, 1]], [[1, 3], [2, 3]], [[1, True]])
    ],
    "no list with at least one message": [{"messages": None}, {"conversations": []}],
    "without text as its content": [
        *({"messages": value} for value in ([3], [{"role": "user"}])),
        *({"messages": [USER, ASSISTANT | {"content": v}]} for v in (None, [], "\ud800")),
    ],
    "without text as its value": [{"conversations": [{"from": "human"}]}],
    "expected system, user, assistant": [
        *({"messages": [USER, ASSISTANT | {"role": v}]} for v in (None, [], "human")),
        {"conversations": [{"role": "gpt", "content": "a"}]},
        {"conversations": [{"from": "bot", "value": "a"}]},
    ],
    "begins with the assistant": [{"messages": [ASSISTANT]}],
    "selfspec data --from": [{"turns": ["a"]}],
    "text that is no string": [{"text": None}, {"text": "\udfff a b"}],
}


@pytest.mark.parametrize(
    ("row", "reason"),
    [(row, reason) for reason, rows in BAD.items() for row in rows],
    ids=lambda value: repr(value)[:40],
)
def test_a_bad_row_is_named_with_line_and_reason(tmp_path: Path, row: Any, reason: str) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_bytes(LINE + (row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n")
    with pytest.raises(InvalidData, match=f"^{path}, line 2 .*{re.escape(reason)}"):
        read(path)
    assert read(path, skip=True) == [text.Conversation((1, 2, 3, 4), ((2, 4),))]


@pytest.mark.parametrize("record", [{"text": "a b"}, {"messages": TALK}])
def test_text_and_messages_need_a_tokenizer(record: dict[str, Any]) -> None:
    with pytest.raises(InvalidData, match="Give input_ids"):
        text.encode(record, None)


def test_a_templates_refusal_is_the_reason() -> None:
    picky = make_tokenizer()
    picky.chat_template = "{{ raise_exception('no system here') }}"
    with pytest.raises(InvalidPrompt, match="does not take these messages: no system here"):
        text.encode({"messages": TALK}, picky)
    picky.chat_template = None
    with pytest.raises(InvalidData, match="Give --chat-template"):
        text.encode({"messages": TALK}, picky)


# --- sources


def test_lines_are_read_with_their_numbers_and_blank_ones_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 1}\r\n\n{"n": 2}')
    assert [place for place, _ in text.rows(path)] == ["line 1", "line 3"]
    assert numbers(path) == [1, 2]


LINES, ARRAY = b'{"n": 1}\n{"n": 2}\n', b' [{"n": 1},\n {"n": 2}]'


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt", "a.json", "a.json.gz"])
@pytest.mark.parametrize("content", [LINES, ARRAY])
def test_only_json_files_may_hold_an_array(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    accepted = content == LINES or name.removesuffix(".gz") == "a.json"
    assert numbers(tmp_path / name, skip_bad_rows=True) == ([1, 2] if accepted else [])


CONTENTS: dict[str, tuple[str, bytes]] = {
    "holds no conversations": ("a.jsonl", b"\n \n\t\n"),
    "line 1 is not JSON in UTF-8: 'utf-8": ("a.jsonl", '{"text": "a b"}\n{}'.encode("utf-16")),
    "maximum recursion depth": ("a.json", DEEP[: 1 << 15].encode()),
    "line 2 is not JSON in UTF-8: Unterminated": ("a.jsonl", LINE + LINE[:9]),
    "item 1 holds a whole number": ("a.json", b"[1, 2]"),
    "is not JSON in UTF-8: Expecting ','": ("a.json", b"[" + LINE),
    "value has 6000 digits": (
        "a.jsonl",
        b'{"input_ids": [1, ' + b"9" * 6000 + b'], "answer_start": 1}',
    ),
    "Not a gzipped file": ("a.jsonl.gz", LINE),
    "Compressed file ended": ("a.jsonl.gz", gzip.compress(LINE * 99)[:40]),
    "CRC check failed": ("a.jsonl.gz", gzip.compress(LINE * 99)[:-8] + bytes(8)),
    "line 1 has more than 8192 bytes": ("a.jsonl.gz", gzip.compress(b"[" * (1 << 24))),
    "only blank lines for 8193 bytes": ("a.jsonl.gz", gzip.compress(b"\n" * (1 << 20))),
    "has over 65536 bytes": ("a.json.gz", gzip.compress(b"[" + b" " * (1 << 24))),
}
"""File name and content, by words of the error."""


@pytest.mark.parametrize("words", CONTENTS)
def test_odd_files_are_refused(tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_MOST_LINE", 8192)
    monkeypatch.setattr(text, "_MOST_ARRAY", 1 << 16)
    name, content = CONTENTS[words]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidData, match=f"{path}.*{re.escape(words)}"):
        read(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("name", ["a.json", "a.jsonl.gz"])
@pytest.mark.parametrize("long", [LINE[:-1] + b" " * 8192, b"{" * 8193, b"x" * 99999])
@pytest.mark.parametrize("place", [0, 3])
def test_a_line_that_is_too_long_is_a_bad_row(
    tmp_path: Path, place: int, long: bytes, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "_MOST_LINE", 8192)
    lines = [LINE.rstrip()] * 3
    lines.insert(place, long)
    path = tmp_path / name
    content = b"\n".join(lines)
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert len(read(path, skip=True)) == 3
    with pytest.raises(InvalidData, match=f"{name}, line {place + 1} has more than 8192 bytes"):
        read(path)


@pytest.mark.parametrize("name", ["none.jsonl", "./none"])
def test_a_missing_file_is_not_mistaken_for_a_data_set(name: str) -> None:
    with pytest.raises(InvalidData, match=f"cannot read {Path(name)}: .*No such file"):
        next(text.rows(name))


def test_a_hub_id_is_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, *, split: str, **_: None) -> Any:
        if (name, split) != ("someone/some-talks", "train"):
            raise FileNotFoundError(f"no {name}\nhere")
        return [{"n": 1}, {"n": 2}]

    fake: Any = Mock(load_dataset=load_dataset, **{"exceptions.DatasetsError": RuntimeError})
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert list(text.rows("someone/some-talks")) == [("row 1", {"n": 1}), ("row 2", {"n": 2})]
    assert numbers(Path("someone/some-talks")) == [1, 2]
    with pytest.raises(InvalidData) as caught:
        list(text.rows("someone/else"))
    assert str(caught.value) == "cannot read the data set someone/else: no someone/else"
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InvalidData, match=r'pip install "selfspec\[train\]"'):
        list(text.rows("someone/some-talks"))


def test_the_real_package_reads_folders_and_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "train.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    table = datasets.Dataset.from_list([{"messages": TALK}])
    table.to_parquet(tmp_path / "it.parquet")
    for source in (tmp_path / "in", "~/in", tmp_path / "it.parquet"):
        ((place, row),) = text.rows(source)
        assert (place, text.messages_of(row)) == ("row 1", TALK)
    (tmp_path / "it.csv").write_text('text\n"a, b"\n')
    assert [*text.rows(tmp_path / "it.csv")] == [("row 1", {"text": "a, b"})]
    (tmp_path / "it.parquet").write_text("no table")
    with pytest.raises(InvalidData, match=r"cannot read the data set .*it\.parquet"):
        next(text.rows(tmp_path / "it.parquet"))


# --- conversations


def test_a_twentieth_is_held_out_and_one_conversation_is_too_few(talks: Talks) -> None:
    train, held_out = text.split(talks * 5)
    assert (len(train), held_out) == (57, talks[-3:])
    with pytest.raises(InvalidData, match="too few"):
        text.split(talks[:1])


# --- a file that grows

OPTIONS = {"seed": 0, "shard": "1/1", "pair": (0.8, 1.0)}
BATCHES = [['{"a": "é"}', '{"a": 2}'], [], ['{"a": 3}']]


def opened(path: Path, **options: Any) -> text.Writer:
    return text.Writer(path, OPTIONS | options, {"torch": "1"})


def filled(path: Path, first: int = 0, last: int = 3) -> text.Writer:
    writer = opened(path)
    for number in range(first, last):
        writer.append(BATCHES[number], number + 7, counted(rows=number))
    return writer


def record(path: Path) -> Path:
    return path.with_name(path.name + ".run.json")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_batches_are_appended_and_recorded(tmp_path: Path, name: str) -> None:
    path = tmp_path / "new" / name
    writer = filled(path)
    assert [entry["a"] for entry in writer.records()] == ["é", 2, 3]
    assert (writer.batches, writer.counts) == (3, counted(rows=2))
    state = json.loads(record(path).read_text())
    assert state["seeds"] == [7, 8, 9]
    assert state["bytes"] == path.stat().st_size
    assert (state["options"]["pair"], state["versions"]) == ([0.8, 1.0], {"torch": "1"})
    content = path.read_bytes()
    lines = gzip.decompress(content) if name.endswith("gz") else content
    assert lines.decode().splitlines() == [*BATCHES[0], *BATCHES[2]]
    with pytest.raises(InvalidOption, match="was begun with extra None, not 5"):
        opened(path, extra=5)


def test_the_template_of_a_text_in_the_home_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    opened(tmp_path / "a.jsonl", chat_template="its own").append([], 0, counted(rows=0))
    assert text.template_of("~/a.jsonl") == "its own"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("whole", [0, 1, 2])
@pytest.mark.parametrize("written", [0, 5, None])
def test_leftovers_of_a_killed_run_are_cut_off(
    tmp_path: Path, name: str, whole: int, written: int | None
) -> None:
    """The run wrote `whole` batches, and `written` bytes of the next one."""
    filled(tmp_path / "expected" / name)
    path = tmp_path / name
    writer = filled(path, 0, whole)
    block = writer._block(BATCHES[whole])
    writer._save(replace(writer._run, next=BATCHES[whole]))
    with path.open("ab") as file:
        file.write(block[:written])
    record(path).with_name(record(path).name + ".new").write_text("{")  # killed while writing it
    assert opened(path).batches == whole
    filled(path, whole)
    assert path.read_bytes() == (tmp_path / "expected" / name).read_bytes()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("coming", [0, 1], ids=["whole", "killed"])
@pytest.mark.parametrize("added", [b'{"mi', b"\n", gzip.compress(b"mine\n", mtime=0)])
def test_lines_of_users_are_kept(tmp_path: Path, name: str, coming: int, added: bytes) -> None:
    """After a whole run, and after a run that was killed while it wrote a batch."""
    path = tmp_path / name
    writer = filled(path)
    block = writer._block(BATCHES[0]) * coming
    writer._save(replace(writer._run, next=BATCHES[0] * coming))
    with path.open("ab") as file:
        file.write(block + added)
    content = path.read_bytes()
    with pytest.raises(InvalidData, match=r"what follows byte \d+ was not written"):
        opened(path)
    assert path.read_bytes() == content


def test_a_run_that_was_stopped_after_saving_its_record_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, saves = tmp_path / "a.jsonl", [None, KeyboardInterrupt]
    writer, save = filled(path, 0, 1), text.Writer._save

    def stopped(self: text.Writer, run: Any) -> None:
        save(self, run)
        if (error := saves.pop(0)) is not None:
            raise error

    monkeypatch.setattr(text.Writer, "_save", stopped)
    with pytest.raises(KeyboardInterrupt):
        writer.append(BATCHES[1], 8, counted(rows=1))
    monkeypatch.undo()
    assert opened(path).batches == 2


def test_other_versions_give_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path / "a.jsonl")
    with caplog.at_level(logging.WARNING):
        opened(tmp_path / "a.jsonl")
        assert not caplog.messages
        text.Writer(tmp_path / "a.jsonl", OPTIONS, {"torch": "2"})
    assert "other versions than {'torch': '2'}" in caplog.messages[0]
