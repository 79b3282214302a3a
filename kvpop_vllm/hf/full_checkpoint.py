"""Full checkpoints in transformers: the base model with the scorers' tensors.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import re
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen3ForCausalLM

from kvpop_vllm import model_types
from kvpop_vllm.config import ConfigError
from kvpop_vllm.hub import local_folder
from kvpop_vllm.model_hook import check_loaded
from kvpop_vllm.model_types import LlamaKVpopConfig, Qwen3KVpopConfig
from kvpop_vllm.scorers import ScorerConfig, checkpoint
from kvpop_vllm.scorers.published_checkpoint import is_published, open_checkpoint

SCORERS = [r"\.self_attn\.(kvpop|retention_gate)\."]
"""Patterns of tensor names that are not parameters of the model."""


class LlamaKVpopForCausalLM(LlamaForCausalLM):
    """Llama without the scorer tensors of its checkpoint, which :func:`scorer_tensors` reads."""

    config_class = LlamaKVpopConfig
    _keys_to_ignore_on_load_unexpected = SCORERS


class Qwen3KVpopForCausalLM(Qwen3ForCausalLM):
    """Qwen3 without the scorer tensors of its checkpoint, which :func:`scorer_tensors` reads."""

    config_class = Qwen3KVpopConfig
    _keys_to_ignore_on_load_unexpected = SCORERS


MODELS = {model.config_class.base: model for model in (LlamaKVpopForCausalLM, Qwen3KVpopForCausalLM)}
"""Class of the models of full checkpoints, by base model type."""

model_types.register()
for _model in MODELS.values():
    AutoModelForCausalLM.register(_model.config_class, _model, exist_ok=True)


def load_checkpoint(folder: str | Path, **options) -> torch.nn.Module:
    """Return the model of a full checkpoint, of this package or of other authors, as its base model.

    No code of the folder is executed. Give the model to :class:`kvpop_vllm.hf.KVpopCache`, which finds the scorer. In
    this process, ``AutoTokenizer.from_pretrained(folder)`` then works as well.

    Args:
        folder: folder, or a name of the hub.
        options: of transformers' ``from_pretrained``, such as ``dtype``.
    """
    if options.pop("trust_remote_code", False):
        raise ConfigError("no code of a checkpoint is executed: leave trust_remote_code out")
    folder = local_folder(folder)
    options |= {"trust_remote_code": False, "output_loading_info": True, "ignore_mismatched_sizes": True}
    if not is_published(folder):
        model, loaded = AutoModelForCausalLM.from_pretrained(folder, **options)
        check_loaded(loaded, folder)
        return model
    theirs = open_checkpoint(folder)
    base = MODELS[theirs.base]
    names = [f"^{re.escape(name)}$" for name in theirs.shapes] + [r"rotary_emb\.inv_freq$"]
    model_class = type(base.__name__, (base,), {"_keys_to_ignore_on_load_unexpected": names})
    config = model_types.register_published(theirs.config).from_dict(theirs.config)
    model, loaded = model_class.from_pretrained(folder, config=config, **options)
    check_loaded(loaded, folder)
    if unexpected := sorted(loaded["unexpected_keys"]):
        raise ConfigError(f"{folder}: tensor {unexpected[0]} is neither the base model's nor the scorer's")
    model.__class__ = base  # which pickles
    return model


def published_scorer(model: torch.nn.Module) -> str | None:
    """Return the folder or name of the hub of a model whose checkpoint is another author's, else None."""
    name, config = model.name_or_path, model.config.get_text_config()
    if Path(name).is_dir():
        return str(name) if is_published(name) else None
    if not model_types.is_adopted(config):
        return None
    commit = getattr(model.config, "_commit_hash", None)
    return f"{name}@{commit}" if commit else str(name)


def scorer_tensors(folder: str | Path, config: ScorerConfig) -> list[dict[str, torch.Tensor]]:
    """Return the checked scorer tensors of each layer from a checkpoint's safetensors files."""
    if not Path(folder).is_dir():
        raise ConfigError(f"the model was not loaded from a folder ({str(folder)!r}): give --kv-scorer DIR")
    tensors = checkpoint.read_tensors(folder, checkpoint.looks_like_scorer)
    return checkpoint.layers_of(config, tensors, str(folder))
