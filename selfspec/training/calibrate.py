"""From fitted heads to calibrated ones: temperatures, thresholds, and settings worth using.

Comes in: heads, features of held-out text, measured costs. Goes out: what to write into the heads'
config, and a record of why. Called by `selfspec calibrate`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfspec import files
from selfspec.config import SpeculationOptions
from selfspec.decoding.prices import Costs
from selfspec.heads.exit_heads import ExitHeads
from selfspec.options import Exit, Ngram, NoDrafts
from selfspec.options.drafters import FITTED
from selfspec.training import records
from selfspec.training.cost_model import Exits, Setting, best_setting, exits
from selfspec.training.measure import coverage
from selfspec.training.reliability import Reliability, Scores, reliability, score, threshold
from selfspec.training.sources import Selection

PRECISIONS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)

_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Candidate thresholds let this share of the positions exit."""

_GUESSES = 8
"""Of heads that read embeddings, for a place: the right token is among so many in 68 % of places of
SmolLM2-135M's own, the first in 39 %. Prices say how many are proposed."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was found."""

    positions: int
    """Held-out answer positions."""
    coverage: float
    """Share of the positions where the heads can draft the model's token."""
    reliabilities: dict[int, Reliability]
    second: dict[int, float] | None
    """By exit layer, the share of second drafts that are right; None: as first drafts."""
    thresholds: dict[int, dict[float, float | None]]
    """By exit layer: the threshold for each of PRECISIONS, None where no threshold gives it."""
    setting: Setting
    costs: Costs

    def record(self) -> dict[str, Any]:
        """For `calibration.json`."""
        layers = {
            str(layer): {
                **asdict(found),
                "agreement_second": None if self.second is None else self.second[layer],
                "thresholds": self.thresholds[layer],
            }
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
        """What should draft: exit heads only where they should be faster than plain decoding.

        Text already seen costs nothing to look up; where rows of a verification cost so much that
        not even right drafts pay, nothing drafts.
        """
        if self.setting.speed_up > 1.0:
            return FITTED
        costs = self.costs
        gains = (rows * costs.plain_step() - costs.step(rows) for rows in costs.counts[1:])
        return Ngram.kind if any(gain > 0.0 for gain in gains) else NoDrafts.kind

    def defaults(self, before: SpeculationOptions) -> SpeculationOptions:
        """Of the heads; what they were `before` stays where it has nothing to do with drafters."""
        if self.drafter != FITTED:
            return replace(before, exit=Exit(), drafter=self.drafter)
        drafter = before.drafter if before.uses(Exit.kind) else FITTED
        return replace(before, exit=self.exit(), drafter=drafter)

    def exit(self) -> Exit:
        """Where they pay. Annealing is in the fitted temperatures."""
        return Exit(
            layers=self.setting.exit_layers,
            threshold=self.setting.exit_threshold,
            anneal_strength=0.0,
            max_tokens=self.setting.max_draft_tokens,
            guesses=_GUESSES if self.setting.exit_layers == (0,) else 1,
        )


def calibrate(
    heads: ExitHeads,
    text: Selection,
    costs: Costs,
    *,
    precision: float | None = None,
    most_layers: int = 2,
) -> Calibration:
    """Measure, fit temperatures, and choose layers, thresholds and bounds by the cost model.

    `precision` leaves only the threshold that gives it to each layer, where there is one.
    """
    first, later = score(heads, text.batches())
    found = {layer: reliability(scores) for layer, scores in first.items()}
    sure = {layer: first[layer].at(found[layer].temperature) for layer in first}
    sure_later = {layer: later[layer].at(found[layer].temperature) for layer in later}
    thresholds = {
        layer: {share: threshold(sure[layer], first[layer].right, share) for share in PRECISIONS}
        for layer in first
    }
    candidates = {layer: _candidates(sure[layer], first[layer].right, precision) for layer in first}

    def evaluate(layers: tuple[int, ...], taus: tuple[float, ...]) -> tuple[Exits, Exits]:
        return _exits(sure, first, layers, taus), _exits(sure_later, later, layers, taus)

    setting = best_setting(
        costs, {layer: taus for layer, taus in candidates.items() if taus}, evaluate, most_layers
    )
    rounded = tuple(round(tau, 3) for tau in setting.exit_threshold)
    return Calibration(
        positions=text.answers,
        coverage=coverage(heads, text.batches()),
        reliabilities=found,
        second={layer: entry.right.double().mean().item() for layer, entry in later.items()}
        if heads.reads_deep
        else None,
        thresholds=thresholds,
        setting=replace(setting, exit_threshold=rounded),
        costs=costs,
    )


def write(heads: ExitHeads, folder: Path, found: Calibration, run: dict[str, Any]) -> None:
    """Put temperatures and defaults into the heads' config, and the record beside it.

    The card follows; the weights stay as they are. Raises CannotWrite.
    """
    options = SpeculationOptions().updated(heads.config.defaults)
    heads.config = replace(
        heads.config,
        temperatures={str(k): entry.temperature for k, entry in found.reliabilities.items()},
        defaults=found.defaults(options).differing(),
    )
    files.write(
        folder / records.CALIBRATION, json.dumps({"run": run, **found.record()}, indent=2) + "\n"
    )
    records.redescribe(folder, heads.config)


def _candidates(confidence: Tensor, right: Tensor, precision: float | None) -> list[float]:
    """Thresholds to try."""
    if precision is not None:
        found = threshold(confidence, right, precision)
        return [] if found is None else [found]
    ranked = confidence.sort(descending=True).values
    places = (torch.tensor(_SHARES) * (len(ranked) - 1)).long()
    return sorted({max(float(value), 1e-3) for value in ranked[places]})


def _exits(
    sure: dict[int, Tensor],
    scores: dict[int, Scores],
    layers: tuple[int, ...],
    taus: tuple[float, ...],
) -> Exits:
    chosen = [sure[layer] for layer in layers]
    return exits(chosen, [scores[layer].right for layer in layers], taus)
