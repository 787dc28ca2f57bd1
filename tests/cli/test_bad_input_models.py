"""Models from outside: odd configs, damaged weights and tokenizers, templates without end, GGUF."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from selfspec.errors import InvalidData
from selfspec.hub.gguf_header import read_header
from tests.bad_input import refused
from tests.gguf_files import header, tensor, text, tiny, value

COMMAND = ["generate", "a", "--model", "it", "--dtype", "float32", "--max-new-tokens", "2"]

Damage = Callable[[Path], object]


@pytest.fixture
def place(furnished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a copy of a whole model, `it`, to be damaged."""
    shutil.copytree(furnished / "model", tmp_path / "it")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def changed(name: str, **values: Any) -> Damage:
    """Other values in a JSON file; None removes one."""

    def damage(folder: Path) -> None:
        found = json.loads((folder / name).read_text()) | values
        kept = {key: value for key, value in found.items() if value is not None}
        (folder / name).write_text(json.dumps(kept))

    return damage


def config(**values: Any) -> Damage:
    return changed("config.json", **values)


def holding(name: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def template(text: str) -> Damage:
    def damage(folder: Path) -> None:
        for file in folder.glob("chat_template*"):
            file.unlink()
        changed("tokenizer_config.json", chat_template=text)(folder)

    return damage


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return damage


def another_model(folder: Path) -> None:
    save_file({"a": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})


def cut(name: str, size: int) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def no_weights(instead: str) -> Damage:
    """A folder in their place, or an index of files that are not there."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        if instead == "folder":
            (folder / "model.safetensors").mkdir()
        elif instead:
            (folder / "model.safetensors.index.json").write_text(instead)

    return damage


def in_parts(called: Callable[[str], str]) -> Damage:
    """Weights in another file, under a name in the index that leads to it by a path."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        name = called("part.safetensors")
        index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, name)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return damage


WHOLE = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8, torch.bool)


def retyped(dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], object]:
    """A weight of whole numbers, as a changed header makes of one."""
    name = "model.norm.weight"
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


def loop(name: str) -> Damage:
    """A link to a link back to it in place of a file."""

    def apply(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(f"{name}.link")
        (folder / f"{name}.link").symlink_to(name)

    return apply


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


DEEP = '{"a":' * 5000 + "1" + "}" * 5000

DAMAGES: dict[str, Damage] = {
    "config is a list": holding("config.json", "[]"),
    "config is text": holding("config.json", '"llama"'),
    "config is null": holding("config.json", "null"),
    "config is empty": holding("config.json", ""),
    "config is an empty object": holding("config.json", "{}"),
    "config is garbage": holding("config.json", bytes(range(256))),
    "config is deep": holding("config.json", DEEP),
    "config has a half character": config(model_type="\udc80"),
    "config of nobody": config(model_type="nobody"),
    "config of a number": config(model_type=7),
    "config of a list": config(model_type=["llama"]),
    "config of defaults": lambda folder: (folder / "config.json").write_text(
        '{"model_type": "llama"}'
    ),
    "config of code": config(model_type="mine", auto_map={"AutoConfig": "mine.Config"}),
    "config of an encoder": config(model_type="bert", architectures=["BertModel"]),
    "no vocabulary": config(vocab_size=0),
    "a negative vocabulary": config(vocab_size=-5),
    "a huge vocabulary": config(vocab_size=10**12),
    "another vocabulary": config(vocab_size=50),
    "no positions": config(max_position_embeddings=0),
    "negative positions": config(max_position_embeddings=-1),
    "a vocabulary of text": config(vocab_size="many"),
    "a vocabulary of half a token": config(vocab_size=95.5),
    "no layers": config(num_hidden_layers=0),
    "negative layers": config(num_hidden_layers=-3),
    "a billion layers": config(num_hidden_layers=10**9),
    "more layers than weights": config(num_hidden_layers=9),
    "layers as text": config(num_hidden_layers="6"),
    "layers as a list": config(num_hidden_layers=[6]),
    "no hidden size": config(hidden_size=0),
    "a huge hidden size": config(hidden_size=2**40),
    "another hidden size": config(hidden_size=48),
    "no heads": config(num_attention_heads=0),
    "negative heads": config(num_attention_heads=-4),
    "heads that do not divide": config(num_attention_heads=5, head_dim=None),
    "no key heads": config(num_key_value_heads=0),
    "three key heads": config(num_key_value_heads=3),
    "a huge head": config(head_dim=2**40),
    "an unknown activation": config(hidden_act="quick"),
    "an activation of a number": config(hidden_act=3),
    "rope of text": config(rope_parameters="fast"),
    "rope of nobody": config(rope_parameters={"rope_type": "mine", "rope_theta": 1.0}),
    "a dtype of nobody": config(dtype="float33", torch_dtype="float33"),
    "quantised by text": config(quantization_config="int4"),
    "an epsilon of text": config(rms_norm_eps="small"),
    "settings of text": changed("generation_config.json", temperature="hot", do_sample=True),
    "settings are a list": holding("generation_config.json", "[]"),
    "settings are deep": holding("generation_config.json", DEEP),
    "weights are empty": holding("model.safetensors", b""),
    "weights are garbage": holding("model.safetensors", bytes(range(256)) * 40),
    "weights are cut off": cut("model.safetensors", 9000),
    "weights are cut in the header": cut("model.safetensors", 300),
    "weights lack one": weights(lambda t: t.pop("model.layers.3.mlp.up_proj.weight")),
    "weights lack the embedding": weights(lambda t: t.pop("model.embed_tokens.weight")),
    "weights of another shape": weights(
        lambda t: t.update({"model.norm.weight": torch.zeros(31, dtype=torch.float32)})
    ),
    "weights are another model's": another_model,
    "weights are a folder": no_weights("folder"),
    "weights are a loop": loop("model.safetensors"),
    "config is a loop": loop("config.json"),
    "settings are a loop": loop("generation_config.json"),
    "tokenizer is a loop": loop("tokenizer.json"),
    "an index is a loop": loop("model.safetensors.index.json"),
    "weights are pickled": pickled,
    "weights are not there": no_weights(""),
    "an index of nothing": no_weights('{"weight_map": {"a": "b"}}'),
    "an index of text": no_weights('"all"'),
    "an index of a path": in_parts(lambda name: str(Path("it", name).absolute())),
    "an index of a folder above": in_parts(lambda name: f"../it/{name}"),
    "an index of a folder within": in_parts(lambda name: f"./{name}"),
    "an index of pickles": in_parts(lambda name: "config.json"),
    **{f"weights of {dtype}": weights(retyped(dtype)) for dtype in WHOLE},
    "quantised by nobody": config(quantization_config={"quant_method": "mine", "bits": 4}),
    "quantised by no name": config(quantization_config={"bits": 4}),
    "quantised by a list": config(quantization_config={"quant_method": ["gptq"], "bits": 4}),
    "quantised, with plain weights": config(
        quantization_config={"quant_method": "gptq", "bits": 4}
    ),
    "tokenizer is empty": holding("tokenizer.json", ""),
    "tokenizer is a list": holding("tokenizer.json", "[]"),
    "tokenizer is deep": holding("tokenizer.json", DEEP),
    "tokenizer is garbage": holding("tokenizer.json", bytes(range(256)) * 9),
    "tokenizer is cut off": cut("tokenizer.json", 200),
    "tokenizer of nobody": holding("tokenizer.json", '{"model": {"type": "Mine"}}'),
    "tokenizer settings are a list": holding("tokenizer_config.json", "[]"),
    "tokenizer settings are deep": holding("tokenizer_config.json", DEEP),
    "template that fills the memory": template("{{ 'a' * 10**11 }}"),
    "template without end": template(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "template of a huge number": template("{{ 10**(10**9) }}"),
    "template of a huge range": template("{% for a in range(10**12) %}{% endfor %}"),
    "template that calls itself": template("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"),
    "template that raises": template("{{ raise_exception('no\nsuch\nrole') }}"),
    "template that divides": template("{{ 1 / 0 }}"),
    "template that does not parse": template("{% for %}"),
    "template that escapes": template("{{ ''.__class__.__mro__ }}"),
    "template of nothing": template("{{ '' }}"),
    "template of a number": changed("tokenizer_config.json", chat_template=7),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_model_that_cannot_be_run_is_refused(
    kind: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "template" in kind:
        for file in (place / "it").glob("chat_template*"):
            file.unlink()
    DAMAGES[kind](place / "it")
    refused(COMMAND, place, capsys)


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "vocab.json"])
def test_a_pipe_among_the_files_of_a_model_does_not_hang(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "it" / name).unlink(missing_ok=True)
    os.mkfifo(place / "it" / name)
    refused(COMMAND, place, capsys)


# --- GGUF


NESTED = struct.pack("<IQ", 9, 1) * 50 + struct.pack("<IQ", 4, 0)

GGUF = {
    "empty": b"",
    "short": b"GGUF",
    "garbage": bytes(range(256)) * 4,
    "another format": b"GGML" + bytes(60),
    "version 1": header(version=1),
    "version 99": header(version=99),
    "the other byte order": header(version=3 << 24),
    "2^60 values": header(values=2**60),
    "2^63 tensors": header(tensors=2**63),
    "a key of 2^63 bytes": header(text(b"a", 2**63), values=1),
    "a key beyond the end": header(text(b"a", 200), values=1),
    "a key that is no text": header(value(b"\xff\xfe", 4, bytes(4)), values=1),
    "a key twice": header(value("a", 4, bytes(4)) * 2, values=2),
    "a string of 2^62 bytes": header(value("a", 8, text(b"", 2**62)), values=1),
    "an unknown type": header(value("a", 77, bytes(8)), values=1),
    "an array of 2^60 numbers": header(value("a", 9, struct.pack("<IQ", 4, 2**60)), values=1),
    "an array of 2^60 strings": header(value("a", 9, struct.pack("<IQ", 8, 2**60)), values=1),
    "strings beyond the end": header(
        value("a", 9, struct.pack("<IQ", 8, 2) + text("x") + text("y", 500) + bytes(40)), values=1
    ),
    "an array of an unknown type": header(
        value("a", 9, struct.pack("<IQ", 99, 1) + bytes(8)), values=1
    ),
    "nested arrays": header(value("a", 9, NESTED), values=1),
    "alignment 0": header(value("general.alignment", 4, struct.pack("<I", 0)), values=1),
    "alignment 3": header(value("general.alignment", 4, struct.pack("<I", 3)), values=1),
    "alignment 2^31": header(value("general.alignment", 4, struct.pack("<I", 2**31)), values=1),
    "alignment as text": header(value("general.alignment", 8, text("32")), values=1),
    "a tensor of 2^32 dimensions": header(text("t"), b"\xff" * 40, tensors=1),
    "a tensor beyond the end": header(tensor("t", [64]), tensors=1),
    "a tensor far away": header(tensor("t", [1], offset=2**62), bytes(64), tensors=1),
    "a tensor of 2^120 elements": header(tensor("t", [2**60, 2**60]), bytes(64), tensors=1),
    "a tensor of an unknown type": header(tensor("t", [1], kind=99), bytes(64), tensors=1),
    "a tensor twice": header(tensor("t", [1]) * 2, bytes(64), tensors=2),
    "half a block": header(tensor("t", [33], kind=2), bytes(640), tensors=1),
    "no model in it": header(),
    "a tensor and no size": header(tensor("t", [1]), bytes(64), tensors=1),
    "more layers than tensors": tiny(layers=3),
    "a billion layers": tiny(layers=10**9),
    "another width": tiny(width=4096),
    "a huge inner layer": tiny(inner=10**9),
    "all defaults but one tensor": tiny(),
    "an unknown architecture": header(value("general.architecture", 8, text("mine")), values=1),
    "a llama without anything": header(value("general.architecture", 8, text("llama")), values=1),
}


@pytest.mark.parametrize("kind", GGUF)
def test_a_gguf_file_that_holds_no_model_is_refused(
    kind: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "it.gguf").write_bytes(GGUF[kind])
    refused(["generate", "a", "--model", "it.gguf"], place, capsys)


def test_a_gguf_header_is_followed_to_its_end(tmp_path: Path) -> None:
    """What is whole passes, and one byte less does not."""
    (tmp_path / "it.gguf").write_bytes(tiny())
    read_header(tmp_path / "it.gguf")
    (tmp_path / "it.gguf").write_bytes(tiny()[:-1])
    with pytest.raises(InvalidData, match="its tensors end at byte"):
        read_header(tmp_path / "it.gguf")
