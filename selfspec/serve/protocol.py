"""Request bodies in OpenAI's format, their options for `Speculator.call`, and error responses.

A field that is not listed here is refused by name, never ignored, unless its value has no effect.
Imports no torch: the front process of several copies of the model imports this module, too.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
from pydantic import BeforeValidator, Field, StrictBool, StrictFloat, StrictInt

from selfspec import errors
from selfspec.config import GenerateOptions, check_request
from selfspec.files import parse_json
from selfspec.serve.options import ServeOptions

if TYPE_CHECKING:
    from selfspec.api.text import Prompt

_NOTHING: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("echo", "include_obfuscation", "continuous_usage_stats"), (False,)),
    **dict.fromkeys(("ignore_eos", "use_beam_search", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("typical_p", "tfs_z"), (1,)),
    **dict.fromkeys(("mirostat", "top_a", "min_tokens", "priority"), (0,)),
    **dict.fromkeys(("tools", "functions", "annotations"), ([],)),
    **dict.fromkeys(("suffix", "reasoning", "reasoning_content"), ("",)),
    **dict.fromkeys(("function_call", "reasoning_effort"), ("none",)),
    "top_k": (-1,),
    "chat_template_kwargs": ({},),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
}
"""Values without effect, of fields that are not supported: these are accepted."""
_UNUSED = ("cache_control", "prompt_cache_key", "prompt_cache_retention", "store")

Penalty = Annotated[StrictFloat, Field(ge=-2, le=2)]
Bias = Annotated[StrictFloat, Field(ge=-100, le=100)]
Count = Annotated[StrictInt, Field(ge=1)]
Likely = Annotated[StrictInt, Field(ge=0, le=20)]
TokenName = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]  # an id; keys of JSON are text
Stop = Annotated[str, Field(max_length=64)]
Stops = Annotated[
    list[Stop],
    Field(max_length=16),  # OpenAI takes 4, but some clients send more to other servers
    BeforeValidator(lambda stops: [stops] if isinstance(stops, str) else stops),
]
Setting = Annotated[str, Field(max_length=256)]

T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]  # reports one error, not a million
Some = Annotated[Many[T], Field(min_length=1)]

Tools = Sequence[dict[str, Any]]
"""Tools in OpenAI's format: `{"type": "function", "function": {"name": .., "parameters": ..}}`."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One text to generate."""

    prompt: Prompt
    options: GenerateOptions
    stops: Sequence[str] = ()  # texts that end the answer and are not part of it
    tools: Tools = ()  # that the model may call
    must_call: bool = False
    explain: bool = False  # whether to say who gave each token
    tools_field: str | None = None  # the field that only a chat template with tools can honour
    most_calls: int | None = None


def _check_size(entries: Any) -> Any:
    """Raise ValueError for too many entries: an error for each of them would take seconds."""
    if isinstance(entries, dict) and len(entries) > 1024:
        raise ValueError("more than 1024 entries")
    return entries


class _Shape(pydantic.BaseModel):
    """An object in a body: an unknown field is refused, unless its value has no effect."""

    model_config = pydantic.ConfigDict(extra="forbid")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, body: Any) -> Any:
        if not isinstance(_check_size(body), dict):
            return body
        return {
            name: value
            for name, value in body.items()
            if name not in _UNUSED and value not in (None, *_NOTHING.get(name, ()))
        }


class _Text(_Shape):
    type: Literal["text"]
    text: str


class _Named(_Shape):
    name: str


class _Called(_Named):
    arguments: str


class _Call(_Shape):
    id: str
    type: Literal["function"]
    function: _Called
    index: StrictInt | None = None  # from clients that send back a streamed call

    def as_part(self) -> dict[str, Any]:
        """The call for a chat template, which expects arguments as values, not as JSON text."""
        part = self.model_dump(exclude={"index"})
        with contextlib.suppress(errors.InvalidData):  # invalid JSON stays text
            part["function"]["arguments"] = parse_json(self.function.arguments, "arguments")
        return part


class _Message(_Shape):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[_Text] | None = None
    name: str | None = None
    tool_calls: Many[_Call] | None = None
    tool_call_id: str | None = None
    refusal: None = None

    @pydantic.model_validator(mode="after")
    def _says_something(self) -> _Message:
        if self.content is None and not self.tool_calls and self.role != "tool":
            raise ValueError("a message without content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only the assistant may have tool_calls")
        return self

    def as_turn(self) -> dict[str, Any]:
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        role = "system" if self.role == "developer" else self.role
        turn: dict[str, Any] = {"role": role, "content": text}
        if self.tool_calls:
            turn["tool_calls"] = [call.as_part() for call in self.tool_calls]
        return turn | self.model_dump(include={"tool_call_id", "name"}, exclude_none=True)


class _Function(_Shape):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None

    @pydantic.field_validator("parameters")
    @classmethod
    def _require_object(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema and schema.get("type", "object") != "object":
            raise ValueError(f"type is {errors.shown(schema['type'])}, expected object")
        return schema


class _Tool(_Shape):
    type: Literal["function"]
    function: _Function


class _Chosen(_Shape):
    type: Literal["function"]
    function: _Named


class _Schema(_Shape):
    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: StrictBool | None = None


class _ResponseFormat(_Shape):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None

    @pydantic.model_validator(mode="after")
    def _fits(self) -> _ResponseFormat:
        if (self.type == "json_schema") is not (self.json_schema is not None):
            raise ValueError('type "json_schema" and json_schema go together')
        return self

    @property
    def constraint(self) -> dict[str, Any] | bool | None:
        if self.json_schema is not None and self.json_schema.schema_:
            return self.json_schema.schema_
        return None if self.type == "text" else True


class _StreamOptions(_Shape):
    include_usage: StrictBool = False


class _Speculation(_Shape):
    """How to draft for one request; the text is the same with any of these."""

    drafter: Setting | None = None
    controller: Setting | None = None
    never_slower: StrictBool | None = None
    explain: StrictBool = False  # say who gave each token: `Explanation`

    @pydantic.field_validator("drafter", "controller")
    @classmethod
    def _check_setting(cls, setting: str, info: pydantic.ValidationInfo) -> str:
        try:
            check_request({str(info.field_name): setting})
        except errors.InvalidOption as error:
            raise ValueError(str(error)) from error
        return setting


class Body(_Shape):
    """Fields that requests for chats and for texts have in common."""

    field: ClassVar[str]  # that holds the prompt

    model: str | None = None
    stream: StrictBool = False
    stream_options: _StreamOptions = _StreamOptions()
    n: Annotated[StrictInt, Field(ge=1, le=128)] = 1
    best_of: Count | None = None  # answers to choose n of
    stop: Stops | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**64)] | None = None
    # None: 1 if another field is set that only affects sampling, else 0 (greedy)
    temperature: Annotated[StrictFloat, Field(ge=0, le=2)] | None = None
    top_p: Annotated[StrictFloat, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[StrictInt, Field(ge=0)] = 0
    min_p: Annotated[StrictFloat, Field(ge=0, le=1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[TokenName, Bias], BeforeValidator(_check_size)] | None = None
    response_format: _ResponseFormat | None = None
    max_tokens: Count | None = None
    # for billing by user, which is not done here
    user: str | None = None
    safety_identifier: str | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_check_size)] | None = None
    speculation: StrictBool | _Speculation | None = None

    def _choices(
        self, prompts: Sequence[Prompt], options: Any, limits: ServeOptions, **fields: Any
    ) -> list[Choice]:
        """Make `n` choices per prompt; `options`: keywords of `generate` that the body adds."""
        count, limit = self.n * len(prompts), limits.concurrency + limits.queue
        if count > limit:
            raise Refused(400, f"{count} answers at once, expected at most {limit}", field="n")
        if self.best_of not in (None, self.n):
            message = f"best_of is {self.best_of}, expected n, {self.n}: all answers are returned"
            raise Refused(400, f"{message}. Leave it out", field="best_of")
        extras = {
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            # a dict: in lists, transformers 5.17 refuses token 0
            "sequence_bias": {(int(key),): bias for key, bias in (self.logit_bias or {}).items()},
            "json_schema": self.response_format and self.response_format.constraint,
        }
        options |= {name: value for name, value in extras.items() if value not in (None, 0, [], {})}
        sampling = self.top_p < 1 or self.top_k or self.min_p or self.n > 1 or self.seed is not None
        temperature = float(bool(sampling)) if self.temperature is None else self.temperature
        options["do_sample"] = draws = temperature > 0
        if draws:
            options |= self.model_dump(include={"top_p", "top_k", "min_p"})
            options["temperature"] = temperature
        if isinstance(self.speculation, _Speculation):
            options |= self.speculation.model_dump(exclude_none=True, exclude={"explain"})
            fields["explain"] = self.speculation.explain
        elif self.speculation is not None:
            options["speculate"] = self.speculation
        fields["stops"] = [stop for stop in self.stop or [] if stop]
        choices = []
        for prompt, number in itertools.product(prompts, range(self.n)):
            keywords: Any = {**options, "raw": self.field == "prompt"}
            if draws and self.seed is not None:
                keywords["seed"] = (self.seed + number) % 2**64
            choices.append(Choice(prompt=prompt, options=keywords, **fields))
        return choices


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    field: ClassVar[str] = "messages"

    messages: Some[_Message]
    max_completion_tokens: Count | None = None
    logprobs: StrictBool = False
    top_logprobs: Likely | None = None
    tools: Annotated[list[_Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | _Chosen | None = None
    parallel_tool_calls: StrictBool = True
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_check_size)] = {}
    reasoning_effort: Setting | None = None

    @pydantic.model_validator(mode="after")
    def _fits(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs without logprobs. Set logprobs to true")
        names = [tool.function.name for tool in self.tools or ()]
        if len({*names}) < len(names):
            raise ValueError("two tools have one name")
        choice = self.tool_choice
        if choice not in (None, "none", "auto") and not names:
            raise ValueError("tool_choice without tools")
        if isinstance(choice, _Chosen) and choice.function.name not in names:
            raise ValueError(f"tool_choice names {choice.function.name}, which is no tool")
        if self._must_call and self.response_format is not None and self.response_format.constraint:
            raise ValueError("response_format beside a tool that must be called")
        return self

    @property
    def _must_call(self) -> bool:
        return isinstance(self.tool_choice, _Chosen) or self.tool_choice == "required"

    def choices(self, limits: ServeOptions, room: int) -> list[Choice]:
        """The texts to generate, of at most `room` tokens; max_completion_tokens goes first."""
        max_tokens = self.max_completion_tokens or self.max_tokens or limits.max_tokens
        options: dict[str, Any] = {"max_new_tokens": min(max_tokens, room)}
        options["max_time"] = limits.timeout
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        effort = self.model_dump(include={"reasoning_effort"}, exclude_none=True)
        if variables := {**self.chat_template_kwargs, **effort}:
            options["chat_template_kwargs"] = variables
        tools = [] if self.tool_choice == "none" else self.tools or []
        if isinstance(self.tool_choice, _Chosen):
            tools = [tool for tool in tools if tool.function.name == self.tool_choice.function.name]
        has_calls = any(message.role == "tool" or message.tool_calls for message in self.messages)
        return self._choices(
            [[message.as_turn() for message in self.messages]],
            options,
            limits,
            tools=[tool.model_dump(exclude_none=True) for tool in tools],
            must_call=self._must_call,
            tools_field="tools" if tools else "messages" if has_calls else None,
            most_calls=None if self.parallel_tool_calls else 1,
        )


class TextBody(Body):
    """`POST /v1/completions`: continue a text, without a chat template."""

    field: ClassVar[str] = "prompt"

    prompt: str | Some[str] | Some[StrictInt] | Some[Many[StrictInt]]
    max_tokens: Count | None = 16
    logprobs: Likely | None = None

    def choices(self, limits: ServeOptions, room: int) -> list[Choice]:
        max_tokens = min(self.max_tokens or limits.max_tokens, room)
        options = {"max_new_tokens": max_tokens, "max_time": limits.timeout}
        if self.logprobs is not None:
            options["logprobs"] = self.logprobs
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts: Any = [self.prompt] if single else self.prompt
        return self._choices(prompts, options, limits)


@dataclass(eq=False)
class Refused(Exception):
    """An error that a client gets in place of an answer, in OpenAI's format."""

    status: int
    message: str
    field: str | None = None  # the request's field that is wrong
    code: str | None = None
    headers: dict[str, str] | None = None

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        error = {"message": self.message, "type": kind, "param": self.field, "code": self.code}
        return {"error": error}


_FIELDS = {
    **{"json_schema": "response_format", "grammar": "tools", "drafter": "speculation.drafter"},
    **{"SequenceBiasLogitsProcessor": "logit_bias", "chat_template_kwargs": "chat_template_kwargs"},
}
"""Fields of a request, by the runtime's name for them, which begins its error messages."""


def refusal_of(error: BaseException, field: str | None = None) -> Refused:
    """The response for an error that a request caused; `field` is the one with its prompt."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, errors.InvalidOption | errors.HeadsNotFound):
        name, _, rest = str(error).replace("max_new_tokens", "max_tokens").partition(" ")
        field = _FIELDS.get(name)
        return Refused(400, f"{field or name} {rest}", field=field)
    if isinstance(error, errors.InvalidPrompt):
        return Refused(400, str(error), field=field)
    if isinstance(error, errors.SelfspecError):
        return Refused(503 if isinstance(error, errors.ModelChanged) else 500, str(error))
    return Refused(500, "the answer failed through a fault of the server. Its log says more")


def invalid_body(error: pydantic.ValidationError) -> Refused:
    """The error of an invalid body: of several, the most deeply nested, and of these the last."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    faults.sort(key=lambda e: e["type"].endswith("_type"))  # prefer values of the right type
    fault = max(faults, key=lambda e: (len(e["loc"]), [n for n in e["loc"] if isinstance(n, int)]))
    field = ""  # messages[0].content; names of types, which pydantic puts in between, are left out
    for place in fault["loc"]:
        if isinstance(place, int):
            field += f"[{place}]"
        elif place.isidentifier() and place not in _TYPES:
            field += f".{place}" if field else place
    text = f"is wrong: {fault['msg'].removeprefix('Value error, ').partition(' or instance of')[0]}"
    if fault["type"] == "extra_forbidden":  # names of the two bodies, but not this very name
        matches = difflib.get_close_matches(field, _NAMES - {field}, n=1, cutoff=0.85)
        hint = f"Did you mean {matches[0]}?" if matches else "Leave it out"
        text = f"is not supported here. {hint}"
    elif fault["type"] == "missing":
        text = "is missing"
    return Refused(400, f"{field or 'the body'} {text}", field=field or None)


_NAMES = {*ChatBody.model_fields, *TextBody.model_fields}
_TYPES = {"str", "bool", "int", "float", "list", "dict", "_Speculation", "_Chosen"}


def trace_of(error: BaseException) -> str:
    """An error's class and its lines of code, those of its causes first.

    Its message is left out, because it may hold a client's text.
    """
    cause = error.__cause__ or error.__context__
    lines = [trace_of(cause), "\nwhich led to\n"] if cause is not None else []
    lines += traceback.format_tb(error.__traceback__)
    return "".join(lines) + type(error).__name__
