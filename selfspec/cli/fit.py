"""`selfspec fit`: conversations or a feature cache in, a folder of exit heads out."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.cli import common, progress, training
from selfspec.cli.flags import Flag, inputs, merged, option_flags, with_flags
from selfspec.errors import CannotWrite
from selfspec.training.options import PRESETS, CacheOptions, FitOptions
from selfspec.typed import check_keys

if TYPE_CHECKING:
    from selfspec.training.features import Selection
    from selfspec.training.fit import Fitted, Job, Progress

FILES = (
    Flag("data", str, "Conversations to fit on: .jsonl, .jsonl.gz, .json, or a data set's id."),
    Flag("cache", str, "Features to fit on, from selfspec cache; instead of --data."),
    Flag("output", str, "Folder to write the heads to. Required."),
    Flag("validation", str, "Conversations to measure agreement on; else a 20th of the data."),
    Flag("preset", str, f"Options under those given: {', '.join(PRESETS)}."),
    Flag("overwrite", bool, "Start over where the output holds a fit, and replace it."),
    Flag("keep_features", bool, "With --data: compute features once and keep them in memory."),
    *training.MODEL,
    training.SKIP_BAD_ROWS,
)
_TEXT = tuple(f for f in option_flags(CacheOptions) if f.name in ("batch_tokens", "max_tokens"))
FLAGS = (*FILES, *_TEXT, *option_flags(FitOptions))

UNFINISHED = "unfinished"
"""Folder within the output that holds the checkpoint."""


@with_flags(*FLAGS)
def fit(*, config: common.ConfigFile = None, flags: dict[str, Any]) -> None:
    """Fit exit heads to a model. They are measured, and their folder is written.

    A killed run goes on where it was. With `accelerate launch -m selfspec fit ...` several
    processes share the batches of a step.
    """
    asked = merged(config, flags, FLAGS)
    if "preset" in asked:
        check_keys([asked["preset"]], PRESETS, "preset")
        asked = PRESETS[asked["preset"]] | asked
    training.require(asked, "output", "cache" if "cache" in asked else "data")
    training.check_given(asked)
    fitted = run(asked, training.options_of(FitOptions, asked), config)
    for layer, shares in fitted.metrics["layers"].items():
        second = shares["agreement_second"]
        common.emit(
            f"layer {layer:>3}  agreement {shares['agreement']:.1%}  of the most confident 25 % "
            f"{shares['agreement_top_25']:.1%}  10 % {shares['agreement_top_10']:.1%}"
            + ("\n" if second is None else f"  second draft {second:.1%}\n")
        )
    common.emit(f"{asked['output']}: exit heads at {len(fitted.metrics['layers'])} layers\n")
    _say_next(asked)


def _say_next(asked: dict[str, Any]) -> None:
    """Calibration takes text that the heads were not fitted to; where there is none, make some."""
    text = asked.get("validation", "held-out.jsonl")
    if "validation" not in asked:
        training.say_next("data", asked, "--output", text, "--tokens", "20000", "--seed", "1")
    training.say_next("calibrate", asked, "--heads", asked["output"], "--data", text)


def run(asked: dict[str, Any], options: FitOptions, config: Path | None = None) -> Fitted:
    """Load, fit, write."""
    with training.writing(check_output(asked, config)):
        check_output(asked, config)  # another fit may have ended since
        return _run(asked, options)


def check_output(asked: dict[str, Any], config: Path | None) -> str:
    """The output, if heads may be written there. Raises CannotWrite."""
    from selfspec import files
    from selfspec.heads.folder import FILES_OF_A_FIT, is_heads_folder
    from selfspec.training import checkpoint

    name: str = asked["output"]
    # a fit that was killed while it wrote has its checkpoint still, and goes on
    begun = bool(name) and (Path(name) / UNFINISHED / checkpoint.FILE).is_file()
    if name and not begun:
        _remove_empty(Path(name) / UNFINISHED)
    overwrite = begun or asked.get("overwrite", False)
    files.check_folder(
        name, FILES_OF_A_FIT, is_heads_folder, overwrite=overwrite, reads=inputs(asked, config)
    )
    return name


def _remove_empty(workplace: Path) -> None:
    """Remove the folder of a fit that was killed between its checkpoint's removal and its own."""
    from selfspec import files

    if workplace.is_dir():
        with suppress(CannotWrite, OSError), files.locked(workplace.parent.absolute()):
            workplace.rmdir()  # an error unless it is empty


def _run(asked: dict[str, Any], options: FitOptions) -> Fitted:
    from selfspec.heads import known
    from selfspec.training import checkpoint, fit, records

    output = Path(asked["output"])
    workplace = output / UNFINISHED
    if asked.get("overwrite"):
        checkpoint.remove(workplace)
    job = prepared(asked, options, workplace)
    with progress.bar("fit", "steps") as show:

        def advance(progress: Progress) -> None:
            loss = sum(progress.losses.values()) / len(progress.losses)
            show(progress.step, progress.steps, f"epoch {progress.epoch}  loss {loss:.3f}")

        fitted = fit.fit(job, advance)
    if job.processes.is_main:
        named = {flag.name: asked.get(flag.name) for flag in (*FILES, *_TEXT)}
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(job.options).items()}
        records.write(output, fitted, {**named, "base_model": job.base_model, **plain})
        known.remember(output)
        checkpoint.remove(workplace)
    return fitted


def prepared(asked: dict[str, Any], options: FitOptions, workplace: Path) -> Job:
    """The model, the features to fit on and those to measure on."""
    base = training.load_base(asked)
    from selfspec.training import fit
    from selfspec.training.text import special_ids

    if "cache" in asked:
        train, held_out, data = _from_cache(asked, base)
        if options.exit_layers is None:
            options = replace(options, exit_layers=train.source.spec.layers)
        needed = fit.feature_spec(base.backbone, options, measured=False)
        training.require_features(train.source.spec, needed)
    else:
        train, held_out = _from_text(asked, base, options)
        data = Path(asked["data"]).name
    if "validation" in asked:
        spec = fit.feature_spec(base.backbone, options, measured=True)
        held_out = training.streamed(asked["validation"], base, spec, asked)
    return fit.Job(
        backbone=base.backbone,
        base_model=base.name,
        train=train,
        validation=held_out,
        options=options,
        chat_template=base.chat_template,
        special_ids=special_ids(base.tokenizer) if base.tokenizer else (),
        data=data,
        **({"held_out": Path(asked["validation"]).name} if "validation" in asked else {}),
        workplace=workplace,
        processes=base.processes,
    )


def _from_cache(asked: dict[str, Any], base: training.Base) -> tuple[Selection, Selection, str]:
    from selfspec.training.features import split, whole

    source = training.cache_source(asked["cache"], base)
    data: str = source.manifest["data"]
    train, held_out = (whole(source),) * 2 if "validation" in asked else split(source)
    if asked.get("max_tokens"):
        train = train.limited(asked["max_tokens"])
    return train, held_out, data


def _from_text(
    asked: dict[str, Any], base: training.Base, options: FitOptions
) -> tuple[Selection, Selection]:
    """Features made from conversations while they are needed."""
    from selfspec.training import fit
    from selfspec.training.features import StreamSource, whole
    from selfspec.training.text import split

    text = training.options_of(CacheOptions, asked)
    talks = training.read(asked["data"], base, asked, text.batch_tokens, text.max_tokens)
    held_out = talks
    if "validation" not in asked:
        talks, held_out = split(talks)
    spec = fit.feature_spec(base.backbone, options, measured=False)
    measured = fit.feature_spec(base.backbone, options, measured=True)
    keep = asked.get("keep_features", False)
    return (
        whole(StreamSource(base.backbone, spec, talks, text.batch_tokens, keep=keep)),
        whole(StreamSource(base.backbone, measured, held_out, text.batch_tokens, keep=True)),
    )
