"""`selfspec cache`: conversations in, a folder of features out."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.cli import common, progress, training
from selfspec.cli.flags import Flag, inputs, merged, option_flags, with_flags
from selfspec.errors import InvalidOption
from selfspec.training.options import CacheOptions

if TYPE_CHECKING:
    from selfspec.training.features import FeatureSpec

FLAGS = (
    Flag("data", str, "Conversations: .jsonl, .jsonl.gz, .json, or a data set's id. Required."),
    Flag("output", str, "Folder to write the features to. Required."),
    Flag("max_size", float, "Gigabytes at most; refused before any work if it would be more."),
    *training.MODEL,
    training.SKIP_BAD_ROWS,
    *option_flags(CacheOptions),
)


@with_flags(*FLAGS)
def cache(*, config: common.ConfigFile = None, flags: dict[str, Any]) -> None:
    """Keep what heads are fitted to. The frozen model runs once over conversations.

    A killed run goes on where it was. With `accelerate launch -m selfspec cache ...` several
    processes share the shards.
    """
    asked = merged(config, flags, FLAGS)
    training.require(asked, "data", "output")
    training.check_given(asked)
    options = training.options_of(CacheOptions, asked)
    from selfspec.training import features as store

    store.check_output(asked["output"], inputs(asked, config))
    with training.writing(asked["output"]):
        run(asked, options)
    training.say_next("fit", asked, "--cache", asked["output"], "--output", "heads")


def run(asked: dict[str, Any], options: CacheOptions) -> None:
    """Load, compute, write."""
    base = training.load_base(asked)
    from selfspec.training import features as store
    from selfspec.training.features import StreamSource

    spec = feature_spec(options, base.backbone.num_layers)
    texts = training.read(asked["data"], base, asked, options.batch_tokens, options.max_tokens)
    source = StreamSource(base.backbone, spec, texts, options.batch_tokens)
    size_of = spec.bytes_per_token(base.backbone.hidden_size, base.backbone.dtype.itemsize)
    described = {
        "base_model": base.name,
        "base_fingerprint": base.backbone.fingerprint,
        "dtype": str(base.backbone.dtype).removeprefix("torch."),
        "data": Path(asked["data"]).name,
        **({} if base.chat_template is None else {"chat_template": base.chat_template}),
    }
    manifest = store.identity(source, described, size_of)
    announce(manifest, size_of, asked.get("max_size"))
    total, rate = manifest["positions"], Rate()
    with progress.bar("cache", "tokens") as show:

        def count(positions: int, computed: bool) -> None:
            rate.add(positions, computed=computed)
            show(rate.done, total, rate.line(), found=not computed)

        store.write(Path(asked["output"]), source, manifest, base.processes, count)
    if base.processes.is_main:
        common.emit(
            f"{asked['output']}: {total:,} positions, {sum(source.answers):,} of them answers, "
            f"{_gigabytes(manifest):.2f} GB\n"
        )


class Rate:
    """Positions that are done, and how many a second this run computes."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """`now` gives seconds; tests inject their own."""
        self.done = 0
        """Those of earlier runs included."""
        self._computed, self._seconds = 0, 0.0
        self._now, self._last = now, now()

    def add(self, positions: int, *, computed: bool) -> None:
        """So many more since the last call, computed by this run or found on disk."""
        now = self._now()
        self.done += positions
        if computed:
            self._computed += positions
            self._seconds += now - self._last
        self._last = now

    def line(self) -> str:
        """The rate in words; nothing before the first computed batch."""
        return f"{self._computed / self._seconds:,.0f} tok/s" if self._seconds else ""


def feature_spec(options: CacheOptions, num_layers: int) -> FeatureSpec:
    """Layers, deep states and targets as asked for. Raises InvalidOption for missing layers."""
    from selfspec.heads.exit_heads import check_exit_layers
    from selfspec.training.features import FeatureSpec
    from selfspec.training.fit import default_exit_layers

    layers = options.exit_layers or default_exit_layers(num_layers, deep=options.deep)
    check_exit_layers(layers, range(0 if options.deep else 1, num_layers))
    return FeatureSpec(layers, options.deep, options.top_k, not options.answers_only)


def announce(manifest: dict[str, Any], size_of: int, max_size: float | None) -> None:
    """Say how large it gets. Raises InvalidOption where that is more than asked for."""
    size = _gigabytes(manifest)
    common.note(
        f"selfspec: {manifest['positions']:,} positions at {size_of:,} bytes: {size:.2f} GB"
    )
    if max_size is not None and size > max_size:
        raise InvalidOption(
            f"the features would take {size:.2f} GB, more than max_size {max_size}. Take fewer "
            "--exit-layers or --max-tokens, or fit with --data, which keeps nothing on disk"
        )


def _gigabytes(manifest: dict[str, Any]) -> float:
    return float(manifest["bytes"] / 1e9)
