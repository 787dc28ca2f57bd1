"""The first run on a GPU, as prepared commands that end by themselves and keep what they have.

    python -m eval.gpu_hour parts --output parts    # where the default model is installed
    python -m eval.gpu_hour check --weights parts --output out    # and there: speed, fit

`check`: whether graphs are captured and compute what they should, where rounds wait. `speed`: the
default model, and random weights in larger shapes, beside Hugging Face. `fit`: heads on text that
the model writes. A step begins only if it fits into `--minutes`, and is stopped after three times
its reckoned seconds; OUTPUT/COMMAND.json is written after each. Exit code 1 where one failed.
`--tiny`: a tiny random model, on a CPU too. Without the default model's file, or the package `gguf`
to read it, weights of its shape are random, and the result says so.
"""

from __future__ import annotations

import gc
import hashlib
import json
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import typer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from eval import lab, peers
from selfspec.api.speculator import Speculator, wrap
from selfspec.api.text import encode
from selfspec.config import SpeculationOptions
from selfspec.decoding.acceptance import Proposed, Target, Verdict
from selfspec.decoding.engine import Runtime
from selfspec.decoding.measure import Clock, quick_costs, step_speed
from selfspec.decoding.stats import GenerationStats
from selfspec.errors import InvalidData, ModelNotFound, first_line
from selfspec.eval import concurrency, verify
from selfspec.eval.bench import endless
from selfspec.eval.verify import WrongDrafter, greedy_request
from selfspec.files import write
from selfspec.hub.models import default_model_file, load_model
from selfspec.model.cuda_graph import Capture, Work, graph_capture, uncaptured
from selfspec.training import fit, records, selfgen, text
from selfspec.training.features import StreamSource, whole
from selfspec.training.options import CacheOptions, DataOptions, FitOptions, plain
from selfspec.training.recipe import Passages, read_recipe
from selfspec.untrusted import read_json

DEFAULT, SMALL, LARGE = "smollm2-135m", "llama-3.2-1b", "llama-3.1-8b"
TINY = lab.Shape(32, 64, 6, 4, 2, 96, 512)
SIZES = (  # of a shape, as LlamaConfig calls them
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
)
GRAPHS, GENERIC = "cuda-graph", "generic"
BF16, FP32 = torch.bfloat16, torch.float32
ROWS, CHANCES, TEXTS = (2, 4, 8, 16), (0.5, 0.7, 0.8, 0.9), (1, 2, 4, 8, 16, 32)
QUESTIONS = (
    "Explain in a few sentences how a rainbow forms.",
    "Write a Python function that counts the words in a file.",
    "Sam has 12 apples, gives away 5 and buys twice as many as are left. How many has he now?",
)
TEXT, HEADS = "text.jsonl.gz", "heads.zip"

Found = dict[str, Any]
"""What a step fills in; it stays where the step fails."""


# --- the models -----------------------------------------------------------------------------------


class Hour:
    """What the steps of a command share."""

    def __init__(self, output: Path, weights: Path | None, minutes: float, *, tiny: bool) -> None:
        self.output, self.weights, self.minutes, self.tiny = output, weights, minutes, tiny
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.cuda else "cpu")
        self.tokens = 12 if tiny else 64
        self._ready: dict[tuple[str, torch.dtype, str], Speculator] = {}

    @cached_property
    def file(self) -> tuple[Path | None, str]:
        """The default model's file, or none and why."""
        try:
            file = default_model_file() if self.weights is None else joined(self.weights)
        except ModelNotFound as error:
            return None, first_line(error)
        return (file, "") if find_spec("gguf") else (None, f"no package gguf to read {file.name}")

    def on(self, name: str, dtype: torch.dtype = BF16, executor: str = GRAPHS) -> Speculator:
        """A model on an executor. Models of other names go."""
        if any(other != name for other, *_ in self._ready):
            self.drop()
        if (name, dtype, executor) not in self._ready:
            alike = (one for (_, other, _), one in self._ready.items() if other == dtype)
            known = next(((one.model, one.tokenizer, one.label) for one in alike), None)
            model, tokenizer, label = known or self._loaded(name, dtype)
            heads = None if name == DEFAULT else "none"
            made = wrap(model, tokenizer, heads=heads, label=label, executor=executor)
            self._ready[name, dtype, executor] = made
        return self._ready[name, dtype, executor]

    def drop(self) -> None:
        self._ready.clear()
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # what it compiled holds the models
        gc.collect()
        torch.cuda.empty_cache()

    def _loaded(self, name: str, dtype: torch.dtype) -> tuple[Any, Any, str]:
        file, why = self.file if name == DEFAULT and not self.tiny else (None, "")
        if file is not None:
            model, tokenizer, found = load_model(file, dtype=dtype, device=str(self.device))
            return model, tokenizer, found.label
        shape = TINY if self.tiny else lab.SHAPES[name]
        own: Any = dict(zip(SIZES, shape, strict=True)) | {"tie_word_embeddings": name != LARGE}
        own["initializer_range"] = 0.3 if self.tiny else 0.02
        with self.device:
            made: Any = AutoModelForCausalLM.from_config(LlamaConfig(**own), dtype=dtype)
        label = f"random weights, {'tiny' if self.tiny else name}{why and f': {why}'}"
        return made.eval(), tiny_tokenizer() if self.tiny else None, label

    def prompts(self, on: Speculator) -> list[Tensor]:
        """[1, P] each; without a tokenizer one of any ids."""
        if on.tokenizer is None:
            return [torch.arange(64, device=self.device)[None]]
        return [encode(on.tokenizer, question).to(self.device) for question in QUESTIONS]

    def answer(self, on: Speculator, prompt: int = 0, **options: Any) -> GenerationStats:
        asked: Any = {"max_new_tokens": self.tokens, "do_sample": False, **options}
        with endless(on):
            return on.generate(self.prompts(on)[prompt], **asked).stats


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(96)}, "w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0")
    made.chat_template = "{% for m in messages %}{{ m.content }} w0 {% endfor %}"
    return made


# --- drafts that stay as often as is wanted -------------------------------------------------------


class Planted(Runtime):
    """Drafts that cost nothing and stay by chance: near ties of random weights decide nothing."""

    drafts: int
    chance: float
    dice: random.Random
    lossless = False

    def drafter(self, *_: Any) -> WrongDrafter:
        return WrongDrafter(width=self.drafts)

    def rule(self, *_: Any) -> Planted:
        return self

    def verdict(self, _: Tensor, target: Target, row: int, proposed: Proposed) -> Verdict:
        token = target.best[row]  # read in any case, as a rule reads it
        kept = bool(proposed) and self.dice.random() < self.chance
        return Verdict(proposed[0].token, 0) if kept else Verdict(token)


def planted(on: Speculator, drafts: int, chance: float) -> Speculator:
    made = Speculator(on.backbone, on.tokenizer, None, "", SpeculationOptions(drafter="none"))
    made.runtime = runtime = Planted(on.backbone, None, None)
    runtime.drafts, runtime.chance, runtime.dice = drafts, chance, random.Random(0)
    return made


# --- check ----------------------------------------------------------------------------------------


def machine(hour: Hour, found: Found) -> None:
    found |= records.machine() | {"cuda": torch.version.cuda, "no_weights": hour.file[1]}
    if hour.cuda:
        about = torch.cuda.get_device_properties(hour.device)
        found |= {"memory_gb": about.total_memory / 1e9, "capability": (about.major, about.minor)}


def captures(hour: Hour, found: Found) -> None:
    """Of passes of 1 to 16 rows: how many graphs, how long they take to make, their memory."""
    on, seconds = hour.on(DEFAULT), list[float]()
    executor: Any = on.backbone._executor
    found |= {"model": on.label, "captured": executor.replays.captures}

    def strategy() -> Capture:
        inner = graph_capture(hour.device) if hour.cuda else uncaptured

        def capture(work: Work) -> Work:
            start = time.perf_counter()
            try:
                return inner(work)
            except RuntimeError as error:  # after which the executor goes on without graphs
                found["error"] = first_line(error)
                raise
            finally:
                seconds.append(time.perf_counter() - start)

        return capture

    before = torch.cuda.memory_reserved()
    executor.start_capture(strategy)
    for rows in (1, *ROWS):
        hour.answer(planted(on, rows - 1, 0.5))
    found |= {"graphs": len(seconds), "seconds": sum(seconds)}
    found["memory_mb"] = (torch.cuda.memory_reserved() - before) / 1e6
    if hour.cuda and not executor.replays.captures:
        raise RuntimeError("nothing was captured")


def bits(hour: Hour, found: Found, executor: str, dtype: torch.dtype) -> None:
    """Logits of 64 positions, by passes of more rows against passes of one."""
    backbone = hour.on(DEFAULT, dtype, executor).backbone
    ids = torch.arange(64, device=hour.device) % backbone.vocab_size
    alone = verify.logits_of(backbone, ids, verify.Way([1]))
    for rows in ROWS:
        seen = verify.Bits()
        seen.compare(f"{rows} rows", verify.logits_of(backbone, ids, verify.Way([rows])), alone)
        found[str(rows)] = {"differing": seen.differing, "first": seen.first}


def ways(on: Speculator) -> dict[str, tuple[Speculator, Found]]:
    drafted = planted(on, 7, 0.8)
    return {"plain": (on, {"speculate": False}), "7 drafts": (drafted, {}), "default": (on, {})}


def waits(hour: Hour, found: Found, executor: str) -> None:
    """Where the host waits for the device, by torch's warnings; prompt included."""
    for way, (on, options) in ways(hour.on(DEFAULT, executor=executor)).items():
        hour.answer(on, **options)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                rounds = hour.answer(on, **options).rounds
            finally:
                torch.cuda.set_sync_debug_mode("default")
        said = [one for one in heard if "synchroniz" in str(one.message)]
        places = Counter(f"{Path(one.filename).name}:{one.lineno}" for one in said)
        found[way] = {"a_round": len(said) / rounds, "places": dict(places.most_common(8))}


def profiled(hour: Hour, found: Found, executor: str) -> None:
    """Calls of CUDA a round, and what takes longest: count and microseconds; prompt included."""
    kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * hour.cuda]
    spent = "self_device_time_total" if hour.cuda else "self_cpu_time_total"
    for way, (on, options) in ways(hour.on(DEFAULT, executor=executor)).items():
        hour.answer(on, **options)
        with profile(activities=kinds) as seen:
            rounds = hour.answer(on, max_new_tokens=5, **options).rounds
        table: Any = sorted(seen.key_averages(), key=lambda one: -getattr(one, spent))
        each = {one.key[:80]: (one.count / rounds, getattr(one, spent) / rounds) for one in table}
        calls = {key: count for key, (count, _) in each.items() if key.startswith("cu")}
        found[way] = {"rounds": rounds, "calls": calls, "longest": dict([*each.items()][:12])}


def lossless(hour: Hour, found: Found, executor: str, dtype: torch.dtype) -> None:
    """The rungs of `selfspec verify`; its copy in float64 is the same for all, so made once."""
    on = hour.on(DEFAULT, dtype, executor)
    asked = [greedy_request(on, ids, hour.tokens // 4) for ids in hour.prompts(on)[:2]]
    cases = [verify.Case(id=f"prompt {number}", request=one) for number, one in enumerate(asked)]
    rungs = {*range(1, 8)} - ({3} if (executor, dtype) != (GRAPHS, FP32) else set())
    subject = verify.Subject(speculator=on, cases=cases, rungs=rungs, max_copy_gb=8.0)
    for claim, rung in verify.climb(subject):
        found[claim] = [rung.outcome, rung.found]
    if failed := [claim for claim, (outcome, _) in found.items() if outcome == "failed"]:
        raise RuntimeError(f"not so: {'; '.join(failed)}")


# --- speed ----------------------------------------------------------------------------------------


def copied(hour: Hour, found: Found) -> None:
    """A copy within the device, bytes read and written."""
    old = torch.ones(1 << (20 if hour.tiny else 30), device=hour.device, dtype=torch.uint8)
    new = torch.empty_like(old)
    seconds = Clock(hour.device, 5).seconds({"": lambda: new.copy_(old)})[""]
    found["bytes_per_s"] = 2 * old.nbytes / seconds


def theirs(hour: Hour, found: Found, name: str, setting: Found) -> None:
    """Hugging Face's `generate`: tokens per second behind the first; a first try does not count.

    The longest prompt goes first: what is compiled for a static cache serves shorter ones.
    """
    on = hour.on(name, executor=GENERIC)
    timed = partial(peers.timed, on, "hugging-face", setting)
    asked = sorted(hour.prompts(on), key=Tensor.numel, reverse=True)
    first, *tries = [timed(ids, hour.tokens) for ids in (asked[0], *asked)]
    behind = sum(one["seconds"] - one["first_s"] for one in tries)
    rate = sum(len(one["token_ids"]) - 1 for one in tries) / behind
    found |= {"model": on.label, "first_try_s": first["seconds"], "tokens_per_s": rate}


def pace(hour: Hour, on: Speculator, most: int = 3, **options: Any) -> Found:
    """Tokens per second behind the first, over the answers to some prompts; a try goes first."""
    prompts = range(len(hour.prompts(on)))[:most]
    _, *answers = [hour.answer(on, prompt, **options) for prompt in (0, *prompts)]
    tokens = sum(one.new_tokens - 1 for one in answers)
    seconds, rounds = (sum(getattr(one, n) for one in answers) for n in ("decode_s", "rounds"))
    return {"tokens_per_s": tokens / seconds, "tokens_a_round": tokens / rounds}


def ours(hour: Hour, found: Found, name: str, executor: str) -> None:
    """Plain decoding, passes by rows against the memory's limit, and what `generate` drafts."""
    on = hour.on(name, executor=executor)
    found |= {"model": on.label, "plain": pace(hour, on, speculate=False)}
    found["step"] = step_speed(on.backbone, clock=Clock(hour.device, 5)).to_dict()
    ids = torch.arange(min(8192, on.backbone.vocab_size), device=hour.device)
    heads = on.heads or lab.untrained(on.backbone, 0, "deep-fused", ids)
    found["costs_in_steps"] = asdict(quick_costs(on.backbone, heads))
    if name == DEFAULT:
        found["default"] = pace(hour, on)


def swept(hour: Hour, found: Found, name: str) -> None:
    """Drafts that cost nothing to make and stay with a given chance, by how many a round."""
    on = hour.on(name)
    for rows in ROWS:
        for chance in CHANCES:
            drafted = planted(on, rows - 1, chance)
            found[f"{rows - 1} drafts, {chance:g}"] = pace(hour, drafted, most=1)


def batches(hour: Hour, found: Found, name: str) -> None:
    """Tokens per second of many texts at once, prompts included."""
    on = hour.on(name)
    ids, writers = hour.prompts(on)[0], {"plain": concurrency.ours(speculate=False)}
    writers["Hugging Face, padded"] = concurrency.padded_batch
    with endless(on):
        for texts in TEXTS[: 2 if hour.tiny else None]:
            for way, writer in writers.items():
                load, answers = writer(on, [ids] * texts, hour.tokens // 2, texts)
                found.setdefault(way, {})[texts] = sum(map(len, answers)) / load.seconds


# --- fit ------------------------------------------------------------------------------------------


def written(hour: Hour, found: Found) -> None:
    """Text by the built-in recipe, for nearly half of the time; one batch at least."""
    on = hour.on(DEFAULT, executor="auto")
    found |= {"model": on.label, "executor": on.backbone.executor_name}
    options = DataOptions(batch_size=16)
    if hour.tiny:
        options = replace(options, batch_size=24, max_new_tokens=8, max_question_tokens=4)
    writer = text.Writer(hour.output / TEXT, {**plain(options), "model": on.label}, {})
    author = selfgen.Author(on.backbone, on.tokenizer, options, lambda _: None)
    recipe = read_recipe()
    prompts = author.prompts(recipe, Passages(None, tuple(recipe.languages)))
    propose = selfgen.here(selfgen.Written(author, prompts).propose)
    source = selfgen.Admission(options, writer.records())
    start, most = time.monotonic(), 0.0 if hour.tiny else 60 * hour.minutes * 0.45
    for counts in selfgen.write(source, writer, options, propose):
        found |= {"seconds": time.monotonic() - start, "answer_tokens": counts.answer_tokens}
        if found["seconds"] >= most:
            break


def fitted(hour: Hour, found: Found) -> None:
    """Heads of the default recipe, features made on the way; agreement on a 20th of the talks."""
    on, batch_tokens = hour.on(DEFAULT, executor=GENERIC), CacheOptions().batch_tokens
    backbone, tokenizer, size = on.backbone, on.tokenizer, on.backbone.vocab_size
    options = replace(
        FitOptions(), draft_vocab_size=min(size, FitOptions().draft_vocab_size or size)
    )
    most, source = min(batch_tokens, backbone.max_positions), hour.output / TEXT
    talks = text.read_conversations(source, tokenizer, vocab_size=size, max_length=most)
    streams = []
    for some, measured in zip(text.split(talks), (False, True), strict=True):
        spec = fit.feature_spec(backbone, options, measured=measured)
        streams.append(whole(StreamSource(backbone, spec, some, batch_tokens)))
    job = fit.Job(
        backbone=backbone,
        base_model=on.label,
        train=streams[0],
        validation=streams[1],
        options=options,
        special_ids=text.special_ids(tokenizer) if tokenizer else (),
        data=TEXT,
    )
    made = fit.fit(job)
    found["metrics"] = made.metrics
    with tempfile.TemporaryDirectory() as folder:
        records.write(Path(folder, "heads"), made, {"base_model": on.label, **plain(options)})
        archive = shutil.make_archive(f"{folder}/packed", "zip", f"{folder}/heads")
        write(hour.output / HEADS, Path(archive).read_bytes())
    found["heads_mb"] = (hour.output / HEADS).stat().st_size / 1e6
    drafting = wrap(on.model, tokenizer, heads=made.heads, executor=GRAPHS)
    for way, asked in (("plain", {"speculate": False}), ("heads", {"never_slower": False})):
        found[way] = pace(hour, drafting, **asked)


# --- steps, within their time ---------------------------------------------------------------------


class Step(NamedTuple):
    name: str
    seconds: float
    """Reckoned, with what it loads."""
    work: Callable[..., None]
    given: Found
    cuda: bool = False
    """Whether it means nothing without."""


def check_steps() -> Iterator[Step]:
    yield Step("machine", 2, machine, {})
    yield Step("captures", 20, captures, {})
    for executor in (GRAPHS, GENERIC):
        given: Found = {"executor": executor}
        yield Step(f"waits, {executor}", 8, waits, given, cuda=True)
        yield Step(f"profile, {executor}", 8, profiled, given)
    for dtype in (BF16, FP32):
        for executor in (GRAPHS, GENERIC):
            given = {"executor": executor, "dtype": dtype}
            yield Step(f"bits, {executor}, {dtype}", 6, bits, given)
            yield Step(f"verify, {executor}, {dtype}", 30, lossless, given)


THEIRS: dict[str, tuple[float, Found]] = {
    "eager": (8, {}),
    "prompt lookup": (8, {"prompt_lookup_num_tokens": 10}),
    "static cache": (20, {"cache_implementation": "static"}),  # `generate` compiles it on a GPU
}


def speed_steps() -> Iterator[Step]:
    yield Step("copy", 3, copied, {})
    for name, load in ((DEFAULT, 5), (LARGE, 15), (SMALL, 5)):
        given: Found = {"name": name}
        for executor in (GRAPHS, GENERIC):
            yield Step(f"{name}, {executor}", load + 10, ours, {**given, "executor": executor})
        yield Step(f"{name}, planted drafts", 10, swept, given)
        yield Step(f"{name}, batches", 15, batches, given)
        for way, (seconds, setting) in THEIRS.items():
            own = {**given, "setting": setting}
            yield Step(f"{name}, Hugging Face, {way}", seconds, theirs, own)


def fit_steps() -> Iterator[Step]:
    yield Step("machine", 2, machine, {})
    yield Step("text", 100, written, {})
    yield Step("fit", 60, fitted, {})


class TimeUp(BaseException):
    """Not an Exception: libraries catch those."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    def over(*_: object) -> None:
        raise TimeUp(f"stopped after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def carried_out(
    hour: Hour, name: str, steps: Sequence[Step], now: Callable[[], float] = time.monotonic
) -> None:
    """All steps that fit, in their order. Exit code 1 where one failed."""
    end = now() + 60 * hour.minutes
    entries: dict[str, Found] = {step.name: {"outcome": "not begun"} for step in steps}
    facts = {"command": lab.command(), "minutes": hour.minutes, "steps": entries}
    for step in steps:
        left = end - now()
        if step.cuda and not hour.cuda:
            entries[step.name] = {"outcome": "skipped: no CUDA"}
        elif step.seconds <= left:
            entries[step.name] = begun(hour, step, min(left, 3 * step.seconds))
        print(f"{left:6.1f} s left, {step.name}: {entries[step.name]['outcome']}", flush=True)
        write(hour.output / f"{name}.json", json.dumps(facts, indent=1) + "\n")
    if any(entry["outcome"] == "failed" for entry in entries.values()):
        raise typer.Exit(1)


def begun(hour: Hour, step: Step, most: float) -> Found:
    """What became of a step."""
    found: Found = {}
    entry: Found = {"outcome": "done", "found": found}
    start = time.perf_counter()
    if hour.cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        with within(most):
            step.work(hour, found, **step.given)
    except (Exception, TimeUp) as error:  # noqa: BLE001  # whatever fails: the next step goes on
        places = traceback.extract_tb(error.__traceback__)[-5:]
        entry |= {"outcome": "failed", "error": type(error).__name__, "said": first_line(error)}
        entry["trace"] = [f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in places]
    if entry.get("error") == "OutOfMemoryError":
        hour.drop()
    peak = torch.cuda.max_memory_allocated() / 1e9
    return entry | {"seconds": time.perf_counter() - start, "peak_gb": peak}


# --- the file in parts ----------------------------------------------------------------------------

PART, MANIFEST = 40 << 20, "parts.json"


def parts(output: Path) -> None:
    """The default model's file in parts of 40 MiB."""
    file = default_model_file()
    data = file.read_bytes()
    for number, start in enumerate(range(0, len(data), PART)):
        write(output / f"{file.name}.part-{number:02}", data[start : start + PART])
    write(output / MANIFEST, json.dumps(identity(data)) + "\n")


def joined(folder: Path) -> Path:
    """The file that the parts make, beside them. Raises ModelNotFound, InvalidData."""
    found = sorted(folder.glob("*.gguf.part-*"))
    if not found:
        raise ModelNotFound(f"{folder} holds no parts. Make them: python -m eval.gpu_hour parts")
    data = b"".join(part.read_bytes() for part in found)
    if read_json(folder / MANIFEST) != identity(data):
        raise InvalidData(f"the parts in {folder} are not what {MANIFEST} says. Copy them again")
    write(folder / found[0].stem, data)
    return folder / found[0].stem


def identity(data: bytes) -> Found:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


COMMANDS = {"check": (4.0, check_steps), "speed": (4.0, speed_steps), "fit": (5.0, fit_steps)}


def main(
    command: Literal["check", "speed", "fit", "parts"],
    output: lab.Output,
    weights: Annotated[Path | None, typer.Option(help="Folder of parts.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="A tiny random model.")] = False,
    minutes: Annotated[float | None, typer.Option(max=9, help="4; for fit 5.")] = None,
) -> None:
    """Run one command."""
    if command == "parts":
        parts(output)
        return
    usual, steps = COMMANDS[command]
    hour = Hour(output, weights, usual if minutes is None else minutes, tiny=tiny)
    asked = [step for step in steps() if not tiny or step.given.get("name") in (None, DEFAULT)]
    carried_out(hour, command, asked)


if __name__ == "__main__":
    lab.run(main)
