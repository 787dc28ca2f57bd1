"""Models whose weights stay as blocks of their GGUF file, against de-quantised ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

import selfspec
from selfspec.errors import ModelNotFound
from selfspec.hub import gguf as gguf_files
from selfspec.hub import models as hub
from selfspec.hub import pretrained
from selfspec.hub.gguf import read_header
from selfspec.model import fingerprint, weights
from selfspec.model.backbone import Backbone
from selfspec.model.weights import FORMATS, QuantisedWeight
from tests.gguf_models import write_model

Q4_K_M = {"ffn_down": "Q6_K", "attn_v": "Q6_K", "token_embd": "Q6_K"}
"""How llama.cpp mixes formats in one file."""


@pytest.fixture(autouse=True)
def blocks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products read blocks in bfloat16, too, where numbers would be faster."""
    monkeypatch.setattr(weights, "blocks_pay", lambda _: True)


def both(path: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """From blocks, and de-quantised by transformers."""
    name = {"gguf_file": path.name}
    config = AutoConfig.from_pretrained(path.parent, **name)
    attention = "eager" if config.model_type == "gemma2" else "sdpa"  # the only one it has
    blocks = gguf_files.load(path, read_header(path), config, dtype, attention)
    numbers: Any = AutoModelForCausalLM.from_pretrained(
        path.parent,
        **name,
        dtype=torch.float32,
        attn_implementation=attention,
        quantization_config=GgufConfig(dequantize=True),
    )
    for weight in numbers.parameters():  # not the rotations, which `to` would round as well
        weight.data = weight.data.to(dtype)
    return blocks, numbers.eval()


@pytest.mark.parametrize(
    ("architecture", "kinds", "kind", "dtype"),
    [
        ("llama", {}, "Q4_1", torch.float32),
        ("llama", Q4_K_M, "Q4_K", torch.bfloat16),
        ("qwen2", {"ffn": "Q5_0", "attn_k": "F16"}, "Q5_1", torch.float32),
        ("qwen3", {"ffn": "Q4_0", "output": "BF16"}, "Q8_0", torch.bfloat16),
        ("phi3", {"attn": "Q5_K"}, "Q4_K", torch.float32),
        ("gemma2", {}, "Q8_0", torch.float32),
        ("gemma3", Q4_K_M, "Q4_K", torch.bfloat16),
    ],
)
def test_a_model_of_blocks_is_the_de_quantised_model(
    tmp_path: Path, architecture: str, kinds: dict[str, str], kind: str, dtype: torch.dtype
) -> None:
    write_model(tmp_path / "it.gguf", architecture, kinds, kind)
    blocks, numbers = both(tmp_path / "it.gguf", dtype)
    expected = dict(numbers.named_parameters())
    assert dict(blocks.named_parameters()).keys() == expected.keys()
    for name, weight in blocks.named_parameters():
        assert torch.equal(weight.clone(), expected[name]), name
    kept = [w for w in blocks.parameters() if isinstance(w, QuantisedWeight)]
    assert len(kept) >= 8
    assert fingerprint.of(blocks) == fingerprint.of(numbers)
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        assert torch.equal(blocks(ids).logits, numbers(ids).logits)
    both_ways = [selfspec.wrap(model, drafter="ngram") for model in (blocks, numbers)]
    ours, theirs = (one.backbone for one in both_ways)
    assert ours.executor_name == theirs.executor_name == "fused", ours.refused
    assert ours.weight_bytes < 0.7 * theirs.weight_bytes
    if dtype == torch.float32:  # in bfloat16 blocks need not be rounded, and texts part at ties
        texts = [one.generate(ids, max_new_tokens=24).token_ids for one in both_ways]
        assert texts[0] == texts[1]


def test_an_embedding_may_be_the_unembedding_too(tmp_path: Path) -> None:
    write_model(tmp_path / "it.gguf", tied=True)
    blocks, numbers = both(tmp_path / "it.gguf")
    assert blocks.lm_head.weight is blocks.model.embed_tokens.weight
    blocks.save_pretrained(tmp_path / "saved")  # as numbers
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        for other in (numbers, saved):
            assert torch.equal(blocks(ids).logits, other(ids).logits)


def test_other_formats_are_de_quantised_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_files, "FORMATS", {"Q4_1": FORMATS["Q4_1"]})
    write_model(tmp_path / "it.gguf", kinds={"ffn": "Q8_0"})
    with caplog.at_level(logging.DEBUG, "selfspec"):
        blocks, numbers = both(tmp_path / "it.gguf")
    assert "keeps some weights as Q8_0, which are de-quantised" in caplog.text
    found = blocks.model.layers[0].mlp.up_proj.weight
    assert not isinstance(found, QuantisedWeight)
    assert torch.equal(found, numbers.model.layers[0].mlp.up_proj.weight)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"architecture": "starcoder2"}, "starcoder2 is not among"),
        ({"kind": "F16"}, "none of its weights are in blocks that are known"),
    ],
)
def test_what_cannot_stay_is_de_quantised_with_a_line(
    tmp_path: Path,
    options: dict[str, Any],
    why: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pretrained, "load", lambda *_, **__: (torch.nn.Linear(1, 1), None))
    done = lambda _gguf, out, dtype: (out / "config.json").touch()  # noqa: E731
    monkeypatch.setattr(hub, "_convert", done)
    write_model(tmp_path / "it.gguf", **options)
    with caplog.at_level(logging.INFO):
        hub.load_model(tmp_path / "it.gguf", device="cpu", blocks=True)
    assert f"it.gguf is de-quantised: {why}" in caplog.text


def test_a_dtype_is_chosen_where_none_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "it.gguf")
    for pays, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(weights, "blocks_pay", lambda _, pays=pays: pays)
        assert hub.load_model(tmp_path / "it.gguf", device="cpu", blocks=True)[0].dtype == dtype
    assert hub.load_model(tmp_path / "it.gguf", device="cpu")[0].dtype == torch.bfloat16


def test_other_executors_get_numbers(tmp_path: Path) -> None:
    write_model(tmp_path / "it.gguf")
    loaded = selfspec.load(tmp_path / "it.gguf", dtype="float32", executor="generic")
    assert not any(isinstance(w, QuantisedWeight) for w in loaded.model.parameters())
    blocks, _ = both(tmp_path / "it.gguf")
    assert Backbone(blocks, executor="generic").executor_name == "generic"
    assert blocks.lm_head.weight.kept is not None


def write_bytes(path: Path, tensor: str, place: int, value: bytes) -> None:
    first = read_header(path).tensors[tensor].first
    with path.open("r+b") as file:
        file.seek(first + place)
        file.write(value)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda path: write_bytes(path, "blk.1.ffn_up.weight", 20 * 7, b"\0\x7c"),
            "blk.1.ffn_up.weight has a scale that is not finite",
        ),
        (
            lambda path: write_bytes(path, "blk.0.attn_norm.weight", 0, b"\0\0\xc0\x7f"),
            "blk.0.attn_norm.weight holds numbers that are not finite",
        ),
        (
            lambda it: it.write_bytes(it.read_bytes().replace(b"blk.1.attn_k.", b"blk.1.attn_x.")),
            "it lacks 1 weights",
        ),
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), "its tensors end at byte"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(
    tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    write_model(tmp_path / "it.gguf")
    damage(tmp_path / "it.gguf")
    with pytest.raises(ModelNotFound, match=said) as found:
        hub.load_model(tmp_path / "it.gguf", device="cpu", blocks=True)
    assert len(str(found.value).splitlines()) == 1


def test_the_default_model_stays_as_it_is() -> None:
    """All tensors of its file."""
    blocks, numbers = (
        hub.load_model(None, dtype="float32", device="cpu", blocks=kept)[0]
        for kept in (True, False)
    )
    expected = dict(numbers.named_parameters())
    for name, weight in blocks.named_parameters():
        assert torch.equal(weight.clone(), expected[name]), name
    assert sum(isinstance(weight, QuantisedWeight) for weight in blocks.parameters()) == 211
