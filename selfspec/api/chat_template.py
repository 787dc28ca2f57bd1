"""Chat templates for models that bring none: by name, from a file, or as text.

Comes in: what `--chat-template` says. Goes out: the text of a template that was tried, a tokenizer
of our own that has it, and how its turns end. Called by the facade and the commands of training.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec import files
from selfspec.api.template import CannotRender, render, templated
from selfspec.errors import InvalidData, InvalidOption, InvalidPrompt
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.folder import MOST_TEMPLATE_CHARACTERS
from selfspec.typed import check_keys
from selfspec.untrusted import read_text

logger = logging.getLogger(__name__)

NAMES = ("alpaca", "chatml", "llama-2", "vicuna", "zephyr")
"""Files in `templates`, each of which names its source."""

_HINTS = {
    "vicuna": "vicuna",
    "llama-?2.*chat": "llama-2",
    "alpaca": "alpaca",
    "zephyr": "zephyr",
    "hermes|dolphin|chatml": "chatml",
}
"""What a model's name may say of its template."""

# stand for turns of unknown text; letters only, so that no template trims or escapes them
_ASKED, _ANSWER, _NEXT = "selfspecasked", "selfspecanswer", "selfspecnext"


class TurnEnd(NamedTuple):
    """How an answer ends where that is not the model's own end token."""

    token: int | None = None
    text: str = ""
    """Where no single token says it."""

    def options(self, given: Mapping[str, Any], model: PreTrainedModel) -> dict[str, Any]:
        """Keywords of `generate` that end an answer here, too, beside those `given`."""
        if self.text:
            stops = given.get("stop_strings") or []
            return {"stop_strings": [*([stops] if isinstance(stops, str) else stops), self.text]}
        if self.token is None or given.get("eos_token_id") is not None:
            return {}
        base: Any = model.generation_config
        ends = getattr(given.get("generation_config"), "eos_token_id", None)
        ends = base.eos_token_id if ends is None else ends
        own = ends if isinstance(ends, list) else [] if ends is None else [ends]
        return {"eos_token_id": sorted({*own, self.token})}


NO_END = TurnEnd()


def read(given: str | Path) -> str:
    """The template behind a name or a file; text with a `{` is one. Raises InvalidOption."""
    name = str(given)
    if name in NAMES:
        return _built_in(name)
    if "{" in name:
        return _tried(name, "chat_template")
    path = files.local_path(name)
    if not path.exists() and not path.suffix:
        check_keys([name], NAMES, "chat template")
    try:
        return _tried(read_text(path, MOST_TEMPLATE_CHARACTERS), name)
    except InvalidData as error:
        raise InvalidOption(f"cannot take the chat template: {error}") from error


def name_of(template: str) -> str:
    """The name of a built-in template; of any other its beginning."""
    for name in NAMES:
        if _built_in(name) == template:
            return name
    words = " ".join(template.split())
    return words if len(words) <= 40 else f"{words[:40]}…"


def having(tokenizer: PreTrainedTokenizerBase, template: str) -> PreTrainedTokenizerBase:
    """A copy with this template; the tokenizer itself stays as it is."""
    own = copy.copy(tokenizer)
    own.chat_template = template
    return own


def suggested(model: str) -> str:
    """The name of the template that a model's name speaks of; empty where it speaks of none."""
    last = model.lower().rstrip("/").rpartition("/")[2]
    return next((name for said, name in _HINTS.items() if re.search(said, last)), "")


def advice(model: str) -> str:
    """What to do about a model without a template, for people."""
    if name := suggested(model):
        return f"Its name says: --chat-template {name}"
    return f"Give --chat-template: {', '.join(NAMES)}, or a Jinja file"


def chosen(
    tokenizer: PreTrainedTokenizerBase | None,
    given: str | None,
    heads: ExitHeads | None,
    label: str,
) -> tuple[PreTrainedTokenizerBase | None, TurnEnd]:
    """The tokenizer with the template to use, the given one before that of the heads.

    And how turns end under it. Raises InvalidOption for a template without a tokenizer.
    """
    fitted = None if heads is None else heads.config.chat_template
    if given is not None and fitted not in (None, given):
        logger.warning(
            "the heads were fitted with the chat template %s, not %s: fewer drafts may be accepted",
            name_of(fitted or ""),
            name_of(given),
        )
    template = fitted if given is None else given
    if template is None:
        if tokenizer is not None and tokenizer.chat_template is None and suggested(label):
            logger.warning("%s brings no chat template. %s", label, advice(label))
        return tokenizer, NO_END
    if tokenizer is None:
        raise InvalidOption("a chat template needs a tokenizer. Give one to selfspec.wrap")
    own = having(tokenizer, template)
    return own, turn_end(own)


def turn_end(tokenizer: PreTrainedTokenizerBase) -> TurnEnd:
    """What the template writes behind an answer, unless that is the tokenizer's end token."""
    messages = [_said("user", _ASKED), _said("assistant", _ANSWER), _said("user", _NEXT)]
    try:
        text = templated(tokenizer, messages)
    except InvalidPrompt:
        return NO_END  # it is for one turn
    behind = text.partition(_ANSWER)[2].partition(_NEXT)[0].strip()
    end = behind.split("\n")[0].strip()
    own = tokenizer.eos_token
    if not end or (own and end.startswith(str(own))):
        return NO_END
    ids = tokenizer(end, add_special_tokens=False)["input_ids"]
    if len(ids) == 1 and ids[0] in tokenizer.added_tokens_decoder:
        return TurnEnd(token=int(ids[0]))
    return TurnEnd(text=end)


def _built_in(name: str) -> str:
    folder = resources.files(__package__).joinpath("templates")
    return folder.joinpath(f"{name}.jinja").read_text(encoding="utf-8")


def _tried(template: str, where: str) -> str:
    """The template, once it has shown a message. Raises InvalidOption."""
    if len(template) > MOST_TEMPLATE_CHARACTERS:
        raise InvalidOption(
            f"{where} has {len(template):,} characters, a chat template at most "
            f"{MOST_TEMPLATE_CHARACTERS:,}"
        )
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    asked = {"messages": [_said("user", _ASKED)], "tools": None, "documents": None}
    try:
        text = render(template, {**asked, "add_generation_prompt": True, **tokens})
    except CannotRender as error:
        place = where if error.line is None else f"{where}, line {error.line}"
        reason = str(error).rstrip(".")
        raise InvalidOption(f"{place} is no chat template: {reason}. Correct it") from error
    if _ASKED not in text:
        raise InvalidOption(f"{where} is no chat template: it does not show what the user says")
    return template


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
