"""Writes a folder of fitted heads: heads, metrics, the run that made them, and a card.

Comes in: what `fit` gave and the options it ran with. Goes out: a folder for people and for
`ExitHeads.from_pretrained`. Called by `selfspec fit`.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from selfspec import files
from selfspec.api.chat_template import name_of
from selfspec.errors import InvalidData
from selfspec.heads.attending import config_of
from selfspec.heads.exit_heads import HeadsConfig
from selfspec.heads.folder import FILES_OF_A_FIT
from selfspec.hub.models import HUB_ID
from selfspec.training.fit import Fitted
from selfspec.untrusted import read_json, read_yaml

logger = logging.getLogger(__name__)

_CARD = """\
# Exit heads for {base_model}

{kind} heads at exit layers {layers} of {num_layers}, drafting from {vocabulary}. For
speculative decoding with selfspec, whose output they never change. Weights: {dtype}.

Fitted with `selfspec fit` (loss: {loss}; learning rate {learning_rate}, {epochs} epoch(s), {steps}
steps, seed {seed}) on {answer_tokens:,} answer tokens of {conversations:,} conversations
({data}); `run.yaml` holds all options, `metrics.jsonl` the course of it. Base fingerprint:
`{fingerprint}`.

## Use

```sh
selfspec generate --model {model} --heads HEADS --stats "Why is the sky blue?"
```

HEADS is this folder, or its id on the hub; MODEL, where it says so, the model itself. Behind
`selfspec heads pull HEADS` these heads are used with their model by themselves.{template}

## Agreement on held-out text

Share of {positions:,} answer positions ({validation}) where a head's top token is the
model's own, over the full vocabulary, and the same among the positions where the head is most
confident (`metrics.json`). {coverage:.1%} of the model's tokens are in the draft vocabulary.
Text of another kind than the conversations has lower shares.

| exit layer | all | most confident 25 % | most confident 10 % |{second_head}
|---|---|---|---|{second_rule}
{rows}
"""

_TEMPLATE = """

Their text was written with a chat template that the model does not bring, `{name}`. It is kept in
`config.json` and used with these heads by itself."""

_CALIBRATION = """
## Calibration

`selfspec calibrate` on {positions:,} positions of other text (`calibration.json`). T: temperature
of a head's confidence; ECE: how far that then is from the truth.

| exit layer | agreement | T | ECE before | ECE |
|---|---|---|---|---|
{rows}

Of the settings that it tried the best is exit layers {layers}, thresholds {thresholds}, at most
{width} draft tokens. By measured costs of layers and heads on the machine that it ran on, that is
{rate:.2f} tokens per verification and {speed_up:.2f} times the speed of plain decoding behind the
prompt. `selfspec tune` finds what suits another machine.
"""


def card(
    config: HeadsConfig,
    metrics: Mapping[str, Any],
    calibration: Mapping[str, Any] | None = None,
    licence: str | None = None,
) -> str:
    """The README of a heads folder; `licence` stands in the header."""
    text = header(config, licence) + _described(config, metrics)
    return text if calibration is None else text + _calibrated(calibration)


def header(config: HeadsConfig, licence: str | None = None) -> str:
    """What the hub reads, between two rules."""
    values: dict[str, Any] = {"library_name": "selfspec"}
    if _is_hub_id(config.base_model):
        values["base_model"] = config.base_model
    if licence is not None:
        values["license"] = licence
    values["tags"] = ["selfspec", "speculative-decoding", "early-exit"]
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---\n\n"


def _described(config: HeadsConfig, metrics: Mapping[str, Any]) -> str:
    size, template = config.draft_vocab_size, config.chat_template
    layers = metrics["layers"]
    second = any(shares["agreement_second"] is not None for shares in layers.values())
    return _CARD.format(
        **config.training,
        base_model=config.base_model,
        model=config.base_model if _is_hub_id(config.base_model) else "MODEL",
        template="" if template is None else _TEMPLATE.format(name=name_of(template)),
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


def _calibrated(found: Mapping[str, Any]) -> str:
    setting = found["setting"]
    return _CALIBRATION.format(
        positions=found["positions"],
        rows="\n".join(
            f"| {layer} | {100 * entry['agreement']:.1f} % | {entry['temperature']:.2f} | "
            f"{entry['ece_before']:.3f} | {entry['ece']:.3f} |"
            for layer, entry in found["layers"].items()
        ),
        layers=", ".join(map(str, setting["exit_layers"])),
        thresholds=", ".join(map(str, setting["exit_threshold"])),
        width=setting["max_draft_tokens"],
        rate=setting["compression_rate"],
        speed_up=setting["speed_up"],
    )


def _loss(ce_share: float) -> str:
    """In words."""
    if ce_share == 1.0:
        return "cross-entropy on the next token"
    own = "divergence from the model's own distribution"
    return own if ce_share == 0.0 else f"{own}, {ce_share:g} of it cross-entropy on the next token"


def _row(layer: str, shares: Mapping[str, float | None]) -> str:
    names = ("agreement", "agreement_top_25", "agreement_top_10", "agreement_second")
    known = [value for name in names if (value := shares[name]) is not None]
    return " | ".join([f"| {layer}", *(f"{100 * value:.1f} %" for value in known)]) + " |"


def _is_hub_id(name: str) -> bool:
    return "/" in name and HUB_ID.fullmatch(name) is not None


PICTURE = "curves.png"


class Curve(NamedTuple):
    """One exit layer over the epochs."""

    layer: int
    epochs: list[int]
    train_loss: list[float]
    """Nats per answer token."""
    agreement: list[float]
    """Percent of held-out positions."""


def curves(entries: Sequence[dict[str, Any]]) -> list[Curve]:
    """By exit layer."""
    layers = sorted({entry["layer"] for entry in entries})
    by_layer = {layer: [e for e in entries if e["layer"] == layer] for layer in layers}
    return [
        Curve(
            layer,
            [entry["epoch"] for entry in found],
            [entry["train_loss"] for entry in found],
            [100 * entry["agreement"] for entry in found],
        )
        for layer, found in by_layer.items()
    ]


def picture_of(entries: Sequence[dict[str, Any]]) -> bytes | None:
    """Loss and agreement by epoch; without matplotlib a notice takes the picture's place."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no %s: it needs matplotlib (pip install 'selfspec[train]')", PICTURE)
        return None
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    loss, agreement = figure.subplots(1, 2)
    for curve in curves(entries):
        loss.plot(curve.epochs, curve.train_loss, marker="o", label=f"layer {curve.layer}")
        agreement.plot(curve.epochs, curve.agreement, marker="o")
    loss.set(xlabel="epoch", ylabel="training loss [nats per token]")
    agreement.set(xlabel="epoch", ylabel="agreement, held out [%]")
    for axes in (loss, agreement):
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside right center", frameon=False)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=120)
    return drawn.getvalue()


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
    picture = picture_of(fitted.epochs)
    others = {
        "README.md": card(fitted.heads.config, fitted.metrics),
        "run.yaml": yaml.safe_dump(described, sort_keys=False),
        "metrics.jsonl": "".join(json.dumps(entry) + "\n" for entry in fitted.epochs),
        "metrics.json": json.dumps(fitted.metrics, indent=2) + "\n",
    }
    (folder / CALIBRATION).unlink(missing_ok=True)  # of the heads that these replace
    fitted.heads.save(folder, others if picture is None else others | {PICTURE: picture})


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
            config_of(folder),
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
