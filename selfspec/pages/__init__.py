"""HTML pages in one file: what all of them share. Their look, words for elements, a strict policy.

A page is a template with a style and a script in it; it loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib.resources import files

from selfspec.pages import palette


def page(
    package: str, name: str, scripts: Sequence[str], *rules: str, **values: str
) -> tuple[str, str]:
    """`name`.html with `name`.css, with `scripts` as one module and with `values`; its policy.

    A value that looks like a place to fill stays as it is.
    """
    style = style_of(package, f"{name}.css")
    script = "\n".join((_asset(__name__, "dom.js"), *(_asset(package, one) for one in scripts)))
    values |= {"style": style, "script": script, "policy": policy(script, style, *rules)}
    template = _asset(package, f"{name}.html")
    html = re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)
    return html, values["policy"]


def style_of(package: str, name: str) -> str:
    """Colours, the look of all pages, and a page's own."""
    return "\n".join((palette.as_css(), _asset(__name__, "look.css"), _asset(package, name)))


def policy(script: str, style: str, *more: str) -> str:
    """Nothing may be loaded from anywhere, and no script run but ours; `more`: directives."""
    digests = (hashlib.sha256(text.encode("utf-8")).digest() for text in (script, style))
    scripts, styles = (f"'sha256-{base64.b64encode(one).decode('ascii')}'" for one in digests)
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {scripts}",
            f"style-src {styles}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            *more,
        )
    )


def _asset(package: str, name: str) -> str:
    return (files(package) / "assets" / name).read_text(encoding="utf-8")
