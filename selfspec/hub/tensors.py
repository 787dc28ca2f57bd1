"""The tensors of a folder of safetensors, each read when it is asked for, its shape checked.

Comes in: a folder that `model_folder` has checked. Goes out: plain tensors. Called by `grouped`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfspec.errors import InvalidData
from selfspec.hub.model_folder import indexed

_ONE = "model.safetensors"


class Tensors:
    """By name."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidData for an index that is none, or names files that are not there."""
        from safetensors import safe_open

        self._file_of: dict[str, Any] = {}
        for file in _files(folder):
            try:
                opened = safe_open(file, framework="pt")
            except Exception as error:  # of its own kinds
                raise InvalidData(f"cannot read {file}: {error}") from error
            self._file_of |= dict.fromkeys(opened.keys(), opened)  # type: ignore[no-untyped-call]

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def get(
        self,
        name: str,
        shape: tuple[int | None, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """A tensor of this shape, None standing for any length. Raises InvalidData."""
        if name not in self:
            raise InvalidData(f"it lacks {name}")
        found: Tensor = self._file_of[name].get_tensor(name)
        if shape is not None and not _fits(tuple(found.shape), shape):
            asked = ", ".join("any" if length is None else str(length) for length in shape)
            raise InvalidData(f"{name} is {list(found.shape)}, expected [{asked}]")
        if dtype is not None and found.dtype != dtype:
            raise InvalidData(f"{name} holds {found.dtype}, expected {dtype}")
        return found


def _files(folder: Path) -> list[Path]:
    """As transformers finds them: one file, or those that an index names."""
    if (folder / _ONE).is_file():
        return [folder / _ONE]
    return indexed(folder) or sorted(folder.glob("*.safetensors"))


def _fits(found: tuple[int, ...], asked: tuple[int | None, ...]) -> bool:
    return len(found) == len(asked) and all(
        want in (None, has) for has, want in zip(found, asked, strict=True)
    )
