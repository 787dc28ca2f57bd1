"""Streamed answers: streamers, rounds, givers, and later turns of a session."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from itertools import pairwise
from queue import SimpleQueue
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from selfspec.api.speculator import Speculator, wrap
from selfspec.api.stream import Piece, html
from selfspec.decoding.stats import Giver, Round
from selfspec.errors import InvalidOption, InvalidPrompt
from tests.api.test_text import metaspace
from tests.bad_input import small_model, speaking
from tests.models import make_model, random_ids


def heard(listener: Mock) -> list[list[int]]:
    """What a streamer was given, once it has heard the end."""
    listener.end.assert_called_once_with()
    return [call.args[0].flatten().tolist() for call in listener.put.call_args_list]


def test_a_streamer_hears_prompt_tokens_and_end(speculator: Speculator, exact: Any) -> None:
    ids, listener, loop = random_ids(13), Mock(), speculator.hf()
    answer = speculator.generate(ids, max_new_tokens=9, streamer=listener)
    assert heard(listener) == [ids[0].tolist(), *([token] for token in answer.token_ids)]

    def wrapped(*args: Any, **options: Any) -> Any:
        streamer = "another's"  # noqa: F841  # a caller's variable, not generate's
        return loop(*args, **options)

    for custom_generate in (loop, wrapped):
        second = Mock()
        options = {"custom_generate": custom_generate, "streamer": second}
        exact.generate(ids, max_new_tokens=9, do_sample=False, **options)
        assert heard(second) == heard(listener)


def test_a_streamer_may_close_its_stream(speculator: Speculator) -> None:
    listener = Mock()
    stream = speculator.stream(random_ids(13), max_new_tokens=200, streamer=listener)
    listener.put = lambda _: stream.close()
    assert 0 < len(stream.drain().token_ids) < 20
    assert stream._running.ended
    listener.end.assert_called_once_with()


def test_a_streamer_hears_the_end_after_an_error_too(speculator: Speculator) -> None:
    listener, criteria = Mock(), [lambda *_: 1 // 0]
    with pytest.raises(ZeroDivisionError):
        speculator.generate(random_ids(13), streamer=listener, stopping_criteria=criteria)
    listener.end.assert_called_once_with()
    speculator.stream(random_ids(13), streamer=listener).close()
    assert listener.end.call_count == 2


def test_a_streamer_takes_one_text_only(speculator: Speculator, exact: Any) -> None:
    ids = torch.cat([random_ids(9), random_ids(9)])
    for call in (
        lambda: speculator.generate_batch(ids, max_new_tokens=2, streamer=Mock()),
        lambda: exact.generate(ids, custom_generate=speculator.hf(), streamer=Mock()),
    ):
        with pytest.raises(InvalidOption, match="a streamer shows one text"):
            call()


def test_the_estimate_follows_from_the_costs(speculator: Speculator) -> None:
    options: Any = {"max_new_tokens": 20, "never_slower": False}
    stream = speculator.stream(random_ids(9), costs="row=0.5,head=0.25", **options)
    answer = stream.drain()
    rounds = stream.rounds[1:]
    steps = sum(
        1 + 0.5 * len(entry.draft_tokens) + 0.25 * entry.heads + sum(entry.exit_layers) / 6
        for entry in rounds
    )
    assert answer.stats.drafted > 0
    assert answer.estimate is not None
    assert answer.estimate.speed_up == pytest.approx(19 / steps)
    assert answer.estimate.measured
    stream._running.shared = True  # with other texts, whose rows change all costs
    assert stream.result.estimate is None
    default = speculator.generate(random_ids(9), **options)
    assert default.estimate is not None
    assert not default.estimate.measured
    default.stats.seconds.clear()  # without times the summary has no speed
    assert default.summary() == (
        f"20 tokens, {default.stats.compression_rate:.1f} tokens per pass, about "
        f"{default.estimate.speed_up:.1f} times as fast as without drafts (a guess; to measure: "
        "selfspec tune)"
    )
    assert answer.summary().endswith(" times as fast as without drafts (by costs measured here)")
    unsure = speculator.stream(
        random_ids(9), drafter="exit:threshold=1", costs="head=0.25", **options
    )
    estimate, asked = unsure.drain().estimate, sum(entry.heads for entry in unsure.rounds)
    assert (unsure.result.stats.drafted, asked > 0) == (0, True)
    assert estimate is not None  # heads cost, although they are never sure
    assert estimate.speed_up == pytest.approx(19 / (19 + 0.25 * asked))
    plain = speculator.generate(random_ids(9), speculate=False, **options)
    assert re.fullmatch(r"20 tokens at [\d.]+ tokens/s, 1.0 tokens per pass", plain.summary())


def test_later_turns_run_only_new_tokens_and_give_the_same_answer(speculator: Speculator) -> None:
    session = speculator.session()
    first = random_ids(13)
    answer = session.generate(first, max_new_tokens=8)
    assert answer.stats.reused_tokens == 0
    second = torch.cat([first, torch.tensor([answer.token_ids]), random_ids(4, seed=1)], dim=1)
    reply = session.generate(second, max_new_tokens=8)
    assert reply.stats.reused_tokens == 13 + 8 - 1
    assert reply.token_ids == speculator.generate(second, max_new_tokens=8).token_ids
    edited = second.clone()
    edited[0, 10] = (edited[0, 10] + 1) % 96
    retry = session.generate(edited, max_new_tokens=8)
    assert retry.stats.reused_tokens == 10
    assert retry.token_ids == speculator.generate(edited, max_new_tokens=8).token_ids


def test_threads_may_share_a_session_and_close_a_stream(speculator: Speculator) -> None:
    session, queue = speculator.session(), SimpleQueue[Tensor]()
    prompts = [random_ids(13, seed) for seed in range(3)]

    def answer(ids: Tensor) -> list[int]:
        return session.generate(ids, max_new_tokens=20).token_ids

    listener = Mock(put=queue.put)
    stream = speculator.stream(random_ids(13), max_new_tokens=200, streamer=listener)
    with ThreadPoolExecutor() as threads:
        answers = [*threads.map(answer, prompts)]
        future = threads.submit(stream.drain)
        for _ in ("the prompt", "a token"):
            queue.get()
        stream.close()
    assert answers == [*map(answer, prompts)]
    assert 0 < len(future.result().token_ids) < 200


def test_closing_does_not_wait_for_a_streamer_that_waits_itself(speculator: Speculator) -> None:
    began, closed, heard = Event(), Event(), list[bool]()

    def put(ids: Tensor) -> None:  # as into a full queue, which the thread that closes would empty
        if ids.numel() == 1:
            began.set()
            heard.append(closed.wait(9))

    streamer = Mock(put=put)
    stream = speculator.stream(random_ids(13), max_new_tokens=200, streamer=streamer)
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(stream.drain)
        began.wait(99)
        stream.close()
        closed.set()
        assert 0 < len(future.result().token_ids) < 20
    assert all(heard)
    streamer.end.assert_called_once_with()
    assert stream._running.ended


def test_no_thread_takes_a_turn_while_a_streamer_might_take_one(speculator: Speculator) -> None:
    session, locked = speculator.session(), []
    with ThreadPoolExecutor(1) as threads:

        def put(_: Tensor) -> None:  # two threads would wait for each other
            locked.append(not threads.submit(session._lock.acquire, blocking=False).result())

        session.stream(random_ids(9), max_new_tokens=3, streamer=Mock(put=put)).drain()
    assert locked == [True] * 4


# Coloured, in a notebook


@pytest.fixture(scope="module")
def speaker() -> Speculator:
    return speaking(small_model())


def text_of(shown: str) -> str:
    (body,) = re.findall(r"pre-wrap[^>]*>(.*?)</div>", shown, re.DOTALL)
    return unescape(re.sub(r"<[^>]*>", "", body))


def test_pieces_join_to_the_text_and_name_their_givers(speaker: Speculator) -> None:
    stream = speaker.stream("the cat", max_new_tokens=24, do_sample=False)
    first, answer = next(stream), stream.drain()
    assert answer.text.startswith(first)
    assert "".join(piece.text for piece in answer.pieces) == answer.text
    assert [entry.prefill for entry in stream.rounds] == [True] + [False] * answer.stats.rounds
    assert [token for entry in stream.rounds for token in entry.tokens] == answer.token_ids
    givers = [giver for entry in stream.rounds for giver in entry.givers]
    assert [piece.giver for piece in answer.pieces] == givers
    drafted = [piece for piece in answer.pieces if piece.giver.source != "model"]
    assert len(drafted) == answer.stats.accepted
    assert text_of(answer._repr_html_()) == answer.text


def test_a_continuation_keeps_its_first_space() -> None:
    model = make_model("llama", torch.float64, vocab_size=4)
    bias: Any = {"max_new_tokens": 1, "sequence_bias": {(1,): 1e3}, "do_sample": False}
    base = wrap(model, tokenizer := metaspace())
    assert [base.generate("hello", raw=raw, **bias).text for raw in (False, True)] == [" world"] * 2
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = wrap(model, tokenizer)
    streams = [chat.stream("hello", raw=raw, **bias) for raw in (False, True)]
    assert [next(stream) for stream in streams] == ["world", " world"]


def test_half_a_character_at_the_end_spoils_no_text_before_it() -> None:
    """Decoded at once, a run of byte tokens is text only if all of it is."""
    backend = Tokenizer(models.WordLevel({"<0x0A>": 0, "<0xF0>": 1, "a": 2}, unk_token="a"))
    backend.decoder = decoders.ByteFallback()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    bias: Any = {"sequence_bias": {(0,): 1e3, (0, 1): 1e6}, "do_sample": False}
    model = make_model("llama", vocab_size=3)
    stream = wrap(model, tokenizer).stream([2], max_new_tokens=2, **bias)
    text = next(stream)
    assert (text, stream.result.text) == ("\n", "\n")
    text += "".join(stream)
    assert (stream.result.token_ids, text) == ([0, 1], "\n\N{REPLACEMENT CHARACTER}")
    assert [stream.result.text, "".join(piece.text for piece in stream.result.pieces)] == [text] * 2


def test_a_round_names_the_giver_of_each_token() -> None:
    drafts: Any = {"draft_tokens": [1, 9, 2], "exit_layers": [4, 0, 0], "parents": [-1, 0, 0]}
    sources = ["exit", "exit", "ngram"]
    entry = Round(tokens=[1, 2, 3], sources=sources, kept=[0, 2], ended="width", **drafts)
    assert [*entry.givers] == [("exit", 4), ("ngram", 0), ("model", 0)]


def test_text_is_escaped_and_each_giver_has_its_style() -> None:
    texts = {"exit": "<script>alert(1)</script>", "ngram": " & ", "grammar": '"\n', "model": "<b>"}
    pieces = [Piece(text, Giver(source)) for source, text in texts.items()]
    markup = html(pieces, 6, "1 < 2")
    assert text_of(markup) == "".join(texts.values())
    assert not re.search("<script|<b>|1 < 2", markup)
    assert {"solid", "dotted", "dashed"} <= set(re.findall(r"underline 2px (\w+)", markup))
    assert "the embedding" in markup


def test_an_error_shows_the_callers_lines_and_its_sentence(speaker: Speculator) -> None:
    with pytest.raises(InvalidPrompt) as caught:
        speaker.generate(["the cat", "the mat"])  # type: ignore[arg-type]  # the mistake
    *lines, sentence = caught.value._render_traceback_()
    assert sentence == f"InvalidPrompt: {caught.value}"
    assert 'speaker.generate(["the cat", "the mat"])' in lines[1]
    assert not any("selfspec/api/" in line for line in lines)


def test_a_stream_shows_its_text_as_it_grows(
    speaker: Speculator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options: Any = {"max_new_tokens": 12, "do_sample": False}
    text = speaker.generate("the cat", **options).text
    stream = speaker.stream("the cat", **options)
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    stream.show()
    assert capsys.readouterr().out == f"{text}\n"
    assert stream.result.text == text
    monkeypatch.setitem(sys.modules, "IPython", notebook := Mock())
    speaker.stream("the cat", **options).show()
    display = notebook.display.display  # one display, updated each time
    calls = [display.call_args, *display.return_value.update.call_args_list]
    texts = [call.args[0].text for call in calls]
    assert texts[-1] == text
    assert len(texts) > 2
    assert all(newer.startswith(older) for older, newer in pairwise(texts))
