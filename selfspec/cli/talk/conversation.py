"""A conversation: what was said so far, and the session that says more.

Questions come in, pieces of text with their givers go to who writes them. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec import files
from selfspec.cli import common
from selfspec.errors import InvalidData, InvalidPrompt
from selfspec.untrusted import read_json

if TYPE_CHECKING:
    from selfspec.api.speculator import Speculator
    from selfspec.api.stream import Generation

MADE_BY = "selfspec chat"

_ROLES = ("system", "user", "assistant")


class Conversation:
    """Turns of a user and a model."""

    def __init__(
        self, speculator: Speculator, options: dict[str, Any], system: str | None = None
    ) -> None:
        """`options` of each answer, as `generate` takes them."""
        self.speculator = speculator
        self.options = options
        self.messages = common.opening(system)
        self.tokens = 0
        """In the context, as far as the model has seen it."""
        self.last: Generation | None = None
        """The newest answer; None where it was taken back."""
        self._session = speculator.session()

    def ask(self, question: str, write: Callable[[str, str, int], None]) -> bool:
        """Answer a turn; False if Ctrl-C ended it. What was said stays; unsaid, there is no turn.

        Raises what `generate` raises.
        """
        asked = [*self.messages, {"role": "user", "content": question}]
        stream = self._session.stream(asked, **self.options)
        whole = True
        try:
            for piece in stream:
                write(piece, *stream.giver)
        except KeyboardInterrupt:
            stream.close()
            whole = False
        found = stream.result
        if said := found.text:
            self.messages = [*asked, {"role": "assistant", "content": said}]
            self.tokens = found.stats.prompt_tokens + found.stats.new_tokens
            self.last = found
        return whole

    def clear(self) -> None:
        """Start over; the system message stays."""
        self._replace([entry for entry in self.messages[:1] if entry["role"] == "system"])

    def undo(self) -> str | None:
        """Take back the newest question and its answer; returns the question."""
        places = [at for at, entry in enumerate(self.messages) if entry["role"] == "user"]
        if not places:
            return None
        question = self.messages[places[-1]]["content"]
        self._replace(self.messages[: places[-1]])
        return question

    def instruct(self, system: str) -> None:
        """Replace the system message."""
        rest = [entry for entry in self.messages if entry["role"] != "system"]
        self._replace([*common.opening(system), *rest])

    def save(self, path: Path) -> None:
        """Keep the conversation. Raises CannotWrite."""
        values = {
            "made_by": MADE_BY,
            "model": self.speculator.label,
            "messages": self.messages,
        }
        text = json.dumps(values, indent=2, ensure_ascii=False)
        files.write(files.check_file(path, overwrite=True), text + "\n")

    def load(self, path: Path) -> None:
        """Go on with one that was kept. Raises InvalidData."""
        values = read_json(path)
        messages = values.get("messages") if isinstance(values, dict) else None
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise InvalidData(f"{path} is no conversation. Give a file that /save wrote")
        self._replace([{name: entry[name] for name in ("role", "content")} for entry in messages])

    def _replace(self, messages: list[dict[str, str]]) -> None:
        self.messages, self.last, self.tokens = messages, None, 0
        tokenizer = self.speculator.tokenizer
        if tokenizer is not None and any(entry["role"] == "user" for entry in messages):
            from selfspec.api.text import encode

            with suppress(InvalidPrompt):
                self.tokens = encode(tokenizer, list(messages)).shape[1]


def _is_message(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.get("role") in _ROLES
        and isinstance(entry.get("content"), str)
    )
