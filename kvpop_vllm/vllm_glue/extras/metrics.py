"""Metrics of engines with a policy, in addition to vLLM's own on ``/metrics`` and in ``LLM.get_metrics()``."""

from prometheus_client import Counter, Gauge, Histogram
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from kvpop_vllm.vllm_glue.extras.reports import STATS
from kvpop_vllm.vllm_glue.start.engine_policy import engine_policy, requested

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.999, 1.0)
"""Upper ends of the histogram's buckets. Requests of which nothing was evicted are alone in the last one."""
GAUGES = {
    "blocks_held": "Blocks that running requests hold; blocks that several share are counted for each.",
    "blocks_bound": "Most blocks that running requests can come to hold, by their budgets and max_tokens.",
    "bytes_held": "Bytes of the blocks that running requests hold, with scores, state and padding, on all ranks.",
    "dense_bytes": "Bytes of keys and values of all tokens that running requests have processed, in the layers that the policy acts on.",
}
COUNTERS = {
    "tokens_seen": "Tokens that the caches of ended requests have seen, those of a prefix or a snapshot included.",
    "tokens_kept": "Tokens that caches held when their requests ended, mean of all KV heads, by slots in use.",
    "tokens_evicted": "Tokens evicted from the caches of requests that have ended, mean of all KV heads: seen - kept.",
    "protected_tokens": "Tokens of protected prefixes, cartridges included, of requests that have ended.",
}
SNAPSHOTS = {
    "taken": "Snapshots of what requests held at their end or at their prompt's end.",
    "hits": "Requests that went on from a snapshot.",
    "lost": "Snapshots that were dropped, or of which the pool took blocks back.",
}


KEPT = "tokens_kept", "tokens_evicted"


class PolicyStatLogger(AggregateStatLoggerBase):
    """Stat logger of an engine with a policy.

    Tokens that are kept are not published for policies that evict while slots are free, where they are not known.

    Args:
        vllm_config: config of the engine.
        engine_indexes: its data-parallel engines.
    """

    def __init__(self, vllm_config, engine_indexes):
        policy, model = engine_policy(vllm_config), vllm_config.model_config.served_model_name
        labels, self.metrics = ["model_name", "engine"], {}

        def add(name: str, metric) -> None:
            self.metrics[name] = {index: metric.labels(model, str(index)) for index in engine_indexes}

        for name, text in GAUGES.items():
            add(name, Gauge(f"vllm:kv_policy_{name}", text, labels, multiprocess_mode="mostrecent"))
        for name, text in COUNTERS.items():
            if name not in KEPT or not policy.drops_early:
                add(name, Counter(f"vllm:kv_policy_{name}", text, labels))
        for name, text in SNAPSHOTS.items():
            add(f"snapshots_{name}", Counter(f"vllm:kv_policy_snapshots_{name}", text, labels))
        share = "Share of its tokens that a request's cache held at its end, mean of all KV heads."
        if not policy.drops_early:
            add("retained_share", Histogram("vllm:kv_policy_retained_share", share, labels, buckets=SHARES))
        info_labels = {
            "policy": policy.name,
            "budget": str(policy.retention.budget),
            "layers": str(policy.model.num_layers),
            "model_layers": str(policy.model.model_layers),
            "scorer": str(policy.settings.scorer or ("checkpoint" if policy.scorer_kind else "none")),
        }
        info = Gauge(
            "vllm:kv_policy_info",
            "Policy of the KV cache, with B in tokens per KV head and the layers that it acts on.",
            [*labels, *info_labels],
            multiprocess_mode="mostrecent",
        )
        for index in engine_indexes:
            info.labels(model, str(index), *info_labels.values()).set(1)

    def log_engine_initialized(self):
        """Do nothing: the policy is published from the start."""

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        """Publish a step's numbers, and take them out of vLLM's statistics, whose loggers expect a connector's there."""
        if scheduler_stats is None or not (numbers := (scheduler_stats.kv_connector_stats or {}).get(STATS)):
            return
        scheduler_stats.kv_connector_stats = None
        engine_metrics = {name: by_engine[engine_idx] for name, by_engine in self.metrics.items()}
        for name in GAUGES:
            engine_metrics[name].set(numbers[name])
        for name, count in numbers["snapshots"].items():
            engine_metrics[f"snapshots_{name}"].inc(count)
        for tokens, mean_kept, protected in numbers["ended"]:
            engine_metrics["tokens_seen"].inc(tokens)
            engine_metrics["protected_tokens"].inc(protected)
            if mean_kept is not None:
                engine_metrics["tokens_kept"].inc(mean_kept)
                engine_metrics["tokens_evicted"].inc(tokens - mean_kept)
                engine_metrics["retained_share"].observe(mean_kept / tokens)


def add_logger(original, self, vllm_config, *args, **kwargs):
    """Wrap the making of an engine's stat loggers: add that of its policy."""
    original(self, vllm_config, *args, **kwargs)
    if requested(vllm_config):  # first, so that vLLM's loggers do not see our numbers
        self.stat_loggers.insert(0, PolicyStatLogger(vllm_config, self.engine_indexes))
