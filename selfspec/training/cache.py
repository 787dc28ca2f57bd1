"""A folder of features, so that the frozen model runs once for many fits.

`manifest.json` says of what model, text and layers; `shard-00000.safetensors ...` hold the batches.
A shard is written under a temporary name and renamed, with a small record of its hash behind it, so
a killed run goes on at the next shard. Made by `selfspec cache`, read by `fit` and `calibrate`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from selfspec.errors import InvalidData, InvalidOption, SelfspecError
from selfspec.training.features import Features, FeatureSpec
from selfspec.training.processes import Processes
from selfspec.training.sources import FeatureSource

FORMAT_VERSION = 1
MANIFEST = "manifest.json"

Progress = Callable[[int, bool], None]
"""Called with so many positions more, and whether this run computed them or found them there."""

_SHARD_BYTES = 256 << 20
_IDENTITY = (
    "format_version",
    "base_model",
    "base_fingerprint",
    "spec",
    "dtype",
    "digest",
    "shards",
)


def identity(source: FeatureSource, base: dict[str, str], size_of: int) -> dict[str, Any]:
    """What a manifest says before any work; `size_of` is the bytes of one position.

    `base`: base_model, base_fingerprint, dtype, and data, the text's name.
    """
    return {
        "format_version": FORMAT_VERSION,
        **base,
        "spec": asdict(source.spec) | {"layers": list(source.spec.layers)},
        "digest": source.digest,
        "conversations": list(source.conversations),
        "answer_tokens": sum(source.sizes),
        "bytes": sum(source.sizes) * size_of,
        "shards": _cut(source.sizes, size_of),
    }


def write(
    folder: Path,
    source: FeatureSource,
    manifest: dict[str, Any],
    processes: Processes | None = None,
    progress: Progress | None = None,
) -> None:
    """Fill `folder`; goes on where a killed run of the same `manifest` was.

    Raises InvalidOption for a folder of other features, SelfspecError when a shard cannot be
    written (what is there stays).
    """
    processes = processes or Processes()
    folder.mkdir(parents=True, exist_ok=True)
    if processes.is_main:
        _claim(folder, manifest)
    processes.wait()
    mine = processes.share(list(enumerate(manifest["shards"])))
    for number, batches in mine:
        positions = sum(source.sizes[index] for index in batches)
        if _is_whole(_shard(folder, number)):
            if progress:
                progress(positions, False)
            continue
        _write_shard(_shard(folder, number), source, batches, progress)
    processes.wait()
    if processes.is_main:
        hashes = [_hash_of(_shard(folder, number)) for number in range(len(manifest["shards"]))]
        _replace(folder / MANIFEST, manifest | {"sha256": hashes})


class CacheSource:
    """Batches from a cache folder."""

    def __init__(self, folder: Path, fingerprint: str | None = None) -> None:
        """Raises InvalidData if it is incomplete, damaged, or of a model without `fingerprint`."""
        self.manifest = read_manifest(folder)
        if "sha256" not in self.manifest:
            raise InvalidData(f"{folder} is unfinished. Run the selfspec cache command again")
        if fingerprint not in (None, self.manifest["base_fingerprint"]):
            raise InvalidData(
                f"{folder} holds features of {self.manifest['base_model']} "
                f"({self.manifest['base_fingerprint'][:12]}), the model is another one "
                f"({str(fingerprint)[:12]})"
            )
        spec = self.manifest["spec"]
        self.spec = FeatureSpec(**spec | {"layers": tuple(spec["layers"])})
        self.digest: str = self.manifest["digest"]
        self.conversations: list[int] = self.manifest["conversations"]
        self._places = {
            index: _shard(folder, number)
            for number, batches in enumerate(self.manifest["shards"])
            for index in batches
        }
        self.sizes = [self._sizes_of(index) for index in range(len(self._places))]

    def check(self) -> None:
        """Raise InvalidData naming the first shard whose bytes are not those that were written."""
        paths = list(dict.fromkeys(self._places.values()))
        for path, expected in zip(paths, self.manifest["sha256"], strict=True):
            if not path.is_file() or sha256(path) != expected:
                raise InvalidData(f"{path} is damaged. Run the selfspec cache command again")

    def batch(self, index: int) -> Features:
        """Batch `index`."""
        path, prefix = self._places[index], f"{index}."
        try:
            with safe_open(path, "pt") as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118  # no dict
                return Features.of({n.removeprefix(prefix): file.get_tensor(n) for n in names})
        except (OSError, SafetensorError) as error:
            raise InvalidData(f"{path} is damaged: {error}. Run selfspec cache again") from error

    def token_counts(self) -> Counter[int]:
        """How often each token is to be predicted."""
        counts: Counter[int] = Counter()
        for index, path in self._places.items():
            with safe_open(path, "pt") as file:
                counts.update(file.get_tensor(f"{index}.following").tolist())
        return counts

    def _sizes_of(self, index: int) -> int:
        path = self._places[index]
        try:
            with safe_open(path, "pt") as file:
                return int(file.get_slice(f"{index}.following").get_shape()[0])
        except (OSError, SafetensorError) as error:
            raise InvalidData(f"{path} is damaged: {error}. Run selfspec cache again") from error


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises InvalidData for a folder without one that this version reads."""
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["format_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidData(f"{folder} is no feature cache: cannot read {path}: {error}") from error
    if version != FORMAT_VERSION:
        raise InvalidData(f"{path} has format version {version}, expected {FORMAT_VERSION}")
    return manifest


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def _cut(sizes: Sequence[int], size_of: int) -> list[list[int]]:
    """Numbers of the batches of each shard, in order."""
    shards: list[list[int]] = []
    room = 0
    for index, positions in enumerate(sizes):
        if room < positions * size_of:
            shards.append([])
            room = _SHARD_BYTES
        shards[-1].append(index)
        room -= positions * size_of
    return shards


def _claim(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, or find the same one there."""
    path = folder / MANIFEST
    if not path.exists():
        _replace(path, manifest)
        return
    found = read_manifest(folder)
    for name in _IDENTITY:
        if found.get(name) != manifest[name]:
            raise InvalidOption(
                f"{folder} holds features with another {name.replace('_', ' ')}. Remove the "
                "folder, or give another --output"
            )


def _write_shard(
    path: Path,
    source: FeatureSource,
    batches: Sequence[int],
    progress: Progress | None,
) -> None:
    """One shard, then the record of its hash."""
    tensors: dict[str, Tensor] = {}
    for index in batches:
        features = source.batch(index)
        named = features.tensors().items()
        tensors |= {f"{index}.{name}": tensor.cpu().contiguous() for name, tensor in named}
        if progress:
            progress(len(features), True)
    new = path.with_name(path.name + ".new")
    try:
        save_file(tensors, new)
        new.chmod(0o644)  # safetensors makes files that only their owner can read
        digest = sha256(new)
        new.replace(path)
        _replace(_hash_path(path), {"sha256": digest})
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise SelfspecError(
            f"cannot write {path}: {error}. What was written before stays: make room and run the "
            "same command again"
        ) from error


def _is_whole(path: Path) -> bool:
    return _hash_path(path).is_file() and path.is_file() and sha256(path) == _hash_of(path)


def _hash_of(path: Path) -> str:
    found: str = json.loads(_hash_path(path).read_text(encoding="utf-8"))["sha256"]
    return found


def _hash_path(path: Path) -> Path:
    return path.with_suffix(".json")


def _shard(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def _replace(path: Path, value: dict[str, Any]) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    new.replace(path)
