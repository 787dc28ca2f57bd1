"""Whether the reference package reads what `selfspec fit --head-type eagle3` writes.

    python -m tests.heads.eagle3.ours FOLDER      # selfspec's environment: fits, and notes logits
    python tests/heads/eagle3/ours.py FOLDER      # the reference's (as make.py has it): compares

Found with speculators 0.9.0: three drafts' logits within 4e-6 of ours, Llama and Qwen3.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file

FAMILIES = ("llama", "qwen3")
STEPS = 3


def write(folder: Path) -> None:
    """For each family a tiny model, heads that were fitted to it, a text, and what they say."""
    from selfspec.heads.attending import AttendingHeads
    from selfspec.model.backbone import Backbone
    from selfspec.training import records
    from selfspec.training.features import Features
    from selfspec.training.measure import unrolled
    from tests.models import make_model
    from tests.talks import make_talks
    from tests.training.test_fit import fitted

    for family in FAMILIES:
        model = make_model(family)
        backbone, talks = Backbone(model, executor="generic"), make_talks(model)
        options: dict[str, Any] = {
            "head_type": "eagle3",
            "exit_layers": (0,),
            "draft_vocab_size": 20,
        }
        result = fitted(
            backbone,
            talks,
            base_model=str(folder / f"{family}-model"),
            draft_vocab_size=20,
            **options,
        )
        heads = cast("AttendingHeads", result.heads)
        records.write(folder / family, result, {})
        model.save_pretrained(folder / f"{family}-model")
        ids, layers = torch.tensor([talks[3].ids]), (0, *heads.layers)
        with torch.no_grad():
            states = [one[0] for one in backbone.states(ids, layers)]
            inside = torch.arange(ids.shape[1]) > 0
            batch = Features(dict(zip(layers, states, strict=True)), ids[0], inside, inside)
            drafts = unrolled(heads, 0, batch, STEPS)
            said = [heads.head.unembed(features) for features, _ in drafts]
        text = {"ids": ids, "states": torch.cat(states[1:], -1), "logits": torch.stack(said)}
        save_file(text, folder / f"{family}.safetensors")


def compare(folder: Path) -> None:
    """The largest difference of each draft's logits."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    for family in FAMILIES:
        text = load_file(folder / f"{family}.safetensors")
        config = Eagle3SpeculatorConfig.from_pretrained(folder / family)
        config.transformer_layer_config._attn_implementation = "eager"
        model = Eagle3DraftModel.from_pretrained(folder / family, config=config).float().eval()
        table = load_file(folder / f"{family}-model" / "model.safetensors")
        model.embed_tokens.weight.data = table["model.embed_tokens.weight"]  # heads have none
        noted: list[torch.Tensor] = []
        model.lm_head.register_forward_hook(lambda _m, _i, out, kept=noted: kept.append(out[0]))
        ids, states = text["ids"], text["states"][None]
        with torch.no_grad():
            model(states[:, :-1], ids[:, 1:], torch.zeros_like(ids[:, 1:]), ttt_steps=STEPS)
        for step, theirs in enumerate(noted):
            ours = text["logits"][step, 1 + step :]
            difference = float((theirs[: len(ours)] - ours).abs().max())
            print(family, "draft", step + 1, difference)  # noqa: T201


if __name__ == "__main__":
    (write if __package__ else compare)(Path(sys.argv[1]).absolute())
