"""What a lossy rule does to the text: answers come in, beside plain decoding's, records go out.

Over tokens: where an answer parts and how far it strays. Over text: BLEU and ROUGE-L, against
references and against plain decoding. Under the model: how likely it finds the answer. Called by
`bench` for every method that is lossy or draws its tokens, and if asked to for all.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

from selfspec.errors import InvalidOption

_PACKAGES = {"sacrebleu": "sacrebleu", "rouge_score": "rouge-score"}
"""Modules and how they are installed; the extra `eval` has both."""

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Text(NamedTuple):
    """An answer up to its end token."""

    token_ids: Sequence[int]
    words: str


@dataclass(frozen=True, kw_only=True)
class Quality:
    """One answer of one method, beside the answer of plain decoding to the same question."""

    text: str
    plain_text: str
    reference: str | None
    tokens: int
    plain_tokens: int
    first_divergence: int | None
    """Equal tokens ahead of the first that differs; None if all are equal."""
    edit_distance: int
    """Tokens to insert, delete or replace to make the one answer the other."""
    log_likelihood: float
    """Nats of the whole answer under the model, without processors."""
    plain_log_likelihood: float


def check_packages() -> None:
    """Raise InvalidOption where a package for BLEU or ROUGE is missing, before any work."""
    for module, package in _PACKAGES.items():
        if find_spec(module) is None:
            raise InvalidOption(
                f"the quality of texts needs {package}: pip install 'selfspec[eval]'"
            )


def quality(
    answer: Text,
    plain: Text,
    reference: str | None,
    log_likelihood: Callable[[Sequence[int]], float],
) -> Quality:
    """The record of an answer; `log_likelihood` gives nats of tokens behind the prompt."""
    found, expected = answer.token_ids, plain.token_ids
    return Quality(
        text=answer.words,
        plain_text=plain.words,
        reference=reference,
        tokens=len(found),
        plain_tokens=len(expected),
        first_divergence=first_divergence(found, expected),
        edit_distance=edit_distance(found, expected),
        log_likelihood=log_likelihood(found),
        plain_log_likelihood=log_likelihood(expected),
    )


def summary(records: Sequence[Quality]) -> dict[str, Any]:
    """Figures of one method over some questions; those against references None without any."""
    parted = [r.first_divergence for r in records if r.first_divergence is not None]
    tokens, plain_tokens = sum(r.tokens for r in records), sum(r.plain_tokens for r in records)
    known = [(r.text, r.plain_text, r.reference) for r in records if r.reference is not None]
    texts, plain_texts, references = zip(*known, strict=True) if known else ((), (), ())
    return {
        "answers": len(records),
        "exact_share": 1.0 - len(parted) / len(records),
        "median_first_divergence": statistics.median(parted) if parted else None,
        "edits_per_token": sum(r.edit_distance for r in records) / plain_tokens,
        "nats_per_token": sum(r.log_likelihood for r in records) / tokens,
        "plain_nats_per_token": sum(r.plain_log_likelihood for r in records) / plain_tokens,
        "relative_bleu": bleu([r.text for r in records], [r.plain_text for r in records]),
        "with_reference": len(known),
        "bleu": bleu(texts, references) if known else None,
        "plain_bleu": bleu(plain_texts, references) if known else None,
        "rouge_l": rouge_l(texts, references) if known else None,
        "plain_rouge_l": rouge_l(plain_texts, references) if known else None,
    }


def first_divergence(found: Sequence[int], expected: Sequence[int]) -> int | None:
    """Equal tokens ahead of the first that differs, or ahead of one text's end; None if equal."""
    if list(found) == list(expected):
        return None
    pairs = enumerate(zip(found, expected, strict=False))
    shorter = min(len(found), len(expected))
    return next((index for index, (a, b) in pairs if a != b), shorter)


def edit_distance(found: Sequence[int], expected: Sequence[int]) -> int:
    """Levenshtein's: insertions, deletions and replacements, one each."""
    row = list(range(len(expected) + 1))
    for count, token in enumerate(found, start=1):
        above, row[0] = row[0], count
        for place, other in enumerate(expected, start=1):
            cheapest = min(row[place] + 1, row[place - 1] + 1, above + (token != other))
            above, row[place] = row[place], cheapest
    return row[-1]


def final_number(text: str) -> float | None:
    """What a worked solution arrives at: its last number; None without any."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def expected_number(reference: str) -> float | None:
    """What a reference says: its first number, behind "####" where it has that; None without."""
    found = _NUMBER.findall(reference.rpartition("####")[2])
    return float(found[0].replace(",", "")) if found else None


def bleu(texts: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU, 0 to 100: sacreBLEU, with case. Against plain decoding: relative BLEU.

    Source: CM-ASD, sections IV.A and Table V. Needs sacrebleu, from the extra `eval`.
    """
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError as error:
        raise InvalidOption("BLEU needs sacrebleu: pip install 'selfspec[eval]'") from error
    # effective order: answers of a word or two hold no 4-gram, and would make all of it 0
    return float(BLEU(effective_order=True).corpus_score(texts, [references]).score)


def rouge_l(texts: Sequence[str], references: Sequence[str]) -> float:
    """Mean F1 of the longest common subsequence of words, 0 to 1, without stemming.

    Needs rouge-score, from the extra `eval`.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise InvalidOption("ROUGE needs rouge-score: pip install 'selfspec[eval]'") from error
    scorer = RougeScorer(["rougeL"])
    pairs = zip(references, texts, strict=True)
    return statistics.fmean(scorer.score(right, text)["rougeL"].fmeasure for right, text in pairs)
