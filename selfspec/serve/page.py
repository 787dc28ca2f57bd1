"""The page at `/`: a chat that shows who gave each token, in one file and by the public API."""

from __future__ import annotations

from typing import NamedTuple

from selfspec import pages

_HOME = "selfspec.serve"

_SCRIPTS = ("tokens.js", "figures.js", "api.js", "answer.js", "main.js")
"""In this order: one module in the page."""


class ChatPage(NamedTuple):
    """What a browser gets."""

    html: str
    headers: dict[str, str]


def chat_page() -> ChatPage:
    """It may run its own script and style alone, and talk to nobody but its server."""
    style, script = pages.style_of(_HOME, "chat.css"), pages.script_of(_HOME, *_SCRIPTS)
    html = pages.filled(pages.assets(_HOME, ["chat.html"]), {"style": style, "script": script})
    rules = ("connect-src 'self'", "frame-ancestors 'none'", "trusted-types 'none'")
    return ChatPage(
        html,
        {
            "Content-Security-Policy": pages.policy(
                script, style, *rules, "require-trusted-types-for 'script'"
            ),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        },
    )
