"""KV caches: contents of each layer, and pages that texts share within a memory budget."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selfspec.errors import InvalidOption
from selfspec.model.kv import POSITIONS, KVCache, KVStore, Page, PageLayout, PooledKVCache


def block(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random keys [1, 2, rows, 4] and values [1, 2, rows, 5]."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(1, 2, rows, width, generator=generator) for width in (4, 5))
    return keys, values


def test_each_layer_has_its_own_contents_length_and_mask() -> None:
    cache = KVCache(3)
    shallow, deep = block(5, seed=1), block(2, seed=2)
    cache.update(*shallow, 0, {"sin": 1}, cache_position=torch.arange(5))  # args of other caches
    keys, _ = cache.update(*deep, 2)
    assert torch.equal(keys, deep[0])
    for length in (cache.length, cache.get_seq_length, cache.get_query_offset):
        assert [length(layer) for layer in range(3)] == [5, 0, 2]
    assert (cache.get_mask_sizes(3, 0), cache.get_mask_sizes(3, 2)) == ((8, 0), (5, 0))
    cache.truncate(4)
    assert [cache.length(layer) for layer in range(3)] == [4, 0, 2]  # no layer grows
    cache.truncate(1, 0, 2)
    assert [cache.length(layer) for layer in range(3)] == [1, 0, 2]


def test_two_thousand_single_rows_reallocate_only_a_few_times() -> None:
    cache = KVCache(1)
    sizes, written = [], []
    for step in range(2000):
        keys, values = block(1, seed=step)
        written.append(keys)
        all_keys, all_values = cache.update(keys, values, 0)
        sizes.append(all_keys.untyped_storage().nbytes() // (4 * 2 * 4))
    assert sorted(set(sizes)) == [256, 384, 512, 704, 896, 1152, 1472, 1856, 2368]
    assert all_values.untyped_storage().nbytes() == 2368 * 4 * 2 * 5
    assert torch.equal(all_keys, torch.cat(written, dim=-2))
    for rows, slots in ((204, 256), (256, 320), (1024, 1280)):  # a quarter more than needed
        keys, _ = KVCache(1).update(*block(rows), 0)
        assert keys.untyped_storage().nbytes() == slots * 4 * 2 * 4


def test_fixed_slots_always_return_whole_buffers_padded_with_zeros() -> None:
    cache = KVCache(1, slots=64)
    assert cache.is_compileable  # transformers then makes a mask in every pass
    assert not KVCache(1).is_compileable
    assert cache.get_mask_sizes(3, 0) == (64, 0)
    first = block(3)
    keys, values = cache.update(*first, 0)
    assert (keys.shape[-2], values.shape[-2], cache.length(0)) == (64, 64, 3)
    assert torch.equal(keys[..., :3, :], first[0])
    assert torch.equal(values[..., :3, :], first[1])
    assert not keys[..., 3:, :].any()
    assert not values[..., 3:, :].any()
    assert keys.untyped_storage().nbytes() == 64 * 4 * 2 * 4
    assert cache.get_mask_sizes(1, 0) == (64, 0)
    assert cache.update(*block(61), 0)[0].data_ptr() == keys.data_ptr()


def test_raising_the_slots_keeps_the_content_of_a_layer_without_truncated_rows() -> None:
    cache = KVCache(1, slots=64)
    first, second = block(60, seed=1), block(10, seed=2)
    cache.update(*first, 0)
    cache.slots = 128
    keys, _ = cache.update(*second, 0)
    assert keys.shape[-2] == 128
    assert torch.equal(keys[..., :70, :], torch.cat([first[0], second[0]], dim=-2))
    assert not keys[..., 70:, :].any()
    keys, values = block(50)
    cache.update(keys * torch.nan, values * torch.nan, 0)
    cache.truncate(0)
    cache.slots = 192
    assert not any(part.isnan().any() for part in cache.update(*block(2), 0))


# --- caches of several texts

LAYOUT = PageLayout(torch.float32, ((1, 16),))


def store_of(pages: int) -> KVStore:
    return KVStore(1, LAYOUT, 0, pages * LAYOUT.nbytes)


def fill(kv: PooledKVCache, ids: Sequence[int]) -> None:
    """Write each id as the value of its position, as a pass over the rest of `ids` would."""
    start = kv.length(0)
    pages = kv.pages(len(ids) - start, 0, LAYOUT)
    for place in range(start, len(ids)):
        value_at(pages, place).fill_(ids[place])
    kv.extend(len(ids) - start, 0, 1)


def shown(kv: PooledKVCache) -> list[int]:
    pages = kv.pages(0, 0, LAYOUT)
    return [int(value_at(pages, place).flatten()[0]) for place in range(kv.length(0))]


def value_at(pages: Sequence[Page], place: int) -> Tensor:
    [(_, values)] = LAYOUT.slots(pages[place // POSITIONS].numbers, place % POSITIONS)
    return values


def begun(store: KVStore, ids: Sequence[int], positions: int = 200) -> PooledKVCache:
    kv = store.kv(positions)
    assert store.admit(kv, ids)
    return kv


def test_a_text_starts_from_the_longest_prefix_that_is_held() -> None:
    store, old = store_of(99), list(range(1, 171))
    first = begun(store, old)
    assert first.length(0) == 0
    fill(first, old)
    store.release(first, old)
    for new, expected in (
        (old, 169),  # one id is left to run
        ([*old, 5], 170),
        ([*old[:150], 7, 8], 150),
        ([*old[:128], 7], 128),
        ([*old[:30], 7], 30),
        ([9, 9], 0),
        (old[:1], 0),
    ):
        kv = begun(store, new)
        assert kv.length(0) == expected == store.prefix_length(new)
        assert shown(kv) == new[:expected]
        fill(kv, new)
        assert shown(kv) == new
        store.release(kv, new)
    assert shown(begun(store, old)) == old[:169]  # not overwritten


def test_running_texts_share_full_pages_once_the_first_has_run() -> None:
    store, common = store_of(999), list(range(1, 501))
    first = begun(store, [*common, 1], 1000)
    fill(first, common)
    store.share(first, common)
    caches = [first, *(begun(store, [*common, number], 1000) for number in range(2, 33))]
    pages = {id(page) for kv in caches for page in kv.held_pages}
    assert len(pages) == len(first.held_pages) == 8  # 7 are shared; the others own none yet
    assert {kv.length(0) for kv in caches[1:]} == {500 // POSITIONS * POSITIONS}
    for number, kv in enumerate(caches, start=1):
        fill(kv, [*common, number])
    for number, kv in enumerate(caches, start=1):
        assert shown(kv) == [*common, number]
    assert store.memory.used == (7 + 32) * LAYOUT.nbytes


def test_the_least_recently_used_text_is_evicted_first_from_its_end() -> None:
    store = store_of(6)
    texts = [[number] * 100 for number in (1, 2)]
    for ids in texts:
        kv = begun(store, ids, 100)
        fill(kv, ids)
        store.release(kv, ids)
    assert [store.prefix_length([*ids, 0]) for ids in texts] == [100, 100]
    first = begun(store, [*texts[0], 0], 101)  # the first is used again
    store.release(first, texts[0])
    third = begun(store, [3] * 190, 250)
    fill(third, [3] * 190)
    assert store.prefix_length([*texts[0], 0]) == 100
    assert store.prefix_length([*texts[1], 0]) < 100
    assert store.memory.used + store.memory.kept <= store.memory.most


def test_a_text_waits_for_room_and_one_that_never_fits_is_refused() -> None:
    store = store_of(4)
    first = begun(store, [1, 2], 128)  # three pages: one more for drafts
    second = store.kv(100)
    assert not store.admit(second, [3, 4])
    fill(first, [1, 2])
    store.release(first, [1, 2])
    assert store.admit(second, [3, 4])
    with pytest.raises(InvalidOption, match=r"300 tokens .*is 13\.0 MB\. Lower max_new_tokens"):
        KVStore(1, None, 50_000, 13_000_000).refuse_too_long(300)
    store.refuse_too_long(190)


def test_caches_without_pages_count_in_the_same_way() -> None:
    store = KVStore(1, None, 10, 10 * POSITIONS * 4)
    first = begun(store, [1, 2], 100)
    assert store.memory.used == 3 * 10 * POSITIONS
    second = store.kv(100)
    assert not store.admit(second, [3])
    store.release(first, [1, 2])
    assert store.memory.used == 0
    assert store.admit(second, [3])


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), pages=st.integers(1, 20))
def test_each_text_keeps_its_own_values_in_any_order(seed: int, pages: int) -> None:
    dice, store = random.Random(seed), store_of(pages)
    running: dict[PooledKVCache, list[int]] = {}
    for _ in range(60):
        if dice.random() < 0.6:
            ids = [dice.choice((1, 1, 1, 2))] * dice.choice((3, 64, 70, 130))
            ids += [dice.randrange(9) for _ in range(dice.randrange(1, 40))]
            kv = store.kv(len(ids) + 9)
            if store.admit(kv, ids):
                assert shown(kv) == ids[: kv.length(0)]
                fill(kv, ids)
                running[kv] = ids
                if dice.random() < 0.5:
                    store.share(kv, ids)
        elif running:
            kv = dice.choice([*running])
            ids = running.pop(kv)
            assert shown(kv) == ids
            store.release(kv, ids)
        memory = store.memory
        assert memory.used + memory.kept <= max(memory.most, memory.used)
    for kv, ids in running.items():
        assert shown(kv) == ids
