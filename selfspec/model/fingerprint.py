"""The hash that tells one base model from another: of all its weights, whatever their dtype.

Comes in: a model, and where it was just loaded stamps of the files that decide its weights. Goes
out: 64 hex digits, or "" where the weights cannot be read. A file is hashed once: the cache folder
keeps the result by path, size and time. Called by `Backbone` and by what loads one; heads, features
and records carry it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec import files
from selfspec.errors import CannotWrite, InvalidData
from selfspec.files import cache_folder
from selfspec.model.compiler import KERNELS
from selfspec.model.weights import QuantisedWeight, processor_features
from selfspec.untrusted import read_json

logger = logging.getLogger(__name__)

FileStamp = tuple[str, int, int]
"""Real path, bytes, and time of the last change in nanoseconds."""

_KINDS = ("config.json", "*.index.json", "*.safetensors")

UNKNOWN = ""
"""In place of a fingerprint: the weights cannot be read, or there is no base model."""

_FORMAT_VERSION = 1
_BLOCK = 1 << 22  # numbers that are converted at a time: 8 MB
_PLAIN = (Tensor, nn.Parameter, QuantisedWeight)
_PACKED_MODULES = "torch.ao.nn.quantized"  # their weights are no tensors at all


def of(model: nn.Module) -> str:
    """sha256 over name, shape and hash of each weight and kept buffer; tied ones count once.

    Numbers are rounded to bfloat16, then to float16, so that a model whose file is in bfloat16 has
    one fingerprint in whichever dtype it was loaded. UNKNOWN, with a line in the log, for weights
    that were quantised on loading, or are not in memory.
    """
    weights = dict(sorted(_weights(model)))
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
    if not loaded_from or stamps(Path(path) for path, _, _ in loaded_from) != loaded_from:
        return of(model)  # not known, or replaced while they were read
    key = [
        *(_FORMAT_VERSION, metadata.version("transformers"), str(model.dtype)),
        *map(list, loaded_from),
    ]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    place = cache_folder() / "fingerprints" / f"{name}.json"
    if (known := _kept(place, key)) is not None:
        return known
    if (found := of(model)) != UNKNOWN:
        try:
            files.write(place, json.dumps({"selfspec": key, "fingerprint": found}) + "\n")
        except CannotWrite as error:  # a folder that takes no files costs time, nothing else
            logger.debug("the fingerprint is not kept: %s", error)
    return found


def mark_of_checks(
    model: PreTrainedModel, executor: str, loaded_from: tuple[FileStamp, ...]
) -> Path | None:
    """The file that says that this model, read from these files, passed the checks of a Backbone.

    It stands for all that the checks look at: files, config, versions, our own code, processor.
    None where they have to be made.
    """
    if not loaded_from or stamps(Path(path) for path, _, _ in loaded_from) != loaded_from:
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


def _kept(place: Path, key: list[object]) -> str | None:
    """What an earlier run found; None where there is nothing that can be used."""
    if not place.is_file():
        return None
    try:
        found = read_json(place)
        usable = found["selfspec"] == key and len(bytes.fromhex(found["fingerprint"])) == 32
    except (InvalidData, LookupError, TypeError, ValueError):
        return None
    return str(found["fingerprint"]) if usable else None


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
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
        if type(weight) not in _PLAIN or weight.is_quantized:
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
