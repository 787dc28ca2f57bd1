"""Ways to decode that are measured side by side.

For each method: what it is, the settings to try, how it writes an answer. Called by `contenders`.
To add a method is to add an entry to METHODS. Imports no torch.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from selfspec.errors import HeadsNotFound
from selfspec.options.text import word

if TYPE_CHECKING:
    from torch import Tensor
    from transformers.generation.streamers import BaseStreamer

    from selfspec.api.speculator import Speculator
    from selfspec.decoding.stats import GenerationStats, Round

Setting = Mapping[str, Any]
"""Keywords: SpeculationOptions for our runtime, `generate`'s own for Hugging Face."""

NO_BOUND = 64
"""W_max where there is to be none: the largest, which no chain of confident drafts reaches."""

EXIT: Setting = {"drafter": "exit", "never_slower": False}
"""The paper's own, without our pauses: the defaults of heads, or what was tuned, may name another
drafter."""


def exits(**settings: Any) -> dict[str, Any]:
    """EXIT with some settings of exit heads changed."""
    said = ",".join(f"{name}={word(value)}" for name, value in settings.items())
    return {**EXIT, "drafter": f"exit:{said}"}


ALWAYS = 1e-9
"""tau that every token reaches: no top-1 probability is smaller."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """An answer, and what our runtime counted; Hugging Face counts nothing."""

    token_ids: list[int]
    rounds: Sequence[Round] = ()
    stats: GenerationStats | None = None


Decode = Callable[["Speculator", "Tensor", int, Setting, "BaseStreamer"], Written]
"""Writes so many tokens behind ids [1, P], greedily unless the setting says otherwise, or up to an
end token where one ends answers; the streamer hears of each."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to decode."""

    source: str
    """What it is, for readers of the results."""
    decode: Decode
    settings: Callable[[Speculator], Sequence[Setting]]
    """The grid from which the fastest is chosen, on other prompts than those reported. One entry:
    nothing to choose. Empty: here the method would be `speculation` itself."""


@contextmanager
def unchanged(speculator: Speculator) -> Iterator[None]:
    """Afterwards the model is as it was, whatever ran.

    Assisted decoding keeps what it learns in the model's generation config, and early exit sets
    the number of layers, which an error would leave behind.
    """
    model: Any = speculator.model
    config: Any = speculator.backbone.config
    before, layers = model.generation_config, config.num_hidden_layers
    model.generation_config = copy.deepcopy(before)
    try:
        yield
    finally:
        model.generation_config, config.num_hidden_layers = before, layers


@contextmanager
def endless(speculator: Speculator) -> Iterator[None]:
    """While open no end token ends an answer; afterwards the model is as it was."""
    with unchanged(speculator):
        model: Any = speculator.model
        model.generation_config.eos_token_id = None
        yield


# --- how an answer is written ---------------------------------------------------------------------


def on_our_runtime(
    speculator: Speculator, ids: Tensor, count: int, setting: Setting, streamer: BaseStreamer
) -> Written:
    """On our runtime, with some options changed."""
    stream = speculator.stream(
        ids,
        max_new_tokens=count,
        streamer=streamer,
        **{"speculate": True, "do_sample": False, **setting},
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
    if speculator.heads is None:
        raise HeadsNotFound("speculation needs exit heads. Give heads=...")
    return speculator.heads.layers_in_use(speculator.options.updated(setting))


def fitted_layers(speculator: Speculator) -> tuple[int, ...]:
    """All exit layers that there are heads for. Raises HeadsNotFound."""
    return _in_use(speculator, exits(layers=None, max_depth=None, threshold=ALWAYS))


def _speculation(speculator: Speculator) -> list[Setting]:
    """SpecBound as the heads' own defaults, or the options given, have it."""
    fitted_layers(speculator)
    return [EXIT]


def _no_annealing(speculator: Speculator) -> list[Setting]:
    """SpecBound without ACT's temperatures: alpha = 0; the thresholds stay."""
    fitted_layers(speculator)
    return [exits(anneal_strength=0)] if speculator.options.exit.anneal_strength else []


def _no_depth_bound(speculator: Speculator) -> list[Setting]:
    """SpecBound without D_max: a difficult token goes on through all fitted exit layers.

    A layer without a threshold of its own gets that of the next shallower one that has one.
    """
    fitted, used = fitted_layers(speculator), _in_use(speculator, {})
    if used == fitted:
        return []
    own = speculator.options.exit
    given = own.layers or fitted
    by_layer = dict(zip(given, itertools.cycle(own.thresholds), strict=False))
    nearest = [max((at for at in given if at <= layer), default=given[0]) for layer in fitted]
    thresholds = tuple(by_layer[layer] for layer in nearest)
    return [exits(max_depth=None, layers=fitted, threshold=thresholds)]


def _no_width_bound(speculator: Speculator) -> list[Setting]:
    """SpecBound without W_max: a round drafts until a token is difficult."""
    fitted_layers(speculator)
    return [exits(max_tokens=NO_BOUND)]


def _fixed_exit(speculator: Speculator) -> list[Setting]:
    """LayerSkip: every token leaves at one layer, always so many per round."""
    return [
        exits(**_PEER, layers=(layer,), threshold=ALWAYS, max_tokens=width)
        for layer, width in itertools.product(_some(fitted_layers(speculator)), (1, 2, 4))
    ]


def _threshold_exit(speculator: Speculator) -> list[Setting]:
    """AdaDecode: a token leaves at the first layer that is sure; no bounds, one threshold."""
    layers = fitted_layers(speculator)
    return [
        exits(**_PEER, layers=layers, threshold=tau, max_tokens=NO_BOUND) for tau in (0.5, 0.7, 0.9)
    ]


def _one_exit(speculator: Speculator) -> list[Setting]:
    """Kangaroo: tokens leave at one layer; an unsure one ends the draft, as does the sixth."""
    return [
        exits(**_PEER, layers=(layer,), threshold=tau, max_tokens=6)
        for layer, tau in itertools.product(_some(fitted_layers(speculator)), (0.4, 0.6, 0.8))
    ]


def _rule(**setting: Any) -> Callable[[Speculator], Sequence[Setting]]:
    """Speculation under another rule. No grid: the fastest lossy setting would be the lossiest."""

    def settings(speculator: Speculator) -> list[Setting]:
        fitted_layers(speculator)
        return [{**EXIT, **setting}]

    return settings


def _ablated(**setting: Any) -> Callable[[Speculator], Sequence[Setting]]:
    """Text already seen, else exit heads, without one of the rules that say when."""

    def settings(speculator: Speculator) -> list[Setting]:
        fitted_layers(speculator)
        return [{"drafter": "ngram+exit", **setting}]

    return settings


_DRAWN = {"do_sample": True, "seed": 0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
"""Draws from the model's whole law: lenience says nothing about greedy drafts."""

_PEER = {"max_depth": None, "anneal_strength": 0}
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
        decode=on_our_runtime,
        settings=lambda _: [{"speculate": False}],
    ),
    "speculation": Method(
        source="SpecBound on our runtime, with the settings of the heads",
        decode=on_our_runtime,
        settings=_speculation,
    ),
    "ngram": Method(
        source="text already seen (prompt lookup) on our runtime",
        decode=on_our_runtime,
        settings=lambda _: [{"drafter": "ngram"}],
    ),
    "ngram+exit": Method(
        source="text already seen, else speculation",
        decode=on_our_runtime,
        settings=lambda _: [{"drafter": "ngram+exit"}],
    ),
    "no-value-rule": Method(
        source="ngram+exit, but whatever the text has said before is proposed in full",
        decode=on_our_runtime,
        settings=_ablated(prices="row=0"),
    ),
    "no-never-slower": Method(
        source="ngram+exit, but exit heads go on drafting where that does not pay",
        decode=on_our_runtime,
        settings=_ablated(never_slower=False),
    ),
    "draft-model": Method(
        source="a second, smaller model (speculative decoding as it began) on our runtime",
        decode=on_our_runtime,
        settings=lambda _: [{"drafter": "draft-model", "never_slower": False}],
    ),
    "no-annealing": Method(
        source="speculation without annealing: alpha = 0 (Figure 4 of SpecBound)",
        decode=on_our_runtime,
        settings=_no_annealing,
    ),
    "no-depth-bound": Method(
        source="speculation without D_max: all fitted exit layers (Figure 4 of SpecBound)",
        decode=on_our_runtime,
        settings=_no_depth_bound,
    ),
    "no-width-bound": Method(
        source="speculation without W_max (Figure 4 of SpecBound)",
        decode=on_our_runtime,
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
        decode=on_our_runtime,
        settings=_fixed_exit,
    ),
    "threshold-exit": Method(
        source="after AdaDecode: exits above a threshold, no bounds; our runtime, our heads",
        decode=on_our_runtime,
        settings=_threshold_exit,
    ),
    "one-exit": Method(
        source="after Kangaroo: one exit, an unsure token ends a draft; our runtime, our heads",
        decode=on_our_runtime,
        settings=_one_exit,
    ),
    "cm-asd": Method(
        source="speculation under CM-ASD's rule: drafts close to the model's best token stay",
        decode=on_our_runtime,
        settings=_rule(acceptance="cm-asd"),
    ),
    "easd": Method(
        source="speculation under EASD's rule: no drafts where both models waver",
        decode=on_our_runtime,
        settings=_rule(acceptance="easd"),
    ),
    "sampling": Method(
        source="plain sampling on our runtime, temperature 1: what lenience is to be held against",
        decode=on_our_runtime,
        settings=lambda _: [{"speculate": False, **_DRAWN}],
    ),
    "sampled-speculation": Method(
        source="speculation under lossless speculative sampling, temperature 1",
        decode=on_our_runtime,
        settings=_rule(**_DRAWN),
    ),
    "lenience": Method(
        source="speculative sampling that keeps more drafts: lenience 0.6, temperature 1",
        decode=on_our_runtime,
        settings=_rule(acceptance="lenient:lenience=0.6", **_DRAWN),
    ),
}
"""By name; the ablations and peers that share our runtime differ in settings alone."""
