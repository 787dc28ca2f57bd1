"""HTML pages in one file: what all of them share. Their look, words for elements, a strict policy.

A page is a template with a style and a script in it; it loads nothing. Called by
`visualise.page` and `serve.app`.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files

from selfspec.pages import palette


def assets(package: str, names: Sequence[str]) -> str:
    """Files of a package's folder `assets`, one behind the other."""
    folder = files(package) / "assets"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def style_of(package: str, *names: str) -> str:
    """Colours, the look of all pages, and a page's own."""
    return "\n".join((palette.as_css(), assets(__name__, ["look.css"]), assets(package, names)))


def script_of(package: str, *names: str) -> str:
    """One module: words for elements, and a page's own files in this order."""
    return "\n".join((assets(__name__, ["dom.js"]), assets(package, names)))


def policy(script: str, style: str, *more: str) -> str:
    """Nothing may be loaded from anywhere, and no script run but ours; `more`: directives."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            *more,
        )
    )


def filled(template: str, values: Mapping[str, str]) -> str:
    """In one go: a value that looks like a place to fill stays as it is."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
