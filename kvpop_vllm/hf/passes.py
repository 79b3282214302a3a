"""Passes of a cache: what a pass goes on from, its positions and protected tokens, and what it leaves.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import torch

from kvpop_vllm.config import ConfigError, protected_tokens
from kvpop_vllm.hf.attention_patch import Step
from kvpop_vllm.hf.checks import (
    check_inputs,
    check_pads,
    check_positions,
    check_text,
    columns_of_tokens,
    warn_of_positions,
)
from kvpop_vllm.hf.layer import recording


class CachePasses:
    """Methods of a :class:`kvpop_vllm.hf.KVpopCache` that begin and end passes."""

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
            ValueError: the pass does not continue where the cache ends, or repeats what cartridges hold.
            RuntimeError: the previous pass was interrupted, or the pass cannot be recorded.
        """
        self._check_begins(decoder, inputs)
        rows, length = inputs.shape[:2]
        self._rows.check_number(rows)
        columns, lengths = self._begins_at(mask, positions, length)
        in_tails = [before > 0 and before >= p for before, p in zip(lengths, self.protected, strict=True)]
        of_text = columns < self.text_columns
        decoding = length == 1 and not of_text and columns == self._columns and len(lengths) > 0 and all(in_tails)
        cartridge_slots = self._cartridges.count
        lengths = lengths or [cartridge_slots] * rows
        recorded = self._is_recorded(inputs.device, decoding)
        # on an accelerator, reading the mask makes the host wait
        look = not recorded and (inputs.device.type == "cpu" or not decoding)
        counts = columns_of_tokens(mask, [before - cartridge_slots for before in lengths], columns, length, look)
        after = [before + count for before, count in zip(lengths, counts, strict=True)]
        self._check_lengths(lengths, after, columns + length)
        self._check_counts(inputs, counts)
        self._replace_rows(rows)
        sequence_lengths = self._sequence_lengths(inputs.device, rows)
        protected = self.protected or [cartridge_slots] * rows
        if decoding or length == 1 and all(counts) and not self._protects:
            # read from the device, so that a replayed CUDA graph finds the latest
            position_ids, starts = sequence_lengths.positions.unsqueeze(1).clone(), None
        else:
            position_ids, starts = _positions(after, length).to(inputs.device), lengths
            protected = self._protected_in(columns, length, lengths, after, protected)
        if look and positions is not None:
            check_positions(positions, position_ids - cartridge_slots, counts)
        if self.text is not None and self.next_text is not None and len(self.text) == len(self.next_text):
            check_text(self.next_text, self.text, mask, columns)
        elif self.text is not None:
            # generate() also knows the token that this pass should have read
            self.text = self.text[:, :columns]
        self.next_text = None
        self._most_protected = max(map(min, protected, after))
        for layer in self._layers.values():
            self._make_room(layer)
        # nothing before this line has changed what the cache holds, so a refused pass can be repeated
        self._before = self._columns, self._lengths, self.protected
        self._go_to(columns, lengths, protected)
        self.attended = set()
        return Step(self, position_ids, starts, counts, recorded)

    def _is_recorded(self, device: torch.device, decoding: bool) -> bool:
        """Return whether the pass is recorded into a CUDA graph.

        Raises:
            RuntimeError: it is, and is not a decode step of layers that have pages.
        """
        recorded = recording(device)
        if recorded and not (decoding and len(self._layers) == len(self)):
            raise RuntimeError(
                "a CUDA graph can hold a pass of one token a row only, and not the first or one of protected tokens: let the prompt, the"
                " protected tokens and a token pass before it"
            )
        return recorded

    def _check_counts(self, inputs: torch.Tensor, counts: list[int]) -> None:
        """Check the pads of a pass whose rows have ``counts`` tokens, and the beginning of a first pass.

        Raises:
            ValueError: the model reads pads, or the first pass repeats what cartridges hold.
        """
        if self.recurrent:
            check_pads(counts, inputs.shape[1], self._biased)
        if not self._columns:
            self._cartridges.check_inputs(inputs, counts)

    def _replace_rows(self, rows: int) -> None:
        """Forget the pages of a batch with another number of rows.

        Raises:
            ValueError: a CUDA graph holds them.
        """
        if self._lengths_by_device and len(next(iter(self._lengths_by_device.values())).positions) != rows:
            self._check_unrecorded()
            self._lengths_by_device, self._layers = {}, {}

    def _protected_in(
        self, columns: int, length: int, lengths: list[int], after: list[int], protected: list[int]
    ) -> list[int]:
        """Return p of each row in a pass of prefill.

        p covers a prompt, or the rest of one. A single token after a prompt is an answer's, and leaves p, unless
        it belongs to the text of a call of ``generate()``.

        Args:
            columns: columns after which the pass continues.
            length: columns of the pass.
            lengths: tokens of each row before the pass.
            after: tokens of each row after the pass.
            protected: p of each row before the pass.
        """
        cartridge_slots, of_prompt = self._cartridges.count, length > 1 or columns < self.text_columns
        protects = self._rows.protects(self.policy, len(lengths))
        return [
            cartridge_slots + protected_tokens(protect, end - cartridge_slots)
            if columns < self._columns or p == before and (of_prompt or before == cartridge_slots)
            else p
            for protect, p, before, end in zip(protects, protected, lengths, after, strict=True)
        ]

    def _check_begins(self, decoder, inputs: torch.Tensor) -> None:
        """Check that a pass of a decoder may begin with inputs ``[R, L, ..]``.

        Raises:
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
        dropped = self._columns - reusable
        return reusable, [max(self._cartridges.count, length - dropped) for length in self._lengths]

    def _check_lengths(self, lengths: list[int], after: list[int], columns: int) -> None:
        """Check that rows may grow from some lengths to others, in so many columns. Warn beyond the model's positions.

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
            end = f"which {self.policy.name} keeps" if self.policy.keeps_all else "up to which the model attends alike"
            raise ValueError(
                f"{max(lengths)} tokens are more than max_length {longest}, {end}: raise max_length, or shorten the text"
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

    def end(self, step: Step, failed: bool) -> None:
        """Finish a pass. ``failed`` is True if it raised.

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
        """Leave a pass that did not end. The cache is as before it if no layer has attended, and no state moved on."""
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
        self._check_begun("replays nothing")
        if not passes:
            return
        lengths = [length + passes for length in self._lengths]
        self._check_room(lengths)
        warn_of_positions(self._lengths, lengths, self._positions)
        self._count(passes, [passes] * len(self._lengths))

    def _check_begun(self, consequence: str) -> None:
        """Check that the cache holds tokens and that no pass was broken off; ``consequence`` ends the error.

        Raises:
            RuntimeError: it does not, or one was.
        """
        if not self._lengths or self._broken or self.attended is not None:
            raise RuntimeError(
                f"a KVpopCache that is empty, or broken off in a pass, {consequence}: begin with a prompt"
            )


def _positions(after: list[int], length: int) -> torch.Tensor:
    """Return positions ``[R, length]`` of rows that end with ``after`` tokens, 0 for pads."""
    shift = torch.tensor([end - length for end in after]).unsqueeze(1)
    return (torch.arange(length) + shift).clamp_min(0)
