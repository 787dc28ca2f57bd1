"""Heads that attend: EAGLE-3's architecture, read from the folders in which others publish it.

    states of three layers ─norms─fc─▶ state ┐
                                             ├─▶ a decoder layer over the text ─▶ norm, lm_head
    embedding of the token behind them ──────┘        └─▶ the state of the next draft

Come in: a folder in the speculators format or the original one (`midlayer.*`), safetensors only.
Goes out: AttendingHeads, and for each text an Attention: what its layer has read. Layers, positions
and norms are as in the reference package: tests/heads/eagle3/make.py has what was found there.
Called by `api.finding`, the sequence, which reads what verification passes by, and the drafter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from selfspec.errors import HeadsMismatch, InvalidHeads, InvalidOption, first_line
from selfspec.heads.exit_heads import ExitHeads, HeadsConfig
from selfspec.heads.folder import attends
from selfspec.heads.heads import DraftVocabulary, LinearHead
from selfspec.model.kv import Lease
from selfspec.model.parts import CACHE, Unembedding
from selfspec.untrusted import check_safetensors

_LAYERS = {"llama": (LlamaConfig, LlamaDecoderLayer), "qwen3": (Qwen3Config, Qwen3DecoderLayer)}
_IGNORED = ("t2d", "verifier_norm.", "verifier_lm_head.", "rotary_emb.")
"""Tensors that say nothing more, or belong to the model."""

_PIECE = 256
"""Rows that run through the layer at once: its mask has so many times the text's length."""

_TEXTS, _REMEMBERED = 32, 1 << 16
"""Texts, and positions of them, whose keys and values are kept for others that begin alike."""


@dataclass(frozen=True, kw_only=True)
class AttendingConfig(HeadsConfig):
    """What `config.json` of such a folder says; sizes are the model's."""

    format: str
    """speculators or original."""
    state_layers: tuple[int, ...] | None
    """Whose states are read, counted as `hidden_states`; None: 2, L // 2, L - 3."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    layer: dict[str, Any]
    """The config of its decoder layer, as far as it is known here."""

    def __post_init__(self) -> None:
        """`heads.folder` has checked all; `num_layers` is 0 until there is a model."""

    def of_model(self, folder: Path, weight: Tensor, name: str, layers: int) -> AttendingConfig:
        """With what a model of so many layers and this unembedding adds. Raises HeadsMismatch."""
        if self.hidden_size != weight.shape[1] or self.vocab_size > weight.shape[0]:
            raise HeadsMismatch(
                f"{folder} is for a model of width {self.hidden_size} with {self.vocab_size} "
                f"tokens, {name} has {weight.shape[1]} and {weight.shape[0]}. Give the heads of "
                "this model"
            )
        found = self.state_layers or (2, layers // 2, layers - 3)
        if min(found) < 0 or max(found) > layers or len(set(found)) < len(found):
            raise HeadsMismatch(
                f"{folder} reads the states of layers {list(found)}, {name} has {layers} layers. "
                "Give the heads of this model"
            )
        return replace(
            self, num_layers=layers, vocab_size=weight.shape[0], state_layers=tuple(found)
        )


def config_of(folder: Path) -> HeadsConfig:
    """Of heads of any kind. Raises HeadsNotFound or InvalidHeads."""
    return (AttendingConfig if attends(folder) else HeadsConfig).read(folder)


class AttendingHeads(ExitHeads):
    """Heads whose only exit layer is 0: they read the text, what is behind no layer of a draft.

    The layer's output goes through `self.head`, a norm and rows of its own, to draft logits.
    """

    config: AttendingConfig

    def __init__(
        self, config: AttendingConfig, unembedding: Unembedding, tensors: Mapping[str, Tensor]
    ) -> None:
        """`tensors`: of the file, named as in the speculators format. Raises InvalidHeads."""
        nn.Module.__init__(self)
        self.config, self.folder = config, None
        self.layers: Sequence[int] = config.state_layers or ()
        weight, ids = unembedding.weight, _draft_ids(tensors, config)
        self.parts: Any = unfilled(config, embeddings="embed_tokens.weight" in tensors)
        held = {name: one for name, one in tensors.items() if name != "d2t"}
        _check(held, {name: tuple(one.shape) for name, one in self.parts.state_dict().items()})
        held = {name: one.to(weight.device, weight.dtype) for name, one in held.items()}
        self.parts.load_state_dict(held, assign=True)
        layer = _layer_config(config)
        self.rotary = LlamaRotaryEmbedding(layer).to(weight.device)
        if "embed_tokens" not in self.parts and layer.hidden_size != config.hidden_size:
            raise InvalidHeads("it has no embed_tokens, expected them: it is not the model's width")
        norm, rows = self.parts.pop("norm"), self.parts.pop("lm_head").weight
        vocabulary = DraftVocabulary(None if ids is None else ids.to(weight.device), rows.detach())
        self.head = LinearHead(Unembedding(weight, norm, Tensor.float), vocabulary)
        self.by_layer = nn.ModuleDict({"0": self.head})
        weights = [*self.parts.named_parameters(), *self.head.named_parameters()]
        self.nbytes = sum(one.nbytes for name, one in weights if not name.startswith("embed_"))
        """Of the weights that a draft token reads; copies in 8 bits are fewer."""
        self._texts: deque[Attention] = deque(maxlen=_TEXTS)

    def __getitem__(self, layer: int) -> Any:
        """Raises InvalidOption: there is nothing that can be asked about one row by itself."""
        raise InvalidOption(
            f"these heads attend to the whole text, none of them reads exit layer {layer} by "
            "itself. Give heads that selfspec fitted"
        )

    @property
    def reads_deep(self) -> bool:
        """They do, in a way of their own."""
        return False

    @classmethod
    def from_pretrained(
        cls,
        folder: Path,
        unembedding: Unembedding,
        base_fingerprint: str,  # noqa: ARG003  # such folders know none
        base_model: str,
        num_layers: int | None = None,
    ) -> AttendingHeads:
        """As ExitHeads' own."""
        config = AttendingConfig.read(folder)
        config = config.of_model(folder, unembedding.weight, base_model, num_layers or 0)
        try:
            heads = cls(config, unembedding, _tensors(folder))
        except Exception as error:  # an odd config makes transformers fail anywhere
            raise InvalidHeads(
                f"{folder} does not hold the heads of its config: {first_line(error)}"
            ) from error
        heads.folder = Path(folder)
        return heads.eval().requires_grad_(False)

    def fuse(self, states: Tensor) -> Tensor:
        """[n, layers * d], in the order of `layers`, -> [n, d]."""
        states = states.to(self.parts["fc"].weight)
        if "input_norm" in self.parts:
            states = self.parts["input_norm"](states)
        if "fc_norm" in self.parts:
            norms = self.parts["fc_norm"]
            chunks = states.chunk(len(norms), -1)
            states = torch.cat([norm(one) for norm, one in zip(norms, chunks, strict=True)], -1)
        fused: Tensor = self.parts["fc"](states)
        return fused

    def run(
        self,
        embeddings: Tensor,
        states: Tensor,
        lease: Lease,
        positions: Sequence[int] | None = None,
        sees: Tensor | None = None,
    ) -> Tensor:
        """The layer's output for more rows of a text, [n, d] each; the first row is position 1's.

        Their keys and values join `lease`. In a tree `positions` differ from the rows' places, and
        `sees` [n, rows held + n] says what each row attends to.
        """
        layer, seen, count = self.parts["layers"][0], lease.length(0), len(states)
        places = range(seen + 1, seen + 1 + count) if positions is None else positions
        if sees is None and count > 1:
            sees = states.new_ones(count, seen + count, dtype=torch.bool).tril(seen)
        normed = layer.hidden_norm(states)
        residual = normed if self.config.norm_before_residual else states
        inputs = torch.cat([layer.input_layernorm(embeddings.to(states)), normed], -1)[None]
        rotary = self.rotary(inputs, torch.tensor([[*places]], device=states.device))
        attended, _ = layer.self_attn(
            hidden_states=inputs,
            position_embeddings=rotary,
            attention_mask=None if sees is None else sees[None, None],
            **{CACHE: lease},
        )
        hidden = residual + attended[0]
        output: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return output

    def fed(self, output: Tensor) -> Tensor:
        """What the next draft's row reads in place of `fuse`'s, [n, d]."""
        return self.head.norm(output) if self.config.norm_output else output

    def attention(self, embed: Callable[[Tensor], Tensor]) -> Attention:
        """Of a new text; `embed` is the model's own, for heads without a table of theirs."""
        text = Attention(self, self._embed if "embed_tokens" in self.parts else embed)
        self._texts.append(text)
        while sum(len(one.ids) for one in list(self._texts)) > _REMEMBERED:
            self._texts.popleft()
        return text

    def _embed(self, ids: Tensor) -> Tensor:
        """By the table of the heads, which lacks what pads the model's vocabulary."""
        table = self.parts["embed_tokens"]
        found: Tensor = table(ids.to(table.weight.device).clamp(max=table.num_embeddings - 1))
        return found

    def longest(self, ids: Sequence[int]) -> Attention | None:
        """Of the texts that are remembered the one that shares most of its rows with `ids`."""
        return max(list(self._texts), key=lambda one: one.shared(ids), default=None)

    def twin(self, unembedding: Unembedding) -> AttendingHeads:
        """The same heads beside the same model in another dtype."""
        own = {"norm.weight": self.head.norm.weight, "lm_head.weight": self.head.rows}
        tensors = self.parts.state_dict() | own
        if self.head.draft_ids is not None:
            ids = self.head.draft_ids
            tensors["d2t"] = ids - torch.arange(len(ids), device=ids.device)
        return AttendingHeads(self.config, unembedding, tensors).eval().requires_grad_(False)


class Attention:
    """What the layer has read of one text: row p is token p beside the state of position p - 1."""

    def __init__(self, heads: AttendingHeads, embed: Callable[[Tensor], Tensor]) -> None:
        """Made by `AttendingHeads.attention`."""
        self._heads, self._embed = heads, embed
        self.ids: list[int] = []
        """Tokens of its rows, from position 1 on."""
        self.lease = Lease(1)
        self._waiting: list[Tensor] = []
        """Fused states of the positions from the last row's on, whose tokens are not read yet."""
        self.output: Tensor | None = None
        """The layer's at the last row, [1, d]; None: nothing was read since the text began."""
        self._paths: list[list[int]] = []
        """Of each draft token that the layer has read this round: those down to it, itself too."""

    @property
    def waiting(self) -> int:
        """Rows that can be read."""
        return sum(map(len, self._waiting))

    def shared(self, ids: Sequence[int]) -> int:
        """Rows that are also those of a text with `ids`, from position 1 on."""
        pairs = zip(self.ids, ids, strict=False)
        return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(self.ids), len(ids)))

    def begin(self, ids: Sequence[int], held: int) -> int:
        """A text with `ids` of which the model holds the first positions: how many it may keep.

        Rows are taken over from a text that began alike; the states of others are gone.
        """
        if self.ids:
            return min(len(self.ids), held)
        other = self._heads.longest(ids[1:])
        rows = 0 if other is None else min(other.shared(ids[1:]), held)
        if rows and other is not None:
            self.lease.update(*other.lease.first(rows, 0), 0)
            self.ids = other.ids[:rows]
        return rows

    def add(self, states: Tensor) -> None:
        """States of positions that are committed now, [n, layers * d]."""
        self._waiting.append(self._heads.fuse(states))

    def read(self, ids: Sequence[int]) -> Tensor | None:
        """All rows whose states are known, `ids` being the text's; the output at the newest."""
        self.lease.truncate(len(self.ids))  # without the drafts of the round before
        self._paths = []
        waiting, self._waiting = self._waiting, []
        for states in waiting:
            for piece in states.split(_PIECE):
                start = len(self.ids) + 1
                tokens = list(ids[start : start + len(piece)])
                self.output = self._run(tokens, piece)[-1:]
                self.ids += tokens
        return self.output

    def draft(self, tokens: Sequence[int], outputs: Tensor, parents: Sequence[int]) -> Tensor:
        """The layer's output behind more draft tokens, [n, d], of which none follows another.

        `parents`: the draft token in front of each, counted in the order in which they were read
        this round, -1: the text; `outputs` [n, d]: the layer's there.
        """
        held, read = len(self.ids), len(self._paths)
        for number, parent in enumerate(parents, start=read):
            self._paths.append([*(self._paths[parent] if parent >= 0 else ()), number])
        paths, sees = self._paths[read:], None
        if any(len(path) < len(self._paths) for path in paths):
            sees = outputs.new_zeros(len(paths), held + len(self._paths), dtype=torch.bool)
            sees[:, :held] = True
            for row, path in zip(sees, paths, strict=True):
                row[[held + number for number in path]] = True
        positions = [held + len(path) for path in paths]
        return self._run(tokens, self._heads.fed(outputs), positions, sees)

    def _run(self, tokens: Sequence[int], states: Tensor, *tree: Any) -> Tensor:
        return self._heads.run(self._embed(torch.tensor(tokens)), states, self.lease, *tree)


# --- modules --------------------------------------------------------------------------------------


def unfilled(config: AttendingConfig, *, embeddings: bool) -> Any:
    """All modules without numbers, named as in the speculators format: a ModuleDict."""
    layer, count = _layer_config(config), len(config.state_layers or ())
    width, eps = layer.hidden_size, layer.rms_norm_eps
    with torch.device("meta"):
        own: Any = _LAYERS[config.layer["model_type"]][1](layer, 0)
        own.hidden_norm = LlamaRMSNorm(width, eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(own.self_attn, name).out_features
            wide = nn.Linear(2 * width, outputs, bias=layer.attention_bias)
            setattr(own.self_attn, name, wide)
        parts: dict[str, nn.Module] = {
            "fc": nn.Linear(count * config.hidden_size, width, bias=False),
            "layers": nn.ModuleList([own]),
            "norm": LlamaRMSNorm(width, eps),
            "lm_head": nn.Linear(width, config.draft_vocab_size or 0, bias=False),
        }
        if config.norm_before_fc:
            parts["input_norm"] = LlamaRMSNorm(count * config.hidden_size, eps)
        if config.fc_norm:
            norms = [LlamaRMSNorm(config.hidden_size, eps) for _ in range(count)]
            parts["fc_norm"] = nn.ModuleList(norms)
        if embeddings:
            parts["embed_tokens"] = nn.Embedding(config.layer["vocab_size"], width)
        return nn.ModuleDict(parts)


def _layer_config(config: AttendingConfig) -> Any:
    """As transformers has it."""
    known = {name: value for name, value in config.layer.items() if name != "model_type"}
    layer = _LAYERS[config.layer["model_type"]][0](**known, num_hidden_layers=1)
    layer._attn_implementation = "sdpa"
    return layer


# --- files ----------------------------------------------------------------------------------------


def _tensors(folder: Path) -> dict[str, Tensor]:
    """All of a folder, named as in the speculators format. Raises InvalidData, InvalidHeads."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        pickled = any(True for _ in Path(folder).glob("*.bin"))
        then = "Its .bin files are pickles, which may run code: convert them" if pickled else ""
        raise InvalidHeads(f"no *.safetensors there. {then or 'Copy all its files there'}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        check_safetensors(file)
        tensors |= load_file(file)
    named = {name.replace("midlayer.", "layers.0.", 1): one for name, one in tensors.items()}
    return {name: one for name, one in named.items() if not name.startswith(_IGNORED)}


def _check(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise InvalidHeads unless they are exactly the expected, floating and finite."""
    for name in sorted(expected.keys() - tensors.keys()):
        raise InvalidHeads(f"no {name}. Is the file whole?")
    for name, tensor in tensors.items():
        if name not in expected:
            raise InvalidHeads(f"{name} is unknown, expected one layer, as EAGLE-3 has it")
        if tuple(tensor.shape) != expected[name]:
            shapes = list(tensor.shape), list(expected[name])
            raise InvalidHeads("{} is {}, expected {}".format(name, *shapes))
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise InvalidHeads(f"{name} is {tensor.dtype}, expected floating numbers")
        if not bool(tensor.isfinite().all()):
            raise InvalidHeads(f"{name} holds numbers that are not finite")


def _draft_ids(tensors: Mapping[str, Tensor], config: AttendingConfig) -> Tensor | None:
    """[V_draft] ids of the model; None: all of them, in their order. Raises InvalidHeads."""
    offsets, count = tensors.get("d2t"), config.draft_vocab_size or 0
    known = config.layer["vocab_size"]  # the model's may be padded
    if offsets is None:
        if count != known:
            raise InvalidHeads(f"no d2t, which {count} of {known} tokens need")
        return None if count == config.vocab_size else torch.arange(count)
    if tuple(offsets.shape) != (count,) or offsets.dtype not in (torch.int32, torch.int64):
        raise InvalidHeads(f"d2t is {offsets.dtype} {list(offsets.shape)}, expected {count} ids")
    ids = offsets.long() + torch.arange(count, device=offsets.device)
    if int(ids.min()) < 0 or int(ids.max()) >= known or len(ids.unique()) < count:
        raise InvalidHeads(f"d2t does not lead to different ids in 0..{known - 1}")
    return ids
