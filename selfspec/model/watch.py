"""Notices that a model is no longer what was wrapped: weights, modules, attributes, configs, hooks.

Comes in: a model, when it is wrapped. Goes out: what has changed since, in words, or nothing. Asked
at the beginning of every request, so all of it is compared in a few calls that loop in C, and a
reason is looked for only where one of them finds a difference. Weights, which are too many for
that, are compared by counters, addresses and a part of their numbers. Called by the backbone.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from ctypes import string_at
from math import gcd
from mmap import PAGESIZE
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from selfspec.model.parts import foreign_hooks
from selfspec.model.weights import FilePages, tells_written, written_pages

PARTS = 64
"""Requests that look at all the numbers which are compared, a part each. So what changed one row or
one column through `.data`, which no counter sees, is found by the 64th request at the latest."""

_TOGETHER = 4
"""Neighbouring rows that are looked at by the same request: they often share a page of memory."""

_WORD = 8
"""Bytes that are compared at a time."""

_SMALL = 64
"""Weights of fewer bytes are compared as a whole."""

_TORCHS = frozenset(vars(nn.Module()))
"""Attributes of every module: what they hold is looked at by itself."""

_IDLE = _TORCHS | {
    *("_is_hf_initialized", "generation_config", "gradient_checkpointing", "name_or_path"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
    *("output_hidden_states", "_output_attentions", "_name_or_path", "transformers_version"),
}
"""Attributes of modules and configs that callers may set as they like: no logit depends on them."""

_LINEAR = {"in_features", "out_features"}
"""Of a plain linear layer, most of all modules; its forward reads its weight alone."""

_PLAIN = {Tensor, nn.Parameter, nn.Buffer}
"""Kinds of tensors that hide no others."""

_VALUES = {bool, int, float, str, list, tuple, dict, set}
"""Kinds of attributes that are the same if they are equal; of others, objects are compared."""

_HOLDERS = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")

_dtype_of = attrgetter("dtype")
_version_of = attrgetter("_version")


class _Part(NamedTuple):
    """One module, as it was."""

    path: str
    module: nn.Module
    children: dict[str, nn.Module | None]
    weights: set[str]
    """Names of parameters and buffers that are there."""
    hooks: list[Any]


class _Owner(NamedTuple):
    """What has attributes, a module or a config, as it was."""

    path: str
    object: Any
    kind: type
    own: dict[str, Any]
    names: frozenset[str]


class _Attribute(NamedTuple):
    """One value that code may read, as it was."""

    place: dict[str, Any]
    name: str
    path: str
    value: Any
    copy: Any
    """What it held, of a list or the like; else the value itself."""


class _Weight(NamedTuple):
    """One parameter or buffer, or a tensor that is an attribute, as it was."""

    place: dict[str, Any]
    name: str
    path: str
    tensor: Tensor
    dtype: torch.dtype
    device: torch.device
    version: int | None
    """None for tensors that do not count changes."""
    pointer: int | None
    """None for tensors made of other tensors."""


class ModelWatch:
    """A model as it is now, to compare with what it is later."""

    def __init__(self, model: nn.Module) -> None:
        """Reads a few bytes of each row of the weights."""
        named = [(path or "the model", module) for path, module in model.named_modules()]
        self._parts = [
            _Part(
                *(path, module, dict(module._modules)),
                *(_weight_names(module), foreign_hooks(module)),
            )
            for path, module in named
        ]
        owners = [*named, *_configs(named)]
        self._owners = [
            _Owner(path, one, type(one), vars(one), frozenset(vars(one))) for path, one in owners
        ]
        self._weights = [weight for path, module in named for weight in _weights(path, module)]
        self._attributes = [one for owner in self._owners for one in _attributes(owner)]
        self._numbers = _Numbers(self._weights)
        self._note()

    def _note(self) -> None:
        """The same as lists, each of which one call compares."""
        self._objects = [owner.object for owner in self._owners]
        self._kinds = [owner.kind for owner in self._owners]
        self._owns = [owner.own for owner in self._owners]
        self._sizes = [len(own) for own in self._owns]
        held = [getattr(part.module, name) for part in self._parts for name in _HOLDERS]
        self._empty = [one for one in held if not one]
        self._filled = [one for one in held if one]
        self._contents = [dict(one) for one in self._filled]
        values = [(one.place, one.name, one.value) for one in self._attributes]
        values += [(one.place, one.name, one.tensor) for one in self._weights]
        self._places, self._names, self._values = map(list, zip(*values, strict=True))
        copied = [one for one in self._attributes if one.copy is not one.value]
        self._containers = [one.value for one in copied]
        self._copies = [one.copy for one in copied]
        placed = [one for one in self._weights if one.pointer is not None]
        self._placed = [one.tensor for one in placed]
        self._pointers = [one.pointer for one in placed]
        self._dtypes = [one.dtype for one in placed]
        counting = [one for one in self._weights if one.version is not None]
        self._counting = [one.tensor for one in counting]
        self._versions = [one.version for one in counting]

    def change(self) -> str | None:
        """What is not as it was, or None."""
        found = None
        if not self._looks_the_same():
            found = self._changed_part() or self._changed_weight() or self._changed_attribute()
            if found is None:
                self._note()
        if found is None and (path := self._numbers.changed()) is not None:
            found = f"{path} was changed"
        return found

    def _looks_the_same(self) -> bool:
        """Whether nothing can have changed but numbers. False also where idle hooks came."""
        try:
            return (
                list(map(type, self._objects)) == self._kinds
                and not any(self._empty)
                and self._filled == self._contents
                and list(map(len, self._owns)) == self._sizes
                and all(map(is_, map(dict.get, self._places, self._names), self._values))
                and self._containers == self._copies
                and list(map(Tensor.data_ptr, self._placed)) == self._pointers
                and list(map(_dtype_of, self._placed)) == self._dtypes
                and self._counted() == self._versions
            )
        except Exception:  # noqa: BLE001  # tensors that are not the same need not be comparable
            return False

    def _counted(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():  # else each subclass takes a microsecond
            return list(map(_version_of, self._counting))

    def _changed_part(self) -> str | None:
        for path, owner, kind, own, names in self._owners:
            if type(owner) is not kind:
                return f"{path} is a {type(owner).__name__}, it was a {kind.__name__}"
            added = {name for name in own.keys() - names - _IDLE if _is_read(name, kind)}
            if "forward" in added or "_hf_hook" in added:
                return f"the forward of {path} was replaced"
            if added:
                return f"{path} has {min(added)}, which it had not"
        for path, module, children, weights, hooks in self._parts:
            if module._modules != children:
                return f"{path} has other modules"
            if _weight_names(module) != weights:
                return f"{path} has other weights"
            if foreign_hooks(module) != hooks:
                return f"{path} has other hooks"
        return None

    def _changed_weight(self) -> str | None:
        for place, name, path, tensor, dtype, device, version, pointer in self._weights:
            now = place.get(name)
            if now is not tensor and (now is None or not (now.is_meta and tensor.is_meta)):
                return f"{path} was replaced"
            if now.dtype is not dtype:
                return f"{path} was cast from {dtype} to {now.dtype}"
            if pointer is not None and now.data_ptr() != pointer:
                moved = now.device != device
                return f"{path} was " + (f"moved to {now.device}" if moved else "replaced")
            if version is not None and now._version != version:
                return f"{path} was changed"
        return None

    def _changed_attribute(self) -> str | None:
        for place, name, path, value, copy in self._attributes:
            now = place.get(name)
            same = now == copy if type(now) is type(value) in _VALUES else now is value
            if name not in place or not same:
                return f"{name} of {path} was changed"
        return None


def _is_read(name: str, kind: type) -> bool:
    """Whether code may look for an attribute that a module of this kind had not."""
    return name == "_hf_hook" or not name.startswith("_") or hasattr(kind, name)


def _weight_names(module: nn.Module) -> set[str]:
    both = [*module._parameters.items(), *module._buffers.items()]
    return {name for name, tensor in both if tensor is not None}


def _configs(named: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, PreTrainedConfig]]:
    """All that the modules hold, and that these hold."""
    found: dict[int, tuple[str, PreTrainedConfig]] = {}

    def look(path: str, owner: object) -> None:
        for name, value in vars(owner).items():
            if isinstance(value, PreTrainedConfig) and id(value) not in found:
                found[id(value)] = f"{name} of {path}", value
                look(*found[id(value)])

    for path, module in named:
        look(path, module)
    return list(found.values())


def _attributes(owner: _Owner) -> Iterator[_Attribute]:
    path, one, kind, own, names = owner
    for name in names - _IDLE - (_LINEAR if kind is nn.Linear else set()):
        if not isinstance(own[name], Tensor):
            yield _Attribute(own, name, path, own[name], _copied(own[name]))
    parts = (one, *one.children()) if isinstance(one, nn.Module) else ()
    if any(_drops(name, value) for part in parts for name, value in vars(part).items()):
        yield _Attribute(own, "training", path, own["training"], own["training"])


def _drops(name: str, value: object) -> bool:
    """Whether it is a share that is dropped out in training."""
    return (name == "p" or "drop" in name) and isinstance(value, float) and value > 0


def _copied(value: Any) -> Any:
    """A container with copies of those in it; all else as it is."""
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_copied(entry) for entry in value]
    return set(value) if isinstance(value, set) else value


def _weights(path: str, module: nn.Module) -> Iterator[_Weight]:
    for place in (module._parameters, module._buffers, vars(module)):
        for name, tensor in place.items():
            if isinstance(tensor, Tensor):
                where = name if path == "the model" else f"{path}.{name}"
                offloaded = tensor.is_meta  # another object after every pass
                counts = not (offloaded or tensor.is_inference())
                plain = type(tensor) in _PLAIN and not offloaded
                yield _Weight(
                    *(place, name, where, tensor, tensor.dtype, tensor.device),
                    tensor._version if counts else None,
                    tensor.data_ptr() if plain else None,
                )


class _Numbers:
    """What weights hold in main memory: words of each row and column, and who wrote to pages.

    Reading a page that only repeats a file brings it back into memory, which executors with copies
    of their own have given back. Whether somebody wrote to it, the kernel tells without that.
    """

    def __init__(self, weights: Sequence[_Weight]) -> None:
        """Reads the words."""
        files, told = FilePages(), dict[tuple[int, int], bool]()
        self._turn, self._held = 0, _in_memory(weights)
        self._ends = [end for _, end, _, _ in self._held]
        self._small = list[tuple[int, int]]()
        whole = list[tuple[int, int, Tensor]]()
        for start, end, _, tensor in self._held:
            mapping = files.around(start, end)
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
        """Of the first weight that has some of these bytes."""
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
