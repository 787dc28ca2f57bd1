"""Decode one prompt as `generate` does, then compute every exit layer's prediction of each token.

The runtime itself decodes. Hidden states come from one more pass over the finished text, with the
same code as in training, so no hook is set on the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from selfspec.api.speculator import Speculator
from selfspec.api.text import Prompt, TokenTexts
from selfspec.api.tuned import heads_hash
from selfspec.config import GenerateOptions, SpeculationOptions
from selfspec.decoding.drafters.ngram import NgramIndex
from selfspec.decoding.stats import EXIT, MODEL, NGRAM, Round
from selfspec.errors import HeadsNotFound
from selfspec.heads.exit_heads import logit_lens
from selfspec.heads.heads import ExitHead, ExitJudge, each_layer, top_probability, widened
from selfspec.model.backbone import Backbone
from selfspec.options import Costs, Exit
from selfspec.training.features import LOGIT_ROWS, Batch, FeatureSpec, features
from selfspec.visualise.layers import LayerSays, LayerTrace, Place, TraceInfo

TOP = 5  # guesses to keep per layer

_DIGITS = 6
"""Decimals of probabilities and divergences: a file keeps exactly what the pictures show."""


def inspect(
    speculator: Speculator,
    prompt: Prompt,
    *,
    all_layers: bool = True,
    **options: Unpack[GenerateOptions],
) -> LayerTrace:
    """Make the answer of `speculator.generate(prompt, **options)`, with each layer's predictions.

    Layers with heads are read by their heads, and with `all_layers` all others by the logit lens.
    Raises HeadsNotFound if there are no layers to read, and what `generate` raises.
    """
    lenses, backbone = _lenses(speculator, all_layers=all_layers), speculator.backbone
    stream = speculator.stream(prompt, **options)
    prompt_ids = stream.request.input_ids[0, stream.request.pads[0] :]
    settings = _resolve_options(speculator, stream.request.speculation)
    lossless = stream.drain().stats.lossless
    taus = each_layer(settings.exit.thresholds, settings.exit.layers or ())
    # thresholds are tuned for their own layers: others have the built-in one
    (built_in,) = Exit().thresholds
    thresholds = {layer: taus.get(layer, built_in) for layer in lenses}
    temperatures = {layer: lens.temperature for layer, lens in lenses.items()}
    strength, texts = settings.exit.anneal_strength, TokenTexts(speculator.tokenizer)
    judge = ExitJudge(backbone.num_layers, thresholds, strength, temperatures)
    reader = Reader(lenses, judge, texts, tuple(getattr(speculator.heads, "layers", ())))
    records = [*provenance(prompt_ids.tolist(), stream.rounds, settings.ngram.size)]
    return LayerTrace(
        info=TraceInfo(
            base_model=speculator.label,
            base=backbone.fingerprint,
            heads="" if speculator.heads is None else heads_hash(speculator.heads),
            dtype=str(backbone.dtype).removeprefix("torch."),
            executor=backbone.executor_name,
            num_layers=backbone.num_layers,
            exit_layers=tuple(lenses),
            head_kinds=tuple(lens.kind for lens in lenses.values()),
            thresholds=tuple(thresholds.values()),
            options=settings,
            lossless=lossless,
            prompt=_prompt_text(prompt, prompt_ids, texts),
            prompt_texts=tuple(texts.pieces(prompt_ids.tolist())),
        ),
        places=tuple(_places(backbone, reader, prompt_ids, records)),
        rounds=tuple(stream.rounds),
        draft_texts=tuple(tuple(map(texts.of, entry.draft_tokens)) for entry in stream.rounds),
    )


def _lenses(speculator: Speculator, *, all_layers: bool) -> dict[int, Lens]:
    """Lenses by increasing layer: fitted heads, and with `all_layers` logit lenses elsewhere."""
    heads, backbone = speculator.heads, speculator.backbone
    if heads is None and not all_layers:
        raise HeadsNotFound("no exit heads to look through. Give --heads, or drop --no-all-layers")
    sets = [] if heads is None else [heads]
    if all_layers:
        lens = logit_lens(backbone.unembedding, backbone.num_layers, speculator.label)
        sets.insert(0, lens)
    lenses = {
        layer: Lens(one[layer], one.config.head_type, one.config.temperatures.get(str(layer), 1.0))
        for one in sets
        for layer in one.config.exit_layers
    }
    return dict(sorted(lenses.items()))


def _resolve_options(speculator: Speculator, options: SpeculationOptions) -> SpeculationOptions:
    """The options that were used with this model and heads, or would be used if heads drafted."""
    heads = speculator.heads
    drafter = options.drafter if options.speculate else "none"
    if drafter == "exit" and heads is None:
        drafter = "none"  # as in `generate`
    exits = options.exit
    if heads is not None:
        by_layer = each_layer(exits.thresholds, exits.layers or heads.config.exit_layers)
        layers = heads.layers_in_use(options)
        taus = tuple(by_layer[layer] for layer in layers)
        exits = replace(exits, layers=layers, threshold=taus, max_depth=None)
    if not speculator.runtime.runs_trees(replace(options, drafter="exit")):
        exits = replace(exits, guesses=1)
    cost = speculator.runtime.draft_cost(options)
    costs = Costs(row=cost.rows, head=cost.head, token=cost.token)
    return replace(options, speculate=True, drafter=drafter, exit=exits, costs=costs)


@torch.no_grad()
def _places(
    backbone: Backbone, reader: Reader, prompt: Tensor, pairs: Sequence[tuple[dict[str, Any], int]]
) -> Iterator[Place]:
    """The tokens of `pairs` after `prompt` [P], with predictions from one pass over both."""
    answer = [fields["token"] for fields, _ in pairs]
    ids = torch.cat([prompt, prompt.new_tensor(answer)])[None]
    predicts = torch.zeros_like(ids, dtype=torch.bool)
    predicts[:, len(prompt) - 1 : -1] = True
    lenses, last = reader.lenses, backbone.num_layers
    deep = any(lens.head.reads_deep for lens in lenses.values())
    spec = FeatureSpec((*lenses, last), deep=deep, states=reader.states)
    states = features(backbone, spec, Batch(ids, predicts, predicts))
    exits, counts = [fields["exit_layer"] for fields, _ in pairs], [drafts for _, drafts in pairs]
    feats = chained_features(lenses, states.hidden, states.deep, exits, counts)
    texts = iter(reader.texts.pieces(answer))
    for rows in torch.arange(len(answer)).split(LOGIT_ROWS):
        target_logits = backbone.logits(states.hidden[last][rows])
        final = reader.likeliest(target_logits.log_softmax(-1))
        tokens = states.following[rows]
        preds = [reader.read(layer, feats[layer][rows], target_logits, tokens) for layer in lenses]
        for index, best, layers in zip(rows.tolist(), final, zip(*preds, strict=True), strict=True):
            yield Place(
                index=index,
                text=next(texts),
                **pairs[index][0],
                **{f"final_{name}": values for name, values in best.items()},
                layers=layers,
            )


def provenance(
    prompt: Sequence[int], rounds: Sequence[Round], size: int
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield how each token of the answer was made, as fields of its Place.

    Each comes with the number of exit heads' drafts directly before it in its round. `size`: the
    longest n-gram of prompt lookup.
    """
    index = NgramIndex(size)
    index.extend(prompt)
    for number, entry in enumerate(rounds):
        (_, begin), drafts = index.find(), 0
        period = len(index.text) - begin
        for offset, (token, giver) in enumerate(zip(entry.tokens, entry.givers, strict=True)):
            position = begin + offset % (period or 1)  # a copy may overlap itself
            copied = giver.source == NGRAM and period and index.text[position] == token
            layer = giver.layer if giver.source == EXIT else None
            kind = "bonus" if giver.source == MODEL else "accepted"
            place = {"token": token, "kind": "prefill" if entry.prefill else kind, "round": number}
            yield place | {"exit_layer": layer, "copied_from": position if copied else None}, drafts
            drafts = 0 if layer is None else drafts + 1
        index.extend(entry.tokens)


def _prompt_text(prompt: Prompt, prompt_ids: Tensor, texts: TokenTexts) -> str:
    """The prompt for people: its text, its last message, or the text of all its tokens."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and isinstance(prompt[-1], dict):
        return prompt[-1]["content"]
    return "".join(texts.pieces(prompt_ids.tolist()))


# --- predictions from hidden states


class Lens(NamedTuple):
    """The head that reads one layer."""

    head: ExitHead
    kind: str  # the name of its type in HEAD_TYPES
    temperature: float  # calibrated; the judge also anneals it


class Reader(NamedTuple):
    """Reads predictions of several tokens from features [R, d] or target logits [R, V]."""

    lenses: Mapping[int, Lens]
    judge: ExitJudge  # the decode's own, for all layers of `lenses`
    texts: TokenTexts
    states: tuple[int, ...] = ()  # layers of the previous token that heads read

    def read(
        self, layer: int, features: Tensor, target_logits: Tensor, tokens: Tensor
    ) -> list[LayerSays]:
        """Predictions of `layer` at places with final `tokens` [R] and target logits [R, V]."""
        head, _, temperature = self.lenses[layer]
        logits = head.unembed(features)  # [R, V_draft]
        log_probs = (logits / temperature).log_softmax(-1)
        kept_logits = target_logits if head.draft_ids is None else target_logits[:, head.draft_ids]
        target = kept_logits.log_softmax(-1)  # over the draft vocabulary, as the head's
        columns = (
            self.likeliest(log_probs, head),
            top_probability(logits, self.judge.temperatures[layer]).tolist(),
            ranks(head.to_target_logits(logits), tokens).tolist(),
            (target.exp() * (target - log_probs)).sum(-1).tolist(),
        )
        return [
            LayerSays(
                layer=layer,
                **best,
                confidence=round(confidence, _DIGITS),
                rank=rank,
                divergence=round(divergence, _DIGITS),
            )
            for best, confidence, rank, divergence in zip(*columns, strict=True)
        ]

    def likeliest(self, log_probs: Tensor, head: ExitHead | None = None) -> list[dict[str, Any]]:
        """Top tokens of distributions, [R, V_draft] of `head` or [R, V] of a model, by name."""
        best = log_probs.argmax(-1, keepdim=True)
        # topk orders ties arbitrarily: put the token first that would be drafted
        marked = log_probs.scatter(-1, best, torch.inf)
        columns = marked.topk(min(TOP, log_probs.shape[-1]), dim=-1).indices
        ids = (columns if head is None else head.to_target_ids(columns)).tolist()
        probs = log_probs.gather(-1, columns).exp().tolist()
        return [
            {
                "top_tokens": tuple(row),
                "top_texts": tuple(map(self.texts.of, row)),
                "top_probs": tuple(round(p, _DIGITS) for p in shares),
            }
            for row, shares in zip(ids, probs, strict=True)
        ]


def ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """Ranks of `tokens` [R] in logits [R, V], from 1; 0 if the logit is -inf. Ties share a rank."""
    token_logits = logits.gather(-1, tokens[:, None])
    better: Tensor = (logits > token_logits).sum(-1)
    return torch.where(token_logits[:, 0].isneginf(), 0, better + 1)


def chained_features(
    lenses: Mapping[int, Lens],
    hidden: Mapping[int, Tensor],
    deep: Tensor | None,
    exits: Sequence[Any],
    counts: Sequence[int],
) -> dict[int, Tensor]:
    """Features [N, d] of each layer, read from `hidden` [N, d] by layer and `deep`.

    `counts[n]`: drafts of exit heads directly before place n in its round. If there are any, heads
    read no deep state, as in decoding, but the features of the last draft, of `exits[n - 1]`.
    """
    feats = {layer: torch.empty_like(hidden[layer]) for layer in lenses}
    deep_states = None if deep is None else deep.clone()
    for drafts in sorted(set(counts)):
        rows = torch.tensor([n for n, count in enumerate(counts) if count == drafts])
        if deep_states is not None and drafts > 0:
            for row in rows.tolist():
                feature = feats[exits[row - 1]][row - 1]
                deep_states[row] = widened(feature, feature, deep_states.shape[-1])
        for layer, lens in lenses.items():
            deep_rows = None if deep_states is None else deep_states[rows]
            feats[layer][rows] = lens.head.features(hidden[layer][rows], deep_rows)
    return feats
