"""Folders of heads: what was saved comes back, what is damaged or does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from selfspec.errors import CannotWrite, HeadsMismatch, InvalidHeads
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.folder import CONFIG_FILE, FORMAT_VERSION, WEIGHTS_FILE
from selfspec.model.backbone import Backbone
from selfspec.model.parts import Unembedding
from tests.heads.kinds import DRAFT_IDS, FINGERPRINT, TRAINED, make_heads, train
from tests.models import make_model


def load(folder: Path, unembedding: Unembedding) -> ExitHeads:
    return ExitHeads.from_pretrained(folder, unembedding, FINGERPRINT, "tiny")


@pytest.fixture
def saved(tmp_path: Path, unembedding: Unembedding) -> Path:
    """A folder of trained low-rank translators over a draft vocabulary."""
    folder = tmp_path / "heads"
    train(make_heads("low-rank-draft", unembedding)).save(folder)
    return folder


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# Save and load


@pytest.mark.parametrize("kind", TRAINED)
def test_what_was_saved_loads_bit_equal(
    kind: str, unembedding: Unembedding, hidden: Tensor, tmp_path: Path
) -> None:
    heads = make_heads(
        kind,
        unembedding,
        base_revision="abc",
        temperatures={"2": 1.25},
        defaults={"drafter": "exit:threshold=0.5/0.6,layers=2/4"},
        training={"steps": 7},
    )
    train(heads).save(tmp_path / "new" / "folder")
    loaded = load(tmp_path / "new" / "folder", unembedding)
    assert loaded.config == heads.config
    assert loaded.state_dict().keys() == heads.state_dict().keys()
    assert all(torch.equal(v, loaded.state_dict()[k]) for k, v in heads.state_dict().items())
    for layer in (2, 4):
        assert torch.equal(loaded[layer](hidden), heads[layer](hidden))


def test_heads_saved_in_float32_load_in_the_models_dtype_ready_to_use(saved: Path) -> None:
    unembedding = Backbone(make_model("llama", torch.bfloat16), executor="generic").unembedding
    loaded = load(saved, unembedding)
    assert {weight.dtype for weight in loaded.parameters()} == {torch.bfloat16}
    assert not any(weight.requires_grad for weight in loaded.parameters())
    assert not loaded.training
    assert loaded.first.draft_ids is not None
    assert loaded.first.draft_ids.dtype == torch.int64


def test_the_draft_vocabulary_is_stored_once_as_small_integers(saved: Path) -> None:
    tensors = load_file(saved / WEIGHTS_FILE)
    stored = [name for name in tensors if "draft_ids" in name]
    assert stored == ["draft_ids"]
    assert tensors["draft_ids"].dtype == torch.int32
    assert tensors["draft_ids"].tolist() == DRAFT_IDS.tolist()


def test_saving_twice_replaces_the_first(
    saved: Path, unembedding: Unembedding, hidden: Tensor
) -> None:
    newer = train(make_heads("linear", unembedding))
    newer.save(saved)
    assert torch.equal(load(saved, unembedding)[2](hidden), newer[2](hidden))
    assert {path.name for path in saved.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE}
    assert json.loads((saved / CONFIG_FILE).read_text())["format_version"] == FORMAT_VERSION == 2


def test_loading_writes_nothing_into_the_model(backbone: Backbone, tmp_path: Path) -> None:
    # logit-lens heads share the model's norm; a folder made with another norm must not replace it
    make_heads("linear", backbone.unembedding, exit_layers=(2,)).save(tmp_path)
    edit_config(tmp_path, head_type="logit-lens")
    save_file({"by_layer.2.norm.weight": torch.zeros(32)}, tmp_path / WEIGHTS_FILE)
    before = {name: weight.clone() for name, weight in backbone.model.state_dict().items()}
    with suppress(InvalidHeads):
        load(tmp_path, backbone.unembedding)
    after = backbone.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(weight.requires_grad for weight in backbone.model.parameters())


def fail(*_: object, **__: object) -> None:
    raise OSError("no space left on device")


def half_written(_tensors: object, path: Path, _metadata: object) -> None:
    path.write_bytes(b"half")
    raise OSError("no space left on device")


@pytest.mark.parametrize(
    ("target", "action"),
    [
        ("selfspec.heads.exit_heads.save_file", half_written),
        ("pathlib.Path.replace", fail),
    ],
)
def test_a_failed_save_leaves_no_file_and_keeps_the_old_ones(
    target: str,
    action: Callable[..., None],
    saved: Path,
    unembedding: Unembedding,
    hidden: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = load(saved, unembedding)[2](hidden)
    newer = train(train(make_heads("low-rank-draft", unembedding)))
    with monkeypatch.context() as patch:
        patch.setattr(target, action)
        with pytest.raises(CannotWrite, match="no space left"):
            newer.save(saved)
    assert torch.equal(load(saved, unembedding)[2](hidden), before)
    assert {path.name for path in saved.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE}


# Folders that do not fit; damaged ones: test_bad_files.py


def test_heads_of_another_model_name_both(saved: Path, unembedding: Unembedding) -> None:
    with pytest.raises(HeadsMismatch) as caught:
        ExitHeads.from_pretrained(saved, unembedding, "fedcba9876543210", "other")
    assert str(caught.value) == (
        f"{saved} fits tiny (0123456789ab), the model is other (fedcba987654). "
        "Fit heads for it: selfspec fit"
    )
