"""Decode one prompt as `generate` does, then ask every exit layer what it says of each token.

A Speculator and a prompt come in, a LayerTrace goes out. The decode is the runtime's own; hidden
states come from one more pass over the finished text, run by the same pieces as in training, so
there is no hook on the model. Called by `selfspec trace`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from selfspec.api.speculator import Speculator
from selfspec.api.text import Prompt
from selfspec.api.tuned import heads_hash
from selfspec.config import GenerateOptions, SpeculationOptions
from selfspec.decoding.drafters import Sources
from selfspec.decoding.prices import Unmeasured
from selfspec.decoding.stats import Round
from selfspec.errors import HeadsNotFound
from selfspec.eval.options import RecordOptions
from selfspec.eval.record import Record, Recorder
from selfspec.heads.exit_heads import logit_lens
from selfspec.heads.judge import ExitJudge, spread
from selfspec.model.backbone import Backbone
from selfspec.options import Exit
from selfspec.training.features import FeatureSpec, features
from selfspec.training.text import Batch
from selfspec.visualise.layers import Kind, LayerTrace, Place, TraceInfo, TraceSettings
from selfspec.visualise.lenses import Lens, Reader, chained
from selfspec.visualise.origins import origins
from selfspec.visualise.texts import TokenTexts

_ROWS = 128
"""Places whose logits exist at a time."""


def inspect(
    speculator: Speculator,
    prompt: Prompt,
    *,
    all_layers: bool = True,
    **options: Unpack[GenerateOptions],
) -> LayerTrace:
    """The same answer as `speculator.generate(prompt, **options)`, with what each layer made of it.

    Layers are those that have heads; without `all_layers` no others, which the logit lens reads.
    Raises HeadsNotFound where that leaves none, and what `generate` raises.
    """
    lenses = _lenses(speculator, all_layers=all_layers)
    call = speculator.call(prompt, options)
    request, speculation = call.request.only(), call.speculation
    stream = call.stream(speculator.engine().add(request, speculation))
    asked = request.ids[0, request.pad :]
    taus = _taus(speculator, speculation)
    settings = _settings(speculator, speculation, taus, lossless=stream.drain().stats.lossless)
    thresholds = _thresholds(taus, lenses)
    judge = ExitJudge(
        speculator.backbone.num_layers,
        thresholds,
        settings.anneal_strength,
        {layer: lens.temperature for layer, lens in lenses.items()},
    )
    texts = TokenTexts(speculator.tokenizer)
    seen_at = origins(asked.tolist(), stream.rounds, speculation.ngram.size)
    steps = _steps(stream.rounds, texts, seen_at)
    return LayerTrace(
        info=TraceInfo(
            base_model=speculator.label,
            base=speculator.backbone.fingerprint,
            heads="" if speculator.heads is None else heads_hash(speculator.heads),
            dtype=str(speculator.backbone.dtype).removeprefix("torch."),
            executor=speculator.backbone.executor_name,
            num_layers=speculator.backbone.num_layers,
            exit_layers=tuple(lenses),
            head_kinds=tuple(lens.kind for lens in lenses.values()),
            thresholds=tuple(thresholds.values()),
            settings=settings,
            prompt=_words(prompt, asked, texts),
            prompt_texts=tuple(texts.pieces(asked.tolist())),
        ),
        places=tuple(
            _places(speculator.backbone, lenses, Reader(lenses, judge, texts), asked, steps)
        ),
        rounds=tuple(stream.rounds),
        draft_texts=tuple(tuple(map(texts.of, entry.draft_tokens)) for entry in stream.rounds),
    )


def branches(
    speculator: Speculator, prompt: Prompt, max_new_tokens: int, used: TraceSettings
) -> Record:
    """What other settings would have drafted on this prompt, for replays; greedy.

    The alpha `used` is among them, and W_max up to twice the usual. Raises InvalidOption where
    greedy decoding is more than the most likely token.
    """
    usual = RecordOptions()
    alphas = {*usual.anneal_strengths, used.anneal_strength}
    width = max(usual.max_draft_tokens, min(used.max_draft_tokens, 2 * usual.max_draft_tokens))
    options = replace(
        usual,
        max_new_tokens=max_new_tokens,
        max_draft_tokens=width,
        anneal_strengths=tuple(sorted(alphas)),
    )
    recorder = Recorder(speculator, options)
    recorder.prompt(prompt, "prompt", "prompts", 1)
    return recorder.record()


class _Step(NamedTuple):
    """How one token came about."""

    token: int
    text: str
    kind: Kind
    round: int
    exit_layer: int | None
    copied_from: int | None
    behind: int
    """How many drafts of exit heads stand before it in its round."""


def _lenses(speculator: Speculator, *, all_layers: bool) -> dict[int, Lens]:
    """By layer, rising: fitted heads, and logit lenses where there are none and all are asked."""
    heads, backbone = speculator.heads, speculator.backbone
    if heads is None and not all_layers:
        raise HeadsNotFound("no exit heads to look through. Give --heads, or drop --no-all-layers")
    found: dict[int, Lens] = {}
    if all_layers:
        untrained = logit_lens(backbone.unembedding, backbone.num_layers, speculator.label)
        for layer in untrained.config.exit_layers:
            found[layer] = Lens(untrained[layer], untrained.config.head_type, 1.0)
    if heads is not None:
        for layer in heads.config.exit_layers:
            temperature = heads.config.temperatures.get(str(layer), 1.0)
            found[layer] = Lens(heads[layer], heads.config.head_type, temperature)
    return dict(sorted(found.items()))


def _taus(speculator: Speculator, options: SpeculationOptions) -> dict[int, float]:
    """By exit layer in use, or that would be if heads drafted."""
    heads = speculator.heads
    if heads is None:
        return {}
    by_layer = spread(options.exit.thresholds, options.exit.layers or heads.config.exit_layers)
    return {layer: by_layer[layer] for layer in heads.layers_in_use(options)}


def _settings(
    speculator: Speculator,
    options: SpeculationOptions,
    taus: Mapping[int, float],
    *,
    lossless: bool,
) -> TraceSettings:
    heads = speculator.heads
    drafter = options.drafter if options.speculate else "none"
    if drafter == "exit" and heads is None:
        drafter = "none"  # as `generate` has it
    thresholds = taus if "exit" in drafter.split("+") else {}
    # where heads drafted nothing: as they would have
    trees = Sources(speculator.backbone, heads).runs_trees(replace(options, drafter="exit"))
    cost = Unmeasured.of(speculator.backbone).unless(options.prices)
    return TraceSettings.of(
        options, cost, thresholds, drafter=drafter, trees=trees, lossless=lossless
    )


def _thresholds(taus: Mapping[int, float], lenses: Mapping[int, Lens]) -> dict[int, float]:
    """By layer. Tuned to a layer, a threshold means nothing elsewhere: the built-in one."""
    (built_in,) = Exit().thresholds
    return {layer: taus.get(layer, built_in) for layer in lenses}


def _steps(
    rounds: Sequence[Round], texts: TokenTexts, seen_at: Sequence[int | None]
) -> list[_Step]:
    """The tokens of all rounds, in order; `seen_at`: where each was copied from."""
    pieces = iter(texts.pieces([token for entry in rounds for token in entry.tokens]))
    steps: list[_Step] = []
    for number, entry in enumerate(rounds):
        behind = 0  # drafts of heads that lead here without a break
        for index, token in enumerate(entry.tokens):
            draft = entry.kept[index] if index < entry.accepted else None
            kind: Kind = "prefill" if entry.prefill else "bonus" if draft is None else "accepted"
            left = None
            if draft is not None and entry.sources[draft] == "exit":
                left = entry.exit_layers[draft]
            copied = seen_at[len(steps)]
            steps.append(_Step(token, next(pieces), kind, number, left, copied, behind))
            behind = 0 if left is None else behind + 1
    return steps


@torch.no_grad()
def _places(
    backbone: Backbone,
    lenses: Mapping[int, Lens],
    reader: Reader,
    asked: Tensor,
    steps: Sequence[_Step],
) -> list[Place]:
    """The answer `steps` behind the prompt `asked` [P], in one pass over both."""
    ids = torch.cat([asked, asked.new_tensor([step.token for step in steps])])[None]
    predicts = torch.zeros_like(ids, dtype=torch.bool)
    predicts[:, len(asked) - 1 : -1] = True
    deep = any(lens.head.reads_deep for lens in lenses.values())
    spec = FeatureSpec((*lenses, backbone.num_layers), deep=deep)
    looked = features(backbone, spec, Batch(ids, predicts, predicts))
    exits, behind = [step.exit_layer for step in steps], [step.behind for step in steps]
    made = chained(lenses, looked.hidden, looked.deep, exits, behind)
    places: list[Place] = []
    for rows in torch.arange(len(steps)).split(_ROWS):
        target_logits = backbone.logits(looked.hidden[backbone.num_layers][rows])
        final = reader.likeliest(target_logits.log_softmax(-1))
        tokens = looked.following[rows]
        said = [reader.said(layer, made[layer][rows], target_logits, tokens) for layer in lenses]
        for best, layers in zip(final, zip(*said, strict=True), strict=True):
            step = steps[len(places)]
            places.append(
                Place(
                    index=len(places),
                    token=step.token,
                    text=step.text,
                    kind=step.kind,
                    round=step.round,
                    exit_layer=step.exit_layer,
                    copied_from=step.copied_from,
                    final_top_tokens=best.tokens,
                    final_top_texts=best.texts,
                    final_top_probs=best.probs,
                    layers=layers,
                )
            )
    return places


def _words(prompt: Prompt, asked: Tensor, texts: TokenTexts) -> str:
    """What was asked, for people: the text, the last message, or all tokens."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and isinstance(prompt[-1], dict):
        return prompt[-1]["content"]
    return "".join(texts.pieces(asked.tolist()))
