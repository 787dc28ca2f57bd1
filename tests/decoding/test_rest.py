"""Drafts from a datastore: what is found there, what it is worth, whose file it is."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from selfspec import files
from selfspec.api.speculator import wrap
from selfspec.decoding.acceptance import Draft
from selfspec.decoding.drafters import rest
from selfspec.decoding.drafters.base import ROOT
from selfspec.decoding.drafters.rest import BEHIND, DOUBT, END, Datastore, RestGuesser, suffix_array
from selfspec.decoding.state import alone
from selfspec.decoding.stats import Stopwatch
from selfspec.errors import InvalidData
from tests.decoding.test_drafters import Text
from tests.models import make_model, random_ids
from tests.talks import make_tokenizer

Prefix = tuple[int, ...]


def store_of(*texts: list[int]) -> Datastore:
    return Datastore.of(texts, make_tokenizer())


def weights(texts: list[list[int]], newest: list[int]) -> tuple[Counter[Prefix], int]:
    """The definition: how often each prefix of 10 tokens follows the longest suffix that occurs."""
    for count in range(min(16, len(newest)), 1, -1):
        suffix, found = newest[-count:], Counter[Prefix]()
        for text in texts:
            for at in range(len(text) - count + 1):
                if text[at : at + count] == suffix:
                    behind = text[at + count : at + count + BEHIND]
                    found.update(tuple(behind[: n + 1]) for n in range(len(behind)))
                    found[()] += 1
        if found:
            return found, count
    return Counter(), 0


@pytest.mark.parametrize("seed", range(20))
def test_the_heaviest_prefixes_behind_the_longest_suffix_are_found(seed: int) -> None:
    drawn = random.Random(seed)
    texts = [[drawn.randrange(3) for _ in range(drawn.randrange(1, 60))] for _ in range(12)]
    newest = [drawn.randrange(3) for _ in range(drawn.randrange(1, 20))]
    (expected, matched), store = weights(texts, newest), store_of(*texts)
    for most in (4, 15, 10_000):
        trie = store.behind(newest, most)
        found = {(*path, token) for path, known in trie.items() for token in known.tokens}
        assert found <= expected.keys()
        sizes = sorted((count for path, count in expected.items() if path), reverse=True)
        assert sorted((expected[path] for path in found), reverse=True) == sizes[:most]
        for path, known in trie.items():
            assert path == () or path in found
            whole = expected[path] + DOUBT / (matched + len(path))
            chances = [expected[path + (token,)] / whole for token in known.tokens]  # noqa: RUF005  # 3.10
            assert list(known.chances) == chances == sorted(chances, reverse=True)


def test_places_are_in_the_order_of_what_stands_there() -> None:
    drawn = random.Random(0)
    for size in (1, 2, 31, 500):
        ids = np.array([drawn.randrange(-1, 3) for _ in range(size)], np.int32)
        naive = sorted(range(size), key=lambda at: (ids[at : at + 32].tolist(), at))
        assert suffix_array(ids).tolist() == naive


def test_many_hits_are_thinned_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(*([1, 2, 3] for _ in range(30)), *([1, 2, 4] for _ in range(60)))
    monkeypatch.setattr(rest, "HITS", 9)
    known = store.behind([1, 2], 15)[()]
    assert (known.tokens, known.chances) == ((4, 3), (6 / (9 + 4), 3 / (9 + 4)))


def test_nothing_goes_on_into_the_next_text_and_one_token_is_too_few() -> None:
    store = store_of([1, 2], [3, 4], [7, 8, 1, 2, 5])
    assert store.behind([1, 2], 15) == store.behind([9, 1, 2], 15)
    assert store.behind([1, 2], 15)[()].tokens == (5,)
    for newest in ([4, 9], [1], [], [2, 5]):
        assert not store.behind(newest, 15)


def test_a_guesser_says_what_follows_paths_of_a_draft_and_in_chains_the_heaviest() -> None:
    store, draft = store_of([1, 2, 5, 6], [1, 2, 5, 7], [1, 2, 8, 6]), Draft.of([5, 8], [-1, -1])
    for trees, expected in ((True, [[5, 8], [6, 7], [6]]), (False, [[5], [6], [6]])):
        guesser = RestGuesser(store, 15, trees=trees)
        guesser.begin(Text([9, 1, 2]))
        found = alone(guesser.ask(draft, [ROOT, 0, 1], Stopwatch()))
        assert [
            [guess.choice(rank).token for rank in range(len(guess.chances))]  # type: ignore[union-attr]  # there is one
            for guess in found
        ] == expected


# --- the file


def test_a_file_holds_what_was_saved_and_is_known_as_ours(tmp_path: Path) -> None:
    store, path = store_of([1, 2, 3], [4, 5]), tmp_path / "store.safetensors"
    for _ in range(2):  # the second takes the place of the first
        store.save(path)
    found = Datastore.read(path)
    assert found.ids.tolist() == [1, 2, 3, END, 4, 5, END]
    assert (found.suffixes.tolist(), found.vocabulary) == (
        store.suffixes.tolist(),
        store.vocabulary,
    )
    assert files.written_here(path)


WRONG: list[dict[str, Any]] = [
    {"ids": None},
    {"more": np.zeros(3, np.int32)},
    {"ids": np.zeros(2, np.int32)},
    {"ids": np.zeros(7, np.int64)},
    {"ids": np.full(7, -2, np.int32)},
    {"suffixes": np.full(7, 7, np.int32)},
    {"suffixes": np.full(7, -1, np.int32)},
    {"ids": np.zeros(0, np.int32), "suffixes": np.zeros(0, np.int32)},
    {"ids": np.zeros((7, 1), np.int32), "suffixes": np.zeros((7, 1), np.int32)},
    {"vocabulary": np.zeros(31, np.uint8)},
]


@pytest.mark.parametrize("changed", WRONG, ids=range(len(WRONG)))
def test_what_is_no_datastore_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "store.safetensors"
    store_of([1, 2, 3], [4, 5]).save(path)
    tensors = {name: one for name, one in (load_file(path) | changed).items() if one is not None}
    save_file(tensors, path)
    with pytest.raises(InvalidData, match=f"{path} is (no datastore|damaged)"):
        wrap(make_model("llama"), datastore=path)


def test_another_vocabulary_is_refused(tmp_path: Path, exact: Any) -> None:
    path, other = tmp_path / "store.safetensors", make_tokenizer()
    other.add_tokens(["zebra"])
    Datastore.of([[1, 2, 3]], other).save(path)
    assert wrap(exact, other, datastore=path).options.drafter == "ngram+rest"
    with pytest.raises(InvalidData, match=f"the datastore {path} is of another vocabulary"):
        wrap(exact, make_tokenizer(), datastore=path)
    Datastore.of([[1, 96, 3]], other).save(path)  # a token that the model does not have
    with pytest.raises(InvalidData, match="of another vocabulary than the model's"):
        wrap(exact, other, datastore=path)


# --- through the facade


def test_longest_paths_and_rows_are_bounded(tmp_path: Path, exact: Any) -> None:
    ids, path = random_ids(9), tmp_path / "store.safetensors"
    many: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "costs": "row=0"}
    plain = wrap(exact, speculate=False).generate(ids, **many)
    store_of(*[[*ids[0].tolist(), *plain.token_ids]] * 50).save(path)  # all but certain
    speculator = wrap(exact, datastore=path, drafter="rest")
    lengths = [
        max(speculator.generate(ids, drafter=f"rest:{setting}", **many).stats.drafted_by_index)
        for setting in ("max_tokens=2", "max_rows=4", "max_rows=16")
    ]
    assert lengths == [2, 3, 10]
