"""Turns the answers of a bench into figures, tables, a results folder and a report.

Two methods are compared on the answers that both wrote; intervals resample prompts. Tables are laid
out like SpecBound's Tables 1 (CR and SD by task), 3 (latency) and 5 (by prompt). Needs the extra
`eval`.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml
from jinja2 import Environment, StrictUndefined, TemplateError
from matplotlib.figure import Figure

from selfspec import files, pages
from selfspec.decoding.stats import counted
from selfspec.errors import InvalidData, InvalidOption, require_same
from selfspec.eval import results
from selfspec.files import json_lines, parse_json, read_json, read_yaml

Summary = Mapping[str, Any]  # all figures of a bench, ready for JSON
BASES = ("plain", "hugging-face")  # methods that speed-ups are relative to, where measured

NAMES = {"plain": "plain decoding on our runtime", "hugging-face": "Hugging Face's generate"}
ALL, WITHOUT_LOOPS = "all", "without_loops"

# --- figures

_COLUMNS = (
    *("id", "task", "turn", "repeat", "looping", "method", "seconds", "equal", "first_s"),
    *("first_tokens", "tokens", "passes", "token_s", "drafted", "accepted", "by_costs"),
    *("counts", "quality"),
)

_PLACE = ["id", "turn", "repeat"]  # identify an answer


def frame_of(answers: Iterable[results.Answer]) -> pd.DataFrame:
    """A row for each run that gave an answer, with the answer's values and the run's.

    tokens and passes are those after the first pass, which is the prompt's. token_s: seconds of
    each of these tokens; the tokens of a round arrive together and share its seconds.
    """
    rows = [
        {
            **vars(answer),
            **vars(run),
            "looping": answer.repeated > results.LOOPING,
            "method": label,
            "first_s": run.arrivals[0][1],
            "first_tokens": run.arrivals[0][0],
            "tokens": sum(count for count, _ in run.arrivals[1:]),
            "passes": len(run.arrivals) - 1,
            "token_s": [s / count for count, s in run.arrivals[1:] for _ in range(count)],
            "drafted": int(sum(run.counts.get("drafted_by_index", {}).values())),
            "accepted": int(sum(run.counts.get("accepted_by_index", {}).values())),
        }
        for answer in answers
        for label, run in answer.runs.items()
        if run.error is None
    ]
    return pd.DataFrame(rows, columns=_COLUMNS)


def seconds_by_prompt(runs: pd.DataFrame, *labels: str) -> pd.DataFrame:
    """Wall seconds by question, [P, labels], of the answers that all these methods wrote."""
    wide = runs.pivot(index=_PLACE, columns="method", values="seconds")
    return wide.reindex(columns=list(labels)).dropna().groupby("id", sort=False).sum()


def by_task(runs: pd.DataFrame, work: Callable[[pd.DataFrame], Any]) -> dict[str, Any]:
    """`work` on each of Spec-Bench's six groups in order, then on other tasks, then on all."""
    tasks = {task: runs[runs.task == task] for task in dict.fromkeys((*results.TASKS, *runs.task))}
    groups = tasks | {results.OVERALL: runs}
    return {task: work(group) for task, group in groups.items() if len(group)}


def summarise(
    answers: Sequence[results.Answer], methods: Mapping[str, Mapping[str, Any]], seed: int = 0
) -> dict[str, Any]:
    """All figures of `methods`, given as descriptions by label; `seed` is the bootstrap's."""
    measured = [answer for answer in answers if answer.error is None]
    frame = frame_of(measured)
    straight = frame[~frame.looping.astype(bool)]
    groups = {label: frame[frame.method == label] for label in methods}
    judged = {label: runs[runs.quality.notna()] for label, runs in groups.items()}
    return {
        "methods": methods,
        "questions": len({answer.id for answer in measured}),
        "answers": len(measured),
        "answers_without_loops": sum(answer.repeated <= results.LOOPING for answer in measured),
        "new_tokens": sum(answer.new_tokens for answer in measured),
        "loop_share": by_task(frame.drop_duplicates(_PLACE), lambda group: group.looping.mean()),
        ALL: by_task(frame, partial(_figures, methods=methods, seed=seed)),
        WITHOUT_LOOPS: by_task(straight, partial(_figures, methods=methods, seed=seed)),
        "latency": {label: _latency(runs) for label, runs in groups.items()},
        "acceptance": {
            label: {f"by_{kind}": _draft_counts(runs.counts, kind) for kind in ("layer", "index")}
            for label, runs in groups.items()
        },
        "parts_s": {label: _sums(runs.counts, "seconds") for label, runs in groups.items()},
        "unequal": {label: int((~runs.equal.astype(bool)).sum()) for label, runs in groups.items()},
        "quality": {
            label: by_task(runs, lambda group: results.quality_summary([*group.quality]))
            for label, runs in judged.items()
            if len(runs)
        },
        "failures": results.failures(answers),
    }


def _figures(group: pd.DataFrame, methods: Iterable[str], seed: int) -> dict[str, Any]:
    """Figures by method. A speed-up is None if its base or the method wrote no answer."""
    by_label: dict[str, Any] = {}
    for label in methods:
        runs = group[group.method == label]
        drafted, passes = runs.drafted.sum(), runs.passes.sum()
        by_costs = runs.by_costs.astype(float)
        by_label[label] = {
            "answers": len(runs),
            "compression_rate": float(runs.tokens.sum() / passes) if passes else None,
            "acceptance_rate": float(runs.accepted.sum() / drafted) if drafted else None,
            "worst_by_costs": float(by_costs.fillna(1.0).min()) if by_costs.any() else None,
        }
        for base in BASES:
            above, below = seconds_by_prompt(group, base, label).to_numpy().T
            gain = asdict(results.speed_up(above, below, seed)) if len(above) else None
            by_label[label][f"over_{base}"] = gain
    return by_label


def _sums(counts: pd.Series, name: str) -> dict[str, float]:
    sums: dict[str, float] = pd.DataFrame([c.get(name, {}) for c in counts]).sum().to_dict()
    return sums


def _draft_counts(counts: pd.Series, kind: str) -> dict[str, list[int]]:
    """Drafted and accepted tokens by exit layer or by draft index; keys are text, as in JSON."""
    drafted, accepted = (_sums(counts, f"{word}_by_{kind}") for word in ("drafted", "accepted"))
    return {key: [int(drafted[key]), int(accepted.get(key, 0))] for key in sorted(drafted, key=int)}


def _latency(runs: pd.DataFrame) -> dict[str, float]:
    """How long a user waits, in seconds; empty without runs."""
    if not len(runs):
        return {}
    tokens = runs.token_s.explode().astype(float)  # NaN, ignored, for answers of one token
    latency = {
        "first_token_s": runs.first_s.mean(),
        "token_mean_s": tokens.mean(),
        "token_p50_s": tokens.quantile(0.5),
        "token_p95_s": tokens.quantile(0.95),
        "tokens_per_s": (runs.tokens.sum() + runs.first_tokens.sum()) / runs.seconds.sum(),
        "answer_s": runs.seconds.mean(),
    }
    return {name: float(value) for name, value in latency.items() if pd.notna(value)}


def bases(summary: Summary) -> list[str]:
    """The measured BASES of speed-ups; plain decoding on our runtime comes first."""
    overall = summary[ALL].get(results.OVERALL, {}).values()
    return [base for base in BASES if any(figures[f"over_{base}"] for figures in overall)]


def _main_labels(summary: Summary) -> list[str]:
    """Labels without those of sweeps, unless only sweeps and bases were measured."""
    labels = [label for label, entry in summary["methods"].items() if label == entry["method"]]
    return labels if {*labels} - {*BASES} else [*summary["methods"]]


def gains_of(summary: Summary) -> tuple[str, dict[str, Mapping[str, float]]]:
    """The first of `bases`, and the speed-ups over it by label, for labels of `_main_labels`."""
    base, overall = [*bases(summary), ""][0], summary[ALL].get(results.OVERALL, {})
    gains = {label: overall.get(label, {}).get(f"over_{base}") for label in _main_labels(summary)}
    return base, {label: gain for label, gain in gains.items() if gain}


def verdict(summary: Summary) -> str:
    """The result in a sentence: the fastest of the methods whose texts are plain decoding's."""
    base, all_gains = gains_of(summary)
    gains = {
        label: gain
        for label, gain in all_gains.items()
        if label not in BASES and not summary["methods"][label].get("lossy")
        if not summary["methods"][label]["setting"].get("do_sample")
    }
    if not gains:
        return "No speed-up is known: plain decoding or a lossless method was not measured."
    best = max(gains, key=lambda label: float(gains[label]["ratio"]))
    gain, count = gains[best], summary[ALL][results.OVERALL][best]["answers"]
    unequal = summary["unequal"].get(best, 0)
    texts = f"all {count} texts equal" if count > 1 else "the same text"
    texts = f"{unequal} of {count} texts differ" if unequal else texts
    rank = f", the fastest of {len(gains)}" if len(gains) > 1 else ""
    speed = f"{best}{rank}: {gain['ratio']:.2f} times as fast as {NAMES[base]}"
    if gain["ratio"] <= 1.0:
        speed = f"Nothing was faster than {NAMES[base]}; {best}: {gain['ratio']:.2f} times"
    interval = f"{gain['low']:.2f} to {gain['high']:.2f}"
    return f"{speed} (95 %: {interval}), {counted(int(gain['prompts']), 'prompt')}, {texts}."


def rates(summary: Summary) -> str:
    """Tokens per second of each method, prompts included, as a line; none if nothing answered."""
    names = {"hugging-face": "Hugging Face", "plain": "without drafts", "speculation": "selfspec"}
    speeds = {
        names.get(label, label): latency["tokens_per_s"]
        for label in _main_labels(summary)
        if (latency := summary["latency"][label])
    }
    line = ", ".join(f"{name} {rate:.1f}" for name, rate in speeds.items())
    return f"{line} tokens/s\n" if line else ""


# --- tables


class Table(NamedTuple):
    """A table with its title."""

    title: str
    cells: pd.DataFrame
    digits: int = 2

    def words(self) -> pd.DataFrame:
        """The cells as text; "-" for missing ones."""

        def word(value: Any) -> str:
            if pd.isna(value):
                return "-"
            return f"{value:.{self.digits}f}" if isinstance(value, float) else str(value)

        return self.cells.astype(object).map(word)


def figures(summary: Summary) -> pd.DataFrame:
    """Figures with one row per group of answers, task and method."""
    rows = [
        {"answers_in": group, "task": task, "method": label} | values
        for group in (ALL, WITHOUT_LOOPS)
        for task, methods in summary[group].items()
        for label, values in methods.items()
    ]
    return pd.json_normalize(rows, sep="_")


def tables(summary: Summary) -> list[Table]:
    """All tables of a bench that have rows; methods whose rule changes the output are marked."""
    frame, baselines = figures(summary), bases(summary)
    latency = _by_method(summary["latency"])
    waits = latency.filter(like="token_")
    latency[waits.columns] = 1e3 * waits
    names = ["method", "what it is", "setting", "the fastest of"]
    rows = [
        (label, entry["source"], settings, ", ".join(entry["chosen_from"]))
        for label, entry in summary["methods"].items()
        for settings in [", ".join(f"{k}={v}" for k, v in entry["setting"].items())]
    ]
    all_tables = [
        *(_speed(summary, frame, base, key) for key in (ALL, WITHOUT_LOOPS) for base in baselines),
        *(_by_prompt(summary, frame, base) for base in baselines),
        _quality(summary),
        _excerpt("Latency", latency, _WAITS, digits=1),
        Table("Seconds by part of a round", _by_method(summary["parts_s"]).fillna(0.0)),
        acceptance_table(summary),
        Table(
            "Looping answers",
            pd.DataFrame([{t: f"{share:.0%}" for t, share in summary["loop_share"].items()}]),
        ),
        Table("Methods", pd.DataFrame(rows, columns=names)),
    ]
    marks = {"method": {label: marked_label(summary, label) for label in summary["methods"]}}
    return [one._replace(cells=one.cells.replace(marks)) for one in all_tables if one.cells.size]


def marked_label(summary: Summary, label: str) -> str:
    """A method's label, with a warning if its rule changes the output."""
    return f"{label} (lossy)" if summary["methods"][label].get("lossy") else label


_WAITS = {
    "first_token_s": "first token (ms)",
    "token_mean_s": "per token, mean (ms)",
    "token_p50_s": "median",
    "token_p95_s": "95th percentile",
    "tokens_per_s": "tokens/s",
    "answer_s": "answer (s)",
}
"""Columns of the table of latencies, the paper's Table 3."""


def _by_method(rows: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame([{"method": label, **values} for label, values in rows.items() if values])


def _excerpt(title: str, frame: pd.DataFrame, headers: Mapping[str, str], digits: int = 2) -> Table:
    """A table of the method and of some columns, which get new headers."""
    return Table(title, frame.reindex(columns=["method", *headers]).rename(columns=headers), digits)


def _speed(summary: Summary, frame: pd.DataFrame, base: str, group: str) -> Table:
    """CR and SD by method and task, with the overall interval: the paper's Table 1."""
    title = f"Tokens per verification (CR) and speed-up (SD) over {NAMES[base]}"
    if group == WITHOUT_LOOPS:
        title += f", without looping answers ({summary['answers_without_loops']} are left)"
    frame = frame.rename(columns=lambda name: name.removeprefix(f"over_{base}_"))
    columns = dict[str, pd.Series]()
    for task, part in frame[frame.answers_in == group].groupby("task", sort=False):
        part = part.set_index("method")
        columns |= {f"{task} CR": part.compression_rate, f"{task} SD": part.ratio}
        if task == results.OVERALL:
            ends = Table("", part[["low", "high"]]).words()
            columns["95 %"] = (ends.low + " to " + ends.high).where(part.low.notna(), "-")
    return Table(title, pd.DataFrame(columns).rename_axis("method").reset_index())


def _by_prompt(summary: Summary, frame: pd.DataFrame, base: str) -> Table:
    """How the speed-up differs between prompts: the paper's Table 5."""
    frame = frame.rename(columns=lambda name: name.removeprefix(f"over_{base}_"))
    frame = frame[(frame.answers_in == ALL) & frame.ratio.notna()]
    overall = frame[frame.task == results.OVERALL]
    pairs = zip(overall.method, overall.answers, strict=True)
    unlike = [f"{summary['unequal'][label]} of {count}" for label, count in pairs]
    headers = {"prompts": "prompts", "ratio": "total", "mean": "mean", "p5": "5th percentile"}
    headers |= {"worst": "worst", "worst_by_costs": "worst answer by costs, behind its prompt"}
    headers |= {"unlike": "answers unlike plain decoding's"}
    title = f"Speed-up over {NAMES[base]}, by prompt"
    return _excerpt(title, overall.astype({"prompts": int}).assign(unlike=unlike), headers)


_QUALITY = {
    "task": "task",
    "answers": "answers",
    "exact_share": "equal",
    "median_first_divergence": "equal tokens ahead of the first other one (median)",
    "edits_per_token": "edits per token",
    "nats_per_token": "log-likelihood per token, nats",
    "plain_nats_per_token": "plain's",
    "relative_bleu": "relative BLEU",
    "with_reference": "with a reference",
    "bleu": "BLEU",
    "plain_bleu": "plain's BLEU",
    "rouge_l": "ROUGE-L",
    "plain_rouge_l": "plain's ROUGE-L",
}


def _quality(summary: Summary) -> Table:
    """Quality of methods that may change plain decoding's text; CM-ASD's Table V and more."""
    rows = [
        {"method": label, "task": task, **values}
        for label, tasks in summary.get("quality", {}).items()
        for task, values in tasks.items()
    ]
    title = "Quality of texts up to their own end, beside plain greedy decoding's"
    return _excerpt(title, pd.DataFrame(rows), _QUALITY)


def acceptance_table(summary: Summary) -> Table:
    """The share of drafts that were accepted, by exit layer and by place in the draft."""

    def shares(counts: Mapping[str, Sequence[int]]) -> str:
        return ", ".join(f"{key}: {kept / drafted:.0%}" for key, (drafted, kept) in counts.items())

    names = ["method", "by exit layer", "by place in the draft"]
    rows = [
        (label, shares(counts["by_layer"]), shares(counts["by_index"]))
        for label, counts in summary["acceptance"].items()
        if counts["by_layer"] or counts["by_index"]
    ]
    return Table("Accepted drafts", pd.DataFrame(rows, columns=names))


def markdown(table: Table) -> str:
    cells = table.words().rename(columns=lambda name: name.replace("|", r"\|"))
    cells = cells.replace(r"\|", r"\\|", regex=True)
    return f"## {table.title}\n\n{cells.to_markdown(index=False, disable_numparse=True)}\n"


# --- the folder of a run

RUN, SUMMARY = "run.yaml", "summary.json"
FILES = (RUN, results.ANSWERS, results.TUNING, SUMMARY, "table.md")


class Results(NamedTuple):
    """Contents of a finished results folder."""

    name: str
    run: dict[str, Any]  # options and machine
    summary: dict[str, Any]


def check_results(folder: str | Path, *, overwrite: bool, reads: Iterable[object] = ()) -> Path:
    """The folder to write. Raises CannotWrite, and InvalidOption for results not to overwrite."""
    folder = files.check_folder(
        folder, FILES, lambda path: files.is_own_file(path / RUN), overwrite=True, reads=reads
    )
    if (folder / SUMMARY).exists() and not overwrite:
        raise InvalidOption(f"{folder} holds results. Give --overwrite or another folder")
    return folder


def begin_results(folder: Path, run: Mapping[str, Any], *, overwrite: bool = False) -> None:
    """Record in the folder what will be measured; keeps the same run's files, unless `overwrite`.

    Raises InvalidOption if the folder holds another run.
    """
    path = folder / RUN
    if path.exists() and not overwrite:
        earlier = _mapping(read_yaml(path), path)
        for part, values in run.items():
            require_same(folder, _mapping(earlier.get(part), path), values, "--overwrite")
        return
    text = yaml.safe_dump(dict(run), sort_keys=False, allow_unicode=True)
    with files.replacing(path) as new:  # a full disk fails before anything is removed
        new.write_text(f"# written by selfspec bench\n{text}", encoding="utf-8")
        for name in FILES[1:]:
            (folder / name).unlink(missing_ok=True)


def costs_of(path: Path) -> dict[str, str]:
    """The option `costs` of a begun run, to continue it with: busy machines store no costs."""
    with suppress(InvalidData, LookupError, TypeError, StopIteration):
        first = parse_json(next(json_lines(path))[1], "a line") if path.suffix == ".jsonl" else None
        return {"costs": (first or read_yaml(path))["speculation"]["costs"]}
    return {}


def write_results(folder: Path, summary: Mapping[str, Any]) -> str:
    """Write the figures as Markdown, which is returned, then as JSON, which marks the run done."""
    text = "\n".join(markdown(table) for table in tables(summary))
    files.write(folder / "table.md", text)
    files.write(folder / SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    return text


def read_results(folder: Path) -> Results:
    """Read a finished run. Raises InvalidData if there is none."""
    try:
        run = _mapping(read_yaml(folder / RUN), folder / RUN)
        summary = _mapping(read_json(folder / SUMMARY), folder / SUMMARY)
    except InvalidData as error:
        text, loads = f"{folder} holds no finished run of selfspec bench", folder / "concurrency.md"
        reason = f"--concurrency has a table of its own, {loads}" if loads.exists() else error
        raise InvalidData(f"{text}: {reason}") from error
    return Results(folder.resolve().name, run, summary)


def _mapping(values: Any, path: Path) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise InvalidData(f"{path} has a {type(values).__name__}, expected names and values")
    return values


# --- the chart

BLUE, INK, PALE = pages.RAMP[1], pages.TONES["ink"].light, pages.TONES["other"].light


def chart(summary: Summary) -> str | None:
    """A PNG as base64 with one bar and interval per method; None for fewer than two methods."""
    base, by_label = gains_of(summary)
    gains = _by_method(by_label)
    if len(gains) < 2:
        return None
    names = [marked_label(summary, label) for label in gains.method]
    figure = Figure(figsize=(8.0, 0.9 + 0.42 * len(gains)), layout="constrained")
    axes = figure.subplots()
    colours = [BLUE if ratio == gains.ratio.max() else PALE for ratio in gains.ratio]
    ends = [gains.ratio - gains.low, gains.high - gains.ratio]
    style: Any = {"color": colours, "height": 0.66, "error_kw": {"ecolor": INK}}
    bars = axes.barh(names, gains.ratio, xerr=ends, **style)
    axes.bar_label(bars, fmt="%.2f", padding=6)
    axes.axvline(1.0, color=INK, linewidth=0.8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"speed-up [× {base}]; n = {gains.prompts.max()} prompts")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    image = io.BytesIO()
    figure.savefig(image, dpi=120)
    return base64.b64encode(image.getvalue()).decode()


# --- the report: one page of HTML


_LACKING = (TemplateError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def page(runs: Iterable[Results]) -> str:
    """All runs on one page of HTML, escaped. Raises InvalidData for results that lack a part."""
    style, newest = pages.style_of("selfspec.eval", "report.css"), ""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    text = (resources.files(__package__) / "assets" / "report.html").read_text(encoding="utf-8")

    def named() -> Iterator[Results]:
        nonlocal newest
        for run in runs:
            newest = run.name
            yield run

    template = environment.from_string(text)
    helpers: Any = {"verdict": verdict, "tables": tables, "chart": chart}
    try:
        return template.render(runs=named(), style=style, policy=pages.policy("", style), **helpers)
    except _LACKING as error:
        raise InvalidData(
            f"the results {newest} lack what a report shows: {type(error).__name__} {error}. "
            "Measure again: selfspec bench"
        ) from error
