"""Measures many answers at once: tokens per second and waiting times by the number of texts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import ContinuousBatchingConfig, GenerationConfig

from selfspec.api.chat_template import NO_END, as_list
from selfspec.api.speculator import Speculator
from selfspec.api.text import encode
from selfspec.decoding.engine import Running
from selfspec.errors import InvalidOption
from selfspec.eval.bench import Arrivals, unchanged
from selfspec.eval.results import BenchOptions, Question, speed_up


@dataclass(kw_only=True)
class Load:
    """Measurements of a method on all prompts, `texts` at once."""

    method: str = ""
    texts: int
    repeat: int = 0
    seconds: float = 0.0
    tokens: int = 0
    steps_s: float = 0.0
    """Seconds of rounds in which `texts` texts are written and no prompt enters."""
    steps_tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    """Seconds from a prompt's arrival to its first token, if that can be observed."""
    gaps_s: list[float] = field(default_factory=list)  # between rounds of a text
    same: int | None = None
    """Count of answers equal to those of plain decoding alone, if compared."""

    def summary(self) -> dict[str, Any]:
        """Figures for a file; lists become their median and 95th percentile."""
        return asdict(self) | {
            "tokens_per_s": self.tokens / self.seconds,  # with prompts
            "decode_tokens_per_s": self.steps_tokens / self.steps_s if self.steps_tokens else None,
            **{
                name: np.quantile(waits, (0.5, 0.95)).tolist() if waits else None
                for name, waits in (("first_s", self.first_s), ("gaps_s", self.gaps_s))
            },
        }


Wrote = tuple[Load, list[list[int]]]  # figures, and the tokens of all answers

Write = Callable[[Speculator, Sequence[Tensor], int, int], Wrote]
"""Answers prompts [1, P] with a number of tokens each, a number of texts at once."""


def on_engine(**settings: Any) -> Write:
    """Write on our engine, which has all prompts from the start."""

    def write(speculator: Speculator, prompts: Sequence[Tensor], count: int, texts: int) -> Wrote:
        load = Load(texts=texts)
        engine, start = speculator.engine(most=texts), time.perf_counter()
        options: Any = {"max_new_tokens": count, "do_sample": False, **settings}
        requests = [speculator.call(ids, options) for ids in prompts]
        running = [engine.add(request.only(), request.speculation) for request in requests]
        answers: dict[Running, list[int]] = {text: [] for text in running}
        newest = dict.fromkeys(running, start)
        while engine.texts:
            step_start = time.perf_counter()
            news = engine.step()
            now = time.perf_counter()
            rounds = [(text, entry) for text in news for entry in text.take()]
            for text, entry in rounds:
                answers[text] += entry.tokens
                (load.first_s if entry.prefill else load.gaps_s).append(now - newest[text])
                newest[text] = now
            if len(rounds) == texts and not any(entry.prefill for _, entry in rounds):
                load.steps_s += now - step_start
                load.steps_tokens += sum(len(entry.tokens) for _, entry in rounds)
        load.seconds = time.perf_counter() - start
        return load, list(answers.values())

    return write


def padded_batch(
    speculator: Speculator, prompts: Sequence[Tensor], count: int, texts: int
) -> Wrote:
    """Transformers' `generate`: batches of `texts` prompts, padded on the left."""
    load, answers, start = Load(texts=texts), list[list[int]](), time.perf_counter()
    model: Any = speculator.model
    ends = as_list(model.generation_config.eos_token_id)
    for first in range(0, len(prompts), texts):
        group = prompts[first : first + texts]
        ones = [torch.ones_like(ids[0]) for ids in group]
        ids = pad_sequence([ids[0] for ids in group], batch_first=True, padding_side="left")
        mask = pad_sequence(ones, batch_first=True, padding_side="left")
        streamer = Arrivals(time.perf_counter)
        options = {"max_new_tokens": count, "do_sample": False, "attention_mask": mask}
        output = model.generate(ids, streamer=streamer, use_cache=True, **options)
        times = [moment for _, moment in streamer.events]
        rows = [_through_end(row, ends) for row in output[:, ids.shape[1] :].tolist()]
        answers += rows
        load.first_s += [times[0] - start] * len(group)
        full = min(map(len, rows))  # later steps pad the texts that have ended
        if len(group) == texts and full > 1:
            load.steps_s += times[full - 1] - times[0]
            load.steps_tokens += (full - 1) * texts
    load.seconds = time.perf_counter() - start
    return load, answers


def continuous(speculator: Speculator, prompts: Sequence[Tensor], count: int, texts: int) -> Wrote:
    """Transformers' continuous batching: `generate_batch`, `texts` prompts at a time."""
    load, answers, start = Load(texts=texts), list[list[int]](), time.perf_counter()
    model: Any = speculator.model
    ends = as_list(model.generation_config.eos_token_id)
    end_options: Any = {"eos_token_id": ends or None, "pad_token_id": min(ends, default=None)}
    config = GenerationConfig(max_new_tokens=count, do_sample=False, **end_options)
    for first in range(0, len(prompts), texts):
        group = [ids[0].tolist() for ids in prompts[first : first + texts]]
        # By default it takes all memory; its blocks have 256 positions, despite their name.
        blocks = sum((len(ids) + count) // 256 + 1 for ids in group)
        limits = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=sum(map(len, group)))
        outputs = model.generate_batch(group, config, limits, progress_bar=False)
        tokens = {tuple(text.prompt_ids): list(text.generated_tokens) for text in outputs.values()}
        errors = [text.error for text in outputs.values() if text.error]
        if errors or len(outputs) < len(group):
            problem = f"generate_batch of transformers failed{f' ({errors[0]})' if errors else ''}"
            raise InvalidOption(f"{problem}. Leave hugging-face-continuous out: --methods")
        answers += [tokens[tuple(ids)] for ids in group]
    load.seconds = time.perf_counter() - start
    return load, answers


METHODS: dict[str, Write] = {
    "plain": on_engine(speculate=False),
    "default": on_engine(),
    "hugging-face-padded": padded_batch,
    "hugging-face-continuous": continuous,
}
"""Methods by name."""


def measure_loads(
    speculator: Speculator,
    questions: Sequence[Question],
    texts: Sequence[int],
    methods: Sequence[str],
    options: BenchOptions,
    done: Sequence[Load] = (),
) -> Iterator[Load]:
    """Run all methods at each number of texts, in random order, repeatedly; skips those `done`.

    If a chat template ends turns with a token, that token ends answers of all methods.
    """
    known = {(load.method, load.texts, load.repeat) for load in done}
    device, new_tokens = speculator.backbone.device, options.max_new_tokens
    prompts = [encode(speculator.tokenizer, question.turns[0]).to(device) for question in questions]
    with unchanged(speculator):
        config: Any = speculator.model.generation_config
        if (end := speculator.turn_end.token) is not None:
            config.eos_token_id = [*as_list(config.eos_token_id), end]
        speculator.turn_end = NO_END
        _, expected = METHODS["plain"](speculator, prompts, new_tokens, 1)
        for name in methods:  # warms up: work of the first use does not count
            METHODS[name](speculator, prompts[:2], 2, 2)
        for repeat, count in product(range(options.repeats), texts):
            order = list(methods)
            random.Random(f"{options.seed} {repeat} {count}").shuffle(order)
            for name in (method for method in order if (method, count, repeat) not in known):
                load, answers = METHODS[name](speculator, prompts, new_tokens, count)
                load.method, load.repeat, load.tokens = name, repeat, sum(map(len, answers))
                load.same = sum(a == b for a, b in zip(answers, expected, strict=True))
                yield load


def _through_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    place = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: place + 1]


# --- tables

_PLACES = ["method", "texts"]


def table(loads: Sequence[Load]) -> str:
    """A Markdown table with a row per method and number of texts, without unmeasured columns.

    Rates are medians, waits are percentiles; with several repeats also compared with plain.
    """
    frame = pd.DataFrame(map(vars, loads)).astype({"same": "Int64"})
    frame["rate"] = frame.tokens / frame.seconds
    frame["decode"] = (frame.steps_tokens / frame.steps_s).where(frame.steps_tokens > 0)
    groups = frame.groupby(_PLACES, sort=False)
    grid = groups.agg(tokens=("tokens", "sum"), rate=("rate", "median"))
    grid = grid.rename(columns={"rate": "tokens/s"})
    grid["behind prompts"] = groups.decode.median()
    for name, share in product(("first_s", "gaps_s"), (0.5, 0.95)):
        waits = frame.explode(name).astype({name: float}).groupby(_PLACES, sort=False)[name]
        grid[f"{name[:-2]}, ms: p{round(100 * share)}"] = 1e3 * waits.quantile(share)
    grid["as alone"] = groups.same.min()
    grid = grid.dropna(axis=1, how="all")
    if gains := _against_plain(frame):
        grid["against plain (95 %)"] = pd.Series(gains)
    cells = grid.astype(object).where(grid.notna(), None).reset_index()
    return f"{cells.to_markdown(index=False, floatfmt='.1f')}\n"


def _against_plain(frame: pd.DataFrame) -> dict[tuple[str, int], str]:
    """Ratios of rates after the prompts, paired by repeat; empty with one repeat."""
    if frame.repeat.nunique() < 2:
        return {}
    seconds = 1.0 / frame.pivot(index="repeat", columns=_PLACES, values="decode")
    cells = {}
    for name, count in seconds:
        if name != "plain" and ("plain", count) in seconds:
            plain, other = seconds[[("plain", count), (name, count)]].dropna().to_numpy().T
            if len(plain):
                gain = speed_up(plain, other)
                cells[name, count] = f"{gain.ratio:.2f} ({gain.low:.2f} to {gain.high:.2f})"
    return cells
