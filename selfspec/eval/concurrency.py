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

from selfspec.api.chat_template import NO_END, listed
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


def ours(**settings: Any) -> Write:
    """Write on our engine, which has all prompts from the start."""

    def write(speculator: Speculator, prompts: Sequence[Tensor], count: int, texts: int) -> Wrote:
        load = Load(texts=texts)
        engine, start = speculator.engine(most=texts), time.perf_counter()
        options: Any = {"max_new_tokens": count, "do_sample": False, **settings}
        requests = [speculator.call(ids, options) for ids in prompts]
        running = [engine.add(one.only(), one.speculation) for one in requests]
        answers: dict[Running, list[int]] = {one: [] for one in running}
        newest = dict.fromkeys(running, start)
        while engine.texts:
            before = time.perf_counter()
            news = engine.step()
            now = time.perf_counter()
            rounds = [(one, entry) for one in news for entry in one.take()]
            for one, entry in rounds:
                answers[one] += entry.tokens
                (load.first_s if entry.prefill else load.gaps_s).append(now - newest[one])
                newest[one] = now
            if len(rounds) == texts and not any(entry.prefill for _, entry in rounds):
                load.steps_s += now - before
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
    ends = listed(model.generation_config.eos_token_id)
    for first in range(0, len(prompts), texts):
        group = prompts[first : first + texts]
        ones = [torch.ones_like(ids[0]) for ids in group]
        ids = pad_sequence([ids[0] for ids in group], batch_first=True, padding_side="left")
        mask = pad_sequence(ones, batch_first=True, padding_side="left")
        streamer = Arrivals(time.perf_counter)
        options = {"max_new_tokens": count, "do_sample": False, "attention_mask": mask}
        found = model.generate(ids, streamer=streamer, use_cache=True, **options)
        times = [when for _, when in streamer.heard]
        made = [_through_end(row, ends) for row in found[:, ids.shape[1] :].tolist()]
        answers += made
        load.first_s += [times[0] - start] * len(group)
        if len(group) == texts and len(times) > 1:
            load.steps_s += times[-1] - times[0]
            load.steps_tokens += sum(len(tokens) - 1 for tokens in made)
    load.seconds = time.perf_counter() - start
    return load, answers


def continuous(speculator: Speculator, prompts: Sequence[Tensor], count: int, texts: int) -> Wrote:
    """Transformers' continuous batching: `generate_batch`, `texts` prompts at a time."""
    load, answers, start = Load(texts=texts), list[list[int]](), time.perf_counter()
    model: Any = speculator.model
    ends = listed(model.generation_config.eos_token_id)
    ended: Any = {"eos_token_id": ends or None, "pad_token_id": min(ends, default=None)}
    config = GenerationConfig(max_new_tokens=count, do_sample=False, **ended)
    for first in range(0, len(prompts), texts):
        group = [ids[0].tolist() for ids in prompts[first : first + texts]]
        # By default it takes all memory; its blocks have 256 positions, despite their name.
        blocks = sum((len(ids) + count) // 256 + 1 for ids in group)
        room = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=sum(map(len, group)))
        found = model.generate_batch(group, config, room, progress_bar=False)
        made = {tuple(one.prompt_ids): list(one.generated_tokens) for one in found.values()}
        why = [one.error for one in found.values() if one.error]
        if why or len(found) < len(group):
            said = f"generate_batch of transformers failed{f' ({why[0]})' if why else ''}"
            raise InvalidOption(f"{said}. Leave hugging-face-continuous out: --methods")
        answers += [made[tuple(ids)] for ids in group]
    load.seconds = time.perf_counter() - start
    return load, answers


METHODS: dict[str, Write] = {
    "plain": ours(speculate=False),
    "default": ours(),
    "hugging-face-padded": padded_batch,
    "hugging-face-continuous": continuous,
}
"""Methods by name."""


def measured(
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
    known = {(one.method, one.texts, one.repeat) for one in done}
    device, new_tokens = speculator.backbone.device, options.max_new_tokens
    ids = [encode(speculator.tokenizer, one.turns[0]).to(device) for one in questions]
    with unchanged(speculator):
        config: Any = speculator.model.generation_config
        if (end := speculator.turn_end.token) is not None:
            config.eos_token_id = [*listed(config.eos_token_id), end]
        speculator.turn_end = NO_END
        _, expected = METHODS["plain"](speculator, ids, new_tokens, 1)
        for name in methods:  # warms up: work of the first use does not count
            METHODS[name](speculator, ids[:2], 2, 2)
        for repeat, count in product(range(options.repeats), texts):
            order = list(methods)
            random.Random(f"{options.seed} {repeat} {count}").shuffle(order)
            for name in (one for one in order if (one, count, repeat) not in known):
                load, answers = METHODS[name](speculator, ids, new_tokens, count)
                load.method, load.repeat, load.tokens = name, repeat, sum(map(len, answers))
                load.same = sum(a == b for a, b in zip(answers, expected, strict=True))
                yield load


def _through_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    place = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: place + 1]


# --- tables

_PLACES = ["method", "texts"]


def table(loads: Sequence[Load]) -> str:
    """A Markdown table with a row per method and number of texts, without unmeasured columns.

    Rates are medians, waits are percentiles; with several repeats also compared with plain.
    """
    found = pd.DataFrame(map(vars, loads)).astype({"same": "Int64"})
    found["rate"] = found.tokens / found.seconds
    found["decode"] = (found.steps_tokens / found.steps_s).where(found.steps_tokens > 0)
    by = found.groupby(_PLACES, sort=False)
    made = by.agg(tokens=("tokens", "sum"), rate=("rate", "median"))
    made = made.rename(columns={"rate": "tokens/s"})
    made["behind prompts"] = by.decode.median()
    for name, share in product(("first_s", "gaps_s"), (0.5, 0.95)):
        waits = found.explode(name).astype({name: float}).groupby(_PLACES, sort=False)[name]
        made[f"{name[:-2]}, ms: p{round(100 * share)}"] = 1e3 * waits.quantile(share)
    made["as alone"] = by.same.min()
    made = made.dropna(axis=1, how="all")
    if against := _against_plain(found):
        made["against plain (95 %)"] = pd.Series(against)
    cells = made.astype(object).where(made.notna(), None).reset_index()
    return f"{cells.to_markdown(index=False, floatfmt='.1f')}\n"


def _against_plain(found: pd.DataFrame) -> dict[tuple[str, int], str]:
    """Ratios of rates after the prompts, paired by repeat; empty with one repeat."""
    if found.repeat.nunique() < 2:
        return {}
    seconds = 1.0 / found.pivot(index="repeat", columns=_PLACES, values="decode")
    cells = {}
    for name, count in seconds:
        if name != "plain" and ("plain", count) in seconds:
            plain, other = seconds[[("plain", count), (name, count)]].dropna().to_numpy().T
            if len(plain):
                gain = speed_up(plain, other)
                cells[name, count] = f"{gain.ratio:.2f} ({gain.low:.2f} to {gain.high:.2f})"
    return cells
