"""Options of writing text, of caching features and of fitting; flags are derived from them.

Imports no torch, so that `selfspec fit --help` stays fast.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from safetensors import SafetensorError

from selfspec.errors import InvalidData, InvalidOption
from selfspec.heads.folder import EAGLE3, MEDUSA
from selfspec.options import SHARE, Count, Probability, Range, at_least, between, check_fields

FITTED_HEAD_TYPES = ("linear", "translator", "deep-fused", EAGLE3, MEDUSA)

PRESETS: dict[str, dict[str, Any]] = {
    "specbound": {
        "head_type": "linear",
        "draft_vocab_size": None,
        "ce_share": 1.0,
        "learning_rate": 3e-5,
        "epochs": 20,
    }
}
"""Named sets of FitOptions. specbound: the values in the paper's section 3.1."""

_KINDS_WITH = {  # options that only some head types have
    **dict.fromkeys(("state_layers", "inner_size"), ("deep-fused", EAGLE3)),
    **dict.fromkeys(("draft_steps", "step_decay"), ("deep-fused", EAGLE3, MEDUSA)),
}

Limit = Annotated[int | None, at_least(1)]
Positive = Annotated[float, Range(lambda value: value > 0.0, "above 0")]
_LARGEST_SEED = 2**63  # torch's generators allow twice as much, and a fit adds to its seed
_BELOW_1 = Range(lambda value: 0.0 <= value < 1.0, "in [0, 1)")
_HEAD_TYPE = Range(FITTED_HEAD_TYPES.__contains__, f"out of {', '.join(FITTED_HEAD_TYPES)}")
_RANGE = Range(
    lambda values: len(values) == 2 and 0.0 < values[0] <= values[1],
    "of a lowest and a highest one, above 0",
    whole=True,
)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What text a model writes, and how much."""

    tokens: Limit = None
    """Answer tokens to write, at least 1; the last batch is written whole. A file may be continued
    with a higher number. None: all rows of --from."""
    batch_size: Count = 128
    """Conversations per batch, at least 1; a killed run loses at most one batch."""
    system: str | None = None
    """System message of every conversation."""
    raw: bool = False
    """For base models: prompts are plain text that the model continues, without a chat template."""
    question_temperature: Annotated[tuple[float, ...], _RANGE] = (0.8, 1.0)
    """Lowest and highest temperature of user turns, above 0; each row draws its own in between."""
    question_top_k: Annotated[int, at_least(0)] = 100
    """User turns are sampled from this many of the likeliest tokens; 0: from all."""
    max_question_tokens: Count = 256
    """Maximum tokens of a user turn, at least 1; longer turns are dropped."""
    greedy_share: Probability = 0.9
    """Share of the conversations that are answered greedily, in [0, 1]; the others are sampled, so
    that heads see more text than greedy decoding gives."""
    temperature: Positive = 0.7
    """Temperature of sampled answers, above 0."""
    max_prompt_tokens: Annotated[int, at_least(32)] = 1500
    """Maximum tokens of a prompt, at least 32; longer ones are dropped, passages are cut to fit."""
    max_new_tokens: Count = 400
    """Maximum tokens of an answer, at least 1; longer ones are cut."""
    seed: Annotated[int, between(0, _LARGEST_SEED)] = 0
    """Seed of all random choices; it fixes the text."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.raw and self.system:
            raise InvalidOption(f"system is {self.system}, expected none with raw")


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Which features are computed from a text, and how they are batched."""

    exit_layers: tuple[int, ...] | None = None
    """Exit layers, counted from 1; 0 is the embedding, for deep-fused heads. None: five, evenly
    spread over the first two thirds, and 0 where deep states are kept."""
    deep: bool = True
    """Keep the last layer's state of the previous token, which deep-fused heads read."""
    state_layers: tuple[int, ...] | None = None
    """More layers whose states of the previous token are kept, rising. None: one, at 0.7 of the
    depth."""
    top_k: Count = 32
    """How many of the model's likeliest next tokens to keep, for fitting to its distribution and
    for measuring, at least 1."""
    batch_tokens: Count = 2048
    """Tokens per batch, padding included; no conversation may be longer. Larger batches make fewer
    steps."""
    answers_only: bool = False
    """Keep only positions that predict a token of an answer, for a fit with --answer-share 1."""
    max_tokens: Limit = None
    """Answer tokens of the text to use. None: all."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Which heads are fitted, and how."""

    exit_layers: tuple[int, ...] | None = None
    """Exit layers, counted from 1; 0 is the embedding, for deep-fused heads, and the only choice of
    eagle3 and medusa. None: the cache's, else 0 for these three types; for others five, evenly over
    the first two thirds."""
    head_type: Annotated[str, _HEAD_TYPE] = "deep-fused"
    """deep-fused (an MLP that also reads the model's last state of the previous token: no layer
    runs for a draft), linear (norm and its own LM head), translator (norm, an affine map, the
    model's unembedding), eagle3 (a decoder layer that attends to the whole text, with its own LM
    head; other runtimes read its files, too), or medusa (several heads, each from the model's last
    state to a token further ahead)."""
    state_layers: tuple[int, ...] | None = None
    """Layers whose states of the previous token heads read, rising, 1 to the model's last but one.
    None: for eagle3 2, the middle one and the last but three; for deep-fused heads at exit layer 0
    alone those of the cache, else one, at 0.7 of the depth."""
    inner_size: Limit = None
    """Hidden units of deep-fused and eagle3 heads, at least 1. None: the type's default."""
    draft_vocab_size: Limit = 8192
    """How many tokens heads can draft: all special ones, the most frequent of the training answers,
    then the lowest ids. None, or as many as there are: the model's whole vocabulary."""
    ce_share: Probability = 1.0
    """Share of the loss on the model's own next token, in [0, 1]; the rest is the divergence from
    its distribution."""
    answer_share: Annotated[float | None, SHARE] = None
    """Share of the loss on positions that predict a token of an answer, above 0, at most 1; the
    rest is on the model's predictions in user turns and passages. 1 leaves these out. None: all
    positions count alike."""
    draft_steps: Limit = None
    """Tokens ahead that deep-fused, eagle3 and medusa heads learn, at least 1. From the second on,
    the first two read the head's own features, as they will when they draft; medusa has one head
    for each. None: 2, or 3 for medusa, as in its project's own command (its paper: 5)."""
    step_decay: Annotated[float | None, SHARE] = None
    """Weight of each further token ahead, relative to the one before, above 0, at most 1. None: 1,
    or 0.8 for medusa heads, as in its paper."""
    epochs: Count = 2
    """Passes over the training text, at least 1."""
    learning_rate: Positive = 2e-3
    """Peak learning rate of AdamW, above 0."""
    warmup: Annotated[float, _BELOW_1] = 0.05
    """Share of the steps over which the learning rate rises, in [0, 1); a cosine to 0 follows."""
    weight_decay: Annotated[float, at_least(0)] = 0.01
    """Weight decay of AdamW, at least 0; for matrices only."""
    max_grad_norm: Positive = 1.0
    """Gradients are clipped to this norm, above 0, for each head alone, so that one does not slow
    the others down."""
    accumulate: Count = 1
    """Batches per step, at least 1; several processes share them."""
    checkpoint_steps: Count = 200
    """Steps between two checkpoints, at least 1: the most that a killed run loses."""
    seed: Annotated[int, between(-_LARGEST_SEED, _LARGEST_SEED)] = 0
    """Seed of the order of batches and of the first weights."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name, kinds in _KINDS_WITH.items():
            if getattr(self, name) and self.head_type not in kinds:
                raise InvalidOption(f"{name} means nothing to {self.head_type} heads. Leave it out")

    @property
    def tokens_ahead(self) -> int:
        return self.draft_steps or (3 if self.head_type == MEDUSA else 2)

    @property
    def decay(self) -> float:
        return self.step_decay or (0.8 if self.head_type == MEDUSA else 1.0)


def options_dict(options: Any) -> dict[str, Any]:
    """Options by name, ready for JSON and YAML: tuples become lists."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(options).items()}


# --- files that a later run continues from

_WRONG = (InvalidData, InvalidOption, OSError, RuntimeError, SafetensorError)


def seconds_of(budget: str) -> float:
    """Parse 90s, 30m or 2h into seconds. Raises InvalidOption."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(s|m|h)", budget.strip())
    seconds = float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]] if found else 0.0
    if seconds < 10.0:
        raise InvalidOption(f"budget is {budget}, expected 10s or more, as 90s, 30m or 2h")
    return seconds


@contextmanager
def explain_errors(problem: str, way_out: str) -> Iterator[None]:
    """Turn errors of reading a file into InvalidData: `problem` is wrong, the reason, `way_out`."""
    try:
        yield
    except _WRONG as error:
        raise InvalidData(f"{problem}: {' '.join(str(error).split())}. {way_out}") from error
