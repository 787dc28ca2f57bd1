"""The methods that `bench` compares, sweeps of an option, and the runner.

For each prompt and turn all methods run in random order, so that machine drift affects all alike.
Each writes as many tokens as plain decoding does before its end token. A second turn's prompt holds
plain decoding's first answer, for every method.

To add a method, add an entry to METHODS. Imports no torch, so that `--help` is fast.
"""

from __future__ import annotations

import copy
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from selfspec.config import OPTION_NAMES, SpeculationOptions
from selfspec.errors import (
    HeadsNotFound,
    InvalidOption,
    SelfspecError,
    annotations_of,
    check_keys,
    first_line,
)
from selfspec.eval import results
from selfspec.eval.results import Answer, BenchOptions, Quality, Question, Run, Show
from selfspec.options import ACCEPTANCE, CONTROLLERS, PARTS, as_word, parse

if TYPE_CHECKING:
    from torch import Tensor

    from selfspec.api.speculator import Speculator
    from selfspec.api.stream import Estimate, Generation
    from selfspec.api.text import Prompt
    from selfspec.decoding.stats import GenerationStats, Round
    from selfspec.heads.exit_heads import ExitHeads

Setting = Mapping[str, Any]
"""Keywords: SpeculationOptions for our runtime, `generate`'s own for Hugging Face."""
Grid = Callable[["Speculator"], Sequence[Setting]]
"""Settings from which the fastest is chosen, on other prompts than those reported. An empty list:
with these heads the method would be `speculation` itself."""


class Written(NamedTuple):
    """An answer, and the counts of our runtime; Hugging Face has none."""

    token_ids: list[int]
    rounds: Sequence[Round] = ()
    stats: GenerationStats | None = None
    estimate: Estimate | None = None


Decode = Callable[["Speculator", "Tensor", int, Setting, Any], Written]
"""Writes a number of tokens after ids [1, P], greedily unless the setting says otherwise, or up to
an end token where one ends answers; each token goes to the streamer."""


@contextmanager
def unchanged(speculator: Speculator) -> Iterator[None]:
    """Restore the model's configs on exit.

    Assisted decoding stores what it learns in the model's generation config, and early exit sets
    the number of layers, which would stay set after an error.
    """
    model: Any = speculator.model
    config: Any = speculator.backbone.config
    original, layers, end = model.generation_config, config.num_hidden_layers, speculator.turn_end
    model.generation_config = copy.deepcopy(original)
    try:
        yield
    finally:
        model.generation_config, config.num_hidden_layers = original, layers
        speculator.turn_end = end


@contextmanager
def endless(speculator: Speculator) -> Iterator[None]:
    """Let no end token end an answer; restore the model's configs on exit."""
    with unchanged(speculator):
        model: Any = speculator.model
        model.generation_config.eos_token_id = None
        speculator.turn_end = type(speculator.turn_end)()
        yield


def on_our_runtime(
    speculator: Speculator, ids: Tensor, count: int, setting: Setting, streamer: Any
) -> Written:
    options = {"speculate": True, "do_sample": False, "streamer": streamer, **setting}
    stream = speculator.stream(ids, max_new_tokens=count, **options)
    answer = stream.drain()
    return Written(answer.token_ids, stream.rounds, answer.stats, answer.estimate)


def _hugging_face(
    speculator: Speculator, ids: Tensor, count: int, setting: Setting, streamer: Any
) -> Written:
    model: Any = speculator.model
    options = {"max_new_tokens": count, "do_sample": False, "streamer": streamer, **setting}
    options |= speculator.ending({}, speculator.turn_end) | {"tokenizer": speculator.tokenizer}
    options["use_cache"] = True  # the model's config may turn it off, which is slower
    sequences = model.generate(ids, attention_mask=ids.new_ones(ids.shape), **options)
    return Written(sequences[0, ids.shape[1] :].tolist())


# --- grids of settings

NO_BOUND = 64
"""W_max that stands for no bound: the largest, which no chain of confident drafts reaches."""

ALWAYS = 1e-9  # tau that every token reaches: no top-1 probability is smaller

EXIT: Setting = {"drafter": "exit", "never_slower": False}
"""The paper's method, without our pauses. It names the drafter, because the defaults of heads or
tuned options may name another."""

_DRAWN = {"do_sample": True, "seed": 0, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
"""Sample from the model's whole distribution: lenience means nothing for greedy drafts."""


def exits(**settings: Any) -> dict[str, Any]:
    text = ",".join(f"{name}={as_word(value)}" for name, value in settings.items())
    return {**EXIT, "drafter": f"exit:{text}"}


def _heads(speculator: Speculator) -> ExitHeads:
    if speculator.heads is None:
        raise HeadsNotFound("speculation needs exit heads. Give --heads, or other --methods")
    return speculator.heads


def _no_depth_bound(speculator: Speculator) -> list[Setting]:
    """All fitted layers; one without a threshold gets that of the next shallower layer with one."""
    heads, exit_options = _heads(speculator), speculator.options.exit
    fitted = heads.config.exit_layers
    if heads.layers_in_use(speculator.options) == fitted:
        return []
    layers = exit_options.layers or fitted
    by_layer = dict(zip(layers, itertools.cycle(exit_options.thresholds), strict=False))
    nearest = [max((at for at in layers if at <= layer), default=layers[0]) for layer in fitted]
    thresholds = tuple(by_layer[layer] for layer in nearest)
    return [exits(max_depth=None, layers=fitted, threshold=thresholds)]


def _peer(taus: Sequence[float], widths: Sequence[int], *, single: bool = True) -> Grid:
    """Settings for all fitted exit layers, or one each for the shallowest, middle and deepest.

    No peer anneals or bounds the depth. The heads keep their calibrated temperatures.
    """

    def settings(speculator: Speculator) -> list[Setting]:
        layers = _heads(speculator).config.exit_layers
        singles = sorted({layers[0], layers[len(layers) // 2], layers[-1]})
        subsets = [(layer,) for layer in singles] if single else [layers]
        return [
            exits(max_depth=None, anneal_strength=0, layers=subset, threshold=tau, max_tokens=width)
            for subset, tau, width in itertools.product(subsets, taus, widths)
        ]

    return settings


def _medusa(speculator: Speculator) -> list[Setting]:
    """Settings of Medusa-1: its published tree of 63 drafts, in full and cut to rows that pay."""
    if not _heads(speculator).looks_ahead:
        raise InvalidOption(
            "medusa needs medusa heads. Fit them and give them with --heads: selfspec fit "
            "--head-type medusa"
        )
    full = exits(threshold=ALWAYS, anneal_strength=0, guesses=10, max_tokens=4, max_rows=64)
    return [full, {**full, "never_slower": True}]


SKIPPED: dict[str, tuple[str, ...]] = {
    "SmolLM2-135M": ("4", "4/5/6/13/14/26", "4/5/6/7/13/14/15/18/21/22/26/27")
}
"""By the model's name: sets of layers that Self-SD may leave out, the best of one, six and twelve
that `eval.papers.self_sd` found; its command is in eval/results/papers/self-sd."""


def _self_sd(speculator: Speculator) -> list[Setting]:
    skipped = speculator.options.skip.skipped
    matches = (sets for name, sets in SKIPPED.items() if name in speculator.label)
    sets = next(matches, ()) if skipped is None else (as_word(skipped),)
    if not sets:
        raise InvalidOption(
            "the layers that self-sd should leave out are unknown for this model. Give "
            "--drafter skip:skipped=LAYER/LAYER/.."
        )
    return [{"drafter": f"skip:skipped={layers}", "never_slower": False} for layers in sets]


class Method(NamedTuple):
    """One way to decode; `source` describes it for readers of the results."""

    source: str
    settings: Grid | Setting  # a lossy method has one: the fastest of several is the lossiest
    decode: Decode = on_our_runtime


METHODS = {
    "hugging-face": Method(
        "transformers' model.generate, plain greedy decoding", {}, _hugging_face
    ),
    "plain": Method("plain greedy decoding on our runtime", {"speculate": False}),
    "speculation": Method("SpecBound on our runtime, with the settings of the heads", EXIT),
    **{
        name: Method(f"{source}, on our runtime", {"drafter": name})
        for name, source in (
            ("ngram", "prompt lookup"),
            ("ngram+exit", "prompt lookup, else speculation"),
            ("ngram+successors", "prompt lookup, and successors of tokens (Token Recycling)"),
            ("rest", "what follows the same tokens in a datastore (REST)"),
            ("ngram+rest", "prompt lookup, and a datastore (REST)"),
            ("lookahead", "lookahead decoding (Fu et al. 2024), N, W, G = 3, 2, 2"),
        )
    },
    "lookahead-5-7-7": Method(
        "lookahead decoding as its project has it: N, W, G = 5, 7, 7, and no pauses",
        {"drafter": "lookahead:level=5,window=7,guesses=7", "never_slower": False},
    ),
    "default": Method("as `generate` drafts here by itself, tuned or not", {}),
    "no-value-rule": Method(
        "ngram+exit, but whatever the text has said before is proposed in full",
        {"drafter": "ngram+exit", "costs": "row=0"},
    ),
    "no-never-slower": Method(
        "ngram+exit, but exit heads go on drafting where that does not pay",
        {"drafter": "ngram+exit", "never_slower": False},
    ),
    "draft-model": Method(
        "a second, smaller model (speculative decoding as it began) on our runtime",
        {"drafter": "draft-model", "never_slower": False},
    ),
    "self-sd": Method(
        "Self-SD: the model without layers that were found before drafts; on our runtime", _self_sd
    ),
    "swift": Method(
        "after SWIFT: layers are searched for while it writes; chains in place of trees",
        {"drafter": "skip:skipped=none,target=none,max_tokens=25", "never_slower": False},
    ),
    "no-annealing": Method(
        "speculation without annealing: alpha = 0, the thresholds stay (Figure 4 of SpecBound)",
        lambda it: [exits(anneal_strength=0)] if it.options.exit.anneal_strength else [],
    ),
    "no-depth-bound": Method(
        "speculation without D_max: all fitted exit layers (Figure 4 of SpecBound)", _no_depth_bound
    ),
    "no-width-bound": Method(
        "speculation without W_max (Figure 4 of SpecBound)", exits(max_tokens=NO_BOUND)
    ),
    "prompt-lookup": Method(
        "transformers' prompt_lookup_num_tokens",
        lambda _: [{"prompt_lookup_num_tokens": count} for count in (2, 4, 10)],
        _hugging_face,
    ),
    "assistant-early-exit": Method(
        "transformers' assistant_early_exit",
        lambda speculator: [
            {"assistant_early_exit": layer}
            for layer in sorted({max(1, speculator.backbone.num_layers // n) for n in (8, 4, 2)})
        ],
        _hugging_face,
    ),
    "fixed-exit": Method(
        "after LayerSkip: one exit layer, always exits; on our runtime, with our heads",
        _peer((ALWAYS,), (1, 2, 4)),
    ),
    "threshold-exit": Method(
        "after AdaDecode: exits above a threshold, no bounds; our runtime, our heads",
        _peer((0.5, 0.7, 0.9), (NO_BOUND,), single=False),
    ),
    "one-exit": Method(
        "after Kangaroo: one exit, an unsure token ends a draft; our runtime, our heads",
        _peer((0.4, 0.6, 0.8), (6,)),
    ),
    "medusa": Method("Medusa-1 on our runtime, with heads of its kind (--heads)", _medusa),
    "cm-asd": Method(
        "speculation under CM-ASD's rule: drafts close to the model's best token stay",
        {**EXIT, "acceptance": "cm-asd"},
    ),
    "easd": Method(
        "speculation under EASD's rule: no drafts where both models waver",
        {**EXIT, "acceptance": "easd"},
    ),
    **{
        name + suffix: Method(
            f"{source}, temperature {warmth:g}", {**setting, **_DRAWN, "temperature": warmth}
        )
        for suffix, warmth in (("", 1.0), ("-0.3", 0.3))
        for name, source, setting in (
            ("sampling", "plain sampling on our runtime", {"speculate": False}),
            ("sampled-speculation", "speculation under lossless speculative sampling", EXIT),
            ("sampled-default", "as `generate` drafts here by itself, sampled without loss", {}),
        )
    },
    "lenience": Method(
        "speculative sampling that keeps more drafts: lenience 0.6, temperature 1",
        {**EXIT, "acceptance": "lenient:lenience=0.6", **_DRAWN},
    ),
}
"""Methods by name; ablations and peers on our runtime differ in their settings alone."""

# --- sweeps: `--sweep exit.threshold=0.1,0.3`


def sweeps(text: str) -> dict[str, Setting]:
    """Parse a sweep `NAME=VALUE,VALUE,..` into settings by `NAME=VALUE`; `/` separates list items.

    NAME is an option (pinned_rows, acceptance), or a setting of one: exit.threshold, costs.row,
    acceptance.cm-asd.tolerance. A drafter's setting also chooses that drafter alone. Raises
    InvalidOption.
    """
    name, equals, values = (piece.strip() for piece in text.partition("="))
    if not equals:
        raise InvalidOption(f"sweep is {text!r}, expected NAME=VALUE,VALUE,..")
    known = _sweep_options()
    check_keys([name], known, "option to sweep")
    option, prefix, hint = known[name]
    typed_values = [parse(name, value.strip(), hint) for value in values.split(",")]
    return {
        f"{name}={as_word(value)}": {option: prefix + as_word(value) if prefix else value}
        for value in typed_values
    }


def _sweep_options() -> dict[str, tuple[str, str, Any]]:
    """By name of a sweep: the option, the prefix of the value in its text, the value's type."""
    hints = annotations_of(SpeculationOptions)
    sweeps = {
        name: (name, "", str if name in PARTS else hints[name])
        for name in OPTION_NAMES
        if name != "costs"
    }
    for option, kinds in PARTS.items():
        for kind, part in kinds.items():
            path = f"{option}.{kind}" if kind in CONTROLLERS and kind in ACCEPTANCE else kind
            for field in fields(part):
                prefix = f"{kind}:{field.name}=" if kind else f"{field.name}="
                hint = annotations_of(part)[field.name]
                sweeps[f"{path or option}.{field.name}"] = (option, prefix, hint)
    return sweeps


# --- methods with their settings, ready to be measured


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A method with one of its settings."""

    label: str
    method: str
    setting: Setting
    source: str = ""  # description of the method
    by: Decode = on_our_runtime
    lossy: bool = False  # its rule changes the output, which tables mark
    chosen_from: Sequence[str] = ()  # labels of all its settings, if it was the fastest of several

    def decode(
        self, speculator: Speculator, ids: Tensor, count: int, streamer: Any = None
    ) -> Written:
        """Write `count` tokens after ids [1, P], fewer if an end token ends the answer."""
        return self.by(speculator, ids, count, self.setting, streamer)

    @property
    def may_differ(self) -> bool:
        """Whether its answers may differ from those of plain greedy decoding."""
        return self.lossy or bool(self.setting.get("do_sample"))


def candidates(speculator: Speculator, names: Sequence[str]) -> dict[str, list[Contender]]:
    """Each method with all its settings. Raises InvalidOption, HeadsNotFound if one cannot run."""
    grid = {}
    for name in names:
        choices = METHODS[name].settings
        settings = [choices] if isinstance(choices, Mapping) else choices(speculator)
        if not settings:
            raise InvalidOption(
                f"{name} is the same as speculation with these heads and options. Leave it out of "
                "--methods"
            )
        grid[name] = [_contender(speculator, name, setting) for setting in settings]
    return grid


def swept(speculator: Speculator, settings: Mapping[str, Setting]) -> list[Contender]:
    """Speculation with some options changed; lenience samples. Raises as `candidates` does."""
    base = EXIT if speculator.options.uses("exit") else {}
    return [
        _contender(speculator, "speculation", {**base, **sampling, **setting}, label)
        for label, setting in settings.items()
        for sampling in [_DRAWN if "lenient" in setting.get("acceptance", "") else {}]
    ]


def describe(methods: Sequence[Contender]) -> dict[str, dict[str, Any]]:
    """Methods by label, for the record: description, setting, and what it was chosen from."""
    names = ("method", "source", "setting", "lossy", "chosen_from")
    return {method.label: {name: getattr(method, name) for name in names} for method in methods}


def _contender(
    speculator: Speculator, name: str, setting: Setting, label: str | None = None
) -> Contender:
    method, lossy = METHODS[name], False
    if method.decode is on_our_runtime:
        options = {"speculate": True, "do_sample": False, **setting}
        # raises here what would fail on every prompt
        stream = speculator.stream([0], max_new_tokens=1, **options)
        stream.close()
        if "exit" in setting.get("drafter", ""):
            _heads(speculator)
        speculation = stream.request.speculation
        lossy = speculation.speculate and speculation.loss is not None
    source = method.source
    if label and "exit" not in setting.get("drafter", ""):  # a sweep without heads
        source = "as `generate` drafts here by itself, with this setting"
    label = label or ", ".join(f"{key}={as_word(value)}" for key, value in setting.items())
    keywords: Any = {"source": source, "by": method.decode, "lossy": lossy}
    return Contender(label=f"{name}({label})", method=name, setting=setting, **keywords)


# --- the runner

_WARM_UP, _WARM_UP_TOKENS = "Count to ten.", 16


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Runs and times methods; all measurements of a run share it."""

    speculator: Speculator
    options: BenchOptions
    now: Callable[[], float] = time.perf_counter  # seconds; tests inject their own

    def measure(
        self, questions: Sequence[Question], contenders: Sequence[Contender], path: Path, show: Show
    ) -> list[Answer]:
        """Answers to all questions: those in the file at `path`, and new ones, appended to it."""
        results.drop_unfinished(path)
        answers = {answer.key: answer for answer in results.read(path)}
        if any(not self._is_done(question, answers) for question in questions):
            for contender in contenders:  # warms kernels and caches
                self.run(contender, self._ids(_WARM_UP), [0] * _WARM_UP_TOKENS)
        for number, question in enumerate(questions):
            show(number, len(questions), question.id)
            if not self._is_done(question, answers):
                for answer in self.answers(question, contenders, answers):
                    results.append(path, answer)
                    answers[answer.key] = answer
        show(len(questions), len(questions), "")
        return list(answers.values())

    def answers(
        self,
        question: Question,
        contenders: Sequence[Contender],
        stored_answers: Mapping[tuple[str, int, int], Answer],
    ) -> Iterator[Answer]:
        """Yield answers to all turns and repeats that are not in `stored_answers`."""
        messages: list[dict[str, str]] = []
        limit = self.options.max_new_tokens
        for turn, text in enumerate(question.turns, start=1):
            messages.append({"role": "user", "content": text})
            answer = Answer(id=question.id, task=question.task, turn=turn, repeat=1)
            try:
                ids = self._ids(messages if turn > 1 else text)
                plain = self.speculator.generate(
                    ids, max_new_tokens=limit, do_sample=False, speculate=False
                )
            except SelfspecError as error:
                yield replace(answer, error=first_line(error))
                return
            answer = replace(
                answer,
                prompt_tokens=ids.shape[1],
                new_tokens=len(plain.token_ids),
                repeated=results.repeated_share(plain.token_ids),
                text=plain.text,
            )
            for repeat in range(1, self.options.repeats + 1):
                answer = replace(answer, repeat=repeat)
                if answer.key in stored_answers:
                    continue
                order = list(contenders)
                random.Random(f"{self.options.seed} {answer.key}").shuffle(order)
                runs = {entry.label: self.run(entry, ids, plain.token_ids) for entry in order}
                if repeat == 1:
                    reference = question.reference if turn == len(question.turns) else None
                    runs |= self._judge(runs, contenders, ids, plain, reference)
                yield replace(answer, runs=runs)
            messages.append({"role": "assistant", "content": plain.text})

    def run(self, contender: Contender, ids: Tensor, expected: list[int]) -> Run:
        """Answer ids [1, P] with as many tokens as `expected` has, or record the error."""
        streamer = Arrivals(self.now)
        try:
            with endless(self.speculator):
                start = self.now()
                written = contender.decode(self.speculator, ids, len(expected), streamer)
                seconds = self.now() - start
        except Exception as error:  # noqa: BLE001  # a peer may fail in any way: others continue
            return _failed_run(error)
        if len(written.token_ids) != len(expected):
            return Run(error=f"wrote {len(written.token_ids)} of {len(expected)} tokens")
        return Run(
            seconds=seconds,
            arrivals=arrivals(streamer.events, start, written),
            equal=written.token_ids == expected,
            counts=_counts(written.stats) if written.stats else {},
            by_costs=written.estimate and written.estimate.speed_up,
        )

    def _judge(
        self,
        runs: Mapping[str, Run],
        contenders: Sequence[Contender],
        ids: Tensor,
        plain: Generation,
        reference: str | None,
    ) -> dict[str, Run]:
        """Add the quality of texts to `runs`: each is written once more, up to its own end."""
        speculator, judged, plain_tokens = self.speculator, {}, plain.token_ids
        tokenizer: Any = speculator.tokenizer
        # cached: every method needs it for plain decoding's answer
        nats = cache(lambda tokens: results.log_likelihood(speculator.model, ids, tokens))
        for entry in contenders:
            run = runs[entry.label]
            if run.error is not None or not (entry.may_differ or self.options.quality):
                continue
            try:
                with unchanged(speculator):
                    tokens = entry.decode(speculator, ids, self.options.max_new_tokens).token_ids
                quality = Quality(
                    text=tokenizer.decode(tokens, skip_special_tokens=True) if tokenizer else "",
                    plain_text=plain.text,
                    reference=reference,
                    tokens=len(tokens),
                    plain_tokens=len(plain_tokens),
                    first_divergence=results.first_divergence(tokens, plain_tokens),
                    edit_distance=results.edit_distance(tokens, plain_tokens),
                    log_likelihood=nats(tuple(tokens)),
                    plain_log_likelihood=nats(tuple(plain_tokens)),
                )
                judged[entry.label] = replace(run, quality=quality)
            except Exception as error:  # noqa: BLE001  # as in `run`
                judged[entry.label] = _failed_run(error)
        return judged

    def _ids(self, prompt: Prompt) -> Tensor:
        from selfspec.api.text import encode

        return encode(self.speculator.tokenizer, prompt).to(self.speculator.backbone.device)

    def _is_done(self, question: Question, answers: Mapping[tuple[str, int, int], Answer]) -> bool:
        """Whether all turns are answered, or an error says why they cannot be."""
        matches = [answer for answer in answers.values() if answer.id == question.id]
        complete = len(matches) == len(question.turns) * self.options.repeats
        return complete or any(answer.error for answer in matches)


def _failed_run(error: Exception) -> Run:
    return Run(error=f"{type(error).__name__}: {first_line(error)}")


# --- choosing settings and questions


def best_of(
    grid: Mapping[str, Sequence[Contender]], tuning: Sequence[Answer]
) -> dict[str, Contender]:
    """By method, the setting that failed least, then took least time; labelled as the method."""
    winners = {}
    for name, entries in grid.items():
        labels = [entry.label for entry in entries] if len(entries) > 1 else []
        best = _fastest(entries, [row.runs for row in tuning if row.runs]) if labels else entries[0]
        winners[name] = replace(best, label=name, chosen_from=labels)
    return winners


def _fastest(entries: Sequence[Contender], answers: Sequence[Mapping[str, Run]]) -> Contender:
    """The fastest of those that failed least often, on the answers that they all wrote."""

    def failures(entry: Contender) -> int:
        return sum(runs[entry.label].error is not None for runs in answers)

    fewest = min(map(failures, entries))
    steady = [entry for entry in entries if failures(entry) == fewest]
    shared = [runs for runs in answers if not any(runs[entry.label].error for entry in steady)]
    return min(steady, key=lambda entry: sum(runs[entry.label].seconds for runs in shared))


def split(
    suite: Sequence[Question], options: BenchOptions, *, tuning: bool
) -> tuple[list[Question], list[Question]]:
    """Questions to report, and to choose settings on. Raises InvalidOption if none is reported."""
    others = results.spread_out(suite, options.tune_questions) if tuning else []
    taken = {question.turns for question in others}
    rest = [question for question in suite if question.turns not in taken]
    if not rest:
        raise InvalidOption(
            f"all {len(others)} questions would be used to choose settings. Give fewer "
            "--tune-questions"
        )
    return results.spread_out(rest, options.limit), others


# --- when tokens arrive


class Arrivals:
    """A streamer that records when tokens arrive."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.events: list[tuple[int, float]] = []  # tokens that came together, and when
        self._now, self._has_prompt = now, False

    def put(self, value: Tensor) -> None:
        """Hugging Face gives the prompt first, then tokens."""
        if self._has_prompt:
            self.events.append((value.numel(), self._now()))
        self._has_prompt = True

    def end(self) -> None:
        """Do nothing: no token is held back."""


def arrivals(
    events: Sequence[tuple[int, float]], start: float, written: Written
) -> list[tuple[int, float]]:
    """Count of tokens of each pass, with the seconds since the pass before."""
    if written.rounds:  # our runtime streams a round's tokens one by one
        sizes = [len(entry.tokens) for entry in written.rounds]
        ends = itertools.accumulate(sizes)
        events = [(size, events[end - 1][1]) for size, end in zip(sizes, ends, strict=True)]
    times = [start, *(moment for _, moment in events)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return [(count, gap) for (count, _), gap in zip(events, gaps, strict=True)]


def _counts(stats: GenerationStats) -> dict[str, dict[str, float]]:
    kinds = [f"{word}_by_{kind}" for kind in ("layer", "index") for word in ("drafted", "accepted")]
    counts = {name: getattr(stats, name) for name in ("seconds", *kinds)}
    return {name: {str(key): n for key, n in count.items()} for name, count in counts.items()}
