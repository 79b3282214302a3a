"""Changes of this package to the loaded modules of vLLM; test_inert runs this with ``-m`` and reads the report it writes.

Attributes of all modules and classes of vLLM are compared before and after the plugin is loaded, a stock engine has
run, and an engine with a policy has. The process has no plugins but ours, which is loaded by hand.
"""

import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from typing import Any

from engine.test_cartridges import write
from engine.tiny_engine import configure, generate, running
from vllm import SamplingParams, envs
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvpop_vllm.testing import random_prompt, write_random_scorer, write_tiny_model
from kvpop_vllm.vllm_glue import plugin
from kvpop_vllm.vllm_glue.ledger import LEDGER

SERVER = "vllm.entrypoints."
"""Beginning of the names of modules of vLLM's HTTP server."""
PLAIN = type(None), bool, int, float, str, bytes


def owners() -> Iterator[tuple[str, Any]]:
    """Yield each loaded module of vLLM and each class that it defines, with the beginning of its attributes' names."""
    for name, module in list(sys.modules.items()):
        if module is None or name.split(".")[0] != "vllm":
            continue
        yield f"{name}:", module
        classes = [value for value in list(vars(module).values()) if inspect.isclass(value)]
        while classes:
            cls = classes.pop()
            if cls.__module__ == name:
                yield f"{name}:{cls.__qualname__}.", cls
                inner = f"{cls.__qualname__}."
                classes += [x for x in vars(cls).values() if inspect.isclass(x) and x.__qualname__.startswith(inner)]


def state() -> dict[str, tuple]:
    """Return what each attribute is: the object, and the members of containers in it and in an instance of the module."""
    attributes = {}
    for prefix, owner in owners():
        for name, value in list(vars(owner).items()):
            if inspect.ismodule(value) or name == "__warningregistry__":
                continue  # a package has each of its modules that is loaded
            attributes[prefix + name] = described(value)
            if prefix == f"{type(value).__module__}:" and hasattr(value, "__dict__"):
                for member, inner in list(vars(value).items()):
                    if isinstance(inner, dict | list | set):
                        attributes[f"{prefix}{name}.{member}"] = described(inner)
    return attributes


def described(value) -> tuple:
    """Return the object, its members, and those of them that are ours; type and value of a plain value."""
    if isinstance(value, PLAIN):
        return type(value), value, []
    members = []
    if isinstance(value, dict):
        members = [member for pair in list(value.items()) for member in pair]
    elif isinstance(value, list | set | frozenset):
        members = list(value)
    return value, list(map(identity, members)), [str(member) for member in members if is_ours(member)]


def identity(value) -> tuple:
    """Return what is equal for equal plain values, else for the same object."""
    return (type(value), value) if isinstance(value, PLAIN) else (object, id(value))


def is_ours(value) -> bool:
    """Return whether a value names this package, or is a class, a function or an object of it."""
    name = value if isinstance(value, str) else getattr(value, "__module__", type(value).__module__)
    return str(name).startswith("kvpop_vllm")


def changed(before: dict, after: dict, volatile: frozenset[str] = frozenset()) -> set[str]:
    """Return the attributes that are others, new or gone, in modules that were there before.

    Args:
        before: attributes before a step.
        after: attributes after it.
        volatile: attributes that vLLM changes itself, which count where members of ours come or go.
    """
    modules, absent = {name.partition(":")[0] for name in before}, (object(), [], [])
    different = set()
    for name in after.keys() | before.keys():
        (value, members, ours), (new_value, new, new_ours) = before.get(name, absent), after.get(name, absent)
        equal = ours == new_ours and (name in volatile or (value is new_value and members == new))
        if name.partition(":")[0] in modules and not equal:
            different.add(name)
    return different


def load(server: bool, runner_v2: bool = False) -> None:
    """Import the modules of the ledger's targets, so that they can be compared: those of HTTP servers, or the others.

    Model runner V2 is one of the others, where there is a GPU.
    """
    KVCacheSpecRegistry._ensure_registered()
    for row in LEDGER:
        if row.target.startswith(SERVER) == server and (runner_v2 or row.when != "model runner V2"):
            importlib.import_module(row.target.partition(":")[0])


def serve_all(model: str, folder: str) -> None:
    """Run an engine with a policy and all that a policy may have, and requests that ask for it; one with a gate."""
    cartridge = write(f"{folder}/cartridge", model, "plain")
    policy = {"policy": "vase", "budget": 64, "window": 16, "protect_prompt": 64, "inspect": True}
    options = {"kv_report": 1, "kv_seed": 3, "kv_cartridges": ["plain"], "kv_protect_prompt": 32}
    params = [SamplingParams(max_tokens=3, seed=1, extra_args=asks, detokenize=False) for asks in (options, {})]
    prompts = [{"prompt_token_ids": random_prompt(200)}] * 2
    with running(model, policy | {"cartridge": {"plain": cartridge}}, long_prefill_token_threshold=64) as llm:
        reported, _ = llm.generate(prompts, params, use_tqdm=False)
        assert reported.kv_transfer_params["kv_report"]["cartridge_tokens"] == 64
        assert llm.reset_prefix_cache()
    gate = write_random_scorer(f"{folder}/gate", model, "trimkv")
    generate(model, {"policy": "trimkv", "scorer": str(gate)}, tokens=2)


def main(model: str, out: str) -> None:
    """Write the attributes of vLLM that change at each step, as JSON."""
    write_tiny_model(model, "qwen3")
    load(server=False)
    for _ in range(2):
        generate(model, None, tokens=2)
    before = state()
    generate(model, None, tokens=2)
    after = state()
    volatile = frozenset(changed(before, after))
    report = {"nothing": changed(after, state())}
    steps = {
        "load": plugin.register,
        "again": plugin.register,
        "stock engine": lambda: generate(model, None, tokens=2),
        "server": lambda: configure(model, None),
        "policy": lambda: serve_all(model, out + "-files"),
    }
    for name, step in steps.items():
        if name == "server":
            load(server=True)
        envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING = name == "policy"
        before = state()
        step()
        report[name] = changed(before, state(), volatile)
    with open(out, "w") as file:
        json.dump({name: sorted(names) for name, names in report.items()}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
