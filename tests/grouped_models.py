"""Folders of tiny models as GPTQ, AWQ and compressed-tensors write them, number by number."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.models import make_model
from tests.talks import make_tokenizer

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours each four bits of a word hold, the lowest first."""


class Kept(NamedTuple):
    """A linear layer as a method keeps it."""

    quants: Tensor  # [out, in], from 0
    scales: Tensor  # [out, groups]
    zeros: Tensor  # [out, groups]
    group_of: Tensor  # [in]

    def numbers(self) -> Tensor:
        """[out, in], float64: exact."""
        counted = self.quants - self.zeros[:, self.group_of]
        return counted.double() * self.scales.double()[:, self.group_of]


def random_layer(
    out: int, inner: int, bits: int, group: int, symmetric: bool, shuffled: bool, seed: int
) -> Kept:
    """Any numbers, in groups of so many inputs; scales are bfloat16 and float16 at once."""
    draw = torch.Generator().manual_seed(seed)
    most, groups = 1 << bits, -(-inner // group)
    quants = torch.randint(most, (out, inner), generator=draw)
    zeros = torch.full((out, groups), most // 2)
    if not symmetric:
        zeros = torch.randint(most, (out, groups), generator=draw)
    scales = (torch.rand(out, groups, generator=draw) + 0.5) * 4 / most / inner**0.5
    order = torch.randperm(inner, generator=draw) if shuffled else torch.arange(inner)
    return Kept(quants, scales.bfloat16(), zeros, order // group)


def write_folder(
    folder: Path,
    method: str,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    shuffled: bool = False,
    said: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """A Llama kept so; its numbers by name. `said` replaces what its config says."""
    model = make_model(
        "llama", hidden_size=64, intermediate_size=128, head_dim=16, num_hidden_layers=2
    )
    numbers: dict[str, Tensor] = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for seed, (name, weight) in enumerate(numbers.items()):
        if "proj" not in name:
            tensors[name] = weight.detach().bfloat16()
            numbers[name] = tensors[name].double()
            continue
        out, inner = weight.shape
        kept = random_layer(out, inner, bits, group, symmetric, shuffled, seed)
        numbers[name] = kept.numbers()
        layer = name.removesuffix(".weight")
        for part, tensor in PACK[method](kept, bits).items():
            if not (symmetric and part == "weight_zero_point"):
                tensors[f"{layer}.{part}"] = tensor.contiguous()
    model.config.save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = says(method, bits, group, symmetric) | dict(said or {})
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer().save_pretrained(folder)
    return numbers


def words(values: Tensor, bits: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[n, count] -> int32 [n, count * bits / 32], one shift at a time."""
    per_word = 32 // bits
    source = values.numpy().astype(np.uint64)
    missing = -source.shape[1] % per_word
    source = np.pad(source, ((0, 0), (0, missing)))
    found = np.zeros((source.shape[0], source.shape[1] // per_word), np.uint64)
    for place in range(per_word):
        found |= source[:, order[place] :: per_word] << np.uint64(bits * place)
    return torch.from_numpy(found.astype(np.uint32).view(np.int32))


def gptq(kept: Kept, bits: int) -> dict[str, Tensor]:
    return {
        "qweight": words(kept.quants, bits).T,
        "qzeros": words(kept.zeros.T, bits) - ((1 << 32) - 1) // ((1 << bits) - 1),  # of each zero
        "scales": kept.scales.T.to(torch.float16),
        "g_idx": kept.group_of.to(torch.int32),
    }


def awq(kept: Kept, bits: int) -> dict[str, Tensor]:
    return {
        "qweight": words(kept.quants.T, bits, AWQ_ORDER),
        "qzeros": words(kept.zeros.T, bits, AWQ_ORDER),
        "scales": kept.scales.T.to(torch.float16),
    }


def packed(kept: Kept, bits: int) -> dict[str, Tensor]:
    return {
        "weight_packed": words(kept.quants, bits),
        "weight_scale": kept.scales,
        "weight_shape": torch.tensor(kept.quants.shape),
        "weight_zero_point": words(kept.zeros.T, bits).T,
    }


def signed_bytes(kept: Kept, bits: int) -> dict[str, Tensor]:
    return {
        "weight": (kept.quants - 128).to(torch.int8),
        "weight_scale": kept.scales,
        "weight_zero_point": (kept.zeros - 128).to(torch.int8),
    }


PACK: dict[str, Any] = {"gptq": gptq, "awq": awq, "pack-quantized": packed}
PACK["int-quantized"] = signed_bytes


def says(method: str, bits: int, group: int, symmetric: bool) -> dict[str, Any]:
    if method in ("gptq", "awq"):
        own: dict[str, Any] = {"sym": symmetric, "desc_act": False}
        said: dict[str, Any] = {"quant_method": method, "bits": bits, "group_size": group}
        return said | (own if method == "gptq" else {"version": "gemm", "zero_point": True})
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "symmetric": symmetric}
    groups = {"group_0": {"targets": ["Linear"], "weights": {**weights, "group_size": group}}}
    kept = {"quant_method": "compressed-tensors", "format": method, "config_groups": groups}
    return kept | {"quantization_status": "compressed", "ignore": ["lm_head"]}
