"""Which executor runs a model: the table of them, and the best that gives the model's numbers.

Comes in: a Decoder, and a name or "auto". Goes out: an executor, and why others do not run it.
Called by the backbone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from selfspec.errors import InvalidOption, UnsupportedModel, first_line
from selfspec.model.conformance import Passage, check_agreement, evaluation
from selfspec.model.decoder import Decoder
from selfspec.model.executors import Executor
from selfspec.model.executors.cuda_graph import CudaGraphExecutor
from selfspec.model.executors.fused_cpu import FusedExecutor
from selfspec.model.file_pages import FilePages

logger = logging.getLogger(__name__)


class Kind(NamedTuple):
    """One way to run layers."""

    device: str | None
    """Where auto tries it; None: it is what is left."""
    make: Callable[[Decoder, Sequence[Passage], bool], Executor]
    """For a model, what it computes, and whether it was asked for by name. Raises where it cannot
    run the model, or computes something else."""


@dataclass
class Chosen:
    """An executor by name, never auto."""

    name: str
    executor: Executor
    refused: dict[str, str] = field(default_factory=dict)
    """Why others that were tried do not run this model, by name."""


def check_name(name: object) -> None:
    """Raise InvalidOption unless it is an executor's, or auto."""
    if name not in (AUTO, *EXECUTORS):
        raise InvalidOption(
            f"executor is {name!r}, expected one of {', '.join((AUTO, *EXECUTORS))}. Leave it out "
            "for the best that runs"
        )


def choose(decoder: Decoder, name: str, passages: Sequence[Passage]) -> Chosen:
    """The executor called `name`; for auto the best that runs.

    `passages`: of the conformance check. Raises UnsupportedModel where one that was asked for does
    not run the model.
    """
    if name != AUTO:
        try:
            return Chosen(name, EXECUTORS[name].make(decoder, passages, True))
        except Exception as error:  # whatever fails here
            raise UnsupportedModel(
                f"the {name} executor cannot run it: {first_line(error)}. Leave the executor out, "
                "or choose generic"
            ) from error
    refused: dict[str, str] = {}
    for other, kind in EXECUTORS.items():
        if kind.device == decoder.device.type:
            try:
                return Chosen(other, kind.make(decoder, passages, False), refused)
            except Exception as error:  # noqa: BLE001  # whatever fails: the next one runs
                refused[other] = first_line(error)
                logger.debug("no %s executor: %s", other, refused[other])
    return Chosen("generic", decoder.own, refused)


def _compiled(decoder: Decoder, passages: Sequence[Passage], _asked: bool) -> Executor:
    """Weights that lie in a file leave memory as soon as they are copied."""
    with evaluation(decoder.model):  # parts are asked what they compute
        fused = FusedExecutor(decoder.parts, decoder.lm_head, done=FilePages().release)
    check_agreement(decoder, fused, passages)
    logger.debug("weights copied: each token reads %d MB", fused.weight_bytes // 1_000_000)
    return fused


def _graphs(decoder: Decoder, passages: Sequence[Passage], asked: bool) -> Executor:
    """Raises ValueError where nothing is captured and nobody asked for it.

    Uncaptured it computes the same as the generic executor, and looks at masked slots as well.
    """
    # far positions take memory: what they were checked with is not what runs
    check_agreement(decoder, CudaGraphExecutor(decoder.parts, decoder.lm_head), passages)
    graphs = CudaGraphExecutor(decoder.parts, decoder.lm_head)
    if decoder.device.type == "cuda":
        with evaluation(decoder.model):
            graphs.start_capture()
    else:
        logger.warning("no CUDA device: segments run uncaptured, which gains nothing")
    if not (asked or graphs.captures):
        raise ValueError("segments cannot be captured")
    logger.debug("CUDA graphs: keys and values take %d MB", graphs.nbytes // 1_000_000)
    return graphs


AUTO = "auto"

EXECUTORS = {
    "fused": Kind("cpu", _compiled),
    "cuda-graph": Kind("cuda", _graphs),
    "generic": Kind(None, lambda decoder, *_: decoder.own),
}
"""By name, the best first."""
