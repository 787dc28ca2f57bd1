"""Who gave each token, over the wire: the same counts as usage has, and the answer's own text."""

from __future__ import annotations

from collections import Counter
from typing import Any

import openai
import pytest

from selfspec.decoding.prices import DraftCost
from selfspec.decoding.stats import Round
from selfspec.serve.pieces import Explanation
from tests.serve.live import Running

LISTS = [{"role": "user", "content": "Repeat three times: 🦜 red, green, blue 🪁 and grey."}]
EXPLAIN = {"explain": True}


def ask(client: openai.OpenAI, speculation: Any = EXPLAIN, **more: Any) -> Any:
    asked = {"model": None, "messages": LISTS, "max_tokens": 40, "temperature": 0.0, **more}
    return client.chat.completions.create(**asked, extra_body={"speculation": speculation})


def streamed(client: openai.OpenAI, **more: Any) -> tuple[list[str], list[list[Any]]]:
    """By choice: the text, and the rounds of all its chunks."""
    texts = [""] * more.get("n", 1)
    rounds: list[list[Any]] = [[] for _ in texts]
    for chunk in ask(client, stream=True, **more):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            told = getattr(choice, "speculation", {"rounds": []})
            rounds[choice.index] += told["rounds"]
            shown = "".join(
                token["text"] for entry in rounds[choice.index] for token in entry["tokens"]
            )
            assert texts[choice.index].startswith(shown)
    return texts, rounds


def joined(rounds: list[Any]) -> str:
    return "".join(token["text"] for entry in rounds for token in entry["tokens"])


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 0.9, "seed": 3, "n": 2},
        {"stop": ["blue", "\n\n"]},
        {"speculation": {"drafter": "ngram", "explain": True}},
        {"speculation": {"drafter": "none", "explain": True}},
    ],
)
def test_sources_are_those_of_usage_and_texts_join(
    client: openai.OpenAI, more: dict[str, Any]
) -> None:
    answer = ask(client, **more)
    texts, rounds = streamed(client, **more)
    drafted, accepted, tokens = Counter[str](), Counter[str](), 0
    for choice in answer.choices:
        told = choice.speculation["rounds"]
        assert joined(told) == choice.message.content == texts[choice.index]
        assert told == rounds[choice.index]
        first, *others = told
        assert (first["steps"], first["drafts"]) == (0, [])
        for entry in others:
            drafted.update(draft["source"] for draft in entry["drafts"])
            accepted.update(draft["source"] for draft in entry["drafts"] if draft["accepted"])
            given = [token["source"] for token in entry["tokens"]]
            kept = sum(draft["accepted"] for draft in entry["drafts"])
            assert "model" not in given[:kept]
            assert given[kept:] in ([], ["model"])
            assert entry["steps"] >= 1
            assert entry["steps"] > 1 or not entry["drafts"]  # heads may be asked in vain
        tokens += sum(len(entry["tokens"]) for entry in told)
    found = answer.usage.speculation
    assert found["rounds"] == sum(len(c.speculation["rounds"]) - 1 for c in answer.choices)
    assert tokens == answer.usage.completion_tokens
    assert {
        source: {"drafted": drafted[source], "accepted": accepted[source]} for source in drafted
    } == found["sources"]
    assert bool(drafted) == (more.get("speculation", EXPLAIN).get("drafter") != "none")


def test_nothing_is_explained_unless_asked(client: openai.OpenAI) -> None:
    for speculation in (None, True, False, {"drafter": "ngram"}, {"explain": False}):
        answer = ask(client, speculation)
        assert not hasattr(answer.choices[0], "speculation")
    assert not any(
        hasattr(c, "speculation") for k in ask(client, None, stream=True) for c in k.choices
    )
    with pytest.raises(openai.BadRequestError, match="explain"):
        ask(client, {"explain": 1})


def test_text_completions_are_explained_too(client: openai.OpenAI, server: Running) -> None:
    answer: Any = client.completions.create(
        model=server.speculator.label,
        prompt=["One, two, three,", "Red, green,"],
        max_tokens=8,
        temperature=0,
        extra_body={"speculation": EXPLAIN},
    )
    for choice in answer.choices:
        assert joined(choice.speculation["rounds"]) == choice.text
        assert choice.speculation["num_layers"] == server.speculator.backbone.num_layers


def entry(tokens: list[int], drafts: list[int], kept: list[int], **more: Any) -> Round:
    return Round(
        tokens=tokens,
        draft_tokens=drafts,
        exit_layers=more.pop("layers", [0] * len(drafts)),
        sources=more.pop("sources", ["exit"] * len(drafts)),
        kept=kept,
        ended="unsure",
        **more,
    )


def test_a_round_waits_for_its_text_and_a_stop_cuts_it() -> None:
    told = Explanation(None, DraftCost(rows=(0.5, 0.25), head=0.125, num_layers=4))
    told.add(entry([1], [], [], prefill=True), ["on"])
    assert [one["steps"] for one in told.shown("on")["rounds"]] == [0]
    told.add(entry([2, 3, 4], [2, 3, 9], [0, 1], layers=[2, 1, 0], heads=4), ["e E", "N", "D!"])
    assert told.shown("e ")["rounds"] == []  # END may begin here
    told.add(entry([5], [], []), ["?"])
    told.rest("!")
    first, second = told.shown("", last=True)["rounds"]
    assert [token["text"] for token in first["tokens"]] == ["e ", "", ""]
    assert [token["layer"] for token in first["tokens"]] == [2, 1, None]
    assert [draft["text"] for draft in first["drafts"]] == ["e ", "", ""]
    assert [draft["parent"] for draft in first["drafts"]] == [-1, 0, 1]
    assert [draft["accepted"] for draft in first["drafts"]] == [True, True, False]
    assert first["steps"] == 1 + (0.5 + 0.25 + 0.25) + (2 + 1 + 0) / 4 + 4 * 0.125
    assert [token["text"] for token in second["tokens"]] == [""]
    assert second["steps"] == 1


def test_rejected_drafts_have_their_text_behind_what_they_follow(server: Running) -> None:
    speculator = server.speculator
    tokenizer = speculator.tokenizer
    assert tokenizer is not None
    one, two, three = (tokenizer.encode(f" {word}")[0] for word in ("one", "two", "three"))
    told = Explanation(tokenizer, speculator.runtime.draft_cost(speculator.options))
    told.add(entry([one], [], [], prefill=True), [" one"])
    told.add(entry([one], [two, three], [], parents=[-1, -1], sources=["ngram"] * 2), [" one"])
    _, second = told.shown(" one one")["rounds"]
    assert [draft["text"] for draft in second["drafts"]] == [" two", " three"]
    assert {draft["layer"] for draft in second["drafts"]} == {None}
