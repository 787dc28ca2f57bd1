"""Bars for README from a result of `against_llama_cpp`: how fast each way answers.

    python -m eval.speed_chart eval/results/llama-cpp-bf16-avx512/summary.json docs/images

Writes speed-light.svg and speed-dark.svg: times as fast as `model.generate`, prompt included.
"""

from __future__ import annotations

import json
from pathlib import Path

import typer

from eval.against_llama_cpp import DEFAULT, LLAMA, LOOKUP, PLAIN, THEIR_LOOKUP, THEIRS
from eval.svg import LOOKS, Look, document, label
from selfspec.files import write

NAMES = {
    THEIRS: "Hugging Face",
    THEIR_LOOKUP: "Hugging Face, prompt lookup",
    LLAMA: "llama.cpp",
    LOOKUP: "llama.cpp, prompt lookup",
    PLAIN: "selfspec, no drafts",
    DEFAULT: "selfspec",
}
WIDTH, LEFT, TOP, ROW, THICK = 880, 260, 54, 34, 20
LONGEST = WIDTH - LEFT - 90


def main(summary: Path, folder: Path) -> None:
    """Read, then draw. Raises KeyError for a result without Hugging Face (`--numbers`)."""
    tables = json.loads(summary.read_text(encoding="utf-8"))["tables"]
    whole = {name: float(table["whole"]["ratio"]) for name, table in tables.items()}
    times = {name: whole[name] / whole[THEIRS] for name in NAMES if name in whole}
    folder.mkdir(parents=True, exist_ok=True)
    for name, look in LOOKS.items():
        write(folder / f"speed-{name}.svg", drawn(times, look))


def drawn(times: dict[str, float], look: Look) -> str:
    """A bar each, the slowest first."""
    most = max(times.values())
    rows = []
    for place, (name, value) in enumerate(sorted(times.items(), key=lambda entry: entry[1])):
        y, ours = TOP + ROW * place, name in (PLAIN, DEFAULT)
        weight, length = 700 if name == DEFAULT else 400, LONGEST * value / most
        rows += [
            label(NAMES[name], LEFT - 14, y + 15, look.ink, weight=weight, anchor="end"),
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{THICK}" rx="3" '
            f'fill="{look.good if ours else look.other}"/>',
            label(f"{value:.1f}×", LEFT + length + 10, y + 15, look.ink, weight=weight),
        ]
    head = label("Times as fast as model.generate", 18, 34, look.dim)
    told = ", ".join(f"{NAMES[name]} {value:.1f}" for name, value in times.items())
    height = TOP + ROW * len(times) + 10
    return document(WIDTH, height, look, f"Times as fast: {told}", head + "".join(rows))


if __name__ == "__main__":
    typer.run(main)
