"""Builders of every kind of exit head for the tiny Llama, untrained or with changed weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from selfspec.heads.exit_heads import ExitHeads, HeadsConfig
from selfspec.model.parts import Unembedding
from tests.models import VOCAB_SIZE

FINGERPRINT = "0123456789abcdef"
DRAFT_IDS = torch.tensor([0, 3, 17, 40, 95])

KINDS: dict[str, dict[str, Any]] = {
    "linear": {"head_type": "linear"},
    "linear-draft": {"head_type": "linear", "draft_vocab_size": 5},
    "translator": {"head_type": "translator"},
    "deep-fused": {"head_type": "deep-fused"},
    "deep-fused-draft": {"head_type": "deep-fused", "inner_size": 7, "draft_vocab_size": 5},
    "logit-lens": {"head_type": "logit-lens"},
    "logit-lens-draft": {"head_type": "logit-lens", "draft_vocab_size": 5},
}
AT_0: dict[str, dict[str, Any]] = {
    "medusa": {"head_type": "medusa", "num_heads": 3},
    "states": {"head_type": "deep-fused", "state_layers": (2, 5)},
}
TRAINED = [kind for kind in KINDS if not kind.startswith("logit-lens")]


def make_config(**values: Any) -> HeadsConfig:
    """A config for the tiny Llama; `values` replace entries."""
    sizes: dict[str, Any] = {
        "base_model": "tiny",
        "base_fingerprint": FINGERPRINT,
        "hidden_size": 32,
        "num_layers": 6,
        "vocab_size": VOCAB_SIZE,
        "exit_layers": (2, 4),
        "head_type": "linear",
    }
    return HeadsConfig(**sizes | values)


def make_heads(kind: str, unembedding: Unembedding, **values: Any) -> ExitHeads:
    fields = KINDS[kind] if kind in KINDS else {"exit_layers": (0,)} | AT_0[kind]
    config = make_config(**fields | values)
    return ExitHeads(config, unembedding, DRAFT_IDS if config.draft_vocab_size else None)


def beside(unembedding: Unembedding, fingerprint: str = FINGERPRINT, layers: int = 6) -> Any:
    """A stand-in with the attributes of a backbone that heads read."""
    return SimpleNamespace(unembedding=unembedding, fingerprint=fingerprint, num_layers=layers)


def load(folder: Path, unembedding: Unembedding) -> ExitHeads:
    return ExitHeads.from_pretrained(folder, beside(unembedding), "tiny")


@torch.no_grad()
def train(heads: ExitHeads) -> ExitHeads:
    """Add seeded noise to every parameter of the heads."""
    generator = torch.Generator().manual_seed(1)
    for weight in heads.parameters():
        weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
    return heads
