"""Shape of a model, read from its folder, from a config of transformers or from vLLM's.

Config files spell sizes in different ways, nest them, and leave out what equals a default.
``tests/engine/test_shapes.py`` holds :func:`shape_of` equal to the engine's shape.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvpop_vllm.config import RAISE_LENGTH, ConfigError
from kvpop_vllm.files import read_json
from kvpop_vllm.rope import model_rope
from kvpop_vllm.supported import (
    ARCHITECTURES,
    CACHE_SPECS,
    FULL,
    FULL_CHECKPOINT_SUFFIX,
    HYBRID,
    LOCAL_LAYERS,
    POLICY_LAYERS,
    RECURRENT,
    base_keys,
    layer_kinds,
    published_base,
    rotates,
    sliding_window,
)

ADVICE = "give the folder of a decoder-only language model"
OTHER_SHAPES = "layers of different shapes"
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Keys under which configs that transformers does not know nest that of the language model."""
FALCONS = ("falcon", "RefinedWeb", "RefinedWebModel")
"""Model types of which ``multi_query`` overrides the number of KV heads, unless ``new_decoder_architecture`` is set."""
KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
"""Names of the number of KV heads, in vLLM's order."""
NAMES = {
    "num_layers": ("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "hidden_size": ("hidden_size", "n_embed", "n_embd", "d_model"),
    "head_dim": ("head_dim", "hidden_size_per_head"),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
}
"""Names of the other sizes. Only configs that transformers does not know use more than the first of most."""
BORROWED = "kvpop_borrowed_channel"
"""Key in the ``config.json`` of a model that was trained by this package to give up a query channel."""


@dataclass(frozen=True)
class ModelShape:
    """Shape of the layers of a model that a policy acts on: those with full attention, in most models all.

    Attributes:
        model_type: model type of the base model, as in ``config.json``.
        num_layers: number of layers that the policy acts on.
        num_kv_heads: H, KV heads of these layers, on all ranks.
        head_dim: D, head size of these layers.
        max_model_len: longest sequence, in tokens.
        hidden_size: E, width of the hidden states, or None if unknown.
        num_heads: query heads of the whole model, or None if unknown.
        rope: rope parameters of these layers (:func:`kvpop_vllm.rope.rope_of`), or None if they are unknown, or differ
            between them, or attention does not rotate.
        kinds: kind of each layer of the model (:func:`kvpop_vllm.supported.layer_kinds`), empty if all have full
            attention alone.
        layers: indices in the model of the layers that the policy acts on, empty if these are all.
        wide_window: tokens of the windows that count as full attention because no text is longer, in a model that has
            other layers with full attention, None if there are no such windows.
    """

    model_type: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    hidden_size: int | None = None
    num_heads: int | None = None
    rope: Mapping | None = field(default=None, hash=False)
    kinds: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    wide_window: int | None = None

    @property
    def model_layers(self) -> int:
        """Number of layers of the model."""
        return len(self.kinds) or self.num_layers

    @property
    def attention_layers(self) -> int:
        """Number of layers of the model that attend, to all tokens or to those nearby."""
        return sum(kind in POLICY_LAYERS | LOCAL_LAYERS for kind in self.kinds) or self.num_layers

    @property
    def recurrent(self) -> bool:
        """True if layers of the model keep a recurrent state."""
        return not {RECURRENT, HYBRID}.isdisjoint(self.kinds)

    @property
    def stock_kinds(self) -> tuple[str, ...]:
        """Kinds of layers, sorted, that have a cache of vLLM's."""
        names = {kind for kind in self.kinds if set(CACHE_SPECS.get(kind, ())) - {*CACHE_SPECS[FULL]}}
        return tuple(sorted(names))

    def ordinal(self, layer: int) -> int:
        """Return the index of a layer of the model among those that the policy acts on."""
        if self.layers and layer not in self.layers:
            raise ConfigError(
                f"layer {layer} of this model has full attention, and its config says {self.kinds[layer]}: leave --kv-policy out"
            )
        return self.layers.index(layer) if self.layers else layer

    def stages(self, bounds: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the layers of pipeline stages, of each the first one and the one after the last.

        Args:
            bounds: layers of each stage, as the model counts them. The result is as the policy counts them.
        """
        if not self.layers:
            return list(bounds)
        # as many layers of the policy as come before a layer of the model
        return [tuple(bisect_left(self.layers, layer) for layer in stage) for stage in bounds]

    @classmethod
    def of(cls, model: Any, max_model_len: int) -> ModelShape:
        """Return the shape given by the ``config.json`` of a model folder, or by a config.

        Args:
            model: Hugging Face folder, or a config. See :func:`resolve`.
            max_model_len: longest sequence, in tokens.
        """
        source = "the model's config"
        if isinstance(model, str | PathLike):
            model, source = read_model_config(model), Path(model) / "config.json"
        config = resolve(model, source)
        sizes = shape_of(config, source, max_model_len)
        window = _wide_window(text_config(config), max_model_len)
        return cls(**sizes, max_model_len=max_model_len, rope=rope_of(config, max_model_len), wide_window=window)

    @classmethod
    def in_context(cls, model: Any, tokens: int) -> ModelShape:
        """Return the shape for texts of ``tokens``, with layers of the kinds of the model's whole context.

        In a context of at most a window's tokens, layers with windows would count as those of full attention. The
        longest sequence is one token more than the window then.

        Args:
            model: as in :meth:`of`.
            tokens: tokens of the longest text.
        """
        config = read_model_config(model) if isinstance(model, str | PathLike) else model
        window = sliding_window(text_config(config)) if kinds_of(config) else None
        # longer than the window, so that layers with windows keep their kind
        return cls.of(model, max(tokens, (window or 0) + 1))

    @classmethod
    def of_engine(cls, model: Any) -> ModelShape:
        """Return the shape of a model as vLLM counts it.

        Args:
            model: vLLM's ``ModelConfig``.
        """
        text, count = model.hf_text_config, model.get_total_num_hidden_layers()
        mixed = _layers(text, count, model.max_model_len)
        by_layer = [model.model_arch_config[layer] for layer in mixed.get("layers") or range(count)]
        names = "total_num_kv_heads", "head_size", "total_num_attention_heads"
        shapes = {tuple(getattr(layer, name) for name in names) for layer in by_layer}
        if len(shapes) > 1:
            remedy = _raise_length(text, model.max_model_len) or "leave --kv-policy out"
            raise ConfigError(f"{model.model}: {OTHER_SHAPES}: {remedy}")
        ((num_kv_heads, head_dim, num_heads),) = shapes
        return cls(
            model_type=text.model_type.removesuffix(FULL_CHECKPOINT_SUFFIX),
            num_layers=len(by_layer),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_model_len=model.max_model_len,
            hidden_size=model.get_hidden_size(),
            num_heads=num_heads,
            rope=rope_of(text, model.max_model_len),
            wide_window=_wide_window(text, model.max_model_len),
            **mixed,
        )


def resolve(config: Mapping | Any, source: str | Path) -> Any:
    """Return a model's config with its keys as attributes, resolved by transformers if it knows the model type.

    Args:
        config: contents of a ``config.json``, or a resolved config, which is returned as it is.
        source: its name in errors.
    """
    if hasattr(config, "model_type"):
        return config
    if not isinstance(config, Mapping):
        raise ConfigError(f"{source} is not a model's config: {ADVICE}")
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(f"{source} has no 'model_type': {ADVICE}")
    base = published_base(config)
    if base is None:
        base = kind.removesuffix(FULL_CHECKPOINT_SUFFIX)
    else:
        check_base(base, source)
        config = base_keys(config, base)
    # not known to this transformers: the keys count as they are
    if base not in CONFIG_MAPPING:
        nested = {name: resolve(config[name], source) for name in TEXT_CONFIGS if isinstance(config.get(name), Mapping)}
        return SimpleNamespace(**{**config, **nested})
    try:
        return CONFIG_MAPPING[base].from_dict(_with_floats({**config, "model_type": base}))
    except Exception as error:  # each model type has checks of its own
        raise ConfigError(f"{source}: transformers refuses it ({' '.join(str(error).split())}): {ADVICE}") from None


def _with_floats(value: Any) -> Any:
    """Return a copy of a config's contents with the numbers that JSON lacks: transformers tags infinities as objects."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _with_floats(part) for name, part in value.items()}
    return [_with_floats(part) for part in value] if isinstance(value, list) else copy.deepcopy(value)


def check_base(base: str, source: str | Path) -> None:
    """Check that the base of a full checkpoint is one that carries scorers."""
    if base not in ARCHITECTURES:
        raise ConfigError(
            f"{source}: a KVpop checkpoint of {base or 'no known model'} cannot be served, those of {' and '.join(ARCHITECTURES)} can"
        )


def read_model_config(folder: str | Path) -> Any:
    """Return the resolved config of a model folder (:func:`resolve`)."""
    path, advice = (
        Path(folder) / "config.json",
        "give the folder of a Hugging Face model, or OWNER/NAME[@REVISION] of one on the hub",
    )
    if not path.is_file():
        raise ConfigError(f"{folder} has no config.json: {advice}")
    return resolve(read_json(path, advice), path)


def text_config(config: Any) -> Any:
    """Return the language model's part of a resolved config, which may be the config itself."""
    if not hasattr(config, "get_text_config"):
        return next((text_config(vars(config)[name]) for name in TEXT_CONFIGS if name in vars(config)), config)
    try:
        return config.get_text_config()
    except ValueError as error:
        raise ConfigError(f"{config.model_type} has several text configs ({error}): {ADVICE}") from None


def size(text: Any, name: str) -> Any:
    """Return the size of a text config that has the given key in :data:`NAMES`, or None."""
    values = (getattr(text, spelling, None) for spelling in NAMES[name])
    return next((value for value in values if value is not None), None)


def shape_of(config: Mapping | Any, source: str | Path, tokens: int | None = None) -> dict:
    """Return the sizes of a model that policies and scorers depend on, as an engine counts them.

    Args:
        config: contents of a ``config.json``, or a config of transformers.
        source: its name in errors.
        tokens: tokens of the longest text, by default the model's positions.

    Returns:
        ``model_type``, ``num_layers``, ``num_kv_heads``, ``head_dim``, ``num_heads`` and, if the config has it,
        ``hidden_size``. The model type of a full checkpoint is that of its base model. If a policy acts on some layers
        only, ``kinds`` and ``layers`` as in :class:`ModelShape`, and ``num_layers`` counts those layers.
    """
    text = text_config(resolve(config, source))
    try:
        count = size(text, "num_layers")
        mixed = {}
        if type(count) is int:
            mixed = _layers(text, count, positions_of(text) if tokens is None else tokens)
        sizes = _sizes_of_layers(text, mixed.get("layers"), source, tokens)
    except TypeError:
        # a size of another type fails in arithmetic above
        raise ConfigError(f"{source} is not a model's config: {ADVICE}") from None
    except RuntimeError as error:  # transformers' refusal to return what layers differ in
        raise ConfigError(f"{source}: {OTHER_SHAPES} ({str(error).split('.')[0]}): {ADVICE}") from None
    sizes = {"num_layers": count} | sizes
    for name, number in sizes.items():
        if number is None:
            raise ConfigError(f"{source} has no {NAMES[name][0]!r}: {ADVICE}")
        if type(number) is not int or number < 1:
            raise ConfigError(f"{source}: {name} is {number!r}: {ADVICE}")
    sizes["num_layers"] = len(mixed.get("layers", ())) or sizes["num_layers"]
    return {"model_type": text.model_type.removesuffix(FULL_CHECKPOINT_SUFFIX)} | sizes | mixed


def attention_sizes(text: Any, layers: Iterable[int]) -> tuple[int, int]:
    """Return the number of KV heads and the head size of some layers of a model.

    Args:
        text: the model's text config.
        layers: indices of layers.
    """
    sizes = _sizes_of_layers(text, layers, "the model's config")
    return sizes["num_kv_heads"], sizes["head_dim"]


def _sizes_of_layers(text: Any, layers: Iterable[int] | None, source: str | Path, tokens: int | None = None) -> dict:
    """Return the sizes of attention in some layers, by default in all, and of what layers have in common.

    Args:
        text: the model's text config.
        layers: indices of layers.
        source: its name in errors.
        tokens: tokens of the longest text, None if nothing bounds it.
    """
    by_layer = [text]
    if getattr(text, "is_heterogeneous", False):
        by_layer = [text.per_layer_config[layer] for layer in layers or range(len(text.per_layer_config))]
    sizes = _layer_sizes(by_layer[0])
    if any(_layer_sizes(layer) != sizes for layer in by_layer[1:]):
        raise ConfigError(f"{source}: {OTHER_SHAPES}: {_raise_length(text, tokens) or ADVICE}")
    return sizes


def _layer_sizes(text: Any) -> dict:
    """Return the sizes of attention in a layer, and of what layers have in common, from the layer's config."""
    heads, hidden = size(text, "num_heads"), size(text, "hidden_size")
    return {
        "num_heads": heads,
        "head_dim": size(text, "head_dim") or (hidden and heads and hidden // heads),
        "num_kv_heads": _kv_heads(text, heads),
        **({} if hidden is None else {"hidden_size": hidden}),
    }


def _layers(text: Any, count: int, tokens: int | None) -> dict[str, tuple]:
    """Return ``kinds`` and ``layers`` of a model of ``count`` layers, nothing if all layers are alike or a policy acts on none."""
    kinds = layer_kinds(text, count, tokens)
    layers = tuple(i for i, kind in enumerate(kinds) if kind in POLICY_LAYERS)
    if not layers or set(kinds) == {FULL}:
        return {}
    return {"kinds": kinds, "layers": layers if len(layers) < len(kinds) else ()}


def _wide_window(text: Any, tokens: int | None) -> int | None:
    """Return the ``wide_window`` of a :class:`ModelShape` for texts of at most ``tokens``."""
    kinds = layer_kinds(text)
    return sliding_window(text) if {*kinds} & POLICY_LAYERS and layer_kinds(text, tokens=tokens) != kinds else None


def _raise_length(text: Any, tokens: int | None) -> str | None:
    """Return the advice to serve longer texts if windows count as full attention because texts are short, or None."""
    window = _wide_window(text, tokens)
    return None if window is None else RAISE_LENGTH.format(window)


def kinds_of(config: Any) -> tuple[str, ...]:
    """Return the kind of each layer of a resolved config, for texts as long as the model has positions.

    It is empty if all layers have full attention alone, or a policy acts on none.
    """
    text = text_config(config)
    return _layers(text, size(text, "num_layers"), positions_of(text)).get("kinds", ())


def rope_of(config: Any, tokens: int | None = None) -> dict | None:
    """Return the rope parameters of the layers that a policy acts on (:func:`kvpop_vllm.rope.rope_of`).

    Args:
        config: a resolved config.
        tokens: tokens of the longest text, by default the model's positions.

    Returns:
        The parameters, in which layers are counted as the policy counts them, None if these layers rotate differently,
        or attention does not rotate.
    """
    text = text_config(config)
    if not rotates(text):
        return None
    keys = text.to_dict() if hasattr(text, "to_dict") else dict(vars(text))
    length = positions_of(text) if tokens is None else tokens
    if layers := _layers(text, size(text, "num_layers"), length).get("layers"):
        # layers of other kinds may rotate in other ways
        by_kind, rotated = keys.get("rope_parameters"), keys.get("no_rope_layers")
        if isinstance(by_kind, Mapping) and isinstance(by_kind.get(FULL), Mapping):
            keys["rope_parameters"] = by_kind[FULL]
        if rotated:
            keys["no_rope_layers"] = [rotated[layer] for layer in layers]
    return model_rope(keys)


def _kv_heads(text: Any, heads: int) -> Any:
    """Return the number of KV heads. ``heads`` is that of query heads, which it defaults to."""
    if text.model_type in FALCONS and not getattr(text, "new_decoder_architecture", False):
        if getattr(text, "multi_query", False):
            return 1
    return next((value for name in KV_HEADS if (value := getattr(text, name, None))), heads)


def folder_sizes(model: str | PathLike) -> dict:
    """Return the sizes of a model folder (:func:`shape_of`)."""
    return shape_of(read_model_config(model), Path(model) / "config.json")


def vocabulary_of(folder: str | PathLike) -> int:
    """Return the vocabulary size of a model folder. Raises as :func:`read_model_config`."""
    return text_config(read_model_config(folder)).vocab_size


def rotations(text: Any) -> Iterator[dict]:
    """Yield the rope parameters of a text config, those of each type of layer where they differ."""
    rope = getattr(text, "rope_parameters", None) or {}
    yield from (parameters for parameters in (rope, *rope.values()) if isinstance(parameters, Mapping))


def positions_of(config: Any) -> int | None:
    """Return the number of positions of a resolved config, those of a stretched rotation included, or None."""
    text = text_config(config)
    positions = size(text, "positions")
    if type(positions) is not int or positions < 1:
        return None
    if "gemma3" in getattr(text, "model_type", ""):  # its positions are those of the stretched rotation
        return positions
    stretched = [
        rope["factor"] * (rope.get("original_max_position_embeddings") or positions)
        for rope in rotations(text)
        if rope.get("factor")
    ]
    return int(max([positions, *stretched]))


def check_length(folder: str | PathLike, length: int) -> None:
    """Check that a model has positions for rows of ``length`` tokens."""
    positions = positions_of(read_model_config(folder))
    if positions is not None and length > positions:
        raise ConfigError(f"the model has {positions} positions: lower --length {length}")


def borrows_channel(model: str | PathLike) -> bool:
    """Return whether a model folder's model gives up a query channel (see :func:`gives_up_channel`)."""
    return gives_up_channel(read_json(Path(model) / "config.json", ADVICE))


def gives_up_channel(config: Mapping) -> bool:
    """Return whether the model of a ``config.json`` uses a query channel as its eviction logit (DMS).

    The channel is the last one of each KV head's first query head. Models trained by this package and models
    in the layout of the authors of DMS are recognised.
    """
    # with projections of its own, the model's queries stay whole
    published = "dms_alpha_scale" in config and not config.get("dms_separate_alpha", False)
    return bool(config.get(BORROWED, False)) or published
