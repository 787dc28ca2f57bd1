"""Models that keep the quantised weights of their files, against the de-quantised models.

The files are GGUF, or folders in the formats of GPTQ, AWQ and compressed-tensors.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from tokenizers import decoders
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig
from transformers import modeling_gguf_pytorch_utils as gguf_reader
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import selfspec
from selfspec import files
from selfspec.errors import ModelNotFound
from selfspec.hub import gguf as gguf_files
from selfspec.hub import models as hub
from selfspec.hub import pretrained
from selfspec.hub.gguf import read_header
from selfspec.model import fingerprint, weights
from selfspec.model.backbone import Backbone
from selfspec.model.weights import FORMATS, QuantisedWeight
from tests.bad_input import Change, tensor, tensors
from tests.gguf_models import write_model
from tests.models import BREADTH, make_model, noted
from tests.talks import make_tokenizer


def check_same_texts(blocks: Any, numbers: Any, ids: Tensor) -> list[Backbone]:
    """Check that both models run fused and, in float32, write the same text; their backbones.

    In bfloat16 a kernel may leave quantised weights unrounded: near ties can resolve differently.
    """
    pair = [selfspec.wrap(model, drafter="ngram") for model in (blocks, numbers)]
    for speculator in pair:
        assert speculator.backbone.executor_name == "fused", speculator.backbone.refusals
    if blocks.dtype == torch.float32:
        texts = [speculator.generate(ids, max_new_tokens=20).token_ids for speculator in pair]
        assert texts[0] == texts[1]
    return [speculator.backbone for speculator in pair]


# --- GGUF

Q4_K_M = {"ffn_down": "Q6_K", "attn_v": "Q6_K", "token_embd": "Q6_K"}
"""How llama.cpp mixes formats in one file."""


def both_models(path: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The model with quantised blocks, and the same model de-quantised by transformers."""
    file = {"gguf_file": path.name}
    config = AutoConfig.from_pretrained(path.parent, **file)
    attention = "eager" if config.model_type == "gemma2" else "sdpa"  # gemma2 supports no other
    blocks = gguf_files.load(path, read_header(path), config, dtype, attention)
    numbers: Any = AutoModelForCausalLM.from_pretrained(
        path.parent,
        **file,
        dtype=torch.float32,
        attn_implementation=attention,
        quantization_config=GgufConfig(dequantize=True),
    )
    for weight in numbers.parameters():  # `numbers.to` would also round the rotary frequencies
        weight.data = weight.data.to(dtype)
    return blocks, numbers.eval()


@pytest.mark.parametrize(
    ("architecture", "kinds", "kind", "dtype"),
    [
        ("llama", {}, "Q4_1", torch.float32),
        ("llama", Q4_K_M, "Q4_K", torch.bfloat16),
        ("qwen2", {"ffn": "Q5_0", "attn_k": "F16"}, "Q5_1", torch.float32),
        ("qwen3", {"ffn": "Q4_0", "output": "BF16"}, "Q8_0", torch.bfloat16),
        ("phi3", {"attn": "Q5_K"}, "Q4_K", torch.float32),
        ("gemma2", {}, "Q8_0", torch.float32),
        ("gemma3", Q4_K_M, "Q4_K", torch.bfloat16),
    ],
)
def test_a_quantised_model_equals_the_de_quantised_model(
    tmp_path: Path, architecture: str, kinds: dict[str, str], kind: str, dtype: torch.dtype
) -> None:
    write_model(tmp_path / "it.gguf", architecture, kinds, kind)
    blocks, numbers = both_models(tmp_path / "it.gguf", dtype)
    expected = dict(numbers.named_parameters())
    assert dict(blocks.named_parameters()).keys() == expected.keys()
    for name, weight in blocks.named_parameters():
        assert torch.equal(weight.clone(), expected[name]), name
    quantised = [w for w in blocks.parameters() if isinstance(w, QuantisedWeight)]
    assert len(quantised) >= 8
    assert fingerprint.of(blocks) == fingerprint.of(numbers)
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        assert torch.equal(blocks(ids).logits, numbers(ids).logits)
    packed, full = check_same_texts(blocks, numbers, ids)
    assert packed.weight_bytes < 0.7 * full.weight_bytes


LLAMA_3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"short_factor": [2.0] * 24, "long_factor": [18.0] * 24, "partial_rotary_factor": 0.75}


def rotations(**rope: Any) -> Any:
    sizes: Any = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 128}
    return LlamaRotaryEmbedding(
        LlamaConfig(rope_parameters={"rope_theta": 10000.0, **rope}, **sizes)
    )


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 8.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "llama3", **LLAMA_3, "original_max_position_embeddings": 8192},
        {"rope_type": "longrope", **LONG, "original_max_position_embeddings": 32},
    ],
)
def test_rotary_scaling_follows_the_file(
    tmp_path: Path, rope: dict[str, Any], blocks: bool
) -> None:
    """Llama 3 and Phi files store the scaling as tensors, other files as metadata values."""
    scaled, names = rotations(**rope), {"rope_type": "type"}
    names["original_max_position_embeddings"] = "original_context_length"
    options: Any = {"scaling": {names.get(name, name): value for name, value in rope.items()}}
    if rope["rope_type"] == "llama3":
        frequencies = rotations(rope_type="default").inv_freq
        options = {"divisors": {"rope_freqs": (frequencies / scaled.inv_freq).numpy()}}
    if rope["rope_type"] == "longrope":
        pytest.importorskip("transformers", "5.18")  # older versions split Phi's text into letters
        short, long = (np.array(rope[f"{kind}_factor"], np.float32) for kind in ("short", "long"))
        options = {"scaling": {"original_context_length": 32}, "architecture": "phi3"}
        options["divisors"] = {"rope_factors_long": long, "rope_factors_short": short}
    write_model(tmp_path / "it.gguf", **options)
    parts: Any = hub.load_model(tmp_path / "it.gguf", dtype="float32", device="cpu", blocks=blocks)
    rotary = parts[0].model.rotary_emb
    assert torch.allclose(rotary.inv_freq, scaled.inv_freq, rtol=1e-4)
    assert rotary.attention_scaling == pytest.approx(scaled.attention_scaling)
    assert rotary.config.rope_parameters.get("long_factor") == rope.get("long_factor")


@pytest.mark.parametrize("blocks", [True, False])
def test_the_largest_gemma_scales_queries_by_its_width(
    tmp_path: Path, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for layers, scalar in ((46, 256), (2, 256 // 4)):
        monkeypatch.setitem(gguf_files._27B, "gemma2", layers)
        write_model(path := tmp_path / f"{layers}.gguf", "gemma2", tied=layers == 2)
        parts: Any = hub.load_model(path, dtype="float32", device="cpu", blocks=blocks)
        assert parts[0].config.query_pre_attn_scalar == scalar


@pytest.mark.parametrize(
    "said",
    [
        {"scaling": {"type": "longrope"}},
        {"scaling": {"factor": 4.0}},
        {"scaling": {"type": "linear", "factor": -1.0}},
        {"scaling": {"type": "yarn", "factor": 4.0, "yarn_beta_fast": 16.0}},
        {"scaling": {"type": "linear", "factor": 4.0}, "architecture": "phi3"},
        {"divisors": {"rope_freqs": np.ones(0, np.float32)}},
        {"divisors": {"rope_freqs": np.full(32, 2.0, np.float32)}},
        {
            "scaling": {"original_context_length": 32},
            "divisors": {"rope_factors_short": np.ones(24, np.float32)},
        },
    ],
)
def test_unsupported_rotary_scaling_is_refused(tmp_path: Path, said: Any) -> None:
    if "architecture" in said:
        pytest.importorskip("transformers", "5.18")  # older versions split Phi's text into letters
    write_model(tmp_path / "it.gguf", **said)
    with pytest.raises(ModelNotFound, match=r"it\.gguf.*(scales rot|field must be|is empty)"):
        hub.load_model(tmp_path / "it.gguf", device="cpu", blocks=True)


def test_a_file_loaded_before_is_not_read_in_full_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(path := tmp_path / "it.gguf")
    checks = noted(monkeypatch, gguf_files, "check_scales", lambda *_: None)
    sizes = noted(monkeypatch, files, "sha256", lambda _, __, size: size)
    for mtime in (0, 0, 1):
        os.utime(path, (mtime, mtime))
        hub.load_model(path, device="cpu", blocks=True)
    assert len(checks) == 2
    assert max(sizes) == read_header(path).described_bytes < path.stat().st_size / 2
    parses = noted(monkeypatch, gguf_reader, "load_gguf_checkpoint", lambda *_, **__: None)
    pretrained.describe_gguf(path, tmp_path / "described")
    assert len(parses) <= 1  # 0 where transformers' newer reader knows the architecture


def test_a_panic_of_the_tokenizer_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "it.gguf")
    panic = type("PanicException", (BaseException,), {})("range end index 2")  # from Rust
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", MagicMock(side_effect=panic))
    with pytest.raises(ModelNotFound, match=r"cannot read .*: range end index 2"):
        hub.load_model(tmp_path / "it.gguf", device="cpu", blocks=True)


@pytest.mark.parametrize("blocks", [True, False])
def test_a_tokenizer_that_loses_blanks_or_words_is_refused(
    tmp_path: Path, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizers of Phi and Gemma do so in transformers 5.17."""
    write_model(tmp_path / "it.gguf", "phi3")
    letters = {
        "return_value.decode.return_value": "one two",
        "return_value.return_value": {"input_ids": [*range(7)]},
    }
    letters |= {"return_value.get_vocab.return_value": {"one": 1}}
    for attributes in ({"return_value.decode.return_value": "onetwo"}, letters):
        monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", MagicMock(**attributes))
        with pytest.raises(ModelNotFound, match="reads 'one two' as"):
            hub.load_model(tmp_path / "it.gguf", device="cpu", blocks=blocks)


def test_wrong_decoder_and_end_of_transformers_5_17_are_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prepends SentencePiece's decoder (grammars then allowed other text) and a wrong end."""
    write_model(tmp_path / "it.gguf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="it.gguf")
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.ByteLevel()]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.init_kwargs["eos_token_id"], tokenizer.eos_token = tokenizer.eos_token_id, "a"
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: tokenizer)
    pretrained.describe_gguf(tmp_path / "it.gguf", tmp_path / "made")
    fields = json.loads((tmp_path / "made" / "tokenizer.json").read_text())
    assert fields["decoder"]["type"] == "ByteLevel"
    assert tokenizer.eos_token_id == tokenizer.init_kwargs["eos_token_id"]


def test_embedding_and_unembedding_may_be_tied(tmp_path: Path) -> None:
    write_model(tmp_path / "it.gguf", tied=True)
    blocks, numbers = both_models(tmp_path / "it.gguf")
    assert blocks.lm_head.weight is blocks.model.embed_tokens.weight
    blocks.save_pretrained(tmp_path / "saved")  # de-quantised
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        for other in (numbers, saved):
            assert torch.equal(blocks(ids).logits, other(ids).logits)


def test_other_formats_are_de_quantised_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_files, "FORMATS", {"Q4_1": FORMATS["Q4_1"]})
    write_model(tmp_path / "it.gguf", kinds={"ffn": "Q8_0"})
    with caplog.at_level(logging.DEBUG, "selfspec"):
        blocks, numbers = both_models(tmp_path / "it.gguf")
    assert "keeps some weights as Q8_0, which are de-quantised" in caplog.text
    weight = blocks.model.layers[0].mlp.up_proj.weight
    assert not isinstance(weight, QuantisedWeight)
    assert torch.equal(weight, numbers.model.layers[0].mlp.up_proj.weight)


def test_a_default_dtype_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "it.gguf")
    for pairs, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(weights, "has_bfloat16_dots", lambda pairs=pairs: pairs)
        assert hub.load_model(tmp_path / "it.gguf", device="cpu", blocks=True)[0].dtype == dtype
    assert hub.load_model(tmp_path / "it.gguf", device="cpu")[0].dtype == torch.bfloat16


def test_other_executors_de_quantise(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "it.gguf")
    pretrained.convert_gguf(tmp_path / "it.gguf", tmp_path / "made", "float32")
    assert "Converting" not in capfd.readouterr().err  # a progress bar of transformers
    loaded = selfspec.load(tmp_path / "it.gguf", dtype="float32", executor="generic")
    assert not any(isinstance(w, QuantisedWeight) for w in loaded.model.parameters())
    blocks, _ = both_models(tmp_path / "it.gguf")
    assert Backbone(blocks, executor="generic").executor_name == "generic"
    assert blocks.lm_head.weight.plain is not None


@pytest.mark.slow
def test_the_default_model_stays_as_it_is() -> None:
    """All tensors of its file, its end token and its chat template."""
    loads = [
        hub.load_model(None, dtype="float32", device="cpu", blocks=keep) for keep in (True, False)
    ]
    blocks, numbers = (dict(model.named_parameters()) for model, *_ in loads)
    for name, weight in blocks.items():
        assert torch.equal(weight.clone(), numbers[name]), name
    assert sum(isinstance(weight, QuantisedWeight) for weight in blocks.values()) == 211
    for model, tokenizer, origin in loads:
        assert origin.is_default
        config = model.generation_config
        assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == (2, 2, 1)
        assert tokenizer.eos_token_id == 2
        assert tokenizer.decode([2]) == "<|im_end|>"
        assert (model.config.num_hidden_layers, model.config.hidden_size) == (30, 576)
        messages = [{"role": "user", "content": "hi"}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert str(text).endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


# --- folders in the formats of GPTQ, AWQ and compressed-tensors

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours each 4-bit field of a word holds, lowest field first."""


class Kept(NamedTuple):
    """A quantised linear layer."""

    quants: Tensor  # [out, in], from 0
    scales: Tensor  # [out, groups]
    zeros: Tensor  # [out, groups]
    group_of: Tensor  # [in]

    def numbers(self) -> Tensor:
        """The de-quantised weights, [out, in], exact in float64."""
        offsets = self.quants - self.zeros[:, self.group_of]
        return offsets.double() * self.scales.double()[:, self.group_of]


def random_layer(
    out: int, inner: int, bits: int, group: int, symmetric: bool, shuffled: bool, seed: int
) -> Kept:
    """A random layer in groups of `group` inputs (0: one group); scales exact in 16-bit floats."""
    generator = torch.Generator().manual_seed(seed)
    levels, groups = 1 << bits, -(-inner // (group or inner))
    quants = torch.randint(levels, (out, inner), generator=generator)
    zeros = torch.full((out, groups), levels // 2)
    if not symmetric:
        zeros = torch.randint(levels, (out, groups), generator=generator)
    scales = (torch.rand(out, groups, generator=generator) + 0.5) * 4 / levels / inner**0.5
    order = torch.randperm(inner, generator=generator) if shuffled else torch.arange(inner)
    if not group:
        scales[:], zeros[:] = scales[0].clone(), zeros[0].clone()
    return Kept(quants, scales.bfloat16(), zeros, order // (group or inner))


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
    """Write a Llama quantised by `method`; its weights by name. `said` overrides its config."""
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
        for part, values in PACK[method](kept, bits).items():
            if not group and part in ("weight_scale", "weight_zero_point"):
                values = values[0]
            skipped = {"weight_zero_point": symmetric, "weight_g_idx": not shuffled}
            if not skipped.get(part):
                tensors[f"{layer}.{part}"] = values.contiguous()
    model.config.save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = quantisation(method, bits, group, symmetric) | dict(said or {})
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer().save_pretrained(folder)
    return numbers


def pack_words(values: Tensor, bits: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack values of `bits` bits: [n, count] -> int32 [n, count * bits / 32]."""
    per_word = 32 // bits
    padding = -values.shape[1] % per_word
    source = np.pad(values.numpy().astype(np.uint64), ((0, 0), (0, padding)))
    fields = source.reshape(len(source), -1, per_word)[..., list(order[:per_word])]
    words = (fields << np.arange(0, 32, bits, dtype=np.uint64)).sum(-1)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def gptq(kept: Kept, bits: int) -> dict[str, Tensor]:
    return {
        "qweight": pack_words(kept.quants, bits).T,
        "qzeros": pack_words(kept.zeros.T, bits) - ((1 << 32) - 1) // ((1 << bits) - 1),  # zero - 1
        "scales": kept.scales.T.to(torch.float16),
        "g_idx": kept.group_of.to(torch.int32),
    }


def awq(kept: Kept, bits: int) -> dict[str, Tensor]:
    return {
        "qweight": pack_words(kept.quants.T, bits, AWQ_ORDER),
        "qzeros": pack_words(kept.zeros.T, bits, AWQ_ORDER),
        "scales": kept.scales.T.to(torch.float16),
    }


def packed(kept: Kept, bits: int) -> dict[str, Tensor]:
    return {
        "weight_packed": pack_words(kept.quants, bits),
        "weight_scale": kept.scales,
        "weight_shape": torch.tensor(kept.quants.shape),
        "weight_zero_point": pack_words(kept.zeros.T, bits).T,
        "weight_g_idx": kept.group_of.to(torch.int32),
    }


def signed_bytes(kept: Kept, bits: int) -> dict[str, Tensor]:
    return {
        "weight": (kept.quants - 128).to(torch.int8),
        "weight_scale": kept.scales,
        "weight_zero_point": (kept.zeros - 128).to(torch.int8),
    }


PACK: dict[str, Callable[[Kept, int], dict[str, Tensor]]] = {
    **{"gptq": gptq, "awq": awq, "pack-quantized": packed, "int-quantized": signed_bytes}
}


def quantisation(method: str, bits: int, group: int, symmetric: bool) -> dict[str, Any]:
    if method in ("gptq", "awq"):
        flags: dict[str, Any] = {"sym": symmetric, "desc_act": False}
        config: dict[str, Any] = {"quant_method": method, "bits": bits, "group_size": group}
        return config | (flags if method == "gptq" else {"version": "gemm", "zero_point": True})
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "tensor"}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    fields = {"quant_method": "compressed-tensors", "format": method, "config_groups": groups}
    return fields | {"quantization_status": "compressed", "ignore": ["lm_head"]}


UP = "model.layers.1.mlp.up_proj"

WAYS: list[tuple[str, dict[str, Any], bool]] = [
    ("gptq", {}, True),
    ("gptq", {"bits": 8, "group": 64, "said": {"dynamic": {"-:lm_head": {}}}}, True),
    ("gptq", {"symmetric": False}, True),
    ("gptq", {"shuffled": True}, False),
    ("gptq", {"symmetric": False, "group": 48}, False),
    ("awq", {"symmetric": False}, True),
    ("pack-quantized", {}, True),
    ("pack-quantized", {"symmetric": False, "group": 64}, True),
    ("pack-quantized", {"bits": 8, "group": 16}, False),
    ("pack-quantized", {"shuffled": True}, False),
    ("int-quantized", {"bits": 8, "group": 64}, True),
    ("int-quantized", {"bits": 8, "symmetric": False}, True),
    ("int-quantized", {"bits": 8, "symmetric": False, "group": 0}, True),
]


@pytest.mark.parametrize(
    ("method", "options", "stay", "dtype"),
    [(*way, torch.float32) for way in WAYS] + [(*way, torch.bfloat16) for way in WAYS[2:5]],
)
def test_a_folder_loads_as_its_de_quantised_weights(
    tmp_path: Path, method: str, options: dict[str, Any], stay: bool, dtype: torch.dtype
) -> None:
    expected = write_folder(tmp_path, method, **options)
    quantised, numbers = (
        hub.load_model(tmp_path, dtype=dtype, device="cpu", blocks=blocks)[0]
        for blocks in (True, False)
    )
    for model, blocks in ((quantised, stay), (numbers, False)):
        for name, weight in model.named_parameters():
            assert torch.equal(weight.clone(), expected[name].to(dtype)), name
            assert isinstance(weight, QuantisedWeight) == (blocks and "proj" in name), name
    assert quantised.generation_config.eos_token_id == [5, 7]
    check_same_texts(quantised, numbers, torch.arange(30)[None])


@pytest.mark.parametrize(
    ("method", "options"),
    [way[:2] for way in WAYS if way[0].endswith("quantized") and "shuffled" not in way[1]],
)
def test_transformers_de_quantises_to_the_same_weights(
    tmp_path: Path, method: str, options: dict[str, Any]
) -> None:
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    if method == "int-quantized":
        pytest.importorskip("transformers", "5.24")  # 5.22 fails here
    from transformers import CompressedTensorsConfig

    write_folder(tmp_path, method, **options)
    reference, _ = pretrained.load(
        str(tmp_path),
        dtype=torch.bfloat16,
        quantization_config=CompressedTensorsConfig(dequantize=True),
    )
    model = hub.load_model(tmp_path, dtype="bfloat16", device="cpu", blocks=True)[0]
    expected = dict(reference.named_parameters())
    for name, weight in model.named_parameters():
        assert torch.equal(weight.clone(), expected[name]), name


def loaded(folder: Path, dtype: str) -> dict[str, Tensor]:
    model = hub.load_model(folder, dtype=dtype, device="cpu", blocks=True)[0]
    return {name: weight.clone() for name, weight in model.named_parameters()}


def test_version_2_of_gptq_takes_nothing_off_its_zeros(tmp_path: Path) -> None:
    expected = write_folder(tmp_path, "gptq", said={"checkpoint_format": "gptq_v2"})
    weight = loaded(tmp_path, "float32")[f"{UP}.weight"]
    assert bool((weight > expected[f"{UP}.weight"]).all())  # each zero is read as one less


def test_an_unset_group_index_is_ignored(tmp_path: Path) -> None:
    expected, unset = write_folder(tmp_path, "pack-quantized"), torch.full((64,), -1).int()
    tensors(lambda tensors: tensors.update({f"{UP}.weight_g_idx": unset}))(tmp_path)
    assert torch.equal(loaded(tmp_path, "float64")[f"{UP}.weight"], expected[f"{UP}.weight"])


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_dtypes_get_de_quantised_weights(tmp_path: Path, dtype: str) -> None:
    expected = write_folder(tmp_path, "awq")
    for name, weight in loaded(tmp_path, dtype).items():
        assert torch.equal(weight, expected[name].to(getattr(torch, dtype))), name


@pytest.mark.skipif("gemma4" not in BREADTH, reason="needs a newer transformers")
def test_buffers_that_a_model_saves_are_read() -> None:
    config, half = make_model("gemma4").config, lambda _, shape: torch.full(shape, 0.5)
    model: Any = pretrained.assemble(config, torch.float32, "sdpa", half)
    assert model.model.layers[0].layer_scalar.item() == 0.5


def test_several_files_are_one_model(tmp_path: Path) -> None:
    expected, path = write_folder(tmp_path, "gptq"), tmp_path / "model.safetensors"
    save_torch_state_dict(load_file(path), tmp_path, max_shard_size="20KB")
    assert not path.exists()
    assert len([*tmp_path.glob("model-*")]) > 1
    for name, weight in loaded(tmp_path, "float32").items():
        assert torch.equal(weight, expected[name].float()), name


def change(name: str, to: Callable[[Tensor], Tensor]) -> Change:
    return tensor(f"{UP}.{name}", to)


def written(folder: Path, method: str, **said: Any) -> Path:
    """Write a model quantised by `method`; the path of its GGUF file or its folder."""
    if method == "GGUF":
        write_model(folder / "it.gguf", **said)
        return folder / "it.gguf"
    write_folder(folder, method, bits=8 if method == "int-quantized" else 4, said=said)
    return folder


def put(name: str, place: int, value: bytes) -> Change:
    """A change of some bytes of a tensor of a GGUF file."""

    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(read_header(path).tensors[name].offset + place)
            file.write(value)

    return damage


def renamed(old: bytes, new: bytes) -> Change:
    return lambda path: path.write_bytes(path.read_bytes().replace(old, new))


FFN, NORM = "blk.1.ffn_up.weight", "blk.0.attn_norm.weight"
KEYS = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("kind", "damage", "said"),
    [
        ("GGUF", put(FFN, 20 * 7, b"\0\x7c"), f"{FFN} has a scale that is not finite"),
        ("GGUF", put(NORM, 0, b"\0\0\xc0\x7f"), f"{NORM} holds numbers that are not finite"),
        ("GGUF", renamed(b"blk.1.attn_k.", b"blk.1.attn_x."), f"lacks 1 weights, {KEYS} among"),
        ("GGUF", renamed(b"attn_k.weight", b"attn_xxx.bias"), "drops its blk.0.attn_xxx.bias."),
        ("gptq", change("qweight", lambda t: t[:-1]), "qweight is .7, 128., expected .8, 128."),
        ("gptq", change("qweight", lambda t: t.float()), "holds torch.float32"),
        ("gptq", change("qzeros", lambda t: t[:1]), "qzeros is .1, 16., expected .2, 16."),
        ("gptq", change("g_idx", lambda t: t + 1), "inputs in groups that do not exist"),
        ("gptq", change("scales", lambda t: t / 0), "has a scale that is not finite"),
        ("awq", change("scales", lambda t: t[:0]), "expected .0, 16."),
        ("pack-quantized", change("weight_scale", lambda t: t[:5]), "has scales and zeros of"),
        ("pack-quantized", change("weight_scale", lambda t: t[:, 0]), "expected .128, any"),
        ("pack-quantized", change("weight_scale", lambda t: t.int()), "scale that is not finite"),
        ("int-quantized", change("weight", lambda t: t.float()), "holds torch.float32"),
    ],
)
def test_damage_is_named(
    tmp_path: Path, kind: str, damage: Callable[[Path], object], said: str
) -> None:
    path = written(tmp_path, kind)
    damage(path)
    for blocks in (True, *([False] if "lacks" in said or "drops" in said else [])):
        with pytest.raises(ModelNotFound, match=said):
            hub.load_model(path, dtype="float32", device="cpu", blocks=blocks)


@pytest.mark.parametrize(
    ("method", "says", "why"),
    [
        ("GGUF", {"architecture": "starcoder2"}, "starcoder2 is not among"),
        ("GGUF", {"kind": "F16"}, "none of its weights are in blocks that are known"),
        ("gptq", {"bits": 3}, "GPTQ of 3 bits"),
        ("gptq", {"bits": 4.0}, "GPTQ of 4.0 bits"),
        ("gptq", {"dynamic": {"x": {}}}, "or by layer"),
        ("awq", {"version": "gemv"}, "AWQ of 4 bits as gemv"),
        ("gptq", {"quant_method": "bitsandbytes"}, "'bitsandbytes' is not among"),
        ("gptq", {"quant_method": ["gptq"]}, "is not among"),
        ("pack-quantized", {"format": ["pack-quantized"]}, "is not one of compressed-tensors"),
        ("pack-quantized", {"kv_cache_scheme": {"num_bits": 8}}, "more than weights"),
        ("pack-quantized", {"config_groups": [1]}, "is not one of compressed-tensors"),
        ("pack-quantized", {"format": "float-quantized"}, "as float-quantized"),
        ("pack-quantized", {"config_groups": {"a": {"weights": {"num_bits": 2}}}}, "other weights"),
        ("gptq", "lost", "it lacks 1 weights, model.layers.1.mlp.up_proj.weight among them"),
        ("awq", "h.0.mlp.act.scales", "its activations are scaled"),
    ],
)
def test_other_formats_are_left_to_transformers(
    tmp_path: Path,
    method: str,
    says: dict[str, Any] | str,
    why: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pretrained, "load", lambda *_, **__: (torch.nn.Linear(1, 1), None))
    convert = lambda _gguf, out, dtype: (out / "config.json").write_text("{}")  # noqa: E731
    monkeypatch.setattr(pretrained, "convert_gguf", convert)
    path = written(tmp_path, method, **(says if isinstance(says, dict) else {}))
    if isinstance(says, str):  # the new name of a tensor
        tensors(lambda tensors: tensors.update({says: tensors.pop(f"{UP}.qweight")}))(path)
    with caplog.at_level(logging.INFO):
        hub.load_model(path, device="cpu", blocks=True)
    assert ("is de-quantised" if method == "GGUF" else "is left to transformers") in caplog.text
    assert why in caplog.text
