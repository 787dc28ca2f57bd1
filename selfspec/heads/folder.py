"""Validation of a heads folder's files, which may come from anyone. Imports no torch.

The header of `model.safetensors` repeats `config.json` as it was when the weights were saved. A
model's heads are found by its fingerprint: the last folder named by `fit`, `adapt`, `heads pull` or
`heads use`, else one that came with selfspec.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from selfspec import files
from selfspec.config import SpeculationOptions
from selfspec.errors import (
    CannotWrite,
    HeadsNotFound,
    InvalidData,
    InvalidHeads,
    InvalidOption,
    annotations_of,
    check_keys,
    check_types,
    shown,
)
from selfspec.files import parse_json, read_json
from selfspec.options import LAYER, Range, between, check_ranges

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

FORMAT_VERSION = 2  # in version 1 `base_fingerprint` covers only the unembedding
METADATA = "selfspec"  # key of the config in the weights' header, and of our fields in EAGLE-3's

EAGLE3 = "eagle3"  # heads that attend, published or fitted here
MEDUSA = "medusa"  # several heads on the last layer, each for a token further ahead
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

_MOST_BYTES = 1 << 20  # maximum size of a JSON file

_EAGLE3_DEFAULTS = {"drafter": "ngram+exit:threshold=0.3,anneal_strength=0,max_tokens=5"}
"""For published heads, which have no settings. Not measured: with 0.3 a third draft is right as
often as not where each is right at 0.8."""

logger = logging.getLogger(__name__)


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a folder, all types and ranges checked. Raises HeadsNotFound, InvalidHeads.

    If a run was killed between the weights and `config.json`, the weights' copy is used.
    """
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        raise HeadsNotFound(f"no {CONFIG_FILE} in {folder}. Expected a folder of exit heads")
    try:
        config = _checked_config(read_json(path, _MOST_BYTES))
    except (InvalidData, InvalidOption) as error:
        raise InvalidHeads(f"{path} is not a config of exit heads: {error}") from error
    weights = Path(folder) / WEIGHTS_FILE
    if (header := repeated_config(weights)) is None:
        return config
    section = header.get(METADATA)
    if (section if isinstance(section, dict) else header).get("weights") == config.get("weights"):
        return config
    logger.warning("%s does not belong to the weights beside it: their own copy is used", path)
    try:
        return _checked_config(header)
    except InvalidOption as error:
        raise InvalidHeads(f"{weights} repeats no config: {error}") from error


def attends(folder: Path) -> bool:
    """Whether a folder's config, valid or not, is for EAGLE-3 heads."""
    return _is_eagle3(_json_object(Path(folder) / CONFIG_FILE))


def is_heads_folder(folder: Path) -> bool:
    """Whether `fit` wrote a folder; checked before its files are replaced."""
    path = folder / CONFIG_FILE
    if not path.exists():
        return repeated_config(folder / WEIGHTS_FILE) is not None
    config = _json_object(path)
    return config.keys() >= {*_NEEDED} or METADATA in config


def repeated_config(weights: Path) -> dict[str, Any] | None:
    """The config in the header of a weights file; None without one, or without the file."""
    if not weights.is_file():
        return None
    try:
        with files.open_safetensors(weights) as file:
            config = parse_json((file.metadata() or {})[METADATA], str(weights))
    except (InvalidData, KeyError, RuntimeError):
        return None
    return config if isinstance(config, dict) else None


def _json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if it is not JSON, or not an object."""
    try:
        values = read_json(file, _MOST_BYTES)
    except InvalidData:
        return {}
    return values if isinstance(values, dict) else {}


# --- valid values of a config

_SIZE = between(1, 1 << 24)
_LINE = Range(lambda text: len(text) <= 1000 and text.isprintable(), "of one line")
_LAYERS = Range(
    lambda layers: (
        1 <= len(layers) <= 4096
        and all(map(LAYER.holds, layers))
        and len(set(layers)) == len(layers)
    ),
    "of different layers",
    whole=True,
)
_TEMPERATURES = Range(
    lambda by_layer: all(1e-6 < value < 1e6 for value in by_layer.values()),
    "between 1e-6 and 1e6 for each layer",
)
_TEMPLATE = Range(
    lambda text: len(text) <= files.MOST_TEMPLATE_CHARACTERS, "of the length of a chat template"
)
_Size = Annotated[int, _SIZE]


@dataclass(frozen=True, kw_only=True)
class HeadsFields:
    """The fields of a heads folder's `config.json`, with the ranges for reading it."""

    base_model: Annotated[str, _LINE]
    base_fingerprint: Annotated[str, _LINE]
    hidden_size: Annotated[int, between(1, 1 << 20)]
    num_layers: Annotated[int, between(1, 4096)]
    vocab_size: _Size
    exit_layers: Annotated[tuple[int, ...], _LAYERS]
    head_type: Annotated[str, _LINE]
    inner_size: Annotated[int | None, _SIZE] = None  # None: the head type's default
    draft_vocab_size: Annotated[int | None, _SIZE] = None  # tokens that heads can draft; None: all
    num_heads: Annotated[int | None, between(1, 64)] = None  # None: one per exit layer
    state_layers: Annotated[tuple[int, ...] | None, _LAYERS] = None  # read beside layer L
    # by exit layer; 1 if missing
    temperatures: Annotated[dict[str, float], _TEMPERATURES] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)  # recommended SpeculationOptions
    training: dict[str, Any] = field(default_factory=dict)  # tokens, data, steps, seed, versions
    chat_template: Annotated[str | None, _TEMPLATE] = None  # of the text; None: the model's
    weights: Annotated[str | None, _LINE] = None  # hash: a killed run may have replaced one file
    format_version: int = FORMAT_VERSION


_NEEDED = [entry.name for entry in fields(HeadsFields) if entry.default is entry.default_factory]
EAGLE3_OURS = (
    *("base_fingerprint", "num_layers", "temperatures", "defaults", "training"),
    *("chat_template", "weights"),
)

_STATES = "eagle_aux_hidden_state_layer_ids"  # beside the switches, or in `eagle_config`


class _Eagle3(TypedDict, total=False):
    speculators_model_type: Literal["eagle3"]
    transformer_layer_config: dict[str, Any]
    speculators_config: dict[str, Any]
    eagle_config: dict[str, Any]
    selfspec: dict[str, Any]  # METADATA
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    target_hidden_size: _Size
    draft_vocab_size: _Size
    eagle_aux_hidden_state_layer_ids: Annotated[tuple[int, ...], _LAYERS]


class _Sizes(TypedDict):
    hidden_size: _Size
    intermediate_size: _Size
    num_attention_heads: _Size
    vocab_size: _Size


class _DecoderLayer(_Sizes, total=False):
    model_type: Literal["llama", "qwen3"]
    num_hidden_layers: Literal[1]
    num_key_value_heads: _Size
    head_dim: _Size
    max_position_embeddings: _Size
    rms_norm_eps: Annotated[float, Range(lambda value: 0 < value < 1, "between 0 and 1")]
    hidden_act: Literal["silu"]
    attention_bias: bool
    mlp_bias: bool
    layer_types: tuple[Literal["full_attention"]]
    rope_parameters: dict[str, Any]
    rope_scaling: dict[str, Any]


def _fields(values: Mapping[str, Any], kind: type, required: Iterable[str] = ()) -> dict[str, Any]:
    """The values that are not null, checked against `kind`, lists as tuples. InvalidOption."""
    config = {name: value for name, value in values.items() if value is not None}
    config = {name: tuple(one) if isinstance(one, list) else one for name, one in config.items()}
    check_types(dict.fromkeys(required) | config, annotations_of(kind))
    check_ranges(config, kind)
    return config


def _checked_config(values: Any) -> dict[str, Any]:
    """The checked config of any kind of heads, lists as tuples. Raises InvalidOption."""
    if _is_eagle3(values):
        return _eagle3_config(values)
    check_types({"it": values}, {"it": dict})
    version = values.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise InvalidOption(
            f"it has format version {shown(version)}, this selfspec reads {FORMAT_VERSION}"
        )
    config = _fields(values, HeadsFields, _NEEDED)
    _check_fit(config, config["exit_layers"])
    return config


def _check_fit(config: Mapping[str, Any], layers: Sequence[int]) -> None:
    """Raise InvalidOption unless temperatures and defaults suit these exit layers."""
    check_keys(config.get("temperatures", {}), map(str, layers), "layer of temperatures")
    try:
        options = SpeculationOptions().updated(config.get("defaults", {}))
        chosen = layers if options.exit.layers is None else list(options.exit.layers)
        fits = set(chosen) <= set(layers) and len(options.exit.thresholds) in (1, len(chosen))
    except (InvalidOption, TypeError, ValueError, OverflowError) as error:
        raise InvalidOption(f"its defaults are invalid: {error}") from error
    if not fits:
        raise InvalidOption(f"its defaults are for other exit layers than {list(layers)}")
    # others' heads must not change a user's text, nor make requests fail
    others = options.uses("draft-model") or options.uses("rest")
    if options.loss is not None or options.pinned or others:
        raise InvalidOption(
            "its defaults are not for everybody: lossy, pinned or another drafter's"
        )


# --- EAGLE-3 heads


def _is_eagle3(values: Any) -> bool:
    """Whether a config is in the speculators format, or in the original one with fewer keys."""
    if not isinstance(values, dict) or "head_type" in values or "exit_layers" in values:
        return False
    return "speculators_model_type" in values or "draft_vocab_size" in values


def _eagle3_config(values: Mapping[str, Any]) -> dict[str, Any]:
    config = _fields(values, _Eagle3)
    original = "speculators_model_type" not in config
    layer = _layer_config(values if original else config.get("transformer_layer_config", {}))
    if config.get("fc_norm") and config.get("norm_before_fc"):
        raise InvalidOption("fc_norm is true beside norm_before_fc, expected one of them")
    states = {**config.get("eagle_config", {}), **values}.get(_STATES)
    layers = _fields({_STATES: states}, _Eagle3).get(_STATES)
    verifier = config.get("speculators_config", {}).get("verifier")
    base = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    metadata = config.get(METADATA, {})
    own_fields = _fields({name: metadata.get(name) for name in EAGLE3_OURS}, HeadsFields)
    _check_fit(own_fields, [0])
    return {
        **{name: config.get(name, False) for name in SWITCHES},
        "base_model": base if isinstance(base, str) and _LINE.holds(base) else "not said",
        "base_fingerprint": "",
        "hidden_size": config.get("target_hidden_size", layer["hidden_size"]),
        "num_layers": 0,
        "vocab_size": layer["vocab_size"],
        "draft_vocab_size": config.get("draft_vocab_size", layer["vocab_size"]),
        "exit_layers": (0,),
        "head_type": EAGLE3,
        "defaults": dict(_EAGLE3_DEFAULTS),
        "format": "original" if original else "speculators",
        "state_layers": layers,
        "layer": layer,
        **own_fields,
    }


def _layer_config(values: Mapping[str, Any]) -> dict[str, Any]:
    config = _fields(values, _DecoderLayer, _Sizes.__annotations__)
    layer: dict[str, Any] = {
        **{"model_type": "llama", "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False},
        **{name: config[name] for name in _DecoderLayer.__annotations__ if name in config},
    }
    for name in ("num_hidden_layers", "hidden_act", "layer_types", "rope_scaling"):
        layer.pop(name, None)
    query = layer["num_attention_heads"]
    if query % (keys := layer.setdefault("num_key_value_heads", query)):
        raise InvalidOption(f"num_key_value_heads is {keys}, expected a divisor of {query}")
    width = layer.setdefault("head_dim", layer["hidden_size"] // query)
    if not width or width % 2:
        raise InvalidOption(f"head_dim is {width}, expected an even number")
    # RoPE parameters in the form of transformers 5, from either form
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {"rope_theta": values.get("rope_theta") or 10000.0} | rope
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    hints: dict[str, Any] = dict.fromkeys(rope, float | bool)
    hints["rope_type"] = Literal["default", "linear", "llama3", "yarn"]  # the same for any length
    check_types(rope, hints, "rope ")
    for name, value in rope.items():
        if name != "rope_type" and not 0 <= value < 1e12:
            raise InvalidOption(f"rope {name} is {shown(value)}, expected a number in [0, 1e12)")
    return layer | {"rope_parameters": rope}


def as_json(config: Mapping[str, Any]) -> str:
    """A config as text, in the form of both files."""
    return json.dumps(config, indent=2) + "\n"


# --- the heads of each model on this machine: one small file per model in the cache folder

_MOST_KNOWN = 32  # maximum folders listed for a model


def remember(folder: Path, *, chosen: bool = False) -> bool:
    """Make the heads in `folder` those of their model; returns False if others stay in use.

    Others stay if the user chose them, or if the model has no fingerprint. `chosen`: by the user,
    until another choice, and with precedence over heads that come with selfspec.
    """
    config = read_config(folder)
    base = config["base_fingerprint"]
    if not base.isalnum():
        return False  # a model without a fingerprint is never found by it
    heads = folder.absolute()
    try:
        with files.locked(place := _file_of(base), wait=True):
            old_entry = _json_object(place)
            known = _folders(old_entry)
            others = [path for path in known if path != heads and _exists(path)]
            stays = not chosen and old_entry.get("chosen") is True and others[:1] == known[:1] != []
            folders = [*others[:stays], heads, *others[stays:]]
            entry = {
                "folders": [str(path) for path in folders[:_MOST_KNOWN]],
                "chosen": chosen or stays,
                "base_model": config["base_model"],
                "base_fingerprint": base,
                "sizes": [config["num_layers"], config["hidden_size"]],
            }
            files.write(place, json.dumps(entry, indent=2) + "\n")
    except CannotWrite as error:
        if chosen:  # else the heads themselves were saved, which matters more
            raise
        logger.warning("%s will not be found automatically: %s. Give --heads", folder, error)
        return False
    if stays:
        logger.info("%s stay in use, as was chosen. To change that: heads use", others[0])
    elif chosen:
        logger.info("to undo this choice: rm %s", place)
    return not stays


def find_known(
    sizes: tuple[int, int],
    fingerprint: Callable[[], str],
    bundled: Iterable[Path] = (),
    *,
    chosen: bool = False,
) -> Path | None:
    """The heads folder for a model of `sizes` (layers, width), which tell most models apart.

    Its `fingerprint` is computed only if heads of these sizes are known. Remembered folders precede
    `bundled` ones; folders that are gone, or hold other heads by now, are skipped. `chosen`: only
    the user's choice.
    """
    written = any(
        entry.get("sizes") == list(sizes) and (not chosen or entry.get("chosen") is True)
        for entry in map(_json_object, registry_folder().glob("*.json"))
    )
    pairs = ((path, _config(path)) for path in bundled)
    candidates = [
        path for path, meta in pairs if (meta.get("num_layers"), meta.get("hidden_size")) == sizes
    ]
    if not (written or candidates) or not (base := fingerprint()):
        return None
    entry = _json_object(_file_of(base)) if written else {}
    known = _folders(entry)
    if chosen:  # that of another model of these sizes says nothing about this one
        known = known[:1] if entry.get("chosen") is True else []
    if gone := [str(folder) for folder in known if not _exists(folder)]:
        other = next((str(folder) for folder in known if str(folder) not in gone), "")
        logger.info(
            "exit heads of this model were in %s and are gone. If they were moved: "
            "selfspec heads pull FOLDER; to forget them: %s",
            ", ".join(gone),
            f"selfspec heads use {other}" if other else f"rm {_file_of(base)}",
        )
    hits = (path for path in (*known, *candidates) if _config(path).get("base_fingerprint") == base)
    return next(hits, None)


def known_folders() -> list[Path]:
    """Remembered folders that still exist; those in use first."""
    entries = map(_json_object, sorted(registry_folder().glob("*.json")))
    folders = (folder for entry in entries for folder in _folders(entry) if _config(folder))
    return [*dict.fromkeys(folders)]  # one folder may be listed for several models


def registry_folder() -> Path:
    return files.cache_folder() / "known-heads"


def _file_of(base: str) -> Path:
    return registry_folder() / f"{base[:32]}.json"


def _folders(entry: dict[str, Any]) -> list[Path]:
    names = entry.get("folders")
    paths = names if isinstance(names, list) else []
    return [Path(name) for name in paths if isinstance(name, str)]


def _exists(folder: Path) -> bool:
    return os.path.exists(folder)  # noqa: PTH110  # Path.exists raises without permission


def _config(folder: Path) -> dict[str, Any]:
    """The config of a folder of heads; empty if it holds none."""
    try:
        return read_config(folder)
    except (HeadsNotFound, InvalidHeads, OSError):
        return {}
