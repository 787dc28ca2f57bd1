"""Chat templates: untrusted programs, run with limits; built-in ones for models without their own.

They run in a separate process (`rendering`), which starts in a tenth of a second and is kept: each
later text takes less than a millisecond more than in this process.
"""

from __future__ import annotations

import atexit
import copy
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from selfspec import files
from selfspec.api import rendering
from selfspec.errors import InvalidData, InvalidOption, InvalidPrompt, SelfspecError, check_keys
from selfspec.files import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from selfspec.heads.exit_heads import ExitHeads

logger = logging.getLogger(__name__)

NAMES = ("alpaca", "chatml", "llama-2", "vicuna", "zephyr")  # files in `templates`

# patterns in a model's name, and the template they suggest
_HINTS = {"llama-?2.*chat": "llama-2", "hermes|dolphin|chatml": "chatml"}
_HINTS |= {name: name for name in ("vicuna", "alpaca", "zephyr")}
# placeholders for the text of turns; letters only, so that no template trims or escapes them
_ASKED, _ANSWER, _NEXT = "selfspecasked", "selfspecanswer", "selfspecnext"


class TurnEnd(NamedTuple):
    """How an answer ends, if not with the model's own end token."""

    token: int | None = None
    text: str = ""  # the end as text, if it is not a single token


NO_END = TurnEnd()


def as_list(ends: int | list[int] | None) -> list[int]:
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def read(source: str | Path) -> str:
    """Read a template by name or file; text with a `{` is one itself. Raises InvalidOption."""
    name = str(source)
    if name in NAMES:
        return _built_in(name)
    if "{" in name:
        return _check(name, "chat_template")
    path = files.local_path(name)
    if not path.exists() and not path.suffix:
        check_keys([name], NAMES, "chat template")
    try:
        return _check(read_text(path, files.MOST_TEMPLATE_CHARACTERS), name)
    except InvalidData as error:
        raise InvalidOption(f"cannot take the chat template: {error}") from error


def _built_in(name: str) -> str:
    file = resources.files(__package__) / "templates" / f"{name}.jinja"
    return file.read_text(encoding="utf-8")


def name_of(template: str) -> str:
    """The name of a built-in template, or the beginning of any other template."""
    text = " ".join(template.split())
    beginning = text if len(text) <= 40 else f"{text[:40]}…"
    return next((name for name in NAMES if _built_in(name) == template), beginning)


def with_template(tokenizer: PreTrainedTokenizerBase, template: str) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer with this template; the tokenizer itself is not changed."""
    clone = copy.copy(tokenizer)
    clone.chat_template = template
    return clone


def suggestion(model: str) -> str:
    """The name of the template that a model's name suggests; empty if it suggests none."""
    last = model.lower().rstrip("/").rpartition("/")[2]
    return next((name for pattern, name in _HINTS.items() if re.search(pattern, last)), "")


def advice(model: str) -> str:
    if name := suggestion(model):
        return f"Its name says: --chat-template {name}"
    return f"Give --chat-template: {', '.join(NAMES)}, or a Jinja file"


def choose_template(
    tokenizer: PreTrainedTokenizerBase | None,
    override: str | None,
    heads: ExitHeads | None,
    label: str,
) -> tuple[PreTrainedTokenizerBase | None, TurnEnd]:
    """The tokenizer with the given template, else that of the heads; and how turns end."""
    heads_template = None if heads is None else heads.config.chat_template
    if override is not None and heads_template not in (None, override):
        logger.warning(
            "the heads were fitted with the chat template %s, not %s: fewer drafts may be accepted",
            name_of(heads_template or ""),
            name_of(override),
        )
    template = heads_template if override is None else override
    if template is None or (override is None and tokenizer is None):  # token ids need no template
        if tokenizer is not None and tokenizer.chat_template is None and suggestion(label):
            logger.warning("%s brings no chat template. %s", label, advice(label))
        return tokenizer, NO_END
    if tokenizer is None:
        raise InvalidOption("a chat template needs a tokenizer. Give one to selfspec.wrap")
    if override is None:
        _check(template, "chat_template of the heads")
    clone = with_template(tokenizer, template)
    return clone, turn_end(clone)


def turn_end(tokenizer: PreTrainedTokenizerBase) -> TurnEnd:
    """The end that the template writes after an answer, unless it is the tokenizer's end token."""
    messages = [_message("user", _ASKED), _message("assistant", _ANSWER), _message("user", _NEXT)]
    end, eos = "", tokenizer.eos_token
    for count in (2, 3):  # the last answer may end otherwise than earlier ones, or not at all
        try:
            text = apply_template(tokenizer, messages[:count])
        except InvalidPrompt:
            return NO_END  # the template allows one turn only
        end = text.partition(_ANSWER)[2].partition(_NEXT)[0].strip().partition("\n")[0].strip()
        if eos and end.startswith(str(eos)):
            return NO_END
        ids = tokenizer(end, add_special_tokens=False)["input_ids"]
        if ids and ids[0] in tokenizer.added_tokens_decoder:  # the next turn may follow at once
            return TurnEnd(token=int(ids[0]))
    return TurnEnd(text=end)


def _check(template: str, source: str) -> str:
    """Return the template if it can render a message. Raises InvalidOption."""
    if len(template) > files.MOST_TEMPLATE_CHARACTERS:
        raise InvalidOption(
            f"{source} has {len(template):,} characters, a chat template at most "
            f"{files.MOST_TEMPLATE_CHARACTERS:,}"
        )
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    context = {"messages": [_message("user", _ASKED)], "tools": None, "documents": None}
    try:
        text = _render(template, json.dumps({**context, "add_generation_prompt": True, **tokens}))
    except CannotRender as error:
        place = source if error.line is None else f"{source}, line {error.line}"
        reason = str(error).rstrip(".")
        raise InvalidOption(f"{place} is no chat template: {reason}. Correct it") from error
    if _ASKED not in text:
        raise InvalidOption(f"{source} is no chat template: it does not show what the user says")
    return template


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


# --- running a template

_MOST_CHARACTERS = 1 << 20  # in a rendered text, and eight more for each one of its input
_CANNOT = "this machine cannot run chat templates"
_KEPT = 2  # idle processes to keep, of 25 MB each; more threads at once start more


class CannotRender(Exception):
    """A template failed; the message is the reason, in one line."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line  # of the template, if known


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Any,
    *,
    tools: list[Any] | None = None,
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return the same text as `apply_chat_template`. Raises InvalidPrompt, whatever goes wrong.

    `variables`: `chat_template_kwargs`; InvalidOption for one that the template does not read.
    Raises SelfspecError instead if this machine lacks files, processes or jinja2.
    """
    try:
        template = tokenizer.get_chat_template(tools=tools)
        tokens = [name for name in tokenizer.special_tokens_map if name.isidentifier()]
        names = ("messages", "tools", "documents", "add_generation_prompt", *tokens)
        # this template returns the variables that transformers prepared for the real one
        pairs = ", ".join(f"'{name}': {name}" for name in names)
        prepared = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=f"{{{{ {{{pairs}}} | tojson }}}}",
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
        values = json.loads(str(prepared))
        for name in variables or ():
            if values.get(name) is not None or not re.search(rf"\b{re.escape(name)}\b", template):
                raise InvalidOption(
                    f"chat_template_kwargs has {name}, which the prompt sets, or the chat template "
                    "does not read. Leave it out"
                )
        return _render(template, json.dumps({**values, **(variables or {})}))
    except SelfspecError:
        raise
    except (ImportError, OSError) as error:  # clients see this message: no file names
        raise SelfspecError(f"{_CANNOT}: {getattr(error, 'strerror', error)}") from error
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise InvalidPrompt(
            f"the chat template does not take these messages: {reason or type(error).__name__}. "
            "Give other messages or another chat template, or a raw prompt"
        ) from error


def _render(template: str, variables: str) -> str:
    """Render a template with `variables`, which are JSON. Raises CannotRender."""
    limit = _MOST_CHARACTERS + 8 * len(variables)
    child = _take_renderer()
    question, answer = cast(IO[str], child.stdin), cast(IO[str], child.stdout)
    try:
        with suppress(BrokenPipeError):
            question.write(json.dumps([template, variables, limit]) + "\n")
            question.flush()
        reply = answer.readline()  # empty where the process ended
    except BaseException:  # the process may be in the middle of an answer: do not reuse it
        child.kill()
        _end(child)
        raise
    if reply and len(_idle) < _KEPT:
        _idle.append(child)
    else:
        _end(child)
    if not reply:
        late = f"it ran for more than {rendering.SECONDS} s"
        reasons = {rendering.LATE: late, rendering.FULL: "it fills the memory"}
        other = f"it ended its process with status {child.returncode}"
        raise CannotRender(reasons.get(child.returncode, other))
    text, reason, line = json.loads(reply)
    if text is None:
        raise CannotRender(reason, line)
    return str(text)


_idle: list[subprocess.Popen[str]] = []


def start_renderer() -> None:
    """Start a process ahead of time, while the caller does something else."""
    if not _idle:
        with suppress(SelfspecError):
            _idle.append(_take_renderer())


def _take_renderer() -> subprocess.Popen[str]:
    """Take an idle process, or start one. Raises SelfspecError."""
    with suppress(IndexError):
        while (child := _idle.pop()).poll() is not None:
            _end(child)
        return child
    try:
        return subprocess.Popen(
            [sys.executable, rendering.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        )
    except OSError as error:
        raise SelfspecError(f"{_CANNOT}: {error.strerror}") from error


def _end(child: subprocess.Popen[str]) -> None:
    with suppress(OSError), child:  # leaving closes its pipes and waits for it
        pass


@atexit.register
def _end_all() -> None:
    while _idle:
        _end(_idle.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # they belong to the parent
