"""A user's own model without a chat template: from its first text to exit heads of its own."""

from __future__ import annotations

import gc
import json
import logging
import re
import shutil
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
import yaml
from transformers import dynamic_module_utils as modules

from selfspec.api import chat_template as templates
from selfspec.api import speculator as facade
from selfspec.api.speculator import load, wrap
from selfspec.cli.heads import folder_problems
from selfspec.cli.main import main
from selfspec.errors import HeadsMismatch, HeadsNotFound
from selfspec.heads.exit_heads import HeadsConfig
from selfspec.heads.folder import find_known, known_folders, read_config, registry_folder, remember
from selfspec.hub import models as hub
from selfspec.options import Costs
from tests.authors import RECIPE
from tests.cli.fakes import Call
from tests.models import make_model, noted
from tests.talks import TEMPLATE, WORDS, dialogue, make_tokenizer, save_tiny

MODEL = ["--model", "tiny-vicuna", "--dtype", "float32"]
FIT = ["fit", *MODEL, "--epochs", "1", "--draft-vocab-size", "10"]
INVENT = ["--tokens", "60", "--batch-size", "6", "--max-question-tokens", "12"]
INVENT += ["--max-new-tokens", "20", "--question-temperature", "4,6", "--recipe", "recipe.yaml"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of ten words, text that it wrote with a template, and heads."""
    folder = tmp_path_factory.mktemp("own")
    save_tiny(folder / "tiny-vicuna", vocab_size=len(WORDS))
    (folder / "tiny-vicuna" / "chat_template.jinja").unlink()
    (folder / "own.jinja").write_text(TEMPLATE)
    (folder / "recipe.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        flags = ["--chat-template", "own.jinja", "--output", "own.jsonl"]
        assert main(["data", *MODEL, *INVENT, *flags]) == 0
        fit = [*FIT, "--exit-layers", "2,4", "--output", "heads"]
        assert main([*fit, "--data", "own.jsonl"]) == 0
    return folder


@pytest.fixture
def workplace(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


def test_heads_keep_and_use_the_template_of_their_text(workplace: Path, call: Call) -> None:
    assert HeadsConfig.read(workplace / "heads").chat_template == TEMPLATE
    output = call(["heads", "show", "heads"]).out
    assert re.search(r"^chat_template +\{% for m in messages", output, re.MULTILINE)
    names = [line.split()[0] for line in output.splitlines()]
    known = [field.name for field in fields(HeadsConfig)]
    assert names == [name for name in known if name in names]  # a line per field that is set
    generate = ["generate", *MODEL, "--max-new-tokens", "3", "a b"]
    assert "Its name says: --chat-template vicuna" in call(generate, 2).err
    kept = json.loads(call([*generate, "--heads", "heads", "--json"]).out)
    explicit = json.loads(call([*generate, "--chat-template", "own.jinja", "--json"]).out)
    assert explicit["token_ids"] == kept["token_ids"]
    warning = call([*generate, "--heads", "heads", "--chat-template", "vicuna"]).err
    assert "fitted with the chat template" in warning


def test_a_feature_cache_keeps_the_template(workplace: Path, tmp_path: Path, call: Call) -> None:
    features, heads = str(tmp_path / "features"), str(tmp_path / "heads")
    cache = ["cache", *MODEL, "--data", "own.jsonl", "--exit-layers", "2", "--output", features]
    assert main([*cache, "--batch-tokens", "64"]) == 0
    output = call([*FIT, "--cache", features, "--output", heads]).err
    assert HeadsConfig.read(Path(heads)).chat_template == TEMPLATE
    assert "--dtype float32 --chat-template FILE.jinja (FILE.jinja: the chat template" in output
    again = ["--cache", features, "--output", heads, "--overwrite", "--chat-template", TEMPLATE]
    assert TEMPLATE not in call([*FIT, *again]).err
    other = tmp_path / "other.jsonl"
    other.write_text((json.dumps({"messages": dialogue("a b c a", "a b c a")}) + "\n") * 4)
    calibrate = ["calibrate", *MODEL, "--heads", heads, "--data", str(other), "--dry-run"]
    call(calibrate)
    output = call([*calibrate, "--chat-template", "vicuna"]).err
    assert "was made with the chat template {% for m" in output
    output = call(["fit", *MODEL, "--data", str(other), "--output", "new"], 2).err
    assert "no chat template. Its name says: --chat-template vicuna" in output
    other.write_text('{"text": "a b c a"}\n' * 4)
    output = call([*FIT, "--data", str(other), "--output", str(tmp_path / "raw")]).err
    assert "--seed 1 --raw --model tiny-vicuna" in output


def heads_in_use() -> Any:
    return getattr(load("tiny-vicuna", dtype="float32").heads, "folder", None)


def test_heads_fitted_here_are_found_by_the_weights_of_their_model(
    workplace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, call: Call
) -> None:
    assert heads_in_use() is None
    remember(Path("heads"))
    with caplog.at_level(logging.INFO):
        speculator = load("tiny-vicuna", dtype="float32")
    assert speculator.heads is not None
    assert speculator.turn_end == templates.NO_END
    assert f"exit heads {workplace / 'heads'} are this model's" in caplog.text
    assert load("tiny-vicuna", dtype="float32", heads="none").heads is None
    assert wrap(speculator.model, speculator.tokenizer).heads is not None
    assert wrap(speculator.model, speculator.tokenizer, heads="none").heads is None
    assert wrap(speculator.model, speculator.tokenizer, draft_model=speculator.model).heads is None
    assert load("tiny-vicuna", dtype="float32", draft_model="tiny-vicuna").heads is None
    other = make_model("llama", vocab_size=len(WORDS))
    other.lm_head.weight.data[0] += 1
    other.save_pretrained(tmp_path / "other")
    make_tokenizer().save_pretrained(tmp_path / "other")
    assert load(tmp_path / "other", dtype="float32").heads is None
    names = [row["name"] for row in json.loads(call(["heads", "list", "--json"]).out)]
    assert names[-1] == str(workplace / "heads")
    # pulled heads become known and come first; folders that are gone are skipped
    assert main(["heads", "pull", "heads"]) == 0
    assert load("tiny-vicuna", dtype="float32").heads is not None
    assert json.loads(next(registry_folder().glob("*.json")).read_text())["folders"][0].endswith(
        "selfspec/heads/heads"
    )
    shutil.rmtree(registry_folder().parent / "heads" / "heads")
    with caplog.at_level(logging.INFO):
        assert heads_in_use() == workplace / "heads", "the heads before it"
    assert "selfspec/heads/heads and are gone. If they were moved" in caplog.text
    assert f"to forget them: selfspec heads use {workplace / 'heads'}" in caplog.text
    next(registry_folder().glob("*.json")).write_text('{"sizes": [6, 32], "folders": [5]}')
    assert load("tiny-vicuna", dtype="float32").heads is None


def test_heads_that_are_fitted_at_once_are_all_known(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [shutil.copytree(workplace / "heads", tmp_path / name) for name in "ab"]
    monkeypatch.setattr("selfspec.heads.folder._exists", lambda _: not Event().wait(0.05))
    with ThreadPoolExecutor() as pool:
        [*pool.map(remember, folders)]
    assert {*folders} <= {*known_folders()}


def test_chosen_heads_stay_in_use_until_the_next_choice(
    workplace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, call: Call
) -> None:
    caplog.set_level(logging.INFO)
    shutil.copytree("heads", tmp_path / "mine")
    output = call(["heads", "use", str(tmp_path / "mine")]).out
    assert "--drafter" not in output
    assert f"to undo this choice: rm {registry_folder()}" in caplog.text
    assert f"heads          {tmp_path / 'mine'}\n" in call(["env", *MODEL]).out
    for _ in range(2):  # the folder may be known already
        assert not remember(Path("heads"))
        assert heads_in_use() == tmp_path / "mine"
    assert f"{tmp_path / 'mine'} stay in use, as was chosen" in caplog.text
    config = HeadsConfig.read(tmp_path / "mine")
    replace(config, defaults={"drafter": "ngram"}).write(tmp_path / "mine")
    output = call(["heads", "use", str(tmp_path / "mine")]).out
    assert "by calibration they gain nothing, so ngram drafts; else: --drafter ngram+exit" in output
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert heads_in_use() == tmp_path / "mine"
    assert "heads gain nothing, so ngram drafts. To try them: --drafter ngram+exit" in caplog.text
    known = next(registry_folder().glob("*.json"))
    known.write_text(known.read_text().replace(str(tmp_path), "/" + "far" * 2000))
    assert heads_in_use() == workplace / "heads", "a path too long to look up is skipped"


def test_another_models_choice_is_none_for_this_one(workplace: Path) -> None:
    remember(Path("heads"))
    config = read_config(Path("heads"))
    sizes = config["num_layers"], config["hidden_size"]
    fingerprint = partial(str, config["base_fingerprint"])
    other = {"sizes": sizes, "chosen": True, "folders": [str(workplace / "others")]}
    (registry_folder() / "other.json").write_text(json.dumps(other))
    assert find_known(sizes, fingerprint) == workplace / "heads"
    assert find_known(sizes, fingerprint, chosen=True) is None


@pytest.fixture
def pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of heads pushed to me/own, laid out in tmp_path as in the hub client's cache."""
    place, client = tmp_path / "models--me--own" / "snapshots" / ("0" * 40), Mock()
    client.create_repo.return_value = "https://hub/me/own"
    client.upload_folder.side_effect = lambda folder_path, **_: shutil.copytree(folder_path, place)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: client)
    return place


def test_pushed_heads_have_a_card_and_no_path_of_this_machine(
    workplace: Path, pushed: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    heads = pushed.parents[2] / "heads"
    shutil.copytree("heads", heads)
    data = str(workplace / "own.jsonl")
    costs = Costs(row=0.1, head=0.1)
    monkeypatch.setattr("selfspec.decoding.measure.quick_costs", lambda *_: costs)
    assert main(["calibrate", *MODEL, "--heads", str(heads), "--data", data]) == 0
    push = ["heads", "push", str(heads), "me/own", "--license", "mit", "--private"]
    assert call(push).out.endswith("\nhttps://hub/me/own\n")
    client: Any = huggingface_hub.HfApi()
    client.create_repo.assert_called_once_with("me/own", private=True, exist_ok=True)
    keywords = client.upload_folder.call_args.kwargs
    assert (keywords["repo_id"], keywords["commit_message"][:10]) == ("me/own", "Exit heads")
    texts = {file.name: file.read_text(errors="replace") for file in pushed.rglob("*.*")}
    card = texts["README.md"]
    header = yaml.safe_load(card.split("---\n")[1])
    assert header.keys() == {"license", "library_name", "pipeline_tag", "tags"}
    assert "## Calibration" in card
    assert "--heads me/own --stats" in card
    assert 'custom_generate="me/own", trust_remote_code=True' in card
    assert not any(str(pushed.parents[3]) in text for text in texts.values())
    # pulled heads are complete despite the additions to the card, and bring no code
    assert folder_problems(pushed) == []
    assert main(["heads", "pull", str(pushed)]) == 0
    assert not any(hub.pulled_heads().rglob("*.py"))
    monkeypatch.undo()
    monkeypatch.chdir(workplace)
    assert "The hub cannot be reached" in call(push, 2).err  # tests are offline
    assert "'own' is no hub id" in call(["heads", "push", str(heads), "own"], 2).err
    (heads / "run.yaml").unlink()
    assert "is not complete: no run.yaml" in call(push, 2).err


def test_transformers_generate_uses_pushed_heads_by_folder_or_hub_id(
    workplace: Path, pushed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["heads", "push", "heads", "me/own"]) == 0
    (pushed.parents[1] / "refs").mkdir()
    (pushed.parents[1] / "refs" / "main").write_text(pushed.name)
    shutil.copytree(pushed, copied := tmp_path / "copied")
    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    wrapped = noted(monkeypatch, facade, "wrap", lambda _, heads: heads)
    model = make_model("llama", vocab_size=len(WORDS))
    inputs = make_tokenizer()("a b c a", return_tensors="pt")
    options = {**inputs, "max_new_tokens": 20, "do_sample": False}
    generate: Any = model.generate
    plain = generate(**options)
    remote: dict[str, Any] = {"trust_remote_code": True, "drafter": "exit"}
    local = {"custom_generate": str(copied), **remote}
    hub_id = {"custom_generate": "me/own", **remote, "cache_dir": str(tmp_path), "revision": "main"}
    for source in (local, local, hub_id, hub_id):
        assert torch.equal(generate(**options, **source), plain)
    assert wrapped == [copied, pushed]
    with torch.no_grad():
        model.lm_head.weight[0] += 1
    with pytest.raises(HeadsMismatch, match="fits tiny-vicuna"):
        generate(**options, **hub_id)
    remote_model: Any = model
    pushed_code = remote_model.load_custom_generate(copied, trust_remote_code=True)
    with pytest.raises(HeadsNotFound, match="'me/own' is no local folder, and the hub"):
        pushed_code(model=model, **options)
    weight = weakref.ref(model.lm_head.weight)
    del model, remote_model, generate
    gc.collect()
    assert weight() is None, "the model is kept alive"
