from __future__ import annotations

import torch

from lightning_zero.plan.plan import SlotPlan, assign_slots, pack


def test_buffers_are_packed_aligned_to_their_own_dtype() -> None:
    # 64 bfloat16 end at byte 128; float32 starts at a multiple of 64 x 4 = 256 bytes.
    assert pack([(64, torch.bfloat16), (128, torch.float32)]) == ((0, 256), 256 + 512)
    assert pack([]) == ((), 0)


def test_equal_units_share_few_slots() -> None:
    assigned, slots = assign_slots([10, 100, 128, 101, 120], [0, 1, 1, 1, 1], 2)
    assert assigned == (0, 1, 2, 1, 2)
    assert slots == (SlotPlan(0, 10), SlotPlan(1, 101), SlotPlan(2, 128))


def test_size_classes_and_depths_do_not_mix() -> None:
    # ceil(log2): 128 and 65 are in class 7, 129 in class 8.
    assigned, slots = assign_slots([128, 128, 65, 129, 128], [0, 1, 1, 1, 2], 1)
    assert assigned == (0, 1, 1, 2, 3)
    assert [slot.nbytes for slot in slots] == [128, 128, 129, 128]


def test_a_unit_without_bytes_to_hold() -> None:
    assert assign_slots([0, 100], [0, 1], 2) == ((0, 1), (SlotPlan(0, 0), SlotPlan(1, 100)))
    assert assign_slots([None, 100], [0, 1], 2) == ((None, 0), (SlotPlan(0, 100),))


def test_a_ring() -> None:
    assigned, slots = assign_slots([10, 20, 30, None, 5], None, 2)
    assert assigned == (0, 1, 0, None, 1)
    assert slots == (SlotPlan(0, 30), SlotPlan(1, 20))
    assert assign_slots([None], None, 2) == ((None,), ())
