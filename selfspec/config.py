"""Every option of the runtime and the one place of its default.

Command-line flags, YAML keys and keyword arguments are derived from these dataclasses. A value
given in several places is taken from: flag > YAML file > what was tuned for this machine > the
heads' own defaults > here.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict

from selfspec.errors import InvalidOption
from selfspec.typed import annotations_of, check_types, shown

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GenerationConfig
    from transformers.generation.streamers import BaseStreamer


DRAFTERS = ("exit", "ngram", "ngram+exit", "draft-model", "ngram+draft-model", "none")

ACCEPTANCE = ("lossless", "cm-asd", "easd")
READINGS = ("intent", "paper")

_WIDEST_PROBED = 16
"""Rows: a probe of more would take longer than it is worth."""


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """How tokens are drafted and checked. Only `acceptance` and `lenience` change the output."""

    speculate: bool = True
    """Draft at all. False is plain decoding on the same runtime, the honest baseline."""

    drafter: str = "exit"
    """What proposes tokens: exit (heads on shallow layers), ngram (text already seen), draft-model
    (a second, smaller model), ngram+exit or ngram+draft-model (whichever promises more), none."""

    exit_layers: tuple[int, ...] | None = None
    """Exit layers in use, counted from 1. None: all that the heads were fitted for."""

    exit_threshold: float | tuple[float, ...] = 0.9
    """tau, in (0, 1]: a token exits where its annealed confidence reaches it. One value for all
    exit layers, or one per layer. High by default: a wrong draft costs work."""

    anneal_strength: float = 0.2
    """alpha, at least 0, in `T_l = 1 + alpha (1 - l / L)`; 0 turns annealing off. The paper calls
    for "a small" one without printing it (section 3.3)."""

    max_draft_depth: int | None = None
    """D_max, an exit layer: no draft runs deeper. None: the deepest exit layer in use."""

    max_draft_tokens: int = 6
    """W_max, at least 1: drafts per round, or where a controller starts."""

    controller: str = "fixed"
    """What sets W_max of the next round: fixed, heuristic (two more after a round that was kept,
    else one less), threshold (stop behind an unsure draft), gammatune, gammatune-plus, cm-asd."""

    shortest_draft: int = 1
    """gamma_min, k_min: shortest W_max that a controller may choose, at least 1."""

    longest_draft: int = 10
    """gamma_max, k_max: longest W_max that a controller may choose; in pinned mode never more than
    `pinned_rows - 1`. Printed nowhere: where verification starts to cost on a CPU."""

    controller_threshold: float = 0.4
    """Top probability, in [0, 1], from which threshold and gammatune-plus draft on. As in Hugging
    Face's `assistant_confidence_threshold`; GammaTune prints none."""

    gammatune_rate: float = 0.3
    """eta, in (0, 1]: weight of the newest round in the mean. Printed nowhere."""

    gammatune_step: float = 2.0
    """delta, at least 0: what a wholly accepted round counts more. Printed nowhere; the heuristic's
    own step."""

    confidence_weights: tuple[float, ...] = (0.4, 0.3, 0.3)
    """CM-ASD's lambdas: weights of entropy, logit margin and softmax margin, which sum to 1.
    Printed nowhere: the two margins say much the same."""

    margin_scale: float = 1.0
    """CM-ASD's beta, above 0: sharpness of the logit margin. Printed nowhere: 1 gives a sigmoid of
    the margin as it is, in nats."""

    length_scale: float = 1.0
    """CM-ASD's alpha, in (0, 1]: share of `longest_draft` that full confidence drafts. The
    document's "full confidence"."""

    ngram_size: int = 4
    """Longest n-gram that is looked up, at least 1; the longest that is found decides."""

    ngram_draft_tokens: int = 7
    """W_max of drafts from text already seen, at least 1. Larger than that of exit heads, because
    they cost no time to make; with the newest token they fill a pinned pass."""

    row_cost: float = 0.08
    """What one more row adds to a verification, as a share of a step, in [0, 1]: drafts from text
    already seen are proposed while their chance exceeds it. Packed weights on a CPU measure 0.05;
    a little more is safer where guesses get worse."""

    head_cost: float = 0.08
    """What asking one exit head adds to a round, as a share of a step, at least 0. SmolLM2-135M in
    bfloat16 measures 0.075."""

    never_slower: bool = True
    """Pause exit heads or a draft model where what they gave lately is less than what they cost;
    try them again later. Text already seen costs nothing to draft and has its own rule."""

    block_cost: float | None = None
    """What a verification of two rows costs more than one of one, as a share of a step, at least 0:
    text already seen must promise more tokens. None: 0.7 where a CPU runs one row by kernels of its
    own, else 0."""

    acceptance: str = "lossless"
    """What decides which drafts stay: lossless (greedy match, speculative sampling), or one of the
    lossy rules cm-asd (close to the target's best) and easd (none where both models waver)."""

    require_lossless: bool = False
    """Refuse lossy settings."""

    lenience: float = 1.0
    """In (0, 1]: a sampled draft stays when u < p / (q * lenience). Below 1 is lossy."""

    cm_asd_reading: str = "intent"
    """intent: cm-asd is stricter where the drafter is unsure, as its text says; paper: looser, as
    its formula does."""

    top_beta: int = 3
    """CM-ASD's beta, at least 1: a draft must be among so many best tokens. Printed nowhere."""

    tolerance: float = 0.1
    """CM-ASD's tau_base, at least 0, in nats below the best token. The document's example."""

    tolerance_gain: float = 0.9
    """CM-ASD's gamma, at least 0, in nats: what confidence (intent) or its lack (paper) adds.
    Printed nowhere: with tolerance 0.1 a token may be e times less likely than the best."""

    entropy_threshold: float | None = None
    """EASD's tau_H, at least 0, in nats. None: calibrate it with selfspec calibrate --entropy."""

    overlap_threshold: float = 0.8
    """EASD's tau_O, in [0, 1]: more than this share of the best tokens is the same in both."""

    overlap_tokens: int = 5
    """EASD's N, at least 1: how many best tokens are compared."""

    pinned: bool | None = None
    """Bitwise draft invariance. True: by passes of one shape where kernels do not have it; refused
    where a probe finds that bits move. None: as far as kernels have it, which costs nothing."""

    pinned_rows: int = 8
    """Rows of every pass in pinned mode: one for the newest token, one for each draft token."""

    def __post_init__(self) -> None:
        """Raise InvalidOption for values that no model could make sense of."""
        check_types(vars(self), annotations_of(SpeculationOptions))
        _require(bool(self.thresholds), "exit_threshold", self.exit_threshold, "or one per layer")
        for tau in self.thresholds:
            _require(0.0 < tau <= 1.0, "exit_threshold", tau, "in (0, 1]")
        for name, (holds, expected) in _RANGES.items():
            value = getattr(self, name)
            _require(holds(value), name, value, expected)
        check_keys([self.drafter], DRAFTERS, "drafter")
        check_keys([self.acceptance], ACCEPTANCE, "acceptance")
        check_keys([self.cm_asd_reading], READINGS, "cm_asd_reading")
        self._check_losses()
        self._check_lengths()

    def _check_lengths(self) -> None:
        """Raise InvalidOption for bounds that leave no draft length."""
        if self.shortest_draft > self.longest_possible_draft:
            rows = f" and pinned_rows {self.pinned_rows}" if self.pinned else ""
            raise InvalidOption(
                f"shortest_draft {self.shortest_draft} exceeds longest_draft {self.longest_draft}"
                f"{rows}. Lower the one or raise the other"
            )
        widths = {"max_draft_tokens": self.max_draft_tokens}
        if self.uses("ngram"):
            widths["ngram_draft_tokens"] = self.ngram_draft_tokens
        for name, width in widths.items():
            if self.pinned and self.pinned_rows <= width:
                raise InvalidOption(
                    f"pinned_rows is {self.pinned_rows}, but {name} {width} needs at least "
                    f"{width + 1} rows. Raise the one or lower the other"
                )

    def _check_losses(self) -> None:
        """Raise InvalidOption for lossy settings that exclude each other, or were excluded."""
        if self.acceptance != "lossless" and self.lenience < 1.0:
            raise InvalidOption(
                f"lenience {self.lenience} and acceptance {self.acceptance}: each is a rule of its "
                "own. Leave one out"
            )
        if self.require_lossless and self.loss is not None:
            raise InvalidOption(f"{self.loss} is lossy, but require_lossless is set. Leave one out")

    @property
    def loss(self) -> str | None:
        """Which option changes the output where drafts are made; None: none does."""
        if self.acceptance != "lossless":
            return f"acceptance {self.acceptance}"
        return f"lenience {self.lenience}" if self.lenience < 1.0 else None

    def uses(self, source: str) -> bool:
        """Whether `source` (exit, ngram, ..) is part of the drafter."""
        return source in self.drafter.split("+")

    @property
    def longest_possible_draft(self) -> int:
        """`longest_draft`, or what a pinned pass has room for beside the newest token."""
        room = self.pinned_rows - 1
        return min(self.longest_draft, room) if self.pinned else self.longest_draft

    @property
    def widest_pass(self) -> int:
        """Rows of the widest verification that these drafts lead to, 16 if that is more."""
        widths = [self.ngram_draft_tokens] if self.uses("ngram") else []
        widths += [self.max_draft_tokens] if self.drafter != "ngram" else []
        widths += [self.longest_draft] if self.controller != "fixed" else []
        return 1 + min(max(widths), _WIDEST_PROBED - 1)

    @property
    def thresholds(self) -> tuple[float, ...]:
        """Tau as a tuple: of length 1 (all layers) or one per exit layer."""
        tau = self.exit_threshold
        return tuple(tau) if isinstance(tau, Iterable) else (tau,)

    def updated(self, values: Mapping[str, Any]) -> SpeculationOptions:
        """A copy with `values` replaced. Raises InvalidOption for a key that does not exist."""
        if not isinstance(values, Mapping):
            raise InvalidOption(f"options are {shown(values)}, expected names and values")
        check_keys(values, OPTION_NAMES, "option")
        lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
        return replace(self, **{**values, **lists})


_AT_LEAST_1 = (lambda value: value >= 1, "at least 1")
_AT_LEAST_0 = (lambda value: value >= 0.0, "at least 0")
_SHARE = (lambda value: 0.0 < value <= 1.0, "in (0, 1]")
_PROBABILITY = (lambda value: 0.0 <= value <= 1.0, "in [0, 1]")

_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "anneal_strength": _AT_LEAST_0,
    "max_draft_tokens": _AT_LEAST_1,
    "shortest_draft": _AT_LEAST_1,
    "ngram_size": _AT_LEAST_1,
    "ngram_draft_tokens": _AT_LEAST_1,
    "row_cost": _PROBABILITY,
    "head_cost": _AT_LEAST_0,
    "block_cost": (lambda value: value is None or value >= 0.0, "at least 0"),
    "controller_threshold": _PROBABILITY,
    "gammatune_rate": _SHARE,
    "gammatune_step": _AT_LEAST_0,
    "confidence_weights": (
        lambda weights: len(weights) == 3 and min(weights) >= 0.0 and abs(sum(weights) - 1) < 1e-6,
        "of three weights, at least 0, that sum to 1",
    ),
    "margin_scale": (lambda value: value > 0.0, "above 0"),
    "length_scale": _SHARE,
    "lenience": _SHARE,
    "top_beta": _AT_LEAST_1,
    "tolerance": _AT_LEAST_0,
    "tolerance_gain": _AT_LEAST_0,
    "entropy_threshold": (lambda value: value is None or value >= 0.0, "at least 0"),
    "overlap_threshold": _PROBABILITY,
    "overlap_tokens": _AT_LEAST_1,
    "pinned_rows": (lambda value: 1 <= value <= 1024, "in [1, 1024]"),
}
"""What a value must hold, and how an error says so."""

_MOST_LISTED = 16
"""Known names that an error lists."""

OPTION_NAMES = frozenset(entry.name for entry in fields(SpeculationOptions))
"""Every SpeculationOptions field."""

DEFAULT_MAX_NEW_TOKENS = 128
"""Tokens to generate where neither the caller nor the model says."""


class GenerateOptions(TypedDict, total=False):
    """Keywords of `generate` and `stream`: Hugging Face's, with its meaning, and ours."""

    # how long, and where to stop
    max_new_tokens: int
    max_length: int
    min_new_tokens: int
    min_length: int
    max_time: float
    eos_token_id: int | list[int]
    pad_token_id: int
    stop_strings: str | list[str]
    stopping_criteria: list[Any]
    # how a token is chosen
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    epsilon_cutoff: float
    eta_cutoff: float
    repetition_penalty: float
    no_repeat_ngram_size: int
    bad_words_ids: list[list[int]]
    sequence_bias: list[list[Any]] | dict[tuple[int, ...], float]
    suppress_tokens: list[int]
    begin_suppress_tokens: list[int]
    forced_bos_token_id: int
    forced_eos_token_id: int | list[int]
    exponential_decay_length_penalty: tuple[int, float]
    renormalize_logits: bool
    remove_invalid_values: bool
    guidance_scale: float
    watermarking_config: Any
    logits_processor: list[Any]
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]]
    # what comes in and out
    attention_mask: Tensor
    num_return_sequences: int
    generation_config: GenerationConfig
    streamer: BaseStreamer
    # ours: for this call only
    seed: int
    """Seeds a generator of this call's own; without it draws come from torch's global one."""
    raw: bool
    """A prompt in words is tokenised as it is, without the chat template."""
    speculate: bool
    drafter: str
    exit_layers: tuple[int, ...] | None
    exit_threshold: float | tuple[float, ...]
    anneal_strength: float
    max_draft_depth: int | None
    max_draft_tokens: int
    controller: str
    shortest_draft: int
    longest_draft: int
    controller_threshold: float
    gammatune_rate: float
    gammatune_step: float
    confidence_weights: tuple[float, ...]
    margin_scale: float
    length_scale: float
    ngram_size: int
    ngram_draft_tokens: int
    row_cost: float
    head_cost: float
    never_slower: bool
    block_cost: float | None
    acceptance: str
    require_lossless: bool
    lenience: float
    cm_asd_reading: str
    top_beta: int
    tolerance: float
    tolerance_gain: float
    entropy_threshold: float | None
    overlap_threshold: float
    overlap_tokens: int
    pinned: bool | None
    pinned_rows: int


def check_keys(values: Iterable[str], known: Iterable[str], kind: str) -> None:
    """Raise InvalidOption at the first of `values` not in `known`, naming the nearest known one."""
    names = sorted(known)
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            hint = f"Known: {', '.join(names[:_MOST_LISTED])}"
            if len(names) > _MOST_LISTED:
                hint = f"Leave it out: it is like none of the {len(names)} known ones"
            if near:
                hint = f"Did you mean {near[0]}?"
            raise InvalidOption(f"unknown {kind} {key!r}. {hint}")


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise InvalidOption(f"{name} is {value}, expected a value {expected}")
