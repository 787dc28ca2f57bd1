"""What lenience does to a law, exactly: target and draft laws come in, what is committed goes out.

One draft at one place, the rule of `acceptance.SpeculativeSampling`. Its law has a closed form, so
that acceptance and distance need no samples. Called by eval/papers/lenience.py.
"""

from __future__ import annotations

import torch
from torch import Tensor


def acceptance(target: Tensor, draft: Tensor, lenience: float) -> Tensor:
    """Chance that a draft stays: p, q [.., V] -> [..], the sum of min(q, p / l)."""
    return torch.minimum(draft, target / lenience).sum(-1)


def committed(target: Tensor, draft: Tensor, lenience: float) -> Tensor:
    """Law of the committed token: p, q [.., V] -> [.., V].

    x is drafted and stays with min(q, p / l); what is refused comes from norm(max(0, p - q)). At
    l = 1 this is p. What l gains in acceptance it costs in total variation, one for one: only where
    p < q does the law move, and there by what stays more often.
    """
    stays = torch.minimum(draft, target / lenience)
    rest = (target - draft).clamp(min=0.0)
    total = rest.sum(-1, keepdim=True)
    residual = torch.where(total > 0, rest / total.clamp(min=torch.finfo(rest.dtype).tiny), target)
    return stays + (1.0 - stays.sum(-1, keepdim=True)) * residual


def total_variation(one: Tensor, other: Tensor) -> Tensor:
    """Half the sum of differences, [.., V], [.., V] -> [..]: 0 for equal laws, at most 1.

    Two samplers can be coupled to agree on a token with chance 1 minus this, and no better.
    """
    return 0.5 * (one - other).abs().sum(-1)


def random_laws(
    count: int, vocab_size: int, likeness: float, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Pairs of laws over a tiny vocabulary, [N, V] float64: a target and a draft like it.

    Logits are normal with deviation 2; `likeness` in [0, 1] is their correlation.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, count, vocab_size, generator=generator, dtype=torch.float64)
    ours = 2.0 * noise[0]
    theirs = likeness * ours + 2.0 * (1.0 - likeness**2) ** 0.5 * noise[1]
    return ours.softmax(-1), theirs.softmax(-1)
