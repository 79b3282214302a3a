"""Command-line flags, added to every parser of engine arguments and merged into ``additional_config``."""

from __future__ import annotations

import argparse

from kvpop_vllm.config import ADDITIONAL_CONFIG_KEY, FLAGS, ConfigError

_HELP = {
    "policy": (
        str,
        "NAME",
        "Keep a fixed number of tokens per KV head, chosen by this policy ('kvpop policies' lists them).",
    ),
    "budget": (int, "B", "Tokens kept per KV head; default: what the scorer's config says."),
    "compression": (float, "C", "Set the budget to max-model-len / C."),
    "sinks": (int, "S", "First tokens that are always kept; default: the scorer's, or the policy's own."),
    "window": (
        int,
        "W",
        "Most recent tokens that are always kept; default: what the scorer was trained with at this budget, or the policy's own.",
    ),
    "scorer": (str, "DIR", "Folder with kvpop_config.json and kvpop_scorer.safetensors."),
    "correction": (
        str,
        "NAME",
        "'moment' adds to every output what the moments of the evicted tokens say of theirs, under any policy (MomentKV); "
        "'none' does not; default: none, but for momentkv.",
    ),
    "allocator": (
        str,
        "NAME",
        "How layers and heads share the budget: 'uniform'; 'pyramid', more in lower layers (PyramidKV), both under any policy; 'ada', the "
        "heads of a layer divide theirs at a prompt's end (Ada-KV), under policies that compress it; default: uniform.",
    ),
    "protect_prompt": (
        str,
        "all|N",
        "Never evict the prompt, or its first N tokens; these are shared by vLLM's prefix cache. Default: all under random, vase and rkv, 0 elsewhere.",
    ),
    "max_budget": (int, "B", "Largest budget that a request may ask for (kv_budget); default: the server's own."),
    "max_protect": (
        str,
        "all|N",
        "Most prompt tokens that a request may ask to protect (kv_protect_prompt); default: what --kv-protect-prompt says.",
    ),
}


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the flag group to a parser, unless the parser has it already."""
    if any("--kv-policy" in action.option_strings for action in parser._actions):
        return
    group = parser.add_argument_group(title="KvPolicy", description="Fixed-budget KV cache (kvpop_vllm).")
    for name, flag in FLAGS.items():
        kind, metavar, text = _HELP[name]
        group.add_argument(flag, type=kind, metavar=metavar, default=None, help=text)


def merge(args: argparse.Namespace, additional_config: object) -> object:
    """Return ``additional_config`` with the flags of the command line merged in; flags win.

    Raises:
        ConfigError: ``additional_config``, or the policy settings in it, are not an object that flags can be
            merged into.
    """
    given = {name: getattr(args, dest(flag), None) for name, flag in FLAGS.items()}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return additional_config
    flag = FLAGS[next(iter(given))]
    if not isinstance(additional_config, dict):
        raise ConfigError(f"{flag} is given, but --additional-config does not hold an object: {additional_config!r}")
    before = additional_config.get(ADDITIONAL_CONFIG_KEY, {})
    if not isinstance(before, dict):
        why = "null, which asks for no policy: leave one of the two out" if before is None else f"{before!r}, no object"
        raise ConfigError(f"{flag} is given, but --additional-config says {ADDITIONAL_CONFIG_KEY!r}: {why}")
    return {**additional_config, ADDITIONAL_CONFIG_KEY: {**before, **given}}


def dest(flag: str) -> str:
    """Return the argparse namespace attribute of a flag."""
    return flag.removeprefix("--").replace("-", "_")
