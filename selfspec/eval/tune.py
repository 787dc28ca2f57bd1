"""The setting that suits this machine: a model and prompts in, options and a forecast out.

A Record holds what any exit setting would do on some prompts. Each *place* of an answer has a root
*node*: what every exit layer would draft behind the tokens up to there. A draft that a setting may
take leads to a child node, where drafting goes on. It is made by plain decoding that looks around:
before each verification an Explorer runs the newest token to every exit layer, with the runtime's
own pieces, and notes what the heads say. A real round does not know that a draft is wrong and goes
on behind it, so the explorer goes there too.

`replay` gives what a real run gives, field by field, from a Record alone. Controllers, drafts from
prompt lookup, the never-slower rule and the schedule are the runtime's own; only exit heads are
followed on paper.

`tune`: a cost model screens thousands of exit settings by how often each exits at the recorded
places. The best are replayed, alone and behind prompt lookup; without heads, drafts from prompt
lookup of several lengths. What is promised is held out: each part of the prompts is judged by the
setting that the same search finds on the other parts. Called by `selfspec tune` and `adapt`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from selfspec.api.request import Request
from selfspec.api.speculator import Speculator
from selfspec.api.text import Prompt
from selfspec.config import SpeculationOptions
from selfspec.decoding import decode
from selfspec.decoding.acceptance import Draft, GreedyMatch
from selfspec.decoding.costs import DraftCost, Exits, MeasuredCosts, expected
from selfspec.decoding.drafters.base import (
    ROOT,
    DraftWriter,
    Guesses,
    Known,
    PacedDrafter,
    make_controller,
)
from selfspec.decoding.drafters.heads import known_deep
from selfspec.decoding.drafters.ngram import SeenTextFirst
from selfspec.decoding.drafters.trees import LEAST_SAID, WhilePaying
from selfspec.decoding.engine import make_ngram, make_tree
from selfspec.decoding.sampling import DraftToken
from selfspec.decoding.state import (
    DecodeState,
    DraftsFrom,
    NoDrafter,
    Pass,
    Schedule,
    Steps,
    alone,
    ready,
)
from selfspec.decoding.stats import EXIT, Round, StopReason, Stopwatch
from selfspec.errors import HeadsNotFound, InvalidOption
from selfspec.eval.results import Question, RecordOptions, Show
from selfspec.heads.exit_heads import ExitHeads, check_exit_layers, layers_in_use
from selfspec.heads.heads import ExitJudge, likeliest, spread, top_probability
from selfspec.options import Costs, Exit, Ngram, as_text, settings_text

GUESSES = 8
"""Guesses kept of exit layer 0 at each node, for trees."""

NONE = -1
"""In place of a node: there is none."""

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class PromptInfo:
    """One prompt, the answer of plain decoding, and where drafting may begin."""

    id: str
    """The question's: all its turns have it."""
    ids: list[int]
    answer: list[int]
    """A token for each place, an end token included."""
    roots: list[int]
    """The node where the place's token is the newest; NONE where nothing can be drafted."""
    max_new_tokens: int
    """What was asked for; the answer is shorter if it ended by itself."""
    end_tokens: Collection[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Record:
    """Answers of plain decoding, and what exit layers would have drafted at each place.

    T places (the answers of all prompts, one behind the other), N nodes, E exit layers, A alphas.
    """

    num_layers: int
    exit_layers: tuple[int, ...]
    """Recorded ones: a column each in the arrays."""
    anneal_strengths: tuple[float, ...]
    """Alphas: the last axis of `confidence`."""
    min_threshold: float
    """Branches are followed down to this confidence, at the alpha where it is highest."""
    max_draft_tokens: int
    """Branches are followed for so many drafts."""
    cost: DraftCost
    """What the model pays for rows and heads, unless measured."""
    prompts: tuple[PromptInfo, ...]
    tokens: Ints
    """[N, E, G] the best tokens of each exit layer; G is 1 unless exit layer 0 may make trees. NONE
    fills the rows of other layers."""
    chances: Floats
    """[N, E, A, G] their probabilities after annealing, falling."""
    children: Ints
    """[N, E, G] the node behind each; NONE where no setting goes on."""

    @property
    def guesses(self) -> int:
        """G: more than one make trees."""
        return int(self.tokens.shape[-1])

    @property
    def confidence(self) -> Floats:
        """[N, E, A] the probability of the best token."""
        return self.chances[..., 0]

    @cached_property
    def answers(self) -> Ints:
        """[T]."""
        return np.concatenate([entry.answer for entry in self.prompts]).astype(np.int32)

    @cached_property
    def roots(self) -> Ints:
        """[T]."""
        return np.concatenate([entry.roots for entry in self.prompts]).astype(np.int32)

    @property
    def widest(self) -> int:
        """Rows of a verification at most, under settings that are tried on it."""
        chain = self.max_draft_tokens + 1
        return max(chain, Exit().max_rows) if self.guesses > 1 else chain

    @property
    def mean_context(self) -> int:
        """Tokens in front of a place, on average."""
        contexts = (len(entry.ids) + len(entry.answer) / 2 for entry in self.prompts)
        return round(sum(contexts) / len(self.prompts))


# --- how it is made -------------------------------------------------------------------------------

_FLOORS = {True: 0.01, False: 0.2}
"""Lowest threshold to be replayed, for a single exit layer and for several."""


class _Said(NamedTuple):
    """What one exit layer says of the next token, at a node."""

    tokens: list[int]
    """The best first."""
    chances: list[list[float]]
    """By alpha, of all of them."""
    children: list[int]
    """The node behind each; entered later."""


@dataclass
class Explorer:
    """A drafter that looks and proposes nothing, so that decoding stays plain.

    A right draft leads to the next place's root: the same tokens have the same hidden states. Only
    for heads that read deep states it does not: what they read there is what the head before them
    computed, so all their drafts, right ones too, have nodes of their own, by exit layer.
    """

    recorder: Recorder
    """How far branches are followed, and where nodes are added."""
    heads: ExitHeads
    judges: Sequence[ExitJudge]
    """One per alpha."""
    answer: Sequence[int]
    """What will be decoded."""
    end_tokens: frozenset[int]
    roots: list[int] = field(default_factory=list)
    """By place; the last token of an answer has none."""

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:  # noqa: ARG002  # the protocol's
        """No tokens; the state is left as it was found."""
        place, root = len(self.roots), NONE
        if (room := min(limit, self.recorder.drafts)) > 0:
            right = None if self.heads.reads_deep else self.answer[place + 1]
            deep = known_deep(self.heads, state)
            paths = [1.0] * len(self.judges)
            root = self._look(state, self.answer[place], deep, room, right, paths)
            state.hidden.clear()
        if place > 0 and not self.heads.reads_deep:
            # the right drafts of the place before lead to this place's root
            for entry in self.recorder.nodes[self.roots[-1]]:
                for rank, token in enumerate(entry.tokens):
                    if token == self.answer[place]:
                        entry.children[rank] = root
        self.roots.append(root)
        return ready(Draft())

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        """Nothing was proposed."""

    def _look(
        self,
        state: DecodeState,
        token: int,
        deep: Tensor | None,
        room: int,
        right: int | None,
        paths: Sequence[float],
    ) -> int:
        """Note what follows `token`, and what follows that, for `room` drafts; returns the node.

        Nothing is noted behind the draft `right`, behind an end token, or where nothing that can be
        replayed goes on: no threshold lets a draft leave, no tree asks behind it. `paths`: what
        exit layer 0 gives the way to here, by alpha.
        """
        nodes, held, index = self.recorder.nodes, state.lease.length(0), len(self.recorder.nodes)
        said = self._ask(state, token, deep)
        nodes.append([entry for entry, _ in said])
        found: dict[tuple[int, int], int] = {}
        for column, (entry, features) in enumerate(said):
            for rank, draft in enumerate(entry.tokens):
                chances = [by[rank] for by in entry.chances]
                on = [0.0] * len(paths)
                if self.recorder.trees and column == 0:
                    on = [path * chance for path, chance in zip(paths, chances, strict=True)]
                taken = rank == 0 and max(chances) >= self.recorder.threshold
                ends = room == 1 or draft == right or draft in self.end_tokens
                if ends or not (taken or max(on) >= LEAST_SAID):
                    continue
                branch = (column if self.heads.reads_deep else 0, draft)
                if branch not in found:
                    found[branch] = self._look(state, draft, features, room - 1, None, on)
                entry.children[rank] = found[branch]
        state.lease.truncate(held)
        return index

    def _ask(
        self, state: DecodeState, token: int, deep: Tensor | None
    ) -> list[tuple[_Said, Tensor]]:
        """Run a row up to the deepest exit layer; what each says, and its features, [1, d]."""
        state.hidden.clear()  # rows of other branches; their keys and values stay
        state.hidden.push(state.backbone.embed(state.ids.new_tensor([token])))
        said = []
        for boundary, layer in enumerate(state.hidden.schedule.depths[1:-1]):
            hidden = alone(state.hidden.advance(boundary))[-1:]
            head = self.heads[layer]
            features = head.features(hidden, deep)
            logits = head.unembed(features)
            count = GUESSES if self.recorder.trees and layer == 0 else 1
            made = [likeliest(logits, judge.temperature(layer), count) for judge in self.judges]
            best = head.to_target_ids(made[0][0]).float()
            tokens, *chances = torch.cat([best, *(found for _, found in made)]).tolist()
            entry = _Said([*map(int, tokens)], chances, [NONE] * len(tokens))
            said.append((entry, features))
        return said


def record(
    speculator: Speculator, questions: Sequence[Question], options: RecordOptions, show: Show
) -> Record:
    """Decode all turns of `questions` greedily and note what any setting would do there.

    Each turn sees the plain answers to those before it; a model without a chat template writes on
    behind the first. Raises what a Recorder does.
    """
    recorder = Recorder(speculator, options)
    raw = getattr(speculator.tokenizer, "chat_template", None) is None
    for done, question in enumerate(questions):
        show(done, len(questions), question.id)
        messages: list[dict[str, str]] = []
        for turn in question.turns[: 1 if raw else None]:
            messages.append({"role": "user", "content": turn})
            answer = recorder.prompt(turn if raw else messages, question.id)
            messages.append({"role": "assistant", "content": answer})
    show(len(questions), len(questions), f"{len(recorder.nodes)} nodes")
    return recorder.record()


class Recorder:
    """Collects prompts into one Record; without heads nothing is noted but the text.

    Raises HeadsNotFound for exit layers without heads, InvalidOption for those that heads lack.
    """

    def __init__(self, speculator: Speculator, options: RecordOptions) -> None:
        heads, layers = speculator.heads, options.exit_layers or ()
        if heads is not None:
            layers = layers or heads.config.exit_layers
            check_exit_layers(layers, heads.config.exit_layers)
        elif layers:
            raise HeadsNotFound(
                f"exit layers {list(layers)} without exit heads. Give --heads, or leave them out"
            )
        self.nodes: list[list[_Said]] = []
        self.drafts = options.max_draft_tokens
        self.threshold = options.min_threshold or _FLOORS[len(layers) == 1]
        self.trees = layers[:1] == (0,) and speculator.backbone.runs_trees
        self._speculator, self._options, self._layers = speculator, options, layers
        self._prompts: list[PromptInfo] = []

    def prompt(self, prompt: Prompt, name: str) -> str:
        """The answer's text. Raises InvalidOption where greedy is more than the likeliest token."""
        speculator = self._speculator
        options: Any = {"max_new_tokens": self._options.max_new_tokens, "do_sample": False}
        request = speculator.call(prompt, options)
        asked = request.only()
        if not asked.sampler.is_plain_greedy or asked.stop.criteria is not None:
            names = [type(p).__name__ for p in asked.sampler.processors] or ["stopping criteria"]
            raise InvalidOption(
                f"the model's generation_config asks for {', '.join(names)}, which cannot be "
                "replayed. Leave it out there"
            )
        plain = speculator.generate(prompt, **options, speculate=False)
        self._prompts.append(
            PromptInfo(
                id=name,
                ids=asked.ids[0, asked.pad :].tolist(),
                answer=plain.token_ids,
                roots=self._explored(request, plain.token_ids),
                max_new_tokens=asked.stop.max_length - asked.ids.shape[1],
                end_tokens=asked.stop.end_tokens,
            )
        )
        return plain.text

    def _explored(self, request: Request, answer: Sequence[int]) -> list[int]:
        """The root of each place of an answer, its nodes noted; without heads there are none."""
        heads = self._speculator.heads
        if heads is None:
            return [NONE] * len(answer)
        asked = request.only()
        looking = replace(
            request.speculation, speculate=True, drafter="exit", exit=Exit(layers=self._layers)
        )
        state = self._speculator.runtime.state(asked, looking)
        layers, taus = self._speculator.backbone.num_layers, dict.fromkeys(self._layers, 1.0)
        warmth = {int(layer): value for layer, value in heads.config.temperatures.items()}
        judges = [
            ExitJudge(layers, taus, alpha, warmth) for alpha in self._options.anneal_strengths
        ]
        explorer = Explorer(self, heads, judges, answer, frozenset(asked.stop.end_tokens))
        rule = GreedyMatch(asked.sampler)
        for _ in decode.rounds(state, explorer, rule, asked.stop, Stopwatch()):
            pass
        return [*explorer.roots, NONE]

    def record(self) -> Record:
        """Everything so far."""
        backbone, alphas = self._speculator.backbone, tuple(self._options.anneal_strengths)
        shape = len(self.nodes), len(self._layers), len(alphas), GUESSES if self.trees else 1
        tokens, children = (np.full((*shape[:2], shape[3]), NONE, np.int32) for _ in range(2))
        chances = np.zeros(shape, np.float32)
        for index, node in enumerate(self.nodes):
            for column, said in enumerate(node):
                count = len(said.tokens)
                tokens[index, column, :count] = said.tokens
                children[index, column, :count] = said.children
                chances[index, column, :, :count] = said.chances
        return Record(
            num_layers=backbone.num_layers,
            exit_layers=tuple(self._layers),
            anneal_strengths=alphas,
            min_threshold=self.threshold,
            max_draft_tokens=self.drafts,
            cost=DraftCost.for_model(backbone).with_costs(self._speculator.options.costs),
            prompts=tuple(self._prompts),
            tokens=tokens,
            chances=chances,
            children=children,
        )


# --- the rounds that a setting would have made ---------------------------------------------------


class Setting(NamedTuple):
    """SpeculationOptions in terms of a record: which columns are asked, and what is enough."""

    layers: tuple[int, ...]
    """Exit layers in use, up to D_max."""
    columns: tuple[int, ...]
    thresholds: tuple[float, ...]
    alpha: int
    """Index on the last axis of the confidence."""
    guesses: int
    """For a place; more than one make trees."""

    @classmethod
    def of(cls, record: Record, options: SpeculationOptions) -> Setting:
        """Raises InvalidOption for a setting that the record does not reach."""
        own, fitted = options.exit, record.exit_layers
        used = layers_in_use(fitted, options)
        by_layer = spread(own.thresholds, own.layers or fitted)
        thresholds = tuple(by_layer[layer] for layer in used)
        controller = make_controller(options, own.max_tokens)
        if (
            own.anneal_strength not in record.anneal_strengths
            or min(thresholds) < record.min_threshold
            or controller.longest > record.max_draft_tokens
            or controller.signal not in (None, top_probability)
            or (options.grows_trees and (used != (0,) or own.guesses > GUESSES))
        ):
            raise InvalidOption(f"not all that {own} with {options.controller} asks was recorded")
        # a record without guesses is of a model that drafts chains, whatever is asked for
        return cls(
            layers=used,
            columns=tuple(map(fitted.index, used)),
            thresholds=thresholds,
            alpha=record.anneal_strengths.index(own.anneal_strength),
            guesses=own.guesses if options.grows_trees and record.guesses > 1 else 1,
        )


class _State:
    """What drafters see of a sequence: DecodeState without a model."""

    def __init__(self, prompt: PromptInfo, schedule: Schedule) -> None:
        self.prompt, self.answer, self.schedule = prompt, prompt.answer, schedule
        self.known = 1
        """Committed tokens of the answer."""

    def committed(self, start: int) -> list[int]:
        return (self.prompt.ids + self.answer[: self.known])[start:]

    @property
    def root(self) -> int:
        return self.prompt.roots[self.known - 1]

    def stop_reason(self) -> StopReason | None:
        if self.known < len(self.answer):
            return None
        return "eos" if self.answer[-1] in self.prompt.end_tokens else "length"


class _Guesser:
    """`drafters.HeadGuesser` on a record."""

    source = EXIT
    once = False

    def __init__(self, record: Record, setting: Setting) -> None:
        self._record, self._setting = record, setting
        self._nodes: dict[int, int] = {}
        """Nodes of the record, by index of the draft token."""

    def begin(self, state: _State) -> None:
        self._nodes = {ROOT: state.root}

    def ask(self, draft: Draft, asked: Sequence[int], watch: Stopwatch) -> Steps[list[Guesses]]:  # noqa: ARG002  # the protocol's
        return ready([self._guesses(self._node(draft, index)) for index in asked])

    def _node(self, draft: Draft, index: int) -> int:
        if index not in self._nodes:
            parent = self._nodes[draft.proposed[index].parent]
            rank = self._record.tokens[parent, 0].tolist().index(draft.proposed[index].token)
            self._nodes[index] = int(self._record.children[parent, 0, rank])
        return self._nodes[index]

    def _guesses(self, node: int) -> Known:
        record, setting = self._record, self._setting
        chances = record.chances[node, 0, setting.alpha, : setting.guesses].tolist()
        if chances[0] < setting.thresholds[0]:
            return Known([], [])
        return Known(record.tokens[node, 0, : setting.guesses].tolist(), chances)


class _ExitDrafter(PacedDrafter):
    """`drafters.ExitDrafter` on a record."""

    def __init__(self, record: Record, setting: Setting, *paced: Any) -> None:
        super().__init__(*paced)
        self._record, self._setting = record, setting

    def draft(self, state: _State, limit: int, watch: Stopwatch) -> Steps[Draft]:  # noqa: ARG002  # the protocol's
        """Up to min(limit, W_max) tokens; the rows that gave them wait where they left."""
        writer = DraftWriter(self, limit, source=EXIT)
        record, setting, node = self._record, self._setting, state.root
        while writer.room:
            state.schedule.push(1)
            asked = zip(setting.layers, setting.columns, setting.thresholds, strict=True)
            for boundary, (layer, column, tau) in enumerate(asked):
                state.schedule.advance(boundary)
                writer.draft.heads += 1
                confidence = float(record.confidence[node, column, setting.alpha])
                if confidence >= tau:
                    token = int(record.tokens[node, column, 0])
                    writer.add(DraftToken(token, layer=layer), confidence)
                    node = int(record.children[node, column, 0])
                    break
            else:  # a difficult token
                writer.stop("depth")
                break
        return ready(writer.draft)


def replay(record: Record, prompt: int, options: SpeculationOptions) -> list[Round]:
    """All rounds of one prompt, the prompt's own pass first, as `decode.rounds` yields them.

    Raises InvalidOption for a setting that the record does not reach.
    """
    info = record.prompts[prompt]
    drafter, layers = _drafter(record, options, info.end_tokens)
    state, watch = _State(info, Schedule(layers, record.num_layers)), Stopwatch()
    passes, reason = [Pass(len(info.ids), 0, record.num_layers)], state.stop_reason()
    entries = [Draft().verified(state.answer[:1], [], passes, prefill=True, stop_reason=reason)]
    while state.known < len(state.answer):
        state.schedule.clear()
        draft = alone(drafter.draft(state, info.max_new_tokens - state.known - 1, watch))
        entries.append(_verified(state, draft))
        drafter.learn(draft, entries[-1].kept)
    return entries


def _drafter(
    record: Record, options: SpeculationOptions, end_tokens: Collection[int]
) -> tuple[DraftsFrom[_State], tuple[int, ...]]:
    """What proposes tokens, and the exit layers at which rows may wait; as `make_drafter`."""
    if not options.speculate or options.drafter == "none":
        return NoDrafter(), ()
    if options.loss is not None or any(map(options.uses, ("draft-model", "rest", "skip"))):
        raise InvalidOption("lossy rules, other layers and datastores say what was not recorded")
    cost = record.cost.with_costs(options.costs)
    ngram = make_ngram(options, cost, end_tokens)
    if not options.uses("exit"):
        return ngram, ()
    setting = Setting.of(record, options)
    if setting.guesses > 1:
        seen = ngram if options.uses("ngram") else None
        guesser = _Guesser(record, setting)
        return make_tree(guesser, options, cost, end_tokens, seen), setting.layers
    controller = make_controller(options, options.exit.max_tokens)
    exits: DraftsFrom[_State] = _ExitDrafter(record, setting, controller, end_tokens)
    if options.never_slower:
        exits = WhilePaying(exits, cost)
    return SeenTextFirst(ngram, exits) if options.uses("ngram") else exits, setting.layers


def _verified(state: _State, draft: Draft) -> Round:
    drafted, following = draft.tokens, state.answer[state.known :]
    state.schedule.push(len(drafted) + 1 - state.schedule.pushed)
    for boundary, until in state.schedule.finish():
        state.schedule.advance(boundary, until)
    kept: list[int] = []
    while len(kept) < len(following):
        behind = draft.following(kept[-1] + 1 if kept else 0)
        right = [index for index in behind if drafted[index] == following[len(kept)]]
        if not right:
            break
        kept.append(right[0])
    tokens = following[: len(kept) + 1]
    state.known += len(tokens)
    return draft.verified(tokens, kept, state.schedule.passes, stop_reason=state.stop_reason())


# --- the choice ----------------------------------------------------------------------------------

_SHARES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
"""Candidate thresholds let this share of the places exit, of those above the recorded floor."""

_SHORTLIST = 50
"""Exit settings that are replayed: each alone and behind prompt lookup, at two costs of a row."""

_MOST_LAYERS = 2
"""Exit layers used together."""

_FOLDS = 4
"""Parts of the prompts; each is judged by the setting that suits the others best."""

_LONGEST_PATH = 4
"""Most levels of a tree; more gained < 0.1 % on 36 Spec-Bench questions, whatever a row cost."""

_NGRAMS, _LENGTHS = (2, 3, 4, 6), (2, 4)
"""Sizes of n-grams and lengths of drafts to be tried without heads; the longest is the built-in."""

_PERCENTILE = 5.0
"""The percentile of the prompts' own speed-ups that `latency` looks at."""

Seconds = npt.NDArray[np.float64]
Prompts = npt.NDArray[np.bool_]
"""Some of them, [P]."""
_Ints = npt.NDArray[np.integer]


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What was chosen, and what to expect of it over plain decoding behind the prompt's pass."""

    options: dict[str, Any]
    """SpeculationOptions; `speculate: False` alone where plain decoding is as fast."""
    objective: str
    speed_up: float
    """Ratio of total seconds, on prompts that had no part in the choice."""
    percentile_5: float
    """5th percentile of the same prompts' own speed-ups."""
    worst: float
    speed_up_in_sample: float
    """Speed-up of the chosen setting on the prompts it was chosen on: too good to promise."""
    compression_rate: float
    """Tokens per verification, in sample."""
    settings: int
    prompts: int

    @property
    def speculates(self) -> bool:
        """Whether drafting pays."""
        return bool(self.options.get("speculate"))

    def sentence(self) -> str:
        """What to expect, for people."""
        if not self.speculates:
            return (
                f"plain decoding is faster here: the best of {self.settings:,} settings gives "
                f"{self.speed_up:.2f} x, so drafting is switched off"
            )
        return (
            f"expect {self.speed_up:.2f} x plain decoding after the prompt "
            f"({self.percentile_5:.2f} x or more for 95 % of the prompts)"
        )


def tune(record: Record, costs: MeasuredCosts, show: Show, objective: str = "speed") -> Tuned:
    """The best of all that is `screened`. Raises InvalidOption for fewer than two questions.

    `objective`: speed is about the time over all prompts, latency about the prompts' own.
    """
    parts = folds(record, _FOLDS)
    search = _Search(record, costs, objective, show)
    plain = search.plain
    held_out = cross_validated(lambda some: search.seconds(search.best(some)), parts[search.longer])
    setting = search.best(np.ones_like(plain, np.bool_))
    kept = [len(one.tokens) for each in search.rounds(setting) for one in each if not one.prefill]
    own = plain / held_out
    speculates = float(score(held_out[None], plain, objective)[0]) > 1.0
    drafters = [part for part in (setting.ngram, setting.exit) if setting.uses(part.kind)]
    runtime = {
        "drafter": "+".join(as_text(part, full=True) for part in drafters),
        "costs": settings_text(setting.costs, full=True),
    }  # in full, over whatever the heads say
    return Tuned(
        options={"speculate": speculates, **(runtime if speculates else {})},
        objective=objective,
        speed_up=float(plain.sum() / held_out.sum()),
        percentile_5=float(np.percentile(own, _PERCENTILE)),
        worst=float(own.min()),
        speed_up_in_sample=float(plain.sum() / search.seconds(setting).sum()),
        compression_rate=sum(kept) / len(kept),
        settings=len(search.screened) + len(search.followed),
        prompts=len(plain),
    )


def thresholds(record: Record, layer: int, alpha: float) -> list[float]:
    """Thresholds of an exit layer worth trying: quantiles of its confidence at the places."""
    roots = record.roots[record.roots != NONE]
    column, strength = record.exit_layers.index(layer), record.anneal_strengths.index(alpha)
    confidence, floor = record.confidence[roots, column, strength], record.min_threshold
    sure = np.sort(confidence[confidence >= floor])[::-1]
    places = [int(share * (len(sure) - 1)) for share in _SHARES] if len(sure) else []
    rounded = (math.floor(float(sure[place]) * 1e3) / 1e3 for place in places)
    return sorted({floor, *(max(floor, tau) for tau in rounded)})


def folds(record: Record, count: int) -> npt.NDArray[np.int64]:
    """A part for each prompt, [P]; all turns of a question are in one, tasks are in all.

    Raises InvalidOption for fewer than two questions.
    """
    names = list(dict.fromkeys(prompt.id for prompt in record.prompts))
    require_two(len(names))
    parts = min(count, len(names))
    return np.array([names.index(prompt.id) % parts for prompt in record.prompts])


def require_two(questions: int) -> None:
    """Raise InvalidOption unless there are questions to choose by and others to judge by."""
    if questions < 2:
        raise InvalidOption("one question cannot be held out. Take at least two: --limit 2")


def score(seconds: Seconds, plain: Seconds, objective: str) -> Seconds:
    """[S, P] and [P] -> [S]: the speed-up that `objective` is about."""
    if objective == "speed":
        return np.asarray(plain.sum() / seconds.sum(-1))
    return np.asarray(np.percentile(plain / seconds, _PERCENTILE, axis=-1))


def cross_validated(best: Callable[[Prompts], Seconds], parts: npt.NDArray[np.int64]) -> Seconds:
    """Seconds of each prompt, [P], under what is best (seconds [P]) on those of other `parts`."""
    held_out = np.empty(len(parts))
    for part in np.unique(parts):
        here = parts == part
        held_out[here] = best(~here)[here]
    return held_out


class _Search:
    """For the setting that suits some prompts best; what was followed for it is kept."""

    def __init__(self, record: Record, costs: MeasuredCosts, objective: str, show: Show) -> None:
        self.screened, seconds = screened(record, costs, show)
        self.followed: dict[SpeculationOptions, Seconds] = {}
        self.longer = [n for n, prompt in enumerate(record.prompts) if len(prompt.answer) > 1]
        """Prompts: an answer of one token is the prompt's pass alone."""
        self.plain = plain_seconds(record, costs)[self.longer]
        self._record, self._costs, self._objective = record, costs, objective
        self._show = show
        self._seconds = seconds[:, self.longer]

    def best(self, prompts: Prompts) -> SpeculationOptions:
        """The few best without the never-slower rule are followed with it."""
        first = self._score(self._seconds, prompts).argsort()[::-1][:_SHORTLIST]
        exits = [self.screened[one] for one in first]
        settings = _to_follow(self._record, exits, self._costs)
        seconds = np.stack([self.seconds(setting) for setting in settings])
        return settings[int(self._score(seconds, prompts).argmax())]

    def rounds(self, setting: SpeculationOptions) -> list[list[Round]]:
        return [replay(self._record, number, setting) for number in self.longer]

    def seconds(self, setting: SpeculationOptions) -> Seconds:
        """[P]."""
        if setting not in self.followed:
            every = map(self._costs.seconds_of, self.rounds(setting))
            self.followed[setting] = np.fromiter(every, np.float64)
            count = len(self.screened)
            self._show(count, count, f"{len(self.followed)} followed round by round")
        return self.followed[setting]

    def _score(self, seconds: Seconds, prompts: Prompts) -> Seconds:
        return score(seconds[:, prompts], self.plain[prompts], self._objective)


def plain_seconds(record: Record, costs: MeasuredCosts) -> Seconds:
    """Wall time of plain decoding behind the prompt's pass, [P]."""
    return np.array([(len(entry.answer) - 1) * costs.plain_step() for entry in record.prompts])


def screened(
    record: Record, costs: MeasuredCosts, show: Show
) -> tuple[list[SpeculationOptions], Seconds]:
    """All exit settings without the never-slower rule, their seconds by the cost model, [S, P]."""
    plain, widths = plain_seconds(record, costs), range(1, record.max_draft_tokens + 1)
    families = [
        (layers, alpha, [*itertools.product(*(thresholds(record, one, alpha) for one in layers))])
        for alpha in record.anneal_strengths
        for count in range(1, _MOST_LAYERS + 1)
        for layers in itertools.combinations(record.exit_layers, count)
    ]
    total = len(widths) * sum(len(taus) for *_, taus in families)
    settings, seconds = list[SpeculationOptions](), [np.empty((0, len(plain)))]
    for layers, alpha, taus in families:
        show(len(settings), total, "")
        first, later = _exits(record, layers, alpha, np.array(taus))
        gains = [expected(costs, layers, first, later, width)[1] for width in widths]
        seconds.append((plain / np.stack(gains, axis=1)).reshape(-1, len(plain)))
        settings += [
            SpeculationOptions(
                exit=Exit(layers=layers, threshold=one, anneal_strength=alpha, max_tokens=width),
                never_slower=False,
            )
            for one, width in itertools.product(taus, widths)
        ]
    show(total, total, "")
    return settings, np.concatenate(seconds)


def _exits(
    record: Record, layers: Sequence[int], alpha: float, taus: Seconds
) -> tuple[Exits, Exits]:
    """At a round's first place and behind a draft that was right; each [C, P], for taus [C, E]."""
    columns = [record.exit_layers.index(layer) for layer in layers]
    confidence = record.confidence[:, columns, record.anneal_strengths.index(alpha)]
    tokens, children = record.tokens[:, columns, 0], record.children[:, columns, 0]
    asked = np.flatnonzero(record.roots != NONE)  # [T]
    ends = np.cumsum([len(entry.answer) for entry in record.prompts])
    prompts = np.eye(len(ends))[np.searchsorted(ends, asked, side="right")]  # [T, P]

    def looked(nodes: _Ints, truth: _Ints) -> tuple[Exits, _Ints]:
        """At nodes [C, T], where NONE does not count; also the nodes behind drafts that stay."""
        there = (nodes != NONE)[..., None]
        sure = there & (confidence[nodes] >= taus[:, None])  # [C, T, E]
        leaves = sure & (sure.cumsum(-1) == 1)
        stays = leaves & (tokens[nodes] == truth[..., None])
        counts = np.maximum(there[..., 0] @ prompts, 1.0)
        at = tuple((leaves[..., column] @ prompts) / counts for column in range(len(columns)))
        behind = np.where(stays, children[nodes], NONE).max(-1)
        return Exits(at, (stays.any(-1) @ prompts) / counts), behind

    roots = np.broadcast_to(record.roots[asked], (len(taus), len(asked)))
    first, behind = looked(roots, record.answers[asked + 1])
    later, _ = looked(behind, record.answers.take(asked + 2, mode="clip"))
    return first, later


def _to_follow(
    record: Record, exits: Sequence[SpeculationOptions], costs: MeasuredCosts
) -> list[SpeculationOptions]:
    """Prompt lookup alone, each exit setting alone and behind it, and trees around it.

    With what rows cost here, and with the built-in reserve, which is safer where guesses get worse.
    """
    built_in, most = SpeculationOptions(), record.max_draft_tokens
    ngram = Ngram(max_tokens=min(built_in.ngram.max_tokens, most))
    # to what a measurement can tell
    head, *here = (round(share, 3) for share in (costs.head_cost, *costs.row_costs))
    seen = replace(built_in, drafter="ngram", ngram=ngram, costs=Costs(head=head))
    kinds = [seen]
    if not record.exit_layers:
        lengths = {min(length, ngram.max_tokens) for length in (*_LENGTHS, ngram.max_tokens)}
        sizes = itertools.product(_NGRAMS, sorted(lengths))
        kinds = [replace(seen, ngram=Ngram(size=n, max_tokens=length)) for n, length in sizes]
    ways = itertools.product(("exit", "ngram+exit"), (setting.exit for setting in exits))
    trees = (("ngram+exit", tree) for tree in _trees(record, len(costs.layers)))
    kinds += [replace(seen, exit=one, drafter=drafter) for drafter, one in (*ways, *trees)]
    two = [replace(seen.costs, row=row) for row in dict.fromkeys((tuple(here), built_in.costs.row))]
    return [replace(kind, costs=one) for kind in kinds for one in two]


def _trees(record: Record, rows: int) -> list[Exit]:
    """Trees of exit layer 0, where it was recorded; costs say how wide they are, up to `rows`."""
    if record.guesses == 1:
        return []
    return [
        Exit(
            layers=(0,),
            threshold=record.min_threshold,
            anneal_strength=alpha,
            max_tokens=min(_LONGEST_PATH, record.max_draft_tokens),
            guesses=record.guesses,
            max_rows=min(Exit().max_rows, rows),
        )
        for alpha in record.anneal_strengths[:2]
    ]
