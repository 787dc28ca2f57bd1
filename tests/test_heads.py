"""Exit heads: what each type computes, draft vocabularies, and folders that keep their promises."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from selfspec.backbone import Backbone
from selfspec.errors import (
    HeadsMismatch,
    HeadsNotFound,
    InvalidHeads,
    InvalidOption,
    SelfspecError,
)
from selfspec.heads import (
    CONFIG_FILE,
    FORMAT_VERSION,
    HEAD_TYPES,
    WEIGHTS_FILE,
    ExitHeads,
    HeadsConfig,
    Unembedding,
    check_exit_layers,
    logit_lens,
)
from tests.models import FAMILIES, VOCAB_SIZE, make_model, random_ids

FINGERPRINT = "0123456789abcdef"
DRAFT_IDS = torch.tensor([0, 3, 17, 40, 95])

KINDS: dict[str, dict[str, Any]] = {
    "linear": {"head_type": "linear"},
    "linear-draft": {"head_type": "linear", "draft_vocab_size": 5},
    "translator": {"head_type": "translator"},
    "translator-rank": {"head_type": "translator", "rank": 3},
    "translator-rank-draft": {"head_type": "translator", "rank": 3, "draft_vocab_size": 5},
    "logit-lens": {"head_type": "logit-lens"},
    "logit-lens-draft": {"head_type": "logit-lens", "draft_vocab_size": 5},
}
NOT_THE_HEADS = r"model\.safetensors does not hold the heads of its config: "
TRAINED = [kind for kind in KINDS if not kind.startswith("logit-lens")]


def make_config(**values: Any) -> HeadsConfig:
    """A config for the tiny Llama; `values` replace entries."""
    sizes: dict[str, Any] = {
        "base_model": "tiny",
        "base_fingerprint": FINGERPRINT,
        "hidden_size": 32,
        "num_layers": 6,
        "vocab_size": VOCAB_SIZE,
        "exit_layers": (2, 4),
        "head_type": "linear",
    }
    return HeadsConfig(**sizes | values)


def make_heads(kind: str, unembedding: Unembedding, **values: Any) -> ExitHeads:
    """Untrained heads of `kind`."""
    config = make_config(**KINDS[kind] | values)
    return ExitHeads(config, unembedding, DRAFT_IDS if config.draft_vocab_size else None)


@torch.no_grad()
def train(heads: ExitHeads) -> ExitHeads:
    """Move all weights that are the heads' own, each differently."""
    generator = torch.Generator().manual_seed(1)
    for weight in heads.parameters():
        weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
    return heads


def load(folder: Path, unembedding: Unembedding) -> ExitHeads:
    return ExitHeads.from_pretrained(folder, unembedding, FINGERPRINT, "tiny")


@pytest.fixture
def backbone() -> Backbone:
    """A tiny Llama of this test's own, which it may change."""
    return Backbone(make_model("llama"), executor="generic")


@pytest.fixture
def unembedding(backbone: Backbone) -> Unembedding:
    return backbone.unembedding


@pytest.fixture
def hidden() -> Tensor:
    """[1, 3, d]"""
    return torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def saved(tmp_path: Path, unembedding: Unembedding) -> Path:
    """A folder of trained low-rank translators over a draft vocabulary."""
    folder = tmp_path / "heads"
    train(make_heads("translator-rank-draft", unembedding)).save(folder)
    return folder


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# What heads compute


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["linear", "translator", "translator-rank", "logit-lens"])
@torch.inference_mode()
def test_untrained_heads_read_the_last_state_as_the_model_does(family: str, kind: str) -> None:
    backbone = Backbone(make_model(family), executor="generic")
    heads = make_heads(kind, backbone.unembedding)
    hidden = backbone.embed(random_ids(3))
    found = heads[4](hidden)
    assert found.dtype == torch.float32
    assert torch.equal(found, backbone.logits(hidden))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_in_the_models_dtype_and_give_float32(kind: str, dtype: torch.dtype) -> None:
    backbone = Backbone(make_model("llama", dtype), executor="generic")
    head = make_heads(kind, backbone.unembedding)[2]
    hidden = backbone.embed(random_ids(3))
    assert hidden.dtype == dtype
    assert head(hidden).dtype == torch.float32
    assert {weight.dtype for weight in head.parameters()} <= {dtype}


def test_a_linear_head_is_a_norm_and_a_matrix(unembedding: Unembedding, hidden: Tensor) -> None:
    head = train(make_heads("linear", unembedding))[2]
    normed = cast(nn.Module, head.norm)(hidden)
    expected = torch.nn.functional.linear(normed, head.state_dict()["weight"])
    assert torch.equal(head(hidden), expected)


@pytest.mark.parametrize("kind", ["translator", "translator-rank"])
def test_a_translator_adds_an_affine_map_to_the_identity(
    kind: str, unembedding: Unembedding, hidden: Tensor
) -> None:
    head = train(make_heads(kind, unembedding))[2]
    weights, normed = head.state_dict(), cast(nn.Module, head.norm)(hidden)
    narrow = normed if kind == "translator" else normed @ weights["down.weight"].T
    if kind == "translator-rank":
        assert weights["down.weight"].shape == (3, 32)
        assert weights["up.weight"].shape == (32, 3)
    moved = normed + narrow @ weights["up.weight"].T + weights["up.bias"]
    # float32; largest difference measured: 1.9e-6
    assert (head(hidden) - moved @ unembedding.weight.T).abs().max() < 1e-5


def test_each_exit_layer_has_a_head_of_its_own(unembedding: Unembedding, hidden: Tensor) -> None:
    heads = train(make_heads("linear", unembedding))
    assert heads[2] is not heads[4]
    assert not torch.equal(heads[2](hidden), heads[4](hidden))
    with pytest.raises(KeyError):
        heads[3]


@pytest.mark.parametrize("kind", TRAINED)
def test_training_heads_leaves_the_model_alone(
    kind: str, backbone: Backbone, hidden: Tensor
) -> None:
    before = {name: weight.clone() for name, weight in backbone.model.state_dict().items()}
    heads = make_heads(kind, backbone.unembedding)
    heads[2](hidden).logsumexp(-1).sum().backward()
    own = dict(heads[2].named_parameters())
    # the narrow matrix gets no gradient at first, because the wide one behind it is still zero
    assert all(weight.grad is not None for weight in own.values())
    assert any(weight.grad is not None and weight.grad.any() for weight in own.values())
    assert all(weight.grad is None for weight in backbone.model.parameters())
    train(heads)
    after = backbone.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_copied_norm_carries_none_of_accelerates_hooks(unembedding: Unembedding) -> None:
    add_hook_to_module(unembedding.norm, ModelHook())
    head = make_heads("linear", unembedding)[2]
    assert not hasattr(head.norm, "_hf_hook")
    assert hasattr(unembedding.norm, "_hf_hook")


@pytest.mark.parametrize("kind", ["linear", "logit-lens"])
def test_only_translators_have_a_rank(kind: str, unembedding: Unembedding) -> None:
    with pytest.raises(InvalidOption, match=f"{kind} heads have no rank, found 3"):
        make_heads(kind, unembedding, rank=3)


# The unembedding is the model's


@pytest.mark.parametrize("kind", ["translator", "translator-rank", "logit-lens"])
def test_the_unembedding_is_the_models_own_storage(
    kind: str, unembedding: Unembedding, hidden: Tensor
) -> None:
    head = make_heads(kind, unembedding)[2]
    with torch.no_grad():
        unembedding.weight.zero_()
    assert not head(hidden).any()


def test_a_linear_head_has_a_matrix_of_its_own(unembedding: Unembedding, hidden: Tensor) -> None:
    head = make_heads("linear", unembedding)[2]
    before = head(hidden)
    with torch.no_grad():
        unembedding.weight.zero_()
    assert torch.equal(head(hidden), before)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("linear", {"norm.weight", "weight"}),
        ("translator", {"norm.weight", "up.weight", "up.bias"}),
        ("translator-rank", {"norm.weight", "down.weight", "up.weight", "up.bias"}),
    ],
)
def test_a_file_holds_exactly_what_was_trained(
    kind: str, names: set[str], unembedding: Unembedding, tmp_path: Path
) -> None:
    make_heads(kind, unembedding).save(tmp_path)
    found = set(load_file(tmp_path / WEIGHTS_FILE))
    assert found == {f"by_layer.{layer}.{name}" for layer in (2, 4) for name in names}


def test_a_translators_file_is_smaller_than_one_unembedding(
    unembedding: Unembedding, tmp_path: Path
) -> None:
    make_heads("translator-rank", unembedding).save(tmp_path)
    unembedding_bytes = unembedding.weight.numel() * 4
    assert (tmp_path / WEIGHTS_FILE).stat().st_size < unembedding_bytes / 2


# Draft vocabularies


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "draft" in kind])
def test_draft_logits_are_the_full_heads_logits_of_the_chosen_tokens(
    kind: str, hidden: Tensor
) -> None:
    unembedding = Backbone(make_model("llama", torch.float64), executor="generic").unembedding
    full = make_heads(kind.removesuffix("-draft"), unembedding)[2]
    narrow = make_heads(kind, unembedding)[2]
    assert (full.draft_vocab_size, narrow.draft_vocab_size) == (VOCAB_SIZE, 5)
    found, expected = narrow(hidden.double()), full(hidden.double())[..., DRAFT_IDS]
    # both were computed in float64 and rounded to float32; largest difference measured: 0
    assert (found - expected).abs().max() < 1e-6


def test_draft_ids_map_to_target_ids_in_any_shape(unembedding: Unembedding) -> None:
    head = make_heads("linear-draft", unembedding)[2]
    assert head.to_target_ids(torch.tensor([[4, 0], [2, 2]])).tolist() == [[95, 0], [17, 17]]
    assert head.to_target_ids(torch.tensor(1)).item() == 3


def test_draft_logits_widen_to_the_vocabulary_without_the_other_tokens(
    unembedding: Unembedding, hidden: Tensor
) -> None:
    head = make_heads("linear-draft", unembedding)[2]
    logits = head(hidden)
    wide = head.to_target_logits(logits)
    assert wide.shape == (1, 3, VOCAB_SIZE)
    assert torch.equal(wide[..., DRAFT_IDS], logits)
    assert wide.isneginf().sum(-1).tolist() == [[VOCAB_SIZE - 5] * 3]
    assert torch.equal(wide.argmax(-1), head.to_target_ids(logits.argmax(-1)))


def test_without_a_draft_vocabulary_ids_and_logits_pass_through(unembedding: Unembedding) -> None:
    head = make_heads("linear", unembedding)[2]
    ids, logits = torch.tensor([5]), torch.zeros(1, VOCAB_SIZE)
    assert head.to_target_ids(ids) is ids
    assert head.to_target_logits(logits) is logits


def test_a_draft_vocabulary_needs_its_ids(unembedding: Unembedding) -> None:
    with pytest.raises(SelfspecError):
        ExitHeads(make_config(draft_vocab_size=5), unembedding)


# Logit lens


def test_the_logit_lens_has_a_head_at_every_layer_and_uses_one(unembedding: Unembedding) -> None:
    heads = logit_lens(unembedding, 6, "tiny")
    assert heads.config.exit_layers == (1, 2, 3, 4, 5)
    assert heads.config.defaults == {"exit_layers": [4]}
    assert (heads.config.vocab_size, heads.config.hidden_size) == (VOCAB_SIZE, 32)


def test_the_logit_lens_of_a_model_with_two_layers_exits_after_the_first(
    unembedding: Unembedding,
) -> None:
    assert logit_lens(unembedding, 2, "tiny").config.defaults == {"exit_layers": [1]}


def test_the_logit_lens_takes_no_memory(unembedding: Unembedding) -> None:
    heads = logit_lens(unembedding, 6, "tiny")
    assert not heads.state_dict()


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
        defaults={"exit_threshold": [0.5, 0.6], "exit_layers": [2, 4]},
        training={"steps": 7},
    )
    train(heads).save(tmp_path / "new" / "folder")
    loaded = load(tmp_path / "new" / "folder", unembedding)
    assert loaded.config == heads.config
    assert loaded.state_dict().keys() == heads.state_dict().keys()
    assert all(torch.equal(v, loaded.state_dict()[k]) for k, v in heads.state_dict().items())
    for layer in (2, 4):
        assert torch.equal(loaded[layer](hidden), heads[layer](hidden))


def test_loaded_heads_are_ready_to_use(saved: Path, unembedding: Unembedding) -> None:
    loaded = load(saved, unembedding)
    assert not loaded.training
    assert not any(weight.requires_grad for weight in loaded.parameters())
    assert loaded[2].draft_ids is not None
    assert loaded[2].draft_ids.dtype == torch.int64


def test_heads_saved_in_float32_load_in_the_models_dtype(saved: Path) -> None:
    unembedding = Backbone(make_model("llama", torch.bfloat16), executor="generic").unembedding
    loaded = load(saved, unembedding)
    assert {weight.dtype for weight in loaded.parameters()} == {torch.bfloat16}


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


def half_written(_tensors: object, path: Path) -> None:
    path.write_bytes(b"half")
    raise OSError("no space left on device")


@pytest.mark.parametrize(
    ("target", "action"),
    [
        ("selfspec.heads.save_file", half_written),
        ("selfspec.heads.json.dumps", fail),
        ("pathlib.Path.write_text", fail),
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
    newer = train(train(make_heads("translator-rank-draft", unembedding)))
    with monkeypatch.context() as patch:
        patch.setattr(target, action)
        with pytest.raises(OSError, match="no space left"):
            newer.save(saved)
    assert torch.equal(load(saved, unembedding)[2](hidden), before)
    assert {path.name for path in saved.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE}


# Folders that do not fit, or are damaged


def test_heads_of_another_model_name_both(saved: Path, unembedding: Unembedding) -> None:
    with pytest.raises(HeadsMismatch) as caught:
        ExitHeads.from_pretrained(saved, unembedding, "fedcba9876543210", "other")
    assert str(caught.value) == (
        f"{saved} fits tiny (0123456789ab), the model is other (fedcba987654). "
        "Fit heads for it: selfspec fit"
    )


@pytest.mark.parametrize("missing", [CONFIG_FILE, "the folder"])
def test_a_folder_without_config_is_no_heads_folder(
    missing: str, tmp_path: Path, unembedding: Unembedding
) -> None:
    folder = tmp_path if missing == CONFIG_FILE else tmp_path / "nowhere"
    with pytest.raises(HeadsNotFound, match=f"no config.json in {folder}"):
        load(folder, unembedding)


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_truncated_weights_are_refused(kept: int, saved: Path, unembedding: Unembedding) -> None:
    path = saved / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InvalidHeads, match=NOT_THE_HEADS):
        load(saved, unembedding)


def test_missing_weights_are_refused(saved: Path, unembedding: Unembedding) -> None:
    (saved / WEIGHTS_FILE).unlink()
    with pytest.raises(InvalidHeads, match=NOT_THE_HEADS):
        load(saved, unembedding)


def test_a_header_that_promises_petabytes_is_refused(saved: Path, unembedding: Unembedding) -> None:
    (saved / WEIGHTS_FILE).write_bytes(struct.pack("<Q", 1 << 50) + b"{}")
    with pytest.raises(InvalidHeads, match=NOT_THE_HEADS):
        load(saved, unembedding)


@pytest.mark.parametrize(
    "tensors",
    [
        {"lm_head.weight": torch.zeros(3, 4)},
        {"draft_ids": DRAFT_IDS.int(), "lm_head.weight": torch.zeros(3, 4)},
    ],
)
def test_foreign_tensors_are_refused(
    tensors: dict[str, Tensor], saved: Path, unembedding: Unembedding
) -> None:
    save_file(tensors, saved / WEIGHTS_FILE)
    with pytest.raises(InvalidHeads):
        load(saved, unembedding)


@pytest.mark.parametrize("change", ["missing", "extra", "other shape"])
def test_tensors_must_be_exactly_those_of_the_config(
    change: str, saved: Path, unembedding: Unembedding
) -> None:
    tensors = load_file(saved / WEIGHTS_FILE)
    if change == "missing":
        del tensors["by_layer.4.up.bias"]
    elif change == "extra":
        tensors["by_layer.5.up.bias"] = torch.zeros(32)
    else:
        tensors["by_layer.4.up.bias"] = torch.zeros(31)
    save_file(tensors, saved / WEIGHTS_FILE)
    with pytest.raises(InvalidHeads, match=NOT_THE_HEADS):
        load(saved, unembedding)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 3, 17, 40], r"draft vocabulary of 4 tokens.*, 5 in config\.json"),
        (None, r"draft vocabulary of 0 tokens.*, 5 in config\.json"),
        ([0, 3, 17, 40, 96], r"draft vocabulary holds ids outside 0\.\.95"),
        ([-1, 3, 17, 40, 95], r"draft vocabulary holds ids outside 0\.\.95"),
    ],
)
def test_a_draft_vocabulary_that_does_not_fit_is_refused(
    ids: list[int] | None, message: str, saved: Path, unembedding: Unembedding
) -> None:
    tensors = load_file(saved / WEIGHTS_FILE)
    del tensors["draft_ids"]
    if ids is not None:
        tensors["draft_ids"] = torch.tensor(ids, dtype=torch.int32)
    save_file(tensors, saved / WEIGHTS_FILE)
    with pytest.raises(InvalidHeads, match=message):
        load(saved, unembedding)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"format_version": 2}, "has format version 2, this selfspec reads 1"),
        ({"format_version": None}, "has format version None, this selfspec reads 1"),
        ({"exit_layer": [2]}, "unknown key 'exit_layer'. Did you mean exit_layers?"),
        ({"exit_layers": [0, 2]}, "exit layer 0 is not among [1, 2, 3, 4, 5]"),
        ({"exit_layers": [2, 6]}, "exit layer 6 is not among [1, 2, 3, 4, 5]"),
        ({"exit_layers": [4, 2]}, "exit layers [4, 2] must be rising"),
        ({"exit_layers": [2, 2]}, "exit layers [2, 2] must be rising"),
        ({"exit_layers": []}, "exit layers [] must be rising"),
        ({"exit_layers": 2}, "is not a config of exit heads"),
        ({"head_type": "magic"}, "head type 'magic' is none of linear, translator, logit-lens"),
        ({"draft_vocab_size": 97}, "draft vocabulary of 97 tokens, the model has 96"),
    ],
)
def test_a_config_that_makes_no_sense_says_why(
    values: dict[str, Any], reason: str, saved: Path, unembedding: Unembedding
) -> None:
    edit_config(saved, **values)
    with pytest.raises(InvalidHeads) as caught:
        load(saved, unembedding)
    assert str(saved / CONFIG_FILE) in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "7", '{"format_version": 1}', "\udcff"])
def test_a_config_that_is_no_config_is_refused(
    text: str, saved: Path, unembedding: Unembedding
) -> None:
    (saved / CONFIG_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidHeads, match=r"config\.json is not a config of exit heads"):
        load(saved, unembedding)


def test_the_saved_config_says_its_format_version(saved: Path) -> None:
    assert json.loads((saved / CONFIG_FILE).read_text())["format_version"] == FORMAT_VERSION == 1


# Names and bounds


@pytest.mark.parametrize(("layers", "bad"), [((0, 2), 0), ((2, 6), 6), ((2, -1), -1)])
def test_exit_layers_lie_between_the_first_and_the_last_but_one(
    layers: tuple[int, ...], bad: int
) -> None:
    with pytest.raises(InvalidOption, match=f"exit layer {bad} is not among"):
        make_config(exit_layers=layers)


def test_the_first_and_the_last_but_one_layer_are_allowed() -> None:
    assert make_config(exit_layers=(1, 5)).exit_layers == (1, 5)


def test_a_long_choice_of_layers_is_shortened_in_the_message() -> None:
    with pytest.raises(InvalidOption) as caught:
        check_exit_layers([30], range(1, 30))
    assert str(caught.value) == "exit layer 30 is not among 1..29"


def test_a_selection_of_fitted_layers_passes() -> None:
    check_exit_layers([2, 6], [2, 4, 6])


def test_head_types_are_what_the_format_names() -> None:
    assert list(HEAD_TYPES) == ["linear", "translator", "logit-lens"]
