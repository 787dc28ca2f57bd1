"""GGUF files byte by byte: whole ones of a few tensors, and parts of damaged ones."""

from __future__ import annotations

import struct


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
    """A file whose header holds together, of two tensors; what it says of a model may differ."""
    nested = struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 5, 2) + bytes(8)
    whole = header(
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
    return whole + bytes(-len(whole) % 8) + bytes(16 + 18)
