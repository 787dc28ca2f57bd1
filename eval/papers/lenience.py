r"""Lenience: speed against divergence (the blog's knob, without a table there).

    python -m eval.papers.lenience --draft-model draft-model --output eval/results/papers/lenience

Three views of the same rule. Laws over a tiny vocabulary, drawn at random: share of drafts that
stay and total variation, by the closed form. The default model and its draft model: the same at
every place of texts that plain sampling wrote, so without any sampling noise. Live sampling:
tokens per verification, speed, and how likely the model finds what came out. Writes `run.yaml`,
`trials.jsonl`, `prices.json`, `summary.json`, `table.md`, `lenience.png`; goes on where it was
stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from eval.papers import lossy, shared, trials
from eval.papers.divergence import acceptance, committed, random_laws, total_variation
from eval.papers.prices import Prices
from selfspec.api.speculator import Speculator
from selfspec.errors import InvalidOption
from selfspec.eval.report import Table
from selfspec.eval.results import SIX_TASKS
from selfspec.eval.verify import block_logits
from selfspec.options import Lenient

NOTE = """\
# Lenience: speed against divergence

A draft x stays when u < p(x) / (q(x) l). Accepted and total variation (TV) in the first two tables
are exact, by the rule's closed form for one draft; two samplers with a total variation of t can
agree on a token with chance 1 - t at best. Live: CR is tokens per verification; predicted speed
prices rounds by parts measured on this machine, timed is wall time behind the prompt's pass, both
per token over plain sampling; nats: the model's own log-likelihood per token; first choices: share
of tokens that the model finds most likely.
"""

VOCABULARY = 6
LIKENESS = (0.5, 0.8, 0.95)
LAWS = 2000


def main(
    output: Annotated[Path, typer.Option(help="Results folder.")],
    draft_model: Annotated[Path, typer.Option(help="Folder of a smaller model.")],
    dtype: str = "bfloat16",
    suite: str = SIX_TASKS,
    questions: Path | None = None,
    limit: Annotated[int, typer.Option(help="Questions, spread over the suite.")] = 12,
    leniences: Annotated[str, typer.Option(help="l: X[,X..].")] = "1,0.8,0.6,0.4,0.2,0.1",
    temperature: float = 1.0,
    max_draft_tokens: int = 2,
    new_tokens: int = 64,
    seed: int = 0,
) -> None:
    """Enumerate, sample, compare, write."""
    values = [float(value) for value in leniences.split(",")]
    if 1.0 not in values:
        raise InvalidOption("leniences hold no 1: there is nothing to compare with")
    speculator = shared.load(draft_model, dtype, max_tokens=max_draft_tokens)
    asked = shared.first_turns(suite, questions, limit)
    shared.begin(output, speculator)
    prices = shared.priced(output, speculator, max_draft_tokens)
    sampling = {
        "max_new_tokens": new_tokens,
        "do_sample": True,
        "temperature": temperature,
        "top_k": 0,
        "top_p": 1.0,
        "seed": seed,
    }
    settings = {lossy.PLAIN: {**sampling, "speculate": False}}
    settings |= {
        label(value): {**sampling, "acceptance": Lenient(lenience=value)} for value in values
    }
    with shared.progress("lenience") as show:
        found = trials.run(speculator, asked, settings, output / trials.TRIALS, show)
    groups = trials.by_label(found, list(settings))
    summary = {
        "tiny": {
            str(likeness): by_lenience([random_laws(LAWS, VOCABULARY, likeness)], values)
            for likeness in LIKENESS
        },
        "model": by_lenience(laws(speculator, groups[lossy.PLAIN], temperature), values),
        "live": live(speculator, groups, prices),
    }
    made = [tiny_table(summary["tiny"], values), model_table(summary["model"], values)]
    made.append(live_table(summary["live"], len(asked)))
    shared.finish(output, NOTE, summary, made)
    save_figure(summary, values, output / "lenience.png")


def label(lenience: float) -> str:
    """Of one setting."""
    return f"l = {lenience:g}"


def by_lenience(
    pairs: Iterable[tuple[Tensor, Tensor]], values: Sequence[float]
) -> dict[str, dict[str, float]]:
    """Mean acceptance and total variation over all places of target and draft laws [N, V]."""
    places, kept, moved = 0, dict.fromkeys(values, 0.0), dict.fromkeys(values, 0.0)
    for target, draft in pairs:
        places += len(target)
        for value in values:
            kept[value] += float(acceptance(target, draft, value).sum())
            law = committed(target, draft, value)
            moved[value] += float(total_variation(law, target).sum())
    return {
        label(value): {
            "places": places,
            "accepted": kept[value] / places,
            "total_variation": moved[value] / places,
        }
        for value in values
    }


@torch.inference_mode()
def laws(
    speculator: Speculator, group: Sequence[trials.Trial], temperature: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each text the target's and the draft model's laws, [n, V] float32."""
    small = speculator.draft_model
    for trial in group:
        ids = torch.tensor([trial.prompt_ids], device=speculator.backbone.device)
        pair = (
            block_logits(model, ids, trial.token_ids) for model in (speculator.model, small.model)
        )
        target, draft = ((logits / temperature).softmax(-1) for logits in pair)
        yield target, draft


def live(
    speculator: Speculator, groups: Mapping[str, Sequence[trials.Trial]], prices: Prices
) -> dict[str, dict[str, Any]]:
    """Speed of every setting, and how the model finds its text."""
    plain = groups[lossy.PLAIN]
    return {
        name: {
            **lossy.speed(group, plain, prices),
            **likelihood(speculator, group),
        }
        for name, group in groups.items()
    }


@torch.inference_mode()
def likelihood(speculator: Speculator, group: Sequence[trials.Trial]) -> dict[str, float]:
    """Nats per token, and the share of tokens that are the model's first choice."""
    nats, firsts, tokens = 0.0, 0, 0
    for trial in group:
        ids = torch.tensor([trial.prompt_ids], device=speculator.backbone.device)
        logits = block_logits(speculator.model, ids, trial.token_ids)
        text = ids.new_tensor(trial.token_ids)
        nats += float(logits.log_softmax(-1).gather(1, text[:, None]).double().sum())
        firsts += int((logits.argmax(-1) == text).sum())
        tokens += len(text)
    return {"nats_per_token": nats / tokens, "first_choices": firsts / tokens}


def tiny_table(summary: Mapping[str, Any], values: Sequence[float]) -> Table:
    """Leniences down, likeness across."""
    header = ["l"]
    for likeness in summary:
        header += [f"accepted, likeness {likeness}", "TV"]
    rows = []
    for value in values:
        cells = [f"{value:g}"]
        for found in summary.values():
            row = found[label(value)]
            cells += [f"{row['accepted']:.1%}", f"{row['total_variation']:.3f}"]
        rows.append(cells)
    return Table(
        f"{LAWS:,} pairs of laws over {VOCABULARY} tokens; likeness: correlation of their logits",
        header,
        rows,
    )


def model_table(summary: Mapping[str, Any], values: Sequence[float]) -> Table:
    """Leniences down."""
    places = summary[label(values[0])]["places"]
    rows = []
    for value in values:
        row = summary[label(value)]
        cells = (row["accepted"], row["total_variation"], 1 - row["total_variation"])
        rows.append([f"{value:g}", f"{cells[0]:.1%}", f"{cells[1]:.3f}", f"{cells[2]:.1%}"])
    header = ["l", "accepted", "TV", "token agreement at best"]
    return Table(f"Default model, {places:,} places of sampled text", header, rows)


def live_table(summary: Mapping[str, Any], questions: int) -> Table:
    """Settings down."""
    columns = ("nats_per_token", "first_choices")
    return lossy.quality_table(f"Live sampling, questions: {questions}", summary, columns)


def save_figure(summary: Mapping[str, Any], values: Sequence[float], path: Path) -> None:
    """Acceptance against total variation, and live speed against likelihood."""
    figure, axes = shared.panels(2)
    lines = {f"tiny, likeness {name}": found for name, found in summary["tiny"].items()}
    lines["default model"] = summary["model"]
    shared.draw(
        axes[0],
        {
            name: (
                [found[label(value)]["total_variation"] for value in values],
                [found[label(value)]["accepted"] for value in values],
            )
            for name, found in lines.items()
        },
        "one draft, exact",
        "total variation",
        "share of drafts that stay",
    )
    rows = summary["live"]
    shared.draw(
        axes[1],
        {
            kind: (values, [rows[label(value)][name] for value in values])
            for kind, name in (
                ("tokens per verification", "compression_rate"),
                ("predicted speed-up", "predicted_speed_up"),
            )
        },
        "default model, live",
        "lenience l",
        "ratio",
    )
    shared.save(figure, path)


if __name__ == "__main__":
    shared.one_line(main)
