"""Prefix caching is on where prompts are protected, unless vLLM's own flag turns it off."""

from __future__ import annotations

import logging

import pytest
from engine.tiny_engine import configure


@pytest.mark.parametrize(
    "protect, asked, caches",
    [(None, None, False), (None, False, False), (0, None, False), (False, False, False)]
    + [(protect, asked, asked is not False) for protect in ("all", True, 1, "40") for asked in (None, True, False)],
)
def test_prefixes_are_cached_where_prompts_are_protected(tiny_model, monkeypatch, protect, asked, caches):
    """If nobody asked, one log line says that prefix caching is off.

    caplog is not used, because the first config sets up vLLM's loggers anew.
    """
    said, line = [], "--kv-policy streaming-llm: prefix caching is off, prompts are not protected (--kv-protect-prompt)"
    monkeypatch.setattr(logging.getLogger("vllm.kvpop_vllm"), "info", lambda text, *args: said.append(text % args))
    model, policy = tiny_model("llama"), {"policy": "streaming-llm", "budget": 64, "protect_prompt": protect}
    assert configure(model, None).cache_config.enable_prefix_caching is True
    assert configure(model, policy, enable_prefix_caching=asked).cache_config.enable_prefix_caching is caches
    assert said.count(line) == (asked is None and not caches)
    worst = [text for text in said if text.startswith("protected: ")]
    assert len(worst) == (1 if protect else 0)


@pytest.mark.parametrize("given", ["all", "0", "40"])
def test_the_flag_of_protected_prompts(tiny_model, given):
    """The flag is parsed by vLLM's own command and decides on prefix caching."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = ["--model", tiny_model("llama"), "--kv-policy", "streaming-llm", "--kv-budget", "64"]
    flags += ["--max-model-len", "256", "--kv-protect-prompt", given]
    for more, caches in (([], given != "0"), (["--no-enable-prefix-caching"], False)):
        args = EngineArgs.from_cli_args(parser.parse_args([*flags, *more]))
        args.skip_tokenizer_init = True
        assert args.create_engine_config().cache_config.enable_prefix_caching is caches
