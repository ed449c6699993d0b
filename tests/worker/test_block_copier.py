from __future__ import annotations

import pytest
import torch

from chairlift.kernels.attention import KVCache
from chairlift.outputs import SchedulerOutput
from chairlift.worker.block_copier import BlockCopier, copy_blocks


def test_blocks_come_back_into_other_blocks_with_their_scales() -> None:
    torch.manual_seed(0)
    shape = (6, 2, 4, 8)
    values = [torch.randint(-128, 127, shape, dtype=torch.int8) for _ in range(2)]
    cache = KVCache(*values, *(torch.rand(shape[:3]) for _ in range(2)))
    before = [tensor.clone() for tensor in cache if tensor is not None]
    memory = BlockCopier([cache], num_blocks=3)
    memory.begin(SchedulerOutput(0, {}, swapped_out={2: 5, 0: 1}, swapped_in={}))
    for tensor in cache:
        assert tensor is not None
        tensor[[1, 5]] = 0
    memory.begin(SchedulerOutput(0, {}, swapped_out={}, swapped_in={3: 2, 4: 0}))
    for tensor, old in zip(cache, before, strict=True):
        assert tensor is not None
        assert torch.equal(tensor[[3, 4]], old[[5, 1]])
        assert torch.equal(tensor[[0, 2]], old[[0, 2]])


def test_a_step_swaps_out_before_it_swaps_in() -> None:
    key = torch.arange(3.0).view(3, 1, 1, 1)
    memory = BlockCopier([KVCache(key, key.clone())], num_blocks=2)
    memory.begin(SchedulerOutput(0, {}, swapped_out={0: 0}, swapped_in={}))
    memory.begin(SchedulerOutput(0, {}, swapped_out={1: 2}, swapped_in={2: 0}))
    memory.begin(SchedulerOutput(0, {}, swapped_out={}, swapped_in={1: 1}))
    assert key.flatten().tolist() == [0, 2, 0]


@pytest.mark.parametrize("is_one_memory", [True, False])
def test_blocks_are_copied_in_any_way(is_one_memory: bool) -> None:
    source, target = torch.rand(5, 2, 3), torch.zeros(4, 2, 3)
    copy_blocks(source, target, {3: 1, 0: 4}, is_one_memory)
    copy_blocks(source, target, {}, is_one_memory)
    assert torch.equal(target[[3, 0]], source[[1, 4]])
    assert not target[[1, 2]].any()
