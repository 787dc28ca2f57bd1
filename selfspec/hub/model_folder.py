"""Whether a folder from outside may be given to transformers: files of bounded size, whole weights.

Comes in: a folder with config.json. A config decides how much is built before any weight is read,
so its counts are held against the weights that are there. Called by `hub`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from selfspec.errors import InvalidData, ModelNotFound
from selfspec.typed import shown
from selfspec.untrusted import check_safetensors, read_json

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
_SIZES = {*_LAYERS, *_MOST}
_WIDEST = 8
"""Times the longest side of any weight: packed weights have shorter sides than a config says."""


INDEX = "model.safetensors.index.json"

_NUMBERS = ("F32", "BF16", "F16", "F64")
_MASKS = ("BOOL", "U8")
_WHOLE = ("position_ids", "num_batches_tracked")
"""Last names of buffers that old models keep beside their weights."""

Shapes = dict[str, list[int]]
"""Of all tensors of a model, by name."""


def check_model_folder(folder: Path) -> Shapes:
    """Shapes of the weights. Raises ModelNotFound, with the reason, unless they may be loaded."""
    shapes: Shapes = {}
    try:
        for file in _small_files(folder):
            if not file.is_file():
                raise InvalidData(f"{file} is no file")
            if file.stat().st_size > _MOST_BYTES:
                raise InvalidData(f"{file} has more than {_MOST_BYTES} bytes")
        configs = {name: _object(folder / name) for name in _OBJECTS if (folder / name).exists()}
        plain = configs["config.json"].get("quantization_config") is None
        indexed(folder)
        weights = sorted(folder.glob("*.safetensors"))
        for file in weights:
            tensors = check_safetensors(file)
            if plain:
                _require_numbers(file, tensors)
            shapes |= {name: shape for name, (_, shape) in tensors.items()}
    except InvalidData as error:
        raise ModelNotFound(f"cannot load {folder}: {error}") from error
    if not weights and any(file for kind in _PICKLED for file in folder.glob(kind)):
        raise ModelNotFound(
            f"cannot load {folder}: it holds pickled weights, which may run code and are never "
            "read. Expected *.safetensors: convert them"
        )
    check_sizes(folder, configs["config.json"], shapes)
    return shapes


def check_sizes(folder: Path, config: dict[str, Any], shapes: Shapes) -> None:
    """Raise ModelNotFound for a config of a model that these weights cannot be.

    Called with the file's own values, and with those that transformers adds to them: what is
    missing would be built at its default size, with random weights.
    """
    lengths = {length for shape in shapes.values() for length in shape}
    for name, value in _numbers(config):
        if name in _LAYERS:
            most = len(shapes) or None
        elif name in ("intermediate_size", "vocab_size"):
            most = min(_MOST[name], _WIDEST * max(lengths, default=_MOST[name]))
        else:
            most = _MOST.get(name)
        wrong = name in _SIZES and (value < 1 or (most is not None and value > most))
        if wrong:
            raise ModelNotFound(
                f"cannot load {folder}: its config has {name} {value}, which its weights have not"
            )
    text = config.get("text_config")
    width = (text if isinstance(text, dict) else config).get("hidden_size")
    if isinstance(width, int) and lengths and width not in lengths:
        raise ModelNotFound(f"cannot load {folder}: none of its weights has hidden_size {width}")


def indexed(folder: Path) -> list[Path]:
    """The files that the index of the weights names; none without one. Raises InvalidData."""
    path = folder / INDEX
    if not path.exists():
        return []
    index = read_json(path)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise InvalidData(f"{path} has no weight_map of names")
    for name in sorted(set(names.values())):
        plain = name.endswith(".safetensors") and Path(name).name == name
        if not (plain and (folder / name).is_file()):
            raise InvalidData(
                f"{path} names {shown(name)}, which is no .safetensors file beside it"
            )
    return [folder / name for name in sorted(set(names.values()))]


def _require_numbers(file: Path, tensors: Mapping[str, tuple[str, list[int]]]) -> None:
    """Raise InvalidData for whole numbers where a model that nobody quantised has weights.

    Read as another type, the bytes of a weight would be other numbers.
    """
    for name, (dtype, _) in tensors.items():
        known = dtype in _NUMBERS or name.rpartition(".")[2] in _WHOLE
        if not known and (name.endswith("weight") or dtype not in _MASKS):
            raise InvalidData(f"{file}: {name} holds {dtype}, expected {', '.join(_NUMBERS)}")


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
