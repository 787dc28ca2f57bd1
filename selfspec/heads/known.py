"""Which heads on this machine fit a model: a small file in the cache folder for each model.

The last folder that `fit`, `adapt`, `heads pull` or `heads use` named for a model, else one that
came with selfspec, is found by the model's fingerprint. Imports no torch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from selfspec import files
from selfspec.errors import CannotWrite, HeadsNotFound, InvalidData, InvalidHeads
from selfspec.heads.folder import read_config
from selfspec.untrusted import read_json

logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 18
_MOST = 32
"""Folders that are listed for a model."""


def remember(folder: Path, *, chosen: bool = False) -> bool:
    """From now on the heads in `folder` are those of their model; False where it cannot be known.

    `chosen` by the user: also before heads that come with selfspec for its default model.
    """
    config = read_config(folder)
    base = config["base_fingerprint"]
    if not base.isalnum():
        return False  # a model without a fingerprint is never found by it
    own = folder.absolute()
    others = [one for one in _folders(_read(_file(base))) if one != own and one.exists()]
    entry = {
        "folders": [str(one) for one in [own, *others][:_MOST]],
        "chosen": chosen,
        "base_model": config["base_model"],
        "base_fingerprint": base,
        "sizes": [config["num_layers"], config["hidden_size"]],
    }
    try:
        files.write(_file(base), json.dumps(entry, indent=2) + "\n")
    except CannotWrite as error:  # the heads themselves are written
        logger.warning("%s are not found by themselves: %s. Name them: --heads", folder, error)
        return False
    return True


def find(
    sizes: tuple[int, int],
    fingerprint: Callable[[], str],
    bundled: Iterable[Path] = (),
    *,
    chosen: bool = False,
) -> Path | None:
    """The folder for a model of `sizes`, its layers and width, which tell most models apart.

    Its `fingerprint` is asked for only where they are known. What was written here goes before the
    `bundled` folders, and those go in their order. A folder that is gone, or holds other heads by
    now, is passed over. `chosen`: only what the user chose.
    """
    entries = [_read(file) for file in place().glob("*.json")]
    written = any(
        entry.get("sizes") == list(sizes) and (not chosen or entry.get("chosen") is True)
        for entry in entries
    )
    coming = [one for one in bundled if _sizes(_config(one)) == sizes]
    if not (written or coming) or not (base := fingerprint()):
        return None
    named = _folders(_read(_file(base))) if written else []
    for gone in (folder for folder in named if not folder.exists()):
        logger.info(
            "exit heads of this model were in %s and are gone. If they were moved: "
            "selfspec heads pull FOLDER",
            gone,
        )
    fitting = (one for one in (*named, *coming) if _config(one).get("base_fingerprint") == base)
    return next(fitting, None)


def folders() -> list[Path]:
    """Folders of heads that were written here and are still there; those in use first."""
    entries = map(_read, sorted(place().glob("*.json")))
    return [folder for entry in entries for folder in _folders(entry) if _config(folder)]


def place() -> Path:
    """The folder of these files."""
    return files.cache_folder() / "known-heads"


def _file(base: str) -> Path:
    return place() / f"{base[:32]}.json"


def _folders(entry: dict[str, Any]) -> list[Path]:
    names = entry.get("folders")
    named = names if isinstance(names, list) else []
    return [files.local_path(name) for name in named if isinstance(name, str)]


def _config(folder: Path) -> dict[str, Any]:
    """What a folder of heads says of itself; empty where it holds none."""
    try:
        return read_config(folder)
    except (HeadsNotFound, InvalidHeads):
        return {}


def _sizes(config: dict[str, Any]) -> tuple[Any, Any]:
    return config.get("num_layers"), config.get("hidden_size")


def _read(file: Path) -> dict[str, Any]:
    try:
        values = read_json(file, _MOST_BYTES)
    except InvalidData:
        return {}
    return values if isinstance(values, dict) else {}
