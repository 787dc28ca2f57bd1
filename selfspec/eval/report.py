"""What a bench found: answers come in; figures, tables, its folder and a report of it go out.

A method is compared on the answers that it and the other one wrote; prompts are the units of the
intervals. Tables are laid out as SpecBound's Tables 1 (CR and SD by task), 3 (latency) and 5 (by
prompt). Called by `selfspec bench` and `selfspec report`.
"""

from __future__ import annotations

import base64
import csv
import dataclasses
import html
import io
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from selfspec import files, pages
from selfspec.decoding.stats import PARTS
from selfspec.errors import InvalidData, InvalidOption
from selfspec.eval.results import (
    ANSWERS,
    LOOPING,
    OVERALL,
    TASKS,
    TUNING,
    Answer,
    Run,
    compression_rate,
    failures,
    percentile,
    quality_summary,
    speed_up,
    token_seconds,
)
from selfspec.pages import palette
from selfspec.untrusted import read_json, read_yaml

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

Summary = Mapping[str, Any]
"""All figures of a bench, ready for JSON."""

BASES = ("plain", "hugging-face")
"""What speed-ups are over, where they were measured."""

NAMES = {"plain": "plain decoding on our runtime", "hugging-face": "Hugging Face's generate"}

ALL, WITHOUT_LOOPS = "all", "without_loops"

# --- figures --------------------------------------------------------------------------------------


def summarise(
    answers: Sequence[Answer],
    methods: Mapping[str, Mapping[str, Any]],
    seed: int = 0,
    memory: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All figures of `methods`, which are described by label; `seed` is the bootstrap's.

    `memory` is what `Bench.memory` found.
    """
    measured = [answer for answer in answers if answer.error is None]
    straight = [answer for answer in measured if answer.repeated <= LOOPING]
    runs = {label: _runs(measured, label) for label in methods}
    texts = {
        label: {
            task: quality_summary(looked)
            for task, group in by_task(measured).items()
            if (looked := [run.quality for run in _runs(group, label) if run.quality is not None])
        }
        for label in methods
    }
    return {
        "methods": methods,
        "questions": len({answer.id for answer in measured}),
        "answers": len(measured),
        "answers_without_loops": len(straight),
        "new_tokens": sum(answer.new_tokens for answer in measured),
        "loop_share": {
            task: sum(answer.repeated > LOOPING for answer in group) / len(group)
            for task, group in by_task(measured).items()
        },
        **{
            name: {
                task: {label: _figures(group, label, seed) for label in methods}
                for task, group in by_task(some).items()
            }
            for name, some in ((ALL, measured), (WITHOUT_LOOPS, straight))
        },
        "latency": {label: _latency(some) for label, some in runs.items()},
        "acceptance": {label: _acceptance(some) for label, some in runs.items()},
        "parts_s": {label: _parts(some) for label, some in runs.items()},
        "unequal": {label: sum(not run.equal for run in some) for label, some in runs.items()},
        "quality": {label: tasks for label, tasks in texts.items() if tasks},
        "harness": _harness(measured),
        "memory": memory,
        "failures": failures(answers),
    }


def by_task(answers: Iterable[Answer]) -> dict[str, list[Answer]]:
    """Spec-Bench's six groups in their order, then other words, then all together."""
    found: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        found[answer.task].append(answer)
        found[OVERALL].append(answer)
    order = [*TASKS, *(task for task in found if task not in (*TASKS, OVERALL)), OVERALL]
    return {task: found[task] for task in order if task in found}


def seconds_by_prompt(
    answers: Iterable[Answer], first: str, second: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Wall seconds by question of two methods, over the answers that both wrote."""
    found: tuple[dict[str, float], dict[str, float]] = {}, {}
    for answer in answers:
        runs = [*_runs([answer], first), *_runs([answer], second)]
        if len(runs) == 2:
            for total, run in zip(found, runs, strict=True):
                total[answer.id] = total.get(answer.id, 0.0) + run.seconds
    return found


def _runs(answers: Iterable[Answer], label: str) -> list[Run]:
    """The runs of one method that gave an answer."""
    found = [answer.runs[label] for answer in answers if label in answer.runs]
    return [run for run in found if run.error is None]


def _figures(answers: Sequence[Answer], label: str, seed: int) -> dict[str, Any]:
    """Of one method on one group. A speed-up is None where its base, or the method, wrote none."""
    runs = _runs(answers, label)
    pairs = _acceptance(runs)["by_index"].values()
    drafted, accepted = (sum(pair[at] for pair in pairs) for at in (0, 1))
    found: dict[str, Any] = {
        "answers": len(runs),
        "compression_rate": compression_rate(run.arrivals for run in runs),
        "acceptance_rate": accepted / drafted if drafted else None,
    }
    for base in BASES:
        below, above = seconds_by_prompt(answers, label, base)
        gain = dataclasses.asdict(speed_up(above, below, seed)) if above else None
        found[f"over_{base}"] = gain
    return found


def _acceptance(runs: Sequence[Run]) -> dict[str, dict[str, list[int]]]:
    """Drafted and accepted by exit layer and by draft index; keys as JSON has them."""
    found = {}
    for kind in ("layer", "index"):
        drafted, accepted = Counter[str](), Counter[str]()
        for run in runs:
            drafted.update(run.counts.get(f"drafted_by_{kind}", {}))
            accepted.update(run.counts.get(f"accepted_by_{kind}", {}))
        pairs = {key: [drafted[key], accepted[key]] for key in sorted(drafted, key=int)}
        found[f"by_{kind}"] = pairs
    return found


def _latency(runs: Sequence[Run]) -> dict[str, float]:
    """What a user waits for, in seconds; empty without runs."""
    if not runs:
        return {}
    tokens = [seconds for run in runs for seconds in token_seconds(run.arrivals)]
    total = sum(run.seconds for run in runs)
    return {
        "first_token_s": sum(run.arrivals[0][1] for run in runs) / len(runs),
        "token_mean_s": sum(tokens) / len(tokens) if tokens else 0.0,
        "token_p50_s": percentile(tokens, 0.5) if tokens else 0.0,
        "token_p95_s": percentile(tokens, 0.95) if tokens else 0.0,
        "tokens_per_s": sum(count for run in runs for count, _ in run.arrivals) / total,
        "answer_s": total / len(runs),
    }


def _parts(runs: Iterable[Run]) -> dict[str, float]:
    """Seconds by part of a round, summed."""
    total: Counter[str] = Counter()
    for run in runs:
        total.update(run.counts.get("seconds", {}))
    return dict(total)


def _harness(answers: Sequence[Answer]) -> dict[str, float]:
    """Seconds in the methods' calls and around them, of answers that all methods wrote."""
    whole = [a for a in answers if all(run.error is None for run in a.runs.values())]
    inside = sum(run.seconds for answer in whole for run in answer.runs.values())
    outside = sum(answer.outside_s for answer in whole)
    share = outside / inside if inside else 0.0
    return {"methods_s": inside, "outside_s": outside, "share": share}


def base_of(summary: Summary) -> str | None:
    """What speed-ups are shown over: plain decoding on our runtime, where it was measured."""
    return next(iter(_bases(summary)), None)


def _bases(summary: Summary) -> list[str]:
    found = summary[ALL].get(OVERALL, {}).values()
    return [base for base in BASES if any(figures[f"over_{base}"] for figures in found)]


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


# --- tables: words in cells, no arithmetic --------------------------------------------------------


class Table(NamedTuple):
    """Words in cells."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(summary: Summary) -> list[Table]:
    """All tables of one bench."""
    bases = _bases(summary)
    return [
        *(_speed(summary, base, group) for group in (ALL, WITHOUT_LOOPS) for base in bases),
        *(_by_prompt(summary, base) for base in bases),
        _quality(summary),
        _latency_table(summary),
        _memory(summary),
        _parts_table(summary),
        acceptance_table(summary),
        Table(
            "Looping answers",
            list(summary["loop_share"]),
            [[f"{share:.0%}" for share in summary["loop_share"].values()]],
        ),
        _harness_table(summary),
        Table(
            "Methods",
            _head("method | what it is | setting | the fastest of"),
            [
                [
                    shown(summary, label),
                    entry["source"],
                    ", ".join(f"{name}={value}" for name, value in entry["setting"].items()),
                    ", ".join(entry["chosen_from"]),
                ]
                for label, entry in summary["methods"].items()
            ],
        ),
    ]


def shown(summary: Summary, label: str) -> str:
    """A method's label, with a warning where its rule changes the output."""
    lossy = summary["methods"].get(label, {}).get("lossy", False)
    return f"{label} (lossy)" if lossy else label


def _head(words: str) -> list[str]:
    return words.split(" | ")


def _rows(summary: Summary, found: Mapping[str, Any], form: str) -> list[list[str]]:
    """A row for each method that has figures, its cells as in `form`."""
    return [
        [shown(summary, label), *_head(form.format(**figures))]
        for label, figures in found.items()
        if figures
    ]


def _interval(gain: Mapping[str, float] | None) -> str:
    return "-" if gain is None else f"{gain['low']:.2f} to {gain['high']:.2f}"


def _speed(summary: Summary, base: str, group: str) -> Table:
    """CR and SD by method and task, the interval overall: the paper's Table 1."""
    figures, over = summary[group], f"over_{base}"

    def pair(found: Mapping[str, Any]) -> tuple[str, str]:
        gain = found[over]
        return f"{found['compression_rate']:.2f}", "-" if gain is None else f"{gain['ratio']:.2f}"

    title = f"Tokens per verification (CR) and speed-up (SD) over {NAMES[base]}"
    if group == WITHOUT_LOOPS:
        title += f", without looping answers ({summary['answers_without_loops']} are left)"
    return Table(
        title,
        ["method", *(f"{task} {kind}" for task in figures for kind in ("CR", "SD")), "95 %"],
        [
            [
                shown(summary, label),
                *(cell for task in figures for cell in pair(figures[task][label])),
                _interval(overall[over]),
            ]
            for label, overall in figures.get(OVERALL, {}).items()
        ],
    )


def _by_prompt(summary: Summary, base: str) -> Table:
    """How the speed-up differs between prompts: the paper's Table 5."""
    gains = {
        label: {**gain, "unlike": f"{summary['unequal'][label]} of {summary['answers']}"}
        for label, figures in summary[ALL].get(OVERALL, {}).items()
        if (gain := figures[f"over_{base}"])
    }
    head = "method | prompts | total | mean | 5th percentile | worst"
    form = "{prompts} | {ratio:.2f} | {mean:.2f} | {p5:.2f} | {worst:.2f} | {unlike}"
    return Table(
        f"Speed-up over {NAMES[base]}, by prompt",
        [*_head(head), "answers unlike plain decoding's"],
        _rows(summary, gains, form),
    )


def _quality(summary: Summary) -> Table:
    """What methods that do not keep plain decoding's text make of it; CM-ASD's Table V and more."""
    rows = []
    for label, tasks in summary.get("quality", {}).items():
        for task, found in tasks.items():
            parted = found["median_first_divergence"]
            form = (
                "{task} | {answers} | {exact_share:.0%} | {parted} | {edits_per_token:.2f} | "
                "{nats_per_token:.2f} ({plain_nats_per_token:.2f}) | {relative_bleu:.1f} | "
                "{with_reference} | "
            )
            if found["with_reference"]:
                form += "{bleu:.1f} ({plain_bleu:.1f}) | {rouge_l:.2f} ({plain_rouge_l:.2f})"
            else:
                form += "- | -"
            cells = {**found, "task": task, "parted": "-" if parted is None else f"{parted:g}"}
            rows += _rows(summary, {label: cells}, form)
    return Table(
        "Quality of texts up to their own end, beside plain greedy decoding's",
        _head(
            "method | task | answers | equal | equal tokens ahead of the first other one (median) "
            "| edits per token | log-likelihood per token, nats (plain) | relative BLEU "
            "| with a reference | BLEU (plain) | ROUGE-L (plain)"
        ),
        rows,
    )


def _memory(summary: Summary) -> Table:
    """What each method needs beyond what the process holds anyway."""
    found, words = summary.get("memory"), ""
    if found:
        kind = "allocated on the device" if found["device"] == "cuda" else "resident"
        words = (
            f": {kind} beyond the {found['before_bytes'] / 2**20:,.0f} MiB that all methods share, "
            f"{found['new_tokens']} tokens behind a prompt of {found['prompt_tokens']}"
        )
    growth = {} if not found else found["growth_bytes"]
    mebibytes = {label: {"size": size / 2**20} for label, size in growth.items()}
    head = ["method", "growth (MiB)"]
    return Table(f"Peak memory{words}", head, _rows(summary, mebibytes, "{size:.1f}"))


def _harness_table(summary: Summary) -> Table:
    """What measuring itself took, next to what was measured."""
    found, form = summary.get("harness"), "{methods_s:.1f} | {outside_s:.3f} | {share:.3%}"
    return Table(
        "The harness itself",
        _head("in the methods' calls (s) | around them (s) | share"),
        [_head(form.format(**found))] if found and found["methods_s"] else [],
    )


def _latency_table(summary: Summary) -> Table:
    """What a user waits for: the paper's Table 3."""
    waits = ("first_token", "token_mean", "token_p50", "token_p95")
    figures = {
        label: {**found, **{f"{name}_ms": 1e3 * found[f"{name}_s"] for name in waits}}
        for label, found in summary["latency"].items()
        if found
    }
    form = " | ".join(f"{{{name}_ms:.1f}}" for name in waits)
    head = "method | first token (ms) | per token, mean (ms) | median | 95th percentile"
    return Table(
        "Latency",
        [*_head(head), "tokens/s", "answer (s)"],
        _rows(summary, figures, form + " | {tokens_per_s:.1f} | {answer_s:.2f}"),
    )


def _parts_table(summary: Summary) -> Table:
    """Where the time of our runtime goes."""
    names = list(dict.fromkeys(part for found in summary["parts_s"].values() for part in found))
    rows = [
        [shown(summary, label), *(f"{found.get(name, 0.0):.2f}" for name in names)]
        for label, found in summary["parts_s"].items()
        if found
    ]
    return Table("Seconds by part of a round", ["method", *names], rows)


def acceptance_table(summary: Summary) -> Table:
    """Of the drafts of each exit layer and each place in a draft the share that stayed."""

    def shares(counts: Mapping[str, Sequence[int]]) -> str:
        return ", ".join(f"{at}: {kept / drafted:.0%}" for at, (drafted, kept) in counts.items())

    rows = [
        [shown(summary, label), shares(found["by_layer"]), shares(found["by_index"])]
        for label, found in summary["acceptance"].items()
        if found["by_layer"] or found["by_index"]
    ]
    return Table("Accepted drafts", ["method", "by exit layer", "by place in the draft"], rows)


def markdown(table: Table) -> str:
    """With its title as a heading."""
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return f"## {table.title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in cells)


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


# --- the folder of a run --------------------------------------------------------------------------

RUN, SUMMARY = "run.yaml", "summary.json"
FILES = (RUN, ANSWERS, TUNING, SUMMARY, "table.md", "table.csv")


class Results(NamedTuple):
    """What a finished folder holds."""

    name: str
    run: dict[str, Any]
    """What was asked, and on which machine."""
    summary: dict[str, Any]


def check_results(
    folder: str | Path, *, overwrite: bool, resume: bool, reads: Iterable[object] = ()
) -> Path:
    """The folder. Raises CannotWrite, InvalidOption for results that nobody gave up."""
    if overwrite and resume:
        raise InvalidOption("--overwrite and --resume at once, expected one")

    def is_run(folder: Path) -> bool:
        return (folder / RUN).exists() and files.written_here(folder / RUN)

    folder = files.check_folder(folder, FILES, is_run, overwrite=True, reads=reads)
    if is_run(folder) and not (overwrite or resume):
        raise InvalidOption(f"{folder} holds results. Give --resume, --overwrite or another folder")
    return folder


def begin_results(folder: Path, run: Mapping[str, Any], *, resume: bool) -> None:
    """Make the folder and say what will be measured, or check that a run to go on with is the same.

    Without `resume` what an earlier run left is removed. Raises InvalidOption for another run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RUN
    if resume and path.exists():
        earlier = _mapping(read_yaml(path), path)
        for part, values in run.items():
            for name, value in values.items():
                if (before := _mapping(earlier.get(part), path).get(name)) != value:
                    raise InvalidOption(
                        f"cannot resume {folder}: {part} {name} was {before}, now it is {value}"
                    )
        return
    text = yaml.safe_dump(dict(run), sort_keys=False, allow_unicode=True)
    with files.replacing(path) as new:  # a full disk is met before anything is removed
        new.write_text(f"# written by selfspec bench\n{text}", encoding="utf-8")
        for name in FILES[1:]:
            (folder / name).unlink(missing_ok=True)


def write_results(folder: Path, summary: Mapping[str, Any]) -> str:
    """Write the figures as JSON, Markdown and CSV; returns the Markdown."""
    text = "\n".join(markdown(table) for table in tables(summary))
    files.write(folder / SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    files.write(folder / "table.csv", as_csv(summary))
    files.write(folder / "table.md", text)
    return text


def read_results(folder: Path) -> Results:
    """Raises InvalidData where a finished run is expected and is none."""
    try:
        run = _mapping(read_yaml(folder / RUN), folder / RUN)
        summary = _mapping(read_json(folder / SUMMARY), folder / SUMMARY)
    except InvalidData as error:
        raise InvalidData(f"{folder} holds no finished run of selfspec bench: {error}") from error
    return Results(folder.resolve().name, run, summary)


def _mapping(values: Any, path: Path) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise InvalidData(f"{path} has a {type(values).__name__}, expected names and values")
    return values


# --- pictures -------------------------------------------------------------------------------------

BLUE = palette.RAMP[1]
INK, PALE = palette.TONES["ink"].light, palette.TONES["other"].light


def gains_of(summary: Summary, base: str) -> dict[str, Mapping[str, float]]:
    """Speed-ups by method, without sweeps and those that have none."""
    overall = summary[ALL].get(OVERALL, {})
    return {
        shown(summary, label): overall[label][f"over_{base}"]
        for label, entry in summary["methods"].items()
        if label == entry["method"] and label in overall and overall[label][f"over_{base}"]
    }


def save_gains(gains: Mapping[str, Mapping[str, float]], base: str, path: Path) -> None:
    """One bar per method, with its interval; the fastest stands out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 0.9 + 0.42 * len(gains)), layout="constrained")
    axes = figure.subplots()
    ratios, low, high = ([gain[end] for gain in gains.values()] for end in ("ratio", "low", "high"))
    colours = [BLUE if ratio == max(ratios) else PALE for ratio in ratios]
    rows = range(len(gains))
    axes.barh(rows, ratios, color=colours, height=0.66, tick_label=list(gains))
    axes.hlines(rows, low, high, color=INK, linewidth=1.2)
    for row, ratio, end in zip(rows, ratios, high, strict=True):
        axes.annotate(f"{ratio:.2f}", (end, row), (6, 0), textcoords="offset points", va="center")
    axes.axvline(1.0, color=INK, linewidth=0.8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    prompts = max(gain["prompts"] for gain in gains.values())
    axes.set_xlabel(f"speed-up [× {base}]; n = {prompts} prompts")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _save(figure, path)


def profile_of(summary: Summary, base: str) -> dict[str, dict[str, float]]:
    """By method on our runtime, without sweeps: its parts in percent of all that `base` took."""
    seconds = {
        shown(summary, label): found
        for label, found in summary["parts_s"].items()
        if found and label == summary["methods"][label]["method"]
    }
    whole = sum(seconds.get(base, {}).values())
    if not whole:
        return {}
    return {
        label: {part: 100 * found.get(part, 0.0) / whole for part in PARTS}
        for label, found in seconds.items()
    }


def save_profile(
    profile: Mapping[str, Mapping[str, float]], base: str, answers: int, path: Path
) -> None:
    """One bar per method, its parts end to end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 1.2 + 0.4 * len(profile)), layout="constrained")
    axes = figure.subplots()
    ends = [0.0] * len(profile)
    for part in PARTS:
        percent = [found[part] for found in profile.values()]
        axes.barh(list(profile), percent, left=ends, label=part)
        ends = [end + width for end, width in zip(ends, percent, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(f"time [% of {base}]; n = {answers} answers")
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    with files.replacing(path) as new:
        figure.savefig(new, dpi=120, metadata={"Software": "selfspec"})


# --- the report: one page in Markdown and in HTML -------------------------------------------------

TITLE = "selfspec: measured"

DEFINITIONS = (
    "CR is tokens committed per verification; the prompt's own pass is not one. SD, the speed-up, "
    "is the ratio of total wall times over the same prompts and the same tokens, prompt pass "
    "included. Its 95 % interval is a paired bootstrap over prompts. Per prompt all methods ran in "
    "random order and wrote the tokens of plain decoding's answer, no more and no fewer; a second "
    "turn's prompt holds plain decoding's first answer for all. Tokens of a round arrive together: "
    "the time per token is an equal share of the round's. An answer loops when more than 30 % of "
    "its 8-grams are repeats; loops flatter every drafter. Peak memory is measured in a run of its "
    "own, on the longest first prompt: what the process's resident size (on CUDA: what is "
    "allocated) grows by. Weights, heads and packed copies are in what all methods share, since "
    "one process holds them for all: what one method alone would need cannot be told from it. "
    "The quality of texts is that of answers written once more, untimed, each up to its own end "
    "token; relative BLEU takes plain decoding's text as the reference. A method that is lossy "
    "says so."
)

_HOME = "selfspec.eval"

MARKDOWN, HTML = "report.md", "report.html"

PICTURES = ("methods", "profile")
"""Names of pictures, behind the number of their run."""


class Picture(NamedTuple):
    """A figure that lies beside the report."""

    title: str
    path: Path


class Section(NamedTuple):
    """One run."""

    title: str
    verdict: str
    paragraphs: Sequence[str]
    tables: Sequence[Table]
    pictures: Sequence[Picture] = ()


def write(runs: Sequence[Results], folder: Path) -> tuple[Path, Path]:
    """Write pictures, `report.md` and `report.html` to `folder`; returns the last two.

    Raises InvalidData for results that lack what a report shows, CannotWrite.
    """
    written = [section(run) for run in runs]  # all is read before anything is written
    sections = []
    for number, (run, words) in enumerate(zip(runs, written, strict=True), start=1):
        with _whole(run):
            sections.append(words._replace(pictures=pictures(run, folder, number)))
    made = folder / MARKDOWN, folder / HTML
    files.write(made[0], as_markdown(sections))
    files.write(made[1], as_html(sections))
    return made


def check_free(folder: str | Path, runs: int, *, overwrite: bool) -> Path:
    """The folder. Raises CannotWrite unless a report of so many runs may be written to `folder`."""
    numbered = (f"{n}-{name}.png" for n in range(1, runs + 1) for name in PICTURES)
    return files.check_folder(
        folder,
        (MARKDOWN, HTML, *numbered),
        lambda folder: files.written_here(folder / HTML) and (folder / HTML).exists(),
        overwrite=overwrite,
    )


def section(run: Results) -> Section:
    """A run's words and tables. Raises InvalidData."""
    with _whole(run):
        return Section(run.name, verdict(run.summary), described(run), tables(run.summary))


@contextmanager
def _whole(run: Results) -> Iterator[None]:
    """Raises InvalidData where results lack what is looked for."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InvalidData(
            f"the results {run.name} lack what a report shows: {type(error).__name__} {error}. "
            "Measure again: selfspec bench"
        ) from error


def described(run: Results) -> list[str]:
    """What was measured, where, on what, and what went wrong, in words."""
    asked, model, machine = (run.run[part] for part in ("run", "model", "machine"))
    summary = run.summary
    others = run.run["questions"]["settings_chosen_on"]
    words = [
        f"{model['name']}, {model['dtype']}, on {model['device']}; heads: {model['heads']}. Suite "
        f"{asked['suite']}: {summary['questions']} questions, {summary['answers']} answers, "
        f"{summary['new_tokens']:,} new tokens, at most {asked['max_new_tokens']} each, greedy. "
        f"{asked['repeats']} time(s), seed {asked['seed']}.",
        "Machine: " + ", ".join(f"{name} {value}" for name, value in machine.items()) + ".",
        "Speculation: "
        + ", ".join(f"{name} {value}" for name, value in run.run["speculation"].items())
        + ".",
    ]
    if others:
        words.append(
            f"Settings of methods with a grid were chosen on {len(others)} questions that are not "
            f"among those reported: {', '.join(others)}."
        )
    return words + [f"Failed: {line}" for line in summary["failures"]]


def pictures(run: Results, folder: Path, number: int) -> list[Picture]:
    """Those that the run has figures for; without matplotlib a notice takes their place."""
    if find_spec("matplotlib") is None:
        logger.info("no pictures: they need matplotlib (pip install 'selfspec[eval]')")
        return []
    base, made = base_of(run.summary), list[Picture]()
    if base is None:
        return made
    if len(gains := gains_of(run.summary, base)) > 1:
        made.append(Picture("Methods", folder / f"{number}-methods.png"))
        save_gains(gains, base, made[-1].path)
    if profile := profile_of(run.summary, base):
        made.append(Picture("Where the time goes", folder / f"{number}-profile.png"))
        save_profile(profile, base, run.summary["answers"], made[-1].path)
    return made


def as_markdown(sections: Sequence[Section]) -> str:
    """Each run begins with its verdict and a chart. Pictures are named, not included."""
    parts = [f"# {TITLE}"]
    for section in sections:
        first, *others = [f"![{each.title}]({each.path.name})" for each in section.pictures] or [""]
        parts += [f"## {section.title}", f"**{section.verdict}**", first, *section.paragraphs]
        parts += [f"#{markdown(table)}".rstrip() for table in section.tables if table.rows]
        for picture, words in zip(section.pictures[1:], others, strict=True):
            parts += [f"### {picture.title}", words]
    return "\n\n".join(filter(None, [*parts, "## How to read this", DEFINITIONS])) + "\n"


def as_html(sections: Sequence[Section]) -> str:
    """One file with everything in it; all words are escaped."""
    style = pages.style_of(_HOME, "report.css")
    head = (
        '<meta charset="utf-8"><meta name="generator" content="selfspec">'
        f'<meta http-equiv="Content-Security-Policy" content="{pages.policy("", style)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{_tag('title', TITLE)}<style>{style}</style>"
    )
    told = "\n".join(map(_html_section, sections))
    end = f"<section>{_tag('h2', 'How to read this')}{_tag('p', DEFINITIONS)}</section>"
    body = f"<header>{_tag('h1', TITLE)}</header>\n<main>\n{told}\n{end}\n</main>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _html_section(section: Section) -> str:
    """The verdict and a chart come first."""
    parts = [_tag("h2", section.title), f'<p class="verdict">{html.escape(section.verdict)}</p>']
    parts += map(_html_picture, section.pictures[:1])
    parts += [_tag("p", words) for words in section.paragraphs]
    for table in section.tables:
        if table.rows:
            parts += [_tag("h3", table.title), _html_table(table)]
    for picture in section.pictures[1:]:
        parts += [_tag("h3", picture.title), _html_picture(picture)]
    return "\n".join(["<section>", *parts, "</section>"])


def _html_picture(picture: Picture) -> str:
    data = base64.b64encode(picture.path.read_bytes()).decode()
    alt = html.escape(picture.title)
    return f'<p><img alt="{alt}" src="data:image/png;base64,{data}"></p>'


def _html_table(table: Table) -> str:
    lines = ["".join(_tag("th", cell) for cell in table.header)]
    lines += ["".join(_tag("td", cell) for cell in row) for row in table.rows]
    rows = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>\n{rows}\n</table>"


def _tag(name: str, words: Any) -> str:
    return f"<{name}>{html.escape(str(words))}</{name}>"
