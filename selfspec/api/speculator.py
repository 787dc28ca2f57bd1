"""The facade: load or wrap a model, then generate, stream, converse.

A tower of generators: `decode.rounds` yields rounds, `Stream` turns them into text, `generate`
drains the stream. Keywords are Hugging Face's; `selfspec.config.GenerateOptions` lists them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import TypeIs, Unpack

from selfspec.api import chat_template as templates
from selfspec.api import structure, tuned
from selfspec.api.chat_template import NO_END, TurnEnd
from selfspec.api.finding import find_heads, heads_for, without_heads
from selfspec.api.given import LOADING, WRAPPING, check_loading, check_wrapping
from selfspec.api.hugging_face import Loop, check_drafting
from selfspec.api.keywords import stop_strings
from selfspec.api.many import Answered, check_many, each
from selfspec.api.request import check_options, prepare
from selfspec.api.session import Session
from selfspec.api.shaping import Grammars, penalised, with_choice
from selfspec.api.stream import Call, Generation, Stream
from selfspec.api.template import start as start_renderer
from selfspec.api.text import Prompt, encode
from selfspec.config import OPTION_NAMES, GenerateOptions, SpeculationOptions, check
from selfspec.decoding.drafters import (
    check_same_size,
    check_same_tokens,
)
from selfspec.decoding.engine import MOST_TEXTS, Engine
from selfspec.decoding.packed_heads import pack
from selfspec.decoding.runtime import Runtime
from selfspec.errors import InvalidOption, SelfspecError
from selfspec.heads.exit_heads import ExitHeads
from selfspec.hub import models as hub
from selfspec.model import fingerprint
from selfspec.model.backbone import Backbone
from selfspec.typed import plain_numbers

logger = logging.getLogger(__name__)


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
    ) -> None:
        """What is None cannot draft. Raises InvalidOption for layers without heads.

        `turn_end`: how answers end beside the model's own end token.
        """
        self.tokenizer = tokenizer
        self.label = label
        self.options = options
        self.turn_end = turn_end
        self.runtime = Runtime(backbone, heads, draft_model)
        self._disabled = False
        self._grammars = Grammars(tokenizer, backbone.vocab_size)
        if heads is not None:
            heads.layers_in_use(options)

    def __repr__(self) -> str:
        """The model, how it runs, and what drafts."""
        drafter = self.options.drafter if self.options.speculate else "none"
        model = self.backbone
        return (
            f"<Speculator of {self.label}: {model.num_layers} layers in {model.dtype} on "
            f"{model.device}, executor {model.executor_name}, drafter {drafter}>"
        )

    @property
    def backbone(self) -> Backbone:
        """The model, cut open."""
        return self.runtime.backbone

    @property
    def heads(self) -> ExitHeads | None:
        """Its exit heads, if it has any."""
        return self.runtime.heads

    @property
    def draft_model(self) -> Backbone | None:
        """A second model that drafts, if there is one."""
        return self.runtime.draft_model

    @property
    def model(self) -> PreTrainedModel:
        """The wrapped model, as it was."""
        return self.backbone.model

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """One answer to one prompt. For batches see `generate_batch`."""
        return self.stream(prompt, **options).drain()

    def generate_batch(
        self, prompts: Prompt | Sequence[Prompt], **options: Unpack[GenerateOptions]
    ) -> list[Generation]:
        """Answers to a list of prompts, or to all rows of left-padded ids [B, P], in their order.

        They are written together, and each is what it is alone: answer i draws with the `seed`
        plus i. Rows of ids may have several answers each, `num_return_sequences`.
        """
        if not _are_many(prompts):
            return self._drained(self.call(prompts, options))
        found: dict[int, Generation] = {}
        for number, answer in self.generate_each(prompts, **options):
            if isinstance(answer, SelfspecError):
                raise type(answer)(f"prompt {number}: {answer}")
            found[number] = answer
        return [found[number] for number in sorted(found)]

    def generate_each(
        self,
        prompts: Iterable[Prompt],
        *,
        most: int = MOST_TEXTS,
        kv_memory: int | None = None,
        seeds: Iterable[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[Answered]:
        """Answers to any number of prompts, each with the number of its prompt, when complete.

        What is wrong with a prompt is its answer: an error, no exception. `most` prompts are
        answered at once, as far as `kv_memory` goes (see `Engine`). Each draws with one of `seeds`,
        or with the `seed` plus its number.
        """
        check_many(prompts, seeds)
        self._sorted(options)
        engine = self.engine(most=most, kv_memory=kv_memory)
        return each(engine, self.call, prompts, options, ahead=most, seeds=seeds)

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """The same answer as `generate`, piece by piece."""
        call = self.call(prompt, options)
        return call.stream(self.engine().add(call.request.only(), call.speculation))

    def engine(
        self,
        *,
        most: int = MOST_TEXTS,
        patience: float | None = None,
        kv_memory: int | None = None,
    ) -> Engine:
        """For many texts at once, which join and leave between rounds; keywords as `Engine` has."""
        return Engine(self.runtime, most=most, patience=patience, kv_memory=kv_memory)

    def session(self) -> Session:
        """A conversation that keeps its keys and values between turns."""
        return Session(self.runtime, self.call)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """While open, plain decoding on the same runtime."""
        before, self._disabled = self._disabled, True
        try:
            yield
        finally:
            self._disabled = before

    def hf(self, *, strings: str | list[str] | None = None, **speculation: Any) -> Loop:
        """A `custom_generate` for Hugging Face's own `model.generate`.

        Give stop `strings` here: `generate` refuses its own beside a callable. `speculation`
        overrides this speculator's options.
        """
        check_drafting(speculation)
        options = self.options.updated(speculation)
        ends_at = stop_strings(self.tokenizer, strings) if strings else None
        allowed = partial(self._allowed, options)
        return Loop(self.backbone, self.tokenizer, allowed, self._drained, ends_at)

    def call(self, prompt: Prompt, options: GenerateOptions) -> Call:
        """One call's keywords, sorted: for Hugging Face, for speculation, and who listens."""
        speculation, rest = self._sorted(options)
        streamer = rest.pop("streamer", None)
        raw = rest.pop("raw", False)
        ids = encode(self.tokenizer, prompt, raw=raw)
        end = NO_END if raw else self.turn_end
        rest |= end.options(rest, self.model)
        grammar = structure.wanted({name: rest.pop(name, None) for name in structure.KEYWORDS})
        rest = penalised(with_choice(rest), ids.shape[1])
        request = prepare(self.backbone, self.tokenizer, ids.to(self.backbone.device), rest)
        if grammar is not None:
            request = request.under(self._grammars.mask(grammar, request))
        return Call(request, self._allowed(speculation), self.tokenizer, streamer, end=end.text)

    def _sorted(self, options: GenerateOptions) -> tuple[SpeculationOptions, dict[str, Any]]:
        """Ours, and the other keywords. Raises InvalidOption."""
        check_options(options, self.backbone.vocab_size)
        rest = plain_numbers(options)
        return self.options.updated({k: rest.pop(k) for k in OPTION_NAMES if k in rest}), rest

    def read_grammar(self, options: GenerateOptions) -> None:
        """Read the grammar of a call ahead of it, in any thread: a large one takes seconds.

        Raises InvalidOption for one that is wrong.
        """
        grammar = structure.wanted(options)
        if grammar is not None:
            ends: Any = self.model.generation_config.eos_token_id
            listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
            self._grammars.read(grammar, listed)

    def _allowed(self, options: SpeculationOptions) -> SpeculationOptions:
        return replace(options, speculate=False) if self._disabled else options

    def _drained(self, call: Call) -> list[Generation]:
        """The answers to all rows of a call, which are written together."""
        engine = self.engine()
        rows = range(len(call.request.pads))
        if call.streamer is not None and len(rows) > 1:
            raise InvalidOption(f"a streamer shows one text, these are {len(rows)}. Leave it out")
        running = [engine.add(call.request.row(row), call.speculation) for row in rows]
        streams = [call.stream(one) for one in running]
        try:
            return [stream.drain() for stream in streams]
        finally:
            for stream in streams:
                stream.close()


def load(
    model: str | Path | None = None,
    *,
    heads: str | Path | ExitHeads | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    attn_implementation: str = "sdpa",
    executor: str = "auto",
    draft_model: str | Path | None = None,
    chat_template: str | Path | None = None,
    **options: Any,
) -> Speculator:
    """A Speculator for a hub id, a local folder, a `.gguf` file, or (None) the default model.

    `heads`: a folder, a name, a hub id, "logit-lens" or "none"; None takes those that were fitted
    or pulled last for a model of these weights, or come with selfspec, unless a draft model takes
    their place; without any, text already seen drafts. The default model keeps its own.
    `dtype`: None is bfloat16, and for a GGUF file float32 where products in bfloat16 are slow.
    `executor`: generic runs the model's own layers, fused compiled ones on a CPU, cuda-graph the
    model's own as CUDA graphs, auto the best of these that can be had. `draft_model`: a smaller one
    with the same tokens, which drafts. `chat_template`: a name as vicuna (`chat_template.NAMES`), a
    Jinja file or its text, in place of the heads' and the model's own. `options` are those of
    SpeculationOptions, as objects, text or mappings. Raises ModelNotFound, UnsupportedModel,
    HeadsNotFound, InvalidHeads, HeadsMismatch, DraftModelMismatch, InvalidOption.
    """
    check_loading(model, draft_model, heads, attn_implementation, device)
    check(options, beside=LOADING)
    start_renderer()
    template = None if chat_template is None else templates.read(chat_template)
    read = partial(
        hub.load_model,
        dtype=dtype,
        device=device,
        attn_implementation=attn_implementation,
        blocks=executor in hub.FROM_BLOCKS,
    )
    loaded, tokenizer, files = read(model)
    second = None
    if draft_model is not None:
        second, other, draft_files = read(draft_model)
        check_same_tokens(tokenizer, other, draft_files.label)
    # asked for here, where nobody can have changed the model since it was read
    found = partial(fingerprint.of_loaded, loaded, files.stamps)
    if heads is None and second is None:
        # float16 rounds the default model to other numbers than those that its heads were fitted to
        own = files.is_default and loaded.dtype != torch.float16
        heads = hub.DEFAULT_HEADS if own else heads_for(loaded, found)
    named = heads not in (None, hub.NO_HEADS) and not isinstance(heads, ExitHeads)
    known = found() if named else None
    backbone = Backbone(loaded, executor=executor, fingerprint=known)
    drafting = None if second is None else Backbone(second, executor=executor)
    return _speculator(backbone, tokenizer, heads, files.label, drafting, template, options)


def wrap(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    heads: str | Path | ExitHeads | None = None,
    label: str | None = None,
    executor: str = "auto",
    draft_model: PreTrainedModel | None = None,
    chat_template: str | Path | None = None,
    **options: Any,
) -> Speculator:
    """A Speculator around a model that is already loaded; the model itself stays as it is.

    So does the tokenizer, whatever the `chat_template`; that and `heads` are as `load` has them.
    Where there are heads for a model of these sizes, all weights are hashed to tell whether they
    fit: 0.4 s for the default model, longer for larger ones; heads="none" saves it.

    A `draft_model` drafts unless `options` say otherwise; that both mean the same by a token id is
    up to the caller. Raises UnsupportedModel, HeadsNotFound, InvalidHeads, HeadsMismatch,
    DraftModelMismatch, InvalidOption.
    """
    check_wrapping(tokenizer, heads, draft_model)
    check(options, beside=WRAPPING)
    template = None if chat_template is None else templates.read(chat_template)
    backbone = Backbone(model, executor=executor)
    drafting = None if draft_model is None else Backbone(draft_model, executor=executor)
    if heads is None and drafting is None:
        heads = heads_for(model, lambda: backbone.fingerprint)
    label = label or model.config.name_or_path or type(model).__name__
    return _speculator(backbone, tokenizer, heads, label, drafting, template, options)


def _speculator(
    backbone: Backbone,
    tokenizer: PreTrainedTokenizerBase | None,
    heads: str | Path | ExitHeads | None,
    label: str,
    second: Backbone | None,
    template: str | None,
    options: dict[str, Any],
) -> Speculator:
    """Heads, their settings, and a draft model beside a model that is cut open."""
    fitted = find_heads(backbone, heads, label)
    tokenizer, turn_end = templates.chosen(tokenizer, template, fitted, label)
    base = SpeculationOptions()
    if fitted is None and second is None:
        base = without_heads(base, backbone, label, options, wanted=heads != hub.NO_HEADS)
    elif fitted is not None:
        pack(fitted)
        base = base.updated(fitted.config.defaults).updated(tuned.read(backbone, fitted))
    if second is not None:
        check_same_size(backbone, second, tokenizer)
        base = base.updated({"drafter": "draft-model"})
    chosen = base.updated(options)
    return Speculator(backbone, tokenizer, fitted, label, chosen, second, turn_end)


def _are_many(prompts: Prompt | Sequence[Prompt]) -> TypeIs[Sequence[Prompt]]:
    """Whether these are prompts, and not one: messages, or token ids."""
    if not isinstance(prompts, list | tuple) or not prompts:
        return False
    return isinstance(prompts[0], str | list | tuple | Tensor)
