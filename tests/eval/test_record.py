"""Records: how far they follow drafts, what they hold of each turn, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from selfspec.api.speculator import Speculator, wrap
from selfspec.decoding.drafters.trees import LEAST_SAID
from selfspec.errors import HeadsNotFound, InvalidOption
from selfspec.eval.options import RecordOptions
from selfspec.eval.record import GUESSES, NONE, Recorder, record
from selfspec.eval.results import Question
from tests.models import make_model, random_ids
from tests.records import OPTIONS, recorded
from tests.talks import make_tokenizer


@pytest.mark.parametrize("kind", ["translator", "deep-fused"])
def test_branches_are_followed_as_far_as_a_setting_may_go(kind: str) -> None:
    """A child where the draft may be taken and another may follow; a tree no deeper than W_max."""
    found, _ = recorded(kind)
    assert found.guesses.shape[1] == (GUESSES if kind == "deep-fused" else 0)
    truth = {int(r): int(t) for r, t in zip(found.roots, found.answers[1:], strict=False)}
    truth.pop(NONE)
    depths = dict.fromkeys(truth, 1)
    for node in range(len(found.tokens)):
        for column, child in enumerate(found.children[node].tolist()):
            token = int(found.tokens[node, column])
            if child == NONE:
                continue
            assert token not in found.info.end_tokens
            if child in truth:
                assert truth[node] == token  # a right draft leads to the next place
                assert kind == "translator"
                continue
            assert found.confidence[node, column].max() >= found.info.min_threshold
            depths[child] = depths[node] + 1  # nodes are numbered from the root on
        for rank, child in enumerate(found.behind[node].tolist()):
            if child != NONE:
                assert found.chances[node, :, rank].max() >= LEAST_SAID
                assert found.guesses[node, rank] not in found.info.end_tokens
                depths[child] = depths[node] + 1
    assert max(depths.values()) == OPTIONS.max_draft_tokens
    assert depths.keys() == set(range(len(found.tokens)))


def test_confidence_falls_with_alpha_and_layers_of_one_mind_share_a_branch() -> None:
    found, _ = recorded("translator")
    assert (np.diff(found.confidence, axis=-1) <= 0).all()
    shared = [
        (tokens[a] == tokens[b], children[a] == children[b])
        for tokens, children in zip(found.tokens, found.children, strict=True)
        for a, b in [(0, 1), (1, 2)]
        if NONE not in (children[a], children[b])
    ]
    assert any(same for same, _ in shared)
    assert all(same == together for same, together in shared)


def test_every_turn_is_recorded_behind_the_plain_answers_to_those_before() -> None:
    speculator = wrap(make_model("llama"), make_tokenizer(), heads="logit-lens")
    questions = [
        Question(id="x", task="chat", turns=("a b", "c")),
        Question(id="y", task="QA", turns=("b",)),
    ]
    seen: list[tuple[int, int]] = []
    found = record(
        speculator,
        questions,
        RecordOptions(max_new_tokens=6),
        lambda n, of, _: seen.append((n, of)),
    )
    assert [prompt.id for prompt in found.prompts] == ["x", "x", "y"]
    assert found.prompts[1].prompt_tokens > found.prompts[0].prompt_tokens + 3
    assert seen == [(0, 2), (1, 2), (2, 2)]
    mean = sum(p.prompt_tokens + p.new_tokens / 2 for p in found.prompts) / 3
    assert found.mean_context == round(mean)


@pytest.fixture(scope="module")
def lens() -> Speculator:
    """It drafts with prompt lookup: `tune` may find that heads pay that `calibrate` left out."""
    return wrap(make_model("llama"), heads="logit-lens", drafter="ngram")


@pytest.mark.parametrize(
    ("options", "floor"), [({"exit_layers": (4,)}, 0.01), ({}, 0.2), ({"min_threshold": 0.6}, 0.6)]
)
def test_heads_are_recorded_whoever_drafts_and_a_single_one_further_down(
    lens: Speculator, options: dict[str, Any], floor: float
) -> None:
    recorder = Recorder(lens, RecordOptions(max_new_tokens=4, **options))
    recorder.prompt(random_ids(5), "x")
    assert len(recorder.record().tokens) > 0
    assert recorder.record().info.min_threshold == floor


def test_what_cannot_be_recorded_is_refused(
    lens: Speculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HeadsNotFound, match="without exit heads"):
        Recorder(wrap(lens.model), RecordOptions(exit_layers=(2,)))
    with pytest.raises(InvalidOption, match="exit layer 6 is not among"):
        Recorder(lens, RecordOptions(exit_layers=(2, 6)))
    for name, value, reason in (
        ("repetition_penalty", 1.2, "RepetitionPenaltyLogitsProcessor"),
        ("max_time", 60.0, "stopping criteria"),
    ):  # greedy decoding is more than the top token
        with monkeypatch.context() as patch:
            patch.setattr(lens.model.generation_config, name, value)
            with pytest.raises(InvalidOption, match=f"asks for {reason}, which cannot"):
                Recorder(lens, RecordOptions()).prompt(random_ids(5), "x")
