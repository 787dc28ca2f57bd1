"""GGUF files: tiny random models as llama.cpp's converter would write them, and parts of files."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

LAYERS, WIDTH, INNER, VOCAB = 2, 256, 512, 320

_K_QUANTS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Formats that the gguf package cannot write, and the places of their float16 numbers."""


def random_blocks(kind: str, rows: int, inner: int, seed: int = 0) -> np.ndarray:
    """Blocks [rows, bytes] of any finite numbers, with scales of both signs from 2^-24 to 2^15."""
    generator = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    data = generator.integers(0, 256, (rows, inner // block, size), dtype=np.uint8)
    places = _K_QUANTS.get(kind, (0, 2) if kind.endswith("_1") else (0,))
    for place in places:
        finite = data[..., place + 1] & 0x7C != 0x7C
        data[..., place + 1] = np.where(finite, data[..., place + 1], 0x3C)
    return data.reshape(rows, -1)


def usual_blocks(kind: str, rows: int, inner: int, seed: int = 0) -> np.ndarray:
    """Blocks [rows, bytes] whose weights have realistic magnitudes."""
    generator = np.random.default_rng(seed)
    if kind not in _K_QUANTS:
        values = generator.normal(0, inner**-0.5, (rows, inner)).astype(np.float32)
        return gguf.quantize(values, GGMLQuantizationType[kind])
    data = random_blocks(kind, rows, inner, seed)
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = data.reshape(rows, inner // block, size)
    for place in _K_QUANTS[kind]:
        scale = np.float16(2.0**-13 if kind == "Q6_K" else 2.0**-12)
        blocks[..., place : place + 2] = np.frombuffer(scale.tobytes(), np.uint8)
    return data


def write_model(
    path: Path,
    architecture: str = "llama",
    kinds: Mapping[str, str] | None = None,
    kind: str = "Q4_1",
    *,
    tied: bool = False,
    scaling: Mapping[str, str | float | int] | None = None,
    divisors: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write a model of `architecture`; `kinds` by part of a tensor's name, else `kind`; norms F32.

    `scaling` and `divisors` belong to rotations; divisors are tensors by name.
    """
    writer = gguf.GGUFWriter(path, architecture)
    heads, kv_heads, side = _heads(architecture)
    values = {"block_count": LAYERS, "context_length": 128, "vocab_size": VOCAB}
    values |= {"embedding_length": WIDTH, "feed_forward_length": INNER}
    values |= {"attention.head_count": heads, "attention.head_count_kv": kv_heads}
    sides = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    values |= dict.fromkeys(sides, side)
    for name, value in values.items():
        writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{architecture}.rope.freq_base", 10000.0)
    _add_tokens(writer, of_bytes=not architecture.startswith("gemma"))
    adders = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
    for name, setting in (scaling or {}).items():
        adders[type(setting)](f"{architecture}.rope.scaling.{name}", setting)  # type: ignore[operator]  # by type
    for name, numbers in (divisors or {}).items():
        writer.add_tensor(f"{name}.weight", numbers)
    for seed, (name, shape) in enumerate(_shapes(architecture, tied)):
        chosen = next((k for part, k in (kinds or {}).items() if part in name), kind)
        if len(shape) == 1:
            noise = np.random.default_rng(seed).normal(0, 0.1, shape).astype(np.float32)
            writer.add_tensor(name, 1 + noise if "norm" in name else noise)
        else:
            data = usual_blocks(chosen, shape[0], shape[1], seed)
            writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[chosen])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _heads(architecture: str) -> tuple[int, int, int]:
    """Query heads, key heads and their size, which transformers does not read for Qwen 3."""
    return (2, 1, 128) if architecture == "qwen3" else (4, 2, 64)


def _add_tokens(writer: gguf.GGUFWriter, *, of_bytes: bool) -> None:
    """Add bytes as tokens, as in GPT-2's tokenizer, or letters, as in Gemma's, and a few more."""
    marks = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256))]
    tokens = [*marks, *(chr(256 + i) for i in range(256 - len(marks)))]
    tokens += ["ab", "ba"]  # made by the merges below
    tokens += [f"<{i}>" for i in range(VOCAB - len(tokens))]
    if not of_bytes:
        tokens[tokens.index("\u0120")] = "\u2581"
        writer.add_token_scores([float(-place) for place in range(VOCAB)])
        writer.add_unk_token_id(VOCAB - 3)
    writer.add_tokenizer_model("gpt2" if of_bytes else "llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["a b", "b a"])  # transformers 5.17 ignores a list of one
    writer.add_bos_token_id(VOCAB - 2)
    writer.add_eos_token_id(VOCAB - 1)
    writer.add_pad_token_id(VOCAB - 1)


def _shapes(architecture: str, tied: bool) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes, [out, in], of all tensors."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("token_embd.weight", (VOCAB, WIDTH))]
    shapes += [("output_norm.weight", (WIDTH,))]
    if not (tied or architecture.startswith("gemma")):
        shapes += [("output.weight", (VOCAB, WIDTH))]
    _, kv_heads, side = _heads(architecture)
    keys = kv_heads * side
    for layer in range(LAYERS):
        parts: dict[str, tuple[int, ...]] = {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
        if architecture == "phi3":
            parts |= {"attn_qkv": (WIDTH + 2 * keys, WIDTH), "ffn_up": (2 * INNER, WIDTH)}
        else:
            parts |= {"attn_q": (WIDTH, WIDTH), "attn_k": (keys, WIDTH), "attn_v": (keys, WIDTH)}
            parts |= {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH)}
        parts |= {"attn_output": (WIDTH, WIDTH), "ffn_down": (WIDTH, INNER)}
        if architecture in ("gemma2", "gemma3"):
            parts |= {"post_attention_norm": (WIDTH,), "post_ffw_norm": (WIDTH,)}
        if architecture in ("qwen3", "gemma3"):
            parts |= {"attn_q_norm": (side,), "attn_k_norm": (side,)}
        shapes += [(f"blk.{layer}.{part}.weight", shape) for part, shape in parts.items()]
        if architecture == "qwen2":
            biases = {"attn_q": WIDTH, "attn_k": keys, "attn_v": keys}
            shapes += [(f"blk.{layer}.{part}.bias", (size,)) for part, size in biases.items()]
    return shapes


def de_quantised(kind: str, data: np.ndarray) -> Tensor:
    """Blocks decoded by the gguf package, float32."""
    return torch.from_numpy(np.array(gguf.dequantize(data, GGMLQuantizationType[kind])))


# --- byte by byte: whole files of a few tensors, and parts of damaged ones


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def header(*parts: bytes, tensors: int = 0, values: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values) + b"".join(parts)


def value(key: str | bytes, kind: int, data: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + data


def tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    layout = f"<I{len(shape)}QIQ"
    return text(name) + struct.pack(layout, len(shape), *shape, kind, offset)


def tiny(layers: int = 2, width: int = 32, inner: int = 64) -> bytes:
    """A file of two tensors with a consistent header; the described model may be another."""
    nested = struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 5, 2) + bytes(8)
    head = header(
        value("general.alignment", 4, struct.pack("<I", 8)),
        value("general.architecture", 8, text("llama")),
        value("llama.block_count", 10, struct.pack("<Q", layers)),
        value("llama.embedding_length", 4, struct.pack("<I", width)),
        value("llama.feed_forward_length", 4, struct.pack("<I", inner)),
        value("words", 9, struct.pack("<IQ", 8, 2) + text("x") + text("yy")),
        value("nested", 9, nested),
        tensor("t", [2, 2]),
        tensor("u", [32], kind=2, offset=16),
        tensors=2,
        values=7,
    )
    return head + bytes(-len(head) % 8) + bytes(16 + 18)
