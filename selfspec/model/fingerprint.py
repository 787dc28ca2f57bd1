"""Which model it is: a hash of all its weights; and whether it is still what was wrapped.

Heads, features and records carry the hash: 64 hex digits, whatever the dtype, or "". A file is
hashed once: the cache folder keeps the result by path, size and time. `ModelWatch` says in words
what has changed since; the backbone asks at every request.
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
_PACKED_MODULES = "torch.ao.nn.quantized"  # their weights are no tensors at all


def of(model: nn.Module) -> str:
    """sha256 over name, shape and hash of each weight and kept buffer; tied ones count once.

    Numbers are rounded to bfloat16, then to float16, so that a model whose file is in bfloat16 has
    one fingerprint in whichever dtype it was loaded. UNKNOWN, with a line in the log, for weights
    that were quantised on loading, or are not in memory.
    """
    kept: dict[int, tuple[str, Tensor]] = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        if isinstance(weight, Tensor):
            kept.setdefault(id(weight), (name, weight))
    weights = dict(sorted(kept.values(), key=itemgetter(0)))
    if reason := _unreadable(model, weights):
        logger.warning("the model has no fingerprint: %s. What fits it is not checked", reason)
        return UNKNOWN
    lines = [f"{name} {list(one.shape)} {_of_tensor(one)}\n" for name, one in weights.items()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def of_loaded(model: PreTrainedModel, loaded_from: tuple[FileStamp, ...]) -> str:
    """The same for a model that was loaded from these files just now, and not changed since.

    Looked up where the files were hashed before. Only for the loader: what a caller may have
    done to a model in the meantime cannot be seen.
    """
    if not _as_stamped(loaded_from):
        return of(model)
    key = _FORMAT_VERSION, metadata.version("transformers"), str(model.dtype), loaded_from
    place = cache_folder() / "fingerprints" / hashlib.sha256(json.dumps(key).encode()).hexdigest()
    with suppress(OSError, ValueError):  # not there, or damaged
        if re.fullmatch("[0-9a-f]{64}", known := place.read_text(encoding="ascii")):
            return known
    if (found := of(model)) != UNKNOWN:
        with suppress(CannotWrite):  # a folder that takes no files costs time, nothing else
            files.write(place, found)
    return found


class Passed:
    """Checks that a model has passed, kept for processes that read it from the same files."""

    def __init__(self, file: Path | None) -> None:
        """`file` stands for all that the checks look at; None: nothing is kept."""
        self._file, self._names = file, set[str]()
        with suppress(OSError, ValueError):  # not there, or damaged
            self._names |= {*(file.read_text(encoding="ascii").split() if file else ())}

    @classmethod
    def of_files(cls, loaded_from: tuple[FileStamp, ...], version: bytes) -> Passed:
        """Those of files alone; `version` of what checks them."""
        digest = hashlib.sha256(version + json.dumps(loaded_from).encode()).hexdigest()
        return cls(cache_folder() / "checked" / digest if loaded_from else None)

    @classmethod
    def by(
        cls, model: PreTrainedModel, executor: str, loaded_from: tuple[FileStamp, ...]
    ) -> Passed:
        """Those that hold for these files, this config, our own code, versions, processor."""
        if not _as_stamped(loaded_from):
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
        with suppress(CannotWrite):  # a folder that takes no files costs time, nothing else
            files.write(self._file, " ".join(sorted(self._names)))


def _unreadable(model: nn.Module, weights: dict[str, Tensor]) -> str | None:
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


def _of_tensor(weight: Tensor) -> str:
    """sha256 of the numbers in order, some at a time; of whole numbers as they are."""
    blocks: Iterable[Tensor]
    if isinstance(weight, QuantisedWeight):  # no more of it is expanded at a time
        rows = torch.arange(len(weight)).split(max(1, _BLOCK // weight.shape[1]))
        blocks = (weight.expanded(part).reshape(-1) for part in rows)
    else:
        blocks = weight.detach().reshape(-1).split(_BLOCK)
    digest = hashlib.sha256()
    for block in blocks:
        if block.is_floating_point():
            block = block.bfloat16().half()  # the block as it is hashed
        digest.update(block.contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


# --- the files that decide weights


def stamps(paths: Iterable[Path]) -> tuple[FileStamp, ...]:
    """The stamp of each file; nothing at all if one is missing."""
    try:
        real = [Path(os.path.realpath(path)) for path in paths]
        return tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in real)
    except OSError:
        return ()


def _as_stamped(known: tuple[FileStamp, ...]) -> bool:
    """False where no file is known, or one was replaced while it was read."""
    return bool(known) and stamps(Path(path) for path, _, _ in known) == known


def of_folder(folder: Path) -> tuple[FileStamp, ...]:
    """The stamps of a model's folder; nothing where an adapter brings in weights from elsewhere."""
    if (folder / "adapter_config.json").exists():
        return ()
    return stamps(sorted({path for kind in _KINDS for path in folder.glob(kind)}))


def of_snapshot(name: str, config: Any) -> tuple[FileStamp, ...]:
    """Stamps of the hub's cached files of a model with this config; these files never change."""
    from huggingface_hub import try_to_load_from_cache

    revision = getattr(config, "_commit_hash", None)
    found = try_to_load_from_cache(name, "config.json", revision=revision) if revision else None
    return of_folder(Path(found).parent) if isinstance(found, str) else ()


# --- a model that was wrapped, compared with what it is later

_WORD = 8
"""Bytes that are compared at either end of each weight. What changed all of it through `.data`,
which no counter sees, is noticed so; what changed a few rows that way is not."""

_TORCHS = frozenset(vars(nn.Module()))  # of every module: what they hold is looked at by itself
_IDLE = _TORCHS | {
    *("_is_hf_initialized", "generation_config", "gradient_checkpointing", "name_or_path"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
    *("output_hidden_states", "_output_attentions", "_name_or_path", "transformers_version"),
    "rope_deltas",  # what the last prompt's pictures did to positions: set by `generate`
}
"""Attributes of modules and configs that may be set at will: no logit of ours depends on them."""

_LINEAR = {"in_features", "out_features"}  # of a linear layer, which reads its weight alone
_PLAIN = {Tensor, nn.Parameter, nn.Buffer}  # kinds of tensors that hide no others


class _Weight(NamedTuple):
    place: dict[str, Any]
    name: str
    path: str
    tensor: Tensor

    @property
    def identity(self) -> object:
        """Another if it was replaced, but for what is offloaded."""
        return self.tensor.dtype if self.tensor.is_meta else id(self.tensor)


class ModelWatch:
    """A model as it is now, to compare with what it is later.

    All of it is compared in a few calls that loop in C, and a reason is looked for only where one
    of them finds a difference. Weights, which are too many for that, are compared by counters,
    addresses and their first and last numbers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        named = _modules(model)
        self._owners = dict([*named, *_configs(named)])
        self._attributes = [vars(one) for one in self._owners.values()]
        self._first = self._copies = _copied(self._attributes)
        self._weights = list(_weights(named))
        # what is offloaded is another object after every pass
        here = {one.path: one.tensor for one in self._weights if not one.tensor.is_meta}
        placed = {path: one for path, one in here.items() if type(one) in _PLAIN}  # at an address
        counting = {path: one for path, one in here.items() if not one.is_inference()}
        self._asked: list[tuple[str, Callable[[Any], object], dict[str, Any]]] = [
            ("{0} is a {2.__name__}, it was a {1.__name__}", type, self._owners),
            ("{0} was cast from {1} to {2}", attrgetter("dtype"), placed),
            ("{0} was moved to {2}", attrgetter("device"), placed),
            ("{0} was replaced", Tensor.data_ptr, placed),
            ("{0} was changed", attrgetter("_version"), counting),
        ]
        """What is asked of which, by path; and how another answer is told."""
        self._answers = self._ask()
        # those that compressed-tensors runs lie in no dict: what is asked of each has to do
        kept = [w for w in self._weights if not w.tensor.is_meta and isinstance(w.place, dict)]
        self._places, self._names = [one.place for one in kept], [one.name for one in kept]
        self._tensors = [one.tensor for one in kept]
        self._ends: list[tuple[str, Array[c_char]]] = []
        """Path and first word, path and last word of each weight in memory, where they lie."""
        for weight in self._weights:
            tensor = getattr(weight.tensor, "blocks", weight.tensor)
            if type(tensor) in _PLAIN and tensor.is_cpu and tensor.is_contiguous():
                size = min(_WORD, tensor.nbytes)
                for at in (0, tensor.nbytes - size) if size else ():
                    word = (c_char * size).from_address(tensor.data_ptr() + at)
                    self._ends.append((weight.path, word))
        self._words = self._read()

    def change(self) -> str | None:
        """What is not as it was, or None."""
        if not self._looks_the_same():
            for reason in self._changes():
                return reason
            self._copies = _copied(self._attributes)  # something idle is another
        for (path, _), was, word in zip(self._ends, self._words, self._read(), strict=True):
            if word != was:
                return f"{path} was changed"
        return None

    def _read(self) -> list[bytes]:
        return [word.raw for _, word in self._ends]

    def _looks_the_same(self) -> bool:
        """Whether nothing can have changed but numbers. False also where something idle did."""
        return (
            all(map(is_, map(dict.get, self._places, self._names), self._tensors))
            and _same(self._attributes, self._copies)
            and self._ask() == self._answers
        )

    def _ask(self) -> list[list[object]]:
        with torch._C.DisableTorchFunctionSubclass():  # else each subclass takes a microsecond
            return [list(map(function, each.values())) for _, function, each in self._asked]

    def _changes(self) -> Iterator[str]:
        for (text, function, each), answers in zip(self._asked, self._answers, strict=True):
            for (path, one), was in zip(each.items(), answers, strict=True):
                if (now := function(one)) != was:
                    yield text.format(path, was, now)
        for (path, one), attributes in zip(self._owners.items(), self._first, strict=True):
            yield from _changes(path, one, attributes)
        found = {one.path: one.identity for one in _weights(_modules(self._model))}
        for one in self._weights:
            if found.get(one.path) != one.identity:
                yield f"{one.path} was replaced"


def _held(by: dict[str, Any]) -> dict[str, object]:
    """What a module holds, by its attributes."""
    tensors = {**by["_parameters"], **by["_buffers"]}
    weights = {name for name, tensor in tensors.items() if tensor is not None}
    return {"modules": by["_modules"], "weights": weights, "hooks": foreign_hooks(by)}


def _changes(path: str, one: Any, was: dict[str, Any]) -> Iterator[str]:
    """What a module or config has otherwise than it had, but for its tensors and what is idle."""
    now = vars(one)
    if isinstance(one, nn.Module):
        both = zip(_held(was).items(), _held(now).values(), strict=True)
        yield from (f"{path} has other {aspect}" for (aspect, old), new in both if old != new)
    idle = _IDLE | (_LINEAR if type(one) is nn.Linear else set())
    idle |= {name for name in {**was, **now} if _moves(one, name)}
    watched = {"training"} if has_dropout(one) else set()
    for name in sorted((was.keys() | now.keys()) - idle | watched):
        if isinstance(value := was.get(name), Tensor):
            continue
        if name in was:
            if name not in now or not _same(value, now[name]):
                yield f"{name} of {path} was changed"
        elif name in ("forward", "_hf_hook"):
            yield f"the forward of {path} was replaced"
        elif not name.startswith("_") or hasattr(type(one), name):  # code may look for it
            yield f"{path} has {name}, which it had not"


def _same(was: object, now: object) -> bool:
    try:
        return was is now or bool(was == now)
    except Exception:  # noqa: BLE001  # tensors that are not the same need not be comparable
        return False


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(path or "the model", module) for path, module in model.named_modules()]


def _moves(one: object, name: str) -> bool:
    """Whether each pass of the model itself writes this anew (rotations: dynamic NTK, longrope)."""
    written = name.endswith(("inv_freq", "max_seq_len_cached"))
    return written and any(kind in str(getattr(one, "rope_type", "")) for kind in MOVING_ROPE)


def _configs(named: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, Any]]:
    found: dict[int, tuple[str, PreTrainedConfig]] = {}

    def look(path: str, owner: object) -> None:
        for name, value in vars(owner).items():
            if isinstance(value, PreTrainedConfig) and id(value) not in found:
                found[id(value)] = f"{name} of {path}", value
                look(*found[id(value)])

    for path, module in named:
        look(path, module)
    return list(found.values())


def has_dropout(one: Any) -> bool:
    """Whether a module, or what it holds directly, drops shares out in training."""
    parts = (one, *one.children()) if isinstance(one, nn.Module) else ()
    held = [(name, value) for part in parts for name, value in vars(part).items()]
    return any(
        (name == "p" or "drop" in name) and isinstance(value, float) and value > 0
        for name, value in held
    )


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_copied(entry) for entry in value]
    return set(value) if isinstance(value, set) else value


def _weights(named: Sequence[tuple[str, nn.Module]]) -> Iterator[_Weight]:
    for path, module in named:
        for place in (module._parameters, module._buffers, vars(module)):
            for name, tensor in place.items():
                # what torch prunes or norms: a hook makes it anew at each pass, from those watched
                made = {f"{name}_orig", f"{name}_v"} & module._parameters.keys()
                idle = name in _IDLE or made or _moves(module, name)
                if isinstance(tensor, Tensor) and not idle:
                    where = name if path == "the model" else f"{path}.{name}"
                    yield _Weight(place, name, where, tensor)
