"""One thread that owns the model: requests come in from any thread, pieces of answers go out.

An engine needs one thread, and so does Hugging Face's preparation of a request. Other threads turn
prompts and grammars into ids and tables: large ones take seconds, while other answers go on.
Any error of a request, even a MemoryError or a panic in Rust, ends that request alone.
Rounds become pieces for clients (text before a stop, calls, why it ended) and Prometheus metrics.
Nothing here depends on HTTP.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import prometheus_client as prometheus
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.api.request import Request
from selfspec.api.speculator import Speculator
from selfspec.api.text import TextDecoder, TokenTexts, UntilStop, encode, is_end, overlap_length
from selfspec.config import WRITING, GenerateOptions
from selfspec.decoding.costs import DraftCost
from selfspec.decoding.engine import Running
from selfspec.decoding.stats import EXIT, LOOKS, MODEL, SOURCES, GenerationStats, Round
from selfspec.errors import InvalidData
from selfspec.files import parse_json
from selfspec.model.kv import Memory
from selfspec.serve.options import ServeOptions
from selfspec.serve.protocol import Choice, Refused, Tools, trace_of

logger = logging.getLogger(__name__)

_READERS = 4  # threads that read prompts
_LONG = 200_000  # bytes: longer requests, which may take a gigabyte, are read one at a time


class Writer:
    """Generates the answers to all requests, in one engine."""

    def __init__(
        self, speculator: Speculator, options: ServeOptions, kv_memory: int | None = None
    ) -> None:
        self.options, self.label = options, speculator.label
        self.room = speculator.backbone.max_positions  # tokens of a text, its prompt included
        self.num_layers = speculator.backbone.num_layers
        self.metrics = Metrics()
        self._speculator = speculator
        self._engine = speculator.engine(
            most=options.concurrency, patience=options.patience, kv_memory=kv_memory
        )
        self.tool_format = format_of(speculator.tokenizer)
        self.texts = TokenTexts(speculator.tokenizer)
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._answers: dict[Running, Answer] = {}
        self.open_choices = 0  # choices that run or wait
        self._readers = ThreadPoolExecutor(_READERS, "selfspec-reader")
        self._long_reader = ThreadPoolExecutor(1, "selfspec-reader")
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="selfspec-writer", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether new requests are answered."""
        return self._thread.is_alive() and not self._stopping.is_set()

    def submit(self, job: Job) -> None:
        """Queue a job. Raises Refused if too many choices run or wait already."""
        count = len(job.choices)
        with self._lock:
            if self.open_choices + count > self.options.concurrency + self.options.queue:
                message = f"{self.open_choices} answers are running or waiting. Try again soon"
                raise Refused(429, message, headers={"Retry-After": "1"})
            self.open_choices += count
        job.open_choices = count
        readers = self._long_reader if job.size > _LONG else self._readers
        future = readers.submit(self._read, job)
        future.add_done_callback(lambda _: self._orders.put(lambda: self._begin(job, future)))

    def cancel(self, job: Job) -> None:
        """Give up the choices of a job that are not complete."""

        def leave() -> None:
            self.metrics.count("request_cancelled", by=job.open_choices)  # also if still being read
            self._leave(job)

        self._orders.put(leave)

    def update_gauges(self) -> Future[Memory]:
        """Set the gauges between two rounds; gives the memory, or nothing after `stop`."""
        future: Future[Memory] = Future()

        def answer() -> None:
            if future.set_running_or_notify_cancel():
                running, memory = self._engine.texts - self._engine.waiting, self._engine.memory
                self.metrics.set_gauges(running, self.open_choices - running, *memory)
                future.set_result(memory)

        self._orders.put(answer)
        return future

    def stop(self) -> None:
        self._stopping.set()
        for readers in (self._readers, self._long_reader):
            readers.shutdown(wait=False, cancel_futures=True)
        self._orders.put(lambda: None)
        self._thread.join()

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                self._take_orders()
                for running in self._engine.step() if self._engine.texts else ():
                    self.metrics.count_rounds(self._answers[running])
                    self._send_piece(self._answers[running])
            except BaseException as error:  # noqa: BLE001  # its message may hold what a client wrote
                logger.error("a round failed; its answers end, others go on:\n%s", trace_of(error))
                for answer in list(self._answers.values()):
                    if answer.running.ended:  # the failed round did not report it
                        self._send_piece(answer)
        for running in list(self._answers):
            running.close()

    def _take_orders(self) -> None:
        """Run all pending orders; wait for one if no answer is running."""
        try:
            if not self._engine.texts:
                self._orders.get()()
            while True:
                self._orders.get_nowait()()
        except queue.Empty:
            return

    def _send_piece(self, answer: Answer) -> None:
        try:
            piece = answer.piece()
        except BaseException as error:  # noqa: BLE001  # any error ends the answer
            piece = Piece(choice=answer.place, error=error)
            if not answer.running.ended:
                answer.running.close()
        if piece.finish is not None:
            self.metrics.count_answer(answer, piece.finish)
        if answer.running.ended:
            self._remove(answer)
        self._send(answer.job, piece)

    def _send(self, job: Job, piece: Piece) -> None:
        try:
            job.on_piece(piece)
        except BaseException as error:  # noqa: BLE001  # its client's callback failed: others go on
            logger.error("an answer could not be sent:\n%s", trace_of(error))
            self._leave(job)

    def _read(self, job: Job) -> list[Tensor]:
        self._speculator.read_ahead(self._options_of(job.choices[0]))  # all have the same
        return [self._ids(choice) for choice in job.choices[:: job.n] if job.open_choices]

    def _begin(self, job: Job, future: Future[list[Tensor]]) -> None:
        """Add a job's texts to the engine: all or none."""
        if not job.open_choices:  # it was cancelled
            return
        try:
            ids = future.result()
            calls = [self._call(ids[index // job.n], one) for index, one in enumerate(job.choices)]
            job.prompt_tokens = sum(prompt.shape[1] for prompt in ids)
            self.metrics.count("prompt_tokens", by=job.prompt_tokens)
            for place, call in enumerate(calls):
                running = self._engine.add(call.only(), call.speculation)
                self._answers[running] = Answer(self, job, place, call, running)
        except BaseException as error:  # noqa: BLE001  # as above
            logger.debug("a request failed:\n%s", trace_of(error))
            self._leave(job)
            self._send(job, Piece(choice=0, error=error))

    def _ids(self, choice: Choice) -> Tensor:
        """A prompt's ids, [1, P]. Raises InvalidPrompt, and Refused if they are too many."""
        raw = choice.options.get("raw", False)
        ids = encode(
            self._speculator.tokenizer,
            choice.prompt,
            raw=raw,
            tools=list(choice.tools),
            variables=choice.options.get("chat_template_kwargs"),
        )
        count, limit = ids.shape[1], min(self.options.max_prompt_tokens or self.room, self.room - 1)
        if count > limit:
            # clients recognise the error by its code, or by these words
            message = f"the prompt has {count} tokens, the maximum context length is {limit} tokens"
            field, code = "prompt" if raw else "messages", "context_length_exceeded"
            raise Refused(400, f"{message}. Shorten the prompt", field=field, code=code)
        return ids

    def _call(self, ids: Tensor, choice: Choice) -> Request:
        """Make the Request for an answer, which ends at the model's last position."""
        max_tokens = min(choice.options["max_new_tokens"], self.room - ids.shape[1])
        options = self._options_of(choice) | {"max_new_tokens": max_tokens}
        options.pop("chat_template_kwargs", None)  # the ids are there
        call = self._speculator.call(ids, options)
        if choice.stops or call.end:
            call.criteria.append(_AtStop(call, choice.stops))
        return call

    def _options_of(self, choice: Choice) -> GenerateOptions:
        if not choice.must_call or self.tool_format is None:
            return choice.options
        return {**choice.options, "grammar": self.tool_format.grammar(choice.tools)}

    def _leave(self, job: Job) -> None:
        for answer in [answer for answer in self._answers.values() if answer.job is job]:
            answer.running.close()
            self._remove(answer)
        with self._lock:
            self.open_choices -= job.open_choices
        job.open_choices = 0

    def _remove(self, answer: Answer) -> None:
        if self._answers.pop(answer.running, None) is not None:
            answer.job.open_choices -= 1
            with self._lock:
                self.open_choices -= 1


# --- from the rounds of an answer to pieces for its client

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The new output of a choice since its last piece."""

    choice: int
    text: str = ""
    logprobs: Sequence[Json] = ()  # in the format of chats, if requested
    offsets: Sequence[int] = ()  # where the text of each new token begins in the answer
    rounds: Sequence[Json] | None = None  # who gave the tokens, by round, if requested
    error: BaseException | None = None  # then there is nothing else
    stats: GenerationStats | None = None  # of the choice, still counting
    # with the last piece
    calls: Sequence[Json] = ()
    finish: str | None = None  # stop, length or tool_calls


@dataclass(eq=False)
class Job:
    """The choices of a request, and the function that gets their pieces, on the writer's thread."""

    choices: Sequence[Choice]
    on_piece: Callable[[Piece], object]
    n: int = 1  # consecutive choices per prompt
    size: int = 0  # bytes of the request
    prompt_tokens: int = 0  # known before the first piece
    open_choices: int = 0  # choices that are not complete
    arrival_s: float = field(default_factory=time.perf_counter)


class _AtStop:
    """A criterion that ends an answer where its text, special tokens shown or not, has a stop."""

    def __init__(self, call: Request, stops: Sequence[str]) -> None:
        self._length = call.input_ids.shape[1]  # the prompt may have stops
        self._texts = [
            (TextDecoder(call.tokenizer, special=special), UntilStop([*stops, call.end]))
            for special in (False, True)
        ]
        for decoder, _ in self._texts:
            decoder.push(call.tail, last=True)

    def __call__(self, ids: Tensor, _: object) -> bool:
        tokens, self._length = ids[0, self._length :].tolist(), ids.shape[1]
        for decoder, stops in self._texts:
            stops.push(decoder.push(tokens))
        return any(stops.has_stopped for _, stops in self._texts)


class Answer:
    """One choice of a job while it is generated."""

    def __init__(
        self, writer: Writer, job: Job, place: int, call: Request, running: Running
    ) -> None:
        self._choice = choice = job.choices[place]
        self.job, self.place, self.running = job, place, running
        self.newest_s: float | None = None  # when its newest tokens came
        self._tokenizer = call.tokenizer
        self._decoder = TextDecoder(call.tokenizer)
        self._decoder.push(call.tail, last=True)
        self._stops = UntilStop([*choice.stops, call.end])
        form, self._texts, self._explanation = writer.tool_format, writer.texts, None
        self._calls: Calls | None = None
        if form is not None and choice.tools:
            self._calls = Calls(form, choice.tools, choice.most_calls, must_call=choice.must_call)
        if choice.explain:  # costs as if it ran alone, so that explanations do not vary
            cost = running.draft_cost(call.speculation)
            self._explanation = Explanation(writer.texts, cost)
        self._offsets = [0]  # by token: where its text begins; last: where the next one will
        self._hides_last = False  # whether the last token is an end token, which has no text

    def piece(self) -> Piece:
        """The new output, the last piece if the text has ended. Raises the error that ended it."""
        running, text, begin = self.running, "", len(self._offsets) - 1
        for entry in running.take():
            text += self._read(entry)
        if running.error is not None:
            raise running.error
        if running.ended:
            rest = self._decoder.push([], last=True)
            if self._explanation is not None:
                self._explanation.add_rest(rest)
            text += self._stops.push(rest, last=True)
        content, calls = text, list[Json]()
        if self._calls is not None:
            content = self._calls.push(text)
            if running.ended:
                rest, calls = self._calls.end()
                content += rest
        explanation, end = self._explanation, len(self._offsets) - 1 - self._hides_last
        piece = Piece(
            choice=self.place,
            text=content,
            logprobs=[
                self._logprob_entry(record.token, record.logprob)
                | {"top_logprobs": [self._logprob_entry(*pair) for pair in record.top]}
                for record in running.logprobs[begin:end]
            ],
            offsets=self._offsets[begin:end],
            rounds=None if explanation is None else explanation.take(text, last=running.ended),
            stats=running.stats,
        )
        if not running.ended:
            return piece
        # a time limit counts as length, and so does the model's last position
        late = time.perf_counter() - self.job.arrival_s >= self._choice.options["max_time"]
        ended = running.stats.stop_reason in (("eos",) if late else ("eos", "stop"))
        complete = ended or self._stops.has_stopped  # a stop may be a special token, without text
        finish = ("tool_calls" if calls else "stop") if complete else "length"
        return replace(piece, calls=calls, finish=finish)

    def _read(self, entry: Round) -> str:
        self.running.stats.add(entry)
        texts = []
        for token in entry.tokens:  # one by one: drafts decide where rounds end
            self._hides_last = is_end(self._tokenizer, entry, token)
            texts.append(self._decoder.push([] if self._hides_last else [token]))
        self._offsets += [*itertools.accumulate(map(len, texts), initial=self._offsets.pop())]
        if self._explanation is not None:
            self._explanation.add(entry, texts)
        return "".join(map(self._stops.push, texts))

    def _logprob_entry(self, token: int, logprob: float) -> Json:
        """A part of a character has no bytes here: a tokenizer only gives text."""
        text = self._texts.of(token)
        utf8 = None if "\N{REPLACEMENT CHARACTER}" in text else [*text.encode()]
        return {"token": text, "logprob": logprob, "bytes": utf8}


class Explanation:
    """Who gave each token of an answer, as JSON: each round once its text is shown.

    Text that a stop hides is not in the tokens' texts. A draft has the text of its token.
    """

    def __init__(self, texts: TokenTexts, cost: DraftCost) -> None:
        self._texts, self._cost = texts, cost
        self._waiting_rounds: list[Json] = []  # rounds with text that is not shown yet
        self._num_shown = 0  # characters of these that are shown

    def add(self, entry: Round, texts: Sequence[str]) -> None:
        """A round; `texts` of its tokens join to the answer."""
        parents = entry.parents or range(-1, len(entry.draft_tokens) - 1)
        drafts = [
            {
                **_giver(entry.sources[index], entry.exit_layers[index]),
                "parent": parents[index],
                "accepted": index in entry.kept,
                "text": self._texts.of(token),
            }
            for index, token in enumerate(entry.draft_tokens)
        ]
        cost = 0.0 if entry.prefill else self._cost.steps(entry.origins, entry.heads)
        tokens = [
            {"text": text, **_giver(*giver)}
            for text, giver in zip(texts, entry.givers, strict=True)
        ]
        record = {"tokens": tokens, "drafts": drafts, "steps": round(cost, 4), "ended": entry.ended}
        self._waiting_rounds.append(record)

    def add_rest(self, text: str) -> None:
        """Add the rest of an incomplete last character to the last token."""
        if text:
            self._waiting_rounds[-1]["tokens"][-1]["text"] += text

    def take(self, text: str, *, last: bool = False) -> list[Json]:
        """The rounds that are complete now that `text` is shown; `last`: no more will be."""
        self._num_shown += len(text)
        records = []
        while self._waiting_rounds:
            record = self._waiting_rounds[0]
            if not last and sum(len(token["text"]) for token in record["tokens"]) > self._num_shown:
                break
            records.append(self._waiting_rounds.pop(0))
            for token in record["tokens"]:
                token["text"] = token["text"][: self._num_shown]
                self._num_shown -= len(token["text"])
        return records


GIVERS = [{"source": s, "look": LOOKS[row.line], **row._asdict()} for s, row in SOURCES.items()]
"""The sources of tokens, for a page."""


def _giver(source: str, layer: int) -> Json:
    """A source of tokens as JSON; only exit heads have a layer."""
    return {"source": source, "layer": layer if source == EXIT else None}


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes a tool call: JSON between two texts."""

    before: str
    after: str
    arguments: str  # the key of the arguments beside `name`

    def grammar(self, tools: Tools) -> str:
        """A Lark grammar for one call of one of the tools."""
        before, after = (json.dumps(text) if text else "" for text in (self.before, self.after))
        choices, rules = [], ""
        for number, tool in enumerate(tools):  # separate schemas: each $ref begins at its root
            name, schema = tool["function"]["name"], tool["function"].get("parameters")
            choices.append(f'{json.dumps(self._beginning(name))} arguments{number} "}}"')
            schema = {"type": "object", **(schema or {"properties": {}})}
            if schema.get("properties") == {}:  # no arguments
                schema.setdefault("additionalProperties", False)
            rules += f"arguments{number}: %json {json.dumps(schema | {'x-guidance': WRITING})}\n"
        return f"start: {before} ({' | '.join(choices)}) {after}\n{rules}"

    def calls(self, text: str, names: Collection[str]) -> Iterator[tuple[Json, str]]:
        """Yield the calls of `names` in a text, each with the text after it; raises for others."""
        before, after = self.before.strip(), self.after.strip()
        _, mark, text = text.partition(before) if before else ("", "{", text)
        while mark:
            end = json.JSONDecoder().raw_decode(text := text.lstrip())[1]
            call, text = text[:end], text[end:]  # its strings may hold both marks
            gap, _, text = text.partition(after) if after else (text, "", "")
            rest, mark, text = text.partition(before) if before else ("", "", "")
            yield self._call(call + gap, names), rest

    def cut_call(self, text: str, names: Collection[str]) -> Iterator[Json]:
        """Yield the call by `grammar` that a text begins with, if it has the name."""
        for name in names:
            _, mark, arguments = text.partition(self._beginning(name))
            if mark:
                with contextlib.suppress(ValueError):  # they are complete
                    arguments = arguments[: json.JSONDecoder().raw_decode(arguments)[1]]
                yield _call(name, arguments)

    def _beginning(self, name: str) -> str:
        return f'{{"name": "{name}", "{self.arguments}": '

    def _call(self, text: str, names: Collection[str]) -> Json:
        fields = parse_json(text.strip(), "a call")
        name, arguments = fields["name"], fields[self.arguments]
        if name not in names or not isinstance(arguments, dict):
            raise InvalidData("no call of a known tool")
        return _call(name, json.dumps(arguments, ensure_ascii=False))


def _call(name: str, arguments: str) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


TAGGED = ToolFormat("<tool_call>\n", "\n</tool_call>", "arguments")  # Hermes, Qwen, SmolLM3
BARE = ToolFormat("", "", "parameters")  # Llama from 3.1 on


def format_of(tokenizer: PreTrainedTokenizerBase | None) -> ToolFormat | None:
    """The format of calls in a chat template; None: it has no tools, or an unknown format."""
    if tokenizer is None or tokenizer.chat_template is None:
        return None
    template = tokenizer.get_chat_template(tools=[{}])
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        return TAGGED
    return BARE if '"parameters"' in template and '"name"' in template else None


class Calls:
    """Splits an answer into text and calls: passes on text that is no call, and holds the rest."""

    def __init__(
        self, form: ToolFormat, tools: Tools, most: int | None = None, *, must_call: bool = False
    ) -> None:
        self._form, self._names = form, [tool["function"]["name"] for tool in tools]
        self._most, self._must_call = most, must_call  # most: calls to return
        self._text = ""
        self._sent_length = 0

    def push(self, text: str) -> str:
        self._text += text
        mark, content = self._form.before.strip(), self._text.lstrip()
        if mark:
            index = self._text.find(mark)
            end = index if index >= 0 else len(self._text) - overlap_length(self._text, mark)
        else:
            end = 0 if not content or content.startswith("{") else len(self._text)
        piece = self._text[self._sent_length : end]
        self._sent_length += len(piece)
        return piece

    def end(self) -> tuple[str, list[Json]]:
        """The rest of the text, and the calls; if one of them is invalid, all of it is text."""
        try:
            pairs = [*self._form.calls(self._text, self._names)]
        except (InvalidData, LookupError, TypeError, ValueError, RecursionError):
            pairs = []
        if not pairs and self._must_call:  # a limit cut the call: its arguments are incomplete
            return "", [*self._form.cut_call(self._text, self._names)]
        if not pairs:
            return self._text[self._sent_length :], []
        tail = "".join(text for _, text in pairs)
        return tail if tail.strip() else "", [call for call, _ in pairs[: self._most]]


# --- metrics that Prometheus reads at /metrics

_GAUGES = {
    "num_requests_running": "Answers that are running.",
    "num_requests_waiting": "Answers that wait for room.",
    "kv_memory_bytes": "KV cache of running answers.",
    "kv_memory_promised_bytes": "KV cache that running answers may grow to.",
    "kv_memory_kept_bytes": "KV cache of ended texts, kept for prompts that begin alike.",
    "kv_memory_limit_bytes": "Budget for the KV cache.",
}

_COUNTERS = {
    "request_success": ("Answers that are complete.", "finished_reason"),
    "request_cancelled": ("Answers whose client disconnected.",),
    "request_refused": ("Requests that got an error.", "status"),
    "prompt_tokens": ("Tokens of prompts.",),
    "generation_tokens": ("Tokens of answers.",),
    "tokens_by_source": ("Tokens of answers by their source.", "source"),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.",),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache.",),
    "spec_decode_num_drafts": ("Rounds that had drafts.",),
    "spec_decode_num_draft_tokens": ("Drafted tokens.",),
    "spec_decode_num_accepted_tokens": ("Accepted drafts.",),
    "spec_decode_num_accepted_tokens_per_pos": (
        "Accepted drafts by their place in a round, from 0.",
        "position",
    ),
}
"""The help text of each counter, and its label."""

_GAPS_S = tuple(0.005 * 2**step for step in range(12))  # 5 ms to 10 s
_ANSWERS_S = tuple(0.01 * 2**step for step in range(17))  # 10 ms to 11 minutes
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request to its first token.", _ANSWERS_S),
    "inter_token_latency_seconds": ("Between rounds of an answer.", _GAPS_S),
    "e2e_request_latency_seconds": ("From a request to its answer's end.", _ANSWERS_S),
}


class Metrics:
    """The metrics of one server, which it shares with no other."""

    def __init__(self) -> None:
        self._registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=self._registry)
        common: Any = {"namespace": "selfspec", "registry": self._registry}
        self._gauges = [prometheus.Gauge(*pair, **common) for pair in _GAUGES.items()]
        self._counters = {
            name: prometheus.Counter(name, text, labels, **common)
            for name, (text, *labels) in _COUNTERS.items()
        }
        self._histograms = {
            name: prometheus.Histogram(name, text, buckets=buckets, **common)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }

    def count(self, name: str, *label: object, by: int = 1) -> None:
        """Add to a counter; `label`: the value of its label, if it has one. Thread-safe."""
        counter = self._counters[name]
        (counter.labels(*label) if label else counter).inc(by)

    def count_rounds(self, answer: Answer) -> None:
        """Count the rounds of an answer that have not been taken yet."""
        running = answer.running
        for entry in running.new_rounds:
            self.count("generation_tokens", by=len(entry.tokens))
            self.count("tokens_by_source", MODEL, by=len(entry.tokens) - entry.accepted)
            if entry.prefill:
                self.count("prefix_cache_queries", by=running.stats.prompt_tokens)
                self.count("prefix_cache_hits", by=running.stats.reused_tokens)
            if entry.draft_tokens:
                self.count("spec_decode_num_drafts")
                self.count("spec_decode_num_draft_tokens", by=len(entry.draft_tokens))
                self.count("spec_decode_num_accepted_tokens", by=entry.accepted)
            for position, index in enumerate(entry.kept):
                self.count("spec_decode_num_accepted_tokens_per_pos", position)
                self.count("tokens_by_source", entry.sources[index])
        if any(entry.tokens for entry in running.new_rounds):
            now = time.perf_counter()
            if answer.newest_s is None:
                self._histograms["time_to_first_token_seconds"].observe(now - answer.job.arrival_s)
            else:
                self._histograms["inter_token_latency_seconds"].observe(now - answer.newest_s)
            answer.newest_s = now

    def count_answer(self, answer: Answer, reason: str) -> None:
        self.count("request_success", reason)
        seconds = time.perf_counter() - answer.job.arrival_s
        self._histograms["e2e_request_latency_seconds"].observe(seconds)

    def set_gauges(self, *values: float) -> None:
        """Set all gauges, in their order. Thread-safe."""
        for gauge, value in zip(self._gauges, values, strict=True):
            gauge.set(value)

    def text(self) -> bytes:
        """The metrics as Prometheus reads them. Thread-safe."""
        return prometheus.generate_latest(self._registry)
