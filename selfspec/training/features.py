"""Features that heads are fitted to: a model's hidden states and logits, computed or from disk."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from fsspec.core import url_to_fs
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from selfspec import files
from selfspec.errors import (
    CannotWrite,
    InvalidData,
    InvalidOption,
    SelfspecError,
    first_line,
    record_of,
    require_same,
)
from selfspec.files import read_json, sha256
from selfspec.heads.attending import AttendingHeads
from selfspec.heads.exit_heads import ExitHeads
from selfspec.model.backbone import Backbone
from selfspec.model.check import evaluation
from selfspec.training.options import explain_errors
from selfspec.training.text import Conversation

LOGIT_ROWS = 128  # rows whose full logits exist at a time; 25 MB for 49,152 tokens


@dataclass(frozen=True)
class FeatureSpec:
    """What a feature of each position contains."""

    layers: tuple[int, ...]  # exit layers, rising; 0 is the embedding
    deep: bool = False  # also the normed output of layer L one position earlier
    top_k: int = 1  # this many of the model's own most likely next tokens
    everywhere: bool = False  # from all positions, not only those that predict an answer's token
    states: tuple[int, ...] = ()  # rising layers whose states follow layer L's output in `deep`

    @classmethod
    def read_by(cls, heads: ExitHeads) -> FeatureSpec:
        """The features that `heads` are measured on."""
        if isinstance(heads, AttendingHeads):
            return cls((0, *heads.layers), everywhere=True)
        return cls(heads.config.exit_layers, heads.reads_deep, states=tuple(heads.layers))

    @property
    def names(self) -> set[str]:
        names = {"following", "continues", "answers", "top_ids", "top_log_probs"}
        names |= {f"hidden.{n}" for n in self.layers}
        return names | {"deep"} if self.deep else names

    def bytes_per_token(self, hidden_size: int, element_size: int) -> int:
        """Bytes of one position in memory and on disk; `element_size`: of a hidden value."""
        vectors = len(self.layers) + self.deep * (1 + len(self.states))
        return vectors * hidden_size * element_size + 8 + 2 + self.top_k * (4 + 2)


@dataclass(frozen=True)
class Features:
    """N positions in the order of the text, on one device."""

    hidden: dict[int, Tensor]  # by exit layer, [N, d], raw, in the model's dtype
    following: Tensor  # [N] int64: the next token of the text
    continues: Tensor  # [N] bool: the position directly follows that of the row before
    answers: Tensor  # [N] bool: the next token belongs to an answer
    top_ids: Tensor  # [N, k] int32: the model's likeliest next tokens, best first
    top_log_probs: Tensor  # [N, k] float16, over the full vocabulary
    deep: Tensor | None = None
    """One position earlier: layer L's normed output and k states, [N, (1 + k) * d], or zeros."""

    def __len__(self) -> int:
        return len(self.following)

    def tensors(self) -> dict[str, Tensor]:
        hidden = {f"hidden.{layer}": tensor for layer, tensor in self.hidden.items()}
        others = {name: t for name, t in vars(self).items() if name != "hidden" and t is not None}
        return hidden | others

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> Features:
        hidden = {int(n.split(".")[1]): t for n, t in tensors.items() if n.startswith("hidden.")}
        others = {name: t for name, t in tensors.items() if not name.startswith("hidden.")}
        return cls(hidden=dict(sorted(hidden.items())), **others)

    def to(self, device: torch.device) -> Features:
        return Features.of({name: tensor.to(device) for name, tensor in self.tensors().items()})


class Batch(NamedTuple):
    """A batch of conversations, padded on the right."""

    ids: Tensor  # [B, T]
    predicts: Tensor  # [B, T] bool: the next token belongs to an answer
    has_next: Tensor  # [B, T] bool: there is a next token


def plan_batches(
    conversations: Sequence[Conversation], batch_tokens: int
) -> list[list[Conversation]]:
    """Batches of conversations of similar length, at most `batch_tokens` with padding."""
    groups: list[list[Conversation]] = []
    for entry in sorted(conversations, key=lambda entry: len(entry.ids)):
        if groups and (len(groups[-1]) + 1) * len(entry.ids) <= batch_tokens:
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return groups


def pad_batch(conversations: Sequence[Conversation]) -> Batch:
    """Make one batch. Padding is token 0, on the right, where no position sees it."""
    ids = pad_sequence([torch.tensor(entry.ids) for entry in conversations], batch_first=True)
    lengths = torch.tensor([len(entry.ids) for entry in conversations])
    has_next = torch.arange(ids.shape[1]) < lengths[:, None] - 1
    predicts = torch.zeros_like(has_next)
    for row, entry in enumerate(conversations):
        for first, end in entry.answers:
            predicts[row, first - 1 : end - 1] = True
    return Batch(ids, predicts, has_next)


def features(backbone: Backbone, spec: FeatureSpec, batch: Batch) -> Features:
    stops = sorted({*spec.layers, *spec.states, backbone.num_layers})
    ids = batch.ids.to(backbone.device)
    device = backbone.unembedding.weight.device
    predicts = batch.predicts.to(device)
    mask = batch.has_next.to(device) if spec.everywhere else predicts
    # with causal attention, right padding needs no mask: no position of a text can see it
    with evaluation(backbone.model), torch.no_grad():
        pairs = zip(stops, backbone.states(ids, stops), strict=True)
        states = {layer: state.to(device) for layer, state in pairs}
        last_output, deep = states[backbone.num_layers], None
        if spec.deep:
            normed = backbone.unembedding.norm(last_output)
            extras = [states[layer].to(normed) for layer in spec.states]
            deep = _shift(torch.cat([normed, *extras], dim=-1))[mask]
        top_ids, top_log_probs = _top_tokens(backbone, last_output[mask], spec.top_k)
    return Features(
        hidden={layer: states[layer][mask] for layer in spec.layers},
        following=batch.ids.roll(-1, dims=1).to(device)[mask],
        continues=(mask & _shift(mask))[mask],
        answers=predicts[mask],
        top_ids=top_ids,
        top_log_probs=top_log_probs,
        deep=deep,
    )


def _top_tokens(backbone: Backbone, last_output: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities [N, count] of the likeliest next tokens."""
    ids, log_probs = [], []
    for rows in last_output.split(LOGIT_ROWS):
        logits = backbone.logits(rows)
        best = logits.topk(min(count, logits.shape[-1]), dim=-1)
        ids.append(best.indices.int())
        log_probs.append((best.values - logits.logsumexp(-1, keepdim=True)).half())
    return torch.cat(ids), torch.cat(log_probs)


def _shift(values: Tensor) -> Tensor:
    """Move [B, T, ...] one position later; zeros come first."""
    shifted = values.roll(1, dims=1)
    shifted[:, 0] = 0
    return shifted


class StreamSource:
    """Runs the model for each batch; writes nothing to disk."""

    def __init__(
        self,
        backbone: Backbone,
        spec: FeatureSpec,
        conversations: Sequence[Conversation],
        batch_tokens: int,
        *,
        keep: bool = False,
    ) -> None:
        """`keep`: features stay in memory once computed."""
        self.spec, self.backbone, self._keep = spec, backbone, keep
        if not spec.everywhere:
            conversations = [entry for entry in conversations if entry.answers]
        self.plan = plan_batches(conversations, batch_tokens)
        self._cache: dict[tuple[int, int, int], Features] = {}
        self.answers = [sum(len(entry.answer_ids) for entry in group) for group in self.plan]
        positions = [sum(len(entry.ids) - 1 for entry in group) for group in self.plan]
        self.sizes = positions if spec.everywhere else self.answers
        self.conversations = [len(group) for group in self.plan]
        sha = hashlib.sha256()
        for group in self.plan:
            sha.update("".join(repr((t.ids, t.answers)) for t in group).encode() + b"|")
        self.digest = sha.hexdigest()  # of all ids, answers and batch boundaries

    def batch(self, index: int, number: int = 0, count: int = 1) -> Features:
        """Features of batch `index`, or of every `count`-th text of it from `number` on."""
        if (cached := self._cache.get((index, number, count))) is not None:
            return cached
        computed = features(self.backbone, self.spec, pad_batch(self.plan[index][number::count]))
        if self._keep:
            self._cache[index, number, count] = computed
        return computed

    def token_counts(self) -> Counter[int]:
        """How often each token occurs in answers."""
        return Counter(t for group in self.plan for entry in group for t in entry.answer_ids)


class Selection:
    """Some batches of a source, with their counts of positions, answers and conversations."""

    def __init__(self, source: FeatureSource, indices: Sequence[int] | None = None) -> None:
        """`indices`: the batches; None: all."""
        self.source = source
        self.indices = range(len(source.sizes)) if indices is None else indices
        self.positions, self.answers, self.conversations = (
            sum(counts[index] for index in self.indices)
            for counts in (source.sizes, source.answers, source.conversations)
        )

    def description(self) -> dict[str, Any]:
        """Identity of the selection, ready for JSON."""
        return {
            "text": self.source.digest,
            "batches": hashlib.sha256(repr(list(self.indices)).encode()).hexdigest(),
            "answer_tokens": self.answers,
            "features": repr(self.source.spec),
        }

    def batches(self, number: int = 0, count: int = 1) -> Iterator[Features]:
        """The batches in order, or the part of process `number` of `count`.

        Processes take whole batches in turn, and share the texts of those that are left over.
        """
        end = len(self.indices) // count * count
        yield from map(self.source.batch, self.indices[number:end:count])
        for index in self.indices[end:]:
            if number < self.source.conversations[index]:
                yield self.source.batch(index, number, count)

    def limited(self, max_tokens: int) -> Selection:
        """Random batches with at least `max_tokens` answer tokens, or all batches."""
        rng, count = torch.Generator().manual_seed(0), len(self.indices)
        order = [self.indices[i] for i in torch.randperm(count, generator=rng).tolist()]
        totals = itertools.accumulate((self.source.answers[i] for i in order), initial=0)
        taken = [
            index for index, answers in zip(order, totals, strict=False) if answers < max_tokens
        ]
        return Selection(self.source, sorted(taken))


def split(source: FeatureSource) -> tuple[Selection, Selection]:
    """Batches to fit, and every 20th (at least one) to validate. Raises InvalidData for one."""
    numbers = range(len(source.sizes))
    if len(numbers) < 2:
        raise InvalidData("one batch is too little to fit and to validate. Give --validation")
    held_out = numbers[10::20] or numbers[-1:]
    rest = [index for index in numbers if index not in held_out]
    return Selection(source, rest), Selection(source, held_out)


def process_state() -> PartialState:
    """This process's place among those of a launcher; without one it is the only process."""
    # by default, PartialState does not connect processes on a CPU
    return PartialState(cpu=not torch.accelerator.is_available())


# --- on disk

FORMAT_VERSION = 3  # version 2 kept answer positions only
MANIFEST = "manifest.json"
_SHARD_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of a cache folder: its `manifest.json`."""

    format_version: int = FORMAT_VERSION
    base_model: str
    base_fingerprint: str
    dtype: str
    data: str  # the text's name
    chat_template: str | None = None  # None: the model's own
    spec: FeatureSpec
    digest: str
    conversations: list[int]  # in each batch
    answers: list[int]
    positions: int
    bytes: int
    shards: list[list[int]]  # numbers of the batches of each, in order
    sha256: list[str]  # of each shard; "" until it is written

    def __post_init__(self) -> None:
        numbers = [index for batches in self.shards for index in batches]
        if (
            numbers != list(range(len(numbers)))
            or not all(self.shards)
            or {len(self.conversations), len(self.answers)} != {len(numbers)}
            or min(self.conversations + self.answers, default=-1) < 0
            or len(self.sha256) != len(self.shards)
        ):
            raise InvalidOption("shards, conversations, answers and sha256 do not match")

    @classmethod
    def of(cls, source: StreamSource, **base: Any) -> Manifest:
        """Make the manifest of a cache to write. Raises InvalidData for a text without batches."""
        if not source.sizes:
            raise InvalidData("the text holds no answers to keep. Give another --data")
        backbone = source.backbone
        size = source.spec.bytes_per_token(backbone.hidden_size, backbone.dtype.itemsize)
        shards, room = list[list[int]](), 0
        for index, positions in enumerate(source.sizes):
            if room < positions * size:
                shards.append([])
                room = _SHARD_BYTES
            shards[-1].append(index)
            room -= positions * size
        return cls(
            **base,
            base_fingerprint=backbone.fingerprint,
            dtype=str(backbone.dtype).removeprefix("torch."),
            spec=source.spec,
            digest=source.digest,
            conversations=source.conversations,
            answers=source.answers,
            positions=sum(source.sizes),
            bytes=sum(source.sizes) * size,
            shards=shards,
            sha256=[""] * len(shards),
        )

    @classmethod
    def read(cls, location: str | Path | Place) -> Manifest:
        """Read a manifest. Raises InvalidData if there is none that this version reads."""
        place = location if isinstance(location, Place) else Place(location)
        path, hint = place.pull(place.folder / MANIFEST), "Run selfspec cache with another --output"
        with explain_errors(f"{place.name} is no feature cache", hint):
            fields = read_json(path)
            if not isinstance(fields, dict) or fields.get("format_version") != FORMAT_VERSION:
                raise InvalidOption(f"its format version is not {FORMAT_VERSION}")
            return record_of(cls, fields)

    def paths(self, folder: Path) -> list[Path]:
        return [folder / f"shard-{number:05d}.safetensors" for number in range(len(self.shards))]

    def write(self, folder: Path) -> None:
        files.write(folder / MANIFEST, json.dumps(asdict(self), indent=1) + "\n")


class Place:
    """Place of a cache: a folder, or a URL that fsspec opens (`s3://bucket/features`).

    Files of a URL pass through a temporary folder of this process.
    """

    def __init__(self, name: str | Path) -> None:
        """Raises InvalidOption for a URL that cannot be opened here."""
        self.name, self._remote = str(name), None
        self.folder = files.local_path(name)
        if files.is_url(name):
            try:
                self._remote, self._root = url_to_fs(self.name)
            except Exception as error:  # of any package that fsspec uses
                raise InvalidOption(f"cannot open {name}: {first_line(error)}") from error
            self._mirror = TemporaryDirectory(prefix="selfspec-features-")
            self.folder = Path(self._mirror.name)

    def pull(self, path: Path) -> Path:
        """The local path of a file; a URL's file is fetched first, if it exists."""
        if self._remote is not None and not path.exists():
            with self._explain_errors(InvalidData, "read"), suppress(FileNotFoundError):
                self._remote.get_file(self._url(path), str(path))
        return path

    @contextmanager
    def open_shard(self, path: Path) -> Iterator[Any]:
        """Open a shard. Raises InvalidData."""
        problem, hint = f"{self.name}/{path.name} is damaged", "Run selfspec cache again"
        hint = hint if self._remote is None else "Remove it there, then run selfspec cache again"
        with explain_errors(problem, hint), safe_open(self.pull(path), "pt") as file:
            yield file

    def push(self, path: Path) -> None:
        """Upload a whole file to a URL, then remove the local one. Raises CannotWrite."""
        if self._remote is not None:
            with self._explain_errors(CannotWrite, "write"):
                self._remote.makedirs(self._root, exist_ok=True)
                self._remote.put_file(str(path), self._url(path))
            path.unlink()

    def holds(self, path: Path, sha: str) -> bool:
        """Whether a shard is complete; of a URL's, only whether it exists."""
        if self._remote is None:
            return bool(sha) and path.exists() and sha256(path) == sha
        with self._explain_errors(InvalidData, "read"):
            return bool(sha) and bool(self._remote.exists(self._url(path)))

    def _url(self, path: Path) -> str:
        return f"{self._root}/{path.name}"

    @contextmanager
    def _explain_errors(self, kind: type[SelfspecError], action: str) -> Iterator[None]:
        try:
            yield
        except SelfspecError:
            raise
        except Exception as error:  # of any package
            raise kind(f"cannot {action} {self.name}: {first_line(error)}") from error


def check_output(name: str, reads: Iterable[object] = ()) -> Path:
    """The folder, if it is new, a feature cache, or free of such files. Raises CannotWrite."""
    if files.is_url(name):
        return Place(name).folder
    folder = Path(name)
    shards = [path.name for path in folder.glob("shard-*")] if name and folder.is_dir() else []

    def is_ours(folder: Path) -> bool:
        with suppress(InvalidData):
            return bool(Manifest.read(folder))
        return False

    return files.check_folder(name, {MANIFEST, *shards}, is_ours, overwrite=True, reads=reads)


_IDENTITY = ("base_model", "base_fingerprint", "spec", "dtype", "digest", "shards")


def write(
    location: str | Path,
    source: StreamSource,
    manifest: Manifest,
    progress: Callable[[int, bool], object] = lambda *_: None,
    compute: Callable[[Iterable[list[Conversation]]], Iterator[Features]] | None = None,
) -> None:
    """Write a cache to a folder or URL; continues a killed run of the same `manifest`.

    `progress` is called with positions, and with whether this run computed or found them.
    `compute` yields the features of batches in order, if other processes compute them. Raises
    InvalidOption for a folder of other features, CannotWrite.
    """
    place = Place(location)
    folder = place.folder
    hashes = [*manifest.sha256]
    if place.pull(folder / MANIFEST).exists():
        old = Manifest.read(place)
        stored, expected = ({n: getattr(m, n) for n in _IDENTITY} for m in (old, manifest))
        require_same(location, stored, expected, "remove the folder")
        hashes = old.sha256
    shards = list(zip(manifest.paths(folder), manifest.shards, strict=True))
    missing: list[int] = []
    for number, (path, batches) in enumerate(shards):
        if place.holds(path, hashes[number]):
            progress(sum(source.sizes[index] for index in batches), False)
        else:
            hashes[number] = ""
            missing.append(number)
    indices = [index for number in missing for index in manifest.shards[number]]
    plan = (source.plan[index] for index in indices)
    stream = compute(plan) if compute else map(source.batch, indices)

    def save_manifest() -> None:
        replace(manifest, sha256=hashes).write(folder)
        place.push(folder / MANIFEST)

    save_manifest()
    for number in missing:
        path, batches = shards[number]
        tensors: dict[str, Tensor] = {}
        for index in batches:
            for name, tensor in next(stream).tensors().items():
                tensors[f"{index}.{name}"] = tensor.cpu().contiguous()
            progress(source.sizes[index], True)
        with files.replacing(path) as new:
            save_file(tensors, new)
        hashes[number] = sha256(path)
        place.push(path)
        save_manifest()


class CacheSource:
    """Reads batches from a cache folder, or from a URL, whose shards are copied here once."""

    def __init__(self, location: str | Path, backbone: Backbone) -> None:
        """Check and open a cache; a launcher's processes share the hashing. Raises InvalidData."""
        self._place, process = Place(location), process_state()
        self.manifest = record = Manifest.read(self._place)
        if not all(record.sha256):
            raise InvalidData(f"{location} is unfinished. Run the selfspec cache command again")
        if backbone.fingerprint != record.base_fingerprint:
            raise InvalidData(
                f"{location} holds features of {record.base_model} ({record.base_fingerprint[:12]})"
                f", but this is another model ({backbone.fingerprint[:12]})"
            )
        self.spec, self.digest = record.spec, record.digest
        self.conversations, self.answers = record.conversations, record.answers
        self.sizes: list[int] = []  # positions in each batch
        self._paths: list[Path] = []
        paths = record.paths(self._place.folder)
        for shard, (path, batches) in enumerate(zip(paths, record.shards, strict=True)):
            with self._place.open_shard(path) as file:
                assigned = shard % process.num_processes == process.process_index
                if assigned and sha256(path) != record.sha256[shard]:
                    raise InvalidData("its bytes have changed since it was written")
                shapes = [file.get_slice(f"{n}.following").get_shape() for n in batches]
            self.sizes += [math.prod(shape) for shape in shapes]
            self._paths += [path] * len(batches)

    def batch(self, index: int, number: int = 0, count: int = 1) -> Features:
        tensors = self._read(index, self.spec.names)
        if count > 1:
            count = min(count, self.conversations[index])  # those that ask for a part
            mask = ((~tensors["continues"]).cumsum(0) - 1) % count == number  # by texts or answers
            tensors = {name: tensor[mask] for name, tensor in tensors.items()}
        return Features.of(tensors)

    def token_counts(self) -> Counter[int]:
        counts = Counter[int]()
        for index in range(len(self.sizes)):
            tensors = self._read(index, {"following", "answers"})
            counts.update(tensors["following"][tensors["answers"]].tolist())
        return counts

    def _read(self, index: int, names: set[str]) -> dict[str, Tensor]:
        path, prefix = self._paths[index], f"{index}."
        with self._place.open_shard(path) as file:
            stored = {n.removeprefix(prefix) for n in file.keys() if n.startswith(prefix)}  # noqa: SIM118  # no dict
            if stored != self.spec.names:
                raise InvalidData(f"its tensors are not those of {self.spec}")
            return {name: file.get_tensor(prefix + name) for name in names}


FeatureSource = StreamSource | CacheSource
"""Numbered batches of features; `digest` identifies the text and how it is cut into batches."""
