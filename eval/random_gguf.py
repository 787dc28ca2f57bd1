"""A GGUF file of random blocks in the shape of a model: what cannot be downloaded still has a cost.

    python -m eval.random_gguf --shape llama-3.2-3b --kind Q4_K /tmp/random.gguf

Weights have the size that those of a model have; what it says means nothing. The embedding is the
unembedding, as Q6_K. Its speed and memory: `selfspec env --model FILE`, `eval/load_memory.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import gguf
import numpy as np
import typer
from gguf import GGMLQuantizationType, GGUFWriter

from eval.device_speed import SHAPES

_SCALES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
"""Where float16 numbers lie in a block, in bytes."""


def main(
    path: Annotated[Path, typer.Argument(help="File to write.")],
    shape: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "llama-3.2-1b",
    kind: Annotated[str, typer.Option(help="Q4_0, Q8_0, Q4_K or Q6_K.")] = "Q4_K",
) -> None:
    """Write it."""
    sizes = SHAPES[shape]
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(sizes["num_hidden_layers"])
    writer.add_context_length(sizes["max_position_embeddings"])
    writer.add_embedding_length(sizes["hidden_size"])
    writer.add_feed_forward_length(sizes["intermediate_size"])
    writer.add_head_count(sizes["num_attention_heads"])
    writer.add_head_count_kv(sizes["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(sizes["vocab_size"])
    words = [f"<{number}>" for number in range(sizes["vocab_size"] - 3)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["a", "b", "ab", *words])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(sizes["vocab_size"] - 1)
    tensors = list(_tensors(sizes, kind))
    for name, of, (outputs, inner) in tensors:
        block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[of]]
        stored = (outputs, inner // block * size)
        writer.add_tensor_info(
            name, stored, np.dtype(np.uint8), outputs * stored[1], GGMLQuantizationType[of]
        )
    norms = [name for name, _, _ in tensors if name.endswith("attn_output.weight")]
    norms = [name.replace("attn_output", part) for name in norms for part in _NORMS]
    flat = np.ones(sizes["hidden_size"], np.float32)
    for name in ("output_norm.weight", *norms):
        writer.add_tensor_info(name, flat.shape, flat.dtype, flat.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, (_, of, (outputs, inner)) in enumerate(tensors):
        writer.write_tensor_data(_blocks(of, outputs, inner, number))
    for _ in ("output_norm.weight", *norms):
        writer.write_tensor_data(flat)
    writer.close()


_NORMS = ("attn_norm", "ffn_norm")


def _tensors(sizes: dict[str, int], kind: str) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Name, format, outputs and inputs."""
    width, inner = sizes["hidden_size"], sizes["intermediate_size"]
    keys = width // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    yield "token_embd.weight", "Q6_K", (sizes["vocab_size"], width)
    for layer in range(sizes["num_hidden_layers"]):
        parts = {"attn_q": (width, width), "attn_k": (keys, width), "attn_v": (keys, width)}
        parts |= {"attn_output": (width, width), "ffn_gate": (inner, width)}
        parts |= {"ffn_up": (inner, width), "ffn_down": (width, inner)}
        for part, shape in parts.items():
            yield f"blk.{layer}.{part}.weight", kind, shape


def _blocks(kind: str, outputs: int, inner: int, seed: int) -> np.ndarray:
    """[outputs, bytes]: random quants, and scales that give weights of about inner ** -0.5."""
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    shape = (outputs, inner // block, size)
    data = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    largest = {"Q4_0": 8, "Q8_0": 128, "Q4_K": 32 * 8, "Q6_K": 64 * 16}[kind]
    scale = np.frombuffer(np.float16(inner**-0.5 / largest).tobytes(), np.uint8)
    for place in _SCALES[kind]:
        data[..., place : place + 2] = scale
    return data.reshape(outputs, -1)


if __name__ == "__main__":
    typer.run(main)
