"""What drafts for a model: heads that were given or are known here, or text already seen.

Comes in: a model and what the caller said of heads. Goes out: heads that fit it, or None, and the
options that follow. Called by the facade.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from selfspec.api import tuned
from selfspec.api.given import check_fit
from selfspec.config import SpeculationOptions
from selfspec.heads import known
from selfspec.heads.attending import AttendingHeads
from selfspec.heads.exit_heads import ExitHeads, logit_lens
from selfspec.heads.folder import attends
from selfspec.hub import models as hub
from selfspec.model.backbone import Backbone

logger = logging.getLogger(__name__)


def heads_for(model: PreTrainedModel, fingerprint: Callable[[], str]) -> Path | None:
    """Heads of a model, where the caller names none; a line in the log says so.

    Those that were fitted or pulled last for it on this machine, else those that come with
    selfspec. The `fingerprint` is asked for only if some heads are for a model of its sizes.
    """
    config = model.config.get_text_config()
    sizes = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
    bundled = sorted(hub.list_heads(), key=lambda folder: folder.name != hub.DEFAULT_HEADS)
    folder = known.find(sizes, fingerprint, bundled)
    if folder is not None:
        name = hub.heads_name(folder)
        logger.info("exit heads %s fit this model and are used; --heads none: without", name)
    return folder


def find_heads(
    backbone: Backbone, heads: str | Path | ExitHeads | None, label: str
) -> ExitHeads | None:
    """The heads that were asked for. Raises HeadsNotFound, InvalidHeads, HeadsMismatch."""
    if isinstance(heads, ExitHeads):
        check_fit(heads, backbone.num_layers, backbone.unembedding)
    if heads is None or isinstance(heads, ExitHeads):
        return heads
    if heads == hub.NO_HEADS:
        return None
    if heads == hub.LOGIT_LENS:
        return logit_lens(backbone.unembedding, backbone.num_layers, label)
    folder = hub.resolve_heads(heads)
    kind = AttendingHeads if attends(folder) else ExitHeads
    return kind.from_pretrained(
        folder, backbone.unembedding, backbone.fingerprint, label, backbone.num_layers
    )


def without_heads(
    base: SpeculationOptions,
    backbone: Backbone,
    label: str,
    options: Mapping[str, Any],
    *,
    wanted: bool,
) -> SpeculationOptions:
    """Text already seen drafts for any model, under a rule of its own, unless `options` differ.

    As it was tuned on this machine, if it was. A line in the log says so where heads were `wanted`.
    """
    said = None
    if "drafter" not in options:
        base = base.updated({"drafter": "ngram"}).updated(tuned.read(backbone, None))
        said = "text already seen drafts"
    drafting = base.updated(options)
    if drafting.uses("exit"):
        said = "plain decoding"
    if said is not None and drafting.speculate and wanted:
        logger.warning("no exit heads for %s: %s. Fit some: selfspec fit", label, said)
    return base
