"""Where the page's sliders begin: a decode's settings, as near as its record can replay them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.config import SpeculationOptions
from selfspec.decoding.stats import Round
from selfspec.eval.record import RecordInfo
from selfspec.options import Exit
from selfspec.visualise.layers import TraceInfo


@dataclass(frozen=True, kw_only=True)
class Start:
    """A setting in terms of a record, and in what it differs from the decode's."""

    used: tuple[bool, ...]
    """Of each recorded exit layer."""
    thresholds: tuple[float, ...]
    """Of each recorded exit layer."""
    alpha: int
    """Index among the recorded ones."""
    depth: int
    """D_max, an exit layer in use."""
    width: int
    """W_max"""
    notes: tuple[str, ...]
    """For people; empty if the replay is the decode."""

    def options(self, info: RecordInfo) -> SpeculationOptions:
        """The same for `eval.replay`."""
        in_use = [column for column, used in enumerate(self.used) if used]
        return SpeculationOptions(
            exit=Exit(
                layers=tuple(info.exit_layers[column] for column in in_use),
                threshold=tuple(self.thresholds[column] for column in in_use),
                anneal_strength=info.anneal_strengths[self.alpha],
                max_depth=self.depth,
                max_tokens=self.width,
            ),
            never_slower=False,  # the page replays without pauses
        )


def start(trace: TraceInfo, record: RecordInfo, rounds: Sequence[Round] = ()) -> Start:
    """The nearest setting that `record` reaches; `rounds` are the decode's."""
    settings, notes = trace.settings, []
    if settings.drafter != "exit":
        notes.append(f"decoded with drafts by {settings.drafter}; here exit heads alone draft")
    elif settings.controller != "fixed":
        notes.append(f"decoded with controller {settings.controller}; here W_max is fixed")
    elif any(entry.ended == "off" and not entry.prefill for entry in rounds):
        notes.append("decoded with pauses where drafts did not pay; here none are made")
    if any(entry.parents is not None for entry in rounds):
        notes.append("decoded with trees of drafts; here they are chains")
    missing = sorted({*settings.exit_layers} - {*record.exit_layers})
    if missing:
        notes.append(f"exit layers not recorded: {', '.join(map(str, missing))}")
    used = [layer for layer in settings.exit_layers if layer in record.exit_layers]
    used = used or list(record.exit_layers)
    known = dict(zip(trace.exit_layers, trace.thresholds, strict=True))
    known |= dict(zip(settings.exit_layers, settings.exit_thresholds, strict=True))
    floor = record.min_threshold
    low = [layer for layer in used if known.get(layer, 1.0) < floor]
    if low:
        notes.append(f"tau was below {floor:g}, where recording stopped")
    strengths = record.anneal_strengths
    alpha = min(range(len(strengths)), key=lambda i: abs(strengths[i] - settings.anneal_strength))
    if strengths[alpha] != settings.anneal_strength:
        notes.append(f"alpha was {settings.anneal_strength:g}, the nearest recorded one is taken")
    width = min(max(settings.max_draft_tokens, 1), record.max_draft_tokens)
    if width < settings.max_draft_tokens:
        notes.append(f"W_max was {settings.max_draft_tokens}, recorded were {width}")
    return Start(
        used=tuple(layer in used for layer in record.exit_layers),
        thresholds=tuple(max(known.get(layer, 1.0), floor) for layer in record.exit_layers),
        alpha=alpha,
        depth=max([layer for layer in used if layer <= settings.max_draft_depth] or used),
        width=width,
        notes=tuple(notes),
    )
