"""Fixed-size KV cache for transformers: ``model.generate(past_key_values=KVpopCache(model, ...))``."""

from kvpop_vllm.hf.cache import KVpopCache
