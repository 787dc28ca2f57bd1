"""How a model is asked for text: what a chat template writes around turns, and who answers.

Comes in: what is to be written behind which ids. Goes out: new ids. `Texts` has the model itself
write many texts side by side, `Server` asks one that speaks OpenAI's protocol. Called by `selfgen`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from selfspec.api.chat_template import advice, templated, turn_end
from selfspec.config import SpeculationOptions
from selfspec.decoding.decode import StopRule
from selfspec.decoding.engine import MOST_TEXTS, Asked, Engine, Runtime
from selfspec.decoding.sampling import Sampler
from selfspec.decoding.state import DecodeState
from selfspec.decoding.stats import StopReason
from selfspec.errors import InvalidData, SelfspecError, first_line
from selfspec.model.backbone import Backbone
from selfspec.training.text import Message, special_ids

# stand for turns of unknown text; letters only, so that no template trims or escapes them
_FIRST, _ANSWER, _SECOND = "selfspecfirst", "selfspecanswer", "selfspecsecond"


@dataclass(frozen=True)
class Turns:
    """The text around the turns of a conversation, so that a model can write the turns itself."""

    tokenizer: PreTrainedTokenizerBase
    system: str | None
    before: str
    """In front of the first user turn, system message included."""
    asked: str
    """From the end of a user turn to the start of its answer."""
    raw: bool = False
    """No turns: the model writes on behind a text."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase | None, system: str | None = None) -> Turns:
        """Raises InvalidData for no template, or one that hides turns, InvalidPrompt for others."""
        if tokenizer is None or tokenizer.chat_template is None:
            raise InvalidData(
                "the model has no chat template, so it cannot write conversations. "
                f"{advice('' if tokenizer is None else tokenizer.name_or_path)}; or for a base "
                "model --raw; text that is there already: selfspec fit --data FILE"
            )
        unknown = cls(tokenizer, system, "", "")
        return cls(tokenizer, system, *_around(unknown._written(_FIRST), _FIRST))

    @classmethod
    def plain(cls, tokenizer: PreTrainedTokenizerBase | None) -> Turns:
        """Nothing around: a base model writes on. Raises InvalidData without a tokenizer."""
        if tokenizer is None:
            raise InvalidData("the model has no tokenizer, so it cannot write text")
        return cls(tokenizer, None, "", "", raw=True)

    def messages(self) -> list[Message]:
        """What stands ahead of the first user turn."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def header(self, opening: str = "") -> list[int]:
        """Ids up to where the user's first words start, or go on behind `opening`."""
        return self.ids(self.before + opening)

    def first_prompt(self, question: str) -> list[int]:
        """Ids up to where the answer to the first question starts."""
        if self.raw:  # with what the tokenizer puts in front, as `generate --raw` has it
            return list(self.tokenizer(question)["input_ids"])
        return self.ids(self.before + question + self.asked)

    def next_prompt(self, said: list[int], question: str | None) -> list[int]:
        """`said`, through the last token of an answer, and `question`, up to its answer.

        None: up to where the user goes on.
        """
        between = _around(self._written(_FIRST, _ANSWER, _SECOND), _ANSWER)[1]
        between = _around(between, _SECOND)[0]
        new = self.ids(between if question is None else between + question + self.asked)
        return said + (new[1:] if said[-1:] == new[:1] else new)  # the model wrote the end token

    def question_ends(self) -> frozenset[int]:
        """Tokens that end a user's turn: what the template puts there, and all special ones."""
        own = self.tokenizer.added_tokens_decoder.keys() & self.ids(self.asked)[:1]
        return frozenset(special_ids(self.tokenizer) | own)

    def ids(self, text: str) -> list[int]:
        """Tokens of text that already holds the template's own."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def question(self, header: list[int], new: list[int]) -> str | None:
        """The user turn that `new` adds to a header; None for one that does not end.

        It ends with one of `question_ends`, or where the template's text for the answer begins.
        """
        text = self.continuation(header, new)
        sign = self.asked.strip().split("\n")[0]
        if sign and sign in text:
            return text.partition(sign)[0]
        return text if new[-1] in self.question_ends() else None

    def continuation(self, start: list[int], new: list[int]) -> str:
        """The text that `new` adds to `start`: some tokenizers drop a leading blank of the rest."""
        known = self.text(start)
        return self.text(start + new)[len(known) :]

    def text(self, ids: list[int]) -> str:
        """What ids say, without special tokens."""
        return str(
            self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def _written(self, *turns: str) -> str:
        """What the template makes of turns of user and assistant, up to the next answer."""
        said = zip(("user", "assistant", "user"), turns, strict=False)
        messages = [*self.messages(), *({"role": role, "content": text} for role, text in said)]
        return templated(self.tokenizer, messages, add_generation_prompt=True)


def _around(text: str, sign: str) -> tuple[str, str]:
    """What stands before and behind the only `sign`."""
    if text.count(sign) != 1:
        raise InvalidData(f"the chat template shows a turn {text.count(sign)} times, expected once")
    before, behind = text.split(sign)
    return before, behind


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens with which the model ends an answer. Raises InvalidData if there are none."""
    configured: Any = model.generation_config.eos_token_id if model.generation_config else None
    ids = configured if isinstance(configured, list) else [configured]
    found = frozenset({*ids, tokenizer.eos_token_id, turn_end(tokenizer).token} - {None})
    if not found:
        raise InvalidData("the model has no end token, so its answers never end")
    return found


# --- answers --------------------------------------------------------------------------------------

LOOP_NGRAM = 8
"""Tokens whose third occurrence makes a loop."""


def loop_start(ids: Sequence[int]) -> int | None:
    """Where the second turn of a loop begins, so that one stays; None without a loop."""
    places: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(ids) - LOOP_NGRAM + 1):
        found = places.setdefault(tuple(ids[start : start + LOOP_NGRAM]), [])
        found.append(start)
        if len(found) == 3:
            return found[1]
    return None


class Ask(NamedTuple):
    """New ids that are wanted behind a prompt."""

    prompt: list[int]
    max_new_tokens: int
    ends: frozenset[int]
    seed: int
    """What a sampled text draws depends on it alone."""
    temperature: float | None = None
    """None: greedy, the likeliest token."""
    top_k: int = 0
    """Draw from this many of the likeliest tokens; 0: from all."""
    messages: tuple[Message, ...] = ()
    """What the prompt says, for those who read no ids."""

    def sampler(self, device: torch.device) -> Sampler:
        """How the next token is chosen."""
        processors = LogitsProcessorList()
        if self.temperature is None:
            return Sampler(processors)
        if self.temperature != 1.0:
            processors.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            processors.append(TopKLogitsWarper(self.top_k))
        return Sampler(processors, do_sample=True).seeded(self.seed, device)


@dataclass(frozen=True, kw_only=True)
class _EndOrLoop(StopRule):
    """Also ends a text where it begins to repeat itself a third time."""

    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    """How often each n-gram of the answer was seen."""
    prompt: int

    def reason(self, state: DecodeState, token: int) -> StopReason | None:
        if state.length - self.prompt >= LOOP_NGRAM:
            newest = tuple(state.committed(-LOOP_NGRAM))
            self.places[newest] = self.places.get(newest, 0) + 1
            if self.places[newest] == 3:
                return "stop"
        return super().reason(state, token)


class Texts:
    """Texts that one model writes side by side. Prompt lookup drafts where that pays."""

    def __init__(self, backbone: Backbone, watch: Callable[[int], None]) -> None:
        """`watch` hears how many tokens come."""
        self._backbone, self._watch = backbone, watch
        self._engine = Engine(Runtime(backbone, None, None))
        self._options = SpeculationOptions(drafter="ngram")
        self._written: dict[Hashable, list[int]] = {}

    def add(self, ask: Ask) -> Hashable:
        """Begin a text; `step` gives what this returns, with the text's ids."""
        stop = _EndOrLoop(
            max_length=len(ask.prompt) + ask.max_new_tokens,
            end_tokens=ask.ends,
            prompt=len(ask.prompt),
        )
        device = self._backbone.device
        ids = torch.tensor([ask.prompt], device=device)
        asked = Asked(ids=ids, sampler=ask.sampler(device), stop=stop)
        running = self._engine.add(asked, self._options)
        self._written[running] = []
        return running

    def step(self) -> list[tuple[Hashable, list[int]]]:
        """Texts that have ended now: what `add` gave, and their new ids.

        At most `max_new_tokens`, with the one of `ends` that ended them; one that loops ends so.
        """
        ended: list[tuple[Hashable, list[int]]] = []
        for running in self._engine.step():
            fresh = [token for entry in running.take() for token in entry.tokens]
            self._written[running] += fresh
            self._watch(len(fresh))
            if running.ended:
                ended.append((running, self._written.pop(running)))
        return ended


class Server:
    """Texts that an OpenAI server writes in the model's place, as the ids of its tokenizer.

    OPENAI_API_KEY is sent where it is set.
    """

    def __init__(self, url: str, turns: Turns, seed: int, watch: Callable[[int], None]) -> None:
        """Raises SelfspecError where the server does not say which model it has."""
        import httpx

        self._turns, self._seed, self._watch = turns, seed, watch
        self._url = f"{url.rstrip('/').removesuffix('/v1')}/v1"
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(headers=headers, timeout=600.0, trust_env=False)
        self._failures = httpx.HTTPError, httpx.InvalidURL
        self._model = self._said("models", None, lambda found: found["data"][0]["id"])
        self._end = turn_end(turns.tokenizer).token or turns.tokenizer.eos_token_id
        self._pool = ThreadPoolExecutor(MOST_TEXTS)
        self._open: set[Future[list[int]]] = set()

    def add(self, ask: Ask) -> Hashable:
        """Send a request, as `Texts.add`."""
        answer = self._pool.submit(self._answered, ask)
        self._open.add(answer)
        return answer

    def step(self) -> list[tuple[Hashable, list[int]]]:
        """Answers that have come, as `Texts.step`."""
        done, self._open = wait(self._open, return_when=FIRST_COMPLETED)
        return [(answer, answer.result()) for answer in done]

    def _answered(self, ask: Ask) -> list[int]:
        body = {
            "model": self._model,
            "messages": ask.messages,
            "max_tokens": ask.max_new_tokens,
            "temperature": ask.temperature or 0.0,
            "seed": self._seed,
        }
        text, reason = self._said("chat/completions", body, _first_choice)
        ids = self._turns.ids(text)[: ask.max_new_tokens]
        self._watch(len(ids))
        ended = reason != "length" and self._end is not None
        return [*ids, int(self._end)] if ended else ids

    def _said(self, path: str, body: dict[str, Any] | None, wanted: Callable[[Any], Any]) -> Any:
        """What is `wanted` of the server's answer. Raises SelfspecError in one line."""
        try:
            method = "GET" if body is None else "POST"
            answer = self._client.request(method, f"{self._url}/{path}", json=body)
            answer.raise_for_status()
            return wanted(answer.json())
        except self._failures as error:
            raise SelfspecError(f"{self._url} did not answer: {first_line(error)}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise SelfspecError(f"{self._url}/{path} is not as OpenAI's: {error!r}") from error


def _first_choice(found: Any) -> tuple[str, Any]:
    (choice, *_) = found["choices"]
    return str(choice["message"]["content"] or ""), choice.get("finish_reason")
