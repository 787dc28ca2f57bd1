"""The decoder in segments gives the bits of the whole; unsupported models are refused."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import partial
from operator import setitem
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from torch import Tensor, nn
from torch._dynamo.utils import counters

from eval.families import tiny_model
from selfspec.api.speculator import Speculator, find_heads, wrap
from selfspec.config import SpeculationOptions
from selfspec.decoding.state import HiddenCache, run_alone
from selfspec.errors import InvalidOption, UnsupportedModel
from selfspec.model.backbone import Backbone
from selfspec.model.check import captured_outputs
from selfspec.model.fused import FusedExecutor
from selfspec.model.generic import Decoder
from selfspec.model.kv import KVCache
from selfspec.model.parts import CACHE
from selfspec.model.weights import CompiledLinear, library
from tests import ladder, models
from tests.models import BREADTH, FAMILIES, addressless, make_model, needs_compiler, random_ids
from tests.stand_in import FIRST, SECOND, stand_ins


@pytest.mark.parametrize(
    ("dtype", "attn"), [(torch.float32, "sdpa"), (torch.bfloat16, "eager")], ids=str
)
@pytest.mark.parametrize("family", FAMILIES | BREADTH)
def test_segments_give_the_bits_of_the_whole(family: str, dtype: torch.dtype, attn: str) -> None:
    model = make_model(family, dtype, attn)
    backbone = Backbone(model, executor="generic")
    assert backbone.mixing is None
    ids = random_ids(30)  # longer than the sliding windows
    hidden = HiddenCache(backbone, KVCache(backbone.num_layers), (2, 3))
    with torch.inference_mode(), captured_outputs(backbone.layers) as outputs:
        expected = model(ids).logits.float()
        states = [outputs[layer][0] for layer in backbone.layers]
        hidden.push(backbone.embed(ids[0]))
        for boundary, depth in enumerate((2, 3, 6)):
            assert torch.equal(run_alone(hidden.advance(boundary)), states[depth - 1])
        assert torch.equal(backbone.logits(hidden.rows(3)), expected[0])


PLACES: dict[str, Any] = {f"layers.{layer}": SECOND if layer > 2 else FIRST for layer in range(6)}
PLACES |= {"embed_tokens": FIRST, "rotary_emb": FIRST, "norm": FIRST}
PLACES |= {"layers.2": "cpu", "layers.4": "disk"}

TREE = "ngram+exit:layers=0,threshold=1e-9,guesses=3,max_rows=8"

ON_TWO_DEVICES: list[tuple[str, Callable[[Backbone], Any] | str, dict[str, Any]]] = [
    ("exit:layers=2/4,threshold=0.05", "logit-lens", {"repetition_penalty": 1.5}),
    ("exit:layers=0/3,threshold=1e-9", ladder.deep_heads, {"do_sample": True, "seed": 3}),
    (TREE, ladder.attending_heads, {}),
    (TREE, ladder.medusa_heads, {"controller": "cm-asd"}),
    ("skip", "none", {}),
    ("draft-model", "none", {"do_sample": True, "seed": 3}),
]


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_model_spread_over_two_devices_writes_the_same_texts(attn: str, tmp_path: Path) -> None:
    """One layer is in main memory, one on disk."""
    ids, sizes = random_ids(12), dict[str, Any](tie_word_embeddings=False)
    plain = wrap(
        make_model("llama", attn=attn, **sizes), heads="none", drafter="none", executor="generic"
    )
    second = make_model("llama", num_hidden_layers=2)
    with stand_ins():
        model = make_model("llama", attn=attn, **sizes)
        places = {f"model.{part}": place for part, place in PLACES.items()} | {"lm_head": SECOND}
        dispatch_model(model, places, main_device=FIRST, offload_dir=tmp_path)
        backbone, drafting = Backbone(model), Backbone(second)
        assert (backbone.device, backbone.executor_name) == (FIRST, "generic")
    for drafter, heads, keywords in ON_TWO_DEVICES[2 if attn == "eager" else 0 :]:
        options = SpeculationOptions(never_slower=False).updated({"costs": "row=0,head=0"})
        with stand_ins():
            fitted = heads(backbone) if callable(heads) else find_heads(backbone, heads, "tiny")
            options = options.updated({"drafter": drafter})
            speculator = Speculator(backbone, None, fitted, "tiny", options, drafting)
            answer = speculator.generate(ids, max_new_tokens=8, **keywords)
        common = {name: keywords[name] for name in keywords if name != "controller"}
        assert answer.token_ids == plain.generate(ids, max_new_tokens=8, **common).token_ids
        assert answer.stats.drafted > 0, drafter


def test_wrapping_and_generating_leave_the_model_unchanged() -> None:
    model = make_model("llama").train()
    model.get_submodule("model.layers.1").eval()
    modes = [module.training for module in model.modules()]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config, generation = model.config.to_dict(), model.generation_config.to_dict()
    speculator = wrap(model, heads="logit-lens", drafter="exit:threshold=0.05")
    speculator.generate(random_ids(5), max_new_tokens=5)
    assert [module.training for module in model.modules()] == modes
    assert model.config.to_dict() == config
    assert model.generation_config.to_dict() == generation
    assert all(torch.equal(weights[name], t) for name, t in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_nan_weight_is_named() -> None:
    model: Any = make_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(UnsupportedModel, match="gives NaN at layer 2: a weight is damaged"):
        Backbone(model)


def test_no_executor_runs_dropout() -> None:
    model = make_model("llama", attention_dropout=0.5).train()
    with pytest.raises(InvalidOption, match="dropout makes passes random"):
        Backbone(model, executor="generic")
    Backbone(model.eval(), executor="generic")


@pytest.mark.parametrize(
    ("first", "where"), [(0, "layer 1 by up to [0-9]"), (200, "layer 1 after 246 positions by")]
)
def test_a_decoder_with_extra_steps_near_or_far_is_refused(first: int, where: str) -> None:
    model: Any = make_model("llama")
    original, embed = model.model.forward, model.model.embed_tokens

    def forward(input_ids: Tensor, position_ids: Tensor, **inputs: Any) -> Any:
        inputs["inputs_embeds"] = embed(input_ids) * (2 if int(position_ids.max()) >= first else 1)
        return original(position_ids=position_ids, **inputs)

    model.model.forward = forward
    with pytest.raises(UnsupportedModel, match=where):
        Backbone(model)


def test_rope_with_fixed_frequencies_runs() -> None:
    llama3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 2.0}
    llama3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3["original_max_position_embeddings"] = 128
    same_as_the_model(make_model("llama", rope_parameters=llama3), drafter="ngram")


# --- a decoder's parts under any family's names


def test_positions_are_limited_by_a_table_but_not_by_rotations() -> None:
    families = ("llama", "gpt_neox", "llama4", "gpt2", "opt", "gptj")
    limits = {family: Decoder(make_model(family)).parts.position_limit for family in families}
    assert limits == dict.fromkeys(families) | dict.fromkeys(families[3:], models.MAX_POSITIONS)
    ids = random_ids(models.MAX_POSITIONS - 2)
    assert len(wrap(make_model("gptj")).generate(ids, max_new_tokens=9).token_ids) == 3


graphless: Any = partial(torch.compile, backend="eager")


def gpt2(change: Callable[[Any], None]) -> Any:
    model: Any = make_model("gpt2")
    model.get_output_embeddings = lambda: model.lm_head
    change(model)
    return model


def asking(forward: Any) -> Any:
    return lambda **inputs: (inputs[CACHE].is_initialized, forward(**inputs))[1]  # as PaliGemma


def qwen2(field: str, value: Any) -> Any:
    model = make_model("qwen2")
    setattr(model.config, field, value)
    return model


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: qwen2("layer_types", ["full_attention", "linear_attention"] * 3), "linear_attention"),
    (lambda: qwen2("num_kv_shared_layers", 2), "shares keys and values"),
    (lambda: qwen2("num_hidden_layers", 12), "has 6 layers, expected the 12 of its config"),
    (lambda: make_model("opt", word_embed_proj_dim=8), "a decoder with project_out, a part that"),
    *(
        (partial(tiny_model, family, torch.float32), words)
        for family, words in [
            ("bloom", "has layers that take alibi"),
            ("mamba", "has linear_attention layers, which cannot be"),
            ("ctrl", "has no final norm named norm, final_layer_norm"),
        ]
    ),
]
CHANGES: list[tuple[Callable[[Any], None], str]] = [
    (lambda m: setattr(m, "get_output_embeddings", lambda: None), "has no lm_head, expected"),
    (lambda m: setattr(m.config, "is_encoder_decoder", True), "has an encoder, expected a decoder"),
    (lambda m: setattr(m, "lm_head", nn.Sequential(m.lm_head)), "has Sequential as lm_head"),
    (lambda m: setattr(m, "forward", asking(m.forward)), "asks its KV cache for is_initialized"),
    (lambda m: delattr(m.transformer, "wte"), "has no embedding named embed_tokens"),
    (lambda m: delattr(m.transformer, "h"), "has no list of layers named layers, h"),
    # an argument that may be left out
    (lambda m: setitem(m.transformer.h, 0, nn.TransformerEncoderLayer(16, 1)), "take is_causal"),
    # a layer without a KV cache
    (lambda m: setitem(m.transformer.h, 0, nn.Linear(16, 16)), "that take no keys and values"),
    (
        lambda m: m.transformer.h[0].compile(backend="eager"),
        r"^transformer\.h\.0 of GPT2.* is compiled by",
    ),
    (lambda m: setitem(m.transformer.h, 0, graphless(m)), r"^transformer\.h\.0 of GPT2"),
    (lambda m: setattr(m.transformer, "forward", graphless(m.forward)), "^transformer of"),
    (lambda m: setattr(m, "_tp_size", 2), "GPT2.* split over processes"),
    (lambda m: setattr(m.lm_head.weight, "device_mesh", 2), "split over processes"),
]
REFUSED += [(partial(gpt2, change), words) for change, words in CHANGES]


@pytest.mark.parametrize(("made", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_unsupported_models_are_refused_with_a_reason(made: Callable[[], Any], words: str) -> None:
    model = made()
    with pytest.raises(UnsupportedModel, match=words):
        Backbone(model)


# --- the model's own modules run where another executor cannot


def same_as_the_model(model: Any, **options: Any) -> Backbone:
    """Check that the answer of `model` is Hugging Face's; return its backbone."""
    speculator, ids = wrap(model, **options), random_ids(9)
    tokens = speculator.generate(ids, max_new_tokens=12).token_ids
    expected = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)
    assert tokens == expected[0, 9:].tolist()
    return speculator.backbone


UNEMBED = FusedExecutor.unembed
FAILURES: list[tuple[Any, str, Any, str]] = [
    (CompiledLinear, "of", NotImplementedError("no kernel\nand a tale"), "no kernel"),
    (FusedExecutor, "run", RuntimeError("out of luck"), "out of luck"),
    (ctypes, "CDLL", OSError("cannot map segment"), "no compiled .*cannot map segment"),
    (FusedExecutor, "unembed", lambda *args: (None, UNEMBED(*args)[1] * 1.001), "logits come out"),
]
"""The function that breaks, an error or a replacement, and the words of the reason."""


@needs_compiler
@pytest.mark.parametrize(("owner", "name", "broken", "why"), FAILURES, ids=addressless)
def test_any_failure_of_compiled_code_leaves_the_models_own_modules(
    owner: Any, name: str, broken: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Mock(side_effect=broken) if isinstance(broken, Exception) else broken
    monkeypatch.setattr(owner, name, broken)
    monkeypatch.setattr("selfspec.model.fused.library", library.__wrapped__)  # as in a new process
    backbone = same_as_the_model(make_model("llama"))
    assert backbone.executor_name == "generic"
    assert re.search(why, backbone.refusals["fused"])
    assert "tale" not in backbone.refusals["fused"]
    with pytest.raises(UnsupportedModel, match=f"{why}.*choose generic"):
        Backbone(make_model("llama"), executor="fused")


class Hidden(Tensor):
    """Weights that look like a tensor but cannot be joined, like quantised ones."""

    @classmethod
    def __torch_function__(cls, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if called in (torch.cat, torch.stack, Tensor.__getitem__):
            raise NotImplementedError(f"{called} of hidden weights")
        with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors
            output = called(*args, **kwargs or {})
        itself = Tensor.detach, Tensor.data.__get__  # type: ignore[attr-defined]  # a descriptor
        return output.as_subclass(cls) if called in itself else output


def hide(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Hidden), requires_grad=False)


def test_weights_of_another_type_run_unpacked() -> None:
    model: Any = make_model("llama", tie_word_embeddings=False)
    for layer in model.model.layers:
        hide(layer.mlp.up_proj)
    backbone = same_as_the_model(model, heads="logit-lens", drafter="exit:threshold=0.05")
    assert "weights are of type Hidden" in backbone.refusals["fused"]
    hide(model.lm_head)
    backbone = same_as_the_model(model, drafter="ngram")
    with pytest.raises(UnsupportedModel, match=r"quantised \(Hidden\).*drafter='ngram'"):
        _ = backbone.unembedding
    backbone.lm_head = SimpleNamespace(weight=lambda: None)  # as torch.ao's
    with pytest.raises(UnsupportedModel, match=r"quantised \(types\)"):
        _ = backbone.unembedding


class NeedsVersions(nn.Linear):
    def forward(self, rows: Tensor) -> Tensor:
        if torch.is_inference_mode_enabled():
            raise RuntimeError("Inference tensors do not track version counter.")
        return super().forward(rows)


def test_layers_that_cannot_run_in_inference_mode_run_without_it() -> None:
    model: Any = make_model("llama")
    for layer in model.model.layers:
        layer.mlp.up_proj.__class__ = NeedsVersions
    same_as_the_model(model, heads="logit-lens", drafter="exit:threshold=0.05")
    same_as_the_model(model, drafter="ngram")


def test_an_unembedding_of_another_dtype_with_a_hook_runs() -> None:
    model: Any = make_model("llama", torch.bfloat16, tie_word_embeddings=False)
    model.lm_head.float()
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    backbone = same_as_the_model(model, heads="logit-lens", drafter="exit:threshold=0.05")
    assert "lm_head has hooks" in backbone.refusals["fused"]


@pytest.mark.parametrize("part", ["lm_head", "model.norm"])
def test_heads_are_refused_if_their_inputs_are_offloaded(part: str) -> None:
    model: Any = make_model("llama", tie_word_embeddings=False)
    cpu_offload(model.get_submodule(part), execution_device=torch.device("cpu"))
    what = "lm_head's weight" if part == "lm_head" else "the final norm"
    with pytest.raises(UnsupportedModel, match=f"{what}, which is offloaded"):
        wrap(model, heads="logit-lens")


@pytest.mark.parametrize("how", ["compile", "optimized", "forward"])
def test_a_compiled_model_runs_uncompiled_and_stays_compiled(how: str) -> None:
    inner: Any = make_model("llama", num_hidden_layers=2)
    if how == "compile":
        inner.compile(backend="eager")
    if how == "forward":
        inner.forward = graphless(inner.forward)
    model: Any = graphless(inner) if how == "optimized" else inner
    attributes, graphs, ids = dict(vars(inner)), counters["stats"]["unique_graphs"], random_ids(9)
    speculator = wrap(model, heads="none", drafter="ngram")
    tokens = speculator.generate(ids, max_new_tokens=6).token_ids
    compiled = graphless(lambda: speculator.generate(ids, max_new_tokens=6))
    assert compiled().token_ids == tokens
    assert (vars(inner), counters["stats"]["unique_graphs"]) == (attributes, graphs)
    loop: Any = speculator.hf()
    assert model.generate(ids, custom_generate=loop, max_new_tokens=6)[0, 9:].tolist() == tokens


def test_models_with_extra_tokens_are_refused_by_name() -> None:
    """Prompt tuning puts its own vectors before the text."""
    model: Any = make_model("llama")
    original = model.forward

    def prompted(input_ids: Tensor, position_ids: Any, **cache: Any) -> Any:
        rows = torch.cat([torch.ones(1, 5, 32), model.model.embed_tokens(input_ids)], dim=1)
        return original(inputs_embeds=rows, **cache)

    model.forward = prompted
    with pytest.raises(UnsupportedModel, match=r"runs 12 rows for 7 tokens.*own generate"):
        Backbone(model)


def test_a_model_that_breaks_is_refused_in_one_line() -> None:
    model: Any = make_model("llama")
    model.model.layers[2].forward = lambda *_, **__: (_ for _ in ()).throw(KeyError("a\nb"))
    with pytest.raises(UnsupportedModel, match="CausalLM itself fails: 'a") as caught:
        Backbone(model)
    assert "\n" not in str(caught.value)
    assert not any(layer._forward_hooks for layer in model.model.layers)
