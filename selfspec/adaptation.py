"""Makes heads for a model within a given time: `selfspec adapt`, `selfspec.adapt`.

The model writes text, heads are fitted to it and calibrated, settings are tuned for this machine,
and generation with the heads is timed against generation without, on held-out prompts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from selfspec import files
from selfspec.api import chat_template as templates
from selfspec.api import tuned
from selfspec.api.speculator import Speculator, heads_of, load
from selfspec.api.text import Prompt
from selfspec.decoding.measure import quick_costs, step_speed
from selfspec.decoding.stats import Stopwatch
from selfspec.errors import InvalidData, InvalidOption, InvalidPrompt, record_of, require_same
from selfspec.eval.results import SpeedUp, load_suite, speed_up, spread_out
from selfspec.eval.tune import ANSWERS, tune
from selfspec.files import read_json
from selfspec.heads.folder import is_heads_folder, remember
from selfspec.hub import models as hub
from selfspec.model import fingerprint
from selfspec.model.backbone import Backbone
from selfspec.training import fit, records, selfgen
from selfspec.training.features import Selection, StreamSource
from selfspec.training.options import (
    CacheOptions,
    DataOptions,
    FitOptions,
    explain_errors,
    options_dict,
    seconds_of,
)
from selfspec.training.recipe import Passages, Recipe, read_recipe
from selfspec.training.text import Conversation, Reader, Writer, from_ids, questions_of, special_ids

logger = logging.getLogger(__name__)

TEXT, HEADS, REPORT, STATE = "text.jsonl", "heads", "report.md", "adapt.json"
BEFORE = "heads-before"

_TEXT_UNTIL, _FIT_UNTIL = 0.5, 0.8
"""Shares of the budget. The rest is for settings and for the comparison."""

_BATCHES = (8, 16, 32, 64, 128)
_ROW_TOKENS = 250  # steps of a batch, of its longest rows: an answer has some 100 tokens on average
_STEPS = 12  # steps that are timed to choose the rows of a batch
_LEAST_BATCHES = 6  # batches of the text, so that it ends in time and mixes families

_MOST_EPOCHS = 8
_LEAST_STEP, _STEPS_EACH = 256, 150  # fewest tokens of a step, and steps of an epoch if they allow
_HELPFUL = 20_000  # answer tokens above which heads of SmolLM2-135M gained over prompt lookup

_TUNE_ON = 6
_TUNE_SHARE = 0.1  # most of the budget that tuning gets

_FEWEST, _MOST = 6, 60  # prompts that are timed
_LEAST_ANSWER, _ANSWER = 16, 64  # fewest and most tokens of their answers

WAYS: dict[str, dict[str, Any]] = {  # ways to generate that are compared
    "without drafts": {"speculate": False},
    "prompt lookup": {"speculate": True, "drafter": "ngram"},
    "these heads": {},
}

Show = Callable[[float, float, str], None]  # called with seconds spent, seconds in all, and words


class Row(NamedTuple):
    """A prompt that was answered in all WAYS."""

    task: str
    tokens: int  # after the first
    seconds: list[float]  # by way, after the first token, for the same number of tokens
    verifications: int  # with these heads
    same: bool  # all texts are the same


@dataclass(frozen=True, kw_only=True)
class Report:
    """Results of an adaptation."""

    model: str
    heads: Path
    drafts: bool  # the heads draft by default, by calibration and tuning
    used: bool  # `load` and the commands use them by default from now on
    answer_tokens: int
    epochs: float
    spent_s: float
    agreement: Mapping[str, tuple[int, float]]
    """Held-out positions, and the share where the heads are right; by kind of text, "all" first."""
    rows: Sequence[Row]

    def _seconds(self, way: str) -> list[float]:
        return [row.seconds[list(WAYS).index(way)] for row in self.rows]

    def tokens_per_s(self, way: str) -> float:
        """The rate after the first token, over all prompts."""
        return sum(row.tokens for row in self.rows) / sum(self._seconds(way))

    def gain(self, over: str) -> SpeedUp:
        """The speed-up of these heads over another of WAYS."""
        return speed_up(self._seconds(over), self._seconds("these heads"))

    @property
    def faster(self) -> bool:
        """Whether the heads are shown to help: nothing that slows is used by default."""
        return (
            self.drafts
            and len(self.rows) >= _FEWEST
            and self.gain("without drafts").low > 1.0
            and self.gain("prompt lookup").ratio > 1.0
        )

    def markdown(self) -> str:
        return records.page("report", report=self, ways=WAYS)


def adapt(
    model: str | Path | None = None,
    *,
    output: str | Path | None = None,
    budget: str = "30m",
    raw: bool = False,
    recipe: str | Path | None = None,
    questions: str | Path | None = None,
    passages: str | Path | None = None,
    chat_template: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    seed: int = 0,
    show: Show | None = None,
) -> Report:
    """Make heads for `model` (as in `selfspec.load`) within `budget` (90s, 30m, 2h).

    Writes everything to the folder `output` (None: named after the model), and continues a killed
    call there. `recipe`: prompt families instead of the built-in ones. `questions`: a file of your
    own prompts, of which every fifth is held out to measure on. `passages`: a folder of texts to
    ask about. `raw`: for base models, which know no turns. `show` is called with the progress.
    Raises what `load` raises, InvalidData for a model without a chat template, CannotWrite, and
    InvalidOption if `output` was begun with other options.
    """
    seconds = seconds_of(budget)
    if output is None:
        output = f"{Path(str(model or 'default')).name.removesuffix('.gguf')}-adapted"
    folder = files.check_folder(
        output,
        {TEXT, HEADS, BEFORE, REPORT, STATE},
        lambda path: (path / STATE).is_file(),
        overwrite=True,
        reads=[model, recipe, questions, passages, chat_template],
    ).absolute()
    with files.locked(folder):
        families = read_recipe(recipe)
        return _Adaptation(
            folder=folder,
            budget_s=seconds,
            loading={"model": model, "dtype": dtype, "device": device},
            text=DataOptions(raw=raw, seed=seed),
            recipe=families,
            passages=Passages(passages, families.languages),
            own=[] if questions is None else questions_of(questions),
            template=None if chat_template is None else templates.read(chat_template),
            show=show or (lambda *_: None),
        ).run()


@dataclass
class _State:
    """The progress, as stored in `adapt.json`."""

    made_from: dict[str, Any]  # must be unchanged to continue a folder
    budget_s: float
    begun_s: float = 0.0  # spent before with a smaller budget
    spent_s: float = 0.0
    batch_size: int = 0  # rows; 0: not chosen yet
    tokens: int = 0  # answer tokens of the text; 0: it is being written
    epochs: int = 0  # 0: not chosen yet
    seen: float = 0.0  # epochs that were done: fewer if time was short
    fitted: bool = False
    tuned: bool = False
    agreement: dict[str, tuple[int, float]] = field(default_factory=dict)
    asked: int = 0  # prompts; those whose answers have at least two tokens have a row
    rows: list[tuple[str, int, list[float], int, bool]] = field(default_factory=list)  # each a Row
    used: bool = False
    finished: bool = False
    drafts: bool = False


@dataclass(kw_only=True)
class _Adaptation:
    folder: Path
    budget_s: float
    loading: dict[str, Any]
    text: DataOptions
    recipe: Recipe
    passages: Passages
    own: list[tuple[str, ...]]
    template: str | None
    show: Show

    def __post_init__(self) -> None:
        """Load the model. Raises InvalidOption if the folder was begun with other options."""
        self._heads = self.folder / HEADS
        self.show(0.0, self.budget_s, "loading the model")
        self._dtype = self.loading["dtype"] or hub.training_dtype(self.loading["device"])
        loading = self.loading | {"dtype": self._dtype}
        self._model, self._tokenizer, source = hub.load_model(loading.pop("model"), **loading)
        self._label = source.label
        self._fingerprint = fingerprint.of_loaded(self._model, source.stamps)
        if self.template is not None:
            self._tokenizer = templates.with_template(self._tokenizer, self.template)
        self._state = self._load_state()
        self._spent_before, self._start_time = self._state.spent_s, time.monotonic()

    def _load_state(self) -> _State:
        """The state of a new or begun folder; a larger budget reopens a finished one."""
        made_from = {
            "model": self._fingerprint,
            "dtype": self._dtype,
            "raw": self.text.raw,
            "seed": self.text.seed,
            "questions": len(self.own) and hashlib.sha256(repr(self.own).encode()).hexdigest()[:16],
            "recipe": self.recipe.digest,
            "passages": self.passages.digest,
            "chat_template": self.template,
        }
        file = self.folder / STATE
        if not file.exists():
            return _State(made_from=made_from, budget_s=self.budget_s)
        with explain_errors(f"{file} is damaged", "Remove its folder"):
            state = record_of(_State, read_json(file))
        require_same(self.folder, state.made_from, made_from, "remove the folder")
        if self.budget_s > state.budget_s:
            if is_heads_folder(self._heads):  # the next heads start from these
                shutil.copytree(self._heads, self.folder / BEFORE, dirs_exist_ok=True)
            (self._heads / hub.CHECKPOINT).unlink(missing_ok=True)  # of a fit to less text
            state = _State(made_from, self.budget_s, state.spent_s, state.spent_s, state.batch_size)
        return state

    def run(self) -> Report:
        state = self._state
        if state.finished:
            return self._report()
        if not state.tokens:
            self._write_text()
        # the generic executor gives states
        self._backbone = Backbone(self._model, executor="generic", fingerprint=self._fingerprint)
        train, held_out, families = self._features()
        if not state.fitted:
            self._fit(train, held_out)
        if not state.tuned:
            self._calibrate(held_out, families)
        # `load` reads the model as users will, from quantised blocks if the file has them
        del train, held_out, self._backbone, self._model
        self._compare([talk for _, talk in families])
        if self._report().faster:
            state.used = remember(self._heads) and self.loading["model"] is not None
        state.finished = True
        self._save()
        report = self._report()
        files.write(self.folder / REPORT, report.markdown())
        return report

    def _report(self) -> Report:
        state = self._state
        return Report(
            model=self._label,
            heads=self._heads,
            drafts=state.drafts,
            used=state.used,
            answer_tokens=state.tokens,
            epochs=state.seen,
            spent_s=state.spent_s,
            agreement=state.agreement,
            rows=[Row(*row) for row in state.rows],
        )

    # --- time

    @property
    def _spent_s(self) -> float:
        return self._spent_before + time.monotonic() - self._start_time

    def _left_s(self, until: float = 1.0) -> float:
        """Seconds left of a share of the budget, or of what was added to a finished one."""
        start = self._state.begun_s
        return start + until * (self._state.budget_s - start) - self._spent_s

    def _say(self, message: str) -> None:
        self.show(min(self._spent_s, self._state.budget_s), self._state.budget_s, message)

    def _save(self) -> None:
        self._state.spent_s = self._spent_s
        files.write(self.folder / STATE, json.dumps(asdict(self._state), indent=1) + "\n")

    # --- text

    def _write_text(self) -> None:
        state, backbone = self._state, Backbone(self._model, fingerprint=self._fingerprint)
        self._start_time = time.monotonic()  # compiling, once per machine, does not count
        if not state.batch_size:
            state.batch_size = self._batch_size(backbone)
        longest = min(self.text.max_new_tokens, backbone.max_positions // 2)
        options = replace(self.text, batch_size=state.batch_size, max_new_tokens=longest)
        excluded = {n for q in load_suite() for turn in q.turns for n in selfgen.ngrams(turn)}
        made_from = asdict(options) | state.made_from
        writer = Writer(self.folder / TEXT, made_from, hub.machine())
        total, batch_tokens = writer.counts.total("answer_tokens"), 0

        def count(tokens: int) -> None:
            nonlocal batch_tokens
            batch_tokens += tokens
            self._say(f"writing text: {total:,} answer tokens, {batch_tokens:,} more in this batch")

        author = selfgen.Author(backbone, self._tokenizer, options, count)
        self._save()
        questions = [turns for number, turns in enumerate(self.own) if number % 5]
        prompts = author.prompts(self.recipe, self.passages, questions)
        propose = selfgen.local_submit(selfgen.Written(author, prompts, excluded).propose)
        source = selfgen.Admission(options, writer.records(), excluded)
        try:
            while self._left_s(_TEXT_UNTIL) > 0.0 or not writer.batches:
                counts = next(selfgen.write(source, writer, options, propose))
                total, batch_tokens = counts.total("answer_tokens"), 0
                self._save()
        except InvalidOption as error:
            if not total:
                raise
            logger.warning("the text ends here: %s", error)
        state.tokens = total
        self._save()

    def _batch_size(self, backbone: Backbone) -> int:
        """Choose the rows of a batch, so that the text's time holds several batches."""
        low, high = _BATCHES[0], _BATCHES[2]
        few, many = (self._time_step(backbone, rows) for rows in (low, high))
        slope = max(0.0, (many - few) / (high - low))
        step = {rows: few + slope * (rows - low) for rows in _BATCHES}  # seconds
        seconds = max(0.0, self._left_s(_TEXT_UNTIL))
        sizes = [n for n in _BATCHES if _ROW_TOKENS * step[n] <= seconds / _LEAST_BATCHES]
        rows = sizes[-1] if sizes else low
        tokens = 0.5 * rows / step[rows] * seconds
        if tokens < _HELPFUL:
            logger.warning(
                "the time may be too short: some %s answer tokens can be written, and heads began "
                "to help from %s on. A larger --budget can follow later",
                *(f"{count:,.0f}" for count in (tokens, _HELPFUL)),
            )
        return rows

    def _time_step(self, backbone: Backbone, rows: int) -> float:
        for _ in range(2):
            began, remaining = time.monotonic(), rows
            texts = selfgen.Texts(backbone, count=lambda _: None)
            for number in range(rows):
                prompt = [number % backbone.vocab_size]
                texts.add(selfgen.Ask(prompt, _STEPS, frozenset(), number, temperature=1.0))
            while remaining:
                remaining -= len(texts.step())
        return (time.monotonic() - began) / _STEPS

    # --- features and heads

    def _features(self) -> tuple[Selection, Selection, list[tuple[str, Conversation]]]:
        """Features to fit and to measure on, and the held-out texts with their families."""

        def parse(record: dict[str, Any]) -> tuple[str, Conversation]:
            return str(record.get("family", "")), from_ids(record)

        rows = list(Reader(self.folder / TEXT, parse))
        answered = [row for row in rows if row[1].answers]
        if len(answered) < 2:
            hint = "Give a larger --budget, or --raw for a base model"
            raise InvalidData(f"{len(answered)} answers could be written in this time. {hint}")
        # hold out the last ones: rows of one batch may ask about the same articles
        count = min(max(_FEWEST + 2, len(answered) // 20), len(answered) // 4)
        held_out = answered[-max(1, count) :]
        held_ids = {id(row) for row in held_out}
        train = [row[1] for row in rows if id(row) not in held_ids]
        backbone, options, most = self._backbone, self._fit_options(), CacheOptions().batch_tokens
        spec, test_spec = (fit.feature_spec(backbone, options, measured=m) for m in (False, True))
        # heads need many steps: a small text is cut into small ones
        ids = sum(len(talk.ids) for talk in train)
        step = min(most, max(_LEAST_STEP, ids // _STEPS_EACH))
        size = ids * spec.bytes_per_token(backbone.hidden_size, backbone.dtype.itemsize)
        keep = size < psutil.virtual_memory().available / 2
        test_set = StreamSource(backbone, test_spec, [row[1] for row in held_out], most, keep=True)
        train_set = StreamSource(backbone, spec, train, step, keep=keep)
        return Selection(train_set), Selection(test_set), held_out

    def _fit_options(self) -> FitOptions:
        return FitOptions(epochs=self._state.epochs or 1, checkpoint_steps=50, seed=self.text.seed)

    def _fit(self, train: Selection, held_out: Selection) -> None:
        """Fit for as many epochs as time allows, fewer if they take longer than expected."""
        state, folder, start = self._state, self.folder / BEFORE, None
        if is_heads_folder(folder):
            start = heads_of(folder, self._backbone, self._label)
        job = fit.Job(
            backbone=self._backbone,
            base_model=self._label,
            train=train,
            validation=held_out,
            options=self._fit_options(),
            start=start,
            special_ids=special_ids(self._tokenizer),
            chat_template=self.template,
            data=TEXT,
            held_out="other conversations",
        )
        if not state.epochs:
            self._say("fitting: timing a step")
            state.epochs = self._epochs(job)
            self._save()
        checkpoint = self._heads / hub.CHECKPOINT
        job = replace(job, options=self._fit_options(), checkpoint=checkpoint)
        fitted = fit.fit(
            job,
            lambda step, steps, note: self._say(f"fitting: step {step} of {steps}, {note}"),
            left_s=lambda: self._left_s(_FIT_UNTIL),
        )
        run = {"command": "adapt", "budget_s": state.budget_s, "base_model": self._label}
        records.write(self._heads, fitted, run | options_dict(job.options))
        state.fitted, state.seen = True, fitted.metrics["steps"] / len(train.indices)
        self._save()
        checkpoint.unlink(missing_ok=True)

    def _epochs(self, job: fit.Job) -> int:
        answers, watch = job.train.source.answers, Stopwatch()
        few = [index for index in job.train.indices if answers[index]][:3]
        probe = Selection(job.validation.source, job.validation.indices[:1])
        fit.fit(replace(job, train=Selection(job.train.source, few), validation=probe), watch=watch)
        features, heads = (watch.seconds[part] / len(few) for part in ("features", "heads"))
        batches, others = len(job.train.indices), len(job.validation.indices)
        seconds = max(self._left_s(_FIT_UNTIL), 0.0) - features * (batches + others)
        return max(1, min(int(seconds / (heads * batches)), _MOST_EPOCHS))

    def _calibrate(self, held_out: Selection, families: Sequence[tuple[str, Conversation]]) -> None:
        """Calibrate, and measure agreement by the first word of the families' names."""
        self._say("calibrating")
        heads = heads_of(self._heads, self._backbone, self._label)
        calibration = records.calibrate(heads, held_out, quick_costs(Backbone(self._model), heads))
        records.write_calibration(heads, self._heads, calibration, {"data": TEXT})
        kinds = {"all": [talk for _, talk in families]}
        for family, talk in families:
            kinds.setdefault(family.partition("-")[0], []).append(talk)
        spec, batch_tokens = held_out.source.spec, CacheOptions().batch_tokens
        for kind, talks in kinds.items():
            source = StreamSource(self._backbone, spec, talks, batch_tokens)
            shares = fit.agreements(heads, Selection(source).batches()).values()
            best = max(shares, key=lambda share: share.agreement)
            self._state.agreement[kind] = best.positions, best.agreement

    # --- this machine

    def _compare(self, held_out: Sequence[Conversation]) -> None:
        """Tune, then time other prompts in all WAYS."""
        state = self._state
        self._say("loading the model with its heads")
        speculator = load(heads=self._heads, **self.loading)
        tuning, prompts = self._prompts(held_out)
        if not state.tuned:
            self._tune(speculator, tuning)
            state.tuned = True
            self._save()
        changes = tuned.read(speculator.backbone, speculator.heads)
        speculator.options = settings = speculator.options.updated(changes)
        state.drafts = settings.speculate and settings.uses("exit")
        for options in WAYS.values():  # each runs once before it is timed
            stats = self._answer(speculator, tuning[0], 8, options).stats
        step = max(stats.decode_s / max(1, stats.rounds), 1e-4)  # seconds
        cost = 2 * len(WAYS) * _FEWEST * step  # prompts take time, too
        tokens = int(min(_ANSWER, max(_LEAST_ANSWER, self._left_s() / cost)))
        for task, prompt in prompts[state.asked : _MOST]:
            if state.asked >= _FEWEST and self._left_s() < 0.0:
                break
            self._say(f"comparing: prompt {state.asked + 1}")
            with suppress(InvalidPrompt):  # one of the user's may be too long for the model
                row = self._time_prompt(speculator, task, prompt, tokens)
                if all(row.seconds):
                    state.rows.append(row)
            state.asked += 1
            self._save()

    def _prompts(
        self, held_out: Sequence[Conversation]
    ) -> tuple[list[Prompt], list[tuple[str, Prompt]]]:
        """Prompts to tune on, from held-out text, and to compare on: own, held-out or suite."""
        openings: list[Prompt] = [[*talk.ids[: talk.answers[0][0]]] for talk in held_out]
        tuning = spread_out(openings, min(_TUNE_ON, max(1, len(openings) // 2)))
        if self.own:
            return tuning, [("your questions", turns[0]) for turns in self.own[::5]]
        if self.text.raw:
            rest = [prompt for prompt in openings if prompt not in tuning] or openings
            return tuning, [
                ("held out", prompt) for prompt in spread_out(rest, min(_MOST, len(rest)))
            ]
        tasks: dict[str, list[Prompt]] = {}
        for question in load_suite():
            tasks.setdefault(question.task, []).append(question.turns[0])
        rows = [(task, n, prompt) for task, ps in tasks.items() for n, prompt in enumerate(ps)]
        return tuning, [(task, prompt) for task, _, prompt in sorted(rows, key=lambda row: row[1])]

    def _tune(self, speculator: Speculator, prompts: Sequence[Prompt]) -> None:
        backbone, heads = speculator.backbone, speculator.heads
        prompt_s = ANSWERS * _ANSWER * step_speed(backbone).step_s
        room = min(_TUNE_SHARE * self._state.budget_s, self._left_s() / 2)
        if (count := min(len(prompts), int(room / prompt_s))) < 2:
            return
        with suppress(InvalidOption):  # too few answers of several tokens to tune on
            choice = tune(
                speculator,
                prompts[:count],
                lambda done, total, note: self._say(f"tuning: {done} of {total} prompts, {note}"),
                new_tokens=_ANSWER,
            )
            tuned.write(backbone, heads, choice.options, asdict(choice))

    def _answer(
        self, speculator: Speculator, prompt: Prompt, tokens: int, options: dict[str, Any]
    ) -> Any:
        settings: Any = {"max_new_tokens": tokens, "raw": self.text.raw and isinstance(prompt, str)}
        return speculator.generate(prompt, **options, **settings, do_sample=False)

    def _time_prompt(self, speculator: Speculator, task: str, prompt: Prompt, tokens: int) -> Row:
        first = self._state.asked % len(WAYS)
        order = [*WAYS][first:] + [*WAYS][:first]
        answers = {way: self._answer(speculator, prompt, tokens, WAYS[way]) for way in order}
        by_heads, counts = answers["these heads"], [len(answers[way].token_ids) - 1 for way in WAYS]
        seconds = [  # texts may differ, and then in length, too
            answers[way].stats.decode_s * counts[-1] / max(1, count)
            for way, count in zip(WAYS, counts, strict=True)
        ]
        same = len({tuple(answer.token_ids) for answer in answers.values()}) == 1
        return Row(task, counts[-1], seconds, by_heads.stats.rounds, same)
