"""How near a plain step comes to what the device's memory allows: a model comes in, figures go out.

Every weight and every kept key and value is read once per token, so no step is faster than those
bytes at the memory's bandwidth. Called by `eval/step_speed.py`; runs on any device.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from selfspec.api.speculator import Speculator
from selfspec.config import SpeculationOptions
from selfspec.errors import UnsupportedModel
from selfspec.model.backbone import Backbone
from selfspec.model.kv_store import Lease
from selfspec.model.parts import text_config
from selfspec.model.rows import Rows

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

EXECUTORS = {"cpu": ("generic", "packed", "fused"), "cuda": ("generic", "cuda-graph")}
"""By kind of device; those that cannot run a model are left out."""

ROWS = (1, 2, 4, 8, 16)
HUGGING_FACE = "hugging-face"
_COPIED = {"cpu": 64 << 20, "cuda": 1 << 30}
"""Bytes copied to measure bandwidth: more than caches hold."""


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
    bandwidth_bytes_per_s: float
    """Of a copy on this device, read and written bytes together."""
    step_bytes: int
    """Weights, keys and values that a step must read."""
    token_s: dict[str, float]
    """Seconds per token of plain greedy decoding, whole loop, by decoder."""
    rows_s: dict[str, dict[int, float]]
    """Seconds of one pass through all layers and the logits, by executor and rows."""

    @property
    def limit_s(self) -> float:
        """Seconds that reading the step's bytes takes."""
        return self.step_bytes / self.bandwidth_bytes_per_s


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
    clock = _Clock(device, repeats, now)
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
        bandwidth_bytes_per_s=bandwidth(device, clock),
        step_bytes=step_bytes(model, context),
        token_s={name: (whole[name] - start[name]) / (new_tokens - 1) for name in decoders},
        rows_s={name: _passes(backbone, ids, clock) for name, backbone in executors.items()},
    )


def _executors(model: PreTrainedModel) -> Iterator[tuple[str, Backbone]]:
    """By name, all that run `model` where it is."""
    for name in EXECUTORS[model.device.type]:
        try:
            yield name, Backbone(model, executor=name)
        except UnsupportedModel as error:
            logger.warning("%s", error)


def step_bytes(model: PreTrainedModel, context: int) -> int:
    """Bytes of all weights but an embedding of its own, of which one row is read, and of the cache.

    Keys and values are taken to be in the model's dtype.
    """
    config = text_config(model)
    embedding, unembedding = (
        next(part.parameters())
        for part in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    weights = sum(weight.nbytes for weight in model.parameters())
    if embedding is not unembedding:
        weights -= embedding.nbytes
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kept = 2 * config.num_hidden_layers * config.num_key_value_heads * size * context
    return int(weights + kept * embedding.element_size())


def bandwidth(device: torch.device, clock: _Clock) -> float:
    """Bytes per second of a large copy, read and written ones together."""
    source = torch.zeros(_COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / clock.seconds({"copy": lambda: target.copy_(source)})["copy"]


class _Clock:
    """Medians of things done in turns."""

    def __init__(self, device: torch.device, repeats: int, now: Callable[[], float]) -> None:
        self._device = device
        self._repeats = repeats
        self._now = now

    def seconds(self, works: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Median seconds of each, after one run that does not count (it captures, and warms up)."""
        found: dict[str, list[float]] = {name: [] for name in works}
        for name in (name for _ in range(self._repeats + 1) for name in works):
            self._wait()
            start = self._now()
            works[name]()
            self._wait()
            found[name].append(self._now() - start)
        return {name: statistics.median(values[1:]) for name, values in found.items()}

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


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


@torch.inference_mode()
def _passes(backbone: Backbone, ids: Tensor, clock: _Clock) -> dict[int, float]:
    """Seconds of a pass of each number of rows behind `ids`, its best token included."""
    lease, context = Lease(backbone.num_layers), ids.shape[1]
    hidden = backbone.embed(ids[0])
    backbone.run(hidden, 0, backbone.num_layers, Rows.of(lease, 0, context, ids.device))

    def run(rows: int) -> list[Any]:
        behind = Rows.of(lease, context, rows, ids.device)
        output = backbone.run(hidden[:rows], 0, backbone.num_layers, behind)
        lease.truncate(context)
        return backbone.logits(output).argmax(-1).tolist()

    works: dict[str, Callable[[], object]] = {str(rows): _for(run, rows) for rows in ROWS}
    return {int(rows): seconds for rows, seconds in clock.seconds(works).items()}


def as_json(found: DeviceSpeed) -> dict[str, Any]:
    """All figures, with the limit."""
    return asdict(found) | {"limit_s": found.limit_s}


def markdown(found: DeviceSpeed) -> Iterator[str]:
    """Lines of a page."""
    yield f"# {found.weights}, {found.dtype}, on {found.device}\n"
    graphs = ""
    if "cuda-graph" in found.token_s:
        graphs = ", CUDA graphs" if found.captured else ", segments uncaptured: no graph was timed"
    yield f"{found.parameters:,} parameters, {found.context} tokens in front{graphs}.\n"
    yield (
        f"A step reads {found.step_bytes / 1e6:,.1f} MB; a copy here moves "
        f"{found.bandwidth_bytes_per_s / 1e9:,.1f} GB/s: at least {1e3 * found.limit_s:.3f} ms.\n"
    )
    yield "| plain decoding | ms per token | times the limit | against Hugging Face |"
    yield "|---|---|---|---|"
    for name, seconds in found.token_s.items():
        against = found.token_s[HUGGING_FACE] / seconds
        yield (f"| {name} | {1e3 * seconds:.3f} | {seconds / found.limit_s:.2f} | {against:.2f}× |")
    yield "\n| one pass, ms, by rows | " + " | ".join(map(str, ROWS)) + " |"
    yield "|---" * (len(ROWS) + 1) + "|"
    for name, seconds_by_rows in found.rows_s.items():
        cells = " | ".join(f"{1e3 * seconds_by_rows[rows]:.3f}" for rows in ROWS)
        yield f"| {name} | {cells} |"
