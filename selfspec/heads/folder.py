"""What the files of a heads folder may hold, whoever wrote them. Imports no torch.

Comes in: `config.json`, and the header of `model.safetensors`, which repeats the config that its
weights were saved with. Goes out: plain values of the right types, or InvalidHeads. Called by
`heads` and by the commands that write such folders.
"""

from __future__ import annotations

import json
import logging
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from selfspec.config import SpeculationOptions
from selfspec.errors import HeadsNotFound, InvalidData, InvalidHeads, InvalidOption
from selfspec.untrusted import parse_json, read_json

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
FILES_OF_A_FIT = (
    *("README.md", CONFIG_FILE, "curves.png", "metrics.json", "metrics.jsonl"),
    *(WEIGHTS_FILE, "run.yaml"),
)
"""What `fit` writes."""

FORMAT_VERSION = 2
"""1: `base_fingerprint` is that of the unembedding alone."""

METADATA = "selfspec"
"""Name of the config in the header of the weights."""

_MOST_LAYERS = 4096
_MOST_CONFIG_BYTES = 1 << 20
MOST_TEMPLATE_CHARACTERS = 1 << 16
"""Of a chat template; those of models have some thousand."""
_SIZES = {
    "hidden_size": (1, 1 << 20),
    "num_layers": (1, _MOST_LAYERS),
    "vocab_size": (1, 1 << 24),
    "inner_size": (1, 1 << 24),
    "draft_vocab_size": (1, 1 << 24),
}
_TEXTS = ("base_model", "base_fingerprint", "head_type", "base_revision", "weights")
_MAY_BE_NONE = ("inner_size", "draft_vocab_size", "base_revision", "weights")
_REQUIRED = ("base_model", "base_fingerprint", "hidden_size", "num_layers", "vocab_size")

logger = logging.getLogger(__name__)


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a folder, all types and ranges checked.

    Where a run was killed between the weights and `config.json`, the one that the weights repeat.
    Raises HeadsNotFound without `config.json`, InvalidHeads for one that is none of heads.
    """
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        raise HeadsNotFound(f"no {CONFIG_FILE} in {folder}. Expected a folder of exit heads")
    try:
        found = checked(read_json(path, _MOST_CONFIG_BYTES))
    except (InvalidData, InvalidHeads) as error:
        raise InvalidHeads(f"{path} is not a config of exit heads: {error}") from error
    repeated = repeated_config(Path(folder) / WEIGHTS_FILE)
    if repeated is not None and repeated.get("weights") != found.get("weights"):
        logger.warning("%s is not that of the weights beside it, which is used instead", path)
        try:
            return checked(repeated)
        except InvalidHeads as error:
            raise InvalidHeads(
                f"{Path(folder) / WEIGHTS_FILE} repeats no config: {error}"
            ) from error
    return found


def is_heads_folder(folder: Path) -> bool:
    """Whether `fit` wrote it: asked before files in it are replaced."""
    config = folder / CONFIG_FILE
    if not config.exists():
        return repeated_config(folder / WEIGHTS_FILE) is not None
    try:
        values = read_json(config, _MOST_CONFIG_BYTES)
    except InvalidData:
        return False
    return isinstance(values, dict) and values.keys() >= {*_REQUIRED, "exit_layers", "head_type"}


def repeated_config(weights: Path) -> dict[str, Any] | None:
    """What the header of a weights file says; None where it says nothing, or is no such file."""
    if not weights.is_file():
        return None
    try:
        with safe_open(weights, "np") as file:
            values = parse_json((file.metadata() or {})[METADATA], str(weights))
    except (OSError, SafetensorError, InvalidData, KeyError, RuntimeError):
        return None
    return values if isinstance(values, dict) else None


def checked(values: Any) -> dict[str, Any]:
    """Values of a config with lists as tuples. Raises InvalidHeads with the reason alone."""
    if not isinstance(values, dict):
        raise InvalidHeads(f"it holds {_short(values)}, expected an object")
    version = values.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise InvalidHeads(
            f"it has format version {_short(version)}, this selfspec reads 1 to {FORMAT_VERSION}"
        )
    for name in (*_REQUIRED, "exit_layers", "head_type"):
        _require(name in values, name, None, "a value")
    for name in _TEXTS:
        if not _missing(values, name):
            text = values[name]
            fits = isinstance(text, str) and len(text) <= 1000 and text.isprintable()
            _require(fits, name, text, "a line of text")
    for name, (low, high) in _SIZES.items():
        if not _missing(values, name):
            size = values[name]
            _require(
                type(size) is int and low <= size <= high, name, size, f"a number in {low}..{high}"
            )
    layers = values["exit_layers"]
    fits = isinstance(layers, list) and len(layers) <= _MOST_LAYERS
    fits = fits and all(type(layer) is int for layer in layers)
    _require(fits, "exit_layers", layers, "a list of whole numbers")
    for name in ("temperatures", "defaults", "training"):
        _require(isinstance(values.get(name, {}), dict), name, values.get(name), "an object")
    if (template := values.get("chat_template")) is not None:
        fits = isinstance(template, str) and len(template) <= MOST_TEMPLATE_CHARACTERS
        _require(fits, "chat_template", template, "the text of a chat template")
    _check_temperatures(values.get("temperatures", {}), layers)
    defaults = values.get("defaults", {})
    _check_defaults(defaults, layers)
    return values | {"exit_layers": tuple(layers), "defaults": defaults}


def _missing(values: Mapping[str, Any], name: str) -> bool:
    return values.get(name) is None and name in _MAY_BE_NONE


def _check_temperatures(values: Mapping[str, Any], layers: list[int]) -> None:
    known = {str(layer) for layer in layers}
    for layer, value in values.items():
        _require(layer in known, "temperatures", layer, "exit layers of these heads")
        fits = type(value) in (int, float) and 1e-6 < value < 1e6 and math.isfinite(value)
        _require(fits, f"the temperature of layer {layer}", value, "a number above 0")


def _check_defaults(values: Mapping[str, Any], layers: list[int]) -> None:
    try:
        options = SpeculationOptions().updated(values)
        chosen = layers if options.exit.layers is None else list(options.exit.layers)
        fits = set(chosen) <= set(layers) and len(options.exit.thresholds) in (1, len(chosen))
    except (InvalidOption, TypeError, ValueError, OverflowError) as error:
        raise InvalidHeads(f"its defaults are none: {error}") from error
    _require(fits, "defaults", values, f"exit layers among {layers}, one threshold or one each")


def _require(condition: bool, name: str, value: Any, expected: str) -> None:
    if not condition:
        raise InvalidHeads(f"{name} is {_short(value)}, expected {expected}")


def _short(value: Any) -> str:
    """A value in a message: no more than some words of it."""
    text = reprlib.repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def as_json(config: Mapping[str, Any]) -> str:
    """A config as both files hold it."""
    return json.dumps(config, indent=2) + "\n"
