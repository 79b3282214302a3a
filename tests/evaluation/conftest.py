"""A tiny model and a tokenizer of bytes."""

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    from kvpop_vllm.testing import write_tiny_model

    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "model", "llama"))


@pytest.fixture
def tokenizer(tmp_path):
    from distill.tiny_text import write_byte_tokenizer
    from transformers import AutoTokenizer

    write_byte_tokenizer(tmp_path / "tokenizer")
    return AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
