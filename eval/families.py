"""Writes a page of the model families: which run, on which executor, and whether texts are exact.

    python -m eval.families --output docs/families.md --overwrite
    python -m eval.families --output few.md --only llama,gpt_neox

Each causal language model of the installed transformers is built with random weights, a few layers
and narrow windows. In float64, texts with drafts (exit heads, n-grams) must equal those of
`model.generate`, after short and long prompts.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import transformers
import typer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from eval.lab import run
from selfspec import files
from selfspec.api.speculator import Speculator, wrap
from selfspec.errors import SelfspecError, first_line
from selfspec.eval.results import first_divergence
from selfspec.eval.verify import Way, hugging_face, logits_of
from selfspec.model.backbone import Backbone

PROMPTS = (5, 90)
"""Prompt lengths: within every window, and beyond the windows and the original context length."""
NEW_TOKENS, _MOST_WORDS = 40, 160  # tokens of an answer; most characters of a reason
VERDICTS = ("exact", "WRONG", "refused", "not tried")


class Row(NamedTuple):
    family: str
    model: str
    text: str  # one of VERDICTS
    executor: str  # the choice of auto in float32; empty if none runs it
    why: str  # why the text is not exact, or the executor not fused


def main(
    output: Annotated[Path, typer.Option(help="The page, Markdown.")],
    only: Annotated[str | None, typer.Option(help="Families (model_type), with commas.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the page.")] = False,
) -> None:
    """Try each family, then write the page. Exit code 1 if a family is WRONG."""
    files.check_file(output, overwrite=overwrite)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*_PARTS.split(), *_ENCODERS.split()}
    names = only.split(",") if only else sorted(known)
    rows = []
    for number, name in enumerate(names, 1):
        rows.append(try_family(name))
        print(f"{number}/{len(names)} {name}: {rows[-1].text} {rows[-1].why}", flush=True)
    text = output.read_text(encoding="utf-8") if output.exists() else HEAD
    files.write(output, text.partition(TABLE)[0] + TABLE + page(rows))
    if any(row.text == "WRONG" for row in rows):
        raise typer.Exit(1)


def try_family(family: str) -> Row:
    """Try a family. Errors other than selfspec's own count as WRONG, not as a refusal."""
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family, family)
    try:
        model = _running_model(family)
    except Exception as error:  # noqa: BLE001  # the page shows what a config lacks
        return Row(family, class_name, "not tried", "", _reason(error))
    try:
        backbone, difference = _compare(family, wrap(model, heads="logit-lens"))
    except SelfspecError as error:
        return Row(family, class_name, "refused", "", first_line(error)[:_MOST_WORDS])
    except Exception as error:  # noqa: BLE001  # a crash is a finding
        return Row(family, class_name, "WRONG", "", _reason(error))
    executor = backbone.executor_name
    if difference:
        return Row(family, class_name, "WRONG", executor, difference)
    note = "" if model.dtype == torch.float64 else "texts compared in float32: no float64 there; "
    note += "" if executor == "fused" else f"not fused: {backbone.refusals['fused'][:_MOST_WORDS]}"
    return Row(family, class_name, "exact", executor, note)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)[:_MOST_WORDS]}"


def _running_model(family: str) -> PreTrainedModel:
    """A tiny model whose own forward runs: in float64, or in float32 if only that works."""
    with torch.no_grad():
        try:
            model = tiny_model(family, torch.float64)
            model(random_ids(PROMPTS[0]))
        except RuntimeError:
            model = tiny_model(family, torch.float32)
            model(random_ids(PROMPTS[0]))
    return model


def _compare(family: str, speculator: Speculator) -> tuple[Backbone, str]:
    """The backbone that auto chooses in float32, and the difference in its texts, or ""."""
    single = tiny_model(family, torch.float32)
    backbone = wrap(single, heads="logit-lens").backbone
    drafted = dict.fromkeys(_DRAFTERS, 0)
    for length in PROMPTS:
        ids = random_ids(length)
        expected, _ = hugging_face(speculator.model, ids, NEW_TOKENS)
        for kind, options in _DRAFTERS.items():
            answer = speculator.generate(ids, max_new_tokens=NEW_TOKENS, **options)
            drafted[kind] += answer.stats.drafted
            if answer.token_ids != expected:
                place = first_divergence(answer.token_ids, expected)
                return backbone, f"{kind} drafts, prompt {length}: another text from token {place}"
    if not (drafted["exit"] and drafted["ngram"]):
        return backbone, f"nothing was drafted, which shows nothing: {drafted}"
    if (error := executor_error(single)) > 1e-3:
        name = backbone.executor_name
        return backbone, f"{name} executor: logits differ by {error:.2g} of their size"
    return backbone, ""


_DRAFTERS: dict[str, dict[str, Any]] = {
    "no": {"speculate": False},  # plain decoding on our runtime
    "exit": {"drafter": "exit:layers=2/4,threshold=0.02", "never_slower": False},
    "ngram": {"drafter": "ngram:size=1", "costs": "row=0", "never_slower": False},
}


def executor_error(model: PreTrainedModel) -> float:
    """Largest error of a position's logits on auto's executor, relative to all logits (RMS)."""
    backbone, ids = wrap(model, heads="logit-lens").backbone, random_ids(sum(PROMPTS))
    with torch.inference_mode():
        expected = model(ids).logits[0].float()
    errors = logits_of(backbone, ids[0], Way([PROMPTS[1]])) - expected
    return float(errors.square().mean(-1).sqrt().max() / expected.square().mean().sqrt())


def random_ids(length: int) -> Tensor:
    """[1, length] ids, the same at every call."""
    return torch.randint(96, (1, length), generator=torch.Generator().manual_seed(length))


# --- tiny models

LAYERS, WINDOW, ORIGINAL = 6, 8, 64
MAX_PARAMETERS = 10_000_000
"""Most parameters of a tiny model: a config with unknown names of sizes gives a full-size model."""

_SIZES: tuple[tuple[int | None, str], ...] = (
    (32, "hidden_size n_embd d_model embed_dim word_embed_proj_dim"),
    (64, "intermediate_size n_inner ffn_dim ffn_hidden_size decoder_ffn_dim encoder_ffn_dim"),
    (64, "intermediate_size_mlp ffn_intermediate_size"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers"),
    (LAYERS, "num_decoder_layers num_encoder_layers"),
    (4, "num_attention_heads n_head n_heads num_heads decoder_attention_heads"),
    (4, "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads"),
    (2, "num_key_value_heads num_kv_heads n_head_kv kv_n_heads"),
    (8, "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim query_pre_attn_scalar"),
    (8, "kv_channels index_head_dim hidden_size_per_layer_input global_head_dim"),
    (16, "q_lora_rank kv_lora_rank moe_intermediate_size shared_expert_intermediate_size"),
    (16, "moe_shared_expert_intermediate_size shared_intermediate_size"),
    (16, "expert_ffn_hidden_size shared_experts_intermediate_size"),
    (256, "max_position_embeddings n_positions max_seq_len max_sequence_length n_ctx"),
    (WINDOW, "sliding_window attention_chunk_size window_size attention_window"),
    (4, "num_local_experts num_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok moe_topk moe_k moe_top_k num_experts_per_token index_n_heads"),
    (1, "n_shared_experts n_group topk_group first_k_dense_replace moe_num_shared_experts"),
    (4, "rotary_dim index_topk"),
    (96, "vocab_size vocab_size_per_layer_input"),
    (None, "bos_token_id eos_token_id pad_token_id"),
)
"""Names of sizes in the families' configs; fields that a config class lacks are left out."""

_ALSO_IF_NONE = {"head_dim", "num_key_value_heads", "v_head_dim", "n_inner"}
"""Sizes that are set although their default is None, because some classes need them."""

_HYBRID: dict[str, Any] = {"mamba_d_head": 16, "mamba_n_heads": 4, "mamba_d_state": 8}
_HYBRID |= {"mamba_d_ssm": 64, "mamba_n_groups": 1}
_SHARED = {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2}
SPECIAL: dict[str, dict[str, Any]] = {
    "afmoe": {"mup_enabled": True},
    "bamba": {**_HYBRID, "attn_layer_indices": [1, 3, 5]},
    "cwm": {"bos_token_id": 1},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 64, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "falcon_h1": _HYBRID,
    "hyperclovax": {"logits_scaling": 0.6, "embedding_multiplier": 3.0},
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
"""Other settings that a family needs, or that enable its special features when tiny."""

_PARTS = (
    "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart "
    "prophetnet trocr whisper moshi musicgen musicgen_melody mllama git fuyu got_ocr2 blt "
    "phi4_multimodal moss_transcribe_diarize gemma3 gemma3n gemma4 gemma4_unified emu3 llama4 "
    "qwen3_5 qwen3_5_moe qwen4_exp dots3_note"
)
"""Left out: parts of encoder-decoders, and models whose text model is listed by itself."""

_ENCODERS = (
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert "
    "roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod xlm xlnet "
    "reformer gemma4_assistant gemma4_unified_assistant cpmant"
)
"""Left out: encoders that also run with a causal mask, and families without their own model."""


def tiny_model(family: str, dtype: torch.dtype) -> PreTrainedModel:
    """A random model of a family, with weights large enough that each layer changes the answer."""
    config = tiny_config(family)
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if count > MAX_PARAMETERS:
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
    generation: Any = model.generation_config
    generation.eos_token_id = None
    model.eval()
    return model


def tiny_config(family: str) -> PreTrainedConfig:
    """A family's config, without special tokens."""
    kind = type(AutoConfig.for_model(family).get_text_config(decoder=True))
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    sizes = {name for name, default in defaults.items() if type(default) is int}
    sizes |= {name for name in _ALSO_IF_NONE if defaults.get(name, 0) is None}
    settings = {
        name: value
        for value, names in _SIZES
        for name in names.split()
        if name in (defaults if value is None else sizes)
    }
    if "kv_lora_rank" in settings:  # latent attention: as many keys as queries
        settings["num_key_value_heads"] = 4
    config = kind(**settings | SPECIAL.get(family, {}))
    config._experts_implementation = "eager"  # grouped matrix products do not support float64
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):  # one, or one per attention type
        if isinstance(rope, dict) and "original_max_position_embeddings" in rope:
            rope["original_max_position_embeddings"] = ORIGINAL
    return config


# --- the page

HEAD = "<!-- written by selfspec -->\n# Families of models\n\n"
TABLE = "## All of them\n\n"
"""Heading of the table; the page's text before it is kept."""


def page(rows: list[Row]) -> str:
    count = Counter(row.text for row in rows)
    totals = ", ".join(f"{count[verdict]} {verdict}" for verdict in VERDICTS if count[verdict])
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    ordered = sorted(rows, key=lambda row: (VERDICTS.index(row.text), row.family))
    lines = [Row._fields, *([cell.replace("|", "/") for cell in row] for row in ordered)]
    head, *table = (f"| {' | '.join(line)} |\n" for line in lines)
    return (
        f"Made by selfspec with `python -m eval.families --output docs/families.md`, {versions}.\n"
        f"{len(rows)} families: {totals}.\n\n{head}|{'---|' * len(Row._fields)}\n{''.join(table)}"
    )


if __name__ == "__main__":
    run(main)
