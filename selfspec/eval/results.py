"""Options of `bench`, prompts to measure on, answers to them, and their statistics.

Imports no torch by itself, because commands name suites in their help.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from selfspec import files
from selfspec.errors import (
    CannotWrite,
    InvalidData,
    InvalidOption,
    check_keys,
    hint_name,
    record_of,
)
from selfspec.files import json_lines, parse_json
from selfspec.options import Count, Seed, check_fields

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

SIX_TASKS, SPEC_BENCH = SUITES = ("six-tasks", "spec-bench")

TASKS = ("math", "chat", "QA", "RAG", "summary", "translation")
"""The six groups of Spec-Bench, in the order of our tables."""

OVERALL = "overall"  # the name of all groups together in tables

_CATEGORIES = {
    "math_reasoning": "math",
    "qa": "QA",
    "rag": "RAG",
    "summarization": "summary",
    "translation": "translation",
}
"""Spec-Bench's categories; all others belong to its multi-turn chat."""

T = TypeVar("T")
Show = Callable[[int, int, str], None]  # called with items done, items in all, and words


@dataclass(frozen=True, kw_only=True)
class Question:
    """One conversation: the user's turns, at least one, each to be answered."""

    id: str
    task: str  # one of TASKS, or the file's own name
    turns: tuple[str, ...]
    reference: str | None = None  # a good answer to the last turn, where the file has one


def load_suite(
    name: str = SIX_TASKS, questions: str | Path | None = None, limit: int | None = None
) -> list[Question]:
    """Load up to `limit` questions, spread evenly, of a suite; `name` may be a JSONL file.

    `questions` is the file of a suite that is not built in. Raises InvalidOption, InvalidData.
    """
    return spread_out(list(_questions(_file(name, questions))), limit)


def spread_out(questions: Sequence[T], count: int | None) -> list[T]:
    """`count` questions, spread evenly; None: all. Raises InvalidOption below 1."""
    if count is not None and count < 1:
        raise InvalidOption(f"limit is {count}, expected at least 1")
    count = min(count or len(questions), len(questions))
    return [questions[index * len(questions) // count] for index in range(count)]


def _file(name: str, questions: str | Path | None) -> Path:
    if name == SPEC_BENCH:
        if questions is None:
            raise InvalidOption("the suite spec-bench is not built in. Give --questions FILE")
        return files.local_path(questions)
    is_file = name not in SUITES and (Path(name).suffix == ".jsonl" or Path(name).is_file())
    if not is_file:
        check_keys([name], SUITES, "suite")
    if questions is not None:
        raise InvalidOption(f"suite {name} and --questions at once. Leave one out")
    return files.local_path(name) if is_file else Path(__file__).with_name("six-tasks.jsonl")


def _questions(file: Path) -> Iterator[Question]:
    """Yield one question per line. Raises InvalidData: file, line, reason."""
    seen: set[str] = set()
    for number, line in json_lines(file):
        record = parse_json(line, f"{file}, line {number}")
        try:
            question = _question(record, str(number))
            if question.id in seen:
                raise InvalidData(f"has the id {question.id} of an earlier line")
        except InvalidData as error:
            raise InvalidData(f"{file}, line {number} {error}") from error
        seen.add(question.id)
        yield question
    if not seen:
        raise InvalidData(f"{file} holds no questions")


def _question(record: Any, number: str) -> Question:
    """Parse a record in any of the formats. Raises InvalidData with the reason alone."""
    if not isinstance(record, dict):
        raise InvalidData(f"holds {hint_name(type(record))}, expected an object")
    turns = [record["prompt"]] if "prompt" in record else record.get("turns")
    if not isinstance(turns, list) or not turns:
        raise InvalidData("has neither a prompt nor a list of turns")
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise InvalidData("has a turn that is no text")
    category, task = _word(record, "category"), _word(record, "task") or "prompts"
    if task == OVERALL and not category:
        raise InvalidData(f"has the task {OVERALL}, which stands for all of them")
    return Question(
        id=_word(record, "id", "question_id") or number,
        task=_CATEGORIES.get(category, "chat") if category else task,
        turns=tuple(turns),
        reference=_reference(record.get("reference")),
    )


def _word(record: dict[str, Any], *names: str) -> str | None:
    """The first existing value of `names`, as one line. Raises InvalidData for other types."""
    for name in names:
        value = record.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise InvalidData(f"has {name} {value}, expected text or a whole number")
        return " ".join(str(value).split())
    return None


def _reference(value: Any) -> str | None:
    """The reference of the last turn: text, or taken from a list; the first of several answers."""
    if isinstance(value, list):
        last = value[-1] if value else None
        value = last[0] if isinstance(last, list) and last else last
    if value is not None and not isinstance(value, str):
        raise InvalidData("has a reference that is no text")
    return value or None


# --- options of `bench`, from which its flags derive


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Which prompts, how many tokens, how often."""

    suite: str = SIX_TASKS
    """six-tasks, spec-bench, or a JSONL file of prompts."""
    questions: str | None = None
    """File of a suite that is not built in: Spec-Bench's question.jsonl."""
    limit: int | None = None
    """Maximum questions to report, spread over the suite."""
    tune_questions: Count = 6
    """Questions of the suite, spread evenly, on which methods with several settings choose one; the
    report leaves them out. At least 1."""
    max_new_tokens: Count = 64
    """Maximum tokens per answer; all methods write equally many."""
    repeats: Count = 1
    """How often each prompt is measured."""
    quality: bool = False
    """Judge the quality of texts of all methods, not only of lossy and sampling ones."""
    seed: Seed = 0
    """Seed of the order of methods and of the bootstrap."""

    def record(self) -> dict[str, Any]:
        """The options as values; files are named without their folder."""
        paths = {name: getattr(self, name) for name in ("suite", "questions")}
        return asdict(self) | {name: Path(path).name for name, path in paths.items() if path}

    def __post_init__(self) -> None:
        check_fields(self)


# --- the file of answers

_MOST_BYTES = 1 << 30  # size limit of a file of answers: thousands of long ones take a tenth of it

ANSWERS, TUNING = "answers.jsonl", "tuning.jsonl"
"""Files of a results folder: answers to report, and answers to choose settings on."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One method on one prompt."""

    seconds: float = 0.0  # from the prompt's ids to the last token
    arrivals: list[tuple[int, float]] = field(default_factory=list)
    """Tokens of each pass, from the prompt's on, and seconds since the pass before."""
    equal: bool = False  # the tokens are those of plain decoding
    counts: dict[str, dict[str, float]] = field(default_factory=dict)
    """Counts of our runtime: seconds by part; drafted and accepted by exit layer and index."""
    by_costs: float | None = None  # estimated speed-up after the prompt, if heads or drafts cost
    quality: Quality | None = None  # of the text up to the method's own end, if judged
    error: str | None = None  # why there is no answer


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One turn of one question, by all methods."""

    id: str
    task: str
    turn: int  # from 1
    repeat: int  # from 1
    prompt_tokens: int = 0
    new_tokens: int = 0  # written by each method: as many as plain decoding writes before it ends
    repeated: float = 0.0  # share of 8-grams that occurred before in plain decoding's answer
    text: str = ""  # plain decoding's answer
    runs: dict[str, Run] = field(default_factory=dict)  # by contender
    error: str | None = None  # why the prompt itself cannot be run

    @property
    def key(self) -> tuple[str, int, int]:
        """The identity of an answer in its file."""
        return self.id, self.turn, self.repeat


def append(path: Path, answer: Answer) -> None:
    files.append(path, json.dumps(asdict(answer), ensure_ascii=False))


def read(path: Path) -> list[Answer]:
    """Read all answers of a file; none if it is missing. Raises InvalidData for other lines."""
    answers = []
    for number, line in json_lines(path) if path.exists() else ():
        try:
            answers.append(record_of(Answer, parse_json(line, "the line")))
        except (InvalidData, InvalidOption) as error:
            raise InvalidData(f"{path}, line {number} is no answer of a bench: {error}") from error
    return answers


def drop_unfinished(path: Path) -> None:
    """Cut off a last line that a killed run left half-written, to continue the file."""
    if path.exists():
        data = files.read_bytes(path, _MOST_BYTES)
        end = data.rfind(b"\n") + 1
        if end < len(data):
            files.write(path, data[:end])


def resume(
    path: Path, record: dict[str, Any], parse: Callable[[Any], T], *, overwrite: bool
) -> list[T]:
    """Read the lines that a killed run left after its `record`; else begin the file with `record`.

    `overwrite` replaces the file of a run with another record. Raises CannotWrite without it, for
    a file of others, and for lines that `parse` cannot parse.
    """
    files.check_file(path, overwrite=True)
    drop_unfinished(path)
    texts = [text for _, text in json_lines(path)] if path.exists() else []
    head, *lines = texts or [""]
    if head == json.dumps(record):
        try:
            return [parse(parse_json(line, "a line")) for line in lines]
        except (InvalidData, ValueError, TypeError, LookupError) as error:
            raise CannotWrite(f"{path} is damaged. Remove it to start over") from error
    if head and not overwrite:
        problem = f"{path} holds another run"
        raise CannotWrite(f"{problem}. Give the same options to go on, or --overwrite")
    files.write(path, json.dumps(record) + "\n")
    return []


def failures(answers: Iterable[Answer]) -> list[str]:
    """One line for each answer that is missing: which, by which method, why."""
    return [
        f"{answer.id}, turn {answer.turn}{method}: {error}"
        for answer in answers
        for method, error in (
            ("", answer.error),
            *((f", {label}", run.error) for label, run in answer.runs.items()),
        )
        if error is not None
    ]


# --- statistics: rates with their intervals

RESAMPLES = 2000
"""Resamples of a bootstrap. Another seed moves an end of the interval by about 6 % of the ratio's
standard error: sqrt(0.025 x 0.975 / 2000) over the normal density at 1.96."""

LOOPING = 0.3  # an answer loops when more than this share of its 8-grams are repeats


@dataclass(frozen=True, kw_only=True)
class SpeedUp:
    """SD: the time of another method over the time of this one, for the same tokens."""

    ratio: float  # of total wall times over all prompts
    low: float  # with `high` the 95 % interval of `ratio`: bootstrap over prompts, paired
    high: float
    mean: float  # like `p5`, the 5th percentile, and `worst`: of the prompts' own ratios
    p5: float
    worst: float
    prompts: int


def speed_up(base: Sequence[float], method: Sequence[float], seed: int = 0) -> SpeedUp:
    """The speed-up, from the seconds of both methods on the same prompts, at least one."""
    import numpy as np

    above, below = np.asarray(base, np.float64), np.asarray(method, np.float64)
    low, high = ratio_interval(above, below, seed)
    ratios = above / below
    return SpeedUp(
        ratio=float(above.sum() / below.sum()),
        low=low,
        high=high,
        mean=float(ratios.mean()),
        p5=float(np.quantile(ratios, 0.05)),
        worst=float(ratios.min()),
        prompts=len(ratios),
    )


def ratio_interval(
    above: Iterable[float], below: Iterable[float], seed: int = 0
) -> tuple[float, float]:
    """95 % percentile bootstrap interval of sum(above) / sum(below), resampling pairs."""
    import torch

    pairs = torch.tensor([[*above], [*below]], dtype=torch.float64)  # [2, N]
    count, generator = pairs.shape[1], torch.Generator().manual_seed(seed)
    indices = torch.randint(count, (RESAMPLES, count), generator=generator)
    sums = pairs[:, indices].sum(-1)  # [2, resamples]
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.quantile(sums[0] / sums[1], ends).tolist()
    return low, high


def repeated_share(tokens: Sequence[int]) -> float:
    """Share of 8-grams that occurred before, 0..1; 0 for texts shorter than that."""
    grams = [tuple(tokens[start : start + 8]) for start in range(len(tokens) - 7)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


# --- quality of texts under lossy rules


@dataclass(frozen=True, kw_only=True)
class Quality:
    """One answer of a method, compared with plain decoding's answer to the same question."""

    text: str
    plain_text: str
    reference: str | None
    tokens: int
    plain_tokens: int
    first_divergence: int | None
    """Count of equal tokens before the first that differs; None if all are equal."""
    edit_distance: int  # tokens to insert, delete or replace to turn one answer into the other
    log_likelihood: float  # nats of the whole answer under the model, without processors
    plain_log_likelihood: float


def quality_summary(records: Sequence[Quality]) -> dict[str, Any]:
    """Figures of one method over some questions; None for figures that lack references."""
    divergences = [r.first_divergence for r in records if r.first_divergence is not None]
    tokens, plain_tokens = sum(r.tokens for r in records), sum(r.plain_tokens for r in records)
    triples = [(r.text, r.plain_text, r.reference) for r in records if r.reference is not None]
    texts, plain_texts, references = zip(*triples, strict=True) if triples else ((), (), ())
    return {
        "answers": len(records),
        "exact_share": 1.0 - len(divergences) / len(records),
        "median_first_divergence": statistics.median(divergences) if divergences else None,
        "edits_per_token": sum(r.edit_distance for r in records) / plain_tokens,
        "nats_per_token": sum(r.log_likelihood for r in records) / tokens,
        "plain_nats_per_token": sum(r.plain_log_likelihood for r in records) / plain_tokens,
        "relative_bleu": bleu([r.text for r in records], [r.plain_text for r in records]),
        "with_reference": len(triples),
        "bleu": bleu(texts, references) if triples else None,
        "plain_bleu": bleu(plain_texts, references) if triples else None,
        "rouge_l": rouge_l(texts, references) if triples else None,
        "plain_rouge_l": rouge_l(plain_texts, references) if triples else None,
    }


def first_divergence(found: Sequence[int], expected: Sequence[int]) -> int | None:
    """Count of equal tokens before the first that differs or a text's end; None if equal."""
    pairs = enumerate(zip(found, expected, strict=False))
    count = next((at for at, (one, other) in pairs if one != other), min(len(found), len(expected)))
    return None if count == len(found) == len(expected) else count


def edit_distance(found: Sequence[int], expected: Sequence[int]) -> int:
    """The Levenshtein distance: insertions, deletions and replacements count one each."""
    row = list(range(len(expected) + 1))
    for count, token in enumerate(found, start=1):
        above, row[0] = row[0], count
        for place, other in enumerate(expected, start=1):
            cheapest = min(row[place] + 1, row[place - 1] + 1, above + (token != other))
            above, row[place] = row[place], cheapest
    return row[-1]


def block_logits(model: PreTrainedModel, ids: Tensor, tokens: Sequence[int]) -> Tensor:
    """Logits of each of `tokens` after `ids` [1, P], from one pass over all: [n, V] float32."""
    import torch

    sequence = torch.cat([ids, ids.new_tensor([list(tokens)])], dim=1)
    with torch.inference_mode():
        logits: Tensor = model(sequence, logits_to_keep=len(tokens) + 1).logits
    return logits[0, :-1].float()


def log_likelihood(model: PreTrainedModel, ids: Tensor, tokens: Sequence[int]) -> float:
    """Log-likelihood of `tokens` after `ids` [1, P], summed, in nats, from float32 logits."""
    logits = block_logits(model, ids, tokens)
    chosen = logits.log_softmax(-1).gather(1, ids.new_tensor([list(tokens)]).T)
    return float(chosen.double().sum())


def bleu(texts: Sequence[str], references: Sequence[str]) -> float:
    """sacreBLEU, 0 to 100, with case. With plain texts: CM-ASD's relative BLEU (Table V)."""
    from sacrebleu.metrics.bleu import BLEU

    # effective order: answers of a word or two hold no 4-gram, which would make the score 0
    return float(BLEU(effective_order=True).corpus_score(texts, [references]).score)


class _Words:
    """Splits as rouge_score does, whose own words have ASCII letters and digits only.

    Japanese and Chinese put no spaces between words: each character counts as a word.
    """

    def tokenize(self, text: str) -> list[str]:
        return re.findall(
            r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+", text.lower()
        )


def rouge_l(texts: Sequence[str], references: Sequence[str]) -> float:
    """Mean F1 of the longest common subsequence of words, 0 to 1, without stemming."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], tokenizer=_Words())
    pairs = zip(references, texts, strict=True)
    return statistics.fmean(scorer.score(truth, text)["rougeL"].fmeasure for truth, text in pairs)
