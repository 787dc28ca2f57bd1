"""Tiny models with random weights, of every family that transformers has: their configs.

Comes in: a family's name and sizes. Goes out: a config or a model. Called by `families`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

LAYERS, WINDOW, ORIGINAL, MAX_POSITIONS = 6, 8, 64, 256
MAX_PARAMETERS = 10_000_000
"""Of a tiny model: a config whose sizes go by other names would build the real thing."""

_NAMES = {
    "hidden": "hidden_size n_embd d_model embed_dim word_embed_proj_dim",
    "inner": "intermediate_size n_inner ffn_dim ffn_hidden_size decoder_ffn_dim encoder_ffn_dim "
    "intermediate_size_mlp ffn_intermediate_size",
    "layers": "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers "
    "num_decoder_layers num_encoder_layers",
    "heads": "num_attention_heads n_head n_heads num_heads decoder_attention_heads "
    "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads",
    "kv_heads": "num_key_value_heads num_kv_heads n_head_kv kv_n_heads",
    "head": "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim query_pre_attn_scalar "
    "kv_channels index_head_dim hidden_size_per_layer_input global_head_dim",
    "rank": "q_lora_rank kv_lora_rank moe_intermediate_size shared_expert_intermediate_size "
    "moe_shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
    "shared_experts_intermediate_size",
    "positions": "max_position_embeddings n_positions max_seq_len max_sequence_length n_ctx",
    "window": "sliding_window attention_chunk_size window_size attention_window",
    "experts": "num_local_experts num_experts n_routed_experts moe_num_experts",
    "two": "num_experts_per_tok moe_topk moe_k moe_top_k num_experts_per_token index_n_heads",
    "one": "n_shared_experts n_group topk_group first_k_dense_replace moe_num_shared_experts",
    "rotary": "rotary_dim index_topk",
    "vocabulary": "vocab_size vocab_size_per_layer_input",
    "nothing": "bos_token_id eos_token_id pad_token_id",
}
"""What families call their sizes; fields that a config class lacks are left out."""

_ALSO_IF_NONE = {"head_dim", "num_key_value_heads", "v_head_dim", "n_inner"}
"""Sizes that are set although their default is None: some classes cannot do without."""

TINY: dict[str, int | None] = {
    **{"hidden": 32, "inner": 64, "layers": LAYERS, "heads": 4, "kv_heads": 2, "head": 8},
    **{"rank": 16, "positions": MAX_POSITIONS, "window": WINDOW, "experts": 4, "two": 2, "one": 1},
    **{"rotary": 4, "vocabulary": 96, "nothing": None},
}
MIDDLE: dict[str, int | None] = {
    **{"hidden": 576, "inner": 1536, "layers": 8, "heads": 9, "kv_heads": 3, "head": 64},
    **{"rank": 192, "positions": 2048, "window": 512, "experts": 4, "two": 2, "one": 1},
    **{"rotary": 32, "vocabulary": 8192, "nothing": None},
}
"""MIDDLE: the default model's width, eight layers, a small vocabulary."""

_HYBRID: dict[str, Any] = {
    "mamba_d_head": 16,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "mamba_d_ssm": 64,
    "mamba_n_groups": 1,
}
_SHARED = {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2}
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {**_HYBRID, "attn_layer_indices": [1, 3, 5]},
    "cwm": {"bos_token_id": 1},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 64, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "falcon_h1": _HYBRID,
    "gemma3n_text": _SHARED,
    "gemma4_text": _SHARED,
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "granitemoehybrid": {**_HYBRID, "layer_types": ["linear_attention", "full_attention"] * 3},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3},
    "llama4_text": {"floor_scale": 16},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "modernbert-decoder": {
        **dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id"), 1),
        **dict.fromkeys(("cls_token_id", "sep_token_id"), 1),
        "local_attention": WINDOW,
    },
    "zamba2": {"mamba_headdim": 16, "n_mamba_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family needs beside its sizes, or what makes it show its specialities when tiny."""

NO_TEXT = {
    **dict.fromkeys(
        (
            *(
                "bart",
                "bigbird_pegasus",
                "blenderbot",
                "blenderbot-small",
                "marian",
                "mbart",
                "mvp",
            ),
            *("pegasus", "plbart", "prophetnet", "trocr", "whisper", "moshi", "musicgen"),
            *("musicgen_melody", "mllama", "git", "fuyu", "got_ocr2", "blt", "phi4_multimodal"),
            *("moss_transcribe_diarize", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "emu3"),
            *("llama4", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "dots3_note"),
        ),
        "part of an encoder-decoder, or listed by its text model where it has one",
    ),
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra"),
            *("ernie", "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert"),
            *("roformer", "xlm-roberta", "xlm-roberta-xl", "xmod", "xlm", "xlnet", "reformer"),
            *("gemma4_assistant", "gemma4_unified_assistant", "cpmant"),
        ),
        "an encoder with a causal mask, or no model of its own",
    ),
}
"""Entries of transformers' table of causal language models that are none to generate with."""


def tiny_model(family: str, sizes: dict[str, int | None], dtype: torch.dtype) -> PreTrainedModel:
    """A random model of a family, with weights large enough that each layer changes the answer."""
    config = tiny_config(family, sizes)
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if count > (MAX_PARAMETERS if sizes is TINY else 40 * MAX_PARAMETERS):
        raise ValueError(f"it would have {count:,} parameters")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() < 2:  # norms and biases: near their neutral value, but not at it
                weight.add_(0.2 * noise)
            elif re.search("embed|lm_head|wte|wpe", name):
                weight.copy_(0.7 * noise)
            else:
                weight.copy_(noise * 1.7 * weight.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = None  # type: ignore[union-attr]  # a model to generate with
    return model.eval()


def tiny_config(family: str, sizes: dict[str, int | None]) -> PreTrainedConfig:
    """A family's config in these sizes, without special tokens."""
    kind = type(AutoConfig.for_model(family).get_text_config(decoder=True))
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    given = {
        name: sizes[size]
        for size, names in _NAMES.items()
        for name in names.split()
        if name in fields and (size == "nothing" or _is_size(name, fields[name]))
    }
    if "kv_lora_rank" in given:  # latent attention: as many keys as queries
        given |= {"num_key_value_heads": sizes["heads"]}
    config = kind(**given | SPECIAL.get(family, {}))
    config._experts_implementation = "eager"  # the grouped product knows no float64
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        if "original_max_position_embeddings" in rope:
            rope["original_max_position_embeddings"] = ORIGINAL
    return config


def _is_size(name: str, default: object) -> bool:
    return (type(default) is int) or (default is None and name in _ALSO_IF_NONE)


def _ropes(parameters: Any) -> Iterator[dict[str, Any]]:
    """A config's rope parameters, which may be one dict or one per attention type."""
    if isinstance(parameters, dict):
        yield parameters
        for value in parameters.values():
            yield from _ropes(value)
