"""Folders of KVzap's gates as their authors publish them: what ``KVzapModel`` of kvpress writes.

``config.json`` has ``model_type: kvzap``, ``input_dim`` E, ``output_dim`` H, ``hidden_dim`` M (null for a linear layer)
and ``n_modules``, the number of layers. Safetensors hold ``layers.{i}.weight`` and ``bias``, or the same of
``layers.{i}.0`` and ``layers.{i}.2``. Nothing says sinks, window, budget or threshold, nor the model that the gates are
for: the first three have the defaults of this module, and the last is not compared beyond its sizes.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import re
from pathlib import Path

import torch
from safetensors import safe_open

from kvpop_vllm.config import DEFAULT_SINKS, ConfigError
from kvpop_vllm.files import read_json
from kvpop_vllm.schemas import Schema, integer, optional
from kvpop_vllm.scorers.kvzap import KVzapConfig
from kvpop_vllm.tensor_files import reading

WINDOW, BUDGET = 128, 4096
"""Window of the paper, and B. The paper bounds no cache."""
CONFIG = "config.json"
_ADVICE = "give a folder that KVzapModel of kvpress wrote"
_SCHEMA = Schema("scorer", advice=f": {_ADVICE}")
_RULES = {name: integer(1) for name in ("input_dim", "output_dim", "n_modules")} | {"hidden_dim": optional(integer(1))}
_LAYERS = {"0.": "fc1.", "2.": "fc2."}
"""Parts of an MLP's tensor names, and those of the scorer format."""


def is_kvzap(folder: str | Path) -> bool:
    """Return whether a folder's ``config.json`` is that of published gates of KVzap."""
    path = Path(folder) / CONFIG
    raw = read_json(path, _ADVICE) if path.is_file() else None
    return isinstance(raw, dict) and raw.get("model_type") == KVzapConfig.scorer


def read_kvzap_config(folder: str | Path) -> KVzapConfig:
    """Return the config of published gates."""
    raw = read_json(Path(folder) / CONFIG, _ADVICE)
    values = {name: raw.get(name) for name in _RULES}
    _SCHEMA.check(values, _RULES, str(Path(folder) / CONFIG))
    return KVzapConfig(
        model_type=None,
        num_layers=values["n_modules"],
        num_kv_heads=values["output_dim"],
        head_dim=None,
        hidden_size=values["input_dim"],
        sinks=DEFAULT_SINKS,
        window=WINDOW,
        topk=BUDGET - DEFAULT_SINKS - WINDOW,
        linear=values["hidden_dim"] is None,
    )


def read_kvzap_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """Return the tensors of published gates by their names in the scorer format."""
    folder, width = Path(folder), read_json(Path(folder) / CONFIG, _ADVICE).get("hidden_dim")
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with reading(path), safe_open(path, "pt") as file:
            for name in file.keys():
                # a tensor may be there under both spellings
                if _name(name) in tensors:
                    raise ConfigError(f"{folder}: {path.name} holds {_name(name)} a second time: {_ADVICE}")
                tensors[_name(name)] = file.get_tensor(name)
    if not tensors:
        raise ConfigError(f"{folder} holds no tensors in safetensors files: {_ADVICE}")
    for name, tensor in tensors.items():
        if name.endswith(".fc1.weight") and len(tensor) != width:
            raise ConfigError(f"{folder}: {name} has {len(tensor)} rows and hidden_dim is {width}: {_ADVICE}")
    return tensors


def _name(name: str) -> str:
    """Return the name of a published tensor in the scorer format. Another name is returned as it is."""
    return re.sub(r"(?<=^layers\.)(\d+)\.([02]\.)(?=(weight|bias)$)", lambda m: f"{m[1]}.{_LAYERS[m[2]]}", name)
