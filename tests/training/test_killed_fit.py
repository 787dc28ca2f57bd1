"""A fit that is killed at any point ends as if never killed, and heads are old or new, never mixed.

The kills are real: a forked process leaves without any clean-up, before or behind a step, a
measurement, or a single operation on a file, halves of files included.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec.cli.main import main
from selfspec.heads import exit_heads as heads_module
from selfspec.heads.exit_heads import ExitHeads
from selfspec.model.backbone import Backbone
from selfspec.training import fit
from tests.models import make_model
from tests.talks import make_talks, make_tokenizer

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks")

FIT = ["fit", "--model", "model", "--dtype", "float32", "--data", "talks.jsonl"]
FIT += ["--validation", "talks.jsonl", "--batch-tokens", "128", "--draft-vocab-size", "80"]
FIT += ["--exit-layers", "2,3", "--checkpoint-steps", "1", "--output", "out"]
EPOCHS = ["--epochs", "2", "--learning-rate", "0.01"]


class Moments:
    """Counts what a fit does; at `last` the process is gone."""

    def __init__(self, patch: pytest.MonkeyPatch, last: int = -1) -> None:
        self.names: list[str] = []
        self._last = last
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
        """One moment more."""
        self.names.append(name)
        if len(self.names) == self._last:
            os._exit(9)

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


@pytest.fixture
def workplace(tmp_path: Path, backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny model and conversations; the current one."""
    make_model("llama").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    talks = make_talks(backbone.model)
    lines = [json.dumps({"input_ids": list(t.ids), "answer_start": 5}) for t in talks]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def killed(command: list[str], last: int) -> None:
    """Run it in a process of its own, which is gone at moment `last`."""
    child = os.fork()
    if child == 0:
        try:
            with pytest.MonkeyPatch.context() as patch:
                Moments(patch, last)
                main(command)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def moments(command: list[str]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        seen = Moments(patch)
        assert main(command) == 0
    return seen.names


def contents(folder: Path) -> dict[str, bytes]:
    """Of all files that do not hold seconds."""
    timed = ("metrics.json", "run.yaml")
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in timed}


def test_a_fit_killed_at_any_moment_gives_the_same_heads(workplace: Path) -> None:
    command = [*FIT, *EPOCHS]
    names = moments(command)
    expected = contents(workplace / "out")
    ends = [n for n, name in enumerate(names, start=1) if name.endswith("agreements")]
    drawn = random.Random(0).sample(range(1, len(names) + 1), 5)
    assert len(ends) == 4  # before and behind both epochs' measurement
    for number, last in enumerate([*ends, *drawn]):
        folder = f"out{number}"
        again = [*command[: command.index("out")], folder, *EPOCHS]
        killed(again, last)
        assert main(again) in (0, 2)  # 2: only the checkpoint was left to remove
        found = workplace / folder
        assert contents(found) == expected, f"killed at {names[last - 1]}, moment {last}"


def test_heads_being_replaced_are_the_old_ones_or_the_new_ones(
    workplace: Path, backbone: Backbone
) -> None:
    def loaded(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
        found = ExitHeads.from_pretrained(
            folder, backbone.unembedding, backbone.fingerprint, "tiny"
        )
        return found.config, found.state_dict()

    def same(one: Any, other: Any) -> bool:
        tensors = all(torch.equal(t, other[1][name]) for name, t in one[1].items())
        return bool(one[0] == other[0] and tensors)

    assert main([*FIT, *EPOCHS]) == 0
    old, out = loaded(workplace / "out"), workplace / "out"
    shutil.copytree(out, workplace / "kept")
    command = [*FIT, "--epochs", "1", "--learning-rate", "0.5"]
    names = moments([*command, "--overwrite"])
    new = loaded(out)
    assert not same(old, new)
    writing = len(names) - names[::-1].index("behind agreements")
    replaced = [n for n, name in enumerate(names, start=1) if name == "behind replace"]
    drawn = random.Random(0).sample(range(writing, len(names) + 1), 5)
    seen = {"old": 0, "new": 0}
    for last in {*drawn, *(number for number in replaced if number > writing)}:
        shutil.rmtree(out)
        shutil.copytree(workplace / "kept", out)
        killed([*command, "--overwrite"], last)
        found = loaded(out)
        assert same(found, old) or same(found, new), f"killed at {names[last - 1]}"
        seen["new" if same(found, new) else "old"] += 1
    assert main(command) in (0, 2)
    assert same(loaded(out), new)
    assert min(seen.values()) > 1
