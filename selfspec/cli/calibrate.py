"""`selfspec calibrate`: fitted heads and held-out text in, the heads' own defaults out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.cli import common, training
from selfspec.cli.entropy import calibrate_entropy
from selfspec.cli.flags import Flag, merged, with_flags
from selfspec.errors import InvalidOption
from selfspec.heads.folder import CONFIG_FILE
from selfspec.hub import models as hub
from selfspec.options.drafters import FITTED

if TYPE_CHECKING:
    from selfspec.heads.exit_heads import ExitHeads
    from selfspec.training.calibrate import Calibration
    from selfspec.training.features import Selection

FLAGS = (
    Flag("heads", str, "Folder of fitted heads; its config.json gets the defaults. Required."),
    Flag("data", str, "Conversations that the heads were not fitted to: .jsonl or .jsonl.gz."),
    Flag("cache", str, "Features of such a text, from selfspec cache; instead of --data."),
    Flag("max_tokens", int, "Answer tokens to use; all without it."),
    Flag("precision", float, "Exit where this share of drafts is right, in (0, 1]; else fastest."),
    Flag("max_exit_layers", int, "Exit layers used together at most. Built in: 2."),
    Flag("entropy", bool, "Only the entropy threshold that --acceptance easd needs, from --data."),
    Flag("dry_run", bool, "Report only."),
    *training.MODEL,
    training.SKIP_BAD_ROWS,
)

_INSTEAD = {
    "ngram": "text already seen, which pauses where it does not pay",
    "none": "because a verification of several rows costs more than as many steps",
}
"""By drafter, why."""


@with_flags(*FLAGS)
def calibrate(
    *, config: common.ConfigFile = None, as_json: common.AsJson = False, flags: dict[str, Any]
) -> None:
    """Find the settings of exit heads. Their confidence is scaled, thresholds are chosen.

    Costs of layers and heads are measured on this machine; nothing else should run meanwhile.
    """
    asked = merged(config, flags, FLAGS)
    if asked.get("entropy"):
        calibrate_entropy(asked, as_json=as_json)
        return
    training.require(asked, "heads", "cache" if "cache" in asked else "data")
    if not 0.0 < asked.get("precision", 1.0) <= 1.0:
        raise InvalidOption(f"precision is {asked['precision']}, expected in (0, 1]")
    folder = hub.resolve_heads(asked["heads"])
    training.check_given(asked)
    if asked.get("dry_run", False):
        found = run(asked, folder)
    else:
        with training.writing_heads(folder):
            found = run(asked, folder)
    common.emit(json.dumps(found.record()) + "\n" if as_json else described(found))
    if not asked.get("dry_run", False):
        common.note(f"wrote {folder / CONFIG_FILE}")
        training.say_next("tune", asked, "--heads", str(folder))


def run(asked: dict[str, Any], folder: Path) -> Calibration:
    """Load, measure, and write where it is wanted."""
    base = training.load_base(asked)
    from selfspec.decoding.measure import measure
    from selfspec.heads.exit_heads import ExitHeads
    from selfspec.model.backbone import Backbone
    from selfspec.training import calibrate as measuring

    heads = ExitHeads.from_pretrained(
        folder, base.backbone.unembedding, base.backbone.fingerprint, base.name
    )
    found = measuring.calibrate(
        heads,
        features(asked, base, heads),
        measure(Backbone(base.backbone.model), heads),
        precision=asked.get("precision"),
        most_layers=asked.get("max_exit_layers", 2),
    )
    if not asked.get("dry_run", False):
        measuring.write(heads, folder, found, {name: asked[name] for name in sorted(asked)})
    return found


def features(asked: dict[str, Any], base: training.Base, heads: ExitHeads) -> Selection:
    """Of the held-out text, as these heads read it."""
    from selfspec.training.features import FeatureSpec, whole

    needed = FeatureSpec(heads.config.exit_layers, heads.reads_deep, 1)
    limit = asked.get("max_tokens")
    if "cache" not in asked:
        return training.streamed(asked["data"], base, needed, asked, limit)
    source = training.cache_source(asked["cache"], base)
    training.require_features(source.spec, needed)
    return whole(source) if limit is None else whole(source).limited(limit)


def described(found: Calibration) -> str:
    """For people."""
    from rich.table import Table

    precisions = list(next(iter(found.thresholds.values())))
    columns = ["layer", "agreement", "2nd draft", "ECE", "T", "ECE at T"]
    columns += [f"tau for {share:.0%}" for share in precisions]
    grid = Table(*columns, box=None, pad_edge=False)
    for layer, entry in found.reliabilities.items():
        second = "" if found.second is None else f"{found.second[layer]:.1%}"
        taus = [found.thresholds[layer][share] for share in precisions]
        grid.add_row(
            str(layer),
            f"{entry.agreement:.1%}",
            second,
            f"{entry.ece_before:.3f}",
            f"{entry.temperature:.2f}",
            f"{entry.ece:.3f}",
            *("-" if tau is None else f"{tau:.3f}" for tau in taus),
        )
    setting = found.setting
    words = (
        f"{found.positions:,} held-out positions; heads can draft {found.coverage:.1%} of the "
        f"model's tokens\n\n{common.rendered(grid)}\n"
        f"exit layers {list(setting.exit_layers)}, thresholds {list(setting.exit_threshold)}, "
        f"at most {setting.max_draft_tokens} draft tokens\n"
        f"expected: {setting.compression_rate:.2f} tokens per verification, "
        f"{setting.speed_up:.2f} x plain decoding\n"
    )
    if found.drafter != FITTED:
        words += (
            "which is not faster, so these heads do not draft by themselves: their default is "
            f"--drafter {found.drafter}, {_INSTEAD[found.drafter]}\n"
        )
    return words
