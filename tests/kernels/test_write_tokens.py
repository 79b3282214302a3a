"""Protected tokens of a step are written to their slots, by every implementation."""

import pytest
import torch
from kernels.factories import poisoned_pages
from kernels.served import INTERPRETED

from kvpop_vllm.cache.pages import PageLayout
from kvpop_vllm.kernels import ops


@pytest.mark.parametrize("count", [1, 70])
def test_tokens_go_to_their_slots_alone(count):
    """Tokens in any order, of keys and values in one tensor, go to blocks in any order."""
    pages = poisoned_pages(PageLayout(3, 48, torch.float16, block_slots=16), 9)
    before = pages.raw.clone()
    k, v = torch.randn(80, 6, 48).half().split(3, 1)
    tokens, places = torch.randperm(80)[:count], torch.randperm(9 * 16)[:count]
    impl = "triton" if INTERPRETED else "auto"
    columns = torch.stack([tokens, places // 16, places % 16], 1).unbind(1)  # not contiguous
    ops.write_tokens(k, v, pages, *columns, impl=impl)
    for token, place in zip(tokens.tolist(), places.tolist(), strict=True):
        block, slot = divmod(place, 16)
        for written, values in ((pages.k, k), (pages.v, v)):
            assert torch.equal(written[block, :, slot], values[token])
    restored = PageLayout(3, 48, torch.float16, block_slots=16).view(before)
    for left, written in ((restored.k, pages.k), (restored.v, pages.v)):
        left[places // 16, :, places % 16] = written[places // 16, :, places % 16]
    assert torch.equal(before, pages.raw)
