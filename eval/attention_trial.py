r"""Whether a deep-fused head should also attend to earlier deep states: a trial, not a head type.

    python -m eval.attention_trial --cache features --held-out held-out --tokens 200000 \
        --output eval/results/heads/attention.json

Two heads on the embedding learn from the same batches in the same order: the deep-fused head as it
is, and one whose input also holds what causal attention (one layer, 8 heads) over the embeddings
and deep states of the same answer gives. First drafts only. The draft vocabulary is what `selfspec
fit` would take.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.progress import track
from torch import Tensor, nn

import selfspec
from selfspec.files import write
from selfspec.heads.types import DeepFusedHead, DraftVocabulary
from selfspec.model.unembedding import Unembedding
from selfspec.training.cache import CacheSource
from selfspec.training.data import draft_vocabulary, special_ids
from selfspec.training.features import Features
from selfspec.training.sources import whole

HEADS = 8


class AttendingHead(DeepFusedHead):
    """Deep-fused, with one layer of causal attention in front; [N, d] of whole answers in order."""

    def _build(self, unembedding: Unembedding, inner_size: int | None) -> None:
        super()._build(unembedding, inner_size)
        size = unembedding.weight.shape[1]
        self.mix = nn.Linear(2 * size, 3 * size)
        self.out = nn.Linear(size, size)
        nn.init.zeros_(self.out.weight)

    def attended(self, hidden: Tensor, deep: Tensor, continues: Tensor) -> Tensor:
        """Features of all N positions; a position sees those of its own answer up to itself."""
        normed = self.norm(hidden)
        parts = self.mix(torch.cat([normed, deep], dim=-1)).chunk(3, dim=-1)
        answer = (~continues).cumsum(0)
        mask = (answer[:, None] == answer[None]).tril()
        queries, keys, values = (p.view(len(p), HEADS, -1).transpose(0, 1)[None] for p in parts)
        seen = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        seen = seen[0].transpose(0, 1).reshape(len(hidden), -1)
        made: Tensor = self.change(torch.cat([normed + self.out(seen), deep], dim=-1))
        return made


def main(
    cache: Annotated[Path, typer.Option(help="Feature cache to fit to.")],
    held_out: Annotated[Path, typer.Option(help="Feature cache to measure on.")],
    output: Annotated[Path, typer.Option(help="JSON file.")],
    tokens: int = 200_000,
    epochs: int = 2,
    learning_rate: float = 2e-3,
) -> None:
    """Fit both, measure both, write."""
    torch.manual_seed(0)
    speculator = selfspec.load(dtype="bfloat16", executor="generic")
    own = speculator.backbone.unembedding
    train = whole(CacheSource(cache)).limited(tokens)
    measured = whole(CacheSource(held_out))
    known = draft_vocabulary(
        train.source.token_counts(), 8192, special_ids(speculator.tokenizer), own.weight.shape[0]
    )
    unembedding = Unembedding(own.weight.float(), own.norm.float(), own.finish)
    vocabulary = DraftVocabulary.of(unembedding, known)
    found: dict[str, Any] = {"answer_tokens": train.positions, "epochs": epochs}
    for name, kind in (("deep-fused", DeepFusedHead), ("with attention", AttendingHead)):
        head, start = kind(unembedding, vocabulary), time.perf_counter()
        fit(head, train.indices, train.source, epochs, learning_rate, name)
        seconds = time.perf_counter() - start
        found[name] = {"agreement": agreement(head, measured.batches()), "seconds": seconds}
        print(name, found[name])
    write(output, json.dumps(found, indent=2) + "\n")


def fit(
    head: DeepFusedHead, indices: Any, source: Any, epochs: int, learning_rate: float, name: str
) -> None:
    """AdamW with a warm-up and a cosine, as `selfspec fit` has it."""
    index = torch.full((head.to_target_logits(torch.zeros(head.draft_vocab_size)).numel(),), -1)
    index[head.draft_ids] = torch.arange(head.draft_vocab_size)
    learned = [entry for entry in head.parameters() if entry.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=learning_rate, weight_decay=0.01)
    order = [i for _ in range(epochs) for i in torch.randperm(len(indices)).tolist()]
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=len(order), pct_start=0.05
    )
    for place in track(order, description=name):
        batch = source.batch(indices[place])
        targets = index[batch.following]
        with torch.autocast("cpu", torch.bfloat16):
            logits = head.unembed(drafted(head, batch))
            loss = F.cross_entropy(logits, targets, ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def agreement(head: DeepFusedHead, batches: Any) -> float:
    """Share of positions where the head's top token is the model's."""
    right, count = 0, 0
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16):
            top = head.to_target_ids(head.unembed(drafted(head, batch)).argmax(-1))
        right += int((top == batch.top_ids[:, 0]).sum())
        count += len(top)
    return right / count


def drafted(head: DeepFusedHead, batch: Features) -> Tensor:
    """Features of first drafts, [N, d]."""
    hidden, deep = batch.hidden[0].float(), batch.deep.float()
    if isinstance(head, AttendingHead):
        return head.attended(hidden, deep, batch.continues)
    return head.features(hidden, deep)


if __name__ == "__main__":
    typer.run(main)
