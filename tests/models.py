"""Tiny random models of every family that selfspec should run; called by fixtures and tests."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from selfspec.model.backbone import Backbone
from selfspec.options import Costs

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a compiler")

EXECUTORS = ["generic", pytest.param("fused", marks=needs_compiler)]
"""Executors on a CPU."""

CHEAP = Costs(row=0.1, head=0.1)
"""Fixed costs: by measured costs, the default heads would draft on some machines only."""

VOCAB_SIZE = 96
MAX_POSITIONS = 256
MAX_PARAMETERS = 100_000

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_POSITIONS,
    # no end token, so that generations run to their limit unless a test asks otherwise; no padding
    # token, because transformers would mask it wherever it occurs in a random prompt
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

_GEMMA: dict[str, Any] = {
    "sliding_window": 8,
    "query_pre_attn_scalar": 8,
    "tie_word_embeddings": False,  # Gemma scales embeddings up: tied ones repeat a token
}

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 8}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {}),
    "gemma2": (
        transformers.Gemma2Config,
        _GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    ),
    "gemma3": (transformers.Gemma3TextConfig, _GEMMA | {"sliding_window_pattern": 3}),
    "phi3": (transformers.Phi3Config, {}),
    "granite": (
        transformers.GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.7,
            "logits_scaling": 0.6,
        },
    ),
    "cohere": (transformers.CohereConfig, {"logit_scale": 1.5}),
    "gpt_neox": (transformers.GPTNeoXConfig, {"bias": True}),  # other names, residuals side by side
}
"""Config class and special settings of a family: sliding windows, soft-capping, scalings."""

BREADTH: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "gpt2": (transformers.GPT2Config, {}),  # learned positions
    "phi": (transformers.PhiConfig, {}),  # lm_head with a bias
    "persimmon": (transformers.PersimmonConfig, {}),
    "nanochat": (transformers.NanoChatConfig, {}),  # the final norm on embeddings too
    "opt": (transformers.OPTConfig, {"ffn_dim": 64, "word_embed_proj_dim": 32}),  # learned, offset
    "gptj": (transformers.GPTJConfig, {"rotary_dim": 4}),  # rotations made inside the layers
    "afmoe": (transformers.AfmoeConfig, {"mup_enabled": True, "num_dense_layers": 6}),  # scaled
    "llama4": (  # attention in chunks, layers without rotation, queries scaled by position
        transformers.Llama4TextConfig,
        {
            **{"attention_chunk_size": 8, "floor_scale": 4, "num_local_experts": 2},
            **{"intermediate_size_mlp": 64, "intermediate_size": 16},
        },
    ),
}
"""More families, for tests that need only a pass: the same code runs their layers."""

if (_minicpm3 := getattr(transformers, "MiniCPM3Config", None)) is not None:  # not in the oldest
    BREADTH["minicpm3"] = (  # latent attention; hidden states divided before lm_head
        _minicpm3,
        {
            **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "v_head_dim": 8},
            **{"qk_rope_head_dim": 8, "num_key_value_heads": 4, "dim_model_base": 8},
        },
    )

if (_gemma4 := getattr(transformers, "Gemma4UnifiedTextConfig", None)) is not None:
    # layers share keys and values with others, and the last has its own head size
    BREADTH["gemma4"] = _gemma4, {"global_head_dim": 16}

EAGER_ONLY = {"gemma2", "gptj"}
"""Families that run eager, because transformers has or allows no sdpa for them."""


def make_model(
    family: str, dtype: torch.dtype = torch.float32, attn: str = "sdpa", **overrides: Any
) -> PreTrainedModel:
    """A random model with 6 layers, d = 32, V = 96; `overrides` replace config entries.

    The weights are the same numbers in every dtype (all fit bfloat16) and at every call; the state
    of torch's global generator is left alone.
    """
    kind, special = (FAMILIES | BREADTH)[family]
    config = kind(**_SIZES | special | overrides)
    attn = "eager" if family in EAGER_ONLY else attn
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn)
    _fill(model)
    assert sum(weight.numel() for weight in model.parameters()) < MAX_PARAMETERS
    return model.eval()


@cache
def wrapped(
    family: str, dtype: torch.dtype = torch.float32, executor: str = "generic", **sizes: Any
) -> Backbone:
    """The backbone of a `make_model` model, made once and shared by tests: do not change it."""
    return Backbone(make_model(family, dtype, **sizes), executor=executor)


def noted(patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any]) -> list[Any]:
    """A list that gets `note`'s result for the arguments of each call of a patched function."""
    notes, original = list[Any](), getattr(owner, name)

    def noting(*args: Any, **keywords: Any) -> Any:
        notes.append(note(*args, **keywords))
        return original(*args, **keywords)

    patch.setattr(owner, name, noting)
    return notes


def addressless(value: object) -> str:
    """A value as text for a test's name: the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def random_ids(length: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Tensor:
    """[1, length] ids, the same at every call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (1, length), generator=generator)


@torch.no_grad()
def _fill(model: PreTrainedModel) -> None:
    """Set weights so large that each layer changes the answer and logits have a clear maximum."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() == 1:  # norms and biases: near their neutral value, but not at it
            values = weight.float() + 0.2 * noise
        elif "embed" in name or "lm_head" in name:
            values = 0.7 * noise
        else:
            values = noise * 1.7 * weight.shape[1] ** -0.5
        weight.copy_(values.bfloat16())
