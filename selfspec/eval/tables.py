"""The figures of a bench as tables: a summary comes in, Markdown and CSV go out. No arithmetic.

Laid out as SpecBound's Tables 1 (CR and SD by task), 3 (latency) and 5 (by prompt).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from selfspec.eval.suites import OVERALL
from selfspec.eval.summary import ALL, BASES, WITHOUT_LOOPS

Summary = Mapping[str, Any]

NAMES = {"plain": "plain decoding on our runtime", "hugging-face": "Hugging Face's generate"}


class Table(NamedTuple):
    """Words in cells."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(summary: Summary) -> list[Table]:
    """All tables of one bench."""
    measured = [base for base in BASES if _has(summary, base)]
    by_task = [
        speed_table(summary, base, group) for group in (ALL, WITHOUT_LOOPS) for base in measured
    ]
    return [
        *by_task,
        *(prompt_table(summary, base) for base in measured),
        quality_table(summary),
        latency_table(summary),
        memory_table(summary),
        parts_table(summary),
        acceptance_table(summary),
        loop_table(summary),
        harness_table(summary),
        methods_table(summary),
    ]


def shown(summary: Summary, label: str) -> str:
    """A method's label, with a warning where its rule changes the output."""
    lossy = summary["methods"].get(label, {}).get("lossy", False)
    return f"{label} (lossy)" if lossy else label


def base_of(summary: Summary) -> str | None:
    """What speed-ups are shown over: plain decoding on our runtime, where it was measured."""
    return next((base for base in BASES if _has(summary, base)), None)


def verdict(summary: Summary) -> str:
    """What was found, in a sentence: the fastest of the methods whose texts are those of plain."""
    base, overall = base_of(summary), summary[ALL].get(OVERALL, {})
    gains = {
        label: overall[label][f"over_{base}"]
        for label, entry in summary["methods"].items()
        if label == entry["method"] and label not in BASES and not entry.get("lossy", False)
        if label in overall and overall[label].get(f"over_{base}")
    }
    if base is None or not gains:
        return "No speed-up can be told: plain decoding or a lossless method was not measured."
    best = max(gains, key=lambda label: float(gains[label]["ratio"]))
    gain, wrote = gains[best], overall[best]["answers"]
    unequal = summary["unequal"].get(best, 0)
    same = f"all {wrote} texts equal" if not unequal else f"{unequal} of {wrote} texts differ"
    faster = f"Fastest of {len(gains)}, {best}: {gain['ratio']:.2f} times as fast as {NAMES[base]}"
    if gain["ratio"] <= 1.0:
        faster = f"Nothing was faster than {NAMES[base]}; {best}: {gain['ratio']:.2f} times"
    return f"{faster} (95 %: {_interval(gain)}), {gain['prompts']} prompts, {same}."


def speed_table(summary: Summary, base: str, group: str) -> Table:
    """CR and SD by method and task, the interval overall: the paper's Table 1."""
    figures = summary[group]
    straight = f", without looping answers ({summary['answers_without_loops']} are left)"
    return Table(
        f"Tokens per verification (CR) and speed-up (SD) over {NAMES[base]}"
        + (straight if group == WITHOUT_LOOPS else ""),
        ["method", *(f"{task} {kind}" for task in figures for kind in ("CR", "SD")), "95 %"],
        [
            [
                shown(summary, label),
                *(cell for task in figures for cell in _pair(figures[task][label], base)),
                _interval(figures[OVERALL][label][f"over_{base}"]),
            ]
            for label in _labels(figures)
        ],
    )


def prompt_table(summary: Summary, base: str) -> Table:
    """How the speed-up differs between prompts: the paper's Table 5."""
    figures = summary[ALL].get(OVERALL, {})
    gains = {label: entry[f"over_{base}"] for label, entry in figures.items()}
    return Table(
        f"Speed-up over {NAMES[base]}, by prompt",
        [
            "method",
            "prompts",
            "total",
            "mean",
            "5th percentile",
            "worst",
            "answers unlike plain decoding's",
        ],
        [
            [
                shown(summary, label),
                str(gain["prompts"]),
                *(f"{gain[name]:.2f}" for name in ("ratio", "mean", "p5", "worst")),
                f"{summary['unequal'][label]} of {summary['answers']}",
            ]
            for label, gain in gains.items()
            if gain
        ],
    )


def quality_table(summary: Summary) -> Table:
    """What methods that do not keep plain decoding's text make of it; CM-ASD's Table V and more."""
    return Table(
        "Quality of texts up to their own end, beside plain greedy decoding's",
        [
            "method",
            "task",
            "answers",
            "equal",
            "equal tokens ahead of the first other one (median)",
            "edits per token",
            "log-likelihood per token, nats (plain)",
            "relative BLEU",
            "with a reference",
            "BLEU (plain)",
            "ROUGE-L (plain)",
        ],
        [
            [shown(summary, label), task, *_quality(found)]
            for label, tasks in summary.get("quality", {}).items()
            for task, found in tasks.items()
        ],
    )


def _quality(found: Mapping[str, Any]) -> list[str]:
    parted = found["median_first_divergence"]
    return [
        str(found["answers"]),
        f"{found['exact_share']:.0%}",
        "-" if parted is None else f"{parted:g}",
        f"{found['edits_per_token']:.2f}",
        f"{found['nats_per_token']:.2f} ({found['plain_nats_per_token']:.2f})",
        f"{found['relative_bleu']:.1f}",
        str(found["with_reference"]),
        *(
            "-"
            if found[name] is None
            else f"{found[name]:{form}} ({found[f'plain_{name}']:{form}})"
            for name, form in (("bleu", ".1f"), ("rouge_l", ".2f"))
        ),
    ]


def memory_table(summary: Summary) -> Table:
    """What each method needs beyond what the process holds anyway."""
    found = summary.get("memory") or {"growth_bytes": {}}
    growth = found["growth_bytes"]
    words = ""
    if growth:
        kind = "allocated on the device" if found["device"] == "cuda" else "resident"
        words = (
            f": {kind} beyond the {found['before_bytes'] / 2**20:,.0f} MiB that all methods share, "
            f"{found['new_tokens']} tokens behind a prompt of {found['prompt_tokens']}"
        )
    return Table(
        f"Peak memory{words}",
        ["method", "growth (MiB)"],
        [[shown(summary, label), f"{size / 2**20:.1f}"] for label, size in growth.items()],
    )


def harness_table(summary: Summary) -> Table:
    """What measuring itself took, next to what was measured."""
    found = summary.get("harness")
    row = []
    if found and found["methods_s"]:
        row = [f"{found['methods_s']:.1f}", f"{found['outside_s']:.3f}", f"{found['share']:.3%}"]
    return Table(
        "The harness itself",
        ["in the methods' calls (s)", "around them (s)", "share"],
        [row] if row else [],
    )


def latency_table(summary: Summary) -> Table:
    """What a user waits for: the paper's Table 3."""
    milliseconds = ("first_token_s", "token_mean_s", "token_p50_s", "token_p95_s")
    return Table(
        "Latency",
        [
            "method",
            "first token (ms)",
            "per token, mean (ms)",
            "median",
            "95th percentile",
            "tokens/s",
            "answer (s)",
        ],
        [
            [
                shown(summary, label),
                *(f"{1e3 * found[name]:.1f}" for name in milliseconds),
                f"{found['tokens_per_s']:.1f}",
                f"{found['answer_s']:.2f}",
            ]
            for label, found in summary["latency"].items()
            if found
        ],
    )


def parts_table(summary: Summary) -> Table:
    """Where the time of our runtime goes."""
    names = list(dict.fromkeys(part for found in summary["parts_s"].values() for part in found))
    return Table(
        "Seconds by part of a round",
        ["method", *names],
        [
            [shown(summary, label), *(f"{found.get(name, 0.0):.2f}" for name in names)]
            for label, found in summary["parts_s"].items()
            if found
        ],
    )


def acceptance_table(summary: Summary) -> Table:
    """Of the drafts of each exit layer and each place in a draft the share that stayed."""

    def shares(counts: Mapping[str, Sequence[int]]) -> str:
        return ", ".join(f"{at}: {kept / drafted:.0%}" for at, (drafted, kept) in counts.items())

    return Table(
        "Accepted drafts",
        ["method", "by exit layer", "by place in the draft"],
        [
            [shown(summary, label), shares(found["by_layer"]), shares(found["by_index"])]
            for label, found in summary["acceptance"].items()
            if found["by_layer"] or found["by_index"]
        ],
    )


def loop_table(summary: Summary) -> Table:
    """Answers in which more than 30 % of the 8-grams are repeats."""
    return Table(
        "Looping answers",
        list(summary["loop_share"]),
        [[f"{share:.0%}" for share in summary["loop_share"].values()]],
    )


def methods_table(summary: Summary) -> Table:
    """What was compared, with which settings."""
    return Table(
        "Methods",
        ["method", "what it is", "setting", "the fastest of"],
        [
            [
                shown(summary, label),
                entry["source"],
                _setting(entry["setting"]),
                ", ".join(entry["chosen_from"]),
            ]
            for label, entry in summary["methods"].items()
        ],
    )


def markdown(table: Table) -> str:
    """With its title as a heading."""
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    cells = ("| " + " | ".join(_escaped(cell) for cell in line) + " |\n" for line in lines)
    return f"## {table.title}\n\n{''.join(cells)}"


def as_csv(summary: Summary) -> str:
    """One line per task and method, with and without looping answers."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    gains = ("ratio", "low", "high", "mean", "p5", "worst", "prompts")
    names = ("answers", "compression_rate", "acceptance_rate")
    over = [f"over_{base}" for base in BASES]
    columns = [f"{base}_{name}" for base in over for name in gains]
    writer.writerow(["answers_in", "task", "method", "lossy", *names, *columns])
    for group in (ALL, WITHOUT_LOOPS):
        for task, methods in summary[group].items():
            for label, found in methods.items():
                cells = [(found[base] or {}).get(name) for base in over for name in gains]
                lossy = summary["methods"][label].get("lossy", False)
                row = [group, task, label, lossy, *(found[name] for name in names), *cells]
                writer.writerow(row)
    return text.getvalue()


def _setting(setting: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in setting.items())


def _has(summary: Summary, base: str) -> bool:
    return any(found[f"over_{base}"] for found in summary[ALL].get(OVERALL, {}).values())


def _labels(figures: Mapping[str, Any]) -> list[str]:
    return list(figures.get(OVERALL, {}))


def _pair(found: Mapping[str, Any], base: str) -> tuple[str, str]:
    gain = found[f"over_{base}"]
    return f"{found['compression_rate']:.2f}", "-" if gain is None else f"{gain['ratio']:.2f}"


def _interval(gain: Mapping[str, float] | None) -> str:
    return "-" if gain is None else f"{gain['low']:.2f} to {gain['high']:.2f}"


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")
