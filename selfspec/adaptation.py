"""From a model to heads that draft for it, in a given time: `selfspec adapt`, `selfspec.adapt`.

The model writes text, heads are fitted to it and calibrated, settings are tuned for this machine,
and generation with the heads is timed against generation without, on prompts held out. Goes out: a
folder with the text, the heads and a report. It can be killed at any moment and goes on; with a
larger budget it writes more text, from which the heads learn on.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from selfspec import files
from selfspec.api import chat_template as templates
from selfspec.api import tuned
from selfspec.api.speculator import Speculator, load
from selfspec.api.text import Prompt
from selfspec.decoding.measure import measure
from selfspec.decoding.stats import Stopwatch
from selfspec.errors import InvalidData, InvalidOption
from selfspec.eval import tune
from selfspec.eval.options import RecordOptions, TuneOptions
from selfspec.eval.record import Recorder
from selfspec.eval.results import SpeedUp, load_suite, speed_up, spread
from selfspec.heads import known
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.folder import is_heads_folder
from selfspec.hub import models as hub
from selfspec.model import fingerprint
from selfspec.model.backbone import Backbone
from selfspec.training import calibrate, checkpoint, fit, records, selfgen
from selfspec.training.asking import Ask, Texts
from selfspec.training.checkpoint import record_of
from selfspec.training.features import Selection, StreamSource, whole
from selfspec.training.measure import agreements
from selfspec.training.options import CacheOptions, DataOptions, FitOptions, plain
from selfspec.training.recipe import Passages, Recipe, read_recipe
from selfspec.training.text import Conversation, Reader, encoded, special_ids, user_turns
from selfspec.typed import annotations_of, check_types
from selfspec.untrusted import read_json

logger = logging.getLogger(__name__)

TEXT, HEADS, REPORT, STATE = "text.jsonl", "heads", "report.md", "adapt.json"
BEFORE = "heads-before"
_UNFINISHED = "unfinished"

_TEXT_UNTIL, _FIT_UNTIL = 0.5, 0.8
"""Shares of the budget. What is left is for settings and for the comparison."""

_BATCHES = (8, 16, 32, 64, 128)
_ROW_TOKENS = 250
"""Steps of a batch of rows, the last of them alone: an answer has some 100 tokens on average."""
_STEPS = 12
"""That are timed to know how many rows a batch may have."""
_LEAST_BATCHES = 6
"""Batches that the text's time should hold, so that it ends in time and families are mixed."""

_MOST_EPOCHS = 8
_LEAST_STEP, _STEPS_EACH = 256, 150
"""Tokens of a step, and steps of an epoch as far as these allow."""
_HELPFUL = 20_000
"""Answer tokens from which on heads of SmolLM2-135M gained over prompt lookup."""

_TUNE_ON = 6
_TUNE_SHARE = 0.1
"""Most of the budget that tuning gets: replays take some 15 s for each prompt beside its answer."""
_REPLAY_S = 15.0

_FEWEST, _MOST, _ANSWER = 6, 60, 64
"""Prompts that are timed, and tokens of their answers."""
_LEAST_ANSWER = 16

WAYS: dict[str, dict[str, Any]] = {
    "without drafts": {"speculate": False},
    "prompt lookup": {"speculate": True, "drafter": "ngram"},
    "these heads": {},
}
"""What is compared, by name."""

Show = Callable[[float, float, str], None]
"""Called with seconds spent, seconds in all, and words."""


def seconds_of(budget: str) -> float:
    """90s, 30m or 2h in seconds. Raises InvalidOption."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(s|m|h)", budget.strip())
    seconds = float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]] if found else 0.0
    if seconds < 10.0:
        raise InvalidOption(f"budget is {budget}, expected at least 10 seconds: 90s, 30m, 2h")
    return seconds


class Row(NamedTuple):
    """A prompt that was answered in all WAYS."""

    task: str
    tokens: int
    """Behind the first."""
    seconds: list[float]
    """By way, behind the first token."""
    verifications: int
    """With these heads."""
    same: bool
    """All texts are one."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What came out."""

    model: str
    heads: Path
    used: bool
    """Whether `load` and the commands use the heads by themselves from now on."""
    answer_tokens: int
    epochs: float
    spent_s: float
    agreement: Mapping[str, tuple[int, float]]
    """Held-out positions, and the share where the heads say what the model says; by kind of text,
    "all" first."""
    rows: Sequence[Row]

    def tokens_per_s(self, way: str) -> float:
        """Behind the first token, over all prompts."""
        seconds = sum(row.seconds[list(WAYS).index(way)] for row in self.rows)
        return sum(row.tokens for row in self.rows) / seconds

    def gain(self, over: str) -> SpeedUp:
        """The speed-up of these heads over another of WAYS."""
        base, own = list(WAYS).index(over), list(WAYS).index("these heads")
        seconds = [row.seconds for row in self.rows]
        return speed_up([one[base] for one in seconds], [one[own] for one in seconds])

    @property
    def faster(self) -> bool:
        """Whether it is shown that the heads help: nothing that slows is to be used by itself."""
        if len(self.rows) < _FEWEST:
            return False
        plain, lookup = self.gain("without drafts"), self.gain("prompt lookup")
        return plain.low > 1.0 and lookup.ratio > 1.0

    def markdown(self) -> str:
        """For people."""
        lines = [
            f"# Heads for {self.model}\n",
            f"Fitted to {self.answer_tokens:,} answer tokens that the model wrote, "
            f"{self.epochs:.1f} epochs; {self.spent_s / 60:.1f} minutes in all.\n",
            *self._speed(),
            "## Agreement on text held out\n",
            "Share of the answer tokens that are the heads' first guess.\n",
            "| text | tokens | agreement |",
            "|---|---|---|",
            *(f"| {kind} | {n:,} | {part:.1%} |" for kind, (n, part) in self.agreement.items()),
            f"\n{self._then()}",
        ]
        return "\n".join(lines) + "\n"

    def _speed(self) -> list[str]:
        if not self.rows:
            return ["No prompt was answered by two tokens, so no speed could be measured.\n"]
        lines = [
            f"## Speed on {len(self.rows)} prompts held out\n",
            "| | tokens/s | these heads are faster by (95 %) |",
            "|---|---|---|",
        ]
        for way in WAYS:
            gain = self.gain(way)
            over = f"{gain.ratio:.2f} ({gain.low:.2f} to {gain.high:.2f})"
            shown = "" if way == "these heads" else over
            lines.append(f"| {way} | {self.tokens_per_s(way):.1f} | {shown} |")
        rate = sum(row.tokens for row in self.rows) / sum(row.verifications for row in self.rows)
        same = sum(row.same for row in self.rows)
        worst = self.gain("without drafts").worst
        return [
            *lines,
            f"\n{rate:.2f} tokens per verification. The slowest prompt ran at {worst:.2f} of its "
            f"speed without drafts. {same} of {len(self.rows)} answers are the same in all three "
            "ways.\n",
        ]

    def _then(self) -> str:
        if self.used:
            return (
                f"The heads are in {self.heads}. They are used with this model from now on; "
                f"without them: --heads none.\nShare them: selfspec heads push {self.heads} ID"
            )
        if self.faster:
            return (
                f"The heads are in {self.heads}; the model keeps the heads it had. To use these: "
                f"selfspec heads use {self.heads}"
            )
        return (
            "These heads do not make the model faster here, so nothing uses them. With a larger "
            "--budget the same command goes on from here.\n"
            f"To try them all the same: --heads {self.heads}"
        )


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
    """Heads for `model` (as `selfspec.load` has it), made within `budget` (90s, 30m, 2h).

    Everything is in the folder `output` (None: named after the model); what a killed call left
    there is taken up. `recipe`: prompt families in place of the built-in ones; `questions`: a file
    of your own prompts, of which every fifth is kept back to measure on; `passages`: a folder of
    texts to ask about. `raw`: for base models, which know no turns.
    `show` hears of the progress. Raises what `load` raises, InvalidData for a model without a chat
    template, CannotWrite, and InvalidOption where `output` was begun otherwise.
    """
    seconds = seconds_of(budget)
    name = str(output or f"{Path(str(model or 'default')).stem}-adapted")
    folder = files.check_folder(
        name,
        {TEXT, HEADS, BEFORE, REPORT, STATE},
        lambda found: (found / STATE).is_file(),
        overwrite=True,
        reads=[model, recipe, questions, passages, chat_template],
    ).absolute()
    with files.locked(folder):
        loading = {"model": model, "dtype": dtype, "device": device}
        text = DataOptions(raw=raw, seed=seed)
        own = [] if questions is None else list(Reader(questions, user_turns))
        asks = read_recipe(recipe)
        given = _Given(
            recipe=asks,
            own=own,
            passages=Passages(passages, tuple(asks.languages)),
            template=None if chat_template is None else templates.read(chat_template),
        )
        return _Adaptation(folder, seconds, loading, text, given, show or (lambda *_: None)).run()


class _Given(NamedTuple):
    """What a user gives beside the model, or what is built in."""

    recipe: Recipe
    own: list[tuple[str, ...]]
    """Prompts, the turns of each."""
    passages: Passages
    template: str | None


@dataclass
class _State:
    """How far it is, as `adapt.json` holds it."""

    made_from: dict[str, Any]
    """What must be the same for a folder to be continued."""
    budget_s: float
    begun_s: float = 0.0
    """Spent before with a smaller budget."""
    spent_s: float = 0.0
    batch_size: int = 0
    """Rows; 0: not chosen yet."""
    tokens: int = 0
    """Answer tokens of the text; 0: it is being written."""
    epochs: int = 0
    """0: not chosen yet."""
    seen: float = 0.0
    """Epochs that were done: fewer where the time got short."""
    fitted: bool = False
    tuned: bool = False
    agreement: dict[str, list[float]] = field(default_factory=dict)
    asked: int = 0
    """Prompts; of those that have a row in `rows` the answer has two tokens at least."""
    rows: list[list[Any]] = field(default_factory=list)
    """Each a Row."""
    used: bool = False
    finished: bool = False

    def __post_init__(self) -> None:
        for row in self.rows:
            check_types(dict(zip(Row._fields, row, strict=True)), annotations_of(Row))


class _Adaptation:
    """One folder on its way."""

    def __init__(
        self,
        folder: Path,
        budget_s: float,
        loading: dict[str, Any],
        text: DataOptions,
        given: _Given,
        show: Show,
    ) -> None:
        """Loads the model. Raises InvalidOption where the folder was begun otherwise."""
        self._began = time.monotonic()
        self._folder, self._show, self._text, self._given = folder, show, text, given
        show(0.0, budget_s, "loading the model")
        self._loading = loading
        self._dtype = loading["dtype"] or hub.training_dtype(loading["device"])
        self._model, tokenizer, found = hub.load_model(
            loading["model"], dtype=self._dtype, device=loading["device"]
        )
        self._label = found.label
        self._fingerprint = fingerprint.of_loaded(self._model, found.stamps)
        if given.template is not None and tokenizer is not None:
            tokenizer = templates.having(tokenizer, given.template)
        self._tokenizer = tokenizer
        self._state = self._begun(budget_s)
        self._before = self._state.spent_s

    def _begun(self, budget_s: float) -> _State:
        """A new folder's state, or that of a begun one; with a larger budget it is reopened."""
        made_from = {
            "model": self._fingerprint,
            "dtype": self._dtype,
            "raw": self._text.raw,
            "seed": self._text.seed,
            "questions": len(self._given.own),
            "recipe": self._given.recipe.digest,
            "passages": self._given.passages.digest,
            "chat_template": self._given.template,
        }
        file = self._folder / STATE
        if not file.exists():
            return _State(made_from=made_from, budget_s=budget_s)
        try:
            state = record_of(_State, read_json(file))
        except (InvalidOption, ValueError) as error:
            raise InvalidData(f"{file} is damaged: {error}. Remove its folder") from error
        checkpoint.require_same(self._folder, state.made_from, made_from, "remove the folder")
        if budget_s > state.budget_s:
            if is_heads_folder(self._heads):  # which the next ones go on from
                shutil.copytree(self._heads, self._folder / BEFORE, dirs_exist_ok=True)
            batch_size, spent_s = state.batch_size, state.spent_s
            state = _State(made_from, budget_s, spent_s, spent_s, batch_size)
        return state

    def run(self) -> Report:
        state = self._state
        if state.finished:
            return self._report()
        if not state.tokens:
            self._write_text()
        # by its own modules, which give states
        self._backbone = Backbone(self._model, executor="generic", fingerprint=self._fingerprint)
        train, held_out, families = self._features()
        if not state.fitted:
            self._fit(train, held_out)
        if not state.tuned:
            self._calibrate(held_out, families)
        del train, held_out
        # `load` reads the model as users will, from blocks where there are any
        del self._backbone, self._model
        self._compare([talk for _, talk in families])
        if self._report().faster:
            state.used = known.remember(self._heads) and self._loading["model"] is not None
        state.finished = True
        self._save()
        files.write(self._folder / REPORT, self._report().markdown())
        return self._report()

    def _report(self) -> Report:
        state = self._state
        return Report(
            model=self._label,
            heads=self._heads,
            used=state.used,
            answer_tokens=state.tokens,
            epochs=state.seen,
            spent_s=state.spent_s,
            agreement={kind: (int(n), share) for kind, (n, share) in state.agreement.items()},
            rows=[Row(*row) for row in state.rows],
        )

    # --- time

    @property
    def _heads(self) -> Path:
        return self._folder / HEADS

    @property
    def _spent(self) -> float:
        """Seconds, those of earlier calls included."""
        return self._before + time.monotonic() - self._began

    def _left(self, until: float = 1.0) -> float:
        """Seconds to a share of the budget, or of what was added to it."""
        begun = self._state.begun_s
        return begun + until * (self._state.budget_s - begun) - self._spent

    def _say(self, words: str) -> None:
        self._show(min(self._spent, self._state.budget_s), self._state.budget_s, words)

    def _save(self) -> None:
        self._state.spent_s = self._spent
        files.write(self._folder / STATE, json.dumps(asdict(self._state), indent=1) + "\n")

    # --- text

    def _write_text(self) -> None:
        state, backbone = self._state, Backbone(self._model, fingerprint=self._fingerprint)
        if not state.batch_size:
            state.batch_size = self._batch_size(backbone)
        longest = min(self._text.max_new_tokens, backbone.max_positions // 2)
        options = replace(self._text, batch_size=state.batch_size, max_new_tokens=longest)
        excluded = {n for q in load_suite() for turn in q.turns for n in selfgen.ngrams(turn)}
        writer = selfgen.Writer(
            self._folder / TEXT,
            asdict(options) | state.made_from | {"chat_template": self._given.template},
            records.machine(),
        )
        done = writer.counts.answer_tokens
        fresh = 0

        def count(tokens: int) -> None:
            nonlocal fresh
            fresh += tokens
            self._say(f"writing text: {done:,} answer tokens, {fresh:,} more in this batch")

        author = selfgen.Author(backbone, self._tokenizer, options, count)
        self._save()
        own = [turns for number, turns in enumerate(self._given.own) if number % 5]
        prompts = author.prompts(self._given.recipe, self._given.passages, own)
        propose = selfgen.here(selfgen.Written(author, prompts, excluded).propose)
        source = selfgen.Admission(options, writer.records(), excluded)
        while self._left(_TEXT_UNTIL) > 0.0 or not writer.batches:
            counts = next(selfgen.write(source, writer, options, propose))
            done, fresh = counts.answer_tokens, 0
            self._save()
        state.tokens = writer.counts.answer_tokens
        self._save()

    def _batch_size(self, backbone: Backbone) -> int:
        """Rows of a batch, so that the text's time holds several batches."""
        low, high = _BATCHES[0], _BATCHES[2]
        step = {rows: self._timed_step(backbone, rows) for rows in (low, high)}
        slope = max(0.0, (step[high] - step[low]) / (high - low))
        room = self._left(_TEXT_UNTIL) / _LEAST_BATCHES
        fitting = [n for n in _BATCHES if _ROW_TOKENS * (step[low] + slope * (n - low)) <= room]
        rows = fitting[-1] if fitting else _BATCHES[0]
        left = max(0.0, self._left(_TEXT_UNTIL))
        expected = 0.5 * rows / (step[low] + slope * (rows - low)) * left
        if expected < _HELPFUL:
            logger.warning(
                "the time may be too short: some %s answer tokens can be written, and heads began "
                "to help from %s on. A larger --budget can follow later",
                f"{expected:,.0f}",
                f"{_HELPFUL:,}",
            )
        return rows

    def _timed_step(self, backbone: Backbone, rows: int) -> float:
        """Seconds of one step of so many texts; the second of two tries."""
        for _ in range(2):
            began, left = time.monotonic(), rows
            texts = Texts(backbone, watch=lambda _: None)
            for number in range(rows):
                prompt = [number % backbone.vocab_size]
                texts.add(Ask(prompt, _STEPS, frozenset(), number, temperature=1.0))
            while left:
                left -= len(texts.step())
        return (time.monotonic() - began) / _STEPS

    # --- features and heads

    def _features(self) -> tuple[Selection, Selection, list[tuple[str, Conversation]]]:
        """To fit, to measure on, and what is measured on by family of the recipe."""

        def parse(record: dict[str, Any]) -> tuple[str, Conversation]:
            return str(record.get("family", "")), encoded(record, self._tokenizer)

        rows = list(Reader(self._folder / TEXT, parse))
        answered = [row for row in rows if row[1].answers]
        if len(answered) < 2:
            raise InvalidData(
                f"{len(answered)} answers could be written. Is it a base model? Give --raw; else "
                "a larger --budget"
            )
        # the last ones: within a batch rows ask about the same articles
        count = min(max(_FEWEST + 2, len(answered) // 20), len(answered) // 4)
        held_out = answered[-max(1, count) :]
        kept = {id(row) for row in held_out}
        backbone, options = self._backbone, self._fit_options()
        batch_tokens = CacheOptions().batch_tokens
        spec = fit.feature_spec(backbone, options, measured=False)
        train = [row[1] for row in rows if id(row) not in kept]
        # heads learn by steps: a small text is cut into as many as pay
        tokens = min(batch_tokens, max(_LEAST_STEP, sum(len(t.ids) for t in train) // _STEPS_EACH))
        size = spec.bytes_per_token(backbone.hidden_size, backbone.dtype.itemsize)
        room = psutil.virtual_memory().available / 2
        keep = size * sum(len(talk.ids) for talk in train) < room
        measured = fit.feature_spec(backbone, options, measured=True)
        others = [talk for _, talk in held_out]
        return (
            whole(StreamSource(backbone, spec, train, tokens, keep=keep)),
            whole(StreamSource(backbone, measured, others, batch_tokens, keep=True)),
            held_out,
        )

    def _fit_options(self) -> FitOptions:
        built_in = FitOptions()
        return replace(
            built_in,
            draft_vocab_size=min(built_in.draft_vocab_size or 0, self._backbone.vocab_size),
            epochs=self._state.epochs or 1,
            checkpoint_steps=50,
            seed=self._text.seed,
        )

    def _fit(self, train: Selection, held_out: Selection) -> None:
        """Fit for as many epochs as there is time for; less where it turns out to be short."""
        state, before = self._state, self._folder / BEFORE
        job = fit.Job(
            backbone=self._backbone,
            base_model=self._label,
            train=train,
            validation=held_out,
            options=self._fit_options(),
            start=self._read(before) if is_heads_folder(before) else None,
            special_ids=special_ids(self._tokenizer) if self._tokenizer else (),
            chat_template=self._given.template,
            data=TEXT,
            held_out="other conversations",
        )
        if not state.epochs:
            self._say("fitting: looking how long a step takes")
            state.epochs = self._epochs(job)
            self._save()
        workplace = self._heads / _UNFINISHED
        if not self._heads.exists() or not (workplace / checkpoint.FILE).is_file():
            checkpoint.remove(workplace)
        job = replace(job, options=self._fit_options(), workplace=workplace)

        def advance(step: int, steps: int, words: str) -> None:
            self._say(f"fitting: step {step} of {steps}, {words}")

        fitted = fit.fit(job, advance, left=lambda: self._left(_FIT_UNTIL))
        run = {"command": "adapt", "budget_s": state.budget_s, "base_model": self._label}
        records.write(self._heads, fitted, run | plain(job.options))
        checkpoint.remove(workplace)
        state.fitted, state.seen = True, fitted.metrics["steps"] / len(train.indices)
        self._save()

    def _epochs(self, job: fit.Job) -> int:
        """How many the time is enough for, at least one; by a few steps."""
        few = job.train.indices[:3]
        watch = Stopwatch()
        trial = replace(
            job,
            train=Selection(job.train.source, few),
            validation=Selection(job.validation.source, job.validation.indices[:1]),
        )
        fit.fit(trial, watch=watch)
        seconds = {part: watch.seconds.get(part, 0.0) / len(few) for part in ("features", "heads")}
        batches, left = len(job.train.indices), max(self._left(_FIT_UNTIL), 0.0)
        left -= seconds["features"] * len(job.validation.indices)
        once, each = seconds["features"] * batches, seconds["heads"] * batches
        return max(1, min(int((left - once) / each), _MOST_EPOCHS))

    def _read(self, heads: Path) -> ExitHeads:
        own = self._backbone.unembedding
        return ExitHeads.from_pretrained(heads, own, self._fingerprint, self._label)

    def _calibrate(self, held_out: Selection, families: Sequence[tuple[str, Conversation]]) -> None:
        """Temperatures and settings into the heads' config; agreement by kind of text.

        A kind is the first word of a family's name.
        """
        self._say("temperatures")
        heads = self._read(self._heads)
        found = calibrate.calibrate(heads, held_out, measure(Backbone(self._model), heads))
        calibrate.write(heads, self._heads, found, {"data": TEXT})
        kinds = {"all": [talk for _, talk in families]}
        for family, talk in families:
            kinds.setdefault(family.partition("-")[0], []).append(talk)
        spec, batch_tokens = held_out.source.spec, CacheOptions().batch_tokens
        for kind, talks in kinds.items():
            source = StreamSource(self._backbone, spec, talks, batch_tokens)
            shares = agreements(heads, whole(source).batches()).values()
            best = max(shares, key=lambda one: one.agreement)
            self._state.agreement[kind] = [best.positions, best.agreement]

    # --- this machine

    def _compare(self, held_out: Sequence[Conversation]) -> None:
        """Tune, then answer prompts in all WAYS; what is tuned on is not timed."""
        state = self._state
        self._say("loading the model with its heads")
        speculator = load(heads=self._heads, **self._loading)
        tuning, prompts = self._prompts(held_out)
        if not state.tuned:
            self._tune(speculator, tuning)
            state.tuned = True
            self._save()
        found = tuned.read(speculator.backbone, speculator.heads)
        speculator.options = speculator.options.updated(found)
        step = self._warmed(speculator, prompts[0][1])
        paid = 2 * len(WAYS) * _FEWEST * step  # prompts take time, too
        tokens = int(min(_ANSWER, max(_LEAST_ANSWER, self._left() / paid)))
        for task, prompt in prompts[state.asked : _MOST]:
            if state.asked >= _FEWEST and self._left() < 0.0:
                break
            self._say(f"comparing: prompt {state.asked + 1}")
            row = self._timed(speculator, task, prompt, tokens)
            state.asked += 1
            if all(row.seconds):
                state.rows.append(list(row))
            self._save()

    def _prompts(
        self, held_out: Sequence[Conversation]
    ) -> tuple[list[Prompt], list[tuple[str, Prompt]]]:
        """To tune on: beginnings of text held out. To compare on: questions held out, or such."""
        begun: list[Prompt] = [[*talk.ids[: talk.answers[0][0]]] for talk in held_out]
        tuning = spread(begun, min(_TUNE_ON, max(1, len(begun) // 2)))
        if self._given.own:
            own = [turns[0] for number, turns in enumerate(self._given.own) if number % 5 == 0]
            return tuning, [("your questions", prompt) for prompt in own]
        if self._text.raw:
            rest = [prompt for prompt in begun if prompt not in tuning] or begun
            return tuning, [("held out", prompt) for prompt in spread(rest, min(_MOST, len(rest)))]
        tasks: dict[str, list[Prompt]] = {}
        for question in load_suite():
            tasks.setdefault(question.task, []).append(question.turns[0])
        mixed = [(task, n, prompt) for task, ps in tasks.items() for n, prompt in enumerate(ps)]
        return tuning, [(task, prompt) for task, _, prompt in sorted(mixed, key=lambda one: one[1])]

    def _tune(self, speculator: Speculator, prompts: Sequence[Prompt]) -> None:
        options = RecordOptions(max_new_tokens=_ANSWER)
        costs = measure(speculator.backbone, speculator.heads)
        answer = 4 * options.max_new_tokens * costs.plain_step()
        room = min(_TUNE_SHARE * self._state.budget_s, self._left() / 2)
        count = min(len(prompts), int(room / (answer + _REPLAY_S)))
        if count < 2:
            return
        recorder = Recorder(speculator, options)
        for number, prompt in enumerate(prompts[:count]):
            self._say(f"tuning: prompt {number + 1} of {count}")
            recorder.prompt(prompt, str(number))
        record = recorder.record()
        costs = measure(
            speculator.backbone, speculator.heads, rows=record.widest, context=record.mean_context
        )
        found = tune.tune(
            record,
            costs,
            TuneOptions(),
            lambda done, total, words: self._say(f"tuning: {done:,} of {total:,} settings {words}"),
        )
        tuned.write(
            speculator.backbone,
            speculator.heads,
            found.options,
            asdict(found) | {"costs": asdict(costs)},
        )

    def _warmed(self, speculator: Speculator, prompt: Prompt) -> float:
        """Seconds of a step; every way has run once."""
        for options in WAYS.values():
            answer = self._answered(speculator, prompt, 8, options)
        return float(max(answer.stats.decode_s / max(1, answer.stats.rounds), 1e-4))

    def _answered(
        self, speculator: Speculator, prompt: Prompt, tokens: int, options: dict[str, Any]
    ) -> Any:
        raw = self._text.raw and isinstance(prompt, str)
        return speculator.generate(
            prompt, max_new_tokens=tokens, do_sample=False, raw=raw, **options
        )

    def _timed(self, speculator: Speculator, task: str, prompt: Prompt, tokens: int) -> Row:
        """One prompt in all ways, each time another one first."""
        first = self._state.asked % len(WAYS)
        order = [*WAYS][first:] + [*WAYS][:first]
        answers = {way: self._answered(speculator, prompt, tokens, WAYS[way]) for way in order}
        last = answers["these heads"]
        return Row(
            task,
            len(last.token_ids) - 1,
            [answers[way].stats.decode_s for way in WAYS],
            last.stats.rounds,
            len({tuple(answer.token_ids) for answer in answers.values()}) == 1,
        )
