from __future__ import annotations

import itertools
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from selfspec.errors import InvalidOption
from selfspec.training import selfgen, text
from selfspec.training.options import DataOptions
from selfspec.training.recipe import Passages, Prompts, key
from selfspec.training.selfgen import (
    Admission,
    Ask,
    Author,
    Texts,
    Turns,
    Written,
    batch_seed,
    loop_start,
    ngrams,
)
from selfspec.training.text import DROPPED, Counts
from tests.authors import RECIPE, SMALL, invent, make_author, prompt_ids, read, recipe_of
from tests.talks import WORDS

ONE_TURN = RECIPE.replace(', ["c {other}", null, "b"]', "")


def words(ids: list[int]) -> str:
    return " ".join(WORDS[token] for token in ids)


# --- what is written


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Counts]:
    path = tmp_path_factory.mktemp("written") / "a.jsonl"
    counts = invent(make_author(tokens=300, greedy_share=0.5, max_question_tokens=4), path)
    return read(path), counts


def test_a_line_holds_the_models_ids_and_their_text(
    written: tuple[list[dict[str, Any]], Counts], tokenizer: PreTrainedTokenizerBase
) -> None:
    single = [line for line in written[0] if "answer_start" in line]
    assert len(single) > 10
    for line in single:
        *_, question, answer = line["messages"]
        if len(line["messages"]) > 2:
            continue
        said = line["input_ids"][line["answer_start"] :]
        assert line["input_ids"][: line["answer_start"]] == prompt_ids(tokenizer, [question])
        expected = str(tokenizer.decode(said, skip_special_tokens=True))
        assert answer["content"].split() == expected.split()
        assert 1 <= len(said) <= SMALL["max_new_tokens"]
        assert loop_start(said) is None
        assert question["content"] == question["content"].strip() != ""


def test_greedy_answers_are_the_likeliest_tokens_and_sampled_ones_are_not(
    written: tuple[list[dict[str, Any]], Counts],
) -> None:
    model = make_author().backbone.model
    greedy = {True: 0, False: 0}
    single = [line for line in written[0] if "answer_start" in line]
    for line in single:
        ids = torch.tensor([line["input_ids"]])
        with torch.no_grad():
            likeliest = model(ids[:, :-1]).logits[0, line["answer_start"] - 1 :].argmax(-1)
        if likeliest.tolist() == line["input_ids"][line["answer_start"] :]:
            greedy[line["sampled"]] += 1
    count = {flag: sum(line["sampled"] == flag for line in single) for flag in (True, False)}
    assert min(count.values()) > 0
    assert greedy[False] == count[False]
    assert greedy[True] < count[True]


def test_every_family_has_rows_of_its_kind(written: tuple[list[dict[str, Any]], Counts]) -> None:
    rows: dict[str, list[dict[str, Any]]] = {}
    for line in written[0]:
        rows.setdefault(line["family"], []).append(line)
    assert rows.keys() == {"free", "pair", "article", "about", "read"}
    assert all(r["messages"][0]["content"].startswith(("a b", "c")) for r in rows["free"])
    assert all(r["answers"] == [] and len(r["messages"]) == 1 for r in rows["read"])
    articles = {r["seed"]: "" for r in rows["article"]}
    for row in rows["article"]:
        articles[row["seed"]] += " " + row["messages"][1]["content"]
    for row in rows["about"]:
        asked = row["messages"][0]["content"]
        passages = [asked.removesuffix(f" {word}") for word in ("a", "b", "a b", "b b", "c a")]
        passages.append(asked.removeprefix("b "))
        article = " ".join(articles[row["seed"]].split())
        assert any(" ".join(passage.split()) in article for passage in passages)


def test_rows_differ_and_every_one_is_counted(written: tuple[list[dict[str, Any]], Counts]) -> None:
    lines, counts = written
    assert len({key(line["messages"][0]["content"]) for line in lines}) == len(lines)
    assert counts.total("rows") == len(lines)
    talks = [text.encoded(line, None) for line in lines]
    assert sum(len(talk.answer_ids) for talk in talks) == counts.answer_tokens >= 300
    assert sum(len(talk.answers) for talk in talks) == counts.total("answers")
    assert any(not talk.answers for talk in talks)  # only read
    seeds = {line["seed"] for line in lines}
    dropped = sum(counts.total(name) for name in DROPPED)
    batches = max(seeds) - batch_seed(0, 0) + 1
    assert counts.total("rows") + dropped == SMALL["batch_size"] * batches
    assert counts.total("duplicates") > 0
    assert counts.families.keys() == {line["family"] for line in lines}


def test_the_last_batch_is_small_where_few_tokens_are_missing() -> None:
    source = Admission(DataOptions(batch_size=32))
    sizes = [len(source.batch(2, missing)) for missing in (3000, 1500, 100)]
    assert sizes == [32, 23, 16]
    assert source.batch(2, 100) == range(64, 80)


# --- options that change the text


def ids_with(folder: Path, **options: Any) -> list[list[int]]:
    folder.mkdir(exist_ok=True)
    invent(make_author(tokens=100, **options), folder / "a.jsonl")
    return [line["input_ids"] for line in read(folder / "a.jsonl")]


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return ids_with(tmp_path_factory.mktemp("usual"))


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 1},
        {"system": "c c"},
        {"question_temperature": (3.0, 3.0)},
        {"question_top_k": 2},
        {"max_question_tokens": 3},
        {"greedy_share": 0.0},
        {"greedy_share": 0.0, "temperature": 5.0},
        {"max_new_tokens": 3},
        {"batch_size": 5},
    ],
)
def test_another_value_is_another_text(
    tmp_path: Path, usual: list[list[int]], options: dict[str, Any]
) -> None:
    found = ids_with(tmp_path / "other", **options)
    assert found != usual
    if "temperature" in options:  # not only because answers are sampled
        assert found != ids_with(tmp_path, greedy_share=0.0)


def test_the_same_options_give_the_same_text(tmp_path: Path, usual: list[list[int]]) -> None:
    before = torch.get_rng_state()
    assert ids_with(tmp_path) == usual
    assert torch.equal(torch.get_rng_state(), before), "global generators are left alone"


def test_later_turns_are_asked_and_invented(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    talk = 'families: {talk: {weight: 1, ask: [["{word}", null, "{word} b"]]}}\n'
    words_of = "lists: {word: [" + ", ".join("abc"[i % 3] + " c" * i for i in range(60)) + "]}\n"
    counts = invent(make_author(tokens=200, system="c"), tmp_path / "a", talk + words_of)
    lengths = set()
    for line in read(tmp_path / "a"):
        roles = [message["role"] for message in line["messages"]]
        spans = line.get("answers", [[line.get("answer_start"), len(line["input_ids"])]])
        assert roles == ["system", *["user", "assistant"] * len(spans)]
        for number, (first, _) in enumerate(spans):
            asked = line["messages"][: 2 * number + 2]
            header = words(line["input_ids"][:first])
            assert header.endswith(f"{asked[-1]['content']} <end> <line> <start> assistant")
        # a cut answer ends its conversation
        assert all(line["input_ids"][end - 1] == 1 for _, end in spans[:-1])
        lengths.add(len(spans))
    assert lengths >= {1, 2}
    assert max(lengths) <= 3
    assert counts.total("answers") > counts.total("rows")


def test_longer_prompts_are_dropped_and_passages_cut_to_fit(tmp_path: Path) -> None:
    recipe = RECIPE.replace("a b, b b", "b" + " b" * 40).replace("[3, 8]", "[60, 90]")
    author = make_author(tokens=300, max_prompt_tokens=45)
    counts = invent(author, tmp_path / "a", recipe)
    assert counts.total("too_long") > 0
    assert counts.families["read"]["rows"] > 0
    for line in read(tmp_path / "a"):
        assert line.get("answer_start", 0) <= 45


# --- loops


def test_answers_are_cut_where_they_loop_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    author = make_author(tokens=60, max_new_tokens=150, greedy_share=1.0)
    never = frozenset({len(WORDS)})  # no answer ends, so that most of them loop
    monkeypatch.setattr(author, "_ends", never)
    counts = invent(author, tmp_path / "a", ONE_TURN)
    loops = 0
    for line in read(tmp_path / "a"):
        if line["sampled"]:
            continue
        start = line["answer_start"]
        prompt, said = line["input_ids"][:start], line["input_ids"][start:]
        texts = Texts(author.backbone, lambda tokens: None)
        texts.add(Ask(prompt, 150, never, 0))
        while not (ended := texts.step()):
            pass
        ((_, whole),) = ended
        assert said == whole[: loop_start(whole)]
        loops += said != whole
    assert counts.total("loops_cut") == loops > 0
    assert sum(line["loops"] for line in read(tmp_path / "a")) == loops


# --- seeds, resuming


def test_seeds_of_a_run_are_all_different_and_stay_within_32_bits() -> None:
    seeds = {batch_seed(seed, index) for seed in (0, 1) for index in range(1000)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_batches_begun_ahead_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those at the end were begun with another size than they turn out to need."""
    monkeypatch.setattr(selfgen, "_TALK_TOKENS", 8)
    author = make_author(tokens=500, batch_size=20)
    asked, propose = list[int](), Written.propose

    def counted(self: Written, numbers: range) -> Any:
        asked.append(numbers.start)
        return propose(self, numbers)

    monkeypatch.setattr(Written, "propose", counted)
    for ahead in (1, 4):
        invent(author, tmp_path / str(ahead), ahead=ahead)
    assert len(set(asked)) < len(asked) - len(set(asked)), "a batch was proposed again"
    assert (tmp_path / "1").read_bytes() == (tmp_path / "4").read_bytes()
    assert (tmp_path / "1.run.json").read_bytes() == (tmp_path / "4.run.json").read_bytes()


@pytest.mark.parametrize("stop", [1, 3, 8])
def test_a_run_that_is_broken_off_writes_the_same_file(tmp_path: Path, stop: int) -> None:
    options: dict[str, Any] = {"tokens": 80, "greedy_share": 0.5}
    expected = invent(make_author(**options), tmp_path / "whole")
    author = make_author(**options)
    looks = broken_off = 0

    def watch(tokens: int) -> None:
        nonlocal looks
        looks += 1
        if looks in (stop, stop + 4):
            raise KeyboardInterrupt

    author = Author(author.backbone, author.turns.tokenizer, author.options, watch)
    path, counts = tmp_path / "broken", None
    while counts is None:
        try:
            counts = invent(author, path)
        except KeyboardInterrupt:
            broken_off += 1
    assert broken_off == 2
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()
    assert asdict(counts) == asdict(expected)


def test_a_finished_file_grows_with_more_tokens(tmp_path: Path) -> None:
    invent(make_author(tokens=120), tmp_path / "whole")
    for tokens in (20, 20, 120):
        counts = invent(make_author(tokens=tokens), tmp_path / "grown")
        assert counts.answer_tokens >= tokens
    assert (tmp_path / "grown").read_bytes() == (tmp_path / "whole").read_bytes()


# --- what cannot go on


def test_a_recipe_that_has_nothing_new_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="no row of 3 batches could be used") as caught:
        invent(make_author(tokens=10_000), tmp_path / "a", "families: {f: {weight: 1, ask: [a]}}")
    assert "\n" not in str(caught.value)


def test_a_model_without_room_for_a_prompt_is_refused() -> None:
    with pytest.raises(InvalidOption, match="of the model's 256 positions no 32 are left"):
        make_author(max_new_tokens=230)


def test_empty_questions_and_answers_are_dropped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    author = make_author(batch_size=4)
    said = iter([" ", "a", None, "c"])

    def ask(_header: list[int], _rng: random.Random) -> Any:
        return next(said)
        yield

    monkeypatch.setattr(author, "ask", ask)
    monkeypatch.setattr(Turns, "continuation", lambda turns, start, new: " ")  # answers only
    recipe = recipe_of("families: {free: {weight: 1, continues: true, ask: [b]}}", tmp_path)
    kept, counts = Written(author, Prompts(recipe, Passages(), 0)).propose(range(4))
    assert kept == []
    found = {name: n for name, n in counts.families["free"].items() if n}
    assert found == {"unfinished": 2, "empty": 2}


# --- what is not written twice, and not from a benchmark


def test_eight_words_in_a_row_are_compared_without_case_and_marks() -> None:
    text = "One, two three four; FIVE six seven eight nine"
    assert ngrams(text) == ngrams("one two three (four five six seven) eight nine!")
    assert len(ngrams(text)) == 2
    assert not ngrams(text) & ngrams("zero " + text.replace("four", "4"))
    assert len(ngrams("你好吗我很好谢谢你")) == 2
    assert ngrams("too short a text to compare with") == set()


def test_rows_with_words_of_an_excluded_text_are_dropped_and_counted(tmp_path: Path) -> None:
    recipe = """
families: {f: {weight: 1, ask: ["{word} b b b b b b b"]}}
lists: {word: [a, c, a a, c c, a b, c b]}
"""
    author = make_author(tokens=10_000)
    prompts = Prompts(recipe_of(recipe, tmp_path), Passages(), 0)
    excluded = ngrams("C b b b b b b b")
    kept, counts = Written(author, prompts, excluded).propose(range(6))
    source = Admission(author.options, excluded=excluded)
    assert counts.total("excluded") == 3  # c, c c and c b
    assert not any(row["messages"][0]["content"].startswith("c b b b b b b b") for row in kept)
    question = {"role": "user", "content": "is it kept"}
    for answer, new in (("it is C b b b b b b b", False), ("b", True), ("a", False)):
        turns = [question, {"role": "assistant", "content": answer}]
        assert source._is_new({"family": "f", "messages": turns}, counts) is new, answer
    # a dropped row leaves nothing behind, or a killed run would go on otherwise
    assert (counts.total("excluded"), counts.total("duplicates")) == (4, 1)


def test_rows_are_written_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    author, texts = make_author(batch_size=12), list[int]()
    step = Texts.step

    def counted(self: Texts) -> Any:
        texts.append(self._engine.texts)
        return step(self)

    monkeypatch.setattr(Texts, "step", counted)
    prompts = Prompts(recipe_of(RECIPE, tmp_path), Passages(), 0)
    assert Written(author, prompts).propose(range(12))[0]
    assert texts[0] > 6, "rows that need nothing of another one begin together"


def test_an_answer_that_was_given_nearly_so_is_dropped() -> None:
    source = Admission(DataOptions())
    counts, words, asked = Counts(), [f"w{n}" for n in range(60)], itertools.count()

    def new(said: list[str]) -> bool:
        turns = [{"role": "user", "content": str(next(asked))}]
        turns.append({"role": "assistant", "content": " ".join(said)})
        return source._is_new({"family": "f", "messages": turns}, counts)

    assert new(words)
    assert not new([*words[:55], "x", "y"])
    assert new([*words[:20], *[f"v{n}" for n in range(40)]])
    assert new(["short", "answer"])
    assert new(["short", "answer"])
    assert counts.total("alike") == 1
