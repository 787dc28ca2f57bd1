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

import sys
import time
from collections import deque
from collections.abc import Iterator

import psutil
import torch

from selfspec.config import SpeculationOptions
from selfspec.decoding.drafters import DraftCache
from selfspec.decoding.likely import Logprob
from selfspec.decoding.pace import Pace
from selfspec.decoding.prefix import common
from selfspec.decoding.prices import DraftCost, Load, Unmeasured
from selfspec.decoding.probe import PassShape, any_split
from selfspec.decoding.runtime import Asked, Runtime, Text
from selfspec.decoding.sequence import DecodeState
from selfspec.decoding.stats import GenerationStats, Round, Stopwatch
from selfspec.decoding.work import Enter, Work, next_together
from selfspec.errors import InvalidOption
from selfspec.model.compiled import TEAM
from selfspec.model.kv_memory import KVStore, Memory, PooledLease
from selfspec.model.kv_pages import POSITIONS
from selfspec.model.kv_store import Lease
from selfspec.typed import check_types

MOST_TEXTS = 32
"""Texts of a round unless asked otherwise: from here on one more adds few tokens on two cores."""


class Running:
    """A text in an engine: iterate for its rounds, which makes the engine step."""

    def __init__(self, engine: Engine, text: Text) -> None:
        """Made by `Engine.add`."""
        self.state: DecodeState = text.state
        self.stats: GenerationStats = text.stats
        """For who takes the rounds to count in."""
        self.watch: Stopwatch = text.watch
        self.logprobs: list[Logprob] = text.logprobs
        """Of all committed tokens, where that was asked for."""
        self.steps = text.steps
        self.ended = False
        """Whether no more rounds will come."""
        self.error: BaseException | None = None
        """What ended it, if that was no stop rule."""
        self.fresh: deque[Round] = deque()
        """Rounds that nobody took yet."""
        self._engine = engine

    def draft_cost(self, options: SpeculationOptions) -> DraftCost:
        """What drafting under these options costs a text that runs alone."""
        return self._engine.runtime.draft_cost(options)

    def __iter__(self) -> Iterator[Round]:
        """Its rounds, the prompt's first."""
        return self

    def __next__(self) -> Round:
        """The next round. Raises what ended the text, once its rounds are taken."""
        while not self.fresh and not self.ended:
            self._engine.step()
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
        self._engine.cancel(self)


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
            _free(backbone.device) // 2 if kv_memory is None else kv_memory,
        )
        self._most = most
        self._patience = patience
        self._pace = Pace(Unmeasured.of(backbone).rows)
        self._load = Load()
        self._waiting: deque[Running] = deque()
        """Have not begun."""
        self._entering: dict[Running, int] = {}
        """Have begun, with so many rows of a prompt that wait."""
        self._writing: list[Running] = []
        """Between two rounds."""
        self._works: dict[Running, Work] = {}
        """Within a round: what each wants next."""

    @property
    def memory(self) -> Memory:
        """Keys and values in use now, in bytes."""
        return self._store.memory

    @property
    def texts(self) -> int:
        """How many are in it, those that wait included."""
        return len(self._waiting) + len(self._entering) + len(self._writing)

    @property
    def waiting(self) -> int:
        """How many of these have not begun."""
        return len(self._waiting)

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
        text = self.runtime.text(asked, options, self._load, lease=lease, draft_cache=draft_cache)
        running = Running(self, text)
        self._waiting.append(running)
        return running

    @torch.inference_mode()
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
        """To the first work of every text that takes part in a round, which are noted.

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
        room, entered = self._room(len(writing)), 0
        for running, waiting in list(self._entering.items()):
            if entered >= room:
                break
            rows = min(waiting, room - entered) if self._splits(running) else waiting
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

    def _room(self, writing: int) -> int:
        """Rows of prompts that may enter beside so many texts that are being written."""
        if self._patience is None:
            return sys.maxsize
        return self._pace.rows(writing, self._patience)

    def _splits(self, running: Running) -> bool:
        """Whether a prompt has the same bits however it is cut into passes."""
        backbone = self.runtime.backbone
        return running.state.hidden.least == 1 and any_split(backbone, PassShape())

    def _do_next(self) -> None:
        """The works that come next, of all texts that want alike ones."""
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
        """Let a text have what it wanted, and see what it wants next."""
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
        """What a text leaves may serve others."""
        running.ended = True
        running.steps.close()
        self._store.done(running.state.lease, running.state.committed(0))

    def _fail(self, running: Running, error: BaseException) -> None:
        """End a text with what stopped its round: its caches are left as before that."""
        if not running.ended:
            running.error = error
            self.cancel(running)


def _free(device: torch.device) -> int:
    """Bytes of memory that nobody uses."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
