from __future__ import annotations

import torch

from lightning_zero.plan.plan import assign_slots, pack


def test_buffers_are_packed_aligned_to_their_own_dtype() -> None:
    # 64 bfloat16 end at byte 128; float32 starts at a multiple of 64 x 4 = 256 bytes.
    assert pack([(64, torch.bfloat16), (128, torch.float32)]) == ((0, 256), 256 + 512)
    assert pack([]) == ((), 0)


def test_equal_units_share_few_slots() -> None:
    assigned, slots = assign_slots([10, 100, 128, 101, 120], [0, 1, 1, 1, 1], 1)
    assert assigned == (0, 1, 2, 1, 2)
    assert slots == (10, 101, 128)


def test_what_is_far_apart_shares_a_slot_whatever_its_size() -> None:
    # An embedding, three blocks and a head.
    assigned, slots = assign_slots([10, 900, 100, 100, 100, 1000], [0, 1, 1, 1, 1, 1], 1)
    assert assigned == (0, 1, 2, 1, 2, 1)
    assert slots == (10, 1000, 100)
    # With four blocks, the last one finds both taken by neighbours.
    assigned, slots = assign_slots([900, 100, 100, 100, 100, 1000], [1, 1, 1, 1, 1, 1], 1)
    assert assigned == (0, 1, 0, 1, 2, 0)
    assert slots == (1000, 100, 100)
    assigned, slots = assign_slots([900, 100, 100, 1000], [1] * 4, 0)
    assert (assigned, slots) == ((0, 0, 0, 0), (1000,))


def test_neighbours_and_depths_do_not_share() -> None:
    for apart in range(4):
        sizes, depths = [128, 128, 65, 129, 128, 5, 5, 900, 128], [0, 1, 1, 1, 2, 1, 1, 2, 1]
        assigned, slots = assign_slots(sizes, depths, apart)
        for depth in set(depths):
            level = [slot for slot, at in zip(assigned, depths, strict=True) if at == depth]
            for place, slot in enumerate(level):
                assert slot not in level[place + 1 : place + 1 + apart]
        assert len({(slot, at) for slot, at in zip(assigned, depths, strict=True)}) == len(slots)
        for slot, nbytes in zip(assigned, sizes, strict=True):
            assert slot is not None
            assert slots[slot] >= nbytes


def test_a_unit_without_bytes_to_hold() -> None:
    assert assign_slots([0, 100], [0, 1], 1) == ((0, 1), (0, 100))
    assert assign_slots([None, 100], [0, 1], 1) == ((None, 0), (100,))


def test_a_ring() -> None:
    assigned, slots = assign_slots([10, 20, 30, None, 5], [0] * 5, 1)
    assert assigned == (0, 1, 0, None, 1)
    assert slots == (30, 20)
    assert assign_slots([None], [0], 1) == ((None,), ())
