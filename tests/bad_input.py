"""Helpers for the tests of bad input: damage, snapshots, limits and checks."""

from __future__ import annotations

import hashlib
import json
import re
import resource
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from selfspec.api.speculator import Speculator, wrap
from selfspec.errors import SelfspecError
from tests.api.test_text import byte_level_bpe
from tests.models import make_model

NAN, INF = float("nan"), float("inf")
DEEP = "[" * 100_000

Change = Callable[[Path], object]


def config(**values: Any) -> Change:
    """A change that sets values of a folder's config; None removes a value."""

    def damage(folder: Path) -> None:
        fields = json.loads((folder / "config.json").read_text()) | values
        kept = {key: value for key, value in fields.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))

    return damage


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Change:
    """A change of the tensors of a folder's weights that keeps the metadata of their header."""

    def damage(folder: Path) -> None:
        weights = load_file(path := folder / "model.safetensors")
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        change(weights)
        save_file({name: weight.contiguous() for name, weight in weights.items()}, path, metadata)

    return damage


def tensor(name: str, make: Callable[[Tensor], Tensor]) -> Change:
    return tensors(lambda weights: weights.update({name: make(weights[name])}))


def snapshot(folder: Path) -> dict[str, Any]:
    """Every entry by name: its kind, and its content or target."""
    return {str(path.relative_to(folder)): _held(path) for path in sorted(folder.rglob("*"))}


def _held(path: Path) -> Any:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return "link", str(path.readlink())
    if stat.S_ISREG(mode):
        return stat.S_IMODE(mode), hashlib.sha256(path.read_bytes()).hexdigest()
    return stat.S_IFMT(mode), stat.S_IMODE(mode)


@contextmanager
def patience() -> Iterator[None]:
    """Fail the test if the block takes longer than half a minute."""
    handler = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("took more than 30 s"))
    signal.alarm(30)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


@contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    """Set a resource limit; RLIMIT_FSIZE acts like a full disk."""
    limits = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, limits)


def one_line(error: pytest.ExceptionInfo[SelfspecError], named: Path) -> None:
    """Check that the message, which is always one line, names the file or its folder."""
    assert named.name in str(error.value)


def steps_into(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the keys and indices that lead to each value inside, and to the value itself."""
    yield ()
    if isinstance(value, dict | list):
        for step in value if isinstance(value, dict) else range(len(value)):
            yield from ((step, *steps) for steps in steps_into(value[step]))


# --- a small speculator for wrong calls, and a check of errors

VOCAB = 280
TEMPLATE = (
    "{% if messages[0].role == 'robot' %}{{ raise_exception('no robots\nplease') }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
IDS = [5, 6, 7]


class Strange:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def small_model() -> Any:
    """A tiny model with a vocabulary of bytes."""
    return make_model("llama", vocab_size=VOCAB, tie_word_embeddings=True)


def speaking(model: Any) -> Speculator:
    """A speculator with a tokenizer, a chat template that refuses robots, and heads."""
    tokenizer = byte_level_bpe()
    tokenizer.chat_template = TEMPLATE
    return wrap(model, tokenizer, heads="logit-lens", drafter="exit:layers=2/5,threshold=0.05")


def check(error: SelfspecError) -> None:
    """Check that the error is short and gives advice."""
    text = str(error)
    assert text
    assert len(text) < 400
    assert re.search(
        r"expected|Did you mean|Known:|(\.|, or|:) ?(Give|Use|Leave|Shorten|Change|Check|Pad|Raise"
        r"|Lower|Remove|Make|Fit|Run|change|leave|go on)",
        text,
    ), text
