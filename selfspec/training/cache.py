"""A folder of features, so that the frozen model runs once for many fits.

`manifest.json` says of what model, text and layers; `shard-00000.safetensors ...` hold the batches.
A shard is written under a temporary name and renamed, with a small record of its hash behind it, so
a killed run goes on at the next shard. Made by `selfspec cache`, read by `fit` and `calibrate`.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from selfspec import files
from selfspec.errors import InvalidData, InvalidOption
from selfspec.training.features import Features, FeatureSpec
from selfspec.training.processes import Processes
from selfspec.training.sources import FeatureSource
from selfspec.untrusted import read_json

FORMAT_VERSION = 3
"""2: answer positions alone were kept."""

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
        "answers": list(source.answers),
        "positions": sum(source.sizes),
        "bytes": sum(source.sizes) * size_of,
        "shards": _cut(source.sizes, size_of),
    }


def check_output(name: str) -> Path:
    """The folder, if features may be written there: new, free of such files, or a feature cache.

    Raises CannotWrite.
    """
    folder = Path(name)
    shards = [path.name for path in folder.glob("shard-*")] if name and folder.is_dir() else []
    return files.check_folder(name, {MANIFEST, *shards}, _is_ours, overwrite=True)


def _is_ours(folder: Path) -> bool:
    try:
        return "shards" in read_manifest(folder)
    except InvalidData:
        return False


def write(
    folder: Path,
    source: FeatureSource,
    manifest: dict[str, Any],
    processes: Processes | None = None,
    progress: Progress | None = None,
) -> None:
    """Fill `folder`; goes on where a killed run of the same `manifest` was.

    Raises InvalidOption for a folder of other features, CannotWrite when a shard cannot be written
    (what is there stays).
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
        _save(folder / MANIFEST, manifest | {"sha256": hashes})


class CacheSource:
    """Batches from a cache folder."""

    def __init__(
        self, folder: Path, fingerprint: str | None = None, sizes: tuple[int, int] | None = None
    ) -> None:
        """Raises InvalidData if it is incomplete, damaged, or of a model without `fingerprint`.

        `sizes`: the model's hidden size and number of tokens, to which all features must keep.
        """
        self._model_sizes = sizes
        self.manifest = read_manifest(folder)
        if "sha256" not in self.manifest:
            raise InvalidData(f"{folder} is unfinished. Run the selfspec cache command again")
        check_manifest(self.manifest, folder / MANIFEST)
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
        self.answers: list[int] = self.manifest["answers"]
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
                raise _damaged(path, "its bytes are not those that were written")

    def batch(self, index: int) -> Features:
        """Batch `index`."""
        path, prefix = self._places[index], f"{index}."
        try:
            with safe_open(path, "pt") as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118  # no dict
                tensors = {n.removeprefix(prefix): file.get_tensor(n) for n in names}
            check_tensors(tensors, self.spec, self._model_sizes)
            return Features.of(tensors)
        except (OSError, SafetensorError, InvalidData) as error:
            raise _damaged(path, error) from error

    def token_counts(self) -> Counter[int]:
        """How often each token stands in an answer."""
        counts: Counter[int] = Counter()
        for index in self._places:
            batch = self.batch(index)
            counts.update(batch.following[batch.answers].tolist())
        return counts

    def _sizes_of(self, index: int) -> int:
        path = self._places[index]
        try:
            with safe_open(path, "pt") as file:
                (size,) = file.get_slice(f"{index}.following").get_shape()
                return int(size)
        except (OSError, SafetensorError, ValueError) as error:
            raise _damaged(path, error) from error


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises InvalidData for a folder without one that this version reads."""
    path = folder / MANIFEST
    try:
        manifest = read_json(path)
    except InvalidData as error:
        raise InvalidData(f"{folder} is no feature cache: {error}") from error
    if not isinstance(manifest, dict) or "format_version" not in manifest:
        raise InvalidData(f"{folder} is no feature cache: {path} has no format version")
    version = manifest["format_version"]
    if type(version) is not int or version != FORMAT_VERSION:
        raise InvalidData(
            f"{path} has format version {reprlib.repr(version)}, expected {FORMAT_VERSION}. Run "
            "selfspec cache with another --output"
        )
    return manifest


def check_manifest(manifest: dict[str, Any], path: Path) -> None:
    """Raise InvalidData unless a finished manifest has what `identity` gives."""
    texts = ("base_model", "base_fingerprint", "dtype", "data", "digest")
    for name in texts:
        text = manifest.get(name)
        if not isinstance(text, str) or not text.isprintable() or len(text) > 1000:
            raise InvalidData(f"{path}: {name} is {reprlib.repr(text)}, expected a line of text")
    spec, shards = manifest.get("spec"), manifest.get("shards")
    layers = spec.get("layers") if isinstance(spec, dict) else None
    if (
        not isinstance(spec, dict)
        or spec.keys() != {"layers", "deep", "top_k", "everywhere"}
        or not (_are_counts(layers) and layers and layers == sorted(set(layers)))
        or not type(spec["deep"]) is type(spec["everywhere"]) is bool
        or not _are_counts([spec["top_k"]])
    ):
        raise InvalidData(
            f"{path}: spec is {reprlib.repr(spec)}, expected layers, deep, top_k, everywhere"
        )
    if not (isinstance(shards, list) and shards and all(_are_counts(part) for part in shards)):
        raise InvalidData(f"{path}: shards is {reprlib.repr(shards)}, expected lists of batches")
    numbers = [index for part in shards for index in part]
    conversations: Any = manifest.get("conversations")
    hashes: Any = manifest.get("sha256")
    counts: tuple[Any, Any] = (conversations, manifest.get("answers"))
    same = all(_are_counts(count) and len(count) == len(numbers) for count in counts)
    if not same or numbers != list(range(len(numbers))):
        raise InvalidData(f"{path}: shards, conversations and answers are of other batches")
    texts_only = isinstance(hashes, list) and all(isinstance(text, str) for text in hashes)
    if not texts_only or len(hashes) != len(shards):
        raise InvalidData(f"{path}: sha256 is {reprlib.repr(hashes)}, expected one per shard")


def check_tensors(
    tensors: dict[str, Tensor], spec: FeatureSpec, sizes: tuple[int, int] | None
) -> None:
    """Raise InvalidData unless a batch is one of `spec`; `sizes` as `CacheSource` has it."""
    following = tensors.get("following")
    if following is None or following.dim() != 1:
        raise InvalidData("a batch has no following tokens")
    count, hidden = len(following), tensors.get(f"hidden.{spec.layers[0]}")
    width = sizes[0] if sizes else 0 if hidden is None else hidden.shape[-1]
    expected: dict[str, tuple[int, ...]]
    expected = {f"hidden.{layer}": (count, width) for layer in spec.layers}
    expected |= dict.fromkeys(("following", "continues", "answers"), (count,))
    expected |= {"deep": (count, width)} if spec.deep else {}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    tops = {found.pop(name, None) for name in ("top_ids", "top_log_probs")}
    if found != expected:
        raise InvalidData(f"a batch holds {reprlib.repr(found)}, expected {expected}")
    if len(tops) != 1 or (spec.top_k > 0) != (None not in tops):
        raise InvalidData("a batch lacks the likeliest tokens, or has some too many")
    for name, tensor in tensors.items():
        kinds = _KINDS.get(name, _NUMBERS)
        if tensor.dtype not in kinds:
            raise InvalidData(f"{name} is {tensor.dtype}")
        wrong = tensor.isnan() if kinds is not _NUMBERS else ~tensor.isfinite()
        if bool(wrong.any()):
            raise InvalidData(f"{name} holds numbers that are not finite")
    for name in ("following", "top_ids"):
        ids = tensors.get(name)
        if ids is not None and ids.numel() and sizes:
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= sizes[1]:
                raise InvalidData(f"{name} holds token ids outside 0..{sizes[1] - 1}")


_NUMBERS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_KINDS = {
    "following": (torch.int64,),
    "continues": (torch.bool,),
    "answers": (torch.bool,),
    "top_ids": (torch.int32,),
    "top_log_probs": (torch.float16,),  # which may be too small for it: minus infinity
}


def _are_counts(values: Any) -> bool:
    """Whether it is a list of whole numbers, none below 0."""
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _damaged(path: Path, reason: object) -> InvalidData:
    words = " ".join(str(reason).split())
    return InvalidData(f"{path} is damaged: {words}. Run the selfspec cache command again")


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
    if not (folder / MANIFEST).exists():
        _save(folder / MANIFEST, manifest)
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
    with files.replacing(path) as new:
        save_file(tensors, new)
        digest = sha256(new)
    _save(_hash_path(path), {"sha256": digest})


def _is_whole(path: Path) -> bool:
    return path.is_file() and _hash_of(path) == sha256(path)


def _hash_of(path: Path) -> str | None:
    """What a shard's record says; None where there is none that can be read."""
    try:
        found = read_json(_hash_path(path))["sha256"]
    except (InvalidData, LookupError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _hash_path(path: Path) -> Path:
    return path.with_suffix(".json")


def _shard(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def _save(path: Path, value: dict[str, Any]) -> None:
    files.write(path, json.dumps(value, indent=1) + "\n")
