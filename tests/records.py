"""Records of a tiny model, for the tests of replay and tune.

In float64 no grouping of rows changes a draft. Heads are fitted to the very answers, so that drafts
are often right; some answers end by themselves.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from selfspec.api.speculator import Speculator, wrap
from selfspec.eval.options import RecordOptions
from selfspec.eval.record import Record, Recorder
from selfspec.model.backbone import Backbone
from tests.models import make_model, random_ids
from tests.talks import make_talks
from tests.training.test_fit import fitted

NEW_TOKENS = 20
PROMPTS = range(4)
FLOOR = 0.15
OPTIONS = RecordOptions(
    max_new_tokens=NEW_TOKENS,
    max_draft_tokens=4,
    min_threshold=FLOOR,
    anneal_strengths=(0.0, 0.5, 2.0),
)

KINDS: dict[str, dict[str, Any]] = {
    "translator": {"head_type": "translator", "exit_layers": (1, 3, 5)},
    "low-rank": {"head_type": "low-rank", "exit_layers": (2, 5), "draft_vocab_size": 60},
    "deep-fused": {"head_type": "deep-fused", "exit_layers": (0, 2, 5)},
    "deep-fused-0": {"head_type": "deep-fused", "exit_layers": (0,)},
}


class Recorded(NamedTuple):
    """A record, and what it was made of."""

    record: Record
    speculator: Speculator


@cache
def speculator_of(kind: str) -> Speculator:
    """Made once for all tests; most need no record, which takes longest."""
    model = make_model("llama", torch.float64)
    backbone = Backbone(model, executor="generic")
    heads = fitted(backbone, make_talks(model), epochs=12, learning_rate=2e-2, **KINDS[kind]).heads
    heads.config.temperatures.update({str(layer): 1.3 for layer in heads.config.exit_layers[1:]})
    plain = wrap(model, executor="generic").generate(random_ids(5, 1), max_new_tokens=NEW_TOKENS)
    model.generation_config.eos_token_id = [plain.token_ids[12], 90]
    return wrap(model, heads=heads, executor="generic")


@cache
def recorded(kind: str) -> Recorded:
    """What it makes of PROMPTS."""
    recorder = Recorder(speculator_of(kind), OPTIONS)
    for seed in PROMPTS:
        recorder.prompt(random_ids(5, seed), str(seed))
    return Recorded(recorder.record(), speculator_of(kind))
