"""Faster generation from a frozen Hugging Face decoder: same output, no second model.

`load` or `wrap` a model, then `generate`, `stream` or `session`.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from selfspec.config import GenerateOptions, SpeculationOptions
from selfspec.errors import SelfspecError

if TYPE_CHECKING:
    from selfspec.adaptation import adapt
    from selfspec.api.speculator import Session, Speculator, load, wrap
    from selfspec.api.stream import Generation, Stream
    from selfspec.decoding.stats import GenerationStats

__all__ = [
    "GenerateOptions",
    "Generation",
    "GenerationStats",
    "SelfspecError",
    "Session",
    "SpeculationOptions",
    "Speculator",
    "Stream",
    "adapt",
    "load",
    "wrap",
]

_HOMES = {
    "Generation": "api.stream",
    "GenerationStats": "decoding.stats",
    "Session": "api.speculator",
    "Speculator": "api.speculator",
    "Stream": "api.stream",
    "adapt": "adaptation",
    "load": "api.speculator",
    "wrap": "api.speculator",
}
"""Names that need torch, and the modules they live in."""


def __getattr__(name: str) -> Any:
    """Import on first use, so that `selfspec --help` need not wait for torch (PEP 562)."""
    if name == "__version__":
        return metadata.version("selfspec")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
