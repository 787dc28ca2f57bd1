"""From options to the drafter of one sequence."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from selfspec.config import SpeculationOptions
from selfspec.decoding import prices
from selfspec.decoding.controllers import make_controller
from selfspec.decoding.drafters.base import Drafter, DraftsFrom, NoDrafter
from selfspec.decoding.drafters.draft_model import DraftCache, DraftModelDrafter
from selfspec.decoding.drafters.exit import ExitDrafter
from selfspec.decoding.drafters.ngram import NgramDrafter, SeenTextFirst, StateT
from selfspec.decoding.drafters.paying import WhilePaying
from selfspec.decoding.scores import Sampler
from selfspec.errors import HeadsNotFound, InvalidOption
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.judge import ExitJudge, spread
from selfspec.model.backbone import Backbone


@dataclass(frozen=True)
class Sources:
    """A model, and what its drafts can come from."""

    backbone: Backbone
    heads: ExitHeads | None = None
    draft_model: DraftCache | None = None


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
    if options.drafter == "exit" and sources.heads is None:
        return NoDrafter()
    cost = prices.Unmeasured.of(sources.backbone)
    if options.drafter == "ngram":
        return make_ngram(options, cost, end_tokens)
    other: Drafter
    layers: tuple[int, ...] = ()
    token = 0.0
    if options.uses("draft-model"):
        other, token = _draft_model(options, sources, sampler, end_tokens)
    else:
        other, layers = _exit(options, sources.heads, sampler, end_tokens)
    other = while_paying(
        other,
        options,
        unmeasured=cost,
        num_layers=sources.backbone.num_layers,
        exit_layers=layers,
        token_cost=token,
    )
    if options.uses("ngram"):
        return SeenTextFirst(make_ngram(options, cost, end_tokens), other)
    return other


def make_ngram(
    options: SpeculationOptions, unmeasured: prices.Unmeasured, end_tokens: Collection[int]
) -> NgramDrafter:
    """A drafter of text already seen; `unmeasured`: the model's costs, where `options` say none."""
    cost = unmeasured.unless(options.prices)
    return NgramDrafter(
        make_controller(options, options.ngram.max_tokens),
        end_tokens,
        size=options.ngram.size,
        row_costs=cost.rows,
    )


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
    cost = prices.DraftCost(
        rows=known.rows,
        token=token_cost,
        head=known.head,
        exit_layers=exit_layers,
        num_layers=num_layers,
    )
    return WhilePaying(drafter, cost)


def _exit(
    options: SpeculationOptions,
    heads: ExitHeads | None,
    sampler: Sampler,
    end_tokens: Collection[int],
) -> tuple[ExitDrafter, tuple[int, ...]]:
    """And the exit layers in use, up to D_max."""
    if heads is None:
        raise HeadsNotFound(f"drafter {options.drafter} needs exit heads. Give heads=... or ngram")
    config = heads.config
    judge = ExitJudge(
        config.num_layers,
        spread(options.exit.thresholds, options.exit.layers or config.exit_layers),
        options.exit.anneal_strength,
        {int(layer): value for layer, value in config.temperatures.items()},
    )
    controller = make_controller(options, options.exit.max_tokens)
    beliefs = options.acceptance.reads_beliefs
    drafter = ExitDrafter(heads, judge, sampler, controller, end_tokens, beliefs=beliefs)
    return drafter, heads.layers_in_use(options)


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
