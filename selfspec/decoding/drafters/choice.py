"""From options to the drafter of one sequence."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from selfspec.config import SpeculationOptions
from selfspec.decoding import prices
from selfspec.decoding.controllers import make_controller
from selfspec.decoding.drafters.attending import AttendingDrafter, AttendingGuesser
from selfspec.decoding.drafters.base import Drafter, DraftsFrom, NoDrafter, Trunks
from selfspec.decoding.drafters.draft_model import DraftCache, DraftModelDrafter
from selfspec.decoding.drafters.heads import (
    ExitDrafter,
    Guesser,
    HeadGuesser,
    Siblings,
    TreeDrafter,
    WhilePaying,
)
from selfspec.decoding.drafters.ngram import GrammarDrafter, NgramDrafter, SeenTextFirst, StateT
from selfspec.decoding.drafters.successors import SuccessorGuesser, Successors
from selfspec.decoding.sampling import Sampler
from selfspec.decoding.state import DecodeState
from selfspec.errors import HeadsNotFound, InvalidOption
from selfspec.heads.attending import AttendingHeads
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.heads import ExitJudge, spread
from selfspec.model.backbone import Backbone


@dataclass(frozen=True)
class Sources:
    """A model, and what its drafts can come from."""

    backbone: Backbone
    heads: ExitHeads | None = None
    draft_model: DraftCache | None = None
    successors: Successors | None = None
    """What all texts of the model have found likely."""
    load: prices.Load = field(default_factory=prices.Load)
    """How many texts are being written."""

    def runs_trees(self, options: SpeculationOptions) -> bool:
        """Whether heads may guess several tokens for a place, and the model can look at siblings.

        Padded passes draft chains: what a row sums over lies elsewhere there, once a sibling was in
        between.
        """
        steady = not options.pinned or self.backbone.claims.steady
        return options.grows_trees and steady and self.backbone.runs_trees

    def reads_embedding(self, options: SpeculationOptions) -> bool:
        """Whether the only exit layer in use is 0: drafts run no layer, so a tree grows freely."""
        return self.heads is not None and self.heads.layers_in_use(options) == (0,)


def make_drafter(
    options: SpeculationOptions,
    sources: Sources,
    sampler: Sampler,
    end_tokens: Collection[int] = (),
) -> Drafter:
    """What proposes tokens under `options`; nothing behind one of `end_tokens`.

    The default, exit, drafts nothing where there are no heads. Raises HeadsNotFound where heads
    were asked for by another name, InvalidOption where there is no draft model.
    """
    if not options.speculate or options.drafter == "none":
        return NoDrafter()
    cost = prices.Unmeasured.of(sources.backbone, sources.load)
    if options.drafter == "ngram" and sampler.grammar is None:
        return make_ngram(options, cost, end_tokens)
    trunks = _trunks(options, cost, sampler, end_tokens)
    if options.drafter == "ngram" or (options.drafter == "exit" and sources.heads is None):
        return NoDrafter() if trunks is None else SeenTextFirst(trunks, NoDrafter())
    other: Drafter
    layers: tuple[int, ...] = ()
    token = 0.0
    if options.uses("successors"):
        count = options.successors.guesses if sources.runs_trees(options) else 1
        table = SuccessorGuesser(sources.successors or Successors(), count)
        sampled = sampler.do_sample
        return make_tree(table, options, cost, end_tokens, seen=trunks, sampled=sampled)
    if options.uses("draft-model"):
        other, token = _draft_model(options, sources, sampler, end_tokens)
    elif sources.runs_trees(options) and sources.reads_embedding(options):
        return _tree(options, sources, cost, sampler, end_tokens, trunks)
    elif isinstance(sources.heads, AttendingHeads):
        other = _attending(sources.heads, options, sampler, end_tokens)
        token = prices.share(sources.heads.nbytes, sources.backbone)
    else:
        other, layers = _exit(options, sources, cost, sampler, end_tokens)
    other = while_paying(
        other,
        options,
        unmeasured=cost,
        num_layers=sources.backbone.num_layers,
        exit_layers=layers,
        token_cost=token,
    )
    return other if trunks is None else SeenTextFirst(trunks, other)


def make_ngram(
    options: SpeculationOptions, unmeasured: prices.Unmeasured, end_tokens: Collection[int]
) -> NgramDrafter:
    """A drafter of text already seen; `unmeasured`: the model's costs, where `options` say none."""
    known = unmeasured.unless(options.prices)
    return NgramDrafter(
        make_controller(options, options.ngram.max_tokens),
        end_tokens,
        size=options.ngram.size,
        cost=prices.DraftCost(rows=known.rows, load=known.load),
    )


def _trunks(
    options: SpeculationOptions,
    unmeasured: prices.Unmeasured,
    sampler: Sampler,
    end_tokens: Collection[int],
) -> Trunks | None:
    """What is proposed without work, if anything; under a grammar nothing that it forbids."""
    seen = make_ngram(options, unmeasured, end_tokens) if options.uses("ngram") else None
    if sampler.grammar is None:
        return seen
    return GrammarDrafter(sampler.grammar, sampler.pad, options.widest_pass - 1, seen)


def while_paying(
    drafter: DraftsFrom[StateT],
    options: SpeculationOptions,
    *,
    unmeasured: prices.Unmeasured,
    num_layers: int,
    exit_layers: tuple[int, ...] = (),
    token_cost: float = 0.0,
) -> DraftsFrom[StateT]:
    """`drafter` under the never-slower rule, or as it is where `options` switch that off.

    `exit_layers`: those in use, of `num_layers`; `unmeasured` as in `make_ngram`.
    """
    if not options.never_slower:
        return drafter
    known = unmeasured.unless(options.prices)
    head = known.head if exit_layers else 0.0
    cost = prices.DraftCost(
        rows=known.rows, load=known.load, token=token_cost, head=head, num_layers=num_layers
    )
    return WhilePaying(drafter, cost)


def make_tree(
    guesser: Guesser[StateT],
    options: SpeculationOptions,
    unmeasured: prices.Unmeasured,
    end_tokens: Collection[int],
    *,
    seen: Trunks | None = None,
    sampled: bool = False,
) -> TreeDrafter[StateT]:
    """Trees of what `guesser` says, around what `seen` proposes."""
    return TreeDrafter(
        guesser,
        _cost(options, unmeasured),
        make_controller(options, options.tree.max_tokens),
        end_tokens,
        most=options.most_drafts,
        seen=seen,
        never_slower=options.never_slower,
        sampled=sampled,
    )


def _tree(
    options: SpeculationOptions,
    sources: Sources,
    unmeasured: prices.Unmeasured,
    sampler: Sampler,
    end_tokens: Collection[int],
    seen: Trunks | None,
) -> TreeDrafter[DecodeState]:
    """Of exit heads that read embeddings, or attend."""
    heads, kind = _required(sources.heads, options), HeadGuesser
    if isinstance(heads, AttendingHeads):
        kind = AttendingGuesser
        unmeasured = unmeasured._replace(head=prices.share(heads.nbytes, sources.backbone))
    guesser = kind(heads, _judge(heads, options), sampler, options.exit.guesses)
    return make_tree(guesser, options, unmeasured, end_tokens, seen=seen, sampled=sampler.do_sample)


def _required(heads: ExitHeads | None, options: SpeculationOptions) -> ExitHeads:
    """Raise HeadsNotFound where there are none."""
    if heads is None:
        raise HeadsNotFound(f"drafter {options.drafter} needs exit heads. Give heads=... or ngram")
    return heads


def _judge(heads: ExitHeads, options: SpeculationOptions) -> ExitJudge:
    """With the thresholds of `options`, and temperatures that were fitted to the heads."""
    config = heads.config
    return ExitJudge(
        config.num_layers,
        spread(options.exit.thresholds, options.exit.layers or config.exit_layers),
        options.exit.anneal_strength,
        {int(layer): value for layer, value in config.temperatures.items()},
    )


def _exit(
    options: SpeculationOptions,
    sources: Sources,
    unmeasured: prices.Unmeasured,
    sampler: Sampler,
    end_tokens: Collection[int],
) -> tuple[ExitDrafter, tuple[int, ...]]:
    """And the exit layers in use, up to D_max."""
    heads = _required(sources.heads, options)
    siblings = None
    if sources.runs_trees(options):
        cost = _cost(options, unmeasured, num_layers=sources.backbone.num_layers)
        siblings = Siblings(options.exit.guesses, cost, options.most_drafts)
    drafter = ExitDrafter(
        heads,
        _judge(heads, options),
        sampler,
        make_controller(options, options.exit.max_tokens),
        end_tokens,
        beliefs=options.acceptance.reads_beliefs,
        siblings=siblings,
    )
    return drafter, heads.layers_in_use(options)


def _attending(
    heads: AttendingHeads,
    options: SpeculationOptions,
    sampler: Sampler,
    end_tokens: Collection[int],
) -> AttendingDrafter:
    """Chains, on any executor."""
    heads.layers_in_use(options)
    return AttendingDrafter(
        heads,
        _judge(heads, options),
        sampler,
        make_controller(options, options.exit.max_tokens),
        end_tokens,
        beliefs=options.acceptance.reads_beliefs,
    )


def _cost(
    options: SpeculationOptions, unmeasured: prices.Unmeasured, *, num_layers: int = 1
) -> prices.DraftCost:
    """Of drafts that exit heads make; rows and heads are free where nothing need pay."""
    if not options.never_slower:
        return prices.DraftCost(rows=(0.0,), num_layers=num_layers)
    known = unmeasured.unless(options.prices)
    return prices.DraftCost(
        rows=known.rows, load=known.load, head=known.head, num_layers=num_layers
    )


def _draft_model(
    options: SpeculationOptions,
    sources: Sources,
    sampler: Sampler,
    end_tokens: Collection[int],
) -> tuple[DraftModelDrafter, float]:
    """And what a token of it costs, as a share of a step of the model."""
    cache = sources.draft_model
    if cache is None:
        raise InvalidOption(f"drafter {options.drafter} needs a second model. Give --draft-model")
    controller = make_controller(options, options.draft_model.max_tokens)
    beliefs = options.acceptance.reads_beliefs
    drafter = DraftModelDrafter(cache, sampler, controller, end_tokens, beliefs=beliefs)
    return drafter, prices.token_cost(cache.backbone, sources.backbone)
