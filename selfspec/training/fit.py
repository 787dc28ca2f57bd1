"""Fits exit heads to a frozen model: takes features, returns heads and their metrics.

All exit layers learn from the same features, each head on its own loss. Heads are float32 during
the fit; their copy in the model's dtype is measured and saved, each layer's from its best epoch.
Called by `selfspec fit` and `adapt`.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, distributed, nn
from torch.nn.utils.rnn import pad_sequence

from selfspec import files
from selfspec.decoding.stats import Stopwatch
from selfspec.errors import InvalidData, InvalidOption, SelfspecError, record_of, require_same
from selfspec.files import parse_json
from selfspec.heads.attending import AttendingConfig, AttendingHeads, attention, layer_like
from selfspec.heads.exit_heads import (
    ExitHeads,
    HeadsConfig,
    check_exit_layers,
    possible_exit_layers,
)
from selfspec.heads.folder import EAGLE3, MEDUSA
from selfspec.heads.heads import ExitHead
from selfspec.hub.models import fast_bfloat16
from selfspec.model.backbone import Backbone
from selfspec.options import FITTED, MEDUSA_FITTED
from selfspec.training.features import CacheSource, Features, FeatureSpec, Selection, process_state
from selfspec.training.options import CacheOptions, FitOptions, explain_errors, options_dict

Show = Callable[[int, int, str], None]  # called with steps done, steps in all, and words


@dataclass(frozen=True, kw_only=True)
class Job:
    """Inputs and options of a fit."""

    backbone: Backbone
    base_model: str  # the model's name, for the record
    train: Selection
    validation: Selection  # batches with targets
    options: FitOptions
    start: ExitHeads | None = None  # heads to continue from, which fix type and sizes
    special_ids: Collection[int] = ()  # always in the draft vocabulary
    chat_template: str | None = None  # the text's; None: the model's own
    data: str = ""  # name of the text, for the record
    held_out: str = "a 20th of the data"  # name of the text that is measured on
    checkpoint: Path | None = None  # an unfinished fit's state; None: it cannot be resumed


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Results of a fit."""

    heads: ExitHeads  # in the model's dtype, ready to draft or to save: each layer's best epoch's
    metrics: dict[str, Any]  # for `metrics.json`
    epochs: list[dict[str, Any]]  # for `metrics.jsonl`: one entry per epoch and layer


class Agreement(NamedTuple):
    """Agreement of one exit layer with the model; shares are in [0, 1]."""

    positions: int  # held-out answer positions; none if eagle3 heads see second tokens alone
    agreement: float  # share where the head's top token is the model's
    agreement_second: float | None
    """The same share for the second draft of a round, after a right first one; None for heads that
    give the first draft only."""


@dataclass
class _Course:
    """Progress of a fit: everything that a checkpoint holds except tensors."""

    sums: dict[str, float]  # loss of this epoch by layer, times positions
    step: int = 0  # steps done
    schedule: float = 0.0  # steps of the learning rate's schedule; a step may count for more
    positions: int = 0  # positions of this epoch so far
    entries: list[dict[str, Any]] = field(default_factory=list)  # one per closed epoch and layer

    def best_entry(self, layer: int) -> dict[str, Any]:
        entries = (entry for entry in self.entries if entry["layer"] == layer)
        return max(entries, key=lambda entry: float(entry["agreement"]))


def fit(
    job: Job,
    progress: Show = lambda *_: None,
    watch: Stopwatch | None = None,
    left_s: Callable[[], float] = lambda: math.inf,
) -> Fitted:
    """Fit heads for all exit layers at once; continues a killed fit of the same job.

    `left_s`: gives the seconds left, for a fit in one process. If they are too few for all batches,
    the learning rate falls faster and the fit ends with it, before it has seen them all. Raises
    InvalidOption for another job's checkpoint or layers, InvalidData for an empty text.
    """
    return Trainer(job, watch or Stopwatch(), left_s).run(progress)


def feature_spec(backbone: Backbone, options: FitOptions, *, measured: bool) -> FeatureSpec:
    """Features that a fit needs, or that are `measured`, for most heads at answers alone."""
    attends, states = options.head_type == EAGLE3, state_layers(backbone, options)
    return FeatureSpec(
        (*exit_layers(backbone, options), *(states if attends else ())),
        options.head_type in ("deep-fused", MEDUSA),
        top_k=1 if measured or options.ce_share == 1.0 else CacheOptions.top_k,
        everywhere=attends or (not measured and options.answer_share != 1.0),
        states=() if attends else states,
    )


def continued_options(options: FitOptions, start: ExitHeads) -> FitOptions:
    """The options to continue the fit of `start` with. Raises InvalidOption if that cannot be."""
    if isinstance(start, AttendingHeads) and "embed_tokens" in start.parts:
        raise InvalidOption(
            f"{start.folder} has embeddings of its own, but heads are fitted to the model's. Leave "
            "out --start-from"
        )
    config, steps = start.config, options.draft_steps
    if config.num_heads not in (None, steps or config.num_heads):
        raise InvalidOption(f"draft_steps is {steps}, but start_from has {config.num_heads} heads")
    if None not in (options.state_layers, config.state_layers):
        raise InvalidOption("state_layers with start_from: the heads have their own. Drop one")
    return replace(
        options,
        exit_layers=config.exit_layers,
        head_type=config.head_type,
        inner_size=config.inner_size,
        draft_vocab_size=config.draft_vocab_size,
        draft_steps=steps or config.num_heads,
        state_layers=options.state_layers or config.state_layers or (),
    )


def state_layers(backbone: Backbone, options: FitOptions) -> tuple[int, ...]:
    """Layers whose states heads read. Raises InvalidOption for layers that the model lacks."""
    count, layers, kind = backbone.num_layers, options.state_layers, options.head_type
    if layers is None:
        candidates = [2, count // 2, count - 3] if kind == EAGLE3 else []
        if kind == "deep-fused" and exit_layers(backbone, options) == (0,) and count > 1:
            candidates = [round(0.7 * count)]  # where heads gain most: training/README.md
        layers = tuple(sorted({min(max(1, layer), count - 1) for layer in candidates}))
    if layers or kind == EAGLE3:
        check_exit_layers(layers, range(1, count), "state")
    return layers


def answer_weights(text: Selection, share: float | None) -> tuple[float, float]:
    """Weights of positions that predict an answer's token and of all others, 1 on average."""
    others = text.positions - text.answers
    if share is None or not others or not text.answers:
        return 1.0, 1.0
    return share * text.positions / text.answers, (1.0 - share) * text.positions / others


def exit_layers(backbone: Backbone, options: FitOptions) -> tuple[int, ...]:
    """The given exit layers, or the defaults. Raises InvalidOption for impossible ones."""
    layers, kind, count = options.exit_layers, options.head_type, backbone.num_layers
    if layers is None:
        from_embedding = kind in ("deep-fused", EAGLE3, MEDUSA)
        layers = (0,) if from_embedding else default_exit_layers(count)
    check_exit_layers(layers, (0,) if kind == EAGLE3 else possible_exit_layers(kind, count))
    return layers


def default_exit_layers(num_layers: int) -> tuple[int, ...]:
    """Five, evenly over the first two thirds: later exits save little; fewer in a shallow model."""
    layers = {round(num_layers * k / 7.5) for k in range(1, 6)}
    return tuple(sorted(layer for layer in layers if 1 <= layer < num_layers))


# --- losses on the model's own next token, its distribution, or both, as weights of draft ids


def draft_index(draft_ids: Tensor | None, vocab_size: int) -> Tensor:
    """[V] int64: each token's place in the draft vocabulary, -1 where it has none."""
    if draft_ids is None:
        return torch.arange(vocab_size)
    index = torch.full((vocab_size,), -1, device=draft_ids.device)
    index[draft_ids] = torch.arange(len(draft_ids), device=draft_ids.device)
    return index


def targets(
    features: Features, index: Tensor, ce_share: float, answer_weights: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Draft ids [N, m] int64 and their weights [N, m] float32, at least 0.

    `ce_share` of the weight is on the model's top token, the rest on its likeliest ones. The rest
    is not renormalised: a position whose probability is mostly on other tokens weighs less.
    """
    ids = [features.top_ids[:, :1].long()]
    weights = [torch.full_like(ids[0], ce_share, dtype=torch.float32)]
    if ce_share < 1.0:
        ids.append(features.top_ids.long())
        weights.append((1.0 - ce_share) * features.top_log_probs.float().exp())
    places = index[torch.cat(ids, dim=-1)]
    answer_weight, other_weight = answer_weights
    shares = torch.where(features.answers, answer_weight, other_weight)[:, None]
    return places.clamp_min(0), torch.cat(weights, dim=-1) * (places >= 0) * shares


def cross_entropy(draft_logits: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Logits [N, V_draft] and `targets` [N, m] -> loss summed over positions, nats, float32.

    Against probabilities it is the Kullback-Leibler divergence up to a constant of the target.
    """
    totals = draft_logits.logsumexp(-1)
    picked = draft_logits.gather(-1, ids)
    return (weights.sum(-1) * totals - (weights * picked).sum(-1)).sum()


# --- how often heads agree with the model


def unroll(
    heads: ExitHeads, layer: int, batch: Features, steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield features [N, d] of the first, the second, ... draft, and a mask [N] of valid positions.

    From the second draft on, heads that read the model's state of the token before read their own
    features of it instead, as they will when they draft. Of heads that look ahead, each next one
    reads a state one position earlier. Other heads have the first draft only.
    """
    if isinstance(heads, AttendingHeads):
        yield from _unroll_attending(heads, batch, steps)
        return
    valid = torch.ones_like(batch.continues)
    if heads.looks_ahead and batch.deep is not None:
        states = batch.deep[:, : heads.config.hidden_size]  # a cache may hold more states
        for _, next_head in zip(range(steps), heads.by_layer.values(), strict=False):
            yield cast("ExitHead", next_head).features(states), valid
            states, valid = states.roll(1, dims=0), batch.continues & valid.roll(1)
        return
    head, hidden, deep = heads[layer], batch.hidden[layer], batch.deep
    for _ in range(steps if head.reads_deep else 1):
        features = head.features(hidden, deep)
        yield features, valid
        deep, valid = features.roll(1, dims=0), batch.continues & valid.roll(1)


def _unroll_attending(
    heads: AttendingHeads, batch: Features, steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The same for all texts of a batch at once; rows attend as they will when they draft.

    The row of the s-th draft attends to first rows at least s - 1 places before it, and to the rows
    of the drafts in between (EAGLE-3's training-time test).
    """
    starts = (~batch.continues).nonzero()[:, 0]
    lengths = starts.diff(append=starts.new_tensor([len(batch)])).tolist()

    def padded(rows: Tensor) -> Tensor:
        """[N, ...] -> [B, T, ...], T at least 2."""
        texts = pad_sequence(rows.split(lengths), batch_first=True)
        gap = max(0, 2 - texts.shape[1])
        return nn.functional.pad(texts, (*(0, 0) * (rows.dim() - 1), 0, gap))

    filled = padded(torch.ones_like(batch.continues))
    if "embed_tokens" in heads.parts:  # others' heads may have a table of their own
        embeddings = padded(heads.embed(batch.following))[:, :-1]
    else:
        embeddings = padded(batch.hidden[0])[:, 1:]
    states = torch.cat([batch.hidden[layer] for layer in heads.layers], -1)
    states = heads.fuse(padded(states)[:, :-1])
    count = embeddings.shape[1]
    places = torch.arange(1, count + 1, device=states.device)
    diagonal = torch.eye(count, dtype=torch.bool, device=states.device)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for step in range(steps):
        drafts = [diagonal.roll(step - draft, 0) for draft in range(1, step + 1)]
        mask = torch.cat([torch.ones_like(diagonal).tril(-step), *drafts], -1)

        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor = mask) -> Tensor:
            keys.append(key.transpose(1, 2))
            values.append(value.transpose(1, 2))
            return attention(query, torch.cat(keys, 2), torch.cat(values, 2), mask)

        output = heads.layer(embeddings, states, places, attend)
        features = nn.functional.pad(heads.head.features(output), (0, 0, 1, 0))
        valid = nn.functional.pad(places > step, (1, 0))
        yield features[filled], valid.expand_as(filled)[filled]
        states = heads.next_states(output).roll(1, 1)


@torch.no_grad()
def judge_drafts(
    heads: ExitHeads, layer: int, batch: Features, drafts: int = 1
) -> list[tuple[Tensor, Tensor]]:
    """Draft logits [N, V_draft] at answers, and [N] bool: whether the best is the model's own.

    One pair each for first, second, ... drafts; later drafts only where an answer precedes them.
    """
    head, answers, pairs = cast("ExitHead", heads.by_layer[str(layer)]), batch.answers, []
    for features, valid in unroll(heads, layer, batch, drafts):
        rows = (answers & valid).nonzero()[:, 0]
        logits = head.unembed(features[rows])
        pairs.append((logits, head.to_target_ids(logits.argmax(-1)) == batch.top_ids[rows, 0]))
        answers = batch.answers & answers.roll(1)
    return pairs


def _global_sums(sums: Tensor) -> Tensor:
    """The sums over all processes."""
    if (processes := process_state()).num_processes > 1:
        sums = sums.to(processes.device)
        distributed.all_reduce(sums)
    return sums


def agreements(heads: ExitHeads, batches: Iterable[Features]) -> dict[int, Agreement]:
    """Agreement by exit layer over the full vocabulary, on the batches of all processes."""
    counts = _global_sums(count_right(heads, batches, 2)).tolist()
    return {
        layer: Agreement(first, right / max(1, first), right_later / later if later else None)
        for layer, ((first, right), (later, right_later)) in zip(
            heads.config.exit_layers, counts, strict=True
        )
    }


def count_right(heads: ExitHeads, batches: Iterable[Features], drafts: int) -> Tensor:
    """[layers, drafts, 2] int64: how many first, second, ... drafts there are, and right ones."""
    layers = heads.config.exit_layers
    counts = torch.zeros(len(layers), drafts, 2, dtype=torch.int64)
    for batch in batches:
        for place, layer in enumerate(layers):
            for draft, (_, right) in enumerate(judge_drafts(heads, layer, batch, drafts)):
                counts[place, draft] += _count_true(right)
    return counts


def coverage(heads: ExitHeads, batches: Iterable[Features]) -> float:
    """Share of positions where the model's next token is one that heads can draft."""
    ids = heads.first.draft_ids
    if ids is None:
        return 1.0
    counts = [_count_true(torch.isin(batch.top_ids[batch.answers, 0], ids)) for batch in batches]
    positions, hits = _global_sums(torch.zeros(2, dtype=torch.int64) + sum(counts)).tolist()
    return float(hits / positions)


def _count_true(right: Tensor) -> Tensor:
    """[N] bool -> [2]: N, and how many are true."""
    return torch.tensor([len(right), int(right.sum())])


# --- the fit

_HEAD_ROWS = 1024
"""Rows whose draft logits exist at a time; 34 MB for 8,192 of them. A step takes twice as long with
256 rows, and no less with 2,048 (2 cores, AVX512-bf16)."""

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Trainer:
    """A running fit: heads, their optimiser and its schedule, and the progress."""

    def __init__(self, job: Job, watch: Stopwatch, left_s: Callable[[], float]) -> None:
        train, test = job.train.positions, job.validation.answers
        if not (train and test):
            raise InvalidData(f"{train} tokens to fit, {test} answer tokens to validate. Give more")
        self._job, self._options, self._watch, self._left_s = job, job.options, watch, left_s
        self._part = process_state().process_index, process_state().num_processes
        self._steps_per_epoch = math.ceil(len(job.train.indices) / job.options.accumulate)
        self._steps = self._steps_per_epoch * job.options.epochs
        self._answer_weights = answer_weights(job.train, job.options.answer_share)
        backbone, draft_ids = job.backbone, _draft_ids(job)
        config, unembed = _config(job, draft_ids), backbone.unembedding
        device = unembed.weight.device
        # linear layers in bfloat16 where the model's are: that is how heads will run
        mixed = backbone.dtype == torch.bfloat16 and fast_bfloat16(device)
        self._autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=mixed)
        unembed = unembed if mixed else unembed._replace(weight=unembed.weight.float())
        torch.manual_seed(job.options.seed)  # inner layers start with random weights
        heads = (
            AttendingHeads.fresh(config, unembed, draft_ids)
            if isinstance(config, AttendingConfig)
            else ExitHeads(config, unembed, draft_ids)
        )
        if job.start is not None:  # zero weights for states that `start` did not read
            state = job.start.state_dict()
            for name, tensor in heads.state_dict().items():
                missing = tensor.shape[-1] - state[name].shape[-1]
                state[name] = nn.functional.pad(state[name], (0, missing))
            heads.load_state_dict(state)
        self.heads = heads.float()
        self._draft_index = draft_index(draft_ids, backbone.vocab_size).to(device)
        parameters = [p for p in self.heads.parameters() if p.requires_grad]
        matrices, norms = ([p for p in parameters if (p.dim() >= 2) is m] for m in (True, False))
        decays = ((matrices, job.options.weight_decay), (norms, 0.0))
        self.optimizer = torch.optim.AdamW([{"params": p, "weight_decay": d} for p, d in decays])
        for parameter in parameters:  # as at AdamW's first step, so that a checkpoint always fits
            moments = {moment: torch.zeros_like(parameter) for moment in _MOMENTS}
            self.optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
            parameter.grad = torch.zeros_like(parameter)
        self._layers = self.heads.config.exit_layers
        self._course = _Course(dict.fromkeys(map(str, self._layers), 0.0))
        self._best = self.heads.twin(backbone.unembedding)  # in the model's dtype
        self._resume()

    def run(self, progress: Show) -> Fitted:
        course, stride = self._course, self._options.accumulate
        indices, start, first_step = self._job.train.indices, time.perf_counter(), course.step
        # count closed epochs, not steps: a fit can be killed between an epoch's last step and end
        for epoch in range(len(course.entries) // len(self._layers), self._options.epochs):
            if course.schedule >= self._steps:
                break
            place = course.step - epoch * self._steps_per_epoch
            rng = torch.Generator().manual_seed(self._options.seed + epoch)
            order = [indices[i] for i in torch.randperm(len(indices), generator=rng).tolist()]
            self._watch.start()
            steps = [order[at : at + stride] for at in range(place * stride, len(order), stride)]
            agreement = max((entry["agreement"] for entry in course.entries), default=None)
            agreement = "" if agreement is None else f"  agreement {agreement:.1%}"
            for positions, batches in self._batches(steps):
                self._watch.lap("features")
                losses = self.step(course.schedule, batches, positions)
                course.step += 1
                course.positions += positions
                for layer, loss in losses.items():
                    course.sums[str(layer)] += loss * positions
                self._watch.lap("heads")
                step_s = (time.perf_counter() - start) / (course.step - first_step)
                rest = self._steps - course.schedule  # if time is short, a step counts more
                course.schedule += min(rest, max(1.0, rest * step_s / max(step_s, self._left_s())))
                mean = sum(losses.values()) / len(losses)
                message = f"epoch {epoch + 1}  loss {mean:.3f}{agreement}"
                progress(round(course.schedule), self._steps, message)
                if course.schedule >= self._steps:
                    break
                if course.step % self._options.checkpoint_steps == 0:
                    self._save()
            self._validate(epoch)
            self._save()
        return self._results()

    def step(self, number: float, batches: Sequence[Features], positions: int) -> dict[int, float]:
        """Do a step at place `number` of the schedule, from 0, on this process's `batches`.

        `positions`: those of all processes. Returns the loss by exit layer in nats per position,
        over all processes. Raises SelfspecError, with unchanged weights, if one is not finite.
        """
        totals = dict.fromkeys(self._layers, 0.0)
        weighting = self._options.ce_share, self._answer_weights
        labels = [targets(batch, self._draft_index, *weighting) for batch in batches]
        handles = []
        for layer in totals:
            for batch, (ids, weights) in zip(batches, labels, strict=True):
                totals[layer] += self._backward(layer, batch, ids, weights, positions)
            if process_state().num_processes > 1:  # summed while the next layer is computed
                handles += [
                    distributed.all_reduce(parameter.grad, async_op=True)
                    for parameter in self.heads.part(layer).parameters()
                    if parameter.grad is not None
                ]
        losses = _global_sums(torch.tensor([*totals.values()], dtype=torch.float64))
        totals = dict(zip(totals, losses.tolist(), strict=True))
        for handle in handles:
            handle.wait()
        for layer, loss in totals.items():
            parameters = self.heads.part(layer).parameters()
            norm = nn.utils.clip_grad_norm_(parameters, self._options.max_grad_norm)
            if not (math.isfinite(loss) and bool(norm.isfinite())):
                raise SelfspecError(
                    f"the loss is {loss} with a gradient of {float(norm)} at step "
                    f"{number + 1:.0f}, exit layer {layer}. Lower the learning rate, or check the "
                    "model's weights"
                )
        for group in self.optimizer.param_groups:
            group["lr"] = self._options.learning_rate * self._rate(number)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return totals

    def _backward(
        self, layer: int, batch: Features, ids: Tensor, weights: Tensor, positions: int
    ) -> float:
        """Add the gradients of one exit layer's drafts; return the first draft's loss per position.

        Draft logits exist for some rows at a time: each piece is backpropagated to the features.
        """
        head = cast("ExitHead", self.heads.by_layer[str(layer)])  # all have the same rows
        floats = {layer: hidden.float() for layer, hidden in batch.hidden.items()}
        deep = None if batch.deep is None else batch.deep.float()
        batch = replace(batch, hidden=floats, deep=deep)
        with self._autocast():
            drafts = list(unroll(self.heads, layer, batch, self._options.tokens_ahead))
        weight, first, gradients = 1.0 / positions, 0.0, []
        for features, valid in drafts:
            leaf, losses = features.detach().requires_grad_(), []
            shares = weights * valid[:, None]
            for start in range(0, len(batch), _HEAD_ROWS):
                rows = slice(start, start + _HEAD_ROWS)
                with self._autocast():
                    loss = cross_entropy(head.unembed(leaf[rows]), ids[rows], shares[rows])
                (loss * weight).backward()
                losses.append(loss.detach())
            gradients.append(leaf.grad)
            first = first or float(torch.stack(losses).sum()) / positions
            weight *= self._options.decay
        torch.autograd.backward([features for features, _ in drafts], gradients)
        return first

    def _rate(self, step: float) -> float:
        """Share of the highest learning rate at `step`, from 0: a ramp, then a cosine to 0."""
        warmup = round(self._steps * self._options.warmup)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, self._steps - warmup)))

    def _batches(self, steps: Iterable[list[int]]) -> Iterator[tuple[int, list[Features]]]:
        """Yield each step's count of positions, and this process's part of its batches."""
        device, source = self._job.backbone.unembedding.weight.device, self._job.train.source
        selected = (Selection(source, indices) for indices in steps)
        pairs = (
            (step.positions, [batch.to(device) for batch in step.batches(*self._part)])
            for step in selected
        )
        if not isinstance(source, CacheSource):
            yield from pairs
            return
        with ThreadPoolExecutor(1) as reader:  # reads the next step while the caller works
            future = reader.submit(next, pairs, None)
            while (pair := future.result()) is not None:
                future = reader.submit(next, pairs, None)
                yield pair

    def _validate(self, epoch: int) -> None:
        """Close an epoch: keep the heads of layers that have improved."""
        course, heads = self._course, self.heads.twin(self._job.backbone.unembedding)
        validation = self._job.validation.batches(*self._part)
        for layer, agreement in agreements(heads, validation).items():
            loss = course.sums[str(layer)] / course.positions
            entry = {"epoch": epoch + 1, "layer": layer, "train_loss": loss, **agreement._asdict()}
            course.entries.append(entry)
            if course.best_entry(layer) is entry:
                self._best.part(layer).load_state_dict(heads.part(layer).state_dict())
        course.sums, course.positions = dict.fromkeys(course.sums, 0.0), 0
        self._watch.lap("validation")

    def _results(self) -> Fitted:
        course, job = self._course, self._job
        metrics = {
            "layers": {str(layer): course.best_entry(layer) for layer in self._layers},
            "coverage": coverage(self._best, job.validation.batches(*self._part)),
            "train_answer_tokens": job.train.answers,
            "train_positions": job.train.positions,
            "steps": course.step,
            "processes": process_state().num_processes,
            "seconds": {part: round(seconds, 1) for part, seconds in self._watch.seconds.items()},
        }
        self._best.config = replace(self._best.config, training=_training_record(job, course.step))
        return Fitted(heads=self._best, metrics=metrics, epochs=course.entries)

    def _save(self) -> None:
        job = self._job
        if job.checkpoint is not None and process_state().is_main_process:
            record = {"job": _description(job), "course": asdict(self._course)}
            save_checkpoint(job.checkpoint, self._tensors(), record)

    def _resume(self) -> None:
        job, path = self._job, self._job.checkpoint
        if path is None or not path.is_file():
            return
        saved, record = load_checkpoint(path)
        require_same(path, record["job"], _description(job), "--overwrite")
        current = self._tensors()
        with _explain_errors(path):
            self._course = record_of(_Course, record.get("course"))
            if {n: t.shape for n, t in saved.items()} != {n: t.shape for n, t in current.items()}:
                raise InvalidData("its tensors have other names or shapes")
        for name, tensor in current.items():
            tensor.copy_(saved[name])
        for state in self.optimizer.state.values():
            state["step"].fill_(self._course.step)

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors that a fit continues from."""
        named = {f"best.{name}": tensor.detach() for name, tensor in self._best.named_parameters()}
        for name, parameter in self.heads.named_parameters():
            named[f"heads.{name}"] = parameter.detach()
            if parameter.requires_grad:
                state = self.optimizer.state[parameter]
                named |= {f"{moment}.{name}": state[moment] for moment in _MOMENTS}
        return named


def _description(job: Job) -> dict[str, Any]:
    """What must be unchanged to continue a checkpoint, ready for JSON."""
    return {
        **options_dict(job.options),
        "model": job.backbone.fingerprint,
        "dtype": str(job.backbone.dtype).removeprefix("torch."),
        "data": job.train.description(),
        "validation": job.validation.description(),
        "special_ids": sorted(job.special_ids),
        "start": job.start and [job.start.config.weights, job.start.config.training],
    }


def draft_vocabulary(
    counts: Counter[int], size: int, special: Iterable[int], vocab_size: int
) -> Tensor:
    """Rising ids [V_draft]: `special`, then the most frequent tokens, then the lowest ids.

    Byte-pair vocabularies are numbered from frequent to rare, so low ids are the best guess for
    tokens that the text does not have.
    """
    chosen = {token for token in special if token < vocab_size}  # a tokenizer may have more
    others = sorted({*range(vocab_size)} - chosen, key=lambda token: (-counts[token], token))
    chosen.update(others[: max(0, size - len(chosen))])
    return torch.tensor(sorted(chosen), dtype=torch.int64)


def _draft_ids(job: Job) -> Tensor | None:
    """The draft vocabulary: rising ids [V_draft]; None: all."""
    if job.start is not None:
        return job.start.first.draft_ids
    size, vocab_size = job.options.draft_vocab_size, job.backbone.vocab_size
    if size is None or size >= vocab_size:
        return None
    counts = job.train.source.token_counts()
    ids = draft_vocabulary(counts, size, job.special_ids, vocab_size)
    return ids.to(job.backbone.unembedding.weight.device)


def _config(job: Job, draft_ids: Tensor | None) -> HeadsConfig:
    backbone, options = job.backbone, job.options
    medusa, attends = options.head_type == MEDUSA, options.head_type == EAGLE3
    common: dict[str, Any] = {
        "chat_template": job.chat_template,
        "defaults": {"drafter": MEDUSA_FITTED if medusa else FITTED},
    }
    if job.start is not None:
        states = options.state_layers or job.start.config.state_layers
        return replace(job.start.config, temperatures={}, state_layers=states, **common)
    full_size = backbone.vocab_size if attends else None
    common |= {
        "state_layers": state_layers(backbone, options) or None,
        "base_model": job.base_model,
        "base_fingerprint": backbone.fingerprint,
        "hidden_size": backbone.hidden_size,
        "num_layers": backbone.num_layers,
        "vocab_size": backbone.vocab_size,
        "exit_layers": exit_layers(backbone, options),
        "head_type": options.head_type,
        "draft_vocab_size": full_size if draft_ids is None else len(draft_ids),
        "num_heads": options.tokens_ahead if medusa else None,
    }
    if not attends:
        return HeadsConfig(inner_size=options.inner_size, **common)
    text_config = backbone.model.config.get_text_config()
    return AttendingConfig(
        format="speculators",
        fc_norm=True,
        layer=layer_like(text_config, backbone.vocab_size, options.inner_size),
        **common,
    )


def _training_record(job: Job, steps: int) -> dict[str, Any]:
    options = job.options
    history = {} if job.start is None else {"before": job.start.config.training}
    return history | {
        "data": job.data,
        "validation": job.held_out,
        "dtype": str(job.backbone.dtype).removeprefix("torch."),
        "conversations": job.train.conversations,
        "answer_tokens": job.train.answers,
        "train_positions": job.train.positions,
        "epochs": options.epochs,
        "steps": steps,
        "ce_share": options.ce_share,
        "learning_rate": options.learning_rate,
        "seed": options.seed,
        "versions": {name: metadata.version(name) for name in ("torch", "transformers")},
    }


# --- the checkpoint: all of a fit except the order of batches, which follows from seed and step

_MARK = "selfspec"  # marks the file as ours; must be near its beginning


def save_checkpoint(path: Path, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
    """Replace the checkpoint at `path`. Raises CannotWrite, and then keeps the old one."""
    with files.replacing(path) as new:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, new, {_MARK: json.dumps(record)})


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and record. Raises InvalidData if damaged."""
    with _explain_errors(path), safe_open(path, "pt") as file:
        record = parse_json((file.metadata() or {}).get(_MARK, ""), "its record")
        if not isinstance(record, dict) or not isinstance(record.get("job"), dict):
            raise InvalidData("its record names no job")
        return {name: file.get_tensor(name) for name in file.keys()}, record  # noqa: SIM118  # no dict


def _explain_errors(path: Path) -> AbstractContextManager[None]:
    return explain_errors(f"{path} is no checkpoint", "Remove it to start over")
