"""The identity of a model, a hash of all its weights, and changes since it was wrapped.

Heads, features and records carry the hash: 64 hex digits, for any dtype, or "". A file is hashed
once: the cache folder keeps the result by path, size and time. `ModelWatch` describes changes since
wrapping; the backbone checks for them at every request.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from ctypes import Array, c_char
from importlib import metadata
from operator import attrgetter, is_, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from selfspec import files
from selfspec.errors import CannotWrite
from selfspec.files import cache_folder
from selfspec.model.compiler import KERNELS
from selfspec.model.parts import MOVING_ROPE, foreign_hooks
from selfspec.model.weights import QuantisedWeight, processor_features

logger = logging.getLogger(__name__)

FileStamp = tuple[str, int, int]  # real path, bytes, time of the last change in nanoseconds
_KINDS = ("config.json", "*.index.json", "*.safetensors")

UNKNOWN = ""  # in place of a fingerprint: weights cannot be read, or there is no base model
_FORMAT_VERSION = 1
_BLOCK = 1 << 22  # numbers that are converted at a time: 8 MB
_READABLE = (Tensor, nn.Parameter, QuantisedWeight)
_PACKED_MODULES = "torch.ao.nn.quantized"  # their weights are not tensors


def of(model: nn.Module) -> str:
    """sha256 over name, shape and hash of each weight and saved buffer; tied ones count once.

    Numbers are rounded to bfloat16, then to float16, so that a model whose file is in bfloat16 has
    the same fingerprint in every dtype. UNKNOWN, with a warning, for weights that were quantised on
    loading, or are not in memory.
    """
    unique: dict[int, tuple[str, Tensor]] = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        if isinstance(weight, Tensor):
            unique.setdefault(id(weight), (name, weight))
    weights = dict(sorted(unique.values(), key=itemgetter(0)))
    if reason := _why_unreadable(model, weights):
        logger.warning("the model has no fingerprint: %s. What fits it is not checked", reason)
        return UNKNOWN
    lines = [f"{name} {list(one.shape)} {_tensor_hash(one)}\n" for name, one in weights.items()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def of_loaded(model: PreTrainedModel, loaded_from: tuple[FileStamp, ...]) -> str:
    """The fingerprint of a model that was just loaded from these files and not changed since.

    Looked up if the files were hashed before. Only for the loader: changes that a caller made to
    the model since would go unnoticed.
    """
    if not _are_unchanged(loaded_from):
        return of(model)
    key = _FORMAT_VERSION, metadata.version("transformers"), str(model.dtype), loaded_from
    file = cache_folder() / "fingerprints" / hashlib.sha256(json.dumps(key).encode()).hexdigest()
    with suppress(OSError, ValueError):  # missing, or damaged
        if re.fullmatch("[0-9a-f]{64}", known := file.read_text(encoding="ascii")):
            return known
    if (fingerprint := of(model)) != UNKNOWN:
        with suppress(CannotWrite):  # a read-only folder only costs time
            files.write(file, fingerprint)
    return fingerprint


class Passed:
    """The checks that a model has passed, kept for processes that read it from the same files."""

    def __init__(self, file: Path | None) -> None:
        """`file`: named by a hash of everything that the checks depend on; None: keep nothing."""
        self._file, self._names = file, set[str]()
        with suppress(OSError, ValueError):  # missing, or damaged
            self._names |= {*(file.read_text(encoding="ascii").split() if file else ())}

    @classmethod
    def of_files(cls, loaded_from: tuple[FileStamp, ...], version: bytes) -> Passed:
        """Checks of files only; `version`: that of the code that checks them."""
        digest = hashlib.sha256(version + json.dumps(loaded_from).encode()).hexdigest()
        return cls(cache_folder() / "checked" / digest if loaded_from else None)

    @classmethod
    def by(
        cls, model: PreTrainedModel, executor: str, loaded_from: tuple[FileStamp, ...]
    ) -> Passed:
        """Checks that hold for these files, this config, our code, library versions, processor."""
        if not _are_unchanged(loaded_from):
            return cls(None)
        config: Any = model.config
        facts = [
            *(executor, str(model.dtype), str(model.device), torch.get_num_threads()),
            *(config.to_json_string(), config._attn_implementation, torch.__version__),
            *(metadata.version("transformers"), sorted(processor_features()), loaded_from),
        ]
        digest = hashlib.sha256(json.dumps(facts).encode())
        for file in sorted((*KERNELS.parent.glob("*.py"), *KERNELS.glob("*.[ch]pp"))):
            digest.update(file.read_bytes())
        return cls(cache_folder() / "checked" / digest.hexdigest())

    def __contains__(self, check: str) -> bool:
        return check in self._names

    def add(self, check: str) -> None:
        if self._file is None or check in self:
            return
        self._names.add(check)
        with suppress(CannotWrite):  # a read-only folder only costs time
            files.write(self._file, " ".join(sorted(self._names)))


def _why_unreadable(model: nn.Module, weights: dict[str, Tensor]) -> str | None:
    for name, module in model.named_modules():
        if type(module).__module__.startswith(_PACKED_MODULES):
            return f"{name} is quantised ({type(module).__name__})"
    for name, weight in weights.items():
        if type(weight) not in _READABLE or weight.is_quantized:
            return f"{name} is quantised or spread out ({type(weight).__name__})"
        if weight.is_meta:
            return f"{name} is not in memory"
        if weight.layout != torch.strided:
            return f"{name} is sparse"
    return None


def _tensor_hash(weight: Tensor) -> str:
    """sha256 of the numbers in order, in blocks; integers are not converted."""
    blocks: Iterable[Tensor]
    if isinstance(weight, QuantisedWeight):  # expand only one block at a time
        rows = torch.arange(len(weight)).split(max(1, _BLOCK // weight.shape[1]))
        blocks = (weight.expanded(part).reshape(-1) for part in rows)
    else:
        blocks = weight.detach().reshape(-1).split(_BLOCK)
    digest = hashlib.sha256()
    for block in blocks:
        if block.is_floating_point():
            block = block.bfloat16().half()  # the same numbers in every dtype
        digest.update(block.contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


# --- the files that determine weights


def stamps(paths: Iterable[Path]) -> tuple[FileStamp, ...]:
    """The stamp of each file; empty if one is missing."""
    try:
        targets = [Path(os.path.realpath(path)) for path in paths]
        return tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in targets)
    except OSError:
        return ()


def _are_unchanged(known: tuple[FileStamp, ...]) -> bool:
    """Whether files are known and unchanged, so none was replaced while it was read."""
    return bool(known) and stamps(Path(path) for path, _, _ in known) == known


def of_folder(folder: Path) -> tuple[FileStamp, ...]:
    """The stamps of a model's folder; empty if an adapter adds weights from elsewhere."""
    if (folder / "adapter_config.json").exists():
        return ()
    return stamps(sorted({path for kind in _KINDS for path in folder.glob(kind)}))


def of_snapshot(name: str, config: Any) -> tuple[FileStamp, ...]:
    """Stamps of the hub's cached files of a model with this config; these files never change."""
    from huggingface_hub import try_to_load_from_cache

    revision = getattr(config, "_commit_hash", None)
    found = try_to_load_from_cache(name, "config.json", revision=revision) if revision else None
    return of_folder(Path(found).parent) if isinstance(found, str) else ()


# --- changes of a model since it was wrapped

_WORD = 8
"""Bytes that are compared at either end of each weight. This notices a change of the whole weight
through `.data`, which no counter sees, but not one of a few rows."""

_TORCHS = frozenset(vars(nn.Module()))  # attributes of every module, whose contents are compared
_IDLE = _TORCHS | {
    *("_is_hf_initialized", "generation_config", "gradient_checkpointing", "name_or_path"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
    *("output_hidden_states", "_output_attentions", "_name_or_path", "transformers_version"),
    "rope_deltas",  # position offsets by the last prompt's images: set by `generate`
}
"""Attributes of modules and configs that may change: our logits do not depend on them."""

_LINEAR = {"in_features", "out_features"}  # of a linear layer, which reads only its weight
_PLAIN = {Tensor, nn.Parameter, nn.Buffer}  # tensor types that wrap no others


class _Weight(NamedTuple):
    place: dict[str, Any]
    name: str
    path: str
    tensor: Tensor

    @property
    def identity(self) -> object:
        """Changes if the tensor was replaced, unless it is offloaded."""
        return self.tensor.dtype if self.tensor.is_meta else id(self.tensor)


class ModelWatch:
    """A snapshot of a model, to detect later changes.

    Attributes are compared in a few calls that loop in C; the reason is searched for only if one of
    them finds a difference. Weights, whose numbers are too many, are compared by version counters,
    addresses, and their first and last bytes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        modules = _modules(model)
        self._owners = dict([*modules, *_configs(modules)])
        self._attributes = [vars(owner) for owner in self._owners.values()]
        self._first_copies = self._copies = _copy(self._attributes)
        self._weights = list(_weights(modules))
        # an offloaded weight is a new object after every pass
        tensors = {w.path: w.tensor for w in self._weights if not w.tensor.is_meta}
        plain = {path: t for path, t in tensors.items() if type(t) in _PLAIN}  # have an address
        versioned = {path: t for path, t in tensors.items() if not t.is_inference()}
        self._checks: list[tuple[str, Callable[[Any], object], dict[str, Any]]] = [
            ("{0} is a {2.__name__}, it was a {1.__name__}", type, self._owners),
            ("{0} was cast from {1} to {2}", attrgetter("dtype"), plain),
            ("{0} was moved to {2}", attrgetter("device"), plain),
            ("{0} was replaced", Tensor.data_ptr, plain),
            ("{0} was changed", attrgetter("_version"), versioned),
        ]
        """Message for a change, function to compare, and the objects to compare by path."""
        self._answers = self._ask()
        # weights of compressed-tensors lie in no dict: only the functions above compare them
        weights = [w for w in self._weights if not w.tensor.is_meta and isinstance(w.place, dict)]
        self._places, self._names = [w.place for w in weights], [w.name for w in weights]
        self._tensors = [w.tensor for w in weights]
        self._end_words: list[tuple[str, Array[c_char]]] = []
        """Path and first word, path and last word of each weight in memory, read in place."""
        for weight in self._weights:
            tensor = getattr(weight.tensor, "blocks", weight.tensor)
            if type(tensor) in _PLAIN and tensor.is_cpu and tensor.is_contiguous():
                size = min(_WORD, tensor.nbytes)
                for offset in (0, tensor.nbytes - size) if size else ():
                    word = (c_char * size).from_address(tensor.data_ptr() + offset)
                    self._end_words.append((weight.path, word))
        self._words = self._read()

    def change(self) -> str | None:
        """A description of the first change, or None."""
        if not self._looks_the_same():
            for reason in self._changes():
                return reason
            self._copies = _copy(self._attributes)  # only idle attributes changed
        for (path, _), old, word in zip(self._end_words, self._words, self._read(), strict=True):
            if word != old:
                return f"{path} was changed"
        return None

    def _read(self) -> list[bytes]:
        return [word.raw for _, word in self._end_words]

    def _looks_the_same(self) -> bool:
        """Whether nothing but weights' numbers can have changed; False if idle attributes did."""
        return (
            all(map(is_, map(dict.get, self._places, self._names), self._tensors))
            and _are_equal(self._attributes, self._copies)
            and self._ask() == self._answers
        )

    def _ask(self) -> list[list[object]]:
        with torch._C.DisableTorchFunctionSubclass():  # else a microsecond for each subclass
            return [list(map(function, objects.values())) for _, function, objects in self._checks]

    def _changes(self) -> Iterator[str]:
        for (text, function, objects), answers in zip(self._checks, self._answers, strict=True):
            for (path, part), old in zip(objects.items(), answers, strict=True):
                if (new := function(part)) != old:
                    yield text.format(path, old, new)
        for (path, part), attributes in zip(self._owners.items(), self._first_copies, strict=True):
            yield from _changes(path, part, attributes)
        identities = {weight.path: weight.identity for weight in _weights(_modules(self._model))}
        for part in self._weights:
            if identities.get(part.path) != part.identity:
                yield f"{part.path} was replaced"


def _contents(fields: dict[str, Any]) -> dict[str, object]:
    """A module's submodules, weights and hooks, from its attributes."""
    tensors = {**fields["_parameters"], **fields["_buffers"]}
    weights = {name for name, tensor in tensors.items() if tensor is not None}
    return {"modules": fields["_modules"], "weights": weights, "hooks": foreign_hooks(fields)}


def _changes(path: str, owner: Any, old: dict[str, Any]) -> Iterator[str]:
    """Changes of a module or config, except of its tensors and idle attributes."""
    new = vars(owner)
    if isinstance(owner, nn.Module):
        aspects = zip(_contents(old).items(), _contents(new).values(), strict=True)
        yield from (f"{path} has other {aspect}" for (aspect, old), new in aspects if old != new)
    idle = _IDLE | (_LINEAR if type(owner) is nn.Linear else set())
    idle |= {name for name in {**old, **new} if _moves(owner, name)}
    watched = {"training"} if has_dropout(owner) else set()
    for name in sorted((old.keys() | new.keys()) - idle | watched):
        if isinstance(value := old.get(name), Tensor):
            continue
        if name in old:
            if name not in new or not _are_equal(value, new[name]):
                yield f"{name} of {path} was changed"
        elif name in ("forward", "_hf_hook"):
            yield f"the forward of {path} was replaced"
        elif not name.startswith("_") or hasattr(type(owner), name):  # code may look for it
            yield f"{path} has {name}, which it had not"


def _are_equal(old: object, new: object) -> bool:
    try:
        return old is new or bool(old == new)
    except Exception:  # noqa: BLE001  # different tensors need not be comparable
        return False


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(path or "the model", module) for path, module in model.named_modules()]


def _moves(owner: object, name: str) -> bool:
    """Whether the model's own passes rewrite this attribute (dynamic NTK and longrope RoPE)."""
    written = name.endswith(("inv_freq", "max_seq_len_cached"))
    return written and any(kind in str(getattr(owner, "rope_type", "")) for kind in MOVING_ROPE)


def _configs(modules: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, Any]]:
    configs: dict[int, tuple[str, PreTrainedConfig]] = {}

    def look(path: str, owner: object) -> None:
        for name, value in vars(owner).items():
            if isinstance(value, PreTrainedConfig) and id(value) not in configs:
                configs[id(value)] = f"{name} of {path}", value
                look(*configs[id(value)])

    for path, module in modules:
        look(path, module)
    return list(configs.values())


def has_dropout(owner: Any) -> bool:
    """Whether a module or one of its children has dropout in training."""
    parts = (owner, *owner.children()) if isinstance(owner, nn.Module) else ()
    attributes = [(name, value) for part in parts for name, value in vars(part).items()]
    return any(
        (name == "p" or "drop" in name) and isinstance(value, float) and value > 0
        for name, value in attributes
    )


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_copy(entry) for entry in value]
    return set(value) if isinstance(value, set) else value


def _weights(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[_Weight]:
    for path, module in modules:
        for place in (module._parameters, module._buffers, vars(module)):
            for name, tensor in place.items():
                # pruned or normed by torch: a hook remakes it at each pass, from watched tensors
                origins = {f"{name}_orig", f"{name}_v"} & module._parameters.keys()
                idle = name in _IDLE or origins or _moves(module, name)
                if isinstance(tensor, Tensor) and not idle:
                    full_path = name if path == "the model" else f"{path}.{name}"
                    yield _Weight(place, name, full_path, tensor)
