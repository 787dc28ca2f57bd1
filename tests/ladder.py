"""Rungs of the losslessness ladder (design.md section 5), as functions that raise AssertionError.

Called by test_lossless.py on correct code, where they must pass, and by test_mutants.py on code
with a planted bug, where one of them must fail. Rungs 4 and 5 are those of `selfspec verify`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from selfspec.api.speculator import wrap
from selfspec.api.stream import Stream
from selfspec.config import OPTION_NAMES, SpeculationOptions
from selfspec.decoding.acceptance import AcceptanceRule, Draft, GreedyMatch
from selfspec.decoding.costs import Load
from selfspec.decoding.decode import StopRule, decode_rounds
from selfspec.decoding.drafters.base import DraftController, Drafting
from selfspec.decoding.drafters.rest import Datastore
from selfspec.decoding.engine import Runtime, SequenceRequest
from selfspec.decoding.measure import PassShape
from selfspec.decoding.sampling import Sampler
from selfspec.decoding.state import DecodeState, Drafter, NoDrafter, do_alone, run_alone
from selfspec.decoding.stats import Round, Stopwatch
from selfspec.eval.results import block_logits
from selfspec.eval.verify import (
    BranchingDrafter,
    MixedDrafter,
    OracleDrafter,
    RandomDrafter,
    Recorder,
    hugging_face,
)
from selfspec.heads.attending import AttendingConfig, AttendingHeads, meta_modules
from selfspec.heads.exit_heads import ExitHeads, HeadsConfig, logit_lens
from selfspec.heads.folder import MEDUSA
from selfspec.model.backbone import Backbone
from selfspec.model.kv import KVCache
from tests.models import wrapped
from tests.talks import make_tokenizer

FIXED = PassShape(rows=6, slots=64)
"""Passes of one shape: the drafts below are at most 5 wide, the texts at most 58 long."""

FREE = PassShape()
"""Passes of any shape: pinned only if kernels treat rows alike."""

NEW_TOKENS = 20

EXITS = (2, 4, 5)
DEEP_EXITS = (0, 3)
Kinds = Collection[str] | None
"""Names of kinds of drafts; None: all."""

FEW = ("oracle", "wrong", "random", "eager exits", "attending", "trees around seen text")
"""Drafts of every width, and of most kinds of heads."""

BRIEF = ("mixed over exits", "choosy exits", "trees around seen text")
"""Right and wrong drafts, from layers and in trees: they find the bugs of test_mutants.py."""

TEMPERATURE = 4.0
"""Temperature of sampling: the tiny models' own distributions are nearly one-hot."""


@dataclass
class Decoded:
    """One decoding: committed tokens, the target logits each was judged by, and the rounds."""

    tokens: list[int]
    logits: Tensor
    entries: list[Round]


def decode(
    backbone: Backbone,
    ids: Tensor,
    drafter: Drafter,
    *,
    new_tokens: int = NEW_TOKENS,
    shape: PassShape = FREE,
    exit_layers: tuple[int, ...] = (),
    heads: ExitHeads | None = None,
    sampler: Sampler | None = None,
) -> Decoded:
    """Greedy decoding with any drafter, checking the invariants of design.md section 1."""
    length = ids.shape[1] + new_tokens
    kv = KVCache(backbone.num_layers, shape.slots)
    extra: dict[str, Any] = {"exit_layers": exit_layers, "pinned_rows": shape.rows, "heads": heads}
    state = DecodeState(backbone, ids, kv=kv, **extra)
    rule = Recorder(GreedyMatch(sampler or greedy()))
    entries = []
    for entry in rounds(state, drafter, StopRule(max_length=length), rule):
        entries.append(entry)
        lengths = {kv.length(layer) for layer in range(backbone.num_layers)}
        assert lengths == {state.length - 1}
        assert state.hidden.row_count == 0
    return Decoded(state.ids[0, ids.shape[1] :].tolist(), rule.logits, entries)


@torch.inference_mode()
def rounds(
    state: DecodeState, drafter: Drafter, stop: StopRule, rule: AcceptanceRule | None = None
) -> Generator[Round, None, None]:
    """Yield the rounds of one text that is written alone, greedily unless a rule is given."""
    steps: Any = decode_rounds(state, drafter, rule or GreedyMatch(greedy()), stop, Stopwatch())
    result = None
    with closing(steps), suppress(StopIteration):
        while True:
            step = steps.send(result)
            if isinstance(step, Round):
                yield step
            result = None if isinstance(step, Round) else do_alone(step)


@torch.inference_mode()
def ask(drafter: Drafter, state: Any, limit: int = 99) -> Draft:
    """The draft for a text that is written alone."""
    return run_alone(drafter.draft(state, limit, Stopwatch()))


def greedy() -> Sampler:
    return Sampler(LogitsProcessorList())


def asked(prompt: Tensor, new_tokens: int = 14) -> SequenceRequest:
    stop = StopRule(max_length=prompt.shape[1] + new_tokens)
    return SequenceRequest(ids=prompt, sampler=greedy(), stop=stop)


def drafting(width: int) -> Drafting:
    """Drafting of the likeliest tokens, `width` in every round."""
    return Drafting(greedy(), DraftController(width))


def deep_heads(
    backbone: Backbone,
    exit_layers: tuple[int, ...] = DEEP_EXITS,
    states: tuple[int, ...] | None = None,
) -> ExitHeads:
    """Heads of random weights that read deep states, the first of them on the embedding."""
    weight = backbone.unembedding.weight
    config = HeadsConfig(
        base_model="tiny",
        base_fingerprint="",
        hidden_size=weight.shape[1],
        num_layers=backbone.num_layers,
        vocab_size=weight.shape[0],
        exit_layers=exit_layers,
        head_type="deep-fused",
        state_layers=states,
    )
    return _random(config, backbone, seed=3, by=0.1)


def _random(config: HeadsConfig, backbone: Backbone, seed: int, by: float) -> ExitHeads:
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):  # initial weights are random: the same after any test
        torch.manual_seed(seed)
        heads = ExitHeads(config, backbone.unembedding)
    for parameter in heads.eval().requires_grad_(False).parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=by)
    return heads


def medusa_heads(backbone: Backbone, count: int = 4) -> ExitHeads:
    """`count` heads of random weights, each for a token further ahead."""
    spec = replace(deep_heads(backbone).config, exit_layers=(0,), head_type=MEDUSA, num_heads=count)
    return _random(spec, backbone, seed=7, by=0.3)


def attending_heads(backbone: Backbone) -> AttendingHeads:
    """EAGLE-3 heads of random weights, over every other token of the model."""
    weight, width = backbone.unembedding.weight, backbone.hidden_size
    count = (len(weight) + 1) // 2
    sizes = {"hidden_size": width, "intermediate_size": 48, "vocab_size": len(weight)}
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = AttendingConfig(
        base_model="tiny",
        base_fingerprint="",
        exit_layers=(0,),
        head_type="eagle3",
        format="speculators",
        hidden_size=width,
        vocab_size=len(weight),
        draft_vocab_size=count,
        num_layers=backbone.num_layers,
        state_layers=(0, backbone.num_layers // 2, backbone.num_layers),
        norm_before_residual=True,
        norm_output=True,
        layer=sizes | attention | {"model_type": "qwen3"},
    )
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.25
        for name, tensor in meta_modules(config, embeddings=False).state_dict().items()
    }
    tensors["d2t"] = torch.arange(count)
    return AttendingHeads(config, backbone.unembedding, tensors).eval().requires_grad_(False)


LOW = f"exit:layers={'/'.join(map(str, EXITS))},anneal_strength=0.3,max_tokens=5,threshold=0.05"
TREES = "exit:layers=0,threshold=0.001,guesses=4,max_rows=10,max_tokens=3"

OWN = {
    "eager exits": ("lens", LOW),
    "exits with pauses": ("lens", LOW),
    "choosy exits": ("lens", LOW.replace("0.05", "0.5")),
    "eager deep": ("deep", "exit:threshold=0.02,max_tokens=5"),
    "choosy deep": ("deep", "exit:threshold=0.1,max_tokens=5"),
    "deep with states": ("deep with states", "exit:threshold=0.02,max_tokens=5"),
    "attending": ("attending", "exit:threshold=0.001,max_tokens=5"),
    "choosy attending": ("attending", "exit:threshold=0.2,anneal_strength=0,max_tokens=3"),
    "fewer layers": ("", "skip:threshold=0.3,max_tokens=4"),
    "another model": ("", "draft-model:max_tokens=4"),
    "seen text": ("", "ngram"),
    "seen text, else exits": ("lens", f"ngram+{LOW}"),
    "trees": ("deep", TREES),
    "trees around seen text": ("deep", f"ngram+{TREES}"),
    "trees of states": ("deep with states", TREES),
    "attending trees": ("attending", TREES),
    "attending trees around seen text": ("attending", f"ngram+{TREES}"),
    "medusa trees": ("medusa", "exit:threshold=1e-9,guesses=10"),
    "successors": ("", "successors:guesses=2,max_rows=10,max_tokens=3"),
    "rest": ("", "rest:max_rows=10,max_tokens=5"),
    "lookahead": ("", "lookahead:level=3,window=2,guesses=2"),
    "medusa chains": ("medusa", "exit:threshold=1e-9"),
}
"""Drafts made by options: the kind of heads, and the drafter. A low threshold drafts often and
wrongly, as tests need."""

EAGER = SpeculationOptions(never_slower=False).updated(
    {"costs": "row=0,head=0", "ngram": "size=2,max_tokens=5"}
)
"""Options under which drafts need not pay."""

HEADS: dict[str, Callable[[Backbone], ExitHeads | AttendingHeads]] = {
    "lens": lambda backbone: logit_lens(backbone.unembedding, backbone.num_layers, "tiny"),
    "deep": deep_heads,
    "deep with states": lambda backbone: deep_heads(backbone, (0,), (1, 2)),
    "attending": attending_heads,
    "medusa": medusa_heads,
}


def taught(runtime: Runtime, sequence: list[int]) -> None:
    """Give a runtime successors and a datastore of the sequence, with every third token wrong."""
    size = runtime.backbone.vocab_size
    for place, token in enumerate(sequence[1:], start=1):
        wrong = (token + 1) % size
        runtime.successors.learn(sequence[:place], [wrong, token] if place % 3 else [wrong], token)
    other = [(token + (place % 3 == 0)) % size for place, token in enumerate(sequence)]
    runtime.datastore = Datastore.of([sequence, other, other], make_tokenizer())


def drafters(
    backbone: Backbone, sequence: list[int], kinds: Kinds = None, *, trees: bool = True
) -> Iterator[tuple[str, Drafter, dict[str, Any]]]:
    """Yield good, bad, random and real drafters, with their name and keywords for `decode`."""
    size = backbone.vocab_size
    scripted: dict[str, tuple[Drafter, tuple[int, ...]]] = {
        "oracle": (OracleDrafter(sequence, width=5), ()),
        "wrong": (OracleDrafter([(token + 1) % size for token in sequence], width=5), ()),
        "random": (RandomDrafter((), 0, size, width=3), ()),
        "mixed": (MixedDrafter(sequence, 1, size, width=5), ()),
        "mixed over exits": (MixedDrafter(sequence, 2, size, width=4), EXITS),
        "oracle trees": (BranchingDrafter(sequence, 0, size, 7), ()),
        "oracle trees over exits": (BranchingDrafter(sequence, 1, size, 7), EXITS),
    }
    trees = trees and backbone.runs_trees
    for name, (drafter, exits) in scripted.items():
        if (kinds is None or name in kinds) and (trees or "trees" not in name):
            yield name, drafter, {"exit_layers": exits}
    heads_of = cache(lambda kind: HEADS[kind](backbone) if kind else None)
    request = asked(torch.tensor([sequence]))
    for name, (kind, spec) in OWN.items():
        options = EAGER.updated({"drafter": spec})
        if name == "exits with pauses":
            options = options.updated({"never_slower": True, "costs": "row=0.3"})
        second = wrapped("llama", num_hidden_layers=3) if name == "another model" else None
        # the tiny second model does not fit a real model
        fits = second is None or second.vocab_size == size
        if (kinds is None or name in kinds) and fits and (trees or not options.grows_trees):
            heads = heads_of(kind)
            runtime = Runtime(backbone, heads, second)
            taught(runtime, sequence)
            layers = heads.layers_in_use(options) if heads else ()
            keywords = {"exit_layers": layers, "heads": heads}
            yield name, runtime.drafter(request, options, Load()), keywords


def check_draft_invariance(
    backbone: Backbone,
    ids: Tensor,
    shape: PassShape = FIXED,
    *,
    new_tokens: int = NEW_TOKENS,
    kinds: Kinds = None,
) -> None:
    """Rung 2: in pinned mode logits are bitwise the same whatever the drafts were.

    Trees are drafted only where a row's bits do not depend on others: see `Runtime.runs_trees`.
    """
    plain = decode(backbone, ids, NoDrafter(), shape=shape, new_tokens=new_tokens)
    sequence, trees = ids[0].tolist() + plain.tokens, backbone.claims.steady
    for name, drafter, keywords in drafters(backbone, sequence, kinds, trees=trees):
        decoded = decode(backbone, ids, drafter, shape=shape, new_tokens=new_tokens, **keywords)
        differing = int((decoded.logits != plain.logits).any(-1).sum())
        assert differing == 0, f"{name}: {differing} of {len(plain.tokens)} positions differ"
        assert decoded.tokens == plain.tokens, name


def check_equal_to_hugging_face(backbone: Backbone, ids: Tensor, kinds: Kinds = None) -> None:
    """Rung 3, for float64: tokens equal to `model.generate`'s, whatever the drafts."""
    expected, _ = hugging_face(backbone.model, ids, NEW_TOKENS)
    for name, drafter, keywords in drafters(backbone, ids[0].tolist() + expected, kinds):
        decoded = decode(backbone, ids, drafter, **keywords)
        assert decoded.tokens == expected, name
        accepted = max(entry.accepted for entry in decoded.entries)
        assert accepted >= {"oracle": 1, "oracle trees": 2}.get(name, 0), name


RATIO = "lenient:lenience=1"
"""Speculative sampling: accepts by the ratio of probabilities, where `lossless` compares draws."""


def check_sampling(
    model: PreTrainedModel,
    ids: Tensor,
    draws: int = 1000,
    length: int = 3,
    heads: str | ExitHeads = "logit-lens",
    seeded: bool = False,
    **options: Any,
) -> None:
    """Rung 6: sampled sequences have exactly the model's distribution, by chi-square.

    Exits are taken at low confidence and the distributions are flattened, so that rejections and
    residuals matter. Draws come from one fixed seed, or each text is `seeded` by its number. A
    correct sampler always passes; each mutant of test_mutants.py has p < 1e-10 from 1,000 draws on.
    """
    size = model.config.vocab_size
    settings = {name: options.pop(name) for name in OPTION_NAMES if name in options}
    speculator = wrap(model, heads=heads, drafter="exit", **options)
    low = {"exit": "layers=1,threshold=0.01,max_tokens=2", "draft_model": "max_tokens=2"}
    speculator.options = speculator.options.updated(low | settings)
    # made once: transformers reads the keywords more slowly than the answer is written
    call = speculator.call(
        ids, {"max_new_tokens": length, "do_sample": True, "top_k": 0, "temperature": TEMPERATURE}
    )
    torch.manual_seed(0)
    engine = speculator.engine()
    calls = (
        replace(call, sampler=call.sampler.seeded(seed, ids.device)) if seeded else call
        for seed in range(draws)
    )
    running = [engine.add(one.only(), one.speculation) for one in calls]
    answers = [Stream(text, call).drain() for text in running]
    stats = [answer.stats for answer in answers]
    assert 0 < sum(one.accepted for one in stats) < sum(one.drafted for one in stats)
    counts = Counter(tuple(answer.token_ids) for answer in answers)
    expected = enumerate_sequences(model, ids, length, size)
    assert chi_square_p(counts, expected, draws) > 0.001, "not the distribution"


def enumerate_sequences(
    model: PreTrainedModel, ids: Tensor, length: int, size: int
) -> dict[tuple[int, ...], float]:
    """Exact probability of every continuation of `length` tokens."""
    chances = {}
    with torch.no_grad():
        for tokens in itertools.product(range(size), repeat=length):
            logits = block_logits(model, ids, list(tokens))
            probs = (logits / TEMPERATURE).softmax(-1).gather(1, torch.tensor(tokens)[:, None])
            chances[tokens] = float(probs.prod())
    return chances


def chi_square_p(
    counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float], draws: int
) -> float:
    """P-value of Pearson's test; outcomes expected fewer than five times are pooled."""
    cells = [(counts[outcome], prob * draws) for outcome, prob in expected.items()]
    rare = [cell for cell in cells if cell[1] < 5]
    pooled = sum(count for count, _ in rare), sum(mean for _, mean in rare)
    cells = [cell for cell in (*cells, pooled) if cell[1] >= 5]
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    half = torch.tensor([len(cells) - 1, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(*half))
