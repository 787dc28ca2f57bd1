"""`selfspec serve`: a server that speaks OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import socket
from typing import Any

from selfspec.cli import common, sizes
from selfspec.cli.flags import Flag, grouped, merged, option_flags, with_flags
from selfspec.cli.settings import LOADING, SPECULATION, Settings, picked
from selfspec.cli.training import options_of
from selfspec.errors import InvalidOption
from selfspec.serve.options import VARIABLE, Keys, ServeOptions

KEYS = "api_key_file"

FLAGS = (
    *grouped("Server", option_flags(ServeOptions), ("host", "port", "concurrency", "timeout")),
    Flag(KEYS, str, "File of API keys, one a line; besides those of SELFSPEC_API_KEY."),
    Flag("kv_memory", str, "For keys and values: 500MB, 2GB. Built in: half of what is free."),
    *LOADING,
    *SPECULATION,
)


@with_flags(*FLAGS)
def serve(*, config: common.ConfigFile = None, flags: dict[str, Any]) -> None:
    """Serve a model over HTTP, as OpenAI does. The page at / is a chat; /metrics has counters.

    Answers are written together, each with the text that it has alone. Ctrl-C stops the server when
    running answers are complete.
    """
    asked = merged(config, flags, FLAGS)
    options = options_of(ServeOptions, asked)
    memory = asked.get("kv_memory")
    kv_memory = None if memory is None else sizes.parsed("kv_memory", memory)
    file = asked.get(KEYS)
    keys = Keys.found(None if file is None else Path(file))
    if not options.is_local and not keys:
        raise InvalidOption(
            f"host is {options.host}, which others can reach. Set {VARIABLE}, or give "
            "--api-key-file"
        )
    if "*" in (options.cors_origin or ()) and not keys:
        raise InvalidOption(
            "cors_origin is *: every web page that this machine's browser shows could ask. Name "
            f"the page, set {VARIABLE}, or give --api-key-file"
        )
    with _packages("serve", "a server"):
        import prometheus_client  # noqa: F401  # known to be there before a model is loaded

        from selfspec.serve.gate import bound
    start = _one if options.replicas == 1 else _several
    settings = Settings(picked(asked, LOADING), picked(asked, SPECULATION))
    with bound(options) as at:
        start(settings, at, options, keys, kv_memory)


def _one(
    settings: Settings, at: socket, options: ServeOptions, keys: Keys, kv_memory: int | None
) -> None:
    speculator = common.load(settings)
    from selfspec.serve.app import make_app
    from selfspec.serve.gate import run
    from selfspec.serve.writer import Writer

    writer = Writer(speculator, options, kv_memory)
    room = speculator.backbone.max_positions
    app = make_app(writer, speculator.label, room, options, keys)
    run(app, at, options, _ready(speculator.label))


def _several(
    settings: Settings, at: socket, options: ServeOptions, keys: Keys, kv_memory: int | None
) -> None:
    with _packages("ray", "more than one copy"):
        from selfspec.serve.replicas import copies, label, make_front
    from selfspec.serve.gate import run
    from selfspec.serve.replica import Plan

    loading = {**settings.loading, **settings.speculation}
    with copies(Plan(loading=loading, options=options, kv_memory=kv_memory)) as handle:
        said = f"{label(handle)}, {options.replicas} copies,"
        run(make_front(handle, options, keys), at, options, _ready(said))


@contextmanager
def _packages(extra: str, what: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise InvalidOption(
            f"{what} needs more packages ({error.name}): pip install 'selfspec[{extra}]'"
        ) from error


def _ready(what: str) -> Callable[[str], None]:
    return lambda address: common.note(
        f"{what} at {address}/v1, a page at {address}. Ctrl-C stops it."
    )
