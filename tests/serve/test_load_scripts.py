"""What eval/serving.py computes, against a live server."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from eval import serving
from eval.serving import question
from selfspec.eval.concurrency import Load
from tests.serve.live import Running

PROMPTS = ["Name a river.", "Count to five.", "Say hello."]


def test_a_load_counts_what_usage_says(server: Running) -> None:
    load = Load(texts=2)
    asked = [question(text, 6, **serving.STREAMED) for text in (*PROMPTS, *PROMPTS[:2])]
    serving.loaded(server.address, asked, load)
    alone = [
        server.speculator.generate(PROMPTS[index % 3], max_new_tokens=6, do_sample=False)
        for index in range(5)
    ]
    assert load.tokens == sum(len(one.token_ids) for one in alone)
    assert len(load.first_s) == 5
    assert 0 < sum(load.gaps_s) < load.texts * load.seconds


def test_an_error_is_no_figure(server: Running) -> None:
    asked = [question("Hello", 4, temperature=9)]
    with pytest.raises(RuntimeError, match=r"status 400.*temperature"):
        serving.loaded(server.address, asked, Load(texts=1))


def test_the_best_peer_counts() -> None:
    def load(method: str, seconds: float) -> Load:
        return Load(method=method, texts=4, seconds=seconds, tokens=60, first_s=[0.1, 0.3])

    loads = [load(serving.OURS, 1), load(serving.THEIRS, 6), load(serving.BATCHING, 3)]
    assert serving.ahead(loads) == {4: 3.0}


def test_what_differs_is_found(server: Running) -> None:
    alone = [
        serving.without_server(server.speculator, number, prompt, 6)
        for number, prompt in enumerate(PROMPTS)
    ]
    token, logprob = alone[1].likely[-1]
    off_by_a_bit = [*alone[1].likely[:-1], (token, math.nextafter(logprob, 0.0))]
    wrong = [alone[0], replace(alone[1], likely=off_by_a_bit), alone[2]]
    for expected, differing in ((alone, []), (wrong, [1])):
        found = serving.compared(server.address, PROMPTS, expected, 6, 2, speculation=True)
        assert list(found["differing"]) == differing
        assert (found["answers"], found["sampled"], found["streams"]) == (3, 1, 1)
