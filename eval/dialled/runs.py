"""Acceptance, depth and draft length as dials: measured speed-up beside SpecBound's formula.

Comes in: a model and questions. Goes out: timed decodings of early models (`early`), and points
that set them beside the formula at the acceptance that was measured. Called by eval/dialled.py.

The formula, for k drafts per round, each kept with chance a if those before it were, and exits
after D of L layers: a round commits (1 - a^(k+1)) / (1 - a) tokens and costs k D / L + (L - D) / L
plain steps (SpecBound, as restored in our notes). It leaves out the heads, and one row: the last
draft too runs through the first D layers, or there would be no token behind it. The complete
formula has both.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from eval.dialled.early import DialledHead, dialled_heads, early_model, small_vocabulary
from selfspec.api.request import Request
from selfspec.api.speculator import Speculator
from selfspec.config import SpeculationOptions
from selfspec.eval.results import Question
from selfspec.eval.scripted import decode, greedy_request
from selfspec.model.backbone import Backbone
from selfspec.options import Exit

_SURE = 1e-6
"""A threshold that every token reaches: all drafts leave at the one exit."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is turned, and how it is measured."""

    layers: int = 30
    """D: layers of the model that are kept; the exit is behind them."""

    extra_layers: tuple[int, ...] = (90, 30)
    """L - D, one or several: layers behind the exit that add nothing."""

    max_draft_tokens: tuple[int, ...] = (2, 4, 6, 8)
    """k: drafts per round."""

    wrong_shares: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3)
    """Shares of positions where the head is made wrong."""

    draft_vocab_size: int = 4096
    """Tokens that the head can draft. 4,096 cost two thirds of a layer of the default model, as
    32,000 do in a model of 7B parameters."""

    max_new_tokens: int = 64
    repeats: int = 3
    """Timed runs of each setting and prompt; the median counts."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Dial:
    """One setting."""

    depth_ratio: float
    """D / L."""
    max_draft_tokens: int
    wrong_share: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """One timed decoding. Seconds are those after the prompt's pass."""

    prompt: str
    depth_ratio: float
    dial: Dial | None
    """None: plain decoding of the same deep model."""
    new_tokens: int
    equal: bool
    """To the text of plain decoding."""
    decode_s: float
    heads_s: float
    """Of these: heads, judge, and reading the draft from the device."""
    drafts: tuple[int, ...]
    """Of each round; the last of a text may have room for fewer."""
    accepted: int
    tried: int
    """Drafts whose predecessors in the round were all kept."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """What one setting gave over all prompts, and what the formula says."""

    dial: Dial
    prompts: int
    equal_texts: int
    acceptance: float
    """a: accepted / tried."""
    compression_rate: float
    head_cost: float
    """One head, in plain steps."""
    speed_up: float
    """Over plain decoding on this runtime: ratio of total seconds."""
    speed_up_without_heads: float
    """With the heads' own seconds taken off."""
    formula: float
    """Over the rounds as they were, with the drafts that each had room for."""
    complete_formula: float


@dataclass(frozen=True, kw_only=True)
class _Rig:
    """A deep model that is ready to be timed."""

    speculator: Speculator
    head: DialledHead
    depth_ratio: float
    requests: dict[str, Request]
    texts: dict[str, list[int]]

    def timed(self, prompt: str, dial: Dial | None) -> Run:
        """One decoding."""
        options = replace(self.speculator.options, speculate=dial is not None)
        if dial is not None:
            self.head.wrong_share = dial.wrong_share
            options = options.updated({"exit": {"max_tokens": dial.max_draft_tokens}})
        found = decode(self.speculator, self.requests[prompt], options)
        rounds = [entry for entry in found.entries if not entry.prefill]
        return Run(
            prompt=prompt,
            depth_ratio=self.depth_ratio,
            dial=dial,
            new_tokens=len(found.tokens),
            equal=found.tokens == self.texts[prompt],
            decode_s=found.decode_s,
            heads_s=found.seconds["heads"],
            drafts=tuple(len(entry.draft_tokens) for entry in rounds),
            accepted=sum(entry.accepted for entry in rounds),
            tried=sum(min(entry.accepted + 1, len(entry.draft_tokens)) for entry in rounds),
        )


def count_runs(sweep: Sweep, prompts: int) -> int:
    """How many `measure` yields."""
    dials = 1 + len(sweep.max_draft_tokens) * len(sweep.wrong_shares)
    return len(sweep.extra_layers) * dials * prompts * sweep.repeats


def measure(base: Speculator, questions: Sequence[Question], sweep: Sweep) -> Iterator[Run]:
    """Per prompt all settings, and plain decoding, in random order: machine drift hits all alike.

    Only the model and the tokenizer of `base` are used. Raises UnsupportedModel, InvalidOption.
    """
    shuffle = random.Random(sweep.seed)  # an order of work, no secret
    for extra in sweep.extra_layers:
        rig = _rig(base, questions, sweep, extra)
        dials: list[Dial | None] = [
            Dial(depth_ratio=rig.depth_ratio, max_draft_tokens=width, wrong_share=share)
            for width, share in itertools.product(sweep.max_draft_tokens, sweep.wrong_shares)
        ]
        rig.timed(next(iter(rig.requests)), dials[-1])  # kernels and caches warm
        for _ in range(sweep.repeats):
            for prompt in rig.requests:
                for dial in shuffle.sample([None, *dials], len(dials) + 1):
                    yield rig.timed(prompt, dial)


def points(runs: Sequence[Run]) -> list[Point]:
    """One per setting, in the order of their first runs."""
    by_dial: dict[Dial, list[Run]] = defaultdict(list)
    plain: dict[float, list[Run]] = defaultdict(list)
    for run in runs:
        (plain[run.depth_ratio] if run.dial is None else by_dial[run.dial]).append(run)
    return [_point(dial, found, plain[dial.depth_ratio]) for dial, found in by_dial.items()]


def expected_tokens(acceptance: float, drafts: int) -> float:
    """(1 - a^(k+1)) / (1 - a): what a round commits."""
    return sum(acceptance**kept for kept in range(drafts + 1))


def round_cost(drafts: int, depth_ratio: float, *, rows: int, head: float = 0.0) -> float:
    """Plain steps per round, `rows` of them through the shallow layers alone."""
    return rows * depth_ratio + (1.0 - depth_ratio) + drafts * head


def _rig(base: Speculator, questions: Sequence[Question], sweep: Sweep, extra: int) -> _Rig:
    """Plain texts come first: the draft vocabulary must hold them."""
    backbone = Backbone(early_model(base.model, sweep.layers, extra))
    options = SpeculationOptions(exit=Exit(threshold=_SURE), speculate=False, never_slower=False)
    plain = Speculator(backbone, base.tokenizer, None, base.label, options)
    requests = {q.id: greedy_request(plain, q.turns[0], sweep.max_new_tokens) for q in questions}
    texts = {name: decode(plain, request, options).tokens for name, request in requests.items()}
    used = itertools.chain.from_iterable(texts.values())
    draft_ids = small_vocabulary(used, sweep.draft_vocab_size, backbone.vocab_size)
    heads, head = dialled_heads(backbone, sweep.layers, draft_ids, sweep.seed)
    return _Rig(
        speculator=Speculator(backbone, base.tokenizer, heads, base.label, options),
        head=head,
        depth_ratio=sweep.layers / (sweep.layers + extra),
        requests=requests,
        texts=texts,
    )


def _point(dial: Dial, runs: Sequence[Run], plain: Sequence[Run]) -> Point:
    ratio, drafts = dial.depth_ratio, [count for run in runs for count in run.drafts]
    seconds, plain_seconds = (_total(group, lambda run: run.decode_s) for group in (runs, plain))
    heads = _total(runs, lambda run: run.heads_s)
    plain_step = plain_seconds / _total(plain, lambda run: run.new_tokens - 1)
    head = heads / _total(runs, lambda run: sum(run.drafts)) / plain_step
    acceptance = sum(run.accepted for run in runs) / sum(run.tried for run in runs)
    tokens = sum(expected_tokens(acceptance, count) for count in drafts)
    # without drafts the newest token's own row still runs through the shallow layers
    cost = sum(round_cost(count, ratio, rows=max(count, 1)) for count in drafts)
    complete = sum(round_cost(count, ratio, rows=count + 1, head=head) for count in drafts)
    prompts = {run.prompt for run in runs}
    return Point(
        dial=dial,
        prompts=len(prompts),
        equal_texts=len(prompts - {run.prompt for run in runs if not run.equal}),
        acceptance=acceptance,
        compression_rate=sum(run.new_tokens - 1 for run in runs) / len(drafts),
        head_cost=head,
        speed_up=plain_seconds / seconds,
        speed_up_without_heads=plain_seconds / (seconds - heads),
        formula=tokens / cost,
        complete_formula=tokens / complete,
    )


def _total(runs: Sequence[Run], value: Callable[[Run], float]) -> float:
    """Sum over prompts of the median over repeats."""
    by_prompt: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        by_prompt[run.prompt].append(value(run))
    return sum(map(statistics.median, by_prompt.values()))
