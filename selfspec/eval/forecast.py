"""What rounds should take: rounds and measured costs come in, seconds go out.

The same sum as `totals.predicted_seconds`, for rounds that are known one by one. Called by `tune`.
"""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.decoding.costs import Costs
from selfspec.decoding.drafters import heads_asked
from selfspec.decoding.stats import Round


def seconds(rounds: Sequence[Round], exit_layers: Sequence[int], costs: Costs) -> float:
    """Wall time of `rounds` that drafted from `exit_layers`, or from text already seen.

    The prompt's pass is not in it.
    """
    return sum(_seconds(entry, exit_layers, costs) for entry in rounds if not entry.prefill)


def _seconds(entry: Round, exit_layers: Sequence[int], costs: Costs) -> float:
    """Passes, the logits of all rows, and the heads that were asked; seen text costs nothing."""
    passes = sum(costs.run(last - first, rows) for rows, first, last in entry.passes)
    verified = costs.logits[len(entry.draft_tokens)] + costs.round
    return passes + verified + costs.head * heads_asked(entry, exit_layers)
