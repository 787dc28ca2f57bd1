"""Sources of features number their batches alike; a cache gives back what was computed."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from selfspec.errors import InvalidData, InvalidOption, SelfspecError
from selfspec.model.backbone import Backbone
from selfspec.training import features as store
from selfspec.training.features import CacheSource, Features, FeatureSpec, Manifest, StreamSource
from selfspec.training.text import Conversation

SPEC = FeatureSpec((2, 4), deep=True, top_k=4, everywhere=True)


@pytest.fixture
def stream(backbone: Backbone, talks: list[Conversation]) -> StreamSource:
    return StreamSource(backbone, SPEC, talks, 64)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_SHARD_BYTES", 40_000)


def manifest_of(source: StreamSource, **changes: str) -> Manifest:
    names = ("base_model", "base_fingerprint", "dtype", "data")
    known = dict(
        zip(names, ("tiny", source._backbone.fingerprint, "float32", "talks"), strict=True)
    )
    return Manifest.of(source, known | changes, SPEC.bytes_per_token(32, 4))


def write(folder: Path, source: StreamSource, **options: Any) -> None:
    store.write(folder, source, manifest_of(source), **options)


def assert_same(one: Features, other: Features) -> None:
    assert one.tensors().keys() == other.tensors().keys()
    assert all(torch.equal(t, other.tensors()[name]) for name, t in one.tensors().items())


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def test_batches_hold_every_conversation_once_and_fit(stream: StreamSource) -> None:
    assert len(stream.sizes) > 3
    assert [len(stream.batch(i)) for i in range(len(stream.sizes))] == stream.sizes
    assert sum(stream.answers) == sum(12 + seed for seed in range(12))
    assert sum(stream.sizes) == sum(16 + seed for seed in range(12))


def test_kept_features_are_computed_once(
    backbone: Backbone, talks: list[Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = StreamSource(backbone, SPEC, talks, 64, keep=True)
    first = source.batch(1)
    monkeypatch.setattr(Backbone, "run", None)
    assert source.batch(1) is first


def test_the_digest_is_that_of_the_text_and_its_batches(
    backbone: Backbone, talks: list[Conversation], stream: StreamSource
) -> None:
    assert StreamSource(backbone, FeatureSpec((3,)), talks, 64).digest == stream.digest
    assert StreamSource(backbone, SPEC, talks[:-1], 64).digest != stream.digest
    assert StreamSource(backbone, SPEC, talks, 128).digest != stream.digest


def test_every_twentieth_batch_is_held_out(backbone: Backbone, talks: list[Conversation]) -> None:
    source = StreamSource(backbone, SPEC, talks * 4, 32)
    train, held_out = store.split(source)
    assert sorted([*train.indices, *held_out.indices]) == list(range(len(source.sizes)))
    assert len(held_out.indices) == pytest.approx(len(source.sizes) / 20, abs=1)
    assert train.positions + held_out.positions == sum(source.sizes)
    with pytest.raises(InvalidData, match="one batch is too little"):
        store.split(StreamSource(backbone, SPEC, talks[:1], 64))


def test_a_part_of_a_source_is_large_enough_and_not_the_shortest_conversations(
    backbone: Backbone, talks: list[Conversation]
) -> None:
    every = store.whole(StreamSource(backbone, SPEC, talks * 4, 32))
    part = every.limited(200)
    assert 200 <= part.answers < 200 + max(every.source.answers)
    assert list(part.indices) == sorted(part.indices)
    assert part.indices[-1] > len(every.indices) // 2
    assert every.limited(10**9).indices == list(every.indices)
    assert every.conversations == 48 > part.conversations


@pytest.mark.usefixtures("small_shards")
def test_a_cache_gives_back_the_very_batches(
    backbone: Backbone, stream: StreamSource, tmp_path: Path
) -> None:
    seen: list[tuple[int, bool]] = []
    write(tmp_path / "features", stream, progress=lambda *entry: seen.append(entry))
    found = CacheSource(tmp_path / "features", backbone)
    assert len(shards(tmp_path / "features")) > 2
    assert (found.spec, found.sizes, found.digest) == (SPEC, stream.sizes, stream.digest)
    hashes = [store.sha256(path) for path in shards(tmp_path / "features")]
    assert found.manifest == replace(manifest_of(stream), sha256=hashes)
    assert sum(found.conversations) == 12
    for index in range(len(stream.sizes)):
        assert_same(found.batch(index), stream.batch(index))
    assert found.token_counts() == stream.token_counts()
    assert seen == [(size, True) for size in stream.sizes]


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_stopped_run_goes_on_at_the_next_shard(
    after: int, stream: StreamSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "whole", stream)
    computed: list[int] = []
    batch = StreamSource.batch

    def stop_or_compute(self: StreamSource, index: int) -> Features:
        if len(computed) == after:
            raise KeyboardInterrupt
        computed.append(index)
        return batch(self, index)

    monkeypatch.setattr(StreamSource, "batch", stop_or_compute)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "stopped", stream)
    with pytest.raises(InvalidData, match="is unfinished"):
        CacheSource(tmp_path / "stopped", stream._backbone)
    kept = len(shards(tmp_path / "stopped"))
    monkeypatch.setattr(StreamSource, "batch", batch)
    seen: list[tuple[int, bool]] = []
    write(tmp_path / "stopped", stream, progress=lambda *entry: seen.append(entry))
    assert sum(not computed for _, computed in seen) == kept  # a whole shard at a time
    assert sum(positions for positions, _ in seen) == sum(stream.sizes)
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert {path.name for path in (tmp_path / "stopped").iterdir()} == names
    assert all(
        (tmp_path / "whole" / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes()
        for name in names
    )
    assert (kept > 0) == (after == 4)


@pytest.mark.usefixtures("small_shards")
def test_a_damaged_shard_is_named_and_rebuilt(stream: StreamSource, tmp_path: Path) -> None:
    write(tmp_path, stream)
    victim = shards(tmp_path)[1]
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(InvalidData, match=f"{victim.name} is damaged"):
        CacheSource(tmp_path, stream._backbone)
    write(tmp_path, stream)
    assert victim.read_bytes() == whole
    CacheSource(tmp_path, stream._backbone)
    manifest_of(stream).write(tmp_path)  # as a killed run leaves it
    os.truncate(victim, len(whole) - 1)
    write(tmp_path, stream)
    assert victim.read_bytes() == whole


def test_a_full_disk_is_reported_and_leaves_nothing_half_written(
    stream: StreamSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: dict[str, Any], path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(store, "save_file", full)
        with pytest.raises(SelfspecError, match=r"shard-00000.safetensors: .*No space left"):
            write(tmp_path, stream)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    write(tmp_path, stream)
    CacheSource(tmp_path, stream._backbone)


def test_a_folder_of_other_features_is_refused(
    backbone: Backbone, talks: list[Conversation], stream: StreamSource, tmp_path: Path
) -> None:
    write(tmp_path, stream)
    changed = StreamSource(backbone, SPEC, talks[1:], 64)
    for source, change, reason in (
        (stream, {"base_fingerprint": "def"}, "begun with base_fingerprint"),
        (stream, {"dtype": "bfloat16"}, "dtype float32, not bfloat16"),
        (changed, {}, "another digest"),
    ):
        with pytest.raises(InvalidOption, match=reason):
            store.write(tmp_path, source, manifest_of(source, **change))


def test_a_cache_of_another_model_is_refused(stream: StreamSource, tmp_path: Path) -> None:
    store.write(tmp_path, stream, manifest_of(stream, base_fingerprint="abc"))
    with pytest.raises(InvalidData, match=r"features of tiny \(abc\)"):
        CacheSource(tmp_path, stream._backbone)


@pytest.mark.usefixtures("small_shards")
def test_several_processes_write_what_one_would(stream: StreamSource, tmp_path: Path) -> None:
    write(tmp_path / "alone", stream)
    for rank in (1, 0):
        part = SimpleNamespace(process_index=rank, num_processes=2, is_main_process=rank == 0)
        part.wait_for_everyone = lambda: None
        if rank:  # the first has written what is known before any work
            (tmp_path / "shared").mkdir()
            manifest_of(stream).write(tmp_path / "shared")
        write(tmp_path / "shared", stream, processes=part)
    for path in (tmp_path / "alone").iterdir():
        assert (tmp_path / "shared" / path.name).read_bytes() == path.read_bytes()
