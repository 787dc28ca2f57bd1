"""The exit heads of one model, one per exit layer, and their folder.

The folder has `config.json` and `model.safetensors`: no pickle, and never the model's unembedding.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typing_extensions import Self

from selfspec import files
from selfspec.config import SpeculationOptions
from selfspec.errors import HeadsMismatch, InvalidHeads, InvalidOption, first_line, record_of
from selfspec.files import check_safetensors
from selfspec.heads.folder import (
    CONFIG_FILE,
    METADATA,
    WEIGHTS_FILE,
    HeadsFields,
    as_json,
    read_config,
)
from selfspec.heads.heads import HEAD_TYPES, DraftVocabulary, ExitHead
from selfspec.model.backbone import Backbone
from selfspec.model.fingerprint import UNKNOWN
from selfspec.model.parts import Unembedding

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HeadsConfig(HeadsFields):
    """The config of exit heads, with a known head type and consistent sizes."""

    def __post_init__(self) -> None:
        if self.head_type not in HEAD_TYPES:
            raise InvalidOption(f"head type {self.head_type!r} is none of {', '.join(HEAD_TYPES)}")
        if HEAD_TYPES[self.head_type].looks_ahead == (self.num_heads is None):
            raise InvalidOption(f"num_heads is {self.num_heads}, with head type {self.head_type}")
        check_exit_layers(self.exit_layers, possible_exit_layers(self.head_type, self.num_layers))
        if self.state_layers is not None:
            if (self.head_type, self.exit_layers) != ("deep-fused", (0,)):
                raise InvalidOption("state_layers are for deep-fused heads at exit layer 0 alone")
            check_exit_layers(self.state_layers, range(1, self.num_layers), "state")
        draft_size, size = self.draft_vocab_size, self.vocab_size
        if draft_size is not None and draft_size > size:
            raise InvalidOption(f"draft vocabulary of {draft_size} tokens, the model has {size}")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The config of a folder. Raises HeadsNotFound or InvalidHeads."""
        try:
            return record_of(cls, read_config(folder))
        except InvalidOption as error:
            path = Path(folder) / CONFIG_FILE
            raise InvalidHeads(f"{path} is not a config of exit heads: {error}") from error

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, folder: Path) -> None:
        """Replace `config.json` only, not the weights. Raises CannotWrite."""
        files.write(Path(folder) / CONFIG_FILE, as_json(self.record()))

    def for_model(self, folder: Path, backbone: Backbone, name: str) -> Self:
        """The config. Raises HeadsMismatch unless the heads were fitted for the model `name`."""
        fingerprint = backbone.fingerprint
        known = UNKNOWN not in (fingerprint, self.base_fingerprint)
        if known and fingerprint != self.base_fingerprint:
            raise HeadsMismatch(
                f"{folder} fits {self.base_model} ({self.base_fingerprint[:12]}), the model is "
                f"{name} ({fingerprint[:12]}). Fit heads for it: selfspec fit"
            )
        self.require_sizes(str(folder), backbone, name)
        if not known:
            logger.warning(
                "whether %s fit %s is not known: one of them has no fingerprint. Where drafts are "
                "seldom accepted, fit heads for it: selfspec fit",
                folder,
                name,
            )
        return self

    def require_sizes(self, heads: str, backbone: Backbone, name: str) -> None:
        """Raise HeadsMismatch unless the sizes match those of the model."""
        shape = self.vocab_size, self.hidden_size, self.num_layers
        if shape != (model_shape := (*backbone.unembedding.weight.shape, backbone.num_layers)):
            raise HeadsMismatch(
                f"{heads} fit {self.base_model} with (tokens, width, layers) {shape}, {name} has "
                f"{model_shape}. Fit heads for it: selfspec fit"
            )


def possible_exit_layers(head_type: str, num_layers: int) -> range:
    """1..L-1; also 0, the embedding, for heads that read `deep`; only 0 if they look ahead."""
    kind = HEAD_TYPES[head_type]
    return range(1) if kind.looks_ahead else range(0 if kind.reads_deep else 1, num_layers)


def check_exit_layers(numbers: Iterable[int], allowed: Iterable[int], kind: str = "exit") -> None:
    """Raise InvalidOption unless `numbers` is an ascending, non-empty selection from `allowed`."""
    layers, choice = list(numbers), list(allowed)
    if not choice:
        raise InvalidOption(f"a model of one layer has no {kind} layers. Give another head type")
    for layer in layers:
        if layer not in choice:
            listed = f"{choice[0]}..{choice[-1]}" if len(choice) > 12 else choice
            raise InvalidOption(f"{kind} layer {layer} is not among {listed}. Give one that is")
    if not layers or layers != sorted(set(layers)):
        raise InvalidOption(
            f"{kind} layers {layers} must be rising, without repeats, at least one. Give such ones"
        )


class ExitHeads(nn.Module):
    """The exit heads of one model, with their config."""

    _config_kind: ClassVar[type[HeadsConfig]] = HeadsConfig

    def __init__(
        self, config: HeadsConfig, unembedding: Unembedding, draft_ids: Tensor | None = None
    ) -> None:
        """Make untrained heads. Raises InvalidHeads if `draft_ids` [V_draft] disagree with it."""
        super().__init__()
        self.config = config
        self.folder: Path | None = None  # the folder that they were read from
        head_type = HEAD_TYPES[config.head_type]
        self.looks_ahead = head_type.looks_ahead  # each head is for a token further ahead
        self.feeds_itself = head_type.reads_deep
        """Whether later drafts of a round read the heads' features of the previous token."""
        self.reads_deep = self.looks_ahead or self.feeds_itself
        """Whether the heads read the output of layer L one position earlier."""
        draft_ids = _checked_draft_ids(draft_ids, config, unembedding)
        vocabulary = DraftVocabulary.of(unembedding, draft_ids)
        # heads that look ahead follow the first of them, at 0, in order
        names = [*map(str, config.exit_layers)]
        names += [f"ahead_{number}" for number in range(2, (config.num_heads or 1) + 1)]
        self.layers: Sequence[int] = config.state_layers or ()
        make_head = partial(head_type, unembedding, vocabulary, config.inner_size, len(self.layers))
        self.by_layer = nn.ModuleDict({name: make_head() for name in names})

    def __getitem__(self, layer: int) -> ExitHead:
        """The head of exit layer `layer`. Raises InvalidOption for heads that look ahead."""
        if self.looks_ahead:
            raise InvalidOption(
                f"medusa heads read the last layer, none of them reads exit layer {layer}. Give "
                "heads of another type"
            )
        return self.by_layer[str(layer)]  # type: ignore[return-value]  # a ModuleDict of ExitHeads

    @property
    def first(self) -> ExitHead:
        """One of the heads: all have the same draft vocabulary."""
        return cast("ExitHead", next(iter(self.by_layer.values())))

    def features_ahead(self, states: Tensor) -> Tensor:
        """[n, d] -> features of all K heads that look ahead, [n * K, d], grouped by row."""
        features = [cast("ExitHead", head).features(states) for head in self.by_layer.values()]
        return torch.stack(features, 1).flatten(0, 1)

    def layers_in_use(self, options: SpeculationOptions) -> tuple[int, ...]:
        """The exit layers in `options`, default all, up to D_max. Raises InvalidOption."""
        all_layers, depth = self.config.exit_layers, options.exit.max_depth
        layers = all_layers if options.exit.layers is None else options.exit.layers
        check_exit_layers(layers, all_layers)
        if len(options.exit.thresholds) not in (1, len(layers)):
            raise InvalidOption(
                f"{len(options.exit.thresholds)} exit thresholds for {len(layers)} exit layers. "
                "Give one for all, or one each"
            )
        if depth is not None and depth not in layers:
            raise InvalidOption(
                f"exit:max_depth {depth} is not among the exit layers {list(layers)}. Give one of "
                "them"
            )
        return tuple(layer for layer in layers if depth is None or layer <= depth)

    def save(self, folder: Path, others: Mapping[str, bytes | str] | None = None) -> None:
        """Write `config.json`, `model.safetensors` and the files `others` by name.

        All files are complete under temporary names before the weights are renamed, then the
        others. The weights repeat the config, so a kill at any moment leaves the old or new heads.
        """
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors().items()}
        self.config = replace(self.config, weights=hash_of(tensors))
        config = as_json(self.config.record())
        with ExitStack() as stack:  # closes in reverse order
            for name, content in (dict(others or {}) | {CONFIG_FILE: config}).items():
                new = stack.enter_context(files.replacing(Path(folder) / name))
                new.write_bytes(content.encode() if isinstance(content, str) else content)
            new = stack.enter_context(files.replacing(Path(folder) / WEIGHTS_FILE))
            save_file(tensors, new, {METADATA: config})

    def tensors(self) -> dict[str, Tensor]:
        """The contents of `model.safetensors`, with the draft vocabulary once."""
        state, ids = self.state_dict(), self.first.draft_ids
        tensors = {name: one for name, one in state.items() if not name.endswith(f".{_DRAFT_IDS}")}
        return tensors if ids is None else {**tensors, _DRAFT_IDS: ids.int()}

    def part(self, layer: int) -> nn.Module:
        """The modules to train for the drafts of an exit layer."""
        return self.by_layer if self.looks_ahead else self.by_layer[str(layer)]

    def twin(self, unembedding: Unembedding) -> ExitHeads:
        """The same heads for the same model in another dtype."""
        heads = ExitHeads(self.config, unembedding, self.first.draft_ids)
        heads.load_state_dict(self.state_dict())
        return heads.eval().requires_grad_(False)

    @classmethod
    def from_pretrained(cls, folder: Path, backbone: Backbone, base_model: str) -> Self:
        """Load heads from `folder` for the model called `base_model`, in its dtype and device.

        Raises HeadsNotFound, InvalidHeads (damaged or foreign file), HeadsMismatch (other model).
        """
        config = cls._config_kind.read(folder).for_model(folder, backbone, base_model)
        try:
            heads = cls._from_folder(config, backbone.unembedding, Path(folder))
        except Exception as error:  # with an odd config libraries may fail anywhere
            raise InvalidHeads(
                f"{folder} does not hold the heads of its config: {first_line(error)}"
            ) from error
        heads.folder = Path(folder)
        return heads.eval().requires_grad_(False)

    @classmethod
    def _from_folder(cls, config: Any, unembedding: Unembedding, folder: Path) -> Self:
        tensors = _read_tensors(folder / WEIGHTS_FILE, config)
        heads = cls(config, unembedding, tensors.pop(_DRAFT_IDS, None))
        ids = {k: v for k, v in heads.state_dict().items() if k.endswith(f".{_DRAFT_IDS}")}
        heads.load_state_dict(tensors | ids)
        return heads


_DRAFT_IDS = "draft_ids"  # all heads of a folder share one draft vocabulary, stored once


def logit_lens(unembedding: Unembedding, num_layers: int, base_model: str) -> ExitHeads:
    """Untrained heads for any model, one per layer: its own norm and unembedding.

    By default only the exit three quarters up is in use: earlier ones are nearly always wrong.
    """
    if num_layers == 1:
        raise InvalidOption("logit-lens reads layers before the last one, the model has one")
    vocab_size, hidden_size = unembedding.weight.shape
    config = HeadsConfig(
        base_model=base_model,
        base_fingerprint="",
        hidden_size=hidden_size,
        num_layers=num_layers,
        vocab_size=vocab_size,
        exit_layers=tuple(range(1, num_layers)),
        head_type="logit-lens",
        defaults={"drafter": f"exit:layers={num_layers * 3 // 4}"},
    )
    return ExitHeads(config, unembedding).eval()


def _read_tensors(path: Path, config: HeadsConfig) -> dict[str, Tensor]:
    """Read a weights file. Raises InvalidHeads if a size in the config exceeds what it holds."""
    check_safetensors(path)
    tensors = load_file(path)
    numbers = sum(tensor.numel() for tensor in tensors.values())
    for name, width in (("inner_size", 1), ("num_heads", config.hidden_size)):
        count = getattr(config, name) or 0
        if count * width * config.hidden_size > numbers:
            raise InvalidHeads(f"{name} is {count}, the file holds {numbers} numbers")
    for name, tensor in tensors.items():
        if name != _DRAFT_IDS:
            check_numbers(name, tensor)
    return tensors


def check_numbers(name: str, tensor: Tensor) -> None:
    """Raise InvalidHeads unless a tensor of a file is floating-point and finite."""
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise InvalidHeads(f"{name} is {tensor.dtype}, expected floating numbers")
    if not bool(tensor.isfinite().all()):
        raise InvalidHeads(f"{name} holds numbers that are not finite. Fit again")


def hash_of(tensors: Mapping[str, Tensor], kind: bytes = b"") -> str:
    """SHA-256 of `kind`, and of the tensors' names and bytes."""
    digest = hashlib.sha256(kind)
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _checked_draft_ids(
    ids: Tensor | None, config: HeadsConfig, unembedding: Unembedding
) -> Tensor | None:
    """The ids as int64 on the model's device. Raises InvalidHeads if they are invalid."""
    if ids is not None and (ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64)):
        raise InvalidHeads(f"draft vocabulary is {ids.dtype} {list(ids.shape)}, expected whole ids")
    count, expected = 0 if ids is None else len(ids), config.draft_vocab_size
    if count != (expected or 0):
        raise InvalidHeads(f"a draft vocabulary of {count} tokens, {expected} in {CONFIG_FILE}")
    if ids is None:
        return None
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise InvalidHeads(f"draft vocabulary holds ids outside 0..{config.vocab_size - 1}")
    if bool((ids[1:] <= ids[:-1]).any()):
        raise InvalidHeads("the ids of a draft vocabulary must rise")
    return ids.long().contiguous().to(unembedding.weight.device)
