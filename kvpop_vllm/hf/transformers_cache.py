"""Interface of ``transformers.Cache``: sizes, flags, and refusals of what a fixed cache cannot do.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from transformers import Cache

from kvpop_vllm.config import ConfigError


def _refusal(limitation: str, instead: str):
    """Return a method that raises a ConfigError: the cache's limitation, and what to do instead."""

    def refuse(self, *args, **kwargs):
        """Refuse. See the message."""
        raise ConfigError(f"a KVpopCache {limitation}: {instead}")

    return refuse


class TransformersCache(Cache):
    """Interface of ``transformers.Cache`` of a :class:`kvpop_vllm.hf.KVpopCache`."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Return keys and values unchanged.

        The step receives them through the attention function.
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

    crop = _refusal("cannot remove tokens", "leave crop() out, and start again with reset()")
    # assisted generation asks for it
    activate_past_recording = _refusal("cannot remove tokens", "leave assistant_model and prompt_lookup_num_tokens out")
    # before the prompt, neither the cache nor the model knows num_beams
    reorder_cache = _refusal("does not exchange rows", "set num_beams to 1")
    batch_repeat_interleave = _refusal(
        "does not repeat rows", "repeat the inputs of generate() instead, or set num_return_sequences"
    )
    batch_select_indices = _refusal("does not choose among rows", "make one cache for each group of rows")
    offload = prefetch = _refusal("stays where it is", "leave offloading out")
