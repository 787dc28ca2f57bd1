"""Fits exit heads to a frozen model: features come in, heads and their metrics go out.

Epochs, validation, the best heads of each layer, checkpoints, early stop. What happens within a
step is in `trainer`. Called by `selfspec fit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfspec.decoding.stats import Stopwatch
from selfspec.errors import InvalidData, InvalidOption
from selfspec.heads.attending import AttendingConfig, layer_like
from selfspec.heads.exit_heads import (
    ExitHeads,
    HeadsConfig,
    check_exit_layers,
    possible_exit_layers,
)
from selfspec.heads.folder import EAGLE3
from selfspec.model.backbone import Backbone
from selfspec.options import FITTED
from selfspec.training import checkpoint
from selfspec.training.features import FeatureSpec, Processes, Selection
from selfspec.training.measure import agreements, coverage
from selfspec.training.options import FitOptions
from selfspec.training.text import draft_vocabulary
from selfspec.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Reported after each step."""

    step: int
    """From 1."""
    steps: int
    epoch: int
    """From 1."""
    positions: int
    """Learned from in this step."""
    losses: dict[int, float]
    """By exit layer, in nats per position."""
    agreement: float | None
    """The best layer's on held-out text, as far as an epoch was closed, in 0..1."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is fitted to what."""

    backbone: Backbone
    base_model: str
    """Name for the record."""
    train: Selection
    validation: Selection
    """Batches with targets."""
    options: FitOptions
    special_ids: Collection[int] = ()
    """Always in the draft vocabulary."""
    chat_template: str | None = None
    """Of the text, where it is not the model's own."""
    data: str = ""
    """Name of the text, for the record."""
    held_out: str = "a 20th of the data"
    """Name of the text that is measured on."""
    workplace: Path | None = None
    """Folder for the checkpoint of an unfinished fit; None: it cannot be resumed."""
    processes: Processes = field(default_factory=Processes)


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """What a fit gives."""

    heads: ExitHeads
    """In the model's dtype, ready to draft or to save: each layer's from its best epoch."""
    metrics: dict[str, Any]
    """For `metrics.json`."""
    epochs: list[dict[str, Any]]
    """For `metrics.jsonl`: one entry per epoch and layer."""


@dataclass
class _Course:
    """How far a fit has come; everything but tensors that a checkpoint holds."""

    step: int = 0
    """Steps done."""
    sums: dict[int, float] = field(default_factory=dict)
    """Loss of this epoch by layer, times positions."""
    positions: int = 0
    """Positions of this epoch so far."""
    entries: list[dict[str, Any]] = field(default_factory=list)
    best: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By layer, its entry of the best epoch."""

    @property
    def validated(self) -> int:
        """Epochs that are closed: all their steps done, and measured."""
        return int(self.entries[-1]["epoch"]) if self.entries else 0

    def record(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, record: Any, layers: Sequence[int]) -> _Course:
        """The inverse of `record`, after JSON made text of the layers.

        Raises ValueError, KeyError, TypeError or AttributeError for what `record` never gives.
        """
        layered = {name: {int(k): v for k, v in record[name].items()} for name in ("sums", "best")}
        course = cls(**record | layered)
        if list(course.sums) != list(layers) or not set(course.best) <= set(layers):
            raise ValueError("it is of other exit layers")
        for entry in (*course.entries, *course.best.values()):
            numbers = [entry["train_loss"], entry["agreement"], entry["positions"]]
            if type(entry["epoch"]) is not int or entry["layer"] not in layers:
                raise ValueError("an entry without epoch and layer")
            if not all(math.isfinite(number) for number in numbers):
                raise ValueError("an entry that is not finite")
        if not all(math.isfinite(total) for total in course.sums.values()):
            raise ValueError("a loss that is not finite")
        return course

    def check(self, steps_per_epoch: int, epochs: int) -> None:
        """Raise ValueError unless steps, positions and entries can be those of one fit."""
        if type(self.step) is not int or type(self.positions) is not int:
            raise ValueError("steps and positions are no whole numbers")
        if len(self.entries) != self.validated * len(self.sums) or self.validated > epochs:
            raise ValueError(f"{len(self.entries)} entries for {self.validated} epochs")
        if self.validated and set(self.best) != set(self.sums):
            raise ValueError("no best epoch")
        place = self.step - self.validated * steps_per_epoch
        if not 0 <= place <= steps_per_epoch or (place > 0) != (self.positions > 0):
            raise ValueError(f"{self.step} steps, {self.validated} epochs measured")


def fit(
    job: Job,
    progress: Callable[[Progress], None] | None = None,
    watch: Stopwatch | None = None,
) -> Fitted:
    """Heads for all exit layers at once; goes on where a killed fit of the same job was.

    Raises InvalidOption for layers or sizes that do not fit the model or another job's checkpoint,
    InvalidData for an empty text, SelfspecError when a loss is not finite.
    """
    return _Fit(job, watch or Stopwatch()).run(progress or _ignore)


def feature_spec(backbone: Backbone, options: FitOptions, *, measured: bool) -> FeatureSpec:
    """What a fit needs to know about each position, or what is `measured` at answers alone."""
    attends = options.head_type == EAGLE3
    layers = exit_layers(backbone, options)
    if attends:
        layers = (0, *state_layers(backbone, options))
    return FeatureSpec(
        layers,
        options.head_type == "deep-fused",
        top_k=1 if measured or options.ce_share == 1.0 else TOP_K,
        everywhere=attends or (not measured and options.answer_share != 1.0),
    )


def state_layers(backbone: Backbone, options: FitOptions) -> tuple[int, ...]:
    """Whose states heads that attend read. Raises InvalidOption where the model has no such."""
    most = backbone.num_layers - 1
    layers = options.state_layers
    if layers is None:
        usual = (2, (most + 1) // 2, most - 2)
        layers = tuple(sorted({min(max(1, layer), most) for layer in usual}))
    check_exit_layers(layers, range(1, most + 1))
    return layers


TOP_K = 32
"""Likeliest next tokens to fit to, where nothing else is asked for."""


def answer_weights(text: Selection, share: float | None) -> tuple[float, float]:
    """Weights of a position that predicts an answer's token, and of any other: 1 on average."""
    others = text.positions - text.answers
    if share is None or not others:
        return 1.0, 1.0
    return share * text.positions / text.answers, (1.0 - share) * text.positions / others


def exit_layers(backbone: Backbone, options: FitOptions) -> tuple[int, ...]:
    """Those asked for, or the default ones. Raises InvalidOption where the model has no such."""
    layers, kind = options.exit_layers, options.head_type
    if layers is None:
        from_embedding = kind in ("deep-fused", EAGLE3)
        layers = (0,) if from_embedding else default_exit_layers(backbone.num_layers)
    if kind == EAGLE3:
        check_exit_layers(layers, (0,))
    else:
        check_exit_layers(layers, possible_exit_layers(kind, backbone.num_layers))
    return layers


def default_exit_layers(num_layers: int) -> tuple[int, ...]:
    """Five, evenly over the first two thirds: later exits save little; fewer in a shallow model."""
    spread = {round(num_layers * k / 7.5) for k in range(1, 6)}
    return tuple(sorted(layer for layer in spread if 1 <= layer < num_layers))


class _Fit:
    """One job on its way."""

    def __init__(self, job: Job, watch: Stopwatch) -> None:
        if not job.train.answers or not job.validation.answers:
            raise InvalidData(
                f"{job.train.answers} answer tokens to fit, {job.validation.answers} to "
                "validate. Give more text"
            )
        self._job = job
        self._watch = watch
        options = job.options
        self._steps_per_epoch = math.ceil(len(job.train.indices) / options.accumulate)
        self._steps = self._steps_per_epoch * options.epochs
        draft_ids = _draft_ids(job)
        config = _config(job, draft_ids, _record(job, self._steps))
        self._layers = config.exit_layers
        self._trainer = Trainer(
            job.backbone,
            config,
            draft_ids,
            options,
            self._steps,
            job.processes,
            answer_weights(job.train, options.answer_share),
        )
        self._course = _Course(sums=dict.fromkeys(self._layers, 0.0))
        self._best = self._trainer.finished()
        self._resume()

    def run(self, progress: Callable[[Progress], None]) -> Fitted:
        """All that is left to do."""
        course = self._course
        while course.validated < self._job.options.epochs and not self._out_of_patience():
            # not from the steps alone: a fit can be killed between an epoch's last one and its end
            epoch = course.validated
            place = course.step - epoch * self._steps_per_epoch
            order = self._order(epoch)
            self._watch.start()
            for start in range(place * self._stride, len(order), self._stride):
                progress(self._step(order[start : start + self._stride], epoch))
                if course.step % self._job.options.checkpoint_steps == 0:
                    self._save()
            self._validate(epoch)
            self._save()
        return self._fitted()

    @property
    def _stride(self) -> int:
        return self._job.options.accumulate

    def _order(self, epoch: int) -> list[int]:
        """The batches of an epoch, shuffled by seed and epoch alone."""
        generator = torch.Generator().manual_seed(self._job.options.seed + epoch)
        indices = self._job.train.indices
        return [indices[i] for i in torch.randperm(len(indices), generator=generator).tolist()]

    def _step(self, indices: list[int], epoch: int) -> Progress:
        """One update on these batches, shared among the processes."""
        course, source = self._course, self._job.train.source
        positions = sum(source.sizes[index] for index in indices)
        device = self._job.backbone.unembedding.weight.device
        mine = [source.batch(index).to(device) for index in self._job.processes.share(indices)]
        self._watch.lap("features")
        losses = self._trainer.step(course.step, mine, positions)
        course.step += 1
        course.positions += positions
        for layer, loss in losses.items():
            course.sums[layer] += loss * positions
        self._watch.lap("heads")
        return Progress(
            step=course.step,
            steps=self._steps,
            epoch=epoch + 1,
            positions=positions,
            losses=losses,
            agreement=max((entry["agreement"] for entry in course.best.values()), default=None),
        )

    def _validate(self, epoch: int) -> None:
        """Close an epoch: measure, note, and keep the heads of layers that have got better."""
        course, heads = self._course, self._trainer.finished()
        shares = agreements(heads, self._job.validation.batches())
        for layer in self._layers:
            entry = {
                "epoch": epoch + 1,
                "layer": layer,
                "train_loss": course.sums[layer] / course.positions,
                **asdict(shares[layer]),
            }
            course.entries.append(entry)
            if layer not in course.best or _better(entry, course.best[layer]):
                course.best[layer] = entry
                self._best.part(layer).load_state_dict(heads.part(layer).state_dict())
        course.sums, course.positions = dict.fromkeys(self._layers, 0.0), 0
        self._watch.lap("validation")

    def _out_of_patience(self) -> bool:
        course, patience = self._course, self._job.options.patience
        if patience is None or not course.best:
            return False
        last_gain = max(entry["epoch"] for entry in course.best.values())
        return bool(course.entries[-1]["epoch"] - last_gain >= patience)

    def _fitted(self) -> Fitted:
        course = self._course
        metrics = {
            "layers": {str(layer): course.best[layer] for layer in self._layers},
            "coverage": coverage(self._best, self._job.validation.batches()),
            "train_answer_tokens": self._job.train.answers,
            "train_positions": self._job.train.positions,
            "steps": course.step,
            "processes": self._job.processes.count,
            "seconds": {part: round(seconds, 1) for part, seconds in self._watch.seconds.items()},
        }
        return Fitted(heads=self._best, metrics=metrics, epochs=course.entries)

    def _save(self) -> None:
        job = self._job
        if job.workplace is None or not job.processes.is_main:
            return
        best = {f"best.{name}": tensor for name, tensor in self._best.named_parameters()}
        record = {"job": _description(job), "course": self._course.record()}
        checkpoint.save(job.workplace / checkpoint.FILE, self._trainer.tensors() | best, record)

    def _resume(self) -> None:
        """Go on from the checkpoint of the same job, if there is one."""
        if self._job.workplace is None:
            return
        path = self._job.workplace / checkpoint.FILE
        found = checkpoint.load(path)
        if found is None:
            return
        tensors, record = found
        checkpoint.require_same(path, record["job"], _description(self._job))
        epochs = self._job.options.epochs
        try:
            self._course = _Course.of(record.get("course"), self._layers)
            self._course.check(self._steps_per_epoch, epochs)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise checkpoint.damaged(path, f"its course makes no sense: {error}") from error
        best = {f"best.{name}": p for name, p in self._best.named_parameters()}
        expected = self._trainer.expected_tensors(self._course.step) | best
        checkpoint.check_tensors(path, tensors, expected)
        self._trainer.restore(tensors, self._course.step)
        for name, parameter in best.items():
            parameter.copy_(tensors[name])


def _better(entry: dict[str, Any], best: dict[str, Any]) -> bool:
    return bool(entry["agreement"] > best["agreement"])


def _description(job: Job) -> dict[str, Any]:
    """What must be the same for a checkpoint to be continued; ready for JSON."""
    options = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(job.options).items()}
    return {
        **options,
        "model": job.backbone.fingerprint,
        "dtype": str(job.backbone.dtype).removeprefix("torch."),
        "data": job.train.description(),
        "validation": job.validation.description(),
        "special_ids": sorted(job.special_ids),
    }


def _draft_ids(job: Job) -> Tensor | None:
    """Rising ids [V_draft], or None for all. Raises InvalidOption for more than the model has."""
    size, vocab_size = job.options.draft_vocab_size, job.backbone.vocab_size
    if size is None:
        return None
    if size > vocab_size:
        raise InvalidOption(f"draft_vocab_size is {size}, the model has {vocab_size} tokens")
    device = job.backbone.unembedding.weight.device
    counts = job.train.source.token_counts()
    return draft_vocabulary(counts, size, job.special_ids, vocab_size).to(device)


def _config(job: Job, draft_ids: Tensor | None, record: dict[str, Any]) -> HeadsConfig:
    backbone, options = job.backbone, job.options
    common: dict[str, Any] = {
        "base_model": job.base_model,
        "base_fingerprint": backbone.fingerprint,
        "hidden_size": backbone.hidden_size,
        "num_layers": backbone.num_layers,
        "vocab_size": backbone.vocab_size,
        "exit_layers": exit_layers(backbone, options),
        "head_type": options.head_type,
        "draft_vocab_size": None if draft_ids is None else len(draft_ids),
        "chat_template": job.chat_template,
        "defaults": {"drafter": FITTED},
        "training": record,
    }
    if options.head_type != EAGLE3:
        return HeadsConfig(inner_size=options.inner_size, **common)
    common["draft_vocab_size"] = backbone.vocab_size if draft_ids is None else len(draft_ids)
    return AttendingConfig(
        format="speculators",
        state_layers=state_layers(backbone, options),
        fc_norm=True,
        layer=layer_like(
            backbone.model.config.get_text_config(), backbone.vocab_size, options.inner_size
        ),
        **common,
    )


def _record(job: Job, steps: int) -> dict[str, Any]:
    """The `training` entry of the heads' config."""
    options = job.options
    return {
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


def _ignore(_progress: Progress) -> None:
    """Nobody watches."""
