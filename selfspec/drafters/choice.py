"""From options to the drafter of one sequence."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from selfspec.backbone import Backbone
from selfspec.config import SpeculationOptions
from selfspec.controllers import make_controller
from selfspec.drafters.base import Drafter, NoDrafter
from selfspec.drafters.draft_model import DraftCache, DraftModelDrafter
from selfspec.drafters.exit import ExitDrafter
from selfspec.drafters.ngram import NgramDrafter, SeenTextFirst
from selfspec.errors import HeadsNotFound, InvalidOption
from selfspec.heads import ExitHeads
from selfspec.judge import ExitJudge, spread
from selfspec.scores import Sampler

_PLAIN_BLOCK_COST = 0.7
"""Two rows against one with plain kernels on a CPU, SmolLM2-135M in bfloat16: 1.7 steps."""


@dataclass(frozen=True)
class Sources:
    """A model, and what its drafts can come from."""

    backbone: Backbone
    heads: ExitHeads | None = None
    draft_model: DraftCache | None = None

    @property
    def block_cost(self) -> float:
        """What the model pays for two rows instead of one, as a share of a step."""
        one_row_kernels = self.backbone.min_rows == 1 and self.backbone.device.type == "cpu"
        return _PLAIN_BLOCK_COST if one_row_kernels else 0.0


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
    if options.drafter == "ngram":
        return make_ngram(options, sources.block_cost, end_tokens)
    other: Drafter
    if options.uses("draft-model"):
        other = _draft_model(options, sources.draft_model, sampler, end_tokens)
    else:
        other = _exit(options, sources.heads, sampler, end_tokens)
    if options.uses("ngram"):
        return SeenTextFirst(make_ngram(options, sources.block_cost, end_tokens), other)
    return other


def make_ngram(
    options: SpeculationOptions, block_cost: float, end_tokens: Collection[int]
) -> NgramDrafter:
    """A drafter of text already seen; `block_cost` is the model's, for where `options` say none."""
    return NgramDrafter(
        make_controller(options, options.ngram_draft_tokens),
        end_tokens,
        size=options.ngram_size,
        row_cost=options.row_cost,
        block_cost=block_cost if options.block_cost is None else options.block_cost,
    )


def _exit(
    options: SpeculationOptions,
    heads: ExitHeads | None,
    sampler: Sampler,
    end_tokens: Collection[int],
) -> ExitDrafter:
    if heads is None:
        raise HeadsNotFound(f"drafter {options.drafter} needs exit heads. Give heads=... or ngram")
    config = heads.config
    layers = config.exit_layers if options.exit_layers is None else options.exit_layers
    judge = ExitJudge(
        config.num_layers,
        spread(options.thresholds, layers),
        options.anneal_strength,
        {int(layer): value for layer, value in config.temperatures.items()},
    )
    controller = make_controller(options, options.max_draft_tokens)
    beliefs = options.acceptance != "lossless"
    return ExitDrafter(heads, judge, sampler, controller, end_tokens, beliefs=beliefs)


def _draft_model(
    options: SpeculationOptions,
    cache: DraftCache | None,
    sampler: Sampler,
    end_tokens: Collection[int],
) -> DraftModelDrafter:
    if cache is None:
        raise InvalidOption(f"drafter {options.drafter} needs a second model. Give --draft-model")
    controller = make_controller(options, options.max_draft_tokens)
    beliefs = options.acceptance != "lossless"
    return DraftModelDrafter(cache, sampler, controller, end_tokens, beliefs=beliefs)
