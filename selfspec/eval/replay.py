"""The rounds that a setting would have made, from a Record alone: no model, no heads.

`rounds` gives what a real run gives, field by field. Controllers, drafts from prompt lookup,
the never-slower rule and the schedule are the runtime's own; only exit heads are followed on paper.
Called by `tune` and by the trace's page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from selfspec.config import SpeculationOptions
from selfspec.decoding.acceptance import Draft
from selfspec.decoding.costs import DraftCost
from selfspec.decoding.drafters.base import (
    ROOT,
    DraftController,
    DraftWriter,
    Guesses,
    Known,
    PacedDrafter,
    make_controller,
)
from selfspec.decoding.drafters.ngram import SeenTextFirst
from selfspec.decoding.drafters.trees import WhilePaying
from selfspec.decoding.engine import make_ngram, make_tree
from selfspec.decoding.sampling import DraftToken
from selfspec.decoding.state import DraftsFrom, NoDrafter, Pass, Schedule, Steps, alone, ready
from selfspec.decoding.stats import EXIT, Round, StopReason, Stopwatch
from selfspec.errors import InvalidOption
from selfspec.eval.record import GUESSES, Record
from selfspec.heads.exit_heads import layers_in_use
from selfspec.heads.heads import spread, top_probability


class Setting(NamedTuple):
    """SpeculationOptions in terms of a record: which columns are asked, and what is enough."""

    layers: tuple[int, ...]
    """Exit layers in use, up to D_max."""
    columns: tuple[int, ...]
    thresholds: tuple[float, ...]
    alpha: int
    """Index on the last axis of the confidence."""
    guesses: int
    """For a place; more than one make trees."""

    @classmethod
    def of(cls, record: Record, options: SpeculationOptions) -> Setting:
        """Raises InvalidOption for a setting that the record does not reach."""
        info, own = record.info, options.exit
        used = layers_in_use(info.exit_layers, options)
        by_layer = spread(own.thresholds, own.layers or info.exit_layers)
        thresholds = tuple(by_layer[layer] for layer in used)
        controller = make_controller(options, own.max_tokens)
        if (
            own.anneal_strength not in info.anneal_strengths
            or min(thresholds) < info.min_threshold
            or controller.longest > info.max_draft_tokens
            or controller.signal not in (None, top_probability)
            or (options.grows_trees and (used != (0,) or own.guesses > GUESSES))
        ):
            raise InvalidOption(f"not all that {own} with {options.controller} asks was recorded")
        # a record without guesses is of a model that drafts chains, whatever is asked for
        return cls(
            layers=used,
            columns=tuple(info.exit_layers.index(layer) for layer in used),
            thresholds=thresholds,
            alpha=info.anneal_strengths.index(own.anneal_strength),
            guesses=own.guesses if options.grows_trees and record.guesses.size else 1,
        )


class _State:
    """What drafters see of a sequence: DecodeState without a model."""

    def __init__(self, record: Record, prompt: int, layers: tuple[int, ...]) -> None:
        places = record.places(prompt)
        self.answer: list[int] = record.answers[places.start : places.stop].tolist()
        self.known = 1
        """Committed tokens of the answer."""
        self.schedule = Schedule(layers, record.info.num_layers)
        self._record, self._places, self._context = record, places, record.context(prompt)

    def committed(self, start: int) -> list[int]:
        return (self._context + self.answer[: self.known])[start:]

    @property
    def root(self) -> int:
        return int(self._record.roots[self._places.start + self.known - 1])

    def stop_reason(self) -> StopReason | None:
        if self.known < len(self.answer):
            return None
        return "eos" if self.answer[-1] in self._record.info.end_tokens else "length"


class _Guesser:
    """`drafters.HeadGuesser` on a record."""

    source = EXIT
    once = False

    def __init__(self, record: Record, setting: Setting) -> None:
        self._record, self._setting = record, setting
        self._nodes: dict[int, int] = {}
        """Nodes of the record, by index of the draft token."""

    def begin(self, state: _State) -> None:
        self._nodes = {ROOT: state.root}

    def ask(self, draft: Draft, asked: Sequence[int], watch: Stopwatch) -> Steps[list[Guesses]]:  # noqa: ARG002  # the protocol's
        return ready([self._guesses(self._node(draft, index)) for index in asked])

    def _node(self, draft: Draft, index: int) -> int:
        if index not in self._nodes:
            parent = self._nodes[draft.proposed[index].parent]
            rank = self._record.guesses[parent].tolist().index(draft.proposed[index].token)
            self._nodes[index] = int(self._record.behind[parent, rank])
        return self._nodes[index]

    def _guesses(self, node: int) -> Known:
        record, setting = self._record, self._setting
        chances = record.chances[node, setting.alpha, : setting.guesses].tolist()
        if not chances or chances[0] < setting.thresholds[0]:
            return Known([], [])
        return Known(record.guesses[node, : setting.guesses].tolist(), chances)


class _ExitDrafter(PacedDrafter):
    """`drafters.ExitDrafter` on a record."""

    def __init__(self, record: Record, setting: Setting, controller: DraftController) -> None:
        super().__init__(controller, record.info.end_tokens)
        self._record, self._setting = record, setting

    def draft(self, state: _State, limit: int, watch: Stopwatch) -> Steps[Draft]:  # noqa: ARG002  # the protocol's
        """Up to min(limit, W_max) tokens; the rows that gave them wait where they left."""
        writer = DraftWriter(self, limit, source=EXIT)
        node = state.root
        while writer.room:
            state.schedule.push(1)
            found = self._first_exit(state.schedule, node, writer.draft)
            if found is None:
                writer.stop("depth")
                break
            layer, token, confidence, node = found
            writer.add(DraftToken(token, layer=layer), confidence)
        return ready(writer.draft)

    def _first_exit(
        self, schedule: Schedule, node: int, draft: Draft
    ) -> tuple[int, int, float, int] | None:
        """The first confident layer at a node, its token, how sure it is, and the node behind it.

        None: difficult token. `draft` counts heads.
        """
        record, setting = self._record, self._setting
        asked = zip(setting.layers, setting.columns, setting.thresholds, strict=True)
        for boundary, (layer, column, tau) in enumerate(asked):
            schedule.advance(boundary)
            draft.heads += 1
            confidence = float(record.confidence[node, column, setting.alpha])
            if confidence >= tau:
                token, child = record.tokens[node, column], record.children[node, column]
                return layer, int(token), confidence, int(child)
        return None


def rounds(record: Record, prompt: int, options: SpeculationOptions) -> list[Round]:
    """All rounds of one prompt, the prompt's own pass first, as `decode.rounds` yields them.

    Raises InvalidOption for a setting that the record does not reach.
    """
    info = record.prompts[prompt]
    drafter, layers = _drafter(record, options)
    state, watch = _State(record, prompt, layers), Stopwatch()
    passes, reason = [Pass(info.prompt_tokens, 0, record.info.num_layers)], state.stop_reason()
    entries = [Draft().verified(state.answer[:1], [], passes, prefill=True, stop_reason=reason)]
    while state.known < len(state.answer):
        state.schedule.clear()
        draft = alone(drafter.draft(state, info.max_new_tokens - state.known - 1, watch))
        entries.append(_verified(state, draft))
        drafter.learn(draft, entries[-1].kept)
    return entries


def _drafter(
    record: Record, options: SpeculationOptions
) -> tuple[DraftsFrom[_State], tuple[int, ...]]:
    """What proposes tokens, and the exit layers at which rows may wait; as `make_drafter`."""
    if not options.speculate or options.drafter == "none":
        return NoDrafter(), ()
    if options.loss is not None or any(map(options.uses, ("draft-model", "rest", "skip"))):
        raise InvalidOption("lossy rules, other layers and datastores say what was not recorded")
    info = record.info
    cost = DraftCost(rows=info.row_costs, head=info.head_cost, num_layers=info.num_layers)
    cost = cost.with_costs(options.costs)
    ngram = make_ngram(options, cost, info.end_tokens)
    if not options.uses("exit"):
        return ngram, ()
    setting = Setting.of(record, options)
    if setting.guesses > 1:
        seen = ngram if options.uses("ngram") else None
        guesser = _Guesser(record, setting)
        return make_tree(guesser, options, cost, info.end_tokens, seen), setting.layers
    controller = make_controller(options, options.exit.max_tokens)
    exits: DraftsFrom[_State] = _ExitDrafter(record, setting, controller)
    if options.never_slower:
        exits = WhilePaying(exits, cost)
    return SeenTextFirst(ngram, exits) if options.uses("ngram") else exits, setting.layers


def _verified(state: _State, draft: Draft) -> Round:
    drafted, following = draft.tokens, state.answer[state.known :]
    state.schedule.push(len(drafted) + 1 - state.schedule.pushed)
    for boundary, until in state.schedule.finish():
        state.schedule.advance(boundary, until)
    kept: list[int] = []
    while len(kept) < len(following):
        behind = draft.following(kept[-1] + 1 if kept else 0)
        right = [index for index in behind if drafted[index] == following[len(kept)]]
        if not right:
            break
        kept.append(right[0])
    tokens = following[: len(kept) + 1]
    state.known += len(tokens)
    return draft.verified(tokens, kept, state.schedule.passes, stop_reason=state.stop_reason())
