"""What to keep: one file, one class, one paper."""

from __future__ import annotations

from kvpop_vllm.config import ConfigError
from kvpop_vllm.policies.base import Policy
from kvpop_vllm.policies.full import Full
from kvpop_vllm.policies.kvpop import KVpop, KVpopLinear, KVpopMLP
from kvpop_vllm.policies.streaming_llm import StreamingLLM

POLICIES: dict[str, type[Policy]] = {cls.name: cls for cls in (KVpop, KVpopMLP, KVpopLinear, StreamingLLM, Full)}


def get(name: str) -> type[Policy]:
    """The policy class of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}: --kv-policy takes {', '.join(POLICIES)}")
    return POLICIES[name]


def describe() -> str:
    """A table of all policies: name, what it scores from, order, cost per step, paper."""
    rows = [("policy", "scorer", "scores from", "order", "cost per step", "paper")]
    for cls in POLICIES.values():
        order = "static, or aged for decay step > 1" if cls.scorer_kind else cls.order.value
        signals = ", ".join(sorted(s.value for s in cls.signals)) or "-"
        rows.append((cls.name, cls.scorer_kind or "-", signals, order, cls.cost, cls.paper))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
