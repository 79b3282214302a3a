"""vLLM's numbers of requests are copied to their drafts on a CPU, whatever their type."""

import pytest
import torch

from kvpop_vllm.vllm_glue.run.cpu_drafts import expand_batch_to_tokens


@pytest.mark.parametrize(
    "numbers, before, after",
    [
        (torch.tensor([0.0, 0.7, 2.0, 1.5]), 0, 1),
        (torch.tensor([3, 50, 0, 7], dtype=torch.int32), 0, 0),
        (torch.tensor([0.1, 0.9, 1.0, 0.5]), 0, 0),
        (torch.tensor([5, 0, 5, 2], dtype=torch.int64), 5, -1),
    ],
    ids=["temperatures", "top-k", "top-p", "int64"],
)
def test_numbers_of_requests_are_those_of_their_drafts(numbers, before, after):
    counts = [2, 0, 3, 1]
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    expanded = expand_batch_to_tokens(None, numbers, ends, sum(counts), before, after)
    values = [after if value == before else value for value in numbers.tolist()]
    expected = [value for value, count in zip(values, counts, strict=True) for _ in range(count)]
    assert expanded.dtype == numbers.dtype and expanded.tolist() == expected
