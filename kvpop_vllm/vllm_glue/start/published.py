"""Full checkpoints of other authors: served as their base model, with nothing in their folder executed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvpop_vllm.config import ConfigError
from kvpop_vllm.hub import local_folder
from kvpop_vllm.model_types import is_adopted
from kvpop_vllm.supported import ARCHITECTURES, published_base

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from kvpop_vllm.policies import Policy

logger = init_logger("vllm.kvpop_vllm")


def adopt(engine_args: EngineArgs, policy: type[Policy] | None) -> None:
    """Change engine arguments so that a full checkpoint of other authors is served as its base model, without its code.

    Any other model is left alone, and without a policy also a checkpoint whose base is not served.

    Args:
        engine_args: the engine's arguments.
        policy: class of the policy that is asked for, None without one.

    Raises:
        ConfigError: its base is not served, its tokenizer exists only as code, its config cannot be read and its code
            would run, or a scorer is asked for with ``--load-format pt``.
    """
    config = _config_json(engine_args, policy is not None)
    base = published_base(config) if isinstance(config, dict) else None
    if base is None or (base not in ARCHITECTURES and policy is None):
        return
    from kvpop_vllm import model_types
    from kvpop_vllm.model_shape import check_base

    check_base(base, engine_args.model)
    model_types.register_published(config)
    if engine_args.trust_remote_code:
        logger.info(
            "%s: --trust-remote-code is switched off, a KVpop checkpoint needs none of its code", engine_args.model
        )
        engine_args.trust_remote_code = False
    if not engine_args.skip_tokenizer_init and engine_args.tokenizer is None:
        _check_tokenizer(engine_args)
    if policy is not None and policy.scorer_kind is not None:
        if engine_args.load_format == "pt":
            raise ConfigError("--load-format pt reads pickles, and a KVpop checkpoint is served without: leave it out")
        if engine_args.load_format in ("auto", "hf"):
            engine_args.load_format = "safetensors"
    overrides = engine_args.hf_overrides
    if callable(overrides):
        raise ConfigError("--hf-overrides must be an object for a KVpop checkpoint, not a function")
    engine_args.hf_overrides = {**(overrides or {}), **model_types.adopted_keys(config, base)}


def _config_json(engine_args: EngineArgs, with_policy: bool) -> object:
    """Return the contents of a model's config as transformers will read it, None where it cannot.

    Raises:
        ConfigError: it cannot be read, and a policy and ``--trust-remote-code`` are asked for.
    """
    from huggingface_hub import constants
    from transformers import PretrainedConfig

    name = os.fspath(engine_args.hf_config_path or engine_args.model)
    if os.path.isfile(name) and not name.endswith(".json"):  # weights of a format without code, such as GGUF
        return None
    options = {"revision": engine_args.revision, "token": engine_args.hf_token}
    try:
        return PretrainedConfig.get_config_dict(name, local_files_only=constants.HF_HUB_OFFLINE, **options)[0]
    except Exception as error:  # vLLM says what is wrong with the model
        if not with_policy or not engine_args.trust_remote_code:
            return None
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{name}: config.json cannot be read ({reason}), so that it may be a checkpoint whose code must not run: leave"
            " --trust-remote-code out, or give a folder"
        ) from None


def _check_tokenizer(engine_args: EngineArgs) -> None:
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    from kvpop_vllm.files import read_json

    folder = local_folder(engine_args.model, revision=engine_args.revision, cache_dir=engine_args.download_dir)
    path = folder / "tokenizer_config.json"
    config = read_json(path, "copy the folder again") if path.is_file() else {}
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no JSON object: copy the folder again")
    code, name = config.get("auto_map"), config.get("tokenizer_class")
    if code and not any(name and tokenizer_class_from_name(f"{name}{end}") for end in ("", "Fast")):
        raise ConfigError(
            f"{engine_args.model}: its tokenizer {name!r} exists only as code in the folder, which is not executed: give the base"
            " model's with --tokenizer"
        )


def serves_published(vllm_config: VllmConfig) -> bool:
    """Return whether an engine's model is a full checkpoint of other authors."""
    return is_adopted(vllm_config.model_config.hf_config)


def folder_of(vllm_config: VllmConfig) -> str:
    """Return the folder of an engine's checkpoint, in the hub's cache if the model is a name of the hub."""
    model, cache_dir = vllm_config.model_config, vllm_config.load_config.download_dir
    return str(local_folder(model.model, revision=model.revision, cache_dir=cache_dir))


def describe(vllm_config: VllmConfig, map_file: str | None) -> list[str]:
    """Return in a few lines how the scorer of an engine's checkpoint is read."""
    from kvpop_vllm.scorers import reader
    from kvpop_vllm.scorers.published_checkpoint import open_checkpoint

    checkpoint = open_checkpoint(folder_of(vllm_config))
    return reader.describe(checkpoint, reader.reading_of(checkpoint, map_file))
