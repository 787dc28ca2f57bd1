"""What training reads again, from anywhere: features and checkpoints.

Each damaged one is one line that names the file; none is a traceback, and none is changed.
"""

from __future__ import annotations

import json
import os
import shutil
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
from selfspec.training.features import FeatureSpec, Manifest, StreamSource
from selfspec.training.fit import fit
from selfspec.training.text import Conversation
from tests.bad_input import NAN, Change, one_line
from tests.models import VOCAB_SIZE
from tests.training.test_fit import make_job, stop_after

# --- features -------------------------------------------------------------------------------------

SPEC = FeatureSpec((2, 4), deep=True, top_k=4)


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, backbone: Backbone, talks: list[Conversation]
) -> Path:
    """Features, and a fit killed in its second epoch."""
    folder = tmp_path_factory.mktemp("made")
    source = StreamSource(backbone, SPEC, talks[:3], 64)
    base = {"base_model": "tiny", "dtype": "float32", "data": "talks"}
    base["base_fingerprint"] = backbone.fingerprint
    store.write(folder / "features", source, Manifest.of(source, base, 800))
    with pytest.raises(KeyboardInterrupt):
        fit(make_job(backbone, talks, workplace=folder), stop_after(5))
    return folder


@pytest.fixture
def features(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made / "features", tmp_path / "features")


def read_features(folder: Path, backbone: Backbone) -> None:
    source = store.CacheSource(folder, backbone)
    for index in range(len(source.sizes)):
        source.batch(index)
    source.token_counts()


WHOLE = {"layers": [2, 4], "deep": True, "top_k": 4, "everywhere": False}
MANIFEST: dict[str, list[Any]] = {
    "format_version": [1, 0, "2", True, None, []],
    "base_fingerprint": [None, 3, ["abc"], "x\ny", "x" * 2000],
    "spec": [
        *(None, [], {}, {"layers": [2, 4]}),
        *(WHOLE | {"layers": value} for value in (["2"], [4, 2], [], [-1], [2])),
        *(WHOLE | {"top_k": value} for value in (0, -1, "4")),
        *(WHOLE | {"deep": 1}, WHOLE | {"deep": False}, WHOLE | {"more": 1}),
    ],
    "shards": [
        *(None, [], 3, [[]], [["0"]], [[0, 0]], [[1]], [[-1]], [[0.0]], [[10**9]], {"0": 1}),
        [[0], [1], [2], [3], [4], [5]],
    ],
    "conversations": [None, [], [-1], ["1"], 3],
    "sha256": [None, [], [3], "abc", ["0" * 64], {}],
    "digest": [None, 3],
    "more": [1],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in MANIFEST.items() for value in values]
)
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
def begun(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(made / checkpoint.FILE, tmp_path))


def course(**values: Any) -> Callable[[dict[str, Tensor], Any], Any]:
    return lambda tensors, record: record["course"].update(values)


def tensor(name: str, value: Tensor) -> Callable[[dict[str, Tensor], Any], Any]:
    return lambda tensors, record: tensors.update({name: value})


COURSES: dict[str, list[Any]] = {
    "step": ["4", -4, NAN, True, 10**12],
    "sums": [[], {"3": 0.0}, {"2": NAN, "4": 0.0}, {"2": "a", "4": "b"}],
    "entries": [[3], [], {}],
    "positions": ["7", 0],
    "more": [1],
}
NORM = "by_layer.2.norm.weight"
CHECKPOINTS: dict[str, Callable[[dict[str, Tensor], Any], Any]] = {
    **{f"{n} {v!r}"[:30]: course(**{n: v}) for n, several in COURSES.items() for v in several},
    "no job": lambda tensors, record: record.pop("job"),
    "job of a list": lambda tensors, record: record.update(job=[]),
    "no course": lambda tensors, record: record.pop("course"),
    "course of a list": lambda tensors, record: record.update(course=[]),
    "an entry less": lambda tensors, record: record["course"]["entries"].pop(),
    "an entry of nan": lambda tensors, record: record["course"]["entries"][0].update(agreement=NAN),
    "an entry without": lambda tensors, record: record["course"]["entries"][0].pop("train_loss"),
    "a tensor less": lambda tensors, record: tensors.pop(f"heads.{NORM}"),
    "a tensor more": tensor("more", torch.zeros(2)),
    "another shape": tensor(f"heads.{NORM}", torch.zeros(31)),
    "one number for all": tensor(f"heads.{NORM}", torch.zeros(1)),
    "nan": tensor(f"heads.{NORM}", torch.full((32,), NAN)),
    "moments of whole numbers": tensor(f"exp_avg.{NORM}", torch.zeros(32, dtype=torch.int32)),
}


@pytest.mark.parametrize("damage", CHECKPOINTS)
def test_a_strange_checkpoint(
    begun: Path, backbone: Backbone, talks: list[Conversation], damage: str
) -> None:
    tensors, record = checkpoint.load(begun)
    CHECKPOINTS[damage](tensors, record)
    checkpoint.save(begun, tensors, record)
    before = begun.read_bytes()
    with pytest.raises(InvalidData, match="is no checkpoint") as caught:
        fit(make_job(backbone, talks, workplace=begun.parent))
    one_line(caught, begun)
    assert begun.read_bytes() == before
