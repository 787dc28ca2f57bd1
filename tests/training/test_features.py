"""Features are the model's own states; a cache returns the computed features or a clear error."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import pytest
import torch
from transformers import PreTrainedModel

from selfspec import files
from selfspec.api.speculator import load, wrap
from selfspec.errors import CannotWrite, InvalidData, InvalidOption
from selfspec.heads.heads import HEAD_TYPES, DeepFusedHead
from selfspec.model.backbone import Backbone
from selfspec.model.check import captured_outputs
from selfspec.training import features as store
from selfspec.training.options import FitOptions
from selfspec.training.text import Conversation
from tests.models import make_model, random_ids, wrapped
from tests.talks import Talks, save_tiny, talk_lines
from training import draft_model
from training.draft_model import agreement, cut, fit
from training.variants import VARIANTS, chains, fit_variant

# --- batches and their features

LAYERS = (0, 2, 4)
WHOLE = store.FeatureSpec(LAYERS, deep=True, top_k=5)


def test_batches_hold_every_conversation_once_within_the_limit(talks: Talks) -> None:
    plan = store.plan_batches(talks, 64)
    assert sorted(talk.ids for group in plan for talk in group) == sorted(t.ids for t in talks)
    assert all(store.pad_batch(group).ids.numel() <= 64 for group in plan)
    assert len(plan) < len(talks)


def test_features_are_the_models_states_at_answers(backbone: Backbone, talks: Talks) -> None:
    batch = store.pad_batch(talks)
    features = store.features(backbone, WHOLE, batch)
    with torch.no_grad():
        output = backbone.model(batch.ids, output_hidden_states=True)
    for layer in LAYERS:
        assert torch.equal(features.hidden[layer], output.hidden_states[layer][batch.predicts])
    expected = output.logits[batch.predicts].log_softmax(-1).topk(5)
    assert torch.equal(features.top_ids.long(), expected.indices)
    # float16 near -5; largest difference measured: 0.0019
    torch.testing.assert_close(features.top_log_probs.float(), expected.values, rtol=0, atol=4e-3)
    assert features.following.tolist() == [token for talk in talks for token in talk.answer_ids]
    # deep states are those of one position earlier
    rows, columns = batch.predicts.nonzero(as_tuple=True)
    assert features.deep is not None
    assert torch.equal(features.deep, output.hidden_states[-1][rows, columns - 1])
    # the announced size is the real one
    size = WHOLE.bytes_per_token(backbone.hidden_size, backbone.dtype.itemsize)
    assert sum(tensor.nbytes for tensor in features.tensors().values()) == len(features) * size


def test_a_text_that_begins_with_an_answer_has_no_deep_state_at_first(backbone: Backbone) -> None:
    rows = store.features(backbone, WHOLE, store.pad_batch([Conversation((1, 2, 3), ((1, 3),))]))
    assert rows.deep is not None
    assert rows.deep.any(-1).tolist() == [False, True]


def test_rows_continue_only_within_an_answer(backbone: Backbone) -> None:
    talks = [
        Conversation((1, 2, 3, 4, 5, 6, 7), ((2, 4), (5, 7))),
        Conversation((1, 2, 3), ((1, 3),)),
    ]
    features = store.features(backbone, store.FeatureSpec((2,)), store.pad_batch(talks))
    assert features.following.tolist() == [3, 4, 6, 7, 2, 3]
    assert features.continues.tolist() == [False, True, False, True, False, True]
    spec = store.FeatureSpec((2,), everywhere=True)
    everywhere = store.features(backbone, spec, store.pad_batch(talks))
    assert everywhere.following.tolist() == [2, 3, 4, 5, 6, 7, 2, 3]
    assert everywhere.answers.tolist() == [False, True, True, False, True, True, True, True]
    assert everywhere.continues.tolist() == [False, *[True] * 5, False, True]
    assert torch.equal(everywhere.hidden[2][everywhere.answers], features.hidden[2])


# --- sources

SPEC = store.FeatureSpec((2, 4), deep=True, top_k=4, everywhere=True)


@pytest.fixture
def stream(backbone: Backbone, talks: Talks) -> store.StreamSource:
    return store.StreamSource(backbone, SPEC, talks, 64)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_SHARD_BYTES", 40_000)


def manifest_of(source: store.StreamSource, **changes: Any) -> store.Manifest:
    return replace(store.Manifest.of(source, base_model="tiny", data="talks"), **changes)


def write(folder: str | Path, source: store.StreamSource, **options: Any) -> None:
    store.write(folder, source, manifest_of(source), **options)


def assert_same(one: store.Features, other: store.Features) -> None:
    assert one.tensors().keys() == other.tensors().keys()
    assert all(torch.equal(t, other.tensors()[name]) for name, t in one.tensors().items())


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def test_kept_features_are_computed_once(
    backbone: Backbone, talks: Talks, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = store.StreamSource(backbone, SPEC, talks, 64, keep=True)
    first = source.batch(1)
    monkeypatch.setattr(Backbone, "run", None)
    assert source.batch(1) is first


def test_the_digest_covers_the_text_and_its_batches(
    backbone: Backbone, talks: Talks, stream: store.StreamSource
) -> None:
    assert store.StreamSource(backbone, store.FeatureSpec((3,)), talks, 64).digest == stream.digest
    assert store.StreamSource(backbone, SPEC, talks[:-1], 64).digest != stream.digest
    assert store.StreamSource(backbone, SPEC, talks, 128).digest != stream.digest


def test_every_twentieth_batch_is_held_out(backbone: Backbone, talks: Talks) -> None:
    source = store.StreamSource(backbone, SPEC, talks * 4, 32)
    train, held_out = store.split(source)
    assert sorted([*train.indices, *held_out.indices]) == list(range(len(source.sizes)))
    assert len(held_out.indices) == pytest.approx(len(source.sizes) / 20, abs=1)
    assert train.positions + held_out.positions == sum(source.sizes)
    with pytest.raises(InvalidData, match="one batch is too little"):
        store.split(store.StreamSource(backbone, SPEC, talks[:1], 64))


def test_a_part_of_a_source_is_large_enough_and_mixed(backbone: Backbone, talks: Talks) -> None:
    selection = store.Selection(store.StreamSource(backbone, SPEC, talks * 4, 32))
    part = selection.limited(200)
    assert 200 <= part.answers < 200 + max(selection.source.answers)
    assert list(part.indices) == sorted(part.indices)
    assert part.indices[-1] > len(selection.indices) // 2
    assert selection.limited(10**9).indices == list(selection.indices)
    assert selection.conversations == 48 > part.conversations


@pytest.mark.usefixtures("small_shards")
def test_a_cache_returns_identical_batches(
    backbone: Backbone, stream: store.StreamSource, tmp_path: Path
) -> None:
    entries: list[tuple[int, bool]] = []
    write(tmp_path / "features", stream, progress=lambda *entry: entries.append(entry))
    cache = store.CacheSource(tmp_path / "features", backbone)
    assert sum(stream.answers) == sum(12 + seed for seed in range(12))
    assert sum(stream.sizes) == sum(16 + seed for seed in range(12))
    assert len(shards(tmp_path / "features")) > 2
    assert (cache.spec, cache.sizes, cache.digest) == (SPEC, stream.sizes, stream.digest)
    hashes = [files.sha256(path) for path in shards(tmp_path / "features")]
    assert cache.manifest == replace(manifest_of(stream), sha256=hashes)
    assert sum(cache.conversations) == 12
    for index in range(len(stream.sizes)):
        assert_same(cache.batch(index), stream.batch(index))
    assert cache.token_counts() == stream.token_counts()
    assert entries == [(size, True) for size in stream.sizes]
    # each of several processes gets whole batches, and texts of the batches left over
    for source in (store.Selection(cache), store.Selection(stream)):
        parts = [[*source.batches(number, 4)] for number in range(4)]
        assert len(source.indices) == 6
        assert [*map(len, parts)] == [3, 2, 1, 1]
        together, alone = (
            torch.cat([batch.hidden[4] for batch in batches]).sort(0).values
            for batches in (itertools.chain(*parts), source.batches())
        )
        # padding changes the last bits; largest difference measured: 1.5e-5
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-4)


def test_processes_share_all_answers_of_a_text(backbone: Backbone, tmp_path: Path) -> None:
    talk = Conversation(tuple(range(1, 13)), ((2, 4), (6, 8), (10, 12)))
    write(tmp_path, store.StreamSource(backbone, store.FeatureSpec((2,)), [talk], 64))
    cache = store.Selection(store.CacheSource(tmp_path, backbone))
    batches = [batch for number in range(2) for batch in cache.batches(number, 2)]
    tokens = [token for batch in batches for token in batch.following.tolist()]
    assert sorted(tokens) == [3, 4, 7, 8, 11, 12]


@pytest.mark.usefixtures("small_shards")
def test_bad_or_missing_shards_are_recomputed(stream: store.StreamSource, tmp_path: Path) -> None:
    write(tmp_path, stream)
    contents = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    lost, victim, *kept = shards(tmp_path)
    victim.write_bytes(contents[victim.name][:-1] + bytes([contents[victim.name][-1] ^ 1]))
    with pytest.raises(InvalidData, match=f"{victim.name} is damaged"):
        store.CacheSource(tmp_path, stream.backbone)
    write(tmp_path, stream)
    assert victim.read_bytes() == contents[victim.name]
    store.CacheSource(tmp_path, stream.backbone)
    lost.unlink()
    with pytest.raises(InvalidData, match=f"{lost.name} is damaged"):
        store.CacheSource(tmp_path, stream.backbone)
    hashes = ["", *(files.sha256(path) for path in shards(tmp_path))]
    manifest_of(stream, sha256=hashes).write(tmp_path)  # as after a killed run
    with pytest.raises(InvalidData, match="is unfinished"):
        store.CacheSource(tmp_path, stream.backbone)
    os.truncate(victim, len(contents[victim.name]) - 1)
    entries: list[tuple[int, bool]] = []
    write(tmp_path, stream, progress=lambda *entry: entries.append(entry))
    assert sum(not computed for _, computed in entries) == len(kept) > 0  # a whole shard at a time
    assert sum(positions for positions, _ in entries) == sum(stream.sizes)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == contents


@pytest.mark.usefixtures("small_shards")
def test_features_of_a_url_are_those_of_a_folder(
    backbone: Backbone, stream: store.StreamSource, tmp_path: Path
) -> None:
    """The URL points to memory of this process; a killed run resumes where it stopped."""
    url, entries = f"memory://{tmp_path.name}", list[tuple[int, bool]]()
    write(tmp_path / "features", stream)

    def killed(positions: int, computed: bool) -> None:
        entries.append((positions, computed))
        if len(entries) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.write(url, stream, manifest_of(stream), killed)
    with pytest.raises(InvalidData, match=f"{url} is unfinished"):
        store.CacheSource(url, backbone)
    entries.clear()
    store.write(url, stream, manifest_of(stream), lambda *entry: entries.append(entry))
    assert {computed for _, computed in entries} == {True, False}
    memory = fsspec.filesystem("memory")
    for path in (tmp_path / "features").iterdir():
        assert memory.cat_file(f"/{tmp_path.name}/{path.name}") == path.read_bytes()
    cache = store.CacheSource(url, backbone)
    for index in range(len(stream.sizes)):
        assert_same(cache.batch(index), stream.batch(index))
    memory.pipe_file(f"/{tmp_path.name}/{path.name}", b"damaged")
    with pytest.raises(InvalidData, match=f"{url}/{path.name} is damaged.* Remove it there"):
        store.CacheSource(url, backbone)


def test_unusable_urls_are_named(
    backbone: Backbone, stream: store.StreamSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidOption, match="cannot open nothing://a: Protocol not known"):
        store.CacheSource("nothing://a", backbone)
    with pytest.raises(InvalidData, match="memory://a/b is no feature cache"):
        store.CacheSource("memory://a/b", backbone)
    full = Mock(side_effect=PermissionError("the bucket is another's\nand more"))
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "put_file", full)
    with pytest.raises(CannotWrite, match=r"memory://a/b: the bucket is another's$"):
        write("memory://a/b", stream)


def test_a_folder_of_other_features_is_refused(
    backbone: Backbone, talks: Talks, stream: store.StreamSource, tmp_path: Path
) -> None:
    write(tmp_path, stream)
    changed = store.StreamSource(backbone, SPEC, talks[1:], 64)
    for source, change, reason in (
        (stream, {"base_fingerprint": "def"}, "begun with base_fingerprint"),
        (stream, {"dtype": "bfloat16"}, "dtype float32, not bfloat16"),
        (changed, {}, "another digest"),
    ):
        with pytest.raises(InvalidOption, match=reason):
            store.write(tmp_path, source, manifest_of(source, **change))
    shutil.rmtree(tmp_path)
    store.write(tmp_path, stream, manifest_of(stream, base_fingerprint="abc"))
    with pytest.raises(InvalidData, match=r"features of tiny \(abc\)"):
        store.CacheSource(tmp_path, backbone)


@pytest.mark.parametrize("name", [n for n in VARIANTS if "vocabulary" not in n])
def test_variants_of_heads_are_fitted_to_a_cache(name: str, talks: Talks, tmp_path: Path) -> None:
    backbone = wrapped("llama", torch.bfloat16, num_hidden_layers=8)
    states = (1, 4, 6, 7)
    spec = store.FeatureSpec((0, 2, 4, 5), deep=True, top_k=1, everywhere=True, states=states)
    write(tmp_path, store.StreamSource(backbone, spec, talks, 32))
    options = FitOptions(exit_layers=(0,), answer_share=1.0, draft_vocab_size=60, epochs=1)
    result, held_out = fit_variant(
        name, tmp_path, backbone, options, 1000, base_model="tiny", special_ids=()
    )
    shares = chains(result.heads, held_out)
    assert shares[0] == pytest.approx(result.metrics["layers"]["0"]["agreement"])
    assert 1.0 >= shares[0] >= shares[1] >= shares[2] >= 0.0
    assert HEAD_TYPES["deep-fused"] is DeepFusedHead


# --- draft models: the first layers of larger models, fitted


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.inference_mode()
def test_the_first_layers_are_kept_bit_for_bit(family: str) -> None:
    large = make_model(family)
    ids = random_ids(9)
    small: Any = cut(large, 2)
    expected = large(ids, output_hidden_states=True).hidden_states[2]
    _, last = small.base_model.layers
    with captured_outputs([last]) as outputs:
        small(ids)
    assert torch.equal(outputs[last], expected)
    assert wrap(large, draft_model=small).options.drafter == "draft-model"


def test_a_cut_that_leaves_no_smaller_model_is_refused(model: PreTrainedModel) -> None:
    for layers in (0, 6):
        with pytest.raises(InvalidOption, match=rf"layers is {layers}, expected 1\.\.5"):
            cut(model, layers)


def test_a_fit_raises_agreement_and_changes_nothing_else(
    model: PreTrainedModel, talks: Talks
) -> None:
    original = {name: value.clone() for name, value in model.state_dict().items()}
    small = cut(model, 2)
    at_first = agreement(small, talks, 64)
    batches = itertools.cycle(store.plan_batches(talks, 64))
    fit(small, batches, steps=60, learning_rate=1e-2, progress=lambda *_: None)
    # 12 texts learned by heart: 21 % before, 100 % after when measured
    assert agreement(small, talks, 64) > at_first + 0.4
    embedding: Any = small.get_input_embeddings()
    assert torch.equal(embedding.weight, original["model.embed_tokens.weight"])
    assert all(torch.equal(value, original[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in small.parameters())
    assert not small.training


def test_the_script_writes_a_draft_model(tmp_path: Path, model: PreTrainedModel) -> None:
    save_tiny(tmp_path / "whole")
    data = tmp_path / "talks.jsonl"
    data.write_text(talk_lines(model))
    folder = tmp_path / "small"
    options: dict[str, Any] = {"data": data, "validation": data, "model": str(tmp_path / "whole")}
    draft_model.main(output=folder, **options, steps=2, batch_tokens=64, validation_tokens=50)
    record = json.loads((folder / "fit.json").read_text())
    assert record["options"]["layers"] == 2
    assert 0.0 <= record["agreement_before"] <= 1.0
    speculator = load(tmp_path / "whole", draft_model=folder)
    assert speculator.generate("a b", raw=True, max_new_tokens=8).stats.drafted > 0
    with pytest.raises(InvalidOption, match="is there already"):
        draft_model.main(output=folder, **options)
