"""Heads that learn: features of one step come in, losses go out. Called by `fit`.

All exit layers learn from the same features, each head on its own loss. Heads are float32 while
they learn; what is measured and saved is their copy in the model's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from selfspec.errors import SelfspecError
from selfspec.heads.attending import AttendingConfig, AttendingHeads
from selfspec.heads.exit_heads import ExitHeads, HeadsConfig
from selfspec.heads.heads import ExitHead
from selfspec.hub.models import fast_products
from selfspec.model.backbone import Backbone
from selfspec.model.parts import Unembedding
from selfspec.training import checkpoint
from selfspec.training.features import Features, Processes
from selfspec.training.losses import Targets, cross_entropy, draft_index, targets
from selfspec.training.measure import unrolled
from selfspec.training.options import FitOptions

_HEAD_ROWS = 1024
"""Rows whose draft logits exist at a time; 34 MB for 8,192 of them. A step takes twice as long with
256 rows, and no less with 2,048 (2 cores, AVX512-bf16)."""


class Trainer:
    """Heads, their optimiser and its schedule."""

    def __init__(
        self,
        backbone: Backbone,
        config: HeadsConfig,
        draft_ids: Tensor | None,
        options: FitOptions,
        steps: int,
        processes: Processes,
        answer_weights: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """Heads as they begin, for `steps` steps in all; weights of positions as `targets` has."""
        self._answer_weights = answer_weights
        self._backbone = backbone
        self._options = options
        self._processes = processes
        self._steps = steps
        own = backbone.unembedding
        device = own.weight.device
        self._mixed = backbone.dtype == torch.bfloat16 and fast_products(torch.bfloat16, device)
        weight = own.weight if self._mixed else own.weight.float()
        torch.manual_seed(options.seed)  # inner layers begin with random numbers
        self.heads = _fresh(config, own._replace(weight=weight), draft_ids).float()
        self._index = draft_index(draft_ids, backbone.vocab_size).to(own.weight.device)
        self._optimizer = torch.optim.AdamW(_groups(self.heads, options.weight_decay))

    def step(self, number: int, batches: Sequence[Features], positions: int) -> dict[int, float]:
        """Step `number`, from 0, on this process's part of `positions` positions.

        Gives the loss by exit layer, nats per position, over all processes. Raises
        SelfspecError, with the weights as they were, when one is not finite.
        """
        totals = dict.fromkeys(self.heads.config.exit_layers, 0.0)
        for batch in batches:
            wanted = targets(batch, self._index, self._options.ce_share, self._answer_weights)
            for layer in totals:
                totals[layer] += self._backward(layer, batch, wanted, positions)
        losses = self._processes.total(totals)
        for layer, loss in losses.items():
            parameters = list(self.heads.part(layer).parameters())
            self._processes.add_up(parameters)
            norm = nn.utils.clip_grad_norm_(parameters, self._options.max_grad_norm)
            if not (math.isfinite(loss) and bool(norm.isfinite())):
                raise SelfspecError(
                    f"the loss is {loss} with a gradient of {float(norm)} at step {number + 1}, "
                    f"exit layer {layer}. Lower the learning rate, or check the model's weights"
                )
        for group in self._optimizer.param_groups:
            group["lr"] = self._options.learning_rate * self._rate(number)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return losses

    def finished(self) -> ExitHeads:
        """A copy in the model's dtype, on the model's own unembedding, no longer learning."""
        return self.heads.twin(self._backbone.unembedding)

    def tensors(self) -> dict[str, Tensor]:
        """All that `restore` needs."""
        named = {f"heads.{k}": t.detach() for k, t in self.heads.named_parameters()}
        return named | checkpoint.optimizer_tensors(self._optimizer, self.heads)

    def expected_tensors(self, step: int) -> dict[str, Tensor]:
        """What `tensors` gives after `step` steps, by name; only the shapes are right."""
        named = {f"heads.{k}": t.detach() for k, t in self.heads.named_parameters()}
        return named | (checkpoint.moments(self.heads) if step else {})

    def restore(self, tensors: dict[str, Tensor], step: int) -> None:
        """Go back to where `tensors` were taken, after `step` steps."""
        with torch.no_grad():
            for name, parameter in self.heads.named_parameters():
                parameter.copy_(tensors[f"heads.{name}"])
        if step:
            checkpoint.restore_optimizer(self._optimizer, self.heads, tensors, step)

    def _backward(self, layer: int, batch: Features, wanted: Targets, positions: int) -> float:
        """Add the gradients of one exit layer's drafts; the first's part of the loss per position.

        Draft logits exist for some rows at a time: each piece goes back as far as the features.
        """
        head = cast("ExitHead", self.heads.by_layer[str(layer)])
        floats = {layer: hidden.float() for layer, hidden in batch.hidden.items()}
        deep = None if batch.deep is None else batch.deep.float()
        batch = replace(batch, hidden=floats, deep=deep)
        with self._autocast(batch.following.device):
            drafts = list(unrolled(self.heads, layer, batch, self._options.draft_steps))
        weight, first, gradients = 1.0 / positions, 0.0, []
        for features, valid in drafts:
            leaf, losses = features.detach().requires_grad_(), []
            chosen = wanted.where(valid)
            for start in range(0, len(batch), _HEAD_ROWS):
                rows = slice(start, start + _HEAD_ROWS)
                with self._autocast(batch.following.device):
                    loss = cross_entropy(head.unembed(leaf[rows]), chosen.rows(rows))
                (loss * weight).backward()
                losses.append(loss.detach())
            gradients.append(leaf.grad)
            first = first or float(torch.stack(losses).sum()) / positions
            weight *= self._options.step_decay
        torch.autograd.backward([features for features, _ in drafts], gradients)
        return first

    def _rate(self, step: int) -> float:
        """Share of the highest learning rate at `step`, from 0: a ramp, then a cosine to 0."""
        warmup = round(self._steps * self._options.warmup)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, self._steps - warmup)))

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Matrix products in bfloat16 where the model has them too: that is how heads will run."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self._mixed)


def _fresh(config: HeadsConfig, unembedding: Unembedding, draft_ids: Tensor | None) -> ExitHeads:
    """Heads that have not learnt yet."""
    if isinstance(config, AttendingConfig):
        return AttendingHeads.fresh(config, unembedding, draft_ids)
    return ExitHeads(config, unembedding, draft_ids)


def _groups(heads: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weights decay, norms and biases do not."""
    parameters = [entry for entry in heads.parameters() if entry.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
