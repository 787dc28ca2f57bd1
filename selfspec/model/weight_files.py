"""Which files decide a model's weights, and whether they are still the same. Imports no torch.

Comes in: a folder, or a hub id and the loaded config. Goes out: stamps, by which `fingerprint`
knows again what it has hashed. Called by `hub` ahead of loading.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FileStamp = tuple[str, int, int]
"""Real path, bytes, and time of the last change in nanoseconds."""

_KINDS = ("config.json", "*.index.json", "*.safetensors")


def stamps(paths: Iterable[Path]) -> tuple[FileStamp, ...]:
    """Of each file; nothing at all if one is missing."""
    try:
        real = [Path(os.path.realpath(path)) for path in paths]
        return tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in real)
    except OSError:
        return ()


def of_folder(folder: Path) -> tuple[FileStamp, ...]:
    """Of a model's folder; nothing where an adapter brings in weights from elsewhere."""
    if (folder / "adapter_config.json").exists():
        return ()
    return stamps(sorted({path for kind in _KINDS for path in folder.glob(kind)}))


def of_snapshot(name: str, config: Any) -> tuple[FileStamp, ...]:
    """Of what the hub's cache holds of a model with this config; its files never change."""
    from huggingface_hub import try_to_load_from_cache

    revision = getattr(config, "_commit_hash", None)
    found = try_to_load_from_cache(name, "config.json", revision=revision) if revision else None
    return of_folder(Path(found).parent) if isinstance(found, str) else ()
