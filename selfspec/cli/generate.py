"""`selfspec generate`, `demo` and `serve`: prompts in, answers out, in a terminal or over HTTP."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec import files
from selfspec.cli import base
from selfspec.cli.base import GENERATION, LOADING, SHARED, SPECULATION, Args, Flag, with_flags
from selfspec.cli.chat import Writer
from selfspec.config import DEFAULT_MAX_NEW_TOKENS
from selfspec.decoding.stats import MODEL, Giver, counted, rate
from selfspec.errors import InvalidData, InvalidOption, SelfspecError, check_packages, shown
from selfspec.eval.bench import METHODS
from selfspec.eval.results import first_divergence, resume
from selfspec.hub.models import heads_name
from selfspec.serve.options import VARIABLE, Keys, ServeOptions, is_loopback

if TYPE_CHECKING:
    from torch import Tensor

    from selfspec.api.speculator import Speculator
    from selfspec.api.stream import Generation

Messages = str | list[dict[str, str]]

_FLAGS = (
    Flag("file", str, "Read the prompt from a file.", metavar="FILE"),
    Flag("prompts", str, 'Answer many prompts: {"prompt": ".."} per line.', metavar="FILE"),
    Flag("output", str, "File for the answers to --prompts, one JSON line each.", metavar="FILE"),
    Flag("overwrite", bool, "Replace an existing output.", rare=True),
    Flag("concurrency", int, "Prompts answered at once. Default: 32.", rare=True),
    base.KV_MEMORY,
    base.RAW,
    base.SYSTEM,
    base.STATS,
)


@with_flags(*_FLAGS, *SHARED)
def generate(prompt: base.Prompt = None, *, as_json: base.AsJson = False, args: base.Given) -> None:
    """Answer a prompt, or a file of prompts. Drafts change no token."""
    raw, system = args.get("raw", False), args.get("system")
    options = base.answer_options(args) | {"raw": raw}
    if {"prompts", "output"} & args.names:
        if prompt is not None or "file" in args:
            raise InvalidOption("--prompts and another prompt at once. Leave one of them out")
        if not {"prompts", "output"} <= args.keys():
            raise InvalidOption("--prompts and --output go together. Give both")
        base.emit(answer_all(args, options, more=as_json or "stats" in args.names))
        return
    base.refuse(args, {"concurrency", "kv_memory"}, "is for --prompts. Leave it out")
    text = base.read_prompt(prompt, args.get("file"), raw=raw)
    base.check_template(args)
    speculator = base.load(args)
    messages: Messages = text if raw else base.conversation(system, text)
    if as_json:
        answer, heads = speculator.generate(messages, **options), speculator.heads
        name = None if heads is None or heads.folder is None else heads_name(heads.folder)
        setup = {
            "model": speculator.label,
            "heads": heads and (args.get("heads") or name),
            "options": speculator.options.described() | options,
        }
        base.emit_json(_facts(answer) | setup)
    else:
        piece = ""
        stream = speculator.stream(messages, **options)
        for piece in stream:
            base.emit(piece)
        if not piece.endswith("\n"):
            base.emit("\n")
        answer = stream.result
        base.say_if_cut(answer, args)
    if "stats" in args:
        base.to_stderr(base.statistics(answer, args["stats"]))


def _facts(answer: Generation | SelfspecError) -> dict[str, Any]:
    if isinstance(answer, SelfspecError):
        return {"error": str(answer)}
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "stop_reason": answer.stop_reason,
        "stats": answer.stats.to_dict(),
    }


# --- a file of prompts: answers are appended to a partial file beside the output, so that the same
# command can continue it; the output is written at the end, in the order of the prompts

_MADE_BY = {"made_by": "selfspec generate"}


def answer_all(args: base.Given, options: dict[str, Any], *, more: bool) -> str:
    """Write each answer or its error to --output; return a summary. Refuses to print `more`."""
    if more:
        raise InvalidOption("--json and --stats: each line of --output has both. Leave them out")
    output, overwrite = base.check_file(args, args["output"]), args.get("overwrite", False)
    limits = {"most": args.get("concurrency", 32), "kv_memory": base.kv_memory(args)}
    prompts = _read_prompts(args["prompts"], args.get("system"), raw=options["raw"])
    base.check_template(args)
    with files.locked(output):
        files.check_file(output, overwrite=overwrite)  # another run may have written it meanwhile
        partial = output.with_name(f"{output.name}.partial")
        inputs = {"prompts": prompts, **base.pick(args, SHARED), **options}
        mark = hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()
        record, read = _MADE_BY | {"asked": mark}, lambda line: (int(line["index"]), line)
        lines: dict[int, Any] = dict(resume(partial, record, read, overwrite=overwrite))
        speculator = base.load(args)
        numbers = [number for number in range(len(prompts)) if number not in lines]
        seed, start, old_count = options.pop("seed", None), time.perf_counter(), _num_tokens(lines)
        answers = speculator.generate_each(
            (prompts[number] for number in numbers),
            seeds=None if seed is None else (seed + number for number in numbers),
            **limits,
            **options,
        )
        try:
            with base.bar("generate", "answers") as show:
                show(len(lines), len(prompts), found=True)
                for place, answer in answers:
                    line = {"index": numbers[place], **_MADE_BY, **_facts(answer)}
                    files.append(partial, json.dumps(line, ensure_ascii=False))
                    lines[numbers[place]] = line
                    show(len(lines), len(prompts))
        except KeyboardInterrupt:
            base.note(f"{len(lines)} of {len(prompts)} answered; the same command continues")
            raise
        seconds = time.perf_counter() - start
        sorted_lines = [lines[number] for number in sorted(lines)]
        texts = (json.dumps(line, ensure_ascii=False) for line in sorted_lines)
        files.write(output, "".join(f"{text}\n" for text in texts))
        partial.unlink()
    errors = [line["error"] for line in sorted_lines if "error" in line]
    failures = f", without an answer: {len(errors)}; the first: {errors[0]}" if errors else ""
    count, tokens = counted(len(sorted_lines) - len(errors), "answer"), _num_tokens(lines)
    speed = f" ({rate((tokens - old_count) / seconds)} with prompts)" if tokens > old_count else ""
    return f"{output}: {count}, {counted(tokens, 'token')}{speed}{failures}\n"


def _num_tokens(lines: Mapping[int, Any]) -> int:
    return sum(len(line.get("token_ids", ())) for line in lines.values())


def _read_prompts(path: str, system: str | None, *, raw: bool) -> list[Messages]:
    prompts: list[Messages] = []
    for number, text in files.json_lines(files.local_path(path), base.MOST_PROMPT_BYTES):
        place = f"{path}, line {number}"
        match files.parse_json(text, place):
            case {"prompt": str(prompt), **others} if prompt.strip() and not others:
                prompts.append(prompt if raw else base.conversation(system, prompt))
            case {"messages": list(messages), **others} if not others:
                if raw or system is not None:
                    problem = f'{place}: "messages" cannot go with --raw or --system'
                    raise InvalidData(f'{problem}. Give "prompt", or leave the flag out')
                prompts.append(messages)
            case record:
                expected = 'only {"prompt": "…"}, not empty, or {"messages": […]}'
                raise InvalidData(f"{place} is {shown(record)}, expected {expected}")
    if not prompts:
        raise InvalidData(f'{path} holds no prompts. Give lines like {{"prompt": "…"}}')
    return prompts


# --- demo

_PROMPT = "Explain in a few sentences how a rainbow forms."
_WARM_UP_TOKENS = 4
_NEAR = 0.05  # relative difference in speed within the noise of one run


@with_flags(base.RAW, *LOADING, *SPECULATION, GENERATION[0])
def demo(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The question.")] = _PROMPT,
    *,
    args: base.Given,
) -> None:
    """Compare with Hugging Face's generate. Both answer one prompt, one after the other.

    Both run in float32 unless --dtype is given: at lower precision, two programs may resolve near
    ties between tokens differently. Exit code 1 if the texts differ.
    """
    from selfspec.model.weights import TEAM

    count = base.answer_options(args).get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    text, raw = base.read_prompt(prompt), args.get("raw", False)
    base.check_template(args, "demo")
    speculator = base.load({"dtype": "float32"} | args, runs_model=True)
    (hf_tokens, hf_s), (tokens, seconds) = race(speculator, text, count, raw=raw)
    if TEAM.crowded:
        base.note("other programs keep this machine busy: compare again when it is idle")
    place = first_divergence(hf_tokens, tokens)
    speeds = f"Hugging Face {rate(len(hf_tokens) / hf_s)}, selfspec {rate(len(tokens) / seconds)}"
    base.emit(f"{speeds}: {verdict(place, hf_s / seconds)}\n")
    if place is not None:
        raise typer.Exit(1)


def verdict(differs_at: int | None, gain: float) -> str:
    """Say how much faster, and whether the texts match or first differ at a token, from 0."""
    speed = "about as fast" if gain > 1 - _NEAR else f"{1 / gain:.1f}× slower"
    speed = f"{gain:.1f}× faster" if gain > 1 + _NEAR else speed
    if differs_at is None:
        return f"{speed}; same text: yes"
    tie = "a near tie may round differently; --dtype float64 tells"
    return f"{speed}; same text: no, token {differs_at + 1} differs ({tie})"


def race(
    speculator: Speculator, text: str, count: int, *, raw: bool
) -> list[tuple[list[int], float]]:
    """Decode greedily with both, from the same weights; show the texts, return tokens and seconds.

    They run in turn, as they would share the processor otherwise. A warm-up is not timed.
    """
    from selfspec.api.text import encode

    ids = encode(speculator.tokenizer, text, raw=raw).to(speculator.backbone.device)
    runs = []
    for title, write in (("Hugging Face generate", stream_hf), ("selfspec", stream_selfspec)):
        write(speculator, ids, _WARM_UP_TOKENS, lambda *_: None)
        base.emit(f"{title}:\n")
        writer = Writer(speculator.backbone.num_layers)
        start = time.perf_counter()
        tokens = write(speculator, ids, count, writer.write)
        seconds = time.perf_counter() - start
        writer.end(f"\n({seconds:.1f} s)\n\n")
        runs.append((tokens, seconds))
    return runs


Show = Callable[[str, Giver], None]  # called with text and its giver


def stream_hf(speculator: Speculator, ids: Tensor, count: int, show: Show) -> list[int]:
    from transformers import TextStreamer

    class Shown(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: ARG002
            show(text, Giver(MODEL))

    tokenizer: Any = speculator.tokenizer
    streamer = Shown(tokenizer, skip_prompt=True, skip_special_tokens=True)
    return METHODS["hugging-face"].decode(speculator, ids, count, {}, streamer).token_ids


def stream_selfspec(speculator: Speculator, ids: Tensor, count: int, show: Show) -> list[int]:
    stream = speculator.stream(ids, max_new_tokens=count, do_sample=False)
    for piece in stream:
        show(piece, stream.giver)
    return stream.result.token_ids


# --- serve

_USUAL = ("host", "port", "concurrency", "timeout")  # flags that --help lists
SERVING = (
    *base.group_flags("Server", _USUAL, *base.option_flags(ServeOptions)),
    Flag("api_key_file", str, "File of API keys, one per line, besides SELFSPEC_API_KEY."),
    base.KV_MEMORY,
    *LOADING,
    *SPECULATION,
)


@with_flags(*SERVING)
def serve(*, args: Args) -> None:
    """Serve a model over HTTP with OpenAI's API. The page at / is a chat; /metrics has counters.

    Answers are generated in one batch, each with the text that it would have alone. After Ctrl-C
    the server completes running answers, then stops.
    """
    options = base.options_of(ServeOptions, args)
    kv_memory = base.kv_memory(args)
    keys = Keys.read(files.local_path(args["api_key_file"]) if "api_key_file" in args else None)
    advice = f"Set {VARIABLE}, or give --api-key-file"
    if not is_loopback(options.host) and not keys:
        raise InvalidOption(f"host is {options.host}, which others can reach. {advice}")
    if "*" in (options.cors_origin or ()) and not keys:
        problem = "cors_origin is *: every web page that a browser here shows could send requests"
        raise InvalidOption(f"{problem}. {advice}, or name the page")
    check_packages("a server", "fastapi", "uvicorn", "prometheus_client", extra="serve")
    from selfspec.serve.gate import Server, bind_socket

    def announce(address: str) -> None:
        count = f", {options.replicas} copies," if options.replicas > 1 else ""
        base.note(f"{label}{count} at {address}/v1, a page at {address}. Ctrl-C stops it.")

    with bind_socket(options) as socket:
        if options.replicas == 1:
            base.note(f"loading {args.get('model', 'the default model')}")
            speculator = base.load(args)
            from selfspec.serve.app import make_app
            from selfspec.serve.writer import Writer

            label = speculator.label
            app = make_app(Writer(speculator, options, kv_memory), keys)
            Server(app, options, announce).run(sockets=[socket])
            return
        check_packages("more than one copy", "ray", extra="ray")
        from selfspec.serve.replicas import copies, make_front

        loading = base.pick(args, (*LOADING, *SPECULATION))
        with copies(loading, options, kv_memory) as handle:
            label = handle.label.remote().result()
            Server(make_front(handle, options, keys), options, announce).run(sockets=[socket])
