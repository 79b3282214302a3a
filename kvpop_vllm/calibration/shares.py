"""``shares.json`` of a calibration folder: how layers and heads share the slots, windows, and a recommendation.

``kvpop calibrate`` writes it, and every policy that takes a calibration reads it. In its place a JSON file may hold
``{"shares": [layers][H]}`` alone, as the config of a scorer with shares does; other keys are ignored.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kvpop_vllm.config import AUTO, ConfigError, PolicySettings, check_head_shares
from kvpop_vllm.files import read_json, write_whole
from kvpop_vllm.schemas import TEXT, Schema, check_same_model, integer, one_of

NAME = "shares.json"
AGAIN = "run 'kvpop calibrate' again"
SCHEMA = Schema("calibration", advice=f": {AGAIN}")
UNITS = "uniform", "layer", "head"
"""Things that may differ in their share of the slots: none, layers, or heads too."""
UNCALIBRATED = "streaming-llm"
"""Policy that ``auto`` stands for without a calibration.

Of the policies that need nothing of a model and prefill in chunks it diverges least on text at B = 1,024, at equal
bytes (`docs/log/2026-W47-7.md`, all policies on one page, and `2026-W49-1.md`), and its prefill is the fastest.
"""
SIZES = "model_type", "num_layers", "num_kv_heads", "head_dim"


def _fractions(windows: object) -> bool:
    numbers = windows.values() if isinstance(windows, dict) else [None]
    # type(), since true and false are integers to isinstance()
    return all(type(value) in (int, float) and 0 < value <= 1 for value in numbers)


RULES = {
    **dict.fromkeys(("model_type", "policy"), TEXT),
    **dict.fromkeys((*SIZES[1:], "budget"), integer(1)),
    "rope": (lambda rope: isinstance(rope, dict | None), "an object or null"),
    "unit": one_of(UNITS),
    "decided_by": (lambda policy: isinstance(policy, str | None), "a policy's name or null"),
    "windows": (_fractions, "an object of numbers above 0 and at most 1"),
}


@dataclass(frozen=True)
class Calibration:
    """Contents of a ``shares.json``, or of a file of shares, which says nothing else about the model.

    Attributes:
        model_type: model type of the calibrated model, like all sizes None where a file of shares does not say it.
        num_layers: its layers with full attention, in most models all.
        num_kv_heads: its KV heads.
        head_dim: its head size.
        rope: its rope parameters (:func:`kvpop_vllm.rope.rope_of`), None if layers differ in them.
        unit: one of :data:`UNITS`.
        shares: ``[layers][H]``, long-range slots of each head over the mean, None if all are equal.
        windows: for each measured policy the window as a fraction of ``B - s``.
        policy: the recommended policy, None in a file of shares.
        budget: the recommended B in tokens, None in a file of shares.
        layers: indices in the model of the layers, empty if these are all, None where a file of shares does not say it.
        decided_by: policy that the shares were measured under, None where the file does not say it.
    """

    model_type: str | None
    num_layers: int | None
    num_kv_heads: int | None
    head_dim: int | None
    rope: dict | None
    unit: str
    shares: tuple[tuple[float, ...], ...] | None
    windows: dict[str, float]
    policy: str | None
    budget: int | None
    layers: tuple[int, ...] | None = ()
    decided_by: str | None = None

    def of_policy(self, policy: str) -> Calibration:
        """Return what a policy takes of the calibration: without shares if they are not for it (:func:`takes_shares`)."""
        return self if takes_shares(policy, self.decided_by) else replace(self, unit=UNITS[0], shares=None)

    def check_model(self, model, source: str) -> None:
        """Check that the calibration is of a model with this shape.

        Args:
            model: shape of a model, with the attributes :data:`SIZES`, ``rope`` and, if a policy acts on some layers
                only, ``layers``.
            source: name of the folder or file in errors.
        """
        compared = [name for name in (*SIZES, "rope") if None not in (getattr(self, name), getattr(model, name))]
        compared += [] if self.layers is None else ["layers"]
        ours, theirs = ({name: getattr(shape, name, ()) for name in compared} for shape in (self, model))
        # for advice only: texts may be shorter than the model's windows
        theirs["wide_window"] = getattr(model, "wide_window", None)
        check_same_model(ours, theirs, f"--kv-calibration {source}", "run 'kvpop calibrate' on this model")
        if self.shares is not None:
            check_head_shares(self.shares, model.num_layers, model.num_kv_heads, source)

    def write(self, folder: Path) -> None:
        """Write the file into a folder."""
        # a file without the key stands for all layers
        values = {name: value for name, value in asdict(self).items() if name != "layers" or value}
        write_whole(folder / NAME, json.dumps(SCHEMA.header | values) + "\n")


def takes_shares(policy: str, decided_by: str | None) -> bool:
    """Return whether a policy takes shares that were measured under another one.

    A window does not: with those of `h2o` it diverges four times as much as with equal ones (`docs/log/2026-W49-1.md`).
    """
    return policy != UNCALIBRATED or decided_by in (None, policy)


def shares_file(source: str) -> Path:
    """Return the file that holds the shares of a calibration's folder, or the file itself."""
    return Path(source) if Path(source).is_file() else Path(source) / NAME


def has_shares(source: str | None) -> bool:
    """Return whether a calibration is given and has shares."""
    return source is not None and shares_file(source).is_file()


def check_holds_any(source: str, statistics: str) -> None:
    """Check that a calibration's folder holds shares, or statistics of queries in a file of this name."""
    if not has_shares(source) and not (Path(source) / statistics).is_file():
        raise ConfigError(
            f"--calibration {source} has neither {NAME} nor {statistics}: give the folder of a finished 'kvpop calibrate'"
        )


def read_calibration(source: str) -> Calibration:
    """Return the contents of a folder's ``shares.json``, or of a file of shares."""
    path = shares_file(source)
    if not path.is_file():
        raise ConfigError(f"--kv-calibration {source} has no {NAME}: give the folder of a finished 'kvpop calibrate'")
    content = read_json(path, AGAIN)
    # a shares.json may have another name: its format tells it from a file of shares alone
    named = isinstance(content, dict) and content.get("format") == SCHEMA.header["format"]
    if (path.name != NAME and not named) or (isinstance(content, dict) and set(content) == {"shares"}):
        return _only_shares(content, path)
    content = SCHEMA.body(content, str(path))
    SCHEMA.check_keys(content, Calibration.__dataclass_fields__, ("layers", "decided_by"), str(path))
    content.setdefault("decided_by", None)
    SCHEMA.check(content, RULES, str(path))
    content["layers"] = tuple(SCHEMA.layers(content, str(path)))
    if content["unit"] == UNITS[0]:
        SCHEMA.check(content, {"shares": (lambda shares: shares is None, "null")}, str(path))
    else:
        check_head_shares(content["shares"], content["num_layers"], content["num_kv_heads"], str(path))
        content["shares"] = tuple(map(tuple, content["shares"]))
    return Calibration(**content)


def recommended(settings: PolicySettings) -> PolicySettings:
    """Return settings in which policy ``auto`` is replaced by the calibration's policy and, if none is set, budget.

    Without a calibration ``auto`` is :data:`UNCALIBRATED`.
    """
    if settings.policy != AUTO:
        return settings
    if settings.calibration is None:
        return replace(settings, policy=UNCALIBRATED)
    calibration = read_calibration(settings.calibration)
    if calibration.policy is None:
        raise ConfigError(
            f"--kv-calibration {settings.calibration} is a file of shares and recommends nothing: give --kv-policy the name of a"
            " policy, or --kv-calibration the folder of 'kvpop calibrate'"
        )
    # a size that the user sets comes before the recommended one
    sized = settings.budget is not None or settings.compression is not None
    return replace(settings, policy=calibration.policy, budget=settings.budget if sized else calibration.budget)


def _only_shares(content: object, path: Path) -> Calibration:
    """Return the contents of a file of shares, whose layers and heads are checked with the model."""
    if not isinstance(content, dict) or not content.get("shares"):
        raise ConfigError(f"{path} has no shares: give --kv-calibration the folder of 'kvpop calibrate'")
    sizes = {name: content.get(name) for name in SIZES}
    layers = tuple(SCHEMA.layers(content, str(path))) if sizes["num_layers"] is not None else None
    return Calibration(
        **sizes, layers=layers, rope=None, unit=UNITS[2], shares=content["shares"], windows={}, policy=None, budget=None
    )
