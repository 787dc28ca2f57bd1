"""`selfspec serve`: a server that speaks OpenAI's protocol."""

from __future__ import annotations

from pathlib import Path

from selfspec.cli import base
from selfspec.cli.base import LOADING, SPECULATION, Asked, Flag, with_flags
from selfspec.errors import InvalidOption
from selfspec.eval.results import check_packages
from selfspec.serve.options import VARIABLE, Keys, ServeOptions, is_loopback

FLAGS = (
    *base.grouped(
        "Server", base.option_flags(ServeOptions), ("host", "port", "concurrency", "timeout")
    ),
    Flag("api_key_file", str, "File of API keys, one a line; besides those of SELFSPEC_API_KEY."),
    base.KV_MEMORY,
    *LOADING,
    *SPECULATION,
)


@with_flags(*FLAGS)
def serve(*, asked: Asked) -> None:
    """Serve a model over HTTP, as OpenAI does. The page at / is a chat; /metrics has counters.

    Answers are written together, each with the text that it has alone. Ctrl-C stops the server when
    running answers are complete.
    """
    options = base.options_of(ServeOptions, asked)
    kv_memory = base.kv_memory(asked)
    keys = Keys.found(Path(asked["api_key_file"]) if "api_key_file" in asked else None)
    if not is_loopback(options.host) and not keys:
        raise InvalidOption(
            f"host is {options.host}, which others can reach. Set {VARIABLE}, or give "
            "--api-key-file"
        )
    if "*" in (options.cors_origin or ()) and not keys:
        raise InvalidOption(
            "cors_origin is *: every web page that this machine's browser shows could ask. Name "
            f"the page, set {VARIABLE}, or give --api-key-file"
        )
    check_packages("a server", "fastapi", "uvicorn", "prometheus_client", extra="serve")
    from selfspec.serve.gate import Server, bound

    def ready(address: str) -> None:
        several = f", {options.replicas} copies," if options.replicas > 1 else ""
        base.note(f"{label}{several} at {address}/v1, a page at {address}. Ctrl-C stops it.")

    with bound(options) as at:
        if options.replicas == 1:
            speculator = base.load(asked)
            from selfspec.serve.app import make_app
            from selfspec.serve.writer import Writer

            label = speculator.label
            app = make_app(Writer(speculator, options, kv_memory), keys)
            Server(app, options, ready).run(sockets=[at])
            return
        check_packages("more than one copy", "ray", extra="ray")
        from selfspec.serve.replicas import copies, make_front

        loading = base.picked(asked, (*LOADING, *SPECULATION))
        with copies(loading, options, kv_memory) as handle:
            label = handle.label.remote().result()
            Server(make_front(handle, options, keys), options, ready).run(sockets=[at])
