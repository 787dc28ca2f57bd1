"""`selfspec calibrate --entropy`: held-out text in, EASD's entropy threshold out."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from selfspec.cli import common, progress, training
from selfspec.config import SpeculationOptions
from selfspec.hub import models as hub
from selfspec.training.options import CacheOptions


def calibrate_entropy(asked: dict[str, Any], *, as_json: bool) -> None:
    """Measure tau_H; with --heads it becomes one of their defaults, else it is only printed."""
    training.require(asked, "data")
    folder = hub.resolve_heads(asked["heads"]) if "heads" in asked else None
    stored = folder is not None and not asked.get("dry_run", False)
    with training.writing_heads(folder) if folder and stored else nullcontext():
        _calibrate(asked, folder, stored=stored, as_json=as_json)


def _calibrate(asked: dict[str, Any], folder: Path | None, *, stored: bool, as_json: bool) -> None:
    base = training.load_base(asked)
    from selfspec.training.calibrate import SHARE, measured_entropy

    batch_tokens = CacheOptions().batch_tokens
    texts = training.read(asked["data"], base, asked, batch_tokens, asked.get("max_tokens"))
    with progress.bar("entropies", "batches") as show:
        found = measured_entropy(
            base.backbone, texts, batch_tokens, lambda done, total: show(done, total, "")
        )
    if folder is not None and stored:
        _store(folder, base, found.entropy_threshold)
    if as_json:
        common.emit(json.dumps(asdict(found)) + "\n")
        return
    where = (
        f"written to {folder}"
        if stored
        else "not stored: give it as --acceptance easd:entropy={found.entropy_threshold}"
    )
    common.emit(
        f"entropy threshold {found.entropy_threshold} nats, the mean of the highest "
        f"{SHARE:.0%} at {found.positions:,} answer positions (mean of all "
        f"{found.mean_entropy}); {where}\n"
    )


def _store(folder: Path, base: training.Base, value: float) -> None:
    """Add it to the defaults of the heads. Raises HeadsMismatch for those of another model."""
    from selfspec.heads.exit_heads import ExitHeads

    heads = ExitHeads.from_pretrained(
        folder, base.backbone.unembedding, base.backbone.fingerprint, base.name
    )
    options = SpeculationOptions().updated(heads.config.defaults)
    options = options.updated({"easd": {"entropy": value}})
    heads.config = replace(heads.config, defaults=options.differing())
    heads.config.write(folder)
