"""One row for every policy: how the oracle sees it. Tests of the whole product and of engines take theirs from here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvpop_vllm.testing import OraclePolicy

LEARNED = ("mlstm", "mlp", "linear", "trimkv", "dms")
"""Kinds of scorer folders."""


@dataclass(frozen=True)
class Row:
    """A policy by its definition.

    Attributes:
        scorer: by what the oracle ranks, or the kind of a scorer folder. policy: its name, where the row is of a variant.
        options: of such a folder, in all tests. spread: more of them where a test has few tokens.
        sinks, window: defaults of a policy without a folder; -1: half of the budget. asked: whether tests ask for others.
        compresses: the prompt is held until its end.
        own_allocator: what shares the budget unasked. allocator: asked for, where the row is of a variant. corrected: what it does unasked. keeps_all: it evicts nothing.
        engines: kinds of models that an engine serves with it. longest: its longest prompts there, in budgets. own_blocks: a pool
            that is too small is tried with it; no other of its make needs other blocks.
        state: float32 words a head at D = 32.
    """

    scorer: str
    policy: str | None = None
    options: dict = field(default_factory=dict)
    spread: dict = field(default_factory=dict)
    sinks: int = 0
    window: int = 1
    asked: bool = False
    compresses: bool = False
    allocator: str = "uniform"
    own_allocator: str = "uniform"
    corrected: bool = False
    keeps_all: bool = False
    engines: tuple[str, ...] = ()
    longest: int = 5
    own_blocks: bool = True
    state: int = 0

    @property
    def learned(self) -> bool:
        return self.scorer in LEARNED


DECAY = {"decay_min": 0.9, "decay_max": 0.99}
MOMENTS = 32 * 32 + 2 * 32
ROWS = {
    "kvpop": Row("mlstm", spread=DECAY, engines=("qwen3", "llama"), longest=10, state=32 * 32 + 32 + 1),
    "kvpop-mlp": Row("mlp", spread=DECAY, engines=("qwen3", "llama"), longest=10),
    "kvpop-linear": Row("linear", spread=DECAY | {"decay_step": 3}, engines=("qwen3", "llama"), longest=10),
    "streaming-llm": Row("recency", sinks=4, window=8, asked=True, engines=("qwen3", "llama"), longest=10),
    "random": Row("random draw", sinks=4, window=8, asked=True, engines=("qwen3",), own_blocks=False),
    "snapkv": Row("prompt votes", window=32, asked=True, compresses=True, state=32 * 2 * 32),
    "pyramidkv": Row(
        "prompt votes", window=32, asked=True, compresses=True, own_allocator="pyramid", state=32 * 2 * 32
    ),
    "adakv": Row("prompt votes", window=32, asked=True, compresses=True, own_allocator="ada", state=32 * 2 * 32 + 1),
    "vase": Row("sampled mass", sinks=4, window=8, asked=True, engines=("qwen3",), own_blocks=False, state=64 * 2 * 32),
    "rkv": Row("redundancy", window=8, asked=True, engines=("llama",), own_blocks=False, state=8 * 2 * 32),
    "h2o": Row("mean mass", window=-1, engines=("qwen3",), own_blocks=False),
    "tova": Row("newest mass", engines=("llama",), own_blocks=False),
    "h2o-pyramid": Row("mean mass", "h2o", window=-1, allocator="pyramid", engines=("llama",)),
    "momentkv": Row("moment residual", sinks=1, corrected=True, engines=("llama",)),
    "trimkv": Row("trimkv", spread={"seed": 1}, engines=("qwen3",), own_blocks=False),
    "trimkv-kv": Row("trimkv", "trimkv", {"reads": "kv", "gated": True}, {"seed": 3}),
    # evicts most tokens: equal tokens have equal logits up to rounding in a first layer, so that few decisions may be left to the budget
    "dms": Row("dms", None, {"evict": 1.5}, {"evict": -0.5}),
    "dms-query": Row("dms", "dms", {"reads": "query", "evict": 0.5}, {"evict": -0.5}, engines=("llama",)),
    "dms-late": Row("dms", "dms", {"shifted": True}, {"evict": -0.5}),
    # no engine: equal tokens of a first layer have keys of equal norm but for rounding; judged on an engine's own keys instead
    "l2norm": Row("key norm"),
    "full": Row("recency", keeps_all=True),
}
"""Name of a case, which is the policy's own but for variants, and its row."""


def allocated(plain: OraclePolicy, allocator: str) -> OraclePolicy:
    """Give lower layers more tokens: two layers whose k are to each other as 39 to 1 (PyramidKV, beta 20)."""
    if allocator == "uniform":
        return plain
    if allocator == "ada":
        return replace(plain, divides=True)
    last = plain.topk // 20 + (plain.topk % 20 > 10)
    return replace(plain, topk=(2 * plain.topk - last, last))
