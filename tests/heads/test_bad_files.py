"""Folders of heads from anywhere: their config and their weights.

Each damaged one is one line that names the file; none is a traceback, and none is changed.
"""

# mypy: disable-error-code="var-annotated"
# mixed values in a row, for which mypy finds no common type

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from selfspec.api.speculator import Speculator
from selfspec.config import SpeculationOptions
from selfspec.errors import (
    HeadsNotFound,
    InvalidHeads,
    SelfspecError,
)
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.folder import METADATA
from selfspec.model.backbone import Backbone
from selfspec.options import ACCEPTANCE, CONTROLLERS, TOGETHER
from tests.bad_input import DEEP, INF, NAN, Change, one_line, snapshot
from tests.heads.kinds import FINGERPRINT, make_heads, train
from tests.models import addressless

# --- heads: config.json ---------------------------------------------------------------------------


@pytest.fixture
def heads(tmp_path: Path, backbone: Backbone) -> Path:
    folder = tmp_path / "heads"
    train(make_heads("low-rank-draft", backbone.unembedding)).save(folder)
    return folder


MISSING = object()

CONFIG_VALUES: list[tuple[str, Any]] = [
    *(("format_version", value) for value in (0, -1, 1, 3, 2.0, True, "2", None, [2], 10**30)),
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
    *(("defaults", {"drafter": value}) for value in ("exit:threshold=7", "exit:layers=3", 5, None)),
    *(("defaults", value) for value in ({"exit_threshold": 7}, {"max_draft_tokens": "many"})),
    *(("defaults", value) for value in ({"exit_layers": [3]}, {"exit_threshold": [0.5] * 3})),
    *(("training", value) for value in (None, [], 3)),
    *(("base_revision", value) for value in (3, ["a"], "a\nb")),
    *(("weights", value) for value in (3, [])),
    *(("exit_layers", value) for value in ([], [0, 2], [2, 6], [4, 2], [2, 2])),
    *((name, MISSING) for name in ("base_model", "base_fingerprint", "hidden_size")),
    *((name, MISSING) for name in ("num_layers", "vocab_size", "exit_layers")),
    *(("num_heads", value) for value in ("2", 0, -2, 2.0, 2, 10**9)),
    ("unknown", 1),
]


@pytest.mark.parametrize(
    ("name", "value"), CONFIG_VALUES, ids=lambda value: addressless(repr(value))[:30]
)
def test_a_heads_config_with_a_strange_value(
    heads: Path, backbone: Backbone, name: str, value: Any
) -> None:
    path = heads / "config.json"
    values = json.loads(path.read_text()) | {name: value}
    path.write_text(json.dumps({key: v for key, v in values.items() if v is not MISSING}))
    refused(heads, backbone)


@pytest.mark.parametrize("number", [None, 0, 2, 4, 64, 65, "3"])
def test_medusa_heads_of_another_number_than_their_file(
    heads: Path, backbone: Backbone, number: object
) -> None:
    train(make_heads("medusa", backbone.unembedding)).save(heads)
    path = heads / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_heads": number}))
    refused(heads, backbone)


DEFAULTS: list[dict[str, Any]] = [
    *({"acceptance": rule} for rule in (*ACCEPTANCE, "lenient:lenience=1.0", "easd:entropy=1")),
    {"easd": "entropy=1.0"},
    *({"drafter": drafter} for drafter in TOGETHER),
    *({"controller": kind} for kind in CONTROLLERS),
    *({"pinned": value} for value in (True, False, None)),
    *({"speculate": False}, {"require_lossless": True}, {"costs": "row=0.5"}),
]


@pytest.mark.parametrize("defaults", DEFAULTS, ids=str)
def test_defaults_of_heads_write_the_models_own_text_or_are_refused(
    heads: Path, backbone: Backbone, defaults: dict[str, Any]
) -> None:
    path = heads / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"defaults": defaults}))
    options = SpeculationOptions().updated(defaults)
    elsewhere = options.uses("draft-model") or options.uses("rest")
    if options.loss or elsewhere or options.pinned:
        refused(heads, backbone)
        return
    found = read_heads(heads, backbone)
    options = SpeculationOptions().updated(found.config.defaults)
    speculator = Speculator(backbone, None, found, "tiny", options)
    plain = Speculator(backbone, None, None, "tiny", SpeculationOptions(speculate=False))
    for sampling in ({}, {"do_sample": True, "seed": 1}):
        asked: Any = {"max_new_tokens": 6, **sampling}
        answer = speculator.generate([1, 2, 3, 1, 2], **asked)
        assert answer.token_ids == plain.generate([1, 2, 3, 1, 2], **asked).token_ids


def test_a_heads_config_that_is_a_folder_or_a_pipe(heads: Path, backbone: Backbone) -> None:
    path = heads / "config.json"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(HeadsNotFound):
        read_heads(heads, backbone)
    path.unlink()
    for place in (heads, heads / "nowhere"):
        with pytest.raises(HeadsNotFound, match=f"no config.json in {place}"):
            read_heads(place, backbone)
    path.mkdir()
    with pytest.raises(HeadsNotFound):
        read_heads(heads, backbone)


def read_heads(folder: Path, backbone: Backbone) -> ExitHeads:
    return ExitHeads.from_pretrained(folder, backbone.unembedding, FINGERPRINT, "tiny", 6)


def refused(folder: Path, backbone: Backbone) -> None:
    before = snapshot(folder)
    with pytest.raises(SelfspecError) as caught:
        read_heads(folder, backbone)
    one_line(caught, folder)
    assert snapshot(folder) == before


# --- heads: model.safetensors ---------------------------------------------------------------------

NAME = "by_layer.4.up.weight"


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
    "a draft id less": put("draft_ids", lambda t: t[:-1]),
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
