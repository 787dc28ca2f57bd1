"""One answer appearing twice, as a moving picture for README: measured here, drawn as SVG.

    python -m eval.race_picture docs/images --dtype float32

Writes race-light.svg and race-dark.svg: `model.generate` and selfspec write the same answer, each
piece of text when it came, at true speed, over and over. Who wants no motion sees both texts whole.
Nothing else should run on the machine.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

import selfspec
from eval.svg import LOOKS, Look, document, label
from selfspec.api.text import TextDecoder, encode
from selfspec.eval.bench import Arrivals
from selfspec.eval.methods import METHODS
from selfspec.files import write
from selfspec.model.quantised import keep_numbers

PROMPT = "Explain in a few sentences how a rainbow forms."

WIDTH, COLUMN, LETTERS = 880, 432, 50
TOP, LINE = 66, 19
TIMES = 5

REST_S = 3.0
"""Both texts stand for so long, then all begins again."""


@dataclass(frozen=True)
class Run:
    """One answer: its name, and each piece of text with the seconds until it came."""

    name: str
    pieces: list[tuple[str, float]]

    @property
    def text(self) -> str:
        """Whole."""
        return "".join(piece for piece, _ in self.pieces)

    @property
    def seconds(self) -> float:
        """Until the last piece."""
        return self.pieces[-1][1]


def main(
    folder: Path,
    prompt: Annotated[str, typer.Option()] = PROMPT,
    new_tokens: Annotated[int, typer.Option(min=2, help="At most.")] = 110,
    dtype: Annotated[str | None, typer.Option(help="Of both.")] = None,
) -> None:
    """Measure, then draw."""
    torch.set_num_threads(2)
    speculator = selfspec.load(dtype=dtype)
    keep_numbers(speculator.model)  # theirs runs the model itself, at its best
    ids = encode(speculator.tokenizer, prompt)
    runs = tuple(
        usual([measured(name, speculator, method, ids, new_tokens) for _ in range(TIMES + 1)])
        for name, method in (("selfspec", "ngram+exit"), ("model.generate", "hugging-face"))
    )
    if len({run.text for run in runs}) > 1:
        raise typer.BadParameter("the texts part at a near tie. Give --dtype float32")
    folder.mkdir(parents=True, exist_ok=True)
    for name, look in LOOKS.items():
        write(folder / f"race-{name}.svg", drawn(runs, look))
    for run in runs:
        print(f"{run.name}: {run.seconds:.2f} s, first text after {run.pieces[0][1]:.2f} s")


# --- measured -------------------------------------------------------------------------------------


def usual(runs: list[Run]) -> Run:
    """The one in the middle by time; the first, which warms up, does not count."""
    return sorted(runs[1:], key=lambda run: run.seconds)[len(runs) // 2 - 1]


def measured(
    name: str, speculator: selfspec.Speculator, method: str, ids: Tensor, count: int
) -> Run:
    """One answer."""
    streamer, start = Arrivals(time.perf_counter), time.perf_counter()
    found = METHODS[method].decode(speculator, ids, count, {}, streamer)
    text, at, pieces = TextDecoder(speculator.tokenizer), 0, []
    for tokens, moment in streamer.heard:
        piece = text.push(found.token_ids[at : at + tokens])
        at += tokens
        pieces.append((piece, moment - start))
    pieces.append((text.push([], last=True), pieces[-1][1]))
    return Run(name, [entry for entry in pieces if entry[0]])


# --- drawn ----------------------------------------------------------------------------------------


def lines(run: Run) -> Iterator[list[tuple[str, float]]]:
    """Wrapped; each line as letters that came together, with their seconds."""
    timed = iter([second for piece, second in run.pieces for _ in piece])
    for paragraph in run.text.split("\n"):
        for line in textwrap.wrap(paragraph, LETTERS, drop_whitespace=False) or [""]:
            letters = [*zip(line, timed)]  # noqa: B905  # as many as there are
            shown = letters[1:] if line.startswith(" ") else letters
            grouped = groupby(shown, lambda one: one[1])
            yield [("".join(letter for letter, _ in some), second) for second, some in grouped]
        next(timed, None)  # of the line's end


def drawn(runs: tuple[Run, ...], look: Look) -> str:
    """The picture: ours on the left, because people read from there."""
    slow = max(run.seconds for run in runs)
    columns = [list(lines(run)) for run in runs]
    moments = sorted({second for run in runs for _, second in run.pieces})
    names = {second: f"t{number}" for number, second in enumerate(moments)}
    body = "".join(
        column(run, lines, 18 + place * COLUMN, names, slow, look)
        for place, (run, lines) in enumerate(zip(runs, columns, strict=True))
    )
    told = "; ".join(f"{run.name} in {run.seconds:.1f} seconds" for run in runs)
    height = TOP + LINE * max(map(len, columns)) + 44
    return document(WIDTH, height, look, f"The same answer twice: {told}", body, moves(names, slow))


def moves(names: dict[float, str], slow: float) -> str:
    """Style: what came at a moment is seen from then on, until all begins again."""
    total = slow + REST_S
    shares = {name: 100 * second / total for second, name in names.items()}
    shown = "".join(
        f"@keyframes {name}{{0%,{share:.2f}%{{fill-opacity:0}}{share + 0.01:.2f}%,100%"
        f"{{fill-opacity:1}}}}.{name}{{animation:{name} {total:.2f}s infinite}}"
        for name, share in shares.items()
    )
    return shown + "@media (prefers-reduced-motion:reduce){*{animation:none!important}}"


def column(
    run: Run,
    lines: list[list[tuple[str, float]]],
    left: float,
    names: dict[float, str],
    slow: float,
    look: Look,
) -> str:
    """One of the two: its name, its text, and at the end how long it took."""
    colour = look.good if run.seconds < slow else look.dim
    times = f", {slow / run.seconds:.1f}× as fast" if run.seconds < slow else ""
    rows = [
        label(
            "".join(f'<tspan class="{names[at]}">{escape(text)}</tspan>' for text, at in line),
            left,
            TOP + LINE * number,
            look.ink,
        )
        for number, line in enumerate(lines)
    ]
    end = f'<tspan class="{names[run.seconds]}">{run.seconds:.1f} seconds{times}</tspan>'
    return "".join(
        (
            label(escape(run.name), left, 34, colour, weight=700),
            f'<path d="M{left} 44h{COLUMN - 32}" stroke="{look.rule}"/>',
            *rows,
            label(end, left, TOP + LINE * len(lines) + 14, colour, weight=700),
        )
    )


if __name__ == "__main__":
    typer.run(main)
