"""Runs a command: errors become one line on standard error, and an exit code.

Ctrl-C is handled before anything else is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import itertools
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from selfspec.cli import interrupts

if TYPE_CHECKING:
    from types import FrameType

BUG = 70  # EX_SOFTWARE, as sysexits.h has it
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
PIPE_CLOSED = 141  # 128 + SIGPIPE


def run() -> None:
    signal.signal(signal.SIGINT, _interrupt)
    gc.set_threshold(50_000)  # objects made by imports stay: scanning them took a tenth of a start
    code = BUG
    atexit.register(lambda: _leave(code))  # the first to register is the last to be called
    try:
        from selfspec.cli import base

        base.repair_streams()
        code = main(sys.argv[1:])
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the exit is left
    except KeyboardInterrupt:
        code = _interrupted()
    sys.exit(code)


def _leave(code: int) -> None:
    """Exit at once: to tear torch down, Python takes a quarter of the time of a short answer."""
    with contextlib.suppress(OSError, ValueError):  # else Python itself reports the failed write
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _interrupt(_signal: int, frame: FrameType | None) -> None:
    interrupts.append(None)
    while frame is not None and frame.f_code.co_name != "__del__":
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == ("torch", "<module>"):
            os._exit(_interrupted())  # an exception would abort the C++ that imports parts of torch
        frame = frame.f_back
    if frame is None:  # a finaliser would swallow it, and Python would print a traceback
        raise KeyboardInterrupt


def _interrupted() -> int:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be closed
        sys.stderr.write("\nselfspec: interrupted\n")
    return INTERRUPTED


def main(arguments: Sequence[str]) -> int:
    args = reorder(arguments)
    try:
        if sys.flags.optimize > 1:  # no docstrings
            from selfspec.errors import SelfspecError

            raise SelfspecError("transformers cannot run under python -OO. Leave it out, or use -O")
        code = int(app()(args=args, prog_name="selfspec", standalone_mode=False) or 0)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as error:  # typer's own, if its help is not read to the end
        closed = isinstance(error.__context__, OSError)
        return PIPE_CLOSED if closed else int(error.code or 0)
    except Exception as error:  # noqa: BLE001  # top level: every error becomes one line
        code = _report_error(error, args)
    return _interrupted() if code == INTERRUPTED else code


@functools.cache  # a process that runs several commands builds them once
def app() -> Any:
    import typer

    from selfspec.cli import base, chat, generate, heads, measure, train

    cli = typer.Typer(
        name="selfspec",
        rich_markup_mode=None,  # plain help: brackets mean ranges here, not markup
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    cli.callback(invoke_without_command=True)(base.selfspec)
    for command in (
        *(generate.generate, chat.chat, generate.demo, generate.serve, measure.env),
        *(train.adapt, train.data, train.cache, train.datastore, train.fit, train.calibrate),
        *(measure.trace, measure.tune, measure.bench, measure.report, measure.verify),
    ):
        cli.command(cls=base.GroupedCommand)(command)
    settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}
    cli.command(context_settings=settings)(measure.lm_eval)
    cli.add_typer(heads.app, name="heads")
    return typer.main.get_command(cli)


_ANYWHERE = ("-q", "--quiet", "-v", "--verbose", "--debug")


def reorder(arguments: Sequence[str]) -> list[str]:
    """Reorder arguments for typer: those that may appear anywhere come first.

    A bare `--stats` does not consume the next word, which may be the prompt.
    """
    first = next((word for word in arguments if word not in _ANYWHERE), "")
    marker = "lm-eval" if first == "lm-eval" else "--"  # the rest is not for selfspec
    end = [*arguments, marker].index(marker)
    words = ["--stats=short" if word == "--stats" else word for word in arguments[:end]]
    return [*sorted(words, key=lambda word: word not in _ANYWHERE), *arguments[end:]]


# --- errors


def _report_error(error: Exception, args: Sequence[str]) -> int:
    """Print an error on one line; return its exit code. `args`: the command, in typer's order."""
    import traceback

    import typer

    from selfspec.cli import base

    # typer's own if the input ends at a question; else a late failure that Ctrl-C caused
    if isinstance(error, typer.Abort) or interrupts:
        return INTERRUPTED
    trace = "".join(traceback.format_exception(error))
    if "--debug" in itertools.takewhile(_ANYWHERE.__contains__, args):
        base.to_stderr(trace.rstrip())
    if isinstance(error, typer.TyperException):
        base.complain(error.format_message() + _hints(error, args))
        return error.exit_code
    if isinstance(error, OSError) and not error.filename:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            # buffered output goes to devnull: writing it would fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    message = base.error_message(error)
    base.complain(base.report_bug(error, args, trace) if message is None else message)
    return BUG if message is None else 2


def _hints(error: Any, args: Sequence[str]) -> str:
    """Advice for an error: the variable of a wrong value, known commands, options, or quotes."""
    parameter = getattr(error, "param", None)
    variable, flags = getattr(parameter, "envvar", None), getattr(parameter, "opts", ())
    by_flag = any(word.partition("=")[0] in flags for word in args)
    if isinstance(variable, str) and variable in os.environ and not by_flag:
        return f" (of {variable} in the environment)"
    message, context = str(error), cast("Any", getattr(error, "ctx", None))
    if message.startswith("No such command") and "Did you mean" not in message:
        return f" Known: {', '.join(context.command.list_commands(context))}"
    if message.startswith("No such option") and "(" not in message:
        rare = any("--help-all" in flag.opts for flag in context.command.params)
        return f". For all of them: {context.command_path} {'--help-all' if rare else '-h'}"
    unquoted = "unexpected extra argument" in message and {"generate", "demo", "trace"} & {*args}
    return ". Put a prompt of several words in quotes" if unquoted else ""
