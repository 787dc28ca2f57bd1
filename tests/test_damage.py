"""Any damage to an input file gives an error of one line or does no harm, for every format.

`make hostile` tries 3,000 damaged files of each format, the suite a few.
"""

from __future__ import annotations

import json
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from selfspec.decoding.drafters.rest import Datastore
from selfspec.errors import InvalidData, SelfspecError
from selfspec.eval import report, results
from selfspec.hub import models as hub
from selfspec.model.backbone import Backbone
from selfspec.training import features as store
from selfspec.training import fit
from selfspec.training.features import FeatureSpec, StreamSource
from selfspec.training.text import DROPPED, KEPT, Writer, read_conversations
from selfspec.visualise.layers import LayerTrace
from tests.authors import counted
from tests.bad_input import INF, NAN, limited, one_line, patience, snapshot, steps_into
from tests.gguf_models import write_model
from tests.heads.eagle3.make import HERE
from tests.heads.kinds import load, make_heads, train
from tests.heads.test_folders import read as read_attending
from tests.hub.test_quantised import write_folder
from tests.models import VOCAB_SIZE, make_model
from tests.talks import make_talks, make_tokenizer
from tests.traces import long_trace

MOST_MEMORY = 1 << 30  # bytes to read a damaged file; each whole file has less than 4 MB

HOSTILE: list[Any] = [
    *(None, True, 0, -1, 1, 3, 10**9, 2**63, 10**40, 0.5, -0.0, NAN, INF),
    *("", "a", "\udc80", "a\nb", "x" * 3000, "../x", "/dev/zero"),
    *([], {}, [[]], [None], [1, "a"], {"a": 1}, [[[[]]]]),
]
NUMBERS = (0, 1, 2, 3, 7, 2**31, 2**32 - 1, 2**60, 2**62, 2**63, 2**64 - 1)
PARTS = [b"", bytes(30), b"[" * 9000, *(struct.pack("<Q", number) for number in NUMBERS)]
PARTS += [struct.pack("<I", number) for number in NUMBERS[:7]]

Whole = Callable[[str], Path]
Draw = Callable[[st.SearchStrategy[Any]], Any]


class Format(NamedTuple):
    damaged: tuple[str, ...]  # files that are changed
    make: Callable[[Path, Backbone], object]
    read: Callable[[Path, Backbone], object]


def make_folder(folder: Path, _: Backbone) -> None:
    make_model("llama").save_pretrained(folder, max_shard_size="100KB")
    make_tokenizer().save_pretrained(folder)


def make_features(folder: Path, backbone: Backbone) -> None:
    talks = make_talks(backbone.model)[:3]
    source = StreamSource(backbone, FeatureSpec((2, 4), top_k=4), talks, 64)
    store.write(folder, source, store.Manifest.of(source, base_model="tiny", data="talks"))


def read_features(folder: Path, backbone: Backbone) -> None:
    source = store.CacheSource(folder, backbone)
    for index in range(len(source.sizes)):
        source.batch(index)


def make_talk_lines(folder: Path, _: Backbone) -> None:
    rows: list[Any] = [
        {"input_ids": [1, 2, 3, 4], "answers": [[1, 2], [3, 4]]},
        {"messages": [{"role": r, "content": "a"} for r in ("system", "user", "assistant")]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    ]
    (folder / "it.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def make_run(folder: Path, _: Backbone) -> None:
    report.begin_results(folder, {"run": {"seed": 0}})
    run = results.Run(seconds=1.0, arrivals=[(1, 0.5)])
    answer = results.Answer(id="a", task="b", turn=1, repeat=1, runs={"plain": run})
    results.append(folder / results.ANSWERS, answer)
    (folder / report.SUMMARY).write_text('{"methods": {"plain": {"seconds": 1.0}}}')


def read_run(folder: Path, _: Backbone) -> None:
    report.read_results(folder)
    results.read(folder / results.ANSWERS)


def data_of(folder: Path) -> Writer:
    return Writer(folder / "it.jsonl", {"seed": 0}, {})


def save_checkpoint(folder: Path, backbone: Backbone) -> None:
    tensors = dict(make_heads("linear", backbone.unembedding).state_dict())
    fit.save_checkpoint(folder / hub.CHECKPOINT, tensors, {"job": {"a": [1, None]}})


FORMATS = {
    "GGUF": Format(
        ("it.gguf",),
        lambda folder, _: write_model(folder / "it.gguf", tied=True),
        lambda folder, _: hub.load_model(folder / "it.gguf", dtype="float32", blocks=True),
    ),
    "a model": Format(
        ("*config.json", "model.safetensors.index.json", "model-00001-of-*", "tokenizer.json"),
        make_folder,
        lambda folder, _: hub.load_model(folder, dtype="float32", device="cpu"),
    ),
    "heads": Format(
        ("config.json", "model.safetensors"),
        lambda folder, backbone: train(make_heads("deep-fused-draft", backbone.unembedding)).save(
            folder
        ),
        lambda folder, backbone: load(folder, backbone.unembedding),
    ),
    "heads that attend": Format(
        ("config.json", "model.safetensors"),
        lambda folder, _: shutil.copytree(HERE / "llama", folder, dirs_exist_ok=True),
        lambda folder, _: read_attending(folder),
    ),
    "a quantised model": Format(
        ("config.json", "model.safetensors"),
        lambda folder, _: write_folder(folder, "gptq"),
        lambda folder, _: hub.load_model(folder, dtype="float32", device="cpu", blocks=True),
    ),
    "features": Format(("manifest.json", "shard-00000.*"), make_features, read_features),
    "a checkpoint": Format(
        (hub.CHECKPOINT,),
        save_checkpoint,
        lambda folder, _: fit.load_checkpoint(folder / hub.CHECKPOINT),
    ),
    "a datastore": Format(
        ("it.safetensors",),
        lambda folder, _: Datastore.of([[1, 2, 3]] * 9, make_tokenizer()).save(
            folder / "it.safetensors"
        ),
        lambda folder, _: Datastore.read(folder / "it.safetensors").continuations([1, 2], 15),
    ),
    "a trace": Format(
        ("it.jsonl",),
        lambda folder, _: long_trace(["a ", "b "]).save(folder / "it.jsonl"),
        lambda folder, _: LayerTrace.load(folder / "it.jsonl"),
    ),
    "conversations": Format(
        ("it.jsonl",),
        make_talk_lines,
        lambda folder, _: read_conversations(
            folder / "it.jsonl", make_tokenizer(), vocab_size=VOCAB_SIZE, max_length=100
        ),
    ),
    "a run of data": Format(
        ("it.jsonl.run.json",),
        lambda folder, _: data_of(folder).append(['{"text": "a"}'], 7, counted(rows=1)),
        lambda folder, _: data_of(folder),
    ),
    "a run of bench": Format(("run.yaml", "summary.json", "answers.jsonl"), make_run, read_run),
}

KNOWN = {"layers": [2, 4], "top_k": 4}
STRANGE: dict[str, dict[str, list[Any]]] = {
    "features": {
        "format_version": [2, None],
        "base_fingerprint": ["x\ny", "x" * 2000],
        "spec": [
            *(None, KNOWN | {"deep": True}),
            *(KNOWN | {"layers": value} for value in ([], [-1], [2])),
        ],
        "shards": [[], [[]], [["0"]], [[0, 0]], [[1]], [[0], [1], [2], [3], [4], [5]]],
        "conversations": [[], [-1]],
        "sha256": [None, [], ["0" * 64]],
    },
    "a run of data": {
        "format_version": [2],
        "counts": [
            {"families": {"a": {"rows": 1}}},
            {"families": {"": dict.fromkeys((*KEPT, *DROPPED), -1)}},
        ],
        "seeds": [[-1]],
        "bytes": ["10", -1, 3, 10**9, 10**30],
        "more": [1],
    },
}
"""By format and name in its first file: values that are wrong or meaningless."""


def damaged(draw: Draw, data: bytes) -> bytes:
    """Change bytes of `data`, mostly in headers, or values of its JSON if it has any."""
    for _ in range(draw(st.integers(1, 3))):
        begin, end = _json(data)
        if end > begin and draw(st.booleans()):
            text = edited(draw, data[begin:end])
            head = struct.pack("<Q", len(text)) if begin else b""
            data = head + text + data[end:]
            continue
        last = max(0, len(data) - 1)
        place = draw(st.one_of(st.integers(0, min(last, 600)), st.integers(0, last)))
        part = draw(st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from(PARTS)))
        size = draw(st.sampled_from([0, 1, 4, 8, len(part), len(data)]))
        data = data[:place] + part + data[place + size :]
    return data


def _json(data: bytes) -> tuple[int, int]:
    """Begin and end of the JSON of a file or of its header; (0, 0) without JSON."""
    if data[8:9] == b"{":
        return 8, min(len(data), 8 + int.from_bytes(data[:8], "little"))
    return (0, len(data)) if data[:1] == b"{" else (0, 0)


def edited(draw: Draw, text: bytes) -> bytes:
    """Replace a value of JSON, or of lines of it, by another type, or remove or rename a key."""
    try:
        rows = [json.loads(part) for part in (text.splitlines() if b"}\n{" in text else [text])]
    except (ValueError, RecursionError):  # already damaged
        return text
    paths = [(number, *path) for number, row in enumerate(rows) for path in steps_into(row)]
    *outer, last = paths[draw(st.integers(0, len(paths) - 1))]
    inner: Any = rows
    for step in outer:
        inner = inner[step]
    if isinstance(inner, dict) and draw(st.booleans()):
        value = inner.pop(last)
        if draw(st.booleans()):
            inner["more"] = value
    else:
        inner[last] = draw(st.sampled_from(HOSTILE))
    return "\n".join(map(json.dumps, rows)).encode() + b"\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, backbone: Backbone) -> Whole:
    """A function that gives a folder of undamaged files of a format, made once."""
    root = tmp_path_factory.mktemp("whole")

    def made(name: str) -> Path:
        if not (folder := root / name.replace(" ", "-")).exists():
            folder.mkdir()
            FORMATS[name].make(folder, backbone)
            FORMATS[name].read(folder, backbone)
        return folder

    return made


@pytest.mark.parametrize("name", FORMATS)
@settings(suppress_health_check=list(HealthCheck))
@given(draws=st.data())
def test_damage_gives_one_line_or_does_no_harm(
    name: str,
    draws: st.DataObject,
    whole: Whole,
    backbone: Backbone,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("damaged") / "it"
    shutil.copytree(whole(name), folder)
    pattern = draws.draw(st.sampled_from(FORMATS[name].damaged))
    path = draws.draw(st.sampled_from(sorted(folder.glob(pattern))))
    path.write_bytes(damaged(draws.draw, path.read_bytes()))
    before = snapshot(folder)
    memory = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    try:
        with patience(), limited(resource.RLIMIT_AS, memory + MOST_MEMORY):
            FORMATS[name].read(folder, backbone)
    except SelfspecError as error:
        text = str(error)
        assert "\n" not in text
        assert len(text) < 2000
        assert str(folder) in text
    assert snapshot(folder) == before
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [(f, key, one) for f, table in STRANGE.items() for key, row in table.items() for one in row],
)
def test_a_wrong_value_gives_an_error_of_one_line(
    name: str, key: str, value: Any, whole: Whole, backbone: Backbone, tmp_path: Path
) -> None:
    folder = shutil.copytree(whole(name), tmp_path / "it")
    path = folder / FORMATS[name].damaged[0]
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    before = snapshot(folder)
    with pytest.raises(InvalidData) as caught:
        FORMATS[name].read(folder, backbone)
    one_line(caught, folder)
    assert snapshot(folder) == before
