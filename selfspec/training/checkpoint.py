"""A fit that can be killed at any moment: its whole state in one file, renamed into place.

Comes in: named tensors and a record. Goes out: the same, bit for bit. Called by `fit`. The only
randomness of a fit, the order of batches, follows from its seed and step, so nothing else is kept.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from selfspec import files
from selfspec.errors import InvalidData, InvalidOption
from selfspec.untrusted import parse_json

FILE = "checkpoint.safetensors"

_RECORD = "selfspec"  # what marks a file as ours has to stand near its beginning

_MOMENTS = ("exp_avg", "exp_avg_sq")


def save(path: Path, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
    """Replace the checkpoint at `path`. Raises CannotWrite, with the one before it whole."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with files.replacing(path) as new:
        save_file(whole, new, {_RECORD: json.dumps(record)})


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Tensors and record, or None where there is no checkpoint. Raises InvalidData if damaged."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            record = parse_json((file.metadata() or {})[_RECORD], "its record")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
    except (OSError, SafetensorError, InvalidData, KeyError, RuntimeError) as error:
        raise damaged(path, error) from error
    if not isinstance(record, dict) or not isinstance(record.get("job"), dict):
        raise damaged(path, "it does not say of what")
    return tensors, record


def damaged(path: Path, reason: object) -> InvalidData:
    """What to raise for a file that a fit cannot go on from."""
    words = " ".join(str(reason).split())
    return InvalidData(f"{path} is no checkpoint: {words}. Remove it to start over")


def remove(workplace: Path) -> None:
    """Delete the checkpoint, and its folder if nothing else is in it. Raises CannotWrite."""
    path = workplace / FILE
    if not path.is_symlink() and path.is_file():
        path.unlink(missing_ok=True)
    with suppress(OSError):
        workplace.rmdir()


def check_tensors(path: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise InvalidData unless names and shapes are those of `expected`, and all is finite."""
    if found.keys() != expected.keys():
        names = sorted(found.keys() ^ expected.keys())
        raise damaged(path, f"tensors of other names, such as {names[0][:80]!r}")
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape or not tensor.is_floating_point():
            raise damaged(path, f"{name} is {tensor.dtype} {list(tensor.shape)}")
        if not bool(tensor.isfinite().all()):
            raise damaged(path, f"{name} holds numbers that are not finite")


def require_same(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise InvalidOption naming the first entry in which two descriptions of a run differ."""
    for name in sorted(found.keys() | expected.keys()):
        before, now = found.get(name), expected.get(name)
        if before != now:
            plain = isinstance(now, str | int | float | None)
            words = f"{name} {reprlib.repr(before)}, not {now}" if plain else f"another {name}"
            raise InvalidOption(
                f"{path} belongs to an unfinished run with {words}. Give the same options, another "
                "--output, or --overwrite"
            )


def optimizer_tensors(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Tensor]:
    """AdamW's moments by parameter name; empty before its first step."""
    named: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        state = optimizer.state.get(parameter, {})
        named |= {f"{moment}.{name}": state[moment] for moment in _MOMENTS if moment in state}
    return named


def moments(module: nn.Module) -> dict[str, Tensor]:
    """Tensors of the shapes of AdamW's moments, by the names that `optimizer_tensors` gives."""
    learning = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    return {f"{moment}.{name}": p.detach() for name, p in learning for moment in _MOMENTS}


def restore_optimizer(
    optimizer: torch.optim.Optimizer, module: nn.Module, tensors: dict[str, Tensor], step: int
) -> None:
    """Give AdamW back its moments after `step` steps."""
    for name, parameter in module.named_parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(float(step)),
            **{m: tensors[f"{m}.{name}"].to(parameter.device) for m in _MOMENTS},
        }
