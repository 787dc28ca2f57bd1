"""A Hugging Face decoder, split into parts and checked, with the fastest executor on this machine.

The parts together give the bits of `model.forward`; a model for which they do not is refused. Only
`model/` knows how transformers builds a decoder.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import NoReturn, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.errors import InvalidOption, InvalidPrompt, ModelChanged, UnsupportedModel, first_line
from selfspec.model import check
from selfspec.model import fingerprint as fingerprints
from selfspec.model.cuda_graph import CudaGraphExecutor
from selfspec.model.fingerprint import FileStamp, ModelWatch, Passed
from selfspec.model.fused import FusedExecutor
from selfspec.model.generic import Claims, Decoder, Executor, States, without_gradients
from selfspec.model.kv import POSITIONS, KVCache, Rows
from selfspec.model.parts import Unembedding, check_model
from selfspec.model.weights import TEAM, QuantisedWeight, keep_numbers, use_one_thread_after_fork

logger = logging.getLogger(__name__)

AUTO = "auto"
EXECUTORS = ("fused", "cuda-graph", "generic")


class Backbone(Decoder):
    """The decoder of `model` as parts that can be run separately.

    Raises UnsupportedModel if the parts do not give exactly what `model.forward` gives.
    """

    @TEAM.probed()
    def __init__(
        self,
        model: PreTrainedModel,
        *,
        executor: str = "auto",
        fingerprint: str | None = None,
        loaded_from: tuple[FileStamp, ...] = (),
    ) -> None:
        """`executor`: a name from EXECUTORS, or auto for the fastest that runs.

        `fingerprint`: that of `model`, if the caller knows it. `loaded_from`: the files that the
        model was just read from, unchanged since; checks that these files passed are skipped.
        """
        if executor not in (AUTO, *EXECUTORS):
            raise InvalidOption(
                f"executor is {executor!r}, expected one of {', '.join((AUTO, *EXECUTORS))}. Leave "
                "it out for the fastest that runs"
            )
        model = getattr(model, "_orig_mod", model)  # unwraps torch.compile(model)
        check_model(model)
        check.refuse_unsupported(model)
        super().__init__(model)
        use_one_thread_after_fork()
        self.refuse_modes()
        if fingerprint is not None:
            self.fingerprint = fingerprint
        self.refusals: dict[str, str] = {}  # by executor: why it cannot run this model
        self.passed = Passed.by(model, executor, loaded_from)
        passages = [] if "layers" in self.passed else self._conform()
        self.executor_name, self._executor = self._choose(executor, passages)
        if self.refusals or self.mode is not nullcontext or self.device.type != "cpu":
            self.passed = Passed(None)
        self.passed.add("layers")
        if self.executor_name != "fused":  # the fused executor has no dropout
            if any(one.training and fingerprints.has_dropout(one) for one in self.layers.modules()):
                raise InvalidOption(
                    "the model is in training mode, where dropout makes passes random. Call "
                    "model.eval() before you wrap it"
                )
            keep_numbers(model)
        self.mixing = None if self.claims.steady else check.find_mixing(self, self._executor)
        """How the rows of a pass affect each other, for the user; None if they do not."""
        if self.mixing is not None:
            text = (
                "no drafts for %s: the rows of a pass change each other (%s), as with a "
                "quantisation that has one scale for all rows, or hooks that depend on the number "
                "of rows. Load the model without them to draft"
            )
            logger.warning(text, type(model).__name__, self.mixing)
        self._watch = ModelWatch(model)
        self._captured_keys: set[Hashable] = set()

    def __reduce__(self) -> NoReturn:
        """Raise TypeError: compiled code holds the addresses of this object's weights."""
        raise TypeError(
            "a Speculator cannot be copied or pickled. Copy the model, and wrap the copy: "
            "selfspec.wrap(copy.deepcopy(speculator.model), speculator.tokenizer)"
        )

    @property
    def claims(self) -> Claims:
        return self._executor.claims

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that one row reads, in the executor's format."""
        return self._executor.weight_bytes

    @cached_property
    def position_bytes(self) -> int:
        pages = self.claims.pages
        if pages is not None:
            return pages.nbytes // POSITIONS
        numbers = 0
        # from transformers 5.24 on layers may have different configs
        for layer in getattr(self.config, "per_layer_config", [self.config] * self.num_layers):
            heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
            dim = getattr(layer, "head_dim", None) or self.hidden_size // layer.num_attention_heads
            numbers += 2 * heads * dim
        return numbers * self.dtype.itemsize

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all weights of the model; "" if they cannot be read."""
        return fingerprints.of(self.model)

    @property
    def unembedding(self) -> Unembedding:
        """The unembedding, for exit heads. Raises UnsupportedModel if quantised or offloaded."""
        weight, name = self.lm_head.weight, "lm_head's weight"
        kinds, reason = (Tensor, nn.Parameter, QuantisedWeight), None
        if type(weight) not in kinds or not weight.is_floating_point():
            kind = type(getattr(weight, "data", weight)).__name__
            kind = type(self.lm_head).__module__ if callable(weight) else kind
            reason = f"quantised ({kind}). Exclude lm_head from the quantisation"
        elif weight.is_meta or any(tensor.is_meta for tensor in self.parts.norm.parameters()):
            name = name if weight.is_meta else "the final norm"
            reason = "offloaded. Keep it on a device"
        if reason is not None:
            raise UnsupportedModel(
                f"exit heads read {name}, which is {reason}, or draft without heads: "
                "drafter='ngram'"
            )
        bias = getattr(self.lm_head, "bias", None)
        return Unembedding(weight, self.parts.norm, self.finish, bias)

    def run(
        self, hidden: Tensor, first: int, last: int, rows: Rows, states: States | None = None
    ) -> Tensor:
        """Run [T, d] through layers first+1..last; adds T positions to the KV caches.

        `states` collect the outputs of layers in between, by layer, in parts of rows. Raises
        UnsupportedModel for a tree if the model runs no trees.
        """
        if not rows.are_chains and self._trees_error is not None:
            raise self._trees_error
        layers = sorted(layer for layer in states or () if first < layer < last)
        run = self._executor.run
        if layers and self.claims.keeps_states:
            run = partial(cast("FusedExecutor", self._executor).run, states=states)
        elif states is not None:
            for layer in layers:
                hidden = self.run(hidden, first, layer, rows)
                states[layer].append(hidden)
                first = layer
        with self.mode():
            if len(rows.spans) == 1 or self.runs_many:
                return run(hidden, first, last, rows)
            return torch.cat([run(block, first, last, part) for block, part in rows.parts(hidden)])

    def logits(self, hidden: Tensor) -> Tensor:
        """Output of layer L, [T, d] -> target logits [T, V], float32."""
        return self.unembed(hidden)[1]

    def unembed(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The normed rows, [T, d], that heads read, and their target logits."""
        with self.mode():
            normed, logits = self._executor.unembed(hidden)
            return normed, self.finish(logits)

    @torch.inference_mode()
    def capture(
        self, start: int, depths: tuple[int, ...], counts: range, slots: int | None = None
    ) -> None:
        """Run each pass between `depths` once, so that no request waits for graph captures."""
        key = depths, counts, slots
        if self.claims.replay is None or key in self._captured_keys:
            return
        self._captured_keys.add(key)
        kv = KVCache(self.num_layers, slots)
        kv.extend(start, 0, self.num_layers)
        for count in counts:
            hidden = self.embed(torch.zeros(count, dtype=torch.int64, device=self.device))
            for first, last in itertools.combinations(sorted({*depths}), 2):
                self.run(hidden, first, last, Rows.of(kv, start, count, self.device))
                kv.truncate(start)
            self.logits(hidden)

    def check_ids(self, ids: Tensor) -> None:
        """Raise InvalidPrompt unless `ids` [B, T] has ids of the vocabulary, at least one."""
        if ids.numel() == 0:
            raise InvalidPrompt("the prompt is empty. Give at least one token")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            raise InvalidPrompt(
                f"token id {low if low < 0 else high} is outside 0..{self.vocab_size - 1}. "
                "Use the model's own tokenizer"
            )

    def refuse_modes(self) -> None:
        """Raise InvalidOption where torch gives other numbers, or makes tensors elsewhere."""
        default = torch.get_default_device().type
        if default not in ("cpu", self.device.type):
            raise InvalidOption(
                f"torch's default device is {default}, the model is on {self.device}. Call outside "
                f"of torch.device({default!r}), or torch.set_default_device(None) before"
            )
        if torch.is_autocast_enabled(self.device.type):
            raise InvalidOption(
                "torch.autocast is on, which compiled layers ignore. Turn it off, and load the "
                "model in the dtype that you want: dtype=torch.bfloat16"
            )

    def require_unchanged(self, name: str = "model") -> None:
        """Raise ModelChanged if the model changed since it was wrapped, InvalidOption in a mode.

        Takes well under a millisecond.
        """
        self.refuse_modes()
        if (change := self._watch.change()) is not None:
            raise ModelChanged(
                f"the {name} has changed since it was wrapped: {change}. Wrap the model again: "
                "selfspec.wrap(model, ...)"
            )

    @property
    def runs_trees(self) -> bool:
        return self._trees_error is None

    @cached_property
    def _trees_error(self) -> UnsupportedModel | None:
        """The error if the model runs no trees, else None; tested on first use."""
        try:
            if "trees" not in self.passed:  # own layers: no need to capture graphs of single layers
                check.check_trees(self, self.generic if self.claims.replay else self._executor)
        except UnsupportedModel as error:
            return error
        self.passed.add("trees")
        return None

    @cached_property
    def runs_many(self) -> bool:
        """Whether sequences may share a pass without changing bits; tested on first use."""
        if not self.claims.joins:
            return False
        if "texts" not in self.passed and not check.isolates_sequences(self, self._executor):
            text = "the %s executor lets texts of one pass change each other: each runs by itself"
            logger.warning(text, self.executor_name)
            return False
        self.passed.add("texts")
        return True

    def _choose(self, name: str, passages: Sequence[check.Passage]) -> tuple[str, Executor]:
        """The executor `name`, or the fastest that runs. Raises UnsupportedModel."""
        best = {"cpu": "fused", "cuda": "cuda-graph"}.get(self.device.type, "generic")
        required, choice = name != AUTO, best if name == AUTO else name
        try:
            return choice, self._make(choice, passages, required=required)
        except Exception as error:  # on any failure the model's own modules run
            self.refusals[choice] = first_line(error)
            if required:
                raise UnsupportedModel(
                    f"the {name} executor cannot run it: {self.refusals[choice]}. Leave the "
                    "executor out, or choose generic"
                ) from error
            logger.debug("no %s executor: %s", choice, self.refusals[choice])
            return "generic", self.generic

    def _make(self, name: str, passages: Sequence[check.Passage], *, required: bool) -> Executor:
        """Make an executor; raises if it cannot run the model or computes something else."""
        if name == "generic":
            return self.generic
        if name == "fused":
            with check.evaluation(self.model):  # making it runs the model's parts
                fused = FusedExecutor(self.parts, self.lm_head)
            check.check_agreement(self, fused, passages)
            return fused
        # checks at far positions take memory, so another instance is used for them
        check.check_agreement(self, CudaGraphExecutor(self.parts, self.lm_head), passages)
        graphs = CudaGraphExecutor(self.parts, self.lm_head)
        if self.device.type == "cuda":
            with check.evaluation(self.model):
                graphs.start_capture()
        else:
            logger.warning("no CUDA device: segments run uncaptured, which gains nothing")
        if not (required or graphs.replays.captures):
            raise ValueError("segments cannot be captured")
        return graphs

    def _conform(self) -> list[check.Passage]:
        """Run the conformance check, without inference mode if layers cannot run in it."""
        errors: list[Exception] = []
        for mode in (torch.inference_mode, torch.no_grad):
            try:
                with mode():
                    return check.check_conformance(self)
            except UnsupportedModel:
                raise
            except Exception as error:  # noqa: BLE001  # any module's own
                logger.debug("not in %s: %s", mode.__name__, error)
                errors.append(error)
                self.mode = without_gradients
        raise check.why_not_by_layers(self, errors[0]) from errors[0]
