"""A fit that is killed at any point ends as if never killed, and heads are old or new, never mixed.

What is there at a moment is what a kill leaves: before or behind a step, a measurement, or a single
operation on a file, halves of files included. Real kills: tests/test_files.py.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from selfspec.cli.main import main
from selfspec.heads import exit_heads as heads_module
from selfspec.heads.exit_heads import ExitHeads
from selfspec.model.backbone import Backbone
from selfspec.training import fit

FIT = ["fit", "--model", "model", "--dtype", "float32", "--data", "talks.jsonl"]
FIT += ["--validation", "talks.jsonl", "--batch-tokens", "128", "--draft-vocab-size", "80"]
FIT += ["--exit-layers", "2,3", "--checkpoint-steps", "1", "--output", "place/out"]
EPOCHS = ["--epochs", "2", "--learning-rate", "0.01"]
PLACE, OUT, KEPT = Path("place"), Path("place/out"), Path("kept")


class Moments:
    """What a fit does, and in KEPT what lies in PLACE then."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        for place, name in [
            *((os, name) for name in ("fsync", "truncate")),
            *((Path, name) for name in ("replace", "mkdir", "unlink", "write_bytes", "rmdir")),
            (fit.Trainer, "step"),
            (fit, "agreements"),
        ]:
            patch.setattr(place, name, self._watched(getattr(place, name), name))
        for module in (fit, heads_module):
            patch.setattr(module, "save_file", self._half(module.save_file))

    def pass_by(self, name: str) -> None:
        self.names.append(name)
        shutil.copytree(PLACE, KEPT / str(len(self.names)))

    def _watched(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.pass_by(f"before {name}")
            found = original(*arguments, **options)
            self.pass_by(f"behind {name}")
            return found

        return call

    def _half(self, original: Callable[..., None]) -> Callable[..., None]:
        def save(tensors: Any, path: Path, metadata: Any) -> None:
            original(tensors, path, metadata)
            whole = path.read_bytes()
            path.write_bytes(whole[: len(whole) // 2])
            self.pass_by("half of a file")
            path.write_bytes(whole)

        return save


@pytest.fixture(autouse=True)
def place(workplace: Path) -> None:
    PLACE.mkdir()


def moments(*more: str) -> list[str]:
    """What happens in a fit, from the first moment; KEPT has a folder for each."""
    shutil.rmtree(KEPT, ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch:
        seen = Moments(patch)
        assert main([*FIT, *more]) == 0
    return seen.names


def left_at(moment: int) -> None:
    shutil.rmtree(PLACE)
    shutil.copytree(KEPT / str(moment), PLACE)


def contents(folder: Path) -> dict[str, bytes]:
    timed = ("metrics.json", "run.yaml")
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in timed}


def test_a_fit_killed_at_any_moment_gives_the_same_heads() -> None:
    names = moments(*EPOCHS)
    expected = contents(OUT)
    ends = [n for n, name in enumerate(names, start=1) if name.endswith("agreements")]
    assert len(ends) == 4  # before and behind both epochs' measurement
    for moment in [*ends, *random.Random(0).sample(range(1, len(names) + 1), 5)]:
        left_at(moment)
        assert main([*FIT, *EPOCHS]) in (0, 2)  # 2: only the checkpoint was left to remove
        assert contents(OUT) == expected, f"killed at {names[moment - 1]}, moment {moment}"


def test_heads_being_replaced_are_the_old_ones_or_the_new_ones(backbone: Backbone) -> None:
    def loaded(folder: Path) -> dict[str, Any]:
        own = backbone.unembedding, backbone.fingerprint
        found = ExitHeads.from_pretrained(folder, *own, "tiny")
        tensors = {name: tensor.tolist() for name, tensor in found.state_dict().items()}
        return {"config": found.config, **tensors}

    assert main([*FIT, *EPOCHS]) == 0
    old, other = loaded(OUT), ("--epochs", "1", "--learning-rate", "0.5")
    names = moments(*other, "--overwrite")
    new = loaded(OUT)
    writing = len(names) - names[::-1].index("behind agreements")
    seen = [loaded(KEPT / str(moment) / "out") for moment in range(writing, len(names) + 1)]
    assert seen.count(old) + seen.count(new) == len(seen)
    assert min(seen.count(old), seen.count(new)) > 1
    left_at(random.Random(0).randrange(writing, len(names) + 1))
    assert main([*FIT, *other]) in (0, 2)
    assert loaded(OUT) == new
