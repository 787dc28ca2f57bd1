"""Settings tuned for this machine: `selfspec tune` writes them, `load` and `wrap` read them.

Each combination of heads (or none), model, dtype, bytes of weights, executor, processor and threads
has a JSON file in the user's cache folder; a broken file is ignored. Without tuning, the costs of
rows and heads are measured on first use, and kept in the same way.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from selfspec.config import SpeculationOptions
from selfspec.decoding.measure import quick_costs
from selfspec.errors import CannotWrite, InvalidData, InvalidOption, check_keys, first_line
from selfspec.files import cache_folder, read_json
from selfspec.files import write as write_file
from selfspec.heads.exit_heads import ExitHeads, hash_of
from selfspec.model.backbone import Backbone
from selfspec.model.compiler import KERNELS
from selfspec.model.weights import TEAM
from selfspec.options import settings_text

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2

# errors from reading a file that is missing or invalid
_UNUSABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, InvalidOption, InvalidData)

TUNED_OPTIONS = ("speculate", "drafter", "costs")  # options in a file: they only change the speed


def folder() -> Path:
    return cache_folder() / "tuned"


def files() -> list[Path]:
    return sorted(folder().glob("*.json"))


def conditions(backbone: Backbone, heads: ExitHeads | None) -> dict[str, Any]:
    """The conditions that a tuned setting is valid for; any other value needs another setting."""
    if heads is None:
        # name and sizes are enough for prompt lookup, and no weights are read
        sizes = backbone.num_layers, backbone.hidden_size, backbone.vocab_size
        name = backbone.model.config.name_or_path or type(backbone.model).__name__
        digest, base = "none", f"{name}, {' x '.join(map(str, sizes))}"
    else:
        digest, base = heads_hash(heads), heads.config.base_fingerprint or backbone.fingerprint
    return {
        "heads": digest,
        "base": base,
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "executor": backbone.executor_name,
        "weight_bytes": backbone.weight_bytes,  # rows cost more if weights are quantised
        "processor": processor(backbone.device),
        "threads": torch.get_num_threads(),
    }


def path(backbone: Backbone, heads: ExitHeads | None) -> Path:
    key = json.dumps(conditions(backbone, heads), sort_keys=True)
    return folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def read(backbone: Backbone, heads: ExitHeads | None) -> dict[str, Any]:
    """Read the tuned options for these heads on this machine; empty if `tune` was not run."""
    if not folder().is_dir() or not (file := path(backbone, heads)).is_file():
        return {}
    try:
        options = _checked_options(read_json(file), heads)
    except _UNUSABLE as error:
        reason = first_line(error)
        logger.warning("ignored %s: %s. Run selfspec tune again, or with --forget", file, reason)
        return {}
    logger.debug("settings tuned for this machine, from %s", file)
    return options


def write(
    backbone: Backbone,
    heads: ExitHeads | None,
    options: Mapping[str, Any],
    record: Mapping[str, Any] | None = None,
    file: Path | None = None,
) -> Path:
    """Save `options`; `record` tells people how they were found. Returns the file."""
    file = file or path(backbone, heads)
    values: dict[str, Any] = {"format_version": FORMAT_VERSION}
    values |= {"conditions": conditions(backbone, heads), "options": dict(options)}
    values |= {} if record is None else {"found": dict(record)}
    write_file(file, json.dumps(values, indent=2) + "\n")
    return file


def forget(backbone: Backbone, heads: ExitHeads | None) -> list[Path]:
    """Remove the settings for these heads here; returns their files. Raises CannotWrite."""
    paths = [one for one in (path(backbone, heads), _costs_path(backbone, heads)) if one.is_file()]
    try:
        for file in paths:
            file.unlink()
    except OSError as error:
        raise CannotWrite(f"cannot remove {error.filename}: {error.strerror}") from error
    return paths


def heads_hash(heads: ExitHeads) -> str:
    """sha256 of all that determines the drafts of heads: kind, layers, temperatures, weights."""
    config = heads.config
    settings = [config.head_type, list(config.exit_layers), sorted(config.temperatures.items())]
    return hash_of(heads.state_dict(), json.dumps(settings).encode())


def processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    file = Path("/proc/cpuinfo")
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    match = re.search(r"^model name\s*:\s*(\S.*\S)", text, re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def first_costs(backbone: Backbone, heads: ExitHeads | None) -> dict[str, Any]:
    """The costs of rows and heads as options: measured once, saved unless this machine is busy."""
    file = _costs_path(backbone, heads)
    with suppress(*_UNUSABLE):
        return _checked_options(read_json(file), heads)
    logger.info("measuring what rows and heads cost on this machine")
    if not (costs := settings_text(quick_costs(backbone, heads))):
        return {}  # the model has too few positions to compare rows
    options = {"costs": costs}
    if TEAM.crowded:
        logger.info("other programs keep this machine busy: a rough measurement, which is not kept")
        return options
    try:
        write(backbone, heads, options, file=file)
    except CannotWrite as error:
        logger.info("not kept: %s", error)
    return options


def _costs_path(backbone: Backbone, heads: ExitHeads | None) -> Path:
    """The file of measured costs, with a hash of the kernels in its name: costs depend on them."""
    sources = b"".join(map(Path.read_bytes, sorted(KERNELS.glob("*.[ch]pp"))))
    name = f"{path(backbone, heads).stem}-{hashlib.sha256(sources).hexdigest()[:8]}.json"
    return cache_folder() / "costs" / name


def _checked_options(values: Any, heads: ExitHeads | None) -> dict[str, Any]:
    """Check a file's values and return its options. Raises errors that `read` catches."""
    if values["format_version"] != FORMAT_VERSION:
        raise InvalidOption(f"format version {values['format_version']}, not {FORMAT_VERSION}")
    fields: dict[str, Any] = values["options"]
    check_keys(fields, TUNED_OPTIONS, "option")
    options = SpeculationOptions().updated(fields)
    if heads is not None:
        heads.layers_in_use(options)
    elif "drafter" in fields and options.speculate and options.uses("exit"):
        raise InvalidOption("its drafts come from exit heads, and there are none")
    return fields
