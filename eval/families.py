"""Which families of models run, on which executor, and whether their texts are exact: a page.

    python -m eval.families --output docs/families.md --overwrite
    python -m eval.families --output docs/families.md --overwrite --speed  # on a quiet machine
    python -m eval.families --output few.md --only llama,gpt_neox

Each causal language model that the installed transformers has is built with random weights, a few
layers and narrow windows. In float64, drafted texts (exit heads, n-grams) must be those of
`model.generate`, from short and long prompts. `--speed` times plain decoding in float32 at d = 576.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from eval.tiny_families import LAYERS, MIDDLE, NO_TEXT, ORIGINAL, TINY, WINDOW, tiny_model
from selfspec import files
from selfspec.api.speculator import wrap
from selfspec.errors import SelfspecError
from selfspec.model.backbone import Backbone

PROMPTS = (5, 90)
"""Tokens of the prompts: inside every window, and beyond the windows and the original maximum."""
NEW_TOKENS = 40
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One family of the page."""

    family: str
    model: str
    executor: str
    """In float32, as auto chooses; empty if none runs it."""
    verdict: str
    """exact, WRONG, refused, or not tried."""
    reason: str
    """Why it is not exact."""
    speed_up: float | None = None
    """Plain decoding over Hugging Face's, float32."""


def main(
    output: Annotated[Path, typer.Option(help="The page, Markdown.")],
    only: Annotated[str | None, typer.Option(help="Families (model_type), with commas.")] = None,
    speed: Annotated[bool, typer.Option("--speed", help="Time plain decoding too.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the page.")] = False,
) -> None:
    """Try each family, then write. Exit code 1 if one comes out wrong."""
    files.check_file(output, overwrite=overwrite)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    names = only.split(",") if only else sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - {*NO_TEXT})
    rows = []
    for number, name in enumerate(names, 1):
        rows.append(tried(name, speed=speed))
        print(f"{number}/{len(names)} {name}: {rows[-1].verdict} {rows[-1].reason}", flush=True)
    files.write(output, "\n".join(page(rows)) + "\n")
    if any(row.verdict == "WRONG" for row in rows):
        raise typer.Exit(1)


def tried(family: str, *, speed: bool = False) -> Row:
    """A family's row. Errors that are not selfspec's own count as wrong, not as a refusal."""
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family, family)
    try:
        model = _running_model(family)
    except Exception as error:  # noqa: BLE001  # whatever a config may lack is said on the page
        return Row(family, named, "", "not tried", f"{type(error).__name__}: {_line(error)}")
    try:
        wrap(model, heads="logit-lens")
        backbone, wrong = _compared(family, model)
    except SelfspecError as error:
        return Row(family, named, "", "refused", _line(error))
    except Exception as error:  # noqa: BLE001  # a crash is a finding
        return Row(family, named, "", "WRONG", f"{type(error).__name__}: {_line(error)}")
    executor = backbone.executor_name
    if wrong:
        return Row(family, named, executor, "WRONG", wrong)
    note = "" if model.dtype == torch.float64 else "texts compared in float32: no float64 there; "
    note += "" if executor == "fused" else f"not fused: {backbone.refused['fused'][:_MOST_WORDS]}"
    return Row(family, named, executor, "exact", note, timed(family) if speed else None)


def _running_model(family: str) -> PreTrainedModel:
    """A tiny model whose own forward runs: in float64, or float32 if it knows no other."""
    try:
        model = tiny_model(family, TINY, torch.float64)
        with torch.no_grad():
            model(random_ids(PROMPTS[0]))
    except RuntimeError:
        model = tiny_model(family, TINY, torch.float32)
        with torch.no_grad():
            model(random_ids(PROMPTS[0]))
    return model


def _compared(family: str, model: PreTrainedModel) -> tuple[Backbone, str]:
    """With the executor that auto takes in float32, and what differs, if anything."""
    single = tiny_model(family, TINY, torch.float32)
    backbone = wrap(single, heads="logit-lens").backbone
    drafted = dict.fromkeys(_DRAFTERS, 0)
    for length in PROMPTS:
        ids = random_ids(length)
        expected = _theirs(model, ids, NEW_TOKENS)
        for kind, options in _DRAFTERS.items():
            speculator = wrap(model, heads="logit-lens", **options)
            answer = speculator.generate(ids, max_new_tokens=NEW_TOKENS)
            drafted[kind] += answer.stats.drafted
            if answer.token_ids != expected:
                place = _first_difference(answer.token_ids, expected)
                return (
                    backbone,
                    f"{kind} drafts, prompt of {length}: another text from token {place}",
                )
    if not (drafted["exit"] and drafted["ngram"]):
        return backbone, f"nothing was drafted, which shows nothing: {drafted}"
    if (error := executor_error(single)) > 1e-3:
        return (
            backbone,
            f"{backbone.executor_name} executor: logits differ by {error:.2g} of their size",
        )
    return backbone, ""


_DRAFTERS: dict[str, dict[str, Any]] = {
    "no": {"speculate": False},  # plain decoding on our runtime
    "exit": {"drafter": "exit:layers=2/4,threshold=0.02", "never_slower": False},
    "ngram": {"drafter": "ngram:size=1", "prices": "row=0", "never_slower": False},
}


def executor_error(model: PreTrainedModel) -> float:
    """Largest error of a position's logits on auto's executor, of the size of all logits."""
    backbone, ids = wrap(model, heads="logit-lens").backbone, random_ids(sum(PROMPTS))
    from selfspec.model.kv_store import Lease
    from selfspec.model.rows import Rows

    lease, parts = Lease(backbone.num_layers), []
    with torch.inference_mode():
        expected = model(ids).logits.float()
        for block in ids[0].split(PROMPTS[1]):
            rows = Rows.of(lease, lease.length(0), len(block), block.device)
            hidden = backbone.embed(block)
            parts.append(backbone.logits(backbone.run(hidden, 0, backbone.num_layers, rows)))
    errors = (torch.cat(parts) - expected).square().mean(-1).sqrt().max()
    return float(errors / expected.square().mean().sqrt())


def timed(family: str, *, context: int = 32, new_tokens: int = 48, repeats: int = 3) -> float:
    """Plain decoding over Hugging Face's: time of a text, medians of interleaved runs."""
    model = tiny_model(family, MIDDLE, torch.float32)
    speculator = wrap(model, heads="logit-lens", speculate=False)
    ids = random_ids(context)
    ways: tuple[Callable[[], object], ...] = (
        lambda: speculator.generate(ids, max_new_tokens=new_tokens),
        lambda: _theirs(model, ids, new_tokens),
    )
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for way, found in zip(ways, seconds, strict=True):
            begin = time.perf_counter()
            way()
            if repeat:  # the first one warms up
                found.append(time.perf_counter() - begin)
    ours, theirs = map(statistics.median, seconds)
    return theirs / ours


def random_ids(length: int) -> Tensor:
    """[1, length] ids, the same at every call."""
    return torch.randint(96, (1, length), generator=torch.Generator().manual_seed(length))


def _theirs(model: PreTrainedModel, ids: Tensor, new_tokens: int) -> list[int]:
    """Greedy text of `model.generate`."""
    made: Any = model.generate(  # type: ignore[operator]  # a mixin gives it
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False
    )
    return made[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]  # untyped module


def _first_difference(ours: list[int], theirs: list[int]) -> int:
    equal = (one == other for one, other in zip(ours, theirs, strict=False))
    return next(
        (place for place, same in enumerate(equal) if not same), min(len(ours), len(theirs))
    )


def _line(error: Exception) -> str:
    """An error's first line of words."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip()[:_MOST_WORDS] if lines else type(error).__name__


# --- the page -------------------------------------------------------------------------------------

COLUMNS = ("family", "model", "text", "executor", "plain, times Hugging Face", "why")


def page(rows: list[Row]) -> list[str]:
    """The page's lines."""
    count = {verdict: sum(row.verdict == verdict for row in rows) for verdict in VERDICTS}
    summary = ", ".join(f"{number} {verdict}" for verdict, number in count.items() if number)
    return [
        "<!-- written by selfspec -->",
        "# Families of models",
        "",
        f"Made by selfspec with `python -m eval.families --output docs/families.md`, "
        f"transformers {transformers.__version__}, torch {torch.__version__}.",
        f"{len(rows)} families: {summary}.",
        "",
        *_HOW,
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *(_table_line(row) for row in sorted(rows, key=_order)),
        "",
        "## What a refusal means",
        "",
        *_REFUSALS,
    ]


_MOST_WORDS = 160
"""Letters of a reason."""

VERDICTS = ("exact", "WRONG", "refused", "not tried")

_HOW = f"""\
Each is a tiny model with random weights: {LAYERS} layers, windows and chunks of {WINDOW} positions,
scaled RoPE from {ORIGINAL} positions on. *exact*: in float64 the greedy texts of {NEW_TOKENS}
tokens behind prompts of {PROMPTS[0]} and {PROMPTS[1]} tokens, without drafts, with drafts of exit
heads (wrong and right ones) and with n-grams, are those of `model.generate`; and in float32 the
logits of the executor that `auto` takes are the model's own up to rounding. *executor*: what `auto`
takes for float32 weights on a CPU. *times Hugging Face*: how much faster plain decoding, without
drafts, is than `model.generate`, at d = 576 and eight layers with random weights, float32.
*not fused*: what the compiled code does not know; the model's own modules run.
""".splitlines()

_REFUSALS = """\
* *layers that keep a running state* (linear attention, Mamba, convolutions): a rejected draft would
  stay in the state, which cannot be rewound.
* *layers of another attention* (compressed, indexed, hybrid): what they keep is not one key and one
  value per position, so it cannot be cut behind the accepted tokens.
* *layers that take* something (`alibi` and `position_bias` add the position to the mask,
  `attention_scaling` scales queries): the decoder computes it on the way, which is not done here.
* *no final norm*, *no list of layers*, *no embedding*, *a part that is not known*: the decoder has
  another shape than embedding, layers, norm, lm_head, or does something in between.
* *fewer layers than its config says*: a layer keeps more than one key and value per position.
* *shares keys and values between layers*: a layer cannot be cut from the one that it reads.
* *differs from its own forward*: the parts were found, and put together they give other bits.
* *dynamic* and *longrope* RoPE: rotations depend on the longest position that was ever read, also
  by a rejected draft.
* *not tried*: no tiny config could be made, or its forward fails in transformers itself.
""".splitlines()


def _order(row: Row) -> tuple[int, str]:
    return VERDICTS.index(row.verdict), row.family


def _table_line(row: Row) -> str:
    faster = "" if row.speed_up is None else f"{row.speed_up:.2f}"
    reason = row.reason.replace("|", "/")
    cells = (row.family, row.model, row.verdict, row.executor, faster, reason)
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    typer.run(main)
