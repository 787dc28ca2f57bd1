"""What the files of a heads folder may hold, whoever wrote them. Imports no torch.

The header of `model.safetensors` repeats `config.json` as it was when the weights were saved. The
last folder that `fit`, `adapt`, `heads pull` or `heads use` named for a model, else one that came
with selfspec, is found by its fingerprint.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from selfspec import files
from selfspec.config import SpeculationOptions
from selfspec.errors import (
    CannotWrite,
    HeadsNotFound,
    InvalidData,
    InvalidHeads,
    InvalidOption,
    shown,
)
from selfspec.files import parse_json, read_json

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
FILES_OF_A_FIT = (  # what `fit` writes
    *("README.md", CONFIG_FILE, "metrics.json", "metrics.jsonl", WEIGHTS_FILE, "run.yaml"),
)

FORMAT_VERSION = 2  # 1: `base_fingerprint` is that of the unembedding alone
METADATA = "selfspec"  # the config in the header of the weights, and our part of one of EAGLE-3's
MOST_TEMPLATE_CHARACTERS = 1 << 16  # of a chat template; those of models have some thousand

EAGLE3 = "eagle3"  # heads that attend, ours and those that others publish
MEDUSA = "medusa"  # several heads on the last layer, each for a token further ahead
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

_MOST_BYTES = 1 << 20  # of a JSON file here

_EAGLE3_DEFAULTS = {"drafter": "ngram+exit:threshold=0.3,anneal_strength=0,max_tokens=5"}
"""Such heads bring no settings. Not measured: with 0.3 a third draft is right as often as not where
each is right at 0.8."""

logger = logging.getLogger(__name__)


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a folder, all types and ranges checked: HeadsNotFound, InvalidHeads.

    Where a run was killed between the weights and `config.json`, the weights' copy of it.
    """
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        raise HeadsNotFound(f"no {CONFIG_FILE} in {folder}. Expected a folder of exit heads")
    try:
        found = _checked(read_json(path, _MOST_BYTES))
    except (InvalidData, InvalidHeads) as error:
        raise InvalidHeads(f"{path} is not a config of exit heads: {error}") from error
    weights = Path(folder) / WEIGHTS_FILE
    repeated = repeated_config(weights)
    if repeated is None or _weights_of(repeated) == found.get("weights"):
        return found
    logger.warning("%s is not that of the weights beside it, which is used instead", path)
    try:
        return _checked(repeated)
    except InvalidHeads as error:
        raise InvalidHeads(f"{weights} repeats no config: {error}") from error


def _weights_of(config: Mapping[str, Any]) -> Any:
    own = config.get(METADATA)
    return (own if isinstance(own, dict) else config).get("weights")


def attends(folder: Path) -> bool:
    """Whether a folder holds EAGLE-3 heads, by its config, right or wrong."""
    return _is_eagle3(_object(Path(folder) / CONFIG_FILE))


def is_heads_folder(folder: Path) -> bool:
    """Whether `fit` wrote a folder: asked before files in it are replaced."""
    config = folder / CONFIG_FILE
    if not config.exists():
        return repeated_config(folder / WEIGHTS_FILE) is not None
    values = _object(config)
    return values.keys() >= _OURS.keys() or METADATA in values


def repeated_config(weights: Path) -> dict[str, Any] | None:
    """What the header of a weights file says; None: nothing, or there is no such file."""
    if not weights.is_file():
        return None
    try:
        with files.open_safetensors(weights) as file:
            values = parse_json((file.metadata() or {})[METADATA], str(weights))
    except (InvalidData, KeyError, RuntimeError):
        return None
    return values if isinstance(values, dict) else None


def _object(file: Path) -> dict[str, Any]:
    """What a JSON file holds; empty where it is none, or no object."""
    try:
        values = read_json(file, _MOST_BYTES)
    except InvalidData:
        return {}
    return values if isinstance(values, dict) else {}


# --- what the values of a config may be


class _Rule(NamedTuple):
    expected: str
    fits: Callable[[Any], bool]


def _whole(most: int, least: int = 1) -> _Rule:
    return _Rule(
        f"a number in {least}..{most}", lambda value: type(value) is int and least <= value <= most
    )


def _one_of(*values: Any) -> _Rule:
    return _Rule(" or ".join(map(str, values)), lambda value: value in values)


def _between(least: float, most: float) -> _Rule:
    return _Rule(
        f"a number between {least} and {most}",
        lambda value: type(value) in (int, float) and least < value < most,
    )


_LINE = _Rule(
    "a line of text",
    lambda value: isinstance(value, str) and len(value) <= 1000 and value.isprintable(),
)
_OBJECT = _Rule("an object", lambda value: isinstance(value, dict))
_SWITCH = _Rule("true or false", lambda value: type(value) is bool)

_SIZE, _LAYER = _whole(1 << 24), _whole(4096, least=0)
_LAYERS = _Rule(
    "different layers",
    lambda value: (
        isinstance(value, list)
        and 1 <= len(value) <= 4096
        and all(map(_LAYER.fits, value))
        and len(set(value)) == len(value)
    ),
)

_OURS = {
    **dict.fromkeys(("base_model", "base_fingerprint", "head_type"), _LINE),
    "hidden_size": _whole(1 << 20),
    "num_layers": _whole(4096),
    "vocab_size": _SIZE,
    "exit_layers": _LAYERS,
}
_OF_A_FIT = {
    **dict.fromkeys(("temperatures", "defaults", "training"), _OBJECT),
    "chat_template": _Rule(
        "the text of a chat template",
        lambda value: isinstance(value, str) and len(value) <= MOST_TEMPLATE_CHARACTERS,
    ),
}
_OURS_TOO = {
    **dict.fromkeys(("base_revision", "weights"), _LINE),
    **dict.fromkeys(("inner_size", "draft_vocab_size"), _SIZE),
    "num_heads": _whole(64),
    "state_layers": _LAYERS,
    **_OF_A_FIT,
}
_EAGLE3 = {
    "speculators_model_type": _one_of(EAGLE3),
    **dict.fromkeys(("transformer_layer_config", "speculators_config"), _OBJECT),
    **dict.fromkeys(("eagle_config", METADATA), _OBJECT),
    **dict.fromkeys(SWITCHES, _SWITCH),
    **dict.fromkeys(("target_hidden_size", "draft_vocab_size"), _SIZE),
}
EAGLE3_OURS = {"base_fingerprint": _LINE, "num_layers": _whole(4096), **_OF_A_FIT, "weights": _LINE}
_SIZES = dict.fromkeys(
    ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"), _SIZE
)
_DECODER_LAYER = {
    "model_type": _one_of("llama", "qwen3"),
    "num_hidden_layers": _one_of(1),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "max_position_embeddings"), _SIZE),
    "rms_norm_eps": _between(0, 1),
    "hidden_act": _one_of("silu"),
    **dict.fromkeys(("attention_bias", "mlp_bias"), _SWITCH),
    "layer_types": _one_of(["full_attention"]),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _OBJECT),
}
_ROTATIONS = _one_of("default", "linear", "llama3", "yarn")  # of a text of any length
_TURN = _Rule(
    "a number",
    lambda value: type(value) is bool or (type(value) in (int, float) and 0 <= value < 1e12),
)


def _require(name: str, value: Any, rule: _Rule) -> None:
    if not rule.fits(value):
        raise InvalidHeads(f"{name} is {shown(value)}, expected {rule.expected}")


def _some(values: Mapping[str, Any], rules: Mapping[str, _Rule]) -> dict[str, Any]:
    """Those that have a rule and are said, null being unsaid."""
    found = {name: values[name] for name in rules if values.get(name) is not None}
    for name, value in found.items():
        _require(name, value, rules[name])
    return found


def _all(values: Mapping[str, Any], rules: Mapping[str, _Rule]) -> dict[str, Any]:
    for name, rule in rules.items():
        _require(name, values.get(name), rule)
    return {name: values[name] for name in rules}


def _checked(values: Any) -> dict[str, Any]:
    """The config of heads of any kind, lists as tuples. Raises InvalidHeads with the reason."""
    if _is_eagle3(values):
        return _eagle3(values)
    _require("it", values, _OBJECT)
    version = values.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise InvalidHeads(
            f"it has format version {shown(version)}, this selfspec reads {FORMAT_VERSION}"
        )
    _all(values, _OURS)
    _some(values, _OURS_TOO)
    _check_fit(values, values["exit_layers"])
    said = {name: value for name, value in values.items() if value is not None}
    return {name: tuple(one) if isinstance(one, list) else one for name, one in said.items()}


def _check_fit(values: Mapping[str, Any], layers: list[int]) -> None:
    """Raise InvalidHeads unless temperatures and defaults are for these exit layers."""
    for layer, value in (values.get("temperatures") or {}).items():
        _require("a layer of temperatures", layer, _one_of(*map(str, layers)))
        _require(f"the temperature of layer {layer}", value, _between(1e-6, 1e6))
    try:
        options = SpeculationOptions().updated(values.get("defaults") or {})
        chosen = layers if options.exit.layers is None else list(options.exit.layers)
        fits = set(chosen) <= set(layers) and len(options.exit.thresholds) in (1, len(chosen))
    except (InvalidOption, TypeError, ValueError, OverflowError) as error:
        raise InvalidHeads(f"its defaults are none: {error}") from error
    if not fits:
        raise InvalidHeads(f"its defaults are for other exit layers than {layers}")
    # a user of somebody's heads wants the model's own text, and an answer to every request
    others = options.uses("draft-model") or options.uses("rest")
    if options.loss is not None or options.pinned or others:
        raise InvalidHeads("its defaults are not for everybody: lossy, pinned or another drafter's")


# --- EAGLE-3 heads


def _is_eagle3(values: Any) -> bool:
    """Whether it is in the speculators format, or in the original one, which says less."""
    if not isinstance(values, dict) or "head_type" in values or "exit_layers" in values:
        return False
    return "speculators_model_type" in values or "draft_vocab_size" in values


def _eagle3(values: Mapping[str, Any]) -> dict[str, Any]:
    said = _some(values, _EAGLE3)
    original = "speculators_model_type" not in said
    layer = _layer(values if original else said.get("transformer_layer_config", {}))
    if said.get("fc_norm") and said.get("norm_before_fc"):
        raise InvalidHeads("fc_norm is true beside norm_before_fc, expected one of them")
    states = {**said.get("eagle_config", {}), **values}.get("eagle_aux_hidden_state_layer_ids")
    if states is not None:
        _require("eagle_aux_hidden_state_layer_ids", states, _LAYERS)
    verifier = said.get("speculators_config", {}).get("verifier")
    base = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    ours = _some(said.get(METADATA, {}), EAGLE3_OURS)
    _check_fit(ours, [0])
    return {
        **{name: said.get(name, False) for name in SWITCHES},
        "base_model": base if _LINE.fits(base) else "not said",
        "base_fingerprint": "",
        "hidden_size": said.get("target_hidden_size", layer["hidden_size"]),
        "num_layers": 0,
        "vocab_size": layer["vocab_size"],
        "draft_vocab_size": said.get("draft_vocab_size", layer["vocab_size"]),
        "exit_layers": (0,),
        "head_type": EAGLE3,
        "defaults": dict(_EAGLE3_DEFAULTS),
        "format": "original" if original else "speculators",
        "state_layers": None if states is None else tuple(states),
        "layer": layer,
        **ours,
    }


def _layer(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        **{"model_type": "llama", "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False},
        **_all(values, _SIZES),
        **_some(values, _DECODER_LAYER),
    }
    for name in ("num_hidden_layers", "hidden_act", "layer_types", "rope_scaling"):
        found.pop(name, None)
    query = found["num_attention_heads"]
    if query % (keys := found.setdefault("num_key_value_heads", query)):
        raise InvalidHeads(f"num_key_value_heads is {keys}, expected a divisor of {query}")
    width = found.setdefault("head_dim", found["hidden_size"] // query)
    if not width or width % 2:
        raise InvalidHeads(f"head_dim is {width}, expected an even number")
    # the rotation's parameters as transformers 5 has them, from either way of saying them
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    rope = {"rope_theta": values.get("rope_theta") or 10000.0} | rope
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    for name, value in rope.items():
        _require(f"rope {name}", value, _ROTATIONS if name == "rope_type" else _TURN)
    return found | {"rope_parameters": rope}


def as_json(config: Mapping[str, Any]) -> str:
    """A config as both files hold it."""
    return json.dumps(config, indent=2) + "\n"


# --- which heads on this machine fit a model: a small file for each in the cache folder

_MOST_KNOWN = 32  # folders that are listed for a model


def remember(folder: Path, *, chosen: bool = False) -> bool:
    """From now on the heads in `folder` are those of their model; False where it cannot be known.

    `chosen` by the user: also before heads that come with selfspec for its default model.
    """
    config = read_config(folder)
    base = config["base_fingerprint"]
    if not base.isalnum():
        return False  # a model without a fingerprint is never found by it
    own = folder.absolute()
    others = [one for one in _folders(_object(_file_of(base))) if one != own and one.exists()]
    entry = {
        "folders": [str(one) for one in [own, *others][:_MOST_KNOWN]],
        "chosen": chosen,
        "base_model": config["base_model"],
        "base_fingerprint": base,
        "sizes": [config["num_layers"], config["hidden_size"]],
    }
    try:
        files.write(_file_of(base), json.dumps(entry, indent=2) + "\n")
    except CannotWrite as error:
        if chosen:  # else the heads themselves are written
            raise
        logger.warning("%s are not found by themselves: %s. Name them: --heads", folder, error)
        return False
    return True


def find_known(
    sizes: tuple[int, int],
    fingerprint: Callable[[], str],
    bundled: Iterable[Path] = (),
    *,
    chosen: bool = False,
) -> Path | None:
    """The folder for a model of `sizes`, its layers and width, which tell most models apart.

    Its `fingerprint` is asked for only where they are known. What was written here goes before the
    `bundled` folders; what is gone, or holds other heads by now, is passed over. `chosen`: only
    what the user chose.
    """
    written = any(
        entry.get("sizes") == list(sizes) and (not chosen or entry.get("chosen") is True)
        for entry in map(_object, known_place().glob("*.json"))
    )
    own = ((one, _said(one)) for one in bundled)
    coming = [
        one for one, said in own if (said.get("num_layers"), said.get("hidden_size")) == sizes
    ]
    if not (written or coming) or not (base := fingerprint()):
        return None
    named = _folders(_object(_file_of(base))) if written else []
    for gone in (folder for folder in named if not folder.exists()):
        logger.info(
            "exit heads of this model were in %s and are gone. If they were moved: "
            "selfspec heads pull FOLDER",
            gone,
        )
    fitting = (one for one in (*named, *coming) if _said(one).get("base_fingerprint") == base)
    return next(fitting, None)


def known_folders() -> list[Path]:
    """Folders that were written here and are still there; those in use first."""
    entries = map(_object, sorted(known_place().glob("*.json")))
    found = (folder for entry in entries for folder in _folders(entry) if _said(folder))
    return [*dict.fromkeys(found)]  # one may have held another model's before


def known_place() -> Path:
    """The folder of these files."""
    return files.cache_folder() / "known-heads"


def _file_of(base: str) -> Path:
    return known_place() / f"{base[:32]}.json"


def _folders(entry: dict[str, Any]) -> list[Path]:
    names = entry.get("folders")
    named = names if isinstance(names, list) else []
    return [Path(name) for name in named if isinstance(name, str)]


def _said(folder: Path) -> dict[str, Any]:
    """What a folder of heads says of itself; empty where it holds none."""
    try:
        return read_config(folder)
    except (HeadsNotFound, InvalidHeads):
        return {}
