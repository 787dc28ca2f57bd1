"""A folder of fitted heads: what a fit gave, a card, and settings that are worth using.

Comes in: what `fit` gave and the options it ran with; later heads, features of held-out text and
measured costs. Goes out: a folder for people and for `ExitHeads.from_pretrained`; temperatures and
settings in its config, and a record of why. Called by `selfspec fit`, `calibrate` and `adapt`.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import ModelCardData
from jinja2 import Environment, StrictUndefined, TemplateError
from torch import Tensor

from selfspec import files
from selfspec.api.chat_template import name_of
from selfspec.config import SpeculationOptions
from selfspec.decoding.costs import Exits, MeasuredCosts, expected
from selfspec.errors import InvalidData
from selfspec.files import read_json, read_yaml
from selfspec.heads.attending import config_of
from selfspec.heads.exit_heads import ExitHeads, HeadsConfig
from selfspec.heads.folder import FILES_OF_A_FIT
from selfspec.heads.heads import entropy, top_probability
from selfspec.hub.models import HUB_ID
from selfspec.model.backbone import Backbone
from selfspec.options import FITTED, Exit, Ngram, NoDrafts
from selfspec.training.features import LOGIT_ROWS, Features, FeatureSpec, Selection, StreamSource
from selfspec.training.fit import Fitted, coverage, judged
from selfspec.training.text import Conversation

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
| {{ layer }} | {{ "%.1f %%"|format(100 * found.agreement) }} |\
{{ " %.1f %% |"|format(100 * found.agreement_second) if second }}
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

_PATHS = (  # options that may name files; a model's hub id stands in the config
    *("data", "cache", "output", "validation", "heads"),
    *("start_from", "config", "chat_template", "model"),
)


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


# --- calibration: measured on held-out text, chosen by the cost model

TEMPERATURES = tuple(round(0.5 * 1.06**step, 4) for step in range(31))  # candidates, 0.5 to 2.9

_BINS = 15

_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Candidate thresholds let this share of the positions exit."""

_GUESSES = 8
"""Guesses at a place by heads that read embeddings: the right token is among so many in 68 % of
places of SmolLM2-135M's own text, the first in 39 %. Costs say how many are proposed."""


@dataclass(frozen=True)
class Scores:
    """Answers of one exit layer at N held-out positions."""

    confidence: Tensor  # [len(TEMPERATURES), N], under each candidate
    right: Tensor  # [N] bool: the model says the same

    def at(self, temperature: float) -> Tensor:
        """[N] confidences under one of TEMPERATURES."""
        return self.confidence[TEMPERATURES.index(temperature)]


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """One exit layer's confidence against the truth."""

    agreement: float  # share of positions where the head is right, in 0..1
    temperature: float  # fitted
    ece_before: float  # expected calibration error at temperature 1, in 0..1
    ece: float  # at the fitted one


@torch.no_grad()
def score(heads: ExitHeads, batches: Iterable[Features]) -> dict[int, tuple[Scores, Scores]]:
    """By exit layer: first drafts of a round, and later ones (the same where nothing is read)."""
    seen: dict[int, tuple[list[Scores], list[Scores]]]
    seen = {layer: ([], []) for layer in heads.config.exit_layers}
    for batch in batches:
        for layer, (first, later) in seen.items():
            drafts = [
                Scores(
                    torch.stack([top_probability(logits, each) for each in TEMPERATURES]).cpu(),
                    right.cpu(),
                )
                for logits, right in judged(heads, layer, batch, drafts=2)
            ]
            first.append(drafts[0])
            later.append(drafts[-1])
    return {layer: (_joined(first), _joined(later)) for layer, (first, later) in seen.items()}


def _joined(parts: Sequence[Scores]) -> Scores:
    confidence = torch.cat([part.confidence for part in parts], dim=1)
    return Scores(confidence, torch.cat([part.right for part in parts]))


def reliability(scores: Scores) -> Reliability:
    """The temperature of the highest likelihood of being right and wrong where it was."""
    chances = torch.where(scores.right, scores.confidence, 1.0 - scores.confidence).double()
    losses = -chances.clamp_min(1e-9).log().mean(-1)  # negative log-likelihood, in nats
    best = int(losses.argmin())
    neutral = min(range(len(TEMPERATURES)), key=lambda i: abs(TEMPERATURES[i] - 1.0))
    return Reliability(
        agreement=scores.right.double().mean().item(),
        temperature=TEMPERATURES[best],
        ece_before=calibration_error(scores.confidence[neutral], scores.right),
        ece=calibration_error(scores.confidence[best], scores.right),
    )


def calibration_error(confidence: Tensor, right: Tensor) -> float:
    """ECE over 15 equal bins: mean distance of confidence and share right, by positions."""
    bins = (confidence * _BINS).long().clamp_max(_BINS - 1)
    zeros = torch.zeros(_BINS, dtype=torch.float64)
    sure = zeros.index_add(0, bins, confidence.double())
    correct = zeros.index_add(0, bins, right.double())
    return float((sure - correct).abs().sum() / len(confidence))


@dataclass(frozen=True)
class Setting:
    """Options of the runtime, and what they should give."""

    exit_layers: tuple[int, ...]
    exit_threshold: tuple[float, ...]
    max_draft_tokens: int
    compression_rate: float  # tokens per verification
    speed_up: float  # over plain decoding on the same runtime


def exits(
    confidence: Sequence[Tensor], right: Sequence[Tensor], thresholds: Sequence[float]
) -> Exits:
    """Statistics over N positions, [N] by exit layer from shallow to deep."""
    waiting = torch.ones_like(right[0])
    at, kept = [], 0
    for sure, correct, tau in zip(confidence, right, thresholds, strict=True):
        leaves = waiting & (sure >= tau)
        at.append(leaves.double().mean().item())
        kept += int((leaves & correct).sum())
        waiting &= ~leaves
    return Exits(tuple(at), kept / len(waiting))


def best_setting(
    costs: MeasuredCosts,
    candidates: Mapping[int, Sequence[float]],
    evaluate: Callable[[tuple[int, ...], tuple[float, ...]], tuple[Exits, Exits]],
    most_layers: int = 2,
) -> Setting:
    """The fastest: at most `most_layers` exit layers, drafts as long as costs were measured."""
    found: list[Setting] = []
    for count in range(1, most_layers + 1):
        for layers in itertools.combinations(sorted(candidates), count):
            for taus in itertools.product(*(candidates[layer] for layer in layers)):
                first, later = evaluate(layers, taus)
                for width in range(1, len(costs.layers)):
                    rate, gain = expected(costs, layers, first, later, width)
                    found.append(Setting(layers, taus, width, rate, gain))
    return max(found, key=lambda setting: setting.speed_up)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was found."""

    positions: int  # held-out answer positions
    coverage: float  # share of them where the heads can draft the model's token
    reliabilities: dict[int, Reliability]  # by exit layer
    second: dict[int, float] | None  # share of second drafts that are right; None: as first ones
    setting: Setting
    costs: MeasuredCosts

    def record(self) -> dict[str, Any]:
        """For `calibration.json`."""
        layers = {
            str(layer): asdict(found)
            | {"agreement_second": None if self.second is None else self.second[layer]}
            for layer, found in self.reliabilities.items()
        }
        return {
            "positions": self.positions,
            "coverage": self.coverage,
            "layers": layers,
            "setting": asdict(self.setting),
            "drafter": self.drafter,
            "costs": asdict(self.costs),
        }

    @property
    def drafter(self) -> str:
        """What should draft: heads if they should beat plain decoding, else what pays."""
        if self.setting.speed_up > 1.0:
            return FITTED
        costs, several = self.costs, range(2, len(self.costs.layers) + 1)
        gains = (rows * costs.plain_step() - costs.step(rows) for rows in several)
        return Ngram.kind if any(gain > 0.0 for gain in gains) else NoDrafts.kind

    def defaults(self, before: SpeculationOptions) -> SpeculationOptions:
        """The heads' default options: `before` with the calibrated drafter and exit settings."""
        setting = self.setting
        if self.drafter != FITTED:
            return replace(before, exit=Exit(), drafter=self.drafter)
        paying = Exit(
            layers=setting.exit_layers,
            threshold=setting.exit_threshold,
            anneal_strength=0.0,  # it is in the fitted temperatures
            max_tokens=setting.max_draft_tokens,
            guesses=_GUESSES if setting.exit_layers == (0,) else 1,
        )
        drafter = before.drafter if before.uses(Exit.kind) else FITTED
        return replace(before, exit=paying, drafter=drafter)


def calibrate(
    heads: ExitHeads, text: Selection, costs: MeasuredCosts, most_layers: int = 2
) -> Calibration:
    """Measure, fit temperatures, and choose layers, thresholds and bounds by the cost model."""
    scores = score(heads, text.batches())
    found = {layer: reliability(first) for layer, (first, _) in scores.items()}
    sure = {
        layer: [drafts.at(found[layer].temperature) for drafts in both]
        for layer, both in scores.items()
    }

    def evaluate(layers: tuple[int, ...], taus: tuple[float, ...]) -> tuple[Exits, Exits]:
        first, later = (
            exits([sure[i][draft] for i in layers], [scores[i][draft].right for i in layers], taus)
            for draft in (0, 1)
        )
        return first, later

    candidates = {layer: _candidates(first) for layer, (first, _) in sure.items()}
    setting = best_setting(costs, candidates, evaluate, most_layers)
    rounded = tuple(round(tau, 3) for tau in setting.exit_threshold)
    seconds = {layer: later.right.double().mean().item() for layer, (_, later) in scores.items()}
    return Calibration(
        positions=text.answers,
        coverage=coverage(heads, text.batches()),
        reliabilities=found,
        second=seconds if heads.feeds_itself else None,
        setting=replace(setting, exit_threshold=rounded),
        costs=costs,
    )


def _candidates(confidence: Tensor) -> list[float]:
    ranked = confidence.sort(descending=True).values
    places = (torch.tensor(_SHARES) * (len(ranked) - 1)).long()
    return sorted({max(float(value), 1e-3) for value in ranked[places]})


def write_calibration(
    heads: ExitHeads, folder: Path, found: Calibration, run: dict[str, Any]
) -> None:
    """Temperatures and defaults into the heads' config, the record beside it, the card anew."""
    options = SpeculationOptions().updated(heads.config.defaults)
    heads.config = replace(
        heads.config,
        temperatures={str(k): entry.temperature for k, entry in found.reliabilities.items()},
        defaults=found.defaults(options).differing(),
    )
    record = json.dumps({"run": run, **found.record()}, indent=2) + "\n"
    files.write(folder / CALIBRATION, record)
    heads.config.write(folder)
    if (folder / "metrics.json").is_file():
        files.write(folder / "README.md", card_of(folder))


# --- the entropy threshold of the lossy rule easd

SHARE = 0.05  # p, the share of high-entropy steps (EASD section 3.6)


def measured_entropy(
    backbone: Backbone,
    conversations: Sequence[Conversation],
    batch_tokens: int,
    progress: Callable[[int, int], None],
) -> dict[str, float]:
    """tau_H of a model over the answers of a text, and the mean entropy there, in nats.

    `progress` hears of batches done and in all. Raises InvalidData for a text without answers.
    """
    last = backbone.num_layers
    source = StreamSource(backbone, FeatureSpec((last,)), conversations, batch_tokens)
    if not source.sizes:
        raise InvalidData("the text holds no answers to measure. Give another --data")
    parts = []
    for index in range(len(source.sizes)):
        parts.append(entropies(backbone, source.batch(index).hidden[last]))
        progress(index + 1, len(source.sizes))
    found = torch.cat(parts)
    return {
        "entropy_threshold": round(high_entropy(found), 4),
        "positions": len(found),
        "mean_entropy": round(found.mean().item(), 4),
    }


@torch.no_grad()
def entropies(backbone: Backbone, hidden: Tensor) -> Tensor:
    """The model's entropy behind the last layer's states, [N, d] -> [N] in nats, temperature 1."""
    parts = [entropy(backbone.logits(rows).softmax(-1)) for rows in hidden.split(LOGIT_ROWS)]
    return torch.cat(parts).cpu()


def high_entropy(found: Tensor) -> float:
    """Mean of the highest ceil(p N) of N entropies, equation 10."""
    return found.double().topk(math.ceil(SHARE * len(found))).values.mean().item()
