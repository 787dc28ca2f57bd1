"""From the rounds of an answer to what a client reads: text without its stop, calls, an end.

On the writer's thread. Nothing here knows of HTTP.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec.api.request import Request
from selfspec.api.text import TextDecoder, UntilStop, begun, is_end
from selfspec.decoding.acceptance import Draft
from selfspec.decoding.costs import DraftCost
from selfspec.decoding.engine import Running
from selfspec.decoding.stats import EXIT, GenerationStats, Round
from selfspec.errors import InvalidData
from selfspec.serve.protocol import Choice, Tools
from selfspec.untrusted import parse_json

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What came of a choice since the last piece."""

    choice: int
    text: str = ""
    logprobs: Sequence[Json] = ()
    """Log-probabilities of its tokens, as a chat's answer has them, where they are noted."""
    calls: Sequence[Json] = ()
    """Function calls, with the last piece."""
    told: Json | None = None
    """Who gave the tokens, where that was asked for."""
    finish: str | None = None
    """`stop`, `length` or `tool_calls`, with the last piece."""
    stats: GenerationStats | None = None
    """With the last piece."""
    error: BaseException | None = None
    """In place of an end."""


@dataclass(eq=False)
class Job:
    """The choices of a request, and who hears of them, on the writer's thread."""

    choices: Sequence[Choice]
    wrote: Callable[[Piece], object]
    prompt_tokens: int = 0
    """Known before the first piece."""
    left: int = 0
    """Choices that have no end yet."""
    came_s: float = field(default_factory=time.perf_counter)


class Answer:
    """One choice of a job while it is written."""

    def __init__(
        self, job: Job, place: int, call: Request, running: Running, form: ToolFormat | None
    ) -> None:
        choice = job.choices[place]
        self.job, self.place, self.running = job, place, running
        self.newest_s: float | None = None
        """When its newest tokens came."""
        self._tokenizer = call.tokenizer
        self._decoder = TextDecoder(call.tokenizer)
        ends = (call.end,) if call.end else ()
        self._stops = UntilStop([*choice.options.get("stop_strings", ()), *ends])
        self._calls = Calls(form, choice.tools) if form is not None and choice.tools else None
        self._explanation = None
        if choice.explain:  # as if it ran alone: so a request's explanation is always the same
            cost = running.draft_cost(call.speculation)
            self._explanation = Explanation(call.tokenizer, cost)
        self._told = 0
        """Tokens that are in earlier pieces."""

    def piece(self) -> Piece:
        """What is new; the last one when the text has ended. Raises what ended it otherwise."""
        running, text, begin = self.running, "", self._told
        for entry in running.take():
            text += self._read(entry)
            self._told += len(entry.tokens)
        if running.error is not None:
            raise running.error
        if running.ended:
            text += self._rest()
            running.stats.seconds = running.watch.seconds
        content, calls = text, list[Json]()
        if self._calls is not None:
            content = self._calls.push(text)
            if running.ended:
                rest, calls = self._calls.end()
                content += rest
        explanation = self._explanation
        return Piece(
            choice=self.place,
            text=content,
            logprobs=[
                self._likely(one.token, one.logprob)
                | {"top_logprobs": [self._likely(*other) for other in one.top]}
                for one in running.logprobs[begin : self._told]
            ],
            told=None if explanation is None else explanation.shown(text, last=running.ended),
            calls=calls,
            finish=self._finish(calls) if running.ended else None,
            stats=running.stats if running.ended else None,
        )

    def _read(self, entry: Round) -> str:
        self.running.stats.add(entry)
        # one by one: rounds are cut by drafts
        texts = [
            self._decoder.push([] if is_end(self._tokenizer, entry, token) else [token])
            for token in entry.tokens
        ]
        if self._explanation is not None:
            self._explanation.add(entry, texts)
        return "".join(map(self._stops.push, texts))

    def _rest(self) -> str:
        rest = self._decoder.push([], last=True)
        if self._explanation is not None:
            self._explanation.rest(rest)
        return self._stops.push(rest, last=True)

    def _likely(self, token: int, logprob: float) -> Json:
        """Half of a character has no bytes here: a tokenizer gives text alone."""
        text = "" if self._tokenizer is None else str(self._tokenizer.decode([token]))
        data = None if "\N{REPLACEMENT CHARACTER}" in text else [*text.encode()]
        return {"token": text, "logprob": logprob, "bytes": data}

    def _finish(self, calls: Sequence[Json]) -> str:
        """A time limit is a length; so is the end of the model's positions."""
        if self.running.stats.stop_reason == "eos" or self._stops.found:
            return "tool_calls" if calls else "stop"
        return "length"


class Explanation:
    """Who gave each token of an answer, round by round, as JSON: a round once its text is shown.

    A stop may hide text that was written: no round shows it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, cost: DraftCost) -> None:
        """Without a tokenizer all texts are empty."""
        self._tokenizer, self._cost = tokenizer, cost
        self._waiting: list[Json] = []
        """Rounds with text that is not shown yet."""
        self._shown = 0
        """Characters of these that are."""
        self._newest: list[int] = []
        """The last committed token."""

    def add(self, entry: Round, texts: Sequence[str]) -> None:
        """A round; `texts` of its tokens join to the answer."""
        by = zip(texts, entry.givers, strict=True)
        self._waiting.append(
            {
                "tokens": [{"text": text, **_giver(*giver)} for text, giver in by],
                "drafts": self._drafts(entry),
                "steps": 0.0 if entry.prefill else round(self._cost.steps(Draft.again(entry)), 4),
                "ended": entry.ended,
            }
        )
        self._newest = entry.tokens[-1:]

    def rest(self, text: str) -> None:
        """Add the rest of a character that the answer ends within: it belongs to the last token."""
        if text:
            self._waiting[-1]["tokens"][-1]["text"] += text

    def shown(self, text: str, *, last: bool = False) -> Json:
        """The rounds that are complete now that `text` is shown; `last`: no more will be."""
        self._shown += len(text)
        found = []
        while self._waiting:
            told = self._waiting[0]
            if not last and sum(len(token["text"]) for token in told["tokens"]) > self._shown:
                break
            found.append(self._waiting.pop(0))
            for token in told["tokens"]:
                token["text"] = token["text"][: self._shown]
                self._shown -= len(token["text"])
            kept = iter(told["tokens"])  # drafts that stayed are the first tokens, in their order
            for draft in told["drafts"]:
                if draft["accepted"]:
                    draft["text"] = next(kept)["text"]
        return {"rounds": found, "num_layers": self._cost.num_layers}

    def _drafts(self, entry: Round) -> list[Json]:
        """Accepted ones get their text when it is shown."""
        found: list[Json] = []
        for index, token in enumerate(entry.draft_tokens):
            parent = index - 1 if entry.parents is None else entry.parents[index]
            by = _giver(entry.sources[index], entry.exit_layers[index])
            draft = by | {"parent": parent, "accepted": index in entry.kept}
            if not draft["accepted"]:
                before = self._newest if parent < 0 else [entry.draft_tokens[parent]]
                draft["text"] = self._text(before, token)
            found.append(draft)
        return found

    def _text(self, before: list[int], token: int) -> str:
        """A token's text behind another; end tokens are shown, as nothing ends with a draft."""
        if self._tokenizer is None:
            return ""
        context = str(self._tokenizer.decode(before))
        return str(self._tokenizer.decode([*before, token]))[len(context) :]


def _giver(source: str, layer: int) -> Json:
    """Only exit heads stand at a layer."""
    return {"source": source, "layer": layer if source == EXIT else None}


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes a call: JSON between two texts."""

    before: str
    after: str
    arguments: str
    """The key of the arguments beside `name`."""

    def grammar(self, tools: Tools) -> str:
        """Lark for one call of one of these."""
        schema = json.dumps({"anyOf": [self._schema(tool["function"]) for tool in tools]})
        before, after = (json.dumps(text) if text else "" for text in (self.before, self.after))
        return f"start: {before} call {after}\ncall: %json {schema}\n"

    def calls(self, text: str, names: Collection[str]) -> list[Json]:
        """Calls of `names` in a text; what only looks like one stays text, and all of it then."""
        before, after = self.before.strip(), self.after.strip()
        parts = text.split(before)[1:] if before else [text]
        try:
            return [self._call(part.split(after)[0] if after else part, names) for part in parts]
        except (InvalidData, LookupError, TypeError):
            return []

    def _schema(self, function: Json) -> Json:
        arguments = function.get("parameters") or {"type": "object", "properties": {}}
        return {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, self.arguments: arguments},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }

    def _call(self, text: str, names: Collection[str]) -> Json:
        said = parse_json(text.strip(), "a call")
        name, arguments = said["name"], said[self.arguments]
        if name not in names or not isinstance(arguments, dict):
            raise InvalidData("no call of what may be called")
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


TAGGED = ToolFormat("<tool_call>\n", "\n</tool_call>", "arguments")
"""The format of Hermes, Qwen and SmolLM3."""

BARE = ToolFormat("", "", "parameters")
"""The format of Llama from 3.1 on."""


def format_of(tokenizer: PreTrainedTokenizerBase | None) -> ToolFormat | None:
    """What a chat template asks the model for; None: it knows no tools, or in another way."""
    if tokenizer is None or tokenizer.chat_template is None:
        return None
    template = tokenizer.get_chat_template(tools=[{}])
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        return TAGGED
    return BARE if '"parameters"' in template and '"name"' in template else None


class Calls:
    """Text of an answer that may call: what is sure to be no call goes on, the rest waits."""

    def __init__(self, form: ToolFormat, tools: Tools) -> None:
        self._form, self._names = form, [tool["function"]["name"] for tool in tools]
        self._text = ""
        self._given = 0

    def push(self, text: str) -> str:
        """What may be shown."""
        self._text += text
        mark, said = self._form.before.strip(), self._text.lstrip()
        if mark:
            at = self._text.find(mark)
            sure = at if at >= 0 else len(self._text) - begun(self._text, mark)
        else:
            sure = 0 if not said or said.startswith("{") else len(self._text)
        shown = self._text[self._given : sure]
        self._given += len(shown)
        return shown

    def end(self) -> tuple[str, list[Json]]:
        """What is left to be shown, and the calls."""
        calls = self._form.calls(self._text, self._names)
        return ("", calls) if calls else (self._text[self._given :], [])
