"""A base model is told from another by all of its weights, and hashed once per file."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from selfspec.api import speculator as generate
from selfspec.errors import HeadsMismatch
from selfspec.files import cache_folder
from selfspec.hub import models as hub
from selfspec.model import fingerprint
from selfspec.model.backbone import Backbone
from selfspec.model.check import Passage, check_conformance
from selfspec.model.fingerprint import UNKNOWN
from selfspec.model.generic import Decoder
from tests.heads.kinds import make_heads, train
from tests.models import make_model
from tests.talks import make_tokenizer

DTYPES = [torch.bfloat16, torch.float16, torch.float64]


def moved(model: PreTrainedModel, name: str) -> PreTrainedModel:
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0].add_(0.5)
    return model


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_model_has_one_fingerprint_in_every_dtype(dtype: torch.dtype) -> None:
    small = make_model("llama")
    with torch.no_grad():
        small.get_parameter("model.layers.1.mlp.up_proj.weight").mul_(2.0**-18)
    expected = fingerprint.of(small)
    assert fingerprint.of(small.to(dtype)) == expected  # type: ignore[arg-type]  # typed as a mixin


def test_every_weight_counts() -> None:
    model = make_model("qwen3")
    found = [fingerprint.of(moved(model, name)) for name, _ in model.named_parameters()]
    assert len({fingerprint.of(make_model("qwen3")), *found}) == len(found) + 1


def test_kept_buffers_count_and_others_do_not() -> None:
    model, same = make_model("llama"), make_model("llama")
    model.register_buffer("kept", torch.ones(3, dtype=torch.int64))
    assert fingerprint.of(model) != fingerprint.of(same)
    same.register_buffer("lost", torch.ones(3), persistent=False)
    assert fingerprint.of(same) == fingerprint.of(make_model("llama"))


def test_tied_weights_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tied, seen = make_model("llama", tie_word_embeddings=True), list[int]()
    monkeypatch.setattr(fingerprint, "_of_tensor", lambda weight: seen.append(weight.data_ptr()))
    fingerprint.of(tied)
    assert len(seen) == len(set(seen)) == len(list(tied.parameters()))


def test_weights_that_lie_otherwise_in_memory_are_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = make_model("llama")
    expected = fingerprint.of(model)
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    monkeypatch.setattr(fingerprint, "_BLOCK", 7)
    assert fingerprint.of(model) == expected


class Strange(torch.Tensor):
    """As quantised weights come: a subclass."""


CHANGES: list[Any] = [
    lambda up: setattr(up, "weight", nn.Parameter(torch.zeros(64, 32).as_subclass(Strange))),
    lambda up: up.to("meta"),
    lambda up: setattr(up, "weight", nn.Parameter(up.weight.detach().to_sparse())),
    None,  # packed
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_cannot_be_read_has_no_fingerprint_and_the_log_says_why(
    change: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = make_model("llama")
    if change is None:
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=True)
    else:
        change(model.model.layers[0].mlp.up_proj)
    with caplog.at_level(logging.WARNING):
        assert fingerprint.of(model) == UNKNOWN
    assert "What fits it is not checked" in caplog.messages[0]


# --- once per file --------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, empty_cache: Path) -> Path:
    """A tiny model on disk, and a cache folder of its own."""
    make_model("llama").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    original = fingerprint.of

    def watched(model: nn.Module) -> str:
        found.append(original(model))
        return found[-1]

    monkeypatch.setattr(fingerprint, "of", watched)
    return found


def loaded(folder: Path, dtype: str = "float32") -> str:
    model, _, files = hub.load_model(folder, dtype=dtype, device="cpu")
    return fingerprint.of_loaded(model, files.stamps)


def test_a_file_is_hashed_once_and_again_when_it_changes(folder: Path, hashed: list[str]) -> None:
    first = loaded(folder)
    assert loaded(folder) == first == hashed[0]
    assert len(hashed) == 1
    assert loaded(folder, "bfloat16") == first
    assert len(hashed) == 2  # another dtype may have other numbers
    moved(make_model("llama"), "model.layers.3.mlp.up_proj.weight").save_pretrained(folder)
    assert loaded(folder) != first
    os.utime(folder / "model.safetensors", ns=(0, 0))
    loaded(folder)
    assert len(hashed) == 4


def test_a_file_that_is_replaced_while_it_is_read_is_not_kept(
    folder: Path, hashed: list[str]
) -> None:
    model, _, files = hub.load_model(folder, dtype="float32", device="cpu")
    os.utime(folder / "model.safetensors", ns=(0, 0))
    for _ in range(2):
        fingerprint.of_loaded(model, files.stamps)
    assert len(hashed) == 2
    assert not (cache_folder() / "fingerprints").exists()
    (folder / "adapter_config.json").write_text("{}")  # brings in weights from elsewhere
    assert fingerprint.of_folder(folder) == fingerprint.stamps([folder / "nowhere"]) == ()


@pytest.mark.parametrize(
    "content", ["{", '{"selfspec": 3}', '{"selfspec": "KEY", "fingerprint": "x"}']
)
def test_a_damaged_entry_is_made_again(folder: Path, hashed: list[str], content: str) -> None:
    first = loaded(folder)
    (entry,) = (cache_folder() / "fingerprints").iterdir()
    key = json.dumps(json.loads(entry.read_text())["selfspec"])
    entry.write_text(content.replace('"KEY"', key))
    assert loaded(folder) == first
    assert len(hashed) == 2
    assert json.loads(entry.read_text())["fingerprint"] == first


def test_a_cache_folder_that_takes_no_files_costs_time_only(
    folder: Path, hashed: list[str], empty_cache: Path
) -> None:
    (empty_cache / "fingerprints").write_text("a file")
    assert loaded(folder) == loaded(folder)
    assert len(hashed) == 2


def test_a_model_that_was_changed_after_loading_is_hashed(folder: Path) -> None:
    loaded(folder)  # the cache knows the file
    model, tokenizer, _ = hub.load_model(folder, dtype="float32", device="cpu")
    model.get_parameter("model.layers.0.mlp.up_proj.weight").data.mul_(2)
    wrapped = generate.wrap(model, tokenizer, heads="logit-lens")
    assert wrapped.backbone.fingerprint == fingerprint.of(model) != loaded(folder)


def test_a_backbone_asks_once_and_only_when_it_must(folder: Path, hashed: list[str]) -> None:
    plain = generate.load(folder, dtype="float32", device="cpu")
    assert not hashed
    assert plain.backbone.fingerprint == plain.backbone.fingerprint
    assert len(hashed) == 1
    again = generate.load(folder, dtype="float32", device="cpu", heads="logit-lens")
    assert again.backbone.fingerprint == plain.backbone.fingerprint
    assert len(hashed) == 2  # what was asked for later may have been changed: it was not kept
    generate.load(folder, dtype="float32", device="cpu", heads="logit-lens")
    assert len(hashed) == 2


def test_checks_that_a_models_files_passed_are_made_once(
    folder: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Decoder] = []

    def counted(decoder: Decoder) -> list[Passage]:
        checked.append(decoder)
        return check_conformance(decoder)

    monkeypatch.setattr("selfspec.model.backbone.check_conformance", counted)
    texts = [generate.load(folder, device="cpu").generate([3, 4, 5]).token_ids for _ in range(2)]
    kept = [*(empty_cache / "checked").glob("*")]
    once = len(kept)  # where nothing compiles nothing is kept
    assert (len(checked), texts[0]) == (2 - once, texts[1])
    os.utime(folder / "model.safetensors", (1, 1))
    generate.load(folder, device="cpu")
    model, _, _ = hub.load_model(folder, device="cpu")
    generate.wrap(model)
    assert len(checked) == 4 - once


# --- heads ----------------------------------------------------------------------------------------


def saved_heads(place: Path, backbone: Backbone, **values: Any) -> Path:
    values = {"base_fingerprint": backbone.fingerprint} | values
    train(make_heads("translator", backbone.unembedding, **values)).save(place)
    return place


def test_heads_of_another_fine_tune_with_the_same_unembedding_are_refused(tmp_path: Path) -> None:
    base = Backbone(make_model("llama"), executor="generic")
    heads = saved_heads(tmp_path / "heads", base)
    assert generate.wrap(base.model, heads=heads).heads is not None
    other = moved(make_model("llama"), "model.layers.2.mlp.down_proj.weight")
    assert torch.equal(Backbone(other).unembedding.weight, base.unembedding.weight)
    with pytest.raises(HeadsMismatch, match=r"fits tiny .* the model is other"):
        generate.wrap(other, heads=heads, label="other")


def test_where_there_is_no_fingerprint_sizes_decide_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = Backbone(make_model("llama"), executor="generic")
    heads = saved_heads(tmp_path / "heads", base, base_fingerprint="")
    with caplog.at_level(logging.WARNING):
        generate.wrap(base.model, heads=heads)
    assert "is not known: one of them has no fingerprint" in caplog.text
    shallow = make_model("llama", num_hidden_layers=5)
    with pytest.raises(HeadsMismatch, match=r"\(96, 32, 6\), .* has \(96, 32, 5\)"):
        generate.wrap(shallow, heads=heads, label="shallow")
