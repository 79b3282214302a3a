"""Versions of vLLM, models, head sizes and dtypes that are served, and the features of a model that are refused.

Single source of truth for them. Constructors of layers repeat what only they can see. vLLM's glue, ``kvpop plan``, the
cache for transformers, the choice of kernels, training and the tests read it, and the documents are compared with it.
It imports neither vLLM nor torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VLLM = ">=0.32,<0.34"
"""Versions of vLLM that are served, as in ``pyproject.toml``."""

TRANSFORMERS = ">=5.16,<5.25"
"""Versions of transformers that are served, as in ``pyproject.toml``."""

HEAD_SIZES = (32, 64, 80, 96, 128, 256, 512)
"""Head sizes that are served, by C++ and by Triton."""

DTYPES = {"cpu": ("bfloat16", "float32"), "cuda": ("float16", "bfloat16", "float32")}
"""Dtypes of model and cache that are served, by platform."""


@dataclass(frozen=True)
class Kernels:
    """Head sizes and dtypes that the serving ops of an implementation take.

    Attributes:
        multiple: divisor of the head size.
        largest: largest head size, None for any.
        dtypes: names of the dtypes of keys, None for all of torch's floating-point dtypes.
    """

    multiple: int = 1
    largest: int | None = None
    dtypes: tuple[str, ...] | None = None


KERNELS = {
    "reference": Kernels(),
    "cpp": Kernels(16, None, DTYPES["cpu"]),
    "triton": Kernels(16, 512, DTYPES["cuda"]),
}
"""Head sizes and dtypes of each implementation. HEAD_SIZES are those that are tested, in C++ and in Triton."""

FULL_CHECKPOINT_SUFFIX = "_kvpop"
"""Suffix of a full checkpoint's model type, after the model type of the base model."""

ARCHITECTURES = {"llama": "LlamaKVpopForCausalLM", "qwen3": "Qwen3KVpopForCausalLM"}
"""Architecture of the full checkpoint, by base model type. Its class in the vLLM glue has the same name."""

STOCK_ARCHITECTURES = {name.replace("KVpop", ""): name for name in ARCHITECTURES.values()}
"""Architecture of the full checkpoint, by architecture of the base model."""


def published_base(config: Mapping[str, Any]) -> str | None:
    """Return the base model type of a full checkpoint of other authors, None for any other config.

    Its model type or architecture contains ``kvpop``, in any case and with any separators, and it has no section that
    this package wrote. The base may be one that is not in ARCHITECTURES, several where names disagree, or empty.

    Args:
        config: contents of a ``config.json``.
    """
    section, names = config.get("kvpop"), config.get("architectures")
    kind, names = config.get("model_type"), names if isinstance(names, list) else []
    if isinstance(section, Mapping) and section.get("format") == "kvpop-scorer":
        return None
    # KVpop, kv_pop and kv-pop are one word
    words = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in (kind, *names) if isinstance(name, str)]
    if not any("kvpop" in word for word in words):
        return None
    # what is left of a name is the base
    bases = [re.sub(r"kvpop|forcausallm|lmheadmodel|model", "", word) for word in words]
    return " or ".join(dict.fromkeys(base for base in bases if base))


def base_keys(config: Mapping[str, Any], base: str) -> dict[str, Any]:
    """Return the keys of a published checkpoint's config that are its base model's, without any that name code."""
    from transformers import CONFIG_MAPPING

    keys = {
        *(CONFIG_MAPPING[base]().to_dict() if base in CONFIG_MAPPING else ()),
        "rope_theta",
        "rope_scaling",
        "torch_dtype",
        "quantization_config",
    }
    # nothing that names code may pass
    keys -= {"architectures", "auto_map", "model_type", "transformers_version", "_name_or_path"}
    return {name: value for name, value in config.items() if name in keys}


RESCALED_LOGITS = (
    "final_logit_softcapping", "lm_head_multiplier", "logit_scale", "logits_scaling", "logits_soft_cap",
    "output_multiplier",
)  # fmt: skip
"""Model settings that rescale logits after the output layer, which training does not support."""

SCALED_BY_POSITION = "llama_4_scaling_beta", "attn_temperature_tuning"
"""Model settings that scale queries by their position, which training at drawn positions does not support."""


BORROWING = (*ARCHITECTURES, "gemma3_text", "gpt_oss", "nemotron_h")
"""Model types of which it is tested where the query channel is that a gate of DMS may borrow."""
HEADS_FIRST = frozenset({"gemma3_text"})
"""Model types in BORROWING whose norm of queries, in transformers, has the axis of heads before that of tokens."""


def refused_borrowing(kind: str) -> str | None:
    """Return why a gate cannot borrow a channel of the queries in models of a type, as errors say it, or None."""
    if kind in BORROWING:
        return None
    served = ", ".join(BORROWING)
    return (
        f"the gate borrows a channel of the queries, which is known where it is in {served} models only, not in {kind}"
    )


PAIRED = frozenset({"llama4_text"})
"""Model types whose rotation pairs neighbouring channels in transformers, and the halves of a head in vLLM.

Scorers read keys as vLLM has them, even channels before odd ones.
"""


def has_sinks(text: Any) -> bool:
    """Return whether a model's attention has sinks of its own. ``text`` is its text config, with its keys as attributes."""
    kind = getattr(text, "model_type", None)
    if kind in ("granite", "granite_swa", "granitemoe", "granitemoe_swa"):  # as in vLLM
        return bool(getattr(text, "attention_sinks", getattr(text, "layer_types", None) is not None))
    return kind == "gpt_oss" or any(value and "attention_sink" in name for name, value in vars(text).items())


FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
RECURRENT, HYBRID = "linear_attention", "hybrid"
"""Kinds of layers with a recurrent state: in place of attention, and next to full attention."""
POLICY_LAYERS = frozenset({FULL, HYBRID})
"""Kinds of layers that a policy acts on."""
LOCAL_LAYERS = frozenset({SLIDING, CHUNKED})
"""Kinds of layers whose queries attend to tokens nearby."""
CACHE_SPECS = {
    FULL: ("FixedBudgetSpec",),
    SLIDING: ("SlidingWindowSpec",),
    CHUNKED: ("ChunkedLocalAttentionSpec",),
    RECURRENT: ("MambaSpec",),
    HYBRID: ("FixedBudgetSpec", "MambaSpec"),
    "mlp": (),
    "moe": (),
}
"""Kinds of layers that an engine with a policy serves, with the names of their cache specs. All but the policy's are vLLM's."""
SPELLINGS = {"attention": FULL, "mamba": RECURRENT}
"""Kinds of layers as older configs spell them."""

MAMBA2, GDN = "Mamba2", "gated delta net"
RECURRENCES = {
    "nemotron_h": MAMBA2,
    "granitemoehybrid": MAMBA2,
    "falcon_h1": MAMBA2,
    "qwen3_next": GDN,
    "qwen3_5_text": GDN,
    "qwen3_5_moe_text": GDN,
}
"""Model types with recurrent layers that an engine serves, with what these layers are."""


NEEDS_FULL = {
    "cartridge": "a cartridge, which holds a text in every layer",
    "carried": "a checkpoint that carries scorers, which has them in every layer",
}
"""Features that need full attention in every layer, by name, as errors call them."""


def refused_beside(kinds: Sequence[str], **features: object) -> str | None:
    """Return why a model with layers of several kinds is refused, as errors say it, or None.

    Args:
        kinds: kinds of the model's layers, empty if a policy acts on all.
        features: whether each of NEEDS_FULL is wanted, False for those left out.
    """
    reasons = [NEEDS_FULL[name] for name, present in features.items() if present]
    return f"layers without full attention cannot have {'; nor '.join(reasons)}" if kinds and reasons else None


def recurrent_layers(text: Any, layers: int) -> tuple[int, ...]:
    """Return the indices of the layers of a model that keep a recurrent state. Arguments as of :func:`layer_kinds`."""
    return tuple(i for i, kind in enumerate(layer_kinds(text, layers)) if kind in (RECURRENT, HYBRID))


def sliding_window(text: Any) -> int | None:
    """Return the tokens that a query in a model's sliding-window layers attends to, None if the config says none."""
    # Qwen's configs may name a window that they do not use
    return getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None


def local_size(text: Any, kind: str) -> int:
    """Return the tokens of a window or chunk of a model's layers of a kind."""
    return sliding_window(text) if kind == SLIDING else text.attention_chunk_size


def layer_kinds(text: Any, layers: int | None = None, tokens: int | None = None) -> tuple[str, ...]:
    """Return the kind of each layer of a model, as in transformers' configs. A policy acts on those in POLICY_LAYERS.

    A sliding window that no text exceeds is full attention.

    Args:
        text: the model's text config, with its keys as attributes.
        layers: number of layers, None for as many as the config lists, or one.
        tokens: tokens of the longest text that the model reads, None if nothing bounds it.
    """
    window = sliding_window(text)
    default = CHUNKED if getattr(text, "attention_chunk_size", None) else FULL if window is None else SLIDING
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or (default,) * (layers or 1)
    wide = type(window) is int and tokens is not None and tokens <= window
    spellings = SPELLINGS | ({SLIDING: FULL} if wide else {})
    return tuple(spellings.get(kind, kind) for kind in kinds[:layers])


def rotates(text: Any) -> bool:
    """Return whether attention of a model has rotary embeddings, as far as its config says so."""
    kind = getattr(text, "model_type", None)
    return kind != "nemotron_h" and (
        kind != "granitemoehybrid" or getattr(text, "position_embedding_type", None) == "rope"
    )


def recurrence(text: Any) -> str | None:
    """Return what the recurrent layers of a model are that an engine serves, None if it has none or is not served."""
    kinds = {*layer_kinds(text)}
    if not kinds & {RECURRENT, HYBRID} or not kinds & POLICY_LAYERS:
        return None
    return RECURRENCES.get(getattr(text, "model_type", None))


def _has_no_full_layer(text: Any, tokens: int | None) -> bool:
    """Return whether no layer has full attention, or the size of a window or chunk is missing."""
    kinds = set(layer_kinds(text, tokens=tokens))
    sizes = {SLIDING: sliding_window(text), CHUNKED: getattr(text, "attention_chunk_size", None)}
    return LOCAL_LAYERS >= kinds or any(type(sizes[kind]) is not int for kind in kinds & sizes.keys())


def _has_alibi(text: Any, tokens: int | None) -> bool:
    options = getattr(text, "attn_config", None)
    mpt = options.get("alibi") if isinstance(options, dict) else getattr(options, "alibi", False)
    names = {"bloom"} & {getattr(text, "model_type", None)}
    return bool(getattr(text, "alibi", False) or mpt or names or getattr(text, "position_encoding_type", "") == "alibi")


def _has_sparse_layers(text: Any, tokens: int | None) -> bool:
    options, kinds = getattr(text, "sparse_attention_config", None), getattr(text, "layer_types", None) or ()
    sparse = isinstance(options, dict) and options.get("use_sparse_attention", True)
    return bool(sparse or {"minimax_m3_sparse", "indexed_attention"} & set(kinds))


@dataclass(frozen=True)
class Refused:
    """Feature of a model that a fixed-size cache cannot serve.

    Attributes:
        models: its models, as vLLM's errors call them.
        feature: the feature itself, as errors of ``kvpop plan`` and of the cache for transformers call it.
        declared: takes a model's text config and the tokens of its longest text, or None, and returns whether it
            declares the feature. Where a config does not say so reliably, this is False and the caller's ``observed``
            decides.
    """

    models: str
    feature: str
    declared: Callable[[Any, int | None], bool] = lambda text, tokens: False


REFUSED = {
    "MLA": Refused("models with multi-head latent attention (MLA)", "latent attention (MLA)"),
    "encoder-decoder": Refused("encoder-decoder models", "an encoder"),
    "ALiBi": Refused("models with ALiBi", "ALiBi", _has_alibi),
    "soft-capping": Refused(
        "models with attention logit soft-capping",
        "logit soft-capping in attention",
        lambda text, tokens: bool(getattr(text, "attn_logit_softcapping", None)),
    ),
    "attention sinks": Refused("models with attention sinks of their own", "attention sinks of its own"),
    "shared KV layers": Refused(
        "models with cross-layer KV sharing",
        "cross-layer KV sharing",
        lambda text, tokens: bool(getattr(text, "num_kv_shared_layers", 0)),
    ),
    "bidirectional images": Refused("models with bidirectional image attention", "bidirectional image attention"),
    "bidirectional attention": Refused(
        "models with bidirectional text attention",
        "attention in both directions",
        lambda text, tokens: not getattr(text, "is_causal", True),
    ),
    "recurrent": Refused("models with Mamba or other recurrent layers", "layers other than full attention"),
    "sliding-window": Refused(
        "models of sliding-window or chunked layers without one of full attention",
        "layers other than full attention",
        _has_no_full_layer,
    ),
    "block-sparse": Refused("models with block-sparse layers", "layers other than full attention", _has_sparse_layers),
}
"""Refused features by a name that the documents have too."""


def refused(text: Any, observed: Mapping[str, Any], tokens: int | None = None) -> list[Refused]:
    """Return the refused features of a model. A sliding window that no text exceeds is full attention.

    Args:
        text: the model's text config, with its keys as attributes.
        observed: features by their names in REFUSED, with whether the caller finds them in what it knows in
            addition to the config.
        tokens: tokens of the longest text that the model reads, None if nothing bounds it.
    """
    assert observed.keys() <= REFUSED.keys()
    return [feature for name, feature in REFUSED.items() if observed.get(name) or feature.declared(text, tokens)]


def unserved(text: Any, features: Mapping[str, Any], tokens: int | None) -> list[str]:
    """Return the refused features of a model of transformers, as errors call them. See :func:`refused`.

    Layers of kinds other than LOCAL_LAYERS and full attention are among them. An engine finds those by their state
    instead.

    Args:
        text: as in :func:`refused`.
        features: the features that the caller sees, see :func:`refused`.
        tokens: as in :func:`refused`.
    """
    features = {"recurrent": not {FULL, *LOCAL_LAYERS}.issuperset(layer_kinds(text, tokens=tokens)), **features}
    return list(dict.fromkeys(feature.feature for feature in refused(text, features, tokens)))


EQUAL, UNTESTED = "equal to the oracle", "served, untested"
"""States of families that are served: tests compare the tokens of an engine with the oracle's, or nothing does."""


@dataclass(frozen=True)
class Family:
    """Models that are served alike, or refused for one reason.

    Attributes:
        name: the family, as its authors call it.
        model_types: model types of the text configs.
        architecture: vLLM's class of the language model.
        layers: what a policy acts on.
        state: EQUAL, UNTESTED, or the feature in REFUSED, or another reason, for which it is refused.
        model: a model on the hub, or nothing.
        options: options of ``vllm serve`` that the model needs.
        limit: what an engine does not serve, or nothing.
        read: where stock vLLM cannot run the family on a CPU, what was read instead.
    """

    name: str
    model_types: tuple[str, ...]
    architecture: str
    layers: str
    state: str
    model: str = ""
    options: str = ""
    limit: str = ""
    read: str = ""

    @property
    def served(self) -> bool:
        """True if an engine serves it with a policy."""
        return self.state in (EQUAL, UNTESTED)

    @property
    def command(self) -> str:
        """A command that serves a model of the family with a policy."""
        options = f" {self.options}" if self.options else ""
        return f"vllm serve {self.model}{options} --kv-policy streaming-llm --kv-budget 2048"


FAMILIES = (
    Family("Gemma 3", ("gemma3_text",), "Gemma3ForCausalLM", "one layer of six (the others have windows)", EQUAL,
           "google/gemma-3-27b-it", "--language-model-only"),
    Family("OLMo 3", ("olmo3",), "Olmo3ForCausalLM", "one layer of four (the others have windows)", EQUAL,
           "allenai/Olmo-3-7B-Think"),
    Family("EXAONE 4", ("exaone4",), "Exaone4ForCausalLM", "one layer of four (the others have windows)", EQUAL,
           "LGAI-EXAONE/EXAONE-4.0-32B"),
    Family("Llama 4", ("llama4_text",), "Llama4ForCausalLM", "one layer of four (the others have chunks)", EQUAL,
           "meta-llama/Llama-4-Scout-17B-16E-Instruct"),
    Family("gpt-oss", ("gpt_oss",), "GptOssForCausalLM", "every second layer (the others have windows)", EQUAL,
           "openai/gpt-oss-20b"),
    Family("Granite with windows and sinks", ("granite_swa",), "GraniteSWAForCausalLM",
           "one layer of four (the others have windows)", EQUAL),
    Family("Nemotron-H", ("nemotron_h",), "NemotronHForCausalLM",
           "the attention layers (the others have Mamba2 states, or an MLP)", EQUAL, "nvidia/Nemotron-H-8B-Base-8K"),
    Family("Granite 4 hybrid", ("granitemoehybrid",), "GraniteMoeHybridForCausalLM",
           "the attention layers (the others have Mamba2 states)", EQUAL, "ibm-granite/granite-4.0-h-small"),
    Family("Falcon-H1", ("falcon_h1",), "FalconH1ForCausalLM",
           "the attention of every layer, each of which has a Mamba2 state too", EQUAL, "tiiuae/Falcon-H1-34B-Instruct"),
    Family("Qwen3-Next", ("qwen3_next",), "Qwen3NextForCausalLM", "one layer of four (the others have a gated delta net)",
           EQUAL, "Qwen/Qwen3-Next-80B-A3B-Instruct", limit="other dtypes than bfloat16 on a CPU"),
    Family("Qwen3.5", ("qwen3_5_text",), "Qwen3_5ForConditionalGeneration",
           "one layer of four (the others have a gated delta net)", EQUAL, "Qwen/Qwen3.5-27B",
           limit="other dtypes than bfloat16 on a CPU"),
    Family("Qwen3.5 with experts", ("qwen3_5_moe_text",), "Qwen3_5MoeForConditionalGeneration",
           "one layer of four (the others have a gated delta net)", UNTESTED, "Qwen/Qwen3.5-35B-A3B",
           limit="other dtypes than bfloat16 on a CPU"),
    Family("Gemma 4", ("gemma4_text",), "Gemma4ForCausalLM", "one layer of six, with heads of 512 (the others have windows)",
           EQUAL, "google/gemma-4-31B-it", "--language-model-only"),
    Family("Cohere 2", ("cohere2",), "Cohere2ForCausalLM", "one layer of four (the others have windows)", UNTESTED,
           "CohereLabs/c4ai-command-r7b-12-2024"),
    Family("Ministral", ("ministral",), "MistralForCausalLM", "the layers of kind `full_attention`", UNTESTED,
           "mistralai/Ministral-8B-Instruct-2410"),
    Family("Qwen2 and Qwen3 with windows", ("qwen2", "qwen3"), "Qwen3ForCausalLM", "the layers of kind `full_attention`",
           UNTESTED),
    Family("Mistral 7B v0.1, Phi-3 with a window", ("mistral", "phi3"), "MistralForCausalLM", "all", UNTESTED,
           "mistralai/Mistral-7B-v0.1", "--max-model-len 4096", "texts beyond the window"),
    Family("LFM2", ("lfm2",), "Lfm2ForCausalLM", "-", "recurrent", "LiquidAI/LFM2-2.6B",
           read="On a CPU vLLM 0.32's op rotates its queries and keys wrongly, and log-probabilities are off by up to 1.6. Read "
           "instead: `lfm2.py` and this op"),
    Family("Jamba, Bamba, Zamba2 and others", ("jamba",), "JambaForCausalLM", "-", "recurrent", "ai21labs/AI21-Jamba-Mini-1.7",
           read="On a CPU vLLM 0.32 has no kernel that reads Jamba's prompts (`selective_scan_fwd`). Read instead: `jamba.py`, "
           "whose attention does not rotate"),
    Family("OLMo hybrid", ("olmo_hybrid",), "OlmoHybridForCausalLM", "-", "recurrent",
           read="On a CPU vLLM 0.32 has Triton's kernels alone for its gated delta net. Read instead: `olmo_hybrid.py`"),
    Family("Gemma 2", ("gemma2",), "Gemma2ForCausalLM", "-", "soft-capping", "google/gemma-2-9b-it"),
    Family("Gemma 3n, Gemma 4 E2B and E4B", ("gemma3n_text",), "Gemma3nForCausalLM", "-", "shared KV layers",
           "google/gemma-3n-E4B-it"),
)  # fmt: skip
"""Families whose layers are of several kinds, those that are refused last. docs/models.md has them (``docs/models.py``)."""


def family_of(text: Any) -> Family | None:
    """Return the family of a model, None if the table does not have it. ``text`` is its text config."""
    kind = getattr(text, "model_type", None)
    return next((family for family in FAMILIES if kind in family.model_types), None)
