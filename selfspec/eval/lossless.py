"""The losslessness ladder on a user's own model: seven claims, each exact at its own level.

Comes in: a Speculator and questions. Goes out: a Rung per claim, with what was compared and, where
it fails, the first place. Called by `selfspec verify`.

Sampling is not on it: to compare distributions takes thousands of texts over a vocabulary that can
be enumerated. The tests do that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch

from selfspec.api.speculator import Speculator
from selfspec.config import SpeculationOptions
from selfspec.decoding.probe import PassShape, any_split
from selfspec.errors import PinnedUnavailable, SelfspecError
from selfspec.eval.company import alone, together
from selfspec.eval.compare import Bits, Case, Comparison, compare_texts, shortfall
from selfspec.eval.decoding import decode_recorded, greedy_request, planted
from selfspec.eval.one_result import WAYS, logits
from selfspec.eval.quality import first_divergence
from selfspec.eval.reference import model_in, named, speculator_in, why_no_copy
from selfspec.eval.suites import Question
from selfspec.model.backbone import Backbone
from selfspec.model.kv_store import Lease
from selfspec.model.rows import Rows

Outcome = Literal["passed", "failed", "skipped"]

_NARROW = (torch.bfloat16, torch.float16)

_FLOAT64_DRAFTS = ("mixed", "heads")
"""Right drafts, wrong ones and real exits: float64 is too slow for the other kinds."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """What became of one claim."""

    outcome: Outcome
    found: str
    """In words: what was compared; the first place where it fails; or why it was skipped."""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Subject:
    """What is put to the test, and how far to go."""

    speculator: Speculator
    cases: list[Case]
    max_copy_gb: float
    """Copies of the model in wider numbers are made up to this size."""
    skip_float64: bool = False
    tick: Callable[[], None] = lambda: None
    """Hears of each prompt done on a rung."""

    @cached_property
    def compared(self) -> Comparison:
        """Texts in the model's own dtype, as `generate` runs: two rungs read them."""
        return compare_texts(self.speculator, self.cases, self.tick)


def cases_of(speculator: Speculator, questions: Sequence[Question], new_tokens: int) -> list[Case]:
    """The first turns of `questions`. Raises InvalidPrompt for one that the model cannot read."""
    return [
        Case(id=question.id, request=greedy_request(speculator, question.turns[0], new_tokens))
        for question in questions
    ]


def climb(subject: Subject) -> Iterator[tuple[str, Rung]]:
    """Each claim and what became of it, from the first; one that fails does not end the climb."""
    for claim, rung in RUNGS.items():
        try:
            yield claim, rung(subject)
        except torch.OutOfMemoryError:
            raise  # no bug, and no verdict
        except (SelfspecError, RuntimeError, IndexError) as error:
            # the runtime itself broke: what it should compute is there in all of these
            words = f"{type(error).__name__}: {error}".splitlines()[0]
            yield claim, Rung(outcome="failed", found=words)


def verdict(rungs: Sequence[Rung]) -> str:
    """One sentence."""
    failed = [str(number) for number, rung in enumerate(rungs, 1) if rung.outcome == "failed"]
    if failed:
        return f"NOT lossless: rung {', '.join(failed)} failed"
    if rungs[1].outcome == "passed":
        return "lossless: the text is the model's own, and in pinned mode no draft moves a bit"
    return "lossless up to rounding: the text is the model's own, bits could not be pinned here"


def _segments(subject: Subject) -> Rung:
    """Rung 1: the model's own layers, cut at the exit layers, against its forward."""
    model, heads = subject.speculator.model, subject.speculator.heads
    backbone = Backbone(model, executor="generic")
    exits = heads.layers_in_use(subject.speculator.options) if heads else ()
    bits = Bits()
    for case in subject.cases:
        with torch.inference_mode():
            hidden, lease = backbone.embed(case.ids[0]), Lease(backbone.num_layers)
            rows = Rows.of(lease, 0, len(hidden), hidden.device)
            for first, last in itertools.pairwise(sorted({0, *exits, backbone.num_layers})):
                hidden = backbone.run(hidden, first, last, rows)
            bits.compare(case.id, backbone.logits(hidden), model(case.ids).logits[0].float())
        subject.tick()
    return _judged(bits, f"{bits.positions:,} positions, cut at layers {list(exits)}")


def _invariance(subject: Subject) -> Rung:
    """Rung 2: logits in pinned mode, without drafts and with drafts of every kind."""
    speculator, own = subject.speculator, subject.speculator.options
    if (mixing := speculator.backbone.mixing) is not None:
        words = f"drafts are refused: the rows of a pass change each other ({mixing})"
        return Rung(outcome="skipped", found=words)
    rows = max(own.pinned_rows, *(width + 1 for width in own.widths.values()))
    options = replace(own, pinned=True, pinned_rows=rows)
    bits, kinds = Bits(), 0
    try:
        for case in subject.cases:
            kinds = _compare_pinned(speculator, case, options, bits)
            subject.tick()
        slots = speculator.runtime.state(subject.cases[0].request.only(), options).lease.slots
    except PinnedUnavailable as error:
        return Rung(outcome="skipped", found=str(error))
    how = "kernels that treat rows alike" if slots is None else f"every pass of {rows} rows"
    return _judged(bits, f"{bits.positions:,} positions, {kinds} kinds of drafts, {how}")


def _compare_pinned(
    speculator: Speculator, case: Case, options: SpeculationOptions, bits: Bits
) -> int:
    """All kinds of drafts on one prompt, up to where a text parts; returns how many kinds."""
    undrafted = replace(options, speculate=False)
    plain, expected = decode_recorded(speculator, case.request, undrafted)
    kinds = planted(speculator, options, case.ids[0].tolist() + plain)
    for name, (drafter, adapted) in kinds.items():
        tokens, logits = decode_recorded(speculator, case.request, adapted, drafter)
        at = first_divergence(tokens, plain)
        same = len(plain) if at is None else min(at + 1, len(tokens), len(plain))
        where = f"{case.id} with {name} drafts"
        bits.compare(where, logits[:same], expected[:same])
        if at is not None and not bits.differing:
            bits.differing, bits.first = 1, f"{where}, token {at + 1}, though its logits are equal"
    return len(kinds)


def _float64(subject: Subject) -> Rung:
    """Rung 3: a copy in float64, where rounding is too small to part any text."""
    if subject.skip_float64:
        return Rung(outcome="skipped", found="--skip-float64")
    if reason := why_no_copy(subject.speculator.model, torch.float64, subject.max_copy_gb):
        return Rung(outcome="skipped", found=reason)
    exact = speculator_in(subject.speculator, torch.float64)
    compared = compare_texts(exact, subject.cases, subject.tick, _FLOAT64_DRAFTS)
    figures = {"texts": compared.count, "partings": [asdict(p) for p in compared.partings]}
    if compared.partings:
        found = f"{compared.equal}. First {compared.partings[0]}"
        return Rung(outcome="failed", found=found, figures=figures)
    return Rung(outcome="passed", found=compared.equal, figures=figures)


def _near_ties(subject: Subject) -> Rung:
    """Rung 4: in the model's own dtype texts part only where two tokens are nearly as good."""
    compared = subject.compared
    partings, noise = compared.partings, compared.noise
    found = f"{named(subject.speculator.backbone.dtype)}: {compared.equal}"
    figures = {
        "texts": compared.count,
        "partings": [asdict(parting) for parting in partings],
        "noise": noise,
    }
    if not partings:
        return Rung(outcome="passed", found=found, figures=figures)
    worst = max(partings, key=lambda parting: parting.margin)
    found += f", the others part at margins up to {worst.margin:.3g} (noise {noise:.3g})"
    if worst.margin <= 2 * noise:  # both scores may lose it
        return Rung(outcome="passed", found=found, figures=figures)
    return Rung(outcome="failed", found=f"{found}. Widest: {worst}", figures=figures)


def _near_top(subject: Subject) -> Rung:
    """Rung 5: every text of rung 4, read by a float32 copy of the model in one block."""
    model, dtype = subject.speculator.model, subject.speculator.backbone.dtype
    if dtype not in _NARROW:
        return Rung(outcome="skipped", found=f"in {named(dtype)} rung 4 says it all")
    if reason := why_no_copy(model, torch.float32, subject.max_copy_gb):
        return Rung(outcome="skipped", found=reason)
    exact = model_in(model, torch.float32)
    count, found = 0, []
    for case, texts in zip(subject.cases, subject.compared.texts, strict=True):
        for tokens in sorted({tuple(text) for text in texts}):
            count += len(tokens)
            found.append(shortfall(case, tokens, exact, model))
        subject.tick()
    worst = max(found, key=lambda entry: entry.excess)
    words = f"{count:,} tokens, at worst {worst.below:.3g} below the best (noise {worst.noise:.3g})"
    figures = {"tokens": count, "below": worst.below, "noise": worst.noise}
    outcome: Outcome = "failed" if worst.excess > 0 else "passed"
    return Rung(outcome=outcome, found=words, figures=figures)


def _one_result(subject: Subject) -> Rung:
    """Rung 6: the beginning of every prompt, cut into passes in many ways."""
    backbone = subject.speculator.backbone
    if not any_split(backbone, PassShape()):
        words = f"the {backbone.executor_name} executor does not claim it"
        return Rung(outcome="skipped", found=words)
    bits = Bits()
    for case in subject.cases:
        ids = case.ids[0, :_MOST_READ]
        expected = logits(backbone, ids)
        for name, way in WAYS.items():
            bits.compare(f"{case.id}, {name}", logits(backbone, ids, way), expected)
        subject.tick()
    return _judged(bits, f"{bits.positions:,} positions, {len(WAYS)} ways")


def _any_company(subject: Subject) -> Rung:
    """Rung 7: all prompts in one engine, with the drafts of `generate`, against each alone."""
    speculator, bits = subject.speculator, Bits()
    requests = [case.request for case in subject.cases]
    options = speculator.options
    found = together(speculator, requests, options)
    for case, (tokens, heard) in zip(subject.cases, found, strict=True):
        expected, own = alone(speculator, case.request, options)
        same = min(len(heard), len(own))
        bits.compare(case.id, heard[:same], own[:same])
        if tokens != expected and not bits.differing:
            bits.differing, bits.first = 1, f"{case.id}, a token, though its logits are equal"
        subject.tick()
    how = "in shared passes" if speculator.backbone.runs_many else "each in passes of its own"
    return _judged(bits, f"{bits.positions:,} positions of {len(requests)} texts, {how}")


_MOST_READ = 100
"""Tokens of a prompt that rung 6 reads: some ways take a step for each."""


RUNGS: dict[str, Callable[[Subject], Rung]] = {
    "segments give the bits of model.forward": _segments,
    "no draft moves a bit of a logit (pinned)": _invariance,
    "float64 texts are Hugging Face's": _float64,
    "texts are Hugging Face's but for near ties": _near_ties,
    "tokens are float32's best within rounding": _near_top,
    "a text has the same bits however it arrives": _one_result,
    "a text has the same bits in any company": _any_company,
}
"""Claims in the order of design: from exact to rounded."""


def _judged(bits: Bits, words: str) -> Rung:
    """Passed if no bit differed."""
    figures = {"positions": bits.positions, "differing": bits.differing}
    if bits.differing:
        found = f"{bits.differing:,} of {words} differ. First {bits.first}"
        return Rung(outcome="failed", found=found, figures=figures)
    return Rung(outcome="passed", found=f"{words}: 0 differ", figures=figures)
