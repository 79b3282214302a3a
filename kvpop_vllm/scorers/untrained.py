"""``kvpop init-scorer``: an untrained scorer for a model.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from pathlib import Path

import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.model_shape import folder_sizes
from kvpop_vllm.scorers import ScorerConfig, build, make_config
from kvpop_vllm.scorers.checkpoint import CONFIG_NAME, write_scorer


def init_scorer(model: str | Path, out: str | Path, *, seed: int = 0, **options) -> ScorerConfig:
    """Write an adapter folder with freshly initialised scorers, and return its config.

    Before training their policy is the sliding window.

    Args:
        model: Hugging Face folder.
        out: folder to write.
        seed: seed of the initial parameters.
        options: keys of the config. ``scorer`` defaults to mlstm, ``sinks``, ``window``,
            ``topk`` to 4, 256 and 764 (B = 1,024).
    """
    if (Path(out) / CONFIG_NAME).exists():
        raise ConfigError(f"{out} holds a scorer already: choose another folder")
    defaults = {"scorer": "mlstm", "sinks": 4, "window": 256, "topk": 764}
    config = make_config(folder_sizes(model), source="init-scorer options", **(defaults | options))
    # the caller's random state stays as it is
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [dict(build(config).state_dict()) for _ in range(config.num_layers)]
    write_scorer(out, config, layers)
    return config
