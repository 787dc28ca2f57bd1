"""Random requests to tiny models, and Hugging Face's answers to them; used by test_fuzz.py.

A case holds numbers and names only, so that hypothesis prints it in full and it can be typed in
again. Prompts are short or end near a limit: a sliding window (8), a block (64), the context (80).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import torch
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import (
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.generation.stopping_criteria import StopStringCriteria

from selfspec.api.speculator import Speculator, wrap
from selfspec.decoding.drafters.rest import Datastore
from selfspec.model.backbone import Backbone
from selfspec.options import CONTROLLERS, TOGETHER, Bounded
from tests import ladder
from tests.models import VOCAB_SIZE, make_model, random_ids

LAYERS = 4
CONTEXT = 80
FURTHEST = CONTEXT + 24
"""Most ids of a prompt and its answer: some exceed the context length, where answers continue."""
MOST_NEW = 20

EXITS = {"logit-lens": (1, 2, 3), "deep-fused": (0, 1, 3), "eagle3": (0,)}
"""Kinds of heads, and the layers that they read."""

WORDS = [chr(97 + token % 26) * (1 + token // 26) for token in range(VOCAB_SIZE)]


@dataclass(frozen=True)
class Prompt:
    """Ids that are the same at every call; few of them differ, so that n-grams repeat."""

    length: int
    seed: int
    different: int

    @property
    def ids(self) -> Tensor:
        """[1, length]."""
        return random_ids(self.length, self.seed, self.different)


@dataclass(frozen=True)
class Wishes:
    """A caller's options for Hugging Face; hashable, so that answers can be cached."""

    keywords: tuple[tuple[str, Any], ...]
    every: int = 0
    """A stopping criterion ends a text after an id that this divides; 0: there is none."""
    strings: tuple[str, ...] = ()
    stateful: bool = False
    """Whether a processor counts its calls."""

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of `generate` without stop strings; new objects at every call."""
        options = {name: as_list(value) for name, value in self.keywords}
        if self.every:
            options["stopping_criteria"] = [self.divides]
        if self.stateful:
            options["logits_processor"] = [EveryThird()]
        return options

    def divides(self, ids: Tensor, _: object) -> Tensor:
        """A stopping criterion, [B, n] -> [B]."""
        return ids[:, -1] % self.every == 0

    def reason(self, ids: Tensor) -> str:
        """Why a complete text [1, n] has ended."""
        ends = self.options.get("eos_token_id", [])
        if int(ids[0, -1]) in (ends if isinstance(ends, list) else [ends]):
            return "eos"
        stopped = bool(self.every) and bool(self.divides(ids, None))
        if self.strings:
            criterion = StopStringCriteria(tokenizer(), list(self.strings))
            stopped = stopped or bool(criterion(ids, None))
        return "stop" if stopped else "length"


@dataclass(frozen=True)
class Case:
    """One request, and how drafts are made for it."""

    prompt: Prompt
    wishes: Wishes
    heads: str
    executor: str
    speculation: dict[str, Any] = field(hash=False)


class EveryThird(LogitsProcessor):
    """Forbids another third of the ids at every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls % 3 :: 3] = -torch.inf
        return scores


def as_list(value: Any) -> Any:
    return [as_list(entry) for entry in value] if isinstance(value, tuple) else value


# --- models


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer with one to four letters per id."""
    letters = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, []))
    letters.decoder = decoders.Fuse()
    built = PreTrainedTokenizerFast(tokenizer_object=letters)
    assert len(built) == VOCAB_SIZE
    return built


FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "granite", "cohere"]

Sizes = tuple[tuple[str, Any], ...]


@cache
def configuration(number: int) -> tuple[str, Sizes]:
    """A family and sizes, the same at every call; number 0 is the tiny Llama."""
    if number == 0:
        return "llama", ()
    draw = random.Random(number)
    kv, groups, width = draw.choice([1, 2, 3]), draw.choice([1, 2]), draw.choice([4, 8, 12, 16])
    sizes = {
        "hidden_size": kv * groups * draw.choice([4, 5, 8]),
        "num_attention_heads": kv * groups,
        "num_key_value_heads": kv,
        "head_dim": width,
        "intermediate_size": draw.choice([17, 32, 48, 80]),
        "tie_word_embeddings": draw.random() < 0.3,
    }
    return draw.choice(FAMILIES), tuple(sizes.items())


@lru_cache(maxsize=64)
def model(
    family: str, dtype: torch.dtype, layers: int = LAYERS, sizes: Sizes = ()
) -> PreTrainedModel:
    """A tiny model whose deep layers add little, so that about half of the drafts are right.

    With fewer `layers` it has the first layers of the whole model.
    """
    lengths: dict[str, Any] = {"num_hidden_layers": LAYERS, "max_position_embeddings": CONTEXT}
    tiny: Any = make_model(family, dtype, **lengths, **dict(sizes))
    with torch.no_grad():
        for layer in tiny.model.layers[1:]:
            layer.self_attn.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.3)
    if layers < LAYERS:
        del tiny.model.layers[layers:]
        tiny.config.num_hidden_layers = layers
        if getattr(tiny.config, "layer_types", None):
            tiny.config.layer_types = tiny.config.layer_types[:layers]
    return tiny


datastore = cache(lambda: Datastore.of(random_ids(20_000).tolist(), tokenizer()))


@lru_cache(maxsize=64)
def speculator(
    family: str, dtype: torch.dtype, executor: str, kind: str, sizes: Sizes = ()
) -> Speculator:
    """A speculator with heads of a kind, and a draft model of two layers."""
    heads: Any = kind
    target = model(family, dtype, sizes=sizes)
    if kind != "logit-lens":
        generic = Backbone(target, executor="generic")
        deep = ladder.deep_heads(generic, EXITS[kind])
        heads = ladder.attending_heads(generic) if kind == "eagle3" else deep
    instance = wrap(
        target,
        tokenizer(),
        heads=heads,
        executor=executor,
        draft_model=model(family, dtype, layers=2, sizes=sizes),
    )
    instance.runtime.datastore = datastore()
    return instance


@cache
def hugging_face(family: str, prompt: tuple[int, ...], wishes: Wishes) -> list[int]:
    """The new tokens of `model.generate` in float64."""
    generator: Any = model(family, torch.float64)
    ids = torch.tensor([prompt])
    stops: dict[str, Any] = {}
    if wishes.strings:
        stops = {"stop_strings": list(wishes.strings), "tokenizer": tokenizer()}
    mask = torch.ones_like(ids)
    options = {"do_sample": False} | wishes.options
    answer = generator.generate(ids, attention_mask=mask, **stops, **options)
    return answer[0, len(prompt) :].tolist()


# --- strategies

lengths = st.one_of(
    st.sampled_from(
        [1, 2, 7, 8, 9, 62, 63, 64, 65, CONTEXT - 2, CONTEXT - 1, CONTEXT, CONTEXT + 1]
    ),
    st.integers(1, FURTHEST - 1),
)
FORCED = VOCAB_SIZE - 1
ids = st.integers(0, FORCED - 1)  # transformers cannot force an id that it suppresses


@st.composite
def prompts(draw: st.DrawFn, longest: int = FURTHEST - 1) -> Prompt:
    length = min(draw(lengths), longest)
    return Prompt(length, draw(st.integers(0, 9)), draw(st.sampled_from([3, 8, VOCAB_SIZE])))


@st.composite
def wishes(draw: st.DrawFn, length: int) -> Wishes:
    new = draw(st.integers(1, min(MOST_NEW, FURTHEST - length)))
    keywords = draw(st.sampled_from([{"max_new_tokens": new}, {"max_length": length + new}]))
    keywords = keywords | draw(st.sampled_from(CHOICES))
    ends = draw(st.sampled_from([None, (int(draw(ids)),), tuple(range(8)), tuple(range(40))]))
    if ends:
        keywords["eos_token_id"] = ends
    stateful = False
    if ends and draw(st.booleans()):
        # alone: it makes NaN of a score that another processor set to minus infinity
        keywords["exponential_decay_length_penalty"] = (2, 1.3)
    elif draw(st.booleans()):
        keywords |= draw(st.fixed_dictionaries({}, optional=PROCESSORS))
        if ends and draw(st.booleans()):
            keywords |= {"min_new_tokens": draw(st.integers(1, new)), "forced_eos_token_id": FORCED}
        stateful = draw(st.booleans())
    return Wishes(
        keywords=tuple(sorted(keywords.items())),
        every=draw(st.sampled_from([0, 0, 0, 5, 31])),
        strings=draw(st.sampled_from([(), (), (), ("e",), ("ab", "zz"), ("bcc",)])),
        stateful=stateful,
    )


PROCESSORS: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.sampled_from([0.8, 1.1, 1.6]),
    "no_repeat_ngram_size": st.integers(1, 3),
    "bad_words_ids": st.tuples(st.tuples(ids), st.tuples(ids, ids)),
    "suppress_tokens": st.lists(ids, min_size=1, max_size=5).map(tuple),
    "begin_suppress_tokens": st.lists(ids, min_size=1, max_size=5).map(tuple),
    "sequence_bias": st.tuples(st.tuples(st.tuples(ids), st.sampled_from([-3.0, 3.0]))),
    "renormalize_logits": st.just(True),
}

CHOICES: list[dict[str, Any]] = [
    {},
    {},
    {"do_sample": True, "top_k": 1},
    {"do_sample": True, "top_k": 1, "temperature": 3.0},
    {"do_sample": True, "top_k": 0, "top_p": 1e-6},
]
"""Ways to choose a token; sampling from the best one alone is the greedy choice."""

shares = st.sampled_from([0.01, 0.05, 0.2, 0.5, 0.9, 1.0])


@st.composite
def speculations(
    draw: st.DrawFn, heads: str, kept: tuple[bool | None, ...] = (None, None, False, True)
) -> dict[str, Any]:
    """Options that are in range and fit together; `kept`: values of `pinned`."""
    layers = tuple(sorted(draw(st.sets(st.sampled_from(EXITS[heads]), min_size=1))))
    rows = draw(st.sampled_from([4, 8]))
    pinned = draw(st.sampled_from(kept))
    most = rows - 1 if pinned else 12
    longest = draw(st.integers(1, most))
    settings: dict[str, dict[str, Any]] = {
        "exit": {
            "layers": layers,
            "threshold": draw(st.one_of(shares, st.tuples(*[shares for _ in layers]))),
            "max_depth": draw(st.sampled_from([None, *layers])),
            "max_tokens": draw(st.integers(1, most)),
            **draw(
                tuning(
                    anneal_strength=st.sampled_from([0.0, 0.5, 2.0]),
                    guesses=st.integers(1, 4),
                    max_rows=st.integers(2, 32),
                )
            ),
        },
        "ngram": {"max_tokens": draw(st.integers(1, most)), **draw(tuning(size=st.integers(1, 5)))},
        "draft-model": {"max_tokens": draw(st.integers(1, most))},
        "successors": {
            "max_tokens": draw(st.integers(1, most)),
            **draw(tuning(guesses=st.integers(1, 8), max_rows=st.integers(1, 16))),
        },
        "rest": {
            "max_tokens": draw(st.integers(1, most)),
            **draw(tuning(max_rows=st.integers(1, 16))),
        },
        "lookahead": draw(
            tuning(level=st.integers(2, 8), window=st.integers(1, 9), guesses=st.integers(1, 9))
        ),
        "skip": {
            "threshold": draw(shares),
            "max_tokens": draw(st.integers(1, most)),
            **draw(tuning(skipped=st.sampled_from([(2,)]), target=st.sampled_from([None, 0.5]))),
        },
        "none": {},
    }
    bounds = {"longest": longest, "shortest": draw(st.integers(1, longest))}
    controller = draw(st.sampled_from(sorted(CONTROLLERS)))
    base = bounds if issubclass(CONTROLLERS[controller], Bounded) else {}
    return {
        "drafter": {k: settings[k] for k in draw(st.sampled_from(TOGETHER)).split("+")},
        "controller": {controller: base | draw(CONTROLLER_TUNING.get(controller, tuning()))},
        "costs": draw(COSTS),
        "never_slower": draw(st.booleans()),
        "pinned": pinned,
        "pinned_rows": rows,
    }


def tuning(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=values)


STEPS = st.sampled_from([0.0, 1.0, 4.0])
CONTROLLER_TUNING = {
    "threshold": tuning(threshold=shares),
    "gammatune": tuning(rate=shares, step=STEPS),
    "gammatune-plus": tuning(rate=shares, step=STEPS, threshold=shares),
    "cm-asd": tuning(
        weights=st.sampled_from([(1.0, 0.0, 0.0), (0.2, 0.2, 0.6)]),
        margin_scale=st.sampled_from([0.1, 5.0]),
        scale=shares,
    ),
}
COSTS = tuning(row=st.sampled_from([0.0, 0.3]), head=st.sampled_from([0.0, 0.3]))


@st.composite
def cases(draw: st.DrawFn, executors: tuple[str, ...]) -> Case:
    prompt = draw(prompts())
    heads = draw(st.sampled_from(sorted(EXITS)))
    return Case(
        prompt=prompt,
        wishes=draw(wishes(prompt.length)),
        heads=heads,
        executor=draw(st.sampled_from(executors)),
        speculation=draw(speculations(heads)),
    )


@st.composite
def batches(draw: st.DrawFn, executors: tuple[str, ...]) -> tuple[Case, list[Tensor]]:
    """A request that keeps its bits, and the prompts of its batch, its own among them."""
    case = draw(cases(executors))
    kept = (True,) if case.executor == "generic" else (None, True)
    case = replace(case, speculation=draw(speculations(case.heads, kept)))
    count = 0 if case.wishes.stateful else 4  # a processor that counts its calls serves one text
    others = draw(st.lists(prompts(longest=case.prompt.length), max_size=count))
    place = draw(st.integers(0, len(others)))
    batch = [*others[:place], case.prompt, *others[place:]]
    return case, [prompt.ids for prompt in batch]


DRAWS: list[dict[str, Any]] = [
    {"seed": 0},  # in 16 bits two tokens may be the best: top_k of 1 draws between them
    {"do_sample": True, "seed": 1, "temperature": 0.8},
    {"do_sample": True, "seed": 2, "top_p": 0.7},
]
"""Sampling options whose seed fixes the text."""


@dataclass(frozen=True)
class Turn:
    keep: int
    """Most ids of the text so far with which the new prompt begins."""
    added: Prompt
    wishes: Wishes
    pieces: int | None
    """Pieces after which the stream is closed; None: it runs to its end."""
    speculation: dict[str, Any] = field(hash=False)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[str, list[Turn]]:
    """A kind of heads, and turns that continue the whole text, a part of it, or nothing."""
    heads = draw(st.sampled_from(sorted(EXITS)))
    return heads, draw(st.lists(turns(heads), min_size=2, max_size=4))


@st.composite
def turns(draw: st.DrawFn, heads: str) -> Turn:
    added = draw(prompts(longest=12))
    longest = FURTHEST - MOST_NEW - added.length
    return Turn(
        keep=draw(st.sampled_from([0, 5, longest, longest])),
        added=added,
        wishes=draw(wishes(FURTHEST - MOST_NEW)),
        pieces=draw(st.sampled_from([None, None, 1, 4])),
        speculation=draw(speculations(heads)),
    )
