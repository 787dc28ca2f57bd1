"""A model writes many texts at once, turn by turn, or a server in its place."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from selfspec.api.chat_template import having, read
from selfspec.errors import InvalidData, InvalidPrompt, SelfspecError
from selfspec.model.backbone import Backbone
from selfspec.training.recipe import Passages
from selfspec.training.selfgen import Ask, Author, Texts, Turns, Written, end_ids, loop_start
from tests.api.test_text import byte_level_bpe
from tests.authors import RECIPE, make_author, prompt_ids, recipe_of
from tests.models import VOCAB_SIZE, make_model, random_ids
from tests.talks import WORDS, make_tokenizer

# --- turns


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer()


def words(ids: list[int]) -> str:
    return " ".join(WORDS[token] for token in ids)


def test_headers_end_where_the_user_starts(tokenizer: PreTrainedTokenizerBase) -> None:
    turns = Turns.of(tokenizer)
    assert words(turns.header()) == "<start> user"
    assert words(turns.header("a b")) == "<start> user a b"
    assert turns.messages() == []
    system = Turns.of(tokenizer, "c c")
    assert words(system.header()) == "<start> system c c <end> <line> <start> user"
    assert system.messages() == [{"role": "system", "content": "c c"}]


def test_prompts_are_what_the_template_writes(tokenizer: PreTrainedTokenizerBase) -> None:
    turns = Turns.of(tokenizer, "c")
    messages = [*turns.messages(), {"role": "user", "content": "a b"}]
    assert turns.first_prompt("a b") == prompt_ids(tokenizer, messages)
    said = turns.first_prompt("a b") + [WORDS.index(word) for word in ("b", "<end>")]
    messages += [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    whole, start = prompt_ids(tokenizer, messages), turns.next_prompt(said, None)
    assert turns.next_prompt(said, "c") == whole
    assert whole[: len(start) + 1] == [*start, WORDS.index("c")]
    # an end token that the template does not write stays
    said = [*turns.first_prompt("a"), WORDS.index("<unused>")]
    assert words(turns.next_prompt(said, None)[len(said) :]) == "<end> <line> <start> user"


def test_special_tokens_and_the_templates_own_end_a_question(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    ends = {WORDS[token] for token in Turns.of(tokenizer).question_ends()}
    assert ends == {"<start>", "<end>", "<unused>"}
    tokenizer.add_tokens(["[/Q]"])  # not special, but the template ends questions with it
    tokenizer.chat_template = "{% for m in messages %}[Q] {{ m.content }} [/Q] {% endfor %}"
    own = tokenizer.convert_tokens_to_ids("[/Q]")
    assert own in Turns.of(tokenizer).question_ends()


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "no chat template"),
        ("{{ messages[0].role }}", "shows a turn 0 times"),
        ("{% for m in messages %}{{ m.content }} {{ m.content }}{% endfor %}", "a turn 2 times"),
        ("{{ raise_exception('no') }}", "does not take these messages: no"),
    ],
)
def test_a_template_that_cannot_be_taken_apart_is_refused(
    tokenizer: PreTrainedTokenizerBase, template: str | None, reason: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises((InvalidData, InvalidPrompt), match=reason):
        Turns.of(tokenizer)


def test_end_tokens_are_the_models_and_the_tokenizers(tokenizer: PreTrainedTokenizerBase) -> None:
    ending = make_model("llama")
    assert end_ids(ending, tokenizer) == {1}
    assert ending.generation_config is not None
    for configured in (7, [7, 1], [7]):
        ending.generation_config.eos_token_id = configured
        assert end_ids(ending, tokenizer) == {1, 7}
    ending.generation_config.eos_token_id = tokenizer.eos_token = None
    with pytest.raises(InvalidData, match="no end token"):
        end_ids(ending, tokenizer)


def test_a_user_turn_ends_where_a_template_without_end_tokens_begins_the_answer() -> None:
    tokenizer = having(byte_level_bpe(), read("vicuna"))
    turns = Turns.of(tokenizer)
    header = turns.header()
    said = turns.ids("What is a cat? ASSISTANT: It is")
    assert turns.question(header, said) == "What is a cat? "
    assert turns.question(header, turns.ids("What is a cat?")) is None
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    assert turns.question(header, [*turns.ids("What is a cat?"), end]) == "What is a cat?"
    prompt = turns.first_prompt("Q")
    assert str(turns.tokenizer.decode(prompt)).endswith(" USER: Q ASSISTANT:")
    more = turns.next_prompt([*prompt, *turns.ids(" A"), end], "R")
    assert str(turns.tokenizer.decode(more)).endswith("ASSISTANT: A<end>USER: R ASSISTANT:")


# --- texts

PROMPTS = [random_ids(length, seed=length)[0].tolist() for length in (5, 1, 12, 9)]
LIMIT = 41


@pytest.fixture(scope="module")
def exact() -> Backbone:
    """In float64, where a row has the same tokens in every way to compute it."""
    return Backbone(make_model("llama", torch.float64))


def run(
    backbone: Backbone,
    prompts: list[list[int]] = PROMPTS,
    *,
    ends: frozenset[int] = frozenset({VOCAB_SIZE - 1}),
    limit: int = LIMIT,
    seed: int = 0,
    heard: list[int] | None = None,
    **sampling: Any,
) -> list[list[int]]:
    texts = Texts(backbone, (lambda tokens: None) if heard is None else heard.append)
    places = {
        texts.add(Ask(prompt, limit, ends, 100 * seed + place, **sampling)): place
        for place, prompt in enumerate(prompts)
    }
    found: dict[int, list[int]] = {}
    while len(found) < len(prompts):
        found |= {places[text]: ids for text, ids in texts.step()}
    assert texts.step() == []
    return [found[place] for place in range(len(prompts))]


@torch.no_grad()
def alone(backbone: Backbone, prompt: list[int], ends: frozenset[int]) -> list[int]:
    """Greedy tokens without a cache or a batch, up to an end or a loop."""
    ids: list[int] = []
    while len(ids) < LIMIT and not (ids and ids[-1] in ends) and loop_start(ids) is None:
        ids.append(int(backbone.model(torch.tensor([prompt + ids])).logits[0, -1].argmax()))
    return ids


def test_texts_are_what_they_are_alone(exact: Backbone) -> None:
    ends = frozenset(alone(exact, PROMPTS[0], frozenset())[3:4])
    expected = [alone(exact, prompt, ends) for prompt in PROMPTS]
    assert len({len(ids) for ids in expected}) > 1, "texts should end one by one"
    heard: list[int] = []
    assert run(exact, ends=ends, heard=heard) == expected
    assert sum(heard) == sum(map(len, expected))


def test_a_text_that_loops_ends_with_its_third_turn(exact: Backbone) -> None:
    stuck = make_model("llama", torch.float64)
    token = run(exact)[0][0]
    with torch.no_grad():
        stuck.lm_head.weight[token] *= 100.0
    found = run(Backbone(stuck), limit=200)
    assert max(map(len, found)) < 200
    for ids in found:
        assert loop_start(ids) is not None
        assert loop_start(ids[:-1]) is None


def test_draws_come_from_the_seed_of_a_text(exact: Backbone) -> None:
    texts = run(exact, temperature=2.0)
    torch.manual_seed(3)
    assert run(exact, PROMPTS[:2], temperature=2.0) == texts[:2]
    assert run(exact, seed=1, temperature=2.0) != texts
    twins = run(exact, [PROMPTS[0]] * 2, temperature=2.0)
    assert twins[0] != twins[1]
    assert run(exact, temperature=2.0, top_k=1) == run(exact)


def test_the_models_own_defaults_do_not_change_the_text(exact: Backbone) -> None:
    expected, drawn = run(exact), run(exact, temperature=1.0)
    own = exact.model.generation_config
    assert own is not None
    odd = {"repetition_penalty": 5.0, "top_p": 0.01, "do_sample": True, "temperature": 9.0}
    own.update(**odd, max_length=3)
    try:
        assert run(exact) == expected
        assert run(exact, temperature=1.0) == drawn
    finally:
        own.update(**dict.fromkeys((*odd, "max_length")))


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
    assert loop_start([ord(letter) for letter in text]) == start


# --- a server


class OpenAI(BaseHTTPRequestHandler):
    """Says the last user turn again, and "b"; a turn of more than three words is cut."""

    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body | {"path": self.path, "key": self.headers["Authorization"]})
        said = body["messages"][-1]["content"]
        reason = "length" if len(said.split()) > 3 else "stop"
        message = {"role": "assistant", "content": f"{said} b"}
        self._send({"choices": [{"index": 0, "message": message, "finish_reason": reason}]})

    def do_GET(self) -> None:
        self._send({"data": [{"id": "its-model"}]} if self.path == "/v1/models" else [])

    def _send(self, answer: Any) -> None:
        sent = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_: Any) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    OpenAI.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), OpenAI)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def remote(url: str, **options: Any) -> Author:
    own = make_author(batch_size=24, **options)
    return Author(own.backbone, own.turns.tokenizer, own.options, lambda tokens: None, url)


def test_answers_are_the_servers_as_the_models_ids(url: str, tmp_path: Path) -> None:
    author = remote(url, system="c", greedy_share=0.5)
    prompts = author.prompts(recipe_of(RECIPE, tmp_path), Passages())
    assert prompts.left_out == ["free", "pair"]
    rows, _ = Written(author, prompts).propose(range(24))
    answered = [row for row in rows if row["family"] != "read"]
    assert len(answered) > 3
    for row in answered:
        system, question, answer = row["messages"]
        assert system == {"role": "system", "content": "c"}
        assert answer["content"].split() == [*question["content"].split(), "b"]
        ended = len(question["content"].split()) <= 3
        assert (row["input_ids"][-1] == author.turns.tokenizer.eos_token_id) is ended
    seen = {name: {body[name] for body in OpenAI.asked} for name in ("path", "model", "key")}
    assert seen["path"] == {"/v1/chat/completions"}
    assert (seen["model"], seen["key"]) == ({"its-model"}, {"Bearer secret"})
    assert {body["temperature"] for body in OpenAI.asked} == {0.0, author.options.temperature}
    assert {body["max_tokens"] for body in OpenAI.asked} == {author.options.max_new_tokens}
    with pytest.raises(SelfspecError, match=r"v1/models is not as OpenAI's: .*TypeError"):
        remote(f"{url}/else")


def test_a_server_that_is_not_there_is_one_line() -> None:
    with pytest.raises(SelfspecError, match=r"http://127\.0\.0\.1:9/v1 did not answer") as caught:
        remote("http://127.0.0.1:9/v1/")
    assert "\n" not in str(caught.value)
