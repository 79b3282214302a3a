"""Fixed-budget KV caches with learned eviction for vLLM.

Importing this package imports nothing else and patches nothing.
"""

__version__ = "0.1.0"
