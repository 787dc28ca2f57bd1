"""What a normal forward pass computes layer by layer: for conformance checks, training, tracing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def captured_outputs(
    modules: Sequence[nn.Module], done: Callable[[nn.Module], object] = lambda _: None
) -> Iterator[dict[int, Tensor]]:
    """While open, each forward pass stores what `modules[i]` returned under key i.

    `done` is called with each module that has returned.

    Yields a dict that is filled by the passes, [B, T, d] per module; a later pass replaces the
    values of an earlier one. No hook is left behind, also after an exception.
    """
    outputs: dict[int, Tensor] = {}

    def store(index: int) -> object:
        def hook(module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            outputs[index] = output[0] if isinstance(output, tuple) else output
            done(module)

        return hook

    handles = []
    try:
        for index, module in enumerate(modules):
            handles.append(module.register_forward_hook(store(index)))  # type: ignore[arg-type]  # torch types hooks as Callable[..., Any]
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
