"""A fit that can be killed at any moment: its whole state in one file, renamed into place.

Comes in: named tensors and a record. Goes out: the same, bit for bit. Called by `fit`. The only
randomness of a fit, the order of batches, follows from its seed and step, so nothing else is kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from selfspec.errors import InvalidOption, SelfspecError

FILE = "checkpoint.safetensors"

_MOMENTS = ("exp_avg", "exp_avg_sq")


def save(path: Path, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
    """Replace the checkpoint at `path`. Raises SelfspecError when it cannot be written."""
    new = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, new, {"record": json.dumps(record)})
        new.replace(path)
    except (OSError, SafetensorError) as error:
        new.unlink(missing_ok=True)
        raise SelfspecError(
            f"cannot write {path}: {error}. The checkpoint before it is whole: free some space and "
            "run the same command again"
        ) from error


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Tensors and record, or None where there is no checkpoint. Raises SelfspecError if damaged."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            record = json.loads(file.metadata()["record"])
            return {name: file.get_tensor(name) for name in file.keys()}, record  # noqa: SIM118  # no dict
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise SelfspecError(f"{path} is no checkpoint: {error}. Remove it to start over") from error


def require_same(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise InvalidOption naming the first entry in which two descriptions of a run differ."""
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise InvalidOption(
                f"{path} belongs to an unfinished run with {name} {found.get(name)}, not "
                f"{expected.get(name)}. Give the same options, another --output, or --overwrite"
            )


def optimizer_tensors(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Tensor]:
    """AdamW's moments by parameter name; empty before its first step."""
    named: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        state = optimizer.state.get(parameter, {})
        named |= {f"{moment}.{name}": state[moment] for moment in _MOMENTS if moment in state}
    return named


def restore_optimizer(
    optimizer: torch.optim.Optimizer, module: nn.Module, tensors: dict[str, Tensor], step: int
) -> None:
    """Give AdamW back its moments after `step` steps."""
    for name, parameter in module.named_parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(float(step)),
            **{m: tensors[f"{m}.{name}"].to(parameter.device) for m in _MOMENTS},
        }
