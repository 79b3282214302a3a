"""Byte layout of the pages."""

import pytest
import torch

from kvpop_vllm.cache.pages import PageLayout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [32, 64, 80, 96, 128])
@pytest.mark.parametrize("slots", [16, 64])
def test_every_byte_belongs_to_exactly_one_array(dtype, size, slots):
    layout = PageLayout(3, size, dtype, slots)
    raw = torch.zeros(4, 3, slots, layout.slot_bytes, dtype=torch.uint8)
    pages = layout.view(raw)
    covered = torch.zeros_like(raw, dtype=torch.int32)
    for array in (pages.k, pages.v, pages.score, pages.position):
        raw.zero_()
        array.copy_(torch.full_like(array, float("nan")) if array.is_floating_point() else torch.full_like(array, -1))
        array_bytes = array[0, 0].numel() * array.element_size()
        touched = raw != 0
        assert array.data_ptr() % 16 == raw.data_ptr() % 16
        assert touched[0, 0].flatten().nonzero().max() - touched[0, 0].flatten().nonzero().min() < array_bytes
        covered += touched
    assert covered.max() == 1
    assert layout.region_bytes == slots * (2 * size * dtype.itemsize + 8)


def test_views_of_a_strided_cache_write_through():
    layout = PageLayout(2, 32, torch.float32, 16)
    wide = torch.zeros(5, 2, 16, 2, layout.slot_bytes, dtype=torch.uint8)[:, :, :, 0]
    with pytest.raises(ValueError, match="does not hold"):
        layout.view(wide)
    raw = torch.zeros(2, 5, 16, layout.slot_bytes, dtype=torch.uint8).transpose(0, 1)  # heads outermost: any strides
    pages = layout.view(raw)
    pages.k[3, 1, 5] = 1.5
    pages.position[4, 0, 2] = 7
    assert pages.k[3, 1].sum() == 1.5 * 32 and pages.position[4].sum() == 7 and raw[3, 1].any() and not raw[3, 0].any()


def test_block_counts():
    layout = PageLayout(3, 64, torch.bfloat16, 64, state_floats=64 * 64 + 64 + 1)
    assert layout.state_blocks == 1
    assert [layout.blocks(n, 1000) for n in (1, 64, 65, 999, 1000, 5000)] == [2, 2, 3, 17, 17, 17]
    assert PageLayout(8, 128, torch.bfloat16, 64, state_floats=128 * 128 + 128 + 1).state_blocks == 2
