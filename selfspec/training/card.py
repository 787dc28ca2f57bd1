"""The card of a heads folder, from its records: what they are, how to use them, what was measured.

Comes in: the config, the metrics of the fit, and what `calibrate` found, if it ran. Goes out: the
text of README.md, with the header that the hub reads. Called by `records` and `selfspec heads`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from selfspec.api.chat_template import name_of
from selfspec.heads.exit_heads import HeadsConfig
from selfspec.hub.models import HUB_ID

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
