"""What the files of a heads folder may hold, whoever wrote them. Imports no torch.

Comes in: `config.json`, ours or that of published EAGLE-3 heads, and the header of
`model.safetensors`, which repeats ours as it was when the weights were saved. Goes out: plain
values of the right types, or InvalidHeads. Called by `heads` and by the commands that write such
folders.
"""

from __future__ import annotations

import json
import logging
import math
import reprlib
from collections.abc import Iterable, Mapping
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
"""Name of the config in the header of the weights, and of our part of a config of EAGLE-3's."""

_MOST_LAYERS = 4096
_MOST_CONFIG_BYTES = 1 << 20
MOST_TEMPLATE_CHARACTERS = 1 << 16
"""Limit for a chat template; those of models have some thousand."""
_SIZES = {
    "hidden_size": (1, 1 << 20),
    "num_layers": (1, _MOST_LAYERS),
    "vocab_size": (1, 1 << 24),
    "inner_size": (1, 1 << 24),
    "draft_vocab_size": (1, 1 << 24),
    "num_heads": (1, 64),
}
_TEXTS = ("base_model", "base_fingerprint", "head_type", "base_revision", "weights")
_MAY_BE_NONE = ("inner_size", "draft_vocab_size", "num_heads", "base_revision", "weights")
_REQUIRED = ("base_model", "base_fingerprint", "hidden_size", "num_layers", "vocab_size")

EAGLE3 = "eagle3"
"""Head type of heads that attend, ours and those that others publish. Ours say what only selfspec
reads under one more key of the config, METADATA."""

MEDUSA = "medusa"
"""Head type of several heads on the last layer, each for a token further ahead."""

_EAGLE3_DEFAULTS = {"drafter": "ngram+exit:threshold=0.3,anneal_strength=0,max_tokens=5"}
"""Such heads bring no settings. Not measured: with 0.3 a third draft is right as often as not where
each is right at 0.8."""

_LAYERS = ("llama", "qwen3")
_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Rotations that do not depend on how long a text is."""

_LAYER_SIZES = {
    "hidden_size": True,
    "intermediate_size": True,
    "num_attention_heads": True,
    "vocab_size": True,
    "num_key_value_heads": False,
    "head_dim": False,
    "max_position_embeddings": False,
}
"""Whether a size must be there."""

SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

logger = logging.getLogger(__name__)


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a folder, all types and ranges checked.

    Where a run was killed between the weights and `config.json`, the weights' copy of it.
    Raises HeadsNotFound without `config.json`, InvalidHeads where it is no config of heads.
    """
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        raise HeadsNotFound(f"no {CONFIG_FILE} in {folder}. Expected a folder of exit heads")
    try:
        found = _config_of(read_json(path, _MOST_CONFIG_BYTES))
    except (InvalidData, InvalidHeads) as error:
        raise InvalidHeads(f"{path} is not a config of exit heads: {error}") from error
    repeated = repeated_config(Path(folder) / WEIGHTS_FILE)
    if repeated is not None and _weights_of(repeated) != found.get("weights"):
        logger.warning("%s is not that of the weights beside it, which is used instead", path)
        try:
            return _config_of(repeated)
        except InvalidHeads as error:
            raise InvalidHeads(
                f"{Path(folder) / WEIGHTS_FILE} repeats no config: {error}"
            ) from error
    return found


def _weights_of(config: Mapping[str, Any]) -> Any:
    """The hash in a config of either kind."""
    own = config.get(METADATA)
    return (own if isinstance(own, dict) else config).get("weights")


def _config_of(values: Any) -> dict[str, Any]:
    """The config of heads of any kind. Raises InvalidHeads with the reason alone."""
    return eagle3(values) if _is_eagle3(values) else checked(values)


def attends(folder: Path) -> bool:
    """Whether a folder holds EAGLE-3 heads, by its config, right or wrong."""
    try:
        return _is_eagle3(read_json(Path(folder) / CONFIG_FILE, _MOST_CONFIG_BYTES))
    except InvalidData:
        return False


def is_heads_folder(folder: Path) -> bool:
    """Whether `fit` wrote a folder: asked before files in it are replaced."""
    config = folder / CONFIG_FILE
    if not config.exists():
        return repeated_config(folder / WEIGHTS_FILE) is not None
    try:
        values = read_json(config, _MOST_CONFIG_BYTES)
    except InvalidData:
        return False
    ours = {*_REQUIRED, "exit_layers", "head_type"}
    return isinstance(values, dict) and (values.keys() >= ours or METADATA in values)


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
    if type(version) is not int or version != FORMAT_VERSION:
        raise InvalidHeads(
            f"it has format version {_short(version)}, this selfspec reads {FORMAT_VERSION}"
        )
    for name in (*_REQUIRED, "exit_layers", "head_type"):
        _require(name in values, name, None, "a value")
    _check_texts(values, _TEXTS)
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
    return {**values, **_of_a_fit(values, layers), "exit_layers": tuple(layers)}


_OF_A_FIT = ("temperatures", "defaults", "training")


def _of_a_fit(values: Mapping[str, Any], layers: list[int]) -> dict[str, Any]:
    """What a fit to these exit layers adds to sizes and kind, as far as it is said."""
    for name in _OF_A_FIT:
        _require(isinstance(values.get(name, {}), dict), name, values.get(name), "an object")
    if (template := values.get("chat_template")) is not None:
        fits = isinstance(template, str) and len(template) <= MOST_TEMPLATE_CHARACTERS
        _require(fits, "chat_template", template, "the text of a chat template")
    _check_temperatures(values.get("temperatures", {}), layers)
    _check_defaults(values.get("defaults", {}), layers)
    return {name: values[name] for name in (*_OF_A_FIT, "chat_template") if name in values}


def _check_texts(values: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        if not _missing(values, name):
            text = values[name]
            fits = isinstance(text, str) and len(text) <= 1000 and text.isprintable()
            _require(fits, name, text, "a line of text")


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
    # a user of somebody's heads wants the model's own text, and an answer to every request
    rule = values.get("acceptance")
    _require(options.loss is None, "the acceptance of defaults", rule, "a lossless rule")
    others = options.uses("draft-model") or options.uses("rest")
    for name, wanted in (("drafter", others), ("pinned", options.pinned)):
        _require(not wanted, f"{name} of defaults", values.get(name), "what runs everywhere")


# --- EAGLE-3 heads --------------------------------------------------------------------------------


def _is_eagle3(values: Any) -> bool:
    """Whether it is a config in the speculators format, or in the original one, which says less."""
    if not isinstance(values, dict) or "head_type" in values or "exit_layers" in values:
        return False
    return "speculators_model_type" in values or "draft_vocab_size" in values


def eagle3(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as from `checked`, of a config in either format. Raises InvalidHeads likewise."""
    kind = values.get("speculators_model_type")
    _require(kind in (None, EAGLE3), "speculators_model_type", kind, EAGLE3)
    own = values if kind is None else _object(values, "transformer_layer_config")
    layer = _layer(own)
    switches = {name: values.get(name) or False for name in SWITCHES}
    for name, value in switches.items():
        _require(type(value) is bool, name, value, "true or false")
    both = switches["norm_before_fc"] and switches["fc_norm"]
    _require(not both, "fc_norm", both, "false beside norm_before_fc")
    given = {**_object(values, "eagle_config"), **values}
    layers = given.get("eagle_aux_hidden_state_layer_ids")
    if layers is not None:
        fits = isinstance(layers, list) and 1 <= len(layers) <= 16
        fits = fits and all(type(one) is int and 0 <= one <= _MOST_LAYERS for one in layers)
        fits = fits and len(layers) == len(set(layers))
        _require(fits, "eagle_aux_hidden_state_layer_ids", layers, "different layers")
    verifier = _object(_object(values, "speculators_config"), "verifier")
    base = verifier.get("name_or_path")
    known = isinstance(base, str) and len(base) <= 1000 and base.isprintable()
    ours = {"base_fingerprint": "", **_object(values, METADATA)}
    _check_texts(ours, ours.keys() & set(_TEXTS))
    return {
        **switches,
        "base_model": base if known else "not said",
        "base_fingerprint": ours["base_fingerprint"],
        "weights": ours.get("weights"),
        "hidden_size": _size("target_hidden_size", values, layer["hidden_size"]),
        "num_layers": _size("num_layers", ours) if "num_layers" in ours else 0,
        "vocab_size": layer["vocab_size"],
        "draft_vocab_size": _size("draft_vocab_size", values, layer["vocab_size"]),
        "exit_layers": (0,),
        "head_type": EAGLE3,
        "defaults": dict(_EAGLE3_DEFAULTS),
        "format": "original" if kind is None else "speculators",
        "state_layers": None if layers is None else tuple(layers),
        "layer": layer,
        **_of_a_fit(ours, [0]),
    }


def _layer(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of the config of a decoder layer."""
    kind, count = values.get("model_type", "llama"), values.get("num_hidden_layers", 1)
    _require(isinstance(kind, str) and kind in _LAYERS, "model_type", kind, " or ".join(_LAYERS))
    _require(count == 1, "num_hidden_layers", count, "1")
    found: dict[str, Any] = {"model_type": kind, "rope_parameters": _rotation(values)}
    for name, needed in _LAYER_SIZES.items():
        if needed or values.get(name) is not None:
            found[name] = _size(name, values)
    query = found["num_attention_heads"]
    keys = found.setdefault("num_key_value_heads", query)
    width = found.setdefault("head_dim", found["hidden_size"] // query)
    _require(query % keys == 0, "num_key_value_heads", keys, f"a divisor of {query}")
    _require(width > 0 and width % 2 == 0, "head_dim", width, "an even number")
    eps, activation = values.get("rms_norm_eps", 1e-6), values.get("hidden_act", "silu")
    _require(type(eps) in (int, float) and 0 < eps < 1, "rms_norm_eps", eps, "a small number")
    _require(activation == "silu", "hidden_act", activation, "silu")
    found["rms_norm_eps"] = eps
    for name in ("attention_bias", "mlp_bias"):
        found[name] = values.get(name) or False
        _require(type(found[name]) is bool, name, found[name], "true or false")
    types = values.get("layer_types") or ["full_attention"]
    _require(types == ["full_attention"], "layer_types", types, "full_attention")
    return found


def _rotation(values: Mapping[str, Any]) -> dict[str, Any]:
    """The rotation's parameters as transformers 5 has them, from either way of saying them."""
    said = _object(values, "rope_parameters") or _object(values, "rope_scaling")
    rope = {"rope_theta": values.get("rope_theta") or 10000.0} | said
    kind = rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    _require(kind in _ROTATIONS, "rope_type", kind, f"one of {', '.join(_ROTATIONS)}")
    for name, value in rope.items():
        number = type(value) in (int, float) and 0 <= value < 1e12
        _require(
            number or type(value) is bool or name == "rope_type", f"rope {name}", value, "a number"
        )
    return rope


def _object(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """One of the values; empty where it is missing."""
    value = values.get(name) or {}
    _require(isinstance(value, dict), name, value, "an object")
    found: dict[str, Any] = value
    return found


def _size(name: str, values: Mapping[str, Any], otherwise: int | None = None) -> int:
    value = otherwise if values.get(name) is None else values[name]
    fits = type(value) is int and 1 <= value <= 1 << 24
    _require(fits, name, value, f"a number in 1..{1 << 24}")
    return int(value or 0)


# --- messages -------------------------------------------------------------------------------------


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
