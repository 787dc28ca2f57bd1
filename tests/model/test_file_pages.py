"""Weights in a mapped file: their memory is released."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from eval.memory import peak_growth, resident_mb
from selfspec.model.backbone import Backbone
from selfspec.model.check import check_conformance
from selfspec.model.generic import Decoder
from selfspec.model.weights import FilePages
from tests.models import make_model, needs_compiler, random_ids

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are released only on Linux")

MIB = 2**20
SIZE = 32  # MiB


@pytest.fixture
def mapped(tmp_path: Path) -> nn.Linear:
    """8,192 rows of ones in a private mapping of a file, as in safetensors; no row is read yet."""
    rows, width = 1 << 13, 1 << 10  # reading a page also reads its neighbours, up to two megabytes
    path = tmp_path / "weights"
    path.write_bytes(torch.ones(rows * width).numpy().tobytes())
    weight = torch.from_file(str(path), shared=False, size=rows * width, dtype=torch.float32)
    module = nn.Linear(1, 1, bias=False)
    module.weight = nn.Parameter(weight.view(rows, width), requires_grad=False)
    return module


def test_memory_is_released_and_values_are_read_again(mapped: nn.Linear) -> None:
    assert (mapped.weight == 1).all()
    before = resident_mb("RssFile")
    FilePages().release(mapped)
    assert before - resident_mb("RssFile") > SIZE - 1
    assert (mapped.weight == 1).all()
    assert before - resident_mb("RssFile") < 1  # read again on access


@pytest.mark.parametrize("listed", [True, False])
def test_changed_or_unknown_weights_are_not_released(
    listed: bool, mapped: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    if listed:
        mapped.weight.data[700, 3] = 3
    else:
        monkeypatch.delattr(psutil.Process, "memory_maps")  # like on other systems
    expected, before = mapped.weight.clone(), resident_mb("RssFile")
    FilePages().release(mapped)
    assert before - resident_mb("RssFile") < 1
    assert torch.equal(mapped.weight, expected)


def test_weights_without_a_file_stay() -> None:
    module = nn.Linear(1024, 1024)
    expected = module.weight.clone()
    FilePages().release(module)
    assert torch.equal(module.weight, expected)


@pytest.fixture
def loaded(tmp_path: Path) -> PreTrainedModel:
    """A Llama of some MB, loaded from a folder in the dtype in which it was saved."""
    config = make_model("llama").config
    config.update({"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    return model


@needs_compiler
def test_packing_needs_little_more_than_one_copy(loaded: PreTrainedModel) -> None:
    ids = random_ids(9)
    logits = loaded(ids).logits
    Backbone(make_model("llama"), executor="fused")  # one-time loads are not counted
    size = sum(weight.nbytes for weight in loaded.parameters())
    assert size > 36 * MIB
    backbones: list[Backbone] = []
    memory = peak_growth(lambda: backbones.append(Backbone(loaded, executor="fused")))
    # measured: 1.4 times the model with all that a pass needs, and 2.3 if nothing were released
    assert 1e6 * memory < 1.8 * size
    assert torch.equal(loaded(ids).logits, logits)


def test_checking_a_model_holds_one_layer_of_it_at_a_time(loaded: PreTrainedModel) -> None:
    check_conformance(Decoder(make_model("llama")))  # one-time loads are not counted
    size = sum(weight.nbytes for weight in loaded.parameters())
    FilePages().release(loaded)
    memory = peak_growth(lambda: check_conformance(Decoder(loaded)))
    # measured: 0.5 times the model, and 1.4 if nothing were released
    assert 1e6 * memory < 0.9 * size
