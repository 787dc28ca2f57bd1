"""Bodies of requests, as OpenAI has them, what they mean for `Speculator.call`, and refusals.

A field that is not here is refused by name, never ignored, unless its value asks for nothing.
Imports no torch: the process in front of several copies of the model reads this, too.
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from selfspec.config import GenerateOptions, check_request
from selfspec.errors import (
    InvalidData,
    InvalidOption,
    InvalidPrompt,
    ModelChanged,
    SelfspecError,
)
from selfspec.serve.options import ServeOptions
from selfspec.untrusted import parse_json

if TYPE_CHECKING:
    from selfspec.api.text import Prompt

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

Truth = Annotated[bool, Strict()]
Whole = Annotated[int, Strict()]
Real = Annotated[float, Strict()]
"""Of JSON: no text that reads like one, no truth for a number."""

Penalty = Annotated[Real, Field(ge=-2, le=2)]
Bias = Annotated[Real, Field(ge=-100, le=100)]
Count = Annotated[Whole, Field(ge=1)]
Likely = Annotated[Whole, Field(ge=0, le=MOST_LIKELY)]
TokenName = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
"""The id of a token; keys of JSON are text."""

Stop = Annotated[str, Field(max_length=64)]
Setting = Annotated[str, Field(max_length=256)]

T = TypeVar("T")
Some = Annotated[list[T], Field(min_length=1)]

Tools = Sequence[dict[str, Any]]
"""As OpenAI has them: `{"type": "function", "function": {"name": .., "parameters": ..}}`."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One text to write."""

    prompt: Prompt
    options: GenerateOptions
    tools: Tools = ()
    """That it may call."""
    must_call: bool = False
    explain: bool = False
    """Whether to say who gave each token."""
    needs_tools: str | None = None
    """The field that only a chat template which knows tools can honour."""

    @property
    def has_grammar(self) -> bool:
        """Whether not every text would do."""
        return self.must_call or "json_schema" in self.options or "grammar" in self.options


class Shape(BaseModel):
    """An object of a body: what is not named is refused."""

    model_config = ConfigDict(extra="forbid")


class Text(Shape):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Named(Shape):
    """The function of a choice."""

    name: str


class Called(Named):
    """The function of an earlier call."""

    arguments: str


class Call(Shape):
    """A call that an earlier answer made."""

    id: str
    type: Literal["function"]
    function: Called

    def as_part(self) -> dict[str, Any]:
        """For the chat template, which wants arguments as values."""
        arguments: Any = self.function.arguments
        with contextlib.suppress(InvalidData):  # then it stays text
            arguments = parse_json(arguments, "arguments")
        function = {"name": self.function.name, "arguments": arguments}
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


class Chosen(Shape):
    """`tool_choice` for one function."""

    type: Literal["function"]
    function: Named


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
    """Say who gave each token; see `Explanation`."""

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

    field: ClassVar[str]
    """Where the prompt stands."""

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
    max_tokens: Count | None = None
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

    def choices(self, limits: ServeOptions, room: int) -> list[Choice]:
        """The texts to write; none gets longer than `room` tokens."""
        raise NotImplementedError

    def _choices(self, prompts: Sequence[Prompt], options: Any, **more: Any) -> list[Choice]:
        """`n` of each prompt; `options`: those of all, for `generate`."""
        more["explain"] = isinstance(self.speculation, Speculation) and self.speculation.explain
        options |= self._drawing() | self._shaping()
        if isinstance(self.speculation, bool):
            options["speculate"] = self.speculation
        elif self.speculation is not None:
            options |= self.speculation.model_dump(exclude_none=True, exclude={"explain"})
        found = []
        for prompt, number in itertools.product(prompts, range(self.n)):
            own: Any = {**options, "raw": isinstance(prompt, str)}
            if options["do_sample"] and self.seed is not None:
                own["seed"] = (self.seed + number) % 2**64
            found.append(Choice(prompt=prompt, options=own, **more))
        return found

    def _drawing(self) -> dict[str, Any]:
        """How tokens are drawn."""
        if self.temperature == 0:
            return {"do_sample": False}
        names = {"temperature", "top_p", "top_k", "min_p"}
        return {"do_sample": True, **self.model_dump(include=names)}

    def _shaping(self) -> dict[str, Any]:
        """What moves scores, rules tokens out, or ends the text."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        found = {
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "sequence_bias": [[[int(k)], v] for k, v in (self.logit_bias or {}).items()],
            "json_schema": self.response_format and self.response_format.wanted,
            "stop_strings": [stop for stop in stops if stop],
        }
        return {name: value for name, value in found.items() if value not in (None, 0, [])}


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    field: ClassVar[str] = "messages"

    messages: Some[Message]
    max_completion_tokens: Count | None = None
    logprobs: Truth = False
    top_logprobs: Likely | None = None
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
        if self._must_call and self.response_format is not None and self.response_format.wanted:
            raise ValueError("response_format beside a tool that must be called")
        return self

    @property
    def _must_call(self) -> bool:
        return isinstance(self.tool_choice, Chosen) or self.tool_choice == "required"

    def choices(self, limits: ServeOptions, room: int) -> list[Choice]:
        """Of one prompt; of two names for a length, the newer one wins."""
        longest = self.max_completion_tokens or self.max_tokens or limits.max_tokens
        options = {"max_new_tokens": min(longest, room), "max_time": limits.timeout}
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        if isinstance(self.tool_choice, Chosen):
            name = self.tool_choice.function.name
            tools = [tool for tool in tools if tool["function"]["name"] == name]
        elif self.tool_choice == "none":
            tools = []
        shown = any(message.role == "tool" or message.tool_calls for message in self.messages)
        return self._choices(
            [[message.as_turn() for message in self.messages]],
            options,
            tools=tools,
            must_call=self._must_call,
            needs_tools="tools" if tools else "messages" if shown else None,
        )


class TextBody(Body):
    """`POST /v1/completions`: text that goes on, without a chat template."""

    field: ClassVar[str] = "prompt"

    prompt: str | Some[str] | Some[Whole] | Some[list[Whole]]
    max_tokens: Count | None = 16
    logprobs: Likely | None = None

    def choices(self, limits: ServeOptions, room: int) -> list[Choice]:
        """Of one prompt, or several."""
        longest = min(self.max_tokens or limits.max_tokens, room)
        options = {"max_new_tokens": longest, "max_time": limits.timeout}
        if self.logprobs is not None:
            options["logprobs"] = self.logprobs
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts: Any = [self.prompt] if one else self.prompt
        return self._choices(prompts, options)


class Refused(Exception):
    """A request that gets an error in place of an answer, in the shape of OpenAI's clients."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """`field`: what of the request is wrong."""
        super().__init__(message)
        self.status, self.field, self.code, self.headers = status, field, code, headers

    def body(self) -> dict[str, Any]:
        """`{"error": {...}}`."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        said = {"message": str(self), "type": kind, "param": self.field, "code": self.code}
        return {"error": said}


_FIELDS = {
    "json_schema": "response_format",
    "grammar": "tools",
    "SequenceBiasLogitsProcessor": "logit_bias",
}
"""Fields of a request, by what the runtime calls them at the beginning of an error."""


def of_error(error: BaseException, field: str = "") -> Refused:
    """For what a request made the model raise; `field` is where its prompt stands."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, InvalidPrompt):
        return Refused(400, str(error), field=field)
    if isinstance(error, InvalidOption):
        name, _, rest = str(error).partition(" ")
        if name not in _FIELDS:
            return Refused(400, str(error))
        return Refused(400, f"{_FIELDS[name]} {rest}", field=_FIELDS[name])
    if isinstance(error, SelfspecError):
        return Refused(503 if isinstance(error, ModelChanged) else 500, str(error))
    return Refused(500, "the answer failed by a fault of the server. Its log says more")


def of_validation(error: ValidationError) -> Refused:
    """What a body has wrong: of several, the one that is furthest inside it."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    found = max(errors, key=lambda one: len(one["loc"]))
    said = found["msg"].removeprefix("Value error, ")
    field = ""  # messages[0].content; names of types, which pydantic puts in between, are left out
    for place in found["loc"]:
        if isinstance(place, int):
            field += f"[{place}]"
        elif place.isidentifier() and place not in _TYPES:
            field += f".{place}" if field else place
    message = {
        "extra_forbidden": f"{field} is not supported here. Leave it out",
        "missing": f"{field} is missing",
    }.get(found["type"], f"{field or 'the body'} is wrong: {said}")
    return Refused(400, message, field=field or None)


_TYPES = {"str", "bool", "int", "float", "list", "dict", "Text", "Speculation", "Chosen"}


def places(error: BaseException) -> str:
    """An error's kind and the lines of code it came through, those of its causes first.

    Without what it says: its message may hold what somebody wrote.
    """
    before = error.__cause__ or error.__context__
    lines = [places(before), "\nwhich led to\n"] if before is not None else []
    lines += traceback.format_tb(error.__traceback__)
    return "".join(lines) + type(error).__name__
