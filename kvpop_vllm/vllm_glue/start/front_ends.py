"""Checks that all processes of a server have the settings with which it was started.

A server has one or several front ends, which answer HTTP, and one or several engines, which may run on other machines
with command lines of their own. vLLM does not compare their configs. A front end with a policy compares its settings
with those of its engines before it serves. An engine with a policy refuses requests of front ends without one: nobody
has checked what such requests ask for.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kvpop_vllm.config import ADDITIONAL_CONFIG_KEY, ConfigError
from kvpop_vllm.flags import FLAGS
from kvpop_vllm.requests import of_params
from kvpop_vllm.vllm_glue.start import fallback, flags
from kvpop_vllm.vllm_glue.start.engine_policy import engine_policy, requested, with_local_scorer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.protocol import EngineClient


def settings(self) -> dict:
    """Return the settings of an engine. See :func:`settings_of`."""
    return settings_of(self.vllm_config)


def preprocess_add_request(original, self, request, *args, **kwargs):
    """Wrap the intake of a request: refuse one that no front end has checked."""
    if requested(self.vllm_config) and of_params(request.sampling_params) is None:
        raise ConfigError(
            f"the front end that sent this request does not serve --kv-policy {engine_policy(self.vllm_config).name}, as this"
            " engine does: start every node with the same --kv- flags, and with this plugin"
        )
    return original(self, request, *args, **kwargs)


async def init_generate_state(original, engine_client, state, args, *positional, **kwargs) -> None:
    """Wrap the last step of an HTTP server's start: check its settings."""
    with fallback.one_line_errors():
        check_flags(args, engine_client.vllm_config)
        if requested(engine_client.vllm_config):
            await check_engines(engine_client)
    await original(engine_client, state, args, *positional, **kwargs)


def check_flags(args: argparse.Namespace, vllm_config: VllmConfig) -> None:
    """Check that the flags of a server's arguments are settings of its config.

    Raises:
        ConfigError: they are not.
    """
    merged = flags.merge(args, vllm_config.additional_config)
    if requested(vllm_config):
        merged = with_local_scorer(merged)
    if merged != vllm_config.additional_config:
        names = " and ".join(FLAGS[name] for name in flags.flags_in(args))
        settings = json.dumps({ADDITIONAL_CONFIG_KEY: merged[ADDITIONAL_CONFIG_KEY]})
        raise ConfigError(f"{names} did not reach this API server: give --additional-config '{settings}' instead")


async def check_engines(engine_client: EngineClient) -> None:
    """Check that every engine of a front end has the front end's settings.

    Raises:
        ConfigError: one has others, or no policy.
    """
    ours = settings_of(engine_client.vllm_config)
    try:
        engines = await engine_client.engine_core.call_utility_all_async("kvpop_settings")
    except Exception as error:  # an engine's error comes as an exception of another class
        text = " ".join(str(error).split())
        raise ConfigError(
            f"an engine of this API server does not serve --kv-policy {ours['policy']} ({text}): start every node with the"
            " same --kv- flags"
        ) from None
    for theirs in engines:
        if different := [name for name in ours if theirs.get(name) != ours[name]]:
            name = next((name for name in ("calibration", "scorer", "allocator") if name in different), different[0])
            raise ConfigError(
                f"an engine of this API server has {FLAGS[name]} {theirs.get(name)}, not {ours[name]}: start every"
                " node with the same --kv- flags, and the same files"
            )


def settings_of(vllm_config: VllmConfig) -> dict:
    """Return the resolved settings that all processes of a server share, by name.

    Scorers, calibrations and cartridges are compared by their content, since their folders may differ between
    machines. ``compression`` is resolved into the budget.
    """
    from kvpop_vllm.calibration.shares import shares_file
    from kvpop_vllm.calibration.statistics import CONFIG_NAME as STATISTICS
    from kvpop_vllm.calibration.statistics import TENSORS_NAME as QUERIES
    from kvpop_vllm.compaction.cartridge import digest_of
    from kvpop_vllm.vllm_glue.extras.cartridge_names import names_of

    policy = engine_policy(vllm_config)
    settings = asdict(policy.settings) | asdict(policy.retention)
    settings |= {"max_budget": policy.max_budget, "protect_prompt": policy.protect, "max_protect": policy.max_protect}
    settings["cartridge"] = {name: f"{placed.digest:.12}" for name, placed in names_of(vllm_config).placed.items()}
    if (scorer := policy.settings.scorer) is not None:
        settings["scorer"] = f"sha256 {_digest_of_scorer(scorer):.12}"
    if (map_file := policy.settings.map) is not None:
        settings["map"] = f"sha256 {digest_of(Path(map_file).parent, Path(map_file).name):.12}"
    if (calibration := policy.settings.calibration) is not None:
        shares = shares_file(calibration)
        names = [name for name in (shares.name, STATISTICS, QUERIES) if (shares.parent / name).is_file()]
        settings["calibration"] = f"sha256 {digest_of(shares.parent, *names):.12}"
    settings["allocator"] = policy.allocator
    return {name: settings[name] for name in FLAGS if name != "compression"}


def _digest_of_scorer(scorer: str) -> str:
    """Return the sha256 of a scorer's files; of the weights of other authors' checkpoints, of their sizes and headers."""
    from kvpop_vllm.compaction.cartridge import digest_of
    from kvpop_vllm.scorers.checkpoint import files_of, is_published_scorer

    folder, *names = files_of(scorer)
    digest = hashlib.sha256(digest_of(folder, *names).encode())
    for path in sorted(folder.glob("*.safetensors")) if is_published_scorer(folder) else ():
        with open(path, "rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
        digest.update(f"{path.name} {path.stat().st_size} ".encode() + header)
    return digest.hexdigest()
