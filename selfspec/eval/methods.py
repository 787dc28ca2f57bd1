"""Ways to decode that are measured side by side.

Comes in: names. Goes out: for each method the settings to try, and how it writes an answer. Called
by `bench`. To add a method is to add an entry to METHODS. Imports no torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from selfspec.config import check_keys
from selfspec.errors import InvalidOption

if TYPE_CHECKING:
    from torch import Tensor
    from transformers.generation.streamers import BaseStreamer

    from selfspec.generate import Speculator
    from selfspec.stats import GenerationStats, Round

Setting = Mapping[str, Any]
"""Keywords: SpeculationOptions for our runtime, `generate`'s own for Hugging Face."""

NO_BOUND = 1_000_000
"""W_max where there is to be none: more than any answer has tokens."""

ALWAYS = 1e-9
"""tau that every token reaches: no top-1 probability is smaller."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """An answer, and what our runtime counted; Hugging Face counts nothing."""

    token_ids: list[int]
    rounds: Sequence[Round] = ()
    stats: GenerationStats | None = None


Decode = Callable[["Speculator", "Tensor", int, Setting, "BaseStreamer"], Written]
"""Writes exactly so many tokens behind ids [1, P], greedily; the streamer hears of each."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to decode."""

    source: str
    """What it is, for readers of the results."""
    decode: Decode
    settings: Callable[[Speculator], Sequence[Setting]]
    """The grid from which the fastest is chosen, on other prompts than those reported. One entry:
    nothing to choose. Empty: here the method would be `speculation` itself."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A method with one of its settings."""

    label: str
    """As tables call it."""
    method: str
    setting: Setting

    def decode(
        self, speculator: Speculator, ids: Tensor, count: int, streamer: BaseStreamer
    ) -> Written:
        """Write exactly `count` tokens behind ids [1, P]; end tokens do not end the answer."""
        return METHODS[self.method].decode(speculator, ids, count, self.setting, streamer)


def candidates(speculator: Speculator, names: Sequence[str]) -> dict[str, list[Contender]]:
    """Each method with all its settings.

    Raises InvalidOption for unknown names, for methods that would be `speculation` itself and for
    settings that the heads do not allow; HeadsNotFound where heads are missing.
    """
    check_keys(names, METHODS, "method")
    found = {}
    for name in names:
        grid = METHODS[name].settings(speculator)
        if not grid:
            raise InvalidOption(
                f"{name} is the same as speculation with these heads and options. Leave it out of "
                "--methods"
            )
        found[name] = [_contender(speculator, name, setting) for setting in grid]
    return found


def swept(speculator: Speculator, settings: Sequence[Setting]) -> list[Contender]:
    """Speculation with some options moved, all others at their values.

    Raises InvalidOption for a value that the heads do not allow, HeadsNotFound without any where
    they are to draft.
    """
    if settings and speculator.options.uses("exit"):
        _fitted(speculator)
    return [_contender(speculator, "speculation", setting) for setting in settings]


def described(
    methods: Sequence[Contender], grid: Mapping[str, Sequence[Contender]]
) -> dict[str, dict[str, Any]]:
    """By label, for the record: what each is, its setting, and out of which it was chosen."""
    return {
        entry.label: {
            "method": entry.method,
            "source": METHODS[entry.method].source,
            "setting": dict(entry.setting),
            "chosen_from": [
                one.label for one in grid.get(entry.label, ()) if len(grid[entry.label]) > 1
            ],
        }
        for entry in methods
    }


@contextmanager
def endless(speculator: Speculator) -> Iterator[None]:
    """While open no end token ends an answer. Afterwards the model is as it was, whatever ran.

    Assisted decoding keeps what it learns in the model's generation config, and early exit sets
    the number of layers, which an error would leave behind.
    """
    model: Any = speculator.model
    config: Any = speculator.backbone.config
    before, layers = model.generation_config, config.num_hidden_layers
    model.generation_config = copy.deepcopy(before)
    model.generation_config.eos_token_id = None
    try:
        yield
    finally:
        model.generation_config, config.num_hidden_layers = before, layers


def _contender(speculator: Speculator, name: str, setting: Setting) -> Contender:
    if METHODS[name].decode is _own:  # what would fail on every prompt is raised here
        options = {"speculate": True, **setting}
        speculator.stream([0], max_new_tokens=1, do_sample=False, **options).close()
    words = ", ".join(f"{key}={_word(value)}" for key, value in setting.items())
    return Contender(label=f"{name}({words})", method=name, setting=setting)


def _word(value: Any) -> str:
    """A value on one line, without blanks."""
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)


# --- how an answer is written ---------------------------------------------------------------------


def _own(
    speculator: Speculator, ids: Tensor, count: int, setting: Setting, streamer: BaseStreamer
) -> Written:
    """On our runtime, with some options changed."""
    stream = speculator.stream(
        ids,
        max_new_tokens=count,
        do_sample=False,
        streamer=streamer,
        **{"speculate": True, **setting},
    )
    answer = stream.drain()
    return Written(token_ids=answer.token_ids, rounds=stream.rounds, stats=answer.stats)


def _hugging_face(
    speculator: Speculator, ids: Tensor, count: int, setting: Setting, streamer: BaseStreamer
) -> Written:
    """By transformers' own `generate` on the same model."""
    model: Any = speculator.model
    sequences = model.generate(
        ids,
        attention_mask=ids.new_ones(ids.shape),
        max_new_tokens=count,
        do_sample=False,
        streamer=streamer,
        **setting,
    )
    return Written(token_ids=sequences[0, ids.shape[1] :].tolist())


# --- settings -------------------------------------------------------------------------------------


def _in_use(speculator: Speculator, setting: Setting) -> tuple[int, ...]:
    """Exit layers in use. Raises InvalidOption for what the heads do not allow, HeadsNotFound."""
    from selfspec.generate import active_layers  # here, because it imports torch

    return active_layers(speculator.heads, speculator.options.updated(setting))


def _fitted(speculator: Speculator) -> tuple[int, ...]:
    """All exit layers that there are heads for.

    Raises HeadsNotFound, or InvalidOption where a draft model has taken their place.
    """
    if speculator.options.drafter == "draft-model":
        raise InvalidOption(
            "the draft model drafts, but this method needs exit heads. Give --drafter exit beside "
            "--draft-model (the method draft-model still uses it), or leave the method out"
        )
    everything = {"exit_layers": None, "max_draft_depth": None, "exit_threshold": ALWAYS}
    return _in_use(speculator, everything)


def _speculation(speculator: Speculator) -> list[Setting]:
    """SpecBound as the heads' own defaults, or the options given, have it."""
    _fitted(speculator)
    return [{}]


def _no_annealing(speculator: Speculator) -> list[Setting]:
    """SpecBound without ACT's temperatures: alpha = 0; the thresholds stay."""
    _fitted(speculator)
    return [{"anneal_strength": 0.0}] if speculator.options.anneal_strength else []


def _no_depth_bound(speculator: Speculator) -> list[Setting]:
    """SpecBound without D_max: a difficult token goes on through all fitted exit layers.

    A layer without a threshold of its own gets that of the next shallower one that has one.
    """
    fitted, used = _fitted(speculator), _in_use(speculator, {})
    if used == fitted:
        return []
    options = speculator.options
    given = options.exit_layers or fitted
    taus = options.thresholds if len(options.thresholds) > 1 else options.thresholds * len(given)
    by_layer = dict(zip(given, taus, strict=True))
    nearest = [max((at for at in given if at <= layer), default=given[0]) for layer in fitted]
    thresholds = tuple(by_layer[layer] for layer in nearest)
    return [{"max_draft_depth": None, "exit_layers": fitted, "exit_threshold": thresholds}]


def _no_width_bound(speculator: Speculator) -> list[Setting]:
    """SpecBound without W_max: a round drafts until a token is difficult."""
    _fitted(speculator)
    return [{"max_draft_tokens": NO_BOUND}]


def _fixed_exit(speculator: Speculator) -> list[Setting]:
    """LayerSkip: every token leaves at one layer, always so many per round."""
    return [
        {**_PEER, "exit_layers": (layer,), "exit_threshold": ALWAYS, "max_draft_tokens": width}
        for layer, width in product(_some(_fitted(speculator)), (1, 2, 4))
    ]


def _threshold_exit(speculator: Speculator) -> list[Setting]:
    """AdaDecode: a token leaves at the first layer that is sure; no bounds, one threshold."""
    layers = _fitted(speculator)
    return [
        {**_PEER, "exit_layers": layers, "exit_threshold": tau, "max_draft_tokens": NO_BOUND}
        for tau in (0.5, 0.7, 0.9)
    ]


def _one_exit(speculator: Speculator) -> list[Setting]:
    """Kangaroo: tokens leave at one layer; an unsure one ends the draft, as does the sixth."""
    return [
        {**_PEER, "exit_layers": (layer,), "exit_threshold": tau, "max_draft_tokens": 6}
        for layer, tau in product(_some(_fitted(speculator)), (0.4, 0.6, 0.8))
    ]


_PEER = {"max_draft_depth": None, "anneal_strength": 0.0}
"""None of the peers anneals or bounds the depth. Calibrated temperatures, a part of the heads,
stay."""


def _some(layers: Sequence[int]) -> list[int]:
    """The shallowest, the middle and the deepest."""
    return sorted({layers[0], layers[len(layers) // 2], layers[-1]})


def _prompt_lookup(speculator: Speculator) -> list[Setting]:  # noqa: ARG001  # a grid's signature
    return [{"prompt_lookup_num_tokens": count} for count in (2, 4, 10)]


def _assistant_early_exit(speculator: Speculator) -> list[Setting]:
    """At an eighth, a quarter and half of the layers."""
    depth = speculator.backbone.num_layers
    layers = sorted({max(1, depth // part) for part in (8, 4, 2)})
    return [{"assistant_early_exit": layer} for layer in layers]


METHODS = {
    "hugging-face": Method(
        source="transformers' model.generate, plain greedy decoding",
        decode=_hugging_face,
        settings=lambda _: [{}],
    ),
    "plain": Method(
        source="plain greedy decoding on our runtime",
        decode=_own,
        settings=lambda _: [{"speculate": False}],
    ),
    "speculation": Method(
        source="SpecBound on our runtime, with the settings of the heads",
        decode=_own,
        settings=_speculation,
    ),
    "ngram": Method(
        source="text already seen (prompt lookup) on our runtime",
        decode=_own,
        settings=lambda _: [{"drafter": "ngram"}],
    ),
    "ngram+exit": Method(
        source="text already seen, else speculation",
        decode=_own,
        settings=lambda _: [{"drafter": "ngram+exit"}],
    ),
    "draft-model": Method(
        source="a second, smaller model (speculative decoding as it began) on our runtime",
        decode=_own,
        settings=lambda _: [{"drafter": "draft-model"}],
    ),
    "no-annealing": Method(
        source="speculation without annealing: alpha = 0 (Figure 4 of SpecBound)",
        decode=_own,
        settings=_no_annealing,
    ),
    "no-depth-bound": Method(
        source="speculation without D_max: all fitted exit layers (Figure 4 of SpecBound)",
        decode=_own,
        settings=_no_depth_bound,
    ),
    "no-width-bound": Method(
        source="speculation without W_max (Figure 4 of SpecBound)",
        decode=_own,
        settings=_no_width_bound,
    ),
    "prompt-lookup": Method(
        source="transformers' prompt_lookup_num_tokens",
        decode=_hugging_face,
        settings=_prompt_lookup,
    ),
    "assistant-early-exit": Method(
        source="transformers' assistant_early_exit",
        decode=_hugging_face,
        settings=_assistant_early_exit,
    ),
    "fixed-exit": Method(
        source="after LayerSkip: one exit layer, always exits; on our runtime, with our heads",
        decode=_own,
        settings=_fixed_exit,
    ),
    "threshold-exit": Method(
        source="after AdaDecode: exits above a threshold, no bounds; our runtime, our heads",
        decode=_own,
        settings=_threshold_exit,
    ),
    "one-exit": Method(
        source="after Kangaroo: one exit, an unsure token ends a draft; our runtime, our heads",
        decode=_own,
        settings=_one_exit,
    ),
}
"""By name; the ablations and peers that share our runtime differ in settings alone."""
