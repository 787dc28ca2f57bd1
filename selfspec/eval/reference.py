"""What a model says without us: Hugging Face's greedy text, its logits, other number formats.

Called where this runtime is compared with it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.api.speculator import Speculator
from selfspec.model.backbone import Backbone


def hugging_face(model: PreTrainedModel, ids: Tensor, new_tokens: int) -> tuple[list[int], Tensor]:
    """Greedy tokens behind `ids` [1, P], and the logits that each was chosen by, [n, V] float32."""
    generator: Any = model
    output = generator.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0, ids.shape[1] :].tolist(), torch.cat(output.logits).float()


@torch.inference_mode()
def block_logits(model: PreTrainedModel, ids: Tensor, tokens: Sequence[int]) -> Tensor:
    """Logits of each of `tokens` behind `ids` [1, P], from one pass over all: [n, V] float32."""
    whole = torch.cat([ids, ids.new_tensor([list(tokens)])], dim=1)
    kept: Tensor = model(whole, logits_to_keep=len(tokens) + 1).logits
    return kept[0, :-1].float()


def log_likelihood(model: PreTrainedModel, ids: Tensor, tokens: Sequence[int]) -> float:
    """Nats of `tokens` behind `ids` [1, P], summed, from logits in float32."""
    logits = block_logits(model, ids, tokens)
    chosen = logits.log_softmax(-1).gather(1, ids.new_tensor([list(tokens)]).T)
    return float(chosen.double().sum())


def why_no_copy(model: PreTrainedModel, dtype: torch.dtype, most_gb: float) -> str | None:
    """Why no copy in `dtype` is made, or None."""
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "the model is spread over several devices"
    size = sum(weight.numel() for weight in model.parameters()) * dtype.itemsize
    if size > 1e9 * most_gb:
        return (
            f"a copy in {named(dtype)} takes {size / 1e9:.1f} GB, more than max_copy_gb {most_gb:g}"
        )
    return None


def model_in(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy of `model` in `dtype`."""
    # Module.to, because the model's own is wrapped and loses its type
    return nn.Module.to(copy.deepcopy(model), dtype)


def speculator_in(speculator: Speculator, dtype: torch.dtype) -> Speculator:
    """The same model, heads and options in `dtype`, on the generic executor."""
    backbone = Backbone(model_in(speculator.model, dtype), executor="generic")
    heads = speculator.heads
    if heads is not None:
        heads = heads.twin(backbone.unembedding)
    return Speculator(
        backbone,
        speculator.tokenizer,
        heads,
        speculator.label,
        speculator.options,
        turn_end=speculator.turn_end,
    )


def named(dtype: torch.dtype) -> str:
    """As flags have it: bfloat16."""
    return str(dtype).removeprefix("torch.")
