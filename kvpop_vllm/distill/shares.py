"""Shares of heads that a run trains with."""

from __future__ import annotations

from pathlib import Path

from kvpop_vllm.calibration.shares import NAME, read_calibration
from kvpop_vllm.config import ConfigError
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.scorers.checkpoint import CONFIG_NAME


def read_shares(source: str, model: str | Path, length: int) -> list[list[float]]:
    """Return the measured shares ``[layers][H]`` of the heads of a model.

    Args:
        source: folder of ``kvpop calibrate``, file of shares, or folder of a scorer that has them.
        model: folder of the model.
        length: S, tokens of a row.

    Raises:
        ConfigError: the source has no shares, or those of another model.
    """
    config = Path(source) / CONFIG_NAME
    file = config if config.is_file() and not (Path(source) / NAME).is_file() else Path(source)
    try:
        calibration = read_calibration(str(file))
        calibration.check_model(ModelShape.in_context(model, length), str(file))
    except ConfigError as error:
        raise ConfigError(str(error).replace("--kv-calibration", "--shares")) from None
    if calibration.shares is None:
        raise ConfigError(f"--shares {source}: no shares were better than equal ones: leave --shares out")
    return [list(map(float, row)) for row in calibration.shares]
