"""Exit heads: small modules from the hidden state at an exit layer to draft logits.

Come in: a hidden state [.., d], raw, before the final norm. Go out: draft logits over the draft
vocabulary. Called by the exit drafter; fitted by `selfspec.training`; kept in folders that hold
`config.json` and `model.safetensors` (design: no pickle, the model's unembedding never inside).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.hooks import remove_hook_from_module
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from selfspec.config import check_keys
from selfspec.errors import HeadsMismatch, HeadsNotFound, InvalidHeads, InvalidOption

FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


class Unembedding(NamedTuple):
    """A model's own way from a hidden state to logits; its tensors are shared, never copied."""

    weight: Tensor
    """[V, d]"""
    norm: nn.Module
    """The final norm."""
    finish: Callable[[Tensor], Tensor]
    """What the model does behind the matrix product (scaling, soft-capping); gives float32."""


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """What `config.json` of a heads folder says."""

    base_model: str
    base_fingerprint: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    exit_layers: tuple[int, ...]
    head_type: str
    base_revision: str | None = None
    rank: int | None = None
    """Rank of a translator's map; None is a full one."""
    draft_vocab_size: int | None = None
    """Tokens that heads can draft; None is all."""
    temperatures: dict[str, float] = field(default_factory=dict)
    """Calibrated temperature per exit layer; 1 where missing."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """SpeculationOptions that suit these heads."""
    training: dict[str, Any] = field(default_factory=dict)
    """Tokens, data, steps, seed, versions."""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        """Raise InvalidOption for exit layers outside 1..L-1 or an unknown head type."""
        check_exit_layers(self.exit_layers, range(1, self.num_layers))
        if self.head_type not in HEAD_TYPES:
            raise InvalidOption(f"head type {self.head_type!r} is none of {', '.join(HEAD_TYPES)}")
        if self.draft_vocab_size is not None and self.draft_vocab_size > self.vocab_size:
            raise InvalidOption(
                f"draft vocabulary of {self.draft_vocab_size} tokens, the model has "
                f"{self.vocab_size}"
            )

    @classmethod
    def read(cls, folder: Path) -> HeadsConfig:
        """From `folder/config.json`. Raises HeadsNotFound or InvalidHeads."""
        path = Path(folder) / CONFIG_FILE
        if not path.is_file():
            raise HeadsNotFound(f"no {CONFIG_FILE} in {folder}. Expected a folder of exit heads")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            version = values.get("format_version")
            if version != FORMAT_VERSION:
                raise InvalidHeads(
                    f"{path} has format version {version}, this selfspec reads {FORMAT_VERSION}"
                )
            check_keys(values, (entry.name for entry in fields(cls)), "key")
            return cls(**values | {"exit_layers": tuple(values["exit_layers"])})
        except (ValueError, KeyError, TypeError, AttributeError, InvalidOption) as error:
            raise InvalidHeads(f"{path} is not a config of exit heads: {error}") from error


def check_exit_layers(asked: Iterable[int], allowed: Iterable[int]) -> None:
    """Raise InvalidOption unless `asked` is a rising, non-empty selection from `allowed`."""
    layers, choice = list(asked), list(allowed)
    for layer in layers:
        if layer not in choice:
            listed = f"{choice[0]}..{choice[-1]}" if len(choice) > 12 else choice
            raise InvalidOption(f"exit layer {layer} is not among {listed}")
    if not layers or layers != sorted(set(layers)):
        raise InvalidOption(f"exit layers {layers} must be rising, without repeats, at least one")


class ExitHead(nn.Module):
    """Base of all head types: holds the map from draft ids to target ids.

    `forward(hidden)`: [.., d] -> draft logits [.., V_draft], float32.
    """

    draft_ids: Tensor | None

    def __init__(self, unembedding: Unembedding, draft_ids: Tensor | None = None) -> None:
        """`draft_ids` [V_draft]: the target ids that this head can draft, rising; None for all."""
        super().__init__()
        self.register_buffer("draft_ids", draft_ids)
        self._target_vocab_size = unembedding.weight.shape[0]
        self._finish = unembedding.finish

    @property
    def draft_vocab_size(self) -> int:
        """V_draft, the width of the draft logits."""
        return self._target_vocab_size if self.draft_ids is None else len(self.draft_ids)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Indices into the draft logits -> token ids of the model; any shape."""
        return draft_ids if self.draft_ids is None else self.draft_ids[draft_ids]

    def to_target_logits(self, draft_logits: Tensor) -> Tensor:
        """[.., V_draft] -> [.., V]; tokens that cannot be drafted get -inf."""
        if self.draft_ids is None:
            return draft_logits
        wide = draft_logits.new_full(
            (*draft_logits.shape[:-1], self._target_vocab_size), -torch.inf
        )
        wide[..., self.draft_ids] = draft_logits
        return wide


class LinearHead(ExitHead):
    """Norm and a trained LM head of its own (SpecBound section 3.1; AdaDecode)."""

    def __init__(
        self, unembedding: Unembedding, draft_ids: Tensor | None = None, rank: int | None = None
    ) -> None:
        """Starts as the model's own norm and (rows of the) unembedding. `rank` must be None."""
        super().__init__(unembedding, draft_ids)
        if rank is not None:
            raise InvalidOption(f"linear heads have no rank, found {rank}")
        self.norm = _own_norm(unembedding)
        self.weight = nn.Parameter(_rows(unembedding, draft_ids).clone())

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., d] -> draft logits [.., V_draft], float32."""
        return self._finish(nn.functional.linear(self.norm(hidden), self.weight))


class TranslatorHead(ExitHead):
    """Norm, an affine map on top of the identity, then the model's own frozen unembedding.

    The map translates from the language of layer l to that of the last layer (the idea of the
    tuned lens); with `rank` it is the product of two narrow matrices. Starts as the identity.
    """

    def __init__(
        self, unembedding: Unembedding, draft_ids: Tensor | None = None, rank: int | None = None
    ) -> None:
        """`rank` None is a full map, else its rank."""
        super().__init__(unembedding, draft_ids)
        self.norm = _own_norm(unembedding)
        weight = unembedding.weight
        size = weight.shape[1]
        self.down = None if rank is None else nn.Linear(size, rank, bias=False).to(weight)
        self.up = nn.Linear(size if rank is None else rank, size).to(weight)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)
        self._shared = [_rows(unembedding, draft_ids)]  # a list: state_dict must not see it

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., d] -> draft logits [.., V_draft], float32."""
        normed = self.norm(hidden)
        change = self.up(normed if self.down is None else self.down(normed))
        return self._finish(nn.functional.linear(normed + change, self._shared[0]))


class LogitLensHead(ExitHead):
    """The model's own norm and unembedding on an intermediate state; nothing to fit."""

    def __init__(
        self, unembedding: Unembedding, draft_ids: Tensor | None = None, rank: int | None = None
    ) -> None:
        """`rank` must be None."""
        super().__init__(unembedding, draft_ids)
        if rank is not None:
            raise InvalidOption(f"logit-lens heads have no rank, found {rank}")
        # a tuple: state_dict must not see them, and a file must not be loaded into them
        self._shared = (unembedding.norm, _rows(unembedding, draft_ids))

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., d] -> draft logits [.., V_draft], float32."""
        norm, weight = self._shared
        return self._finish(nn.functional.linear(norm(hidden), weight))


def _own_norm(unembedding: Unembedding) -> nn.Module:
    """A copy of the final norm to fit, without the hooks by which accelerate moves the model's."""
    norm: nn.Module = remove_hook_from_module(copy.deepcopy(unembedding.norm))
    return norm.requires_grad_(True)


def _rows(unembedding: Unembedding, draft_ids: Tensor | None) -> Tensor:
    """The frozen unembedding: the very tensor, or the rows of a draft vocabulary."""
    weight = unembedding.weight.detach()
    return weight if draft_ids is None else weight[draft_ids]


HEAD_TYPES: dict[str, type[LinearHead | TranslatorHead | LogitLensHead]] = {
    "linear": LinearHead,
    "translator": TranslatorHead,
    "logit-lens": LogitLensHead,
}


class ExitHeads(nn.Module):
    """The exit heads of one model, one per exit layer, with their config."""

    def __init__(
        self, config: HeadsConfig, unembedding: Unembedding, draft_ids: Tensor | None = None
    ) -> None:
        """Untrained heads, in the dtype and on the device of the unembedding.

        `draft_ids` [V_draft] are the tokens of the config's draft vocabulary. Raises InvalidHeads
        if they are not.
        """
        super().__init__()
        self.config = config
        head = HEAD_TYPES[config.head_type]
        draft_ids = _checked_draft_ids(draft_ids, config, unembedding)
        self.by_layer = nn.ModuleDict(
            {str(layer): head(unembedding, draft_ids, config.rank) for layer in config.exit_layers}
        )

    def __getitem__(self, layer: int) -> ExitHead:
        """The head of exit layer `layer`, counted from 1."""
        return self.by_layer[str(layer)]  # type: ignore[return-value]  # a ModuleDict of ExitHeads

    def save(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors`, both under temporary names first."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        weights, config = folder / f"{WEIGHTS_FILE}.new", folder / f"{CONFIG_FILE}.new"
        try:
            save_file(_shared_ids_once(tensors), weights)
            weights.chmod(0o644)  # safetensors makes files that only their owner can read
            config.write_text(json.dumps(asdict(self.config), indent=2) + "\n", encoding="utf-8")
            weights.replace(folder / WEIGHTS_FILE)
            config.replace(folder / CONFIG_FILE)
        finally:
            weights.unlink(missing_ok=True)
            config.unlink(missing_ok=True)

    @classmethod
    def from_pretrained(
        cls, folder: Path, unembedding: Unembedding, base_fingerprint: str, base_model: str
    ) -> ExitHeads:
        """Heads from `folder`, for the model with `base_fingerprint`, in its dtype and device.

        Raises HeadsNotFound, InvalidHeads (damaged or foreign file), HeadsMismatch (other model).
        """
        config = HeadsConfig.read(folder)
        if config.base_fingerprint != base_fingerprint:
            raise HeadsMismatch(
                f"{folder} fits {config.base_model} ({config.base_fingerprint[:12]}), the model is "
                f"{base_model} ({base_fingerprint[:12]}). Fit heads for it: selfspec fit"
            )
        path = Path(folder) / WEIGHTS_FILE
        try:
            tensors = load_file(path)
            draft_ids = tensors.pop(_DRAFT_IDS, None)
            heads = cls(config, unembedding, draft_ids)
            heads.load_state_dict(_with_draft_ids(tensors, heads))
        except (OSError, SafetensorError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise InvalidHeads(f"{path} does not hold the heads of its config: {reason}") from error
        return heads.eval().requires_grad_(False)


_DRAFT_IDS = "draft_ids"
"""All heads of a folder share one draft vocabulary, so the file holds it once."""


def logit_lens(unembedding: Unembedding, num_layers: int, base_model: str) -> ExitHeads:
    """Untrained heads for any model, one per layer: its own norm and unembedding there.

    Only one exit, three quarters up, is in use unless asked: earlier ones are nearly always wrong.
    """
    vocab_size, hidden_size = unembedding.weight.shape
    config = HeadsConfig(
        base_model=base_model,
        base_fingerprint="",
        hidden_size=hidden_size,
        num_layers=num_layers,
        vocab_size=vocab_size,
        exit_layers=tuple(range(1, num_layers)),
        head_type="logit-lens",
        defaults={"exit_layers": [num_layers * 3 // 4]},
    )
    return ExitHeads(config, unembedding).eval()


def _shared_ids_once(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace the heads' `..draft_ids` by one tensor."""
    kept = {name: t for name, t in tensors.items() if not name.endswith(f".{_DRAFT_IDS}")}
    for name, tensor in tensors.items():
        if name not in kept:
            kept[_DRAFT_IDS] = tensor.int()
    return kept


def _with_draft_ids(tensors: dict[str, Tensor], heads: ExitHeads) -> dict[str, Tensor]:
    """Put each head's own draft ids back beside its weights."""
    ids = {k: v for k, v in heads.state_dict().items() if k.endswith(f".{_DRAFT_IDS}")}
    return tensors | ids


def _checked_draft_ids(
    ids: Tensor | None, config: HeadsConfig, unembedding: Unembedding
) -> Tensor | None:
    """Draft ids as int64 on the model's device. Raises InvalidHeads if they do not fit."""
    if (0 if ids is None else len(ids)) != (config.draft_vocab_size or 0):
        raise InvalidHeads(
            f"a draft vocabulary of {0 if ids is None else len(ids)} tokens, "
            f"{config.draft_vocab_size} in {CONFIG_FILE}"
        )
    if ids is None:
        return None
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise InvalidHeads(f"draft vocabulary holds ids outside 0..{config.vocab_size - 1}")
    if bool((ids[1:] <= ids[:-1]).any()):
        raise InvalidHeads("the ids of a draft vocabulary must rise")
    return ids.long().to(unembedding.weight.device)
