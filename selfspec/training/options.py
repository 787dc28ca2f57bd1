"""Options of a fit. Flags of `selfspec fit` and keys of a recipe are derived from them.

Imports no torch, so that `selfspec fit --help` stays fast.
"""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.errors import InvalidOption

FITTED_HEAD_TYPES = ("linear", "translator")
LOSSES = ("kl", "ce")


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Which heads are fitted, and how."""

    exit_layers: tuple[int, ...] | None = None
    """Exit layers, counted from 1. None: five, evenly spread over the first two thirds."""

    head_type: str = "translator"
    """linear (norm and an LM head of its own) or translator (norm, an affine map, the model's own
    unembedding)."""

    rank: int | None = None
    """Rank of a translator's map, at least 1. None: a full one."""

    draft_vocab_size: int | None = 8192
    """Tokens that heads can draft: all special ones and the most frequent of the training answers.
    None: the model's whole vocabulary. 8192 cover 97.7 % of the shared self-generated answers at a
    sixth of the whole vocabulary's cost."""

    loss: str = "kl"
    """kl (to the model's own distribution, within the draft vocabulary) or ce (to the next token of
    the text)."""

    epochs: int = 1
    """Passes over the training text, at least 1."""

    learning_rate: float = 3e-3
    """AdamW's, at its highest, above 0."""

    warmup: float = 0.05
    """Share of the steps over which the learning rate rises, in [0, 1); then a cosine to 0."""

    weight_decay: float = 0.01
    """AdamW's, at least 0; for matrices only."""

    max_grad_norm: float = 1.0
    """Gradients of a head are clipped to this norm, above 0; each head on its own, so that one does
    not slow the others down."""

    batch_tokens: int = 2048
    """Tokens per step, padding included. No conversation may be longer. 4096 halve the number of
    steps, which cost 4 to 6 points of agreement in one epoch over 60K tokens."""

    max_tokens: int | None = None
    """Answer tokens of the training text to use. None: all."""

    keep_features: bool = False
    """Keep the hidden states of the first epoch in memory for the later ones, instead of running
    the model again: 2 * d * (exit layers + 1) bytes per answer token in bfloat16."""

    seed: int = 0
    """Fixes the order of the batches, and so the weights."""

    def __post_init__(self) -> None:
        """Raise InvalidOption for values that no fit could make sense of."""
        _require(
            self.head_type in FITTED_HEAD_TYPES, "head_type", self.head_type, FITTED_HEAD_TYPES
        )
        _require(self.loss in LOSSES, "loss", self.loss, LOSSES)
        for name in ("rank", "draft_vocab_size", "epochs", "batch_tokens", "max_tokens"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "at least 1")
        for name in ("learning_rate", "max_grad_norm"):
            _require(getattr(self, name) > 0.0, name, getattr(self, name), "above 0")
        _require(0.0 <= self.warmup < 1.0, "warmup", self.warmup, "in [0, 1)")
        _require(self.weight_decay >= 0.0, "weight_decay", self.weight_decay, "at least 0")


def _require(condition: bool, name: str, value: object, expected: object) -> None:
    if not condition:
        wanted = " or ".join(expected) if isinstance(expected, tuple) else expected
        raise InvalidOption(f"{name} is {value}, expected {wanted}")
