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
from typing import Any

import torch
import yaml
from huggingface_hub import ModelCardData
from jinja2 import Environment, StrictUndefined, TemplateError

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
---
{{ header.to_yaml() }}
---

# Exit heads for {{ config.base_model }}

{{ config.head_type.capitalize() }} heads at exit layers {{ config.exit_layers|join(", ") }} of \
{{ config.num_layers }}, drafting from {{ vocabulary }}. For
speculative decoding with selfspec, whose output they never change. Weights: {{ run.dtype }}.

Fitted with `selfspec fit` (loss: {{ loss }}; learning rate {{ run.learning_rate }}, \
{{ run.epochs }} epoch(s), {{ run.steps }}
steps, seed {{ run.seed }}) on {{ "{:,}".format(run.answer_tokens) }} answer tokens of \
{{ "{:,}".format(run.conversations) }} conversations
({{ run.data }}){{ before }}; `run.yaml` holds all options, `metrics.jsonl` the course of it. \
Base fingerprint:
`{{ config.base_fingerprint }}`.

## Use

```sh
selfspec generate --model {{ header.base_model or "MODEL" }} --heads {{ heads }} --stats \
"Why is the sky blue?"
```

In transformers (5.17 or newer), where selfspec is installed too:

```python
output = model.generate(**inputs, custom_generate="{{ heads }}", trust_remote_code=True)
```

{% if heads == "HEADS" %}
HEADS is this folder, or its id on the hub, where transformers finds what `heads push` adds.
{% endif %}
Behind `selfspec heads pull {{ heads }}` these heads are used with their model by themselves.
{% if config.chat_template is not none %}

Their text was written with a chat template that the model does not bring, `{{ template }}`. It is \
kept in
`config.json` and used with these heads by itself.
{% endif %}

## Agreement on held-out text

Share of {{ "{:,}".format(first.positions) }} answer positions ({{ run.validation }}) where a \
head's top token is the
model's own, over the full vocabulary. {{ "{:.1%}".format(metrics.coverage) }} of these are in \
the draft vocabulary.
Text of another kind than the conversations has lower shares.

| exit layer | first draft |{{ " second draft |" if second }}
|---|---|{{ "---|" if second }}
{% for layer, found in metrics.layers.items() %}
| {{ layer }} | {{ shares(found)|join(" | ") }} |
{% endfor %}
{% if calibration is not none %}

## Calibration

`selfspec calibrate` on {{ "{:,}".format(calibration.positions) }} positions of other text \
(`calibration.json`). T: temperature
of a head's confidence; ECE: how far that then is from the truth.

| exit layer | agreement | T | ECE before | ECE |
|---|---|---|---|---|
{% for layer, found in calibration.layers.items() %}
| {{ layer }} | {{ "%.1f %%"|format(100 * found.agreement) }} | \
{{ "%.2f | %.3f | %.3f"|format(found.temperature, found.ece_before, found.ece) }} |
{% endfor %}

Of the settings that it tried the best is exit layers {{ setting.exit_layers|join(", ") }}, \
thresholds {{ setting.exit_threshold|join(", ") }}, at most
{{ setting.max_draft_tokens }} draft tokens. By measured costs of layers and heads on the machine \
that it ran on, that is
{{ "%.2f"|format(setting.compression_rate) }} tokens per verification and \
{{ "%.2f"|format(setting.speed_up) }} times the speed of plain decoding behind the
prompt. `selfspec tune` finds what suits another machine.
{% endif %}
"""
_GENERATE = '''\
"""model.generate(**inputs, custom_generate="{name}", trust_remote_code=True)

Drafts with the heads of this folder, by selfspec; `heads` names others.
"""

import selfspec


def generate(model, heads=None, **options):
    return selfspec.custom_generate(model, heads=heads, pushed_to="{name}", **options)
'''
"""What transformers calls in place of its own `generate`, from `custom_generate/generate.py`."""


def card(
    config: HeadsConfig,
    metrics: Mapping[str, Any],
    calibration: Mapping[str, Any] | None = None,
    licence: str | None = None,
    heads: str = "HEADS",
) -> str:
    """The README of a folder of `heads`; `licence` stands in the header, which the hub reads.

    Raises jinja2.TemplateError, LookupError, TypeError or ValueError for records of other things.
    """
    size, ce_share = config.draft_vocab_size, config.training["ce_share"]
    before, wide = config.training.get("before"), config.training.get("narrowed_from")
    on_hub = "/" in config.base_model and HUB_ID.fullmatch(config.base_model) is not None
    loss = "divergence from the model's own distribution"
    if ce_share > 0.0:
        loss += f", {ce_share:g} of it cross-entropy on the next token"
    first: Mapping[str, Any] = next(iter(metrics["layers"].values()), {})
    page = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    return page.from_string(_CARD).render(
        header=ModelCardData(
            base_model=config.base_model if on_hub else None,
            library_name="selfspec",
            license=licence,
            pipeline_tag="text-generation",
            tags=["selfspec", "speculative-decoding", "early-exit", "custom_generate"],
        ),
        config=config,
        heads=heads,
        run=config.training,
        before=f", from heads of {before['answer_tokens']:,} before" if before else "",
        vocabulary=("the whole vocabulary" if size is None else f"{size:,} tokens")
        + (f", the most frequent of {wide:,}, which the figures below are of" if wide else ""),
        loss="cross-entropy on the next token" if ce_share == 1.0 else loss,
        template=name_of(config.chat_template or ""),
        metrics=metrics,
        first=first,
        second=first["agreement_second"] is not None,
        shares=lambda found: [
            f"{100 * found[name]:.1f} %"
            for name in ("agreement", "agreement_second")
            if found[name] is not None
        ],
        calibration=calibration,
        setting={} if calibration is None else calibration["setting"],
    )


def picture_of(entries: Sequence[dict[str, Any]]) -> bytes | None:
    """Loss and agreement by epoch; without matplotlib a notice takes the picture's place."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no curves.png: it needs matplotlib (pip install 'selfspec[train]')")
        return None
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    loss, agreement = figure.subplots(1, 2)
    for layer in sorted({entry["layer"] for entry in entries}):
        found = [entry for entry in entries if entry["layer"] == layer]
        epochs = [entry["epoch"] for entry in found]
        losses = [entry["train_loss"] for entry in found]
        loss.plot(epochs, losses, marker="o", label=f"layer {layer}")
        agreement.plot(epochs, [100 * entry["agreement"] for entry in found], marker="o")
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

CALIBRATION = "calibration.json"

_PATHS = (
    *("data", "cache", "output", "validation", "heads"),
    *("start_from", "config", "chat_template", "model"),
)
"""Options that may name files; a model's hub id stands in the config."""


def write(folder: Path, fitted: Fitted, run: Mapping[str, Any]) -> None:
    """Write all files of `folder`; `run`: the command's options, for YAML. Raises CannotWrite."""
    others: dict[str, str | bytes] = {
        "README.md": card(fitted.heads.config, fitted.metrics),
        "run.yaml": yaml.safe_dump({"run": dict(run), "machine": machine()}, sort_keys=False),
        "metrics.jsonl": "".join(json.dumps(entry) + "\n" for entry in fitted.epochs),
        "metrics.json": json.dumps(fitted.metrics, indent=2) + "\n",
    }
    if picture := picture_of(fitted.epochs):
        others["curves.png"] = picture
    (folder / CALIBRATION).unlink(missing_ok=True)  # of the heads that these replace
    fitted.heads.save(folder, others)


def card_of(folder: Path, licence: str | None = None, heads: str = "HEADS") -> str:
    """The card that the records of a folder make. Raises InvalidData, InvalidHeads."""
    calibration = folder / CALIBRATION
    try:
        return card(
            config_of(folder),
            read_json(folder / "metrics.json"),
            read_json(calibration) if calibration.is_file() else None,
            licence,
            heads,
        )
    except (TemplateError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise InvalidData(
            f"the records do not make a card: {type(error).__name__} {error}"
        ) from error


def for_others(folder: Path, name: str, licence: str | None = None) -> dict[str, str | bytes]:
    """The files that `fit` and `calibrate` wrote, for the hub: paths lose their folders.

    Beside them what transformers needs to run them by `name`. Raises InvalidData, InvalidHeads.
    """
    found: dict[str, str | bytes] = {}
    for file in (*FILES_OF_A_FIT, CALIBRATION):
        if (folder / file).is_file():
            found[file] = (folder / file).read_bytes()
    if CALIBRATION in found:
        values = read_json(folder / CALIBRATION)
        found[CALIBRATION] = json.dumps(_without_folders(values), indent=2) + "\n"
    found["README.md"] = card_of(folder, licence, name)
    found["custom_generate/generate.py"] = _GENERATE.format(name=name)
    needed = f"selfspec>={metadata.version('selfspec')}\n"
    found["custom_generate/requirements.txt"] = needed
    run = _without_folders(read_yaml(folder / "run.yaml"))
    return found | {"run.yaml": yaml.safe_dump(run, sort_keys=False)}


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
    packages = ("torch", "transformers", "safetensors")
    accelerated = torch.cuda.is_available()
    return {name: metadata.version(name) for name in packages} | {
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if accelerated else None,
    }
