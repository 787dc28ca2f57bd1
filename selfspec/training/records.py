"""Writes folders of fitted heads: results of the fit, a card (card.jinja), calibrated settings."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata, resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from huggingface_hub import ModelCardData
from jinja2 import Environment, StrictUndefined, TemplateError
from torch import Tensor

from selfspec import files
from selfspec.api.chat_template import name_of
from selfspec.config import SpeculationOptions
from selfspec.decoding.costs import USUAL_COST, DraftCost, ExitOdds, expected_gain
from selfspec.errors import InvalidData
from selfspec.files import read_json, read_yaml
from selfspec.heads.attending import config_of
from selfspec.heads.exit_heads import ExitHeads, HeadsConfig
from selfspec.heads.heads import entropy, top_probability
from selfspec.hub import models as hub
from selfspec.model.backbone import Backbone
from selfspec.options import FITTED, Costs, Exit, Ngram, NoDrafts
from selfspec.training.features import LOGIT_ROWS, Features, FeatureSpec, Selection, StreamSource
from selfspec.training.fit import Fitted, coverage, judge_drafts
from selfspec.training.text import Conversation


def page(template: str, /, **values: Any) -> str:
    """Render a template beside this file."""
    text = (resources.files(__package__) / f"{template}.jinja").read_text(encoding="utf-8")
    jinja = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    return jinja.from_string(text).render(**values)


def card(
    config: HeadsConfig,
    metrics: Mapping[str, Any],
    calibration: Mapping[str, Any] | None = None,
    licence: str | None = None,
    heads: str = "HEADS",
) -> str:
    """The README of a folder of `heads`; `licence` goes into the header, which the hub reads.

    Raises jinja2.TemplateError, LookupError, TypeError or ValueError for records of another kind.
    """
    on_hub = "/" in config.base_model and hub.HUB_ID.fullmatch(config.base_model) is not None
    return page(
        "card",
        header=ModelCardData(
            base_model=config.base_model if on_hub else None,
            library_name="selfspec",
            license=licence,
            pipeline_tag="text-generation",
            tags=["selfspec", "speculative-decoding", "early-exit", "custom_generate"],
        ),
        config=config,
        heads=heads,
        metrics=metrics,
        calibration=calibration,
        name_of=name_of,
    )


FILES = ("README.md", "config.json", "metrics.json", "model.safetensors", "run.yaml")
"""Files that every folder of fitted heads has."""

CALIBRATION = "calibration.json"

_PATHS = (  # options that may name files; a model's hub id is in the config
    *("data", "cache", "output", "validation", "heads"),
    *("start_from", "config", "chat_template", "model"),
)


def write(folder: Path, fitted: Fitted, run: Mapping[str, Any]) -> None:
    """Write all files of `folder`; `run`: the command's options, for YAML. Raises CannotWrite."""
    texts = {
        "README.md": card(fitted.heads.config, fitted.metrics),
        "run.yaml": yaml.safe_dump({"run": dict(run), "machine": hub.machine()}, sort_keys=False),
        "metrics.jsonl": "".join(json.dumps(entry) + "\n" for entry in fitted.epochs),
        "metrics.json": json.dumps(fitted.metrics, indent=2) + "\n",
    }
    fitted.heads.save(folder, texts)
    (folder / CALIBRATION).unlink(missing_ok=True)  # that of replaced heads


def card_of(folder: Path, licence: str | None = None, heads: str = "HEADS") -> str:
    """Make the card of a folder from its records. Raises InvalidData, InvalidHeads."""
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
        reason = f"metrics.json or calibration.json makes no card ({type(error).__name__} {error})"
        raise InvalidData(f"{reason}. Run selfspec calibrate, or fit, again") from error


def hub_files(folder: Path, name: str, licence: str | None = None) -> dict[str, str | bytes]:
    """The files that `fit` and `calibrate` wrote, for the hub, with file names instead of paths.

    Adds the files with which transformers runs them by `name`. Raises InvalidData, InvalidHeads.
    """
    names = [file for file in hub.HEADS_FILES if (folder / file).is_file()]
    contents: dict[str, str | bytes] = {file: (folder / file).read_bytes() for file in names}
    if CALIBRATION in contents:
        values = read_json(folder / CALIBRATION)
        contents[CALIBRATION] = json.dumps(_without_folders(values), indent=2) + "\n"
    run = _without_folders(read_yaml(folder / "run.yaml"))
    return contents | {
        "README.md": card_of(folder, licence, name),
        "run.yaml": yaml.safe_dump(run, sort_keys=False),
        "custom_generate/generate.py": page("custom_generate", name=name),
        "custom_generate/requirements.txt": f"selfspec>={metadata.version('selfspec')}\n",
    }


def _without_folders(record: Any) -> Any:
    """A record whose `run` names files without their folders."""
    if not isinstance(record, dict) or not isinstance(record.get("run"), dict):
        return record
    run = {
        name: Path(value).name if isinstance(value, str) and name in _PATHS else value
        for name, value in record["run"].items()
    }
    return record | {"run": run}


# --- calibration: measured on held-out text, chosen by the cost model

TEMPERATURES = tuple(round(1.06**step, 4) for step in range(-12, 19))  # candidates, 0.5 to 2.9

_BINS = 15

_LONGEST = 7  # most draft tokens of a setting
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Shares of the positions that exit under each candidate threshold."""

_GUESSES = 8
"""Guesses per position by heads that read embeddings: in SmolLM2-135M's own text, the right token
is among this many at 68 % of positions, and the first at 39 %. Costs say how many are drafted."""


class Scores(NamedTuple):
    """Predictions of one exit layer at N held-out positions."""

    confidence: Tensor  # [len(TEMPERATURES), N], at each candidate temperature
    right: Tensor  # [N] bool: the model predicts the same token


@dataclass(frozen=True)
class Reliability:
    """How well one exit layer's confidence predicts that it is right."""

    agreement: float  # share of positions where the head is right, in 0..1
    temperature: float  # fitted
    ece_before: float  # expected calibration error at temperature 1, in 0..1
    ece: float  # at the fitted temperature
    agreement_second: float | None = None  # of second drafts; None: the same as of first ones


@torch.no_grad()
def score(heads: ExitHeads, batches: Iterable[Features]) -> dict[int, tuple[Scores, Scores]]:
    """By exit layer: first drafts of a round, and second ones (the same if heads have none)."""
    scores: dict[int, tuple[list[Scores], list[Scores]]]
    scores = {layer: ([], []) for layer in heads.config.exit_layers}
    for batch in batches:
        for layer, (first, later) in scores.items():
            drafts = []
            for logits, right in judge_drafts(heads, layer, batch, drafts=2):
                confidence = torch.stack([top_probability(logits, each) for each in TEMPERATURES])
                drafts.append(Scores(confidence.cpu(), right.cpu()))
            first.append(drafts[0])
            later.append(drafts[-1])

    def join(parts: list[Scores]) -> Scores:
        return Scores(*(torch.cat(tensors, -1) for tensors in zip(*parts, strict=True)))

    return {layer: (join(first), join(later)) for layer, (first, later) in scores.items()}


def reliability(first: Scores, second: Scores | None = None) -> Reliability:
    """Fit the temperature under which right and wrong predictions have the highest likelihood."""
    chances = torch.where(first.right, first.confidence, 1.0 - first.confidence).double()
    best = int(chances.clamp_min(1e-9).log().mean(-1).argmax())  # log-likelihood
    return Reliability(
        agreement=first.right.double().mean().item(),
        temperature=TEMPERATURES[best],
        ece_before=calibration_error(first.confidence[TEMPERATURES.index(1.0)], first.right),
        ece=calibration_error(first.confidence[best], first.right),
        agreement_second=None if second is None else second.right.double().mean().item(),
    )


def calibration_error(confidence: Tensor, right: Tensor) -> float:
    """ECE over 15 equal bins: mean distance of confidence and share right, by positions."""
    bins = (confidence * _BINS).long().clamp_max(_BINS - 1)
    sure, correct = (bins.bincount(x.double(), _BINS) for x in (confidence, right))
    return float((sure - correct).abs().sum() / len(confidence))


@dataclass(frozen=True)
class Setting:
    """Options of the runtime, and their expected gain."""

    exit_layers: tuple[int, ...]
    exit_threshold: tuple[float, ...]
    max_draft_tokens: int
    compression_rate: float  # tokens per verification
    speed_up: float  # over plain decoding on the same runtime


def odds(drafts: Sequence[tuple[Tensor, Tensor]], thresholds: Sequence[float]) -> ExitOdds:
    """Exit statistics over N positions; `drafts`: confidence and right [N] by rising layer."""
    waiting, shares, correct = torch.ones_like(drafts[0][1]), list[float](), 0
    for (confidence, right), tau in zip(drafts, thresholds, strict=True):
        leaves = waiting & (confidence >= tau)
        shares.append(leaves.double().mean().item())
        correct += int((leaves & right).sum())
        waiting &= ~leaves
    return ExitOdds(tuple(shares), correct / len(waiting))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Results of a calibration."""

    positions: int  # held-out answer positions
    coverage: float  # share of them where the heads can draft the model's token
    layers: dict[int, Reliability]  # by exit layer
    setting: Setting
    costs: Costs

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"drafter": self.drafter}

    @property
    def drafter(self) -> str:
        """The default drafter: heads if they should beat plain decoding, else whatever pays."""
        if self.setting.speed_up > 1.0:
            return FITTED
        pays = any(row < 1.0 for row in self.costs.rows or (USUAL_COST,))
        return Ngram.kind if pays else NoDrafts.kind

    def defaults(self, options: SpeculationOptions) -> SpeculationOptions:
        """The heads' default options: `options` with the calibrated drafter and exit settings."""
        setting = self.setting
        if self.drafter != FITTED:
            return replace(options, exit=Exit(), drafter=self.drafter)
        exit_options = Exit(
            layers=setting.exit_layers,
            threshold=setting.exit_threshold,
            anneal_strength=0.0,  # the fitted temperatures account for it
            max_tokens=setting.max_draft_tokens,
            guesses=_GUESSES if setting.exit_layers == (0,) else 1,
        )
        drafter = options.drafter if options.uses(Exit.kind) else FITTED
        return replace(options, exit=exit_options, drafter=drafter)


def calibrate(heads: ExitHeads, text: Selection, costs: Costs, most_layers: int = 2) -> Calibration:
    """Measure, fit temperatures, and choose layers, thresholds and bounds by the cost model."""
    scores = score(heads, text.batches()) if text.answers else {}
    # heads that attend draft no second token of a text
    if not (positions := max((len(first.right) for first, _ in scores.values()), default=0)):
        raise InvalidData("the text holds no answers to measure. Give another --data")
    reliabilities, drafts = dict[int, Reliability](), dict[int, list[tuple[Tensor, Tensor]]]()
    candidates = dict[int, list[float]]()
    for layer, (first, later) in scores.items():
        later = later if len(later.right) else first  # if every answer is one token
        reliabilities[layer] = reliability(first, later if heads.feeds_itself else None)
        best = TEMPERATURES.index(reliabilities[layer].temperature)
        drafts[layer] = [(scores.confidence[best], scores.right) for scores in (first, later)]
        ranked = first.confidence[best].sort(descending=True).values
        places = (torch.tensor(_SHARES) * (len(ranked) - 1)).long()
        # as the config has them, rounded down: a head that is surer than 0.9995 must not need 1
        taus = (math.floor(1000 * tau) / 1000 for tau in ranked[places].tolist())
        candidates[layer] = sorted({max(tau, 1e-3) for tau in taus})

    cost = DraftCost.with_costs(costs, heads.config.num_layers)

    def settings() -> Iterator[Setting]:
        """All sets of few layers, with all their thresholds, and drafts of up to seven tokens."""
        for count in range(1, most_layers + 1):
            for layers in itertools.combinations(sorted(candidates), count):
                for taus in itertools.product(*(candidates[layer] for layer in layers)):
                    first, later = (odds([drafts[i][n] for i in layers], taus) for n in (0, 1))
                    for width in range(1, _LONGEST + 1):
                        rate, gain = expected_gain(cost, layers, first, later, width)
                        yield Setting(layers, taus, width, rate, gain)

    return Calibration(
        positions=positions,
        coverage=coverage(heads, text.batches()),
        layers=reliabilities,
        setting=max(settings(), key=lambda setting: setting.speed_up),
        costs=costs,
    )


def write_calibration(
    heads: ExitHeads, folder: Path, calibration: Calibration, run: dict[str, Any]
) -> None:
    """Write temperatures and defaults to the heads' config, a record, and a new card."""
    options = SpeculationOptions().updated(heads.config.defaults)
    heads.config = replace(
        heads.config,
        temperatures={str(k): entry.temperature for k, entry in calibration.layers.items()},
        defaults=calibration.defaults(options).differing(),
    )
    record = json.dumps({"run": run, **calibration.record()}, indent=2) + "\n"
    files.write(folder / CALIBRATION, record)
    heads.config.write(folder)
    if (folder / "metrics.json").is_file():
        files.write(folder / "README.md", card_of(folder))


# --- the entropy threshold of the lossy rule easd

SHARE = 0.05  # p, the share of high-entropy steps (EASD section 3.6)


def measure_entropy(
    backbone: Backbone,
    conversations: Sequence[Conversation],
    batch_tokens: int,
    progress: Callable[[int, int], None],
) -> dict[str, float]:
    """Measure tau_H over the answers of a text, and the mean entropy there, in nats.

    tau_H is the mean of the highest ceil(SHARE N) of N entropies (equation 10).
    """
    last = backbone.num_layers
    source = StreamSource(backbone, FeatureSpec((last,)), conversations, batch_tokens)
    if not source.sizes:
        raise InvalidData("the text holds no answers to measure. Give another --data")
    parts = []
    for index in range(len(source.sizes)):
        parts.append(entropies(backbone, source.batch(index).hidden[last]))
        progress(index + 1, len(source.sizes))
    samples = torch.cat(parts)
    highest = samples.double().topk(math.ceil(SHARE * len(samples))).values
    return {
        "entropy_threshold": round(highest.mean().item(), 4),
        "positions": len(samples),
        "mean_entropy": round(samples.mean().item(), 4),
    }


@torch.no_grad()
def entropies(backbone: Backbone, hidden: Tensor) -> Tensor:
    """The model's entropy from last-layer states, [N, d] -> [N] in nats, at temperature 1."""
    parts = [entropy(backbone.logits(rows).softmax(-1)) for rows in hidden.split(LOGIT_ROWS)]
    return torch.cat(parts).cpu()
