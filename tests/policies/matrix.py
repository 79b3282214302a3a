"""One row for every policy, as the oracle describes it, for the tests of the product and of engines."""

import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from kvpop_vllm import policies
from kvpop_vllm.calibration.statistics import QueryStatistics, write_statistics
from kvpop_vllm.config import PolicySettings
from kvpop_vllm.kernels import dispatch
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.rope import band_norms
from kvpop_vllm.scorers.checkpoint import read_scorer, write_scorer
from kvpop_vllm.scorers.untrained import init_scorer
from kvpop_vllm.testing import OraclePolicy, write_random_scorer
from kvpop_vllm.testing.oracle_policy import shared_slots

GATES = ("trimkv", "dms", "kvzap")
"""Kinds of gates, which come in folders as scorers do."""
LEARNED = ("mlstm", "mlp", "linear", *GATES)
"""Kinds of scorers that come in folders."""


@dataclass(frozen=True)
class Row:
    """One policy, or a variant of it.

    Attributes:
        scorer: score by which the oracle ranks tokens, or the kind of a scorer folder.
        policy: name of the policy, where the row is a variant.
        options: options of the scorer folder in all tests.
        spread: further options of the scorer folder in tests with few tokens.
        sinks: default of a policy without a scorer folder.
        window: default of a policy without a scorer folder; -1 is half of the budget.
        set_by_tests: True if tests set sinks and window themselves.
        compresses: True if the policy holds the prompt until its end and then compresses it.
        allocator: allocator to ask for, where the row is a variant.
        own_allocator: default allocator of the policy.
        corrected: True if the policy corrects outputs by default.
        keeps_all: True if the policy evicts nothing.
        engines: kinds of tiny models that a KVpopCache runs with it.
        state: float32 words of one head's state at D = 32.
        calibrated: True if the policy needs statistics of the model.
        threshold: threshold to ask for, where the row is a variant.
    """

    scorer: str
    policy: str | None = None
    options: dict = field(default_factory=dict)
    spread: dict = field(default_factory=dict)
    sinks: int = 0
    window: int = 1
    set_by_tests: bool = False
    compresses: bool = False
    allocator: str = "uniform"
    own_allocator: str = "uniform"
    corrected: bool = False
    keeps_all: bool = False
    engines: tuple[str, ...] = ()
    state: int = 0
    calibrated: bool = False
    threshold: float | None = None

    @property
    def learned(self) -> bool:
        return self.scorer in LEARNED

    @property
    def gate(self) -> bool:
        return self.scorer in GATES

    @property
    def early(self) -> dict:
        """The threshold as a setting and as a field of the oracle's policy, if the row has one."""
        return {} if self.threshold is None else {"threshold": self.threshold}


DECAY = {"decay_min": 0.9, "decay_max": 0.99}
MOMENTS = 32 * 32 + 2 * 32
ROWS = {
    "kvpop": Row("mlstm", spread=DECAY, engines=("qwen3", "llama"), state=32 * 32 + 32 + 1),
    "kvpop-mlp": Row("mlp", spread=DECAY, engines=("qwen3", "llama")),
    "kvpop-linear": Row("linear", spread=DECAY | {"decay_step": 3}, engines=("qwen3", "llama")),
    "streaming-llm": Row("recency", sinks=4, window=8, set_by_tests=True, engines=("qwen3", "llama")),
    "random": Row("random draw", sinks=4, window=8, set_by_tests=True, engines=("qwen3",)),
    "snapkv": Row("prompt votes", window=32, set_by_tests=True, compresses=True, state=32 * 2 * 32),
    "pyramidkv": Row(
        "prompt votes", window=32, set_by_tests=True, compresses=True, own_allocator="pyramid", state=32 * 2 * 32
    ),
    "adakv": Row(
        "prompt votes", window=32, set_by_tests=True, compresses=True, own_allocator="ada", state=32 * 2 * 32 + 1
    ),
    # tests compare it with oracle_matching.py, or with a KVpopCache; 14 queries of its window at B = 56
    "attention-matching": Row("prompt matching", window=16, compresses=True, state=14 * 2 * 32),
    "vase": Row("sampled mass", sinks=4, window=8, set_by_tests=True, engines=("qwen3",), state=64 * 2 * 32),
    "rkv": Row("redundancy", window=8, set_by_tests=True, engines=("llama",), state=8 * 2 * 32),
    "triattention": Row(
        "expected logits", sinks=4, window=8, set_by_tests=True, calibrated=True, engines=("qwen3", "llama")
    ),
    "h2o": Row("mean mass", window=-1, engines=("qwen3",)),
    "tova": Row("newest mass", engines=("llama",)),
    "h2o-pyramid": Row("mean mass", "h2o", window=-1, allocator="pyramid", engines=("llama",)),
    "momentkv": Row("moment residual", sinks=1, corrected=True, engines=("llama",)),
    "trimkv": Row("trimkv", spread={"seed": 1}, engines=("qwen3",)),
    "trimkv-kv": Row("trimkv", "trimkv", {"reads": "kv", "gated": True}, {"seed": 3}),
    # evicts most tokens by threshold: equal tokens of a first layer have equal logits up to rounding, so few
    # decisions may be left to the budget
    "dms": Row("dms", None, {"evict": 1.5}, {"evict": -0.5}),
    "dms-query": Row("dms", "dms", {"reads": "query", "evict": 0.5}, {"evict": -0.5}, engines=("llama",)),
    "dms-late": Row("dms", "dms", {"shifted": True}, {"evict": -0.5}),
    "kvzap": Row("kvzap", spread={"seed": 1}, engines=("qwen3",)),
    # half of the tokens are evicted by the threshold, others by the budget
    "kvzap-early": Row("kvzap", "kvzap", {"linear": True}, {"seed": 1}, threshold=0.1, engines=("llama",)),
    # no engine: equal tokens of a first layer have keys of equal norm up to rounding; test_variants.py judges
    # it on an engine's own keys
    "l2norm": Row("key norm"),
    "full": Row("recency", keeps_all=True),
}
"""Rows by name. The name is the policy's, except for variants."""


def random_scorer_folder(folder: Path, model: Path, kind: str, **options) -> Path:
    """Write a scorer folder whose scores vary strongly between tokens, and return its path.

    Tests have writers of their own for the kinds that :mod:`kvpop_vllm.testing` knows. Another kind is an
    untrained scorer plus noise.
    """
    if kind in LEARNED:
        return write_random_scorer(folder, model, kind, **options)
    decay = {name: options.pop(f"decay_{name}", value) for name, value in (("step", 1), ("min", 0.99), ("max", 0.9999))}
    config = init_scorer(model, folder, scorer=kind, decay=decay, **options)
    _, layers = read_scorer(folder)
    draw = torch.Generator().manual_seed(0)
    noisy = [{name: t + torch.randn(t.shape, generator=draw) / 4 for name, t in layer.items()} for layer in layers]
    write_scorer(folder, config, noisy)
    return folder


ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
"""Rope parameters of the tiny models."""


def random_statistics_folder(folder: Path, shape: ModelShape) -> Path:
    """Write statistics of a model's queries that are drawn at random, and return the folder's path."""
    draw = torch.Generator().manual_seed(3)
    names = ("model_type", "num_layers", "num_heads", "num_kv_heads", "head_dim", "layers")
    pairs = shape.head_dim // 2
    mean = torch.randn(shape.num_layers, shape.num_heads, shape.head_dim, generator=draw)
    norm = band_norms(mean, pairs) + torch.rand(*mean.shape[:2], pairs, generator=draw)
    sizes = {name: getattr(shape, name) for name in names}
    write_statistics(folder, QueryStatistics(**sizes, rope=dict(shape.rope), tokens=1, mean=[*mean], norm=[*norm]))
    return folder


SMALL = ModelShape("llama", 2, 4, 32, 256)
SHARES = Path(__file__).with_name("shares.json")
"""Shares of two heads in two layers, one of which has a single long-range slot."""
MILD_SHARES = Path(__file__).with_name("mild_shares.json")
"""Shares that leave every head more than two long-range slots, with which values of ``triattention`` tie."""


def made(name: str, budget: int | None = 64, shape: ModelShape = SMALL, **settings) -> policies.Policy:
    """Return a policy with these settings for a model of this shape."""
    return policies.get(name)(PolicySettings(name, budget, **settings), shape)


def shared_by(allocator: str, statistics: str | None = None) -> dict[str, str]:
    """Return the settings of an allocator or of a file of shares, and of a folder with statistics of a model.

    A file of shares and the statistics are copied into a folder next to the latter.
    """
    if not Path(allocator).is_file():
        return {"allocator": allocator} | ({} if statistics is None else {"calibration": statistics})
    if statistics is None:
        return {"calibration": allocator}
    folder = Path(f"{statistics}-shared")
    shutil.copytree(statistics, folder, dirs_exist_ok=True)
    shutil.copy(allocator, folder / "shares.json")
    return {"calibration": str(folder)}


def allocated(plain: OraclePolicy, allocator: str) -> OraclePolicy:
    """Return the oracle's policy with the k of two layers that an allocator gives.

    PyramidKV with beta 20 gives the two layers k in the ratio 39 to 1. ``ada`` lets the heads of a layer
    divide its slots. A file gives heads parts of all slots.
    """
    if Path(allocator).is_file():
        return replace(plain, topk=shared_slots(json.loads(Path(allocator).read_text())["shares"], plain.topk))
    if allocator == "uniform":
        return plain
    if allocator == "ada":
        return replace(plain, adaptive_head_budgets=True)
    last = plain.topk // 20 + (plain.topk % 20 > 10)
    return replace(plain, topk=(2 * plain.topk - last, last))


def force(patch, impl: str) -> None:
    """Have ops take an implementation, and those that are not written in C++ the reference, until ``patch`` is undone."""
    patch.setattr(
        dispatch,
        "select",
        lambda op, tensor: "reference" if impl == "cpp" and op not in dispatch.CPP_DTYPES else impl,
    )
