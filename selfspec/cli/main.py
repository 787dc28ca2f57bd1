"""The `selfspec` command. Errors become one line on standard error; `--debug` shows more.

Exit codes: 0 done, 1 a check failed, 2 bad input, 130 interrupted, 141 nobody reads the output.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

from selfspec.cli import (
    bench,
    cache,
    calibrate,
    chat,
    common,
    data,
    env,
    fit,
    generate,
    heads,
    report,
    trace,
    tune,
    verify,
)
from selfspec.errors import SelfspecError

app = typer.Typer(
    name="selfspec",
    rich_markup_mode=None,  # plain help: brackets mean ranges here, not markup
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(env.env)
app.command()(data.data)
app.command()(cache.cache)
app.command()(fit.fit)
app.command()(calibrate.calibrate)
app.command()(trace.trace)
app.command()(tune.tune)
app.command()(bench.bench)
app.command()(report.report)
app.command()(verify.verify)
app.add_typer(heads.app, name="heads")


@app.callback(invoke_without_command=True)
def selfspec(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[  # noqa: ARG001  # read by run(), listed here for --help
        bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere.")
    ] = False,
) -> None:
    """Faster generation from a frozen decoder: exit heads draft, the deep layers check."""
    log_to_stderr()
    if version:
        common.emit(metadata.version("selfspec") + "\n")
    elif context.invoked_subcommand is None:
        common.emit(context.get_help() + "\n")


def log_to_stderr() -> None:
    """Show what the package logs, from notices up, as plain lines on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("selfspec: %(message)s"))
    logger = logging.getLogger("selfspec")
    logger.setLevel(logging.INFO)
    logger.handlers[:] = [handler]


def main(arguments: Sequence[str], *, debug: bool = False) -> int:
    """Run one command and give its exit code; `debug` lets errors through."""
    try:
        code = app(args=list(arguments), prog_name="selfspec", standalone_mode=False)
    except typer.TyperException as error:
        if debug:
            raise
        common.complain(error.format_message())
        return error.exit_code
    except SelfspecError as error:
        if debug:
            raise
        common.complain(error)
        return 2
    except typer.Abort:
        code = common.INTERRUPTED
    if code == common.INTERRUPTED:
        common.note("\nselfspec: interrupted")
    return int(code or 0)


def run() -> None:
    """Entry point of the console script."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    sys.exit(main(arguments, debug=len(arguments) < len(sys.argv) - 1))
