"""The loop: draft, verify, commit, rewind.

    decode_rounds  yields Work, and one Round per verification
      draft        a drafter proposes k tokens; their shallow rows may already be queued
      verify       all k + 1 rows run to the last layer, in one batched pass per segment
      commit       the acceptance rule judges drafts one by one, each on its true prefix
      rewind       layers keep the committed positions only; queues are emptied

Plain decoding is the same loop with a drafter that proposes nothing. The engine drives the loops of
a whole batch and does their Work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from selfspec.decoding.acceptance import AcceptanceRule, Draft, Target, Verdict
from selfspec.decoding.state import DecodeState, Drafter, Embed, Enter, Steps, Work
from selfspec.decoding.stats import Round, StopReason, Stopwatch
from selfspec.errors import InvalidDraft

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StopRule:
    """Decides when a sequence is complete; asked after every token, as in plain decoding."""

    max_length: int  # maximum number of ids, prompt and padding included
    end_tokens: Collection[int] = ()
    criteria: Callable[[Tensor], bool] | None = None  # further criteria, given all ids, [1, n]
    context: int | None = None  # length in ids, padding included, past which a warning is logged

    def reason(self, state: DecodeState, token: int) -> StopReason | None:
        """Why the sequence ends with its newest `token`, or None."""
        if self.context is not None and state.length == self.context + 1:
            warn_once(BEYOND_CONTEXT, self.context - state.pad)
        if token in self.end_tokens:
            return "eos"
        if self.criteria is not None and self.criteria(state.ids):
            return "stop"
        return "length" if state.length >= self.max_length else None


BEYOND_CONTEXT = "the text goes beyond the model's context length, %d positions: quality may drop"
CONTEXT_ENDS = "the model has %d positions here: answers end there, whatever length is asked for"


warn_once = cache(logger.warning)


def decode_rounds(
    state: DecodeState, drafter: Drafter, rule: AcceptanceRule, stop: StopRule, watch: Stopwatch
) -> Generator[Work | Round, Any, None]:
    """Decode until `stop` ends the sequence; yields Work, and a Round after each verification.

    The prompt has its own round. After any yield, and after an exception, `state` may be dropped or
    decoded further.
    """
    entry: Round | None = None
    while entry is None or entry.stop_reason is None:
        watch.start()
        prefill = entry is None
        with state.round():
            if prefill:
                yield from enter(state)
                draft = Draft()
            else:
                draft = yield from propose(state, drafter, stop, watch)
            target = yield from verify(state, draft)
            watch.lap("prefill" if prefill else "verify")
            entry = commit(state, draft, target, rule, stop, prefill=prefill)
            if not prefill:
                draft.target = target
                drafter.learn(draft, entry.kept)
        watch.lap("bookkeeping")
        yield entry


def enter(state: DecodeState) -> Steps[None]:
    """Run the prompt in the pieces that the engine admits; the last piece is left to `verify`."""
    while True:
        waiting = state.waiting_ids
        count: int = yield Enter(len(waiting))
        if count >= len(waiting):
            return
        state.hidden.push((yield Embed(state.backbone, waiting[:count])))
        yield from state.hidden.advance_all(read=0)
        state.keep_states(range(count))
        state.hidden.clear(state.hidden.passes)


def propose(state: DecodeState, drafter: Drafter, stop: StopRule, watch: Stopwatch) -> Steps[Draft]:
    """Ask for a draft that leaves room for the token that verification adds."""
    limit = stop.max_length - state.length - 1
    draft = yield from drafter.draft(state, limit, watch)
    if draft.depth > limit:
        raise InvalidDraft(f"{type(drafter).__name__} drafted {draft.depth} of {limit}")
    watch.lap("draft")
    return draft


def verify(state: DecodeState, draft: Draft) -> Steps[Target]:
    """Run all rows to the last layer: target logits [k + 1, V] of the newest token and the drafts.

    Rows that the drafter did not queue enter here: the last draft, n-gram drafts, a prompt.
    """
    ids = state.waiting_ids
    pending = ids + draft.tokens
    missing = pending[state.hidden.row_count :]
    if missing:
        parents = [*range(-1, len(ids) - 1), *(len(ids) + parent for parent in draft.parents)]
        hidden = yield Embed(state.backbone, missing)
        state.hidden.push(hidden, parents[state.hidden.row_count :])
    if (pushed := state.hidden.row_count) != len(pending):
        raise InvalidDraft(f"{pushed} rows were queued for {len(pending)} tokens")
    count = len(draft.proposed) + 1
    hidden = yield from state.hidden.advance_all(read=count)
    state.judge(count)
    target = yield from state.hidden.unembed(hidden[-count:])
    state.normed = target.normed
    return target


def commit(
    state: DecodeState,
    draft: Draft,
    target: Target,
    rule: AcceptanceRule,
    stop: StopRule,
    *,
    prefill: bool = False,
) -> Round:
    """Append the rule's tokens one by one, until it keeps no draft or the sequence ends."""
    tokens: list[int] = []
    kept: list[int] = []
    reason = None
    for row, verdict in walk(state, draft, target, rule):
        state.append(verdict.token, row)
        tokens.append(verdict.token)
        if verdict.kept is not None:
            kept.append(draft.children(row)[verdict.kept])
        reason = stop.reason(state, verdict.token)
        if reason is not None:
            break
    return Round(
        tokens=tokens,
        draft_tokens=draft.tokens,
        exit_layers=[token.layer for token in draft.proposed],
        sources=[token.source for token in draft.proposed],
        parents=None if draft.is_chain else draft.parents,
        kept=kept,
        ended=draft.ended,
        heads=draft.heads,
        passes=state.hidden.passes,
        prefill=prefill,
        stop_reason=reason,
    )


def walk(
    state: DecodeState, draft: Draft, target: Target, rule: AcceptanceRule
) -> Iterator[tuple[int, Verdict]]:
    """Yield (row, verdict) along the draft for as long as the rule keeps a token.

    The caller commits each token before it asks for the next, so processors see the true prefix.
    """
    row = 0
    while True:
        children = draft.children(row)
        verdict = rule.verdict(state, target, row, [draft.proposed[index] for index in children])
        yield row, verdict
        if verdict.kept is None:
            return
        row = children[verdict.kept] + 1
