"""Writes a folder of fitted heads: heads, metrics, the run that made them, and a card.

Comes in: what `fit` gave and the options it ran with. Goes out: a folder for people and for
`ExitHeads.from_pretrained`. Called by `selfspec fit`.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml

from selfspec import files
from selfspec.errors import InvalidData
from selfspec.heads.exit_heads import HeadsConfig
from selfspec.heads.folder import FILES_OF_A_FIT
from selfspec.training import curves
from selfspec.training.card import card
from selfspec.training.fit import Fitted
from selfspec.untrusted import read_json, read_yaml

FILES = ("README.md", "config.json", "metrics.json", "model.safetensors", "run.yaml")
"""What a folder of fitted heads holds at least."""

CARD, METRICS, RUN = "README.md", "metrics.json", "run.yaml"
CALIBRATION = "calibration.json"

_PATHS = ("data", "cache", "output", "validation", "heads", "config", "chat_template", "model")
"""Options that may name files; a model's hub id stands in the config."""

_PACKAGES = ("torch", "transformers", "safetensors")


def write(folder: Path, fitted: Fitted, run: Mapping[str, Any]) -> None:
    """Write all files of `folder`; `run` holds the options of the command, ready for YAML.

    Raises CannotWrite; `ExitHeads.save` says what is there then.
    """
    described = {"run": dict(run), "machine": machine()}
    picture = curves.picture(fitted.epochs)
    others = {
        "README.md": card(fitted.heads.config, fitted.metrics),
        "run.yaml": yaml.safe_dump(described, sort_keys=False),
        "metrics.jsonl": "".join(json.dumps(entry) + "\n" for entry in fitted.epochs),
        "metrics.json": json.dumps(fitted.metrics, indent=2) + "\n",
    }
    (folder / CALIBRATION).unlink(missing_ok=True)  # of the heads that these replace
    fitted.heads.save(folder, others if picture is None else others | {curves.FILE: picture})


def redescribe(folder: Path, config: HeadsConfig) -> None:
    """Give the folder another config, and the card that follows from it. Raises CannotWrite."""
    config.write(folder)
    if (folder / METRICS).is_file():
        files.write(folder / CARD, card_of(folder))


def card_of(folder: Path, licence: str | None = None) -> str:
    """The card that the records of a folder make. Raises InvalidData, InvalidHeads."""
    metrics, calibration = folder / METRICS, folder / CALIBRATION
    try:
        return card(
            HeadsConfig.read(folder),
            read_json(metrics),
            read_json(calibration) if calibration.is_file() else None,
            licence,
        )
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise InvalidData(
            f"the records do not make a card: {type(error).__name__} {error}"
        ) from error


def for_others(folder: Path, licence: str | None = None) -> dict[str, str | bytes]:
    """The files that `fit` and `calibrate` wrote, for the hub: paths lose their folders.

    Raises InvalidData, InvalidHeads.
    """
    found: dict[str, str | bytes] = {}
    for name in (*FILES_OF_A_FIT, CALIBRATION):
        if (folder / name).is_file():
            found[name] = (folder / name).read_bytes()
    if CALIBRATION in found:
        values = read_json(folder / CALIBRATION)
        found[CALIBRATION] = json.dumps(_without_folders(values), indent=2) + "\n"
    run = _without_folders(read_yaml(folder / RUN))
    return found | {CARD: card_of(folder, licence), RUN: yaml.safe_dump(run, sort_keys=False)}


def _without_folders(record: Any) -> Any:
    """A record with a `run`, whose files are named without the places where they are."""
    if not isinstance(record, dict) or not isinstance(record.get("run"), dict):
        return record
    run = {
        name: Path(value).name if isinstance(value, str) and name in _PATHS else value
        for name, value in record["run"].items()
    }
    return record | {"run": run}


def machine() -> dict[str, Any]:
    """What a repetition on another machine may differ in."""
    versions = {name: metadata.version(name) for name in _PACKAGES}
    cpu = torch.backends.cpu.get_cpu_capability()
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        **versions,
        "python": platform.python_version(),
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "accelerator": accelerator,
    }
