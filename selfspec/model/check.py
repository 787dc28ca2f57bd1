"""Whether a model may be cut into segments, and whether other executors compute what it does.

The backbone asks when it is made, with a few random blocks; an error says where they part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from selfspec.errors import UnsupportedModel
from selfspec.model.generic import MASKS, Decoder, Executor
from selfspec.model.kv import POSITIONS, KVCache, Page, PageLayout, Rows
from selfspec.model.parts import CACHE, attention_types, text_config, unsupported
from selfspec.model.weights import FilePages

_CHECK_PREFIX, _CHECK_BLOCK = 7, 3  # rows: a first pass on an empty cache, a block behind it

_NAMES_POSITIONS = re.compile(r"window(?!_layers)|position|chunk|context|seq|length|floor")
"""Names of config fields that count positions: sliding_window, original_max_position_embeddings."""

_MOST_NAMED = 8  # positions named by a config that are looked at; no config in use has more
_MOST_HELD = 8192  # slots that a check fills: with 8 key heads of 128, 67 MB of a layer in float32
_MARKED = 16  # slots of a check's cache whose values are not 0

_ORIGINAL = "_torchdynamo_orig_callable"  # where torch.compile keeps what it compiled

_AGREEMENT = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest error of another executor, relative to what a layer adds (root mean square). Rounding
gives 1.5e-6 and 0.023 on the default model (float32, bfloat16); a forgotten factor or norm gives
more than this. In float64, too, the softmax of eager attention is float32."""


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel, by name, for what would pass a short check and still go wrong."""
    config, name = text_config(model), type(model).__name__
    meshes = (getattr(model, own, None) for own in ("_device_mesh", "_tp_size"))
    split = any(hasattr(one, "device_mesh") or hasattr(one, "ds_id") for one in model.parameters())
    if split or any(mesh is not None for mesh in meshes):
        raise UnsupportedModel(
            f"the weights of {name} are split over processes (tensor parallel, FSDP or ZeRO-3). "
            "Load it whole, with device_map='auto': layers may be on several devices"
        )
    for path, part in model.named_modules():
        replaced = hasattr(vars(part).get("forward"), _ORIGINAL)
        if path and (replaced or part._compiled_call_impl is not None):
            raise UnsupportedModel(
                f"{path} of {name} is compiled by torch.compile, and parts run by themselves here. "
                "Load it again and wrap it as it is, or compile it as a whole: model.compile()"
            )
    if others := set(attention_types(config)) - MASKS.keys():
        raise unsupported(model, f"has {sorted(others)[0]} layers, which cannot be rewound")
    if getattr(config, "num_kv_shared_layers", 0):
        raise unsupported(model, "shares keys and values between layers")
    home = cast("Any", model).prepare_inputs_for_generation.__module__
    if not home.startswith("transformers."):
        lora = " (with LoRA wrap its get_base_model())" if home.startswith("peft.") else ""
        why = f"prepares inputs by code of {home}, which nothing calls here{lora}"
        raise unsupported(model, why)


def _uncompiled(model: PreTrainedModel) -> Any:
    """The same modules in another object, which runs them without torch.compile."""
    own = {**vars(model), "_compiled_call_impl": None}
    if (before := getattr(own.get("forward"), _ORIGINAL, None)) is not None:
        own["forward"] = before
    plain = object.__new__(type(model))
    object.__setattr__(plain, "__dict__", own)
    return plain


@contextmanager
def captured_outputs(
    layers: Iterable[nn.Module], done: Callable[[nn.Module], object] = lambda _: None
) -> Iterator[dict[nn.Module, Tensor]]:
    """While open: what each layer returned in the newest pass, [B, T, d]; `done` is told."""
    outputs: dict[nn.Module, Tensor] = {}

    def hook(layer: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs[layer] = output[0] if isinstance(output, tuple) else output
        done(layer)

    handles = [layer.register_forward_hook(hook) for layer in layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


class Passage(NamedTuple):
    """What the model's own modules made of a block of random ids."""

    start: int  # the first row's position
    held: int | None  # slots in front said to be filled; None: the text goes on from its start
    hidden: tuple[Tensor, ...]  # [T, d] each: before the first layer, and behind each
    logits: Tensor  # [T, V], as the unembedding gives them


def check_conformance(decoder: Decoder) -> list[Passage]:
    """Raise UnsupportedModel at the first layer whose bits differ from `model.forward`.

    Random blocks go through both, one layer of ours at a time: one at the first positions, one
    behind it, a row alone, and one for each stretch of `stretches`. Costs two short passes each.
    Weights that lie in a file leave memory again, layer by layer.
    """
    count, ids = decoder.num_layers, _random_ids(decoder, seed=0)
    theirs, ours = DynamicCache(), KVCache(count)
    blocks: list[tuple[Tensor, int, int | None, Any, KVCache]] = [
        (ids[:_CHECK_PREFIX], 0, None, theirs, ours),
        (ids[_CHECK_PREFIX:-1], _CHECK_PREFIX, None, theirs, ours),
        (ids[-1:], len(ids) - 1, None, theirs, ours),  # some hooks mind how many rows there are
    ]
    for start, filled in stretches(decoder):
        both = PlantedKVCache(count, filled), PlantedKVCache(count, filled)
        blocks.append((ids, start, filled, *both))
    found, pages = list[Passage](), FilePages()
    with evaluation(decoder.model):
        plain = _uncompiled(decoder.model)
        for block, start, held, theirs, ours in blocks:
            rows = Rows.of(ours, start, len(block), ids.device)
            with captured_outputs(decoder.layers, pages.release) as expected:
                output = plain(block[None], position_ids=rows.positions[None], **{CACHE: theirs})
            if (made := output.logits.shape[1]) != len(block):
                why = f"runs {made} rows for {len(block)} tokens: it adds its own"
                raise unsupported(decoder.model, f"{why} (prompt tuning does)")
            hidden = [decoder.embed(block)]
            for index, layer in enumerate(decoder.layers[:count]):
                hidden.append(decoder.own.run(hidden[-1], index, index + 1, rows))
                pages.release(layer)
                where = f"layer {index + 1}" + (f" behind {start} positions" if start else "")
                _require_equal(hidden[-1], expected[layer][0], where, decoder)
            logits = decoder.own.unembed(hidden[-1])[1]
            pages.release(decoder.lm_head)
            _require_equal(decoder.finish(logits), output.logits[0].float(), "the logits", decoder)
            found.append(Passage(start, held, tuple(hidden), logits))
    return found


def check_agreement(decoder: Decoder, other: Executor, passages: Sequence[Passage]) -> None:
    """Raise ValueError unless `other` computes each layer, and the logits, up to rounding.

    Each layer gets what the model's own got in the conformance check: no error adds up or hides.
    """
    bound = _AGREEMENT[decoder.dtype]
    kv = KVCache(decoder.num_layers)
    with torch.inference_mode(), decoder.mode(), evaluation(decoder.model):
        for start, held, hidden, logits in passages:
            if held is not None:
                kv = PlantedKVCache(decoder.num_layers, held)
            rows = Rows.of(kv, start, len(logits), hidden[0].device)
            for layer, (before, ours) in enumerate(pairwise(hidden)):
                theirs = other.run(before, layer, layer + 1, rows)
                error = _error(theirs - ours, decoder.layers[layer])
                if not error <= bound * _size(ours - before) + _rounding(ours):
                    raise ValueError(f"layer {layer + 1} comes out differently at position {start}")
            if not _size(other.unembed(hidden[-1])[1] - logits) <= bound * _size(logits):
                raise ValueError("the logits come out differently")


def check_trees(decoder: Decoder, executor: Executor) -> None:
    """Raise UnsupportedModel unless a row beside siblings comes out as it does alone.

    Some layers count positions by how many rows there are. Up to rounding, where conformance looks.
    """
    if (kind := decoder.config._attn_implementation) not in ("sdpa", "eager"):
        raise UnsupportedModel(f"attention is {kind}, whose masks know no siblings. Draft chains")
    bound, ids = _AGREEMENT[decoder.dtype], _random_ids(decoder, seed=2)
    parents = [*[-1] * (len(ids) - 1), 0]
    path = [0, len(ids) - 1]
    with torch.inference_mode(), decoder.mode(), evaluation(decoder.model):
        for start, held in [(0, 0), *stretches(decoder)]:
            tree, alone = (PlantedKVCache(decoder.num_layers, held) for _ in range(2))
            beside = Rows.of(tree, start, len(ids), ids.device, parents)
            chain = Rows.of(alone, start, len(path), ids.device)
            hidden = decoder.embed(ids)
            for layer in range(decoder.num_layers):
                found = executor.run(hidden, layer, layer + 1, beside)
                expected = executor.run(hidden[path], layer, layer + 1, chain)
                added = _size(expected - hidden[path].to(expected.device))
                if not _size(found[path] - expected) <= bound * added + _rounding(expected):
                    raise UnsupportedModel(
                        f"layer {layer + 1} comes out otherwise beside siblings, at position "
                        f"{start}: this model runs no trees of drafts. Draft chains"
                    )
                hidden = found


def keeps_apart(decoder: Decoder, executor: Executor) -> bool:
    """Whether texts that share a pass come out, bit for bit, as each does in passes of its own."""
    ids, layers = _random_ids(decoder, seed=3), decoder.num_layers
    texts = ids[:1], ids[1:4], ids[4:]
    apart, joined = ([KVCache(layers) for _ in texts] for _ in range(2))

    def behind(caches: Sequence[KVCache]) -> list[Rows]:
        pairs = zip(caches, texts, strict=True)
        return [Rows.of(one, one.length(0), len(text), ids.device) for one, text in pairs]

    with torch.inference_mode(), decoder.mode(), evaluation(decoder.model):
        parts = [decoder.embed(text) for text in texts]
        for _ in range(2):  # the second time behind what the first has left
            each = zip(parts, behind(apart), strict=True)
            expected = [executor.run(part, 0, layers, rows) for part, rows in each]
            found = executor.run(torch.cat(parts), 0, layers, Rows.joined(behind(joined)))
            if not torch.equal(found, torch.cat(expected)):
                return False
    return True


def stretches(decoder: Decoder) -> list[tuple[int, int]]:
    """Where else to look: first position, and filled slots in front of it.

    Just under the model's limit, and across every position that its config names. Up to
    _MOST_HELD, slots are filled as in a text of that length; beyond, positions alone are far and no
    slot is filled: a window wider than that is not tried.
    """
    rows, limit = _CHECK_PREFIX + _CHECK_BLOCK, decoder.max_positions
    named = sorted(named_positions(decoder.config.to_dict(), limit))[:_MOST_NAMED]
    starts = {max(0, min(place - _CHECK_PREFIX, limit - rows)) for place in (*named, limit)}
    return [(start, start if start <= _MOST_HELD else 0) for start in sorted(starts - {0})]


def named_positions(fields: Mapping[str, Any], limit: int) -> set[int]:
    """Numbers below `limit` in a config, nested ones too, whose names speak of positions."""
    found: set[int] = set()
    for name, value in fields.items():
        if isinstance(value, Mapping):
            found |= named_positions(value, limit)
        elif isinstance(value, int | float) and _NAMES_POSITIONS.search(name):
            found |= {int(value)} if 1 < value < limit else set()
    return found


class PlantedKVCache(KVCache):
    """Says that it holds positions, of keys 0 and values that show who looks at which.

    It forgets what a layer adds: one block runs through it, and memory is needed for one layer
    only. The first values, which lie at the edge of a window, outweigh all others together.
    """

    def __init__(self, num_layers: int, held: int) -> None:
        super().__init__(num_layers)
        self._planted = held
        self._marks = [size * held / _MARKED**2 for size in range(1, min(_MARKED, held) + 1)]
        self.extend(held, 0, num_layers)

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """What any KV cache gives back, and nothing is kept of it."""
        if self._keys[layer] is None:
            self._keys[layer] = self._room(None, keys, 0, self._planted + 1)
            self._values[layer] = planted = self._room(None, values, 0, self._planted + 1)
            self._mark(planted)
        found = super().update(keys, values, layer)
        self._keys[layer] = self._values[layer] = None
        return found

    def pages(self, count: int, first: int, layout: PageLayout) -> list[Page]:
        """All that are said to be filled, but the first and the last, are one."""
        if self._planted and not self.held:
            marked, empty = Page(layout), Page(layout)
            for slot, size in enumerate(self._marks):
                for _, values in layout.slots(marked.numbers, slot):
                    values.fill_(size)
            self.held = [marked, *[empty] * (self._planted // POSITIONS - 1)]
        return super().pages(count, first, layout)

    def move_to(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """What is said to be filled shows there, too."""
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
    """What few numbers of a hidden state that are rounded the other way come to.

    Where a layer adds little to much, as to the massive activations of some models, that is more
    than the error of what it adds: 0.38 of 4.5, in bfloat16, beside a hidden state of 475.
    """
    return torch.finfo(hidden.dtype).eps / 8 * _size(hidden)


def _size(values: Tensor) -> float:
    """Root mean square."""
    return float(values.float().square().mean().sqrt())


def _error(values: Tensor, layer: nn.Module) -> float:
    """Root mean square; with experts, of the median row: rounding picks of two equal experts."""
    if any(name.endswith("experts") for name, _ in layer.named_modules()):
        return float(values.float().square().mean(-1).sqrt().median())
    return _size(values)


@contextmanager
def evaluation(model: PreTrainedModel) -> Iterator[None]:
    """Dropout off while open; afterwards each module is in the mode that the caller had set."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _require_equal(found: Tensor, expected: Tensor, where: str, decoder: Decoder) -> None:
    if not torch.equal(found, expected.to(found.device)):
        if bool(expected.isnan().any()):
            why = f"a weight is damaged, or numbers are too large for {decoder.dtype}"
            said = f"{type(decoder.model).__name__} gives NaN at {where}: {why}"
            raise UnsupportedModel(f"{said}. Load it in float32, or copy it anew")
        difference = (found.float() - expected.to(found.device).float()).abs().max().item()
        raise unsupported(
            decoder.model,
            f"differs from its own forward at {where} by up to {difference:.3g}: its decoder does "
            "more than embed, layers, norm, lm_head",
        )


# --- rows that change each other: no draft is lossless there

_BEHIND, _BESIDE = 7, 7  # rows in front of the watched one, and beside it
_ALONE = 3  # rows that also run in passes of their own
_BY_COUNT = "which gives a row in a pass of its own something else"
_SPIKE = 100.0  # times the usual: some numbers of an outlying row, one of 64, or eight in all

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}
"""Change of a row, relative to what a layer adds, that rounding may make: experts that each take a
part of the rows run other shapes for other neighbours. With 8-bit weights and activations
(bitsandbytes) a row changes by 0.025 in bfloat16 and 0.003 in float32."""


def find_mixing(decoder: Decoder, executor: Executor) -> str | None:
    """How outlying neighbours change a row that ran before them in the same pass, or None.

    Two passes of one shape differ in the rows behind the watched one only, layer by layer. A row
    that minds itself comes out with the same bits; and in a pass of its own up to rounding.
    """
    rows = _BEHIND + 1 + _BESIDE
    if rows > decoder.max_positions:
        return None
    ids, kv = _random_ids(decoder, seed=2, count=rows), KVCache(decoder.num_layers)
    with torch.inference_mode(), decoder.mode(), evaluation(decoder.model):
        behind, block = decoder.embed(ids).split([_BEHIND, 1 + _BESIDE])
        first = Rows.of(kv, 0, _BEHIND, ids.device)
        watched = Rows.of(kv, _BEHIND, 1 + _BESIDE, ids.device)
        for layer in range(decoder.num_layers):
            behind = executor.run(behind, layer, layer + 1, first)
            alone = [
                executor.run(row, layer, layer + 1, Rows.of(kv, _BEHIND + at, 1, ids.device))
                for at, row in enumerate(block[:_ALONE].split(1))
            ]
            kv.truncate(_BEHIND, layer, layer + 1)
            outlying = executor.run(_spiked(block), layer, layer + 1, watched)
            kv.truncate(_BEHIND, layer, layer + 1)
            before, block = block, executor.run(block, layer, layer + 1, watched)
            added = block - before.to(block.device)
            found = _change(block[:1], outlying[:1], added[:1])
            bound = _AGREEMENT[decoder.dtype] * _size(added[:_ALONE]) + _rounding(block[:_ALONE])
            error = _error(torch.cat(alone) - block[:_ALONE], decoder.layers[layer])
            if found is not None or not error <= bound:
                return f"layer {layer + 1}, {found or _BY_COUNT}"
        usual, outlying, single = (
            decoder.finish(executor.unembed(each)[1])[:1]
            for each in (block, _spiked(block), block[:1])
        )
        found = _change(usual, outlying, usual)
        if found is None and _size(single - usual) <= _AGREEMENT[decoder.dtype] * _size(usual):
            return None
        return f"the logits, {found or _BY_COUNT}"


def _change(usual: Tensor, outlying: Tensor, added: Tensor) -> str | None:
    """How much outlying neighbours change a row, [1, ..], of what was `added` to it; in words."""
    if torch.equal(usual, outlying):
        return None
    change = _size(outlying - usual) / _size(added)
    small = change <= _ROUNDING.get(usual.dtype, 0.0)
    return None if small else f"by {change:.2g} of what it computes"


def _spiked(rows: Tensor) -> Tensor:
    """[T, d] with numbers far out, in other places of each row but the first."""
    spiked, step = rows.clone(), max(64, rows.shape[-1] // 8)
    for row in range(1, len(rows)):
        spiked[row, row::step] *= _SPIKE
    return spiked
