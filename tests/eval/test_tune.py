"""Choice of a setting by timed answers: the prompts, the race of settings, and the promise."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from selfspec.api.speculator import Speculator, wrap
from selfspec.api.tuned import TUNED_OPTIONS
from selfspec.config import SpeculationOptions
from selfspec.errors import InvalidOption
from selfspec.eval.tune import PLAIN, Options, Timed, candidates, race, tune
from selfspec.options import Ngram
from tests.models import make_model, random_ids
from tests.skilled import skilled
from tests.talks import make_tokenizer

SETTINGS: list[Options] = [{"drafter": f"ngram:size={size}"} for size in range(1, 10)]


def unseen(done: int, total: int, words: str) -> None:
    """Ignore progress."""


class Stopwatches:
    """Answers with given seconds, by setting or by setting and prompt; plain ones take 10 s."""

    def __init__(self, seconds: dict[Any, float], usual: float = 10.0) -> None:
        self.seconds, self.usual = seconds, usual
        self.asked: list[tuple[int, str]] = []

    def __call__(self, number: int, options: Options) -> Timed:
        name = "plain" if options == PLAIN else options["drafter"].removeprefix("ngram:size=")
        self.asked.append((number, name))
        default = 10.0 if name == "plain" else self.usual
        seconds = self.seconds.get((name, number), self.seconds.get(name, default))
        rounds = 0 if seconds == 0.0 else 12 if name == "plain" else 6
        return Timed(seconds, 12, rounds)


def test_the_faster_third_answers_more_and_other_prompts_judge() -> None:
    watches = Stopwatches({"1": 4.0, "2": 5.0, "3": 6.0, ("1", 11): 20.0})
    progress: list[tuple[int, int]] = []
    winner = race(SETTINGS, 12, watches, lambda done, of, _: progress.append((done, of)))
    assert winner.options == {"speculate": True, **SETTINGS[0]}
    assert winner.compression_rate == 2.0
    assert (winner.settings, winner.prompts, winner.objective) == (9, 12, "speed")
    # prompts 0, 2, .. choose, two per stage; 1, 3, .. judge, and one of them is slow
    first, raced_by = watches.asked[:12], watches.asked[12:]
    assert first == [(number, "plain") for number in range(12)]
    assert len({*raced_by}) == len(raced_by)
    by_prompt = Counter(number for number, _ in raced_by)
    assert by_prompt == {0: 10, 2: 10, 4: 4, 6: 4, 8: 2, 10: 2} | dict.fromkeys(range(1, 12, 2), 2)
    assert {name for number, name in raced_by if number in (4, 6)} == {"plain", *"123"}
    assert winner.speed_up == pytest.approx(60 / 40)
    assert winner.worst == 0.5
    assert winner.worst < winner.percentile_5 < winner.speed_up
    assert progress == sorted(progress)
    assert progress[-1] == (12, 12)
    orders = [[name for n, name in raced_by if n == number] for number in (0, 2)]
    assert orders[0] != orders[1], "each prompt has its own order"
    assert "expect 1.50 x plain decoding" in winner.sentence()


def test_a_setting_must_stay_fast() -> None:
    """All answers of a setting count, also those of earlier stages."""
    lucky: dict[Any, float] = {("1", 0): 1.0, ("1", 2): 1.0, "1": 12.0, "2": 5.0}
    winner = race(SETTINGS, 12, Stopwatches(lucky), unseen)
    assert winner.options["drafter"] == "ngram:size=2"


def test_ending_early_does_not_count_as_faster() -> None:
    def ask(_number: int, options: Options) -> Timed:
        size = options["drafter"][-1] if options != PLAIN else ""
        return {"": Timed(6.0, 60, 60), "1": Timed(4.0, 60, 30), "2": Timed(1.0, 8, 8)}[size]

    winner = race(SETTINGS[:2], 12, ask, unseen)
    assert (winner.options["drafter"], winner.speed_up) == ("ngram:size=1", 1.5)


def test_latency_maximises_a_low_percentile_of_speed_ups() -> None:
    uneven = {"1": 2.0, ("1", 0): 15.0, "2": 8.0}
    assert race(SETTINGS, 12, Stopwatches(uneven), unseen).options["drafter"][-1] == "1"
    winner = race(SETTINGS, 12, Stopwatches(uneven), unseen, "latency")
    assert (winner.options["drafter"][-1], winner.objective) == ("2", "latency")


def test_drafting_is_switched_off_if_nothing_pays() -> None:
    winner = race(SETTINGS, 4, Stopwatches({}, usual=12.5), unseen)
    assert winner.options == PLAIN
    assert not winner.options["speculate"]
    assert winner.sentence().startswith("drafts do not pay here: the best of 9 settings")
    assert "0.80 x, so" in winner.sentence()
    slow: dict[Any, float] = {(name, 3): 20.0 for name in "123456789"}
    winner = race(SETTINGS, 12, Stopwatches(slow, usual=5.0), unseen, "latency")
    assert (winner.options, winner.speed_up > 1.0) == (PLAIN, True)
    assert f"gives {winner.percentile_5:.2f} x or more for 95 % of" in winner.sentence()


def test_answers_of_one_token_are_ignored() -> None:
    silent: dict[Any, float] = {(name, n): 0.0 for name in ("plain", *"12") for n in (0, 1)}
    watches = Stopwatches(silent | {"2": 5.0})
    winner = race(SETTINGS[:2], 4, watches, unseen, "latency")
    assert winner.options["drafter"] == "ngram:size=2"
    assert (winner.speed_up, winner.worst, winner.prompts) == (2.0, 2.0, 2)
    assert {number for number, name in watches.asked if name != "plain"} == {2, 3}
    with pytest.raises(InvalidOption, match="second token"):
        race(SETTINGS[:2], 3, Stopwatches(silent), unseen)


@pytest.mark.parametrize("kind", ["translator", "deep-fused-0", None])
def test_candidates_are_the_drafters_that_this_model_can_use(kind: str | None) -> None:
    speculator = wrap(make_model("llama"), make_tokenizer()) if kind is None else skilled(kind)
    settings = [*candidates(speculator)]
    assert len({str(setting) for setting in settings}) == len(settings)
    options = [SpeculationOptions().updated(setting) for setting in settings]
    assert all(setting.keys() <= {*TUNED_OPTIONS} for setting in settings)
    drafters = Counter(option.drafter for option in options)
    lengths = {Ngram().max_tokens, 2, 4, 8}
    if kind is None:
        assert drafters == {"ngram": 2 * 4 * len(lengths)}
        return
    assert set(drafters) == {"ngram", "exit", "ngram+exit"}
    assert drafters["exit"] == drafters["ngram+exit"]
    heads, exits = speculator.heads, [option.exit for option in options if option.uses("exit")]
    assert heads is not None
    singles = {one.layers for one in exits if one.layers is not None and len(one.layers) == 1}
    fitted = heads.config.exit_layers
    assert singles >= {(layer,) for layer in fitted if layer > 0}
    for option in options:
        heads.layers_in_use(option)
    rows = {option.costs.row for option in options}
    assert len(rows) == 2, "measured costs and built-in costs"
    assert SpeculationOptions().costs.row in rows


@pytest.mark.parametrize("kind", ["translator", "deep-fused-0"])
def test_real_answers_are_timed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    speculator, answers = skilled(kind), dict[tuple[int, ...], set[tuple[int, ...]]]()
    generate = Speculator.generate

    def heard(self: Speculator, prompt: Any, **options: Any) -> Any:
        answer = generate(self, prompt, **options)
        answers.setdefault(tuple(prompt[0].tolist()), set()).add(tuple(answer.token_ids))
        return answer

    monkeypatch.setattr(Speculator, "generate", heard)
    prompts: list[torch.Tensor] = [random_ids(5, seed) for seed in range(3)]
    winner = tune(speculator, prompts, unseen, new_tokens=6)
    assert len(answers) == 3
    assert all(len(texts) == 1 for texts in answers.values()), "no setting changes a text"
    assert winner.settings == len([*candidates(speculator)])
    SpeculationOptions().updated(winner.options)


def test_a_base_model_gets_plain_text() -> None:
    speculator = wrap(make_model("llama"), make_tokenizer())
    speculator.tokenizer.chat_template = None  # type: ignore[union-attr]  # there is one
    assert tune(speculator, ["a b", "b a"], unseen, new_tokens=3).prompts == 2
