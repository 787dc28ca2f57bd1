"""Which conversation a request belongs to, so that one copy of the model gets all its turns."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from selfspec import untrusted
from selfspec.errors import InvalidData

NAME = "x-selfspec-copy"
"""Header of an answer: which copy wrote it."""

_BEGINNING = 256
"""Characters or ids of a prompt without messages that make its session."""


def session(body: bytes) -> str:
    """Which conversation a body belongs to: the same for all its turns; empty where it has none.

    All turns share the messages up to the first that a user wrote, or the beginning of a prompt.
    """
    try:
        found = untrusted.parse_json(body.decode(), "the body")
        beginning = _beginning(found) if isinstance(found, dict) else None
        words = json.dumps(beginning).encode()
    except (InvalidData, UnicodeError):
        return ""
    return hashlib.sha256(words).hexdigest() if beginning else ""


def _beginning(body: dict[str, Any]) -> Any:
    messages, prompt = body.get("messages"), body.get("prompt")
    if not isinstance(messages, list):
        return prompt[:_BEGINNING] if isinstance(prompt, str | list) else None
    users = (
        place
        for place, message in enumerate(messages)
        if isinstance(message, dict) and message.get("role") == "user"
    )
    return messages[: next(users, len(messages)) + 1]
