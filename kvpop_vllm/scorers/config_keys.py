"""Reader of the keys of a published checkpoint's ``config.json`` that are of its scorer, under names that nobody has fixed.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvpop_vllm.config import MAX_BUDGET, ConfigError

_PREFIXES = re.compile(r"^(kvpop|scorer|retention|cache|kv|mlstm|importance)+(?=.)")
KEYS = {
    "sinks": r"(num|n|number|numberof)?(attention|attn)?sinks?(size|tokens?|len|length|count|window)?",
    "window": r"(num|n)?(protected|local|recent|recency|sliding|attention)?window(size|len|length|tokens|protected)?|recent(size|tokens|budget)|protected(size|tokens)",
    "topk": r"(num|n)?(longrange|longterm)?topk(budget|size|tokens|slots|entries)?|(num|n)?longrange(tokens|slots|size|budget|entries)?",
    "budget": r"(total|token|max|eval|memory)?budget(size|tokens|total|perhead)?|(max)?size|(num|total|max)?slots|capacity",
    "state": r"(state|memory)(entries|tokens|slots|size|budget)",
    "decay_min": r"(decay|gamma)min(imum)?|min(imum)?(decay|gamma)",
    "decay_max": r"(decay|gamma)max(imum)?|max(imum)?(decay|gamma)",
    "decay_step": r"decay(step|stepsize|every|interval|stride|n)",
    "decay_range": r"(decay|gamma)(range|bounds|limits|interval)",
    "decay": r"(decay|gamma)(param|parametrization|parameterization|type|kind|form|mode|space)",
    "gamma": r"decay|gamma|decay(factor|rate|value)",
    "feature_map": r"(qk|kernel|qkernel)?featuremap(type|name|kind|fn)?|phi",
    "gate_softcap": r"(gates?|logits?)?softcap(ping)?(value|gates?)?",
    "norm": r"(use|with|has)?(head|headwise|out|output|multihead|readout|score|h)?norm(alization|alize|alise)?(type|kind)?",
    "skip": r"(use|with|has)?(input|score)?(skip|residual)(connection|score)?",
    "delayed": r"(use|is|with)?delay(ed)?(scoring|readout|read|scores?)?",
    "value_projection": r"(use|with|has)?v(alue)?proj(ection)?",
    "activation": r"(score|readout|out|output|head)?(act|activation|actfn|activationfn|activationfunction)",
}  # fmt: skip
"""Pattern of the names of each key, in lower case without separators and prefixes such as ``kvpop``."""
_SCORER = re.compile(
    r"(.*\.)?(kvpop|kv|retention|importance|mlstm)*scorer(type|kind|name|arch|architecture|class)?"
    r"|(.*\.)?[^.]*(scorer|mlstm)\.(type|kind|name|arch|architecture|class)"
)
"""Pattern of the path of the key that names the kind of scorer."""
_ELSEWHERE = ("generation_config",)
"""Objects whose keys are of other things."""
_FEATURE_MAPS = {"hedgehog": "hedgehog", "hedgehogfeaturemap": "hedgehog", "softmax": "softmax", "softmaxfeaturemap": "softmax"}  # fmt: skip
_DECAYS = {
    "logit": "logit", "sigmoid": "logit", "alpha": "logit", "log": "log", "loggamma": "log", "logdecay": "log",
    "gamma": "gamma", "raw": "gamma", "linear": "gamma", "value": "gamma", "direct": "gamma",
}  # fmt: skip
_NORMS = {"rms": "rms", "rmsnorm": "rms", "headwiserms": "rms", "layer": "layer", "layernorm": "layer", "ln": "layer"}
DEEPEST = 8
"""Levels of nested objects that are searched."""
DECAY_RANGE = 0.999, 0.999999
"""Range of the decay where the config says none (KVpop, table 3)."""


@dataclass
class Facts:
    """Values that a config says, None where it says nothing.

    Attributes:
        values: checked value of each key of :data:`KEYS`.
        names: name of each key in the config.
        unread: names of keys that nothing was read from, with their values.
        findings: values that disagree, and values that are not served. A map decides in place of them.
    """

    values: dict[str, object] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    unread: dict[str, object] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    def __getitem__(self, key: str):
        """Return the value of a key, or None."""
        return self.values.get(key)


def facts_of(config: Mapping, model_keys: frozenset[str], source: str) -> Facts:
    """Return what a ``config.json`` says about its scorer, nested or flat.

    Args:
        config: contents of ``config.json``.
        model_keys: its keys that are the base model's.
        source: name of the file in errors and findings.
    """
    facts = Facts()
    for name, value in _scalars(config, model_keys):
        key = _key_of(name)
        try:
            read = None if key is None or value is None else _read(key, value, f"{source}: {name}")
        except ConfigError as error:
            facts.findings.append(str(error))
            continue
        if read is None:
            facts.unread[name] = value
        elif key not in facts.values:
            facts.values[key], facts.names[key] = read, name
        elif facts.values[key] != read:
            first = facts.names[key]
            facts.findings.append(
                f"{source}: {first} is {facts.values[key]!r} and {name} is {read!r}: one of the two is wrong"
            )
    return facts


def _key_of(name: str) -> str | None:
    """Return the key of :data:`KEYS` that a name in the config stands for, None if there is none."""
    # num_sinks, numSinks and num-sinks are one name
    path = re.sub(r"[^a-z0-9.]", "", name.lower())
    if _SCORER.fullmatch(path):
        return "scorer"
    stripped = _PREFIXES.sub("", path.rsplit(".", 1)[-1])
    # at the top level these may be the model's own: top_k is a sampling parameter of transformers
    if "." not in name and name in ("top_k", "cache_size"):
        return None
    # a letter is a key inside of an object only
    short = {"k": "topk", "w": "window", "s": "sinks", "b": "budget"}.get(stripped if "." in name else "")
    return short or next((key for key, names in KEYS.items() if re.fullmatch(names, stripped)), None)


def _scalars(config: Mapping, model_keys: frozenset[str], path: str = "") -> Iterator[tuple[str, object]]:
    for name, value in config.items():
        name = name if name.isprintable() else repr(name)
        # keys of the base model say nothing about the scorer, but for a window that the base model does not use
        if (
            name in _ELSEWHERE
            or not path
            and name in model_keys
            and not (name == "sliding_window" and not config.get("use_sliding_window"))
        ):
            continue
        if isinstance(value, Mapping) and path.count(".") < DEEPEST:
            yield from _scalars(value, model_keys, f"{path}{name}.")
        elif not (name == "sliding_window" and value is None):
            yield f"{path}{name}", value


def _read(key: str, value: object, label: str):
    """Return a checked value, None if the key is of no use."""
    number = _is_number(value)
    if key in ("sinks", "window", "topk", "budget", "state", "decay_step"):
        if not number or value != int(value) or not 0 <= value <= MAX_BUDGET:
            raise ConfigError(f"{label} is {value!r}, which is no number of tokens: mend config.json")
        return int(value)
    if key in ("decay_min", "decay_max", "gamma"):
        if not number or not 0 < value <= 1:
            # the name may be that of another thing, whose value is not read
            if key == "gamma":
                return None
            raise ConfigError(f"{label} is {value!r}, and a decay is above 0 and at most 1: mend config.json")
        return float(value)
    if key == "decay_range":
        if not isinstance(value, list) or len(value) != 2 or not all(_is_number(end) and 0 < end <= 1 for end in value):
            raise ConfigError(f"{label} is {value!r}, which is not a range of decays: mend config.json")
        return tuple(map(float, value))
    if key == "gate_softcap":
        if value is False or value == 0:
            return 0.0
        if value is True or not number or value < 0:
            raise ConfigError(f"{label} is {value!r}, which is not a cap: give gate_softcap in a map (--kv-map)")
        return float(value)
    if key in ("skip", "value_projection"):
        return value if isinstance(value, bool) else None
    if key == "delayed":
        return value if isinstance(value, bool) else (bool(value) if number else None)
    if key == "norm":
        return (
            _served_value(_NORMS, value, label) if isinstance(value, str) and value.lower() != "none" else value is True
        )
    tables = {"feature_map": _FEATURE_MAPS, "decay": _DECAYS}
    if key in tables:
        return _served_value(tables[key], value, label)
    if key == "activation":
        return _served_value({"silu": "silu", "swish": "silu"}, value, label)
    if key == "scorer":
        return _served_value({"mlstm": "mlstm", "mlstmscorer": "mlstm", "delayedmlstm": "mlstm"}, value, label)
    # every key of KEYS is read above
    raise AssertionError(key)


def _is_number(value: object) -> bool:
    # bool is an int to isinstance(), and an int may be too large for a float
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _served_value(table: Mapping[str, str], value: object, label: str) -> str:
    served = table.get(re.sub(r"[^a-z0-9]", "", str(value).lower()))
    if served is None:
        raise ConfigError(f"{label} is {value!r}, and {', '.join(sorted(set(table.values())))} alone can be served")
    return served


def budgets_of(facts: Facts, state_entries: int, source: str) -> list[dict[str, int | None]]:
    """Return s, w and k, each None if the config does not say it, in each way in which its numbers can be read.

    ``B = s + w + k``. A budget, or a number of long-range tokens, may also count the sinks, the window or the state. A
    budget alone does not say whether it counts the state.

    Args:
        facts: what the config says.
        state_entries: tokens whose keys and values take as many numbers as the state.
        source: name of the file in errors.
    """
    sinks, window, topk, budget = (facts[key] for key in ("sinks", "window", "topk", "budget"))
    if window == 0:
        raise ConfigError(f"{source}: {facts.names['window']} is 0, and a window holds one token at least")
    if sinks is None or window is None or budget is None:
        return [{"sinks": sinks, "window": window, "topk": topk}]
    protected = sinks + window
    if topk is None:
        # where no key says whether the budget counts the state, both are readings
        states = (0, state_entries) if facts["state"] is None else (facts["state"],)
        if budget < protected + states[0]:
            raise ConfigError(f"{source}: {facts.names['budget']} is {budget}, less than {protected} sinks and window")
        numbers = (budget - protected - state for state in dict.fromkeys(states) if budget >= protected + state)
        return [{"sinks": sinks, "window": window, "topk": k} for k in numbers]
    states = {0, state_entries, facts["state"] or 0}
    for k in (topk, topk - protected):  # a number of long-range tokens may count the protected ones
        # budget == topk: both keys say one number, of which k is what the protected tokens leave
        if k >= 0 and (budget - protected - k in states or budget == topk != k):
            return [{"sinks": sinks, "window": window, "topk": k}]
    raise ConfigError(
        f"{source}: {facts.names['budget']} is {budget}, and {sinks} sinks, window {window} and {facts.names['topk']} {topk} make"
        f" {protected + topk}: one of them is wrong"
    )
