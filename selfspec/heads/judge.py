"""Decides from draft logits whether a token leaves at this exit layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from selfspec.heads.confidence import top_probability


class ExitJudge:
    """Annealed confidence threshold, ACT (SpecBound section 2.2).

    `T_l = 1 + alpha (1 - l / L)`; `c_l = max softmax(z / T_l)`; exit at `c_l >= tau_l`. A
    calibrated temperature of the layer multiplies T_l; the paper has none, which is 1.
    """

    def __init__(
        self,
        num_layers: int,
        thresholds: Mapping[int, float],
        anneal_strength: float = 0.0,
        temperatures: Mapping[int, float] | None = None,
    ) -> None:
        """`thresholds` and `temperatures` by exit layer; `anneal_strength` is alpha."""
        self.thresholds = dict(thresholds)
        self._temperatures = {
            layer: (1.0 + anneal_strength * (1.0 - layer / num_layers))
            * (temperatures or {}).get(layer, 1.0)
            for layer in thresholds
        }

    def temperature(self, layer: int) -> float:
        """T_l of `layer`, calibration included."""
        return self._temperatures[layer]

    def confidence(self, logits: Tensor, layer: int) -> Tensor:
        """Draft logits [B, V_draft] of `layer` -> top-1 probability after annealing, [B]."""
        return top_probability(logits, self._temperatures[layer])

    def exits(self, confidence: float, layer: int) -> bool:
        """Whether this confidence is enough at `layer`."""
        return confidence >= self.thresholds[layer]


def spread(values: Sequence[float], layers: Sequence[int]) -> dict[int, float]:
    """One value for all `layers`, or one per layer, as a mapping by layer."""
    if len(values) == 1:
        return dict.fromkeys(layers, values[0])
    return dict(zip(layers, values, strict=True))
