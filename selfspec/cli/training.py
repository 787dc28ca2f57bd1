"""What the commands around fitting share: the model, the text, progress bars."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from selfspec.cli import common, early
from selfspec.cli.flags import Flag
from selfspec.cli.settings import CHAT_TEMPLATE
from selfspec.errors import InvalidOption
from selfspec.training.options import CacheOptions
from selfspec.training.places import check_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from selfspec.model.backbone import Backbone
    from selfspec.training.features import CacheSource, FeatureSpec, Processes, Selection
    from selfspec.training.text import Conversation

Options = TypeVar("Options")

MODEL = (
    Flag("model", str, "Hub id, folder or .gguf file; without it the bundled default model."),
    Flag("base_model", str, "The model's name for the record; else its file or id."),
    Flag("dtype", str, "Of the model and the heads: bfloat16 (the default), float32, ..."),
    Flag("device", str, "cpu, cuda, cuda:1, or auto to spread the layers over all devices."),
    CHAT_TEMPLATE,
)
SKIP_BAD_ROWS = Flag("skip_bad_rows", bool, "Count lines that cannot be used instead of stopping.")


class Base(NamedTuple):
    """A frozen model, ready for features."""

    backbone: Backbone
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    """For the record."""
    processes: Processes
    chat_template: str | None = None
    """Where it is not the model's own."""


def check_given(asked: dict[str, Any]) -> None:
    """Refuse a model or a text that cannot be read, before torch is imported."""
    early.check({name: asked[name] for name in ("model", "dtype", "device") if name in asked})
    for name in ("data", "validation", "source"):
        if name in asked:
            check_source(asked[name])


def say_next(command: str, asked: dict[str, Any], *words: str) -> None:
    """The command that goes on from here, ready to paste; of several processes the first says it.

    It names the same model.
    """
    if int(os.environ.get("RANK", "0")):
        return
    model = [word for name in ("model", "dtype") if name in asked for word in _flag(name, asked)]
    common.note(f"next: {shlex.join(['selfspec', command, *words, *model])}")


def _flag(name: str, asked: dict[str, Any]) -> tuple[str, str]:
    return f"--{name}", str(asked[name])


def load_base(asked: dict[str, Any], *, writes: bool = False) -> Base:
    """The model that the flags ask for, once the files that they name are there.

    Where it `writes` text it runs on the best executor, else by its own modules, which give states.
    """
    from selfspec.api import chat_template as templates
    from selfspec.hub import models as hub
    from selfspec.model import fingerprint
    from selfspec.model.backbone import Backbone
    from selfspec.training.features import Processes, read_manifest

    if "cache" in asked:
        read_manifest(Path(asked["cache"]))
    template = chat_template(asked)
    processes = Processes.launched()
    model, tokenizer, files = hub.load_model(
        asked.get("model"),
        dtype=asked.get("dtype", "bfloat16"),
        device=asked.get("device", processes.device),
    )
    known = fingerprint.of_loaded(model, files.stamps)
    backbone = Backbone(model, executor="auto" if writes else "generic", fingerprint=known)
    if template is not None and tokenizer is not None:
        tokenizer = templates.having(tokenizer, template)
    return Base(backbone, tokenizer, asked.get("base_model", files.label), processes, template)


def chat_template(asked: dict[str, Any]) -> str | None:
    """The text of a template: as asked for, else that of the heads, of the text or its features.

    A line says where they differ. Raises InvalidOption.
    """
    from selfspec.api import chat_template as templates
    from selfspec.heads.folder import read_config
    from selfspec.hub.models import resolve_heads
    from selfspec.training.features import read_manifest
    from selfspec.training.selfgen import template_of

    given, found = asked.get("chat_template"), {}
    chosen = None if given is None else templates.read(given)
    if (heads := asked.get("heads")) is not None:
        found[heads] = read_config(resolve_heads(heads)).get("chat_template")
    if (text := asked.get("data")) is not None:
        found[text] = template_of(Path(text))
    if (cache := asked.get("cache")) is not None:
        found[cache] = read_manifest(Path(cache)).get("chat_template")
    for name, other in found.items():
        if not isinstance(other, str):
            continue
        if chosen not in (None, other):
            common.note(
                f"selfspec: {name} was made with the chat template {templates.name_of(other)}, "
                f"not {templates.name_of(str(chosen))}"
            )
        chosen = other if chosen is None else chosen
    return chosen


@contextmanager
def writing(output: str) -> Iterator[None]:
    """While open, this command alone writes `output`; of several processes the first sees to it.

    Raises CannotWrite while another command writes there.
    """
    from selfspec import files

    if int(os.environ.get("RANK", "0")):
        yield
        return
    with files.locked(Path(output).absolute()):
        yield


@contextmanager
def writing_heads(folder: Path) -> Iterator[None]:
    """The same for what is added to a folder of heads. Raises CannotWrite for any other folder."""
    from selfspec import files
    from selfspec.heads.folder import CONFIG_FILE, is_heads_folder

    names = {CONFIG_FILE, "calibration.json"}
    files.check_folder(folder, names, is_heads_folder, overwrite=True)
    with writing(str(folder)):
        yield


def read(
    path: str, base: Base, asked: dict[str, Any], batch_tokens: int, max_tokens: int | None = None
) -> list[Conversation]:
    """The conversations of a file that fit the model and a batch."""
    from selfspec.training import text

    return text.read_conversations(
        Path(path),
        base.tokenizer,
        vocab_size=base.backbone.vocab_size,
        max_length=min(batch_tokens, base.backbone.max_positions),
        max_tokens=max_tokens,
        skip_bad_rows=asked.get("skip_bad_rows", False),
    )


def cache_source(path: str, base: Base) -> CacheSource:
    """The whole features that `selfspec cache` wrote for this model. Raises InvalidData."""
    from selfspec.training.features import CacheSource

    sizes = base.backbone.hidden_size, base.backbone.vocab_size
    source = CacheSource(Path(path), base.backbone.fingerprint, sizes)
    source.check()
    return source


def streamed(
    path: str,
    base: Base,
    spec: FeatureSpec,
    asked: dict[str, Any],
    max_tokens: int | None = None,
) -> Selection:
    """Features of a file's text, computed once and kept in memory."""
    from selfspec.training.features import StreamSource, whole

    batch_tokens = options_of(CacheOptions, asked).batch_tokens
    talks = read(path, base, asked, batch_tokens, max_tokens)
    return whole(StreamSource(base.backbone, spec, talks, batch_tokens, keep=True))


def options_of(kind: type[Options], asked: dict[str, Any]) -> Options:
    """The option dataclass `kind` from what was asked for."""
    names = {entry.name for entry in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    return kind(**{name: value for name, value in asked.items() if name in names})


def require(asked: dict[str, Any], *names: str) -> None:
    """Raise InvalidOption for a missing flag."""
    for name in names:
        if asked.get(name) is None:
            flag = "--" + name.replace("_", "-")
            raise InvalidOption(f"no {flag}. Give the flag, or the key in a --config file")


def require_features(found: FeatureSpec, needed: FeatureSpec) -> None:
    """Raise InvalidOption where a cache lacks what heads read."""
    if missing := sorted(set(needed.layers) - set(found.layers)):
        raise InvalidOption(
            f"the cache holds exit layers {list(found.layers)}, not {missing}. Choose among them, "
            "or cache again with --exit-layers"
        )
    if needed.everywhere and not found.everywhere:
        raise InvalidOption(
            "the cache holds answers alone. Fit with --answer-share 1, or cache again without "
            "--answers-only"
        )
    if needed.deep and not found.deep:
        raise InvalidOption("the cache holds no deep states. Cache again with --deep")
