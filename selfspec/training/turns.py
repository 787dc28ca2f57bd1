"""What a chat template writes around turns, so that a model can write the turns themselves.

Comes in: a tokenizer and perhaps a system message. Goes out: ids up to where a user's turn or an
answer starts, and the tokens that end either. Called by `selfgen`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.api.chat_template import advice, turn_end
from selfspec.errors import InvalidData
from selfspec.training.data import special_ids
from selfspec.training.formats import Message, rendered

# stand for turns of unknown text; letters only, so that no template trims or escapes them
_FIRST, _ANSWER, _SECOND = "selfspecfirst", "selfspecanswer", "selfspecsecond"


@dataclass(frozen=True)
class Turns:
    """The text around the turns of one conversation."""

    tokenizer: PreTrainedTokenizerBase
    system: str | None
    before: str
    """In front of the first user turn, system message included."""
    asked: str
    """From the end of a user turn to the start of its answer."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase | None, system: str | None = None) -> Turns:
        """Raises InvalidData if there is no template, or one that hides or refuses the turns."""
        if tokenizer is None or tokenizer.chat_template is None:
            raise InvalidData(
                "the model has no chat template, so it cannot write conversations. "
                f"{advice('' if tokenizer is None else tokenizer.name_or_path)}; or give text with "
                "--from, without --regenerate"
            )
        messages = [*_opened(system), _user(_FIRST)]
        text = rendered(tokenizer, messages, add_generation_prompt=True)
        before, asked = _around(text, _FIRST)
        return cls(tokenizer, system, before, asked)

    def messages(self) -> list[Message]:
        """What stands ahead of the first user turn."""
        return _opened(self.system)

    def header(self, opening: str = "") -> list[int]:
        """Ids up to where the user's first words start, or go on behind `opening`."""
        return self.ids(self.before + opening)

    def first_prompt(self, question: str) -> list[int]:
        """Ids up to where the answer to the first question starts."""
        return self.ids(self.before + question + self.asked)

    def next_header(self, said: list[int]) -> list[int]:
        """`said`, through the last token of an answer, up to where the user goes on."""
        return said + _without_first(said, self.ids(self._between()))

    def next_prompt(self, said: list[int], question: str) -> list[int]:
        """`said`, through the last token of an answer, and `question`, up to its answer."""
        return said + _without_first(said, self.ids(self._between() + question + self.asked))

    def question_ends(self) -> frozenset[int]:
        """Tokens that end a user's turn: what the template puts there, and all special ones."""
        first = self.ids(self.asked)[:1]
        return frozenset(special_ids(self.tokenizer)) | (
            set(first) & self.tokenizer.added_tokens_decoder.keys()
        )

    def ids(self, text: str) -> list[int]:
        """Tokens of text that already holds the template's own."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def question(self, header: list[int], new: list[int]) -> str | None:
        """The user turn that `new` adds to a header; None for one that does not end.

        It ends with one of `question_ends`, or where the template's text for the answer begins.
        """
        text = self.continuation(header, new)
        sign = self.asked.strip().split("\n")[0]
        first = self.ids(self.asked)[:1]
        if sign and not set(first) & self.tokenizer.added_tokens_decoder.keys() and sign in text:
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

    def _between(self) -> str:
        """From the end of an answer to the start of the user's next words."""
        messages = [
            *_opened(self.system),
            _user(_FIRST),
            {"role": "assistant", "content": _ANSWER},
            _user(_SECOND),
        ]
        text = rendered(self.tokenizer, messages, add_generation_prompt=True)
        return _around(_around(text, _ANSWER)[1], _SECOND)[0]


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens with which the model ends an answer. Raises InvalidData if there are none."""
    configured: Any = model.generation_config.eos_token_id if model.generation_config else None
    ids = configured if isinstance(configured, list) else [configured]
    found = frozenset({*ids, tokenizer.eos_token_id, turn_end(tokenizer).token} - {None})
    if not found:
        raise InvalidData("the model has no end token, so its answers never end")
    return found


def _opened(system: str | None) -> list[Message]:
    return [] if system is None else [{"role": "system", "content": system}]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _around(text: str, sign: str) -> tuple[str, str]:
    """What stands before and behind the only `sign`."""
    if text.count(sign) != 1:
        raise InvalidData(f"the chat template shows a turn {text.count(sign)} times, expected once")
    before, behind = text.split(sign)
    return before, behind


def _without_first(said: list[int], new: list[int]) -> list[int]:
    """`new`, but for the end token of the answer where the model wrote it already."""
    return new[1:] if said[-1:] == new[:1] else new
