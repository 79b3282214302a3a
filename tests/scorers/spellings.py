"""Full Qwen3 checkpoints with an mLSTM scorer as other authors might write them; no code is shared with the reader.

Four spellings take their names from public code: ``xlstm`` 2.0.6 (``blocks/mlstm``: ``LinearHeadwiseExpand``,
``MultiHeadLayerNorm`` with residual weights; ``xlstm_large``: ``q``, ``igate_preact``, ``gate_soft_cap``),
``mlstm_kernels`` 2.0.6 (``matQ``, ``vecI``) and ``flash-linear-attention`` 0.6.0 (``layers/hgrn2.py``: ``i_proj``,
``f_proj``, ``g_norm``; ``layers/linear_attn.py``: ``feature_map``).
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from distill.byte_tokenizer import byte_tokenizer
from safetensors.torch import load_file, save_file

from kvpop_vllm.testing import write_random_scorer, write_tiny_model

LAYERS, HEADS, DIM = 2, 3, 32
BUDGET = {"sinks": 4, "window": 16, "topk": 44}
CODE = "import pathlib\npathlib.Path({trace!r}).write_text('ran')\n"
"""Body of every Python file in a checkpoint's folder."""
CODE_FILES = (
    "modeling_qwen3kvpop.py", "configuration_qwen3kvpop.py", "cache_kvpop.py", "check_generation.py", "conftest.py",
    "custom_generate/generate.py", "__init__.py", "setup.py", "sitecustomize.py", "tokenization_qwen3kvpop.py",
    "processing_qwen3kvpop.py", "image_processing_qwen3kvpop.py", "generation_qwen3kvpop.py",
)  # fmt: skip
CODE_CONFIGS = {
    "tokenizer_config.json": {"AutoTokenizer": ["tokenization_qwen3kvpop.Tokenizer", None]},
    "processor_config.json": {"AutoProcessor": "processing_qwen3kvpop.Processor"},
    "preprocessor_config.json": {"AutoImageProcessor": "image_processing_qwen3kvpop.ImageProcessor"},
    "generation_config.json": {"GenerationConfig": "generation_qwen3kvpop.Config"},
}
"""``auto_map`` of each other file than ``config.json`` that may name code."""
TEMPLATE = "{{% set run = cycler.__init__.__globals__.os.system('touch {trace}') %}}{{{{ messages }}}}"
"""Chat template that runs a command where nothing forbids it."""

Tensors = dict[str, torch.Tensor]


@dataclass
class Spelling:
    """One way to write a checkpoint.

    Attributes:
        write: takes a layer's number and its tensors in our format, and returns tensors by their names.
        config: keys added to ``config.json``.
        values: options of the random scorer.
        join: takes all layers' tensors of ``write``, and returns those of the file.
        ours: changes a layer's tensors in our format to what the spelling means by them.
        dtype: dtype of the scorer's tensors.
        shards: number of files.
        exact: False where a decay is stored as another number.
    """

    write: Callable[[int, Tensors], Tensors]
    config: dict
    values: dict = field(default_factory=dict)
    join: Callable[[Tensors], Tensors] = lambda tensors: tensors
    ours: Callable[[Tensors], Tensors] = lambda tensors: tensors
    dtype: torch.dtype = torch.float32
    shards: int = 1
    exact: bool = True


def named(kind: str = "qwen3kvpop", architecture: str = "Qwen3KVpopForCausalLM", **keys) -> dict:
    """Return the names in a config, with code that must not run."""
    code = {"AutoConfig": "configuration_qwen3kvpop.Config", "AutoModelForCausalLM": "modeling_qwen3kvpop.Model"}
    return {"model_type": kind, "architectures": [architecture], "auto_map": code, **keys}


def flat(weight: torch.Tensor) -> torch.Tensor:
    """Return ``[H, in, out]`` as the weight of one linear layer, ``[H * out, in]``."""
    return weight.transpose(1, 2).reshape(-1, weight.shape[1])


def _gamma(logit: torch.Tensor, low: float = 0.99, high: float = 0.9999) -> torch.Tensor:
    low, high = math.log(low), math.log(high)
    return torch.exp(low + torch.sigmoid(logit.double()) * (high - low)).float()


def _xlstm(i: int, t: Tensors) -> Tensors:
    names = {f"{part}_proj.weight": t[f"{part}_proj"].transpose(1, 2) for part in "qkv"}
    names |= {f"mlstm_cell.{name}": t[name] for name in ("igate.weight", "igate.bias", "fgate.weight", "fgate.bias")}
    names |= {"mlstm_cell.outnorm.weight": (t["norm.weight"] - 1).reshape(-1), "score_head.weight": t["out.weight"]}
    names |= {"score_head.bias": t["out.bias"], "decay_logit": t["decay_logit"]}
    return {f"model.layers.{i}.self_attn.importance_scorer.{name}": tensor for name, tensor in names.items()}


def _centred(t: Tensors) -> Tensors:
    return t | {"v_proj": t["v_proj"] - t["v_proj"].mean(-1, keepdim=True)}


def _xlstm_large(i: int, t: Tensors) -> Tensors:
    names = {f"{part}.weight": flat(t[f"{part}_proj"]) for part in "qkv"}
    names |= {f"{gate}_preact.{end}": t[f"{gate}.{end}"] for gate in ("igate", "fgate") for end in ("weight", "bias")}
    names |= {"out_proj.weight": t["out.weight"].reshape(-1), "out_proj.bias": t["out.bias"]}
    names["log_gamma"] = _gamma(t["decay_logit"]).log()
    return {f"model.layers.{i}.mlstm_layer.{name}": tensor for name, tensor in names.items()}


def _kernels(i: int, t: Tensors) -> Tensors:
    names = {f"mat{part}": t[f"{part.lower()}_proj"] for part in "QKV"}
    names |= {"vecI": t["igate.weight"], "vecF": t["fgate.weight"], "vecI_bias": t["igate.bias"]}
    names |= {"vecF_bias": t["fgate.bias"], "score.weight": t["out.weight"].unsqueeze(1), "alpha": t["decay_logit"]}
    return {f"model.layers.{i}.self_attn.kvpop_mlstm.{name}": tensor for name, tensor in names.items()}


def _fla(i: int, t: Tensors) -> Tensors:
    names = {f"{part}_proj.weight": flat(t[f"{part}_proj"]) for part in "qkv"}
    for ours, theirs in (("igate", "i_proj"), ("fgate", "f_proj")):
        names |= {f"{theirs}.{end}": t[f"{ours}.{end}"] for end in ("weight", "bias")}
    names |= {"g_norm.weight": t["norm.weight"][0], "o_proj.weight": t["out.weight"], "o_proj.bias": t["out.bias"]}
    names["gamma"] = _gamma(t["decay_logit"])
    return {f"model.layers.{i}.retention.{name}": tensor for name, tensor in names.items()}


def _shared_norm(t: Tensors) -> Tensors:
    return t | {"norm.weight": t["norm.weight"][:1].expand(len(t["norm.weight"]), -1).contiguous()}


def _stacked_names(i: int, t: Tensors) -> Tensors:
    names = {"W_q": t["q_proj"], "W_k": t["k_proj"], "W_v": t["v_proj"], "w_i": t["igate.weight"]}
    names |= {"w_f": t["fgate.weight"], "b_i": t["igate.bias"], "b_f": t["fgate.bias"], "a": t["out.weight"]}
    names |= {"b": t["out.bias"], "decay_alpha": t["decay_logit"]}
    return {f"{name}/{i}": tensor for name, tensor in names.items()}


def _over_layers(tensors: Tensors) -> Tensors:
    names = dict.fromkeys(name.split("/")[0] for name in tensors)
    return {f"kvpop_scorers.{name}": torch.stack([tensors[f"{name}/{i}"] for i in range(LAYERS)]) for name in names}


def _heads(i: int, t: Tensors) -> Tensors:
    names = {}
    for h in range(len(t["decay_logit"])):
        of_head = {"query.weight": t["q_proj"][h].T, "key.weight": t["k_proj"][h].T, "value.weight": t["v_proj"][h].T}
        of_head |= {"input_gate.weight": t["igate.weight"][h : h + 1], "input_gate.bias": t["igate.bias"][h : h + 1]}
        of_head |= {"forget_gate.weight": t["fgate.weight"][h : h + 1], "forget_gate.bias": t["fgate.bias"][h : h + 1]}
        of_head |= {"readout.weight": t["out.weight"][h], "readout.bias": t["out.bias"][h : h + 1]}
        of_head["decay_logit"] = t["decay_logit"][h]
        names |= {f"model.layers.{i}.self_attn.scorers.{h}.{name}": tensor for name, tensor in of_head.items()}
    return names


def _camel(i: int, t: Tensors) -> Tensors:
    names = {"Wq": t["q_proj"], "Wk": t["k_proj"], "Wi": t["igate.weight"], "Wf": t["fgate.weight"].unsqueeze(-1)}
    names |= {
        "bi": t["igate.bias"],
        "bf": t["fgate.bias"],
        "scoreProj.weight": t["out.weight"],
        "skip": t["skip.weight"],
    }
    names["decay"] = t["decay_logit"]
    return {f"model.layers.{i}.self_attn.KVpopScorer.{name}": tensor for name, tensor in names.items()}


def _no_score_bias(t: Tensors) -> Tensors:
    return t | {"out.bias": torch.zeros_like(t["out.bias"])}


def _fused(i: int, t: Tensors) -> Tensors:
    names = {"qkv.weight": torch.cat([t["q_proj"], t["k_proj"], t["v_proj"]], -1)}
    names |= {"if_gate.weight": torch.stack([t["igate.weight"], t["fgate.weight"]], 1)}
    names |= {"if_gate.bias": torch.stack([t["igate.bias"], t["fgate.bias"]], 1), "score.weight": t["out.weight"].T}
    names |= {"score.bias": t["out.bias"], "decay.weight": t["decay_logit"]}
    return {f"model.layers.{i}.kv_retention.{name}": tensor for name, tensor in names.items()}


SPELLINGS = {
    "xlstm": Spelling(
        _xlstm,
        named(kvpop_config={"num_sinks": 4, "window_size": 16, "top_k": 44, "budget": 64 + 12, "decay_min": 0.99, "decay_max": 0.9999, "norm_type": "layernorm", "lr": 1e-3}),
        {"norm": True, "value_width": 24}, ours=_centred,
    ),
    "xlstm_large": Spelling(
        _xlstm_large,
        named("qwen3-kvpop", kvpop={"sink_size": 4, "protected_window": 16, "budget": 64, "state_tokens": 0, "gate_soft_cap": 15.0}),
        {"gate_softcap": 15.0, "value_width": 24}, exact=False,
    ),
    "mlstm_kernels": Spelling(
        _kernels,
        named("Qwen3_KVPop", kvpop_num_sink_tokens=4, kvpop_window=16, kvpop_topk=44, decay_range=[0.99, 0.9999]),
        {"value_width": 24}, ours=_no_score_bias, dtype=torch.bfloat16,
    ),
    "fla": Spelling(
        _fla,
        named(architecture="Qwen3KvPopModelForCausalLM", retention={"sinks": 4, "recent_size": 16, "longrange_tokens": 44, "scorer": {"feature_map": "hedgehog", "norm": "rmsnorm"}}),
        {"norm": True, "value_width": 24}, ours=_shared_norm, exact=False,
    ),
    "stacked": Spelling(
        _stacked_names,
        named("kvpop_qwen3", sink_size=4, protected_window=16, kvpop_top_k=44, gamma_min=0.99, gamma_max=0.9999, kv_budget=64),
        {"value_width": 24}, join=_over_layers,
    ),
    "heads": Spelling(
        _heads,
        named("qwen3", "Qwen3KVpopForCausalLM", eviction={"s": 4, "w": 16, "k": 44, "decay": {"min_decay": 0.99, "max_decay": 0.9999}}),
        {"value_width": 24}, dtype=torch.float16, shards=3,
    ),
    "camel": Spelling(
        _camel,
        named("qwen3_kvpop", kvpop_cfg={"numSinks": 4, "windowSize": 16, "topK": 44, "featureMap": "softmax", "useSkip": True, "decayType": "logit", "decayMin": 0.99, "decayMax": 0.9999}),
        {"feature_map": "softmax", "skip": True, "v_proj": False}, ours=_no_score_bias,
    ),
    "fused": Spelling(
        _fused,
        named("qwen3.kvpop", sliding_window=16, use_sliding_window=False, num_sinks=4, kvpop={"topk": 64, "cache_size": 64, "decay_min": 0.99, "decay_max": 0.9999, "decay_kind": "sigmoid"}),
        {"value_width": 24}, dtype=torch.bfloat16,
    ),
}  # fmt: skip


def write_spelling(root: Path, spelling: Spelling, *, heads: int = HEADS, vocab: int = 256) -> tuple[Path, Path, Path]:
    """Write a base model, the same scorer in our format, and a full checkpoint; return the three folders.

    The folder of the checkpoint has code, which leaves the file ``trace`` in ``root`` if it runs.
    """
    sizes = {"layers": LAYERS, "q_heads": 2 * heads, "kv_heads": heads, "head_dim": DIM, "vocab": vocab}
    base = write_tiny_model(root / "base", "qwen3", **sizes)
    adapter = write_random_scorer(root / "ours", base, "mlstm", **BUDGET, **spelling.values)
    file = adapter / "kvpop_scorer.safetensors"
    values = {name: tensor.to(spelling.dtype).float() for name, tensor in load_file(file).items()}
    written, rounded = {}, {}
    for i in range(LAYERS):
        layer = {name.split(".", 2)[2]: t for name, t in values.items() if name.startswith(f"layers.{i}.")}
        written |= spelling.write(i, layer)
        rounded |= {f"layers.{i}.{name}": t.contiguous() for name, t in spelling.ours(layer).items()}
    save_file(rounded, file)
    full = root / "full"
    full.mkdir()
    scorer = {name: t.to(spelling.dtype).contiguous() for name, t in spelling.join(written).items()}
    _write_shards(full, load_file(base / "model.safetensors") | scorer, spelling.shards)
    config = json.loads((base / "config.json").read_text()) | spelling.config
    (full / "config.json").write_text(json.dumps(config))
    write_code(full, root / "trace")
    return base, adapter, full


def write_code(folder: Path, trace: Path) -> None:
    """Write Python files into a folder that write the file ``trace`` when they run."""
    for name in CODE_FILES:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(CODE.format(trace=str(trace)))


def write_tokenizer(folder: Path, trace: Path) -> None:
    """Write a tokenizer into a folder, and configs and a chat template that name code or hold some; see `write_code`."""
    byte_tokenizer(template=None).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.format(trace=trace))
    for name, auto_map in CODE_CONFIGS.items():
        content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(content | {"auto_map": auto_map}))


def _write_shards(folder: Path, tensors: Tensors, shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, weight_map = sorted(tensors), {}
    for n in range(shards):
        file = f"model-{n + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[n::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
