"""Tiny models and text, and the command line run in their folder."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from distill.tiny_text import VOCABULARY, write_byte_tokenizer, write_text

from kvpop_vllm.testing import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("command")
    for kind in ("qwen3", "llama"):
        write_byte_tokenizer(
            write_tiny_model(root / kind, kind, vocab=VOCABULARY, kv_heads=2 if kind == "qwen3" else 4)
        )
    write_text(root / "text.jsonl")
    return root


@pytest.fixture(autouse=True)
def leave_group():
    """Leave the group that a process that is alone joins to train in mixed precision."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
