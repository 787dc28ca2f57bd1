"""`selfspec data`, `cache`, `fit` and `calibrate`: recipes, flags, kills, two processes."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import PartialState
from safetensors.torch import load_file

from selfspec.api.speculator import load
from selfspec.cli.main import main
from selfspec.config import SpeculationOptions
from selfspec.heads import exit_heads as heads_module
from selfspec.heads.attending import AttendingConfig
from selfspec.heads.exit_heads import ExitHeads, HeadsConfig
from selfspec.heads.folder import attends
from selfspec.hub.models import CHECKPOINT
from selfspec.model.backbone import Backbone
from selfspec.options import Easd
from selfspec.training import fit, selfgen
from selfspec.training.text import Counts
from tests.authors import RECIPE as PROMPTS
from tests.authors import counted, read
from tests.cli.fakes import Call
from tests.training.test_records import FLAT

MODEL = ["--model", "model", "--dtype", "float32"]


def next_commands(call: Call, words: list[str]) -> list[str]:
    """Run a command; the next commands that it suggests, each checked for known flags."""
    lines = call(words).err.splitlines()
    commands = [line.removeprefix("next: ") for line in lines if line.startswith("next: ")]
    for command in commands:
        assert "nowhere" in call([*shlex.split(command)[1:], "--config", "nowhere.yaml"], 2).err
    return commands


# --- data

SETTINGS = """\
model: words
dtype: float32
batch-size: 6
question-temperature: [4.0, 6.0]
max-question-tokens: 12
max-new-tokens: 20
recipe: prompts.yaml
"""
INVENT = ["data", "--config", "recipe.yaml", "--output", "out.jsonl", "--tokens", "200"]
GIVEN = ["data", "--config", "given.yaml", "--output", "out.jsonl"]


@pytest.fixture
def recipes(workplace: Path) -> Path:
    """The current folder, with recipes, prompts and a file of conversations."""
    (workplace / "recipe.yaml").write_text(SETTINGS)
    (workplace / "given.yaml").write_text(SETTINGS.replace("recipe: prompts.yaml\n", ""))
    (workplace / "prompts.yaml").write_text(PROMPTS)
    talks = [
        {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "b"}]}
        for text in ("a", "b", "c c")
    ]
    (workplace / "talks.json").write_text(json.dumps(talks))
    return workplace


def run_record(output: str = "out.jsonl") -> dict[str, Any]:
    record: dict[str, Any] = json.loads(Path(output + ".run.json").read_text())
    return record


def test_the_model_writes_conversations_and_counts_them(recipes: Path, call: Call) -> None:
    output = call(INVENT)
    lines = read(recipes / "out.jsonl")
    counts = Counts(run_record()["counts"]["families"])
    assert output.out.splitlines()[-1] == f"out.jsonl: {counts.words()}"
    assert counts.total("rows") == len(lines)
    assert counts.total("answer_tokens") >= 200
    assert "tokens generated" in output.err
    assert output.err.splitlines()[-1] == (
        "next: selfspec fit --data out.jsonl --output heads --model words --dtype float32"
    )
    record = run_record()
    assert record["options"]["max_new_tokens"] == 20
    assert record["options"]["model"] == "words"
    assert record["versions"].keys() >= {"torch", "transformers", "threads"}
    assert {line["seed"] for line in lines} <= set(record["seeds"])
    # and other options for the same file are refused by name
    before = (recipes / "out.jsonl").read_bytes()
    for flag, value, reason in (
        ("--seed", "1", "begun with seed 0, not 1"),
        ("--system", "c", "begun with system None, not c"),
        ("--dtype", "float64", "begun with dtype float32, not float64"),
    ):
        assert reason in call([*INVENT, flag, value], 2).err
    (recipes / "prompts.yaml").write_text(PROMPTS + "# more\nwritten-share: 0.1\n")
    assert "begun with recipe" in call(INVENT, 2).err
    assert (recipes / "out.jsonl").read_bytes() == before


def test_own_prompts_passages_and_excluded_texts_are_used(recipes: Path, call: Call) -> None:
    (recipes / "docs").mkdir()
    (recipes / "docs" / "a.txt").write_text("c c c a b\n\nb b a")
    (recipes / "own.jsonl").write_text('{"turns": ["a a a c"]}\n{"text": "b b b c"}\n')
    (recipes / "bench.jsonl").write_text('{"id": 3, "turns": ["b b b b b b b b"]}\n')
    flags = ["--passages", "docs", "--questions", "own.jsonl", "--exclude", "bench.jsonl"]
    flags += ["--config", "given.yaml"]  # with the recipe that is built in
    assert main([*INVENT, *flags]) == 0
    lines = read(recipes / "out.jsonl")
    assert {"a a a c", "b b b c"} & {line["messages"][0]["content"] for line in lines}
    options = run_record()["options"]
    assert options["passages"]
    assert options["recipe"]
    assert options["questions"].startswith("own.jsonl, ")
    (recipes / "bench.jsonl").write_text('{"turns": ["c c c c c c c c"]}\n')
    assert "begun with excluded" in call([*INVENT, *flags], 2).err


def test_the_user_turns_of_a_file_are_answered(recipes: Path, call: Call) -> None:
    assert main([*GIVEN, "--from", "talks.json"]) == 0
    lines = read(recipes / "out.jsonl")
    assert {line["messages"][0]["content"] for line in lines} <= {"a", "b", "c c"}
    assert [line["messages"][1]["content"] for line in lines] != ["b"] * len(lines)
    assert run_record("out.jsonl")["options"]["source"].startswith("talks.json, ")
    (recipes / "bad.json").write_text('[5, {"messages": []}, {"turns": ["a b"]}]')
    output = call([*GIVEN[:-1], "few.jsonl", "--from", "bad.json", "--skip-bad-rows"])
    assert output.out.endswith("; dropped: 2 bad rows\n")
    assert "bad.json: skipped 2 bad rows, the first: item 1 holds a whole number" in output.err
    (recipes / "long.json").write_text(json.dumps([{"turns": ["a " * 99]}]))
    command = [*GIVEN[:-1], "none.jsonl", "--from", "long.json", "--max-prompt-tokens", "32"]
    assert "none.jsonl holds no conversation. Dropped: 1 too long" in call(command, 2).err


def test_a_stopped_run_resumes(recipes: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    propose = selfgen.Written.propose

    def once(*arguments: Any) -> Any:
        if Path("out.jsonl.run.json").exists():  # after the first batch
            raise KeyboardInterrupt
        return propose(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(selfgen.Written, "propose", once)
        assert "out.jsonl: the same command continues it" in call(INVENT, 130).err
    assert len(run_record()["seeds"]) == 1
    assert main(INVENT) == 0  # the same file as in one go: tests/training/test_selfgen.py
    assert len(run_record()["seeds"]) > 1


def test_counts_in_words_name_what_was_dropped() -> None:
    counts = counted(
        rows=3, duplicates=1, unfinished=2, too_long=5, answers=4, answer_tokens=1234, loops_cut=1
    )
    assert counts.words() == (
        "3 conversations, 1,234 answer tokens, 1 of 4 answers cut where they loop (25%); dropped: "
        "1 duplicates, 2 user turns without an end, 5 too long for the model"
    )


# --- cache and fit

CACHE = ["cache", *MODEL, "--batch-tokens", "64", "--data", "talks.jsonl", "--output", "features"]
FIT = ["fit", *MODEL, "--batch-tokens", "64", "--data", "talks.jsonl", "--output", "out"]


def test_fit_follows_presets_recipes_and_flags(workplace: Path, call: Call) -> None:
    (workplace / "recipe.yaml").write_text("epochs: 3\nvalidation: talks.jsonl\n")
    flags = ["--config", "recipe.yaml", "--exit-layers", "2,3", "--preset", "specbound"]
    output = call([*FIT, *flags, "--max-tokens", "60", "--epochs", "1"])
    config = HeadsConfig.read(workplace / "out")
    assert (config.base_model, config.exit_layers) == ("model", (2, 3))
    assert config.draft_vocab_size is None
    assert 60 <= config.training["answer_tokens"] < 80
    assert output.out.count("agreement") == 2
    assert output.out.endswith("\nout: exit heads at 2 layers\n")
    assert "calibrate --heads out --data talks.jsonl --model model" in output.err
    run = yaml.safe_load((workplace / "out" / "run.yaml").read_text())["run"]
    assert (run["exit_layers"], run["batch_tokens"], run["epochs"]) == ([2, 3], 64, 1)
    assert (run["data"], run["dtype"]) == ("talks.jsonl", "float32")
    assert (run["head_type"], run["learning_rate"]) == ("linear", 3e-5)
    command = [*FIT[:-1], "more", "--start-from", "out", "--epochs", "1"]
    for name, value in (("inner_size", "3"), ("preset", "specbound")):
        flag = f"--{name.replace('_', '-')}"
        assert f"{name} with start_from: the heads" in call([*command, flag, value], 2).err
    assert main(command) == 0
    config = HeadsConfig.read(workplace / "more")
    assert (config.head_type, config.exit_layers) == ("linear", (2, 3))


def test_a_stopped_fit_names_the_command_that_continues_it(
    workplace: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = fit.Trainer._save

    def once(trainer: fit.Trainer) -> None:
        save(trainer)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fit.Trainer, "_save", once)
        assert "out: the same command continues it" in call(FIT, 130).err
        error = call([*FIT, "--overwrite"], 130).err  # starts over
    assert "out: the same command without --overwrite continues it" in error
    call(FIT)


@pytest.mark.parametrize("where", ["features", "file://features"])
def test_features_are_cached_and_fitted_to(where: str, workplace: Path, call: Call) -> None:
    output = call([*CACHE[:-1], where, "--exit-layers", "0,2,3", "--deep", "--top-k", "999"])
    assert "258 positions at 1,226 bytes" in output.err, "of a vocabulary of 96"
    assert f"{where}: 258 positions, 210 of them answers" in output.out
    assert output.err.splitlines()[-1] == (
        f"next: selfspec fit --cache {where} --output heads --model model --dtype float32"
    )
    shared = ["fit", *MODEL, "--draft-vocab-size", "90", "--exit-layers", "0,3", "--epochs", "1"]
    shared += ["--head-type", "deep-fused"]
    make, calibrate = next_commands(call, [*shared, "--cache", where, "--output", "cached"])
    assert make.startswith("selfspec data --output held-out.jsonl --tokens ")
    assert "calibrate --heads cached --data held-out.jsonl" in calibrate
    flags = ["--validation", "talks.jsonl", "--batch-tokens", "64"]
    for folder, source in (("a", ["--cache", where]), ("b", ["--data", "talks.jsonl"])):
        assert call([*shared, *source, *flags, "--output", folder]).out.count("second draft") == 2
    one, other = (workplace / name / "model.safetensors" for name in ("a", "b"))
    assert one.read_bytes() == other.read_bytes()
    assert not (workplace / "a" / CHECKPOINT).exists()
    assert HeadsConfig.read(workplace / "a").exit_layers == (0, 3)
    call(["fit", *MODEL, "--cache", where, "--head-type", "translator", "--output", "c", *flags])
    assert HeadsConfig.read(workplace / "c").exit_layers == (2, 3), "no head but deep-fused reads 0"


def test_two_processes_take_the_same_steps_as_one(workplace: Path) -> None:
    """Three batches per step, the third cut in two: same losses and, up to rounding, same heads."""
    assert main([*CACHE, "--exit-layers", "0,2,3"]) == 0
    shared = ["fit", *MODEL, "--cache", "features", "--accumulate", "3", "--exit-layers", "2,3"]
    shared += ["--draft-vocab-size", "90", "--epochs", "2", "--output"]
    assert main([*shared, "alone"]) == 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    children = []
    for rank in ("0", "1"):
        if (child := os.fork()) == 0:
            try:
                PartialState._reset_state()  # then as a launcher does
                os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                main([*shared, "together"])
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    metrics = json.loads((workplace / "together" / "metrics.json").read_text())
    assert metrics["processes"] == 2
    single, pair = (
        [json.loads(line) for line in (workplace / folder / "metrics.jsonl").open()]
        for folder in ("alone", "together")
    )
    for expected, row in zip(single, pair, strict=True):
        # float32 sums in another order; largest relative difference measured: 4e-7
        assert row.pop("train_loss") == pytest.approx(expected.pop("train_loss"), rel=1e-5)
        assert row == expected, "what is measured is a count"
    alone, together = (load_file(f"{name}/model.safetensors") for name in ("alone", "together"))
    for name, tensor in alone.items():  # largest difference measured: 4.1e-7
        torch.testing.assert_close(together[name], tensor, rtol=0, atol=4e-6)


def require_same_text(call: Call, *drafts: str) -> None:
    """Check that heads on the embedding draft and change no token."""
    command = ["generate", *MODEL, "--max-new-tokens", "12", "--json", "a b"]
    ways = ["--no-speculate"], drafts
    plain, drafted = (json.loads(call([*command, *way]).out) for way in ways)
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["stats"]["drafted_by_layer"]["0"] > 0


def test_attending_heads_are_fitted_calibrated_and_draft(workplace: Path, call: Call) -> None:
    shared = ["fit", *MODEL, "--head-type", "eagle3", "--draft-vocab-size", "90", "--epochs", "1"]
    shared += ["--learning-rate", "0.03", "--step-decay", "0.8"]
    assert main([*CACHE, "--exit-layers", "0,2,3"]) == 0
    assert main([*shared, "--cache", "features", "--output", "a"]) == 0
    assert main(["calibrate", *MODEL, "--heads", "a", "--cache", "features"]) == 0
    assert attends(workplace / "a")
    assert "0" in AttendingConfig.read(workplace / "a").temperatures
    call(["heads", "check", "a", "--model", "model"])
    require_same_text(call, "--heads", "a", "--drafter", "exit:threshold=0.01")


def test_medusa_heads_are_fitted_and_draft_uncalibrated(workplace: Path, call: Call) -> None:
    shared = ["fit", *MODEL, "--head-type", "medusa", "--draft-vocab-size", "90", "--epochs", "8"]
    data = ["--data", "talks.jsonl", "--batch-tokens", "64", "--draft-steps", "5"]
    last = next_commands(call, [*shared, *data, "--output", "b"])[-1]
    assert last.startswith("selfspec bench --heads b --methods plain,medusa")
    assert HeadsConfig.read(workplace / "b").num_heads == 5
    line = "OK: b (medusa, 5 heads, each a token further ahead) fit model"
    assert line in call(["heads", "check", "b", "--model", "model"]).out
    calibrate = ["calibrate", *MODEL, "--heads", "b", "--data", "talks.jsonl"]
    assert "b holds medusa heads" in call(calibrate, 2).err
    require_same_text(call, "--heads", "b", "--drafter", "exit", "--costs", "row=0.01")


# --- datastore


def test_a_datastore_drafts(workplace: Path, call: Call) -> None:
    (workplace / "texts" / "in").mkdir(parents=True)
    (workplace / "texts" / "in" / "a.md").write_text("a b c " * 9)
    command = ["datastore", "--model", "model", "--output", "it.safetensors"]
    command += ["--data", "talks.jsonl"]
    assert call([*command, "--texts", "texts"]).out == "it.safetensors: 13 texts, 297 tokens\n"
    assert "is there already. Give --overwrite" in call(command, 2).err
    talks = [json.loads(line)["input_ids"] for line in Path("talks.jsonl").read_text().splitlines()]
    speculator = load(
        "model", dtype="float32", datastore="it.safetensors", drafter="rest", costs="row=0"
    )
    assert speculator.generate(talks[0][:7], max_new_tokens=5).stats.accepted_by_source["rest"] > 0


# --- calibrate


def test_a_dry_run_only_reports_and_then_defaults_are_written_into_the_heads(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setattr("selfspec.decoding.measure.quick_costs", lambda *_: FLAT)
    heads = workplace / "heads"
    heads.unlink()
    call([*FIT[:-1], "heads", "--exit-layers", "0,2,4", "--draft-vocab-size", "90"])
    command = ["calibrate", *MODEL, "--heads", "heads", "--data", "talks.jsonl"]
    config = (heads / "config.json").read_bytes()
    report = json.loads(call([*command, "--dry-run", "--json"]).out)
    assert report["layers"].keys() == {"0", "2", "4"}
    assert (heads / "config.json").read_bytes() == config
    assert not (heads / "calibration.json").exists()
    before, output = HeadsConfig.read(heads), call(command)
    after = HeadsConfig.read(heads)
    assert (before.defaults, before.temperatures) == ({"drafter": "ngram+exit"}, {})
    assert after.temperatures.keys() == {"0", "2", "4"}
    layers = SpeculationOptions().updated(after.defaults).exit.layers
    assert layers is not None
    assert set(layers) <= {0, 2, 4}
    assert f"exit layers {list(layers)}" in output.out
    assert "210 held-out positions" in output.out
    assert "wrote heads/config.json" in output.err
    assert output.err.splitlines()[-1] == (
        "next: selfspec tune --heads heads --model model --dtype float32"
    )


def test_the_entropy_threshold_becomes_a_default_that_is_kept(workplace: Path, call: Call) -> None:
    (workplace / "heads").unlink()
    shutil.copytree(workplace / "others", workplace / "heads")
    command = ["calibrate", "--entropy", *MODEL]
    before = HeadsConfig.read(workplace / "heads")
    assert "no --data" in call(command, 2).err
    command += ["--data", "talks.jsonl"]
    assert "not stored: use --acceptance easd:entropy=" in call(command).out
    report = json.loads(call([*command, "--heads", "heads", "--dry-run", "--json"]).out)
    assert report.keys() == {"entropy_threshold", "positions", "mean_entropy"}
    assert 0 < report["mean_entropy"] < (value := report["entropy_threshold"])
    assert HeadsConfig.read(workplace / "heads") == before
    assert f"entropy threshold {value} nats" in call([*command, "--heads", "heads"]).out
    after = HeadsConfig.read(workplace / "heads")
    assert after.defaults == before.defaults | {"easd": f"entropy={value}"}
    speculator = load("model", heads="heads", dtype="float32", acceptance="easd")
    assert speculator.options.acceptance == Easd(entropy=value)
    assert not speculator.generate([5, 6, 7], max_new_tokens=4).stats.lossless
    assert main(["calibrate", *MODEL, "--heads", "heads", "--data", "talks.jsonl"]) == 0
    defaults = HeadsConfig.read(workplace / "heads").defaults
    assert SpeculationOptions().updated(defaults).easd.entropy == value


# --- a fit killed at any point gives the same heads in the end; heads are old or new, never mixed

KILLED = ["fit", *MODEL, "--data", "talks.jsonl", "--validation", "talks.jsonl"]
KILLED += ["--batch-tokens", "128", "--draft-vocab-size", "80", "--exit-layers", "2,3"]
KILLED += ["--checkpoint-steps", "1", "--output", "place/out"]
EPOCHS = ["--epochs", "2", "--learning-rate", "0.01"]
PLACE, OUT, KEPT = Path("place"), Path("place/out"), Path("kept")


def moments(*more: str) -> list[str]:
    """Run a fit; the names of its moments, in order, each with a copy of PLACE in a folder of KEPT.

    A copy is what a kill would leave before or after a step, a measurement or a file operation,
    or within the writing of a file. For real kills, see tests/test_files.py.
    """
    names: list[str] = []

    def pass_moment(name: str) -> None:
        names.append(name)
        shutil.copytree(PLACE, KEPT / str(len(names)))

    def watched(run: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            pass_moment(f"before {name}")
            outcome = run(*arguments, **options)
            pass_moment(f"after {name}")
            return outcome

        return call

    def half(run: Callable[..., None]) -> Callable[..., None]:
        def save(tensors: Any, path: Path, metadata: Any) -> None:
            run(tensors, path, metadata)
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])
            pass_moment("half of a file")
            path.write_bytes(content)

        return save

    with pytest.MonkeyPatch.context() as patch:
        for place, name in [
            *((os, name) for name in ("fsync", "truncate")),
            *((Path, name) for name in ("replace", "mkdir", "unlink", "write_bytes", "rmdir")),
            (fit.Trainer, "step"),
            (fit, "agreements"),
        ]:
            patch.setattr(place, name, watched(getattr(place, name), name))
        for module in (fit, heads_module):
            patch.setattr(module, "save_file", half(module.save_file))
        assert main([*KILLED, *more]) == 0
    return names


def left_at(moment: int) -> None:
    shutil.rmtree(PLACE)
    shutil.copytree(KEPT / str(moment), PLACE)


def contents(folder: Path) -> dict[str, bytes]:
    timed = ("metrics.json", "run.yaml")
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in timed}


@pytest.mark.usefixtures("workplace")
def test_a_fit_killed_at_any_moment_gives_the_same_heads() -> None:
    PLACE.mkdir()
    names = moments(*EPOCHS)
    expected = contents(OUT)
    ends = [n for n, name in enumerate(names, start=1) if name.endswith("agreements")]
    assert len(ends) == 4  # before and after the measurement of each epoch
    for moment in [*ends, *random.Random(0).sample(range(1, len(names) + 1), 5)]:
        left_at(moment)
        assert main([*KILLED, *EPOCHS]) in (0, 2)  # 2: only the checkpoint was left to remove
        assert contents(OUT) == expected, f"killed at {names[moment - 1]}, moment {moment}"


@pytest.mark.usefixtures("workplace")
def test_heads_being_replaced_are_the_old_ones_or_the_new_ones(backbone: Backbone) -> None:
    PLACE.mkdir()

    def loaded(folder: Path) -> dict[str, Any]:
        heads = ExitHeads.from_pretrained(folder, backbone, "tiny")
        tensors = {name: tensor.tolist() for name, tensor in heads.state_dict().items()}
        return {"config": heads.config, **tensors}

    assert main([*KILLED, *EPOCHS]) == 0
    old, other = loaded(OUT), ("--epochs", "1", "--learning-rate", "0.5")
    names = moments(*other, "--overwrite")
    new = loaded(OUT)
    writing = len(names) - names[::-1].index("after agreements")
    states = [loaded(KEPT / str(moment) / "out") for moment in range(writing, len(names) + 1)]
    assert states.count(old) + states.count(new) == len(states)
    assert min(states.count(old), states.count(new)) > 1
    left_at(random.Random(0).randrange(writing, len(names) + 1))
    assert main([*KILLED, *other]) in (0, 2)
    assert loaded(OUT) == new
