"""From options to the drafter of one sequence."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from selfspec.config import SpeculationOptions
from selfspec.decoding.costs import DraftCost, Load, token_cost, token_cost_without
from selfspec.decoding.drafters.base import (
    Drafter,
    Drafting,
    Guesser,
    NoDrafter,
    StateT,
    Trunks,
    make_controller,
)
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
    GrammarDrafter,
    LookaheadDrafter,
    NgramDrafter,
    SeenTextFirst,
    SuccessorGuesser,
    Successors,
)
from selfspec.decoding.drafters.rest import Datastore, RestGuesser
from selfspec.decoding.drafters.trees import TreeDrafter, WhilePaying
from selfspec.decoding.sampling import Sampler
from selfspec.errors import HeadsNotFound, InvalidOption
from selfspec.heads.attending import AttendingHeads
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.heads import ExitJudge, spread
from selfspec.model.backbone import Backbone
from selfspec.options import word


@dataclass(eq=False)
class Sources:
    """A model, and what its drafts can come from; all its texts share them."""

    backbone: Backbone
    heads: ExitHeads | None
    draft_model: Backbone | None
    datastore: Datastore | None = None
    successors: Successors = field(init=False, default_factory=Successors)
    layers: LayerSearch = field(init=False)

    def __post_init__(self) -> None:
        self.layers = LayerSearch(self.backbone.num_layers)

    def draft_cache(self) -> DraftCache | None:
        """An empty one for the draft model, if there is one."""
        if self.draft_model is None:
            return None
        return DraftCache(self.draft_model, self.backbone.vocab_size)

    def runs_trees(self, options: SpeculationOptions) -> bool:
        """Whether heads may guess several tokens for a place, and the model can look at siblings.

        Padded passes draft chains: what a row sums over lies elsewhere there, once a sibling was in
        between.
        """
        steady = not options.pinned or self.backbone.claims.steady
        return options.grows_trees and steady and self.backbone.runs_trees

    def draft_cost(self, options: SpeculationOptions, load: Load | None = None) -> DraftCost:
        """What drafting costs under `options`, as far as it is known.

        Raises InvalidOption for layers that the model does not have.
        """
        cost = DraftCost.for_model(self.backbone, load).with_costs(options.costs)
        if options.uses("skip"):
            skipped, layers = options.skip.skipped or self.layers.skipped, self.backbone.num_layers
            if max(skipped, default=0) > layers:
                raise InvalidOption(
                    f"skip:skipped is {word(skipped)}, the model has {layers} layers. "
                    "Leave out those behind"
                )
            return replace(cost, token=token_cost_without(skipped, self.backbone))
        if self.draft_model is None or not options.uses("draft-model"):
            return cost
        return replace(cost, token=token_cost(self.draft_model, self.backbone))


def make_drafter(
    options: SpeculationOptions,
    sources: Sources,
    sampler: Sampler,
    end_tokens: Collection[int] = (),
    *,
    cache: DraftCache | None = None,
    load: Load | None = None,
) -> Drafter:
    """What proposes tokens under `options`; nothing behind one of `end_tokens`.

    `cache` may hold what an earlier turn left. The default, exit, drafts nothing where there are no
    heads. Raises HeadsNotFound where heads were asked for by another name, InvalidOption where
    there is no draft model, no datastore, or not the layers that are to be left out.
    """
    if not options.speculate or options.drafter == "none":
        return NoDrafter()
    cost = sources.draft_cost(options, load)
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
        cost = _own_cost(cost, options, sources, trees=True)
        return make_tree(guesser, options, cost, end_tokens, seen)
    chains = _chains(options, sources, sampler, end_tokens, cache)
    if options.never_slower:
        chains = WhilePaying(chains, _own_cost(cost, options, sources, trees=False))
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
    if not options.never_slower:  # nothing need pay
        cost = replace(cost, rows=(0.0,), head=0.0)
    return TreeDrafter(
        guesser,
        cost,
        make_controller(options, options.tree.max_tokens),
        end_tokens,
        most=options.most_drafts,
        seen=seen,
        never_slower=options.never_slower,
    )


def _own_cost(
    cost: DraftCost, options: SpeculationOptions, sources: Sources, *, trees: bool
) -> DraftCost:
    """What is paid: no head where none is asked, and for heads that attend what they read."""
    if not options.uses("exit"):
        return cost if options.uses("successors") else replace(cost, head=0.0)
    if not isinstance(sources.heads, AttendingHeads):
        return cost
    read = sources.heads.nbytes / sources.backbone.weight_bytes
    if not trees:  # the layer runs for each token
        return replace(cost, head=0.0, token=read)
    return cost if options.costs.head is not None else replace(cost, head=read)


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


def _chains(
    options: SpeculationOptions,
    sources: Sources,
    sampler: Sampler,
    end_tokens: Collection[int],
    cache: DraftCache | None,
) -> Drafter:
    def how(longest: int) -> Drafting:
        controller, beliefs = make_controller(options, longest), options.acceptance.reads_beliefs
        return Drafting(sampler, controller, end_tokens, beliefs)

    if options.uses("lookahead"):
        wanted, trees = options.lookahead, sources.runs_trees(options)
        return LookaheadDrafter(
            make_controller(options, wanted.level - 1),
            end_tokens,
            level=wanted.level,
            window=wanted.window if trees else 0,
            guesses=wanted.guesses if trees else 1,
            most=options.most_drafts,
        )
    if options.uses("draft-model"):
        cache = cache or sources.draft_cache()
        if cache is None:
            raise InvalidOption(
                f"drafter {options.drafter} needs a second model. Give --draft-model"
            )
        return DraftModelDrafter(cache, how(options.draft_model.max_tokens))
    if options.uses("skip"):
        return SkipDrafter(options.skip, sources.layers, how(options.skip.max_tokens))
    heads = sources.heads
    if heads is None:
        raise HeadsNotFound(f"drafter {options.drafter} needs exit heads. Give heads=... or ngram")
    heads.layers_in_use(options)  # raises for those that it does not have
    kind = AttendingDrafter if isinstance(heads, AttendingHeads) else ExitDrafter
    drafter = kind(heads, _judge(heads, options), how(options.exit.max_tokens))
    if sources.backbone.claims.replayed is not None:
        drafter.ask_once(sources.backbone)
    return drafter


def _judge(heads: ExitHeads, options: SpeculationOptions) -> ExitJudge:
    """With the thresholds of `options`, and temperatures that were fitted to the heads."""
    config = heads.config
    return ExitJudge(
        config.num_layers,
        spread(options.exit.thresholds, options.exit.layers or config.exit_layers),
        options.exit.anneal_strength,
        {int(layer): value for layer, value in config.temperatures.items()},
    )
