"""Two Ray workers write the text and features of one process, even if a worker is killed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from selfspec.cli.main import main
from selfspec.errors import InvalidOption
from selfspec.training.text import Writer
from tests.authors import RECIPE
from tests.cli.fakes import link_all

cluster: Any = pytest.importorskip("selfspec.cluster", exc_type=ImportError)  # before ray

STARTED = cluster.run_ray
MODEL = ["--model", "words", "--dtype", "float32"]
SMALL = ["--batch-size=6", "--question-temperature=4,6", "--max-question-tokens=12"]
DATA = ["data", *MODEL, *SMALL, "--max-new-tokens=20", "--recipe=prompts.yaml", "--tokens=500"]
CACHE = ["cache", "--model", "model", "--dtype", "float32", "--data", "talks.jsonl"]
CACHE += ["--batch-tokens", "64"]


@pytest.fixture(autouse=True, scope="module")
def place(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, with models, prompts and conversations; one Ray runs for all tests."""
    folder = link_all(made, tmp_path_factory.mktemp("workers"))
    (folder / "prompts.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with cluster.run_ray(num_cpus=2):
            patch.setattr(cluster, "run_ray", lambda *_, **options: nullcontext())
            yield folder


def test_a_killed_workers_batch_is_written(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first batch, suspend a worker, then kill it with the batch that it has or gets."""
    assert main([*DATA, "--output", "alone.jsonl"]) == 0
    victims, append = list[psutil.Process](), Writer.append

    def appended(self: Writer, *batch: Any) -> None:
        append(self, *batch)
        if not victims:
            children = psutil.Process().children(recursive=True)
            workers = [child for child in children if "ray::_Worker" in " ".join(child.cmdline())]
            victims.append(workers[0])
            victims[0].suspend()
            threading.Timer(2.0, victims[0].kill).start()

    monkeypatch.setattr(Writer, "append", appended)
    assert main([*DATA, "--output", "shared.jsonl", "--workers", "2"]) == 0
    assert not psutil.pid_exists(victims[0].pid)
    for end in ("", ".run.json"):  # the counts too
        alone, shared = (place / f"{name}.jsonl{end}" for name in ("alone", "shared"))
        assert shared.read_bytes() == alone.read_bytes()


def test_shards_equal_those_of_one_process(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent passes through Ray, the work is done here: a process takes 9 s to start."""

    def sent(value: Any) -> Any:
        return cluster.ray.get(cluster.ray.put(value))

    @contextmanager
    def workers(count: int, make: Any) -> Iterator[Any]:
        works = itertools.cycle([sent(make)() for _ in range(count)])
        yield lambda task: partial(lambda work: sent(work(sent(task))), next(works))

    assert main([*CACHE, "--output", "alone"]) == 0
    monkeypatch.setattr(cluster, "workers", workers)
    assert main([*CACHE, "--output", "shared", "--workers", "2"]) == 0
    files = sorted((place / "alone").iterdir())
    assert len(files) > 1
    for path in files:
        assert (place / "shared" / path.name).read_bytes() == path.read_bytes()


def test_a_failing_start_of_ray_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.ray, "init", lambda **_: "".index("late"))
    with pytest.raises(InvalidOption, match="cannot use Ray at local: substring"):
        STARTED().__enter__()
