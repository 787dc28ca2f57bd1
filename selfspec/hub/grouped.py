"""Models whose linear layers are quantised to small integers, in groups that share a scale.

Reads the formats of GPTQ, AWQ and compressed-tensors, without their packages. A weight is
scale * (quant - zero), rounded once, to the model's dtype. If scales have that dtype, transformers
de-quantises to the same value; else transformers first rounds to the scales' dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from selfspec.errors import InvalidData, LacksWeights
from selfspec.hub.pretrained import assemble, weight_files
from selfspec.model.weights import FORMATS, ZEROED, QuantisedWeight

GROUP = 32  # inputs of a block; larger groups are several blocks of one scale
_BITS = (4, 8)
_AWQ_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # of eight outputs in a word


class Tensors(dict[str, Any]):
    """The open file of each tensor, by name, for a folder that was checked."""

    def __init__(self, folder: Path) -> None:
        for path in weight_files(folder):
            file = safe_open(path, framework="pt")
            self |= dict.fromkeys(file.keys(), file)  # type: ignore[no-untyped-call]

    def read(
        self,
        name: str,
        shape: tuple[int | None, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Read a tensor of this shape; None stands for any length. Raises InvalidData."""
        if name not in self:
            raise InvalidData(f"it lacks {name}")
        tensor: Tensor = self[name].get_tensor(name)
        if shape is not None:
            pairs = zip(shape, tensor.shape, strict=False)
            if len(shape) != tensor.dim() or any(want not in (None, has) for want, has in pairs):
                expected = ", ".join("any" if length is None else str(length) for length in shape)
                raise InvalidData(f"{name} is {list(tensor.shape)}, expected [{expected}]")
        if dtype is not None and tensor.dtype != dtype:
            raise InvalidData(f"{name} holds {tensor.dtype}, expected {dtype}")
        return tensor


class Grouped(NamedTuple):
    """The weights of one linear layer."""

    quants: Tensor  # [out, in], uint8
    scales: Tensor  # [out, groups]
    zeros: Tensor  # [out, groups], int16: the quant that stands for 0
    group_of: Tensor  # [in]: the group of each input


class Method(NamedTuple):
    """How a folder's weights are quantised."""

    bits: int
    suffix: str  # ends the name of a tensor that every quantised layer has
    read: Callable[[Tensors, str, tuple[int, int]], Grouped]  # a layer's name, [out, in]


def method_of(config: Mapping[str, Any]) -> Method:
    """The method of a config's quantization_config. Raises ValueError if it is not read here."""
    kind = config.get("quant_method")
    methods = {"gptq": _gptq_method, "awq": _awq_method, "compressed-tensors": _compressed_method}
    if not isinstance(kind, str) or kind not in methods:
        raise ValueError(f"{kind!r} is not among {', '.join(methods)}")
    try:
        return methods[kind](config)
    except TypeError as error:  # values of other types than any method writes
        raise ValueError(f"its quantization_config is not one of {kind}") from error


def load(
    folder: Path,
    config: PreTrainedConfig,
    method: Method,
    dtype: torch.dtype,
    attention: str | None,
    *,
    blocks: bool,
) -> PreTrainedModel:
    """The model in `folder`, in evaluation mode, as blocks or numbers. Raises InvalidData."""
    tensors = Tensors(folder)
    if any(name.endswith("act.scales") for name in tensors):  # AWQ's, of StarCoder 2 and GPT-NeoX
        raise LacksWeights("its activations are scaled")
    quantised = []

    def weight(name: str, shape: tuple[int, ...]) -> Tensor | None:
        layer = name.removesuffix(".weight")
        if len(shape) == 2 and f"{layer}{method.suffix}" in tensors:
            grouped = method.read(tensors, layer, (shape[0], shape[1]))
            _check(grouped, layer)
            quantised.append(layer)
            block_weight = _as_blocks(grouped, method.bits, dtype) if blocks else None
            return _as_numbers(grouped, dtype) if block_weight is None else block_weight
        if name not in tensors:
            return None
        tensor = tensors.read(name, shape)
        if not tensor.is_floating_point():
            raise InvalidData(f"{name} holds {tensor.dtype}, expected numbers that are not whole")
        return tensor.to(dtype)

    model = assemble(config, dtype, attention, weight)
    if not quantised:
        raise InvalidData("its config says that weights are quantised, and none of them are")
    return model


def _as_numbers(grouped: Grouped, dtype: torch.dtype) -> Tensor:
    """[out, in] in `dtype`. The products are exact in float32: 11 bits by 8."""
    offsets = grouped.quants.to(torch.int16) - grouped.zeros[:, grouped.group_of]
    return (offsets.float() * grouped.scales.float()[:, grouped.group_of]).to(dtype)


# --- how each method keeps weights


def _known_bits(bits: object) -> int:
    """The number of bits; 0 if it is not supported."""
    return bits if isinstance(bits, int) and bits in _BITS else 0


def _gptq_method(config: Mapping[str, Any]) -> Method:
    bits, form = _known_bits(config.get("bits")), config.get("checkpoint_format", "gptq")
    rules = config.get("dynamic") or {}
    skip = isinstance(rules, dict) and all(rule.startswith("-:") for rule in rules)  # whole layers
    if not bits or form not in ("gptq", "gptq_v2") or not skip:
        raise ValueError(
            f"GPTQ of {config.get('bits')} bits as {form}, or by layer, is not read here"
        )
    return Method(bits, ".qweight", partial(_read_gptq, bits=bits, offset=int(form == "gptq")))


def _read_gptq(
    tensors: Tensors, layer: str, shape: tuple[int, int], *, bits: int, offset: int
) -> Grouped:
    """Words hold neighbouring inputs; `offset`: what version 1 of the format takes off zeros."""
    out, inner = shape
    words = tensors.read(f"{layer}.qweight", (inner * bits // 32, out), torch.int32)
    scales = tensors.read(f"{layer}.scales", (None, out))
    zeros = tensors.read(f"{layer}.qzeros", (len(scales), out * bits // 32), torch.int32)
    if f"{layer}.g_idx" in tensors:  # inputs by importance, or a smaller last group
        groups = tensors.read(f"{layer}.g_idx", (inner,), torch.int32).long()
    else:
        groups = _equal_groups(layer, inner, len(scales))
    ones = ((1 << 32) - 1) // ((1 << bits) - 1)  # added to whole words: a zero may have borrowed
    zero_points = _unpack(zeros + offset * ones, bits).T.to(torch.int16)
    return Grouped(_unpack(words.T, bits), scales.T, zero_points, groups)


def _awq_method(config: Mapping[str, Any]) -> Method:
    bits, version = config.get("bits"), str(config.get("version", "gemm")).lower()
    if _known_bits(bits) != 4 or version != "gemm":
        raise ValueError(f"AWQ of {bits} bits as {version} is not read here")
    return Method(4, ".qweight", _read_awq)


def _read_awq(tensors: Tensors, layer: str, shape: tuple[int, int]) -> Grouped:
    out, inner = shape
    words = tensors.read(f"{layer}.qweight", (inner, out // 8), torch.int32)
    scales = tensors.read(f"{layer}.scales", (None, out))
    zeros = tensors.read(f"{layer}.qzeros", (len(scales), out // 8), torch.int32)
    quants, zero_points = (
        _unpack(part, 4).unflatten(1, (-1, 8))[..., _AWQ_PLACES].flatten(1).T
        for part in (words, zeros)
    )
    groups = _equal_groups(layer, inner, len(scales))
    return Grouped(quants, scales.T, zero_points.to(torch.int16), groups)


def _compressed_method(config: Mapping[str, Any]) -> Method:
    schemes = [_fields(scheme) for scheme in _fields(config.get("config_groups")).values()]
    weights = [_fields(scheme.get("weights")) for scheme in schemes]
    widths = {_known_bits(weight.get("num_bits")) for weight in weights}
    formats = {scheme.get("format") or config.get("format") for scheme in schemes}
    extras = [config.get("kv_cache_scheme"), config.get("transform_config")]
    extras += [
        scheme.get(f"{side}_activations") for scheme in schemes for side in ("input", "output")
    ]
    sparsity = _fields(config.get("sparsity_config") or {}).get("format", "dense")
    if any(extras) or sparsity != "dense":
        raise ValueError("it quantises or transforms more than weights")
    integers = all(weight.get("type", "int") == "int" for weight in weights)
    grouped = all(weight.get("strategy") in ("group", "channel", "tensor") for weight in weights)
    if len(widths) != 1 or 0 in widths or len(formats) != 1 or not (integers and grouped):
        raise ValueError("it has other weights than 4 or 8 bits by group, channel or tensor")
    (bits,), (form,) = widths, formats
    if form == "pack-quantized":
        return Method(bits, ".weight_packed", partial(_read_packed, bits=bits))
    if form in ("int-quantized", "naive-quantized") and bits == 8:
        return Method(8, ".weight_scale", _read_bytes)
    raise ValueError(f"weights of {bits} bits as {form} are not read here")


def _read_packed(tensors: Tensors, layer: str, shape: tuple[int, int], *, bits: int) -> Grouped:
    out, inner = shape
    words = tensors.read(f"{layer}.weight_packed", (out, -(-inner * bits // 32)), torch.int32)
    scales, groups = _scales(tensors, layer, shape)
    zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.int16)
    if (name := f"{layer}.weight_zero_point") in tensors:
        packed = tensors.read(name, (-(-out * bits // 32), scales.shape[1]), torch.int32)
        zeros = _unpack(packed.T, bits)[:, :out].T.to(torch.int16)
    return Grouped(_unpack(words, bits)[:, :inner], scales, zeros, groups)


def _read_bytes(tensors: Tensors, layer: str, shape: tuple[int, int]) -> Grouped:
    signed = tensors.read(f"{layer}.weight", shape, torch.int8)
    scales, groups = _scales(tensors, layer, shape)
    zeros = torch.full(scales.shape, 128, dtype=torch.int16)
    if (name := f"{layer}.weight_zero_point") in tensors:
        zeros = _per_output(tensors, name, shape[0], torch.int8).to(torch.int16) + 128
    return Grouped(signed.view(torch.uint8) ^ 128, scales, zeros, groups)


def _scales(tensors: Tensors, layer: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Scales [out, groups], and the group of each input [in]."""
    out, inner = shape
    scales = _per_output(tensors, f"{layer}.weight_scale", out)
    if (name := f"{layer}.weight_g_idx") in tensors:
        groups = tensors.read(name, (inner,), torch.int32).long()
        if not bool((groups == -1).any()):  # -1: an order that was never set
            return scales, groups
    return scales, _equal_groups(layer, inner, scales.shape[1])


def _per_output(tensors: Tensors, name: str, out: int, dtype: torch.dtype | None = None) -> Tensor:
    """[out, groups]; one value may stand for all outputs."""
    tensor = tensors.read(name, None, dtype)
    if tensor.numel() == 1:
        return tensor.view(1, 1).expand(out, 1)
    if tensor.dim() != 2:
        raise InvalidData(f"{name} is {list(tensor.shape)}, expected [{out}, any]")
    return tensor


def _equal_groups(layer: str, inner: int, count: int) -> Tensor:
    if not count or inner % count:
        raise InvalidData(f"{layer} has {count} groups of {inner} inputs")
    return torch.arange(inner) // (inner // count)


def _unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [n, words] -> uint8 [n, words * 32 / bits], the lowest bits first."""
    parts = words.contiguous().view(torch.uint8)
    return parts if bits == 8 else torch.stack([parts & 15, parts >> 4], -1).flatten(1)


def _fields(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError("its quantization_config is not one of compressed-tensors")
    return value


def _check(grouped: Grouped, layer: str) -> None:
    out, groups = len(grouped.quants), grouped.scales.shape[-1]
    if grouped.scales.shape != (out, groups) or grouped.zeros.shape != (out, groups):
        shapes = [list(part.shape) for part in (grouped.scales, grouped.zeros)]
        raise InvalidData(f"{layer} has scales and zeros of {shapes[0]} and {shapes[1]}")
    if not bool(((grouped.group_of >= 0) & (grouped.group_of < groups)).all()):
        raise InvalidData(f"{layer} has inputs in groups that do not exist")
    if not grouped.scales.is_floating_point() or not bool(grouped.scales.isfinite().all()):
        raise InvalidData(f"{layer} has a scale that is not finite")


# --- blocks


def _as_blocks(grouped: Grouped, bits: int, dtype: torch.dtype) -> QuantisedWeight | None:
    """The same in blocks of GROUP inputs; None if scales differ in a block or are no float16."""
    out, inner = grouped.quants.shape
    if inner % GROUP:
        return None
    by_block = grouped.group_of.view(-1, GROUP)
    halves, groups = grouped.scales.to(torch.float16), by_block[:, 0]
    alike = bool((by_block == groups[:, None]).all())
    if not alike or not torch.equal(halves.float(), grouped.scales.float()):
        return None
    middle = 1 << (bits - 1)
    parts = [halves[:, groups, None].contiguous().view(torch.uint8)]
    kind = FORMATS["Q4_0" if bits == 4 else "Q8_0"]
    if bool((zeros := grouped.zeros - middle).any()):
        if not bool((zeros.to(torch.int8) == zeros).all()):
            return None
        parts.append(zeros[:, groups, None].to(torch.int8).view(torch.uint8))
        kind = ZEROED[bits]
    quants = grouped.quants.reshape(out, -1, GROUP)
    low, high = quants[..., : GROUP // 2], quants[..., GROUP // 2 :]
    parts.append(low | high << 4 if bits == 4 else quants ^ 128)
    return QuantisedWeight(torch.cat(parts, -1).flatten(1), kind, dtype)
