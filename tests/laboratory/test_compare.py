"""Settings and versions in turns: who answers what, what is compared with what, what differs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from eval import compare, lab, two_versions
from selfspec.errors import InvalidOption

# --- settings


def test_drafters_are_set_beside_plain_decoding_and_the_first(
    tiny_model: str, prompts: str, tmp_path: Path
) -> None:
    asked: Any = {"model": tiny_model, "heads": "logit-lens", "dtype": "float32", "suite": prompts}
    drafters = ["chain=exit:layers=2,max_tokens=1", "text=ngram;row=0"]
    out = tmp_path / "out"
    compare.main(out, drafters, **asked, limit=2, new_tokens=6)
    answers = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    assert all(answer["runs"].keys() == {"plain", "chain", "text"} for answer in answers)
    assert all(run["equal"] for answer in answers for run in answer["runs"].values())
    methods = json.loads((out / "summary.json").read_text())["methods"]
    assert methods["text"]["setting"] == {"drafter": "ngram", "costs": "row=0"}
    page = (out / "table.md").read_text()
    assert "## Over chain" in page
    assert "| chain | 1.000 (1.000 to 1.000) | 1.00 |" in page


@pytest.mark.parametrize("text", ["ngram", "=ngram", "a=", "plain=ngram"])
def test_a_setting_without_a_name_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match="is not NAME=DRAFTER"):
        compare.named_settings([text])


def test_ratios_are_of_sums_and_answers_of_one_token_are_left_out() -> None:
    found = lab.faster([4.0, 2.0, 0.0], [1.0, 4.0, 1.0], ["a", "b", "b"])
    assert (found["ratio"], found["worst"]) == (6 / 5, 0.5)
    assert found["tasks"] == {"a": 4.0, "b": 0.5}
    assert lab.faster_cells(found | {"interval": (1, 2)}) == [
        "1.200 (1.000 to 2.000)",
        *("0.50", "4.00", "0.50"),
    ]


# --- versions


class Fake:
    """Answers with as many seconds as it is told, and with a part of its own for one prompt."""

    def __init__(self, seconds: float, odd: str = "", part: str = "") -> None:
        self.seconds, self.odd, self.part = seconds, odd, part
        self.asked: list[Mapping[str, Any]] = []

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.asked.append(request)
        own = {self.part: [3, 4]} if request["prompt"] == self.odd else {}
        counts = {"rounds": len(request["prompt"])}
        answer = {"ids": [1, 2], "logits": "ab", "counts": counts, "seconds": self.seconds}
        return answer | own


def test_every_prompt_is_asked_plainly_and_with_drafts_of_both() -> None:
    versions = [Fake(2.0), Fake(1.0)]
    found = two_versions.answers([one.ask for one in versions], ["a", "bc"], 7)
    assert list(zip(found.prompt, found.way, strict=True)) == [
        *(("a", "plain"), ("a", "default"), ("bc", "plain"), ("bc", "default")),
    ]
    for version in versions:
        assert [request.get("speculate") for request in version.asked] == [False, None] * 2
        assert all(request["max_new_tokens"] == 7 for request in version.asked)
    assert set(found.differ) == {""}
    for row in two_versions.speeds(found).itertuples(index=False):
        assert tuple(row) == (1.0, 2.0, 2.0, 2.0, 2.0, 2.0)


@pytest.mark.parametrize("part", ["ids", "logits", "counts"])
def test_what_differs_is_named(part: str) -> None:
    found = two_versions.answers([Fake(1.0).ask, Fake(1.0, "bc", part).ask], ["a", "bc"], 7)
    assert list(found.differ) == ["", "", part, part]
