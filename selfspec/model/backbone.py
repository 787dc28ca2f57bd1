"""A Hugging Face decoder, cut open: embed, run a range of layers, read logits.

Comes in: a PreTrainedModel, never copied or changed. Goes out: a Backbone whose pieces, put back
together, give the bits of `model.forward`; a model where they do not is refused. Called by
everything above; only this file and `executors/` know how transformers builds a decoder.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.errors import InvalidOption, InvalidPrompt, ModelChanged, UnsupportedModel, first_line
from selfspec.hub import fingerprint as fingerprints
from selfspec.model.conformance import (
    check_agreement,
    check_conformance,
    evaluation,
    refuse_unsupported,
)
from selfspec.model.executors import Executor
from selfspec.model.executors.cuda_graph import CudaGraphExecutor
from selfspec.model.executors.fused_cpu import FusedExecutor
from selfspec.model.executors.generic import GenericExecutor
from selfspec.model.executors.packed_cpu import PackedExecutor
from selfspec.model.file_pages import FilePages
from selfspec.model.given import check_model
from selfspec.model.kv_cache import KVCache
from selfspec.model.parts import parts_of
from selfspec.model.row_mixing import find_mixing
from selfspec.model.unembedding import Unembedding
from selfspec.model.watch import ModelWatch

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
        if executor not in EXECUTORS:
            raise InvalidOption(
                f"executor is {executor!r}, expected one of {', '.join(EXECUTORS)}. Leave it out "
                "for the best that runs"
            )
        check_model(model)
        refuse_unsupported(model)
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
        self.refused: dict[str, str] = {}
        """Why other executors that were tried do not run this model, by name."""
        self._mode: Callable[[], AbstractContextManager[object]] = nullcontext
        self._conform()
        if executor == "auto":
            for name in _PREFERRED.get(self.device.type, ()):
                if self.executor_name == "generic":
                    self._choose(name, required=False)
        elif executor != "generic":
            self._choose(executor, required=True)
        self.mixing = None if self.executor_name in _PACKED else find_mixing(self)
        """How the rows of a pass change each other, in words; None where they do not."""
        if self.mixing is not None:
            logger.warning(
                "no drafts for %s: the rows of a pass change each other (%s), as with a "
                "quantisation that has one scale for all rows. Load it without to draft",
                type(model).__name__,
                self.mixing,
            )
        self._watch = ModelWatch(model)

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
        weight = self._lm_head.weight
        if isinstance(weight, Tensor) and weight.shape[1:] == (self.hidden_size,):
            return int(weight.shape[0])
        return int(self._lm_head.out_features)  # quantised weights have other shapes

    @property
    def max_positions(self) -> int:
        """Positions the model was made for; where they are rotations, a text may go on."""
        return int(self.config.max_position_embeddings)

    @property
    def position_limit(self) -> int | None:
        """Positions that the model can compute, if there is an end: learned ones are a table."""
        return self.max_positions if self._decoder.rotary_emb is None else None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of hidden states."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Where token ids enter."""
        embedding: Any = self._decoder.embed_tokens
        if embedding.weight.is_meta:  # offloaded: accelerate brings it there when it is called
            hook = embedding._hf_hook
            places = [
                getattr(one, "execution_device", None) for one in getattr(hook, "hooks", [hook])
            ]
            return torch.device(next(place for place in places if place is not None))
        return embedding.weight.device  # type: ignore[no-any-return]  # untyped module attribute

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
        """The model's own way from a hidden state to logits, shared with exit heads.

        Raises UnsupportedModel where lm_head keeps its weight in another form.
        """
        weight = self._lm_head.weight
        if type(weight) not in (Tensor, nn.Parameter) or not weight.is_floating_point():
            kind = type(getattr(weight, "data", weight)).__name__
            raise UnsupportedModel(
                f"exit heads read lm_head's weight, which is quantised ({kind}). Leave lm_head as "
                "it was when quantising, or draft without heads: drafter='ngram'"
            )
        if weight.is_meta:
            raise UnsupportedModel(
                "exit heads read lm_head's weight, which is offloaded. Keep lm_head on a device, "
                "or draft without heads: drafter='ngram'"
            )
        bias = getattr(self._lm_head, "bias", None)
        return Unembedding(weight, self._decoder.norm, self._finish, bias)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all weights of the model; "" where they cannot be read."""
        return fingerprints.of(self.model)

    def embed(self, ids: Tensor) -> Tensor:
        """[B, T] ids -> [B, T, d] hidden states at boundary 0.

        Positions, learned ones too, enter where layers run.
        """
        with self._mode():
            return self._decoder.embed(ids)

    def run(self, hidden: Tensor, first: int, last: int, positions: Tensor, kv: KVCache) -> Tensor:
        """Layers first+1..last on [B, T, d] at `positions` [B, T]; appends T positions to `kv`."""
        executor = self._executor if hidden.shape[0] == 1 else self._generic
        with self._mode():
            return executor.run(hidden, first, last, positions, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """Output of layer L, [B, T, d] -> target logits [B, T, V], float32."""
        executor = self._executor if hidden.shape[0] == 1 else self._generic
        with self._mode():
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

    def require_unchanged(self) -> None:
        """Raise ModelChanged if the model is not what was wrapped: well under a millisecond."""
        if (change := self._watch.change()) is not None:
            raise ModelChanged(
                f"the model is not what was wrapped: {change}. Wrap the model again: "
                "selfspec.wrap(model, ...)"
            )

    def _conform(self) -> None:
        """Check conformance, in inference mode or, where layers cannot run in it, without it.

        Raises UnsupportedModel, also for whatever the model's own modules raise.
        """
        try:
            with torch.inference_mode():
                check_conformance(self)
        except UnsupportedModel:
            raise
        except Exception as error:  # noqa: BLE001  # any module's own; what follows decides
            logger.debug("not in inference mode: %s", error)
            self._mode = _without_gradients
            self._conform_without(error)

    def _conform_without(self, error: Exception) -> None:
        try:
            with torch.no_grad():
                check_conformance(self)
        except UnsupportedModel:
            raise
        except Exception:  # noqa: BLE001  # as above
            raise UnsupportedModel(
                f"{type(self.model).__name__} does not run layer by layer: {first_line(error)}. "
                "Use transformers' own generate for it"
            ) from error

    def _choose(self, name: str, *, required: bool) -> None:
        """Go over to another executor if it gives this model's numbers."""
        try:
            kind = _PACKED.get(name)
            self._executor = self._packed(kind) if kind else self._graphs(required)
        except Exception as error:  # whatever fails here, the model's own modules run
            reason = first_line(error)
            if required:
                raise UnsupportedModel(
                    f"the {name} executor cannot run it: {reason}. Leave the executor out, or "
                    "choose generic"
                ) from error
            self.refused[name] = reason
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
        # far positions take memory: what they were checked with is not what runs
        check_agreement(self, CudaGraphExecutor(self._decoder, self._lm_head))
        graphs = CudaGraphExecutor(self._decoder, self._lm_head)
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


@contextmanager
def _without_gradients() -> Iterator[None]:
    """For layers that cannot run in inference mode: what they make are ordinary tensors."""
    with torch.inference_mode(False), torch.no_grad():
        yield
