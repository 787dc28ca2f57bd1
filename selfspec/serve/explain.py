"""Who gave each token of an answer, round by round: for `"speculation": {"explain": true}`.

Rounds and the texts of their tokens come in, JSON goes out as soon as all text of a round is shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec.config import SpeculationOptions
from selfspec.decoding.drafters import Draft
from selfspec.decoding.prices import DraftCost, Unmeasured, token_cost
from selfspec.decoding.runtime import Runtime
from selfspec.decoding.sources import EXIT
from selfspec.decoding.stats import Round

Told = dict[str, Any]
"""A round, ready for JSON."""


def cost_of(runtime: Runtime, options: SpeculationOptions) -> DraftCost:
    """What drafting costs a text that runs alone: so a request's explanation is always the same."""
    known = Unmeasured.of(runtime.backbone).unless(options.prices)
    second = runtime.draft_model if options.uses("draft-model") else None
    return DraftCost(
        rows=known.rows,
        token=0.0 if second is None else token_cost(second, runtime.backbone),
        head=known.head,
        num_layers=runtime.backbone.num_layers,
    )


class Explanation:
    """The rounds of one answer. A stop may hide text that was written: no round shows it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, cost: DraftCost) -> None:
        """Without a tokenizer all texts are empty."""
        self._tokenizer, self._cost = tokenizer, cost
        self._waiting: deque[Told] = deque()
        """Rounds with text that is not shown yet."""
        self._shown = 0
        """Characters of these that are."""
        self._newest: list[int] = []
        """The last committed token."""

    def add(self, entry: Round, texts: Sequence[str]) -> None:
        """A round; `texts` of its tokens join to the answer."""
        self._waiting.append(
            {
                "tokens": [
                    {"text": text, **_giver(*by)}
                    for text, by in zip(texts, entry.givers, strict=True)
                ],
                "drafts": self._drafts(entry),
                "steps": 0.0 if entry.prefill else round(self._cost.steps(_draft(entry)), 4),
                "ended": entry.ended,
            }
        )
        self._newest = entry.tokens[-1:]

    def rest(self, text: str) -> None:
        """Of a character that the answer ends within: it belongs to the last token."""
        if text:
            self._waiting[-1]["tokens"][-1]["text"] += text

    def shown(self, text: str, *, last: bool = False) -> Told:
        """The rounds that are complete now that `text` is shown; `last`: no more will be."""
        self._shown += len(text)
        found = []
        while self._waiting and (last or _length(self._waiting[0]) <= self._shown):
            found.append(self._cut(self._waiting.popleft()))
        return {"rounds": found, "num_layers": self._cost.num_layers}

    def _cut(self, told: Told) -> Told:
        """What was shown of a round, counted off."""
        for token in told["tokens"]:
            token["text"] = token["text"][: self._shown]
            self._shown -= len(token["text"])
        accepted = [draft for draft in told["drafts"] if draft["accepted"]]
        for draft in accepted:
            draft["text"] = told["tokens"][draft.pop("place")]["text"]
        return told

    def _drafts(self, entry: Round) -> list[Told]:
        parents = entry.parents
        if parents is None:
            parents = [*range(-1, len(entry.draft_tokens) - 1)]
        found = []
        for index, parent in enumerate(parents):
            kept = index in entry.kept
            before = self._newest if parent < 0 else entry.draft_tokens[parent : parent + 1]
            found.append(
                {
                    "text": "" if kept else self._text(before, entry.draft_tokens[index]),
                    **_giver(entry.sources[index], entry.exit_layers[index]),
                    "parent": parent,
                    "accepted": kept,
                    **({"place": entry.kept.index(index)} if kept else {}),
                }
            )
        return found

    def _text(self, before: list[int], token: int) -> str:
        """A token's text behind another; end tokens are shown, as nothing ends with a draft."""
        if self._tokenizer is None:
            return ""
        context = str(self._tokenizer.decode(before))
        return str(self._tokenizer.decode([*before, token]))[len(context) :]


def _giver(source: str, layer: int) -> Told:
    """Only exit heads stand at a layer."""
    return {"source": source, "layer": layer if source == EXIT else None}


def _draft(entry: Round) -> Draft:
    """What was proposed in a round."""
    return Draft(
        tokens=entry.draft_tokens,
        parents=entry.parents,
        exit_layers=entry.exit_layers,
        sources=entry.sources,
        heads=entry.heads,
    )


def _length(told: Told) -> int:
    return sum(len(token["text"]) for token in told["tokens"])
