"""Answers that an OpenAI server gives in the model's place.

Comes in: its URL and conversations. Goes out: the ids of their answers, as the model's tokenizer
reads the text. Called by `selfspec data --endpoint`. OPENAI_API_KEY is sent where it is set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import httpx
from transformers import PreTrainedTokenizerBase

from selfspec.api.chat_template import turn_end
from selfspec.decoding.engine import MOST_TEXTS
from selfspec.errors import SelfspecError, first_line
from selfspec.model.backbone import Backbone
from selfspec.training.options import DataOptions
from selfspec.training.selfgen import Author, Script
from selfspec.training.text import Ask, T

_TIMEOUT_S = 600.0


class RemoteAuthor(Author):
    """An author whose answers a server writes; it invents no user turns."""

    invents = False

    def __init__(
        self,
        url: str,
        backbone: Backbone,
        tokenizer: PreTrainedTokenizerBase | None,
        options: DataOptions,
        watch: Callable[[int], None],
    ) -> None:
        """`backbone` says how long a text may be and what ends it.

        Raises SelfspecError where the server does not say which model it has.
        """
        super().__init__(backbone, tokenizer, options, watch)
        self._open: set[Future[list[int]]]
        base = url.rstrip("/")
        self._url = base if base.endswith("/v1") else f"{base}/v1"
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(headers=headers, timeout=_TIMEOUT_S, trust_env=False)
        self._model = self._said("models", None, lambda found: found["data"][0]["id"])
        own = self.turns.tokenizer
        self._end = turn_end(own).token or own.eos_token_id

    def write(self, scripts: Iterable[Script[T]]) -> list[T]:
        """What all of them return, in their order; the server writes what they ask for."""
        self._open = set()
        with ThreadPoolExecutor(MOST_TEXTS) as self._pool:
            return super().write(scripts)

    def add(self, ask: Ask) -> Hashable:
        """Send a request; the server puts those together that it can."""
        answer = self._pool.submit(self._answered, ask)
        self._open.add(answer)
        return answer

    def step(self) -> list[tuple[Hashable, list[int]]]:
        """Answers that have come, with their end where the server ended them."""
        done, self._open = wait(self._open, return_when=FIRST_COMPLETED)
        return [(answer, answer.result()) for answer in done]

    def _answered(self, ask: Ask) -> list[int]:
        body = {
            "model": self._model,
            "messages": ask.messages,
            "max_tokens": ask.max_new_tokens,
            "temperature": ask.sampling.temperature or 0.0,
            "seed": self.options.seed,
        }
        text, reason = self._said(
            "chat/completions",
            body,
            lambda found: (found["choices"][0]["message"]["content"] or "", found["choices"][0]),
        )
        ids = self.turns.ids(str(text))[: ask.max_new_tokens]
        self._watch(len(ids))
        ended = reason.get("finish_reason") != "length" and self._end is not None
        return [*ids, int(self._end)] if ended else ids

    def _said(self, path: str, body: dict[str, Any] | None, wanted: Callable[[Any], Any]) -> Any:
        """What is `wanted` of the server's answer. Raises SelfspecError in one line."""
        try:
            method = "GET" if body is None else "POST"
            answer = self._client.request(method, f"{self._url}/{path}", json=body)
            answer.raise_for_status()
            return wanted(answer.json())
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise SelfspecError(f"{self._url} did not answer: {first_line(error)}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise SelfspecError(f"{self._url}/{path} is not as OpenAI's: {error!r}") from error
