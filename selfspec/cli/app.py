"""The commands of `selfspec` and its help; `main` runs them."""

from __future__ import annotations

import logging
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
    demo,
    env,
    fit,
    generate,
    heads,
    progress,
    report,
    serve,
    trace,
    tune,
    verify,
)
from selfspec.errors import InvalidOption

app = typer.Typer(
    name="selfspec",
    rich_markup_mode=None,  # plain help: brackets mean ranges here, not markup
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(demo.demo)
app.command()(serve.serve)
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
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No notices and no progress; errors only.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say how things are done, too.")
    ] = False,
    debug: Annotated[  # noqa: ARG001  # read by run(), listed here for --help
        bool, typer.Option("--debug", help="Show tracebacks.")
    ] = False,
) -> None:
    """Make a Hugging Face model generate faster, with the same text and without a second model.

    --quiet, --verbose and --debug may stand anywhere. The environment may stand for flags:
    SELFSPEC_MODEL for --model, SELFSPEC_CONFIG for --config.

    Exit codes: 0 done, 1 a check failed, 2 bad input, 70 a bug of selfspec, 130 stopped by Ctrl-C,
    141 nobody reads the output.
    """
    if quiet and verbose:
        raise InvalidOption("--quiet and --verbose at once. Leave one of them out")
    progress.shown = not quiet
    log_to_stderr(logging.ERROR if quiet else logging.DEBUG if verbose else logging.INFO)
    if version:
        common.emit(metadata.version("selfspec") + "\n")
    elif context.invoked_subcommand is None:
        common.emit(context.get_help() + "\n")


def log_to_stderr(level: int = logging.INFO) -> None:
    """Show what the package logs, from this level up, as plain lines on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("selfspec: %(message)s"))
    logger = logging.getLogger("selfspec")
    logger.setLevel(level)
    logger.handlers[:] = [handler]
