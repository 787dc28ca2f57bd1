"""Runs a command: errors become one line on standard error, and an exit code.

Exit codes: 0 done, 1 a check failed, 2 bad input, 70 a bug of selfspec, 130 interrupted, 141 nobody
reads the output. `--debug` shows tracebacks. Nothing else is imported before Ctrl-C is minded.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

BUG = 70  # EX_SOFTWARE, as sysexits.h has it

_interrupts: list[float] = []
"""When Ctrl-C came: an import that is interrupted may fail with any error some time later."""

_AFTERMATH_S = 2.0


def main(arguments: Sequence[str], *, debug: bool = False) -> int:
    """Run one command and give its exit code; `debug` shows the tracebacks of errors."""
    try:
        return _run(list(arguments), debug=debug)
    except KeyboardInterrupt:
        return _interrupted()


def run() -> None:
    """Entry point of the console script."""
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    arguments = [word for word in given[:end] if word != "--debug"] + given[end:]
    code = 130
    signal.signal(signal.SIGINT, _interrupt)
    try:
        from selfspec.cli import streams

        streams.repair()
        code = main(arguments, debug=len(arguments) < len(given))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left is to end
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def _run(arguments: list[str], *, debug: bool) -> int:
    """A command's own exit code, or that of its error."""
    import typer

    from selfspec.cli import common

    try:
        from selfspec.cli.app import app

        code = int(app(args=ordered(arguments), prog_name="selfspec", standalone_mode=False) or 0)
    except typer.Abort:  # the end of input, where a line was asked for
        code = common.INTERRUPTED
    except SystemExit as error:  # typer's own, where its help is not read to the end
        return (
            common.PIPE_CLOSED if isinstance(error.__context__, OSError) else int(error.code or 0)
        )
    except Exception as error:  # noqa: BLE001  # the top: every error ends here, as a line
        return _explained(error, arguments, debug=debug)
    return _interrupted() if code == common.INTERRUPTED else code


_ANYWHERE = ("-q", "--quiet", "-v", "--verbose")


def ordered(arguments: Sequence[str]) -> list[str]:
    """As typer reads them: what may stand anywhere first.

    A bare `--stats` takes no word from behind it: that may be the prompt.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    first = [word for word in arguments[:end] if word in _ANYWHERE]
    words = [word for word in arguments[:end] if word not in _ANYWHERE]
    words = ["--stats=short" if word == "--stats" else word for word in words]
    return [*first, *words, *arguments[end:]]


def _variable(error: object, arguments: Sequence[str]) -> str:
    """The part of the environment that a wrong value is from, where no flag gave it."""
    wrong = getattr(error, "param", None)
    name, flags = getattr(wrong, "envvar", None), getattr(wrong, "opts", ())
    if not isinstance(name, str) or name not in os.environ:
        return ""
    given = any(word.partition("=")[0] in flags for word in arguments)
    return "" if given else f" (of {name} in the environment)"


def _quotes(error: Exception, arguments: Sequence[str]) -> str:
    """What to do about a prompt that the shell took for several."""
    several = "unexpected extra argument" in str(error)
    asks = {"generate", "demo", "trace"} & {*arguments}
    return ". Put a prompt of several words in quotes" if several and asks else ""


def _explained(error: Exception, arguments: list[str], *, debug: bool) -> int:
    """Say an error on one line; its exit code."""
    import typer

    from selfspec.cli import common, streams, unexpected
    from selfspec.errors import SelfspecError

    just_now = bool(_interrupts) and time.monotonic() - _interrupts[-1] < _AFTERMATH_S
    # a library may swallow it while it imports, and fail at what is missing then
    stopped_import = bool(_interrupts) and isinstance(error, ImportError)
    if just_now or stopped_import or unexpected.interrupted(error):
        return _interrupted()
    if debug:
        import traceback

        common.note("".join(traceback.format_exception(error)).rstrip())
    if isinstance(error, typer.TyperException):
        hints = _variable(error, arguments) + _quotes(error, arguments)
        common.complain(error.format_message() + hints)
        return error.exit_code
    if isinstance(error, OSError) and not error.filename:
        streams.silence(sys.stdout)  # what is kept back would fail again
    words = str(error) if isinstance(error, SelfspecError) else unexpected.refused(error)
    if words is not None:
        common.complain(words)
        return 2
    common.complain(unexpected.bug(error, arguments))
    return BUG


def _interrupt(*_: object) -> None:
    """Python's own handler, which keeps a note."""
    _interrupts.append(time.monotonic())
    raise KeyboardInterrupt


def _interrupted() -> int:
    from selfspec.cli import common

    common.note("\nselfspec: interrupted")
    return common.INTERRUPTED
