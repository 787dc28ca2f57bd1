"""A Hugging Face decoder, cut open: embed, run a range of layers, read logits.

Comes in: a PreTrainedModel, never copied or changed. Goes out: a Backbone whose pieces, put back
together, give the bits of `model.forward`; a model where they do not is refused. Called by
everything above; only this file and `executors/` know how transformers builds a decoder.
"""

from __future__ import annotations

import logging
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec import fingerprint as fingerprints
from selfspec.conformance import (
    check_agreement,
    check_conformance,
    evaluation,
    refuse_unsupported,
)
from selfspec.errors import InvalidOption, InvalidPrompt, UnsupportedModel
from selfspec.executors import Executor
from selfspec.executors.cuda_graph import CudaGraphExecutor
from selfspec.executors.fused_cpu import FusedExecutor
from selfspec.executors.generic import GenericExecutor
from selfspec.executors.packed_cpu import PackedExecutor
from selfspec.file_pages import FilePages
from selfspec.head_types import Unembedding
from selfspec.kv_cache import KVCache
from selfspec.parts import parts_of

EXECUTORS = ("auto", "generic", "packed", "fused", "cuda-graph")

_PACKED = {"packed": PackedExecutor, "fused": FusedExecutor}
_PREFERRED = {"cpu": ("fused", "packed"), "cuda": ("cuda-graph",)}  # the best first

logger = logging.getLogger(__name__)


class Backbone:
    """The decoder of `model` as pieces that can be run apart.

    Raises UnsupportedModel if the pieces do not give exactly what `model.forward` gives.
    """

    def __init__(
        self, model: PreTrainedModel, *, executor: str = "auto", fingerprint: str | None = None
    ) -> None:
        """`executor`: generic, packed (copies the weights), fused (compiles too), cuda-graph, auto.

        Auto is fused on a CPU, packed without a compiler, cuda-graph on a GPU; generic where those
        do not run. `fingerprint`: of `model`, from a caller who knows it.
        """
        refuse_unsupported(model)
        if executor not in EXECUTORS:
            raise InvalidOption(f"executor is {executor!r}, expected {', '.join(EXECUTORS)}")
        self.model = model
        if fingerprint is not None:
            self.fingerprint = fingerprint
        self._decoder = parts_of(model)
        self.config: Any = self._decoder.config
        self._lm_head: Any = model.get_output_embeddings()
        self._generic = GenericExecutor(self._decoder, self._lm_head)
        self._executor: Executor = self._generic
        self.executor_name = "generic"
        """One of EXECUTORS, never auto."""
        check_conformance(self)
        if executor == "auto":
            for name in _PREFERRED.get(self.device.type, ()):
                if self.executor_name == "generic":
                    self._choose(name, required=False)
        elif executor != "generic":
            self._choose(executor, required=True)

    @property
    def num_layers(self) -> int:
        """L, the number of decoder layers."""
        return int(self.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        """d, the width of a hidden state."""
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """V, the rows of the unembedding."""
        return int(self._lm_head.weight.shape[0])

    @property
    def max_positions(self) -> int:
        """Positions the model was made for; where they are rotations, a text may go on."""
        return int(self.config.max_position_embeddings)

    @property
    def hard_limit(self) -> int | None:
        """Positions that the model can compute, if there is an end: learned ones are a table."""
        return self.max_positions if self._decoder.rotary_emb is None else None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of hidden states."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Where token ids enter."""
        return self._decoder.embed_tokens.weight.device  # type: ignore[return-value]  # untyped module attribute

    @property
    def min_rows(self) -> int:
        """Rows of a pass at least; above 1 where bits do not depend on the number of rows."""
        return self._executor.min_rows

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, for hooks."""
        return self._decoder.layers

    @property
    def unembedding(self) -> Unembedding:
        """The model's own way from a hidden state to logits, shared with exit heads."""
        head = self._lm_head
        return Unembedding(
            head.weight, self._decoder.norm, self._finish, getattr(head, "bias", None)
        )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all weights of the model; "" where they cannot be read."""
        return fingerprints.of(self.model)

    def embed(self, ids: Tensor) -> Tensor:
        """[B, T] ids -> [B, T, d] hidden states at boundary 0.

        Positions, learned ones too, enter where layers run.
        """
        return self._decoder.embed(ids)

    def run(self, hidden: Tensor, first: int, last: int, positions: Tensor, kv: KVCache) -> Tensor:
        """Layers first+1..last on [B, T, d] at `positions` [B, T]; appends T positions to `kv`."""
        executor = self._executor if hidden.shape[0] == 1 else self._generic
        return executor.run(hidden, first, last, positions, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """Output of layer L, [B, T, d] -> target logits [B, T, V], float32."""
        executor = self._executor if hidden.shape[0] == 1 else self._generic
        return self._finish(executor.logits(hidden))

    def check_ids(self, ids: Tensor) -> None:
        """Raise InvalidPrompt unless `ids` [B, T] hold ids of the vocabulary, at least one."""
        if ids.numel() == 0:
            raise InvalidPrompt("the prompt is empty. Give at least one token")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            raise InvalidPrompt(
                f"token id {low if low < 0 else high} is outside 0..{self.vocab_size - 1}. "
                "Use the model's own tokenizer"
            )

    def _choose(self, name: str, *, required: bool) -> None:
        """Go over to another executor if it gives this model's numbers."""
        try:
            kind = _PACKED.get(name)
            self._executor = self._packed(kind) if kind else self._graphs(required)
        except ValueError as reason:
            if required:
                raise UnsupportedModel(f"the {name} executor cannot run it: {reason}") from reason
            logger.debug("no %s executor: %s", name, reason)
            return
        self.executor_name = name

    def _packed(self, kind: type[PackedExecutor]) -> Executor:
        """Raises ValueError where packed weights do not give this model's numbers.

        Weights that lie in a file leave memory as soon as they are copied.
        """
        pages = FilePages()
        pages.release(self.model)  # the conformance check has read all of it
        packed = kind(self._decoder, self._lm_head, done=pages.release)
        check_agreement(self, packed, pages.release)
        logger.info("weights packed for the CPU: a copy of %d MB", packed.nbytes // 1_000_000)
        return packed

    def _graphs(self, required: bool) -> Executor:
        """Raises ValueError where it gives other numbers; where nothing is captured, if not wanted.

        Uncaptured it computes the same as the generic executor, and looks at masked slots as well.
        """
        graphs = CudaGraphExecutor(self._decoder, self._lm_head)
        check_agreement(self, graphs)
        if self.device.type == "cuda":
            with evaluation(self.model):
                graphs.start_capture()
        else:
            logger.warning("no CUDA device: segments run uncaptured, which gains nothing")
        if not (required or graphs.captures):
            raise ValueError("segments cannot be captured")
        logger.info("CUDA graphs: keys and values take %d MB", graphs.nbytes // 1_000_000)
        return graphs

    def _finish(self, logits: Tensor) -> Tensor:
        """The scalings that some families put behind lm_head, then float32."""
        if (divisor := self._decoder.logits_divisor) is not None:  # Granite
            logits = logits / divisor
        if (factor := getattr(self.config, "logit_scale", None)) is not None:  # Cohere
            logits = logits * factor
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:  # Gemma
            logits = torch.tanh(logits / cap) * cap
        return logits.float()
