"""How often heads are right: features of held-out text come in, shares per exit layer go out.

Agreement is with the model's own next token over the full vocabulary, so a token that heads cannot
draft counts against them. Called by `fit` and `calibrate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from accelerate import PartialState
from torch import Tensor, distributed, nn
from torch.nn.utils.rnn import pad_sequence

from selfspec.heads.attending import AttendingHeads, attention
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.heads import ExitHead
from selfspec.training.features import Features


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Shares in 0..1 of one exit layer."""

    positions: int  # held-out answer positions
    agreement: float  # share where the head's top token is the model's
    agreement_second: float | None = None
    """The share for the second draft of a round behind a right first one, where it reads what the
    heads made of that, or comes from a head of its own."""


class Judged(NamedTuple):
    """A head's answers at N positions."""

    logits: Tensor  # [N, V_draft]
    right: Tensor  # [N] bool: its top token is the model's


def unrolled(
    heads: ExitHeads, layer: int, batch: Features, steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Features of the first, the second, ... draft at each position, and where there is one.

    [N, d] and [N] bool each. From the second on heads that read what the model made of the token
    before read what they made of it themselves, as they will when they draft; of those that look
    ahead the next one reads a state one position earlier; other heads have the first only.
    """
    if isinstance(heads, AttendingHeads):
        yield from _attended(heads, batch, steps)
        return
    valid = torch.ones_like(batch.continues)
    if heads.looks_ahead and batch.deep is not None:
        states = batch.deep
        for _, ahead in zip(range(steps), heads.by_layer.values(), strict=False):
            yield cast("ExitHead", ahead).features(states), valid
            states, valid = states.roll(1, dims=0), batch.continues & valid.roll(1)
        return
    head, hidden, deep = heads[layer], batch.hidden[layer], batch.deep
    for _ in range(steps if head.reads_deep else 1):
        features = head.features(hidden, deep)
        yield features, valid
        deep, valid = features.roll(1, dims=0), batch.continues & valid.roll(1)


def _attended(
    heads: AttendingHeads, batch: Features, steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """All texts of a batch side by side; a row attends to what it will when it drafts.

    The row of the s-th draft attends to first rows at least s - 1 places before it, and to the rows
    of the drafts in between (EAGLE-3's training-time test).
    """
    starts = (~batch.continues).nonzero()[:, 0]
    lengths = starts.diff(append=starts.new_tensor([len(batch)])).tolist()

    def padded(rows: Tensor) -> Tensor:
        """[N, ...] -> [B, T, ...], T at least 2."""
        texts = pad_sequence(rows.split(lengths), batch_first=True)
        short = max(0, 2 - texts.shape[1])
        return nn.functional.pad(texts, (*(0, 0) * (rows.dim() - 1), 0, short))

    inside = padded(torch.ones_like(batch.continues))
    embeddings = padded(batch.hidden[0])[:, 1:]
    states = torch.cat([batch.hidden[layer] for layer in heads.layers], -1)
    states = heads.fuse(padded(states)[:, :-1])
    count = embeddings.shape[1]
    places = torch.arange(1, count + 1, device=states.device)
    own = torch.eye(count, dtype=torch.bool, device=states.device)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for step in range(steps):
        drafts = [own.roll(step - before, 0) for before in range(1, step + 1)]
        sees = torch.cat([torch.ones_like(own).tril(-step), *drafts], -1)

        def attend(query: Tensor, key: Tensor, value: Tensor, sees: Tensor = sees) -> Tensor:
            keys.append(key.transpose(1, 2))
            values.append(value.transpose(1, 2))
            return attention(query, torch.cat(keys, 2), torch.cat(values, 2), sees)

        output = heads.layer(embeddings, states, places, attend)
        features = nn.functional.pad(heads.head.features(output), (0, 0, 1, 0))
        valid = nn.functional.pad(places > step, (1, 0))
        yield features[inside], valid.expand_as(inside)[inside]
        states = heads.fed(output).roll(1, 1)


@torch.no_grad()
def judged(heads: ExitHeads, layer: int, batch: Features, drafts: int = 1) -> list[Judged]:
    """A head's answers where the text answers: as first drafts, as second ones, ...

    Of later drafts those whose tokens before belong to the answer, too.
    """
    head, answers, found = cast("ExitHead", heads.by_layer[str(layer)]), batch.answers, []
    top_ids, _ = batch.targets
    for features, valid in unrolled(heads, layer, batch, drafts):
        rows = (answers & valid).nonzero()[:, 0]
        logits = head.unembed(features[rows])
        tokens = head.to_target_ids(logits.argmax(-1))
        found.append(Judged(logits, tokens == top_ids[rows, 0]))
        answers = batch.answers & answers.roll(1)
    return found


def total(sums: Tensor, processes: PartialState | None) -> Tensor:
    """Sums of this process -> those of all together."""
    if processes is not None and processes.num_processes > 1:
        sums = sums.to(processes.device)
        distributed.all_reduce(sums)
    return sums


def agreements(
    heads: ExitHeads, batches: Iterable[Features], processes: PartialState | None = None
) -> dict[int, Agreement]:
    """By exit layer; `processes`: those of which each has batches of its own."""
    layers = heads.config.exit_layers
    counts = total(counted(heads, batches, 2), processes)  # [layers, 2, 2]
    shares = counts[..., 1].double() / counts[..., 0]
    return {
        layer: Agreement(
            positions=int(found[0, 0]),
            agreement=share[0].item(),
            agreement_second=share[1].item() if found[1, 0] else None,
        )
        for layer, found, share in zip(layers, counts, shares, strict=True)
    }


def counted(heads: ExitHeads, batches: Iterable[Features], drafts: int) -> Tensor:
    """[layers, drafts, 2] int64: answers to first drafts, to second ones, ..., and right ones."""
    layers = heads.config.exit_layers
    counts = torch.zeros(len(layers), drafts, 2, dtype=torch.int64)
    for batch in batches:
        for place, layer in enumerate(layers):
            for draft, found in enumerate(judged(heads, layer, batch, drafts)):
                counts[place, draft] += _counted(found.right)
    return counts


def coverage(
    heads: ExitHeads, batches: Iterable[Features], processes: PartialState | None = None
) -> float:
    """Share of positions where the model's next token is one that heads can draft."""
    ids = heads.first.draft_ids
    if ids is None:
        return 1.0
    known = [_counted(torch.isin(batch.targets[0][batch.answers, 0], ids)) for batch in batches]
    positions, found = total(torch.zeros(2, dtype=torch.int64) + sum(known), processes).tolist()
    return float(found / positions)


def _counted(right: Tensor) -> Tensor:
    """[N] bool -> how many, and how many of them are true."""
    return torch.tensor([len(right), int(right.sum())])
