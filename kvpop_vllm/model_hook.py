"""Registered attention function that passes every layer's q, k, v of a transformers model to the caller.

No modelling code is forked: Llama, Qwen2, Qwen3 and other models that use transformers' attention interface
work unchanged. The attention is passed with the call, ``model(tokens, attend=...)``. Only the input of a gate
is taken by hooks on the model.
"""

import functools
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
import transformers
from packaging.version import Version
from safetensors import SafetensorError

from kvpop_vllm.config import ConfigError, check_version
from kvpop_vllm.local_attention import grouped_attention, local_attention
from kvpop_vllm.model_shape import kinds_of, positions_of, read_model_config, rotations, text_config
from kvpop_vllm.rope import rope_at, turned
from kvpop_vllm.scorers import Signals
from kvpop_vllm.scorers.published_checkpoint import is_published
from kvpop_vllm.supported import (
    CHUNKED,
    FULL,
    FULL_CHECKPOINT_SUFFIX,
    HEADS_FIRST,
    PAIRED,
    POLICY_LAYERS,
    RESCALED_LOGITS,
    SCALED_BY_POSITION,
    SLIDING,
    TRANSFORMERS,
    local_size,
    refused_borrowing,
)

check_version("transformers", transformers.__version__, TRANSFORMERS)  # before names that other versions lack

from transformers import AttentionInterface, AutoModelForCausalLM  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface  # noqa: E402

NAME = "kvpop"
LOCAL = SLIDING, CHUNKED
"""Kinds of layers whose queries attend to tokens nearby."""
CACHE_NAME = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"
"""Argument under which this version of transformers passes a cache to a model."""
POSITIONS = 512
"""Positions whose logits over the whole vocabulary are in memory at once."""
_KINDS: weakref.WeakKeyDictionary[torch.nn.Module, tuple[str, ...]] = weakref.WeakKeyDictionary()
"""Kinds of the layers of a model, by its attention blocks, which find them once."""
SHIFT = 100
"""Position at which :func:`check_rotation` compares queries and keys with those at position 0."""


class Attend(Protocol):
    """Function that a model's layers with full attention call in place of attention.

    Layers with windows or chunks attend as :func:`kvpop_vllm.local_attention.local_attention` does, or call a method
    ``local(layer, q, k, v, scale, kind, size)`` of the function, with their index in the model. An attribute ``kinds``
    says the kinds of the model's layers if they are not those of its config, and ``longest`` the tokens of the longest
    text if it is not the row.
    """

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:  # fmt: skip
        """Return the attention of one layer.

        With an attribute ``takes_sinks`` it also takes ``sink_logits``, ``[Hq]`` logits of the model's attention sinks.

        Args:
            layer: index of the layer among those with full attention.
            q: ``[B, Hq, S, D]``, after QK-norm and RoPE.
            k: ``[B, H, S, D]``, likewise.
            v: ``[B, H, S, D]``.
            scale: factor on q . k.

        Returns:
            ``[B, Hq, S, D]``.
        """


def _attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, attend=None, **options):
    if attend is None:
        raise TypeError(
            f"a model loaded with attn_implementation={NAME!r} is called as model(tokens, attend=...); any other cannot be called while"
            " another thread has it in a pass with a KVpopCache, nor with one, if its layers do not hand keyword arguments on to their attention"
        )
    if attention_mask is not None:
        raise ConfigError("the model's attention has a mask of its own, which would be ignored: choose another model")
    kind, index = _place(module, attend)
    size = local_size(module.config, kind) if kind in LOCAL else None
    _check_window(module, kind, size, options.get("sliding_window"), getattr(attend, "longest", key.shape[2]))
    sinks, backend_options = options.get("s_aux"), {}
    if sinks is None and getattr(module, "sinks", None) is not None:
        raise ConfigError("the model's layers keep attention sinks from their attention: choose another model")
    if sinks is not None and getattr(attend, "takes_sinks", False):
        sinks, backend_options = None, {"sink_logits": sinks}
    for name, option in (("logit soft-capping", options.get("softcap")), ("attention sinks", sinks)):
        if option is not None:
            raise ConfigError(f"the model has {name}, which this does not take: choose another model")
    if dropout:
        raise ConfigError("attention dropout cannot be combined with retention: set attention_dropout to 0")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key = query.to(value.dtype), key.to(value.dtype)  # autocast leaves them in float32 after RoPE
    # the same order of channels in both leaves their products as they are
    if module.config.model_type in PAIRED:
        query, key = (torch.cat([x[..., 0::2], x[..., 1::2]], -1) for x in (query, key))
    if share := getattr(module, "borrowed", 0.0):
        by_group = query.transpose(1, 2).unflatten(2, (key.shape[1], -1))
        # again after RoPE, which turns another channel into it
        query = _without_channel(by_group, share).flatten(2, 3).transpose(1, 2)
        if hasattr(attend, "see_channel"):
            attend.see_channel(index, module.channel)
        # else the block would hold a pass's activations until the next one
        del module.channel
    if size is None:
        out = attend(index, query, key, value, scale, **backend_options)
    elif hasattr(attend, "local"):
        out = attend.local(index, query, key, value, scale, kind, size, **backend_options)
    else:
        out = local_attention(query, key, value, scale, kind, size, **backend_options)
    # transformers takes [B, S, Hq, D]
    return out.transpose(1, 2), None


def _place(module: torch.nn.Module, attend: Attend) -> tuple[str, int]:
    """Return the kind of a layer, and its index among the layers with full attention, or in the model if it is another.

    An ``attend`` with an attribute ``kinds`` says the kinds of the model's layers; it is empty if all have full
    attention.

    Raises:
        ConfigError: the layer attends, and no layer of its kind does in models that are served.
    """
    kinds = getattr(attend, "kinds", None)
    if kinds is None:
        if module not in _KINDS:
            _KINDS[module] = kinds_of(module.config)
        kinds = _KINDS[module]
    return _place_among(module.layer_idx, kinds)


@functools.lru_cache(maxsize=4096)
def _place_among(layer: int, kinds: tuple[str, ...]) -> tuple[str, int]:
    """Return the kind of a layer and its index, as :func:`_place`, by the kinds of the model's layers."""
    if not kinds:
        return FULL, layer
    if kinds[layer] in POLICY_LAYERS:
        return FULL, sum(kind in POLICY_LAYERS for kind in kinds[:layer])
    if kinds[layer] not in LOCAL:
        raise ConfigError(f"layer {layer} of the model is of kind {kinds[layer]}, and attends: choose another model")
    return kinds[layer], layer


def _check_window(module: torch.nn.Module, kind: str, size: int | None, window: int | None, tokens: int) -> None:
    """Check that the window that a layer hands to its attention is the one of its kind.

    Args:
        module: attention block of the layer.
        kind: kind of the layer.
        size: tokens of a window or chunk of this kind, None for full attention.
        window: tokens of the window that the layer gives, or None.
        tokens: tokens of the longest text.

    Raises:
        ConfigError: it is another one.
    """
    # a window that holds the longest text hides nothing
    full = kind == FULL and window is not None and window >= tokens
    if window is not None and not full and (kind != SLIDING or window != size):
        raise ConfigError(
            f"layer {module.layer_idx} of the model has a sliding window of {window} tokens, and would be treated as {kind}:"
            " choose another model"
        )


def _no_mask(*args, attention_mask=None, **options):
    """Return no mask, because attention is causal over whole rows; refuse a padding mask."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ConfigError("rows are packed to full length: padding cannot be masked out, leave attention_mask out")
    return None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _no_mask)


def decoder_of(model: torch.nn.Module) -> torch.nn.Module:
    """Return the decoder of a causal language model; some of transformers' models do not find their own."""
    decoder = model.get_decoder()
    return model.model if decoder is model and hasattr(model, "model") else decoder


def attention_blocks(decoder: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the attention blocks of a decoder's layers, in order; layers of other kinds have none."""
    blocks = []
    for layer in getattr(decoder, "layers", ()):
        block, mixer = getattr(layer, "self_attn", None), getattr(layer, "mixer", None)
        if block is not None:
            blocks.append(block)
        elif hasattr(mixer, "q_proj"):  # of Nemotron-H, whose other layers have mixers too
            blocks.append(mixer)
    return blocks


def show_hidden_states(model: torch.nn.Module) -> None:
    """Pass the input of every attention block with full attention to an ``attend`` with a method ``see``, just before it attends.

    May be called more than once.

    Raises:
        ConfigError: the model's layers have no attention block of the usual name.
    """
    blocks = attention_blocks(decoder_of(model))
    if not blocks:
        raise ConfigError(
            "the model's layers have no self_attn, so that gates cannot be trained for it: choose another model"
        )
    for block in blocks:
        if _show not in block._forward_pre_hooks.values():
            block.register_forward_pre_hook(_show, with_kwargs=True)


def _show(module, positional, named):
    if hasattr(attend := named.get("attend"), "see"):
        kind, index = _place(module, attend)
        if kind == FULL:
            attend.see(index, named["hidden_states"] if "hidden_states" in named else positional[0])


def full_blocks(decoder: torch.nn.Module, kinds: tuple[str, ...] | None = None) -> list[torch.nn.Module]:
    """Return the attention blocks of a decoder's layers with full attention, in order.

    Args:
        decoder: the decoder.
        kinds: kinds of the model's layers, empty if all have full attention, by default those of its config.
    """
    kinds = kinds_of(decoder.config) if kinds is None else kinds
    blocks = attention_blocks(decoder)
    return [block for block in blocks if not kinds or kinds[block.layer_idx] in POLICY_LAYERS]


def borrow_channel(model: torch.nn.Module, share: float = 1.0, kinds: tuple[str, ...] | None = None) -> None:
    """Take the last channel of each KV head's first query out of the query, before and after RoPE (DMS).

    The channel ``[B, S, H]``, as it is before RoPE, is passed to an ``attend`` with a method ``see_channel``,
    just before it attends. Layers without full attention keep theirs.

    Args:
        model: from :func:`load_model`.
        share: share of the channel that is taken out before RoPE and again after it, while a model adapts; 1
            sets it to 0.
        kinds: as in :func:`full_blocks`.

    Raises:
        ConfigError: it is not known where the model's attention blocks have the channel.
    """
    decoder = decoder_of(model)
    kind = decoder.config.model_type.removesuffix(FULL_CHECKPOINT_SUFFIX)
    if reason := refused_borrowing(kind):
        raise ConfigError(f"{reason}: choose another model")
    for block in full_blocks(decoder, kinds):
        # after QK-norm where the model has one
        queries = getattr(block, "q_norm", block.q_proj)
        # one hook for any number of calls, which reads the latest share
        if not hasattr(block, "borrowed"):
            queries.register_forward_hook(functools.partial(_take_channel, block))
        block.borrowed = share


def borrowed_share(model: torch.nn.Module) -> float:
    """Return the share of the last :func:`borrow_channel` on a model, or 0."""
    return max((getattr(block, "borrowed", 0.0) for block in attention_blocks(decoder_of(model))), default=0.0)


def _take_channel(block, module, inputs, queries):
    if not block.borrowed:
        return None
    heads_first = block.config.model_type in HEADS_FIRST
    by_token = queries.transpose(1, 2) if heads_first else queries
    by_group = by_token.reshape(*by_token.shape[:2], -1, block.num_key_value_groups, block.head_dim)
    block.channel = by_group[..., 0, -1]
    zeroed = _without_channel(by_group, block.borrowed).reshape(by_token.shape)
    return zeroed.transpose(1, 2) if heads_first else zeroed


def _without_channel(by_group: torch.Tensor, share: float) -> torch.Tensor:
    """Return queries ``[.., G, D]`` with the first query's last channel scaled by ``1 - share``."""
    factor = by_group.new_ones(by_group.shape[-2:])
    factor[0, -1] = 1 - share
    return by_group * factor


class GateInputs:
    """Base class of an :class:`Attend` that stores what a layer's gate reads until the layer attends."""

    def __init__(self):
        self._hidden: dict[int, torch.Tensor] = {}
        self._channel: dict[int, torch.Tensor] = {}

    def see(self, layer: int, hidden: torch.Tensor) -> None:
        """Store the attention block's input ``[B, S, E]``. See :func:`show_hidden_states`."""
        self._hidden[layer] = hidden

    def see_channel(self, layer: int, channel: torch.Tensor) -> None:
        """Store a layer's borrowed channel ``[B, S, H]``. See :func:`borrow_channel`."""
        self._channel[layer] = channel

    def signals(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> Signals:
        """Return what a gate reads of tokens ``[B, S]`` with k, v ``[B, H, S, D]``; their input is then forgotten."""
        hidden, channel = self._hidden.pop(layer, None), self._channel.pop(layer, None)
        return Signals(hidden, k.transpose(1, 2), v.transpose(1, 2), channel)


class Dense:
    """Causal attention over all tokens by torch. Queries may be fewer than keys; they are the last ones."""

    takes_sinks = True

    def __call__(self, layer, q, k, v, scale, sink_logits=None):
        """Return the attention of one layer. See :class:`Attend`."""
        if sink_logits is not None:  # a window of all tokens
            return local_attention(q, k, v, scale, SLIDING, k.shape[2], sink_logits)
        new, past = q.shape[2], k.shape[2] - q.shape[2]
        # is_causal aligns the first query with the first key, so that fewer queries than keys need a mask
        mask = {"is_causal": True}
        if past:
            mask = {"attn_mask": torch.ones(new, past + new, dtype=torch.bool, device=q.device).tril(past)}
        return grouped_attention(q, k, v, scale, **mask)


def hidden_states(model: torch.nn.Module, ids: Sequence[int], positions: Sequence[int], attend: Attend) -> torch.Tensor:
    """Return the last hidden states ``[T, E]`` of a row of tokens.

    Args:
        model: from :func:`load_model`.
        ids: ``[T]``, a sequence or a tensor, as ``positions``.
        positions: ``[T]``.
        attend: attention of the layers.
    """
    device = next(model.parameters()).device
    row = {"input_ids": ids, "position_ids": positions}
    row = {name: torch.as_tensor(values, device=device).unsqueeze(0) for name, values in row.items()}
    return decoder_of(model)(**row, use_cache=False, attend=attend).last_hidden_state[0]


@torch.no_grad()
def check_rotation(model: torch.nn.Module, rope: Mapping) -> None:
    """Check that every layer rotates as :func:`kvpop_vllm.rope.turned` does, or not at all if ``rope`` says so.

    A token alone attends to itself, so that its queries and keys at two positions differ by their rotation in every
    layer.

    Args:
        model: from :func:`load_model`.
        rope: rope parameters of the model, see :func:`kvpop_vllm.rope.rope_of`.

    Raises:
        ConfigError: one does not; the first is named.
    """
    near, far = {}, {}
    for position, by_layer in ((0, near), (SHIFT, far)):

        def attend(layer, q, k, v, scale, by_layer=by_layer):
            by_layer[layer] = torch.cat([q, k], 1).float()
            return Dense()(layer, q, k, v, scale)

        hidden_states(model, [1], [position], attend)
    limit = 1e-3 if next(model.parameters()).dtype == torch.float32 else 3e-2
    for layer, later in far.items():
        if (turned(near[layer], SHIFT, rope_at(rope, layer)) - later).norm() > limit * later.norm():
            raise ConfigError(
                f"layer {layer} of the model does not rotate queries and keys as its config says, with channels paired as in"
                " Llama: choose another model"
            )


def load_model(folder: str | Path, dtype: torch.dtype = torch.bfloat16, logits: bool = True) -> torch.nn.Module:
    """Return a causal language model from a local folder, whose forward takes ``attend``.

    Args:
        folder: folder of the model.
        dtype: dtype of its weights.
        logits: True if its logits are read, which some models rescale after their output layer.

    Raises:
        ConfigError: it is no model folder, weights are damaged, missing or of other shapes than its config
            says, the model's attention cannot be replaced, or the model rescales logits that are read.
    """
    config = config_to_load(folder, logits)
    published = {"config": config} if is_published(folder) else {}
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=NAME,
            local_files_only=True,
            output_loading_info=True,
            # check_loaded() names them in its error
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
            **published,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{folder} cannot be loaded: {str(error).splitlines()[0]}") from None
    check_loaded(loaded, folder)
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "num_attention_heads", None) is None:
        raise ConfigError(f"{folder} is not a decoder-only language model with attention layers: choose another model")
    model.config.use_cache = False
    return model


def config_to_load(folder: str | Path, logits: bool):
    """Return the config of a model that :func:`load_model` loads.

    Args:
        folder: folder of the model.
        logits: True if its logits are read.

    Raises:
        ConfigError: it is no model folder, or the model rescales logits that are read.
    """
    config = read_model_config(folder)
    for name in RESCALED_LOGITS if logits else ():
        if getattr(text_config(config), name, None) not in (None, 1.0):
            raise ConfigError(f"{folder} rescales its logits ({name}), which kvpop does not do: choose another model")
    return config


def check_loaded(loaded: Mapping, folder: str | Path) -> None:
    """Check that all weights of a model came from its folder, by what transformers says of its loading.

    Raises:
        ConfigError: weights are missing or of other shapes than its config says.
    """
    if wrong := sorted(loaded["mismatched_keys"]):
        name, shape, expected = wrong[0]
        raise ConfigError(
            f"{folder}: {name} is {list(shape)} and should be {list(expected)} by config.json:"
            " one of the two is another model's"
        )
    if missing := sorted(loaded["missing_keys"]):
        raise ConfigError(f"{folder} has no weights for {missing[0]}, which would be random: complete the model")


def check_positions(model: torch.nn.Module, positions: int) -> None:
    """Check that the model attends by differences of positions only.

    A text may then begin anywhere before ``positions``.

    Raises:
        ConfigError: the model has no rotary embeddings, its rotation or attention changes with the position,
            or it has fewer positions.
    """
    config = model.config.get_text_config()
    kinds = [rope for rope in rotations(config) if "rope_type" in rope]
    moves = [rope["rope_type"] for rope in kinds if "dynamic" in rope["rope_type"] or rope["rope_type"] == "longrope"]
    moves += [
        name for name in SCALED_BY_POSITION if getattr(config, name, None) or any(rope.get(name) for rope in kinds)
    ]
    if moves or not kinds:
        problem = f"attends differently further out ({moves[0]})" if moves else "has no rotary embeddings"
        raise ConfigError(f"the model {problem}, so its rows must begin at 0: set --positions to the value of --length")
    limit = positions_of(model.config)
    if limit is not None and positions > limit:
        raise ConfigError(f"the model has {limit} positions: lower --positions {positions}")
