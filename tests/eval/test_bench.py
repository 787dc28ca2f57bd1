"""Methods of a bench, all with plain decoding's tokens; its runner, and tables of batches."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec import files
from selfspec.api import text
from selfspec.api.chat_template import TurnEnd
from selfspec.api.speculator import Speculator, wrap
from selfspec.decoding.drafters.rest import Datastore
from selfspec.decoding.stats import Round
from selfspec.errors import CannotWrite, HeadsNotFound, InvalidOption
from selfspec.eval import bench as methods
from selfspec.eval import concurrency, results
from selfspec.eval.bench import METHODS, Bench, Contender, Written, candidates, endless, swept
from selfspec.eval.bench import sweeps as moves
from selfspec.eval.concurrency import Load, continuous, measure_loads, padded_batch, table
from selfspec.eval.results import Answer, BenchOptions, Question, Run
from tests import ladder
from tests.models import make_model, noted, random_ids
from tests.talks import make_tokenizer

COUNT, LONG = 6, 16
NAMES = ("hugging-face", "plain", "speculation")
QUESTIONS = [
    Question(id="one", task="math", turns=("a b c",)),
    Question(id="two", task="chat", turns=("c b", "a a")),
    Question(id="three", task="QA", turns=("b",)),
]


@pytest.fixture(scope="module")
def speculator() -> Speculator:
    """Heads on layers 1 to 5, of which 2 and 4 are in use, a draft model and a datastore.

    The draft model has two layers. All are in float64, so that all methods write equal tokens.
    """
    speculator = wrap(
        make_model("llama", torch.float64),
        make_tokenizer(),
        heads="logit-lens",
        draft_model=make_model("llama", torch.float64, num_hidden_layers=2),
        drafter="exit:layers=2/4,threshold=0.04/0.06,max_tokens=3",
    )
    speculator.runtime.datastore = Datastore.of(random_ids(20_000).tolist(), make_tokenizer())
    speculator.options = speculator.options.updated({"skip": "skipped=3"})
    return speculator


@pytest.fixture
def contenders(speculator: Speculator) -> list[Contender]:
    return [replace(grid(speculator, name)[0], label=name) for name in NAMES]


@pytest.fixture
def bench(speculator: Speculator) -> Bench:
    """A bench whose clock advances by 1 s at each reading."""
    options = BenchOptions(max_new_tokens=COUNT)
    return Bench(speculator=speculator, options=options, now=itertools.count(0.0, 1.0).__next__)


def broken(decode: Callable[..., Any]) -> Contender:
    return Contender(label="broken", method="broken", setting={}, by=decode)


def quiet(done: int, total: int, words: str) -> None:
    """Ignore progress."""


def measure(bench: Bench, contenders: list[Contender], path: Path) -> list[Answer]:
    return bench.measure(QUESTIONS, contenders, path / "answers.jsonl", quiet)


def test_all_methods_write_the_same_tokens_for_every_turn_by_the_clock(
    bench: Bench, contenders: list[Contender], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question's second turn follows plain decoding's answer to its first."""
    prompts = noted(monkeypatch, text, "encode", lambda _, prompt: copy.deepcopy(prompt))
    answers = measure(bench, contenders, tmp_path)
    roles, contents = ("user", "assistant", "user"), ("c b", answers[1].text, "a a")
    assert [tuple(turn.values()) for turn in prompts[-2]] == [*zip(roles, contents, strict=True)]
    keys = [("one", 1, 1), ("two", 1, 1), ("two", 2, 1), ("three", 1, 1)]
    assert [answer.key for answer in answers] == keys
    for answer in answers:
        assert answer.new_tokens == COUNT
        assert answer.runs.keys() == set(NAMES)
        for label, run in answer.runs.items():
            assert (run.equal, run.error) == (True, None)
            assert bool(run.by_costs) == bool(run.counts.get("drafted_by_index"))
            assert sum(count for count, _ in run.arrivals) == COUNT
            if label == "speculation":
                assert all(count == seconds for count, seconds in run.arrivals)
            else:
                assert run.arrivals == [(1, 1.0)] * COUNT  # the clock is read at each token
                assert run.seconds == COUNT + 1.0  # and once at the end
        assert answer.runs["hugging-face"].counts == {}  # only our runtime counts
        assert answer.runs["plain"].counts["drafted_by_layer"] == {}
    assert any(answer.runs["speculation"].counts["drafted_by_layer"] for answer in answers)


def test_only_plain_decodings_end_token_sets_the_length_for_all_methods(
    bench: Bench, contenders: list[Contender], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method whose text differs from plain decoding's may write an end token earlier."""
    ids = text.encode(bench.speculator.tokenizer, "a b c")
    plain = bench.speculator.generate(ids, max_new_tokens=COUNT, speculate=False).token_ids
    config: Any = bench.speculator.model.generation_config
    monkeypatch.setattr(config, "eos_token_id", plain[4])
    answer, *_ = measure(bench, contenders, tmp_path)
    assert answer.new_tokens == plain.index(plain[4]) + 1
    for run in answer.runs.values():
        assert sum(count for count, _ in run.arrivals) == answer.new_tokens
        assert run.equal
    monkeypatch.setattr(config, "eos_token_id", plain[2])
    runs = [bench.run(contender, ids, plain) for contender in contenders]
    assert [run.error for run in runs] == [None] * len(NAMES)


def test_the_seed_sets_the_order(bench: Bench, contenders: list[Contender], tmp_path: Path) -> None:
    def orders(seed: int, folder: str) -> list[list[str]]:
        (tmp_path / folder).mkdir()
        options = replace(bench.options, seed=seed, repeats=2, max_new_tokens=2)
        answers = measure(replace(bench, options=options), contenders, tmp_path / folder)
        return [list(answer.runs) for answer in answers]

    first = orders(0, "a")
    assert len(first) == 8
    assert len({tuple(order) for order in first}) > 2
    assert orders(0, "b") == first
    assert orders(1, "c") != first


# --- texts, memory, the harness itself


def test_texts_of_lossy_methods_are_judged_up_to_their_own_end(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule keeps every draft; the reference belongs to a question's last turn."""
    speculator = bench.speculator
    loose = {"acceptance": "cm-asd:top_beta=100,tolerance=100", "exit": {"threshold": 1e-6}}
    monkeypatch.setattr(speculator, "options", speculator.options.updated(loose))
    model = speculator.model
    entries = [replace(grid(speculator, name)[0], label=name) for name in ("plain", "cm-asd")]
    path = tmp_path / "answers.jsonl"
    question = replace(QUESTIONS[1], reference="a b")
    ids = text.encode(speculator.tokenizer, question.turns[0])
    lossy = speculator.generate(ids, max_new_tokens=COUNT, acceptance="cm-asd").token_ids
    plain = speculator.generate(ids, max_new_tokens=COUNT, speculate=False).token_ids
    end = next(token for token in lossy[2:] if token not in plain)
    monkeypatch.setattr(model.generation_config, "eos_token_id", end)
    first, second = bench.measure([question], entries, path, quiet)
    assert first.runs["plain"].quality is None
    quality, later = first.runs["cm-asd"].quality, second.runs["cm-asd"].quality
    assert quality is not None
    assert later is not None
    assert quality.tokens == lossy.index(end) + 1 < quality.plain_tokens == COUNT
    assert quality.first_divergence == results.first_divergence(lossy[: quality.tokens], plain)
    assert quality.edit_distance == results.edit_distance(lossy[: quality.tokens], plain)
    assert quality.plain_text == first.text != quality.text
    assert quality.log_likelihood == results.log_likelihood(model, ids, lossy[: quality.tokens])
    assert quality.plain_log_likelihood == results.log_likelihood(model, ids, plain)
    assert (quality.reference, later.reference) == (None, "a b")
    assert sum(count for count, _ in first.runs["cm-asd"].arrivals) == COUNT  # the timed text
    assert results.read(path) == [first, second]


def test_texts_of_all_methods_are_judged_once_on_request(
    bench: Bench, contenders: list[Contender], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(bench.options, quality=True, repeats=2)
    (token,) = bench.speculator.generate("a b c", max_new_tokens=3).token_ids[2:]
    monkeypatch.setattr(bench.speculator, "turn_end", TurnEnd(token=token))
    answers = measure(replace(bench, options=options), contenders, tmp_path)
    assert answers[0].new_tokens == 3
    for answer in answers:
        for run in answer.runs.values():
            assert (run.quality is not None) == (answer.repeat == 1)
            assert run.quality is None or run.quality.first_divergence is None
    monkeypatch.setattr("selfspec.eval.results.edit_distance", fails)  # no text can be judged now
    lossy = replace(contenders[-1], lossy=True)
    answer, *_ = bench.measure(QUESTIONS[:1], [contenders[1], lossy], tmp_path / "again", quiet)
    assert answer.runs["speculation"].error == "RuntimeError: out of luck"
    assert answer.runs["plain"].error is None


# --- failures


def fails(*_: Any) -> Written:
    raise RuntimeError("out of luck\nand more")


def test_a_method_that_fails_is_recorded_and_the_others_go_on(
    bench: Bench, contenders: list[Contender], tmp_path: Path
) -> None:
    short = replace(broken(lambda *_: Written([1] * (COUNT - 1))), label="short")
    answers = measure(bench, [*contenders, broken(fails), short], tmp_path)
    assert len(answers) == 4
    for answer in answers:
        assert answer.runs["broken"] == Run(error="RuntimeError: out of luck")
        assert answer.runs["short"] == Run(error=f"wrote {COUNT - 1} of {COUNT} tokens")
        assert all(answer.runs[name].error is None for name in NAMES)


def test_a_bad_prompt_is_noted(bench: Bench, contenders: list[Contender], tmp_path: Path) -> None:
    endless = Question(id="long", task="QA", turns=(" ", "b"))
    path = tmp_path / "answers.jsonl"
    answers = bench.measure([endless, QUESTIONS[0]], contenders, path, quiet)
    assert [answer.key for answer in answers] == [("long", 1, 1), ("one", 1, 1)]
    assert answers[0].error
    assert answers[0].runs == {}
    content = path.read_text()
    assert bench.measure([endless, QUESTIONS[0]], contenders, path, quiet) == answers
    assert path.read_text() == content


def test_a_broken_run_resumes(bench: Bench, contenders: list[Contender], tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    expected = measure(bench, contenders, tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:40])  # killed in question two's second turn
    answers = measure(bench, contenders, tmp_path)
    assert [answer.key for answer in answers] == [answer.key for answer in expected]
    assert answers[:2] == expected[:2]
    assert path.read_text().startswith("".join(lines[:2]))
    assert measure(bench, [broken(fails)], tmp_path) == answers  # nothing is left to measure


# --- choice of settings and of questions


def test_the_fastest_setting_that_did_not_fail_is_chosen() -> None:
    def contender(label: str) -> Contender:
        return Contender(label=label, method="m", setting={"of": label})

    grid = {"m": [contender("a"), contender("b"), contender("c")], "plain": [contender("p")]}

    def timed(*seconds: float | None) -> Answer:
        runs = [Run(error="no") if time is None else Run(seconds=time) for time in seconds]
        return Answer(id="q", task="t", turn=1, repeat=1, runs=dict(zip("abc", runs, strict=True)))

    tuning = [timed(5.0, 2.0, 1.0), timed(5.0, 3.0, None)]
    tuning.append(Answer(id="x", task="t", turn=1, repeat=1, error="too long"))
    winners = methods.best_of(grid, tuning)
    assert (winners["m"].label, winners["m"].setting) == ("m", {"of": "b"})
    assert winners["plain"].label == "plain"
    assert methods.best_of(grid, [])["m"].setting == {"of": "a"}
    # each failed once: the prompt that both answered decides
    tuning = [timed(None, 9.0, None), timed(1.0, None, None), timed(4.0, 3.0, None)]
    assert methods.best_of(grid, tuning)["m"].setting == {"of": "b"}


def test_settings_are_chosen_on_questions_that_are_not_reported() -> None:
    suite = [Question(id=str(number), task="t", turns=(str(number),)) for number in range(8)]
    options = BenchOptions(tune_questions=2, limit=3)
    assert methods.split(suite, options, tuning=False) == ([suite[0], suite[2], suite[5]], [])
    reported, tuning = methods.split(suite, options, tuning=True)
    assert [question.id for question in tuning] == ["0", "4"]
    assert [question.id for question in reported] == ["1", "3", "6"]
    with pytest.raises(InvalidOption, match="Give fewer --tune-questions"):  # nothing is left
        methods.split(suite[:1], BenchOptions(), tuning=True)


# --- batches


def test_continuous_batching_gets_only_the_memory_that_its_texts_need(
    bare: Speculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default transformers allocates and clears nearly all free memory for each batch."""
    kind = type(bare.model)
    blocks = noted(monkeypatch, kind, "generate_batch", lambda *args, **_: args[3].num_blocks)
    prompts = [random_ids(length) for length in (3, 170, 100)]
    _, answers = continuous(bare, prompts, LONG, 2)
    assert (answers, blocks) == (padded_batch(bare, prompts, LONG, 2)[1], [2, 1])


def test_a_model_without_continuous_batching_is_refused_and_not_measured() -> None:
    neox = wrap(make_model("gpt_neox"), make_tokenizer(), heads="none")
    with pytest.raises(InvalidOption, match=r"failed \(.+\)\. Leave hugging-face-continuous out"):
        continuous(neox, [random_ids(3)], COUNT, 1)


def test_answers_of_all_methods_end_at_the_templates_end_of_turn(bare: Speculator) -> None:
    speculator = copy.copy(bare)
    speculator.tokenizer = make_tokenizer()
    (token,) = speculator.generate("a b c", max_new_tokens=3).token_ids[2:]
    options, loads = BenchOptions(max_new_tokens=LONG), dict[TurnEnd, list[Load]]()
    for end in (TurnEnd(token=token), TurnEnd(text=str(speculator.tokenizer.decode([token])))):
        speculator.turn_end = end
        loads[end] = [*measure_loads(speculator, QUESTIONS, (3,), [*concurrency.METHODS], options)]
        assert speculator.turn_end is end
        assert [load.same for load in loads[end]] == [len(QUESTIONS)] * len(concurrency.METHODS)
        steps_tokens = {load.method: load.steps_tokens for load in loads[end]}
        shortest = 3 if end.token == token else LONG  # only rounds of all three texts count
        assert steps_tokens["hugging-face-padded"] == 3 * (shortest - 1)
    by_token, by_text = (entries[0].tokens for entries in loads.values())
    assert by_token < by_text == LONG * len(QUESTIONS)


def test_loads_of_a_killed_run_are_kept(speculator: Speculator, tmp_path: Path) -> None:
    path = tmp_path / "loads.jsonl"

    def begun(texts: list[int], *, overwrite: bool = False) -> list[Load]:
        record = {"made_by": "selfspec bench", "texts": texts}
        return results.resume(path, record, lambda fields: Load(**fields), overwrite=overwrite)

    assert begun([1, 2]) == []
    stored = load("plain", 2, 0, 50.0)
    files.append(path, json.dumps(asdict(stored)))
    with path.open("a") as file:
        file.write('{"method": "pl')  # killed while writing
    assert begun([1, 2]) == [stored]
    options, names = BenchOptions(max_new_tokens=2, repeats=1), ("plain", "default")
    loads = measure_loads(speculator, QUESTIONS, (1, 2), names, options, [stored])
    pairs = [(entry.method, entry.texts) for entry in loads]
    assert sorted(pairs) == [("default", 1), ("default", 2), ("plain", 1)]
    with pytest.raises(CannotWrite, match="holds another run"):
        begun([1])
    assert begun([1], overwrite=True) == []


# --- times of arrival, and tables


def test_arrivals_of_our_runtime_are_grouped_by_round() -> None:
    empty: dict[str, Any] = {key: [] for key in ("draft_tokens", "exit_layers", "sources", "kept")}
    rounds = [Round(tokens=[0] * count, ended="off", **empty) for count in (1, 2, 1)]
    times = [(1, 2.0), (1, 3.0), (1, 3.25), (1, 5.0)]
    arrivals = methods.arrivals(times, 1.5, Written([0] * 4, rounds))
    assert arrivals == [(1, 0.5), (2, 1.25), (1, 1.75)]
    assert methods.arrivals([(3, 2.0), (1, 3.0)], 1.5, Written([0] * 4)) == [(3, 0.5), (1, 1.0)]


def load(method: str, texts: int, repeat: int, rate: float, **more: object) -> Load:
    """A load of `rate` tokens per second without the prompts, and half as many with them."""
    figures: Any = {"seconds": 2.0, "tokens": int(rate), "steps_s": 1.0, "steps_tokens": int(rate)}
    return Load(method=method, texts=texts, repeat=repeat, **figures | {"same": 3} | more)


def rows_of(loads: list[Load]) -> list[dict[str, str]]:
    head, _, *rows = (line[1:-1].split("|") for line in table(loads).splitlines())
    return [dict(zip(map(str.strip, head), map(str.strip, row), strict=True)) for row in rows]


def test_a_table_has_medians_and_a_ratio_to_plain_by_repeat() -> None:
    rates = {"plain": (100, 120, 80), "default": (150, 180, 120)}
    loads = [
        load(method, texts, repeat, rate * texts, first_s=[1.0, 2.0])
        for method, speeds in rates.items()
        for texts in (1, 4)
        for repeat, rate in enumerate(speeds)
    ]
    waits = {"first, ms: p50": "1500.0", "first, ms: p95": "2000.0", "as alone": "3"}
    expected = (
        ("plain", "1", "300", "50.0", "100.0", ""),
        ("plain", "4", "1200", "200.0", "400.0", ""),
        ("default", "1", "450", "75.0", "150.0", "1.50 (1.50 to 1.50)"),
        ("default", "4", "1800", "300.0", "600.0", "1.50 (1.50 to 1.50)"),
    )  # gaps were not measured: no columns
    names = ("method", "texts", "tokens", "tokens/s", "behind prompts", "against plain (95 %)")
    assert rows_of(loads) == [dict(zip(names, row, strict=True)) | waits for row in expected]


def test_cells_without_a_measurement_stay_empty() -> None:
    unseen = load("hugging-face-continuous", 2, 0, 10, steps_tokens=0, gaps_s=[])
    plain, other = rows_of([load("plain", 1, 0, 10, gaps_s=[0.5, 0.1, 0.2], same=2), unseen])
    assert (plain["behind prompts"], other["behind prompts"]) == ("10.0", "")
    assert (plain["gaps, ms: p50"], plain["gaps, ms: p95"]) == ("200.0", "470.0")
    assert other["gaps, ms: p50"] == ""
    assert "against plain (95 %)" not in plain  # one measurement gives no interval


@pytest.mark.parametrize("steps", [0, 30])
def test_a_summary_has_figures_and_no_lists(steps: int) -> None:
    summary = load("plain", 1, 0, 10, first_s=[0.1, 0.3], steps_tokens=steps).summary()
    assert summary["first_s"] == pytest.approx([0.2, 0.29])
    assert summary["gaps_s"] is None
    assert summary["decode_tokens_per_s"] == (steps or None)


# --- methods


@pytest.fixture(scope="module")
def plain(speculator: Speculator) -> list[int]:
    answer = speculator.generate(random_ids(9), max_new_tokens=LONG, speculate=False)
    return answer.token_ids


def moved(speculator: Speculator, **values: Any) -> Speculator:
    twin = copy.copy(speculator)
    twin.options = speculator.options.updated(values)
    return twin


@pytest.fixture(scope="module")
def bare() -> Speculator:
    return wrap(make_model("llama"))


def written(speculator: Speculator, name: str, number: int = 0) -> Written:
    contender = grid(speculator, name)[number]
    end = TurnEnd(token=speculator.generate(random_ids(9), max_new_tokens=1).token_ids[0])
    speculator.turn_end = end
    with endless(speculator):
        answer = contender.decode(speculator, random_ids(9), LONG)
    assert speculator.turn_end is end
    return answer


def grid(speculator: Speculator, name: str) -> list[Contender]:
    return candidates(speculator, [name])[name]


LOSSY = ("cm-asd", "easd", "lenience")
OWN_TEXT = (*LOSSY, *(name for name in METHODS if name.startswith("sampl")))


@pytest.mark.parametrize("name", [name for name in METHODS if name not in (*OWN_TEXT, "medusa")])
def test_every_method_writes_the_same(speculator: Speculator, plain: list[int], name: str) -> None:
    for number, entry in enumerate(grid(speculator, name)):
        assert written(speculator, name, number).token_ids == plain
        assert not entry.may_differ


def test_medusa_verifies_its_tree_or_part_of_it(speculator: Speculator, plain: list[int]) -> None:
    medusa = wrap(speculator.model, heads=ladder.medusa_heads(speculator.backbone))
    whole, cut = (written(medusa, "medusa", number) for number in range(2))
    assert whole.token_ids == cut.token_ids == plain
    widest = [max(len(entry.draft_tokens) for entry in answer.rounds) for answer in (whole, cut)]
    assert widest[0] == 63 > widest[1] > 0


# --- methods with a text of their own


@pytest.mark.parametrize("name", OWN_TEXT)
def test_methods_with_own_texts_say_so(speculator: Speculator, plain: list[int], name: str) -> None:
    wavering = moved(
        speculator,
        exit={"threshold": 1e-6},
        acceptance="cm-asd:top_beta=100,tolerance=100" if name == "cm-asd" else "lossless",
        easd={"entropy": 0.0, "overlap": 0.0},
    )
    (entry,) = grid(wavering, name)
    assert entry.may_differ
    assert entry.lossy == (name in LOSSY)
    assert methods.describe([entry])[entry.label]["lossy"] == entry.lossy
    first = written(wavering, name)
    assert len(first.token_ids) == LONG
    assert first.token_ids != plain
    assert first.stats is not None
    assert first.stats.lossless == (name not in LOSSY)
    assert written(wavering, name).token_ids == first.token_ids  # sampled ones too: they are seeded


def test_lossy_options_and_sweeps_are_marked_but_not_plain_decoding(speculator: Speculator) -> None:
    loose = moved(speculator, acceptance="cm-asd")
    names = ["plain", "hugging-face", "speculation", "ngram"]
    assert [grid(loose, name)[0].lossy for name in names] == [False, False, True, True]
    entries = swept(speculator, moves("acceptance=lossless,cm-asd,lenient"))
    assert [entry.lossy for entry in entries] == [False, True, True]
    assert [entry.setting.get("do_sample") for entry in entries] == [None, None, True]


def test_the_model_is_restored_after_an_error_within_an_early_exit(speculator: Speculator) -> None:
    model: Any = speculator.model
    config = model.generation_config

    def break_off() -> None:
        with endless(speculator):
            model.config.num_hidden_layers = 1
            model.generation_config.num_assistant_tokens = 99
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()
    assert model.generation_config is config
    assert config.num_assistant_tokens != 99
    assert model.config.num_hidden_layers == 6


@pytest.mark.parametrize(
    ("name", "without", "options", "reason"),
    [
        ("medusa", False, {}, "--head-type medusa"),
        ("easd", False, {}, "calibrate --entropy"),
        ("no-annealing", False, {"exit": {"anneal_strength": 0.0}}, "the same as speculation"),
        ("no-depth-bound", False, {"exit": {"layers": None, "threshold": 0.1}}, "the same as"),
        ("draft-model", True, {}, "Give --draft-model"),
        ("rest", True, {}, "Give --datastore"),
        ("self-sd", True, {}, "are unknown for this model"),
    ],
)
def test_an_unavailable_method_says_what_to_do(
    speculator: Speculator, bare: Speculator, name: str, without: bool, options: Any, reason: str
) -> None:
    with pytest.raises(InvalidOption, match=reason):
        candidates(bare if without else moved(speculator, **options), [name])


def test_methods_with_drafts_need_heads_or_a_draft_model(bare: Speculator) -> None:
    assert candidates(bare, ["plain", "hugging-face", "prompt-lookup"])
    for name in ("speculation", "fixed-exit", "no-depth-bound", "no-never-slower"):
        with pytest.raises(HeadsNotFound):
            candidates(bare, [name])
    with pytest.raises(HeadsNotFound):
        swept(bare, moves("exit.threshold=0.5"))
    second = wrap(bare.model, draft_model=bare.model)
    entries = swept(second, moves("draft-model.max_tokens=1,4"))
    drafters = [entry.setting["drafter"] for entry in entries]
    assert drafters == [f"draft-model:max_tokens={count}" for count in (1, 4)]
    assert not any("SpecBound" in entry.source for entry in entries)


def test_a_method_uses_the_drafter_that_it_names(speculator: Speculator) -> None:
    for name, source in (("draft-model", "draft-model"), ("speculation", "exit"), ("rest", "rest")):
        assert {one for e in written(speculator, name).rounds for one in e.sources} == {source}


def test_self_sd_skips_the_layers_that_were_found(speculator: Speculator, bare: Speculator) -> None:
    assert grid(speculator, "self-sd")[0].setting["drafter"] == "skip:skipped=3"
    labelled = copy.copy(bare)
    labelled.label = next(iter(methods.SKIPPED))
    with pytest.raises(InvalidOption, match="the model has 6 layers"):  # not those of 30
        candidates(labelled, ["self-sd"])


def test_ablations_change_one_thing(speculator: Speculator) -> None:
    """Without a depth bound all layers are in use, each with the threshold of the nearest one."""
    bounded = moved(speculator, exit={"max_depth": 2})
    deep = "max_depth=none,layers=1/2/3/4/5,threshold=0.04/0.04/0.04/0.06/0.06"
    for name, changed in (("no-annealing", "anneal_strength=0"), ("no-depth-bound", deep)):
        (entry,) = grid(bounded, name)
        assert entry.setting == {"drafter": f"exit:{changed}", "never_slower": False}


def test_without_a_width_bound_no_round_ends_because_of_its_width(speculator: Speculator) -> None:
    bold = moved(speculator, exit={"threshold": 1e-6})
    assert "width" in {entry.ended for entry in written(bold, "speculation").rounds[1:]}
    assert {entry.ended for entry in written(bold, "no-width-bound").rounds[1:]} == {"budget"}


@pytest.mark.parametrize(
    ("name", "costs", "source"),
    [("no-value-rule", "row=1/0.9", "ngram"), ("no-never-slower", "head=9", "exit")],
)
def test_rules_limit_the_drafts(speculator: Speculator, name: str, costs: str, source: str) -> None:
    dear = moved(speculator, costs=costs)
    counts = [written(dear, method).stats for method in ("ngram+exit", name)]
    ruled, free = (stats.drafted_by_source[source] for stats in counts if stats)
    assert ruled < free


def test_baseline_schedules_keep_their_rules(speculator: Speculator) -> None:
    """A fixed exit uses its layer only; thresholds have no bound; one exit stops if unsure."""
    fixed = [speculator.options.updated(one.setting).exit for one in grid(speculator, "fixed-exit")]
    assert [setting.layers for setting in fixed[::3]] == [(1,), (3,), (5,)]
    for number in (0, 4, 8):  # every layer, and every length
        setting = fixed[number]
        for record in written(speculator, "fixed-exit", number).rounds[1:]:
            assert set(record.exit_layers) <= set(setting.layers or ())
            assert len(record.draft_tokens) == setting.max_tokens or record.ended == "budget"
    for entry in grid(speculator, "threshold-exit"):
        setting = speculator.options.updated(entry.setting).exit
        bounds = setting.layers, setting.max_tokens, setting.anneal_strength
        assert bounds == ((1, 2, 3, 4, 5), methods.NO_BOUND, 0.0)
    assert "depth" in {entry.ended for entry in written(speculator, "one-exit", 2).rounds[1:]}


def test_a_sweep_changes_one_option_from_any_defaults(speculator: Speculator) -> None:
    settings = moves("exit.threshold=0.3") | moves("exit.layers=4/5")
    labels = ["speculation(exit.threshold=0.3)", "speculation(exit.layers=4/5)"]
    for changes in ({"exit": {"threshold": 0.1}}, {"drafter": "ngram+exit"}):
        entries = swept(moved(speculator, **changes), settings)
        assert [entry.label for entry in entries] == labels
        assert entries[0].setting["drafter"] == "exit:threshold=0.3"
