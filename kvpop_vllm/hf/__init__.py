"""Fixed-size KV cache for transformers: ``model.generate(cache=KVpopCache(model, ...))``."""

from kvpop_vllm.hf.cache import KVpopCache
