"""When tokens came: looks at a clock become arrivals."""

from __future__ import annotations

from selfspec.decoding.stats import Round
from selfspec.eval.arrivals import arrivals
from selfspec.eval.methods import Written


def test_arrivals_of_our_runtime_are_put_together_by_round() -> None:
    def entry(count: int, *, prefill: bool = False) -> Round:
        tokens = [0] * count
        return Round(
            tokens=tokens,
            draft_tokens=[],
            exit_layers=[],
            sources=[],
            kept=[],
            ended="off",
            prefill=prefill,
        )

    heard = [(1, 2.0), (1, 3.0), (1, 3.25), (1, 5.0)]
    written = Written(token_ids=[0] * 4, rounds=[entry(1, prefill=True), entry(2), entry(1)])
    assert arrivals(heard, 1.5, written) == [(1, 0.5), (2, 1.25), (1, 1.75)]
    alone = Written(token_ids=[0] * 4)
    assert arrivals([(3, 2.0), (1, 3.0)], 1.5, alone) == [(3, 0.5), (1, 1.0)]
