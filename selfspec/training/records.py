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
from selfspec.heads.exit_heads import HeadsConfig
from selfspec.training import curves
from selfspec.training.fit import Fitted
from selfspec.untrusted import read_json

FILES = ("README.md", "config.json", "metrics.json", "model.safetensors", "run.yaml")
"""What a folder of fitted heads holds at least."""

_PACKAGES = ("torch", "transformers", "safetensors")

_CARD = """\
# Exit heads for {base_model}

{kind} heads at exit layers {layers} of {num_layers}, drafting from {vocabulary}. For
speculative decoding with selfspec, whose output they never change. Weights: {dtype}.

Fitted with `selfspec fit` (loss: {loss}; learning rate {learning_rate}, {epochs} epoch(s), {steps}
steps, seed {seed}) on {answer_tokens:,} answer tokens of {conversations:,} conversations
({data}); `run.yaml` holds all options, `metrics.jsonl` the course of it. Base fingerprint:
`{fingerprint}`.

## Agreement on held-out text

Share of {positions:,} answer positions ({validation}) where a head's top token is the
model's own, over the full vocabulary, and the same among the positions where the head is most
confident (`metrics.json`). {coverage:.1%} of the model's tokens are in the draft vocabulary.
Text of another kind than the conversations has lower shares.

| exit layer | all | most confident 25 % | most confident 10 % |{second_head}
|---|---|---|---|{second_rule}
{rows}
"""


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
    fitted.heads.save(folder, others if picture is None else others | {curves.FILE: picture})


def redescribe(folder: Path, config: HeadsConfig) -> None:
    """Give the folder another config, and the card that follows from it. Raises CannotWrite."""
    config.write(folder)
    if (folder / "metrics.json").is_file():
        files.write(folder / "README.md", card(config, read_json(folder / "metrics.json")))


def card(config: HeadsConfig, metrics: Mapping[str, Any]) -> str:
    """The README of a heads folder, from its records."""
    size = config.draft_vocab_size
    layers = metrics["layers"]
    second = any(shares["agreement_second"] is not None for shares in layers.values())
    return _CARD.format(
        **config.training,
        base_model=config.base_model,
        kind=config.head_type.capitalize(),
        layers=", ".join(map(str, config.exit_layers)),
        num_layers=config.num_layers,
        vocabulary="the whole vocabulary" if size is None else f"{size:,} tokens",
        fingerprint=config.base_fingerprint,
        loss=_loss(config.training["ce_share"]),
        positions=next(iter(layers.values()))["positions"],
        coverage=metrics["coverage"],
        second_head=" second draft |" if second else "",
        second_rule="---|" if second else "",
        rows="\n".join(_row(layer, shares) for layer, shares in layers.items()),
    )


def _loss(ce_share: float) -> str:
    """In words."""
    if ce_share == 1.0:
        return "cross-entropy on the next token"
    own = "divergence from the model's own distribution"
    return own if ce_share == 0.0 else f"{own}, {ce_share:g} of it cross-entropy on the next token"


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


def _row(layer: str, shares: Mapping[str, float | None]) -> str:
    names = ("agreement", "agreement_top_25", "agreement_top_10", "agreement_second")
    known = [value for name in names if (value := shares[name]) is not None]
    return " | ".join([f"| {layer}", *(f"{100 * value:.1f} %" for value in known)]) + " |"
