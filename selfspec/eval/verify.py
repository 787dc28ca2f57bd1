"""The losslessness ladder on a user's own model: seven claims, each exact at its own level.

Tests of the decoding loop also use its planted drafts and recording rules. Sampling is not on the
ladder: to compare distributions takes thousands of texts over a vocabulary that can be enumerated.
The tests do that.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.api.request import Request
from selfspec.api.speculator import Speculator
from selfspec.api.text import Prompt, encode
from selfspec.config import SpeculationOptions
from selfspec.decoding.acceptance import AcceptanceRule, Draft, ObservedRule
from selfspec.decoding.engine import Engine, Running, Runtime
from selfspec.decoding.sampling import Sampler
from selfspec.decoding.state import DecodeState, Drafter, HiddenCache, Steps, no_work, run_alone
from selfspec.decoding.stats import Ended, Stopwatch
from selfspec.errors import InvalidPrompt, PinnedUnavailable, SelfspecError
from selfspec.eval.results import Question, block_logits, first_divergence
from selfspec.model.backbone import Backbone
from selfspec.model.kv import KVCache, Rows, depths

_FLOAT64_DRAFTS = ("mixed", "heads")
"""Right and wrong drafts, and real exits: float64 is too slow for the other kinds."""

_MOST_READ = 100  # tokens of a prompt that rung 6 reads: some ways take a step per token
_APART = 3  # rounds between the arrivals of two texts on rung 7
_PATIENCE = 0.5  # so low that most prompts on rung 7 enter in pieces


@dataclass(frozen=True, kw_only=True)
class Case:
    """One prompt, ready to be decoded."""

    id: str
    request: Request

    @property
    def ids(self) -> Tensor:
        """Token ids of the prompt, [1, P]."""
        return self.request.input_ids

    @property
    def new_tokens(self) -> int:
        return self.request.only().stop.max_length - self.ids.shape[1]

    def scores(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        """Logits [n, V] of `tokens` after the prompt -> the scores that greedy choices compare."""
        sampler = self.request.sampler
        if sampler.is_plain_greedy:
            return logits
        ids = torch.cat([self.ids, self.ids.new_tensor([list(tokens)])], dim=1)
        rows = enumerate(logits.split(1), start=self.ids.shape[1])
        return torch.cat([sampler.scores(ids[:, :end], row.clone()) for end, row in rows])


@dataclass(frozen=True)
class Rung:
    """The outcome of one claim."""

    outcome: Literal["passed", "failed", "skipped"]
    found: str  # in words: what was compared, and the first difference; or why it was skipped
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Subject:
    """The model and prompts to check, and the limits of the check."""

    speculator: Speculator
    cases: list[Case]
    max_copy_gb: float  # largest copy of the model in a wider dtype
    rungs: Collection[int] = range(1, 8)  # those to climb, from 1

    @cached_property
    def comparison(self) -> Comparison:
        """Texts in the model's own dtype, as `generate` writes them; two rungs read them."""
        return compare_texts(self.speculator, self.cases)


def cases_of(speculator: Speculator, questions: Sequence[Question], new_tokens: int) -> list[Case]:
    """Cases of first turns that fit the model. Raises InvalidPrompt if none does."""
    cases, refusal = [], InvalidPrompt("no questions")
    for question in questions:
        try:
            request = greedy_request(speculator, question.turns[0], new_tokens)
            cases.append(Case(id=question.id, request=request))
        except InvalidPrompt as error:
            refusal = error
    if not cases:
        raise refusal
    return cases


def climb(subject: Subject) -> Iterator[tuple[str, Rung]]:
    """Yield each claim and its outcome in order; a failure does not end the climb."""
    for number, (claim, rung) in enumerate(RUNGS.items(), start=1):
        try:
            yield claim, rung(subject) if number in subject.rungs else Rung("skipped", "--rungs")
        except torch.OutOfMemoryError:
            raise  # neither a failed claim nor a bug
        except (SelfspecError, RuntimeError, IndexError) as error:
            # the runtime itself broke, although every case can be computed
            yield claim, Rung("failed", f"{type(error).__name__}: {error}".splitlines()[0])


def verdict(rungs: Sequence[Rung]) -> str:
    failed = [str(number) for number, rung in enumerate(rungs, 1) if rung.outcome == "failed"]
    if failed:
        return f"NOT lossless: rung {', '.join(failed)} failed"
    climbed = [str(number) for number, rung in enumerate(rungs, 1) if rung.found != "--rungs"]
    if len(climbed) < len(rungs):
        return f"nothing differs on rung {', '.join(climbed)}; the others were not run"
    own = "the text is the model's own" + " but for near ties" * (rungs[2].outcome == "skipped")
    if rungs[1].outcome == "passed":
        return f"lossless: {own}, and in pinned mode no draft moves a bit"
    return f"lossless up to rounding: {own}; bits could not be pinned here"


# --- the rungs


def _segments(subject: Subject) -> Rung:
    """Rung 1: the model's layers, cut at the exit layers, against its forward pass."""
    model, heads = subject.speculator.model, subject.speculator.heads
    backbone = Backbone(model, executor="generic")
    exits = heads.layers_in_use(subject.speculator.options) if heads else ()
    bits = Bits()
    for case in subject.cases:
        with torch.inference_mode():
            hidden, kv = backbone.embed(case.ids[0]), KVCache(backbone.num_layers)
            rows = Rows.of(kv, 0, len(hidden), hidden.device)
            for first, last in itertools.pairwise(sorted({0, *exits, backbone.num_layers})):
                hidden = backbone.run(hidden, first, last, rows)
            bits.compare(case.id, backbone.logits(hidden), model(case.ids).logits[0].float())
    return bits.rung(f"{bits.positions:,} positions, cut at layers {list(exits)}")


def _invariance(subject: Subject) -> Rung:
    """Rung 2: logits in pinned mode, without drafts and with drafts of every kind."""
    speculator, defaults = subject.speculator, subject.speculator.options
    if (mixing := speculator.backbone.mixing) is not None:
        return Rung(
            "skipped", f"drafts are refused: the rows of a pass change each other ({mixing})"
        )
    rows = max([defaults.pinned_rows, *(width + 1 for width in defaults.widths.values())])
    options = replace(defaults, pinned=True, pinned_rows=rows)
    undrafted, bits, kinds = replace(options, speculate=False), Bits(), 0
    try:
        for case in subject.cases:
            plain = decode(speculator, case.request, undrafted)
            drafts = planted_drafts(speculator, options, case.ids[0].tolist() + plain[0])
            kinds = len(drafts)
            for name, (drafter, adapted) in drafts.items():
                text = decode(speculator, case.request, adapted, drafter)
                bits.compare_texts(f"{case.id} with {name} drafts", text, plain)
        slots = speculator.runtime.state(subject.cases[0].request.only(), options).kv.slots
    except PinnedUnavailable as error:
        return Rung("skipped", str(error))
    passes = "kernels that treat rows alike" if slots is None else f"every pass of {rows} rows"
    return bits.rung(f"{bits.positions:,} positions, {kinds} kinds of drafts, {passes}")


def _float64(subject: Subject) -> Rung:
    """Rung 3: texts of a float64 copy, whose rounding is too small to change any token."""
    if reason := why_no_copy(subject.speculator.model, torch.float64, subject.max_copy_gb):
        return Rung("skipped", reason)
    exact = speculator_in(subject.speculator, torch.float64)
    compared = compare_texts(exact, subject.cases, _FLOAT64_DRAFTS)
    first = "".join(f". First {parting}" for parting in compared.partings[:1])
    return Rung("failed" if first else "passed", compared.equal_texts + first, compared.figures)


def _near_ties(subject: Subject) -> Rung:
    """Rung 4: in the model's own dtype, texts differ first only at near ties of two tokens."""
    compared = subject.comparison
    noise, figures = compared.noise, compared.figures | {"noise": compared.noise}
    summary = f"{name_of(subject.speculator.backbone.dtype)}: {compared.equal_texts}"
    if compared.partings:
        worst = max(compared.partings, key=lambda parting: parting.margin)
        summary += f", the others part at margins up to {worst.margin:.3g} (noise {noise:.3g})"
        if worst.margin > 2 * noise:  # noise may move both scores
            return Rung("failed", f"{summary}. Widest: {worst}", figures)
    return Rung("passed", summary, figures)


def _near_top(subject: Subject) -> Rung:
    """Rung 5: every text of rung 4, read by a float32 copy of the model in one block."""
    model, dtype = subject.speculator.model, subject.speculator.backbone.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return Rung("skipped", f"in {name_of(dtype)} rung 4 suffices")
    if reason := why_no_copy(model, torch.float32, subject.max_copy_gb):
        return Rung("skipped", reason)
    exact = model_in(model, torch.float32)
    count, shortfalls = 0, []
    for case, texts in zip(subject.cases, subject.comparison.texts, strict=True):
        for tokens in sorted({tuple(text) for text in texts}):
            count += len(tokens)
            shortfalls.append(shortfall(case, tokens, exact, model))
    below, noise = max(shortfalls, key=lambda pair: pair[0] - 2 * pair[1])
    summary = f"{count:,} tokens, at worst {below:.3g} below the best (noise {noise:.3g})"
    figures = {"tokens": count, "below": below, "noise": noise}
    return Rung("failed" if below > 2 * noise else "passed", summary, figures)


def _one_result(subject: Subject) -> Rung:
    """Rung 6: logits of the beginning of every prompt, cut into passes in many ways."""
    backbone = subject.speculator.backbone
    if not backbone.claims.steady:
        return Rung("skipped", f"the {backbone.executor_name} executor does not claim this")
    bits = Bits()
    for case in subject.cases:
        ids = case.ids[0, :_MOST_READ]
        expected = logits_of(backbone, ids)
        for name, way in WAYS.items():
            bits.compare(f"{case.id}, {name}", logits_of(backbone, ids, way), expected)
    return bits.rung(f"{bits.positions:,} positions, {len(WAYS)} ways")


def _any_batch(subject: Subject) -> Rung:
    """Rung 7: all prompts in one engine, with the drafts of `generate`, against each alone.

    They arrive one by one and in pieces; the first arrives twice, and is closed once.
    """
    speculator, options, bits = subject.speculator, subject.speculator.options, Bits()
    requests = [case.request for case in subject.cases]
    runtime = Listening(speculator.runtime)
    engine = Engine(runtime, most=len(requests) + 1, patience=_PATIENCE)
    running, queue, steps = list[Running](), [requests[0], *requests], itertools.count()
    while queue or engine.texts:
        step = next(steps)
        if queue and step % _APART == 0:
            running.append(engine.add(queue.pop(0).only(), options))
        if step == 2 * _APART + 1:
            running[0].close()
        engine.step()
    for case, text, recorder in zip(subject.cases, running[1:], runtime.recorders[1:], strict=True):
        tokens = [token for entry in text.take() for token in entry.tokens]
        expected = decode(speculator, case.request, options)
        bits.compare_texts(case.id, (tokens, recorder.logits), expected)
    passes = "in shared passes" if speculator.backbone.runs_many else "each in passes of its own"
    return bits.rung(f"{bits.positions:,} positions of {len(requests)} texts, {passes}")


RUNGS: dict[str, Callable[[Subject], Rung]] = {
    "segments give the bits of model.forward": _segments,
    "no draft moves a bit of a logit (pinned)": _invariance,
    "float64 texts are Hugging Face's": _float64,
    "texts are Hugging Face's but for near ties": _near_ties,
    "tokens are float32's best within rounding": _near_top,
    "a text has the same bits however it arrives": _one_result,
    "a text has the same bits in any batch": _any_batch,
}
"""Claims by rung, from exact to rounded."""

# --- bits, texts, distances to the best token


@dataclass
class Bits:
    """Counts of logits compared bit by bit."""

    positions: int = 0
    differing: int = 0  # positions with any differing bit
    first: str = ""  # the first such position, and the difference

    def compare(self, label: str, found: Tensor, expected: Tensor) -> None:
        """Compare logits [n, V] with [n, V], both float32."""
        # as integers, so that a NaN equals itself and zeros have a sign
        unequal = found.contiguous().view(torch.int32) != expected.contiguous().view(torch.int32)
        rows = unequal.any(-1)
        self.positions += len(rows)
        self.differing += int(rows.sum())
        if not self.first and bool(rows.any()):
            place = int(rows.int().argmax())
            size = float((found[place] - expected[place]).abs().max())
            count = f"{int(unequal[place].sum()):,} of {found.shape[-1]:,} logits"
            self.first = f"{label}, position {place + 1}: {count}, by up to {size:.3g}"

    def compare_texts(self, label: str, found: Text, expected: Text) -> None:
        """Compare two texts up to their first different token, which counts if all bits agree."""
        place = first_divergence(found[0], expected[0])
        length = min(len(found[0]), len(expected[0]), *(() if place is None else (place + 1,)))
        self.compare(label, found[1][:length], expected[1][:length])
        if place is not None and not self.differing:
            self.differing = 1
            self.first = f"{label}, token {place + 1}, though its logits are equal"

    def rung(self, words: str) -> Rung:
        figures = {"positions": self.positions, "differing": self.differing}
        if not self.differing:
            return Rung("passed", f"{words}: 0 differ", figures)
        return Rung("failed", f"{self.differing:,} of {words} differ. First {self.first}", figures)


@dataclass(frozen=True)
class Parting:
    """The first place where a text differs from Hugging Face's."""

    case: str
    drafts: str
    position: int  # number of the new token, from 1
    margin: float  # Hugging Face's score of its own token, less that of ours

    def __str__(self) -> str:
        return f"{self.case} with {self.drafts} drafts, new token {self.position}"


@dataclass
class Comparison:
    """Our texts, with drafts of several kinds, compared with Hugging Face's."""

    texts: list[list[list[int]]] = field(default_factory=list)  # by prompt and kind of drafts
    partings: list[Parting] = field(default_factory=list)
    noise: float = 0.0
    """Largest difference of Hugging Face's scores between one row at a time and one block, over
    its own texts. It involves no code of ours, so no bug of ours can hide in it."""

    @property
    def equal_texts(self) -> str:
        count = sum(map(len, self.texts))
        return f"{count - len(self.partings)} of {count} texts equal"

    @property
    def figures(self) -> dict[str, Any]:
        partings = [asdict(parting) for parting in self.partings]
        return {"texts": sum(map(len, self.texts)), "partings": partings}


def compare_texts(
    speculator: Speculator, cases: Sequence[Case], only: Collection[str] | None = None
) -> Comparison:
    """Compare texts with all kinds of drafts, or `only` some, not pinned, with Hugging Face's.

    Noise is measured only for all kinds, where differences are judged by it.
    """
    compared = Comparison()
    options = replace(speculator.options, pinned=False)
    for case in cases:
        expected, logits = hugging_face(speculator.model, case.ids, case.new_tokens)
        scores = case.scores(expected, logits)
        if only is None:
            block = case.scores(expected, block_logits(speculator.model, case.ids, expected))
            # kernels that treat rows alike have no noise: then the rounding of scores bounds it
            finest = torch.finfo(speculator.backbone.dtype).eps
            rounded = finest * float(scores[scores.isfinite()].abs().max())
            compared.noise = max(compared.noise, rounded, largest_difference(scores, block))
        compared.texts.append([])
        drafts = planted_drafts(speculator, options, case.ids[0].tolist() + expected)
        for name, (drafter, adapted) in drafts.items():
            if only is not None and name not in only:
                continue
            tokens, _ = decode(speculator, case.request, adapted, drafter)
            compared.texts[-1].append(tokens)
            if (place := first_divergence(tokens, expected)) is not None:
                parting = Parting(case.id, name, place + 1, margin(scores, expected, tokens, place))
                compared.partings.append(parting)
    return compared


def margin(scores: Tensor, theirs: Sequence[int], ours: Sequence[int], index: int) -> float:
    """By how much `scores` [n, V] prefer their token at index `index` to ours.

    If one text just ends there: the whole range of scores, because no noise explains that.
    """
    if index >= min(len(theirs), len(ours)):
        finite = scores[scores.isfinite()]
        return float(finite.max() - finite.min())
    return float(scores[index, theirs[index]] - scores[index, ours[index]])


def shortfall(
    case: Case, tokens: Sequence[int], exact_model: PreTrainedModel, model: PreTrainedModel
) -> tuple[float, float]:
    """How far a token's score is below the top in the exact model, and how far scores differ.

    Both are maxima over `tokens` after the prompt, which both models read in one block.
    """
    scores = case.scores(tokens, block_logits(exact_model, case.ids, tokens))
    rounded = case.scores(tokens, block_logits(model, case.ids, tokens))
    chosen = scores.gather(1, torch.tensor([list(tokens)], device=scores.device).T)[:, 0]
    return float((scores.amax(-1) - chosen).max()), largest_difference(rounded, scores)


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference of scores that are finite in both."""
    difference = (found - expected).abs()
    return float(difference[difference.isfinite()].max())


# --- the model without our runtime, and copies of the model


def hugging_face(model: PreTrainedModel, ids: Tensor, new_tokens: int) -> tuple[list[int], Tensor]:
    """Greedy tokens after `ids` [1, P], and the logits of each choice, [n, V] float32."""
    generator: Any = model
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    output = generator.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return output.sequences[0, ids.shape[1] :].tolist(), torch.cat(output.logits).float()


def why_no_copy(model: PreTrainedModel, dtype: torch.dtype, most_gb: float) -> str | None:
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "the model is spread over several devices"
    size = sum(weight.numel() for weight in model.parameters()) * dtype.itemsize / 1e9
    if size > most_gb:
        return f"a copy in {name_of(dtype)} takes {size:.1f} GB, more than max_copy_gb {most_gb:g}"
    return None


def model_in(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    # Module.to, because the model's own `to` is wrapped and loses the type
    twin = nn.Module.to(copy.deepcopy(model), dtype)
    twin.set_experts_implementation("eager")  # grouped products of experts have no float64
    return twin


def speculator_in(speculator: Speculator, dtype: torch.dtype) -> Speculator:
    """The same model, heads and options in `dtype`, on the generic executor."""
    backbone = Backbone(model_in(speculator.model, dtype), executor="generic")
    return Speculator(
        backbone,
        speculator.tokenizer,
        speculator.heads and speculator.heads.twin(backbone.unembedding),
        speculator.label,
        speculator.options,
        turn_end=speculator.turn_end,
    )


def name_of(dtype: torch.dtype) -> str:
    """The dtype's name as in flags: bfloat16."""
    return str(dtype).removeprefix("torch.")


# --- one row, one result: the logits of a text, however it is cut into passes


class Way(NamedTuple):
    """A way to cut a text into passes."""

    pieces: Sequence[int]  # rows of its passes, repeated
    wrong: int = 0  # extra rows at each pass's end that are removed, like rejected drafts
    threads: int | None = None  # None: the current number
    kept: bool = False
    """The first half is read first, with another end, and kept: like a turn of a session."""
    branch: bool = False  # each row has a wrong sibling: the text is a branch of a tree of drafts


WAYS = {
    "pieces of 500": Way([500]),
    "pieces of 64": Way([64]),
    "pieces of 7": Way([7]),
    "token by token": Way([1]),
    "with drafts that are taken back": Way([1, 4, 2, 5, 3], wrong=3),
    "as a branch of a tree": Way([1, 9, 4], branch=True),
    "behind a kept half": Way([500], wrong=20, kept=True),
    "on one thread": Way([500], threads=1),
    "on one thread, pieces of 7": Way([7], threads=1),
    "on two threads": Way([64], threads=2),
}
"""Ways by name; each is compared with one pass over the whole text."""


def logits_of(backbone: Backbone, ids: Tensor, way: Way | None = None) -> Tensor:
    """Logits [T, V] of every position of `ids` [T]; `way` None: in one pass."""
    way, threads = way or Way([len(ids)]), torch.get_num_threads()
    torch.set_num_threads(way.threads or threads)
    try:
        with torch.inference_mode():
            kv = KVCache(backbone.num_layers)
            cuts = _cuts(len(ids), way)
            return torch.cat([_pass(backbone, kv, ids[low:high], way) for low, high in cuts])
    finally:
        torch.set_num_threads(threads)


def _pass(backbone: Backbone, kv: KVCache, ids: Tensor, way: Way) -> Tensor:
    """Logits of the rows of `ids`; the pass has other rows, too, which are removed afterwards."""
    if way.branch:
        rows = torch.stack([(ids + 1) % backbone.vocab_size, ids], 1).flatten()
        path = list(range(1, len(rows), 2))
        parents = [row - 2 for row in path for _ in range(2)]  # both follow the text's row before
    else:
        wrong = (ids[-1:] + 1 + torch.arange(way.wrong, device=ids.device)) % backbone.vocab_size
        rows, path, parents = torch.cat([ids, wrong]), list(range(len(ids))), None
    start, hidden = kv.length(0), HiddenCache(backbone, kv)
    hidden.push(backbone.embed(rows), parents)
    logits = backbone.logits(run_alone(hidden.advance_all()))[path]
    kv.keep(start, path)
    return logits


def _cuts(count: int, way: Way) -> Iterator[tuple[int, int]]:
    middle = count // 2 if way.kept else 0
    for low, high in ((0, middle), (middle, count)):
        sizes = itertools.cycle(way.pieces)
        while low < high:
            end = min(high, low + next(sizes))
            yield low, end
            low = end


# --- planted drafts

_EAGER = 1e-6  # a threshold that every token reaches: all exits are taken, also wrong ones
_RIGHT = 5  # most right tokens of a planted tree, to leave room for others


class OracleDrafter:
    """Drafts the known continuation, fewer tokens at its end; subclasses draft other tokens.

    `sequence`: the prompt (without padding) and its known continuation. Drafts go by position, so
    they also serve once the decoder's text differs from it. `width` is W_max. No head runs.
    """

    def __init__(
        self, sequence: Sequence[int] = (), seed: int = 0, vocab_size: int = 1, width: int = 4
    ) -> None:
        self.sequence, self.vocab_size, self.width = list(sequence), vocab_size, width
        self._generator = torch.Generator().manual_seed(seed)

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:  # noqa: ARG002  # the protocol's
        """Draft at most min(limit, width) tokens, none of which ran through a layer."""
        room, position = max(min(limit, self.width), 0), state.length - state.pad
        tokens = self._tokens(self.sequence[position : position + room], room)
        ended: Ended = "width" if len(tokens) == self.width else "budget"
        return no_work(Draft.of(tokens, ended=ended))

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        """Do nothing: the drafts are fixed."""

    def _tokens(self, truth: list[int], count: int) -> list[int]:  # noqa: ARG002  # of others
        """At most `count` tokens to draft, where the known continuation has `truth`."""
        return truth

    def _draw(self, end: int) -> int:
        return int(torch.randint(end, (), generator=self._generator))

    def _random_tokens(self, count: int) -> list[int]:
        return torch.randint(self.vocab_size, (count,), generator=self._generator).tolist()


class RandomDrafter(OracleDrafter):
    """Drafts 0..width random tokens."""

    def _tokens(self, truth: list[int], count: int) -> list[int]:  # noqa: ARG002  # the base's
        return self._random_tokens(self._draw(count + 1))


class MixedDrafter(OracleDrafter):
    """Drafts a true prefix of random length, then random tokens up to the full width."""

    def _tokens(self, truth: list[int], count: int) -> list[int]:
        right = truth[: self._draw(count + 1)]
        return right + self._random_tokens(count - len(right))


class BranchingDrafter(OracleDrafter):
    """Plants a true prefix of random length in a random tree of other tokens.

    The first rows stop at some exit layers, as if they had exited there; not with attending heads.
    """

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:  # noqa: ARG002  # the protocol's
        """Draft up to `width` tokens, whose paths fit into `limit`."""
        position = state.length - state.pad
        right = self.sequence[position : position + self._draw(min(max(limit, 0), _RIGHT) + 1)]
        tokens, parents = list[int](), list[int]()
        below, placed = -1, 0  # the newest right token, and the number of them
        while len(tokens) < self.width and limit > 0:
            if placed < len(right) and self._draw(5) < 3:
                tokens.append(right[placed])
                parents.append(below)
                below, placed = len(tokens) - 1, placed + 1
                continue
            parent = self._draw(len(tokens) + 1) - 1
            if parent < 0 or depths(parents)[parent] + 1 < limit:
                tokens += self._random_tokens(1)
                parents.append(parent)
        draft = Draft.of(tokens, parents, ended="width" if tokens else "budget")
        exits = len(state.hidden.depths) - 2 if state.attention is None else 0
        trunk = [*state.committed(-1), *tokens[: draft.trunk]]
        for token in trunk[: self._draw(len(trunk) + 1) if exits else 0]:
            state.hidden.push(state.backbone.embed(state.ids.new_tensor([token])))
            for boundary in range(self._draw(exits) + 1):
                yield from state.hidden.advance(boundary)
        return draft


def planted_drafts(
    speculator: Speculator, options: SpeculationOptions, text: Sequence[int]
) -> dict[str, tuple[Drafter | None, SpeculationOptions]]:
    """Drafters and options by name: good, bad and random drafts, and real exits.

    `text`: the prompt and its known continuation. A drafter of None means the heads. Scripted
    drafts fill a pinned pass.
    """
    size, width = speculator.backbone.vocab_size, options.pinned_rows - 1
    plain = replace(options, speculate=False)
    if speculator.backbone.mixing is not None:
        return {"no": (None, plain)}  # drafts are refused
    drafters: dict[str, tuple[Drafter | None, SpeculationOptions]] = {
        "oracle": (OracleDrafter(text, width=width), plain),
        "wrong": (OracleDrafter([(token + 1) % size for token in text], width=width), plain),
        "random": (RandomDrafter((), 0, size, width), plain),
        "mixed": (MixedDrafter(text, 1, size, width), options),
    }
    steady = not options.pinned or speculator.backbone.claims.steady
    if steady and speculator.backbone.runs_trees:
        drafters["tree"] = (BranchingDrafter(text, 2, size, width), options)
    if speculator.heads is not None and options.speculate:
        exits = {"exit": {"threshold": _EAGER, "max_tokens": width}, "costs": "row=0"}
        drafters |= {"heads": (None, options), "eager heads": (None, options.updated(exits))}
    return drafters


# --- decoding that records logits


class Recorder(ObservedRule):
    """An acceptance rule that keeps the target logits of every committed token."""

    def __init__(self, rule: AcceptanceRule) -> None:
        super().__init__(rule)
        self._rows: list[Tensor] = []

    @property
    def logits(self) -> Tensor:
        """The target logits of all tokens so far, [n, V]."""
        return torch.stack(self._rows)

    def note(self, logits: Tensor, token: int) -> None:  # noqa: ARG002  # the base's
        self._rows.append(logits.clone())


class Listening(Runtime):
    """A runtime that records how tokens of each text are committed; may replace the drafter."""

    def __init__(self, other: Runtime, drafter: Drafter | None = None) -> None:
        super().__init__(other.backbone, other.heads, other.draft_model, other.datastore)
        self.probe = other.probe
        self.recorders: list[Recorder] = []
        self._planted_drafter = drafter

    def rule(self, sampler: Sampler, options: SpeculationOptions) -> AcceptanceRule:
        self.recorders.append(Recorder(super().rule(sampler, options)))
        return self.recorders[-1]

    def drafter(self, *options: Any) -> Drafter:
        return self._planted_drafter or super().drafter(*options)


def greedy_request(speculator: Speculator, prompt: Prompt, new_tokens: int) -> Request:
    """A greedy request for at most `new_tokens`, with the model's own generation settings."""
    ids = encode(speculator.tokenizer, prompt)
    # raw: ends where Hugging Face's text does
    return speculator.call(ids, {"max_new_tokens": new_tokens, "do_sample": False, "raw": True})


Text = tuple[list[int], Tensor]  # tokens, and the target logits [n, V] of each


def decode(
    speculator: Speculator,
    request: Request,
    options: SpeculationOptions,
    drafter: Drafter | None = None,
) -> Text:
    """The text that an engine writes, with the drafts of `options`, or those of `drafter`."""
    runtime = Listening(speculator.runtime, drafter)
    entries = Engine(runtime).add(request.only(), options)
    return [token for entry in entries for token in entry.tokens], runtime.recorders[0].logits
