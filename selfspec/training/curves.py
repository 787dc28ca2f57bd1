"""The course of a fit as a picture: one entry per epoch and layer in, a PNG out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from io import BytesIO
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

FILE = "curves.png"


class Curve(NamedTuple):
    """One exit layer over the epochs."""

    layer: int
    epochs: list[int]
    train_loss: list[float]
    """Nats per answer token."""
    agreement: list[float]
    """Percent of held-out positions."""


def curves(entries: Sequence[dict[str, Any]]) -> list[Curve]:
    """By exit layer."""
    layers = sorted({entry["layer"] for entry in entries})
    by_layer = {layer: [e for e in entries if e["layer"] == layer] for layer in layers}
    return [
        Curve(
            layer,
            [entry["epoch"] for entry in found],
            [entry["train_loss"] for entry in found],
            [100 * entry["agreement"] for entry in found],
        )
        for layer, found in by_layer.items()
    ]


def picture(entries: Sequence[dict[str, Any]]) -> bytes | None:
    """Loss and agreement by epoch; without matplotlib a notice takes the picture's place."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no %s: it needs matplotlib (pip install 'selfspec[train]')", FILE)
        return None
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    loss, agreement = figure.subplots(1, 2)
    for curve in curves(entries):
        loss.plot(curve.epochs, curve.train_loss, marker="o", label=f"layer {curve.layer}")
        agreement.plot(curve.epochs, curve.agreement, marker="o")
    loss.set(xlabel="epoch", ylabel="training loss [nats per token]")
    agreement.set(xlabel="epoch", ylabel="agreement, held out [%]")
    for axes in (loss, agreement):
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside right center", frameon=False)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=120)
    return drawn.getvalue()
