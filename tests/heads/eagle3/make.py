"""Makes the folders beside it: tiny EAGLE-3 heads, and what the reference package makes of them.

    pip install torch==2.13.0 speculators==0.9.0 "transformers<=5.19"
    python tests/heads/eagle3/make.py

The tests read the folders and need none of these versions. Weights are random numbers that bfloat16
holds; what is expected was computed in float32. What the reference does, read in its source
(speculators 0.9.0: models/eagle3, models/utils.py, convert/eagle; SafeAILab's model/cnets.py):

* Layer ids count as `hidden_states` of transformers: i is the state behind i layers, 0 the
  embedding, L behind the last layer, before the final norm. Without ids: 2, L // 2, L - 3.
* Beside the state of position p stands the embedding of token p + 1 (`shift_batch`), and the row is
  rotated for position p + 1. It says what token p + 2 is. Position 0 has no row.
* Later drafts of a round: the row's own output takes the place of the map's, beside the token that
  was drafted, one position further on. It attends to all rows before it.
* What is fed on is the layer's output before the final norm; behind it with `norm_output`.
* `norm_before_fc` norms the states of all layers as one vector, `fc_norm` each by itself; neither
  touches what is fed on. With `norm_before_residual` the residual starts from the normed state.
* `d2t` holds offsets: draft token i is token i + d2t[i] of the model.
* The original format has the same tensors, the layer called `midlayer` in place of `layers.0`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HERE = Path(__file__).parent
WIDTH, VOCABULARY, DRAFTED = 32, 128, 48
STEPS, LENGTH, SHOWN = 4, 40, 5
"""Drafts of a chain, tokens of the text, and places at its end that are kept."""

_TARGET: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LAYER: dict[str, Any] = _TARGET | {
    "num_hidden_layers": 1,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}

HEADS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    # folder: (target, layer, of its config, of the speculator)
    "llama": ("llama", "llama", {}, {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}),
    "llama-normed": (
        "llama",
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        {"norm_before_residual": True, "norm_before_fc": True},
    ),
    "qwen3": (
        "qwen3",
        "qwen3",
        {"head_dim": 16},
        {
            "eagle_aux_hidden_state_layer_ids": [0, 3, 8],
            "norm_before_residual": True,
            "fc_norm": True,
            "norm_output": True,
        },
    ),
    "original-llama": ("llama", "llama", {"head_dim": 16}, {}),
    "original-qwen3": ("qwen3", "llama", {}, {"draft_vocab_size": VOCABULARY}),
}
"""With a table of embeddings of their own, but `NO_EMBEDDINGS`."""

NO_EMBEDDINGS = ("llama-normed", "qwen3", "original-llama")


def target(family: str) -> PreTrainedModel:
    """The model that heads of these folders were made for; the same on any machine."""
    config, kind = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[family]
    model = kind(config(**_TARGET, tie_word_embeddings=False)).eval()
    place = 0
    for name, weight in sorted(model.named_parameters()):
        places = torch.arange(place, place + weight.numel(), dtype=torch.float64)
        place += weight.numel()
        noise = (places * 12.9898).sin().mul(43758.5453).frac() * 2  # in -2..2
        scale = 0.1 if "norm" in name else 0.15
        weight.data.copy_((noise * scale + ("norm" in name)).view_as(weight))
    return model.requires_grad_(False)


def text() -> Tensor:
    """Ids, [1, LENGTH]; some come again."""
    return (torch.arange(LENGTH) ** 2 * 7 % 31 * 4 + torch.arange(LENGTH) % 4)[None]


def states(family: str, layers: list[int], ids: Tensor) -> Tensor:
    """[1, T, layers * d], as transformers counts them; the last before the final norm."""
    model, outputs = target(family), []
    hook = model.model.layers[-1].register_forward_hook(lambda _m, _i, out: outputs.append(out))
    with torch.no_grad():
        hidden = list(model(ids, output_hidden_states=True).hidden_states)
    hook.remove()
    hidden[-1] = outputs[0] if isinstance(outputs[0], Tensor) else outputs[0][0]
    return torch.cat([hidden[layer] for layer in layers], -1)


def said(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    """The reference's draft logits, [STEPS, rows, V_draft]: step s reads the text s tokens on."""
    logits: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _m, _i, out: logits.append(out[0]))
    with torch.no_grad():
        documents = torch.zeros_like(ids[:, 1:])
        model(hidden[:, :-1], ids[:, 1:], documents, ttt_steps=STEPS)
    hook.remove()
    return torch.stack(logits)


def chain(model: Any, hidden: Tensor, ids: Tensor, d2t: Tensor) -> list[int]:
    """What the reference drafts behind the last of `ids`, each from the one before."""
    drafts: list[int] = []
    for step in range(STEPS):
        longer = torch.cat([ids, torch.tensor([[*drafts, *[0] * (STEPS - len(drafts))]])], 1)
        padded = torch.cat([hidden, hidden.new_zeros(1, STEPS, hidden.shape[2])], 1)
        best = int(said(model, padded, longer)[step, ids.shape[1] - 2].argmax())
        drafts.append(best + int(d2t[best]))
    return drafts


def built(name: str) -> tuple[Any, Tensor]:
    """The reference's model with random weights, and its `d2t`."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    family, kind, changes, options = HEADS[name]
    layer = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**(_LAYER | changes))
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        **{
            "transformer_layer_config": layer,
            "draft_vocab_size": DRAFTED,
            "speculators_config": SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=f"tiny-{family}", architectures=[]),
            ),
        }
        | options
    )
    torch.manual_seed(sorted(HEADS).index(name))
    model = Eagle3DraftModel(config).eval()
    for key, weight in model.named_parameters():
        noise = torch.randn(weight.shape) * (0.3 if weight.dim() == 1 else weight.shape[-1] ** -0.5)
        weight.data = (noise + ("norm" in key and "weight" in key)).bfloat16().float()
    d2t = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    if config.draft_vocab_size < VOCABULARY:
        chosen = torch.randperm(VOCABULARY)[:DRAFTED].sort().values
        d2t = chosen - torch.arange(DRAFTED)
        mask = torch.zeros(VOCABULARY, dtype=torch.bool)
        mask[chosen] = True
        model.load_vocab_mappings(mask, d2t)
    if name in NO_EMBEDDINGS:
        model.embed_tokens.weight.data = target(family).get_input_embeddings().weight.data
    return model, d2t


def make(name: str) -> None:
    family = HEADS[name][0]
    model, d2t = built(name)
    config = model.config
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)  # a cast of the model would round its rotations, too
    tensors = load_file(folder / "model.safetensors")
    tensors = {k: v.bfloat16() if v.is_floating_point() else v for k, v in tensors.items()}
    if name in NO_EMBEDDINGS:
        del tensors["embed_tokens.weight"]
        model.embed_tokens.weight.data = target(family).get_input_embeddings().weight.data
    if name.startswith("original"):
        tensors = {k.replace("layers.0.", "midlayer."): v for k, v in tensors.items()}
        for file in folder.iterdir():
            file.unlink()
        layer = config.transformer_layer_config.to_dict()
        rope = layer.pop("rope_parameters")
        layer |= {"draft_vocab_size": config.draft_vocab_size, "rope_theta": rope["rope_theta"]}
        layer["architectures"] = ["LlamaForCausalLMEagle3"]
        names = (*_LAYER, "architectures", "draft_vocab_size", "model_type", "rope_theta")
        fields = {k: layer[k] for k in (*names, "rms_norm_eps", "hidden_act")}
        (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors")
    if name.startswith("original"):
        model = converted(folder, family)
    for file in folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()
    ids = text()
    hidden = states(family, config.eagle_aux_hidden_state_layer_ids or [2, 4, 5], ids)
    logits = said(model, hidden, ids)
    first = LENGTH - STEPS - SHOWN  # row r is token r + 1; behind the last the text has STEPS more
    places = range(first + 2, first + 2 + SHOWN)
    drafts = [chain(model, hidden[:, :at], ids[:, :at], d2t) for at in places]
    rows = range(first, first + SHOWN)
    expected = {"logits": logits[:, rows], "drafts": torch.tensor(drafts, dtype=torch.int32)}
    save_file(
        {k: v.contiguous() for k, v in expected.items()}, HERE / f"{name}.expected.safetensors"
    )


def converted(folder: Path, family: str) -> Any:
    """What the reference makes of a folder in the original format."""
    from speculators.convert.eagle import Eagle3Converter
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    with tempfile.TemporaryDirectory() as scratch:
        base, out = Path(scratch) / "base", Path(scratch) / "out"
        target(family).save_pretrained(base)
        Eagle3Converter().convert(folder, out, str(base), validate=False)
        config = Eagle3SpeculatorConfig.from_pretrained(out)
        config.transformer_layer_config._attn_implementation = "eager"
        config.eagle_aux_hidden_state_layer_ids = None
        model = Eagle3DraftModel(config).eval()
        weights = load_file(out / "model.safetensors")
        tensors: dict[str, Any] = {k: v.float() for k, v in weights.items()}
        if "embed_tokens.weight" not in tensors:
            tensors["embed_tokens.weight"] = target(family).get_input_embeddings().weight.data
        missing, extra = model.load_state_dict(tensors, strict=False)
        assert set(missing) <= {"verifier_lm_head.weight", "verifier_norm.weight"}, missing
        assert not set(extra) - {"d2t", "t2d"}, extra
        model.d2t = tensors.get("d2t", model.d2t)
        return model


if __name__ == "__main__":
    for one in HEADS:
        make(one)
