"""Bodies of requests, as OpenAI has them, and what they mean for `Speculator.call`.

A field that is not here is refused by name, never ignored, unless its value asks for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator

from selfspec.api.text import Prompt
from selfspec.config import GenerateOptions

_NOTHING: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
}
"""Values of fields that are not supported, which ask for nothing."""

MOST_CHOICES = 128

Truth = Annotated[bool, Strict()]
Whole = Annotated[int, Strict()]
Real = Annotated[float, Strict()]
"""Of JSON: no text that reads like one, no truth for a number."""

Stop = Annotated[str, Field(max_length=128)]

T = TypeVar("T")
Some = Annotated[list[T], Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Text(_Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """A turn."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Text]
    name: str | None = None

    def as_turn(self) -> dict[str, str]:
        """For the chat template."""
        role = "system" if self.role == "developer" else self.role
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": role, "content": text}


class StreamOptions(_Strict):
    """What a stream has besides the text."""

    include_usage: Truth = False


class Speculation(_Strict):
    """Drafts of one request; whatever they are, the text is the same."""

    drafter: str | None = None
    controller: str | None = None
    never_slower: Truth | None = None
    explain: Truth = False
    """Say who gave each token; see `explain`."""


class Body(_Strict):
    """What all requests have."""

    model: str | None = None
    stream: Truth = False
    stream_options: StreamOptions | None = None
    n: Annotated[Whole, Field(ge=1, le=MOST_CHOICES)] = 1
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**64)] | None = None
    temperature: Annotated[Real, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Real, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[Whole, Field(ge=0)] = 0
    min_p: Annotated[Real, Field(ge=0, le=1)] = 0.0
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    speculation: Truth | Speculation | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, body: Any) -> Any:
        """Without fields that are null, or ask for nothing."""
        if not isinstance(body, dict):
            return body
        return {
            name: value
            for name, value in body.items()
            if value is not None and not (name in _NOTHING and value in _NOTHING[name])
        }

    @property
    def longest(self) -> int | None:
        """Tokens of an answer at most, if the request says."""
        return self.max_tokens

    @property
    def stops(self) -> list[str]:
        """Texts that end an answer, and are not part of it."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    @property
    def explains(self) -> bool:
        """Whether answers say who gave each token."""
        return isinstance(self.speculation, Speculation) and self.speculation.explain

    def options(self, number: int, longest: int, seconds: float) -> GenerateOptions:
        """Keywords of `generate` for choice `number`."""
        found: dict[str, Any] = {"max_new_tokens": longest, "max_time": seconds}
        if self.temperature == 0:
            found |= {"do_sample": False}
        else:
            sampling = {"temperature": self.temperature, "top_p": self.top_p, "min_p": self.min_p}
            found |= {"do_sample": True, "top_k": self.top_k, **sampling}
            if self.seed is not None:
                found["seed"] = (self.seed + number) % 2**64
        if self.stops:
            found["stop_strings"] = self.stops
        if isinstance(self.speculation, bool):
            found["speculate"] = self.speculation
        elif self.speculation is not None:
            found |= self.speculation.model_dump(exclude_none=True, exclude={"explain"})
        return found  # type: ignore[return-value]  # keys of it


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    messages: Some[Message]
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None

    @property
    def longest(self) -> int | None:
        """The newer name wins."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def prompts(self) -> list[Prompt]:
        """One."""
        return [[message.as_turn() for message in self.messages]]


class TextBody(Body):
    """`POST /v1/completions`: text that goes on, without a chat template."""

    prompt: str | Some[str] | Some[Whole] | Some[list[Whole]]
    max_tokens: Annotated[Whole, Field(ge=1)] | None = 16

    @property
    def prompts(self) -> list[Prompt]:
        """One, or several."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]  # as above
