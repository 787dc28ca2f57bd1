"""Heads that attend: EAGLE-3's architecture, for published heads and for those that `fit` trains.

    states of three layers ─norms─fc─▶ state ┐
                                             ├─▶ a decoder layer over the text ─▶ norm, lm_head
    embedding of the next token ─────────────┘        └─▶ the state of the next draft

Folders are in the speculators format, which `fit` writes, or the original one (`midlayer.*`).
tests/heads/eagle3/make.py documents layers, positions and norms of the reference code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
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
    apply_rotary_pos_emb,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm
from typing_extensions import Self

from selfspec.errors import HeadsMismatch, InvalidHeads, InvalidOption
from selfspec.files import check_safetensors
from selfspec.heads.exit_heads import ExitHeads, HeadsConfig, check_numbers
from selfspec.heads.folder import EAGLE3, EAGLE3_OURS, METADATA, SWITCHES, attends
from selfspec.heads.heads import DraftVocabulary, LinearHead
from selfspec.model.backbone import Backbone
from selfspec.model.kv import KVCache, common_prefix, upload
from selfspec.model.parts import Unembedding

_LAYERS = {"llama": (LlamaConfig, LlamaDecoderLayer), "qwen3": (Qwen3Config, Qwen3DecoderLayer)}
_IGNORED = ("t2d", "verifier_norm.", "verifier_lm_head.", "rotary_emb.")  # or the model's own

_PIECE = 256  # rows that run at once, since the layer's mask is [rows, length of the text]

_TEXTS, _REMEMBERED = 32, 1 << 16  # texts, and positions in all, that are kept for prefix reuse


@dataclass(frozen=True, kw_only=True)
class AttendingConfig(HeadsConfig):
    """The config of a folder of attending heads; sizes are the model's."""

    format: str  # speculators or original
    # `state_layers` are counted as `hidden_states`; None: 2, L // 2, L - 3
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    layer: dict[str, Any]  # the config of its decoder layer: the known fields

    def __post_init__(self) -> None:
        """Skip checks: `heads.folder` has made them. `num_layers` is 0 until `for_model`."""

    def record(self) -> dict[str, Any]:
        """The config in the speculators format, with selfspec's own fields under one key."""
        return {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": EAGLE3,
            "draft_vocab_size": self.draft_vocab_size,
            "eagle_aux_hidden_state_layer_ids": list(self.state_layers or ()),
            **{name: getattr(self, name) for name in SWITCHES},
            "target_hidden_size": self.hidden_size,
            "tie_word_embeddings": False,
            "transformer_layer_config": {**self.layer, "num_hidden_layers": 1},
            "speculators_config": {
                "algorithm": EAGLE3,
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
                "verifier": {"architectures": [], "name_or_path": self.base_model},
            },
            METADATA: {name: getattr(self, name) for name in EAGLE3_OURS},
        }

    def for_model(self, folder: Path, backbone: Backbone, name: str) -> Self:
        """The config, with layers and tokens of this model filled in. Raises HeadsMismatch."""
        if self.base_fingerprint:  # published folders have none
            super().for_model(folder, backbone, name)
        weight, layers = backbone.unembedding.weight, backbone.num_layers
        if self.hidden_size != weight.shape[1] or self.vocab_size > weight.shape[0]:
            raise HeadsMismatch(
                f"{folder} is for a model of width {self.hidden_size} with {self.vocab_size} "
                f"tokens, {name} has {weight.shape[1]} and {weight.shape[0]}. Give the heads of "
                "this model"
            )
        states = self.state_layers or (2, layers // 2, layers - 3)
        if min(states) < 0 or max(states) > layers or len(set(states)) < len(states):
            raise HeadsMismatch(
                f"{folder} reads the states of layers {list(states)}, {name} has {layers} layers. "
                "Give the heads of this model"
            )
        return replace(
            self, num_layers=layers, vocab_size=weight.shape[0], state_layers=tuple(states)
        )


def config_of(folder: Path) -> HeadsConfig:
    """The config of heads of any kind. Raises HeadsNotFound or InvalidHeads."""
    return (AttendingConfig if attends(folder) else HeadsConfig).read(folder)


class AttendingHeads(ExitHeads):
    """Attending heads, with exit layer 0 only; `self.head` maps the layer's output to logits."""

    config: AttendingConfig
    _config_kind = AttendingConfig

    def __init__(
        self, config: AttendingConfig, unembedding: Unembedding, tensors: Mapping[str, Tensor]
    ) -> None:
        """`tensors`: those of the file, named as in the speculators format. Raises InvalidHeads."""
        nn.Module.__init__(self)
        self.config, self.folder, self.looks_ahead = config, None, False
        self.reads_deep = False  # its states of deep layers are handled separately
        self.feeds_itself = True  # the layer's output replaces states that are not known yet
        self.layers: Sequence[int] = config.state_layers or ()
        weight, ids = unembedding.weight, _draft_ids(tensors, config)
        self.parts: Any = meta_modules(config, embeddings="embed_tokens.weight" in tensors)
        state = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
        _check(state, {name: tuple(param.shape) for name, param in self.parts.state_dict().items()})
        state = {name: tensor.to(weight.device, weight.dtype) for name, tensor in state.items()}
        self.parts.load_state_dict(state, assign=True)
        layer = _layer_config(config)
        self.rotary = LlamaRotaryEmbedding(layer).to(weight.device)
        if "embed_tokens" not in self.parts and layer.hidden_size != config.hidden_size:
            raise InvalidHeads("it has no embed_tokens, expected them: it is not the model's width")
        norm, rows = self.parts.pop("norm"), self.parts.pop("lm_head").weight
        vocabulary = DraftVocabulary(None if ids is None else ids.to(weight.device), rows.detach())
        self.head = LinearHead(Unembedding(weight, norm, Tensor.float), vocabulary)
        self.by_layer = nn.ModuleDict({"0": self.head})
        weights = [*self.parts.named_parameters(), *self.head.named_parameters()]
        self.nbytes = sum(param.nbytes for name, param in weights if not name.startswith("embed_"))
        """Bytes of the weights that a draft token reads; 8-bit copies reduce them."""
        self.texts: deque[Attention] = deque(maxlen=_TEXTS)
        """Remembered texts, whose rows later texts with the same prefix copy; newest last."""

    def __getitem__(self, layer: int) -> Any:
        raise InvalidOption(
            f"these heads attend to the whole text, none of them reads exit layer {layer} by "
            "itself. Give heads of another type"
        )

    @classmethod
    def fresh(
        cls, config: AttendingConfig, unembedding: Unembedding, draft_ids: Tensor | None
    ) -> AttendingHeads:
        """Heads to fit: branches of the layer start at zero, norm and lm_head as the model's."""
        parts = meta_modules(config, embeddings=False).to_empty(device="cpu")
        for module in parts.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
            elif isinstance(module, LlamaRMSNorm | Qwen3RMSNorm):
                nn.init.ones_(module.weight)
        for branch in (parts["layers"][0].self_attn.o_proj, parts["layers"][0].mlp.down_proj):
            nn.init.zeros_(branch.weight)
        tensors = parts.state_dict()
        tensors["lm_head.weight"] = DraftVocabulary.of(unembedding, draft_ids).rows.clone()
        tensors["norm.weight"] = _scale(unembedding)
        return cls(config, unembedding, tensors | _vocabulary(draft_ids, config.vocab_size))

    @classmethod
    def _from_folder(cls, config: Any, unembedding: Unembedding, folder: Path) -> Self:
        return cls(config, unembedding, _tensors(folder))

    def fuse(self, states: Tensor) -> Tensor:
        """States [n, layers * d], in the order of `layers`, -> [n, d]."""
        states = states.to(self.parts["fc"].weight)
        if "input_norm" in self.parts:
            states = self.parts["input_norm"](states)
        if "fc_norm" in self.parts:
            norms = self.parts["fc_norm"]
            chunks = states.chunk(len(norms), -1)
            states = torch.cat([norm(chunk) for norm, chunk in zip(norms, chunks, strict=True)], -1)
        fused: Tensor = self.parts["fc"](states)
        return fused

    def run(self, rows: Sequence[TextRows]) -> list[Tensor]:
        """The layer's output for rows of many texts, [n, d] each; weights are read once."""
        counts = [len(part.tokens) for part in rows]
        states = torch.cat([part.states for part in rows])
        tokens = [token for part in rows for token in part.tokens]
        places = [place for part in rows for place in part.positions]
        both = upload([*tokens, *places], states.device).split(len(tokens))

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            queries, keys, values = (tensor.split(counts, 1) for tensor in (query, key, value))
            parts = zip(rows, queries, keys, values, strict=True)
            return torch.cat([part.attend(q, k, v) for part, q, k, v in parts], 1)

        embedded = rows[0].text.embed(both[0])
        return list(self.layer(embedded[None], states[None], both[1], attend)[0].split(counts))

    def layer(
        self,
        embeddings: Tensor,
        states: Tensor,
        positions: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Run the layer: embeddings and states [B, n, d], positions [n] -> [B, n, d].

        `attend`: rotated queries, keys and values [B, n, heads, head_dim] -> shape of queries.
        """
        layer: Any = self.parts["layers"][0]
        attn = layer.self_attn
        normed = layer.hidden_norm(states)
        residual = normed if self.config.norm_before_residual else states
        inputs = torch.cat([layer.input_layernorm(embeddings.to(states)), normed], -1)
        linears = (attn.q_proj, attn.k_proj, attn.v_proj)
        query, key, value = (proj(inputs).unflatten(-1, (-1, attn.head_dim)) for proj in linears)
        if self.config.layer["model_type"] == "qwen3":
            query, key = attn.q_norm(query), attn.k_norm(key)
        rotation = self.rotary(inputs, positions[None])
        query, key = apply_rotary_pos_emb(query, key, *rotation, unsqueeze_dim=-2)
        hidden = residual + attn.o_proj(attend(query, key, value).flatten(-2))
        output: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return output

    def next_states(self, output: Tensor) -> Tensor:
        """The state for the next draft's row, [n, d], in place of the output of `fuse`."""
        return self.head.norm(output) if self.config.norm_output else output

    def attention(self, embed: Callable[[Tensor], Tensor]) -> Attention:
        """The state of a new text; `embed`: the model's, for heads without their own embedding."""
        text = Attention(self, self.embed if "embed_tokens" in self.parts else embed)
        self.texts.append(text)
        while sum(len(one.ids) for one in list(self.texts)) > _REMEMBERED:
            self.texts.popleft()
        return text

    def embed(self, ids: Tensor) -> Tensor:
        """Embed ids by the heads' own embedding, which lacks padding ids of the model's."""
        table = self.parts["embed_tokens"]
        embeddings: Tensor = table(ids.to(table.weight.device).clamp(max=table.num_embeddings - 1))
        return embeddings

    def tensors(self) -> dict[str, Tensor]:
        """The weights, named as in the speculators format."""
        head = {"norm.weight": self.head.norm.weight, "lm_head.weight": self.head.rows}
        ids = _vocabulary(self.head.draft_ids, self.config.layer["vocab_size"])
        return {**self.parts.state_dict(), **head, **ids}

    def part(self, layer: int) -> nn.Module:  # noqa: ARG002  # the base's; there is one
        return self

    def twin(self, unembedding: Unembedding) -> AttendingHeads:
        copies = {name: tensor.detach().clone() for name, tensor in self.tensors().items()}
        return AttendingHeads(self.config, unembedding, copies).eval().requires_grad_(False)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Queries [B, n, heads, head_dim], keys and values [B, kv heads, m, head_dim] -> as queries.

    `mask` [n, m]: what each row attends to; None: everything.
    """
    output: Tensor = nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2), key, value, attn_mask=mask, enable_gqa=True
    )
    return output.transpose(1, 2)


@dataclass(frozen=True, eq=False)
class TextRows:
    """Rows of one text for the layer to run: a Work, which the engine batches."""

    text: Attention
    tokens: Sequence[int]
    states: Tensor  # [n, d]: the layer's second input, beside the tokens
    positions: Sequence[int]
    mask: Tensor | None  # [n, rows held + n]: what each row attends to; None: everything
    priority = (0, 0, 0)

    @property
    def batch_key(self) -> Hashable:
        return TextRows, id(self.text.heads)

    def do(self, alike: Sequence[TextRows], _others: object) -> list[Tensor]:
        """The layer's output for each, [n, d]."""
        return self.text.heads.run(alike)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend [1, n, heads, head_dim] to the text's cached rows and these, which are added."""
        cached = self.text.kv.update(key.transpose(1, 2), value.transpose(1, 2), 0)
        return attention(query, *cached, self.mask)


class Attention:
    """The layer's state for one text: row p combines token p and the state of position p - 1."""

    def __init__(self, heads: AttendingHeads, embed: Callable[[Tensor], Tensor]) -> None:
        """Use `AttendingHeads.attention` to make one; `embed`: ids [n] -> [n, d]."""
        self.heads, self.embed = heads, embed
        self.ids: list[int] = []  # tokens of its rows, from position 1 on
        self.kv = KVCache(1)
        self._waiting_states: list[Tensor] = []  # fused states from the last row's position on
        self.output: Tensor | None = None  # the layer's at the last row, [1, d]
        self._paths: list[list[int]] = []  # path to each draft token read this round, inclusive

    @property
    def waiting_rows(self) -> int:
        """The number of rows that can be read."""
        return sum(map(len, self._waiting_states))

    def begin(self, ids: Sequence[int], cached: int) -> int:
        """How many of the first `cached` positions to keep: rows are copied from a similar text."""
        if self.ids:
            return min(len(self.ids), cached)
        lengths = ((common_prefix(text.ids, ids[1:]), text) for text in list(self.heads.texts))
        length, other = max(lengths, key=itemgetter(0), default=(0, self))
        if rows := min(length, cached):
            self.kv.update(*other.kv.first(rows, 0), 0)
            self.ids = other.ids[:rows]
        return rows

    def add(self, states: Tensor) -> None:
        """Add states of newly committed positions, [n, layers * d]."""
        self._waiting_states.append(self.heads.fuse(states))

    def read(self, ids: Sequence[int]) -> Generator[TextRows, Tensor, Tensor | None]:
        """Run all rows with known states, of the text `ids`; returns the output at the newest."""
        self.kv.truncate(len(self.ids))  # drop drafts of the previous round
        self._paths = []
        waiting, self._waiting_states = self._waiting_states, []
        for states in waiting:
            for piece in states.split(_PIECE):
                start, count = len(self.ids), len(piece)
                tokens = list(ids[start + 1 : start + 1 + count])
                mask = piece.new_ones(count, start + count, dtype=torch.bool).tril(start)
                places = range(start + 1, start + 1 + count)
                rows = TextRows(self, tokens, piece, places, mask if count > 1 else None)
                self.output = (yield rows)[-1:]
                self.ids += tokens
        return self.output

    def draft(self, tokens: Sequence[int], outputs: Tensor, parents: Sequence[int]) -> TextRows:
        """The work to read further draft tokens, none of which follows another.

        `parents`: the draft token before each, numbered in the order of reading in this round, -1:
        the text; `outputs` [n, d]: the layer's outputs at the parents.
        """
        start, count = len(self.ids), len(self._paths)
        for number, parent in enumerate(parents, start=count):
            self._paths.append([*(self._paths[parent] if parent >= 0 else ()), number])
        paths, mask = self._paths[count:], None
        if any(len(path) < len(self._paths) for path in paths):
            mask = outputs.new_zeros(len(paths), start + len(self._paths), dtype=torch.bool)
            mask[:, :start] = True
            for row, path in zip(mask, paths, strict=True):
                row[[start + number for number in path]] = True
        positions = [start + len(path) for path in paths]
        return TextRows(self, tokens, self.heads.next_states(outputs), positions, mask)


# --- modules


def meta_modules(config: AttendingConfig, *, embeddings: bool) -> Any:
    """All modules on the meta device, named as in the speculators format."""
    layer, count = _layer_config(config), len(config.state_layers or ())
    width, eps = layer.hidden_size, layer.rms_norm_eps
    with torch.device("meta"):
        decoder: Any = _LAYERS[config.layer["model_type"]][1](layer, 0)
        decoder.hidden_norm = LlamaRMSNorm(width, eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(decoder.self_attn, name).out_features
            linear = nn.Linear(2 * width, outputs, bias=layer.attention_bias)
            setattr(decoder.self_attn, name, linear)
        parts: dict[str, nn.Module] = {
            "fc": nn.Linear(count * config.hidden_size, width, bias=False),
            "layers": nn.ModuleList([decoder]),
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


def layer_like(model: Any, vocab_size: int, inner_size: int | None) -> dict[str, Any]:
    """The config of a decoder layer like those of a model; `inner_size`: that of its MLP."""
    width = model.hidden_size
    heads = getattr(model, "num_attention_heads", None) or max(1, width // 64)
    rope = getattr(model, "rope_parameters", None) or {}
    eps = getattr(model, "rms_norm_eps", None)
    return {
        "model_type": "qwen3" if model.model_type.startswith("qwen3") else "llama",
        "hidden_size": width,
        "intermediate_size": inner_size or getattr(model, "intermediate_size", None) or 4 * width,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(model, "num_key_value_heads", None) or heads,
        "head_dim": vars(model).get("head_dim") or width // heads,
        "vocab_size": vocab_size,
        "rms_norm_eps": eps if isinstance(eps, float) and 0.0 < eps < 1.0 else 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)},
    }


def _layer_config(config: AttendingConfig) -> Any:
    fields = {name: value for name, value in config.layer.items() if name != "model_type"}
    return _LAYERS[config.layer["model_type"]][0](**fields, num_hidden_layers=1)


def _scale(unembedding: Unembedding) -> Tensor:
    """[d]: the scale of the final norm, from its output for an input of mean 0 and variance 1."""
    norm, weight = unembedding.norm, unembedding.weight
    signs = 1.0 - 2.0 * (torch.arange(weight.shape[1]) % 2)
    with torch.no_grad():  # OLMo's norm has no weights
        output: Tensor = norm(signs[None].to(next(norm.parameters(), weight)))
    return output[0].abs()


# --- files


def _vocabulary(ids: Tensor | None, count: int) -> dict[str, Tensor]:
    """`d2t` and `t2d` of a draft vocabulary; `count`: the number of all tokens."""
    if ids is None:
        return {}
    mask = torch.zeros(count, dtype=torch.bool, device=ids.device)
    mask[ids] = True
    return {"d2t": ids - torch.arange(len(ids), device=ids.device), "t2d": mask}


def _tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        pickled = any(True for _ in Path(folder).glob("*.bin"))
        hint = "Its .bin files are pickles, which may run code: convert them" if pickled else ""
        raise InvalidHeads(f"no *.safetensors there. {hint or 'Copy all its files there'}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        check_safetensors(file)
        tensors |= load_file(file)
    state = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in state.items() if not name.startswith(_IGNORED)}


def _check(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    if missing := sorted(expected.keys() - tensors.keys()):
        raise InvalidHeads(f"no {missing[0]}. Is the file whole?")
    for name, tensor in tensors.items():
        if name not in expected:
            raise InvalidHeads(f"{name} is unknown, expected one layer, as in EAGLE-3")
        if tuple(tensor.shape) != expected[name]:
            raise InvalidHeads(f"{name} is {[*tensor.shape]}, expected {[*expected[name]]}")
        check_numbers(name, tensor)


def _draft_ids(tensors: Mapping[str, Tensor], config: AttendingConfig) -> Tensor | None:
    """[V_draft] ids of the model; None: all of them, in their order. Raises InvalidHeads."""
    offsets, count = tensors.get("d2t"), config.draft_vocab_size or 0
    vocab_size = config.layer["vocab_size"]  # the model's may be padded
    if offsets is None:
        if count != vocab_size:
            raise InvalidHeads(f"no d2t, which {count} of {vocab_size} tokens need")
        return None if count == config.vocab_size else torch.arange(count)
    if tuple(offsets.shape) != (count,) or offsets.dtype not in (torch.int32, torch.int64):
        raise InvalidHeads(f"d2t is {offsets.dtype} {list(offsets.shape)}, expected {count} ids")
    ids = offsets.long() + torch.arange(count, device=offsets.device)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) < count:
        raise InvalidHeads(f"d2t does not lead to different ids in 0..{vocab_size - 1}")
    return ids
