r"""Compares other heads and losses with the default's, fitted to the same features.

    selfspec cache --data train.jsonl.gz --exit-layers 0,2,15,27 --state-layers 2,15,21,27 \
        --top-k 1 --output features
    python training/variants.py --cache features --max-tokens 150000 --output variants

Every variant is fitted to the same batches in the same order, and measured on every 20th batch,
which none is fitted to. Prints a line per variant and writes `summary.json`. Heads are not stored:
useful variants move into `selfspec fit`. Layers other than 0 are for those that read more states;
`--answers-only` is enough for all but "attending" and "labels at every position".
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, cast

import torch
import typer
from torch import Tensor, nn

from selfspec.cli.base import bar
from selfspec.errors import InvalidOption
from selfspec.files import write
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.folder import EAGLE3
from selfspec.heads.heads import HEAD_TYPES, DeepFusedHead, ExitHead, Parts
from selfspec.hub.models import load_model, training_dtype
from selfspec.model.backbone import Backbone
from selfspec.model.parts import Unembedding
from selfspec.training import fit
from selfspec.training.features import CacheSource, Features, Selection, split
from selfspec.training.fit import unroll
from selfspec.training.options import FitOptions
from selfspec.training.text import special_ids

FEWEST = 1000
"""Answer tokens to fit to."""

DRAFTS = 3
"""Drafts of a chain that is measured."""

Drafts = Iterator[tuple[Tensor, Tensor]]


class TwoLayers(DeepFusedHead):
    """A head with a second hidden layer as a residual branch, which adds nothing at first."""

    def _build(self, unembedding: Unembedding, inner_size: int | None) -> Parts:
        parts = super()._build(unembedding, inner_size)
        size = unembedding.weight.shape[1]
        last = nn.Linear(2 * size, size)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.second = nn.Sequential(
            nn.RMSNorm(size), nn.Linear(size, 2 * size), nn.SiLU(), last
        ).to(unembedding.weight)
        return parts

    def features(self, hidden: Tensor, deep: Tensor | None = None) -> Tensor:
        first = super().features(hidden, deep)
        more: Tensor = self.second(first)
        return first + more


class Biased(DeepFusedHead):
    """A head whose draft logits get a low-rank bias that depends only on the previous token.

    The bias is a table of `rank` numbers per token, times a [rank, V_draft] matrix. The token's id
    follows the hidden state, its numbers follow the features.
    """

    rank = 128

    def _build(self, unembedding: Unembedding, inner_size: int | None) -> Parts:
        parts = super()._build(unembedding, inner_size)
        self._size = unembedding.weight.shape[1]
        self.before = nn.Embedding(len(unembedding.weight), self.rank).to(unembedding.weight)
        nn.init.normal_(self.before.weight, std=self.rank**-0.5)
        self.after = nn.Linear(self.rank, len(self.rows), bias=False).to(unembedding.weight)
        nn.init.zeros_(self.after.weight)
        return parts

    def features(self, hidden: Tensor, deep: Tensor | None = None) -> Tensor:
        state = hidden[..., : self._size].to(self.before.weight)
        ids = hidden[..., self._size].long()
        read = super().features(state, None if deep is None else deep[..., : self._size])
        return torch.cat([read, self.before(ids)], -1)

    def unembed(self, features: Tensor) -> Tensor:
        more: Tensor = self.after(features[..., self._size :])
        return super().unembed(features[..., : self._size]) + more


@torch.no_grad()
def chains(heads: ExitHeads, text: Selection) -> list[float]:
    """Share of positions where a chain's first draft is kept, its first two, its first three."""
    kept, counted, head = [0] * DRAFTS, [0] * DRAFTS, heads.first
    for batch in text.batches():
        answers, right = batch.answers, torch.ones_like(batch.answers)
        for place, (features, valid) in enumerate(unroll(heads, 0, batch, DRAFTS)):
            best = [head.unembed(rows).argmax(-1) for rows in features.split(1024)]
            tokens = head.to_target_ids(torch.cat(best))
            right = right & (tokens == batch.top_ids[:, 0])
            rows = answers & valid
            kept[place] += int((right & rows).sum())
            counted[place] += int(rows.sum())
            answers, right = batch.answers & answers.roll(1), right.roll(1)
    return [n / of for n, of in zip(kept, counted, strict=True)]


def to_the_first_error(heads: ExitHeads, layer: int, batch: Features, steps: int) -> Drafts:
    """Yield later drafts only after right ones: after a wrong one they are never used."""
    right = torch.ones_like(batch.continues)
    for features, valid in unroll(heads, layer, batch, steps):
        yield features, valid & right
        with torch.no_grad():
            best = [heads[layer].unembed(rows).argmax(-1) for rows in features.split(1024)]
            tokens = heads[layer].to_target_ids(torch.cat(best))
        right = (right & (tokens == batch.top_ids[:, 0])).roll(1, dims=0)


class WithIds(CacheSource):
    """Features with the id of a row's token appended to its embedding.

    The id is that which followed the previous row. The first rows of answers have no previous row,
    and get 0: in a chat template they all follow the same token.
    """

    def batch(self, index: int, number: int = 0, count: int = 1) -> Features:
        found = super().batch(index, number, count)
        ids = torch.where(found.continues, found.following.roll(1), 0)[:, None]
        return replace(found, hidden={0: torch.cat([found.hidden[0], ids.float()], -1).float()})


class OfStates(CacheSource):
    """Features with the states of some cached layers; `layers` is set before a fit."""

    layers: tuple[int, ...] = ()

    def batch(self, index: int, number: int = 0, count: int = 1) -> Features:
        found, held = super().batch(index, number, count), self.spec.states
        deep, *states = cast("Tensor", found.deep).tensor_split(1 + len(held), dim=-1)
        wanted = [states[held.index(layer)] for layer in self.layers]
        return replace(found, deep=torch.cat([deep, *wanted], -1))


class Variant(NamedTuple):
    """The differences from the default."""

    kind: type[ExitHead] = DeepFusedHead
    options: Mapping[str, Any] = MappingProxyType({})
    source: type[CacheSource] = CacheSource
    drafts: Callable[..., Drafts] = unroll  # yields the drafts to learn from
    states: tuple[float, ...] = ()  # layers whose states are read, as shares of the depth


_ATTENDING = {"head_type": EAGLE3, "learning_rate": 7e-4}

VARIANTS = {
    "default": Variant(),
    "one draft ahead": Variant(options={"draft_steps": 1}),
    "three, each weighing 0.8 of the one before": Variant(
        options={"draft_steps": 3, "step_decay": 0.8}
    ),
    "five, each weighing 0.8 of the one before": Variant(
        options={"draft_steps": 5, "step_decay": 0.8}
    ),
    "two, to the first error": Variant(drafts=to_the_first_error),
    "two hidden layers": Variant(TwoLayers),
    "bias of rank 128": Variant(Biased, source=WithIds),
    "the state at 0.9 of the depth": Variant(source=OfStates, states=(0.9,)),
    "the state at 0.7 of the depth": Variant(source=OfStates, states=(0.7,)),
    "the states at 0.07, 0.5 and 0.9": Variant(source=OfStates, states=(0.07, 0.5, 0.9)),
    "twice as many hidden units": Variant(options={"inner_size": 2304}),
    "labels at every position": Variant(options={"answer_share": None}),
    "draft vocabulary of 4,096": Variant(options={"draft_vocab_size": 4096}),
    "draft vocabulary of 16,384": Variant(options={"draft_vocab_size": 16384}),
    "attending": Variant(options=_ATTENDING),
}


def fit_variant(
    name: str,
    cache: Path,
    backbone: Backbone,
    options: FitOptions,
    max_tokens: int,
    show: fit.Show = lambda *_: None,
    **job: Any,
) -> tuple[fit.Fitted, Selection]:
    """Fit one of VARIANTS; also returns the text to measure it on."""
    kind, changed, source, drafts, states = VARIANTS[name]
    held, options = source(cache, backbone), replace(options, **changed)
    layers = tuple(round(share * backbone.num_layers) for share in states)
    attends = options.head_type == EAGLE3
    options = replace(options, state_layers=None if attends else layers)
    there = held.spec.layers if attends else held.spec.states
    if missing := {*fit.state_layers(backbone, options)} - {*there}:
        raise InvalidOption(f"the cache holds no states of layers {sorted(missing)} for {name!r}")
    if isinstance(held, OfStates):
        held.layers = layers
    train, held_out = split(held)
    job |= {"train": train.limited(max_tokens), "validation": held_out, "options": options}
    own = HEAD_TYPES["deep-fused"]
    try:
        HEAD_TYPES["deep-fused"], fit.unroll = kind, drafts  # used by a fit
        return fit.fit(fit.Job(backbone=backbone, **job), show), held_out
    finally:
        HEAD_TYPES["deep-fused"], fit.unroll = own, unroll


def main(
    cache: Annotated[Path, typer.Option(help="Features of exit layer 0, with deep states.")],
    output: Annotated[Path, typer.Option(help="Folder for summary.json.")],
    model: Annotated[str | None, typer.Option(help="Folder, file or hub id; the default.")] = None,
    max_tokens: Annotated[int, typer.Option(min=FEWEST, help="Answer tokens to fit to.")] = 150_000,
    epochs: int = 2,
    seed: int = 0,
    only: Annotated[list[str] | None, typer.Option(help="A variant by name; repeatable.")] = None,
) -> None:
    """Fit and measure variants one after another; skips those in `summary.json`."""
    names = list(only or VARIANTS)
    if unknown := [name for name in names if name not in VARIANTS]:
        raise InvalidOption(f"{unknown[0]!r} is no variant. There are: {', '.join(VARIANTS)}")
    loaded, tokenizer, files = load_model(model, dtype=training_dtype(None))
    backbone = Backbone(loaded, executor="generic")
    options = FitOptions(exit_layers=(0,), answer_share=1.0, epochs=epochs, seed=seed)
    about = {"base_model": files.label, "special_ids": special_ids(tokenizer)}
    path = output / "summary.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for name in (name for name in names if name not in found):
        start = time.perf_counter()
        with bar(name, "steps") as show:
            result, held_out = fit_variant(
                name, cache, backbone, options, max_tokens, show, **about
            )
        kept = chains(result.heads, held_out)
        found[name] = {
            "kept": kept,
            "train_loss": result.metrics["layers"]["0"]["train_loss"],
            "answer_tokens": result.metrics["train_answer_tokens"],
            "parameters": sum(p.numel() for p in result.heads.parameters()),
            "seconds": round(time.perf_counter() - start),
        }
        write(path, json.dumps(found, indent=1) + "\n")
        shares = ", ".join(f"{share:.1%}" for share in kept)
        typer.echo(f"{name}: a chain's first, first two, first three drafts are right at {shares}")


if __name__ == "__main__":
    typer.run(main)
