from __future__ import annotations

import itertools
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from selfspec.api import chat_template as templates
from selfspec.errors import InvalidData, InvalidOption, InvalidPrompt, SelfspecError
from selfspec.model.backbone import Backbone
from selfspec.training import selfgen, text
from selfspec.training.options import DataOptions
from selfspec.training.recipe import Passages, Prompts, key
from selfspec.training.text import DROPPED, Counts, Reader, Writer
from tests.api.test_text import byte_level_bpe
from tests.authors import RECIPE, SMALL, at_once, invent, make_author, prompt_ids, read, recipe_of
from tests.models import VOCAB_SIZE, make_model, noted, random_ids
from tests.talks import TEMPLATE, WORDS, dialogue, make_tokenizer

Lines = tuple[list[dict[str, Any]], Counts]
WRITTEN: dict[str, Any] = {"tokens": 300, "greedy_share": 0.5, "max_question_tokens": 4}


def words(ids: list[int]) -> str:
    return " ".join(WORDS[token] for token in ids)


# --- the rows that are written


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Counts]:
    path = tmp_path_factory.mktemp("written") / "a.jsonl"
    return path, invent(make_author(**WRITTEN), path)


@pytest.fixture(scope="module")
def written(whole: tuple[Path, Counts]) -> Lines:
    return read(whole[0]), whole[1]


def test_a_line_holds_ids_and_text(written: Lines, tokenizer: PreTrainedTokenizerBase) -> None:
    single = [line for line in written[0] if "answer_start" in line]
    assert len(single) > 10
    for line in single:
        *_, question, answer = line["messages"]
        if len(line["messages"]) > 2:
            continue
        answer_ids = line["input_ids"][line["answer_start"] :]
        assert line["input_ids"][: line["answer_start"]] == prompt_ids(tokenizer, [question])
        expected = str(tokenizer.decode(answer_ids, skip_special_tokens=True))
        assert answer["content"].split() == expected.split()
        assert 1 <= len(answer_ids) <= SMALL["max_new_tokens"]
        assert selfgen.loop_start(answer_ids) is None
        assert question["content"] == question["content"].strip() != ""


def test_every_family_has_rows_of_its_kind(written: Lines) -> None:
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
        question = row["messages"][0]["content"]
        passages = [question.removesuffix(f" {word}") for word in ("a", "b", "a b", "b b", "c a")]
        passages.append(question.removeprefix("b "))
        article = " ".join(articles[row["seed"]].split())
        assert any(" ".join(passage.split()) in article for passage in passages)


def test_rows_differ_and_every_one_is_counted(written: Lines) -> None:
    lines, counts = written
    assert len({key(line["messages"][0]["content"]) for line in lines}) == len(lines)
    assert counts.total("rows") == len(lines)
    talks = [text.from_ids(line) for line in lines]
    assert sum(len(talk.answer_ids) for talk in talks) == counts.total("answer_tokens") >= 300
    assert sum(len(talk.answers) for talk in talks) == counts.total("answers")
    assert sum(len(talk.ids) for talk in talks) == counts.total("tokens")
    assert any(not talk.answers for talk in talks)  # rows without an answer
    seeds = {line["seed"] for line in lines}
    dropped = sum(counts.total(name) for name in DROPPED)
    batches = max(seeds) - selfgen.batch_seed(0, 0) + 1
    assert counts.total("rows") + dropped == SMALL["batch_size"] * batches
    assert counts.total("duplicates") > 0
    assert counts.families.keys() == {line["family"] for line in lines}


def test_the_last_batch_is_small_if_few_tokens_are_missing() -> None:
    source = selfgen.Admission(DataOptions(batch_size=32))
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
def test_each_option_changes_the_text(
    tmp_path: Path, usual: list[list[int]], options: dict[str, Any]
) -> None:
    ids = ids_with(tmp_path / "other", **options)
    assert ids != usual
    if "temperature" in options:  # the change is not due to sampling alone
        assert ids != ids_with(tmp_path, greedy_share=0.0)


def test_turns_are_given_or_invented(tmp_path: Path) -> None:
    talk = 'families: {talk: {weight: 1, ask: [["{word}", null, "{word} b"]]}}\n'
    lists = "lists: {word: [" + ", ".join("abc"[i % 3] + " c" * i for i in range(60)) + "]}\n"
    counts = invent(make_author(tokens=200, system="c"), tmp_path / "a", talk + lists)
    lengths = set()
    for line in read(tmp_path / "a"):
        roles = [message["role"] for message in line["messages"]]
        spans = line.get("answers", [[line.get("answer_start"), len(line["input_ids"])]])
        assert roles == ["system", *["user", "assistant"] * len(spans)]
        for number, (first, _) in enumerate(spans):
            messages = line["messages"][: 2 * number + 2]
            header = words(line["input_ids"][:first])
            assert header.endswith(f"{messages[-1]['content']} <end> <line> <start> assistant")
        # a cut answer ends its conversation
        assert all(line["input_ids"][end - 1] == 1 for _, end in spans[:-1])
        contents = [message["content"] for message in line["messages"]]
        assert len(spans) < 3 or contents[5] == f"{contents[1]} b"
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


def test_loops_are_cut_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    author = make_author(tokens=60, max_new_tokens=150, greedy_share=1.0)
    never = frozenset({len(WORDS)})  # no answer ends, so that most of them loop
    monkeypatch.setattr(author, "_end_tokens", never)
    one_turn = RECIPE.replace(', ["c {other}", null, "b"]', "")
    counts = invent(author, tmp_path / "a", one_turn)
    loops = 0
    for line in read(tmp_path / "a"):
        start = line["answer_start"]
        prompt, answer_ids = line["input_ids"][:start], line["input_ids"][start:]
        texts = selfgen.Texts(author.backbone, lambda tokens: None)
        texts.add(selfgen.Ask(prompt, 150, never, 0))
        while not (ended := texts.step()):
            pass
        ((_, uncut),) = ended
        assert answer_ids == uncut[: selfgen.loop_start(uncut)]
        loops += answer_ids != uncut
    assert counts.total("loops_cut") == loops > 0
    assert sum(line["loops"] for line in read(tmp_path / "a")) == loops


# --- seeds, resuming


def test_seeds_of_a_run_are_all_different_and_stay_within_32_bits() -> None:
    seeds = {selfgen.batch_seed(seed, index) for seed in (0, 1) for index in range(1000)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_batches_ahead_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batches are begun with a size that turns out to be wrong."""
    monkeypatch.setattr(selfgen, "_TALK_TOKENS", 8)
    author = make_author(tokens=500, batch_size=20)
    starts = noted(monkeypatch, selfgen.Written, "propose", lambda _, numbers: numbers.start)
    for ahead in (1, 4):
        invent(author, tmp_path / str(ahead), ahead=ahead)
    assert len(set(starts)) < len(starts) - len(set(starts)), "a batch was proposed again"
    assert (tmp_path / "1").read_bytes() == (tmp_path / "4").read_bytes()
    assert (tmp_path / "1.run.json").read_bytes() == (tmp_path / "4.run.json").read_bytes()


@pytest.mark.parametrize("stop", [1, 40, 120])
def test_an_interrupted_run_writes_the_same_file(
    tmp_path: Path, stop: int, whole: tuple[Path, Counts]
) -> None:
    author, (path, expected) = make_author(**WRITTEN), whole
    looks = itertools.count(1)

    def watch(tokens: int) -> None:
        if next(looks) == stop:
            raise KeyboardInterrupt

    broken = selfgen.Author(author.backbone, author.turns.tokenizer, author.options, watch)
    with pytest.raises(KeyboardInterrupt):
        invent(broken, tmp_path / "broken")
    assert invent(broken, tmp_path / "broken") == expected
    assert (tmp_path / "broken").read_bytes() == path.read_bytes()


# --- runs that cannot continue


def test_a_recipe_without_new_rows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="no row of 3 batches could be used"):
        invent(make_author(tokens=10_000), tmp_path / "a", "families: {f: {weight: 1, ask: [a]}}")


def test_a_model_without_room_for_a_prompt_is_refused() -> None:
    with pytest.raises(InvalidOption, match="leaves under 32 of the model's 256 positions"):
        make_author(max_new_tokens=230)


def test_a_user_turn_ends_at_the_models_last_position() -> None:
    author, rng = make_author(), random.Random(0)
    most = author.backbone.max_positions
    (ask,) = itertools.islice(author.ask([1] * (most - 3), rng), 1)
    assert ask is not None
    assert ask.max_new_tokens == 3
    assert [*author.ask([1] * most, rng)] == []


def test_empty_turns_are_dropped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    author = make_author(batch_size=4)
    replies = iter([" ", "a", None, "c"])

    def ask(_header: list[int], _rng: random.Random) -> Any:
        return next(replies)
        yield

    monkeypatch.setattr(author, "ask", ask)
    monkeypatch.setattr(selfgen.Turns, "continuation", lambda *_: " ")  # answers only
    recipe = recipe_of("families: {free: {weight: 1, continues: true, ask: [b]}}", tmp_path)
    rows, counts = selfgen.Written(author, Prompts(recipe, Passages(), 0)).propose(range(4))
    assert rows == []
    totals = {name: n for name, n in counts.families["free"].items() if n}
    assert totals == {"unfinished": 2, "empty": 2}


# --- duplicates, and rows that overlap with a benchmark


def test_n_grams_of_eight_words_ignore_case_and_punctuation() -> None:
    text = "One, two three four; FIVE six seven eight nine"
    assert selfgen.ngrams(text) == selfgen.ngrams("one two three (four five six seven) eight nine!")
    assert len(selfgen.ngrams(text)) == 2
    assert not selfgen.ngrams(text) & selfgen.ngrams("zero " + text.replace("four", "4"))
    assert len(selfgen.ngrams("你好吗我很好谢谢你")) == 2
    assert selfgen.ngrams("too short a text to compare with") == set()


def test_rows_with_words_of_an_excluded_text_are_dropped_and_counted(tmp_path: Path) -> None:
    recipe = """
families: {f: {weight: 1, ask: ["{word} b b b b b b b"]}}
lists: {word: [a, c, a a, c c, a b, c b]}
"""
    author = make_author(tokens=10_000)
    prompts = Prompts(recipe_of(recipe, tmp_path), Passages(), 0)
    excluded = selfgen.ngrams("C b b b b b b b")
    rows, counts = selfgen.Written(author, prompts, excluded).propose(range(6))
    source = selfgen.Admission(author.options, excluded=excluded)
    assert counts.total("excluded") == 3  # c, c c and c b
    assert not any(row["messages"][0]["content"].startswith("c b b b b b b b") for row in rows)
    for answer, new in (("it is C b b b b b b b", False), ("b", True), ("a", False)):
        row = {"family": "f", "messages": dialogue("is it kept", answer)}
        assert source._is_new(row, counts) is new, answer
    # a dropped row leaves no trace, or a resumed run would write other rows
    assert (counts.total("excluded"), counts.total("duplicates")) == (4, 1)


def test_rows_are_decoded_in_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    author = make_author(batch_size=12)
    texts = noted(monkeypatch, selfgen.Texts, "step", lambda texts: texts._engine.texts)
    prompts = Prompts(recipe_of(RECIPE, tmp_path), Passages(), 0)
    assert selfgen.Written(author, prompts).propose(range(12))[0]
    assert texts[0] > 6, "rows that do not depend on another row begin together"


def test_an_answer_that_nearly_repeats_another_is_dropped() -> None:
    source = selfgen.Admission(DataOptions())
    counts, vocabulary, numbers = Counts(), [f"w{n}" for n in range(60)], itertools.count()

    def new(reply: list[str]) -> bool:
        turns = dialogue(str(next(numbers)), " ".join(reply))
        return source._is_new({"family": "f", "messages": turns}, counts)

    assert new(vocabulary)
    assert not new([*vocabulary[:55], "x", "y"])
    assert new([*vocabulary[:20], *[f"v{n}" for n in range(40)]])
    assert new(["short", "answer"])
    assert new(["short", "answer"])
    assert counts.total("alike") == 1


# --- turns


def test_prompts_are_those_of_the_template(tokenizer: PreTrainedTokenizerBase) -> None:
    turns = selfgen.Turns.of(tokenizer, "c")
    assert turns.first_prompt("a b") == prompt_ids(tokenizer, dialogue("a b", rule="c"))
    ids = turns.first_prompt("a b") + [WORDS.index(word) for word in ("b", "<end>")]
    prompt = prompt_ids(tokenizer, dialogue("a b", "b", "c", rule="c"))
    start = turns.next_prompt(ids, None)
    assert turns.next_prompt(ids, "c") == prompt
    assert prompt[: len(start) + 1] == [*start, WORDS.index("c")]
    # an end token that the template does not write stays
    ids = [*turns.first_prompt("a"), WORDS.index("<unused>")]
    assert words(turns.next_prompt(ids, None)[len(ids) :]) == "<end> <line> <start> user"


def test_the_end_token_is_not_repeated_if_whitespace_precedes_it() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("<end>", "<line> <end>")
    turns = selfgen.Turns.of(tokenizer)
    ids = [*turns.first_prompt("a"), *map(WORDS.index, ("b", "<end>"))]
    assert words(turns.next_prompt(ids, None)[len(ids) :]) == "<line> <start> user"


def test_special_and_template_tokens_end_a_question(tokenizer: PreTrainedTokenizerBase) -> None:
    ends = {WORDS[token] for token in selfgen.Turns.of(tokenizer).question_ends()}
    assert ends == {"<start>", "<end>", "<unused>"}
    tokenizer.add_tokens(["[/Q]"])  # not special, but the template ends questions with it
    tokenizer.chat_template = "{% for m in messages %}[Q] {{ m.content }} [/Q] {% endfor %}"
    end_id = tokenizer.convert_tokens_to_ids("[/Q]")
    assert end_id in selfgen.Turns.of(tokenizer).question_ends()


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "no chat template"),
        ("{{ messages[0].role }}", "shows a turn 0 times"),
        ("{% for m in messages %}{{ m.content }} {{ m.content }}{% endfor %}", "a turn 2 times"),
        ("{{ raise_exception('no') }}", "does not take these messages: no"),
    ],
)
def test_a_template_that_cannot_be_split_into_turns_is_refused(
    tokenizer: PreTrainedTokenizerBase, template: str | None, reason: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises((InvalidData, InvalidPrompt), match=reason):
        selfgen.Turns.of(tokenizer)


def test_end_tokens_come_from_model_and_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    ending = make_model("llama")
    assert selfgen.end_ids(ending, tokenizer) == {1}
    assert ending.generation_config is not None
    for configured in (7, [7, 1], [7]):
        ending.generation_config.eos_token_id = configured
        assert selfgen.end_ids(ending, tokenizer) == {1, 7}
    ending.generation_config.eos_token_id = tokenizer.eos_token = None
    assert selfgen.end_ids(ending, tokenizer) == {1}  # the template's
    tokenizer.chat_template = None
    with pytest.raises(InvalidData, match="no end token"):
        selfgen.end_ids(ending, tokenizer)


def test_a_user_turn_ends_where_a_template_without_end_tokens_begins_the_answer() -> None:
    tokenizer = templates.with_template(byte_level_bpe(), templates.read("vicuna"))
    turns = selfgen.Turns.of(tokenizer)
    header = turns.ids(turns.prefix)
    ids = turns.ids("What is a cat? ASSISTANT: It is")
    assert turns.question(header, ids) == "What is a cat? "
    assert turns.question(header, turns.ids("What is a cat?")) is None
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    assert turns.question(header, [*turns.ids("What is a cat?"), end]) == "What is a cat?"
    prompt = turns.first_prompt("Q")
    assert str(turns.tokenizer.decode(prompt)).endswith(" USER: Q ASSISTANT:")
    second = turns.next_prompt([*prompt, *turns.ids(" A"), end], "R")
    assert str(turns.tokenizer.decode(second)).endswith("ASSISTANT: A<end>USER: R ASSISTANT:")


# --- texts

PROMPTS = [random_ids(length, seed=length)[0].tolist() for length in (5, 1, 12, 9)]


def run(
    backbone: Backbone,
    prompts: list[list[int]] = PROMPTS,
    *,
    limit: int = 12,
    seed: int = 0,
    **sampling: Any,
) -> list[list[int]]:
    texts, ends = selfgen.Texts(backbone, lambda tokens: None), frozenset({VOCAB_SIZE - 1})
    places = {
        texts.add(selfgen.Ask(prompt, limit, ends, 100 * seed + place, **sampling)): place
        for place, prompt in enumerate(prompts)
    }
    answers: dict[int, list[int]] = {}
    while len(answers) < len(prompts):
        answers |= {places[text]: ids for text, ids in texts.step()}
    assert texts.step() == []
    return [answers[place] for place in range(len(prompts))]


def test_a_looping_text_ends_with_the_third_occurrence(precise: Backbone) -> None:
    stuck = make_model("llama", torch.float64)
    token = run(precise)[0][0]
    with torch.no_grad():
        stuck.lm_head.weight[token] *= 100.0
    texts = run(Backbone(stuck), limit=200)
    assert max(map(len, texts)) < 200
    for ids in texts:
        assert selfgen.loop_start(ids) is not None
        assert selfgen.loop_start(ids[:-1]) is None


def test_draws_come_from_the_seed_of_a_text(precise: Backbone) -> None:
    state = torch.get_rng_state()
    texts = run(precise, temperature=2.0)
    assert torch.equal(torch.get_rng_state(), state), "global generators are left alone"
    torch.manual_seed(3)
    assert run(precise, PROMPTS[:2], temperature=2.0) == texts[:2]
    assert run(precise, seed=1, temperature=2.0) != texts
    twins = run(precise, [PROMPTS[0]] * 2, temperature=2.0)
    assert twins[0] != twins[1]
    assert run(precise, temperature=2.0, top_k=1) == run(precise)


def test_the_models_own_defaults_do_not_change_the_text(precise: Backbone) -> None:
    expected, sampled = run(precise), run(precise, temperature=1.0)
    config = precise.model.generation_config
    assert config is not None
    odd = {"repetition_penalty": 5.0, "top_p": 0.01, "do_sample": True, "temperature": 9.0}
    config.update(**odd, max_length=3)
    try:
        assert run(precise) == expected
        assert run(precise, temperature=1.0) == sampled
    finally:
        config.update(**dict.fromkeys((*odd, "max_length")))


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("abcdefgh", None),
        ("abcdefghabcdefgh", None),
        ("xyzabcdefghabcdefghabcdefgh", 11),
        ("xaaaaaaaaa", None),
        ("xaaaaaaaaaa", 2),
        ("xabababababababab", 3),
        ("abcdefgh-abcdefgh+abcdefgh", 9),
        ("abcdefg-abcdefg+abcdefg*", None),
        ("", None),
    ],
)
def test_a_loop_begins_at_the_second_of_three_occurrences(text: str, start: int | None) -> None:
    assert selfgen.loop_start([ord(letter) for letter in text]) == start


# --- a server


URL = "http://server"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Request bodies sent to a server that echoes the last turn and "b", cut from four words on."""
    bodies = list[dict[str, Any]]()

    def answered(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            models = {"data": [{"id": "its-model"}]}
            return httpx.Response(200, json=models if request.url.path == "/v1/models" else [])
        body = json.loads(request.content)
        bodies.append(body | {"path": request.url.path, "key": request.headers["Authorization"]})
        echo = body["messages"][-1]["content"].replace("half", "\ud800")
        reason = "length" if len(echo.split()) > 3 else "stop"
        choice = {"message": {"content": f"{echo} b"}, "finish_reason": reason}
        return httpx.Response(200, text=json.dumps({"choices": [choice]}))

    client = partial(httpx.Client, transport=httpx.MockTransport(answered))
    monkeypatch.setattr(httpx, "Client", client)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    return bodies


def remote(url: str, **options: Any) -> selfgen.Author:
    own = make_author(batch_size=24, **options)
    return selfgen.Author(own.backbone, own.turns.tokenizer, own.options, lambda tokens: None, url)


def test_a_servers_answers_are_the_models_ids(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    author = remote(URL, system="c", greedy_share=0.5)
    prompts = author.prompts(recipe_of(RECIPE, tmp_path), Passages())
    assert prompts.left_out == ["free", "pair"]
    rows, _ = selfgen.Written(author, prompts).propose(range(24))
    answered = [row for row in rows if row["family"] != "read"]
    assert len(answered) > 3
    for row in answered:
        system, question, answer = row["messages"]
        assert system == {"role": "system", "content": "c"}
        assert answer["content"].split() == [*question["content"].split(), "b"]
        ended = len(question["content"].split()) <= 3
        assert (row["input_ids"][-1] == author.turns.tokenizer.eos_token_id) is ended
    fields = {name: {body[name] for body in asked} for name in ("path", "model", "key")}
    assert fields["path"] == {"/v1/chat/completions"}
    assert (fields["model"], fields["key"]) == ({"its-model"}, {"Bearer secret"})
    assert {body["temperature"] for body in asked} == {0.0, author.options.temperature}
    assert {body["max_tokens"] for body in asked} == {author.options.max_new_tokens}
    with pytest.raises(SelfspecError, match=r"v1/models is not OpenAI's format: .*TypeError"):
        remote(f"{URL}/else")
    assert author._server is not None
    half = {"role": "user", "content": "half"}
    author._server.add(selfgen.Ask([1], 4, frozenset(), 0, messages=(half,)))
    with pytest.raises(SelfspecError, match="is not OpenAI's format: UnicodeEncodeError"):
        author._server.step()


def test_an_unreachable_server_is_named() -> None:
    with pytest.raises(SelfspecError, match=r"http://127\.0\.0\.1:9/v1 did not answer"):
        remote("http://127.0.0.1:9/v1/")


# --- given user turns

QUESTIONS = ["a", "b", "c", "a b", "A  b", "b a", "c c", "a c", "b c", "c a b"]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Ten questions, one of them twice, and a bad line."""
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"messages": dialogue(text, "b")}) for text in QUESTIONS]
    path.write_text("\n".join(["[]", *lines]) + "\n")
    return path


def answer(rows: Path, output: Path, ahead: int = 1, **options: Any) -> Counts:
    author = make_author(**{"batch_size": 4, "greedy_share": 1.0} | options)
    parse = partial(selfgen.talk_of, tokenizer=make_tokenizer(), system=author.options.system)
    writer = Writer(output, {}, {})
    reader = Reader(rows, parse, skip_bad_rows=True)
    source = selfgen.Given(reader, writer.batches, author.options, frozenset())
    for _ in selfgen.write(source, writer, author.options, at_once(author.answer), ahead):
        pass
    return writer.counts


def test_questions_are_kept_and_the_model_answers_them(rows: Path, tmp_path: Path) -> None:
    counts = answer(rows, tmp_path / "out")
    lines = read(tmp_path / "out")
    distinct = [text for text in QUESTIONS if text != "A  b"]
    questions = [line["messages"][0]["content"] for line in lines]
    assert questions == [text for text in distinct if text in questions]
    assert counts.total("rows") == len(lines) == len(distinct) - counts.total("empty")
    assert (counts.total("duplicates"), counts.total("bad_rows")) == (1, 1)
    assert [line["messages"][1]["content"] for line in lines] != ["b"] * len(lines)
    assert not any(line["sampled"] for line in lines)
    answer(rows, tmp_path / "drawn", greedy_share=0.5)
    assert {line["sampled"] for line in read(tmp_path / "drawn")} == {True, False}


def test_a_rows_own_system_message_wins(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = dialogue("a", "c", "b", rule="b")
    talk = selfgen.talk_of({"messages": messages}, tokenizer, "c")
    assert talk.messages == messages[:1]
    assert (talk.question, talk.pending) == ("a", ["b"])
    plain = selfgen.talk_of({"messages": dialogue(" a ")}, tokenizer, "c")
    assert plain.messages == dialogue(rule="c")
    assert plain.prompt == prompt_ids(tokenizer, dialogue("a", rule="c"))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "a b"}, "holds text, expected messages, conversations or turns"),
        ({"messages": dialogue(rule="a")}, "no user turn"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "no user turn"),
        ({"messages": dialogue("a", "b", " ")}, "an empty user turn"),
        ({"messages": [*dialogue("a"), *dialogue(rule="a")]}, "after its first turn"),
    ],
)
def test_a_row_without_questions_is_refused(
    record: dict[str, Any], reason: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(InvalidData, match=reason):
        selfgen.talk_of(record, tokenizer, None)


def test_an_interrupted_run_continues_with_the_next_rows(rows: Path, tmp_path: Path) -> None:
    expected = answer(rows, tmp_path / "whole")
    for tokens in (1, 12, None):
        counts = answer(rows, tmp_path / "parts", ahead=3, tokens=tokens)
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()
    assert counts == expected
