"""A program that renders chat templates for `chat_template`, which runs this file as a process.

For each line of JSON, `[template, variables, most characters]`, it writes one: `[text, null, null]`
or `[null, reason, line of the template]`. A template is an untrusted program, and no other Python
code runs during `10**(10**9)`. So the process may use `MEMORY` bytes, and the system ends it after
`SECONDS`. Templates have the same functions and filters as in transformers.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace as AnyNamespace

MEMORY = 256 << 20  # bytes of address space; the program itself takes 30 MB
SECONDS = 1.5  # of CPU time, so that a busy machine fails none: a text takes milliseconds
FULL = 3  # exit status when memory ran out
LATE = -getattr(signal, "SIGPROF", -1)  # exit status when time ran out


class Generation(Extension):
    """`{% generation %}` marks the assistant's text, and does not change it."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 has it

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse a block that renders as its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


class Namespace(AnyNamespace):
    """Refuses names with a leading underscore: they give access to Python's internals."""

    def __init__(self, /, *entries: Any, **values: Any) -> None:
        super().__init__()
        for name, value in dict(*entries, **values).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot have {name!r}")
        super().__setitem__(name, value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)  # fmt: skip


def _raise(message: str) -> None:
    raise TemplateError(message)


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, LoopControls]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
        "dict": lambda *entries, **values: dict(*entries, **values),  # no access to the class
        "namespace": Namespace,
    }
    return environment.from_string(template)


def _answer(line: str) -> list[Any]:
    template, variables, limit = json.loads(line)
    try:
        text = _compile(template).render(json.loads(variables))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # a template can raise anything
        reason = " ".join(str(error)[:500].split()) or type(error).__name__
        return [None, reason, getattr(error, "lineno", None)]
    if len(text) > limit:
        return [None, f"it writes more than {limit:,} characters", None]
    return [text, None, None]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    with contextlib.suppress(ImportError, ValueError):  # Windows, or a lower limit is set
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin:
        _end_after(SECONDS)
        try:
            answer = json.dumps(_answer(line))
        except MemoryError:
            os._exit(FULL)
        _end_after(0)
        print(answer, flush=True)  # noqa: T201  # to the parent


def _end_after(seconds: float) -> None:
    """End this process after so many seconds, whatever it is doing; 0 cancels this."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)  # no handler: the signal ends it
    elif seconds:
        faulthandler.dump_traceback_later(seconds, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
