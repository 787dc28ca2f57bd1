"""Bodies of requests, as OpenAI has them, and what they mean for `Speculator.call`.

A field that is not here is refused by name, never ignored, unless its value asks for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, Strict, ValidationInfo, field_validator, model_validator

from selfspec.api.text import Prompt
from selfspec.config import GenerateOptions, check_request
from selfspec.errors import InvalidOption
from selfspec.serve.messages import Chosen, Message, Shape, Tool, Truth

_NOTHING: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
}
"""Values of fields that are not supported, which ask for nothing."""

MOST_CHOICES = 128

MOST_LIKELY = 20
"""Likely tokens beside each."""

Whole = Annotated[int, Strict()]
Real = Annotated[float, Strict()]
"""Of JSON: no text that reads like one, no truth for a number."""

Penalty = Annotated[Real, Field(ge=-2, le=2)]
Bias = Annotated[Real, Field(ge=-100, le=100)]
TokenName = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
"""The id of a token; keys of JSON are text."""

Stop = Annotated[str, Field(max_length=64)]
Setting = Annotated[str, Field(max_length=256)]

T = TypeVar("T")
Some = Annotated[list[T], Field(min_length=1)]


class Schema(Shape):
    """A JSON schema, with what OpenAI puts around it."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: Truth | None = None


class ResponseFormat(Shape):
    """Any text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    @model_validator(mode="after")
    def _fits(self) -> ResponseFormat:
        if (self.type == "json_schema") is not (self.json_schema is not None):
            raise ValueError('type "json_schema" and json_schema go together')
        return self

    @property
    def wanted(self) -> dict[str, Any] | bool | None:
        """`json_schema` of `generate`."""
        if self.json_schema is not None and self.json_schema.schema_ is not None:
            return self.json_schema.schema_
        return None if self.type == "text" else True


class StreamOptions(Shape):
    """What a stream has besides the text."""

    include_usage: Truth = False


class Speculation(Shape):
    """Drafts of one request; whatever they are, the text is the same."""

    drafter: Setting | None = None
    controller: Setting | None = None
    never_slower: Truth | None = None
    explain: Truth = False
    """Say who gave each token; see `explain`."""

    @field_validator("drafter", "controller")
    @classmethod
    def _is_small(cls, said: str | None, info: ValidationInfo) -> str | None:
        try:
            check_request({str(info.field_name): said})
        except InvalidOption as error:
            raise ValueError(str(error)) from error
        return said


class Body(Shape):
    """What all requests have."""

    model: str | None = None
    stream: Truth = False
    stream_options: StreamOptions | None = None
    n: Annotated[Whole, Field(ge=1, le=MOST_CHOICES)] = 1
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**64)] | None = None
    temperature: Annotated[Real, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Real, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[Whole, Field(ge=0)] = 0
    min_p: Annotated[Real, Field(ge=0, le=1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[TokenName, Bias], Field(max_length=1024)] | None = None
    response_format: ResponseFormat | None = None
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
    def alternatives(self) -> int | None:
        """Likely tokens to say beside each; None: no likelihoods at all."""
        return None

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
        found |= self._sampling(number) | self._shaping()
        if self.stops:
            found["stop_strings"] = self.stops
        if self.alternatives is not None:
            found["logprobs"] = self.alternatives
        if isinstance(self.speculation, bool):
            found["speculate"] = self.speculation
        elif self.speculation is not None:
            found |= self.speculation.model_dump(exclude_none=True, exclude={"explain"})
        return found  # type: ignore[return-value]  # keys of it

    def _sampling(self, number: int) -> dict[str, Any]:
        """How tokens are drawn."""
        if self.temperature == 0:
            return {"do_sample": False}
        found = {"temperature": self.temperature, "top_p": self.top_p, "min_p": self.min_p}
        seed = {} if self.seed is None else {"seed": (self.seed + number) % 2**64}
        return {"do_sample": True, "top_k": self.top_k, **found, **seed}

    def _shaping(self) -> dict[str, Any]:
        """What moves scores, or rules tokens out."""
        found: dict[str, Any] = {
            name: value
            for name in ("presence_penalty", "frequency_penalty")
            if (value := getattr(self, name))
        }
        if self.logit_bias:
            found["sequence_bias"] = [[[int(k)], v] for k, v in self.logit_bias.items()]
        if self.response_format is not None and self.response_format.wanted is not None:
            found["json_schema"] = self.response_format.wanted
        return found


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    messages: Some[Message]
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: Truth = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=MOST_LIKELY)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Chosen | None = None
    parallel_tool_calls: Truth = True

    @model_validator(mode="after")
    def _fits(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs without logprobs. Set logprobs to true")
        names = [tool.function.name for tool in self.tools or ()]
        if len({*names}) < len(names):
            raise ValueError("two tools have one name")
        choice = self.tool_choice
        if choice not in (None, "none", "auto") and not names:
            raise ValueError("tool_choice without tools")
        if isinstance(choice, Chosen) and choice.function.name not in names:
            raise ValueError(f"tool_choice names {choice.function.name}, which is no tool")
        if self.must_call and self.response_format is not None and self.response_format.wanted:
            raise ValueError("response_format beside a tool that must be called")
        return self

    @property
    def alternatives(self) -> int | None:
        """As asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def needs_tools(self) -> str | None:
        """The field that only a chat template which knows tools can honour."""
        if self.tools and self.tool_choice != "none":
            return "tools"
        return "messages" if any(message.needs_tools for message in self.messages) else None

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        return isinstance(self.tool_choice, Chosen) or self.tool_choice == "required"

    @property
    def callable(self) -> list[dict[str, Any]]:
        """Tools that the answer may call, as the chat template takes them."""
        if self.tool_choice == "none":
            return []
        only = self.tool_choice.function.name if isinstance(self.tool_choice, Chosen) else None
        found = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        return [tool for tool in found if only in (None, tool["function"]["name"])]

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
    logprobs: Annotated[Whole, Field(ge=0, le=MOST_LIKELY)] | None = None

    @property
    def alternatives(self) -> int | None:
        """As asked for."""
        return self.logprobs

    @property
    def prompts(self) -> list[Prompt]:
        """One, or several."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]  # as above
