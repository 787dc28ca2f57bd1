"""Drafts from a smaller model: a second one, or the model itself without some of its layers.

A second model is classic speculative decoding (Leviathan et al. 2023). A model that skips some of
its layers reads its own KV cache, as in Self-SD (Zhang et al. 2023,
dilab-zju/self-speculative-decoding), so a prompt runs once; entries of drafts are removed before
verification. The skipped layers are given, or searched for during generation, as in SWIFT (Xia et
al. 2024, hemingkx/SWIFT). Both papers skip attention and MLPs separately; here whole layers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec import options as parts
from selfspec.decoding.acceptance import Draft, Target
from selfspec.decoding.drafters.base import ChoosingDrafter, Drafting, DraftWriter
from selfspec.decoding.sampling import DraftToken
from selfspec.decoding.state import DecodeState, Embed, HiddenCache, Run, Steps
from selfspec.decoding.stats import DRAFT_MODEL, SKIP, Stopwatch
from selfspec.errors import DraftModelMismatch
from selfspec.heads.heads import likeliest
from selfspec.model.backbone import Backbone
from selfspec.model.kv import KVCache, common_prefix


class DraftCache:
    """A draft model with the keys and values of one sequence; a session keeps it between turns."""

    def __init__(self, backbone: Backbone, vocab_size: int | None = None) -> None:
        """`vocab_size`: rows of the target's unembedding; excess rows of either one are padding."""
        self.backbone = backbone
        self._vocab_size = backbone.vocab_size if vocab_size is None else vocab_size
        self._kv = KVCache(backbone.num_layers)
        self._hidden = HiddenCache(backbone, self._kv)
        self._cached_ids: list[int] = []

    def rewind(self, ids: list[int]) -> list[int]:
        """Keep the prefix shared with `ids`; returns the ids still to run, at least one."""
        shared = common_prefix(self._cached_ids, ids[:-1])
        self._kv.truncate(shared)
        del self._cached_ids[shared:]
        return ids[shared:]

    def run(self, ids: list[int]) -> Steps[Tensor]:
        """Append `ids`; returns logits [1, V] of the next token, with the target's V."""
        self._hidden.clear()
        # an id of the target's padding has no embedding here: a wrong one costs at most a draft
        inputs = [min(token, self.backbone.vocab_size - 1) for token in ids]
        self._hidden.push((yield Embed(self.backbone, inputs)))
        hidden = yield from self._hidden.advance_all(read=1)
        self._cached_ids += ids
        logits = (yield from self._hidden.unembed(hidden[-1:])).logits
        missing = self._vocab_size - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits


class DraftModelDrafter(ChoosingDrafter):
    """Drafts by decoding with a second model.

    The next round drops rejected tokens from its cache, and runs the last draft token if accepted.
    """

    def __init__(self, cache: DraftCache, drafting: Drafting) -> None:
        super().__init__(drafting)
        self._cache = cache

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:  # noqa: ARG002  # the protocol's
        """Up to min(limit, W_max) tokens, and none beyond the draft model's context length."""
        ids = state.ids
        room = self._cache.backbone.max_positions - (state.length - state.pad) + 1
        writer = DraftWriter(self, min(limit, room), source=DRAFT_MODEL)
        rows, signal = self._cache.rewind(state.committed(0)), self.controller.signal
        while writer.room:
            logits = yield from self._cache.run(rows)
            choice = self.sampler.choose(ids, logits, believe=self.beliefs)
            writer.add(choice, 1.0 if signal is None else float(signal(logits)))
            rows = [choice.token]
            ids = self.sampler.with_token(ids, choice.token)
        return writer.draft


def check_same_tokens(
    tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, label: str
) -> None:
    """Raise DraftModelMismatch unless `other`, of the draft model `label`, has the same tokens."""
    target, draft = ({i: t for t, i in each.get_vocab().items()} for each in (tokenizer, other))
    if target == draft:
        return
    first = min(i for i in target.keys() | draft.keys() if target.get(i) != draft.get(i))
    raise DraftModelMismatch(
        f"the draft model {label} has another vocabulary: {len(draft)} tokens instead of "
        f"{len(target)}, the first that differs is {first}: {draft.get(first)!r} instead of "
        f"{target.get(first)!r}. Choose a smaller model of the same family"
    )


def check_same_size(
    backbone: Backbone, draft_model: Backbone, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Raise DraftModelMismatch unless both models give logits over the same tokens.

    Unembeddings may differ in their padding after the last token of a shared `tokenizer`.
    """
    rows, draft_rows = backbone.vocab_size, draft_model.vocab_size
    tokens = max(tokenizer.get_vocab().values()) + 1 if tokenizer else max(rows, draft_rows)
    if rows != draft_rows and min(rows, draft_rows) < tokens:
        raise DraftModelMismatch(
            f"the draft model has {draft_rows} rows in its unembedding, the model {rows}. Choose a "
            "smaller model of the same family"
        )


# --- the model itself without some of its layers: Self-SD, and SWIFT's search for them

WINDOW = 32  # newest tokens of an answer that a set of layers is tried on; SWIFT's context window
_RATIO = 0.45  # share of the layers between the first and the last that a set skips; SWIFT's

_ENOUGH, _PATIENCE, _MOST = 0.95, 300, 1000
"""The search ends at more than this share of right tokens, after this many sets in a row without
improvement, or this many in total; SWIFT's `max_score`, `max_tolerance_iter`, `max_opt_iter`."""

_STEP, _NEWEST, _MOMENTUM = 0.01, 0.5, 0.9
"""For Self-SD's threshold: epsilon, weight of the newest round's rate, weight of the old threshold
(its `auto_parameters`)."""


class LayerSearch:
    """Searches for the layers that drafts skip, counted from 1; shared by all texts of a model.

    Each set is drawn at random, whereas SWIFT asks a Gaussian process for every 25th set.
    """

    def __init__(self, num_layers: int) -> None:
        self.skipped = tuple(range(2, num_layers, 2))  # the best set so far; initially SWIFT's
        self._candidates = range(2, num_layers)
        self._random = random.Random(0)
        self._best, self._tries, self._failures = 0.0, 0, 0

    @property
    def goes_on(self) -> bool:
        enough = self._best > _ENOUGH or not self._candidates
        return not (enough or self._failures > _PATIENCE or self._tries > _MOST)

    def draw(self) -> tuple[int, ...]:
        count = max(1, int(_RATIO * len(self._candidates)))  # skipping none is right, but no draft
        return tuple(sorted(self._random.sample(self._candidates, count)))

    def learn(self, skipped: tuple[int, ...], right: float) -> None:
        """Note the share of tokens that were `right` when these layers were skipped."""
        self._tries += 1
        self._failures += 1
        if right > self._best:
            self.skipped, self._best, self._failures = skipped, right, 0


class SkipDrafter(ChoosingDrafter):
    """Drafts token by token through the remaining layers, until a token's confidence is too low.

    That token is proposed too, since it is already computed. Confidence is the likeliest token's
    probability, as in Self-SD's greedy form; its sampling form takes the drawn token's, which would
    bias samples. The threshold follows Self-SD's rule: it rises if too few drafts are accepted;
    else it falls, unless W_max ended the draft.
    """

    def __init__(self, options: parts.Skip, search: LayerSearch, drafting: Drafting) -> None:
        super().__init__(drafting)
        self._skipped, self._search = options.skipped, search
        self.threshold, self._target, self._rate = options.threshold, options.target, 0.0
        self._prompt_length: int | None = None  # ids before the answer

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:  # noqa: ARG002  # the protocol's
        """Up to min(limit, W_max) tokens; caches are left unchanged."""
        if self._skipped is None:
            yield from self._try_layers(state)
        writer = DraftWriter(self, limit, source=SKIP)
        length, ids, rows = state.kv.length(), state.ids, state.committed(-1)
        skipped = self._skipped or self._search.skipped  # another text may soon find better ones
        while writer.room:
            target = yield from logits_without(state, rows, skipped)
            choice, confidence, signal = self._choose(ids, target.row(0))
            writer.add(choice, signal)
            if writer.room and confidence < self.threshold:
                writer.stop("unsure")
            rows = [choice.token]
            ids = self.sampler.with_token(ids, choice.token)
        state.kv.truncate(length)
        return writer.draft

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        super().learn(draft, kept)
        if self._target is not None and draft.proposed:
            self._rate += _NEWEST * (len(kept) / len(draft.proposed) - self._rate)
            step = _STEP if self._rate < self._target else 0.0 if draft.ended == "width" else -_STEP
            self.threshold += (1.0 - _MOMENTUM) * step

    def _choose(self, ids: Tensor, logits: Tensor) -> tuple[DraftToken, float, float]:
        """The token after `ids` by logits [1, V], the top probability, the controller's signal."""
        signal_of = self.controller.signal
        tokens, chances = likeliest(logits, 1.0, 1)
        signals = chances if signal_of is None else signal_of(logits)[:, None]
        token, confidence, signal = torch.cat([tokens, chances, signals], dim=1)[0].tolist()
        if self.sampler.is_plain_greedy and not self.beliefs:
            return DraftToken(int(token)), confidence, signal
        return self.sampler.choose(ids, logits, believe=self.beliefs), confidence, signal

    def _try_layers(self, state: DecodeState) -> Steps[None]:
        """Try another set of layers on the newest tokens of the answer; SWIFT takes the first.

        It runs as a branch beside the cached tokens: needs trees, and a cache without fixed slots.
        """
        self._prompt_length = state.length if self._prompt_length is None else self._prompt_length
        able = state.kv.slots is None and state.backbone.runs_trees
        if state.length - self._prompt_length > WINDOW and self._search.goes_on and able:
            skipped, tokens = self._search.draw(), state.committed(-WINDOW)
            choices = (yield from redraft(state, skipped, WINDOW)).best
            hits = sum(choice == token for choice, token in zip(choices, tokens, strict=True))
            self._search.learn(skipped, hits / WINDOW)


def logits_without(
    state: DecodeState,
    ids: Sequence[int],
    skipped: Sequence[int],
    parents: Sequence[int] | None = None,
) -> Steps[Target]:
    """Logits after `ids` [T] without the layers in `skipped`, which ascend from 2 or more.

    Adds keys and values of T positions to the remaining layers; `parents` as in a Span.
    """
    backbone, kv, least_rows = state.backbone, state.kv, state.hidden.least_rows
    hidden: Tensor = yield Embed(backbone, ids)
    for first, stop in pairwise((0, *skipped, backbone.num_layers + 1)):
        if first < stop - 1:
            hidden = yield Run(backbone, kv, hidden, first, stop - 1, parents, least_rows)
    return (yield from state.hidden.unembed(hidden))


def redraft(state: DecodeState, skipped: Sequence[int], count: int) -> Steps[Target]:
    """The logits by which a draft would have chosen each of the newest `count` committed tokens.

    Runs on a branch beside the cached tokens; leaves caches unchanged. Needs more than `count` ids.
    """
    length, rows = state.kv.length(), state.committed(-count - 1)[:-1]
    target = yield from logits_without(state, rows, skipped, [-1 - count, *range(count - 1)])
    state.kv.truncate(length)
    return target
