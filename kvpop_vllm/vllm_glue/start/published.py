"""Full checkpoints of other authors: served as their base model, with nothing in their folder executed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvpop_vllm import policies
from kvpop_vllm.config import ADDITIONAL_CONFIG_KEY, ConfigError
from kvpop_vllm.files import read_json
from kvpop_vllm.hub import local_folder
from kvpop_vllm.scorers import reader
from kvpop_vllm.supported import ARCHITECTURES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

logger = init_logger("vllm.kvpop_vllm")


def adopt(engine_args: EngineArgs, config: dict, base: str) -> None:
    """Change engine arguments so that the base model's class of this package serves the checkpoint.

    Args:
        engine_args: the engine's arguments.
        config: contents of the checkpoint's ``config.json``.
        base: its base model type.

    Raises:
        ConfigError: its tokenizer exists only as code, or a scorer is asked for with ``--load-format pt``.
    """
    if engine_args.trust_remote_code:
        logger.info(
            "%s: --trust-remote-code is switched off, a KVpop checkpoint needs none of its code", engine_args.model
        )
        engine_args.trust_remote_code = False
    if not engine_args.skip_tokenizer_init and engine_args.tokenizer is None:
        _check_tokenizer(engine_args)
    if reads_scorer(engine_args):
        if engine_args.load_format == "pt":
            raise ConfigError("--load-format pt reads pickles, and a KVpop checkpoint is served without: leave it out")
        if engine_args.load_format in ("auto", "hf"):
            engine_args.load_format = "safetensors"
    ours = {"architectures": [ARCHITECTURES[base]], "kvpop_published": str(config.get("model_type"))}
    overrides = engine_args.hf_overrides
    if callable(overrides):
        raise ConfigError("--hf-overrides must be an object for a KVpop checkpoint, not a function")
    engine_args.hf_overrides = {**(overrides or {}), **ours}


def reads_scorer(engine_args: EngineArgs) -> bool:
    """Return whether a policy is asked for that reads a scorer."""
    settings = (engine_args.additional_config or {}).get(ADDITIONAL_CONFIG_KEY)
    return settings is not None and policies.get(policies.parse_settings(settings).policy).scorer_kind is not None


def _check_tokenizer(engine_args: EngineArgs) -> None:
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

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


def describe(vllm_config: VllmConfig, map_file: str | None) -> list[str]:
    """Return in a few lines how the scorer of an engine's checkpoint is read."""
    checkpoint = reader.open_checkpoint(folder_of(vllm_config))
    return reader.describe(checkpoint, reader.reading_of(checkpoint, map_file))


def folder_of(vllm_config: VllmConfig) -> str:
    """Return the folder of an engine's checkpoint, in the hub's cache if the model is a name of the hub."""
    model, cache_dir = vllm_config.model_config, vllm_config.load_config.download_dir
    return str(local_folder(model.model, revision=model.revision, cache_dir=cache_dir))
