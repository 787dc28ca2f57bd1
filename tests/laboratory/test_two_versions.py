"""Two versions side by side: every difference is said, and a speed is a ratio with its interval."""

from __future__ import annotations

from typing import Any

import pytest

from eval import two_versions


class Fake:
    """Answers with as many seconds as it is told, and with ids of its own for one prompt."""

    def __init__(self, seconds: float, odd: str = "") -> None:
        self.seconds = seconds
        self.odd = odd
        self.asked: list[dict[str, Any]] = []

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(request)
        ids = [1, 2, 3] if request["prompt"] == self.odd else [1, 2]
        counts = {"rounds": len(request["prompt"])}
        return {"ids": ids, "logits": "ab", "counts": counts, "seconds": self.seconds}


def test_every_prompt_is_asked_plainly_and_with_drafts_of_both() -> None:
    versions: Any = [Fake(2.0), Fake(1.0)]
    found = two_versions.answers(versions, ["a", "bc"], 7)
    assert [(one.prompt, one.way) for one in found] == [
        *(("a", "plain"), ("a", "default"), ("bc", "plain"), ("bc", "default")),
    ]
    for version in versions:
        assert [request.get("speculate") for request in version.asked] == [False, None] * 2
        assert all(request["max_new_tokens"] == 7 for request in version.asked)
    assert two_versions.bits(found) == ["8 tokens and their logits, 0 answers differ"]
    for line in two_versions.seconds(found):
        assert "2.000 (2.000 to 2.000) times as fast" in line


def test_a_difference_is_named() -> None:
    versions: Any = [Fake(1.0), Fake(1.0, odd="bc")]
    lines = two_versions.bits(two_versions.answers(versions, ["a", "bc"], 7))
    assert lines == [
        "plain ids differ: 'bc'",
        "default ids differ: 'bc'",
        "10 tokens and their logits, 2 answers differ",
    ]


@pytest.mark.parametrize("part", ["logits", "counts"])
def test_equal_tokens_may_still_differ(part: str) -> None:
    before = {"ids": [1], "logits": "ab", "counts": {"rounds": 1}}
    one = two_versions.Answered("a", "plain", before, before | {part: "other"})
    assert one.difference == part
