"""The documents' experiments run end to end on tiny models, and compute what they should."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from eval import lab
from eval.papers import self_sd, specbound
from eval.papers.specbound import Dial, DialledHead, early_model, round_cost
from selfspec.api.speculator import wrap
from selfspec.errors import InvalidOption, UnsupportedModel
from selfspec.eval.results import Answer, Run
from selfspec.heads.heads import DraftVocabulary, LogitLensHead
from selfspec.model.backbone import Backbone
from selfspec.options import Skip
from tests.models import make_model, random_ids
from tests.talks import make_tokenizer

# --- Self-SD: which layers drafts leave out


def test_rounds_end_behind_an_unsure_draft_and_go_on_behind_the_first_wrong_one() -> None:
    right = [True, True, False, True, True, True, True]
    assert self_sd.rounds(right, [0.9] * 7) == [(7, 2), (4, 4)]
    assert self_sd.rounds(right, [0.9, 0.7, 0.9, 0.9, 0.9, 0.9, 0.9]) == [(2, 2), (4, 4)]
    assert self_sd.rounds([True] * 12, [0.9] * 12) == [(8, 8), (3, 3)]


def test_the_search_leaves_out_more_layers_while_it_notes_what_drafts_come_to(
    prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = wrap(make_model("llama", torch.float64, vocab_size=10), make_tokenizer())
    monkeypatch.setattr(lab, "loaded", lambda **_: tiny)

    def run(**options: Any) -> dict[str, Any]:
        self_sd.main(tmp_path, suite=prompts, new_tokens=12, limit=2, **options)
        found: dict[str, Any] = json.loads((tmp_path / "summary.json").read_text())
        return found

    found = run(ratio=0.5)
    sizes = [one["skipped"] for one in found["sizes"]]
    assert [len(one) for one in sizes] == [1, 2, 3]
    assert all(set(one) < set(more) <= {2, 3, 4, 5, 6} for one, more in pairwise(sizes))
    assert found["skipped"] == max(found["sizes"], key=lambda one: one["speed"])["skipped"]
    costs = [one["cost"] for one in found["sizes"]]
    assert 1.0 > costs[0] > costs[1] > costs[2] > 0.5
    monkeypatch.setattr(self_sd, "RULE", Skip(threshold=0.0, max_tokens=1))
    assert run(ratio=0.2)["sizes"][0]["speed"] != found["sizes"][0]["speed"]


# --- SpecBound: early models, heads that are wrong on demand, what a round should cost

IDS = random_ids(11)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


# --- early models


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.bfloat16), ("gemma3", torch.float32)], ids=str
)
def test_layers_that_add_nothing_change_no_bit(family: str, dtype: torch.dtype) -> None:
    base = make_model(family, dtype)
    before = logits(base)
    deep = early_model(base, 6, 3)
    assert torch.equal(logits(deep), before)
    assert Backbone(deep).num_layers == 9  # conformance, and agreement of the packed weights
    layers = [*base.get_decoder().layers, *deep.get_decoder().layers]
    assert len({layer.mlp.gate_proj.weight.data_ptr() for layer in layers}) == 6 + 9
    assert layers[-1].mlp.gate_proj.weight.any()
    assert torch.equal(logits(base), before)
    with torch.no_grad():  # a shorter one answers what the lens reads there
        hidden = base(IDS, output_hidden_states=True).hidden_states[4]
        expected = base.get_output_embeddings()(base.get_decoder().norm(hidden))
    assert torch.equal(logits(early_model(base, 4, 2)), expected)


def test_a_model_that_cannot_be_made_early_is_refused() -> None:
    odd = make_model("llama")
    with pytest.raises(InvalidOption, match="7 layers asked for, the model has 6"):
        early_model(odd, 7, 1)
    for layer in odd.model.layers:
        layer.mlp = torch.nn.Identity()
    with pytest.raises(UnsupportedModel, match="down_proj"):
        early_model(odd, 6, 1)


# --- the head


def test_a_head_is_wrong_as_often_as_it_is_dialled() -> None:
    states = torch.randn(4000, 32, generator=torch.Generator().manual_seed(4))  # [4000, d]
    unembedding = Backbone(make_model("llama"), executor="generic").unembedding
    vocabulary = DraftVocabulary.of(unembedding, None)
    head = DialledHead(unembedding, vocabulary)
    right = LogitLensHead(unembedding, vocabulary)(states).argmax(-1)
    for share in (0.0, 0.3, 1.0):
        head.wrong_share = share
        wrong = (head(states).argmax(-1) != right).double().mean()
        assert wrong == pytest.approx(share, abs=0.03)  # four standard deviations


# --- the formula


def test_a_round_commits_what_stays_and_costs_plain_steps() -> None:
    assert lab.expected_tokens(0.8, 6) == pytest.approx((1 - 0.8**7) / (1 - 0.8))
    assert lab.expected_tokens(1.0, 3) == 4
    assert round_cost(4, 0.25, rows=5, head=0.01) == pytest.approx(5 * 0.25 + 0.75 + 0.04)


def test_points_are_ratios_of_totals_of_medians() -> None:
    dial = Dial(2, 0.1)
    plain = [1] * 10
    kept = [3, 1, 3, 2, 1]  # tokens of each round; behind nine of ten there is room for none

    def run(tokens: list[int], seconds: float, equal: bool = True) -> Run:
        heard = [(1, 9.0), *((count, seconds / len(tokens)) for count in tokens)]
        return Run(arrivals=heard, equal=equal, counts={"seconds": {"heads": 0.16}})

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


# --- all of it


def test_every_setting_is_timed_in_turn_with_plain_decoding(
    tiny_model: str, prompts: str, tmp_path: Path
) -> None:
    what: dict[str, Any] = {"model": tiny_model, "dtype": "float32", "suite": prompts, "limit": 2}
    heads: dict[str, Any] = {"layers": 3, "extra_layers": "9,3", "draft_vocab_size": 90}
    heads |= {"max_draft_tokens": "1,3", "wrong_shares": "0,0.4"}
    specbound.main(tmp_path / "out", max_new_tokens=13, repeats=2, **what, **heads)
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
