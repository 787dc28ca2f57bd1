"""Files from anywhere: heads, features, checkpoints, conversations, records of `data`.

Each damaged one is one line that names the file; none is a traceback, and none is changed.
"""

# mypy: disable-error-code="var-annotated"
# mixed values in a row, for which mypy finds no common type

from __future__ import annotations

import gzip
import json
import os
import struct
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from selfspec.backbone import Backbone
from selfspec.errors import (
    HeadsNotFound,
    InvalidData,
    InvalidHeads,
    InvalidOption,
    SelfspecError,
)
from selfspec.heads import ExitHeads
from selfspec.heads_folder import METADATA
from selfspec.training import cache, checkpoint, formats
from selfspec.training.data import Conversation, read_conversations
from selfspec.training.features import FeatureSpec
from selfspec.training.fit import fit
from selfspec.training.selfgen import read_openings
from selfspec.training.sources import StreamSource
from selfspec.training.writer import Counts, Writer
from tests.heads.kinds import FINGERPRINT, make_heads, train
from tests.models import VOCAB_SIZE
from tests.talks import make_talks, make_tokenizer
from tests.test_fit import make_job, stop_after

NAN, INF = float("nan"), float("inf")
DEEP = "[" * 100_000

Change = Callable[[Path], object]


def one_line(error: pytest.ExceptionInfo[SelfspecError], named: Path) -> None:
    """The message is one line of bounded length that names the file or its folder."""
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 2000
    assert named.name in text


def unchanged(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- heads: config.json ---------------------------------------------------------------------------


@pytest.fixture
def heads(tmp_path: Path, backbone: Backbone) -> Path:
    folder = tmp_path / "heads"
    train(make_heads("low-rank-draft", backbone.unembedding)).save(folder)
    return folder


CONFIG_VALUES: list[tuple[str, Any]] = [
    *(("format_version", value) for value in (0, -1, 3, 1.0, True, "2", None, [2], 10**30)),
    *(("base_model", value) for value in (None, 3, ["a"], {}, "a\nb", "a\0b", "x" * 2000)),
    *(("base_fingerprint", value) for value in (None, 7, ["f"], "\x1b[31m")),
    *(("hidden_size", value) for value in (None, "32", 32.0, -32, 0, True, 1 << 40, NAN, [32])),
    *(("num_layers", value) for value in (None, "6", 6.5, -1, 0, 10**9, INF)),
    *(("vocab_size", value) for value in (None, "96", 96.0, -5, 0, 10**12)),
    *(("exit_layers", value) for value in (None, "2", 2, {}, [2.0], ["2"], [None], [True])),
    *(("exit_layers", value) for value in ([-1], [[2]], [2, 4, 10**9], list(range(9000)))),
    *(("head_type", value) for value in (None, 3, "", "magic", ["linear"], "ExitHead")),
    *(("inner_size", value) for value in ("3", 0, -3, 3.0, 10**9, 1 << 23, True)),
    *(("draft_vocab_size", value) for value in ("5", 0, -5, 5.0, 4, 97, 10**12)),
    *(("temperatures", value) for value in (None, [], "hot", {"2": "1"}, {"2": NAN}, {"2": 0})),
    *(("temperatures", value) for value in ({"2": -1}, {"2": INF}, {"3": 1.0}, {"x": 1.0})),
    *(("defaults", value) for value in (None, [], "fast", {"magic": 1}, {"exit_threshold": "x"})),
    *(("defaults", value) for value in ({"exit_threshold": 7}, {"max_draft_tokens": "many"})),
    *(("defaults", value) for value in ({"exit_layers": [3]}, {"exit_threshold": [0.5] * 3})),
    *(("training", value) for value in (None, [], 3)),
    *(("base_revision", value) for value in (3, ["a"], "a\nb")),
    *(("weights", value) for value in (3, [])),
    ("unknown", 1),
]


@pytest.mark.parametrize(("name", "value"), CONFIG_VALUES, ids=lambda value: repr(value)[:30])
def test_a_heads_config_with_a_strange_value(
    heads: Path, backbone: Backbone, name: str, value: Any
) -> None:
    path = heads / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    refused(heads, backbone)


@pytest.mark.parametrize(
    "missing",
    ["base_model", "base_fingerprint", "hidden_size", "num_layers", "vocab_size", "exit_layers"],
)
def test_a_heads_config_without_a_value(heads: Path, backbone: Backbone, missing: str) -> None:
    path = heads / "config.json"
    values = json.loads(path.read_text())
    del values[missing]
    path.write_text(json.dumps(values))
    refused(heads, backbone)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\0", b"{", b"[]", b"3", b"null", b'"text"', b"\xff\xfe{\x00}\x00", DEEP.encode()),
        *(b'{"format_version": 2}', b"{}" * 2, b" " * (2 << 20), b'{"format_version": \xff}'),
    ],
    ids=lambda content: repr(content[:12]),
)
def test_a_heads_config_of_other_content(heads: Path, backbone: Backbone, content: bytes) -> None:
    (heads / "config.json").write_bytes(content)
    refused(heads, backbone)


def test_a_heads_config_that_is_a_folder_or_a_pipe(heads: Path, backbone: Backbone) -> None:
    path = heads / "config.json"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(HeadsNotFound):
        read_heads(heads, backbone)
    path.unlink()
    path.mkdir()
    with pytest.raises(HeadsNotFound):
        read_heads(heads, backbone)


def read_heads(folder: Path, backbone: Backbone) -> ExitHeads:
    return ExitHeads.from_pretrained(folder, backbone.unembedding, FINGERPRINT, "tiny", 6)


def refused(folder: Path, backbone: Backbone) -> None:
    before = unchanged(folder)
    with pytest.raises(SelfspecError) as caught:
        read_heads(folder, backbone)
    one_line(caught, folder)
    assert unchanged(folder) == before


# --- heads: model.safetensors ---------------------------------------------------------------------

NAME = "by_layer.4.up.weight"


def tensors_of(path: Path) -> dict[str, Tensor]:
    return load_file(path)


def edited(change: Callable[[dict[str, Tensor]], Any]) -> Change:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        change(tensors)
        save_file(tensors, path, metadata)

    return apply


def put(name: str, make: Callable[[Tensor], Tensor]) -> Change:
    return edited(lambda tensors: tensors.update({name: make(tensors[name]).contiguous()}))


def raw(content: bytes) -> Change:
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


def header(text: bytes, more: bytes = b"") -> Change:
    return raw(struct.pack("<Q", len(text)) + text + more)


def replaced(make: Callable[[Path], object]) -> Change:
    def apply(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        make(folder / "model.safetensors")

    return apply


WEIGHTS: dict[str, Change] = {
    "gone": replaced(lambda path: None),
    "a folder": replaced(Path.mkdir),
    "a pipe": replaced(os.mkfifo),
    "a device": replaced(lambda path: path.symlink_to("/dev/zero")),
    "empty": raw(b""),
    "zeros": raw(bytes(1000)),
    "a pickle": raw(b"\x80\x04\x95\x0b\x00\x00"),
    "text": raw(b"not weights at all"),
    "header of petabytes": raw(struct.pack("<Q", 1 << 50) + b"{}"),
    "header of nothing": header(b"{}"),
    "header not json": header(b"{'a': 1}"),
    "header nested": header(DEEP.encode()),
    "header of lists": header(b"[]"),
    "offsets behind the end": header(
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', b"1234"
    ),
    "offsets that overlap": header(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}',
        b"123456",
    ),
    "shape that overflows": header(
        b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]}}', b"1234"
    ),
    "negative shape": header(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', b"1234"),
    "unknown dtype": header(b'{"a":{"dtype":"Q9","shape":[1],"data_offsets":[0,4]}}', b"1234"),
    "nan": put(NAME, lambda t: t * NAN),
    "infinity": put(NAME, lambda t: t + INF),
    "transposed": put(NAME, lambda t: t.t()),
    "a row less": put(NAME, lambda t: t[:-1]),
    "flat": put(NAME, lambda t: t.flatten()),
    "a scalar": put(NAME, lambda t: t.sum()),
    "whole numbers": put(NAME, lambda t: t.long()),
    "truths": put(NAME, lambda t: t > 0),
    "complex": put(NAME, lambda t: t.to(torch.complex64)),
    "float8": put(NAME, lambda t: t.to(torch.float8_e4m3fn)),
    "a tensor less": edited(lambda tensors: tensors.pop(NAME)),
    "a tensor more": edited(lambda tensors: tensors.update({"extra": torch.zeros(2)})),
    "no draft ids": edited(lambda tensors: tensors.pop("draft_ids")),
    "draft ids 2-D": put("draft_ids", lambda t: t[None]),
    "draft ids 0-D": put("draft_ids", lambda t: t[0]),
    "draft ids of floats": put("draft_ids", lambda t: t.float()),
    "draft ids of bytes": put("draft_ids", lambda t: t.to(torch.uint8)),
    "draft ids falling": put("draft_ids", lambda t: t.flip(0)),
    "draft ids repeated": put("draft_ids", lambda t: t * 0),
    "draft ids below 0": put("draft_ids", lambda t: t - 1),
    "draft ids too high": put("draft_ids", lambda t: t + 90),
    "draft ids of none": put("draft_ids", lambda t: t[:0]),
}


@pytest.mark.parametrize("damage", WEIGHTS)
def test_strange_weights_of_heads(heads: Path, backbone: Backbone, damage: str) -> None:
    WEIGHTS[damage](heads)
    with pytest.raises(InvalidHeads) as caught:
        read_heads(heads, backbone)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", DEEP, '{"weights": "x"}', "{}"])
def test_a_config_that_weights_repeat_wrongly(heads: Path, backbone: Backbone, text: str) -> None:
    path = heads / "model.safetensors"
    save_file(load_file(path), path, {METADATA: text})
    if text.startswith('{"') or text == "{}":
        with pytest.raises(InvalidHeads, match="repeats no config"):
            read_heads(heads, backbone)
    else:
        assert read_heads(heads, backbone).config.exit_layers == (2, 4)


# --- features -------------------------------------------------------------------------------------

SPEC = FeatureSpec((2, 4), deep=True, top_k=4)


@pytest.fixture(scope="module")
def talks(backbone: Backbone) -> list[Conversation]:
    return make_talks(backbone.model)


@pytest.fixture
def features(tmp_path: Path, backbone: Backbone, talks: list[Conversation]) -> Path:
    source = StreamSource(backbone, SPEC, talks[:3], 64)
    base = {"base_model": "tiny", "base_fingerprint": "abc", "dtype": "float32", "data": "talks"}
    cache.write(tmp_path / "features", source, cache.identity(source, base, 800))
    return tmp_path / "features"


def read_features(folder: Path, backbone: Backbone) -> None:
    source = cache.CacheSource(folder, "abc", (backbone.hidden_size, backbone.vocab_size))
    source.check()
    for index in range(len(source.sizes)):
        source.batch(index)
    source.token_counts()


MANIFEST_VALUES: list[tuple[str, Any]] = [
    *(("format_version", value) for value in (1, 0, "2", True, None, [])),
    *(("base_fingerprint", value) for value in (None, 3, ["abc"], "x\ny")),
    *(("spec", value) for value in (None, [], {}, {"layers": [2, 4]}, {"layers": [4, 2]})),
    ("spec", {"layers": ["2"], "deep": True, "top_k": 4}),
    ("spec", {"layers": [2, 4], "deep": 1, "top_k": 4}),
    ("spec", {"layers": [2, 4], "deep": False, "top_k": 4}),
    ("spec", {"layers": [2, 4], "deep": True, "top_k": 0}),
    ("spec", {"layers": [2, 4], "deep": True, "top_k": -1}),
    ("spec", {"layers": [2], "deep": True, "top_k": 4}),
    ("spec", {"layers": [2, 4], "deep": True, "top_k": 4, "more": 1}),
    *(
        ("shards", value)
        for value in (None, [], 3, [[]], [["0"]], [[0, 0]], [[1]], [[-1]], [[0.0]])
    ),
    *(("shards", value) for value in ([[10**9]], {"0": 1}, [[0], [1], [2], [3], [4], [5]])),
    *(("conversations", value) for value in (None, [], [-1], ["1"], 3)),
    *(("sha256", value) for value in (None, [], [3], "abc", ["0" * 64], {})),
    *(("digest", value) for value in (None, 3)),
]


@pytest.mark.parametrize(("name", "value"), MANIFEST_VALUES, ids=lambda value: repr(value)[:30])
def test_a_manifest_with_a_strange_value(
    features: Path, backbone: Backbone, name: str, value: Any
) -> None:
    path = features / cache.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(InvalidData) as caught:
        read_features(features, backbone)
    one_line(caught, features)


def shard(name: str, make: Callable[[Tensor], Tensor] | None) -> Change:
    """A shard with one tensor changed, and a manifest to match."""

    def apply(folder: Path) -> None:
        path = folder / "shard-00000.safetensors"
        tensors = load_file(path)
        tensor = tensors.pop(f"0.{name}")
        if make is not None:
            tensors[f"0.{name}"] = make(tensor).contiguous()
        save_file(tensors, path)
        manifest = json.loads((folder / cache.MANIFEST).read_text())
        manifest["sha256"] = [cache.sha256(path)]
        (folder / cache.MANIFEST).write_text(json.dumps(manifest))

    return apply


SHARDS: dict[str, Change] = {
    "gone": lambda folder: (folder / "shard-00000.safetensors").unlink(),
    "half": lambda folder: os.truncate(folder / "shard-00000.safetensors", 300),
    "no following": shard("following", None),
    "no hidden": shard("hidden.2", None),
    "no deep": shard("deep", None),
    "no top": shard("top_ids", None),
    "following 2-D": shard("following", lambda t: t[None]),
    "following of floats": shard("following", lambda t: t.float()),
    "following too high": shard("following", lambda t: t + VOCAB_SIZE),
    "following below 0": shard("following", lambda t: t - VOCAB_SIZE),
    "following longer": shard("following", lambda t: torch.cat([t, t])),
    "top ids too high": shard("top_ids", lambda t: t + VOCAB_SIZE),
    "top ids of another type": shard("top_ids", lambda t: t.long()),
    "top log-probs nan": shard("top_log_probs", lambda t: t * NAN),
    "continues of numbers": shard("continues", lambda t: t.int()),
    "hidden nan": shard("hidden.4", lambda t: t * NAN),
    "hidden narrower": shard("hidden.4", lambda t: t[:, :-1]),
    "hidden of whole numbers": shard("hidden.4", lambda t: t.int()),
    "deep of another length": shard("deep", lambda t: t[:-1]),
}


@pytest.mark.parametrize("damage", SHARDS)
def test_a_strange_shard(features: Path, backbone: Backbone, damage: str) -> None:
    SHARDS[damage](features)
    with pytest.raises(InvalidData, match=r"shard-00000\.safetensors is damaged") as caught:
        read_features(features, backbone)
    one_line(caught, features)


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.fixture
def begun(tmp_path: Path, backbone: Backbone, talks: list[Conversation]) -> Path:
    """A fit killed in its second epoch."""
    with pytest.raises(KeyboardInterrupt):
        fit(make_job(backbone, talks, workplace=tmp_path), stop_after(5))
    return tmp_path / checkpoint.FILE


def course(**values: Any) -> Callable[[dict[str, Tensor], Any], Any]:
    return lambda tensors, record: record["course"].update(values)


CHECKPOINTS: dict[str, Callable[[dict[str, Tensor], Any], Any]] = {
    "no job": lambda tensors, record: record.pop("job"),
    "job of a list": lambda tensors, record: record.update(job=[]),
    "no course": lambda tensors, record: record.pop("course"),
    "course of a list": lambda tensors, record: record.update(course=[]),
    "steps of text": course(step="4"),
    "steps below 0": course(step=-4),
    "steps of nan": course(step=NAN),
    "steps of truth": course(step=True),
    "too many steps": course(step=10**12),
    "sums of a list": course(sums=[]),
    "sums of other layers": course(sums={"3": 0.0}),
    "sums of nan": course(sums={"2": NAN, "4": 0.0}),
    "sums of text": course(sums={"2": "a", "4": "b"}),
    "entries of numbers": course(entries=[3]),
    "entries of none": course(entries=[]),
    "entries of a dict": course(entries={}),
    "no best": course(best={}),
    "best of text": course(best={"2": "a", "4": "b"}),
    "positions of text": course(positions="7"),
    "no positions": course(positions=0),
    "something more": course(more=1),
    "a tensor less": lambda tensors, record: tensors.pop("heads.by_layer.2.norm.weight"),
    "a tensor more": lambda tensors, record: tensors.update(more=torch.zeros(2)),
    "another shape": lambda tensors, record: tensors.update(
        {"heads.by_layer.2.norm.weight": torch.zeros(31)}
    ),
    "one number for all": lambda tensors, record: tensors.update(
        {"heads.by_layer.2.norm.weight": torch.zeros(1)}
    ),
    "nan": lambda tensors, record: tensors.update(
        {"heads.by_layer.2.norm.weight": torch.full((32,), NAN)}
    ),
    "moments of whole numbers": lambda tensors, record: tensors.update(
        {"exp_avg.by_layer.2.norm.weight": torch.zeros(32, dtype=torch.int32)}
    ),
}


@pytest.mark.parametrize("damage", CHECKPOINTS)
def test_a_strange_checkpoint(
    begun: Path, backbone: Backbone, talks: list[Conversation], damage: str
) -> None:
    found = checkpoint.load(begun)
    assert found is not None
    tensors, record = found
    CHECKPOINTS[damage](tensors, record)
    checkpoint.save(begun, tensors, record)
    before = begun.read_bytes()
    with pytest.raises(InvalidData, match="is no checkpoint") as caught:
        fit(make_job(backbone, talks, workplace=begun.parent))
    one_line(caught, begun)
    assert begun.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"half", bytes(99), struct.pack("<Q", 1 << 60), b"{}"])
def test_a_checkpoint_of_other_content(
    begun: Path, backbone: Backbone, talks: list[Conversation], content: bytes
) -> None:
    begun.write_bytes(content)
    with pytest.raises(InvalidData, match="is no checkpoint") as caught:
        fit(make_job(backbone, talks, workplace=begun.parent))
    one_line(caught, begun)


# --- conversations --------------------------------------------------------------------------------

IDS = {"input_ids": [1, 2, 3], "answer_start": 1}
USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}

ROWS: list[Any] = [
    *(3, None, True, "text", [], [IDS], {}, {"other": 1}),
    *({"input_ids": value, "answer_start": 1} for value in (None, 3, "12", {}, ["1", "2"])),
    *({"input_ids": value, "answer_start": 1} for value in ([1.0, 2.0], [True, True], [[1], [2]])),
    *({"input_ids": value, "answer_start": 1} for value in ([1, -1], [1, 96], [1, 10**40], [])),
    *({"input_ids": [1, 2, 3], "answer_start": value} for value in (None, "1", 0, 3, -1, 1.0)),
    *(
        {"input_ids": [1, 2, 3], "answers": value}
        for value in (None, 3, "ab", [1], [[1]], [[1, 9]])
    ),
    *({"input_ids": [1, 2, 3], "answers": value} for value in ([[2, 1]], [["1", "2"]], [[0, 1]])),
    *({"input_ids": [1, 2, 3], "answers": value} for value in ([[1, 3], [2, 3]], [], [[1, 9]])),
    {"input_ids": [1] * 500, "answer_start": 1},
    *({"messages": value} for value in (None, 3, "hi", {}, [], [3], [None], [[]], [{}])),
    *({"messages": [USER, value]} for value in ({"role": "assistant"}, {"content": "b"})),
    *({"messages": [USER, ASSISTANT | {"role": value}]} for value in (None, 3, [], "robot")),
    *({"messages": [USER, ASSISTANT | {"content": value}]} for value in (None, 3, [], {})),
    {"messages": [USER, ASSISTANT | {"content": "\ud800"}]},
    {"messages": [USER]},
    {"messages": [ASSISTANT]},
    *({"conversations": value} for value in (None, 3, [], [3], [{"from": "human"}])),
    {"conversations": [{"from": "robot", "value": "a"}]},
    *({"turns": value} for value in (None, [], ["a"], [3])),
    *({"text": value} for value in (None, 3, [], "", "a", "\udfff a b")),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: json.dumps(row)[:40])
def test_a_strange_conversation_names_file_and_line(tmp_path: Path, row: Any) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps(IDS) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(InvalidData, match="line 2") as caught:
        read_talks(path)
    one_line(caught, path)
    assert len(read_talks(path, skip=True)) == 1


def read_talks(path: Path, *, skip: bool = False) -> list[Conversation]:
    return read_conversations(
        path, make_tokenizer(), vocab_size=VOCAB_SIZE, max_length=100, skip_bad_rows=skip
    )


LINE = json.dumps(IDS).encode() + b"\n"

CONTENTS: dict[str, tuple[str, bytes]] = {
    "empty": ("a.jsonl", b""),
    "blank": ("a.jsonl", b"\n \n\t\n"),
    "zero bytes": ("a.jsonl", bytes(100)),
    "utf-16": ("a.jsonl", '{"text": "a"}'.encode("utf-16")),
    "latin": ("a.jsonl", b'{"text": "\xe9 a b c"}\n'),
    "deep": ("a.jsonl", DEEP.encode()),
    "deep array": ("a.json", DEEP.encode()),
    "half a line": ("a.jsonl", LINE + LINE[:9]),
    "array of numbers": ("a.json", b"[1, 2]"),
    "array without end": ("a.json", b"[" + LINE),
    "array and more": ("a.json", b"[] []"),
    "huge number": ("a.jsonl", b'{"input_ids": [1, ' + b"9" * 6000 + b'], "answer_start": 1}'),
    "a long line": ("a.jsonl", b'"' + bytes(9000)),
    "long blank": ("a.jsonl", b" \n" * 6000),
    "no gzip": ("a.jsonl.gz", LINE),
    "half a gzip": ("a.jsonl.gz", gzip.compress(LINE * 99)[:40]),
    "damaged gzip": ("a.jsonl.gz", gzip.compress(LINE * 99)[:-9] + bytes(9)),
    "gzip and more": ("a.jsonl.gz", gzip.compress(LINE) + b"more"),
    "a bomb of one line": ("a.jsonl.gz", gzip.compress(b"[" * (1 << 24))),
    "a bomb of blanks": ("a.jsonl.gz", gzip.compress(b"\n" * (1 << 20))),
    "a bomb of an array": ("a.json.gz", gzip.compress(b"[" + b" " * (1 << 24))),
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_a_file_of_conversations_of_other_content(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "_MOST_LINE", 8192)
    monkeypatch.setattr(formats, "_MOST_ARRAY", 1 << 16)
    name, content = CONTENTS[kind]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidData) as caught:
        read_talks(path)
    one_line(caught, path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("kind", ["gone", "a pipe", "a device", "a loop", "a long name"])
def test_what_is_no_file_of_conversations(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.jsonl"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a loop":
        path.symlink_to(path)
    elif kind == "a long name":
        path = tmp_path / f"{'a' * 300}.jsonl"
    with pytest.raises((InvalidData, InvalidOption)) as caught:
        read_talks(path)
    one_line(caught, path)


def test_a_mark_in_front_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + LINE)
    assert len(read_talks(path)) == 1
    path.write_bytes(b"\xef\xbb\xbfTell me\n")
    assert read_openings(path) == ("Tell me",)


@pytest.mark.parametrize("content", [b"", b"# only\n", b"\xff\xfe", b" \n", b"a" * (2 << 20)])
def test_strange_openings(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "openings.txt"
    path.write_bytes(content)
    with pytest.raises(InvalidData) as caught:
        read_openings(path)
    one_line(caught, path)


# --- the record of a file that `data` writes ------------------------------------------------------

RECORD_VALUES: list[tuple[str, Any]] = [
    *(("format_version", value) for value in (0, 2, "1", True, None)),
    *(("options", value) for value in (None, [], "a")),
    *(("versions", value) for value in (None, [], 3)),
    *(("counts", value) for value in (None, [], {}, {"conversations": 1})),
    ("counts", asdict(Counts()) | {"answers": "many"}),
    ("counts", asdict(Counts()) | {"answers": -1}),
    ("counts", asdict(Counts()) | {"answers": 1.5}),
    *(("seeds", value) for value in (None, 3, ["a"], [-1], [1.0], [10**30], {})),
    *(("bytes", value) for value in (None, "10", -1, 1.0, 10**30, True, [], 3, 10**9)),
    ("more", 1),
]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize(("name", "value"), RECORD_VALUES, ids=lambda value: repr(value)[:30])
def test_a_strange_record_loses_no_line(tmp_path: Path, name: str, value: Any, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    writer = Writer(path, {}, {})
    writer.append(['{"a": 1}', '{"a": 2}'], 7, Counts(conversations=2))
    record = path.with_name(path.name + ".run.json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {name: value}))
    before = unchanged(tmp_path)
    with pytest.raises(InvalidData) as caught:
        Writer(path, {}, {})
    one_line(caught, path)
    assert unchanged(tmp_path) == before
