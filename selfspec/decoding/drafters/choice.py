"""From options to the drafter of one sequence."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from selfspec.config import SpeculationOptions
from selfspec.decoding.controllers import make_controller
from selfspec.decoding.costs import DraftCost, Load, share, token_cost, token_cost_without
from selfspec.decoding.drafters.attending import AttendingDrafter, AttendingGuesser
from selfspec.decoding.drafters.base import Drafter, NoDrafter, Trunks
from selfspec.decoding.drafters.draft_model import DraftCache, DraftModelDrafter
from selfspec.decoding.drafters.heads import (
    ExitDrafter,
    Guesser,
    HeadGuesser,
    TreeDrafter,
    WhilePaying,
)
from selfspec.decoding.drafters.lookahead import LookaheadDrafter
from selfspec.decoding.drafters.medusa import MedusaGuesser
from selfspec.decoding.drafters.ngram import GrammarDrafter, NgramDrafter, SeenTextFirst, StateT
from selfspec.decoding.drafters.rest import Datastore, RestGuesser
from selfspec.decoding.drafters.skip import LayerSearch, SkipDrafter
from selfspec.decoding.drafters.successors import SuccessorGuesser, Successors
from selfspec.decoding.sampling import Sampler
from selfspec.errors import HeadsNotFound, InvalidOption
from selfspec.heads.attending import AttendingHeads
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.heads import ExitJudge, spread
from selfspec.model.backbone import Backbone
from selfspec.options import word


@dataclass(frozen=True)
class Sources:
    """A model, and what its drafts can come from."""

    backbone: Backbone
    heads: ExitHeads | None = None
    draft_model: DraftCache | None = None
    successors: Successors = field(default_factory=Successors)
    """What all texts of the model have found likely."""
    datastore: Datastore | None = None
    load: Load = field(default_factory=Load)
    """How many texts are being written."""
    layers: LayerSearch | None = None
    """Which layers of the model drafts leave out; None: nobody knows yet."""

    def runs_trees(self, options: SpeculationOptions) -> bool:
        """Whether heads may guess several tokens for a place, and the model can look at siblings.

        Padded passes draft chains: what a row sums over lies elsewhere there, once a sibling was in
        between.
        """
        steady = not options.pinned or self.backbone.claims.steady
        return options.grows_trees and steady and self.backbone.runs_trees


def make_drafter(
    options: SpeculationOptions,
    sources: Sources,
    sampler: Sampler,
    end_tokens: Collection[int] = (),
) -> Drafter:
    """What proposes tokens under `options`; nothing behind one of `end_tokens`.

    The default, exit, drafts nothing where there are no heads. Raises HeadsNotFound where heads
    were asked for by another name, InvalidOption where there is no draft model, or no datastore.
    """
    if not options.speculate or options.drafter == "none":
        return NoDrafter()
    cost = DraftCost.for_model(sources.backbone, sources.load).with_costs(options.costs)
    seen: Trunks | None = None
    if options.uses("ngram"):
        seen = ngram = make_ngram(options, cost, end_tokens)
        if options.drafter == "ngram" and sampler.grammar is None:
            return ngram
    if sampler.grammar is not None:  # nothing is proposed that it forbids
        seen = GrammarDrafter(sampler.grammar, sampler.pad, options.widest_pass - 1, seen)
    if options.drafter == "ngram" or (options.drafter == "exit" and sources.heads is None):
        return NoDrafter() if seen is None else SeenTextFirst(seen, NoDrafter())
    if (guesser := _guesser(options, sources, sampler)) is not None:
        own = options.uses("exit") and options.costs.head is None
        if own and isinstance(sources.heads, AttendingHeads):
            cost = replace(cost, head=share(sources.heads.nbytes, sources.backbone))
        if options.uses("rest"):  # no head is asked
            cost = replace(cost, head=0.0)
        return make_tree(guesser, options, cost, end_tokens, seen)
    chains = _chains(options, sources, cost, sampler, end_tokens)
    return chains if seen is None else SeenTextFirst(seen, chains)


def make_ngram(
    options: SpeculationOptions, cost: DraftCost, end_tokens: Collection[int]
) -> NgramDrafter:
    """A drafter of prompt lookup."""
    controller = make_controller(options, options.ngram.max_tokens)
    return NgramDrafter(controller, end_tokens, size=options.ngram.size, cost=cost)


def make_tree(
    guesser: Guesser[StateT],
    options: SpeculationOptions,
    cost: DraftCost,
    end_tokens: Collection[int],
    seen: Trunks | None,
) -> TreeDrafter[StateT]:
    """Trees of what `guesser` says, around what `seen` proposes."""
    return TreeDrafter(
        guesser,
        _to_pay(options, cost),
        make_controller(options, options.tree.max_tokens),
        end_tokens,
        most=options.most_drafts,
        seen=seen,
        never_slower=options.never_slower,
    )


def _to_pay(options: SpeculationOptions, cost: DraftCost) -> DraftCost:
    """Rows and heads are free where nothing need pay."""
    return cost if options.never_slower else replace(cost, rows=(0.0,), head=0.0)


def _guesser(
    options: SpeculationOptions, sources: Sources, sampler: Sampler
) -> Guesser[Any] | None:
    """What says the tokens of a tree; None: drafts are chains."""
    trees, heads = sources.runs_trees(options), sources.heads
    if options.uses("rest"):
        if sources.datastore is None:
            raise InvalidOption(f"drafter {options.drafter} needs a datastore. Give --datastore")
        return RestGuesser(sources.datastore, options.most_drafts, trees=trees)
    if options.uses("successors"):
        return SuccessorGuesser(sources.successors, options.successors.guesses if trees else 1)
    if heads is not None and heads.looks_ahead and options.uses("exit"):
        heads.layers_in_use(options)  # raises for those that it does not have
        guesses = options.exit.guesses if trees else 1
        return MedusaGuesser(heads, _judge(heads, options), sampler, guesses)
    if not trees or heads is None or heads.layers_in_use(options) != (0,):
        return None
    kind = AttendingGuesser if isinstance(heads, AttendingHeads) else HeadGuesser
    return kind(heads, _judge(heads, options), sampler, options.exit.guesses)


def _judge(heads: ExitHeads, options: SpeculationOptions) -> ExitJudge:
    """With the thresholds of `options`, and temperatures that were fitted to the heads."""
    config = heads.config
    return ExitJudge(
        config.num_layers,
        spread(options.exit.thresholds, options.exit.layers or config.exit_layers),
        options.exit.anneal_strength,
        {int(layer): value for layer, value in config.temperatures.items()},
    )


def _chains(
    options: SpeculationOptions,
    sources: Sources,
    cost: DraftCost,
    sampler: Sampler,
    end_tokens: Collection[int],
) -> Drafter:
    """Of chains, or lookahead's, under the never-slower rule unless that is off."""
    backbone, heads, cache = sources.backbone, sources.heads, sources.draft_model
    beliefs = options.acceptance.reads_beliefs
    drafter: Drafter
    if options.uses("lookahead"):
        wanted, trees = options.lookahead, sources.runs_trees(options)
        drafter = LookaheadDrafter(
            make_controller(options, wanted.level - 1),
            end_tokens,
            level=wanted.level,
            window=wanted.window if trees else 0,
            guesses=wanted.guesses if trees else 1,
            most=options.most_drafts,
        )
        return WhilePaying(drafter, replace(cost, head=0.0)) if options.never_slower else drafter
    if options.uses("draft-model"):
        if cache is None:
            raise InvalidOption(
                f"drafter {options.drafter} needs a second model. Give --draft-model"
            )
        controller = make_controller(options, options.draft_model.max_tokens)
        drafter = DraftModelDrafter(cache, sampler, controller, end_tokens, beliefs=beliefs)
        cost = replace(cost, head=0.0, token=token_cost(cache.backbone, backbone))
        return WhilePaying(drafter, cost) if options.never_slower else drafter
    if options.uses("skip"):
        layers = sources.layers or LayerSearch(backbone.num_layers)
        skipped = options.skip.skipped or layers.skipped
        if max(skipped, default=0) > backbone.num_layers:
            raise InvalidOption(
                f"skip:skipped is {word(skipped)}, the model has {backbone.num_layers} layers. "
                "Leave out those behind"
            )
        controller = make_controller(options, options.skip.max_tokens)
        drafter = SkipDrafter(
            options.skip, layers, sampler, controller, end_tokens, beliefs=beliefs
        )
        cost = replace(cost, head=0.0, token=token_cost_without(skipped, backbone))
        return WhilePaying(drafter, cost) if options.never_slower else drafter
    if heads is None:
        raise HeadsNotFound(f"drafter {options.drafter} needs exit heads. Give heads=... or ngram")
    heads.layers_in_use(options)  # raises for those that it does not have
    judge, controller = _judge(heads, options), make_controller(options, options.exit.max_tokens)
    if isinstance(heads, AttendingHeads):
        drafter = AttendingDrafter(heads, judge, sampler, controller, end_tokens, beliefs=beliefs)
        cost = replace(cost, head=0.0, token=share(heads.nbytes, backbone))
    else:
        drafter = ExitDrafter(heads, judge, sampler, controller, end_tokens, beliefs=beliefs)
    return WhilePaying(drafter, cost) if options.never_slower else drafter
