"""KV cache of fixed size for ``generate()``."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Hashable, Sequence
from os import PathLike

import torch
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from kvpop_vllm.compaction.prompt_place import ids_behind
from kvpop_vllm.config import ConfigError, protected_tokens
from kvpop_vllm.hf.attention_patch import AttentionCache, Step, register_hooks, restore_attention
from kvpop_vllm.hf.cartridges import slots_of
from kvpop_vllm.hf.checks import (
    changes_attention_at,
    check_inputs,
    check_model,
    check_pads,
    check_positions,
    check_text,
    columns_of_tokens,
    has_recurrent_bias,
    warn_of_positions,
    warn_of_reference,
)
from kvpop_vllm.hf.layer import LayerPages, SequenceLengths, check_kernels, recording
from kvpop_vllm.hf.local_layers import LocalLayer
from kvpop_vllm.hf.policy_resolution import flags_to_arguments, resolve
from kvpop_vllm.hf.rows import Rows
from kvpop_vllm.hf.saved_cache import SavedCache, plain
from kvpop_vllm.model_shape import gives_up_channel, positions_of
from kvpop_vllm.policies import parse_settings


def _refusal(limitation: str, instead: str):
    """Return a method that raises: a KVpopCache does not do what ``limitation`` says."""

    def refuse(self, *args, **kwargs):
        """Refuse; see the message."""
        raise ConfigError(f"a KVpopCache {limitation}: {instead}")

    return refuse


class KVpopCache(SavedCache, Cache, AttentionCache):
    """KV cache of fixed size for transformers, under any registered policy.

    It is used as ``model.generate(**inputs, cache=cache)``; ``past_key_values=`` does the same. Every row of the batch is an
    independent request, as if it were served alone. Pads on its left never enter the cache, and positions
    count from its first token. A later call continues: tokens beyond those already seen are appended, as in
    the next turn of a chat. ``copy.deepcopy`` of a cache lets several texts continue from one beginning, and
    :meth:`save` and :meth:`load` do so in other processes.
    :meth:`reset` starts over with the same pages. Rows that ended before others contain the pads that
    ``generate()`` fed them, and cannot be continued without them. Rows whose turns differ in length cannot be
    continued together.

    With ``protect_prompt``, the text of a call of ``generate()``, or the first N tokens of text and answers, is never
    evicted. A later call must bring the whole text so far, including earlier answers. Everything after the protected
    tokens is then computed again; the protected tokens are not. The cache grows with the protected tokens.

    A policy that compresses prompts holds the text of a call of ``generate()`` until its end. What it does not
    retain is freed after the first step that follows it. A later call must bring the whole text so far, all of which is
    computed again. Where the text comes in pieces (``prefill_chunk_size``), give ``prompt``: without it each piece is
    compressed until another one follows, and a last piece of one token is taken for an answer's.

    Args:
        model: model of transformers. Hooks are registered on it; passes without such a cache are unchanged.
            Only one thread at a time can use it.
        policy: registered name.
        budget: as in :class:`kvpop_vllm.config.PolicySettings`, or a list with one entry per row; pages are
            allocated for the largest.
        compression: as in :class:`kvpop_vllm.config.PolicySettings`.
        sinks: as in :class:`kvpop_vllm.config.PolicySettings`.
        window: as in :class:`kvpop_vllm.config.PolicySettings`.
        threshold: as in :class:`kvpop_vllm.config.PolicySettings`.
        scorer: scorer folder; by default the model's own scorer if it is a full checkpoint.
        map: as in :class:`kvpop_vllm.config.PolicySettings`.
        calibration: as in :class:`kvpop_vllm.config.PolicySettings`.
        correction: as in :class:`kvpop_vllm.config.PolicySettings`.
        allocator: as in :class:`kvpop_vllm.config.PolicySettings`.
        protect_prompt: as in :class:`kvpop_vllm.config.PolicySettings`, or a list with one entry per row.
        cartridge: folder of a cartridge (``kvpop compact``) with which every row begins, or several in order.
            Neither inputs nor positions that are given count its slots. One that stands in a chat's message holds
            the chat's first tokens, :attr:`head`: give the ids after them.
        max_length: longest sequence in tokens, slots of cartridges included, for ``compression`` and for the policy ``full``; by default
            the model's.
        seed: seed of the draws for every row, or a list with one entry per row.
        prompt: under a policy that compresses prompts, the number of tokens at the start of a text that are
            its prompt; by default the text of a call of ``generate()``.
        device: device of the pages and the kernels; by default the model's.

    Attributes:
        passes: passes so far.
        text: ``[R, L]`` ids of the tokens seen in calls of ``generate()``, with which the text of a later one begins, or None.
        next_text: ``[R, L]`` ids of the text of a call of ``generate()`` until its first pass, else None.
        policy: policy, resolved as in an engine.
        settings: arguments of the constructor, but model and device.
        protected: p of each row, which may be shorter.
        head: ids of a chat's beginning that the cartridge holds; inputs begin after them.
        gates: gate of each layer, None where the kernels score tokens.
        borrows: True if a query channel is removed from the queries in passes with this cache.
        recurrent: True if layers of the model have a recurrent state, which transformers' own cache layers hold.
        attended: layers that have attended in the current pass, as :class:`Step` names them, None between passes.

    Raises:
        ConfigError: the settings are invalid, or the policy cannot be used with this model; one line that
            names what to change.
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
            self._made = slots_of(cartridge, model, self.policy)
            self.head = self._made.head
        except ConfigError as error:
            raise ConfigError(flags_to_arguments(str(error))) from None
        self.device = device
        limit, positions = changes_attention_at(model, self.policy), positions_of(model.config)
        self._max_length = None if limit is None else self.policy.model.max_model_len
        if self.policy.keeps_all:
            self._max_length = self.policy.retention.budget
        self._positions = positions if positions is None else max(positions, self.policy.model.max_model_len)
        gated = any(gate is not None and gate.borrows for gate in self.gates)
        self.recurrent = self.policy.model.recurrent
        self.borrows = gated or gives_up_channel(model.config.get_text_config().to_dict())
        self._decoder = weakref.ref(register_hooks(model, self.borrows))
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
        self.protected: list[int] = []
        self._most_protected = 0

    @property
    def _protects(self) -> bool:
        """True if a row has a prefix: a protected prompt, or a cartridge."""
        return self._made.count > 0 or self._rows.any_protects(self.policy)

    def encode(self, tokenizer, prompt: str | list[dict]) -> torch.Tensor:
        """Return the ids ``[1, L]`` of a prompt after the cartridge: without its head, or without BOS where it has none.

        Args:
            tokenizer: the model's.
            prompt: a text, or the messages of a chat, up to where the model's answer begins.

        Raises:
            ConfigError: the prompt does not begin as the cartridge does, or the tokenizer has no chat template.
        """
        if not self._made.count:
            raise ConfigError("this KVpopCache has no cartridge: tokenise the prompt as usual")
        return torch.tensor([ids_behind(tokenizer, self.head, prompt)])

    # contents

    @property
    def columns(self) -> int:
        """Number of columns seen, pads included."""
        return self._columns

    @property
    def lengths(self) -> list[int]:
        """Number of tokens that each row has seen, slots of cartridges included and pads excluded."""
        return list(self._lengths)

    def held(self, row: int = 0) -> torch.Tensor:
        """Return which of a row's tokens are held, ``[layers, H, seen]`` booleans on the CPU; layers are the policy's."""
        return torch.stack(
            [self._layers[i].held(row, self._lengths[row], self.protected[row]) for i in range(len(self))]
        )

    def made_slots(self, row: int = 0) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return each layer's keys, values and biases of the slots that were made of a row's prompt.

        They are ``[H, P, D]``, ``[H, P, D]`` and ``[H, P]``; P is 0 under a policy that makes none.
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

    # forward pass

    def begin(self, decoder, inputs, mask, positions) -> Step:
        """Prepare one pass.

        Args:
            decoder: decoder of the model.
            inputs: ``[R, L, ..]``, token ids or embeddings.
            mask: attention mask as given by the caller, or None.
            positions: ``[R or 1, L]`` as given by the caller, or None.

        Returns:
            The step, which all layers call in place of attention.

        Raises:
            ConfigError: the cache belongs to another model, or cannot serve the pass.
            ValueError: the pass does not continue where the cache ends, or repeats what cartridges hold.
            RuntimeError: the previous pass was interrupted, or the pass cannot be recorded.
        """
        self._check_begins(decoder, inputs)
        rows, length = inputs.shape[:2]
        self._rows.check_number(rows)
        columns, lengths = self._begins_at(mask, positions, length)
        cartridge_slots = self._made.count
        in_tails = [length > 0 and length >= p for length, p in zip(lengths, self.protected, strict=True)]
        decoding = length == 1 and columns == self._columns and len(lengths) > 0 and all(in_tails)
        lengths = lengths or [cartridge_slots] * rows
        recorded = recording(inputs.device)
        if recorded and not (decoding and len(self._layers) == len(self)):
            raise RuntimeError(
                "a CUDA graph can hold a pass of one token a row only, and not the first or one of protected tokens: let the prompt, the"
                " protected tokens and a token pass before it"
            )
        # on an accelerator, reading the mask makes the host wait
        look = not recorded and (inputs.device.type == "cpu" or not decoding)
        counts = columns_of_tokens(mask, [length - cartridge_slots for length in lengths], columns, length, look)
        after = [length + count for length, count in zip(lengths, counts, strict=True)]
        self._check_lengths(lengths, after, columns + length)
        if self.recurrent:
            check_pads(counts, length, self._biased)
        if not self._columns:
            self._made.check_inputs(inputs, counts)
        if self._lengths_by_device and len(next(iter(self._lengths_by_device.values())).positions) != rows:
            self._check_unrecorded()
            self._lengths_by_device, self._layers = {}, {}
        sequence_lengths = self._sequence_lengths(inputs.device, rows)
        protected = self.protected or [cartridge_slots] * rows
        if decoding or length == 1 and all(counts) and not self._protects:
            position_ids, starts = sequence_lengths.positions.unsqueeze(1).clone(), None
        else:
            shift = torch.tensor([end - length for end in after]).unsqueeze(1)
            position_ids, starts = (torch.arange(length) + shift).clamp_min(0).to(inputs.device), lengths
            # a prompt, or the rest of one; a single token is an answer's
            protected = [
                cartridge_slots + protected_tokens(protect, end - cartridge_slots)
                if columns < self._columns or p == before and (length > 1 or before == cartridge_slots)
                else p
                for protect, p, before, end in zip(
                    self._rows.protects(self.policy, rows), protected, lengths, after, strict=True
                )
            ]
        if look and positions is not None:
            check_positions(positions, position_ids - cartridge_slots, counts)
        if self.text is not None and self.next_text is not None and len(self.text) == len(self.next_text):
            check_text(self.next_text, self.text, mask, columns)
        self.next_text = None
        self._most_protected = max(map(min, protected, after))
        for layer in self._layers.values():
            self._make_room(layer)
        self._before = self._columns, self._lengths, self.protected
        self._go_to(columns, lengths, protected)
        self.attended = set()
        return Step(self, position_ids, starts, counts, recorded)

    def _check_begins(self, decoder, inputs: torch.Tensor) -> None:
        """Check that a pass of a decoder may begin with inputs ``[R, L, ..]``.

        Raises:
            ConfigError: the cache belongs to another model, or has no kernels for the inputs' device.
            ValueError: there are no inputs, or those of other rows.
            RuntimeError: the previous pass was interrupted, or gradients are required.
        """
        if decoder is not self._decoder():
            raise ConfigError("this KVpopCache was made for another model: make one with KVpopCache(model, ...)")
        if self.attended is not None:  # torch ends no pass that the keyboard interrupts
            self._break_off()
        if self._broken:
            raise RuntimeError("the pass before was broken off when some layers had it: call reset() on the KVpopCache")
        check_inputs(decoder, inputs)
        if self._lengths and len(inputs) != len(self._lengths):
            raise ValueError(
                f"a batch of {len(inputs)} rows for a KVpopCache of {len(self._lengths)}: call reset() on it, or make another"
            )

    def _go_to(self, columns: int, lengths: list[int], protected: list[int]) -> None:
        """Set the columns and tokens seen, and the protected tokens, on the host and on all devices."""
        for sequence_lengths in self._lengths_by_device.values() if lengths else ():
            if columns != self._columns:
                sequence_lengths.positions.copy_(torch.tensor(lengths))
            if protected != self.protected:
                sequence_lengths.protected.copy_(torch.tensor(protected))
        if self.text is not None and columns < self._columns:
            self.text = self.text[:, :columns]
        self._columns, self._lengths, self.protected = columns, lengths, protected

    def _begins_at(
        self, mask: torch.Tensor | None, positions: torch.Tensor | None, length: int
    ) -> tuple[int, list[int]]:
        """Return the number of columns after which a pass continues, and each row's tokens in them.

        The pass continues after all columns seen, or after the protected ones if the text after them is
        given again. The width of ``mask [R, columns + length]`` decides between the two. Without a mask there
        are no pads, and ``positions [R, length]`` decide. A pass of one token without either continues after
        all columns.

        Raises:
            ValueError: a longer pass without either is ambiguous.
        """
        reusable, columns = self.get_seq_length(), self._columns
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            columns = mask.shape[1] - length
        elif length > 1 and reusable < columns and positions is not None:
            columns = int(positions[0, 0])
        elif length > 1 and reusable < columns:
            raise ValueError(
                f"{length} columns may follow the {columns} that were seen or the {reusable} that are protected: give attention_mask or"
                " position_ids"
            )
        if columns != reusable or reusable == self._columns:
            return self._columns, self._lengths
        if self._local or self.recurrent:
            raise ValueError(
                "layers with windows, chunks or recurrent states have given up what they would need to go back to the protected"
                " tokens: reset() the KVpopCache, and give generate() the whole text"
            )
        return reusable, [max(0, length - (self._columns - reusable)) for length in self._lengths]

    def _make_room(self, layer: LayerPages) -> None:
        """Allocate pages for the protected tokens in a layer, up to the end of the pass.

        Raises:
            ValueError: as :meth:`_check_unrecorded`, if the pages must be moved.
        """
        if self._recorded and self._most_protected > layer.prefix_room:
            self._check_unrecorded()
        with torch.inference_mode(False):
            layer.protect(self._most_protected)

    def _check_unrecorded(self) -> None:
        """Check that no CUDA graph writes to the pages, before they are replaced.

        Raises:
            ValueError: a CUDA graph does.
        """
        if self._recorded:
            raise ValueError(
                "a CUDA graph holds this KVpopCache's pages, for as many rows, their dtype and device: make another KVpopCache"
            )

    def _check_lengths(self, lengths: list[int], after: list[int], columns: int) -> None:
        """Check that rows may grow from some lengths to others, in so many columns; warn beyond the model's positions.

        Raises:
            ValueError: as :meth:`_check_room` and :meth:`_check_scale`.
        """
        self._check_room(after)
        self._check_scale(after, columns)
        warn_of_positions(lengths, after, self._positions)

    def _check_room(self, lengths: list[int]) -> None:
        """Check rows of the given lengths, if the policy never evicts or the model attends differently further out.

        Raises:
            ValueError: a row is longer than the sequences that the cache was made for.
        """
        longest = self._max_length
        if longest is not None and max(lengths) > longest:
            why = f"which {self.policy.name} keeps" if self.policy.keeps_all else "up to which the model attends alike"
            raise ValueError(
                f"{max(lengths)} tokens are more than max_length {longest}, {why}: raise max_length, or shorten the text"
            )

    def _check_scale(self, lengths: list[int], columns: int) -> None:
        """Check that rows of the given lengths have no pads, if the model scales queries by their column.

        Raises:
            ValueError: a row has some, and is so long that its queries are scaled.
        """
        if self._scaled_from is not None and columns >= self._scaled_from and min(lengths) < columns:
            raise ValueError(
                f"this model scales queries by their column from {self._scaled_from} columns on (attn_temperature_tuning), pads included:"
                " give rows of equal length"
            )

    def _sequence_lengths(self, device: torch.device, rows: int) -> SequenceLengths:
        """Return the clock of a device, created with the progress of the rows if necessary."""
        if device not in self._lengths_by_device:
            with torch.inference_mode(False):
                cartridge_slots = self._made.count
                sequence_lengths = SequenceLengths(self._rows.requests(self.policy, rows, cartridge_slots), device)
            self._lengths_by_device[device] = sequence_lengths
            sequence_lengths.positions.copy_(torch.tensor(self._lengths or [cartridge_slots] * rows))
            sequence_lengths.protected.copy_(torch.tensor(self.protected or [cartridge_slots] * rows))
        return self._lengths_by_device[device]

    def layer(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> LayerPages:
        """Return the pages of a layer, allocated on the first call.

        Args:
            index: layer.
            q: ``[R, Hq, L, D]``.
            k: ``[R, H, L, D]``.
            v: ``[R, H, L, D]``.
            scale: factor on q . k.

        Raises:
            ConfigError: the layer has other heads than the model's config says, keys and values differ in
                size, or the kernels of the device do not support them.
            ValueError: a CUDA graph holds the pages, and others are needed.
        """
        pages_before = self._layers.get(index)
        if (
            pages_before is None
            or not self._columns
            and (pages_before.pages.layout.dtype, pages_before.pages.raw.device) != (k.dtype, k.device)
        ):
            shape = self.policy.model
            expected = len(self._lengths), shape.num_kv_heads, k.shape[2], shape.head_dim
            if k.shape != expected or v.shape != expected or q.shape[3] != shape.head_dim:
                raise ConfigError(
                    f"layer {index} has keys {tuple(k.shape)} and values {tuple(v.shape)}, not {expected}: choose another model"
                )
            if pages_before is not None:
                self._check_unrecorded()
            self._make_room(self._new_layer(index, k, scale))
        return self._layers[index]

    def _new_layer(self, index: int, like: torch.Tensor, scale: float) -> LayerPages:
        """Return new pages of a layer, with what cartridges hold.

        Args:
            index: layer.
            like: keys ``[R, H, L, D]``, for sizes, dtype and device.
            scale: factor on q . k.

        Raises:
            ConfigError: the kernels of the device do not support the layer.
        """
        rule = self.policy.layer_rule(index, self._heads)
        check_kernels(like, rule)
        warn_of_reference(like)
        sequence_lengths = self._sequence_lengths(like.device, len(self._lengths))
        with torch.inference_mode(False):  # inference tensors cannot be written outside of inference mode
            budgets = self._budgets and {budget: layers[index] for budget, layers in self._budgets.items()}
            self._layers[index] = layer = LayerPages(rule, budgets, like, scale, sequence_lengths, self.policy.shifted)
            if self._made.count:
                layer.place(*(part.to(like.device) for part in self._made.layers[index]))
        return layer

    def local_layer(self, index: int, size: int) -> LocalLayer:
        """Return a layer of the model with windows or chunks of ``size`` tokens."""
        if index not in self._local:
            self._local[index] = LocalLayer(size)
        return self._local[index]

    def end(self, step: Step, failed: bool) -> None:
        """Finish a pass; ``failed`` is True if it raised.

        Raises:
            RuntimeError: a layer attended without the cache.
        """
        any_layer, all_layers = bool(self.attended), len(self.attended) == self.policy.model.attention_layers
        if failed or not all_layers:
            self._break_off()
            if failed:
                return
            if any_layer:
                raise RuntimeError(
                    "layers attended without the KVpopCache: leave the model's attention alone in a pass"
                )
            raise RuntimeError("the model attended without the KVpopCache: leave its attention alone in a pass")
        self.attended = None
        self._recorded = self._recorded or step.recorded
        if not step.recorded:  # a recorded pass has not been executed
            self._count(step.length, step.counts)
        if self.policy.compresses:  # a prompt that goes on has not been evicted from
            self.protected = [p if length <= p else 0 for p, length in zip(self.protected, self._lengths, strict=True)]
        for sequence_lengths in self._lengths_by_device.values():
            sequence_lengths.advance(step.counts)

    def _break_off(self) -> None:
        """Leave a pass that did not end. The cache is as before the pass if no layer has attended, nor a state moved on."""
        self._broken = bool(self.attended) or self.recurrent
        if not self._broken:
            self._go_to(*self._before)
        self.attended = None

    def _count(self, columns: int, tokens: list[int]) -> None:
        self._columns += columns
        self.passes += 1
        self._lengths = [length + count for length, count in zip(self._lengths, tokens, strict=True)]

    def replayed(self, passes: int = 1) -> None:
        """Record on the host that a CUDA graph of a pass of one token per row was replayed.

        The device has counted the tokens, the host has not. Call this before the next pass outside the graph,
        and before :meth:`held`.

        Args:
            passes: number of replays.

        Raises:
            ValueError: ``passes`` is not a number of passes, or the policy ``full`` had no room for them.
            RuntimeError: the cache is empty, or the previous pass was interrupted.
        """
        if type(passes) is not int or passes < 0:
            raise ValueError(f"passes must be an integer of at least 0, got {passes!r}")
        if not self._lengths or self._broken or self.attended is not None:
            raise RuntimeError(
                "a KVpopCache that is empty, or broken off in a pass, replays nothing: begin with a prompt"
            )
        if not passes:
            return
        lengths = [length + passes for length in self._lengths]
        self._check_room(lengths)
        warn_of_positions(self._lengths, lengths, self._positions)
        self._count(passes, [passes] * len(self._lengths))

    # interface of transformers.Cache

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Return keys and values unchanged.

        The step receives them through the attention function.

        Raises:
            ConfigError: no step has begun, so the model would attend without the cache.
        """
        if self.attended is None:
            raise ConfigError("this model's attention is not the KVpopCache's: make one with KVpopCache(model, ...)")
        return key_states, value_states

    def __len__(self) -> int:
        return self.policy.model.num_layers

    def __repr__(self) -> str:
        roles = self.policy.retention
        return f"KVpopCache({self.policy.name}, budget={roles.budget}, sinks={roles.sinks}, window={roles.window}, lengths={self._lengths})"

    @property
    def batch_size(self) -> int:
        """Number of rows, -1 before the first pass."""
        return len(self._lengths) or -1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns that a longer text need not bring again, pads included.

        These are all columns seen, whether their tokens are held or not. With protected prompts they are the
        columns of the protected tokens. Within a pass, whose layers may ask for their queries' columns, they are those
        before it.
        """
        if self.attended is not None:
            return self._columns
        if not self._rows.any_protects(self.policy) or not self._lengths:
            return self._columns
        unprotected = (length - protected for length, protected in zip(self._lengths, self.protected, strict=True))
        return self._columns - max(0, *unprotected)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the largest number of tokens: the budget under the policy ``full``, else -1 for none."""
        return self.policy.retention.budget if self.policy.keeps_all else -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of columns including the pass, and the offset 0."""
        return self._columns + query_length, 0

    def reset(self) -> None:
        """Forget all tokens.

        The pages are emptied and kept for the next batch with the same number of rows. CUDA graphs recorded with them
        stay valid.
        """
        if (decoder := self._decoder()) is not None:
            restore_attention(decoder)
        self._forget()
        for layer in self._layers.values():
            layer.clear(self._made.count)
        for sequence_lengths in self._lengths_by_device.values():
            sequence_lengths.restart()

    def __deepcopy__(self, memo):
        """Return a copy for the same model, with separate pages that no CUDA graph holds."""
        copied = memo[id(self)] = object.__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        copied._recorded = False
        return copied

    __reduce__ = _refusal(
        "belongs to the model that it was made for", "do not pickle it, and copy it by copy.deepcopy()"
    )

    @property
    def is_linear(self) -> list[bool]:
        """False for every layer: masks are those of the policy's layers."""
        return [False] * len(self)

    is_sliding = is_dummy = is_linear

    @property
    def is_compileable(self) -> bool:
        """False, because the kernels cannot be compiled."""
        return False

    @property
    def is_croppable(self) -> bool:
        """False, because tokens cannot be removed."""
        return False

    crop = _refusal("takes no token back", "leave crop() out, and start anew with reset()")
    # assisted generation asks for it
    activate_past_recording = _refusal("takes no token back", "leave assistant_model and prompt_lookup_num_tokens out")
    # before the prompt, neither the cache nor the model knows num_beams
    reorder_cache = _refusal("does not exchange rows", "set num_beams to 1")
    batch_repeat_interleave = _refusal(
        "does not repeat rows", "repeat the inputs of generate() instead, or set num_return_sequences"
    )
    batch_select_indices = _refusal("does not choose among rows", "make one cache for each group of rows")
    offload = prefetch = _refusal("stays where it is", "leave offloading out")
