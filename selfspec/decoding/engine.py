"""Continuous batching: each pass runs the rows of all sequences, so that weights are read once.

    add     queue a sequence; it begins with the next round in which there is room
    step    run one round of every running sequence: drafts in lockstep, one verification
    cancel  remove a sequence

A sequence's tokens depend on its own request only. Every row is computed as if it were alone; where
an executor cannot promise that, passes are split. Samplers, rules and stop criteria are not shared.
(Under a lossy rule tokens depend on drafts, and therefore on the load.)
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from selfspec.config import SpeculationOptions
from selfspec.decoding.acceptance import AcceptanceRule, Logprob, LogprobRule, acceptance_rule
from selfspec.decoding.costs import USUAL_COST, DraftCost, Load, token_cost_without
from selfspec.decoding.decode import StopRule, decode_rounds
from selfspec.decoding.drafters import ngram
from selfspec.decoding.drafters.base import Drafting, Trunks, make_controller
from selfspec.decoding.drafters.draft_model import (
    DraftCache,
    DraftModelDrafter,
    LayerSearch,
    SkipDrafter,
)
from selfspec.decoding.drafters.heads import (
    AttendingDrafter,
    AttendingGuesser,
    ExitDrafter,
    HeadGuesser,
    MedusaGuesser,
)
from selfspec.decoding.drafters.rest import Datastore, RestGuesser
from selfspec.decoding.drafters.trees import HOPELESS_COST, PausableDrafter, Paying, TreeDrafter
from selfspec.decoding.measure import PassShape, PinnedProbe
from selfspec.decoding.sampling import Sampler
from selfspec.decoding.state import DecodeState, Drafter, Enter, NoDrafter, Work, next_batch
from selfspec.decoding.stats import GenerationStats, Round, Stopwatch
from selfspec.errors import HeadsNotFound, InvalidOption, check_types
from selfspec.heads.attending import AttendingHeads
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.heads import ExitJudge, each_layer
from selfspec.model.backbone import Backbone
from selfspec.model.kv import (
    POSITIONS,
    KVCache,
    KVStore,
    Memory,
    PooledKVCache,
    common_prefix,
    fixed_slots,
    free_bytes,
)
from selfspec.model.weights import TEAM
from selfspec.options import Lossless, as_word

# --- shared by all sequences of one model

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])
Source = TypeVar("Source")


def not_traced(function: Function) -> Function:
    """Exclude `function` from an enclosing torch.compile, which traced a minute for no graph."""
    disabled: Any = torch.compiler.disable  # has no type annotations
    return disabled(function, reason="selfspec decodes outside of it")  # type: ignore[no-any-return]  # the same


@dataclass(frozen=True, kw_only=True)
class SequenceRequest:
    """A request for one sequence."""

    ids: Tensor  # [1, n], left-padded
    pad: int = 0  # padding ids
    sampler: Sampler
    stop: StopRule
    logprobs: int | None = None  # number of likeliest tokens to record for each position
    kv: KVCache | None = None  # the caller's, which may hold a prefix; None: one of the engine's
    draft_cache: DraftCache | None = None  # may hold an earlier turn of the draft model


class Runtime:
    """A model and its sources of drafts; prepares sequences for the engine."""

    def __init__(
        self,
        backbone: Backbone,
        heads: ExitHeads | None,
        draft_model: Backbone | None,
        datastore: Datastore | None = None,
    ) -> None:
        self.backbone, self.heads, self.draft_model = backbone, heads, draft_model
        self.datastore, self.successors = datastore, ngram.Successors()
        self.layers, self.probe = LayerSearch(backbone.num_layers), PinnedProbe(backbone)
        self._warn_once = cache(logger.warning)

    def prepare(self, request: SequenceRequest, options: SpeculationOptions, load: Load) -> Running:
        """Prepare a sequence. Raises ModelChanged if a model was changed after it was wrapped."""
        self.backbone.require_unchanged()
        if self.draft_model is not None:
            self.draft_model.require_unchanged("draft model")
        drafting = options.speculate and options.drafter != "none"
        refusal = self._refusal(options) if drafting else None
        options = replace(options, speculate=drafting and refusal is None)
        request = replace(request, sampler=self._seeded(request.sampler, options))
        rule, logprobs = self.rule(request.sampler, options), list[Logprob]()
        if options.speculate and options.uses("successors"):
            rule = ngram.TeachingRule(
                rule, self.successors, request.ids[0, request.pad :][-2:].tolist()
            )
        if request.logprobs is not None:
            rule = LogprobRule(rule, request.logprobs, logprobs)
        state = self.state(request, options)
        watch = Stopwatch()
        stats = GenerationStats(
            num_layers=self.backbone.num_layers,
            prompt_tokens=state.length - state.pad,
            reused_tokens=state.kv.length(0),
            lossless=rule.lossless,
            pinned=self._is_pinned(options),
            drafts_refused=refusal,
            seconds=watch.seconds,
        )
        if not stats.lossless:
            self._warn_once("lossy acceptance: the output differs from the model's own")
        drafter = self.drafter(request, options, load)
        least, start = state.hidden.least_rows, len(state.committed(0))
        counts = range(least, 1 + max(least, options.widest_pass if options.speculate else 1))
        depths = *state.hidden.depths, *state.hidden.state_layers
        self.backbone.capture(start, depths, counts, state.kv.slots)
        if options.uses("draft-model") and (draft_model := self.draft_model) is not None:
            draft_model.capture(start, (0, draft_model.num_layers), range(1, 3))
        steps = decode_rounds(state, drafter, rule, request.stop, watch)
        return Running(state=state, steps=steps, stats=stats, logprobs=logprobs)

    def _seeded(self, sampler: Sampler, options: SpeculationOptions) -> Sampler:
        """A sampler with a seed, so that drafts change no draw, unless the rule needs one without.

        Lossy rules, and speculative sampling if it is asked for, need a generator's successive
        draws. A missing seed is drawn from torch's generator, so `torch.manual_seed` repeats texts.
        """
        if options.speculate and options.loss:
            return replace(sampler, seed=None)
        asked = options.speculate and not isinstance(options.acceptance, Lossless)
        if asked or not sampler.do_sample or sampler.seed is not None:
            return sampler
        return sampler.seeded(int(torch.randint(2**63 - 1, ())), self.backbone.device)

    def rule(self, sampler: Sampler, options: SpeculationOptions) -> AcceptanceRule:
        """The acceptance rule; experiments may override this to observe verdicts."""
        return acceptance_rule(sampler, options)

    def state(self, request: SequenceRequest, options: SpeculationOptions) -> DecodeState:
        shape, kv = PassShape(), request.kv
        if options.pinned:
            slots = fixed_slots(request.stop.max_length - request.pad + options.pinned_rows)
            fixed = PassShape(options.pinned_rows, max(slots, (kv and kv.slots) or 0))
            shape = self.probe.shape(fixed, options.pinned_rows)
            kv = kv or KVCache(self.backbone.num_layers)
            kv.slots = shape.slots
        heads = self.heads if options.speculate and options.uses("exit") else None
        return DecodeState(
            self.backbone,
            request.ids,
            pad=request.pad,
            exit_layers=() if heads is None else heads.layers_in_use(options),
            heads=heads,
            kv=kv,
            pinned_rows=shape.rows,
        )

    def draft_cache(self) -> DraftCache | None:
        """An empty cache for the draft model; None without a draft model."""
        model, rows = self.draft_model, self.backbone.vocab_size
        return None if model is None else DraftCache(model, rows)

    def runs_trees(self, options: SpeculationOptions) -> bool:
        """Whether the options grow trees of drafts and the model can verify siblings.

        Not in padded passes: a sibling in between moves the slots that a row sums over.
        """
        steady = not options.pinned or self.backbone.claims.steady
        return options.grows_trees and steady and self.backbone.runs_trees

    def draft_cost(self, options: SpeculationOptions) -> DraftCost:
        """The cost of drafting for a single sequence. Raises InvalidOption for missing layers."""
        cost, token = DraftCost.with_costs(options.costs, self.backbone.num_layers), 0.0
        if options.uses("skip"):
            skipped, layers = options.skip.skipped or self.layers.skipped, self.backbone.num_layers
            if max(skipped, default=0) > layers:
                raise InvalidOption(
                    f"skip:skipped is {as_word(skipped)}, the model has {layers} layers. "
                    "Leave out higher numbers"
                )
            token = token_cost_without(skipped, self.backbone)
        elif self.draft_model is not None and options.uses("draft-model"):
            # slightly too high: two layers of SmolLM2-135M and its unembedding are 0.26 of its
            # weights and took 0.17 of its time (eval/results/papers/gammatune)
            token = self.draft_model.weight_bytes / self.backbone.weight_bytes
        if not options.uses("exit"):
            cost = cost if options.uses("successors") else replace(cost, head=0.0)
        elif isinstance(self.heads, AttendingHeads):
            share = self.heads.nbytes / self.backbone.weight_bytes
            if not self.runs_trees(options):  # the layer runs for each token
                cost, token = replace(cost, head=0.0), share
            elif options.costs.head is None:
                cost = replace(cost, head=share)
        return cost if options.costs.token is not None else replace(cost, token=token)

    def drafter(self, request: SequenceRequest, options: SpeculationOptions, load: Load) -> Drafter:
        """The drafter of a sequence. Raises HeadsNotFound or InvalidOption for a missing source."""
        if not options.speculate or options.drafter == "none":
            return NoDrafter()
        cost = replace(self.draft_cost(options), load=load)
        drafter = self._drafter(request, options, cost)
        if options.never_slower:
            return PausableDrafter(drafter, lambda: cost.row_costs[0] >= HOPELESS_COST)
        return drafter

    def _drafter(
        self, request: SequenceRequest, options: SpeculationOptions, cost: DraftCost
    ) -> Drafter:
        sampler, ends = request.sampler, request.stop.end_tokens
        seen: Trunks | None = None
        if options.uses("ngram"):
            controller = make_controller(options, options.ngram.max_tokens)
            seen = lookup = ngram.NgramDrafter(controller, ends, size=options.ngram.size, cost=cost)
            if options.drafter == "ngram" and sampler.grammar is None:
                return lookup
        if sampler.grammar is not None:  # forbidden tokens are never proposed
            seen = ngram.GrammarDrafter(sampler.grammar, sampler.pad, options.widest_pass - 1, seen)
        drafter = NoDrafter() if options.drafter == "ngram" else self._partner(request, options)
        if isinstance(drafter, (RestGuesser, ngram.SuccessorGuesser, HeadGuesser)):
            if not options.never_slower:  # drafts need not pay for themselves
                cost = replace(cost, rows=(0.0,), head=0.0)
            trees = self.runs_trees(options)
            # with one guess per position the tree is a chain, unless a trunk stands beside it
            drafter = TreeDrafter(
                drafter,
                cost,
                make_controller(options, options.tree.max_tokens),
                ends,
                most=options.most_drafts,
                seen=seen if trees else None,
                never_slower=options.never_slower,
            )
            if trees:
                return drafter
        elif options.never_slower and options.drafter != "ngram":
            paying = Paying(cost)
            drafter = PausableDrafter(drafter, paying.pauses, paying.learn)
        return drafter if seen is None else ngram.SeenTextFirst(seen, drafter)

    def _partner(
        self, request: SequenceRequest, options: SpeculationOptions
    ) -> RestGuesser | ngram.SuccessorGuesser | HeadGuesser | Drafter:
        """The drafter that joins prompt lookup: a chain drafter, or a guesser for a tree."""
        sampler, ends, trees = request.sampler, request.stop.end_tokens, self.runs_trees(options)

        def drafting(longest: int) -> Drafting:
            beliefs = options.acceptance.reads_beliefs
            return Drafting(sampler, make_controller(options, longest), ends, beliefs)

        def require(source: Source | None, need: str) -> Source:
            if source is None:
                kind = HeadsNotFound if options.uses("exit") else InvalidOption
                raise kind(f"drafter {options.drafter} needs {need}")
            return source

        match options.drafter.removeprefix("ngram+"):
            case "rest":
                store = require(self.datastore, "a datastore. Give --datastore")
                return RestGuesser(store, options.most_drafts, trees=trees)
            case "successors":
                return ngram.SuccessorGuesser(
                    self.successors, options.successors.guesses if trees else 1
                )
            case "lookahead":
                lookahead = options.lookahead
                return ngram.LookaheadDrafter(
                    make_controller(options, lookahead.level - 1),
                    ends,
                    level=lookahead.level,
                    window=lookahead.window if trees else 0,
                    guesses=lookahead.guesses if trees else 1,
                    most=options.most_drafts,
                )
            case "draft-model":
                cache = request.draft_cache or self.draft_cache()
                cache = require(cache, "a second model. Give --draft-model")
                return DraftModelDrafter(cache, drafting(options.draft_model.max_tokens))
            case "skip":
                return SkipDrafter(options.skip, self.layers, drafting(options.skip.max_tokens))
        heads = require(self.heads, "exit heads, which were not loaded. Start with --heads")
        return self._heads_drafter(heads, options, drafting(options.exit.max_tokens))

    def _heads_drafter(
        self, heads: ExitHeads, options: SpeculationOptions, drafting: Drafting
    ) -> HeadGuesser | ExitDrafter:
        layers = heads.layers_in_use(options)  # raises for those that it does not have
        config, exits, trees = heads.config, options.exit, self.runs_trees(options)
        judge = ExitJudge(
            config.num_layers,
            each_layer(exits.thresholds, exits.layers or config.exit_layers),
            exits.anneal_strength,
            {int(layer): temperature for layer, temperature in config.temperatures.items()},
        )
        attends, guesses = isinstance(heads, AttendingHeads), exits.guesses if trees else 1
        if heads.looks_ahead:
            return MedusaGuesser(heads, judge, drafting.sampler, guesses)
        drafter: HeadGuesser | ExitDrafter
        if trees and layers == (0,):
            kind = AttendingGuesser if attends else HeadGuesser
            drafter = kind(heads, judge, drafting.sampler, guesses)
        else:
            drafter = (AttendingDrafter if attends else ExitDrafter)(heads, judge, drafting)
        if self.backbone.claims.replay is not None:
            drafter.warm_up(self.backbone)
        return drafter

    def _refusal(self, options: SpeculationOptions) -> str | None:
        """Why nothing may be drafted, for the user, or None."""
        if self.backbone.dtype == torch.float16 and not self._is_pinned(options):
            self._warn_once(
                "no drafts in float16: passes of several rows round differently, so drafts would "
                "change the text. Load the model in bfloat16 or float32, or set pinned"
            )
            return "passes of several rows round differently in float16"
        return self.backbone.mixing

    def _is_pinned(self, options: SpeculationOptions) -> bool:
        """Whether drafts cannot change bits: by the option, or by the kernels themselves."""
        if options.pinned is not None:
            return options.pinned
        # without drafts no probe is needed, and it would delay the first token
        return options.speculate and self.probe.treats_rows_alike(options.widest_pass)


# --- chunked prefill: how many rows of prompts join a round; results do not depend on it

BULK_ROWS = 1024  # maximum rows of prompts in a round

_NEWEST = 0.5  # weight of the newest round in a mean: rows cost more as a prompt gets longer


class Pace:
    """Learns from every round of an engine how many rows of prompts fit the next one."""

    def __init__(self) -> None:
        self._usual_s: dict[int, float] = {}  # a round without prompts, by its number of texts
        self._row_s: float | None = None  # added by a prompt's row
        self._newest_rows = 0  # rows of prompts in the newest round that had any

    def note(self, texts: int, rows: int, seconds: float) -> None:
        """Note the time of a round of `texts` sequences with `rows` rows of prompts."""
        if texts == 0:
            return
        if rows == 0:
            self._usual_s[texts] = _mean(self._usual_s.get(texts), seconds)
        elif self._usual_s:
            added = max(seconds - self._usual_seconds(texts), 0.0) / rows
            self._row_s = _mean(self._row_s, added)
            self._newest_rows = rows

    def rows(self, texts: int, patience: float) -> int:
        """Rows of prompts that make a round of `texts` longer by `patience` rounds; at least 1."""
        if texts == 0:
            return BULK_ROWS
        if self._row_s is None:  # nothing measured yet: assume the usual cost
            rows = patience * (1.0 + (texts - 1) * USUAL_COST) / USUAL_COST
            return min(max(int(rows), 1), BULK_ROWS)
        most = min(2 * self._newest_rows, BULK_ROWS)  # a single fast round may be chance
        if self._row_s * most <= patience * self._usual_seconds(texts):
            return most
        return max(int(patience * self._usual_seconds(texts) / self._row_s), 1)

    def _usual_seconds(self, texts: int) -> float:
        """Usual seconds for the nearest number of texts seen so far."""
        return self._usual_s[min(self._usual_s, key=lambda count: abs(count - texts))]


def _mean(mean: float | None, newest: float) -> float:
    return newest if mean is None else mean + _NEWEST * (newest - mean)


# --- the engine

MOST_TEXTS = 32  # in a round: beyond, another one adds few tokens per second on two cores


@dataclass(eq=False, kw_only=True)
class Running:
    """A sequence in an engine. Iterating yields its rounds and steps the engine."""

    state: DecodeState
    steps: Generator[Work | Round, Any, None]  # the generator `decode_rounds`
    stats: GenerationStats  # updated by the reader of the rounds
    logprobs: list[Logprob]  # of all committed tokens, if requested; grows with the text
    ended: bool = False  # whether no more rounds will come
    error: BaseException | None = None  # the error that ended it, if any
    shared: bool = False  # whether passes had rows of other sequences, which changes all costs
    new_rounds: deque[Round] = field(default_factory=deque)  # rounds not taken yet
    engine: Engine = field(init=False)

    def draft_cost(self, options: SpeculationOptions) -> DraftCost:
        return self.engine.runtime.draft_cost(options)

    def __iter__(self) -> Iterator[Round]:
        return self

    def __next__(self) -> Round:
        """The next round. Raises the error that ended the sequence after its last round."""
        while not self.new_rounds and not self.ended:
            self.engine.step()
        if self.new_rounds:
            return self.new_rounds.popleft()
        if self.error is not None:
            raise self.error
        raise StopIteration

    def take(self) -> list[Round]:
        """Take all new rounds. If there are none, raises the error that ended the sequence."""
        if self.error is not None and not self.new_rounds:
            raise self.error
        rounds = list(self.new_rounds)
        self.new_rounds.clear()
        return rounds

    def close(self) -> None:
        """Leave the engine; committed tokens stay in `state`."""
        self.engine.cancel(self)


class Engine:
    """Decodes a batch of sequences with one model. Not thread-safe."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        most: int = MOST_TEXTS,
        patience: float | None = None,
        kv_memory: int | None = None,
    ) -> None:
        """`most`: maximum sequences in a round; others wait.

        `patience`: how much longer prompts may make a round, as a multiple of a round without them;
        None: prompts run at once. `kv_memory`: bytes for keys and values; sequences wait for room,
        and one that can never fit is refused. None: half of the free memory, and a sequence that
        needs more runs alone. Raises InvalidOption for values out of range.
        """
        for name, value, kind, least in (
            ("most", most, int, 1),
            ("patience", patience, float | None, 0),
            ("kv_memory", kv_memory, int | None, 0),
        ):
            check_types({name: value}, {name: kind})
            if value is not None and value < least:
                raise InvalidOption(f"{name} is {value}, expected at least {least}")
        self.runtime = runtime
        backbone = runtime.backbone
        self._strict = kv_memory is not None
        self._store = KVStore(
            backbone.num_layers,
            backbone.claims.pages,
            backbone.position_bytes,
            free_bytes(backbone.device) // 2 if kv_memory is None else kv_memory,
        )
        self._most = most
        self._patience = patience
        self._pace = Pace()
        self._load = Load()
        self._waiting: deque[Running] = deque()  # not begun
        self._entering: dict[Running, int] = {}  # begun, with the rows of the prompt still to run
        self._writing: list[Running] = []  # between two rounds
        self._works: dict[Running, Work] = {}  # within a round: the next work of each

    @property
    def memory(self) -> Memory:
        """Keys and values in use now, in bytes."""
        return self._store.memory

    @property
    def texts(self) -> int:
        return len(self._waiting) + len(self._entering) + len(self._writing)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @not_traced
    def add(self, request: SequenceRequest, options: SpeculationOptions) -> Running:
        """Queue a sequence. Raises as `Runtime.prepare`, and InvalidOption if it can never fit."""
        if request.kv is None:
            positions = request.stop.max_length - request.pad
            if self._strict:
                self._store.refuse_too_long(positions)
            request = replace(request, kv=self._store.kv(positions))
        with TEAM.limited():  # kernels may be probed
            running = self.runtime.prepare(request, options, self._load)
        running.engine = self
        self._waiting.append(running)
        return running

    @torch.inference_mode()
    @not_traced
    def step(self) -> list[Running]:
        """Run one round of all running sequences; returns those with a new round or ended.

        An error of one sequence is raised to its own reader; a KeyboardInterrupt ends them all.
        Raises InvalidOption as `refuse_modes`.
        """
        self.runtime.backbone.refuse_modes()
        batch: dict[Running, None] = {}
        start = time.perf_counter()
        try:
            with TEAM.limited():
                writing, rows = self._begin(batch)
                while self._works:
                    self._do_next()
        except BaseException as error:
            for running in batch:
                self._fail(running, error)
            self._works.clear()
            raise
        self._pace.note(writing, rows, time.perf_counter() - start)
        return [running for running in batch if running.ended or running.new_rounds]

    def cancel(self, running: Running) -> None:
        """Remove a sequence; its committed tokens stay in its state, and the others continue."""
        self._end(running)
        self._works.pop(running, None)
        self._entering.pop(running, None)
        for queue in (self._waiting, self._writing):
            if running in queue:
                queue.remove(running)

    def _begin(self, batch: dict[Running, None]) -> tuple[int, int]:
        """Advance every sequence that takes part to its first work, and note these sequences.

        Returns the number of sequences past their prompts, and the rows of prompts.
        """
        while self._waiting and self._admits(self._waiting[0]):
            running = self._waiting.popleft()
            batch[running] = None
            self._resume(running)
        writing, self._writing = self._writing, []
        # sequences that share no pass share no costs either
        shared = len(writing) > 1 and self.runtime.backbone.runs_many
        self._load.texts = len(writing) if shared else 1
        batch |= dict.fromkeys(writing)
        for running in writing:
            running.shared |= shared
            self._resume(running)
        patience, entered = self._patience, 0
        room = sys.maxsize if patience is None else self._pace.rows(len(writing), patience)
        for running, pending in list(self._entering.items()):
            if entered >= room:
                break
            # in pieces, if these give the same bits
            splits = running.state.hidden.least_rows == 1 and self.runtime.backbone.claims.steady
            rows = min(pending, room - entered) if splits else pending
            entered += rows
            batch[running] = None
            del self._entering[running]
            self._resume(running, rows)
        return len(writing), entered

    def _admits(self, running: Running) -> bool:
        """Whether a sequence may begin: it fits, and no entering one will share a longer prefix."""
        if len(self._entering) + len(self._writing) >= self._most:
            return False
        kv, ids = running.state.kv, running.state.committed(0)
        if not isinstance(kv, PooledKVCache):
            return True
        cached = self._store.prefix_length(ids)
        for other in self._entering:
            shared = common_prefix(ids[:-1], other.state.committed(0))
            if shared // POSITIONS * POSITIONS > cached:
                return False
        if not self._store.admit(kv, ids):
            return False
        running.state.begin()
        running.stats.reused_tokens = kv.length(0)
        return True

    def _do_next(self) -> None:
        batch = next_batch(self._works)
        works = [self._works.pop(running) for running in batch]
        try:
            results = works[0].do(works, list(self._works.values()))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  # for readers; a Rust panic is no Exception
            for running in batch:
                self._fail(running, error)
            return
        for running, work, result in zip(batch, works, results, strict=True):
            if result is None:
                self._works[running] = work
            else:
                self._resume(running, result)

    def _resume(self, running: Running, result: object = None) -> None:
        if running.ended:  # cancelled in the meantime
            return
        try:
            step = running.steps.send(result)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  # as above
            running.error = error
            self._end(running)
            return
        if type(step) is Enter:  # isinstance is slow here: a Protocol's subclass checks methods
            self._entering[running] = step.rows
        elif not isinstance(step, Round):
            self._works[running] = step
        else:
            running.new_rounds.append(step)
            if step.stop_reason is None:
                self._writing.append(running)
                if step.prefill:
                    self._store.share(running.state.kv, running.state.committed(0)[:-1])
            else:
                self._end(running)

    def _end(self, running: Running) -> None:
        running.ended = True
        running.steps.close()
        self._store.release(running.state.kv, running.state.committed(0))

    def _fail(self, running: Running, error: BaseException) -> None:
        if not running.ended:
            running.error = error
            self.cancel(running)
