"""Fits exit heads to a frozen model: conversations come in, heads and their metrics go out.

All exit layers learn from the same pass of the model. Heads are float32 while they learn; what is
returned and measured is what gets saved, in the model's dtype. Called by `selfspec fit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.backbone import Backbone, fingerprint
from selfspec.errors import InvalidData, InvalidOption, SelfspecError
from selfspec.heads import ExitHeads, HeadsConfig, LogitLensHead, check_exit_layers
from selfspec.stats import Stopwatch
from selfspec.training.data import Conversation, draft_vocabulary
from selfspec.training.features import Features, FeatureSource
from selfspec.training.losses import Targets, ce_targets, cross_entropy, kl_targets
from selfspec.training.measure import agreements, coverage
from selfspec.training.options import FitOptions

_HEAD_ROWS = 1024
"""Rows whose draft logits exist at a time; 34 MB for 8,192 of them. A step takes twice as long with
256 rows, and no less with 2,048 (2 cores, AVX512-bf16)."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Reported after each step."""

    step: int
    """From 1."""
    steps: int
    answer_tokens: int
    """Learned from in this step."""
    losses: dict[int, float]
    """By exit layer, in nats per answer token."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """What a fit gives."""

    heads: ExitHeads
    """In the model's dtype, ready to draft or to save."""
    metrics: dict[str, Any]
    """For `metrics.json`."""


def fit(
    backbone: Backbone,
    base_model: str,
    train: Sequence[Conversation],
    validation: Sequence[Conversation],
    options: FitOptions,
    *,
    special_ids: Iterable[int] = (),
    data: str = "",
    progress: Callable[[Progress], None] | None = None,
    watch: Stopwatch | None = None,
) -> Fitted:
    """Heads for all exit layers at once. `base_model` and `data` are names for the record.

    Raises InvalidOption for layers or sizes that do not fit the model, InvalidData for an empty
    text, SelfspecError when a loss is not finite.
    """
    if not train or not validation:
        raise InvalidData(f"{len(train)} conversations to fit, {len(validation)} to validate")
    watch = watch or Stopwatch()
    layers = exit_layers(backbone, options)
    draft_ids = _draft_ids(backbone, train, options, special_ids)
    source = FeatureSource(
        backbone,
        layers,
        train,
        options.batch_tokens,
        with_target=options.loss == "kl",
        keep=options.keep_features,
    )
    record = _record(train, options.epochs * len(source), options, data)
    config = _config(backbone, base_model, options, draft_ids, record)
    trainer = _Trainer(backbone, config, draft_ids, options)
    losses = trainer.run(source, options, watch, progress or _ignore)
    heads = trainer.finished()
    held_out = list(FeatureSource(backbone, layers, validation, options.batch_tokens).epoch())
    shares = agreements(heads, held_out)
    watch.lap("validation")
    by_layer = {layer: {"train_loss": losses[layer], **asdict(shares[layer])} for layer in layers}
    metrics = {
        "layers": {str(layer): values for layer, values in by_layer.items()},
        "coverage": coverage(heads, held_out),
        "train_answer_tokens": record["answer_tokens"],
        "steps": record["steps"],
        "seconds": {part: round(seconds, 1) for part, seconds in watch.seconds.items()},
    }
    return Fitted(heads=heads, metrics=metrics)


def exit_layers(backbone: Backbone, options: FitOptions) -> tuple[int, ...]:
    """Those asked for, or the default ones. Raises InvalidOption where the model has no such."""
    asked = options.exit_layers
    layers = default_exit_layers(backbone.num_layers) if asked is None else asked
    check_exit_layers(layers, range(1, backbone.num_layers))
    return layers


def default_exit_layers(num_layers: int) -> tuple[int, ...]:
    """Five, evenly over the first two thirds: later exits save little; fewer in a shallow model."""
    spread = {round(num_layers * k / 7.5) for k in range(1, 6)}
    return tuple(sorted(layer for layer in spread if 1 <= layer < num_layers))


class _Trainer:
    """Heads that learn, and the state of their optimiser."""

    def __init__(
        self,
        backbone: Backbone,
        config: HeadsConfig,
        draft_ids: Tensor | None,
        options: FitOptions,
    ) -> None:
        """Heads as they begin: the model's own norm, the identity or the model's LM head."""
        self._backbone = backbone
        self._draft_ids = draft_ids
        own = backbone.unembedding
        self._mixed = backbone.dtype == torch.bfloat16
        weight = own.weight if self._mixed else own.weight.float()
        torch.manual_seed(options.seed)  # a low-rank map begins with random numbers
        self._heads = ExitHeads(config, own._replace(weight=weight), draft_ids).float()
        own_head = LogitLensHead(own, draft_ids)
        self._targets: Targets = (
            kl_targets(own_head)
            if options.loss == "kl"
            else ce_targets(own_head, backbone.vocab_size)
        )
        self._max_grad_norm = options.max_grad_norm
        self._optimizer = torch.optim.AdamW(_groups(self._heads, options.weight_decay))
        for group in self._optimizer.param_groups:
            group["lr"] = options.learning_rate
        steps = config.training["steps"]
        warmup = round(steps * options.warmup)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: _rate(step, warmup, steps)
        )

    def run(
        self,
        source: FeatureSource,
        options: FitOptions,
        watch: Stopwatch,
        progress: Callable[[Progress], None],
    ) -> dict[int, float]:
        """All epochs. Gives the mean loss of the last one by exit layer, nats per answer token."""
        step, steps = 0, self._heads.config.training["steps"]
        sums = dict.fromkeys(self._heads.config.exit_layers, 0.0)
        for epoch in range(options.epochs):
            tokens, sums = 0, dict.fromkeys(sums, 0.0)
            watch.start()
            for features in source.epoch(options.seed + epoch):
                watch.lap("features")
                step, count = step + 1, len(features.following)
                losses = self._step(features, step)
                tokens += count
                sums = {layer: sums[layer] + losses[layer] * count for layer in sums}
                progress(Progress(step=step, steps=steps, answer_tokens=count, losses=losses))
                watch.lap("heads")
        return {layer: total / tokens for layer, total in sums.items()}

    def finished(self) -> ExitHeads:
        """The heads in the model's dtype, on the model's own unembedding, no longer learning."""
        heads = ExitHeads(self._heads.config, self._backbone.unembedding, self._draft_ids)
        heads.load_state_dict(self._heads.state_dict())
        return heads.eval().requires_grad_(False)

    def _step(self, features: Features, step: int) -> dict[int, float]:
        """One update of all heads; the loss of each, in nats per answer token."""
        targets = self._targets(features)
        losses = {}
        for layer, hidden in features.hidden.items():
            losses[layer] = self._backward(layer, hidden, targets)
            if not math.isfinite(losses[layer]):
                raise SelfspecError(
                    f"the loss is {losses[layer]} at batch {step}, exit layer {layer}. "
                    "Lower the learning rate, or check the model's weights"
                )
            nn.utils.clip_grad_norm_(self._heads[layer].parameters(), self._max_grad_norm)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        return losses

    def _backward(self, layer: int, hidden: Tensor, targets: Tensor) -> float:
        """Add the gradients of one head on [N, d]; its loss per answer token."""
        total = torch.zeros((), device=hidden.device)
        blocks = zip(hidden.split(_HEAD_ROWS), targets.split(_HEAD_ROWS), strict=True)
        for rows, wanted in blocks:
            with self._autocast(hidden.device):
                draft_logits = self._heads[layer](rows.float())
            loss = cross_entropy(draft_logits, wanted) / len(hidden)
            loss.backward()
            total += loss.detach()
        return float(total)

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Matrix products in bfloat16 where the model has them too: that is how heads will run."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self._mixed)


def _draft_ids(
    backbone: Backbone,
    train: Sequence[Conversation],
    options: FitOptions,
    special_ids: Iterable[int],
) -> Tensor | None:
    """Rising ids [V_draft], or None for all. Raises InvalidOption for more than the model has."""
    size = options.draft_vocab_size
    if size is None:
        return None
    if size > backbone.vocab_size:
        raise InvalidOption(
            f"draft_vocab_size is {size}, the model has {backbone.vocab_size} tokens"
        )
    device = backbone.unembedding.weight.device
    return draft_vocabulary(train, size, special_ids).to(device)


def _groups(heads: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weights decay, norms and biases do not."""
    parameters = [entry for entry in heads.parameters() if entry.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def _rate(step: int, warmup: int, steps: int) -> float:
    """Share of the highest learning rate before step `step`, from 0: a ramp, then a cosine to 0."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _config(
    backbone: Backbone,
    base_model: str,
    options: FitOptions,
    draft_ids: Tensor | None,
    record: dict[str, Any],
) -> HeadsConfig:
    return HeadsConfig(
        base_model=base_model,
        base_fingerprint=fingerprint(backbone.unembedding.weight),
        hidden_size=backbone.hidden_size,
        num_layers=backbone.num_layers,
        vocab_size=backbone.vocab_size,
        exit_layers=exit_layers(backbone, options),
        head_type=options.head_type,
        rank=options.rank,
        draft_vocab_size=None if draft_ids is None else len(draft_ids),
        training=record,
    )


def _record(
    train: Sequence[Conversation], steps: int, options: FitOptions, data: str
) -> dict[str, Any]:
    """The `training` entry of the heads' config."""
    return {
        "data": data,
        "conversations": len(train),
        "answer_tokens": sum(len(entry.answer_ids) for entry in train),
        "epochs": options.epochs,
        "steps": steps,
        "loss": options.loss,
        "learning_rate": options.learning_rate,
        "seed": options.seed,
        "versions": {name: metadata.version(name) for name in ("torch", "transformers")},
    }


def _ignore(_progress: Progress) -> None:
    """Nobody watches."""
