"""What heads are fitted to: hidden states and logits of a model, by batch, on the way or from disk.

Comes in: conversations, or a folder that was filled from some. Goes out: Features, batch by batch,
shared out among processes. Called by `selfspec cache`, `fit` and `calibrate`.
"""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from selfspec import files
from selfspec.errors import InvalidData, InvalidOption
from selfspec.heads.attending import AttendingHeads
from selfspec.heads.exit_heads import ExitHeads
from selfspec.model.backbone import Backbone
from selfspec.training.text import Batch, Conversation, padded, planned
from selfspec.untrusted import read_json

_LOGIT_ROWS = 128
"""Rows whose full logits exist at a time; 25 MB for 49,152 tokens."""


@dataclass(frozen=True)
class FeatureSpec:
    """What is taken from each position."""

    layers: tuple[int, ...]
    """Exit layers, rising; 0 is the embedding."""
    deep: bool = False
    """Also the normed output of layer L one position earlier."""
    top_k: int = 0
    """Also this many of the model's own most likely next tokens."""
    everywhere: bool = False
    """From all positions that have a token behind them, not only those that predict an answer's:
    the model's own next token teaches there, too."""

    @classmethod
    def read_by(cls, heads: ExitHeads) -> FeatureSpec:
        """What heads are measured on."""
        if isinstance(heads, AttendingHeads):
            return cls((0, *heads.layers), top_k=1, everywhere=True)
        return cls(heads.config.exit_layers, heads.reads_deep, top_k=1)

    @property
    def to_the_end(self) -> bool:
        """Whether the layers behind the last exit have to run."""
        return self.deep or self.top_k > 0

    def bytes_per_token(self, hidden_size: int, element_size: int) -> int:
        """Size of one position in memory and on disk; `element_size` of a hidden state's number."""
        vectors = len(self.layers) + self.deep
        return vectors * hidden_size * element_size + 8 + 2 + self.top_k * (4 + 2)


@dataclass(frozen=True)
class Features:
    """N positions in the order of the text, on one device."""

    hidden: dict[int, Tensor]
    """By exit layer, [N, d], raw, in the model's dtype."""
    following: Tensor
    """[N] int64: the next token of the text."""
    continues: Tensor
    """[N] bool: the position stands right behind the one of the row before."""
    answers: Tensor
    """[N] bool: the next token belongs to an answer."""
    deep: Tensor | None = None
    """[N, d]: final norm of layer L's output one position earlier, zeros where there is none."""
    top_ids: Tensor | None = None
    """[N, k] int32: the model's own most likely next tokens, best first."""
    top_log_probs: Tensor | None = None
    """[N, k] float16, over the full vocabulary."""

    def __len__(self) -> int:
        """N."""
        return len(self.following)

    def tensors(self) -> dict[str, Tensor]:
        """By name, for a file."""
        named = {f"hidden.{layer}": tensor for layer, tensor in self.hidden.items()}
        for name in ("following", "continues", "answers", "deep", "top_ids", "top_log_probs"):
            if (tensor := getattr(self, name)) is not None:
                named[name] = tensor
        return named

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> Features:
        """The inverse of `tensors`."""
        hidden = {int(n.split(".")[1]): t for n, t in tensors.items() if n.startswith("hidden.")}
        others = {name: t for name, t in tensors.items() if not name.startswith("hidden.")}
        return cls(hidden=dict(sorted(hidden.items())), **others)

    def to(self, device: torch.device) -> Features:
        """The same on `device`."""
        return Features.of({name: tensor.to(device) for name, tensor in self.tensors().items()})

    @property
    def nbytes(self) -> int:
        """Memory, in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors().values())


def features(backbone: Backbone, spec: FeatureSpec, batch: Batch) -> Features:
    """One frozen pass over a batch."""
    stops = (*spec.layers, backbone.num_layers) if spec.to_the_end else spec.layers
    ids = batch.ids.to(backbone.device)
    device = backbone.unembedding.weight.device
    predicts = batch.predicts.to(device)
    kept = batch.known.to(device) if spec.everywhere else predicts
    # right padding behind causal attention needs no mask: no position of a text can see it
    with _frozen(backbone.model):
        states = [hidden.to(device) for hidden in backbone.states(ids, stops)]
        last_output = states.pop() if spec.to_the_end else None
        deep = _deep(backbone, last_output, kept) if spec.deep else None
        top = _top(backbone, last_output, kept, spec.top_k)
    return Features(
        hidden={layer: s[kept] for layer, s in zip(spec.layers, states, strict=True)},
        following=batch.ids.roll(-1, dims=1).to(device)[kept],
        continues=(kept & _shifted(kept))[kept],
        answers=predicts[kept],
        deep=deep,
        top_ids=None if top is None else top[0],
        top_log_probs=None if top is None else top[1],
    )


def _deep(backbone: Backbone, last_output: Tensor | None, kept: Tensor) -> Tensor:
    """Normed output of layer L one position before each of `kept`, [N, d]."""
    assert last_output is not None  # noqa: S101  # FeatureSpec.to_the_end saw to it
    normed: Tensor = backbone.unembedding.norm(last_output)
    return _shifted(normed)[kept]


def _top(
    backbone: Backbone, last_output: Tensor | None, kept: Tensor, count: int
) -> tuple[Tensor, Tensor] | None:
    """Ids and log-probabilities [N, count] of the likeliest next tokens."""
    if last_output is None or count == 0:
        return None
    ids, log_probs = [], []
    for rows in last_output[kept].split(_LOGIT_ROWS):
        logits = backbone.logits(rows)
        best = logits.topk(min(count, logits.shape[-1]), dim=-1)
        ids.append(best.indices.int())
        log_probs.append((best.values - logits.logsumexp(-1, keepdim=True)).half())
    return torch.cat(ids), torch.cat(log_probs)


def _shifted(values: Tensor) -> Tensor:
    """[B, T, ...] one position later; zeros in front."""
    later = values.roll(1, dims=1)
    later[:, 0] = 0
    return later


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No gradients and no dropout while open; afterwards the mode that the caller had set."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


class FeatureSource(Protocol):
    """Numbered batches of features."""

    spec: FeatureSpec
    digest: str
    """Hash of the text and of how it is cut into batches."""

    @property
    def sizes(self) -> Sequence[int]:
        """Positions in each batch."""

    @property
    def answers(self) -> Sequence[int]:
        """How many of them predict a token of an answer."""

    @property
    def conversations(self) -> Sequence[int]:
        """Conversations in each batch."""

    def batch(self, index: int) -> Features:
        """Batch `index`, 0..len(sizes)-1."""

    def token_counts(self) -> Counter[int]:
        """How often each token stands in an answer."""


class StreamSource:
    """Runs the model for each batch; nothing on disk."""

    def __init__(
        self,
        backbone: Backbone,
        spec: FeatureSpec,
        conversations: Sequence[Conversation],
        batch_tokens: int,
        *,
        keep: bool = False,
    ) -> None:
        """`keep` holds what was computed once in memory."""
        self.spec = spec
        self._backbone = backbone
        if not spec.everywhere:
            conversations = [entry for entry in conversations if entry.answers]
        self._plan = planned(conversations, batch_tokens)
        self._kept: dict[int, Features] | None = {} if keep else None
        self.answers = [sum(len(entry.answer_ids) for entry in group) for group in self._plan]
        self.sizes = self.answers
        if spec.everywhere:
            self.sizes = [sum(len(entry.ids) - 1 for entry in group) for group in self._plan]
        self.conversations = [len(group) for group in self._plan]
        self.digest = digest(self._plan)

    def batch(self, index: int) -> Features:
        """Batch `index`."""
        if self._kept is not None and index in self._kept:
            return self._kept[index]
        computed = features(self._backbone, self.spec, padded(self._plan[index]))
        if self._kept is not None:
            self._kept[index] = computed
        return computed

    def token_counts(self) -> Counter[int]:
        """How often each token stands in an answer."""
        return Counter(t for group in self._plan for entry in group for t in entry.answer_ids)


class Selection(NamedTuple):
    """Some batches of a source."""

    source: FeatureSource
    indices: Sequence[int]

    @property
    def positions(self) -> int:
        """Positions in all."""
        return sum(self.source.sizes[index] for index in self.indices)

    @property
    def answers(self) -> int:
        """How many of them predict a token of an answer."""
        return sum(self.source.answers[index] for index in self.indices)

    @property
    def conversations(self) -> int:
        """Conversations in all."""
        return sum(self.source.conversations[index] for index in self.indices)

    def description(self) -> dict[str, Any]:
        """What tells it from any other selection, ready for JSON."""
        spec = self.source.spec
        return {
            "text": self.source.digest,
            "batches": hashlib.sha256(repr(list(self.indices)).encode()).hexdigest(),
            "answer_tokens": self.answers,
            "features": [list(spec.layers), spec.deep, spec.top_k, spec.everywhere],
        }

    def batches(self) -> Iterator[Features]:
        """In order."""
        return (self.source.batch(index) for index in self.indices)

    def limited(self, max_tokens: int) -> Selection:
        """At least `max_tokens` answer tokens, spread evenly, or all there are."""
        count = len(self.indices)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
        taken, answers = [], 0
        for place in order:
            if answers >= max_tokens:
                break
            taken.append(self.indices[place])
            answers += self.source.answers[self.indices[place]]
        return Selection(self.source, sorted(taken))


def whole(source: FeatureSource) -> Selection:
    """All batches."""
    return Selection(source, range(len(source.sizes)))


HELD_OUT_EVERY = 20


def split(source: FeatureSource) -> tuple[Selection, Selection]:
    """The batches to fit, and every 20th (at least one) to validate. Raises InvalidData for one."""
    numbers = range(len(source.sizes))
    if len(numbers) < 2:
        raise InvalidData("one batch is too little to fit and to validate. Give --validation")
    held_out = list(numbers[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]) or [numbers[-1]]
    rest = [index for index in numbers if index not in set(held_out)]
    return Selection(source, rest), Selection(source, held_out)


def digest(plan: Sequence[Sequence[Conversation]]) -> str:
    """sha256 of all ids, answers and batch borders."""
    found = hashlib.sha256()
    for group in plan:
        for entry in group:
            found.update(repr((entry.ids, entry.answers)).encode())
        found.update(b"|")
    return found.hexdigest()


Item = TypeVar("Item")


class Processes:
    """This process among its peers; alone unless a launcher started several."""

    def __init__(self, state: PartialState | None = None) -> None:
        """`state` None: alone."""
        self._state = state
        self.rank = 0 if state is None else state.process_index
        self.count = 1 if state is None else state.num_processes

    @classmethod
    def launched(cls) -> Processes:
        """As the launcher's environment says."""
        alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        # left to itself, PartialState takes processes on a CPU for strangers
        return cls() if alone else cls(PartialState(cpu=not torch.accelerator.is_available()))

    @property
    def device(self) -> str | None:
        """Where this process should compute; None: where the model is put by default."""
        if self._state is None or self._state.device.type == "cpu":
            return None
        return str(self._state.device)

    @property
    def is_main(self) -> bool:
        """Whether this one writes the results."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """This process's part of `items`."""
        return items[self.rank :: self.count]

    def add_up(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace gradients by their sums over all processes."""
        if self.count == 1:
            return
        for parameter in parameters:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = reduce(grad, reduction="sum")

    def total(self, values: dict[int, float]) -> dict[int, float]:
        """Sums over all processes, key by key."""
        if self.count == 1 or self._state is None:
            return values
        summed = reduce(
            torch.tensor(list(values.values()), dtype=torch.float32, device=self._state.device),
            reduction="sum",
        )
        return dict(zip(values, summed.tolist(), strict=True))

    def wait(self) -> None:
        """Until all are here."""
        if self._state is not None:
            self._state.wait_for_everyone()


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


def check_output(name: str, reads: Iterable[object] = ()) -> Path:
    """The folder, if features may be written there: new, free of such files, or a feature cache.

    Raises CannotWrite.
    """
    folder = Path(name)
    shards = [path.name for path in folder.glob("shard-*")] if name and folder.is_dir() else []
    return files.check_folder(name, {MANIFEST, *shards}, _is_ours, overwrite=True, reads=reads)


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
