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
    from selfspec.api.speculator import Session, Speculator, custom_generate, load, wrap
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
    "custom_generate",
    "load",
    "wrap",
]

_SPECULATOR = ("Session", "Speculator", "custom_generate", "load", "wrap")
_HOMES = {
    **dict.fromkeys(_SPECULATOR, "api.speculator"),
    **dict.fromkeys(("Generation", "Stream"), "api.stream"),
    "GenerationStats": "decoding.stats",
    "adapt": "adaptation",
}
"""Names that need torch, and the modules that define them."""


def __getattr__(name: str) -> Any:
    """Import on first use, so that `selfspec --help` does not wait for torch (PEP 562)."""
    if name == "__version__":
        return metadata.version("selfspec")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
