"""Text and features by two workers of Ray are those of one process, though one is killed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from selfspec.cli.main import main
from tests.authors import RECIPE
from tests.models import make_model
from tests.talks import WORDS, make_talks, make_tokenizer

pytest.importorskip("ray")
from selfspec import cluster  # after the check

MODEL = ["--model", "words", "--dtype", "float32"]
SMALL = ["--batch-size=6", "--question-temperature=4,6", "--max-question-tokens=12"]
DATA = ["data", *MODEL, *SMALL, "--max-new-tokens=20", "--recipe=prompts.yaml", "--tokens=500"]
CACHE = ["cache", "--model", "model", "--dtype", "float32", "--data", "talks.jsonl"]
CACHE += ["--batch-tokens", "64"]


@pytest.fixture(autouse=True, scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, with models, prompts and talks; Ray is up, once for all."""
    folder = tmp_path_factory.mktemp("workers")
    for name, size in (("words", len(WORDS)), ("model", 96)):
        model = make_model("llama", vocab_size=size)
        model.save_pretrained(folder / name)
        make_tokenizer().save_pretrained(folder / name)
    (folder / "prompts.yaml").write_text(RECIPE)
    talks = [{"input_ids": list(t.ids), "answer_start": 5} for t in make_talks(model)]
    (folder / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with cluster.started(num_cpus=2):
            patch.setattr(cluster, "started", lambda *_, **options: nullcontext())
            yield folder


def killed_at_work(record: Path) -> int:
    """Ends a worker in the middle of a batch, once others are in the file."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        for one in psutil.Process().children(recursive=True) if record.exists() else ():
            if "_Worker.do" in " ".join(one.cmdline()):
                one.kill()
                return one.pid
        time.sleep(0.01)
    raise TimeoutError("no worker is at work")


def test_a_killed_workers_batch_is_written_by_another_and_the_file_is_the_same(place: Path) -> None:
    assert main([*DATA, "--output", "alone.jsonl"]) == 0
    with ThreadPoolExecutor(1) as beside:
        killed = beside.submit(killed_at_work, place / "shared.jsonl.run.json")
        assert main([*DATA, "--output", "shared.jsonl", "--workers", "2"]) == 0
        assert not psutil.pid_exists(killed.result())
    for end in ("", ".run.json"):  # the counts, too
        assert (place / f"alone.jsonl{end}").read_bytes() == (
            place / f"shared.jsonl{end}"
        ).read_bytes()


def test_shards_are_the_same_and_those_that_are_there_stay(place: Path) -> None:
    assert main([*CACHE, "--output", "alone"]) == 0
    assert main([*CACHE, "--output", "shared", "--workers", "2"]) == 0
    files = sorted((place / "alone").iterdir())
    assert len(files) > 1
    for path in files:
        assert (place / "shared" / path.name).read_bytes() == path.read_bytes()
