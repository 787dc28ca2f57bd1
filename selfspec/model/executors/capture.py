"""Captures repeated work as CUDA graphs, keeps them, and replays them.

How work is captured is a strategy, so that everything around it runs and is tested on any device.
Called by the CUDA-graph executor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

_MOST_GRAPHS = 64
"""Graphs kept at a time; the one unused for longest makes room."""

_WARM_UPS = 3
"""Runs on another stream before a capture: libraries set up their workspaces at first use, which
must not happen during a capture."""

logger = logging.getLogger(__name__)

Work = Callable[[], Tensor]
"""Computes from buffers at fixed addresses."""

Capture = Callable[[Work], Work]
"""From work to the same work, captured; what that returns may be overwritten by the next one."""


def uncaptured(work: Work) -> Work:
    """The work itself: the strategy where there is nothing to capture with."""
    return work


class GraphCapture:
    """Captures work as CUDA graphs that share one memory pool, as the documentation of torch does.

    What graphs of one pool keep between replays may overlap, which is safe because they never run
    at the same time and every output is copied before the next one runs.
    """

    def __init__(self, device: torch.device) -> None:
        """`device`: where the work runs."""
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """Raises RuntimeError where the work cannot be captured."""
        with torch.cuda.device(self._device):  # streams belong to the current device
            return self._captured(work)

    def _captured(self, work: Work) -> Work:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads do on the GPU meanwhile is no fault of this capture
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = work()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


class Replays:
    """Captured work by key: captured at its first use, replayed from then on."""

    def __init__(self, strategy: Callable[[], Capture]) -> None:
        """`strategy` makes a Capture: one for all graphs that live together."""
        self._strategy = strategy
        self._capture = strategy()
        self._graphs: dict[Hashable, Work] = {}

    @property
    def captures(self) -> bool:
        """Whether work is captured, rather than run as it is."""
        return self._capture is not uncaptured

    def run(self, key: Hashable, work: Work) -> Tensor:
        """What `work` computes, by the graph under `key`; copy it before the next run."""
        graph = self._graphs.pop(key, None)
        if graph is None:
            if len(self._graphs) >= _MOST_GRAPHS:
                self._graphs.pop(next(iter(self._graphs)))
            graph = self._captured(work)
        self._graphs[key] = graph  # newest last
        return graph()

    def clear(self) -> None:
        """Drop all graphs: their addresses are no longer right."""
        self._graphs.clear()
        if self.captures:  # a pool is not used again once the last graph in it is gone
            self._capture = self._strategy()

    def _captured(self, work: Work) -> Work:
        """Falls back to the work itself, for good, where capturing it fails."""
        try:
            return self._capture(work)
        except RuntimeError as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            logger.warning("no CUDA graphs (%s): segments run uncaptured from now on", reason)
            self._capture = uncaptured
            return work
