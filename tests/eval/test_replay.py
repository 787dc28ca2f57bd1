"""Records of a model's answers, and replay from one alone, which gives the rounds of real runs."""

from __future__ import annotations

import itertools
import random
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from selfspec.api.speculator import Speculator, wrap
from selfspec.api.text import Prompt
from selfspec.config import SpeculationOptions
from selfspec.decoding.drafters.trees import LEAST_SAID
from selfspec.decoding.stats import Round
from selfspec.errors import HeadsNotFound, InvalidOption
from selfspec.eval.record import GUESSES, NONE, Record, Recorder, record, replay
from selfspec.eval.results import Question, RecordOptions
from selfspec.model.backbone import Backbone
from selfspec.options import CONTROLLERS, Costs, Exit, GammaTune, Ngram
from tests.api.test_default_model import pytestmark as default_model
from tests.models import make_model, random_ids
from tests.records import NEW_TOKENS, OPTIONS, PROMPTS, recorded
from tests.talks import make_tokenizer

SEEDS = 28
"""For each kind of heads and drafter: what pauses drafting and takes it up again is rarer."""


def real_rounds(
    speculator: Speculator, prompt: Prompt, new_tokens: int, options: SpeculationOptions
) -> list[Round]:
    """What the runtime does."""
    call = speculator.call(prompt, {"max_new_tokens": new_tokens, "do_sample": False})
    return list(speculator.engine().add(call.only(), options))


def random_setting(
    record: Record, seed: int, drafter: str = "exit", *, trees: bool = False
) -> SpeculationOptions:
    """Settings, a controller and costs by chance, within what was recorded."""
    dice, most = random.Random(f"{seed} {drafter}"), record.max_draft_tokens
    fitted, floor = record.exit_layers, record.min_threshold
    layers = (0,) if trees else tuple(sorted(dice.sample(fitted, dice.randint(1, len(fitted)))))
    taus = [max(dice.uniform(floor, 1.0) ** 2, floor) for _ in layers]
    shortest = dice.randint(1, most)
    values: dict[str, Any] = {
        "shortest": shortest,
        "longest": dice.randint(shortest, most),
        "threshold": dice.uniform(0.1, 0.9),
        "rate": dice.uniform(0.1, 1.0),
        "step": dice.uniform(0.0, 3.0),
    }
    name = dice.choice([name for name in CONTROLLERS if name != "cm-asd" or drafter == "ngram"])
    known = {entry.name for entry in fields(CONTROLLERS[name])}
    return SpeculationOptions(
        drafter=drafter,
        exit=Exit(
            layers=layers,
            threshold=tuple(taus) if dice.random() < 0.5 else taus[0],  # one for all
            anneal_strength=dice.choice(record.anneal_strengths),
            max_depth=dice.choice([None, *layers]),
            max_tokens=dice.randint(1, most),
            guesses=dice.randint(2, 8) if trees else 1,
            max_rows=dice.randint(2, 12),
        ),
        controller=CONTROLLERS[name](**{key: values[key] for key in values.keys() & known}),
        ngram=Ngram(size=dice.randint(1, 4), max_tokens=dice.randint(1, 9)),
        costs=Costs(
            row=dice.choice([None, 0.0, 0.05, (0.5, 0.2), (0.05, 0.1, 0.2)]),
            head=dice.choice([0.0, 0.08, 1.0, 9.0]),
        ),
        never_slower=dice.random() < 0.8,
    )


@pytest.mark.parametrize(
    ("kind", "drafter"),
    [
        *(("translator", drafter) for drafter in ("ngram", "exit", "ngram+exit")),
        ("low-rank", "ngram+exit"),
        *itertools.product(("deep-fused", "deep-fused-0"), ("exit", "ngram+exit")),
    ],
)
def test_random_settings_replay_as_they_run(
    kind: str, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # else a whole answer is a first pause
    monkeypatch.setattr("selfspec.decoding.drafters.trees.DEAR", 100.0)
    record, speculator = recorded(kind)
    trees, runs = 0 in record.exit_layers, []
    for seed in range(SEEDS):
        options = random_setting(record, seed, drafter, trees=trees and seed % 2 == 0)
        prompt = seed % len(PROMPTS)
        expected = real_rounds(speculator, random_ids(5, prompt), NEW_TOKENS, options)
        runs.append(replay(record, prompt, options))
        assert runs[-1] == expected, options
        if options.grows_trees:  # else the controller asks for chains
            assert all(len(entry.draft_tokens) < options.exit.max_rows for entry in runs[-1])
    rounds = [entry for run in runs for entry in run]
    assert {source for entry in rounds for source in entry.sources} == {*drafter.split("+")}
    assert {run[-1].stop_reason for run in runs} == {"eos", "length"}
    assert len({len(entry.draft_tokens) for entry in rounds}) > 3
    if drafter == "ngram":
        return
    assert "unsure" in {entry.ended for entry in rounds}
    # drafting went on behind a wrong draft, and behind a right one; it paused, and was taken up
    assert any(0 < entry.accepted < len(entry.draft_tokens) for entry in rounds)
    asked = [[one.ended != "off" for one in run if "ngram" not in one.sources][1:] for run in runs]
    paused = [drafts[drafts.index(False) :] for drafts in asked if False in drafts]
    assert len(paused) > sum(True in drafts for drafts in paused) > 0
    grown = [entry for entry in rounds if entry.parents is not None]
    if trees:
        assert any(len({*entry.depths}) < len(entry.depths) for entry in grown)  # siblings
        assert any(entry.kept != [*range(entry.accepted)] for entry in grown)
        assert any(len({*one.sources}) > 1 for one in grown) == (drafter == "ngram+exit")


@pytest.mark.parametrize("drafter", ["none", "exit"])
def test_plain_decoding_is_replayed_too(drafter: str) -> None:
    record, speculator = recorded("translator")
    options = SpeculationOptions(drafter=drafter, speculate=drafter != "exit")
    expected = real_rounds(speculator, random_ids(5, 0), NEW_TOKENS, options)
    assert replay(record, 0, options) == expected


def test_where_a_model_runs_no_trees_chains_are_recorded_and_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, speculator = recorded("deep-fused-0")
    monkeypatch.setattr(Backbone, "runs_trees", False)
    recorder = Recorder(speculator, OPTIONS)
    recorder.prompt(random_ids(5, 1), "1")
    record = recorder.record()
    assert record.guesses.shape[1] == 0
    exits = Exit(threshold=0.2, guesses=4, max_tokens=3, anneal_strength=0.0)
    options = SpeculationOptions(exit=exits, never_slower=False)
    found = replay(record, 0, options)
    assert found == real_rounds(speculator, random_ids(5, 1), NEW_TOKENS, options)
    assert sum(len(entry.draft_tokens) for entry in found) > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"drafter": "exit:threshold=0.1"},
        {"drafter": "exit:anneal_strength=0.3"},
        {"drafter": "exit:max_tokens=5"},
        {"drafter": "exit:guesses=4"},
        {"drafter": "exit:layers=2"},
        {"controller": "gammatune"},
        {"controller": "cm-asd"},
        {"drafter": "ngram+draft-model"},
        {"drafter": "rest"},
        {"acceptance": "cm-asd"},
    ],
    ids=str,
)
def test_what_was_not_recorded_is_refused(changes: dict[str, object]) -> None:
    record, _ = recorded("translator")
    options = SpeculationOptions(exit=Exit(anneal_strength=0.5, max_tokens=4)).updated(changes)
    with pytest.raises(InvalidOption):
        replay(record, 0, options)


@pytest.mark.parametrize("new_tokens", [pytest.param(12, marks=default_model)])
def test_the_default_model_replays_as_it_runs(default: Speculator, new_tokens: int) -> None:
    """Rows round alike, however many run together."""
    prompt = "Translate into French: The train leaves at nine."
    recorder = Recorder(
        default, RecordOptions(max_new_tokens=new_tokens, max_draft_tokens=3, min_threshold=0.25)
    )
    recorder.prompt(prompt, "train")
    record = recorder.record()
    for seed, drafter in enumerate(("exit", "ngram+exit", "ngram+exit")):
        options = random_setting(record, seed, drafter)
        options = replace(options, controller=GammaTune(longest=3)) if seed == 2 else options
        found = replay(record, 0, options)
        assert found == real_rounds(default, prompt, new_tokens, options), options


@pytest.mark.parametrize("kind", ["translator", "deep-fused"])
def test_branches_are_followed_as_far_as_a_setting_may_go(kind: str) -> None:
    """A child where the draft may be taken and another may follow; a tree no deeper than W_max."""
    found, _ = recorded(kind)
    assert found.guesses.shape[1] == (GUESSES if kind == "deep-fused" else 0)
    end_tokens = found.prompts[0].end_tokens
    truth = {int(r): int(t) for r, t in zip(found.roots, found.answers[1:], strict=False)}
    truth.pop(NONE)
    depths = dict.fromkeys(truth, 1)
    for node in range(len(found.tokens)):
        for column, child in enumerate(found.children[node].tolist()):
            token = int(found.tokens[node, column])
            if child == NONE:
                continue
            assert token not in end_tokens
            if child in truth:
                assert truth[node] == token  # a right draft leads to the next place
                assert kind == "translator"
                continue
            assert found.confidence[node, column].max() >= found.min_threshold
            depths[child] = depths[node] + 1  # nodes are numbered from the root on
        for rank, child in enumerate(found.behind[node].tolist()):
            if child != NONE:
                assert found.chances[node, :, rank].max() >= LEAST_SAID
                assert found.guesses[node, rank] not in end_tokens
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
    options = RecordOptions(max_new_tokens=6)
    found = record(speculator, questions, options, lambda n, of, _: seen.append((n, of)))
    assert [prompt.id for prompt in found.prompts] == ["x", "x", "y"]
    assert len(found.prompts[1].ids) > len(found.prompts[0].ids) + 3
    assert seen == [(0, 2), (1, 2), (2, 2)]
    mean = sum(len(one.ids) + len(one.answer) / 2 for one in found.prompts) / 3
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
    assert recorder.record().min_threshold == floor


def test_what_cannot_be_recorded_is_refused(
    lens: Speculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HeadsNotFound, match="without exit heads"):
        Recorder(wrap(lens.model), RecordOptions(exit_layers=(2,)))
    for name, value, reason in (
        ("repetition_penalty", 1.2, "RepetitionPenaltyLogitsProcessor"),
        ("max_time", 60.0, "stopping criteria"),
    ):  # greedy decoding is more than the top token
        with monkeypatch.context() as patch:
            patch.setattr(lens.model.generation_config, name, value)
            with pytest.raises(InvalidOption, match=f"asks for {reason}, which cannot"):
                Recorder(lens, RecordOptions()).prompt(random_ids(5), "x")
