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
from collections.abc import Callable
from concurrent.futures import Future

from torch import Tensor

from selfspec.api.request import Request
from selfspec.api.speculator import Speculator
from selfspec.api.text import encode
from selfspec.config import GenerateOptions
from selfspec.decoding.engine import Running
from selfspec.errors import InvalidPrompt
from selfspec.serve.metrics import Metrics, State
from selfspec.serve.options import ServeOptions
from selfspec.serve.pieces import Answer, Job, Piece, format_of
from selfspec.serve.protocol import Choice, Refused, places

logger = logging.getLogger(__name__)

_POLL_S = 0.5
"""Between two looks at whether to stop, where nothing is written."""


class Writer:
    """Writes the answers of all requests, in one engine."""

    def __init__(
        self, speculator: Speculator, options: ServeOptions, kv_memory: int | None = None
    ) -> None:
        self.options, self.label = options, speculator.label
        self.room = speculator.backbone.max_positions
        """Tokens of a text at most, its prompt included."""
        self.metrics = Metrics()
        self._speculator = speculator
        self._engine = speculator.engine(
            most=options.concurrency, patience=options.patience, kv_memory=kv_memory
        )
        self._tool_format = format_of(speculator.tokenizer)
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._answers: dict[Running, Answer] = {}
        self.open = 0
        """Choices that are written or wait."""
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="selfspec-writer", daemon=True)
        self._thread.start()

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template can show functions, and says how they are called."""
        return self._tool_format is not None

    @property
    def alive(self) -> bool:
        """Whether requests would be answered."""
        return self._thread.is_alive() and not self._stopping.is_set()

    def read_grammar(self, choice: Choice) -> None:
        """What would hold other answers up, in the thread that calls. Raises InvalidOption."""
        self._speculator.read_grammar(self._asked(choice))

    def submit(self, job: Job) -> None:
        """Have a job written. Raises Refused where too much waits already."""
        count, most = len(job.choices), self.options.concurrency + self.options.queue
        if count > most:
            raise Refused(400, f"{count} answers at once, expected at most {most}", field="n")
        with self._lock:
            if self.open + count > most:
                raise Refused(
                    429,
                    f"{self.open} answers are written or wait. Try again soon",
                    headers={"Retry-After": "1"},
                )
            self.open += count
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
                running = self._engine.texts - self._engine.waiting
                found.set_result(State(running, self.open - running, self._engine.memory))

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
                    self.metrics.wrote(self._answers[running])
                    self._tell(self._answers[running])
            except BaseException as error:  # noqa: BLE001  # its message may hold what a client wrote
                logger.error("a round failed; its answers end, others go on:\n%s", places(error))
                for answer in list(self._answers.values()):
                    if answer.running.ended:  # the round did not come to say so
                        self._tell(answer)
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

    def _tell(self, answer: Answer) -> None:
        try:
            piece = answer.piece()
        except BaseException as error:  # noqa: BLE001  # whatever it is, the answer has an end
            piece = Piece(choice=answer.place, error=error)
            if not answer.running.ended:
                answer.running.close()
        if piece.finish is not None:
            self.metrics.finished(answer, piece.finish)
        if answer.running.ended:
            self._done(answer)
        self._say(answer.job, piece)

    def _say(self, job: Job, piece: Piece) -> None:
        try:
            job.wrote(piece)
        except BaseException as error:  # noqa: BLE001  # nobody listens: others do
            logger.error("an answer was not heard:\n%s", places(error))
            self._leave(job)

    def _begin(self, job: Job) -> None:
        """A job's texts join the engine: all, or none."""
        try:
            prompts = {id(choice.prompt): choice for choice in job.choices}  # choices share them
            ids = {name: self._ids(choice) for name, choice in prompts.items()}
            calls = [self._call(ids[id(choice.prompt)], choice) for choice in job.choices]
            job.prompt_tokens = sum(one.shape[1] for one in ids.values())
            self.metrics.count("prompt_tokens", by=job.prompt_tokens)
            for place, call in enumerate(calls):
                running = self._engine.add(call.only(), call.speculation)
                self._answers[running] = Answer(job, place, call, running, self._tool_format)
        except BaseException as error:  # noqa: BLE001  # as above
            logger.debug("a request failed:\n%s", places(error))
            self._leave(job)
            self._say(job, Piece(choice=0, error=error))

    def _ids(self, choice: Choice) -> Tensor:
        """A prompt's ids, [1, P]. Raises InvalidPrompt for more than there is room for."""
        raw, tools = choice.options.get("raw", False), list(choice.tools)
        ids = encode(self._speculator.tokenizer, choice.prompt, raw=raw, tools=tools)
        count, most = ids.shape[1], min(self.options.max_prompt_tokens or self.room, self.room - 1)
        if count > most:
            raise InvalidPrompt(
                f"the prompt has {count} tokens, this server takes {most}. Shorten the prompt"
            )
        return ids

    def _call(self, ids: Tensor, choice: Choice) -> Request:
        """An answer ends where the model's positions end."""
        longest = min(choice.options["max_new_tokens"], self.room - ids.shape[1])
        return self._speculator.call(ids, {**self._asked(choice), "max_new_tokens": longest})

    def _asked(self, choice: Choice) -> GenerateOptions:
        if not choice.must_call or self._tool_format is None:
            return choice.options
        return {**choice.options, "grammar": self._tool_format.grammar(choice.tools)}

    def _leave(self, job: Job) -> None:
        for answer in [one for one in self._answers.values() if one.job is job]:
            answer.running.close()
            self.metrics.count("request_cancelled")
            self._done(answer)
        with self._lock:
            self.open -= job.left
        job.left = 0

    def _done(self, answer: Answer) -> None:
        if self._answers.pop(answer.running, None) is not None:
            answer.job.left -= 1
            with self._lock:
                self.open -= 1
