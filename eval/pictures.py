"""Pictures for the docs, made small. Called by `gallery` and `page_pictures`."""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo


def small(picture: Path) -> None:
    """With 256 colours: of paper and words that is enough."""
    with Image.open(picture) as found:
        made = found.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    note = PngInfo()
    note.add_text("Software", "selfspec")  # else the next run would not replace it
    made.save(picture, optimize=True, pnginfo=note)
