"""A tiny model with heads that are often right: they are fitted to its own answers.

In float64 the grouping of rows changes no draft. Some answers end with an end token.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from selfspec.api.speculator import Speculator, wrap
from selfspec.model.backbone import Backbone
from tests.models import make_model, random_ids
from tests.talks import make_talks
from tests.training.test_fit import fitted

NEW_TOKENS = 20

KINDS: dict[str, dict[str, Any]] = {
    "translator": {"head_type": "translator", "exit_layers": (1, 3, 5)},
    "narrow": {"head_type": "translator", "exit_layers": (2, 5), "draft_vocab_size": 60},
    "deep-fused": {"head_type": "deep-fused", "exit_layers": (0, 3)},
    "deep-fused-0": {"head_type": "deep-fused", "exit_layers": (0,), "state_layers": (2, 5)},
}


talks = cache(lambda: make_talks(make_model("llama", torch.float64)))


@cache
def skilled(kind: str) -> Speculator:
    model = make_model("llama", torch.float64)
    backbone = Backbone(model, executor="generic")
    heads = fitted(backbone, talks(), epochs=12, learning_rate=2e-2, **KINDS[kind]).heads
    # sharper on the embedding, where trees grow
    for layer in heads.config.exit_layers:
        heads.config.temperatures[str(layer)] = 1.3 if layer else 0.5
    plain = wrap(model, executor="generic").generate(random_ids(5, 1), max_new_tokens=NEW_TOKENS)
    model.generation_config.eos_token_id = [plain.token_ids[12], 90]
    return wrap(model, heads=heads, executor="generic")
