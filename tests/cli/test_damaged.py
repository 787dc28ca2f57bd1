"""Files with wrong contents, models and GGUF files among them: refused with the file and a reason.

Values of wrong types in any place are `tests/test_damage.py`'s; here are those that mean something.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from selfspec.errors import InvalidData
from selfspec.hub.gguf import read_header
from tests.bad_input import Change, refused
from tests.gguf_files import header, tensor, text, tiny, value

Capture = pytest.CaptureFixture[str]

MODEL = ["--model", "model", "--dtype", "float32"]


def holding(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def without(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize("data", [b"\xff\n", b"a\n\xc3\n"])
def test_a_turn_is_text(
    data: bytes, place: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
    refused(["chat", *MODEL, "--max-new-tokens", "2"], place, capsys)


# --- models


def config(**values: Any) -> Change:
    """Other values in a model's config; None removes one."""

    def damage(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text()) | values
        kept = {key: value for key, value in found.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))

    return damage


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    return damage


def in_parts(called: Callable[[str], str]) -> Change:
    """Weights in another file, under a name in the index that leads to it by a path."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).rename(folder / "part.safetensors")
        name = called("part.safetensors")
        index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, name)}
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def replaced(name: str, make: Callable[[Path], object]) -> Change:
    """Something else in place of a file."""

    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return damage


def make_loop(path: Path) -> None:
    """A link to a link back to it."""
    path.symlink_to(f"{path.name}.link")
    path.with_name(f"{path.name}.link").symlink_to(path.name)


MODELS: dict[str, Change] = {
    "config is an empty object": holding("config.json", "{}"),
    "config of nobody": config(model_type="nobody"),
    "config of code": config(model_type="mine", auto_map={"AutoConfig": "mine.Config"}),
    "config of an encoder": config(model_type="bert", architectures=["BertModel"]),
    "a huge vocabulary": config(vocab_size=10**12),
    "another vocabulary": config(vocab_size=50),
    "no positions": config(max_position_embeddings=0),
    "no layers": config(num_hidden_layers=0),
    "a billion layers": config(num_hidden_layers=10**9),
    "more layers than weights": config(num_hidden_layers=9),
    "another hidden size": config(hidden_size=48),
    "no heads": config(num_attention_heads=0),
    "heads that do not divide": config(num_attention_heads=5, head_dim=None),
    "an unknown activation": config(hidden_act="quick"),
    "rope of nobody": config(rope_parameters={"rope_type": "mine", "rope_theta": 1.0}),
    "a dtype of nobody": config(dtype="float33", torch_dtype="float33"),
    "weights lack one": weights(lambda t: t.pop("model.layers.3.mlp.up_proj.weight")),
    "weights of another shape": weights(lambda t: t.update({NORM: torch.zeros(31)})),
    "weights of whole numbers": weights(lambda t: t.update({NORM: t[NORM].int()})),
    "weights are another model's": replaced(
        WEIGHTS, lambda path: save_file({"a": torch.zeros(2)}, path, {"format": "pt"})
    ),
    "weights are a folder": replaced(WEIGHTS, Path.mkdir),
    "weights are pickled": replaced(
        WEIGHTS, lambda path: torch.save({}, path.with_name("pytorch_model.bin"))
    ),
    "weights are not there": without(WEIGHTS),
    **{f"{name} is a loop": replaced(name, make_loop) for name in (WEIGHTS, INDEX, "config.json")},
    **{f"{name} is a pipe": replaced(name, os.mkfifo) for name in ("tokenizer.json", "vocab.json")},
    "an index of a path": in_parts(lambda name: str(Path("it", name).absolute())),
    "an index of a folder above": in_parts(lambda name: f"../it/{name}"),
    "an index of pickles": in_parts(lambda name: "config.json"),
    "quantised by nobody": config(quantization_config={"quant_method": "mine", "bits": 4}),
    "quantised, with plain weights": config(
        quantization_config={"quant_method": "gptq", "bits": 4}
    ),
    "tokenizer of nobody": holding("tokenizer.json", '{"model": {"type": "Mine"}}'),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_cannot_be_run_is_refused(
    kind: str, furnished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    shutil.copytree(furnished / "model", tmp_path / "it")
    monkeypatch.chdir(tmp_path)
    MODELS[kind](tmp_path / "it")
    command = ["generate", "a", "--model", "it", "--dtype", "float32", "--max-new-tokens", "2"]
    refused(command, tmp_path, capsys)


NESTED = struct.pack("<IQ", 9, 1) * 50 + struct.pack("<IQ", 4, 0)

GGUF = {
    "another format": b"GGML" + bytes(60),
    "version 99": header(version=99),
    "2^60 values": header(values=2**60),
    "a key beyond the end": header(text(b"a", 200), values=1),
    "a key that is no text": header(value(b"\xff\xfe", 4, bytes(4)), values=1),
    "a key twice": header(value("a", 4, bytes(4)) * 2, values=2),
    "an unknown type": header(value("a", 77, bytes(8)), values=1),
    "an array of 2^60 numbers": header(value("a", 9, struct.pack("<IQ", 4, 2**60)), values=1),
    "strings beyond the end": header(
        value("a", 9, struct.pack("<IQ", 8, 2) + text("x") + text("y", 500) + bytes(40)), values=1
    ),
    "an array of an unknown type": header(
        value("a", 9, struct.pack("<IQ", 99, 1) + bytes(8)), values=1
    ),
    "nested arrays": header(value("a", 9, NESTED), values=1),
    "alignment 0": header(value("general.alignment", 4, struct.pack("<I", 0)), values=1),
    "alignment as text": header(value("general.alignment", 8, text("32")), values=1),
    "a tensor of 2^32 dimensions": header(text("t"), b"\xff" * 40, tensors=1),
    "a tensor beyond the end": header(tensor("t", [64]), tensors=1),
    "a tensor of 2^120 elements": header(tensor("t", [2**60, 2**60]), bytes(64), tensors=1),
    "a tensor of an unknown type": header(tensor("t", [1], kind=99), bytes(64), tensors=1),
    "a tensor twice": header(tensor("t", [1]) * 2, bytes(64), tensors=2),
    "half a block": header(tensor("t", [33], kind=2), bytes(640), tensors=1),
    "no model in it": header(),
    "a tensor and no size": header(tensor("t", [1]), bytes(64), tensors=1),
    "more layers than tensors": tiny(layers=3),
    "a billion layers": tiny(layers=10**9),
    "all defaults but one tensor": tiny(),
    "an unknown architecture": header(value("general.architecture", 8, text("mine")), values=1),
}


@pytest.mark.parametrize("kind", GGUF)
def test_a_gguf_file_that_holds_no_model_is_refused(
    kind: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "it.gguf").write_bytes(GGUF[kind])
    refused(["generate", "a", "--model", str(tmp_path / "it.gguf")], tmp_path, capsys)


def test_a_gguf_header_is_followed_to_its_end(tmp_path: Path) -> None:
    """What is whole passes, and one byte less does not."""
    (tmp_path / "it.gguf").write_bytes(tiny())
    read_header(tmp_path / "it.gguf")
    (tmp_path / "it.gguf").write_bytes(tiny()[:-1])
    with pytest.raises(InvalidData, match="its tensors end at byte"):
        read_header(tmp_path / "it.gguf")
