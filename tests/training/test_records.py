"""A folder of fitted heads describes itself and gives the same bits back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
import yaml

from selfspec.api.chat_template import read
from selfspec.heads.exit_heads import ExitHeads
from selfspec.model.backbone import Backbone
from selfspec.training import records
from selfspec.training.text import Conversation
from tests.models import make_model
from tests.training.test_fit import LAYERS, fitted

FILES = {
    "README.md",
    "config.json",
    "curves.png",
    "metrics.json",
    "metrics.jsonl",
    "model.safetensors",
    "run.yaml",
}


def test_a_written_folder_gives_the_same_bits_back(
    tmp_path: Path, talks: list[Conversation]
) -> None:
    backbone = Backbone(make_model("llama", dtype := torch.bfloat16))
    result = fitted(backbone, talks, head_type="deep-fused")
    records.write(tmp_path, result, {"epochs": 2})
    assert {file.name for file in tmp_path.iterdir()} == FILES
    unembedding = backbone.unembedding
    loaded = ExitHeads.from_pretrained(tmp_path, unembedding, backbone.fingerprint, "tiny")
    hidden = torch.randn(7, backbone.hidden_size).to(dtype)
    for layer in LAYERS:
        assert torch.equal(loaded[layer](hidden, -hidden), result.heads[layer](hidden, -hidden))
        assert next(loaded[layer].parameters()).dtype == dtype


def test_the_card_and_the_run_are_made_from_the_records(
    backbone: Backbone, talks: list[Conversation], tmp_path: Path
) -> None:
    result = fitted(backbone, talks)
    records.write(tmp_path, result, {"exit_layers": [2, 4]})
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics == result.metrics
    card = (tmp_path / "README.md").read_text()
    assert f"| 4 | {100 * metrics['layers']['4']['agreement']:.1f} % |" in card
    assert "210 answer positions (a 20th of the data)" in card
    assert f"{metrics['steps']} steps" in " ".join(card.split())
    assert "second draft" not in card
    run = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert run["run"] == {"exit_layers": [2, 4]}
    assert run["machine"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == result.epochs
    deep = fitted(backbone, talks, head_type="deep-fused", ce_share=0.5)
    card = records.card(deep.heads.config, deep.metrics)
    share = deep.metrics["layers"]["2"]["agreement_second"]
    assert f"| {100 * share:.1f} % |" in card
    assert "0.5 of it cross-entropy" in card


def test_the_header_names_a_model_of_the_hub_and_the_card_how_to_use_the_heads(
    backbone: Backbone, talks: list[Conversation]
) -> None:
    result = fitted(backbone, talks)
    known = replace(result.heads.config, base_model="lmsys/vicuna-7b", chat_template=read("vicuna"))
    text = records.card(known, result.metrics, licence="apache-2.0")
    header = yaml.safe_load(text.split("---\n")[1])
    assert header["base_model"] == "lmsys/vicuna-7b"
    assert (header["license"], header["library_name"]) == ("apache-2.0", "selfspec")
    assert "selfspec generate --model lmsys/vicuna-7b --heads HEADS" in text
    assert "chat template that the model does not bring, `vicuna`" in text
    local = records.card(result.heads.config, result.metrics)
    assert "base_model" not in yaml.safe_load(local.split("---\n")[1])
    assert "--model MODEL --heads HEADS" in local
