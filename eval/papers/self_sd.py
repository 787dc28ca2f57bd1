r"""Self-SD's search: which layers the default model's drafts should leave out.

    python -m eval.papers.self_sd --output eval/results/papers/self-sd

The paper lets a Gaussian process propose 1,000 sets of attention and MLP blocks, and takes the one
with the best wall time. Here whole layers are removed greedily, each time the layer whose removal
gives the most tokens per plain step. Rounds are those of Self-SD at its first threshold, on the
model's own greedy answers. One pass makes all drafts of an answer, after the model's own keys and
values of the prompt. Writes `summary.json` and `table.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import torch
import typer

from eval import lab
from selfspec.api.speculator import Speculator
from selfspec.decoding.costs import DraftCost, token_cost_without
from selfspec.decoding.drafters.draft_model import redraft
from selfspec.decoding.state import DecodeState, run_alone
from selfspec.decoding.stats import SKIP
from selfspec.eval.results import SIX_TASKS
from selfspec.eval.verify import greedy_request
from selfspec.model.kv import KVCache
from selfspec.options import Skip, as_word

RULE = Skip()


class Found(NamedTuple):
    """A set of layers to skip, with the results of drafts without them."""

    speed: float  # tokens per plain step
    right: float  # share of tokens where the draft equals the model's token
    cost: float  # of a draft token, in plain steps
    skipped: tuple[int, ...]


def main(
    output: lab.Output,
    dtype: lab.Dtype = None,
    suite: lab.Suite = SIX_TASKS,
    questions: lab.Questions = None,
    limit: Annotated[int, typer.Option(help="Questions, spread over the suite.")] = 12,
    new_tokens: lab.NewTokens = 32,
    ratio: Annotated[float, typer.Option(help="Largest share of the layers to skip.")] = 0.45,
) -> None:
    speculator = lab.load(heads="none", dtype=dtype)
    prompts = lab.prompts(suite, questions, limit)
    with torch.inference_mode():
        answers = [state_of(speculator, turn, new_tokens) for turn in lab.track(prompts, "answers")]
        best = path(speculator, answers, int(ratio * speculator.backbone.num_layers))
    rows = [[*(f"{figure:.3f}" for figure in found[:3]), as_word(found.skipped)] for found in best]
    chosen, tokens = max(best), sum(count for _, count in answers)
    summary: dict[str, Any] = {"questions": len(answers), "tokens": tokens}
    summary |= {"sizes": [found._asdict() for found in best], "skipped": chosen.skipped}
    text = f"# Layers that Self-SD leaves out: {as_word(chosen.skipped)}\n\n    {lab.command()}\n\n"
    text += lab.table(["tokens a step", "drafts right", "a draft's cost", "left out"], rows)
    lab.finish(output, summary, text)


def state_of(speculator: Speculator, prompt: str, count: int) -> tuple[DecodeState, int]:
    """The state after a prompt and its answer by all layers, and the number of answer tokens."""
    request = greedy_request(speculator, prompt, count)
    plain, options = request.only(), replace(request.speculation, speculate=False)
    kv = KVCache(speculator.backbone.num_layers)  # an engine reuses its own pages for other texts
    running = speculator.engine().add(replace(plain, kv=kv), options)
    tokens = [token for entry in running for token in entry.tokens]
    return running.state, len(tokens)


def path(
    speculator: Speculator, answers: Sequence[tuple[DecodeState, int]], most: int
) -> list[Found]:
    """The best set of each size up to `most`, found greedily. Layer 1 is never skipped."""
    best, chosen = list[Found](), set[int]()
    for _ in lab.track(range(most), "sizes", "sizes"):
        others = {*range(2, speculator.backbone.num_layers + 1)} - chosen
        candidates = (tuple(sorted({*chosen, layer})) for layer in others)
        best.append(max(measure_drafts(speculator, answers, skipped) for skipped in candidates))
        chosen = {*best[-1].skipped}
    return best


def measure_drafts(
    speculator: Speculator, answers: Sequence[tuple[DecodeState, int]], skipped: tuple[int, ...]
) -> Found:
    backbone = speculator.backbone
    cost = DraftCost.with_costs(speculator.options.costs, backbone.num_layers)
    cost = replace(cost, token=token_cost_without(skipped, backbone))
    tokens = steps = hits = 0.0
    for state, count in answers:
        guesses = run_alone(redraft(state, skipped, count)).logits.softmax(-1).max(-1)
        right = (guesses.indices == state.ids[0, -count:]).tolist()
        for drafted, kept in rounds(right, guesses.values.tolist()):
            tokens += kept + 1
            steps += cost.steps([(SKIP, 0)] * drafted)
        hits += sum(right)
    return Found(tokens / steps, hits / sum(n for _, n in answers), cost.token, skipped)


def rounds(right: Sequence[bool], confidences: Sequence[float]) -> list[tuple[int, int]]:
    """Tokens drafted and kept in each round, if drafts are as `right` and `confidences` say."""
    counts, at = [], 0
    while at < len(right):
        most = min(RULE.max_tokens, len(right) - at)
        unsure = (n + 1 for n in range(most) if confidences[at + n] < RULE.threshold)
        drafted = next(unsure, most)
        kept = next((n for n in range(drafted) if not right[at + n]), drafted)
        counts.append((drafted, kept))
        at += kept + 1
    return counts


if __name__ == "__main__":
    lab.run(main)
