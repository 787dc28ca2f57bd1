"""Checks that a model may be cut into segments, and that other executors compute the same.

The backbone runs them on creation, on a few random blocks; an error names the first bad layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from selfspec.errors import UnsupportedModel, first_line
from selfspec.model.generic import MASKS, Decoder, Executor
from selfspec.model.kv import POSITIONS, KVCache, Page, PageLayout, Rows
from selfspec.model.parts import CACHE, GENERATING, attention_types, text_config, unsupported
from selfspec.model.weights import FilePages

_CHECK_PREFIX, _CHECK_BLOCK = 7, 3  # rows: a first pass on an empty cache, and a block after it

_NAMES_POSITIONS = re.compile(r"window(?!_layers)|position|chunk|context|seq|length|floor")
"""Names of config fields that count positions: sliding_window, original_max_position_embeddings."""

_MOST_NAMED = 8  # positions named by a config that are checked; no config in use has more
_MOST_HELD = 8192  # slots that a check fills: with 8 key heads of 128, 67 MB per layer in float32
_MARKED = 16  # slots of a check's cache whose values are not 0

_ORIGINAL = "_torchdynamo_orig_callable"  # where torch.compile keeps the original function

_AGREEMENT = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest error of another executor, relative to what a layer adds (root mean square). Rounding
gives 1.5e-6 and 0.023 on the default model (float32, bfloat16); a missing factor or norm gives
more than this. Even in float64, the softmax of eager attention is float32."""


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel for features that would pass a short check but fail later."""
    config, name = text_config(model), type(model).__name__
    meshes = (getattr(model, field, None) for field in ("_device_mesh", "_tp_size"))
    split = any(hasattr(one, "device_mesh") or hasattr(one, "ds_id") for one in model.parameters())
    if split or any(mesh is not None for mesh in meshes):
        raise UnsupportedModel(
            f"the weights of {name} are split over processes (tensor parallel, FSDP or ZeRO-3). "
            "Load it whole, with device_map='auto', which may use several devices"
        )
    for path, part in model.named_modules():
        replaced = hasattr(vars(part).get("forward"), _ORIGINAL)
        if path and (replaced or part._compiled_call_impl is not None):
            raise UnsupportedModel(
                f"{path} of {name} is compiled by torch.compile, but parts run separately here. "
                "Load it again and wrap it uncompiled, or compile it as a whole: model.compile()"
            )
    if others := set(attention_types(config)) - MASKS.keys():
        raise unsupported(model, f"has {sorted(others)[0]} layers, which cannot be rewound")
    if getattr(config, "num_kv_shared_layers", 0):
        raise unsupported(model, "shares keys and values between layers")
    for method, words in GENERATING.items():
        home = getattr(model, method).__module__
        if not home.startswith("transformers."):
            lora = " (with LoRA wrap its get_base_model())" if home.startswith("peft.") else ""
            raise unsupported(model, f"{words} by code of {home}, which is not called here{lora}")


def _uncompiled(model: PreTrainedModel) -> Any:
    """The same modules in a new object that runs them without torch.compile."""
    attributes = {**vars(model), "_compiled_call_impl": None}
    if (original := getattr(attributes.get("forward"), _ORIGINAL, None)) is not None:
        attributes["forward"] = original
    uncompiled = object.__new__(type(model))
    object.__setattr__(uncompiled, "__dict__", attributes)
    return uncompiled


@contextmanager
def captured_outputs(
    layers: Iterable[nn.Module], done: Callable[[nn.Module], object] = lambda _: None
) -> Iterator[dict[nn.Module, Tensor]]:
    """Record each layer's output of the newest pass, [B, T, d], and call `done` after the layer."""
    outputs: dict[nn.Module, Tensor] = {}

    def hook(layer: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs[layer] = output[0] if isinstance(output, tuple) else output
        done(layer)

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(hook))
        yield outputs


class Passage(NamedTuple):
    """The outputs of the model's own modules for a block of random ids."""

    start: int  # the first row's position
    planted: int | None  # planted slots before it; None: continues the earlier blocks' cache
    hidden: tuple[Tensor, ...]  # [T, d] each: before the first layer, and after each layer
    logits: Tensor  # [T, V], unfinished output of the unembedding


def check_conformance(decoder: Decoder) -> list[Passage]:
    """Raise UnsupportedModel at the first layer whose bits differ from `model.forward`.

    Random blocks run through both, through ours layer by layer: one at the first positions, one
    after it, a single row, and one for each of `far_places`. Each costs two short passes.
    Memory-mapped weights are released again, layer by layer.
    """
    count, ids = decoder.num_layers, _random_ids(decoder, seed=0)
    cache, kv = DynamicCache(), KVCache(count)
    blocks: list[tuple[Tensor, int, int | None, Any, KVCache]] = [
        (ids[:_CHECK_PREFIX], 0, None, cache, kv),
        (ids[_CHECK_PREFIX:-1], _CHECK_PREFIX, None, cache, kv),
        (ids[-1:], len(ids) - 1, None, cache, kv),  # some hooks depend on the number of rows
    ]
    for start, filled in far_places(decoder):
        caches = PlantedKVCache(count, filled), PlantedKVCache(count, filled)
        blocks.append((ids, start, filled, *caches))
    passages, pages = list[Passage](), FilePages()
    with evaluation(decoder.model):
        model = _uncompiled(decoder.model)
        for block, start, held, cache, kv in blocks:
            rows = Rows.of(kv, start, len(block), ids.device)
            with captured_outputs(decoder.layers, pages.release) as expected:
                keywords = {"input_ids": block[None], "position_ids": rows.positions[None]}
                output = model(**keywords, use_cache=True, **{CACHE: cache})  # as in `generate`
            if (total := output.logits.shape[1]) != len(block):
                reason = f"runs {total} rows for {len(block)} tokens: it adds rows of its own"
                raise unsupported(decoder.model, f"{reason} (prompt tuning does)")
            hidden = [decoder.embed(block)]
            for index, layer in enumerate(decoder.layers[:count]):
                hidden.append(decoder.generic.run(hidden[-1], index, index + 1, rows))
                pages.release(layer)
                place = f"layer {index + 1}" + (f" after {start} positions" if start else "")
                _require_equal(hidden[-1], expected[layer][0], place, decoder)
            logits = decoder.generic.unembed(hidden[-1])[1]
            pages.release(decoder.lm_head)
            _require_equal(decoder.finish(logits), output.logits[0].float(), "the logits", decoder)
            passages.append(Passage(start, held, tuple(hidden), logits))
    return passages


def why_not_by_layers(decoder: Decoder, error: Exception) -> UnsupportedModel:
    """What to raise for a model whose layers, run one by one, raise `error`."""
    name = type(decoder.model).__name__
    if isinstance(error, AttributeError) and isinstance(error.obj, KVCache):
        reason = f"asks its KV cache for {error.name}, which is not known here"
        return unsupported(decoder.model, reason)
    try:
        with torch.no_grad(), evaluation(decoder.model):
            decoder.model(torch.zeros(1, 2, dtype=torch.long, device=decoder.device))
    except Exception as own:  # noqa: BLE001  # any module's own
        problem = f"the forward of {name} itself fails: {first_line(own)}"
        return UnsupportedModel(f"{problem}. Mend that first, for instance by another dtype")
    return unsupported(decoder.model, f"does not run layer by layer: {first_line(error)}")


def check_agreement(decoder: Decoder, other: Executor, passages: Sequence[Passage]) -> None:
    """Raise ValueError unless `other` computes each layer, and the logits, up to rounding.

    Each layer gets the input of the model's own in the conformance check, so errors do not add up.
    """
    bound = _AGREEMENT[decoder.dtype]
    kv = KVCache(decoder.num_layers)
    with torch.inference_mode(), decoder.mode(), evaluation(decoder.model):
        for start, held, hidden, logits in passages:
            if held is not None:
                kv = PlantedKVCache(decoder.num_layers, held)
            rows = Rows.of(kv, start, len(logits), hidden[0].device)
            for layer, (source, expected) in enumerate(pairwise(hidden)):
                output = other.run(source, layer, layer + 1, rows)
                error = _error(output - expected, decoder.layers[layer])
                if not error <= bound * _rms(expected - source) + _rounding(expected):
                    raise ValueError(f"layer {layer + 1} comes out differently at position {start}")
            if not _rms(other.unembed(hidden[-1])[1] - logits) <= bound * _rms(logits):
                raise ValueError("the logits come out differently")


def check_trees(decoder: Decoder, executor: Executor) -> None:
    """Raise UnsupportedModel unless a row gives the same output with siblings as without.

    Some layers take positions from the number of rows. Compares up to rounding, at the positions
    of `check_conformance`.
    """
    if (kind := decoder.config._attn_implementation) not in ("sdpa", "eager"):
        raise UnsupportedModel(f"attention is {kind}, whose masks allow no siblings. Draft chains")
    bound, ids = _AGREEMENT[decoder.dtype], _random_ids(decoder, seed=2)
    parents = [*[-1] * (len(ids) - 1), 0]
    path = [0, len(ids) - 1]
    with torch.inference_mode(), decoder.mode(), evaluation(decoder.model):
        for start, held in [(0, 0), *far_places(decoder)]:
            tree_kv, chain_kv = (PlantedKVCache(decoder.num_layers, held) for _ in range(2))
            tree = Rows.of(tree_kv, start, len(ids), ids.device, parents)
            chain = Rows.of(chain_kv, start, len(path), ids.device)
            hidden = decoder.embed(ids)
            for layer in range(decoder.num_layers):
                output = executor.run(hidden, layer, layer + 1, tree)
                expected = executor.run(hidden[path], layer, layer + 1, chain)
                added = _rms(expected - hidden[path].to(expected.device))
                if not _rms(output[path] - expected) <= bound * added + _rounding(expected):
                    raise UnsupportedModel(
                        f"layer {layer + 1} comes out differently beside siblings, at position "
                        f"{start}: this model runs no trees of drafts. Draft chains"
                    )
                hidden = output


def isolates_sequences(decoder: Decoder, executor: Executor) -> bool:
    """Whether sequences that share a pass give the same bits as in separate passes."""
    ids, layers = _random_ids(decoder, seed=3), decoder.num_layers
    texts = ids[:1], ids[1:4], ids[4:]
    apart, joined = ([KVCache(layers) for _ in texts] for _ in range(2))

    def next_rows(caches: Sequence[KVCache]) -> list[Rows]:
        pairs = zip(caches, texts, strict=True)
        return [Rows.of(kv, kv.length(0), len(text), ids.device) for kv, text in pairs]

    with torch.inference_mode(), decoder.mode(), evaluation(decoder.model):
        parts = [decoder.embed(text) for text in texts]
        for _ in range(2):  # the second time after the cached rows of the first
            pairs = zip(parts, next_rows(apart), strict=True)
            expected = [executor.run(part, 0, layers, rows) for part, rows in pairs]
            output = executor.run(torch.cat(parts), 0, layers, Rows.joined(next_rows(joined)))
            if not torch.equal(output, torch.cat(expected)):
                return False
    return True


def far_places(decoder: Decoder) -> list[tuple[int, int]]:
    """Further places to check: the first position, and the filled slots before it.

    They lie just under the model's limit, and across every position that its config names. Up to
    _MOST_HELD, slots are filled as in a text of that length; beyond, positions are far but no slot
    is filled, so a wider window is not tested.
    """
    rows, limit = _CHECK_PREFIX + _CHECK_BLOCK, decoder.max_positions
    positions = sorted(named_positions(decoder.config.to_dict(), limit))[:_MOST_NAMED]
    starts = {max(0, min(place - _CHECK_PREFIX, limit - rows)) for place in (*positions, limit)}
    return [(start, start if start <= _MOST_HELD else 0) for start in sorted(starts - {0})]


def named_positions(fields: Mapping[str, Any], limit: int) -> set[int]:
    """Numbers below `limit` in a config, nested ones too, whose names refer to positions."""
    positions: set[int] = set()
    for name, value in fields.items():
        if isinstance(value, Mapping):
            positions |= named_positions(value, limit)
        elif isinstance(value, int | float) and _NAMES_POSITIONS.search(name):
            positions |= {int(value)} if 1 < value < limit else set()
    return positions


class PlantedKVCache(KVCache):
    """Pretends to hold `count` positions, with keys 0 and values that reveal which are attended to.

    It keeps nothing that a layer adds: one block runs through it, and memory is needed for one
    layer only. The first values, at the edge of a window, outweigh all others together.
    """

    def __init__(self, num_layers: int, count: int) -> None:
        super().__init__(num_layers)
        self._planted = count
        self._marks = [size * count / _MARKED**2 for size in range(1, min(_MARKED, count) + 1)]
        self.extend(count, 0, num_layers)

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Return what any KV cache returns, but keep nothing."""
        if self._keys[layer] is None:
            self._keys[layer] = self._room(None, keys, 0, self._planted + 1)
            self._values[layer] = buffer = self._room(None, values, 0, self._planted + 1)
            self._mark(buffer)
        contents = super().update(keys, values, layer)
        self._keys[layer] = self._values[layer] = None
        return contents

    def pages(self, count: int, first: int, layout: PageLayout) -> list[Page]:
        """All pages; the planted ones after the first share one empty page."""
        if self._planted and not self.held_pages:
            marked, empty = Page(layout), Page(layout)
            for slot, size in enumerate(self._marks):
                for _, values in layout.slots(marked.numbers, slot):
                    values.fill_(size)
            self.held_pages = [marked, *[empty] * (self._planted // POSITIONS - 1)]
        return super().pages(count, first, layout)

    def move_to(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Move there like any KV cache, and mark the planted positions."""
        super().move_to(keys, values)
        for buffer in values:
            self._mark(buffer)

    def _mark(self, values: Tensor) -> None:
        for slot, size in enumerate(self._marks):
            values[..., slot, :] = size


def _random_ids(
    decoder: Decoder, *, seed: int, count: int = _CHECK_PREFIX + _CHECK_BLOCK
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(decoder.vocab_size, (count,), generator=generator).to(decoder.device)


def _rounding(hidden: Tensor) -> float:
    """The error of a hidden state if a few of its numbers are rounded the other way.

    If a layer adds little to a large state, as to the massive activations of some models, this
    exceeds the error of what it adds: 0.38 of 4.5, in bfloat16, beside a hidden state of 475.
    """
    return torch.finfo(hidden.dtype).eps / 8 * _rms(hidden)


def _rms(values: Tensor) -> float:
    """Root mean square."""
    return float(values.float().square().mean().sqrt())


def _error(values: Tensor, layer: nn.Module) -> float:
    """Root mean square; with experts, of the median row: rounding may switch a row's expert."""
    if any(name.endswith("experts") for name, _ in layer.named_modules()):
        return float(values.float().square().mean(-1).sqrt().median())
    return _rms(values)


@contextmanager
def evaluation(model: PreTrainedModel) -> Iterator[None]:
    """Put the model in evaluation mode while open; then restore each module's mode."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _require_equal(output: Tensor, expected: Tensor, place: str, decoder: Decoder) -> None:
    if not torch.equal(output, expected.to(output.device)):
        if bool(expected.isnan().any()):
            reason = f"a weight is damaged, or numbers are too large for {decoder.dtype}"
            message = f"{type(decoder.model).__name__} gives NaN at {place}: {reason}"
            raise UnsupportedModel(f"{message}. Load it in float32, or download it again")
        difference = (output.float() - expected.to(output.device).float()).abs().max().item()
        raise unsupported(
            decoder.model,
            f"differs from its own forward at {place} by up to {difference:.3g}: its decoder does "
            "more than embed, layers, norm, lm_head",
        )


# --- rows of a pass that change each other, with which no draft is lossless

_BEHIND, _BESIDE = 7, 7  # rows before the watched one, and beside it
_ALONE = 3  # rows that also run in separate passes
_BY_COUNT = "which gives a row other numbers in a pass of its own"
_SPIKE = 100.0  # factor for some numbers of an outlying row: one in 64, or eight in all

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}
"""Change of a row, relative to what a layer adds, that rounding may make: the shapes in which
experts run depend on the neighbours. With 8-bit weights and activations (bitsandbytes) a row
changes by 0.025 in bfloat16 and 0.003 in float32."""


def find_mixing(decoder: Decoder, executor: Executor) -> str | None:
    """How outlying neighbours change an earlier row of the same pass, or None.

    Layer by layer, two passes of one shape differ only in the rows after the watched one. A row
    that ignores them has the same bits, and in a separate pass the same numbers up to rounding.
    """
    rows = _BEHIND + 1 + _BESIDE
    if rows > decoder.max_positions:
        return None
    ids, kv = _random_ids(decoder, seed=2, count=rows), KVCache(decoder.num_layers)
    with torch.inference_mode(), decoder.mode(), evaluation(decoder.model):
        prefix, block = decoder.embed(ids).split([_BEHIND, 1 + _BESIDE])
        prefix_rows = Rows.of(kv, 0, _BEHIND, ids.device)
        block_rows = Rows.of(kv, _BEHIND, 1 + _BESIDE, ids.device)
        for layer in range(decoder.num_layers):
            prefix = executor.run(prefix, layer, layer + 1, prefix_rows)
            singles = [
                executor.run(row, layer, layer + 1, Rows.of(kv, _BEHIND + index, 1, ids.device))
                for index, row in enumerate(block[:_ALONE].split(1))
            ]
            kv.truncate(_BEHIND, layer, layer + 1)
            spiked = executor.run(_spike(block), layer, layer + 1, block_rows)
            kv.truncate(_BEHIND, layer, layer + 1)
            source, block = block, executor.run(block, layer, layer + 1, block_rows)
            added = block - source.to(block.device)
            change = _change(block[:1], spiked[:1], added[:1])
            bound = _AGREEMENT[decoder.dtype] * _rms(added[:_ALONE]) + _rounding(block[:_ALONE])
            error = _error(torch.cat(singles) - block[:_ALONE], decoder.layers[layer])
            if change is not None or not error <= bound:
                return f"layer {layer + 1}, {change or _BY_COUNT}"
        logits, spiked, single = (
            decoder.finish(executor.unembed(hidden)[1])[:1]
            for hidden in (block, _spike(block), block[:1])
        )
        change = _change(logits, spiked, logits)
        if change is None and _rms(single - logits) <= _AGREEMENT[decoder.dtype] * _rms(logits):
            return None
        return f"the logits, {change or _BY_COUNT}"


def _change(row: Tensor, spiked: Tensor, added: Tensor) -> str | None:
    """How much outlying neighbours change a row, [1, ..], relative to `added`, for the user."""
    if torch.equal(row, spiked):
        return None
    change = _rms(spiked - row) / _rms(added)
    small = change <= _ROUNDING.get(row.dtype, 0.0)
    return None if small else f"by {change:.2g} of what it computes"


def _spike(rows: Tensor) -> Tensor:
    """[T, d] with some numbers multiplied, at different places of each row but the first."""
    spiked, step = rows.clone(), max(64, rows.shape[-1] // 8)
    for row in range(1, len(rows)):
        spiked[row, row::step] *= _SPIKE
    return spiked
