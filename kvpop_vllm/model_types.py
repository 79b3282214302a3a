"""Model types of full checkpoints for transformers. This module does not import models."""

from collections.abc import Mapping

from transformers import AutoConfig, LlamaConfig, PretrainedConfig, Qwen3Config

from kvpop_vllm.supported import ARCHITECTURES, FULL_CHECKPOINT_SUFFIX, base_keys, published_base


class _Published:
    """Mixin before a config of transformers that also takes the ``config.json`` of other authors' checkpoints.

    Of those it keeps what is the base model's. Nothing in it names code any more.
    """

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """Return the config of a ``config.json``. See transformers."""
        if published_base(config_dict) is not None:
            config_dict = base_keys(config_dict, cls.base) | adopted_keys(config_dict, cls.base)
        return super().from_dict(config_dict, **kwargs)

    def __setstate__(self, state):
        """Restore a config in another process, where its model type may have to be registered."""
        self.__dict__.update(state)
        if is_adopted(self):
            register_published({"model_type": self.kvpop_published, "architectures": [ARCHITECTURES[self.base]]})


class Qwen3KVpopConfig(_Published, Qwen3Config):
    """Config of Qwen3 with a ``kvpop`` section, the contents of a ``kvpop_config.json``."""

    base = "qwen3"
    model_type = "qwen3" + FULL_CHECKPOINT_SUFFIX
    kvpop: dict | None = None
    kvpop_published: str | None = None


class LlamaKVpopConfig(_Published, LlamaConfig):
    """Config of Llama with a ``kvpop`` section, the contents of a ``kvpop_config.json``."""

    base = "llama"
    model_type = "llama" + FULL_CHECKPOINT_SUFFIX
    kvpop: dict | None = None
    kvpop_published: str | None = None


CONFIGS = {config.base: config for config in (Qwen3KVpopConfig, LlamaKVpopConfig)}
"""Class of the config of full checkpoints, by base model type."""


def adopted_keys(config: Mapping, base: str) -> dict:
    """Return the keys that turn another author's ``config.json`` into one of our full checkpoints of ``base``."""
    return {"architectures": [ARCHITECTURES[base]], "kvpop_published": str(config.get("model_type"))}


def is_adopted(config: PretrainedConfig) -> bool:
    """Return whether a config is of another author's full checkpoint, served as its base."""
    return getattr(config, "kvpop_published", None) is not None


def register() -> None:
    """Register the configs with transformers. It may be called again."""
    for config in CONFIGS.values():
        AutoConfig.register(config.model_type, config, exist_ok=True)


def register_published(config: Mapping) -> type:
    """Register the model type of another author's full checkpoint, and return the class of its configs.

    transformers then reads the folder without its code. A model type of transformers itself stays what it is.

    Args:
        config: contents of its ``config.json``. Its base must be one of :data:`CONFIGS`.
    """
    register()
    parent, kind = CONFIGS[published_base(config)], config.get("model_type")
    if published_base({"model_type": kind}) is not None and kind != parent.model_type:

        def from_dict(cls, config_dict, **kwargs):
            return parent.from_dict(config_dict, **kwargs)

        members = {"model_type": kind, "from_dict": classmethod(from_dict), "__module__": __name__}
        AutoConfig.register(kind, type(parent.__name__, (parent,), members), exist_ok=True)
    return parent
