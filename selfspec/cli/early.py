"""What can be said of a model's flags before torch is imported and anything is loaded.

Comes in: values by name. Goes out: nothing, or the error that loading would end in. Called by
`common.load`, `training` and `env`. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from selfspec.config import ATTENTIONS, DTYPES, EXECUTORS, SpeculationOptions
from selfspec.errors import InvalidOption
from selfspec.heads.folder import read_config
from selfspec.hub import models as hub

_DEVICE = re.compile(r"[a-z]+(:[0-9]+)?")


def check(loading: Mapping[str, Any], speculation: Mapping[str, Any] | None = None) -> None:
    """Raise InvalidOption, ModelNotFound, HeadsNotFound for what could never be loaded."""
    for name, known in (
        ("dtype", DTYPES),
        ("executor", EXECUTORS),
        ("attn_implementation", ATTENTIONS),
    ):
        if name in loading and loading[name] not in known:
            *others, last = known
            expected = f"{', '.join(others)} or {last}"
            raise InvalidOption(f"{name} is {loading[name]!r}, expected {expected}")
    if "device" in loading and not _DEVICE.fullmatch(loading["device"]):
        raise InvalidOption(f"device is {loading['device']!r}, expected cpu, cuda, cuda:0 or auto")
    _check_drafter(loading, speculation or {})
    for name in ("model", "draft_model"):
        if name in loading:
            _check_model(name, loading[name])
    _check_heads(loading, speculation or {})


def _check_heads(loading: Mapping[str, Any], speculation: Mapping[str, Any]) -> None:
    """That they are there, and have the layers that the drafter names."""
    own = not loading.keys() & {"model", "draft_model"}
    name = loading.get("heads", hub.DEFAULT_HEADS if own else hub.NO_HEADS)
    if name in (hub.LOGIT_LENS, hub.NO_HEADS) or not (
        "heads" in loading or "drafter" in speculation
    ):
        return
    config = read_config(hub.resolve_heads(name))
    asked = SpeculationOptions().updated(config.get("defaults", {})).updated(dict(speculation))
    for layer in asked.exit.layers or ():
        if layer not in config["exit_layers"]:
            known = ", ".join(map(str, config["exit_layers"]))
            raise InvalidOption(f"exit layer {layer} is not among those of {name}: {known}")


def _check_drafter(loading: Mapping[str, Any], speculation: Mapping[str, Any]) -> None:
    if "drafter" in speculation and "draft_model" not in loading:
        options = SpeculationOptions().updated(dict(speculation))
        if options.speculate and options.uses("draft-model"):
            raise InvalidOption(
                f"drafter {options.drafter} needs a second model. Give --draft-model"
            )


def _check_model(flag: str, name: str) -> None:
    if not name:
        raise InvalidOption(f"{flag} is empty, expected a hub id, a folder or a .gguf file")
    hub.require_model(name)
