"""Calls of functions: what a chat template writes about them, and how an answer says one.

Comes in: `tools` and `tool_choice` of a request, and the model's template. Goes out: a grammar for
an answer that has to be a call, and calls found in the text of one that may be.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec.api.text import begun
from selfspec.errors import InvalidData
from selfspec.untrusted import parse_json

Tool = dict[str, Any]
"""As OpenAI has it: `{"type": "function", "function": {"name": .., "parameters": ..}}`."""


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes a call: JSON between two texts."""

    before: str
    after: str
    arguments: str
    """The key of the arguments beside `name`."""

    def grammar(self, tools: Sequence[Tool]) -> str:
        """Lark for one call of one of these."""
        schema = json.dumps({"anyOf": [self._schema(tool["function"]) for tool in tools]})
        around = [json.dumps(text) for text in (self.before, self.after)]
        before, after = (text if text != '""' else "" for text in around)
        return f"start: {before} call {after}\ncall: %json {schema}\n"

    def calls(self, text: str, names: Collection[str]) -> tuple[str, list[dict[str, Any]]]:
        """The text in front of calls of `names`, and these; what only looks like one stays text."""
        before, after = self.before.strip(), self.after.strip()
        front, *parts = text.split(before) if before else ("", text)
        found = [self._call(part.split(after)[0] if after else part) for part in parts]
        calls = [call for call in found if call is not None and call["function"]["name"] in names]
        if not calls or len(calls) < len(found):
            return text, []
        return front.rstrip(), calls

    def _schema(self, function: dict[str, Any]) -> dict[str, Any]:
        arguments = function.get("parameters") or {"type": "object", "properties": {}}
        return {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, self.arguments: arguments},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }

    def _call(self, text: str) -> dict[str, Any] | None:
        """One call in OpenAI's shape."""
        try:
            said = parse_json(text.strip(), "a call")
        except InvalidData:
            return None
        if not isinstance(said, dict) or not isinstance(said.get("name"), str):
            return None
        arguments = said.get(self.arguments)
        if not isinstance(arguments, dict):
            return None
        function = {"name": said["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


class Calls:
    """Text of an answer that may call: what is sure to be no call goes on, the rest waits."""

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        """`names`: of the functions that may be called."""
        self._form, self._names = form, names
        self._text = ""
        self._given = 0

    def push(self, text: str) -> str:
        """What may be shown."""
        self._text += text
        shown = self._text[self._given : self._sure()]
        self._given += len(shown)
        return shown

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """What is left to be shown, and the calls."""
        _, calls = self._form.calls(self._text, self._names)
        return ("", calls) if calls else (self._text[self._given :], [])

    def _sure(self) -> int:
        """Characters that come before any call."""
        mark = self._form.before.strip()
        if mark:
            at = self._text.find(mark)
            return at if at >= 0 else len(self._text) - begun(self._text, mark)
        said = self._text.lstrip()
        return 0 if not said or said.startswith("{") else len(self._text)


TAGGED = ToolFormat("<tool_call>\n", "\n</tool_call>", "arguments")
"""Of Hermes, Qwen, SmolLM3."""

BARE = ToolFormat("", "", "parameters")
"""Of Llama from 3.1 on."""


def format_of(tokenizer: PreTrainedTokenizerBase | None) -> ToolFormat | None:
    """What a chat template asks the model for; None: it knows no tools, or in another way."""
    if tokenizer is None or tokenizer.chat_template is None:
        return None
    template = tokenizer.get_chat_template(tools=[{}])
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        return TAGGED
    if '"parameters"' in template and '"name"' in template:
        return BARE
    return None
