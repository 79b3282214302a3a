"""Prefix caching is on where requests can go on from others or prompts are protected, unless vLLM's own flag turns it off."""

import logging

import pytest
from engine.tiny_engine import configure


@pytest.mark.parametrize("enable", [None, True, False])
@pytest.mark.parametrize("protect", [None, 0, False, "all", True, 1, "40"])
def test_prefixes_are_cached(tiny_model, monkeypatch, protect, enable):
    """One log line says that a prompt costs its new tokens.

    caplog is not used, because the first config sets up vLLM's loggers again.
    """
    messages, caches = [], enable is not False
    line = (
        "a prompt that goes on from an earlier request costs its new tokens (--no-enable-prefix-caching turns it off)"
    )
    monkeypatch.setattr(logging.getLogger("vllm.kvpop_vllm"), "info", lambda text, *args: messages.append(text % args))
    model, policy = tiny_model("llama"), {"policy": "streaming-llm", "budget": 64, "protect_prompt": protect}
    assert configure(model, None).cache_config.enable_prefix_caching is True
    assert configure(model, policy, enable_prefix_caching=enable).cache_config.enable_prefix_caching is caches
    assert messages.count(line) == (caches and protect is not True and protect != "all")
    worst = [text for text in messages if text.startswith("protected: ")]
    assert len(worst) == (1 if protect else 0)


@pytest.mark.parametrize("value", ["all", "0", "40"])
def test_the_flag_of_protected_prompts(tiny_model, value):
    """The flag is parsed by vLLM's own command."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = ["--model", tiny_model("llama"), "--kv-policy", "streaming-llm", "--kv-budget", "64"]
    flags += ["--max-model-len", "256", "--kv-protect-prompt", value]
    for words, caches in (([], True), (["--no-enable-prefix-caching"], False)):
        args = EngineArgs.from_cli_args(parser.parse_args([*flags, *words]))
        args.skip_tokenizer_init = True
        assert args.create_engine_config().cache_config.enable_prefix_caching is caches
