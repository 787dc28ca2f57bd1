"""Writes a GGUF file of random blocks in the shape of a model, to time models without a download.

    python -m eval.random_gguf --shape llama-3.2-3b --kind Q4_K /tmp/random.gguf

Weights have the magnitude of a real model's; the text is meaningless. Embedding and unembedding are
tied, as Q6_K, or as Q8_0 if a row is not a multiple of 256. To measure speed and memory, use
`selfspec env --model FILE` and `eval.memory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import gguf
import numpy as np
import typer
from gguf import GGMLQuantizationType, GGUFWriter

from eval.lab import SHAPES, Shape, run
from selfspec.errors import InvalidOption, check_keys

_SCALES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
"""Offsets of float16 numbers in a block, in bytes."""
_LARGEST = {"Q4_0": 8, "Q8_0": 128, "Q4_K": 32 * 8, "Q6_K": 64 * 16}
"""Largest quant times scale in a block."""


def main(
    path: Annotated[Path, typer.Argument(help="File to write.")],
    shape: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "llama-3.2-1b",
    kind: Annotated[str, typer.Option(help="Q4_0, Q8_0, Q4_K or Q6_K.")] = "Q4_K",
) -> None:
    check_keys([shape], SHAPES, "shape")
    check_keys([kind], _SCALES, "kind")
    sizes = SHAPES[shape]
    if kind.endswith("_K") and sizes.hidden_size % 256:
        expected = f"Q4_0 or Q8_0: rows of {shape} are no whole blocks of 256"
        raise InvalidOption(f"kind is {kind!r}, expected {expected}")
    writer = GGUFWriter(path, "llama", use_temp_file=True)
    writer.add_block_count(sizes.num_hidden_layers)
    writer.add_context_length(sizes.max_position_embeddings)
    writer.add_embedding_length(sizes.hidden_size)
    writer.add_feed_forward_length(sizes.intermediate_size)
    writer.add_head_count(sizes.num_attention_heads)
    writer.add_head_count_kv(sizes.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(sizes.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    tokens = [*"abo\u0120", "ab"]  # U+0120 is a blank
    tokens += [f"<{number}>" for number in range(sizes.vocab_size - len(tokens))]
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(sizes.vocab_size - 1)
    for number, (name, quant, outputs, inner) in enumerate(_weights(sizes, kind)):
        blocks = _blocks(quant, outputs, inner, number)
        writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType[quant])
    layers, parts = range(sizes.num_hidden_layers), ("attn", "ffn")
    norms = [f"blk.{layer}.{part}_norm.weight" for layer in layers for part in parts]
    for name in (*norms, "output_norm.weight"):
        writer.add_tensor(name, np.ones(sizes.hidden_size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _weights(sizes: Shape, kind: str) -> Iterator[tuple[str, str, int, int]]:
    width, inner, keys = sizes.hidden_size, sizes.intermediate_size, sizes.keys
    yield "token_embd.weight", "Q8_0" if width % 256 else "Q6_K", sizes.vocab_size, width
    attention = {"attn_q": width, "attn_k": keys, "attn_v": keys, "attn_output": width}
    for layer in range(sizes.num_hidden_layers):
        for part, outputs in (attention | {"ffn_gate": inner, "ffn_up": inner}).items():
            yield f"blk.{layer}.{part}.weight", kind, outputs, width
        yield f"blk.{layer}.ffn_down.weight", kind, width, inner


def _blocks(kind: str, outputs: int, inner: int, seed: int) -> np.ndarray:
    """[outputs, bytes]: random quants, and scales that give weights of about inner ** -0.5."""
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    shape = (outputs, inner // block, size)
    blocks = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    scale = np.frombuffer(np.float16(inner**-0.5 / _LARGEST[kind]).tobytes(), np.uint8)
    for place in _SCALES[kind]:
        blocks[..., place : place + 2] = scale
    return blocks.reshape(outputs, -1)


if __name__ == "__main__":
    run(main)
