"""GGUF files: check a file's header, and load a model whose weights stay the file's blocks.

Large weights are QuantisedWeights, mapped, never de-quantised as a whole. A header's counts,
lengths and offsets are checked against the file's size before a library reads it, so that none can
fill memory or point outside the file. `hub.models` de-quantises for other files and devices.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from selfspec.errors import InvalidData
from selfspec.files import open_bytes
from selfspec.hub.pretrained import assemble, load_description
from selfspec.model.weights import FORMATS, QuantisedWeight, why_not_compiled

logger = logging.getLogger(__name__)

# --- the header

_NUMBERS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of each type of value that is a number or a bool, by its code in the file."""
_FLOAT, _STRING, _ARRAY = 6, 8, 9
_WHOLE = (2, 4, 5, 10, 11)

_SIZES = ("block_count", "embedding_length")
_WIDEST = 8  # times the longest dimension of any tensor: no feed-forward layer is wider
_ROTATIONS = "rope_f"  # begins the names of tensors that divide rotary frequencies


class GgufTensor(NamedTuple):
    """One tensor of a file."""

    shape: tuple[int, ...]  # as torch has it: the last dimension is a row
    kind: str  # ggml's name of its format: Q4_K, F32
    offset: int  # offset in the file, in bytes
    nbytes: int


class GgufHeader(NamedTuple):
    """The parts of a file's header that are used."""

    architecture: str
    tensors: Mapping[str, GgufTensor]
    scaling: Mapping[str, int | float | str | None]  # of rotations: type, factor, ..

    @property
    def described_bytes(self) -> int:
        """How many of the file's first bytes hold everything but the weights."""
        rotations = [tensor for name, tensor in self.tensors.items() if name.startswith(_ROTATIONS)]
        first = min(tensor.offset for tensor in self.tensors.values())
        return max([first, *(tensor.offset + tensor.nbytes for tensor in rotations)])


def read_header(path: Path) -> GgufHeader:
    """Read a header. Raises InvalidData, with the file and the reason, if it is inconsistent."""
    with open_bytes(path) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise InvalidData(f"{path} is a pipe, expected a .gguf file")
        if status.st_size < 24:  # a header without values and tensors
            raise InvalidData(f"{path} is no GGUF file: it has {status.st_size} bytes")
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Header(data).read()
        except (InvalidData, UnicodeDecodeError) as error:
            raise InvalidData(f"{path} is no whole GGUF file: {error}") from error


class _Header:
    """Reads a header step by step; raises InvalidData if the file ends or makes no sense."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._size, self._offset = data, len(data), 0
        self._names: set[str] = set()

    def read(self) -> GgufHeader:
        if self._take(4) != b"GGUF":
            raise InvalidData("it does not begin with GGUF")
        (version,) = self._numbers("I")
        if version not in (2, 3):
            raise InvalidData(f"it has version {version}, expected 2 or 3")
        tensor_count, value_count = self._numbers("QQ")
        self._require_room(value_count, 13, "values")  # a key's length, a byte, a type
        self._require_room(tensor_count, 25, "tensors")
        fields = dict(self._pair() for _ in range(value_count))
        if isinstance(parts := fields.get("split.count"), int) and parts > 1:
            raise InvalidData(f"it is one of {parts} files. Join them: llama-gguf-split --merge")
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment not in {1 << n for n in range(21)}:
            raise InvalidData(f"its alignment is {alignment}, expected a power of two")
        entries = dict(self._tensor(alignment) for _ in range(tensor_count))
        architecture = str(fields.get("general.architecture"))
        _check_sizes(architecture, fields, [tensor.shape for tensor in entries.values()])
        begin = -(-self._offset // alignment) * alignment
        tensors = {name: t._replace(offset=begin + t.offset) for name, t in entries.items()}
        end = max(tensor.offset + tensor.nbytes for tensor in tensors.values())
        if end > self._size:
            raise InvalidData(f"its tensors end at byte {end} of {self._size}")
        start = f"{architecture}.rope.scaling."
        scaling = {key.removeprefix(start): v for key, v in fields.items() if key.startswith(start)}
        if (factor := fields.get(f"{architecture}.rope.scale_linear")) is not None:  # older files
            scaling |= {"type": "linear", "factor": factor}
        return GgufHeader(architecture, tensors, scaling)

    def _pair(self) -> tuple[str, int | float | str | None]:
        key, (kind,) = self._name(), self._numbers("I")
        begin = self._offset
        self._skip_value(kind)
        if kind in _WHOLE:
            return key, int.from_bytes(self._data[begin : self._offset], "little")
        if kind == _FLOAT:
            return key, float(struct.unpack("<f", self._data[begin : self._offset])[0])
        if kind == _STRING and key.endswith((".architecture", ".alignment", ".scaling.type")):
            return key, self._data[begin + 8 : self._offset].decode("utf-8")
        return key, None

    def _skip_value(self, kind: int, depth: int = 0) -> None:
        if kind in _NUMBERS:
            self._skip(_NUMBERS[kind])
        elif kind == _STRING:
            self._skip(*self._numbers("Q"))
        elif kind != _ARRAY:
            raise InvalidData(f"it has a value of the unknown type {kind}")
        elif depth == 4:
            raise InvalidData("it has arrays that are nested too deeply")
        else:
            inner, count = self._numbers("IQ")
            if inner in _NUMBERS:
                self._skip(count * _NUMBERS[inner])
                return
            self._require_room(count, 8, "entries of an array")
            if inner == _STRING:
                self._skip_strings(count)
                return
            for _ in range(count):
                self._skip_value(inner, depth + 1)

    def _skip_strings(self, count: int) -> None:
        """Skip `count` strings, ten times as fast as `_skip_value`: a vocabulary has 100,000."""
        data, at, last = self._data, self._offset, self._size - 8
        length_at = struct.Struct("<Q").unpack_from
        while count and at <= last:
            at += 8 + length_at(data, at)[0]
            count -= 1
        if count or at > self._size:
            raise InvalidData("it has a list of strings that does not end in the file")
        self._offset = at

    def _tensor(self, alignment: int) -> tuple[str, GgufTensor]:
        """A tensor's name and description; its offset counts from the first tensor."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name, (dimensions,) = self._name(), self._numbers("I")
        if dimensions > 4:
            raise InvalidData(f"the tensor {name} has {dimensions} dimensions")
        *shape, number, offset = self._numbers(f"{dimensions}QIQ")
        if number not in {int(entry) for entry in GGMLQuantizationType}:
            raise InvalidData(f"the tensor {name} has the unknown type {number}")
        kind = GGMLQuantizationType(number)
        block, size = GGML_QUANT_SIZES[kind]
        if (shape[0] if shape else 1) % block or offset % alignment:
            raise InvalidData(f"the tensor {name} has a row or a place that does not fit its type")
        nbytes = math.prod(shape) // block * size
        return name, GgufTensor(tuple(reversed(shape)), kind.name, offset, nbytes)

    def _name(self) -> str:
        name = self._take(*self._numbers("Q")).decode("utf-8")
        if name in self._names:
            raise InvalidData(f"it names {name!r} twice")
        self._names.add(name)
        return name

    def _numbers(self, layout: str) -> tuple[int, ...]:
        layout = f"<{layout}"
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _take(self, count: int) -> bytes:
        begin = self._offset
        self._skip(count)
        return self._data[begin : self._offset]

    def _skip(self, count: int) -> None:
        self._require_room(count, 1, "bytes")
        self._offset += count

    def _require_room(self, count: int, size: int, noun: str) -> None:
        room = self._size - self._offset
        if count * size > room:
            raise InvalidData(f"it says that {count} {noun} follow, where {room} bytes are left")


def _check_sizes(
    architecture: str, fields: Mapping[str, object], shapes: Sequence[tuple[int, ...]]
) -> None:
    """Check the model's sizes against its tensors: missing weights would be made up."""
    if not shapes:
        raise InvalidData("it holds no tensors")
    layers, width = (fields.get(f"{architecture}.{key}") for key in _SIZES)
    if not isinstance(layers, int) or not isinstance(width, int):
        names = " and ".join(_SIZES)
        raise InvalidData(f"it does not say {names} of its architecture {architecture}")
    lengths = {length for shape in shapes for length in shape}
    if not 1 <= layers <= len(shapes) or width not in lengths:
        raise InvalidData(f"its {len(shapes)} tensors are not {layers} layers of width {width}")
    inner = fields.get(f"{architecture}.feed_forward_length")
    if isinstance(inner, int) and inner > _WIDEST * max(lengths):
        raise InvalidData(f"its tensors are too small for a feed_forward_length of {inner}")


# --- a model of its blocks


_FAMILIES = ("llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")  # as files name them
_ADDED_TO_NORMS = {"gemma2": 1.0, "gemma3": 1.0}
_27B = {"gemma2": 46, "gemma3": 62}
"""Layer counts that identify the largest Gemmas, which scale queries otherwise, as in llama.cpp."""
_IN_PAIRS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
"""Llama's linear layers whose outputs are stored in rotated pairs by head, and their heads."""
_LONGROPE = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}


def refusal(header: GgufHeader, dtype: torch.dtype, device: torch.device | None) -> str | None:
    if header.architecture not in _FAMILIES:
        return f"{header.architecture} is not among {', '.join(_FAMILIES)}"
    if not any(tensor.kind in FORMATS for tensor in header.tensors.values()):
        return "none of its weights are in blocks that are known"
    if device is None or device.type != "cpu":
        return "blocks are for the CPU"
    return why_not_compiled(dtype)


def check_scales(gguf: Path, header: GgufHeader) -> None:
    """Raise InvalidData for a block whose float16 scale is infinite, or no number."""
    data = _map_file(gguf)
    for name, tensor in header.tensors.items():
        if tensor.kind not in FORMATS:
            continue
        layout = FORMATS[tensor.kind]
        blocks = data[tensor.offset : tensor.offset + tensor.nbytes].view(-1, layout.nbytes)
        exponents = blocks[:, [place + 1 for place in layout.scales]]
        if bool(((exponents & 0x7C) == 0x7C).any()):
            raise InvalidData(f"{name} has a scale that is not finite")


def check_biases(header: GgufHeader) -> None:
    """Raise InvalidData for biases that transformers' reader drops: it reads only Qwen 2's."""
    biases = [name for name in header.tensors if name.endswith(".bias")]
    if biases and header.architecture in _FAMILIES and header.architecture != "qwen2":
        raise InvalidData(f"transformers drops its {biases[0]}. Give the model's folder")


def add_scales(gguf: Path, header: GgufHeader, config: Path) -> None:
    """Add the scales of queries and rotations to a config.json: transformers' reader does not.

    Raises InvalidData for unknown kinds of scaling, ModelNotFound if transformers refuses them.
    """
    text = config.read_text()
    fields: dict[str, Any] = json.loads(text)
    if fields.get("num_hidden_layers") == _27B.get(header.architecture, 0):  # files do not hold it
        fields["query_pre_attn_scalar"] = fields["hidden_size"] // fields["num_attention_heads"]
    _scale_rotations(fields, header, _map_file(gguf))
    if fields != json.loads(text):
        config.write_text(json.dumps(fields, indent=2))
        load_description(config.parent, f"{gguf} as GGUF")


def _scale_rotations(fields: dict[str, Any], header: GgufHeader, data: Tensor) -> None:
    scaling = header.scaling
    factor, kind, context = map(scaling.get, ("factor", "type", "original_context_length"))
    names = [name for name in header.tensors if name.startswith(_ROTATIONS)]
    divisors = {name: _numbers(name, header.tensors[name], data) for name in names}
    if kind in (None, "none") and not divisors and not factor:
        return
    rope: dict[str, Any] = fields.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)  # other layers have no scaling
    if "rope_freqs.weight" in divisors:
        rope |= _llama_3_scaling(divisors["rope_freqs.weight"], rope)
    elif kind in ("linear", "yarn") and not divisors and _is_plain(scaling):
        rope |= {"rope_type": kind, "factor": factor}
        if context and kind == "yarn":
            rope |= {"original_max_position_embeddings": context}
    elif divisors.keys() == _LONGROPE.keys() and isinstance(context, int):
        rope |= {key: divisors[name].tolist() for name, key in _LONGROPE.items()}
        size = fields["hidden_size"] // fields["num_attention_heads"]
        rope["partial_rotary_factor"] = 2 * len(rope["short_factor"]) / size
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": context}
        fields["original_max_position_embeddings"] = context  # for Phi's config
    else:
        message = f"it scales rotations in an unknown way ({kind or ', '.join(divisors) or factor})"
        raise InvalidData(f"{message}. Give the model's folder")


def _is_plain(scaling: Mapping[str, Any]) -> bool:
    """Whether a scaling has a usable factor, and no entry that would be ignored."""
    factor, keys = scaling.get("factor"), {"type", "factor", "original_context_length", "finetuned"}
    return isinstance(factor, float) and 0 < factor < math.inf and scaling.keys() <= keys


def _llama_3_scaling(divisors: Tensor, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Recover the scaling from `divisors` [size / 2] of frequencies, made by llama.cpp's converter.

    Raises InvalidData for divisors other than those of Llama 3.1 to 3.3.
    """
    if not len(divisors):
        raise InvalidData("its rope_freqs.weight is empty. Give the model's folder")
    scaling = {"factor": float(divisors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    turns = torch.arange(len(divisors)) / len(divisors)
    waves = 8192 * rope.get("rope_theta", 10000.0) ** -turns / (2 * math.pi)  # in those positions
    smooth = ((waves - 1.0) / 3.0).clamp(0.0, 1.0)
    if not torch.allclose(divisors, 1 / ((1 - smooth) / scaling["factor"] + smooth), rtol=1e-3):
        raise InvalidData("it scales rotations unlike Llama 3. Give the model's folder")
    return {"rope_type": "llama3", **scaling}


def load(
    gguf: Path, header: GgufHeader, config: PreTrainedConfig, dtype: torch.dtype, attn: str | None
) -> PreTrainedModel:
    """The model in `gguf`, in evaluation mode. Raises InvalidData for a file that does not fit."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    data, formats = _map_file(gguf), dict[str, None]()  # formats that are de-quantised
    kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(kinds[header.architecture], config.num_hidden_layers)

    def weight(name: str, shape: tuple[int, ...]) -> Tensor | None:
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        tensor = header.tensors.get(gguf_name or "")
        if gguf_name is None or tensor is None:
            return None
        if tensor.shape != shape:
            raise InvalidData(f"{gguf_name} is {list(tensor.shape)}, expected {list(shape)}")
        blocks = data[tensor.offset : tensor.offset + tensor.nbytes]
        rows = _rows(gguf_name, shape[0], header.architecture, config)
        if tensor.kind in FORMATS and len(shape) == 2:
            return QuantisedWeight(blocks.view(shape[0], -1), FORMATS[tensor.kind], dtype, rows)
        if tensor.kind not in ("F32", "F16", "BF16"):
            formats[tensor.kind] = None
        numbers = _numbers(gguf_name, tensor, data)
        if "norm" in gguf_name:
            numbers = numbers - _ADDED_TO_NORMS.get(header.architecture, 0.0)
        return numbers.to(dtype) if rows is None else numbers.to(dtype)[rows]

    model = assemble(config, dtype, attn, weight)
    if formats:
        message = "%s keeps some weights as %s, which are de-quantised"
        logger.debug(message, gguf.name, ", ".join(formats))
    return model


def _numbers(name: str, tensor: GgufTensor, data: Tensor) -> Tensor:
    """De-quantise a tensor of a file's `data` to float32."""
    from gguf import GGMLQuantizationType, dequantize

    blocks = data[tensor.offset : tensor.offset + tensor.nbytes].numpy()
    try:
        values = dequantize(blocks, GGMLQuantizationType[tensor.kind])
    except NotImplementedError as error:
        raise InvalidData(f"{name} is {tensor.kind}, which nothing here can read") from error
    numbers = torch.from_numpy(np.array(values, dtype=np.float32)).view(tensor.shape)
    if not bool(numbers.isfinite().all()):
        raise InvalidData(f"{name} holds numbers that are not finite")
    return numbers


def _rows(name: str, count: int, architecture: str, config: PreTrainedConfig) -> Tensor | None:
    """The file's row of each output if the converter reordered them, else None."""
    part = name.split(".")[2] if name.startswith("blk.") else ""
    if architecture != "llama" or part not in _IN_PAIRS:
        return None
    heads = getattr(config, _IN_PAIRS[part])
    if count % (2 * heads):
        raise InvalidData(f"{name} has {count} rows, which are not pairs of {heads} heads")
    return torch.arange(count).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def _map_file(gguf: Path) -> Tensor:
    return torch.from_file(str(gguf), shared=False, size=gguf.stat().st_size, dtype=torch.uint8)
