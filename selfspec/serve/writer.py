"""One thread that owns the model: requests come in from anywhere, pieces of answers go out.

    submit   a request joins the queue, or is refused because it is full
    cancel   its client has gone
    stop     the thread ends, and with it what is still written

An engine is for one thread, and so are a tokenizer and Hugging Face's preparation of a request.
Whatever one request raises, a MemoryError or a panic in Rust, ends that request alone.
Nothing here knows of HTTP.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from selfspec.api.speculator import Speculator
from selfspec.api.stream import Call
from selfspec.api.text import encode
from selfspec.config import GenerateOptions
from selfspec.decoding.engine import Running
from selfspec.errors import InvalidPrompt
from selfspec.serve.metrics import Metrics, State
from selfspec.serve.options import ServeOptions
from selfspec.serve.pieces import Answer, Calls, Explanation, Piece, format_of
from selfspec.serve.protocol import Choice, Refused, places

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1
"""Seconds after which a refused client may try again."""

_POLL_S = 0.5
"""Between two looks at whether to stop, where nothing is written."""


@dataclass(eq=False, kw_only=True)
class Job:
    """The choices of a request, and who hears of them; called on the writer's thread."""

    choices: Sequence[Choice]
    begun: Callable[[int], None]
    """Gets the tokens of its prompts, once."""
    wrote: Callable[[Piece], None]
    answers: list[Answer] = field(default_factory=list)
    left: int = 0
    """Choices that have no end yet."""
    came_s: float = field(default_factory=time.perf_counter)


class Writer:
    """Writes the answers of all requests, in one engine."""

    def __init__(
        self, speculator: Speculator, options: ServeOptions, kv_memory: int | None = None
    ) -> None:
        """Raises InvalidOption as `Engine` does."""
        self._speculator, self._options = speculator, options
        self.metrics = Metrics()
        self._engine = speculator.engine(
            most=options.concurrency, patience=options.patience, kv_memory=kv_memory
        )
        self._tool_format = format_of(speculator.tokenizer)
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._answers: dict[Running, tuple[Job, Answer]] = {}
        self._open = 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="selfspec-writer", daemon=True)
        self._thread.start()

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template can show functions, and says how they are called."""
        return self._tool_format is not None

    @property
    def open(self) -> int:
        """Choices that are written or wait."""
        return self._open

    @property
    def alive(self) -> bool:
        """Whether requests would be answered."""
        return self._thread.is_alive() and not self._stopping.is_set()

    def read_grammar(self, choice: Choice) -> None:
        """What would hold other answers up, in the thread that calls. Raises InvalidOption."""
        self._speculator.read_grammar(self._asked(choice))

    def submit(self, job: Job) -> None:
        """Have a job written. Raises Refused where too much waits already."""
        count, most = len(job.choices), self._options.concurrency + self._options.queue
        if count > most:
            raise Refused(400, f"{count} answers at once, expected at most {most}", field="n")
        with self._lock:
            if self._open + count > most:
                raise Refused(
                    429,
                    f"{self._open} answers are written or wait. Try again soon",
                    headers={"Retry-After": str(_RETRY_AFTER_S)},
                )
            self._open += count
        job.left = count
        self._orders.put(lambda: self._begin(job))

    def cancel(self, job: Job) -> None:
        """What is not yet written of a job is left."""
        self._orders.put(lambda: self._leave(job))

    def look(self) -> Future[State]:
        """What it has between two rounds; no result once it has stopped."""
        found: Future[State] = Future()

        def answer() -> None:
            if found.set_running_or_notify_cancel():
                texts, waiting = self._engine.texts, self._engine.waiting
                running = texts - waiting
                found.set_result(State(running, self._open - running, self._engine.memory))

        self._orders.put(answer)
        return found

    def stop(self) -> None:
        """Leave everything, and end the thread."""
        self._stopping.set()
        self._orders.put(lambda: None)
        self._thread.join()

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                self._take_orders()
                for running in self._engine.step() if self._engine.texts else ():
                    job, answer = self._answers[running]
                    self.metrics.wrote(answer)
                    self._tell(job, answer)
            except BaseException as error:  # noqa: BLE001  # its message may hold what a client wrote
                logger.error("a round failed; its answers end, others go on:\n%s", places(error))
                for job, answer in list(self._answers.values()):
                    if answer.running.ended:  # the round did not come to say so
                        self._tell(job, answer)
        for running in list(self._answers):
            running.close()

    def _take_orders(self) -> None:
        """All there are; where nothing is written, wait for one."""
        try:
            if not self._engine.texts:
                self._orders.get(timeout=_POLL_S)()
            while True:
                self._orders.get_nowait()()
        except queue.Empty:
            return

    def _tell(self, job: Job, answer: Answer) -> None:
        try:
            piece = answer.piece()
        except BaseException as error:  # noqa: BLE001  # whatever it is, the answer has an end
            piece = Piece(choice=answer.choice, error=error)
            if not answer.running.ended:
                answer.running.close()
        if piece.finish is not None:
            self.metrics.finished(answer, piece.finish)
        if answer.running.ended or piece.error is not None:
            self._done(job, answer)
        self._say(job, piece)

    def _say(self, job: Job, piece: Piece) -> None:
        try:
            job.wrote(piece)
        except BaseException as error:  # noqa: BLE001  # nobody listens: others do
            logger.error("an answer was not heard:\n%s", places(error))
            self._leave(job)

    def _begin(self, job: Job) -> None:
        """A job's texts join the engine: all, or none."""
        try:
            ids: dict[int, Tensor] = {}  # choices of one prompt share it
            for choice in job.choices:
                if id(choice.prompt) not in ids:
                    ids[id(choice.prompt)] = self._ids(choice)
            calls = [self._call(ids[id(choice.prompt)], choice) for choice in job.choices]
            prompt_tokens = sum(one.shape[1] for one in ids.values())
            job.begun(prompt_tokens)
            self.metrics.prompt(prompt_tokens)
            for choice, call in zip(job.choices, calls, strict=True):
                self._add(job, choice, call)
        except BaseException as error:  # noqa: BLE001  # as above
            if not isinstance(error, Refused):
                logger.debug("a request failed:\n%s", places(error))
            self._leave(job)
            self._say(job, Piece(choice=0, error=error))

    def _ids(self, choice: Choice) -> Tensor:
        """A prompt's ids, [1, P]. Raises InvalidPrompt for more than there is room for."""
        raw, tools = choice.options.get("raw", False), list(choice.tools)
        ids = encode(self._speculator.tokenizer, choice.prompt, raw=raw, tools=tools)
        room = self._speculator.backbone.max_positions - 1
        count, most = ids.shape[1], min(self._options.max_prompt_tokens or room, room)
        if count > most:
            raise InvalidPrompt(
                f"the prompt has {count} tokens, this server takes {most}. Shorten the prompt"
            )
        return ids

    def _call(self, ids: Tensor, choice: Choice) -> Call:
        """An answer ends where the model's positions end."""
        room = self._speculator.backbone.max_positions - ids.shape[1]
        longest = min(choice.options["max_new_tokens"], room)
        return self._speculator.call(ids, {**self._asked(choice), "max_new_tokens": longest})

    def _asked(self, choice: Choice) -> GenerateOptions:
        if not choice.must_call or self._tool_format is None:
            return choice.options
        return {**choice.options, "grammar": self._tool_format.grammar(choice.tools)}

    def _add(self, job: Job, choice: Choice, call: Call) -> None:
        form, explanation = self._tool_format, None
        if choice.explain:
            # as if it ran alone: so a request's explanation is always the same
            cost = self._speculator.runtime.draft_cost(call.speculation)
            explanation = Explanation(call.tokenizer, cost)
        running = self._engine.add(call.request.only(), call.speculation)
        answer = Answer(
            len(job.answers),
            running,
            call.tokenizer,
            [*choice.options.get("stop_strings", ()), *([call.end] if call.end else [])],
            came_s=job.came_s,
            calls=Calls(form, choice.tools) if form is not None and choice.tools else None,
            explanation=explanation,
        )
        job.answers.append(answer)
        self._answers[running] = job, answer

    def _leave(self, job: Job) -> None:
        for answer in job.answers:
            if answer.running in self._answers:
                answer.running.close()
                self.metrics.cancelled()
                self._done(job, answer)
        with self._lock:
            self._open -= job.left
        job.left = 0

    def _done(self, job: Job, answer: Answer) -> None:
        if self._answers.pop(answer.running, None) is not None:
            job.left -= 1
            with self._lock:
                self._open -= 1
