"""Rows of a recipe depend on number and seed alone, and nothing comes from a benchmark."""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from selfspec.cli.main import main
from selfspec.errors import InvalidData
from selfspec.eval.results import load_suite
from selfspec.heads.exit_heads import HeadsConfig
from selfspec.training.recipe import BUILT_IN, OWN, Passages, Prompts, deal, read_recipe
from selfspec.training.selfgen import ngrams
from tests.authors import RECIPE, recipe_of
from tests.talks import WORDS, save_tiny

ROOT = Path(__file__).parents[2]
SPEC_BENCH = ROOT.parent / "shared" / "data" / "spec_bench" / "question_dev.jsonl"


@pytest.fixture
def passages(tmp_path: Path) -> Passages:
    """Two English files, a German one, and one of a language that no recipe names."""
    for name, text in (
        ("docs/\udcff.txt", "One.\n\nTwo.\n \nThree."),
        ("b.md", "Four.\r\n\r\nFive."),
        ("de/c.rst", "Sechs."),
        ("xx/d.txt", "?"),
        ("e.html", "no"),
    ):
        path = tmp_path / "passages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")
    return Passages(tmp_path / "passages", ("en", "de"))


# --- the built-in recipe


def test_the_built_in_recipe_has_every_kind_and_no_family_above_a_tenth() -> None:
    assert (ROOT / "training" / "text.yaml").resolve() == BUILT_IN.resolve()
    recipe = read_recipe()
    total = sum(family.weight for family in recipe.families)
    assert max(family.weight for family in recipe.families) <= total / 10
    assert len(recipe.families) >= 25
    assert {"de", "fr", "es", "zh"} <= {
        language for f in recipe.families if f.passage for language in f.passage.language
    }
    kinds = {"continues", "passages", "read", "question"}
    assert all(any(getattr(family, kind) for family in recipe.families) for kind in kinds)
    assert {len(ask) for family in recipe.families for ask in family.ask} >= {1, 2, 3, 4}
    used = "".join(turn or "" for f in recipe.families for ask in f.ask for turn in ask)
    assert all(f"{{{name}}}" in used for name in recipe.lists), "an unused list"


def test_the_recipe_shares_no_eight_words_with_a_benchmark() -> None:
    texts = [turn for question in load_suite() for turn in question.turns]
    if SPEC_BENCH.is_file():  # not in the repository
        questions = load_suite("spec-bench", SPEC_BENCH)
        assert len(questions) == 240
        texts += [turn for question in questions for turn in question.turns]
    benchmark = {gram for text in texts for gram in ngrams(text)}
    assert len(benchmark) > 500
    recipe = read_recipe()
    prompts = Prompts(recipe, Passages(), 0)
    turns = [" ".join(filter(None, ask)) for family in recipe.families for ask in family.ask]
    turns += [entry for entries in recipe.lists.values() for entry in entries]
    for row in filter(None, map(prompts.row, range(5000))):
        filled = row.values | {"passage": "", "question": "", "language": ""}
        turns += [turn.format_map(filled) for turn in row.turns if turn is not None]
    shared = [text for text in turns if not ngrams(text).isdisjoint(benchmark)]
    assert not shared


# --- rows


def test_a_deck_deals_each_card_once_before_any_repeats() -> None:
    first, second = ([deal(7, n + start, "seed") for n in range(7)] for start in (0, 7))
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    assert [deal(7, n, "other") for n in range(7)] != first


def test_rows_depend_on_number_and_seed_alone(tmp_path: Path) -> None:
    recipe = recipe_of(RECIPE, tmp_path)

    def texts(seed: int, numbers: Any) -> list[Any]:
        prompts = Prompts(recipe, Passages(), seed)
        rows = [prompts.row(number) for number in numbers]
        return [(row.turns, row.values, row.rng.random()) for row in rows if row]

    assert texts(0, range(40)) == texts(0, reversed(range(40)))[::-1]
    assert texts(0, range(40)) != texts(1, range(40))


def test_families_have_their_share_evenly_spread(tmp_path: Path) -> None:
    prompts = Prompts(recipe_of(RECIPE, tmp_path), Passages(), 0)
    rows = [prompts.row(number) for number in range(900)]
    names = Counter(row.family.name for row in rows if row)
    assert names == {"free": 300, "pair": 200, "article": 100, "about": 200, "read": 100}
    assert all(
        {row.family.name for row in rows[start : start + 12] if row} == names.keys()
        for start in range(0, 880, 12)
    )


def test_a_users_prompts_are_asked_once_with_their_braces(tmp_path: Path) -> None:
    questions = [("what is {x}?",), ("first", "second")]
    prompts = Prompts(recipe_of(RECIPE, tmp_path), Passages(), 0, questions)
    rows = [prompts.row(number) for number in range(1000)]
    texts = [
        tuple(row.text(turn) for turn in row.turns)
        for row in rows
        if row and row.family.name == OWN
    ]
    assert texts == questions
    assert sum(row is None for row in rows) == 98


# --- passages


def test_passages_are_paragraphs_of_a_language(passages: Passages, tmp_path: Path) -> None:
    assert passages.languages == {"en", "de"}
    texts = [passages.draw("en", number, "", 1) for number in range(5)]
    assert sorted(texts) == ["Five.", "Four.", "One.", "Three.", "Two."]
    assert {passages.draw("en", n, "", 8) for n in range(5)} == {
        "One.\n\nTwo.",
        "Two.\n\nThree.",
        "Three.",
        "Four.\n\nFive.",
        "Five.",
    }
    assert passages.draw("de", 3, "", 100) == "Sechs."
    (tmp_path / "passages" / "fr").mkdir()
    (tmp_path / "passages" / "fr" / "a.txt").write_text("\n")  # without a passage
    assert Passages(tmp_path / "passages", ("en", "fr")).languages == {"en"}


def test_the_digest_changes_with_the_text(passages: Passages, tmp_path: Path) -> None:
    digest = passages.digest
    assert Passages(tmp_path / "passages", ("en", "de")).digest == digest
    (tmp_path / "passages" / "b.md").write_text("Four.")
    assert Passages(tmp_path / "passages", ("en", "de")).digest != digest


@pytest.mark.parametrize("name", ["nowhere", "empty", "file"])
def test_a_folder_without_text_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(InvalidData, match=name):
        Passages(tmp_path / name)


def test_families_without_passages_are_left_out(passages: Passages, tmp_path: Path) -> None:
    text = RECIPE + "languages: {de: German, fr: French}\n"
    text = text.replace("{tokens: [3, 8]}", "{tokens: [3, 8], language: [de, fr]}")
    recipe = recipe_of(text, tmp_path)
    assert Prompts(recipe, Passages(), 0).left_out == ["about", "read"]
    prompts = Prompts(recipe, passages, 0, invents=False)
    assert prompts.left_out == ["free", "pair"]
    rows = [prompts.row(number) for number in range(100)]
    assert {row.language for row in rows if row and row.family.passage} == {"de"}
    recipe = recipe_of("families: {f: {weight: 1, ask: [a], continues: true}}", tmp_path)
    with pytest.raises(InvalidData, match="no family of the recipe can be used"):
        Prompts(recipe, Passages(), 0, invents=False)


# --- errors


GOOD: dict[str, Any] = {"weight": 1, "ask": ["{word}"]}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"weight": 0}, "weight is 0, expected above 0"),
        ({"ask": []}, "ask holds no first turn"),
        ({"ask": [[None, "a"]]}, "ask holds no first turn"),
        ({"ask": [3]}, "family f: ask is"),
        ({"ask": ["{wort}"]}, "{wort} in '{wort}' is none of the lists"),
        ({"ask": ["{word!r}"]}, "is no name of a list"),
        ({"ask": ["{word.__class__}"]}, "is no name of a list"),
        ({"ask": ["{"]}, "family f: '{'"),
        ({"ask": ["{passage}"]}, "{passage} in"),
        ({"passage": {}}, "family f: missing 1 required keyword-only argument: 'tokens'"),
        ({"passage": {"tokens": [3, 2]}}, "tokens is 3, 2, expected a range"),
        ({"passage": {"tokens": [3, 4], "count": [1, 99]}}, "count is 1, 99"),
        ({"passage": {"tokens": [3, 4], "language": ["xx"]}}, "language xx has no name"),
        ({"passage": {"tokens": [3, 4], "langauge": ["xx"]}}, "Did you mean language"),
        ({"question": ["Why"]}, "a question needs a passage"),
        ({"asks": []}, "family f: unknown entry 'asks'. Did you mean ask"),
        ("", "expected families and lists"),
        ("families: {}", "families is empty"),
        ("families: 3", "families is 3, expected"),
        ("family: {}", "unknown key 'family'. Did you mean families"),
        ("families: {f: {weight: 1}}", "family f: missing 1 required keyword-only argument: 'ask'"),
        ("families: {questions: {weight: 1, ask: [a]}}", "is the family of --questions. Name"),
        ("lists: {a: []}", "the list a is empty"),
        ("lists: {a: [yes]}", "the list a is [True], expected a list of"),
        ("written-share: 2\nfamilies: {f: {weight: 1, ask: [a]}}", "written-share is 2"),
    ],
)
def test_a_wrong_family_or_file_is_named(tmp_path: Path, wrong: Any, reason: str) -> None:
    if isinstance(wrong, dict):
        wrong = yaml.safe_dump({"families": {"f": GOOD | wrong}, "lists": {"word": ["a"]}})
    with pytest.raises(InvalidData, match=f"^{tmp_path}.*{re.escape(reason)}"):
        recipe_of(wrong, tmp_path)


# --- the commands of training/README.md, from a bare clone


GUIDE = (ROOT / "training" / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"^```sh\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    for line in block.replace("\\\n", " ").splitlines()
]
WRITTEN = ("--output", ">")
READ = ("--data", "--cache", "--validation", "--heads", "--draft-model", "--config")
SMALL = {
    "batch_size": "6",
    "max_new_tokens": "20",
    "max_question_tokens": "12",
    "question_temperature": "4,6",
    "recipe": "recipe.yaml",
    "draft_vocab_size": "10",
    "exit_layers": "2,4",
    "batch_tokens": "64",
    "epochs": "1",
}
"""Small sizes for the commands, as environment variables, so that their words stay."""


def test_every_input_file_was_written_before_or_is_in_the_repository() -> None:
    assert len(COMMANDS) >= 12
    written: set[str] = set()
    for command in COMMANDS:
        for flag, name in itertools.pairwise(command):
            if flag in READ:
                assert name in written or (ROOT / name).is_file(), f"{' '.join(command)}: {name}"
        written |= {name for flag, name in itertools.pairwise(command) if flag in WRITTEN}


def test_the_first_commands_give_calibrated_heads_that_are_used_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path / "MODEL", vocab_size=len(WORDS))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    for name, value in SMALL.items():
        monkeypatch.setenv(f"SELFSPEC_{name.upper()}", value)
    steps = COMMANDS[1:6]  # after `adapt`, which tests/test_adaptation.py runs
    names = ["data", "fit", "data", "calibrate", "generate"]
    assert [command[1] for command in steps] == names
    for program, *flags in steps:
        small = ["40" if word.isdigit() and len(word) > 3 else word for word in flags]
        assert program == "selfspec"
        assert main(small) == 0, " ".join(flags)
    config = HeadsConfig.read(tmp_path / "heads")
    assert config.temperatures.keys() == {"2", "4"}
    capsys.readouterr()
    assert main(["generate", "--model", "MODEL", "a"]) == 0
    assert f"exit heads {tmp_path / 'heads'} are this model's" in capsys.readouterr().err
