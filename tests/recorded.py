"""A CUDA graph on the CPU: operators are recorded once, then run again on the same tensors.

As on a GPU, a replay reads only the current content of the buffers: numbers from Python are frozen,
each result is written to the address of the first one, and reading a value back to the host is
refused. Called by the tests of the CUDA-graph executor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from selfspec.model.cuda_graph import Work

HOST_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
"""Operators that wait for the device, because Python needs their result."""


class Recording(TorchDispatchMode):
    """Records every operator that runs while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOST_READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        output = func(*args, **(kwargs or {}))
        of = tree_leaves((output, args[0])) if func.is_view else ()
        if len({leaf.untyped_storage().data_ptr() for leaf in of}) != 1:  # else no kernel runs
            self.calls.append((func, args, kwargs or {}, tree_leaves(output)))
        return output

    def replay(self) -> None:
        """Run all operators again; new results overwrite the first results."""
        for func, args, kwargs, olds in self.calls:
            rerun = func(*args, **kwargs)
            news = (rerun,) if isinstance(rerun, Tensor) else tree_leaves(rerun)
            for old, new in zip(olds, news, strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class RecordedCapture:
    """A Capture whose outputs become invalid when another recording runs, as in a shared pool."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.replays = 0
        self._outputs: list[Tensor] = []

    def __call__(self, work: Work) -> Work:
        recording = Recording()
        with recording:
            output = work()
        self.recordings.append(recording)
        self._outputs += output

        def replay() -> tuple[Tensor, ...]:
            self.replays += 1
            with _disable_current_modes():  # one launch on a GPU
                for other in self._outputs:
                    other.fill_(torch.nan)
                recording.replay()
            return output

        return replay
