"""Which model it is: a hash of all its weights; and whether it is still what was wrapped.

Comes in: a model, and where it was just loaded stamps of the files that decide its weights. Goes
out: 64 hex digits, whatever the dtype, or "" where the weights cannot be read; heads, features and
records carry them. A file is hashed once: the cache folder keeps the result by path, size and time.
`ModelWatch` says what has changed since, in words; the backbone asks at every request.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from ctypes import string_at
from importlib import metadata
from math import gcd
from mmap import PAGESIZE
from operator import attrgetter, is_
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from selfspec import files
from selfspec.errors import CannotWrite
from selfspec.files import cache_folder
from selfspec.model.compiler import KERNELS
from selfspec.model.parts import foreign_hooks
from selfspec.model.weights import (
    FilePages,
    QuantisedWeight,
    processor_features,
    tells_written,
    written_pages,
)

logger = logging.getLogger(__name__)

FileStamp = tuple[str, int, int]
"""Real path, bytes, and time of the last change in nanoseconds."""

_KINDS = ("config.json", "*.index.json", "*.safetensors")

UNKNOWN = ""
"""In place of a fingerprint: the weights cannot be read, or there is no base model."""

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
    weights = dict(sorted(_kept_weights(model)))
    if reason := _unreadable(model, weights):
        logger.warning("the model has no fingerprint: %s. What fits it is not checked", reason)
        return UNKNOWN
    digest = hashlib.sha256()
    for name, weight in weights.items():
        digest.update(f"{name} {list(weight.shape)} {_of_tensor(weight)}\n".encode())
    return digest.hexdigest()


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


def mark_of_checks(
    model: PreTrainedModel, executor: str, loaded_from: tuple[FileStamp, ...]
) -> Path | None:
    """The file that says that this model, read from these files, passed the checks of a Backbone.

    It stands for all that the checks look at: files, config, versions, our own code, processor.
    None where they have to be made.
    """
    if not _as_stamped(loaded_from):
        return None
    config: Any = model.config
    facts = [
        *(executor, str(model.dtype), str(model.device), torch.get_num_threads()),
        *(config.to_json_string(), config._attn_implementation, torch.__version__),
        *(metadata.version("transformers"), sorted(processor_features()), loaded_from),
    ]
    digest = hashlib.sha256(json.dumps(facts).encode())
    for file in sorted((*KERNELS.parent.glob("*.py"), *KERNELS.glob("*.[ch]pp"))):
        digest.update(file.read_bytes())
    return cache_folder() / "checked" / digest.hexdigest()


def _kept_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the buffers that a file of the model would hold; shared ones once."""
    seen = set()
    for name, weight in model.state_dict(keep_vars=True).items():
        if isinstance(weight, Tensor) and id(weight) not in seen:
            seen.add(id(weight))
            yield name, weight


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
    """sha256 of the numbers in order; of whole numbers as they are."""
    digest = hashlib.sha256()
    for block in _blocks(weight.detach()):
        if block.is_floating_point():
            block = block.bfloat16().half()  # the block as it is hashed
        digest.update(block.contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _blocks(weight: Tensor) -> Iterator[Tensor]:
    """Its numbers in order, some at a time; blocks of a file are expanded no further."""
    if isinstance(weight, QuantisedWeight):
        for rows in torch.arange(len(weight)).split(max(1, _BLOCK // weight.shape[1])):
            yield weight.expanded(rows).reshape(-1)
    else:
        yield from weight.reshape(-1).split(_BLOCK)


# --- the files that decide weights --------------------------------------------------------------


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


# --- a model that was wrapped, compared with what it is later -------------------------------------


PARTS = 64
"""Requests that look at all the numbers which are compared, a part each. So what changed one row or
one column through `.data`, which no counter sees, is found by the 64th request at the latest."""

_TOGETHER = 4  # rows that are looked at by the same request: they often share a page of memory
_WORD = 8  # bytes that are compared at a time
_SMALL = 64  # weights of fewer bytes are compared as a whole

_TORCHS = frozenset(vars(nn.Module()))
"""Attributes of every module: what they hold is looked at by itself."""

_IDLE = _TORCHS | {
    *("_is_hf_initialized", "generation_config", "gradient_checkpointing", "name_or_path"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
    *("output_hidden_states", "_output_attentions", "_name_or_path", "transformers_version"),
}
"""Attributes of modules and configs that callers may set as they like: no logit depends on them."""

_LINEAR = {"in_features", "out_features"}
"""Attributes of a plain linear layer, as most modules are; its forward reads its weight alone."""

_PLAIN = {Tensor, nn.Parameter, nn.Buffer}  # kinds of tensors that hide no others

_VALUES = {bool, int, float, str, list, tuple, dict, set}
"""Kinds of attributes that are the same if they are equal; of others, objects are compared."""

_HOLDERS = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")


class _Weight(NamedTuple):
    place: dict[str, Any]
    name: str
    path: str
    tensor: Tensor

    @property
    def counts(self) -> bool:
        """Whether it counts changes; what is offloaded is another object after every pass."""
        return not (self.tensor.is_meta or self.tensor.is_inference())

    @property
    def placed(self) -> bool:
        """Whether it has an address: it is not made of other tensors."""
        return type(self.tensor) in _PLAIN and not self.tensor.is_meta


class ModelWatch:
    """A model as it is now, to compare with what it is later.

    All of it is compared in a few calls that loop in C, and a reason is looked for only where one
    of them finds a difference. Weights, which are too many for that, are compared by counters,
    addresses and a part of their numbers.
    """

    def __init__(self, model: nn.Module) -> None:
        """Reads a few bytes of each row of the weights."""
        self._model = model
        self._facts = dict(_facts(model))
        self._numbers = _Numbers(list(_weights(_modules(model))))
        self._note()

    def _note(self) -> None:
        """What decides the facts as lists, each of which one call compares."""
        named = _modules(self._model)
        weights, owners = list(_weights(named)), [*named, *_configs(named)]
        objects = [one for _, one in owners]
        held = [getattr(module, name) for _, module in named for name in _HOLDERS]
        self._empty = [one for one in held if not one]
        self._filled = [one for one in held if one]
        self._contents = list(map(dict, self._filled))
        values = [(vars(one), name) for one in objects for name in _watched(one)]
        values += [(one.place, one.name) for one in weights]
        self._places, self._names = map(list, zip(*values, strict=True))
        self._values = list(map(dict.get, self._places, self._names))
        self._containers = [one for one in self._values if type(one) in (dict, list, set)]
        self._copies = list(map(_copied, self._containers))
        placed = [one.tensor for one in weights if one.placed]
        counting = [one.tensor for one in weights if one.counts]
        self._asked: list[tuple[Callable[[Any], object], list[Any]]] = [
            (type, objects),
            (len, list(map(vars, objects))),
            (Tensor.data_ptr, placed),
            (attrgetter("dtype"), placed),
            (attrgetter("_version"), counting),
        ]
        self._answers = self._ask()

    def change(self) -> str | None:
        """What is not as it was, or None."""
        if not self._looks_the_same():
            now = dict(_facts(self._model))
            for fact, was in self._facts.items():
                if not _same(was, now.get(fact)):
                    return _said(*fact, was, now.get(fact))
            self._note()
        path = self._numbers.changed()
        return path and f"{path} was changed"

    def _looks_the_same(self) -> bool:
        """Whether nothing can have changed but numbers. False also where idle hooks came."""
        try:
            return (
                not any(self._empty)
                and self._filled == self._contents
                and all(map(is_, map(dict.get, self._places, self._names), self._values))
                and self._containers == self._copies
                and self._ask() == self._answers
            )
        except Exception:  # noqa: BLE001  # tensors that are not the same need not be comparable
            return False

    def _ask(self) -> list[list[object]]:
        with torch._C.DisableTorchFunctionSubclass():  # else each subclass takes a microsecond
            return [list(map(function, each)) for function, each in self._asked]


def _facts(model: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """What must stay as it is, by path and aspect: structure, then weights, then attributes."""
    named = _modules(model)
    owners = [*named, *_configs(named)]
    for path, module in named:
        weights = [*module._parameters.items(), *module._buffers.items()]
        yield (path, "modules"), dict(module._modules)
        yield (path, "weights"), {name for name, tensor in weights if tensor is not None}
        yield (path, "hooks"), foreign_hooks(module)
    for path, one in owners:
        kind, names = type(one), vars(one).keys() - _IDLE
        yield (path, "kind"), kind
        # what code may look for; not what a class has not and nobody asks for
        read = {name for name in names if not name.startswith("_") or hasattr(kind, name)}
        yield (path, "names"), read | names & {"_hf_hook"}
    for weight in _weights(named):
        path, tensor = weight.path, weight.tensor
        yield (path, "object"), None if tensor.is_meta else id(tensor)
        yield (path, "dtype"), tensor.dtype
        yield (path, "device"), tensor.device
        yield (path, "pointer"), tensor.data_ptr() if weight.placed else None
        yield (path, "version"), tensor._version if weight.counts else None
    for path, one in owners:
        for name in _watched(one):
            value = vars(one)[name]
            kept = (type(value), _copied(value)) if type(value) in _VALUES else id(value)
            yield (f"{name} of {path}", "value"), kept


def _same(was: object, now: object) -> bool:
    try:
        return bool(was == now)
    except Exception:  # noqa: BLE001  # tensors in a list that are not the same
        return False


def _said(path: str, aspect: str, was: Any, now: Any) -> str:
    """How a change of one fact is told; `now` is None where its owner has gone."""
    if aspect == "kind" and now is not None:
        return f"{path} is a {now.__name__}, it was a {was.__name__}"
    if aspect == "names" and (added := (now or set()) - was):
        if added & {"forward", "_hf_hook"}:
            return f"the forward of {path} was replaced"
        return f"{path} has {min(added)}, which it had not"
    if aspect in ("modules", "weights", "hooks"):
        return f"{path} has other {aspect}"
    if aspect == "dtype" and now is not None:
        return f"{path} was cast from {was} to {now}"
    if aspect == "device" and now is not None:
        return f"{path} was moved to {now}"
    return f"{path} was {'replaced' if aspect in ('object', 'pointer') else 'changed'}"


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(path or "the model", module) for path, module in model.named_modules()]


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


def _watched(one: Any) -> set[str]:
    found = vars(one).keys() - _IDLE - (_LINEAR if type(one) is nn.Linear else set())
    parts = (one, *one.children()) if isinstance(one, nn.Module) else ()
    held = [(name, value) for part in parts for name, value in vars(part).items()]
    if any(
        (name == "p" or "drop" in name) and isinstance(value, float) and value > 0
        for name, value in held
    ):
        found |= {"training"}  # shares are dropped out
    return {name for name in found if not isinstance(vars(one)[name], Tensor)}


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
                if isinstance(tensor, Tensor):
                    where = name if path == "the model" else f"{path}.{name}"
                    yield _Weight(place, name, where, tensor)


class _Numbers:
    """What weights hold in main memory: words of each row and column, and who wrote to pages.

    Reading a page that only repeats a file brings it back into memory, which executors with copies
    of their own have given back. Whether somebody wrote to it, the kernel tells without that.
    """

    def __init__(self, weights: Sequence[_Weight]) -> None:
        """Reads the words."""
        pages, told = FilePages(), dict[tuple[int, int], bool]()
        self._turn, self._held = 0, _in_memory(weights)
        self._ends = [end for _, end, _, _ in self._held]
        self._small = list[tuple[int, int]]()
        whole = list[tuple[int, int, Tensor]]()
        for start, end, _, tensor in self._held:
            mapping = pages.around(start, end)
            if mapping is not None and mapping not in told:
                told[mapping] = tells_written(*mapping)
            if mapping is None or not told[mapping]:
                first, last = -(-start // _WORD) * _WORD, end // _WORD * _WORD
                if last - first < _SMALL:
                    first = last = end
                else:
                    whole.append((first, last, tensor))
                edges = (start, first), (last, end)
                self._small += [(low, high - low) for low, high in edges if low < high]
        self._mappings = [mapping for mapping, tells in told.items() if tells]
        self._bytes = [string_at(*one) for one in self._small]
        self._places, self._words = list[Tensor](), list[Tensor]()
        if whole:
            self._low = whole[0][0]
            size = max(last for _, last, _ in whole) - self._low
            self._memory = torch.frombuffer(  # all that lies between the first word and the last
                (ctypes.c_byte * size).from_address(self._low), dtype=torch.int64
            )
            places = torch.cat([_spread(*one) for one in whole], dim=1) - self._low // _WORD
            self._places = list(places)
            self._words = [self._memory.index_select(0, part) for part in self._places]

    def changed(self) -> str | None:
        """The path of a weight where the next part of its numbers is not as it was, or None."""
        turn, self._turn = self._turn, (self._turn + 1) % PARTS
        if self._words:
            places, words = self._places[turn], self._words[turn]
            found = self._memory.index_select(0, places)
            if not torch.equal(found, words):
                at = int(places[int((found != words).nonzero()[0])])
                return self._path(self._low + at * _WORD, _WORD)
        for (start, size), was in zip(self._small, self._bytes, strict=True):
            if string_at(start, size) != was:
                return self._path(start, size)
        for low, high in self._mappings:
            piece = (high - low) // PARTS + 1
            start = low + turn * piece
            for page in written_pages(start, min(start + piece, high)):
                if (path := self._path(page, PAGESIZE)) is not None:
                    return path
        return None

    def _path(self, address: int, size: int) -> str | None:
        index = bisect_right(self._ends, address)
        if index < len(self._held) and self._held[index][0] < address + size:
            return self._held[index][2]
        return None


def _in_memory(weights: Sequence[_Weight]) -> list[tuple[int, int, str, Tensor]]:
    """First and last address, path and tensor, by address; shared ones once."""
    found = dict[int, tuple[int, int, str, Tensor]]()
    for weight in weights:
        tensor = getattr(weight.tensor, "blocks", weight.tensor)
        if type(tensor) in _PLAIN and tensor.is_cpu and tensor.is_contiguous() and tensor.nbytes:
            start = tensor.data_ptr()
            found.setdefault(start, (start, start + tensor.nbytes, weight.path, tensor))
    return [found[start] for start in sorted(found)]


def _spread(start: int, end: int, tensor: Tensor) -> Tensor:
    """Places of words between two addresses, in words, [PARTS, n]: one of each row and column.

    Less than a row apart, by a distance that has no divisor in common with a row's words.
    """
    first, count = start // _WORD, (end - start) // _WORD
    row = max(2, tensor.shape[-1] * tensor.itemsize // _WORD) if tensor.dim() > 1 else 2
    step = max(1, min(row - 1, count // row))
    while gcd(step, row) > 1:
        step -= 1
    places = torch.arange(first, first + count, step)
    together = _TOGETHER if len(places) > 4 * PARTS * _TOGETHER else 1
    rounds = -(-len(places) // (PARTS * together))
    places = places[torch.arange(rounds * PARTS * together) % len(places)]
    return places.view(rounds, PARTS, together).transpose(0, 1).flatten(1)
