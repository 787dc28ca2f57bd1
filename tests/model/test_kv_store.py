"""Keys and values per layer: what comes back, lengths, truncation, growth, fixed slots."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from selfspec.model.kv import Lease, fixed_slots


def block(rows: int, seed: int = 0, head_dim: int = 4) -> tuple[Tensor, Tensor]:
    """Random keys [1, 2, rows, head_dim] and values, one wider."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(1, 2, rows, head_dim, generator=generator)
    return keys, torch.randn(1, 2, rows, head_dim + 1, generator=generator)


def test_update_returns_all_blocks_in_order() -> None:
    cache = Lease(2)
    first, second = block(3, seed=1), block(2, seed=2)
    cache.update(*first, 0)
    keys, values = cache.update(*second, 0)
    assert torch.equal(keys, torch.cat([first[0], second[0]], dim=-2))
    assert torch.equal(values, torch.cat([first[1], second[1]], dim=-2))


def test_what_transformers_passes_beyond_the_layer_is_ignored() -> None:
    cache = Lease(1)
    keys, _ = cache.update(*block(2), 0, {"sin": 1}, cache_position=torch.arange(2))
    assert keys.shape[-2] == 2


def test_layers_have_lengths_and_contents_of_their_own() -> None:
    cache = Lease(3)
    shallow, deep = block(5, seed=1), block(2, seed=2)
    cache.update(*shallow, 0)
    keys, _ = cache.update(*deep, 2)
    assert [cache.length(layer) for layer in range(3)] == [5, 0, 2]
    assert torch.equal(keys, deep[0])


def test_transformers_names_give_the_layers_own_length() -> None:
    cache = Lease(2)
    cache.update(*block(5), 0)
    cache.update(*block(2), 1)
    assert [cache.get_seq_length(layer) for layer in range(2)] == [5, 2]
    assert [cache.get_query_offset(layer) for layer in range(2)] == [5, 2]


def test_a_mask_covers_what_a_layer_holds_and_the_new_rows() -> None:
    cache = Lease(2)
    cache.update(*block(5), 0)
    cache.update(*block(2), 1)
    assert cache.get_mask_sizes(3, 0) == (8, 0)
    assert cache.get_mask_sizes(3, 1) == (5, 0)


def test_truncation_forgets_the_newest_and_later_rows_take_their_place() -> None:
    cache = Lease(1)
    first, second = block(6, seed=1), block(2, seed=2)
    cache.update(*first, 0)
    cache.truncate(4)
    keys, values = cache.update(*second, 0)
    assert torch.equal(keys, torch.cat([first[0][..., :4, :], second[0]], dim=-2))
    assert torch.equal(values, torch.cat([first[1][..., :4, :], second[1]], dim=-2))


def test_truncation_never_lengthens_a_layer() -> None:
    cache = Lease(3)
    cache.update(*block(5), 0)
    cache.update(*block(2), 1)
    cache.truncate(4)
    assert [cache.length(layer) for layer in range(3)] == [4, 2, 0]


def test_truncation_of_a_range_leaves_the_other_layers() -> None:
    cache = Lease(4)
    for layer in range(4):
        cache.update(*block(5), layer)
    cache.truncate(3, 1, 3)
    assert [cache.length(layer) for layer in range(4)] == [5, 3, 3, 5]
    cache.truncate(2, first=3)
    assert [cache.length(layer) for layer in range(4)] == [5, 3, 3, 2]


def test_truncation_moves_no_data() -> None:
    cache = Lease(1)
    before, _ = cache.update(*block(6), 0)
    cache.truncate(1)
    after, _ = cache.update(*block(1), 0)
    assert after.data_ptr() == before.data_ptr()


def test_two_thousand_single_rows_move_buffers_a_few_times() -> None:
    cache = Lease(1)
    sizes, written = [], []
    for step in range(2000):
        keys, values = block(1, seed=step)
        written.append(keys)
        all_keys, all_values = cache.update(keys, values, 0)
        sizes.append(all_keys.untyped_storage().nbytes() // (4 * 2 * 4))
    assert sorted(set(sizes)) == [256, 384, 512, 704, 896, 1152, 1472, 1856, 2368]
    assert all_values.untyped_storage().nbytes() == 2368 * 4 * 2 * 5
    assert torch.equal(all_keys, torch.cat(written, dim=-2))


@pytest.mark.parametrize(("rows", "slots"), [(1, 256), (204, 256), (256, 320), (1024, 1280)])
def test_a_first_block_gets_a_quarter_more_slots_than_it_needs(rows: int, slots: int) -> None:
    keys, _ = Lease(1).update(*block(rows), 0)
    assert keys.untyped_storage().nbytes() == slots * 4 * 2 * 4


def test_buffers_keep_the_dtype_of_what_comes_in() -> None:
    keys, values = (part.bfloat16() for part in block(3))
    all_keys, all_values = Lease(1).update(keys, values, 0)
    assert (all_keys.dtype, all_values.dtype) == (torch.bfloat16, torch.bfloat16)


def test_only_fixed_slots_ask_for_a_mask_in_every_pass() -> None:
    assert not Lease(1).is_compileable
    assert Lease(1, slots=64).is_compileable


def test_fixed_slots_always_return_whole_buffers_with_zeros_behind() -> None:
    cache = Lease(1, slots=64)
    first = block(3)
    keys, values = cache.update(*first, 0)
    assert (keys.shape[-2], values.shape[-2], cache.length(0)) == (64, 64, 3)
    assert torch.equal(keys[..., :3, :], first[0])
    assert torch.equal(values[..., :3, :], first[1])
    assert not keys[..., 3:, :].any()
    assert not values[..., 3:, :].any()
    assert keys.untyped_storage().nbytes() == 64 * 4 * 2 * 4


def test_fixed_slots_are_written_in_place() -> None:
    cache = Lease(1, slots=64)
    first, _ = cache.update(*block(3), 0)
    second, _ = cache.update(*block(61), 0)
    assert second.data_ptr() == first.data_ptr()


def test_fixed_slots_give_masks_of_one_size() -> None:
    cache = Lease(1, slots=64)
    assert cache.get_mask_sizes(3, 0) == (64, 0)
    cache.update(*block(5), 0)
    assert cache.get_mask_sizes(1, 0) == (64, 0)


def test_raising_the_slots_keeps_what_a_layer_holds() -> None:
    cache = Lease(1, slots=64)
    first, second = block(60, seed=1), block(10, seed=2)
    cache.update(*first, 0)
    cache.slots = 128
    keys, _ = cache.update(*second, 0)
    assert keys.shape[-2] == 128
    assert torch.equal(keys[..., :70, :], torch.cat([first[0], second[0]], dim=-2))
    assert not keys[..., 70:, :].any()


def test_growing_does_not_copy_what_was_truncated() -> None:
    cache = Lease(1, slots=64)
    keys, values = block(60)
    cache.update(keys * torch.nan, values * torch.nan, 0)
    cache.truncate(0)
    cache.slots = 128
    keys, values = cache.update(*block(2), 0)
    assert not keys.isnan().any()
    assert not values.isnan().any()


@pytest.mark.parametrize(("length", "slots"), [(1, 64), (64, 64), (65, 128), (128, 128)])
def test_fixed_slots_are_the_next_multiple_of_64(length: int, slots: int) -> None:
    assert fixed_slots(length) == slots
