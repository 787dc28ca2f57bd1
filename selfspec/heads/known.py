"""Which heads on this machine fit a model: a small file in the cache folder for each model.

Comes in: a folder that `fit` or `heads pull` wrote. Goes out: the folder that was written last for
a model, found by its fingerprint. Imports no torch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selfspec import files
from selfspec.errors import CannotWrite, HeadsNotFound, InvalidData, InvalidHeads
from selfspec.heads.folder import read_config
from selfspec.untrusted import read_json

logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 14

Sizes = tuple[int, int]
"""Layers and width of a model: what tells most models apart without reading their weights."""


def place() -> Path:
    """Where the files are."""
    return files.cache_folder() / "known-heads"


def remember(folder: Path) -> None:
    """From now on the heads in `folder` are those of their model."""
    config = read_config(folder)
    base = config["base_fingerprint"]
    if not base.isalnum():
        return  # a model without a fingerprint is never found by it
    entry = {
        "folder": str(folder.absolute()),
        "base_model": config["base_model"],
        "base_fingerprint": base,
        "sizes": [config["num_layers"], config["hidden_size"]],
    }
    try:
        files.write(place() / f"{base[:32]}.json", json.dumps(entry, indent=2) + "\n")
    except CannotWrite as error:  # the heads themselves are written
        logger.warning("%s are not found by themselves: %s. Name them: --heads", folder, error)


def find(sizes: Sizes, fingerprint: Callable[[], str]) -> Path | None:
    """The folder for a model; its `fingerprint` is asked for only where the sizes are known.

    A folder that is gone, or holds other heads by now, is passed over.
    """
    if not any(_sizes(file) == sizes for file in place().glob("*.json")):
        return None
    base = fingerprint()
    file = place() / f"{base[:32]}.json"
    folder = _read(file).get("folder") if base and file.is_file() else None
    if not isinstance(folder, str):
        return None
    try:
        found = read_config(files.local_path(folder))["base_fingerprint"]
    except (HeadsNotFound, InvalidHeads):
        return None
    return Path(folder) if found == base else None


def _sizes(file: Path) -> Sizes | None:
    match _read(file).get("sizes"):
        case [int(layers), int(width)]:
            return layers, width
        case _:
            return None


def _read(file: Path) -> dict[str, Any]:
    """A file of `remember`; empty for any other."""
    try:
        values = read_json(file, _MOST_BYTES)
    except InvalidData:
        return {}
    return values if isinstance(values, dict) else {}
