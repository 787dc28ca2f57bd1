"""Whether a folder from outside may be given to transformers: files of bounded size, whole weights.

Comes in: a folder with config.json. A config decides how much is built before any weight is read,
so its counts are held against the weights that are there. Called by `hub`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selfspec.errors import InvalidData, ModelNotFound
from selfspec.untrusted import check_safetensors, open_bytes, read_json

_MOST_BYTES = 256 << 20
"""Of a tokenizer's file; the largest known have a tenth."""

_OBJECTS = ("config.json", "generation_config.json", "tokenizer_config.json")
_SMALL = ("*.json", "*.jinja", "*.txt", "*.model")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")

_MOST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "head_dim": 1 << 20,
    "intermediate_size": 1 << 24,
}
"""Beyond every model there is; some of what depends on them is built in memory at once."""

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def check_model_folder(folder: Path) -> None:
    """Raise ModelNotFound, with the file and the reason, unless `folder` may be loaded."""
    try:
        for file in _small_files(folder):
            open_bytes(file).close()
            if file.stat().st_size > _MOST_BYTES:
                raise InvalidData(f"{file} has more than {_MOST_BYTES} bytes")
        configs = {name: _object(folder / name) for name in _OBJECTS if (folder / name).exists()}
        weights = sorted(folder.glob("*.safetensors"))
        tensors = sum(check_safetensors(file) for file in weights)
    except InvalidData as error:
        raise ModelNotFound(f"cannot load {folder}: {error}") from error
    if not weights and any(file for kind in _PICKLED for file in folder.glob(kind)):
        raise ModelNotFound(
            f"cannot load {folder}: it holds pickled weights, which may run code and are never "
            "read. Expected *.safetensors: convert them"
        )
    for name, value in _numbers(configs["config.json"]):
        _check_number(folder, name, value, tensors if weights else None)


def _small_files(folder: Path) -> Iterator[Path]:
    for kind in _SMALL:
        yield from folder.glob(kind)


def _object(file: Path) -> dict[str, Any]:
    values = read_json(file)
    if not isinstance(values, dict):
        raise InvalidData(f"{file} holds a {type(values).__name__}, expected an object")
    return values


def _numbers(config: Any) -> Iterator[tuple[str, int]]:
    """Whole numbers by name, those of inner configs too."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield name, value


def _check_number(folder: Path, name: str, value: int, tensors: int | None) -> None:
    """Raise ModelNotFound for what no model has, or these weights do not."""
    if name not in _LAYERS and name not in _MOST:
        return
    most = tensors if name in _LAYERS else _MOST[name]
    if value < 1 or (most is not None and value > most):
        limit = f"1 to {most}" if most is not None else "at least 1"
        raise ModelNotFound(
            f"cannot load {folder}: config.json has {name} {value}, expected {limit}"
        )
