"""Pages of a cache's layers: when they are allocated, and that no CUDA graph loses them.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.hf.checks import warn_of_reference
from kvpop_vllm.hf.devices import check_kernels
from kvpop_vllm.hf.layer import LayerPages, SequenceLengths
from kvpop_vllm.hf.local_layers import LocalLayer


class AllocatedLayers:
    """Methods of a :class:`kvpop_vllm.hf.KVpopCache` that allocate and return the pages of its layers.

    The first pass allocates them, because only its keys have the dtype and the devices of the layers.
    """

    def _make_room(self, layer: LayerPages) -> None:
        """Allocate pages for the protected tokens in a layer, up to the end of the pass.

        Raises:
            ValueError: as :meth:`_check_unrecorded`, if the pages must be moved.
        """
        # protecting more tokens moves pages, and a graph would write to the old ones
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

    def _sequence_lengths(self, device: torch.device, rows: int) -> SequenceLengths:
        """Return the clock of a device, created with the progress of the rows if necessary."""
        if device not in self._lengths_by_device:
            with torch.inference_mode(False):
                cartridge_slots = self._cartridges.count
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
        """
        rule = self.policy.layer_rule(index, self._heads)
        check_kernels(like, rule)
        warn_of_reference(like)
        sequence_lengths = self._sequence_lengths(like.device, len(self._lengths))
        with torch.inference_mode(False):  # inference tensors cannot be written outside of inference mode
            budgets = self._budgets and {budget: layers[index] for budget, layers in self._budgets.items()}
            self._layers[index] = layer = LayerPages(rule, budgets, like, scale, sequence_lengths, self.policy.shifted)
            if self._cartridges.count:
                layer.place(*(part.to(like.device) for part in self._cartridges.layers[index]))
        return layer

    def local_layer(self, index: int, size: int) -> LocalLayer:
        """Return a layer of the model with windows or chunks of ``size`` tokens."""
        if index not in self._local:
            self._local[index] = LocalLayer(size)
        return self._local[index]
