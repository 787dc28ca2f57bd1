"""A model whose weights stay as blocks of its GGUF file: mapped, never de-quantised as a whole.

Comes in: a file whose header holds together, and the config that transformers makes of it. Goes
out: a model of transformers whose large weights are QuantisedWeights. Called by `hub.models`; for
other files and devices it de-quantises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from selfspec.errors import InvalidData
from selfspec.hub.assembled import assembled
from selfspec.hub.gguf_header import GgufHeader, GgufTensor
from selfspec.model.weights import DTYPES, FORMATS, QuantisedWeight, library

logger = logging.getLogger(__name__)


class _Family(NamedTuple):
    """How llama.cpp's converter changed a family's tensors."""

    interleaved: tuple[str, ...] = ()
    """Linear layers whose outputs, by head, stand in pairs that are rotated together."""
    added_to_norms: float = 0.0


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(interleaved=("attn_q", "attn_k")),
    "qwen2": _Family(),
    "qwen3": _Family(),
    "phi3": _Family(),
    "gemma2": _Family(added_to_norms=1.0),
    "gemma3": _Family(added_to_norms=1.0),
}
"""By the architecture that files name."""


def why_not(header: GgufHeader, dtype: torch.dtype, device: torch.device | None) -> str | None:
    """The reason why this file is de-quantised, if there is one."""
    if header.architecture not in _FAMILIES:
        return f"{header.architecture} is not among {', '.join(_FAMILIES)}"
    if not any(tensor.kind in FORMATS for tensor in header.tensors.values()):
        return "none of its weights are in blocks that are known"
    if device is None or device.type != "cpu":
        return "blocks are for the CPU"
    if dtype not in DTYPES:
        return f"blocks give float32 and bfloat16, not {dtype}"
    try:
        library(dtype)
    except ValueError as error:
        return str(error)
    return None


def check_scales(gguf: Path, header: GgufHeader) -> None:
    """Raise InvalidData for a block whose float16 scale is infinite, or no number."""
    data = _mapped(gguf)
    for name, tensor in header.tensors.items():
        if tensor.kind not in FORMATS:
            continue
        kept = FORMATS[tensor.kind]
        blocks = data[tensor.first : tensor.first + tensor.nbytes].view(-1, kept.nbytes)
        exponents = blocks[:, [place + 1 for place in kept.scales]]
        if bool(((exponents & 0x7C) == 0x7C).any()):
            raise InvalidData(f"{name} has a scale that is not finite")


def load(
    gguf: Path, header: GgufHeader, config: PreTrainedConfig, dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    """The model in `gguf`, in evaluation mode. Raises InvalidData for a file that does not fit."""
    read = _Reader(_mapped(gguf), header, config, dtype)
    model = assembled(config, dtype, attention, read.weight)
    if read.others:
        logger.debug(
            "%s keeps some weights as %s, which are de-quantised", gguf.name, ", ".join(read.others)
        )
    return model


class _Reader:
    """The weights of one file, under transformers' names."""

    def __init__(
        self, data: Tensor, header: GgufHeader, config: PreTrainedConfig, dtype: torch.dtype
    ) -> None:
        self._data, self._header, self._dtype = data, header, dtype
        self._config: Any = config
        self._family = _FAMILIES[header.architecture]
        self._name = _names(header.architecture, self._config.num_hidden_layers)
        self.others: set[str] = set()
        """Formats that do not stay as they are."""

    def weight(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """That of a parameter of this shape; None if the file has no such. Raises InvalidData."""
        own = self._name(name)
        tensor = self._header.tensors.get(own or "")
        if own is None or tensor is None:
            return None
        if tensor.shape != shape:
            raise InvalidData(f"{own} is {list(tensor.shape)}, expected {list(shape)}")
        data = self._data[tensor.first : tensor.first + tensor.nbytes]
        rows = self._rows(own, shape[0])
        if tensor.kind in FORMATS and len(shape) == 2:
            blocks = data.view(shape[0], -1)
            return QuantisedWeight(blocks, FORMATS[tensor.kind], self._dtype, rows)
        found = self._numbers(own, tensor, data)
        return found if rows is None else found[rows]

    def _numbers(self, name: str, tensor: GgufTensor, data: Tensor) -> Tensor:
        """De-quantised, in the model's dtype."""
        from gguf import GGMLQuantizationType, dequantize

        if tensor.kind not in ("F32", "F16", "BF16"):
            self.others.add(tensor.kind)
        try:
            values = dequantize(data.numpy(), GGMLQuantizationType[tensor.kind])
        except NotImplementedError as error:
            raise InvalidData(f"{name} is {tensor.kind}, which nothing here can read") from error
        found = torch.from_numpy(np.array(values, dtype=np.float32)).view(tensor.shape)
        if not bool(found.isfinite().all()):
            raise InvalidData(f"{name} holds numbers that are not finite")
        if "norm" in name:
            found = found - self._family.added_to_norms
        return found.to(self._dtype)

    def _rows(self, name: str, count: int) -> Tensor | None:
        """Which row of the file each output is, where the converter moved them."""
        part = name.split(".")[2] if name.startswith("blk.") else ""
        if part not in self._family.interleaved:
            return None
        field = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}[part]
        heads = getattr(self._config, field)
        if count % (2 * heads):
            raise InvalidData(f"{name} has {count} rows, which are not pairs of {heads} heads")
        return torch.arange(count).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def _names(architecture: str, layers: int) -> Callable[[str], str | None]:
    """From transformers' name of a parameter to the file's."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(kinds[architecture], layers)
    return lambda name: names.get_name(name, try_suffixes=(".weight", ".bias"))


def _mapped(gguf: Path) -> Tensor:
    """All bytes of a file, read when somebody looks."""
    return torch.from_file(str(gguf), shared=False, size=gguf.stat().st_size, dtype=torch.uint8)
