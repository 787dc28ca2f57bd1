"""A Hugging Face decoder, cut open and checked, with the executor that runs it fastest here.

Comes in: a PreTrainedModel, never copied or changed. Goes out: a Backbone whose pieces, put back
together, give the bits of `model.forward`; a model where they do not is refused. Called by
everything above; only `model/` knows how transformers builds a decoder.
"""

from __future__ import annotations

import logging
from functools import cached_property
from typing import NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.errors import InvalidDraft, InvalidPrompt, ModelChanged, UnsupportedModel, first_line
from selfspec.model import fingerprint as fingerprints
from selfspec.model.choosing import check_name, choose
from selfspec.model.conformance import (
    Passage,
    check_conformance,
    check_trees,
    keeps_apart,
    refuse_unsupported,
)
from selfspec.model.decoder import Decoder, without_gradients
from selfspec.model.executors import Claims, Executor
from selfspec.model.given import check_model
from selfspec.model.kv_pages import POSITIONS
from selfspec.model.quantised import keep_numbers
from selfspec.model.row_mixing import find_mixing
from selfspec.model.rows import Rows
from selfspec.model.watch import ModelWatch

logger = logging.getLogger(__name__)


class Backbone(Decoder):
    """The decoder of `model` as pieces that can be run apart.

    Raises UnsupportedModel if the pieces do not give exactly what `model.forward` gives.
    """

    def __init__(
        self, model: PreTrainedModel, *, executor: str = "auto", fingerprint: str | None = None
    ) -> None:
        """`executor`: a name from `choosing.EXECUTORS`, or auto, the best of those that run.

        `fingerprint`: of `model`, from a caller who knows it.
        """
        check_name(executor)
        check_model(model)
        refuse_unsupported(model)
        super().__init__(model)
        if fingerprint is not None:
            self.fingerprint = fingerprint
        self._executor: Executor = self.own
        chosen = choose(self, executor, self._conform())
        self._executor, self.executor_name = chosen.executor, chosen.name
        if chosen.name != "fused":
            keep_numbers(model)
        self.refused = chosen.refused
        """Why other executors that were tried do not run this model, by name."""
        self.mixing = None if self.claims.steady else find_mixing(self)
        """How the rows of a pass change each other, in words; None where they do not."""
        if self.mixing is not None:
            logger.warning(
                "no drafts for %s: the rows of a pass change each other (%s), as with a "
                "quantisation that has one scale for all rows. Load it without to draft",
                type(model).__name__,
                self.mixing,
            )
        self._watch = ModelWatch(model)
        self._trees_checked = False

    def __reduce__(self) -> NoReturn:
        """A copy is refused: compiled code knows the addresses of this one. Raises TypeError."""
        raise TypeError(
            "what selfspec.load and wrap return cannot be copied or pickled. Copy the model, and "
            "wrap the copy: selfspec.wrap(copy.deepcopy(speculator.model), speculator.tokenizer)"
        )

    @property
    def claims(self) -> Claims:
        """What the executor says of itself."""
        return self._executor.claims

    @property
    def weight_bytes(self) -> int:
        """Of the weights that a row reads, as the executor keeps them."""
        return self._executor.weight_bytes

    @property
    def position_bytes(self) -> int:
        """Of the keys and values of one position."""
        pages = self.claims.pages
        if pages is not None:
            return pages.nbytes // POSITIONS
        heads = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        each = getattr(self.config, "head_dim", None)
        each = each or self.hidden_size // self.config.num_attention_heads
        return int(2 * self.num_layers * heads * each * self.dtype.itemsize)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all weights of the model; "" where they cannot be read."""
        return fingerprints.of(self.model)

    def run(self, hidden: Tensor, first: int, last: int, rows: Rows) -> Tensor:
        """Layers first+1..last on [T, d]; adds keys and values of T positions to the leases.

        Raises InvalidDraft or UnsupportedModel for a tree where executor or model runs no trees.
        """
        executor = self._executor
        if not rows.are_chains:
            self._require_trees()
        together = len(rows.spans) == 1 or self.runs_many
        with self.mode():
            if together and len(rows.spans) <= executor.claims.spans:
                return executor.run(hidden, first, last, rows)
            parts = [executor.run(part, first, last, one) for part, one in rows.each(hidden)]
            return torch.cat(parts)

    def logits(self, hidden: Tensor) -> Tensor:
        """Output of layer L, [T, d] -> target logits [T, V], float32."""
        with self.mode():
            return self.finish(self._executor.logits(hidden))

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

    @cached_property
    def runs_trees(self) -> bool:
        """Whether executor and model run rows that have siblings, which is tried here."""
        try:
            self._require_trees()
        except (InvalidDraft, UnsupportedModel):
            return False
        return True

    @cached_property
    def runs_many(self) -> bool:
        """Whether rows of many texts may share a pass: each has the bits that it has alone.

        What the executor claims of that is tried here, when the first ones come.
        """
        if self.claims.spans == 1:
            return False
        apart = keeps_apart(self, self._executor)
        if not apart:
            logger.warning(
                "the %s executor lets texts of one pass change each other: each runs by itself",
                self.executor_name,
            )
        return apart

    def _require_trees(self) -> None:
        """What the executor claims of trees is tested when the first one comes."""
        if not self.claims.trees:
            raise InvalidDraft(
                f"the {self.executor_name} executor runs chains of drafts. Choose generic for trees"
            )
        if not self._trees_checked:
            check_trees(self, self._executor)
            self._trees_checked = True

    def _conform(self) -> list[Passage]:
        """What the check came to, in inference mode or, where layers cannot run in it, without it.

        Raises UnsupportedModel, also for whatever the model's own modules raise.
        """
        try:
            with torch.inference_mode():
                return check_conformance(self)
        except UnsupportedModel:
            raise
        except Exception as error:  # noqa: BLE001  # any module's own; what follows decides
            logger.debug("not in inference mode: %s", error)
            self.mode = without_gradients
            return self._conform_without(error)

    def _conform_without(self, error: Exception) -> list[Passage]:
        try:
            with torch.no_grad():
                return check_conformance(self)
        except UnsupportedModel:
            raise
        except Exception:  # noqa: BLE001  # as above
            raise UnsupportedModel(
                f"{type(self.model).__name__} does not run layer by layer: {first_line(error)}. "
                "Use transformers' own generate for it"
            ) from error
