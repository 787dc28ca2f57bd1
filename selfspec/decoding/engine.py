"""Rounds of many texts at once: each draws from what the others' passes read anyway.

    add     a text joins; it begins with the next round in which there is room
    step    one round of every text that runs: drafts in lockstep, one verification
    cancel  a text leaves

A text's tokens depend on nothing but its own request: every row is computed as if it were alone,
and what draws, judges and stops belongs to one text. Where an executor cannot promise that, passes
are split. (Under a lossy rule they depend on drafts, and so on the load.) `Speculator.generate` is
an engine of one.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor

from selfspec.config import SpeculationOptions
from selfspec.decoding.acceptance import AcceptanceRule, Logprob, Noting, acceptance_rule
from selfspec.decoding.costs import DraftCost, Load, each_row, whole_round
from selfspec.decoding.decode import StopRule, written
from selfspec.decoding.drafters.base import Drafter
from selfspec.decoding.drafters.choice import Sources, make_drafter
from selfspec.decoding.drafters.draft_model import DraftCache
from selfspec.decoding.drafters.ngram import Remembering
from selfspec.decoding.probe import PassShape, PinnedProbe, any_split
from selfspec.decoding.sampling import Sampler
from selfspec.decoding.state import DecodeState
from selfspec.decoding.stats import GenerationStats, Round, Stopwatch, common
from selfspec.decoding.work import Enter, Work, next_together
from selfspec.errors import InvalidOption
from selfspec.heads.attending import AttendingHeads
from selfspec.model.kv import POSITIONS, KVStore, Lease, Memory, PooledLease, fixed_slots
from selfspec.model.weights import TEAM
from selfspec.typed import check_types

# --- what all texts of one model share ------------------------------------------------------------


logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])


def eager(function: Function) -> Function:
    """Not traced by a torch.compile around it: that took a minute, and gave no graph."""
    disabled: Any = torch.compiler.disable  # which carries no types
    return disabled(function, reason="selfspec decodes outside of it")  # type: ignore[no-any-return]  # the same


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One text to write."""

    ids: Tensor
    """[1, n], with padding in front."""
    pad: int = 0
    """Padding ids."""
    sampler: Sampler
    stop: StopRule
    logprobs: int | None = None
    """How many likely tokens to note beside each; None: nothing is noted."""


@dataclass(eq=False)
class Runtime(Sources):
    """Makes texts to be written of what is asked."""

    probe: PinnedProbe = field(init=False)
    _told: set[str] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.probe = PinnedProbe(self.backbone)

    def text(
        self,
        asked: Asked,
        options: SpeculationOptions,
        load: Load,
        lease: Lease | None,
        draft_cache: DraftCache | None,
    ) -> Running:
        """A text to write; `lease` and `draft_cache` may hold what an earlier turn left.

        `load`: how many texts share a pass; the caller keeps it true. Raises ModelChanged if
        the model, or the draft model, is not what was wrapped.
        """
        for backbone in (self.backbone, self.draft_model):
            if backbone is not None:
                backbone.require_unchanged()
        drafting = options.speculate and options.drafter != "none"
        refused = self._refusal(options) if drafting else None
        options = replace(options, speculate=drafting and refused is None)
        if options.speculate and options.loss:  # such rules need draws one by one
            asked = replace(asked, sampler=replace(asked.sampler, seed=None))
        rule, noted = self.rule(asked.sampler, options), list[Logprob]()
        if options.speculate and options.uses("successors"):
            rule = Remembering(rule, self.successors, asked.ids[0, asked.pad :][-2:].tolist())
        if asked.logprobs is not None:
            rule = Noting(rule, asked.logprobs, noted)
        state = self.state(asked, options, lease)
        stats = GenerationStats(
            num_layers=self.backbone.num_layers,
            prompt_tokens=state.length - state.pad,
            reused_tokens=state.lease.length(0),
            lossless=rule.lossless or not options.speculate,
            pinned=self._is_pinned(options),
            drafts_refused=refused,
        )
        if not stats.lossless:
            self._tell("lossy acceptance: the output differs from the model's own")
        watch = Stopwatch()
        drafter = self.drafter(asked, options, draft_cache, load)
        least, start = state.hidden.least, len(state.committed(0))
        counts = range(least, 1 + max(least, options.widest_pass if options.speculate else 1))
        self.backbone.capture(start, state.hidden.schedule.depths, counts, state.lease.slots)
        if options.uses("draft-model") and (second := self.draft_model) is not None:
            second.capture(start, (0, second.num_layers), range(1, 3))
        steps = written(state, drafter, rule, asked.stop, watch)
        return Running(state=state, steps=steps, stats=stats, watch=watch, logprobs=noted)

    def rule(self, sampler: Sampler, options: SpeculationOptions) -> AcceptanceRule:
        """Which drafts stay; a laboratory may listen in here."""
        return acceptance_rule(sampler, options)

    def state(
        self, asked: Asked, options: SpeculationOptions, lease: Lease | None = None
    ) -> DecodeState:
        """A text before its first round; `lease` may hold a prefix of it."""
        shape = PassShape()
        if options.pinned:
            slots = fixed_slots(asked.stop.max_length - asked.pad + options.pinned_rows)
            fixed = PassShape(options.pinned_rows, max(slots, (lease and lease.slots) or 0))
            shape = self.probe.shape(fixed, options.pinned_rows)
            lease = lease or Lease(self.backbone.num_layers)
            lease.slots = shape.slots
        heads = self.heads if options.speculate and options.uses("exit") else None
        reader = heads if isinstance(heads, AttendingHeads) else None
        return DecodeState(
            self.backbone,
            asked.ids,
            pad=asked.pad,
            exit_layers=() if heads is None else heads.layers_in_use(options),
            reader=reader,
            lease=lease,
            pinned_rows=shape.rows,
        )

    def drafter(
        self,
        asked: Asked,
        options: SpeculationOptions,
        draft_cache: DraftCache | None = None,
        load: Load | None = None,
    ) -> Drafter:
        """What proposes tokens under `options`; nothing behind an end token."""
        ends = asked.stop.end_tokens
        return make_drafter(options, self, asked.sampler, ends, cache=draft_cache, load=load)

    def _refusal(self, options: SpeculationOptions) -> str | None:
        """Why nothing may be drafted, in words, or None."""
        if self.backbone.dtype == torch.float16 and not self._is_pinned(options):
            self._tell(
                "no drafts in float16: passes of several rows round otherwise, so drafts would "
                "change the text. Load the model in bfloat16 or float32, or ask for pinned"
            )
            return "passes of several rows round otherwise in float16"
        return self.backbone.mixing

    def _tell(self, words: str) -> None:
        if words not in self._told:
            self._told.add(words)
            logger.warning(words)

    def _is_pinned(self, options: SpeculationOptions) -> bool:
        """Whether drafts cannot move bits: because that was asked for, or by themselves."""
        if options.pinned is not None:
            return options.pinned
        # without drafts there is nothing to ask, and a probe would delay the first token
        return options.speculate and self.probe.holds_unpadded(options.widest_pass)


# --- how much of a prompt enters with a round: no sum depends on it -------------------------------


BULK_ROWS = 1024
"""Rows of prompts at most that enter with a round."""

_NEWEST = 0.5
"""Weight of the newest round in a running mean: rows get dearer as a prompt gets longer."""


class Pace:
    """Learns from every round of an engine."""

    def __init__(self, row_costs: tuple[float, ...]) -> None:
        """`row_costs`: as `DraftCost.rows`."""
        self._row_costs = row_costs
        self._usual_s: dict[int, float] = {}
        """Seconds of a round without prompts, by its number of texts."""
        self._row_s: float | None = None
        """What a prompt's row adds."""
        self._newest = 0
        """Rows that entered with the newest such round."""

    def note(self, texts: int, rows: int, seconds: float) -> None:
        """A round of so many texts, with so many rows of prompts beside them."""
        if texts == 0:
            return
        if rows == 0:
            self._usual_s[texts] = _mean(self._usual_s.get(texts), seconds)
        elif self._usual_s:
            added = max(seconds - self._usual(texts), 0.0) / rows
            self._row_s = _mean(self._row_s, added)
            self._newest = rows

    def rows(self, texts: int, patience: float) -> int:
        """Rows of prompts that make a round of `texts` longer by `patience` rounds; at least 1.

        Texts of which none waits for its next token take all that fits a pass.
        """
        if texts == 0:
            return BULK_ROWS
        if self._row_s is None:
            return self._by_costs(texts, patience)
        most = min(2 * self._newest, BULK_ROWS)  # one quick round may be chance
        if self._row_s * most <= patience * self._usual(texts):
            return most
        return max(int(patience * self._usual(texts) / self._row_s), 1)

    def _usual(self, texts: int) -> float:
        """Seconds of a round without prompts, for the nearest number of texts that was seen."""
        return self._usual_s[min(self._usual_s, key=lambda seen: abs(seen - texts))]

    def _by_costs(self, texts: int, patience: float) -> int:
        left = patience * whole_round(self._row_costs, texts)
        for count, cost in enumerate(islice(each_row(self._row_costs), texts - 1, None)):
            left -= cost
            if left < 0.0 or count == BULK_ROWS:
                return max(1, count)
        raise AssertionError  # costs go on without end


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + _NEWEST * (newest - before)


# --- the engine -----------------------------------------------------------------------------------


MOST_TEXTS = 32
"""Texts of a round unless asked otherwise: from here on one more adds few tokens on two cores."""


@dataclass(eq=False, kw_only=True)
class Running:
    """A text in an engine: iterate for its rounds, which makes the engine step."""

    state: DecodeState
    steps: Generator[Work | Round, Any, None]
    """What `decode.written` yields."""
    stats: GenerationStats
    """The reader of the rounds counts in it."""
    watch: Stopwatch
    logprobs: list[Logprob]
    """Log-probabilities of all committed tokens, where asked for; grows with the text."""
    ended: bool = False
    """Whether no more rounds will come."""
    error: BaseException | None = None
    """What ended it, if that was no stop rule."""
    fresh: deque[Round] = field(default_factory=deque)
    """Rounds that nobody took yet."""
    engine: Engine = field(init=False)

    def draft_cost(self, options: SpeculationOptions) -> DraftCost:
        return self.engine.runtime.draft_cost(options)

    def __iter__(self) -> Iterator[Round]:
        return self

    def __next__(self) -> Round:
        """The next round. Raises what ended the text, once its rounds are taken."""
        while not self.fresh and not self.ended:
            self.engine.step()
        if self.fresh:
            return self.fresh.popleft()
        if self.error is not None:
            raise self.error
        raise StopIteration

    def take(self) -> list[Round]:
        """Rounds that nobody took yet. Raises what ended the text, if there are none."""
        if self.error is not None and not self.fresh:
            raise self.error
        found = list(self.fresh)
        self.fresh.clear()
        return found

    def close(self) -> None:
        """Leave the engine; what was committed stays in `state`."""
        self.engine.cancel(self)


class Engine:
    """Texts that are written together with one model. For one thread."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        most: int = MOST_TEXTS,
        patience: float | None = None,
        kv_memory: int | None = None,
    ) -> None:
        """`most`: texts of a round; others wait.

        `patience`: how much longer a round may take for prompts that enter, in rounds without.
        None: prompts enter at once, however long answers wait meanwhile. `kv_memory`: bytes for
        keys and values, above which texts wait, and what could never fit is refused; None: half of
        what is free, and a longer text runs alone. Raises InvalidOption for numbers that nothing
        could be written with.
        """
        for name, value, kind, least in (
            ("most", most, int, 1),
            ("patience", patience, float, 0),
            ("kv_memory", kv_memory, int, 0),
        ):
            check_types({name: value}, {name: kind | None})
            if value is not None and value < least:
                raise InvalidOption(f"{name} is {value}, expected at least {least}")
        self.runtime = runtime
        backbone = runtime.backbone
        self._strict = kv_memory is not None
        self._store = KVStore(
            backbone.num_layers,
            backbone.claims.pages,
            backbone.position_bytes,
            _free_bytes(backbone.device) // 2 if kv_memory is None else kv_memory,
        )
        self._most = most
        self._patience = patience
        self._pace = Pace(DraftCost.for_model(backbone).rows)
        self._load = Load()
        self._waiting: deque[Running] = deque()
        """Texts that have not begun."""
        self._entering: dict[Running, int] = {}
        """Texts that have begun, with so many rows of a prompt that wait."""
        self._writing: list[Running] = []
        """Texts between two rounds."""
        self._works: dict[Running, Work] = {}
        """Within a round: what each wants next."""

    @property
    def memory(self) -> Memory:
        """Keys and values in use now, in bytes."""
        return self._store.memory

    @property
    def texts(self) -> int:
        return len(self._waiting) + len(self._entering) + len(self._writing)

    @property
    def waiting(self) -> int:
        """How many of these have not begun."""
        return len(self._waiting)

    @eager
    def add(
        self,
        asked: Asked,
        options: SpeculationOptions,
        *,
        lease: Lease | None = None,
        draft_cache: DraftCache | None = None,
    ) -> Running:
        """A text joins, with the next round; `lease` is kept where it is, not in this engine.

        Raises as `Runtime.text` does, and InvalidOption for a text that can never fit.
        """
        if lease is None:
            positions = asked.stop.max_length - asked.pad
            if self._strict:
                self._store.refuse_too_long(positions)
            lease = self._store.lease(positions)
        running = self.runtime.text(asked, options, self._load, lease, draft_cache)
        running.engine = self
        self._waiting.append(running)
        return running

    @torch.inference_mode()
    @eager
    def step(self) -> list[Running]:
        """One round of all texts that run; those that have a new round, or have ended.

        What one text raises ends that text alone: its reader gets it. A keyboard interrupt ends the
        round's texts and goes on.
        """
        taking_part: dict[Running, None] = {}
        start = time.perf_counter()
        try:
            with TEAM.limited():
                writing, rows = self._begin(taking_part)
                while self._works:
                    self._do_next()
        except BaseException as error:
            for running in taking_part:
                self._fail(running, error)
            self._works.clear()
            raise
        self._pace.note(writing, rows, time.perf_counter() - start)
        return [running for running in taking_part if running.ended or running.fresh]

    def cancel(self, running: Running) -> None:
        """Take a text out; what it committed stays in its state, and others go on."""
        self._end(running)
        self._works.pop(running, None)
        self._entering.pop(running, None)
        for held in (self._waiting, self._writing):
            if running in held:
                held.remove(running)

    def _begin(self, taking_part: dict[Running, None]) -> tuple[int, int]:
        """Go to the first work of every text that takes part in a round, and note these texts.

        Returns how many texts are being written, and rows of prompts beside them.
        """
        while self._waiting and self._admits(self._waiting[0]):
            running = self._waiting.popleft()
            taking_part[running] = None
            self._go_on(running)
        writing, self._writing = self._writing, []
        # texts that share no pass share no costs either
        shared = len(writing) > 1 and self.runtime.backbone.runs_many
        self._load.texts = len(writing) if shared else 1
        taking_part |= dict.fromkeys(writing)
        for running in writing:
            self._go_on(running)
        patience, entered = self._patience, 0
        room = sys.maxsize if patience is None else self._pace.rows(len(writing), patience)
        for running, waiting in list(self._entering.items()):
            if entered >= room:
                break
            # in pieces, where these have the same bits
            unpadded = running.state.hidden.least == 1
            splits = unpadded and any_split(self.runtime.backbone, PassShape())
            rows = min(waiting, room - entered) if splits else waiting
            entered += rows
            taking_part[running] = None
            del self._entering[running]
            self._go_on(running, rows)
        return len(writing), entered

    def _admits(self, running: Running) -> bool:
        """Whether a text may begin: there is room, and none that enters will leave it more."""
        if len(self._entering) + len(self._writing) >= self._most:
            return False
        lease, ids = running.state.lease, running.state.committed(0)
        if not isinstance(lease, PooledLease):
            return True
        held = self._store.held(ids)
        for other in self._entering:
            shared = common(ids[:-1], other.state.committed(0))
            if shared // POSITIONS * POSITIONS > held:
                return False
        if not self._store.admit(lease, ids):
            return False
        running.state.begin()
        running.stats.reused_tokens = lease.length(0)
        return True

    def _do_next(self) -> None:
        who = next_together(self._works)
        works = [self._works.pop(running) for running in who]
        try:
            results = works[0].done(works, list(self._works.values()))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  # a panic in Rust is no Exception; for readers
            for running in who:
                self._fail(running, error)
            return
        for running, work, result in zip(who, works, results, strict=True):
            if result is None:
                self._works[running] = work
            else:
                self._go_on(running, result)

    def _go_on(self, running: Running, result: object = None) -> None:
        if running.ended:  # cancelled meanwhile
            return
        try:
            found = running.steps.send(result)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  # as above
            running.error = error
            self._end(running)
            return
        if isinstance(found, Enter):
            self._entering[running] = found.rows
        elif not isinstance(found, Round):
            self._works[running] = found
        else:
            running.fresh.append(found)
            if found.stop_reason is None:
                self._writing.append(running)
                if found.prefill:
                    self._store.share(running.state.lease, running.state.committed(0)[:-1])
            else:
                self._end(running)

    def _end(self, running: Running) -> None:
        running.ended = True
        running.steps.close()
        self._store.done(running.state.lease, running.state.committed(0))

    def _fail(self, running: Running, error: BaseException) -> None:
        """End a text with what stopped its round: its caches are left as before that."""
        if not running.ended:
            running.error = error
            self.cancel(running)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
