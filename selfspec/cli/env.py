"""`selfspec env`: what a result depends on here; with a model, how it runs and how fast."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any

from selfspec.cli import common, early
from selfspec.cli.flags import default_file, with_flags
from selfspec.cli.settings import LOADING
from selfspec.errors import ModelNotFound
from selfspec.files import cache_folder
from selfspec.hub import models as hub

if TYPE_CHECKING:
    from selfspec.decoding.speed import StepSpeed

PACKAGES = ("selfspec", "torch", "transformers", "accelerate", "safetensors")


FLAGS = tuple(flag for flag in LOADING if flag.name not in ("heads", "draft_model"))


@with_flags(*FLAGS)
def env(*, as_json: common.AsJson = False, flags: dict[str, Any]) -> None:
    """Show versions, device, threads, folders. With --model: how it runs, and how fast."""
    early.check(flags)
    facts, speed = environment(), None
    if flags:
        about, speed = model_facts(flags)
        facts |= about
    if as_json:
        measured = {} if speed is None else {"speed": speed.to_dict()}
        common.emit(json.dumps(facts | measured) + "\n")
        return
    facts |= {} if speed is None else speed_lines(speed)
    width = max(map(len, facts))
    common.emit("".join(f"{name:<{width}}  {_words(facts[name])}\n" for name in facts))


def environment() -> dict[str, Any]:
    """Facts by name, ready for JSON."""
    from selfspec.api import tuned

    return {
        **machine(),
        "default_model": _default_model(),
        "default_heads": hub.DEFAULT_HEADS,
        "cache_folder": str(cache_folder()),
        "config": _config(),
        "tuned": [str(file) for file in tuned.files()],
    }


def model_facts(flags: dict[str, Any]) -> tuple[dict[str, Any], StepSpeed]:
    """Which executor runs a model, why no other does, what drafts do to its bits; its speed."""
    import torch

    from selfspec.config import SpeculationOptions
    from selfspec.decoding.probe import PinnedProbe
    from selfspec.decoding.speed import step_speed
    from selfspec.model.backbone import Backbone

    loading = dict(flags)
    executor = loading.pop("executor", "auto")
    blocks = executor in hub.FROM_BLOCKS
    model, _, files = hub.load_model(loading.pop("model", None), blocks=blocks, **loading)
    backbone = Backbone(model, executor=executor)
    if backbone.mixing is not None:
        drafts = f"refused: the rows of a pass change each other ({backbone.mixing})"
    elif PinnedProbe(backbone).holds_unpadded(SpeculationOptions().widest_pass):
        drafts = "no draft moves a bit of a logit"
    elif backbone.dtype == torch.float16:
        drafts = "refused without --pinned: passes of several rows round otherwise in float16"
    else:
        drafts = "passes of several rows may round otherwise: near ties may fall otherwise"
    refused = {f"no_{name}_executor": why for name, why in backbone.refused.items()}
    facts = {"model": files.label, "executor": backbone.executor_name, **refused, "drafts": drafts}
    return facts, step_speed(backbone)


def speed_lines(speed: StepSpeed) -> dict[str, str]:
    """A plain step against the memory's limit, and passes of several rows against one step."""
    return {
        "plain step": (
            f"{_short(1e3 * speed.step_s)} ms behind {speed.context_tokens} positions; "
            f"reading {_short(speed.step_bytes / 1e6)} MB at "
            f"{_short(speed.memory_bytes_per_s / 1e9)} GB/s takes "
            f"{_short(1e3 * speed.limit_s)} ms: {100 * speed.share_of_limit:.0f} % of the limit"
        ),
        "rows": "  ".join(f"{rows}: {cost:.2f}" for rows, cost in speed.rows_in_steps.items())
        + " of a step",
    }


def machine() -> dict[str, Any]:
    """What a measured figure depends on."""
    import torch

    from selfspec.model.compiled import origin

    cuda = torch.cuda.is_available()
    return {
        **{name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "compiled": origin(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "cuda": torch.version.cuda if cuda else None,
    }


def _short(value: float) -> str:
    """At least three digits, no exponent for what a machine can do."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _words(value: Any) -> Any:
    """A list without brackets."""
    return ", ".join(value) or "none" if isinstance(value, list) else value


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _config() -> str:
    """The files of options that commands read here, the first one first."""
    named = os.environ.get("SELFSPEC_CONFIG")
    found = [f"{named} (SELFSPEC_CONFIG)"] if named else []
    file = default_file()
    found.append(f"{file}{'' if file.exists() else ' (not there)'}")
    return ", then ".join(found)


def _default_model() -> str:
    """The file and its package's version, or how to get it."""
    package = hub.DEFAULT_MODEL_PACKAGE
    try:
        return f"{hub.default_model_file()} ({package} {_version(package)})"
    except ModelNotFound as error:
        return str(error)
