"""What training reads again, from anywhere: features and checkpoints.

Each damaged one is one line that names the file; none is a traceback, and none is changed.
"""

# mypy: disable-error-code="var-annotated"
# mixed values in a row, for which mypy finds no common type

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from selfspec.errors import (
    InvalidData,
)
from selfspec.model.backbone import Backbone
from selfspec.training import checkpoint
from selfspec.training import features as store
from selfspec.training.features import FeatureSpec, StreamSource
from selfspec.training.fit import fit
from selfspec.training.text import Conversation
from tests.bad_input import NAN, Change, one_line
from tests.models import VOCAB_SIZE
from tests.talks import make_talks
from tests.training.test_fit import make_job, stop_after

# --- features -------------------------------------------------------------------------------------

SPEC = FeatureSpec((2, 4), deep=True, top_k=4)


@pytest.fixture(scope="module")
def talks(backbone: Backbone) -> list[Conversation]:
    return make_talks(backbone.model)


@pytest.fixture
def features(tmp_path: Path, backbone: Backbone, talks: list[Conversation]) -> Path:
    source = StreamSource(backbone, SPEC, talks[:3], 64)
    base = {"base_model": "tiny", "base_fingerprint": "abc", "dtype": "float32", "data": "talks"}
    store.write(tmp_path / "features", source, store.identity(source, base, 800))
    return tmp_path / "features"


def read_features(folder: Path, backbone: Backbone) -> None:
    source = store.CacheSource(folder, "abc", (backbone.hidden_size, backbone.vocab_size))
    source.check()
    for index in range(len(source.sizes)):
        source.batch(index)
    source.token_counts()


MANIFEST_VALUES: list[tuple[str, Any]] = [
    *(("format_version", value) for value in (1, 0, "2", True, None, [])),
    *(("base_fingerprint", value) for value in (None, 3, ["abc"], "x\ny")),
    *(("spec", value) for value in (None, [], {}, {"layers": [2, 4]}, {"layers": [4, 2]})),
    ("spec", {"layers": ["2"], "deep": True, "top_k": 4}),
    ("spec", {"layers": [2, 4], "deep": 1, "top_k": 4}),
    ("spec", {"layers": [2, 4], "deep": False, "top_k": 4}),
    ("spec", {"layers": [2, 4], "deep": True, "top_k": 0}),
    ("spec", {"layers": [2, 4], "deep": True, "top_k": -1}),
    ("spec", {"layers": [2], "deep": True, "top_k": 4}),
    ("spec", {"layers": [2, 4], "deep": True, "top_k": 4, "more": 1}),
    *(
        ("shards", value)
        for value in (None, [], 3, [[]], [["0"]], [[0, 0]], [[1]], [[-1]], [[0.0]])
    ),
    *(("shards", value) for value in ([[10**9]], {"0": 1}, [[0], [1], [2], [3], [4], [5]])),
    *(("conversations", value) for value in (None, [], [-1], ["1"], 3)),
    *(("sha256", value) for value in (None, [], [3], "abc", ["0" * 64], {})),
    *(("digest", value) for value in (None, 3)),
]


@pytest.mark.parametrize(("name", "value"), MANIFEST_VALUES, ids=lambda value: repr(value)[:30])
def test_a_manifest_with_a_strange_value(
    features: Path, backbone: Backbone, name: str, value: Any
) -> None:
    path = features / store.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(InvalidData) as caught:
        read_features(features, backbone)
    one_line(caught, features)


def shard(name: str, make: Callable[[Tensor], Tensor] | None) -> Change:
    """A shard with one tensor changed, and a manifest to match."""

    def apply(folder: Path) -> None:
        path = folder / "shard-00000.safetensors"
        tensors = load_file(path)
        tensor = tensors.pop(f"0.{name}")
        if make is not None:
            tensors[f"0.{name}"] = make(tensor).contiguous()
        save_file(tensors, path)
        manifest = json.loads((folder / store.MANIFEST).read_text())
        manifest["sha256"] = [store.sha256(path)]
        (folder / store.MANIFEST).write_text(json.dumps(manifest))

    return apply


SHARDS: dict[str, Change] = {
    "gone": lambda folder: (folder / "shard-00000.safetensors").unlink(),
    "half": lambda folder: os.truncate(folder / "shard-00000.safetensors", 300),
    "no following": shard("following", None),
    "no hidden": shard("hidden.2", None),
    "no deep": shard("deep", None),
    "no top": shard("top_ids", None),
    "following 2-D": shard("following", lambda t: t[None]),
    "following of floats": shard("following", lambda t: t.float()),
    "following too high": shard("following", lambda t: t + VOCAB_SIZE),
    "following below 0": shard("following", lambda t: t - VOCAB_SIZE),
    "following longer": shard("following", lambda t: torch.cat([t, t])),
    "top ids too high": shard("top_ids", lambda t: t + VOCAB_SIZE),
    "top ids of another type": shard("top_ids", lambda t: t.long()),
    "top log-probs nan": shard("top_log_probs", lambda t: t * NAN),
    "continues of numbers": shard("continues", lambda t: t.int()),
    "hidden nan": shard("hidden.4", lambda t: t * NAN),
    "hidden narrower": shard("hidden.4", lambda t: t[:, :-1]),
    "hidden of whole numbers": shard("hidden.4", lambda t: t.int()),
    "deep of another length": shard("deep", lambda t: t[:-1]),
}


@pytest.mark.parametrize("damage", SHARDS)
def test_a_strange_shard(features: Path, backbone: Backbone, damage: str) -> None:
    SHARDS[damage](features)
    with pytest.raises(InvalidData, match=r"shard-00000\.safetensors is damaged") as caught:
        read_features(features, backbone)
    one_line(caught, features)


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.fixture
def begun(tmp_path: Path, backbone: Backbone, talks: list[Conversation]) -> Path:
    """A fit killed in its second epoch."""
    with pytest.raises(KeyboardInterrupt):
        fit(make_job(backbone, talks, workplace=tmp_path), stop_after(5))
    return tmp_path / checkpoint.FILE


def course(**values: Any) -> Callable[[dict[str, Tensor], Any], Any]:
    return lambda tensors, record: record["course"].update(values)


CHECKPOINTS: dict[str, Callable[[dict[str, Tensor], Any], Any]] = {
    "no job": lambda tensors, record: record.pop("job"),
    "job of a list": lambda tensors, record: record.update(job=[]),
    "no course": lambda tensors, record: record.pop("course"),
    "course of a list": lambda tensors, record: record.update(course=[]),
    "steps of text": course(step="4"),
    "steps below 0": course(step=-4),
    "steps of nan": course(step=NAN),
    "steps of truth": course(step=True),
    "too many steps": course(step=10**12),
    "sums of a list": course(sums=[]),
    "sums of other layers": course(sums={"3": 0.0}),
    "sums of nan": course(sums={"2": NAN, "4": 0.0}),
    "sums of text": course(sums={"2": "a", "4": "b"}),
    "entries of numbers": course(entries=[3]),
    "entries of none": course(entries=[]),
    "entries of a dict": course(entries={}),
    "no best": course(best={}),
    "best of text": course(best={"2": "a", "4": "b"}),
    "positions of text": course(positions="7"),
    "no positions": course(positions=0),
    "something more": course(more=1),
    "a tensor less": lambda tensors, record: tensors.pop("heads.by_layer.2.norm.weight"),
    "a tensor more": lambda tensors, record: tensors.update(more=torch.zeros(2)),
    "another shape": lambda tensors, record: tensors.update(
        {"heads.by_layer.2.norm.weight": torch.zeros(31)}
    ),
    "one number for all": lambda tensors, record: tensors.update(
        {"heads.by_layer.2.norm.weight": torch.zeros(1)}
    ),
    "nan": lambda tensors, record: tensors.update(
        {"heads.by_layer.2.norm.weight": torch.full((32,), NAN)}
    ),
    "moments of whole numbers": lambda tensors, record: tensors.update(
        {"exp_avg.by_layer.2.norm.weight": torch.zeros(32, dtype=torch.int32)}
    ),
}


@pytest.mark.parametrize("damage", CHECKPOINTS)
def test_a_strange_checkpoint(
    begun: Path, backbone: Backbone, talks: list[Conversation], damage: str
) -> None:
    found = checkpoint.load(begun)
    assert found is not None
    tensors, record = found
    CHECKPOINTS[damage](tensors, record)
    checkpoint.save(begun, tensors, record)
    before = begun.read_bytes()
    with pytest.raises(InvalidData, match="is no checkpoint") as caught:
        fit(make_job(backbone, talks, workplace=begun.parent))
    one_line(caught, begun)
    assert begun.read_bytes() == before
