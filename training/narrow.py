r"""Makes heads with a smaller draft vocabulary: each use of them reads fewer rows of weights.

    python training/narrow.py --heads HEADS --data train.jsonl.gz --draft-vocab-size 8192 \
        --output narrow

Kept are special tokens, then those that stand in answers most often. Weights, temperatures and
defaults stay. `python -m eval.agreement` says what the heads no longer say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from selfspec.errors import InvalidOption
from selfspec.heads.exit_heads import ExitHeads
from selfspec.hub.models import load_model, resolve_heads
from selfspec.model import fingerprint
from selfspec.model.backbone import Backbone
from selfspec.model.parts import Unembedding
from selfspec.training.text import read_conversations, special_ids


def narrowed(
    heads: ExitHeads,
    unembedding: Unembedding,
    size: int,
    counts: Counter[int],
    always: Collection[int] = (),
) -> ExitHeads:
    """Heads with `size` of their draft tokens. Raises InvalidOption where they have fewer."""
    ids = heads.first.draft_ids
    have = list(range(heads.config.vocab_size)) if ids is None else ids.tolist()
    if len(have) < size:
        raise InvalidOption(f"draft_vocab_size is {size}, the heads have {len(have)} draft tokens")
    order = sorted(have, key=lambda token: (token not in always, -counts[token], token))
    training = heads.config.training | {"narrowed_from": len(have)}
    config = replace(heads.config, draft_vocab_size=size, training=training)
    kept = sorted(order[:size])
    rows = [have.index(token) for token in kept]  # for heads with a matrix of their own
    found = ExitHeads(config, unembedding, torch.tensor(kept))
    for new, old in zip(found.parameters(), heads.parameters(), strict=True):
        new.data.copy_(old if new.shape == old.shape else old[rows])
    return found


def main(
    heads: Annotated[str, typer.Option(help="Folder or name of exit heads.")],
    data: Annotated[Path, typer.Option(help="Conversations whose answers are counted.")],
    output: Annotated[Path, typer.Option(help="Folder of the new heads.")],
    draft_vocab_size: Annotated[int, typer.Option(min=1)] = 8192,
    model: Annotated[str | None, typer.Option(help="Folder, file or hub id; the default.")] = None,
) -> None:
    """Count, choose, write."""
    loaded, tokenizer, files = load_model(model, dtype="bfloat16")
    known = fingerprint.of_loaded(loaded, files.stamps)
    backbone = Backbone(loaded, executor="generic", fingerprint=known)
    wide = ExitHeads.from_pretrained(resolve_heads(heads), backbone, files.label)
    size, most = backbone.vocab_size, backbone.max_positions
    talks = read_conversations(data, tokenizer, vocab_size=size, max_length=most)
    counts = Counter(token for talk in talks for token in talk.answer_ids)
    own = backbone.unembedding
    narrowed(wide, own, draft_vocab_size, counts, special_ids(tokenizer)).save(output)


if __name__ == "__main__":
    typer.run(main)
