"""Measures a GPU with prepared commands that stop on time and keep their results so far.

    python -m eval.gpu_hour check --output out    # then speed, fit

`check`: whether CUDA graphs are captured and compute the right values, and where rounds wait.
`speed`: the default model, and random weights in larger shapes, compared with Hugging Face. `fit`:
runs `selfspec adapt` in OUTPUT/adapted. A step starts only if it fits into `--minutes`, and is
stopped after three times its estimated seconds; OUTPUT/COMMAND.json is written after each step.
Exit code 1 if a step failed.
`--tiny`: a tiny random model, which also runs on a CPU. If the default model cannot be read
(`--weights` names its file), random weights of its shape are used, and the result says so.
"""

from __future__ import annotations

import gc
import json
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import typer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from eval import families, lab
from selfspec.api.speculator import Speculator, wrap
from selfspec.api.text import encode
from selfspec.config import SpeculationOptions
from selfspec.decoding.acceptance import Prefix, Proposed, Target, Verdict
from selfspec.decoding.engine import Runtime
from selfspec.decoding.measure import Clock, quick_costs, step_speed
from selfspec.decoding.stats import GenerationStats
from selfspec.errors import SelfspecError, first_line
from selfspec.eval import concurrency, verify
from selfspec.eval.bench import METHODS, Bench, Contender, endless
from selfspec.eval.results import BenchOptions, Question
from selfspec.eval.verify import MixedDrafter
from selfspec.files import read_json, write
from selfspec.hub import models as hub
from selfspec.model.cuda_graph import Capture, Work, graph_capture, uncaptured

DEFAULT, SMALL, LARGE = "smollm2-135m", "llama-3.2-1b", "llama-3.1-8b"
GRAPHS, GENERIC = "cuda-graph", "generic"
BF16, FP32 = torch.bfloat16, torch.float32
ROWS, CHANCES, TEXTS = (2, 4, 8, 16), (0.5, 0.7, 0.8, 0.9), (1, 2, 4, 8, 16, 32)
QUESTIONS = (
    "Explain in a few sentences how a rainbow forms.",
    "Write a Python function that counts the words in a file.",
    "Sam has 12 apples, gives away 5 and buys twice as many as are left. How many has he now?",
)
ADAPTED = "adapted"  # folder of text and heads

Record = dict[str, Any]  # results that a step fills in; kept if the step fails

# --- the models


class Hour:
    def __init__(self, output: Path, weights: Path | None, minutes: float, *, tiny: bool) -> None:
        self.output, self.weights, self.minutes, self.tiny = output, weights, minutes, tiny
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.cuda else "cpu")
        self.tokens = 12 if tiny else 64
        self._current: tuple[Any, ...] = ()
        self._speculators: dict[str, Speculator] = {}

    def load(self, name: str, dtype: torch.dtype = BF16, executor: str = GRAPHS) -> Speculator:
        """A model on an executor. Unloads any other model."""
        if self._current[:2] != (name, dtype):
            self.drop()
            self._current = name, dtype, *self._load_parts(name, dtype)
        if executor not in self._speculators:
            _, _, model, tokenizer, label = self._current
            heads = None if name == DEFAULT else "none"
            speculator = wrap(model, tokenizer, heads=heads, label=label, executor=executor)
            self._speculators[executor] = speculator
        return self._speculators[executor]

    def drop(self) -> None:
        self._current = ()
        self._speculators.clear()
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # its compiled code keeps the models alive
        gc.collect()
        torch.cuda.empty_cache()

    def _load_parts(self, name: str, dtype: torch.dtype) -> tuple[Any, Any, str]:
        if self.tiny:
            tiny = families.tiny_model("llama", dtype).to(self.device)  # type: ignore[arg-type]  # a wrapped method
            return tiny, word_tokenizer(), "random weights, tiny"
        label = f"random weights, {name}"
        if name == DEFAULT:
            try:
                parts = hub.load_model(self.weights, dtype=dtype, device=str(self.device))
                return parts[0], parts[1], parts[2].label
            except (SelfspecError, ImportError) as error:
                label += f": {first_line(error)}"
        sizes: dict[str, Any] = lab.SHAPES[name]._asdict()
        config = LlamaConfig(**sizes, tie_word_embeddings=name != LARGE)
        with self.device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return model.eval(), word_tokenizer(), label

    def model_flags(self, scratch: str) -> list[str]:
        """Arguments that name the default model; random weights are saved to `scratch`."""
        speculator = self.load(DEFAULT, executor=GENERIC)
        flags = [] if self.weights is None else ["--model", str(self.weights)]
        if speculator.label.startswith("random"):
            speculator.model.save_pretrained(scratch)
            word_tokenizer().save_pretrained(scratch)
            flags = ["--model", scratch]
        self.drop()
        return flags

    def prompts(self, speculator: Speculator) -> list[Tensor]:
        """The token ids of each question, [1, P]."""
        return [encode(speculator.tokenizer, question).to(self.device) for question in QUESTIONS]

    def answer(self, speculator: Speculator, **options: Any) -> GenerationStats:
        keywords: Any = {"max_new_tokens": self.tokens, "do_sample": False, **options}
        with endless(speculator):
            return speculator.generate(self.prompts(speculator)[0], **keywords).stats


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer for random weights: 96 words, one of which stands for all unknown words."""
    word_level = Tokenizer(models.WordLevel({f"w{number}": number for number in range(96)}, "w1"))
    word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_level, eos_token="w0")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} w0 {% endfor %}"
    return tokenizer


# --- drafts with a chosen rate of acceptance


class Planted(Runtime):
    """Free drafts, accepted at random, so that near ties of random weights have no influence."""

    lossless = False

    def __init__(self, on: Speculator, drafts: int, chance: float) -> None:
        super().__init__(on.backbone, None, None)
        self.drafts, self.chance, self.dice = drafts, chance, random.Random(0)

    def drafter(self, *_: Any) -> MixedDrafter:
        return MixedDrafter(width=self.drafts)

    def rule(self, *_: Any) -> Planted:
        return self

    def verdict(self, _: Prefix, target: Target, row: int, proposed: Proposed) -> Verdict:
        token = target.best[row]  # always read, as acceptance rules do
        kept = bool(proposed) and self.dice.random() < self.chance
        return Verdict(proposed[0].token, 0) if kept else Verdict(token)


def planted_speculator(on: Speculator, drafts: int, chance: float) -> Speculator:
    speculator = Speculator(on.backbone, on.tokenizer, None, "", SpeculationOptions(drafter="none"))
    speculator.runtime = Planted(on, drafts, chance)
    return speculator


# --- check


def machine(hour: Hour, record: Record) -> None:
    record |= hub.machine()
    if hour.cuda:
        gpu = torch.cuda.get_device_properties(hour.device)
        record |= {"memory_gb": gpu.total_memory / 1e9, "capability": (gpu.major, gpu.minor)}


def captures(hour: Hour, record: Record) -> None:
    """Capture graphs of passes of 1 to 16 rows: their number, capture time and memory."""
    speculator, seconds = hour.load(DEFAULT), list[float]()
    executor: Any = speculator.backbone._executor
    record |= {"model": speculator.label, "captured": executor.replays.captures}

    def strategy() -> Capture:
        inner = graph_capture(hour.device) if hour.cuda else uncaptured

        def capture(work: Work) -> Work:
            start = time.perf_counter()
            try:
                return inner(work)
            except RuntimeError as error:  # the executor then continues without graphs
                record["error"] = first_line(error)
                raise
            finally:
                seconds.append(time.perf_counter() - start)

        return capture

    reserved = torch.cuda.memory_reserved()
    executor.start_capture(strategy, "inductor" if hour.cuda else None)
    for rows in (1, *ROWS):
        hour.answer(planted_speculator(speculator, rows - 1, 0.5))
    record |= {"graphs": len(seconds), "seconds": sum(seconds)}
    record["memory_mb"] = (torch.cuda.memory_reserved() - reserved) / 1e6
    if hour.cuda and not executor.replays.captures:
        raise RuntimeError("nothing was captured")


def bits(hour: Hour, record: Record, executor: str, dtype: torch.dtype) -> None:
    """Compare bits of the logits of 64 positions, from passes of many rows and of one row."""
    backbone = hour.load(DEFAULT, dtype, executor).backbone
    record["texts share passes"] = backbone.runs_many
    ids = torch.arange(64, device=hour.device) % backbone.vocab_size
    alone = verify.logits_of(backbone, ids, verify.Way([1]))
    for rows in ROWS:
        tally = verify.Bits()
        tally.compare(f"{rows} rows", verify.logits_of(backbone, ids, verify.Way([rows])), alone)
        record[str(rows)] = {"differing": tally.differing, "first": tally.first}


def ways(on: Speculator) -> dict[str, tuple[Speculator, Record]]:
    drafted = planted_speculator(on, 7, 0.8)
    return {"plain": (on, {"speculate": False}), "7 drafts": (drafted, {}), "default": (on, {})}


def waits(hour: Hour, record: Record, executor: str) -> None:
    """Find where the host waits for the device, from torch's warnings; includes the prompt."""
    for way, (speculator, options) in ways(hour.load(DEFAULT, executor=executor)).items():
        hour.answer(speculator, **options)
        with warnings.catch_warnings(record=True) as records:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                rounds = hour.answer(speculator, **options).rounds
            finally:
                torch.cuda.set_sync_debug_mode("default")
        syncs = [warning for warning in records if "synchroniz" in str(warning.message)]
        places = Counter(f"{Path(warning.filename).name}:{warning.lineno}" for warning in syncs)
        record[way] = {"a_round": len(syncs) / rounds, "places": dict(places.most_common(8))}


def profiled(hour: Hour, record: Record, executor: str) -> None:
    """CUDA calls per round, and the longest kernels: count and microseconds; with the prompt."""
    kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * hour.cuda]
    field = "self_device_time_total" if hour.cuda else "self_cpu_time_total"
    for way, (speculator, options) in ways(hour.load(DEFAULT, executor=executor)).items():
        hour.answer(speculator, **options)
        with profile(activities=kinds) as profiler:
            rounds = hour.answer(speculator, max_new_tokens=5, **options).rounds
        table: Any = sorted(profiler.key_averages(), key=lambda row: -getattr(row, field))
        ops = {row.key[:80]: (row.count / rounds, getattr(row, field) / rounds) for row in table}
        calls = {key: count for key, (count, _) in ops.items() if key.startswith("cu")}
        record[way] = {"rounds": rounds, "calls": calls, "longest": dict([*ops.items()][:12])}


def lossless(hour: Hour, record: Record, executor: str, dtype: torch.dtype) -> None:
    """Climb the rungs of `selfspec verify`; rung 3 (a float64 copy) runs once for all steps."""
    speculator = hour.load(DEFAULT, dtype, executor)
    questions = [Question(id=text, task="", turns=(text,)) for text in QUESTIONS[:2]]
    cases = verify.cases_of(speculator, questions, hour.tokens // 4)
    rungs = {*range(1, 8)} - ({3} if (executor, dtype) != (GRAPHS, FP32) else set())
    subject = verify.Subject(speculator=speculator, cases=cases, rungs=rungs, max_copy_gb=8.0)
    for claim, rung in verify.climb(subject):
        record[claim] = [rung.outcome, rung.found]
    if failed := [claim for claim, (outcome, _) in record.items() if outcome == "failed"]:
        raise RuntimeError(f"failed: {'; '.join(failed)}")


# --- speed


def pace(
    hour: Hour, speculator: Speculator, method: str = "default", most: int = 3, **setting: Any
) -> Record:
    """Tokens per second after the first token, over the answers to some prompts.

    Warms up on the longest prompt, because code compiled for it serves shorter ones.
    """
    prompts = sorted(hour.prompts(speculator), key=Tensor.numel, reverse=True)[:most]
    way = Contender(label=method, method=method, setting=setting, by=METHODS[method].decode)
    runner = Bench(speculator=speculator, options=BenchOptions())
    first, *runs = [runner.run(way, ids, [0] * hour.tokens) for ids in (prompts[0], *prompts)]
    if errors := [run.error for run in (first, *runs) if run.error]:
        raise RuntimeError(errors[0])
    arrivals = [arrival for run in runs for arrival in run.arrivals[1:]]
    tokens, seconds = (sum(part) for part in zip(*arrivals, strict=True))
    rates = {"tokens_per_s": tokens / seconds, "tokens_a_round": tokens / len(arrivals)}
    return {"first_try_s": first.seconds, **rates}


THEIRS: dict[str, Record] = {
    "eager": {},
    "prompt lookup": {"prompt_lookup_num_tokens": 10},
    "static cache": {"cache_implementation": "static"},  # `generate` compiles it on a GPU
}


def theirs(hour: Hour, record: Record, name: str, way: str) -> None:
    speculator = hour.load(name, executor=GENERIC)
    record |= {"model": speculator.label, **pace(hour, speculator, "hugging-face", **THEIRS[way])}


def ours(hour: Hour, record: Record, name: str, executor: str) -> None:
    """Measure plain decoding, a step against the memory's limit, costs, and default drafts."""
    start = time.perf_counter()
    speculator = hour.load(name, executor=executor)
    record |= {"ready_s": time.perf_counter() - start}
    record |= {"model": speculator.label, "plain": pace(hour, speculator, "plain", speculate=False)}
    record["step"] = step_speed(speculator.backbone, clock=Clock(hour.device, 5)).to_dict()
    draft_ids = torch.arange(min(8192, speculator.backbone.vocab_size), device=hour.device)
    heads = speculator.heads or lab.untrained_heads(speculator.backbone, 0, "deep-fused", draft_ids)
    record["costs_in_steps"] = asdict(quick_costs(speculator.backbone, heads))
    if name == DEFAULT:
        record["default"] = pace(hour, speculator)


def swept(hour: Hour, record: Record, name: str) -> None:
    """Measure free drafts that are accepted with a given chance, by drafts per round."""
    for rows, chance in product(ROWS, CHANCES):
        speculator = planted_speculator(hour.load(name), rows - 1, chance)
        record[f"{rows - 1} drafts, {chance:g}"] = pace(hour, speculator, most=1)


def batches(hour: Hour, record: Record, name: str) -> None:
    speculator = hour.load(name)
    ids, writers = hour.prompts(speculator)[0], {"plain": concurrency.on_engine(speculate=False)}
    writers["Hugging Face, padded"] = concurrency.padded_batch
    with endless(speculator):
        for texts in TEXTS[: 2 if hour.tiny else None]:
            for way, writer in writers.items():
                load, answers = writer(speculator, [ids] * texts, hour.tokens // 2, texts)
                record.setdefault(way, {})[texts] = sum(map(len, answers)) / load.seconds


# --- fit


def adapted(hour: Hour, record: Record) -> None:
    """Run `selfspec adapt` with four fifths of the time: text, heads, settings, comparison."""
    folder, budget = hour.output / ADAPTED, 10 if hour.tiny else max(10, 48 * hour.minutes)
    flags = ("--budget", f"{budget:.0f}s", "--output", str(folder), "--device", str(hour.device))
    with tempfile.TemporaryDirectory() as scratch:
        lab.selfspec_command("adapt", *flags, *hour.model_flags(scratch))
    record |= read_json(folder / "adapt.json")


# --- steps, within their time


class Step(NamedTuple):
    seconds: float  # estimated, with loading
    work: Callable[..., None]
    arguments: Record
    cuda: bool = False  # whether the step needs CUDA

    @property
    def name(self) -> str:
        return ", ".join([self.work.__name__, *map(str, self.arguments.values())])


def check_steps() -> Iterator[Step]:
    yield Step(2, machine, {})
    yield Step(20, captures, {})
    for dtype, executor in product((BF16, FP32), (GRAPHS, GENERIC)):
        given: Record = {"executor": executor}
        if dtype == BF16:
            yield Step(8, waits, given, cuda=True)
            yield Step(8, profiled, given)
        yield Step(6, bits, {**given, "dtype": dtype})
        yield Step(30, lossless, {**given, "dtype": dtype})


def speed_steps() -> Iterator[Step]:
    for name, load in ((DEFAULT, 25), (LARGE, 15), (SMALL, 5)):
        given: Record = {"name": name}
        yield Step(load + 30, ours, {**given, "executor": GRAPHS})  # compiles once per machine
        for way in THEIRS:
            yield Step(40 if "static" in way else 8, theirs, {**given, "way": way})
        yield Step(10, swept, given)
        yield Step(10, ours, {**given, "executor": GENERIC})
        yield Step(15, batches, given)


def fit_steps() -> Iterator[Step]:
    yield Step(2, machine, {})
    yield Step(150, adapted, {})


class TimeUp(BaseException):
    """Raised when a step's time is up; no Exception, because libraries catch those."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeUp(f"stopped after {seconds:.0f} s")

    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def run_steps(hour: Hour, name: str, steps: Sequence[Step]) -> None:
    """Run all steps that fit, in order. Exit code 1 if one failed."""
    end = time.monotonic() + 60 * hour.minutes
    entries: dict[str, Record] = {step.name: {"outcome": "not begun"} for step in steps}
    facts = {"command": lab.command(), "minutes": hour.minutes, "steps": entries}
    for step in steps:
        left = end - time.monotonic()
        if step.cuda and not hour.cuda:
            entries[step.name] = {"outcome": "skipped: no CUDA"}
        elif step.seconds <= left:
            entries[step.name] = run_step(hour, step, min(left, 3 * step.seconds))
        print(f"{left:6.1f} s left, {step.name}: {entries[step.name]['outcome']}", flush=True)
        write(hour.output / f"{name}.json", json.dumps(facts, indent=1) + "\n")
    if any(entry["outcome"] == "failed" for entry in entries.values()):
        raise typer.Exit(1)


def run_step(hour: Hour, step: Step, limit_s: float) -> Record:
    record: Record = {}
    entry: Record = {"outcome": "done", "found": record}
    start = time.perf_counter()
    if hour.cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        with time_limit(limit_s):
            step.work(hour, record, **step.arguments)
    except (Exception, TimeUp) as error:  # noqa: BLE001  # the next step runs after any failure
        places = traceback.extract_tb(error.__traceback__)[-5:]
        entry |= {"outcome": "failed", "error": type(error).__name__, "said": first_line(error)}
        entry["trace"] = [f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in places]
        if "OutOfMemory" in repr(error):
            hour.drop()
    peak = torch.cuda.max_memory_allocated() / 1e9
    return entry | {"seconds": time.perf_counter() - start, "peak_gb": peak}


COMMANDS = {"check": (4.0, check_steps), "speed": (4.0, speed_steps), "fit": (5.0, fit_steps)}


def main(
    command: Literal["check", "speed", "fit"],
    output: lab.Output,
    weights: Annotated[Path | None, typer.Option(help="The default model's file.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="A tiny random model.")] = False,
    minutes: Annotated[float | None, typer.Option(min=0.1, max=9, help="4; for fit 5.")] = None,
) -> None:
    default, steps = COMMANDS[command]
    hour = Hour(output, weights, default if minutes is None else minutes, tiny=tiny)
    plan = [step for step in steps() if not tiny or step.arguments.get("name") in (None, DEFAULT)]
    run_steps(hour, command, plan)


if __name__ == "__main__":
    lab.run(main)
