"""Records of a model's answers, replay from one alone, and the choice of a setting by these."""

from __future__ import annotations

import itertools
import random
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from selfspec.api.speculator import Speculator, wrap
from selfspec.api.text import Prompt
from selfspec.api.tuned import TUNED_OPTIONS
from selfspec.config import SpeculationOptions
from selfspec.decoding.costs import Exits, MeasuredCosts, expected
from selfspec.decoding.drafters.trees import LEAST_SAID
from selfspec.decoding.stats import Round
from selfspec.errors import HeadsNotFound, InvalidOption
from selfspec.eval.results import Question, RecordOptions
from selfspec.eval.tune import (
    GUESSES,
    NONE,
    Record,
    Recorder,
    Setting,
    Tuned,
    cross_validated,
    folds,
    plain_seconds,
    record,
    replay,
    score,
    screened,
    thresholds,
    tune,
)
from selfspec.model.backbone import Backbone
from selfspec.options import CONTROLLERS, Costs, Exit, GammaTune, Ngram
from tests.api.test_default_model import pytestmark as default_model
from tests.models import make_model, random_ids
from tests.records import FLOOR, NEW_TOKENS, OPTIONS, PROMPTS, recorded
from tests.talks import make_tokenizer

ROWS = OPTIONS.max_draft_tokens + 1
COSTS = MeasuredCosts(
    num_layers=6,
    layers=tuple(1.0 + 0.1 * row for row in range(ROWS)),
    start=(0.1,) * ROWS,
    logits=tuple(0.3 + 0.01 * row for row in range(ROWS)),
    head=0.05,
    round=0.02,
)
"""Rows are cheap and heads cheaper: drafting pays."""

PLAIN = np.array([10.0, 20.0, 30.0, 40.0])
SECONDS = np.array(
    [
        [10.0, 20.0, 30.0, 40.0],
        [5.0, 10.0, 60.0, 20.0],  # 95 in all, one prompt twice as slow
        [9.0, 18.0, 27.0, 37.0],  # 91 in all
        [20.0, 20.0, 20.0, 20.0],  # 80 in all, one prompt twice as slow
    ]
)


SHORTLIST = 8


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer settings are screened and replayed, which takes most of the time."""
    monkeypatch.setattr("selfspec.eval.tune._SHORTLIST", SHORTLIST)
    monkeypatch.setattr("selfspec.eval.tune._SHARES", (0.05, 0.35, 1.0))


def unseen(done: int, total: int, words: str) -> None:
    """No progress bar."""


@cache
def best(objective: str = "speed") -> tuple[Tuned, list[tuple[int, int]]]:
    """What is chosen for the translator's record, and the progress that was shown."""
    shown: list[tuple[int, int]] = []
    record = recorded("translator").record
    return tune(record, COSTS, lambda done, of, _: shown.append((done, of)), objective), shown


@cache
def screening(kind: str = "translator") -> tuple[list[SpeculationOptions], np.ndarray]:
    """All settings, and their seconds by the cost model."""
    return screened(recorded(kind).record, COSTS, unseen)


def test_speed_is_a_ratio_of_totals_and_latency_the_fifth_percentile_of_the_prompts() -> None:
    assert score(SECONDS, PLAIN, "speed") == pytest.approx([1.0, 100 / 95, 100 / 91, 100 / 80])
    # of four prompts it lies 15 % of the way from the worst to the second worst
    found = score(SECONDS, PLAIN, "latency")
    assert found[1] == pytest.approx(0.5 + 0.15 * (2.0 - 0.5))
    assert found[2] == pytest.approx(40 / 37 + 0.15 * (10 / 9 - 40 / 37))
    assert found.argmax() == 2  # speed would take the last


def test_each_part_is_judged_by_what_suits_the_others() -> None:
    parts = np.array([0, 0, 1, 1])

    # best on the last two is row 3: 40 seconds; best on the first two is row 1: 15
    def best(some: np.ndarray) -> np.ndarray:
        return np.array(SECONDS[score(SECONDS[:, some], PLAIN[some], "speed").argmax()])

    assert cross_validated(best, parts).tolist() == [20.0, 20.0, 60.0, 20.0]


def ids(record: Record, *names: str) -> Record:
    """The record with other names of its prompts."""
    prompts = tuple(replace(p, id=name) for p, name in zip(record.prompts, names, strict=True))
    return replace(record, prompts=prompts)


def test_turns_of_a_question_are_held_out_together() -> None:
    record = recorded("translator").record
    assert folds(ids(record, "a", "b", "b", "c"), 2).tolist() == [0, 1, 1, 0]
    assert folds(ids(record, "a", "b", "c", "d"), 4).tolist() == [0, 1, 2, 3]
    assert folds(ids(record, "a", "a", "b", "b"), 4).tolist() == [0, 0, 1, 1]
    with pytest.raises(InvalidOption, match="one question cannot be held out"):
        folds(ids(record, "a", "a", "a", "a"), 4)


def test_thresholds_are_quantiles_of_what_was_recorded_and_never_below_the_floor() -> None:
    record = recorded("translator").record
    found = thresholds(record, 5, 0)
    assert found == sorted({round(tau, 3) for tau in found})  # as people would write them
    assert found[0] == FLOOR
    sure = record.confidence[record.roots[record.roots != NONE], 2, 0]
    exits = [(sure >= tau).mean() for tau in found]
    assert exits[0] == (sure >= FLOOR).mean()
    assert 0.0 < exits[-1] < 0.2


def test_every_candidate_can_be_replayed_and_widths_are_neighbours() -> None:
    record = recorded("translator").record
    found = screening()[0]
    assert len(found) == len(set(found)) > 500
    assert {len(setting.exit.layers or ()) for setting in found} == {1, 2}
    assert [setting.exit.max_tokens for setting in found[:8]] == [1, 2, 3, 4, 1, 2, 3, 4]
    for setting in found[:: len(found) // 50]:
        Setting.of(record, setting)


def exits(record: Record, prompt: int, setting: SpeculationOptions) -> tuple[Exits, Exits]:
    """What the cost model goes by, place by place."""
    asked = Setting.of(record, setting)
    counts: list[list[tuple[int | None, bool]]] = [[], []]

    def look(node: int, place: int) -> int:
        """Note what happens at a node; the node behind a draft that stays."""
        if node == NONE:
            return NONE
        sure = record.confidence[node, list(asked.columns), asked.alpha] >= asked.thresholds
        at = int(sure.argmax()) if sure.any() else None
        column = asked.columns[at or 0]
        right = at is not None and record.tokens[node, column, 0] == record.answers[place + 1]
        counts[step].append((at, right))
        return int(record.children[node, column, 0]) if right else NONE

    start = sum(len(entry.answer) for entry in record.prompts[:prompt])
    for place, node in enumerate(record.prompts[prompt].roots, start):
        for step in range(2):
            node = look(node, place + step)
    layers = range(len(asked.layers))
    first, later = (
        Exits(
            tuple(sum(at == layer for at, _ in seen) / max(len(seen), 1) for layer in layers),
            sum(right for _, right in seen) / max(len(seen), 1),
        )
        for seen in counts
    )
    return first, later


@pytest.mark.parametrize("kind", ["translator", "deep-fused"])
def test_the_cost_model_goes_by_how_often_each_setting_exits(kind: str) -> None:
    record = recorded(kind).record
    settings, found = screening(kind)
    plain = plain_seconds(record, COSTS)
    assert found.shape == (len(settings), len(plain))
    for index in range(0, len(settings), len(settings) // 20):
        setting = settings[index]
        for prompt in range(len(plain)):
            first, later = exits(record, prompt, setting)
            layers, width = setting.exit.layers or (), setting.exit.max_tokens
            gain = expected(COSTS, layers, first, later, width)[1]
            assert found[index, prompt] == pytest.approx(plain[prompt] / gain)


def test_what_the_cost_model_likes_is_fast_when_it_is_replayed() -> None:
    record = recorded("translator").record
    settings, seconds = screening()
    by_model = seconds.sum(-1).argsort()
    likes, dislikes = (
        [followed(record, settings[i]) for i in some] for some in (by_model[:20], by_model[-20:])
    )
    assert max(likes) < plain_seconds(record, COSTS).sum() < min(dislikes)


COSTS_HERE = Costs(row=(0.083, 0.083), head=0.038)
"""What `tune` makes of COSTS: 1.32 a plain step."""


def followed(record: Record, setting: SpeculationOptions) -> float:
    """Seconds on all prompts."""
    return sum(
        COSTS.seconds_of(replay(record, prompt, setting)) for prompt in range(len(record.prompts))
    )


def test_no_setting_is_faster_on_the_prompts_it_was_chosen_on() -> None:
    record = recorded("translator").record
    found, shown = best()
    assert found.speculates
    settings, seconds = screening()
    assert not any(setting.never_slower for setting in settings)
    first = replace(settings[seconds.sum(-1).argmin()], never_slower=True, costs=COSTS_HERE)
    plain = plain_seconds(record, COSTS).sum()
    assert found.speed_up_in_sample >= plain / followed(record, first) - 1e-9
    assert found.speed_up <= found.speed_up_in_sample
    assert found.worst <= found.percentile_5
    # seen text alone, the best few alone and behind it, at two costs of a row; other parts of
    # the prompts may have other best ones
    followed_by = found.settings - len(settings) - 2
    assert 4 * SHORTLIST <= followed_by <= 4 * SHORTLIST * (4 + 1)
    assert found.prompts == 4
    chosen = SpeculationOptions().updated(found.options)
    every = [replay(record, prompt, chosen) for prompt in range(4)]
    behind = [entry for entries in every for entry in entries[1:]]
    rate = sum(len(entry.tokens) for entry in behind) / len(behind)
    assert found.compression_rate == pytest.approx(rate)
    assert f"expect {found.speed_up:.2f} x plain decoding" in found.sentence()
    # what was measured here is what the rules go by
    assert chosen.costs.head == COSTS_HERE.head
    assert chosen.costs.row in (COSTS_HERE.row, Costs().row)
    assert found.options.keys() <= set(TUNED_OPTIONS)
    assert (shown[0], shown[-1]) == ((0, len(settings)), (len(settings), len(settings)))
    latency = best("latency")[0]
    assert latency.objective == "latency"
    assert latency.options != found.options


def repeating(record: Record) -> Record:
    """The record, as if each answer said one thing again and again."""
    said = [7, 8, 9] * 10
    prompts = [replace(one, answer=said[: len(one.answer)]) for one in record.prompts]
    return replace(record, prompts=tuple(prompts))


def test_drafts_from_text_already_seen_are_chosen_where_texts_repeat() -> None:
    record = repeating(recorded("translator").record)
    found = tune(record, COSTS, unseen)
    chosen = SpeculationOptions().updated(found.options)
    assert chosen.uses("ngram")
    assert chosen.ngram.max_tokens == OPTIONS.max_draft_tokens
    dear = tune(record, replace(COSTS, head=5.0), unseen)
    assert dear.options == {
        "speculate": True,
        "drafter": "ngram:size=4,max_tokens=4",
        "costs": dear.options["costs"],
    }


def test_dear_heads_and_rows_switch_drafting_off() -> None:
    record = recorded("translator").record
    dear = replace(COSTS, head=5.0, layers=tuple(1.0 + 5.0 * row for row in range(ROWS)))
    found = tune(record, dear, unseen)
    assert found.options == {"speculate": False}
    assert found.sentence().startswith("plain decoding is faster here")


# --- records, and replay from one alone


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
    record, speculator = recorded(kind).record, recorded(kind).speculator
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
    of = recorded("translator")
    options = SpeculationOptions(drafter=drafter, speculate=drafter != "exit")
    expected = real_rounds(of.speculator, random_ids(5, 0), NEW_TOKENS, options)
    assert replay(of.record, 0, options) == expected


def test_where_a_model_runs_no_trees_chains_are_recorded_and_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speculator = recorded("deep-fused-0").speculator
    monkeypatch.setattr(Backbone, "runs_trees", False)
    recorder = Recorder(speculator, OPTIONS)
    recorder.prompt(random_ids(5, 1), "1")
    record = recorder.record()
    assert record.guesses == 1
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
    record = recorded("translator").record
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
    found = recorded(kind).record
    assert found.guesses == (GUESSES if kind == "deep-fused" else 1)
    truth = {int(r): int(t) for r, t in zip(found.roots, found.answers[1:], strict=False)}
    truth.pop(NONE)
    depths = dict.fromkeys(truth, 1)
    for node, column, rank in zip(*np.nonzero(found.children != NONE), strict=True):
        child, token = int(found.children[node, column, rank]), found.tokens[node, column, rank]
        assert token not in found.prompts[0].end_tokens
        if child in truth:
            assert truth[node] == token  # a right draft leads to the next place
            assert kind == "translator"
            continue
        chance = found.chances[node, column, :, rank].max()
        tree = column == 0 and found.guesses > 1
        assert chance >= (LEAST_SAID if tree else found.min_threshold)
        depths[child] = depths[int(node)] + 1  # nodes are numbered from the root on
    assert max(depths.values()) == OPTIONS.max_draft_tokens
    assert depths.keys() == set(range(len(found.tokens)))


def test_confidence_falls_with_alpha_and_layers_of_one_mind_share_a_branch() -> None:
    found = recorded("translator").record
    assert (np.diff(found.confidence, axis=-1) <= 0).all()
    shared = [
        (tokens[a] == tokens[b], children[a] == children[b])
        for tokens, children in zip(found.tokens[..., 0], found.children[..., 0], strict=True)
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
