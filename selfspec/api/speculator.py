"""The facade: load or wrap a model, then generate, stream or hold a conversation.

Keywords are those of Hugging Face's `generate`; `selfspec.config.GenerateOptions` lists them.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count, repeat
from numbers import Integral
from pathlib import Path
from threading import RLock
from types import FrameType
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from typing_extensions import Unpack

from selfspec.api import chat_template as templates
from selfspec.api import request as requests
from selfspec.api import tuned
from selfspec.api.chat_template import NO_END, TurnEnd
from selfspec.api.request import Grammars, Request, keyword_value, stop_strings
from selfspec.api.stream import Generation, Stream
from selfspec.api.text import Prompt, encode
from selfspec.config import OPTION_NAMES, GenerateOptions, SpeculationOptions, check, grammar_of
from selfspec.decoding.drafters.draft_model import check_same_size, check_same_tokens
from selfspec.decoding.drafters.heads import pack
from selfspec.decoding.drafters.rest import Datastore
from selfspec.decoding.engine import MOST_TEXTS, Engine, Running, Runtime, not_traced
from selfspec.decoding.state import DecodeState
from selfspec.errors import (
    HeadsMismatch,
    InvalidOption,
    InvalidPrompt,
    ModelChanged,
    SelfspecError,
    check_types,
    shown,
)
from selfspec.files import local_path
from selfspec.heads.attending import AttendingHeads
from selfspec.heads.exit_heads import ExitHeads, logit_lens
from selfspec.heads.folder import attends, find_known
from selfspec.hub import models as hub
from selfspec.model import fingerprint
from selfspec.model.backbone import Backbone
from selfspec.model.kv import common_prefix
from selfspec.model.parts import CACHES, check_model, kind_of
from selfspec.options import FITTED, Costs, Exit

logger = logging.getLogger(__name__)

_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
_TAIL = 4  # last prompt tokens of a text that is continued: the new tokens are decoded after them

Answered = tuple[int, Generation | SelfspecError]
"""The index of a prompt, from 0, and its answer, or the error that it raised."""

Answers = Tensor | GenerateDecoderOnlyOutput
"""What Hugging Face's `generate` returns."""


class Speculator:
    """A model with its exit heads, ready to generate. Made by `load` or `wrap`."""

    def __init__(
        self,
        backbone: Backbone,
        tokenizer: PreTrainedTokenizerBase | None,
        heads: ExitHeads | None,
        label: str,
        options: SpeculationOptions,
        draft_model: Backbone | None = None,
        turn_end: TurnEnd = NO_END,
        datastore: Datastore | None = None,
    ) -> None:
        """A part that is None cannot draft. Raises InvalidOption for exit layers without a head."""
        self.tokenizer, self.label = tokenizer, label
        self.options, self.turn_end = options, turn_end
        self.runtime = Runtime(backbone, heads, draft_model, datastore)
        self._grammars = Grammars(tokenizer, backbone.vocab_size)
        if heads is not None:
            heads.layers_in_use(options)

    def __repr__(self) -> str:
        drafter = self.options.drafter if self.options.speculate else "none"
        model = self.backbone
        return (
            f"<Speculator of {self.label}: {model.num_layers} layers in {model.dtype} on "
            f"{model.device}, executor {model.executor_name}, drafter {drafter}>"
        )

    def __call__(self, *_: object, **__: object) -> None:
        """Raise InvalidOption: transformers ignores a `custom_generate` that is not callable."""
        raise InvalidOption(
            "a Speculator is not callable. Use generate(prompt), or custom_generate=speculator.hf()"
        )

    @property
    def backbone(self) -> Backbone:
        """The model, split into its layers."""
        return self.runtime.backbone

    @property
    def heads(self) -> ExitHeads | None:
        """Its exit heads, if it has any."""
        return self.runtime.heads

    @property
    def model(self) -> PreTrainedModel:
        """The wrapped model, unchanged."""
        return self.backbone.model

    @not_traced
    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """Generate one answer to one prompt. For batches, see `generate_batch`."""
        return self.stream(prompt, **options).drain()

    def generate_batch(
        self, prompts: Prompt | Sequence[Prompt], **options: Unpack[GenerateOptions]
    ) -> list[Generation]:
        """Answers to a list of prompts, or to all rows of left-padded ids [B, P], in their order.

        All are generated in one batch, and each equals the answer to its prompt alone: answer i is
        sampled with `seed` plus i. Rows of ids may get `num_return_sequences` answers each.
        """
        kinds = (str, list, tuple, Tensor, np.ndarray)  # in a list; else messages, or token ids
        if not isinstance(prompts, list | tuple) or (prompts and not isinstance(prompts[0], kinds)):
            return self.answers(self.call(cast("Prompt", prompts), options))
        answers: dict[int, Generation] = {}
        for number, answer in self.generate_each(cast("Sequence[Prompt]", prompts), **options):
            if isinstance(answer, SelfspecError):
                raise type(answer)(f"prompt {number}: {answer}")
            answers[number] = answer
        return [answers[number] for number in sorted(answers)]

    def generate_each(
        self,
        prompts: Iterable[Prompt],
        *,
        most: int = MOST_TEXTS,
        kv_memory: int | None = None,
        seeds: Iterable[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[Answered]:
        """Yield answers to any number of prompts as they complete, each with its prompt's index.

        The error of an invalid prompt is yielded as its answer, not raised. At most `most` prompts
        are answered at once, as far as `kv_memory` allows (see `Engine`). Each is sampled with its
        entry of `seeds`, or with `seed` plus its index. Your own processors and criteria need a
        method `for_row(number)` if they keep state between calls.
        """
        if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
            expected = "expected a list of prompts. For one prompt, use generate"
            raise InvalidPrompt(f"the prompts are {shown(prompts)}, {expected}")
        if seeds is not None and (isinstance(seeds, str) or not isinstance(seeds, Iterable)):
            expected = "expected a list with one for each prompt. For consecutive seeds, give seed"
            raise InvalidOption(f"seeds are {shown(seeds)}, {expected}")
        self._split_options(options)
        if options.get("streamer") is not None or (options.get("num_return_sequences") or 1) != 1:
            raise InvalidOption("streamer and num_return_sequences need one prompt. Leave them out")
        if seeds is None and (first := options.get("seed")) is not None:
            seeds = count(first)
        engine = self.engine(most=most, kv_memory=kv_memory)
        prompt_seeds = repeat(None) if seeds is None else iter(seeds)
        no_seed = "missing: more prompts than seeds"
        entries = ((n, prompt, next(prompt_seeds, no_seed)) for n, prompt in enumerate(prompts))
        return self._answer_each(engine, entries, options, most)

    def _answer_each(
        self,
        engine: Engine,
        entries: Iterator[tuple[int, Prompt, Any]],
        options: GenerateOptions,
        most: int,
    ) -> Iterator[Answered]:
        """Yield answers as they complete; a prompt is read when a place in the batch is free."""
        streams: dict[Running, tuple[int, Stream]] = {}
        try:
            while True:
                while len(streams) < most and (entry := next(entries, None)):
                    number, prompt, seed = entry
                    own = options | _cut(options, number) | ({} if seed is None else {"seed": seed})
                    if isinstance(seed, Integral):
                        own["seed"] = int(seed) % 2**64
                    try:
                        request = self.call(prompt, own)
                        sequence = engine.add(request.only(), request.speculation)
                    except SelfspecError as error:
                        yield number, error
                        continue
                    streams[sequence] = number, Stream(sequence, request)
                if not streams:
                    return
                for running in engine.step():
                    if running.ended and running in streams:
                        number, stream = streams.pop(running)
                        try:
                            yield number, stream.drain()
                        except SelfspecError as error:
                            yield number, error
        finally:
            for running in streams:
                running.close()

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """Return the same answer as `generate`, piece by piece."""
        request = self.call(prompt, options)
        return Stream(self.engine().add(request.only(), request.speculation), request)

    def engine(
        self, *, most: int = MOST_TEXTS, patience: float | None = None, kv_memory: int | None = None
    ) -> Engine:
        """An engine, whose texts join and leave between rounds; keywords are those of `Engine`."""
        return Engine(self.runtime, most=most, patience=patience, kv_memory=kv_memory)

    def session(self) -> Session:
        """Start a conversation that keeps its KV cache between turns."""
        return Session(self)

    @not_traced
    def hf(
        self, *, strings: str | list[str] | None = None, **speculation: Any
    ) -> Callable[..., Answers]:
        """A `custom_generate` for Hugging Face's own `model.generate`.

        Give stop `strings` here: `model.generate` rejects `stop_strings` with a callable.
        `speculation` overrides this speculator's options.
        """
        if "stop_strings" in speculation:
            raise InvalidOption("stop_strings are called strings here. Give hf(strings=...)")
        for name in speculation:
            if name in GenerateOptions.__annotations__ and name not in OPTION_NAMES:
                raise InvalidOption(f"{name} is for model.generate itself. Give it there")
        ends_at = stop_strings(self.tokenizer, strings) if strings else None
        return partial(_loop, self, self.options.updated(speculation), ends_at)

    @not_traced
    def call(self, prompt: Prompt, options: GenerateOptions) -> Request:
        """Make the Request for one prompt and the keywords of one call."""
        self.backbone.refuse_modes()
        speculation, rest = self._split_options(options)
        streamer, raw = rest.pop("streamer", None), rest.pop("raw", False)
        variables = rest.pop("chat_template_kwargs", None)
        ids = encode(self.tokenizer, prompt, raw=raw, variables=variables).to(self.backbone.device)
        end = NO_END if raw else self.turn_end
        rest |= self.ending(rest, end)
        request = requests.prepare(self.backbone, self.tokenizer, self._grammars, ids, rest)
        goes_on = raw or getattr(self.tokenizer, "chat_template", None) is None
        tail = ids[0, -_TAIL:].tolist() if goes_on and len(ids) == 1 else ()
        return replace(request, speculation=speculation, streamer=streamer, end=end.text, tail=tail)

    def _split_options(self, options: GenerateOptions) -> tuple[SpeculationOptions, dict[str, Any]]:
        """Split keywords into speculation options and the others. Raises InvalidOption."""
        rest = requests.check_options(options, self.backbone.vocab_size)
        return self.options.updated({k: rest.pop(k) for k in OPTION_NAMES if k in rest}), rest

    def ending(self, given: Mapping[str, Any], end: TurnEnd) -> dict[str, Any]:
        """Keywords of `generate` that stop at the end of a turn, too, besides the usual stops."""
        if end.text:
            stops = keyword_value(self.model, given, "stop_strings") or []
            strings = stops if isinstance(stops, list | tuple) else [stops]
            return {"stop_strings": [*strings, end.text]}
        if end.token is None or given.get("eos_token_id") is not None:
            return {}
        ends = templates.as_list(keyword_value(self.model, given, "eos_token_id"))
        return {"eos_token_id": sorted({*ends, end.token})}

    def read_ahead(self, options: GenerateOptions) -> None:
        """Read stops and grammar before a call, in any thread: reading them may take seconds."""
        end = NO_END if options.get("raw") else self.turn_end
        keywords = {**options, **self.ending(options, end)}
        if strings := keyword_value(self.model, keywords, "stop_strings"):
            stop_strings(self.tokenizer, strings)
        if (grammar := grammar_of(options)) is not None:
            ends = keyword_value(self.model, keywords, "eos_token_id")
            self._grammars.mask(grammar, templates.as_list(ends))

    def answers(self, request: Request) -> list[Generation]:
        """Generate the answers to all rows of a request in one batch."""
        engine = self.engine()
        rows = range(len(request.pads))
        if request.streamer is not None and len(rows) > 1:
            raise InvalidOption(f"a streamer shows one text, not {len(rows)}. Leave it out")
        sequences = [engine.add(request.row(row), request.speculation) for row in rows]
        streams = [Stream(running, request) for running in sequences]
        try:
            return [stream.drain() for stream in streams]
        finally:
            for stream in streams:
                stream.close()


def _cut(options: Mapping[str, Any], number: int) -> Any:
    """Keywords with the processors and criteria of prompt `number`, from their `for_row` if any."""
    return {
        name: [func.for_row(number) if hasattr(func, "for_row") else func for func in options[name]]
        for name in ("logits_processor", "stopping_criteria")
        if options.get(name)
    }


class Session:
    """A conversation over several turns, which reuses the KV cache of earlier turns.

    Concurrent calls of `generate` run one after the other.
    """

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator
        self._state: DecodeState | None = None
        self._shapes: tuple[bool, int] | None = None
        self._stream: Stream | None = None
        self._lock = RLock()
        self._draft_cache = speculator.runtime.draft_cache()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """Generate the answer to `prompt`: the whole conversation so far and the new turn."""
        with self._lock:
            return self.stream(prompt, **options).drain()

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """Return the same answer, piece by piece. Closes the stream of an earlier turn."""
        with self._lock:
            if self._stream is not None:
                self._stream.close()
            request = self._speculator.call(prompt, options)
            sequence, speculation = request.only(), request.speculation
            shapes, kv = (bool(speculation.pinned), speculation.pinned_rows), None
            state = self._state
            if shapes == self._shapes and state is not None and not (state.pad or sequence.pad):
                # keep the prefix shared with the new prompt, whose last id is always run
                state.kv.truncate(common_prefix(state.committed(0), sequence.ids[0, :-1].tolist()))
                kv = state.kv
            sequence = replace(sequence, kv=kv, draft_cache=self._draft_cache)
            running = self._speculator.engine().add(sequence, speculation)
            self._shapes, self._state = shapes, running.state
            self._stream = Stream(running, request, self._lock)
            return self._stream


def load(
    model: str | Path | None = None,
    *,
    heads: str | Path | ExitHeads | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    attn_implementation: str | None = None,
    executor: str = "auto",
    draft_model: str | Path | None = None,
    datastore: str | Path | None = None,
    chat_template: str | Path | None = None,
    **options: Any,
) -> Speculator:
    """Load a Speculator for a hub id, a local folder, a `.gguf` file, or None, the default model.

    `heads`: a folder, a name, a hub id, "logit-lens" or "none". None takes the heads that were last
    fitted or pulled for these weights, or come with selfspec, unless there is a draft model; if
    there are none, prompt lookup drafts. The default model keeps its own heads.
    `dtype`: None is bfloat16, or float32 for a GGUF file where bfloat16 is slow on this machine.
    `attn_implementation`: None is sdpa, or eager for models without sdpa.
    `executor`: generic runs the model's own layers, fused runs compiled layers on a CPU, cuda-graph
    runs the model's own layers as CUDA graphs, auto takes the best one available. `draft_model`: a
    smaller model with the same tokens, which drafts. `datastore`: a file from `selfspec datastore`;
    its texts draft after prompt lookup, in place of heads. `chat_template`: a name like vicuna
    (`chat_template.NAMES`), a Jinja file or its text; it replaces that of the heads or the model.
    `options`: those of SpeculationOptions, as objects, text or mappings. Raises ModelNotFound,
    UnsupportedModel, HeadsNotFound, InvalidHeads, HeadsMismatch, DraftModelMismatch, InvalidData,
    InvalidOption.
    """
    for name, value in (("model", model), ("draft_model", draft_model)):
        if value == "":
            raise InvalidOption(f"{name} is empty, expected {_NAMES}")
        _require(f"{name} is", value, str | Path, _NAMES)
    _require("heads are", heads, str | Path | ExitHeads, _HEADS)
    fields = {"attn_implementation": attn_implementation, "device": device}
    check_types(fields, {"attn_implementation": str | None, "device": str | None})
    check(options, other_names=[*inspect.signature(load).parameters])
    templates.start_renderer()
    store, template = _read(datastore, chat_template)
    read = partial(
        hub.load_model,
        dtype=dtype,
        device=device,
        attn_implementation=attn_implementation,
        blocks=executor in hub.FROM_BLOCKS,
    )
    loaded, tokenizer, files = read(model)
    draft_loaded = None
    if draft_model is not None:
        draft_loaded, draft_tokenizer, draft_files = read(draft_model)
        check_same_tokens(tokenizer, draft_tokenizer, draft_files.label)
    # made here, before anything can change the model that was read
    hasher = partial(fingerprint.of_loaded, loaded, files.stamps)
    if heads is None and draft_loaded is None:
        # the default heads were not fitted to the default model as float16 rounds it
        fits = files.is_default and loaded.dtype != torch.float16
        heads = heads_for(loaded, hasher, chosen=fits) or (hub.DEFAULT_HEADS if fits else None)
    by_name = heads not in (None, hub.NO_HEADS) and not isinstance(heads, ExitHeads)
    digest = hasher() if by_name else None
    backbone = Backbone(loaded, executor=executor, fingerprint=digest, loaded_from=files.stamps)
    draft = None if draft_loaded is None else Backbone(draft_loaded, executor=executor)
    return _speculator(backbone, tokenizer, heads, files.label, draft, store, template, options)


def wrap(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    heads: str | Path | ExitHeads | None = None,
    label: str | None = None,
    executor: str = "auto",
    draft_model: PreTrainedModel | None = None,
    datastore: str | Path | None = None,
    chat_template: str | Path | None = None,
    **options: Any,
) -> Speculator:
    """Make a Speculator around a model that is already loaded, and leave the model unchanged.

    The tokenizer stays unchanged, too. `chat_template` and `heads` are the same as in `load`.
    If there are heads for a model of this size, all weights are hashed to tell whether the heads
    fit: 0.4 s for the default model, longer for larger ones. heads="none" avoids this.

    A `datastore` or a `draft_model` drafts unless `options` say otherwise. The caller ensures that
    both models, and a datastore without a tokenizer, use the same token ids. Raises
    UnsupportedModel, HeadsNotFound, InvalidHeads, HeadsMismatch, DraftModelMismatch, InvalidData,
    InvalidOption.
    """
    nested = isinstance(getattr(tokenizer, "tokenizer", None), PreTrainedTokenizerBase)
    advice = "Give its .tokenizer" if nested else "Load one with AutoTokenizer, or leave it out"
    expected = f"a tokenizer of transformers. {advice}"
    _require("tokenizer is", tokenizer, PreTrainedTokenizerBase, expected)
    _require("heads are", heads, str | Path | ExitHeads, _HEADS)
    if draft_model is not None:
        check_model(draft_model, "draft_model")
    check(options, other_names=[*inspect.signature(wrap).parameters])
    store, template = _read(datastore, chat_template)
    backbone = Backbone(model, executor=executor)
    draft = None if draft_model is None else Backbone(draft_model, executor=executor)
    if heads is None and draft is None:
        heads = heads_for(model, lambda: backbone.fingerprint)
    label = label or model.config.name_or_path or type(model).__name__
    return _speculator(backbone, tokenizer, heads, label, draft, store, template, options)


def _speculator(
    backbone: Backbone,
    tokenizer: PreTrainedTokenizerBase | None,
    heads: str | Path | ExitHeads | None,
    label: str,
    draft: Backbone | None,
    store: Datastore | None,
    template: str | None,
    options: dict[str, Any],
) -> Speculator:
    """Make a Speculator from its parts: find the heads, the chat template and the base options."""
    if store is not None:
        store.check(tokenizer, backbone.vocab_size)
        options = {"drafter": "ngram+rest", **options}
    exit_heads = find_heads(backbone, heads, label)
    tokenizer, turn_end = templates.choose_template(tokenizer, template, exit_heads, label)
    base = SpeculationOptions()
    if exit_heads is not None:
        if backbone.claims.replay is None:  # CUDA graphs capture torch's own kernels alone
            pack(exit_heads)
        base = base.updated(exit_heads.config.defaults).updated(tuned.read(backbone, exit_heads))
        if base.speculate and not base.uses(Exit.kind) and "drafter" not in options:
            note = "by calibration the heads gain nothing, so %s drafts. To try them: --drafter %s"
            logger.info(note, base.drafter, FITTED)
    elif draft is None and "drafter" not in options:
        # prompt lookup drafts for any model, under a rule of its own
        base = base.updated({"drafter": "ngram"}).updated(tuned.read(backbone, None))
        if heads != hub.NO_HEADS and base.updated(options).speculate:
            note = "no exit heads for %s: prompt lookup drafts. Fit: selfspec adapt %s--model MODEL"
            is_chat = getattr(tokenizer, "chat_template", None) is not None
            logger.warning(note, label, "" if is_chat else "--raw ")
    if draft is not None:
        check_same_size(backbone, draft, tokenizer)
        base = base.updated({"drafter": "draft-model"})
    settings = base.updated(options)
    if settings.costs == Costs() and settings.speculate and settings.drafter != "none":
        settings = settings.updated(tuned.first_costs(backbone, exit_heads))
    return Speculator(backbone, tokenizer, exit_heads, label, settings, draft, turn_end, store)


# --- the exit heads that were given, or are known here


def heads_for(
    model: PreTrainedModel, fingerprint: Callable[[], str], *, chosen: bool = False
) -> Path | None:
    """Find heads for a model if the caller names none, and log which ones were found.

    First those that were last fitted, pulled or chosen for this model on this machine, then those
    that come with selfspec. With `chosen`, only heads that the user chose.
    """
    config = model.config.get_text_config()
    sizes = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
    entries = [] if chosen else hub.list_heads()
    bundled = sorted(entries, key=lambda entry: entry.name != hub.DEFAULT_HEADS)
    folder = find_known(sizes, fingerprint, bundled, chosen=chosen)
    if folder is not None:
        name = hub.heads_name(folder)
        logger.info("exit heads %s are this model's. To use none: --heads none", name)
    return folder


def find_heads(
    backbone: Backbone, heads: str | Path | ExitHeads | None, label: str
) -> ExitHeads | None:
    """Load the heads named by `heads`. Raises HeadsNotFound, InvalidHeads, HeadsMismatch."""
    if isinstance(heads, ExitHeads):
        weight = backbone.unembedding.weight
        heads.config.require_sizes("heads", backbone, "the model")
        if (param := next(heads.parameters(), weight)).device != weight.device:
            raise HeadsMismatch(
                f"the heads are on {param.device}, the model's lm_head is on {weight.device}. Move "
                "them: heads.to(device)"
            )
        return heads if param.dtype == weight.dtype else heads.twin(backbone.unembedding)
    if heads is None or heads == hub.NO_HEADS:
        return None
    if heads == hub.LOGIT_LENS:
        return logit_lens(backbone.unembedding, backbone.num_layers, label)
    return heads_of(hub.resolve_heads(heads), backbone, label)


def heads_of(folder: Path, backbone: Backbone, label: str) -> ExitHeads:
    """Load heads of any kind from a folder. Raises HeadsNotFound, InvalidHeads, HeadsMismatch."""
    kind = AttendingHeads if attends(folder) else ExitHeads
    return kind.from_pretrained(folder, backbone, label)


# --- arguments of `load` and `wrap`


_NAMES = (
    "a hub id, a folder or a .gguf file. For a model that is already loaded, use "
    "selfspec.wrap(model)"
)
_HEADS = "a folder, a name, 'logit-lens' or ExitHeads. See the names with: selfspec heads"


def _require(name: str, value: object, kinds: Any, expected: str) -> None:
    """Raise InvalidOption for a value of another type; None means "not given"."""
    if value is not None and not isinstance(value, kinds):
        raise InvalidOption(f"{name} {kind_of(value)}, expected {expected}")


def _read(datastore: object, template: str | Path | None) -> tuple[Datastore | None, str | None]:
    """Read the datastore and the chat template; None for each that is None."""
    check_types({"datastore": datastore}, {"datastore": str | Path | None})
    path = None if datastore is None else local_path(cast("str | Path", datastore))
    store = None if path is None else Datastore.read(path)
    return store, None if template is None else templates.read(template)


# --- inside Hugging Face's `generate`


@not_traced
def _loop(
    speculator: Speculator,
    options: SpeculationOptions,
    ends_at: StopStringCriteria | None,
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> Answers:
    """A `custom_generate` for one model. Returns prompts and answers [B, longest], right-padded."""
    if model is not speculator.model:
        advice = "Wrap that model"
        if hasattr(model, "get_base_model") or hasattr(speculator.model, "get_base_model"):
            advice = "Wrap PEFT's get_base_model(), and call PEFT's own generate"
        raise InvalidOption(f"this custom_generate belongs to another model. {advice}")
    for name, advice in _UNHEARD.items():
        if _generate_local(name) or (_generate_local("kwargs") or {}).get(name) is not None:
            raise InvalidOption(f"{name} is not supported: it would be ignored. {advice}")
    if ends_at is not None:
        stopping_criteria.append(ends_at)
    request = requests.from_prepared(
        speculator.backbone,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        model_kwargs,
        speculation=options,
        tokenizer=speculator.tokenizer,
        streamer=_generate_local("streamer") if streamer is None else streamer,
        streamer_has_prompt=True,
    )
    ids, answers = request.input_ids, speculator.answers(request)
    rows = [ids.new_tensor(answer.token_ids) for answer in answers]
    padded = pad_sequence(rows, batch_first=True, padding_value=request.pad_token_id)
    ids = torch.cat([ids, padded], dim=1)
    return GenerateDecoderOnlyOutput(sequences=ids) if request.return_dict else ids  # type: ignore[arg-type]  # annotated LongTensor upstream


_UNHEARD = {
    "assistant_model": "Wrap the model with draft_model=",
    "synced_gpus": "Leave it out",
    **dict.fromkeys(CACHES, "Drop past_key_values, or use speculator.session()"),
}
"""Keywords that a decoding loop does not get, or cannot tell from what `generate` itself made."""


def _generate_local(name: str) -> Any:
    """The value of a local variable of the running `generate`; None if no `generate` runs.

    transformers (5.17 to 5.24) does not pass on everything: a callable does not get the streamer,
    and the code of a repository does not get its own address. Other ways to read them would change
    the model, which is never changed. Without its streamer, the answer would come all at once.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _GENERATE:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get(name)


# --- `custom_generate` of heads on the hub

_WRAPPED: WeakKeyDictionary[PreTrainedModel, tuple[object, Speculator]] = WeakKeyDictionary()
"""The Speculator last made for each model, and the key of its heads, while the model lives."""


def custom_generate(
    model: PreTrainedModel,
    *,
    pushed_to: str,
    heads: str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **options: Any,
) -> Answers:
    """Run `model.generate(custom_generate="OWNER/HEADS", trust_remote_code=True)` with exit heads.

    The heads come from the folder or hub id that `generate` was given as `custom_generate`, else
    from `pushed_to`; `heads` names other heads, as in `wrap`. `options`: keywords of `generate`, of
    SpeculationOptions, and of the hub (`revision`, `token`, `cache_dir`). The model is wrapped at
    the first call, and again if it or the heads changed. Raises what `generate` and `wrap` raise.
    """
    strings = keyword_value(model, options, "stop_strings")
    speculation = {name: options.pop(name) for name in OPTION_NAMES if name in options}
    hub_options = {name: options.pop(name) for name in hub.FETCHING if name in options}
    source = str(heads or _generate_local("custom_generate") or pushed_to)
    folder = local_path(source)
    key = (source, hub_options, fingerprint.of_folder(folder))
    if (speculator := _cached_speculator(model, key)) is None:
        if heads is None and not folder.is_dir():
            folder = hub.fetch_heads(source, **hub_options)
        # another object with the model's state: holding it does not keep the model object alive
        alias: PreTrainedModel = object.__new__(type(model))
        object.__setattr__(alias, "__dict__", vars(model))
        _WRAPPED[model] = key, (speculator := wrap(alias, heads=heads or folder))
    ends_at = stop_strings(tokenizer, strings) if strings else None
    loop = partial(_loop, speculator, speculator.options.updated(speculation), ends_at)
    kind: Any = type(model)  # the class's method: loading a model with such code sets its own
    options |= {"custom_generate": loop, "stop_strings": None}
    ids: Answers = kind.generate(speculator.model, **options)
    return ids


def _cached_speculator(model: PreTrainedModel, key: object) -> Speculator | None:
    """The Speculator of `model` for `key`; None, and it is dropped, if the model or key changed."""
    old_key, speculator = _WRAPPED.pop(model, (None, None))
    if speculator is not None and old_key == key:
        with suppress(ModelChanged):
            speculator.backbone.require_unchanged()
            _WRAPPED[model] = key, speculator
            return speculator
    return None
