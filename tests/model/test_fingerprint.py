"""Fingerprints cover all weights of a model and are computed once per file; changes are noticed."""

from __future__ import annotations

import logging
import os
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.prune import l1_unstructured
from transformers import PreTrainedModel

from selfspec.api.speculator import Speculator, load, wrap
from selfspec.decoding import measure
from selfspec.errors import HeadsMismatch, ModelChanged
from selfspec.files import cache_folder
from selfspec.hub import models as hub
from selfspec.model import check, fingerprint
from selfspec.model.check import captured_outputs
from selfspec.model.fingerprint import UNKNOWN, ModelWatch
from tests.heads.kinds import make_heads, train
from tests.model.test_check import Doubling, mlp
from tests.models import BREADTH, FAMILIES, make_model, noted, random_ids, wrapped
from tests.talks import save_tiny


def moved(model: PreTrainedModel, name: str) -> PreTrainedModel:
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0].add_(0.5)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_one_model_has_one_fingerprint_in_every_dtype(dtype: torch.dtype) -> None:
    small = make_model("llama")
    with torch.no_grad():
        small.get_parameter("model.layers.1.mlp.up_proj.weight").mul_(2.0**-18)
    expected = fingerprint.of(small)
    assert fingerprint.of(small.to(dtype)) == expected  # type: ignore[arg-type]  # typed as a mixin


def test_every_weight_counts() -> None:
    model = make_model("qwen3")
    fingerprints = [fingerprint.of(moved(model, name)) for name, _ in model.named_parameters()]
    assert len({fingerprint.of(make_model("qwen3")), *fingerprints}) == len(fingerprints) + 1


def test_kept_buffers_count_and_others_do_not() -> None:
    model, twin = make_model("llama"), make_model("llama")
    model.register_buffer("kept", torch.ones(3, dtype=torch.int64))
    assert fingerprint.of(model) != fingerprint.of(twin)
    twin.register_buffer("lost", torch.ones(3), persistent=False)
    assert fingerprint.of(twin) == fingerprint.of(make_model("llama"))


def test_the_memory_layout_of_weights_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = make_model("llama")
    expected = fingerprint.of(model)
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    monkeypatch.setattr(fingerprint, "_BLOCK", 7)
    assert fingerprint.of(model) == expected


class Strange(torch.Tensor):
    """A subclass, like quantised weights."""


def _set(model: Any, weight: Tensor) -> None:
    mlp(model).up_proj.weight = nn.Parameter(weight)


UNREADABLE: list[Callable[[Any], object]] = [
    lambda m: _set(m, torch.zeros(64, 32).as_subclass(Strange)),
    lambda m: _set(m, mlp(m).up_proj.weight.detach().to_sparse()),
    lambda m: mlp(m).to("meta"),
    lambda m: torch.ao.quantization.quantize_dynamic(m, {nn.Linear}, inplace=True),
]


@pytest.mark.parametrize("change", UNREADABLE)
def test_unreadable_weights_have_no_fingerprint_and_the_log_says_why(
    change: Callable[[Any], object], caplog: pytest.LogCaptureFixture
) -> None:
    change(model := make_model("llama"))
    with caplog.at_level(logging.WARNING):
        assert fingerprint.of(model) == UNKNOWN
    assert "What fits it is not checked" in caplog.messages[0]


# --- once per file


@pytest.fixture
def folder(tmp_path: Path, empty_cache: Path) -> Path:
    """A tiny model on disk, with an empty cache folder."""
    return save_tiny(tmp_path / "model")


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Mock:
    monkeypatch.setattr(fingerprint, "of", counter := Mock(wraps=fingerprint.of))
    return counter


def loaded(folder: Path, dtype: str = "float32") -> str:
    model, _, files = hub.load_model(folder, dtype=dtype, device="cpu")
    return fingerprint.of_loaded(model, files.stamps)


def test_a_file_is_hashed_once_and_again_when_it_changes(folder: Path, hashed: Mock) -> None:
    first = loaded(folder)
    assert loaded(folder) == first
    assert hashed.call_count == 1
    assert loaded(folder, "bfloat16") == first
    assert hashed.call_count == 2  # another dtype may have other numbers
    moved(make_model("llama"), "model.layers.3.mlp.up_proj.weight").save_pretrained(folder)
    assert loaded(folder) != first
    os.utime(folder / "model.safetensors", ns=(0, 0))
    loaded(folder)
    assert hashed.call_count == 4


def test_a_file_that_changes_while_it_is_read_is_not_kept(folder: Path, hashed: Mock) -> None:
    model, _, files = hub.load_model(folder, dtype="float32", device="cpu")
    os.utime(folder / "model.safetensors", ns=(0, 0))
    for _ in range(2):
        fingerprint.of_loaded(model, files.stamps)
    assert hashed.call_count == 2
    assert not (cache_folder() / "fingerprints").exists()
    (folder / "adapter_config.json").write_text("{}")  # adds weights from another file
    assert fingerprint.of_folder(folder) == fingerprint.stamps([folder / "nowhere"]) == ()


def test_a_damaged_entry_is_made_again(folder: Path, hashed: Mock) -> None:
    first = loaded(folder)
    (entry,) = (cache_folder() / "fingerprints").iterdir()
    for count, content in enumerate((b"", b"\xff", first[:-1].encode()), start=2):
        entry.write_bytes(content)
        assert loaded(folder) == first == entry.read_text()
        assert hashed.call_count == count


def test_an_unwritable_cache_only_costs_time(folder: Path, hashed: Mock, empty_cache: Path) -> None:
    (empty_cache / "fingerprints").write_text("a file")
    assert loaded(folder) == loaded(folder)
    assert hashed.call_count == 2


def test_a_model_that_was_changed_after_loading_is_hashed(folder: Path) -> None:
    loaded(folder)  # the cache knows the file
    model, tokenizer, _ = hub.load_model(folder, dtype="float32", device="cpu")
    model.get_parameter("model.layers.0.mlp.up_proj.weight").data.mul_(2)
    speculator = wrap(model, tokenizer, heads="logit-lens")
    assert speculator.backbone.fingerprint == fingerprint.of(model) != loaded(folder)


def test_a_backbone_hashes_once_and_only_when_it_must(folder: Path, hashed: Mock) -> None:
    plain = load(folder, dtype="float32", device="cpu")
    hashed.assert_not_called()
    assert plain.backbone.fingerprint == plain.backbone.fingerprint
    assert hashed.call_count == 1
    second = load(folder, dtype="float32", device="cpu", heads="logit-lens")
    assert second.backbone.fingerprint == plain.backbone.fingerprint
    assert hashed.call_count == 2  # a late fingerprint is not cached: the model may have changed
    load(folder, dtype="float32", device="cpu", heads="logit-lens")
    assert hashed.call_count == 2


def test_checks_that_a_models_files_passed_are_made_once(
    folder: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = [(check, name) for name in ("check_conformance", "check_trees", "isolates_sequences")]
    checks.append((measure, "why_unpinned"))
    calls = [noted(monkeypatch, *one, lambda *_, **__: None) for one in checks]

    def texts(speculator: Speculator) -> list[list[int]]:
        options: Any = {"drafter": "ngram+successors", "max_new_tokens": 4}
        answers = speculator.generate_batch([[3, 4, 5], [6, 7]], **options)
        return [answer.token_ids for answer in answers]

    first = texts(load(folder, device="cpu"))
    entries = [*(empty_cache / "checked").glob("*")]  # empty without a compiler
    if entries:
        assert [*map(len, calls)] == [1] * 4
        assert texts(load(folder, device="cpu")) == first
        assert [*map(len, calls)] == [1] * 4
        entries[0].write_bytes(b"\xff trees")
    count = len(calls[0])
    assert texts(load(folder, device="cpu")) == first
    assert len(calls[0]) == count + 1
    os.utime(folder / "model.safetensors", (1, 1))
    load(folder, device="cpu")
    model, _, _ = hub.load_model(folder, device="cpu")
    wrap(model)
    assert len(calls[0]) == count + 3


def test_heads_without_a_fingerprint_to_compare_are_checked_by_sizes_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = wrapped("llama")
    train(make_heads("translator", base.unembedding, base_fingerprint="")).save(tmp_path)
    with caplog.at_level(logging.WARNING):
        wrap(base.model, heads=tmp_path)
    assert "is not known: one of them has no fingerprint" in caplog.text
    shallow = make_model("llama", num_hidden_layers=5)
    with pytest.raises(HeadsMismatch, match=r"\(96, 32, 6\), .* has \(96, 32, 5\)"):
        wrap(shallow, heads=tmp_path, label="shallow")


# --- a model that was changed after it was wrapped is refused at the next request


MLP, UP = "model.layers.3.mlp", "model.layers.3.mlp.up_proj.weight"
CHANGES: list[tuple[Callable[[Any], object], str]] = [
    (lambda m: m.to(torch.bfloat16), "embed_tokens.weight was cast from torch.float32 to torch.bf"),
    (lambda m: m.to(torch.float16).to(torch.float32), "weight was"),  # some keep their address
    (lambda m: m.to("meta"), "was"),
    (lambda m: mlp(m).up_proj.weight.detach().add_(0.01), f"{UP} was changed"),
    (lambda m: mlp(m).up_proj.weight.data.add_(0.01), f"{UP} was changed"),
    (lambda m: setattr(mlp(m).up_proj.weight, "data", torch.ones(64, 32)), f"{UP} was replaced"),
    (lambda m: _set(m, torch.ones(64, 32)), "was replaced"),
    (lambda m: m.model.rotary_emb.inv_freq.mul_(2), "model.rotary_emb.inv_freq was changed"),
    (lambda m: mlp(m).register_buffer("scale", torch.ones(1)), f"{MLP} has other weights"),
    (lambda m: setattr(mlp(m), "up_proj", nn.Linear(32, 64)), f"{MLP} has other modules"),
    (lambda m: mlp(m).register_forward_hook(lambda _, __, out: out * 2), f"{MLP} has other hooks"),
    (lambda m: setattr(mlp(m), "forward", torch.zeros_like), f"the forward of {MLP} was replaced"),
    (lambda m: setattr(m.lm_head, "__class__", Doubling), "lm_head is a Doubling, it was a Linear"),
    # Llama has none; Cohere's is read
    (lambda m: setattr(m.config, "logit_scale", 2.0), "model has logit_scale, which it had not"),
    (lambda m: m.config.rope_parameters.update(rope_theta=1.0), "rope_parameters of config of the"),
    (lambda m: mlp(m).adapters.append("second"), f"adapters of {MLP} was changed"),  # like PEFT's
]


@pytest.mark.parametrize("kind", ["default", "dynamic"])
def test_rotations_are_watched_except_for_dynamic_frequencies(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    model: Any = make_model("llama", rope_parameters=rope, max_position_embeddings=16)
    watch, rotary = ModelWatch(model), model.model.rotary_emb
    model(random_ids(40))  # long enough to change dynamic frequencies
    assert watch.change() is None
    rotary.attention_scaling = 1.5
    assert watch.change() == "attention_scaling of model.rotary_emb was changed"
    rotary.attention_scaling = 1.0
    rotary.register_forward_hook(lambda _, __, out: out)
    assert watch.change() == "model.rotary_emb has other hooks"


@pytest.mark.parametrize(("change", "found"), CHANGES)
def test_each_change_is_named(change: Callable[[Any], object], found: str) -> None:
    model = make_model("llama", tie_word_embeddings=False)
    mlp(model).adapters = ["first"]
    watch = ModelWatch(model)
    assert watch.change() is None
    change(model)
    assert found in str(watch.change())


def other(value: Any) -> Any:
    """Another value of the same type, or else a plain object."""
    if isinstance(value, bool):
        return not value
    if value is None or isinstance(value, int | float):
        return 1 + (value or 0)
    if isinstance(value, dict):
        return {**value, "other": 1}
    return type(value)([*value, 1]) if isinstance(value, list | tuple) else object()


HELD = vars(nn.Module()).keys() - {"training"} | {"_heterogeneity_spec"}
"""Attributes that hold modules, weights and hooks, and one that every config needs."""


@pytest.mark.parametrize("family", [*FAMILIES, *BREADTH])
def test_an_attribute_that_decides_a_logit_is_watched(family: str) -> None:
    model: Any = make_model(family, num_hidden_layers=2)
    watch, ids = ModelWatch(model), random_ids(12)
    expected = model(ids)[0].detach()
    noticed = 0
    places = [(path or "the model", vars(module)) for path, module in model.named_modules()]
    for path, fields in [*places, ("config of the model", vars(model.config))]:
        for name in fields.keys() - HELD:
            value, fields[name] = fields[name], other(fields[name])
            message = watch.change()
            if message is None:
                assert torch.equal(model(ids)[0], expected), f"{name} of {path}"
            else:
                assert name in message
                assert path in message
                noticed += 1
            fields[name] = value
    assert watch.change() is None
    assert noticed > 80


@given(
    st.integers(1, 400),
    st.integers(1, 480),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([Tensor.neg_, lambda weight: weight.view(torch.uint8).numpy().fill(3)]),
)
def test_a_whole_weight_changed_past_the_version_counter_is_named(
    rows: int, width: int, dtype: torch.dtype, write: Callable[[Tensor], object]
) -> None:
    model: Any = nn.ModuleList([nn.Linear(width, rows, dtype=dtype) for _ in range(2)])
    watch = ModelWatch(model)
    assert watch.change() is None
    write(model[1].weight.data)
    assert watch.change() == "1.weight was changed"


@pytest.fixture(scope="module")
def speculator() -> Speculator:
    return wrap(make_model("llama"), heads="logit-lens")


def test_harmless_changes_are_ignored(speculator: Speculator) -> None:
    model: Any = speculator.model
    model.train()
    speculator.generate(random_ids(5), max_new_tokens=3)
    model.eval()
    model(random_ids(5), output_hidden_states=True)  # leaves inactive hooks
    model.generate(random_ids(5), max_new_tokens=3)
    model.requires_grad_(requires_grad=False)
    with captured_outputs(model.model.layers):
        speculator.generate(random_ids(5), max_new_tokens=3)
    pruned: Any = make_model("llama")
    l1_unstructured(pruned.lm_head, "weight", 0.4)
    pruned.lm_head._parameters = UserDict(pruned.lm_head._parameters)  # as compressed-tensors does
    watch = ModelWatch(pruned)
    pruned(random_ids(5))
    assert watch.change() is None
    pruned.lm_head.weight_orig.data += 1
    assert watch.change() == "lm_head.weight_orig was changed"


def test_every_entry_point_checks(speculator: Speculator) -> None:
    session = speculator.session()
    prompt, model = random_ids(5), speculator.model
    with model.lm_head.register_forward_hook(lambda *_: None):
        for run in (
            lambda: speculator.generate(prompt, max_new_tokens=2),
            lambda: speculator.generate_batch(prompt, max_new_tokens=2),
            lambda: speculator.stream(prompt, max_new_tokens=2),
            lambda: session.generate(prompt, max_new_tokens=2),
            lambda: model.generate(prompt, max_new_tokens=2, custom_generate=speculator.hf()),  # type: ignore[operator]  # typed as Tensor | Module upstream
        ):
            with pytest.raises(
                ModelChanged, match=r"lm_head has other hooks\. Wrap the model again"
            ):
                run()
    speculator.generate(prompt, max_new_tokens=2)


def test_a_changed_draft_model_is_refused() -> None:
    small: Any = make_model("llama", num_hidden_layers=2)
    speculator = wrap(make_model("llama"), draft_model=small)
    speculator.generate(random_ids(5), max_new_tokens=2)
    small.lm_head.weight.data += 1
    with pytest.raises(ModelChanged, match=r"the draft model has changed .*weight was changed"):
        speculator.generate(random_ids(5), max_new_tokens=2)


def test_weights_of_inference_mode_have_no_version_counter_but_are_watched() -> None:
    with torch.inference_mode():
        model: Any = make_model("llama")
        watch = ModelWatch(model)
        assert watch.change() is None
        model.lm_head.weight.mul_(2)
    assert watch.change() is not None
