"""Rungs of the losslessness ladder (design.md section 5), as functions that raise AssertionError.

Called by test_lossless.py on correct code, where they must pass, and by test_mutants.py on code
with a planted bug, where one of them must fail.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from selfspec.api.speculator import wrap
from selfspec.api.stream import Stream
from selfspec.config import OPTION_NAMES
from selfspec.decoding.acceptance import GreedyMatch
from selfspec.decoding.costs import DraftCost
from selfspec.decoding.decode import StopRule, rounds
from selfspec.decoding.drafters.base import DraftController, Drafting
from selfspec.decoding.drafters.draft_model import (
    DraftCache,
    DraftModelDrafter,
    LayerSearch,
    SkipDrafter,
)
from selfspec.decoding.drafters.heads import (
    AttendingDrafter,
    AttendingGuesser,
    ExitDrafter,
    HeadGuesser,
    MedusaGuesser,
)
from selfspec.decoding.drafters.ngram import (
    LookaheadDrafter,
    NgramDrafter,
    SeenTextFirst,
    SuccessorGuesser,
    Successors,
)
from selfspec.decoding.drafters.rest import Datastore, RestGuesser
from selfspec.decoding.drafters.trees import TreeDrafter, WhilePaying
from selfspec.decoding.measure import PassShape
from selfspec.decoding.sampling import Sampler
from selfspec.decoding.state import DecodeState, Drafter, NoDrafter
from selfspec.decoding.stats import Round, Stopwatch
from selfspec.eval.results import block_logits
from selfspec.eval.verify import (
    BranchingDrafter,
    MixedDrafter,
    OracleDrafter,
    RandomDrafter,
    Recorder,
    WrongDrafter,
    hugging_face,
)
from selfspec.heads.attending import AttendingConfig, AttendingHeads, unfilled
from selfspec.heads.exit_heads import ExitHeads, HeadsConfig, logit_lens
from selfspec.heads.folder import MEDUSA
from selfspec.heads.heads import ExitJudge
from selfspec.model.backbone import Backbone
from selfspec.model.kv import KVCache
from selfspec.options import Skip
from tests.models import VOCAB_SIZE, wrapped
from tests.talks import make_tokenizer

FIXED = PassShape(rows=6, slots=64)
"""Passes of one shape: the drafts below are at most 5 wide, the texts at most 58 long."""

FREE = PassShape()
"""Passes as they come, where kernels do not care; everywhere else nothing is pinned."""

NEW_TOKENS = 20

EXITS = (2, 4, 5)
DEEP_EXITS = (0, 3)
Kinds = Collection[str] | None
"""Of drafts, by name; None: all."""

FEW = ("oracle", "wrong", "random", "eager exits", "attending", "trees around seen text")
"""Drafts of every width: what test_mutants.py plants, these find too."""

TEMPERATURE = 4.0
"""For sampling: the tiny models' own distributions are nearly one-hot."""


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
    sampler: Sampler | None = None,
) -> Decoded:
    """Greedy decoding with any drafter, checking the invariants of design.md section 1."""
    length = ids.shape[1] + new_tokens
    kv = KVCache(backbone.num_layers, shape.slots)
    state = DecodeState(
        backbone,
        ids,
        exit_layers=exit_layers,
        kv=kv,
        pinned_rows=shape.rows,
        reader=reader_of(drafter),
    )
    rule = Recorder(GreedyMatch(sampler or greedy()))
    entries = []
    for entry in rounds(state, drafter, rule, StopRule(max_length=length), Stopwatch()):
        entries.append(entry)
        held = {kv.length(layer) for layer in range(backbone.num_layers)}
        assert held == {state.length - 1}
        assert state.hidden.schedule.pushed == 0
    return Decoded(state.ids[0, ids.shape[1] :].tolist(), rule.logits, entries)


def greedy() -> Sampler:
    return Sampler(LogitsProcessorList())


def drafting(width: int) -> Drafting:
    """The likeliest tokens, `width` in every round."""
    return Drafting(greedy(), DraftController(width))


def exit_drafter(backbone: Backbone, tau: float, width: int = 5) -> ExitDrafter:
    """Untrained heads at EXITS; a low tau drafts often and wrongly, which is what tests want."""
    heads = logit_lens(backbone.unembedding, backbone.num_layers, "tiny")
    judge = ExitJudge(backbone.num_layers, dict.fromkeys(EXITS, tau), anneal_strength=0.3)
    return ExitDrafter(heads, judge, drafting(width))


def deep_heads(backbone: Backbone, exit_layers: tuple[int, ...] = DEEP_EXITS) -> ExitHeads:
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
    )
    return _moved(ExitHeads(config, backbone.unembedding), seed=3, by=0.1)


def _moved(heads: ExitHeads, seed: int, by: float) -> ExitHeads:
    generator = torch.Generator().manual_seed(seed)
    for parameter in heads.eval().requires_grad_(False).parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=by)
    return heads


def deep_drafter(heads: ExitHeads, tau: float, width: int = 5) -> ExitDrafter:
    """Chains of `deep_heads`."""
    judge = ExitJudge(heads.config.num_layers, dict.fromkeys(DEEP_EXITS, tau))
    return ExitDrafter(heads, judge, drafting(width))


def medusa_heads(backbone: Backbone, count: int = 4) -> ExitHeads:
    """`count` heads of random weights, each for a token further ahead."""
    own = replace(deep_heads(backbone).config, exit_layers=(0,), head_type=MEDUSA, num_heads=count)
    return _moved(ExitHeads(own, backbone.unembedding), seed=7, by=0.3)


def grown(
    guesser: Any, depth: int, most: int = 9, row: float = 0.0, seen: NgramDrafter | None = None
) -> TreeDrafter:
    """Trees of up to `most` guesses, whether they pay or not."""
    cost, controller = DraftCost(rows=(row,)), DraftController(depth)
    return TreeDrafter(guesser, cost, controller, most=most, seen=seen, never_slower=False)


def medusa_drafter(backbone: Backbone, most: int = 15, row: float = 0.0) -> TreeDrafter:
    """Trees of `medusa_heads`."""
    judge = ExitJudge(backbone.num_layers, {0: 1e-9})
    return grown(MedusaGuesser(medusa_heads(backbone), judge, greedy(), 10), 6, most, row)


def attending_heads(backbone: Backbone) -> AttendingHeads:
    """EAGLE-3 heads of random weights, over every other token of the model."""
    weight, width = backbone.unembedding.weight, backbone.hidden_size
    drafted = (len(weight) + 1) // 2
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
        draft_vocab_size=drafted,
        num_layers=backbone.num_layers,
        state_layers=(0, backbone.num_layers // 2, backbone.num_layers),
        norm_before_residual=True,
        norm_output=True,
        layer=sizes | attention | {"model_type": "qwen3"},
    )
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.randn(one.shape, generator=generator) * one.shape[-1] ** -0.25
        for name, one in unfilled(config, embeddings=False).state_dict().items()
    }
    tensors["d2t"] = torch.arange(drafted)
    return AttendingHeads(config, backbone.unembedding, tensors).eval().requires_grad_(False)


def attending_drafter(heads: AttendingHeads, tau: float, width: int = 5) -> AttendingDrafter:
    """Chains of `attending_heads`."""
    judge = ExitJudge(heads.config.num_layers, {0: tau})
    return AttendingDrafter(heads, judge, drafting(width))


def reader_of(drafter: Drafter) -> AttendingHeads | None:
    """Heads that attend, if any draft."""
    heads = getattr(drafter, "heads", None) or getattr(
        getattr(drafter, "_guesser", None), "_heads", None
    )
    return heads if isinstance(heads, AttendingHeads) else None


def tree_drafter(
    heads: ExitHeads | AttendingHeads, seen: NgramDrafter | None = None
) -> TreeDrafter:
    """Wide trees of `deep_heads`, or of those that attend, around prompt lookup."""
    judge = ExitJudge(heads.config.num_layers, {0: 0.001})
    kind: Any = AttendingGuesser if isinstance(heads, AttendingHeads) else HeadGuesser
    return grown(kind(heads, judge, greedy(), 4), 3, seen=seen)


def successor_drafter(sequence: list[int], vocab_size: int) -> TreeDrafter:
    """Trees of what the sequence itself taught, every third token wrong."""
    table = Successors()
    for at, token in enumerate(sequence[1:], start=1):
        wrong = (token + 1) % vocab_size
        table.learn(sequence[:at], [wrong, token] if at % 3 else [wrong], token)
    return grown(SuccessorGuesser(table, 2), 3)


def rest_drafter(sequence: list[int], vocab_size: int) -> TreeDrafter:
    """Trees of the sequence and of another, of which every third token is wrong."""
    wrong = [(token + (at % 3 == 0)) % vocab_size for at, token in enumerate(sequence)]
    store = Datastore.of([sequence, wrong, wrong], make_tokenizer())
    return grown(RestGuesser(store, 9, trees=True), 5)


def second_model() -> DraftModelDrafter:
    """A model of half the layers, which has nothing to do with the one that verifies."""
    return DraftModelDrafter(DraftCache(wrapped("llama", num_hidden_layers=3)), drafting(4))


def fewer_layers(backbone: Backbone) -> SkipDrafter:
    """The model itself without every other layer."""
    options = Skip(skipped=(*range(2, backbone.num_layers, 2),), threshold=0.3)
    return SkipDrafter(options, LayerSearch(backbone.num_layers), drafting(4))


def drafters(
    backbone: Backbone, sequence: list[int], kinds: Kinds = None, *, trees: bool = True
) -> Iterator[tuple[str, Drafter, tuple[int, ...]]]:
    """Good, bad and random drafts, and real exits; with the exit layers each needs."""
    size = backbone.vocab_size
    deep = cache(partial(deep_heads, backbone))
    attending = cache(partial(attending_heads, backbone))

    def seen(longest: int) -> NgramDrafter:
        return NgramDrafter(DraftController(5), size=longest)

    exits = partial(exit_drafter, backbone)
    bounds: Any = {"level": 3, "window": 2, "guesses": 2, "most": 7}
    makers: dict[str, tuple[Callable[[], Drafter], tuple[int, ...]]] = {
        "oracle": (lambda: OracleDrafter(sequence, width=5), ()),
        "wrong": (lambda: WrongDrafter(sequence, 0, size, width=5), ()),
        "random": (lambda: RandomDrafter((), 0, size, width=3), ()),
        "mixed": (lambda: MixedDrafter(sequence, 1, size, width=5), ()),
        "mixed over exits": (lambda: MixedDrafter(sequence, 2, size, width=4), EXITS),
        "eager exits": (lambda: exits(0.05), EXITS),
        "exits with pauses": (lambda: WhilePaying(exits(0.05), DraftCost(rows=(1.0,))), EXITS),
        "choosy exits": (lambda: exits(0.5, 3), EXITS),
        "eager deep": (lambda: deep_drafter(deep(), 0.02), DEEP_EXITS),
        "choosy deep": (lambda: deep_drafter(deep(), 0.1), DEEP_EXITS),
        "attending": (lambda: attending_drafter(attending(), 0.001), ()),
        "choosy attending": (lambda: attending_drafter(attending(), 0.2, width=3), ()),
        "fewer layers": (lambda: fewer_layers(backbone), ()),
        "seen text": (lambda: seen(2), ()),
        "seen text, else exits": (lambda: SeenTextFirst(seen(3), exits(0.05)), EXITS),
    }
    if size == VOCAB_SIZE:  # of tiny models; no other is at hand for a real one
        makers["another model"] = (second_model, ())
    if trees and backbone.runs_trees:
        makers |= {
            "oracle trees": (lambda: BranchingDrafter(sequence, 0, size, 7), ()),
            "oracle trees over exits": (lambda: BranchingDrafter(sequence, 1, size, 7), EXITS),
            "trees": (lambda: tree_drafter(deep()), (0,)),
            "successors": (lambda: successor_drafter(sequence, size), ()),
            "rest": (lambda: rest_drafter(sequence, size), ()),
            "medusa trees": (lambda: medusa_drafter(backbone), (0,)),
            "lookahead": (lambda: LookaheadDrafter(DraftController(2), **bounds), ()),
            "attending trees": (lambda: tree_drafter(attending()), ()),
            "attending trees around seen text": (lambda: tree_drafter(attending(), seen(2)), ()),
            "trees around seen text": (lambda: tree_drafter(deep(), seen(2)), (0,)),
        }
    for name, (make, layers) in makers.items():
        if kinds is None or name in kinds:
            yield name, make(), layers


def check_draft_invariance(
    backbone: Backbone,
    ids: Tensor,
    shape: PassShape = FIXED,
    *,
    new_tokens: int = NEW_TOKENS,
    kinds: Kinds = None,
) -> None:
    """Rung 2: in pinned mode logits are bitwise the same whatever the drafts were.

    Trees are made where a row's bits are its own: see `Runtime.runs_trees`.
    """
    plain = decode(backbone, ids, NoDrafter(), shape=shape, new_tokens=new_tokens)
    sequence, trees = ids[0].tolist() + plain.tokens, backbone.claims.steady
    for name, drafter, exits in drafters(backbone, sequence, kinds, trees=trees):
        found = decode(
            backbone, ids, drafter, shape=shape, exit_layers=exits, new_tokens=new_tokens
        )
        differing = int((found.logits != plain.logits).any(-1).sum())
        assert differing == 0, f"{name}: {differing} of {len(plain.tokens)} positions differ"
        assert found.tokens == plain.tokens, name


def check_equal_to_hugging_face(backbone: Backbone, ids: Tensor, kinds: Kinds = None) -> None:
    """Rung 3, for float64: tokens equal to `model.generate`'s, whatever the drafts."""
    expected, _ = hugging_face(backbone.model, ids, NEW_TOKENS)
    for name, drafter, exits in drafters(backbone, ids[0].tolist() + expected, kinds):
        found = decode(backbone, ids, drafter, exit_layers=exits)
        assert found.tokens == expected, name
        kept = max(entry.accepted for entry in found.entries)
        assert kept >= {"oracle": 1, "oracle trees": 2}.get(name, 0), name


def count_ties(
    backbone: Backbone, ids: Tensor, *, new_tokens: int = NEW_TOKENS, kinds: Kinds = None
) -> int:
    """Rung 4, for float32: tokens equal to `model.generate`'s, or parted at a tie; counts ties.

    A tie is a margin of the top logit within twice the noise: the largest difference, on this
    very text, between logits of our passes and of one block.
    """
    expected, _ = hugging_face(backbone.model, ids, new_tokens)
    ties = 0
    for name, drafter, exits in drafters(backbone, ids[0].tolist() + expected, kinds):
        found = decode(backbone, ids, drafter, exit_layers=exits, new_tokens=new_tokens)
        parted = [a != b for a, b in zip(found.tokens, expected, strict=True)]
        if any(parted):
            at = parted.index(True)
            noise = measured_noise(backbone.model, ids, found)
            top = found.logits[at].topk(2).values
            assert float(top[0] - top[1]) <= 2 * noise, f"{name} parts at {at}, noise {noise}"
            ties += 1
    return ties


def check_near_top(
    backbone: Backbone,
    exact: PreTrainedModel,
    ids: Tensor,
    *,
    new_tokens: int = NEW_TOKENS,
    kinds: Kinds = None,
) -> None:
    """Rung 5, for bfloat16: each token lies within the noise of the float32 model's top logit.

    Noise: the largest difference, on the emitted text, between the bfloat16 and the float32 model
    run plainly over it in one block; a token may lose it twice, once for each of two logits.
    """
    plain = decode(backbone, ids, NoDrafter(), new_tokens=new_tokens)
    shortfalls: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
    for name, drafter, exits in drafters(backbone, ids[0].tolist() + plain.tokens, kinds):
        found = decode(backbone, ids, drafter, exit_layers=exits, new_tokens=new_tokens)
        if (text := tuple(found.tokens)) not in shortfalls:  # most drafts lead to one text
            shortfalls[text] = shortfall(backbone.model, exact, ids, found.tokens)
        short, noise = shortfalls[text]
        assert short <= 2 * noise, f"{name}: {short} below the top, noise {noise}"


def shortfall(
    model: PreTrainedModel, exact: PreTrainedModel, ids: Tensor, tokens: list[int]
) -> tuple[Tensor, Tensor]:
    """By how much `tokens` miss the top logit of `exact` at most, and the noise of `model`."""
    reference = block_logits(exact, ids, tokens)
    noise = (block_logits(model, ids, tokens) - reference).abs().max()
    chosen = reference.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return (reference.max(-1).values - chosen).max(), noise


def check_sampling(
    model: PreTrainedModel,
    ids: Tensor,
    draws: int = 1000,
    length: int = 3,
    heads: str | ExitHeads = "logit-lens",
    **options: Any,
) -> None:
    """Rung 6: sampled sequences have exactly the model's distribution, by chi-square.

    Exits are taken at low confidence and the distributions are flattened, so that rejections and
    residuals matter. With the fixed seed a correct sampler passes always; each of test_mutants.py's
    has p < 1e-10 from 1,000 draws on.
    """
    size = model.config.vocab_size
    own = {name: options.pop(name) for name in OPTION_NAMES if name in options}
    speculator = wrap(model, heads=heads, drafter="exit", **options)
    low = {"exit": "layers=1,threshold=0.01,max_tokens=2", "draft_model": "max_tokens=2"}
    speculator.options = speculator.options.updated(low | own)
    # asked once: transformers takes longer to read the keywords than the answer takes
    call = speculator.call(
        ids, {"max_new_tokens": length, "do_sample": True, "top_k": 0, "temperature": TEMPERATURE}
    )
    torch.manual_seed(0)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(draws):
        answer = Stream(speculator.engine().add(call.only(), call.speculation), call).drain()
        counts[tuple(answer.token_ids)] += 1
    expected = enumerate_sequences(model, ids, length, size)
    assert chi_square_p(counts, expected, draws) > 0.001


def enumerate_sequences(
    model: PreTrainedModel, ids: Tensor, length: int, size: int
) -> dict[tuple[int, ...], float]:
    """Exact probability of every continuation of `length` tokens."""
    found = {}
    with torch.no_grad():
        for tokens in itertools.product(range(size), repeat=length):
            logits = block_logits(model, ids, list(tokens))
            probs = (logits / TEMPERATURE).softmax(-1).gather(1, torch.tensor(tokens)[:, None])
            found[tokens] = float(probs.prod())
    return found


def chi_square_p(
    counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float], draws: int
) -> float:
    """P-value of Pearson's test; outcomes expected less than five times are pooled."""
    pooled = [0.0, 0.0]
    statistic, cells = 0.0, 0
    for outcome, prob in expected.items():
        if prob * draws < 5:
            pooled[0] += counts[outcome]
            pooled[1] += prob * draws
        else:
            statistic += (counts[outcome] - prob * draws) ** 2 / (prob * draws)
            cells += 1
    if pooled[1] >= 5:
        statistic += (pooled[0] - pooled[1]) ** 2 / pooled[1]
        cells += 1
    half = torch.tensor([(cells - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def measured_noise(model: PreTrainedModel, ids: Tensor, found: Decoded) -> float:
    """Largest difference between our passes and one block, on the same text."""
    return float((block_logits(model, ids, found.tokens) - found.logits).abs().max())
