"""Messages and tools in bodies of requests, and what they are for a chat template."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator

from selfspec.errors import InvalidData
from selfspec.untrusted import parse_json

Truth = Annotated[bool, Strict()]
"""Of JSON: no text that reads like one, no number."""


class Shape(BaseModel):
    """An object of a body: what is not named is refused."""

    model_config = ConfigDict(extra="forbid")


class Text(Shape):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Called(Shape):
    """The function of an earlier call."""

    name: str
    arguments: str


class Call(Shape):
    """A call that an earlier answer made."""

    id: str
    type: Literal["function"]
    function: Called

    def as_part(self) -> dict[str, Any]:
        """For the chat template, which wants arguments as values."""
        arguments = self.function.arguments
        try:
            said = parse_json(arguments, "arguments")
        except InvalidData:
            said = arguments
        function = {"name": self.function.name, "arguments": said}
        return {"id": self.id, "type": self.type, "function": function}


class Message(Shape):
    """A turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Text] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    refusal: None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message without content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are of the assistant")
        return self

    @property
    def needs_tools(self) -> bool:
        """Whether only a chat template that knows tools can show it."""
        return self.role == "tool" or bool(self.tool_calls)

    def as_turn(self) -> dict[str, Any]:
        """For the chat template."""
        role = "system" if self.role == "developer" else self.role
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        turn: dict[str, Any] = {"role": role, "content": text}
        if self.tool_calls:
            turn["tool_calls"] = [call.as_part() for call in self.tool_calls]
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        return turn


class Function(Shape):
    """A function that may be called."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Truth | None = None


class Tool(Shape):
    """One of `tools`."""

    type: Literal["function"]
    function: Function


class Named(Shape):
    """The function of a choice."""

    name: str


class Chosen(Shape):
    """`tool_choice` for one function."""

    type: Literal["function"]
    function: Named
