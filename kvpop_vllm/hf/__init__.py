"""Fixed-size KV cache for transformers: ``model.generate(cache=KVpopCache(model, ...))``."""

from kvpop_vllm.hf.cache import KVpopCache
from kvpop_vllm.hf.full_checkpoint import load_checkpoint

__all__ = ["KVpopCache", "load_checkpoint"]
