"""Records of a tiny model, for the tests of replay and tune.

In float64 no grouping of rows changes a draft. Heads are fitted to the very answers, so that drafts
are often right; some answers end by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from selfspec.api.speculator import Speculator, wrap
from selfspec.eval.results import RecordOptions
from selfspec.eval.tune import Record, Recorder
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
    "deep-fused": {"head_type": "deep-fused", "exit_layers": (0, 3)},
    "deep-fused-0": {"head_type": "deep-fused", "exit_layers": (0,)},
}


@dataclass(frozen=True)
class Recorded:
    """A record, and what it is made of."""

    speculator: Speculator

    @cached_property
    def record(self) -> Record:
        """Made where it is asked for: the trees of `deep-fused` take their time."""
        recorder = Recorder(self.speculator, OPTIONS)
        for seed in PROMPTS:
            recorder.prompt(random_ids(5, seed), str(seed))
        return recorder.record()


@cache
def recorded(kind: str) -> Recorded:
    """Made once for all tests."""
    model = make_model("llama", torch.float64)
    backbone = Backbone(model, executor="generic")
    heads = fitted(backbone, make_talks(model), epochs=12, learning_rate=2e-2, **KINDS[kind]).heads
    # sharper on the embedding: every guess that is not hopeless is looked behind, which takes long
    for layer in heads.config.exit_layers:
        heads.config.temperatures[str(layer)] = 1.3 if layer else 0.5
    plain = wrap(model, executor="generic").generate(random_ids(5, 1), max_new_tokens=NEW_TOKENS)
    model.generation_config.eos_token_id = [plain.token_ids[12], 90]
    return Recorded(wrap(model, heads=heads, executor="generic"))
