"""Scripts of eval/ on a tiny model: they run, and their results are right.

The experiments of the documentation are among them, end to end.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
import typer
from transformers import PreTrainedModel

from eval import (
    agreement,
    compare,
    costs,
    families,
    gpu_hour,
    lab,
    memory,
    micro,
    random_gguf,
    two_versions,
)
from eval.compare import ASSISTED, INT4, LLAMA, LOOKUP, NUMBERS, OPENVINO, THEIRS
from eval.gpu_hour import COMMANDS, Hour, Step
from eval.lab import SHAPES, Shape
from eval.papers import self_sd, specbound
from eval.papers.specbound import Dial, DialledHead, early_model
from selfspec.api.speculator import wrap
from selfspec.decoding.measure import Clock
from selfspec.errors import CannotWrite, InvalidOption, UnsupportedModel
from selfspec.eval.results import Answer, Run
from selfspec.heads.heads import DraftVocabulary, LogitLensHead
from selfspec.hub.models import load_model
from selfspec.model import fingerprint
from selfspec.model.backbone import Backbone
from selfspec.options import Skip
from tests.gguf_models import write_model
from tests.models import make_model, needs_compiler, random_ids, wrapped
from tests.talks import make_tokenizer, save_tiny

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny model; no test writes to it."""
    return str(save_tiny(tmp_path_factory.mktemp("laboratory") / "model"))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """A file of eight prompts."""
    texts = [" ".join(f"{number:03b}".replace("0", "a").replace("1", "b")) for number in range(8)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in texts))
    return str(path)


def test_an_empty_output_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(output: lab.Output) -> None:
        raise AssertionError(output)

    monkeypatch.setattr(sys, "argv", ["work", "--output", ""])  # as an unset variable is
    with pytest.raises(SystemExit, match="the name of a file is empty"):
        lab.run(work)


def test_a_record_holds_its_command_without_this_machines_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "x.py"), "--model", str(tmp_path / "m b")])
    spec = importlib.util.find_spec("eval.papers.specbound")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    assert lab.command() == "python -m eval.papers.specbound --model 'm b'"
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert lab.command() == "python x.py --model 'm b'"


def test_agreement_is_counted_by_kind_and_position(
    tiny_model: str, prompts: str, tmp_path: Path
) -> None:
    loaded, _, files = load_model(tiny_model, dtype="float32")
    backbone = Backbone(loaded, fingerprint=fingerprint.of_loaded(loaded, files.stamps))
    heads = lab.untrained_heads(backbone, 0, "deep-fused")
    heads.config = replace(heads.config, base_fingerprint=backbone.fingerprint)
    heads.save(tmp_path / "heads")
    agreement.main([str(tmp_path / "heads")], tmp_path / "out", tiny_model, prompts, new_tokens=9)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    ((right,),) = (by_layer.values() for by_layer in summary["right"].values())
    numbers = [number for _, number in right["all"]]
    assert numbers[0] > numbers[1] > numbers[2] > 0, "answers of at least three tokens"
    assert all(0 <= count <= number for count, number in right["all"])
    assert "/" in (tmp_path / "out" / "table.md").read_text()


# --- memory


@LINUX
def test_peaks_of_memory_are_read_from_the_kernel(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "in_new_process", lambda work, *inputs: work(*inputs))
    options = {"model": tiny_model, "dtypes": "float32", "executors": "generic"}
    (figures,) = run(memory.load, tmp_path, **options)["cases"]
    assert figures["executor"] == "generic"
    assert 0.0 < figures["model_mb"] < 1.0
    assert figures["loading_mb"] <= figures["generating_mb"]


def test_the_page_of_families_says_what_runs_on_which_executor_and_why_not(tmp_path: Path) -> None:
    out = tmp_path / "families.md"
    families.main(out, only="llama,opt,mamba")
    lines = out.read_text(encoding="utf-8").splitlines()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    columns, *rows = table
    by_family = {row[0]: dict(zip(columns, row, strict=False)) for row in rows}
    assert by_family.keys() == {"llama", "opt", "mamba"}
    assert by_family["llama"]["text"] == by_family["opt"]["text"] == "exact"
    assert by_family["opt"]["executor"] == "generic"
    assert by_family["opt"]["why"] == "not fused: positions are not rotated"
    assert by_family["mamba"]["text"] == "refused"
    assert "cannot be rewound" in by_family["mamba"]["why"]
    assert "3 families: 2 exact, 1 refused." in lines
    with pytest.raises(CannotWrite, match="is there already"):
        families.main(out, only="llama")


def test_a_family_whose_text_differs_is_wrong_and_not_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "hugging_face", lambda *_: ([0] * families.NEW_TOKENS, None))
    with pytest.raises(typer.Exit):
        families.main(tmp_path / "page.md", only="llama")
    assert re.search(r"\| WRONG \|.*another text from token", (tmp_path / "page.md").read_text())


# --- versions


def fake(seconds: float, odd: str = "", part: str = "") -> Mock:
    """A version that answers in `seconds`; for the prompt `odd`, its `part` differs."""

    def answered(request: dict[str, Any]) -> dict[str, Any]:
        difference = {part: [3, 4]} if request["prompt"] == odd else {}
        counts = {"rounds": len(request["prompt"])}
        return {"ids": [1, 2], "logits": "ab", "counts": counts, "seconds": seconds} | difference

    return Mock(side_effect=answered)


def test_both_versions_answer_every_prompt_with_and_without_drafts() -> None:
    versions = [fake(2.0), fake(1.0)]
    frame = two_versions.answers(versions, ["a", "bc"], 7)
    assert list(zip(frame.prompt, frame.way, strict=True)) == [
        *(("a", "plain"), ("a", "default"), ("bc", "plain"), ("bc", "default"))
    ]
    for version in versions:
        asked = [call.args[0] for call in version.call_args_list]
        assert [request.get("speculate") for request in asked] == [False, None] * 2
        assert all(request["max_new_tokens"] == 7 for request in asked)
    assert set(frame.differ) == {""}
    assert two_versions.differences(frame).empty
    for row in two_versions.speeds(frame).itertuples(index=False):
        assert tuple(row) == (1.0, 2.0, 2.0, 2.0, 2.0, 2.0)


@pytest.mark.parametrize("part", ["ids", "logits", "counts"])
def test_differing_parts_are_named(part: str) -> None:
    frame = two_versions.answers([fake(1.0), fake(1.0, "bc", part)], ["a", "bc"], 7)
    assert list(frame.differ) == ["", "", part, part]
    unlike = [("plain", part, "bc"), ("default", part, "bc")]
    assert [*two_versions.differences(frame).itertuples(index=False, name=None)] == unlike


# --- llama.cpp and OpenVINO, by stand-ins

_LLAMA = """
class Llama:
    def __init__(self, model_path, draft_model=None, **options):
        assert model_path.endswith(".gguf") and options["n_threads"] == 1
        print("what libraries print")
        self.first = 0 if draft_model is None else 100

    def reset(self):
        self.n_tokens = 0

    def eval(self, ids):
        assert self.n_tokens == (0 if len(ids) == 20 else 20)
        self.n_tokens += len(ids)

    def generate(self, ids, temp, **options):
        assert temp == 0.0 and all(isinstance(one, int) for one in ids)
        yield from range(self.first, 1000)
"""

_OPENVINO = """
from types import SimpleNamespace

GenerationConfig, StreamerBase = SimpleNamespace, object
StreamingStatus, TokenizedInputs = SimpleNamespace(RUNNING=0), lambda ids, mask: (ids, mask)

class LLMPipeline:
    def __init__(self, model, device, INFERENCE_NUM_THREADS, prompt_lookup=False):
        assert device == "CPU" and INFERENCE_NUM_THREADS == 1
        self.first, self.lookup = 100 * model.endswith("int4"), prompt_lookup

    def generate(self, inputs, config, streamer):
        ids, mask = inputs
        assert ids.shape == mask.shape == (1, len(ids[0])) and mask.all()
        assert config.ignore_eos and not config.do_sample
        assert getattr(config, "num_assistant_tokens", 0) == 10 * self.lookup
        tokens = range(self.first, self.first + config.max_new_tokens)
        for token in tokens:
            assert streamer.write(token) == StreamingStatus.RUNNING
        streamer.end()
        return SimpleNamespace(tokens=[[*tokens]])
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llama_cpp"
    package.mkdir()
    (package / "__init__.py").write_text(_LLAMA, encoding="utf-8")
    (package / "llama_speculative.py").write_text("LlamaPromptLookupDecoding = dict\n")
    (tmp_path / "openvino_genai.py").write_text(_OPENVINO, encoding="utf-8")
    (tmp_path / "openvino.py").write_text("def Tensor(array): return array\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    write_model(tmp_path / "it.gguf")


@pytest.mark.usefixtures("stand_in")
def test_all_methods_answer_in_turn(tmp_path: Path) -> None:
    questions, out = tmp_path / "questions.jsonl", tmp_path / "results"
    questions.write_text('{"prompt": "two words", "task": "chat"}\n' * 2, encoding="utf-8")
    compare.main(
        out,
        ["chain=exit:layers=1,max_tokens=1", "text=ngram;row=0"],
        llama_cpp=sys.executable,
        openvino=sys.executable,
        int4=tmp_path / "int4",
        model=str(tmp_path / "it.gguf"),
        heads="logit-lens",
        suite=str(questions),
        new_tokens=6,
        threads=1,
        numbers=True,
    )
    answers = [json.loads(line) for line in (out / "answers.jsonl").open()]
    rivals = [name + drafts for name in (LLAMA, OPENVINO, INT4) for drafts in ("", LOOKUP)]
    hf_ways = [THEIRS, *(THEIRS + name for name in ASSISTED)]
    methods = ["plain", "chain", "text"]
    for answer in answers:
        runs = answer["runs"]
        assert runs.keys() == {*rivals, *methods, *hf_ways, *(NUMBERS + name for name in methods)}
        assert {name for name, run in runs.items() if not run["equal"]} == {*rivals}
        assert all(len(run["arrivals"]) > 1 for run in runs.values())
    summary = json.loads((out / "summary.json").read_text())
    assert summary["methods"]["text"]["setting"] == {"drafter": "ngram", "costs": "row=0"}
    assert summary["all"]["overall"][THEIRS]["over_plain"]["ratio"] > 0
    page = (out / "table.md").read_text().split("## Over llama.cpp")[1]
    assert re.search(r"\| llama.cpp +\| 1.000 \(1.000 to 1.000\) +\| 1.00 ", page)
    assert "| numbers, chain " in page


def test_invalid_arguments_are_named(tmp_path: Path) -> None:
    for text in ("ngram", "=ngram", "a=", "plain=ngram"):
        with pytest.raises(InvalidOption, match="is not NAME=DRAFTER"):
            compare.named_settings([text])
    with pytest.raises(InvalidOption, match="'1,x': expected numbers"):
        lab.numbers("1,x", int)
    for arguments in ({"shape": "llama"}, {"kind": "Q4"}):
        with pytest.raises(InvalidOption, match=f"unknown {next(iter(arguments))} "):
            random_gguf.main(tmp_path / "it.gguf", **arguments)
    with pytest.raises(InvalidOption, match="no whole blocks of 256"):
        random_gguf.main(tmp_path / "it.gguf", "smollm2-135m", "Q4_K")
    assert not [*tmp_path.iterdir()]


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="Give --openvino"):
        compare.main(tmp_path, int4=tmp_path)
    nowhere = str(tmp_path / "python")
    with pytest.raises(InvalidOption, match="python: No such file"), lab.json_process([nowhere]):
        pass


@pytest.mark.usefixtures("stand_in")
def test_passes_of_all_programs_are_timed(tmp_path: Path) -> None:
    files: dict[str, Any] = {"output": tmp_path / "passes", "model": tmp_path / "it.gguf"}
    micro.passes(python=sys.executable, rows="1,3", in_front=20, threads=1, repeats=1, **files)
    summary = json.loads((tmp_path / "passes/summary.json").read_text())
    assert summary["seconds"].keys() == {"blocks", "numbers", LLAMA}
    assert all(seconds.keys() == {"1", "3"} for seconds in summary["seconds"].values())
    assert summary["limit_s"]["blocks"] < summary["limit_s"]["numbers"]


# --- times by rows


def run(command: Any, output: Path, **options: Any) -> dict[str, Any]:
    """Run a command and return its summary; the command prints the page."""
    command(output=output, **options)
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text())
    assert summary["command"].startswith("python ")
    return summary


@pytest.mark.parametrize(
    ("command", "options", "things"),
    [
        pytest.param(
            micro.split,
            {"rows": "1,2", "in_front": 5},
            {*micro.PARTS, "unembedding"},
            marks=needs_compiler,
        ),
        pytest.param(micro.prompts, {"lengths": "40"}, {micro.OURS, micro.HF}, marks=LINUX),
    ],
    ids=["split", "prompts"],
)
def test_every_part_is_timed_by_rows(
    tiny_model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Any,
    options: dict[str, Any],
    things: set[str],
) -> None:
    monkeypatch.setattr(micro, "in_new_process", lambda work, *inputs: work(*inputs))
    seconds = run(command, tmp_path, model=tiny_model, repeats=1, **options)["seconds"]
    assert seconds.keys() == things
    counts = str(options.get("rows", options.get("lengths"))).split(",")
    for times in seconds.values():
        assert list(times) == counts
        assert all(time > 0 for time in times.values())
    assert (tmp_path / "table.md").read_text().count("\n| ") >= 3


def test_brackets_show_shares_of_the_reference() -> None:
    seconds = {"all layers": {1: 0.003, 4: 0.006}, "unembedding": {1: 0.001, 4: 0.002}}
    lines = micro.as_table("part", seconds, {1: 0.004, 4: 0.008}).splitlines()
    assert lines[0] == "| part | 1 | 4 |"
    assert lines[2] == "| all layers | 3.000 (0.75) | 6.000 (0.75) |"
    assert micro.as_table("", seconds).splitlines()[2].endswith("6.000 (2.00) |")
    columns = {"limit": {"unembedding": "0.5"}}
    assert micro.as_table("", seconds, extra=columns).splitlines()[3].endswith(" | 0.5 |")


# --- linear layers


def test_rates_are_bytes_and_operations_over_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(micro, "memory_rate", lambda _: 30e9)
    monkeypatch.setattr(micro, "arithmetic_rate", lambda _: 150.0)
    monkeypatch.setattr(micro, "time_layer", lambda *_: {"ours": {1: 0.002, 4: 0.004}})
    monkeypatch.setitem(SHAPES, "odd", Shape(500, 1000, 1, 5, 1, 10**6, 1))
    summary = run(micro.linear, tmp_path, shapes="odd", dtypes="bfloat16", rows="1,4")
    assert summary["memory_gb_s"] == 30.0
    names = [name.split(", ", 1)[1] for name in summary["seconds"]]
    assert names[0] == "queries, keys, values 700×500, ours"
    assert len(names) == 4  # the head is too large
    (down,) = (line for line in (tmp_path / "table.md").read_text().splitlines() if "down" in line)
    # 500,000 weights of 2 bytes in 2 ms; 4 rows of 1 MFLOP in 4 ms
    assert down == "| odd bfloat16, down 500×1000, ours | 2.000 (1.00) | 4.000 (2.00) | 0.5 | 1.0 |"
    with pytest.raises(InvalidOption, match="smollm2-135m"):
        micro.linear(tmp_path, "huge")


@needs_compiler
def test_a_slow_kernel_is_not_timed_at_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (32, 16, torch.float32, (1, 2), 0, Clock(micro.CPU, 1))
    assert {name: [*times] for name, times in micro.time_layer(*arguments).items()} == {
        "ours": [1, 2],
        "torch": [1, 2],
    }
    monkeypatch.setattr(micro, "_PATIENCE_S", 0.0)
    assert all([*times] == [1] for times in micro.time_layer(*arguments).values())


def test_drafts_at_other_sizes_are_simulated_from_rows(tiny_model: str, tmp_path: Path) -> None:
    costs = {1: 1.0, 2: 1.1, 4: 1.3, 16: 2.5}
    gain, drafts = micro.best_chain(0.6, costs, 0.1)
    assert drafts == 2
    assert gain == pytest.approx((1 + 0.6 + 0.36) / 1.4)
    assert micro.best_chain(0.05, costs, 0.1) == (1.0, 0)
    sizes = run(micro.sizes, tmp_path, models=tiny_model, rates="0.5,0.9", repeats=1)["sizes"]
    (size,) = sizes.values()
    assert size["rows"]["1"] == 1.0
    assert size["best"]["0.9"][0] >= size["best"]["0.5"][0] >= 1.0
    assert "simulated" in (tmp_path / "table.md").read_text()


def test_the_page_of_costs_has_the_computed_tables(tmp_path: Path) -> None:
    gains = run(costs.main, tmp_path)["gains"]
    page = (costs.RESULTS.parents[1] / "docs/guides/costs.md").read_text(encoding="utf-8")
    lines = (tmp_path / "table.md").read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if line.startswith("| ") and line not in page]
    # the formula is within 16 % of the policies that were timed
    for policy, measured in gains["135M, measured"].items():
        assert gains["135M"][policy] == pytest.approx(measured, rel=0.16), policy
    assert costs.chance_of(sum(0.6**place for place in range(8))) == pytest.approx(0.6, abs=1e-3)


# --- the commands for a GPU


def steps_of(output: Path, command: str) -> dict[str, Any]:
    steps: dict[str, Any] = json.loads((output / f"{command}.json").read_text())["steps"]
    return steps


def test_every_step_runs_on_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, commands = itertools.count(step=0.05), cast("Any", COMMANDS)
    monkeypatch.setattr("selfspec.adaptation.time.monotonic", lambda: next(clock))
    for command in commands:
        gpu_hour.main(command, tmp_path, tiny=True)
    check, speed, fit = (steps_of(tmp_path, command) for command in COMMANDS)
    for name, step in (check | speed | fit).items():
        assert step["outcome"] == ("skipped: no CUDA" if name.startswith("waits") else "done"), name
    assert check["captures"]["found"]["graphs"] >= 2 * 5  # layers and logits, by rows
    rows = {"texts share passes", "2", "4", "8", "16"}
    assert set(check["bits, generic, torch.float32"]["found"]) == rows
    assert len(check["lossless, cuda-graph, torch.float32"]["found"]) == 7
    swept = speed["swept, smollm2-135m"]["found"]
    few, many = (swept[f"7 drafts, {chance}"]["tokens_a_round"] for chance in (0.5, 0.9))
    assert 1.0 <= few < many
    assert speed["ours, smollm2-135m, generic"]["found"]["plain"]["tokens_a_round"] == 1.0
    assert fit["adapted"]["found"]["finished"]
    assert (tmp_path / "adapted" / "heads" / "model.safetensors").exists()


def test_steps_that_fail_hang_or_no_longer_fit_are_recorded_and_others_run(tmp_path: Path) -> None:
    def breaks(_: Hour, found: dict[str, Any], **_more: str) -> None:
        found["half"] = 1
        raise ValueError("no such kernel\nwith more to say")

    def hangs(*_: object) -> None:
        while True:
            pass

    def works(*_: object) -> None:
        pass

    steps = [Step(1, breaks, {}), Step(0.01, hangs, {}), Step(1, works, {})]
    steps.append(Step(61, breaks, {"for": "long"}))
    with pytest.raises(typer.Exit):
        gpu_hour.run_steps(Hour(tmp_path, None, 1, tiny=True), "some", steps)
    entries = steps_of(tmp_path, "some")
    assert {name: (entry["outcome"], entry.get("said")) for name, entry in entries.items()} == {
        "breaks": ("failed", "no such kernel"),
        "hangs": ("failed", "stopped after 0 s"),
        "works": ("done", None),
        "breaks, long": ("not begun", None),
    }
    entry = entries["breaks"]
    assert (entry["found"], entry["error"]) == ({"half": 1}, "ValueError")
    assert entry["trace"][-1].endswith(" breaks")


def test_without_a_model_file_weights_are_random_and_the_label_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, gpu_hour.DEFAULT, Shape(32, 64, 2, 4, 2, 96, 64))
    hour = Hour(tmp_path, tmp_path / "no.gguf", 1, tiny=False)
    label = hour._load_parts(gpu_hour.DEFAULT, gpu_hour.BF16)[2]
    assert label.startswith("random weights, smollm2-135m: ")
    assert "no.gguf" in label


# --- Self-SD: which layers drafts leave out


def test_rounds_end_after_an_unsure_draft_and_continue_after_the_first_wrong_one() -> None:
    right = [True, True, False, True, True, True, True]
    assert self_sd.rounds(right, [0.9] * 7) == [(7, 2), (4, 4)]
    assert self_sd.rounds(right, [0.9, 0.7, 0.9, 0.9, 0.9, 0.9, 0.9]) == [(2, 2), (4, 4)]
    assert self_sd.rounds([True] * 12, [0.9] * 12) == [(8, 8), (3, 3)]


def test_the_search_skips_more_layers_and_records_speed_and_cost(
    prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = wrap(make_model("llama", torch.float64, vocab_size=10), make_tokenizer())
    monkeypatch.setattr(lab, "load", lambda **_: tiny)

    search = partial(run, self_sd.main, tmp_path, suite=prompts, new_tokens=12, limit=2)
    summary = search(ratio=0.5)
    sizes = [size["skipped"] for size in summary["sizes"]]
    assert [len(layers) for layers in sizes] == [1, 2, 3]
    assert all(set(fewer) < set(more) <= {2, 3, 4, 5, 6} for fewer, more in pairwise(sizes))
    assert summary["skipped"] == max(summary["sizes"], key=lambda one: one["speed"])["skipped"]
    costs = [size["cost"] for size in summary["sizes"]]
    assert 1.0 > costs[0] > costs[1] > costs[2] > 0.5
    monkeypatch.setattr(self_sd, "RULE", Skip(threshold=0.0, max_tokens=1))
    assert search(ratio=0.2)["sizes"][0]["speed"] != summary["sizes"][0]["speed"]


# --- SpecBound: early models, heads that are wrong on demand, what a round should cost

IDS = random_ids(11)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(IDS).logits
    return output


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.bfloat16), ("gemma3", torch.float32)], ids=str
)
def test_layers_that_add_nothing_change_no_bit(family: str, dtype: torch.dtype) -> None:
    base = make_model(family, dtype)
    original = logits(base)
    deep = early_model(base, 6, 3)
    assert torch.equal(logits(deep), original)
    assert Backbone(deep).num_layers == 9  # conformance, and agreement of the packed weights
    layers = [*base.get_decoder().layers, *deep.get_decoder().layers]
    assert len({layer.mlp.gate_proj.weight.data_ptr() for layer in layers}) == 6 + 9
    assert layers[-1].mlp.gate_proj.weight.any()
    assert torch.equal(logits(base), original)
    with torch.no_grad():  # a shorter model gives the logit lens's logits
        hidden = base(IDS, output_hidden_states=True).hidden_states[4]
        expected = base.get_output_embeddings()(base.get_decoder().norm(hidden))
    assert torch.equal(logits(early_model(base, 4, 2)), expected)


def test_a_model_without_an_early_variant_is_refused() -> None:
    model = make_model("llama")
    with pytest.raises(InvalidOption, match="7 layers asked for, the model has 6"):
        early_model(model, 7, 1)
    for layer in model.model.layers:
        layer.mlp = torch.nn.Identity()
    with pytest.raises(UnsupportedModel, match="down_proj"):
        early_model(model, 6, 1)


def test_a_dialled_head_is_wrong_at_the_set_rate() -> None:
    states = torch.randn(4000, 32, generator=torch.Generator().manual_seed(4))  # [4000, d]
    unembedding = wrapped("llama").unembedding
    vocabulary = DraftVocabulary.of(unembedding, None)
    head = DialledHead(unembedding, vocabulary)
    right = LogitLensHead(unembedding, vocabulary)(states).argmax(-1)
    for share in (0.0, 0.3, 1.0):
        head.wrong_share = share
        wrong = (head(states).argmax(-1) != right).double().mean()
        assert wrong == pytest.approx(share, abs=0.03)  # four standard deviations


def test_points_are_ratios_of_totals_of_medians() -> None:
    dial = Dial(2, 0.1)
    plain = [1] * 10
    kept = [3, 1, 3, 2, 1]  # tokens of each round; after nine of ten no draft fits

    def run(tokens: list[int], seconds: float, equal: bool = True) -> Run:
        arrivals = [(1, 9.0), *((count, seconds / len(tokens)) for count in tokens)]
        return Run(arrivals=arrivals, equal=equal, counts={"seconds": {"heads": 0.16}})

    times = {"a": [(2, 1), (2, 1), (9, 7)], "b": [(6, 3), (6, 4), (6, 3)]}
    answers = [
        Answer(id=name, task="", turn=1, repeat=repeat, new_tokens=11)
        for name in times
        for repeat in (1, 2, 3)
    ]
    for answer in answers:
        slow, fast = times[answer.id][answer.repeat - 1]
        same = (answer.id, answer.repeat) != ("b", 3)
        answer.runs.update({"plain": run(plain, slow), dial.label: run(kept, fast, same)})
    (point,) = specbound.points(answers, [dial], 0.25)
    assert point["equal_texts"] == 1
    assert point["speed_up"] == pytest.approx((2 + 6) / (1 + 3))
    assert point["acceptance"] == 5 / 7  # drafts of a text: 2 + 2 + 2 + 2 + 0, of which 7 are tried
    assert point["compression_rate"] == 10 / 5
    # 48 drafts took 0.96 s; 20 plain steps took 8 s
    assert point["head_cost"] == pytest.approx(0.02 / 0.4)
    a = 5 / 7
    tokens = 4 * (1 + a + a**2) + 1
    cost = 4 * (2 * 0.25 + 0.75) + (1 * 0.25 + 0.75)
    complete = 4 * (3 * 0.25 + 0.75 + 2 * 0.05) + (1 * 0.25 + 0.75)
    assert point["formula"] == pytest.approx(tokens / cost)
    assert point["complete_formula"] == pytest.approx(tokens / complete)


def test_every_setting_is_timed_in_turn_with_plain_decoding(
    tiny_model: str, prompts: str, tmp_path: Path
) -> None:
    common: dict[str, Any] = {"model": tiny_model, "dtype": "float32", "suite": prompts, "limit": 2}
    heads: dict[str, Any] = {"layers": 3, "extra_layers": "9,3", "draft_vocab_size": 90}
    heads |= {"max_draft_tokens": "1,3", "wrong_shares": "0,0.4"}
    specbound.main(tmp_path / "out", max_new_tokens=13, repeats=2, **common, **heads)
    for extra in (9, 3):
        lines = (tmp_path / f"out/{extra}-layers-more/answers.jsonl").read_text().splitlines()
        answers = list(map(json.loads, lines))
        assert len(answers) == 2 * 2
        for answer in answers:
            assert len(answer["runs"]) == 5
            assert answer["new_tokens"] == 13
            assert all(run["equal"] for run in answer["runs"].values())
    points = json.loads((tmp_path / "out/summary.json").read_text())["points"]
    assert len(points) == 8
    for point in points:
        assert point["depth_ratio"] in (0.25, 0.5)
        assert (point["acceptance"] == 1.0) == (point["wrong_share"] == 0.0)
        assert point["compression_rate"] <= point["max_draft_tokens"] + 1
    assert (tmp_path / "out/table.md").read_text().count("\n|    0.") == 8
