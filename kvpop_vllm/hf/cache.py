"""KV cache of fixed size for ``generate()``.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import copy
import weakref
from collections.abc import Hashable, Sequence
from os import PathLike

import torch
from transformers.cache_utils import LinearAttentionLayer

from kvpop_vllm.compaction.prompt_place import ids_after
from kvpop_vllm.config import ConfigError
from kvpop_vllm.hf.attention_patch import AttentionCache, register_hooks, restore_attention
from kvpop_vllm.hf.cache_files import plain
from kvpop_vllm.hf.cartridges import slots_of
from kvpop_vllm.hf.checks import changes_attention_at, check_model, has_recurrent_bias
from kvpop_vllm.hf.layer import LayerPages, SequenceLengths
from kvpop_vllm.hf.layer_allocation import AllocatedLayers
from kvpop_vllm.hf.local_layers import LocalLayer
from kvpop_vllm.hf.passes import CachePasses
from kvpop_vllm.hf.policy_resolution import flags_to_arguments, resolve
from kvpop_vllm.hf.rows import Rows
from kvpop_vllm.hf.saved_cache import SavedCache
from kvpop_vllm.hf.transformers_cache import TransformersCache
from kvpop_vllm.model_shape import gives_up_channel, positions_of
from kvpop_vllm.policies import parse_settings


class KVpopCache(SavedCache, CachePasses, AllocatedLayers, TransformersCache, AttentionCache):
    """KV cache of fixed size for transformers, under any registered policy.

    It is used as ``model.generate(**inputs, cache=cache)``. ``past_key_values=`` does the same. Every row of the batch
    is an independent request, as if it were served alone. Pads on its left never enter the cache, and positions count
    from its first token. A later call continues: tokens beyond those already seen are appended, as in the next turn of
    a chat. ``copy.deepcopy`` of a cache lets several texts continue from one beginning, and :meth:`save` and
    :meth:`load` do so in other processes. :meth:`reset` starts over with the same pages. Rows that ended before others
    contain the pads that ``generate()`` fed them, and cannot be continued without them. Rows whose turns differ in
    length cannot be continued together.

    With ``protect_prompt``, the text of a call of ``generate()``, or the first N tokens of text and answers, is never
    evicted. A later call must bring the whole text so far, including earlier answers. Everything after the protected
    tokens is then computed again. The protected tokens are not. The cache grows with the protected tokens.

    A policy that compresses prompts holds the text of a call of ``generate()`` until its end. What it does not
    retain is freed after the first step that follows it. A later call must bring the whole text so far, all of which is
    computed again. Where the text comes in pieces (``prefill_chunk_size``), give ``prompt``: without it each piece is
    compressed until another one follows.

    Args:
        model: model of transformers. Hooks are registered on it. Passes without such a cache are unchanged.
            Only one thread at a time can use it.
        policy: registered name.
        budget: as in :class:`kvpop_vllm.config.PolicySettings`, or a list with one entry per row. Pages are
            allocated for the largest.
        compression: as in :class:`kvpop_vllm.config.PolicySettings`.
        sinks: as in :class:`kvpop_vllm.config.PolicySettings`.
        window: as in :class:`kvpop_vllm.config.PolicySettings`.
        threshold: as in :class:`kvpop_vllm.config.PolicySettings`.
        scorer: scorer folder, by default the model's own scorer if it is a full checkpoint.
        map: as in :class:`kvpop_vllm.config.PolicySettings`.
        calibration: as in :class:`kvpop_vllm.config.PolicySettings`.
        correction: as in :class:`kvpop_vllm.config.PolicySettings`.
        allocator: as in :class:`kvpop_vllm.config.PolicySettings`.
        protect_prompt: as in :class:`kvpop_vllm.config.PolicySettings`, or a list with one entry per row.
        cartridge: folder of a cartridge (``kvpop compact``) with which every row begins, or several in order.
            Neither inputs nor positions that are given count its slots. One that stands in a chat's message holds
            the chat's first tokens, :attr:`head`: give the ids after them.
        max_length: longest sequence in tokens, slots of cartridges included, for ``compression`` and for the policy
            ``full``, by default the model's.
        seed: seed of the draws for every row, or a list with one entry per row.
        prompt: under a policy that compresses prompts, the number of tokens at the start of a text that are
            its prompt, by default the text of a call of ``generate()``.
        device: device of the pages and the kernels, by default the model's.

    Attributes:
        passes: passes so far.
        text: ``[R, L]`` ids of the tokens seen in calls of ``generate()``, with which the text of a later one begins,
            or None.
        next_text: ``[R, L]`` ids of the text of a call of ``generate()`` until its first pass, else None.
        text_columns: number of columns of that text until the call ends, else 0.
        policy: policy, resolved as in an engine.
        settings: arguments of the constructor, but model and device.
        protected: p of each row, which may be shorter.
        head: ids of a chat's beginning that the cartridge holds. Inputs begin after them.
        gates: gate of each layer, None where the kernels score tokens.
        borrows: True if a query channel is removed from the queries in passes with this cache.
        recurrent: True if layers of the model have a recurrent state, which transformers' own cache layers hold.
        attended: layers that have attended in the current pass, as :class:`Step` names them, None between passes.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        policy: str,
        *,
        budget: int | Sequence[int] | None = None,
        compression: float | None = None,
        sinks: int | None = None,
        window: int | None = None,
        threshold: float | None = None,
        scorer: str | PathLike | None = None,
        map: str | PathLike | None = None,
        calibration: str | PathLike | None = None,
        correction: str | None = None,
        allocator: str | None = None,
        protect_prompt: bool | int | Sequence[bool | int] | None = None,
        cartridge: str | PathLike | Sequence[str | PathLike] = (),
        max_length: int | None = None,
        seed: int | Sequence[int] = 0,
        prompt: int | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(layers=[])
        check_model(model, max_length)
        if not isinstance(policy, str):
            raise ConfigError(f"policy must be the name of one, such as 'kvpop', got {policy!r}")
        arguments = dict(policy=policy, compression=compression, sinks=sinks, window=window)
        arguments |= dict(threshold=threshold, correction=correction, allocator=allocator)
        for name, value in (("scorer", scorer), ("map", map), ("calibration", calibration)):
            arguments[name] = str(value) if isinstance(value, PathLike) else value
        rows = dict(budget=budget, protect_prompt=protect_prompt, seed=seed, prompt=prompt)
        self.settings = plain(arguments | rows | dict(cartridge=cartridge, max_length=max_length))
        try:
            self._rows = Rows(**rows)
            settings = parse_settings(arguments | self._rows.settings())
            self.policy = resolve(model, settings, max_length)
            self._rows.check(self.policy)
            heads = self._heads = slice(0, self.policy.model.num_kv_heads)
            self._budgets = self._rows.head_budgets(self.policy)
            self.gates = [self.policy.gate(i, heads) for i in range(len(self))]
            self._cartridges = slots_of(cartridge, model, self.policy)
            self.head = self._cartridges.head
        except ConfigError as error:
            raise ConfigError(flags_to_arguments(str(error))) from None
        self.device = device
        limit, positions = changes_attention_at(model, self.policy), positions_of(model.config)
        self._max_length = None if limit is None else self.policy.model.max_model_len
        if self.policy.keeps_all:
            self._max_length = self.policy.retention.budget
        self._positions = positions if positions is None else max(positions, self.policy.model.max_model_len)
        self.recurrent = self.policy.model.recurrent
        self.borrows = self.policy.borrows or gives_up_channel(model.config.get_text_config().to_dict())
        self._decoder = weakref.ref(register_hooks(model, self.borrows, self.policy.model.kinds))
        text = model.config.get_text_config()
        self._biased = has_recurrent_bias(text)
        self._scaled_from = text.floor_scale if getattr(text, "attn_temperature_tuning", False) else None
        self._layers: dict[int, LayerPages] = {}
        self._lengths_by_device: dict[torch.device, SequenceLengths] = {}
        self._recorded = False
        self._forget()

    def _forget(self) -> None:
        self.attended: set[Hashable] | None = None
        self._local: dict[int, LocalLayer] = {}
        # transformers keeps an empty one for layers without a state too
        self.layers = [LinearAttentionLayer() for _ in self.policy.model.kinds] if self.recurrent else []
        self._broken = False
        self._columns, self._lengths, self.passes = 0, [], 0
        self.text: torch.Tensor | None = None
        self.next_text: torch.Tensor | None = None
        self.text_columns = 0
        self.protected: list[int] = []
        self._most_protected = 0

    @property
    def _protects(self) -> bool:
        """True if a row has a prefix: a protected prompt, or a cartridge."""
        return self._cartridges.count > 0 or self._rows.any_protects(self.policy)

    def encode(self, tokenizer, prompt: str | list[dict]) -> torch.Tensor:
        """Return the ids ``[1, L]`` of a prompt after the cartridge: without its head, or without BOS where it has none.

        Args:
            tokenizer: the model's.
            prompt: a text, or the messages of a chat, up to where the model's answer begins.
        """
        if not self._cartridges.count:
            raise ConfigError("this KVpopCache has no cartridge: tokenise the prompt as usual")
        return torch.tensor([ids_after(tokenizer, self.head, prompt)])

    @property
    def columns(self) -> int:
        """Number of columns seen, pads included."""
        return self._columns

    @property
    def lengths(self) -> list[int]:
        """Number of tokens that each row has seen, slots of cartridges included and pads excluded."""
        return list(self._lengths)

    def held(self, row: int = 0) -> torch.Tensor:
        """Return which of a row's tokens are held, ``[layers, H, seen]`` booleans on the CPU. Layers are the policy's."""
        return torch.stack(
            [self._layers[i].held(row, self._lengths[row], self.protected[row]) for i in range(len(self))]
        )

    def made_slots(self, row: int = 0) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return each layer's keys, values and biases of the slots that were made of a row's prompt.

        They are ``[H, P, D]``, ``[H, P, D]`` and ``[H, P]``. P is 0 under a policy that makes none.
        """
        return [self._layers[i].made_slots(row) for i in range(len(self))]

    def allocated_bytes(self) -> int:
        """Return the bytes allocated for the batch, including scores, positions, state and padding.

        The number is constant from the first token on, except for protected prefixes.
        """
        lengths = sum(sequence_lengths.allocated_bytes() for sequence_lengths in self._lengths_by_device.values())
        layers = *self._layers.values(), *self._local.values()
        states = [state for layer in self.layers for state in (layer.conv_states[0], layer.recurrent_states[0])]
        states = sum(state.nbytes for state in states if state is not None)
        return lengths + states + sum(layer.allocated_bytes() for layer in layers)

    def dense_bytes(self) -> int:
        """Return the bytes that a ``DynamicCache`` would hold now in the policy's layers: keys and values of all tokens and pads."""
        dtypes = [layer.pages.layout.dtype for layer in self._layers.values()]
        shape = self.policy.model
        tokens = len(self._lengths) * self._columns
        return sum(2 * tokens * shape.num_kv_heads * shape.head_dim * dtype.itemsize for dtype in dtypes)

    def reset(self) -> None:
        """Forget all tokens.

        The pages are emptied and kept for the next batch with the same number of rows. CUDA graphs recorded with them
        stay valid.
        """
        if (decoder := self._decoder()) is not None:
            restore_attention(decoder)
        self._forget()
        for layer in self._layers.values():
            layer.clear(self._cartridges.count)
        for sequence_lengths in self._lengths_by_device.values():
            sequence_lengths.restart()

    def __deepcopy__(self, memo):
        """Return a copy for the same model, with separate pages that no CUDA graph holds."""
        copied = memo[id(self)] = object.__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        copied._recorded = False
        return copied
