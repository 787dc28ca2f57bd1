from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from selfspec.errors import InvalidData, InvalidOption
from selfspec.training import data
from selfspec.training.selfgen import Author, Invented, batch_seed, key, read_openings
from selfspec.training.texts import Sampling, continued, loop_start
from selfspec.training.turns import Turns
from selfspec.training.writer import Counts
from tests.authors import OPENINGS, SMALL, invent, make_author, prompt_ids, read
from tests.models import MAX_POSITIONS
from tests.talks import WORDS, make_tokenizer

DROPPED = ("duplicates", "unfinished", "empty", "too_long")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer()


def words(ids: list[int]) -> str:
    return " ".join(WORDS[token] for token in ids)


# --- what is written


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Counts]:
    path = tmp_path_factory.mktemp("written") / "a.jsonl"
    counts = invent(
        make_author(tokens=150, greedy_share=0.5, opening_share=0.5, max_question_tokens=4), path
    )
    return read(path), counts


def test_a_line_holds_the_models_ids_and_their_text(
    written: tuple[list[dict[str, Any]], Counts], tokenizer: PreTrainedTokenizerBase
) -> None:
    for line in written[0]:
        question, answer = line["messages"]
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
    for line in written[0]:
        ids = torch.tensor([line["input_ids"]])
        with torch.no_grad():
            likeliest = model(ids[:, :-1]).logits[0, line["answer_start"] - 1 :].argmax(-1)
        if likeliest.tolist() == line["input_ids"][line["answer_start"] :]:
            greedy[line["sampled"]] += 1
    count = {flag: sum(line["sampled"] == flag for line in written[0]) for flag in (True, False)}
    assert min(count.values()) > 0
    assert greedy[False] == count[False]
    assert greedy[True] < count[True]


def test_openings_begin_their_share_of_the_questions(
    written: tuple[list[dict[str, Any]], Counts],
) -> None:
    begun = [line["messages"][0]["content"].startswith(OPENINGS) for line in written[0]]
    assert any(begun)
    assert not all(begun)


def test_questions_differ_and_every_row_is_counted(
    written: tuple[list[dict[str, Any]], Counts],
) -> None:
    lines, counts = written
    assert len({key(line["messages"][0]["content"]) for line in lines}) == len(lines)
    assert counts.conversations == counts.answers == len(lines)
    assert counts.answer_tokens == sum(len(x["input_ids"]) - x["answer_start"] for x in lines)
    assert counts.answer_tokens >= 150
    seeds = {line["seed"] for line in lines}
    dropped = sum(getattr(counts, name) for name in DROPPED)
    assert counts.conversations + dropped == SMALL["batch_size"] * (
        max(seeds) - batch_seed(0, 0) + 1
    )
    assert counts.duplicates > 0
    assert counts.unfinished > 0


def test_the_last_batch_is_small_where_few_tokens_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    author, sizes = make_author(tokens=3000, batch_size=32), list[int]()

    def ask(headers: list[list[int]], temperature: float) -> list[str | None]:
        sizes.append(len(headers))
        return []

    monkeypatch.setattr(author, "ask", ask)
    for written in (0, 1500, 2900):
        with suppress(ValueError):  # no question for these openings
            Invented(author, OPENINGS, []).batch(0, Counts(answer_tokens=written))
    assert sizes == [32, 23, 16]


def test_what_is_written_can_be_read_for_training(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    counts = invent(make_author(tokens=30, turns=3), path)
    talks = data.read_conversations(path, None, vocab_size=len(WORDS), max_length=MAX_POSITIONS)
    assert sum(len(talk.answer_ids) for talk in talks) == counts.answer_tokens
    assert sum(len(talk.answers) for talk in talks) == counts.answers > counts.conversations


# --- options that change the text


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 1},
        {"opening_share": 0.0},
        {"system": "c c"},
        {"question_temperature": (3.0, 3.0)},
        {"question_top_k": 2},
        {"max_question_tokens": 3},
        {"greedy_share": 0.0},
        {"greedy_share": 0.0, "temperature": 5.0},
        {"max_new_tokens": 3},
        {"batch_size": 5},
        {"turns": 2},
        {"shard": "2/2"},
    ],
)
def test_another_value_is_another_text(tmp_path: Path, options: dict[str, Any]) -> None:
    texts = []
    for number, given in enumerate(({}, {}, options, {"greedy_share": 0.0})):
        path = tmp_path / str(number)
        invent(make_author(tokens=20, **given), path)
        texts.append([line["input_ids"] for line in read(path)])
    assert texts[0] == texts[1] != texts[2]
    assert "temperature" not in options or texts[2] != texts[3]


def test_more_turns_are_conversations_with_more_answers(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    invent(make_author(tokens=100, turns=3, system="c"), tmp_path / "a")
    lengths = set()
    for line in read(tmp_path / "a"):
        roles = [message["role"] for message in line["messages"]]
        spans = line.get("answers", [[line.get("answer_start"), len(line["input_ids"])]])
        assert roles == ["system", *["user", "assistant"] * len(spans)]
        for number, (first, _) in enumerate(spans):
            asked = line["messages"][: 2 * number + 2]
            header = words(line["input_ids"][:first])
            assert header.endswith(f"{asked[-1]['content']} <end> <line> <start> assistant")
            assert header.count("<start> user") == number + 1
        lengths.add(len(spans))
    assert lengths >= {1, 2}
    assert max(lengths) <= 3


def test_a_cut_answer_ends_its_conversation(tmp_path: Path) -> None:
    counts = invent(make_author(tokens=60, turns=4, max_new_tokens=3), tmp_path / "a")
    for line in read(tmp_path / "a"):
        spans = line.get("answers", [[0, len(line["input_ids"])]])
        assert all(line["input_ids"][end - 1] == 1 for _, end in spans[:-1])
    assert counts.answers >= counts.conversations


def test_a_conversation_ends_where_the_model_has_no_room_left(tmp_path: Path) -> None:
    options = {"tokens": 30, "turns": 40, "max_new_tokens": 8}
    invent(make_author(**options), tmp_path / "a")
    assert max(len(line["input_ids"]) for line in read(tmp_path / "a")) <= MAX_POSITIONS


# --- loops


def test_answers_are_cut_where_they_loop_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    author = make_author(tokens=60, max_new_tokens=150)
    never = frozenset({len(WORDS)})  # no answer ends, so that most of them loop
    monkeypatch.setattr(author, "_ends", never)
    counts = invent(author, tmp_path / "a")
    loops = 0
    for line in read(tmp_path / "a"):
        prompt, said = (line["input_ids"][part] for part in _parts(line))
        (whole,) = continued(
            author.backbone,
            [prompt],
            max_new_tokens=150,
            ends=never,
            sampling=Sampling(),
            seed=0,
            watch=lambda tokens: None,
        )
        assert said == whole[: loop_start(whole)]
        loops += said != whole
    assert counts.loops_cut == loops > 0
    assert counts.loop_share == loops / counts.answers


def _parts(line: dict[str, Any]) -> tuple[slice, slice]:
    """The prompt and the answer within the ids."""
    return slice(line["answer_start"]), slice(line["answer_start"], None)


# --- seeds, shards, resuming


def test_seeds_of_a_run_are_all_different_and_stay_within_32_bits() -> None:
    seeds = {batch_seed(seed, index) for seed in (0, 1) for index in range(1000)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_shards_are_the_batches_of_one_run(tmp_path: Path) -> None:
    for shard in ("1/1", "1/2", "2/2"):
        invent(make_author(tokens=60, shard=shard), tmp_path / shard.replace("/", "-"))
    whole, *parts = ({line["seed"] for line in read(tmp_path / n)} for n in ("1-1", "1-2", "2-2"))
    assert not parts[0] & parts[1]
    assert whole <= parts[0] | parts[1]
    first = [line for line in read(tmp_path / "1-1") if line["seed"] == batch_seed(0, 0)]
    assert first == [line for line in read(tmp_path / "1-2") if line["seed"] == batch_seed(0, 0)]


@pytest.mark.parametrize("stop", [1, 2, 3, 5, 8])
def test_a_run_that_is_broken_off_writes_the_same_file(tmp_path: Path, stop: int) -> None:
    options: dict[str, Any] = {"tokens": 80, "turns": 2, "greedy_share": 0.5}
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


def test_the_global_generators_are_put_back(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    invent(make_author(tokens=10), tmp_path / "a")
    assert torch.equal(torch.rand(3), expected)


# --- what cannot go on


def test_a_model_that_asks_nothing_new_is_an_error(tmp_path: Path) -> None:
    author = make_author(tokens=10_000, question_top_k=1)
    with pytest.raises(
        InvalidOption, match="none of the user turns of 3 batches could be used"
    ) as caught:
        invent(author, tmp_path / "a")
    assert "\n" not in str(caught.value)


def test_a_text_that_would_not_fit_the_model_is_refused() -> None:
    author = make_author(max_question_tokens=200, max_new_tokens=50)
    with pytest.raises(InvalidOption, match="need 258 positions, the model has 256"):
        Invented(author, OPENINGS, [])


def test_empty_questions_and_answers_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    author = make_author(batch_size=4)
    monkeypatch.setattr(
        author, "ask", lambda headers, temperature: [" ", "a", None, "c"][: len(headers)]
    )
    monkeypatch.setattr(Turns, "continuation", lambda turns, start, new: " ")  # answers only
    counts = Counts()
    assert Invented(author, ["b"], []).batch(3, counts) == []
    assert counts == Counts(unfinished=1, empty=3)


# --- openings


def test_the_built_in_openings_are_many_and_end_without_a_blank() -> None:
    openings = read_openings(None)
    assert len(openings) == len(set(openings)) >= 120
    assert not [text for text in openings if text != text.strip(" ")]
    assert any("\n" in text for text in openings)


def test_openings_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "openings"
    path.write_text("# none\n\n Say \nText:\\nThe \n", encoding="utf-8")
    assert read_openings(path) == ("Say", "Text:\nThe")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"# none\n", "holds no openings"),
        (b"\xff", "cannot read the openings"),
        (None, "No such file"),
    ],
)
def test_openings_that_cannot_be_read_are_named(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "openings"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidData, match=reason) as caught:
        read_openings(path)
    assert str(path) in str(caught.value)
