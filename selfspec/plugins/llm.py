"""The model `selfspec` for the command line tool `llm`, which finds it by an entry point.

`llm` imports this at every start, so torch waits for the first prompt.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import llm
from pydantic import Field

import selfspec


class Selfspec(llm.Model):
    """`llm -m selfspec`; a process loads its model once for all prompts."""

    model_id = "selfspec"
    can_stream = True
    supports_schema = True

    class Options(llm.Options):
        """`-o NAME VALUE`, like the flags of `selfspec generate`."""

        model: str | None = Field(None, description="Hub id, folder or .gguf file")
        heads: str | None = Field(None, description="Folder, known name, hub id, or none")
        chat_template: str | None = Field(None, description="Name or Jinja file, if it lacks one")
        max_tokens: int | None = Field(None, ge=1, description="Tokens of an answer at most")
        temperature: float | None = Field(None, description="Divides the logits; 0 is greedy")
        top_p: float | None = Field(None, description="Draw from tokens that sum to this")
        seed: int | None = Field(None, description="Makes drawing repeatable")
        speculate: bool | None = Field(None, description="False: without drafts, the same text")

    def execute(
        self,
        prompt: Any,
        stream: bool,  # noqa: ARG002  # llm joins the pieces
        response: Any,
        conversation: Any,  # noqa: ARG002  # its turns are in the prompt
    ) -> Iterator[str]:
        """Yield pieces of the answer to a prompt, which holds the earlier turns."""
        options = prompt.options.model_dump(exclude_none=True)
        arguments = (options.pop(name, None) for name in ("model", "heads", "chat_template"))
        speculator, sessions = _load(*arguments)
        options |= {"max_new_tokens": options.pop("max_tokens", None), "json_schema": prompt.schema}
        turns = [
            {"role": turn.role, "content": "".join(getattr(one, "text", "") for one in turn.parts)}
            for turn in prompt.messages
        ]
        try:
            session = sessions.pop()
        except IndexError:
            session = speculator.session()
        try:
            answer = session.stream(turns, **options)
            yield from answer
        finally:
            sessions.append(session)
        generation = answer.result
        response.set_usage(input=generation.stats.prompt_tokens, output=len(generation.token_ids))


@functools.lru_cache(1)
def _load(
    model: str | None, heads: str | None, template: str | None
) -> tuple[selfspec.Speculator, list[selfspec.Session]]:
    """The Speculator, and its idle sessions: several answers may be generated at once."""
    return selfspec.load(model, heads=heads, chat_template=template), []


@llm.hookimpl
def register_models(register: Callable[[llm.Model], None]) -> None:
    register(Selfspec())
