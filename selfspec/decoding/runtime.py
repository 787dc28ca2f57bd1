"""One model, and all that writing a text with it needs: what was asked in, a text ready to run out.

Holds what all texts of one model share. Called by the engine, which runs them.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from selfspec.config import SpeculationOptions
from selfspec.decoding.acceptance import (
    AcceptanceRule,
    GreedyMatch,
    SeededMatch,
    SpeculativeSampling,
)
from selfspec.decoding.decode import StopRule, written
from selfspec.decoding.drafters import DraftCache, Drafter, Sources, make_drafter
from selfspec.decoding.likely import Logprob, Noting
from selfspec.decoding.lossy import lossy_rule
from selfspec.decoding.prices import DraftCost, Load, Unmeasured, token_cost
from selfspec.decoding.probe import PassShape, PinnedProbe
from selfspec.decoding.scores import Sampler
from selfspec.decoding.sequence import DecodeState
from selfspec.decoding.stats import GenerationStats, Round, Stopwatch
from selfspec.decoding.work import Work
from selfspec.errors import InvalidOption
from selfspec.heads.attending import AttendingHeads
from selfspec.heads.exit_heads import ExitHeads
from selfspec.model.backbone import Backbone
from selfspec.model.kv_store import Lease, fixed_slots
from selfspec.options import CmAsd, Easd, Lenient

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One text to write."""

    ids: Tensor
    """[1, n], with padding in front."""
    pad: int = 0
    """Padding ids."""
    sampler: Sampler
    stop: StopRule
    logprobs: int | None = None
    """How many likely tokens to note beside each; None: nothing is noted."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text before its first round."""

    state: DecodeState
    steps: Generator[Work | Round, Any, None]
    """As `decode.written` yields them."""
    stats: GenerationStats
    watch: Stopwatch
    logprobs: list[Logprob]
    """Of its tokens, where that was asked for; grows with the text."""


class Runtime:
    """One model with what its drafts can come from."""

    def __init__(
        self, backbone: Backbone, heads: ExitHeads | None, draft_model: Backbone | None
    ) -> None:
        """What is None cannot draft."""
        self.backbone = backbone
        self.heads = heads
        self.draft_model = draft_model
        self.probe = PinnedProbe(backbone)
        self._told = set[str]()

    def text(
        self,
        asked: Asked,
        options: SpeculationOptions,
        load: Load | None = None,
        *,
        lease: Lease | None = None,
        draft_cache: DraftCache | None = None,
    ) -> Text:
        """A text to write; `lease` and `draft_cache` may hold what an earlier turn left.

        `load`: how many texts share a pass, as whoever runs it keeps that. Raises ModelChanged if
        the model, or the draft model, is not what was wrapped.
        """
        for backbone in (self.backbone, self.draft_model):
            if backbone is not None:
                backbone.require_unchanged()
        drafting = options.speculate and options.drafter != "none"
        refused = self._refusal(options) if drafting else None
        options = replace(options, speculate=drafting and refused is None)
        asked = replace(asked, sampler=tied(asked.sampler, options))
        rule, noted = self.rule(asked.sampler, options), list[Logprob]()
        if asked.logprobs is not None:
            rule = Noting(rule, asked.logprobs, noted)
        state = self.state(asked, options, lease)
        stats = GenerationStats(
            num_layers=self.backbone.num_layers,
            prompt_tokens=state.length - state.pad,
            reused_tokens=state.lease.length(0),
            lossless=rule.lossless or not options.speculate,
            pinned=self._is_pinned(options),
            drafts_refused=refused,
        )
        if not stats.lossless:
            self._tell("lossy acceptance: the output differs from the model's own")
        watch = Stopwatch()
        drafter = self.drafter(asked, options, draft_cache, load)
        steps = written(state, drafter, rule, asked.stop, watch)
        return Text(state=state, steps=steps, stats=stats, watch=watch, logprobs=noted)

    def rule(self, sampler: Sampler, options: SpeculationOptions) -> AcceptanceRule:
        """Which drafts stay; a laboratory may listen in here."""
        return acceptance_rule(sampler, options)

    def state(
        self, asked: Asked, options: SpeculationOptions, lease: Lease | None = None
    ) -> DecodeState:
        """A text before its first round; `lease` may hold a prefix of it."""
        shape = PassShape()
        if options.pinned:
            slots = fixed_slots(asked.stop.max_length - asked.pad + options.pinned_rows)
            fixed = PassShape(options.pinned_rows, max(slots, (lease and lease.slots) or 0))
            shape = self.probe.shape(fixed, options.pinned_rows)
            lease = lease or Lease(self.backbone.num_layers)
            lease.slots = shape.slots
        heads = self.heads if options.speculate and options.uses("exit") else None
        reader = heads if isinstance(heads, AttendingHeads) else None
        return DecodeState(
            self.backbone,
            asked.ids,
            pad=asked.pad,
            exit_layers=() if heads is None else heads.layers_in_use(options),
            reader=reader,
            lease=lease,
            pinned_rows=shape.rows,
        )

    def drafter(
        self,
        asked: Asked,
        options: SpeculationOptions,
        draft_cache: DraftCache | None = None,
        load: Load | None = None,
    ) -> Drafter:
        """What proposes tokens under `options`; nothing behind an end token."""
        cache = draft_cache or self.draft_cache()
        sources = Sources(self.backbone, self.heads, cache, load or Load())
        return make_drafter(options, sources, asked.sampler, asked.stop.end_tokens)

    def draft_cache(self) -> DraftCache | None:
        """An empty one for the draft model, if there is one."""
        if self.draft_model is None:
            return None
        return DraftCache(self.draft_model, self.backbone.vocab_size)

    def draft_cost(self, options: SpeculationOptions) -> DraftCost:
        """What drafting costs a text that runs alone, by the prices known."""
        known = Unmeasured.of(self.backbone).unless(options.prices)
        second = self.draft_model if options.uses("draft-model") else None
        return DraftCost(
            rows=known.rows,
            token=0.0 if second is None else token_cost(second, self.backbone),
            head=known.head,
            num_layers=self.backbone.num_layers,
        )

    def _refusal(self, options: SpeculationOptions) -> str | None:
        """Why nothing may be drafted, in words, or None."""
        if self.backbone.dtype == torch.float16 and not self._is_pinned(options):
            self._tell(
                "no drafts in float16: passes of several rows round otherwise, so drafts would "
                "change the text. Load the model in bfloat16 or float32, or ask for pinned"
            )
            return "passes of several rows round otherwise in float16"
        return self.backbone.mixing

    def _tell(self, words: str) -> None:
        """Once."""
        if words not in self._told:
            self._told.add(words)
            logger.warning(words)

    def _is_pinned(self, options: SpeculationOptions) -> bool:
        """Whether drafts cannot move bits: because that was asked for, or by themselves."""
        if options.pinned is not None:
            return options.pinned
        # without drafts there is nothing to ask, and a probe would delay the first token
        return options.speculate and self.probe.holds_unpadded(options.widest_pass)


def tied(sampler: Sampler, options: SpeculationOptions) -> Sampler:
    """With draws at their places, unless the rule of these options needs them one by one."""
    return replace(sampler, seed=None) if options.speculate and options.loss else sampler


def acceptance_rule(sampler: Sampler, options: SpeculationOptions) -> AcceptanceRule:
    """The rule for this choice; plain decoding is lossless whatever was asked for.

    Raises InvalidOption for lenience without sampling, and for EASD without a threshold.
    """
    wanted = options.acceptance
    if options.speculate and isinstance(wanted, CmAsd | Easd):
        return lossy_rule(sampler, wanted)
    lenience = wanted.lenience if isinstance(wanted, Lenient) else 1.0
    if sampler.do_sample and sampler.seed is not None:
        return SeededMatch(sampler)
    if sampler.do_sample:
        return SpeculativeSampling(sampler, lenience)
    if lenience < 1.0:
        raise InvalidOption(
            "lenience below 1 needs do_sample: greedy drafts match or do not. Leave one out"
        )
    return GreedyMatch(sampler)
