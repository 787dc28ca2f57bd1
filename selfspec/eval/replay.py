"""The rounds that a setting would have made, from a Record alone: no model, no heads.

`rounds` follows the exit drafter and the hidden cache step by step, and gives what a real run
gives, field by field. `totals` counts the same for thousands of settings, in eval/totals.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from selfspec.config import SpeculationOptions
from selfspec.errors import InvalidOption
from selfspec.eval.record import Record
from selfspec.heads import check_exit_layers
from selfspec.hidden_cache import Pass
from selfspec.judge import spread
from selfspec.stats import Ended, Round, StopReason


@dataclass(frozen=True, kw_only=True)
class Setting:
    """SpeculationOptions in terms of a record: which columns are asked, and what is enough."""

    layers: tuple[int, ...]
    """Exit layers in use, up to D_max."""
    columns: tuple[int, ...]
    thresholds: tuple[float, ...]
    alpha: int
    """Index on the last axis of the confidence."""
    width: int
    """W_max"""

    @classmethod
    def of(cls, record: Record, options: SpeculationOptions) -> Setting:
        """Raises InvalidOption for a setting that the record does not reach."""
        info = record.info
        layers = info.exit_layers if options.exit_layers is None else options.exit_layers
        check_exit_layers(layers, info.exit_layers)
        if len(options.thresholds) not in (1, len(layers)):
            raise InvalidOption(
                f"{len(options.thresholds)} exit thresholds for {len(layers)} exit layers. "
                "Give one for all, or one each"
            )
        if options.anneal_strength not in info.anneal_strengths:
            raise InvalidOption(
                f"anneal_strength {options.anneal_strength} was not recorded, only "
                f"{list(info.anneal_strengths)}. Record it: selfspec trace --anneal-strengths"
            )
        if options.max_draft_tokens > info.max_draft_tokens:
            raise InvalidOption(
                f"max_draft_tokens {options.max_draft_tokens}, recorded were "
                f"{info.max_draft_tokens}. Record more: selfspec trace --max-draft-tokens"
            )
        by_layer = spread(options.thresholds, layers)
        depth = layers[-1] if options.max_draft_depth is None else options.max_draft_depth
        check_exit_layers([depth], layers)
        used = tuple(layer for layer in layers if layer <= depth)
        thresholds = tuple(by_layer[layer] for layer in used)
        if min(thresholds) < info.min_threshold:
            raise InvalidOption(
                f"exit_threshold {min(thresholds)} lies below {info.min_threshold}, where "
                "recording stopped. Record more: selfspec trace --min-threshold"
            )
        return cls(
            layers=used,
            columns=tuple(info.exit_layers.index(layer) for layer in used),
            thresholds=thresholds,
            alpha=info.anneal_strengths.index(options.anneal_strength),
            width=options.max_draft_tokens,
        )


class _Queues:
    """How many rows wait at each boundary: HiddenCache without hidden states."""

    def __init__(self, layers: tuple[int, ...], num_layers: int) -> None:
        self.depths = (0, *layers, num_layers)
        self.waiting = [0] * len(self.depths)
        self.passes: list[Pass] = []

    def advance(self, boundary: int, until: int) -> None:
        """Take all rows at `boundary` to boundary `until` in one pass."""
        rows, first, last = self.waiting[boundary], self.depths[boundary], self.depths[until]
        if first != last:
            self.passes.append(Pass(rows, first, last))
        self.waiting[boundary] = 0
        self.waiting[until] += rows

    def advance_all(self) -> None:
        """Take all rows to boundary L; a pass goes on until it meets other rows."""
        end = len(self.depths) - 1
        boundary = self._next_waiting(0)
        while boundary < end:
            until = self._next_waiting(boundary + 1)
            self.advance(boundary, until)
            boundary = until

    def _next_waiting(self, boundary: int) -> int:
        end = len(self.depths) - 1
        return next((b for b in range(boundary, end) if self.waiting[b]), end)


class _Exit(NamedTuple):
    """One draft: where it left, what it is, and the node behind it."""

    layer: int
    token: int
    child: int


def rounds(record: Record, prompt: int, options: SpeculationOptions) -> list[Round]:
    """All rounds of one prompt, the prompt's own pass first, as `decode.rounds` yields them.

    Raises InvalidOption for a setting that the record does not reach.
    """
    setting = Setting.of(record, options)
    info, places = record.prompts[prompt], record.places(prompt)
    answer = [int(token) for token in record.answers[places.start : places.stop]]
    entries = [
        Round(
            tokens=answer[:1],
            draft_tokens=[],
            exit_layers=[],
            accepted=0,
            ended="off",
            prefill=True,
            passes=[Pass(info.prompt_tokens, 0, record.info.num_layers)],
            stop_reason=_stop(record, answer, 1),
        )
    ]
    known = 1
    while known < len(answer):
        limit = info.max_new_tokens - known - 1
        root = int(record.roots[places.start + known - 1])
        entry = _round(record, setting, root, limit, answer[known:])
        known += len(entry.tokens)
        entries.append(replace(entry, stop_reason=_stop(record, answer, known)))
    return entries


def _stop(record: Record, answer: list[int], known: int) -> StopReason | None:
    """Why an answer ends with its first `known` tokens, or None."""
    if known < len(answer):
        return None
    return "eos" if answer[-1] in record.info.end_tokens else "length"


def _round(record: Record, setting: Setting, root: int, limit: int, following: list[int]) -> Round:
    """One round; `following` are the true tokens behind the newest one."""
    queues = _Queues(setting.layers, record.info.num_layers)
    tokens, layers, ended = _draft(record, setting, queues, root, limit)
    if ended != "depth":  # else the difficult token's row has come to D_max already
        queues.waiting[0] += 1
    queues.advance_all()
    accepted = 0
    while accepted < len(tokens) and tokens[accepted] == following[accepted]:
        accepted += 1
        if accepted == len(following):
            break
    return Round(
        tokens=following[: accepted + 1],
        draft_tokens=tokens,
        exit_layers=layers,
        accepted=accepted,
        ended=ended,
        passes=queues.passes,
    )


def _draft(
    record: Record, setting: Setting, queues: _Queues, node: int, limit: int
) -> tuple[list[int], list[int], Ended]:
    """Draft tokens, their exit layers, and why drafting ended; `drafters.ExitDrafter.draft`."""
    tokens: list[int] = []
    layers: list[int] = []
    ended: Ended = "budget"
    if setting.width <= limit:
        limit, ended = setting.width, "width"
    while len(tokens) < limit:
        queues.waiting[0] += 1
        found = _first_exit(record, setting, queues, node)
        if found is None:
            return tokens, layers, "depth"
        tokens.append(found.token)
        layers.append(found.layer)
        if found.token in record.info.end_tokens:
            return tokens, layers, "eos"
        node = found.child
    return tokens, layers, ended


def _first_exit(record: Record, setting: Setting, queues: _Queues, node: int) -> _Exit | None:
    """The first confident layer at a node; None: difficult token."""
    asked = zip(setting.layers, setting.columns, setting.thresholds, strict=True)
    for boundary, (layer, column, tau) in enumerate(asked):
        queues.advance(boundary, boundary + 1)
        if float(record.confidence[node, column, setting.alpha]) >= tau:
            token, child = record.tokens[node, column], record.children[node, column]
            return _Exit(layer, int(token), int(child))
    return None
