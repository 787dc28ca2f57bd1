"""How near a plain step comes to what the device's memory allows: a model comes in, figures go out.

The limit and the passes are those of `selfspec.decoding.speed`; here they are measured for every
executor, beside Hugging Face. Called by `eval/step_speed.py`; runs on any device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from selfspec.api.speculator import Speculator
from selfspec.config import SpeculationOptions
from selfspec.decoding.clock import Clock
from selfspec.decoding.speed import ROWS, StepSpeed, step_speed
from selfspec.errors import UnsupportedModel
from selfspec.model.backbone import Backbone

logger = logging.getLogger(__name__)

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "max_position_embeddings": 256,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    "llama-3.2-3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    "llama-2-7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
}
"""Models that are made here, with random weights: right for timing, and for nothing else."""

EXECUTORS = {"cpu": ("generic", "fused"), "cuda": ("generic", "cuda-graph")}
"""By kind of device; those that cannot run a model are left out."""

HUGGING_FACE = "hugging-face"


@dataclass(frozen=True, kw_only=True)
class DeviceSpeed:
    """Seconds are medians over interleaved repeats."""

    weights: str
    """What the weights are: a model's name, or that they are random."""
    device: str
    dtype: str
    parameters: int
    context: int
    """Tokens in front."""
    new_tokens: int
    captured: bool
    """Whether segments ran as CUDA graphs."""
    token_s: dict[str, float]
    """Seconds per token of plain greedy decoding, whole loop, by decoder."""
    steps: dict[str, StepSpeed]
    """Passes by rows, and the memory's limit for what a step reads, by executor."""

    @property
    def own(self) -> StepSpeed:
        """Of the model's own modules: the limit that all decoders are held against."""
        return self.steps["generic"]


def random_model(shape: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A Llama of one of SHAPES, made on `device`; it never ends a text by itself."""
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = LlamaConfig(**SHAPES[shape], **ends)  # type: ignore[arg-type]  # a dict of numbers
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def measure(
    model: PreTrainedModel,
    weights: str,
    *,
    context: int = 256,
    new_tokens: int = 64,
    repeats: int = 5,
    now: Callable[[], float] = time.perf_counter,
) -> DeviceSpeed:
    """Plain greedy decoding by Hugging Face and by all executors in turns; then passes by rows.

    The model's end tokens are removed: all decoders must write as much. A context that leaves no
    room for that is shortened.
    """
    model.generation_config.eos_token_id = None
    executors = dict(_executors(model))
    device = executors["generic"].device
    room = executors["generic"].max_positions - max(new_tokens, *ROWS)
    context = max(1, min(context, room))
    ids = torch.arange(context, device=device)[None] % executors["generic"].vocab_size
    decoders = {HUGGING_FACE: _hugging_face(model, ids)}
    decoders |= {name: _ours(backbone, ids) for name, backbone in executors.items()}
    clock = Clock(device, repeats, now)
    whole = clock.seconds({name: _for(decode, new_tokens) for name, decode in decoders.items()})
    start = clock.seconds({name: _for(decode, 1) for name, decode in decoders.items()})
    return DeviceSpeed(
        weights=weights,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        dtype=str(model.dtype).removeprefix("torch."),
        parameters=sum(weight.numel() for weight in model.parameters()),
        context=context,
        new_tokens=new_tokens,
        captured=any(getattr(made._executor, "captures", False) for made in executors.values()),
        token_s={name: (whole[name] - start[name]) / (new_tokens - 1) for name in decoders},
        steps={
            name: step_speed(backbone, context=context, clock=clock)
            for name, backbone in executors.items()
        },
    )


def _executors(model: PreTrainedModel) -> Iterator[tuple[str, Backbone]]:
    """By name, all that run `model` where it is."""
    for name in EXECUTORS[model.device.type]:
        try:
            yield name, Backbone(model, executor=name)
        except UnsupportedModel as error:
            logger.warning("%s", error)


Decoder = Callable[[int], object]


def _for(decode: Decoder, count: int) -> Callable[[], object]:
    return lambda: decode(count)


def _hugging_face(model: PreTrainedModel, ids: Tensor) -> Decoder:
    generate: Any = model.generate
    mask = torch.ones_like(ids)
    return lambda count: generate(
        ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0
    )


def _ours(backbone: Backbone, ids: Tensor) -> Decoder:
    speculator = Speculator(backbone, None, None, "", SpeculationOptions(drafter="none"))
    return lambda count: speculator.generate(ids, max_new_tokens=count, do_sample=False)


def as_json(found: DeviceSpeed) -> dict[str, Any]:
    """All figures, with the limits."""
    return asdict(found) | {"steps": {name: one.to_dict() for name, one in found.steps.items()}}


def markdown(found: DeviceSpeed) -> Iterator[str]:
    """Lines of a page."""
    yield f"# {found.weights}, {found.dtype}, on {found.device}\n"
    graphs = ""
    if "cuda-graph" in found.token_s:
        graphs = ", CUDA graphs" if found.captured else ", segments uncaptured: no graph was timed"
    yield f"{found.parameters:,} parameters, {found.context} tokens in front{graphs}.\n"
    own = found.own
    yield (
        f"A step reads {own.step_bytes / 1e6:,.1f} MB; reading memory here moves "
        f"{own.memory_bytes_per_s / 1e9:,.1f} GB/s: at least {1e3 * own.limit_s:.3f} ms.\n"
    )
    yield "| plain decoding | ms per token | times the limit | against Hugging Face |"
    yield "|---|---|---|---|"
    for name, seconds in found.token_s.items():
        against = found.token_s[HUGGING_FACE] / seconds
        yield (f"| {name} | {1e3 * seconds:.3f} | {seconds / own.limit_s:.2f} | {against:.2f}× |")
    yield "\n| one pass, ms, by rows | " + " | ".join(map(str, ROWS)) + " |"
    yield "|---" * (len(ROWS) + 1) + "|"
    for name, step in found.steps.items():
        cells = " | ".join(f"{1e3 * seconds:.3f}" for seconds in step.rows_s.values())
        yield f"| {name} | {cells} |"
