"""Statistics of a model's queries (:mod:`kvpop_vllm.calibration.statistics`), measured on texts."""

from collections.abc import Iterable, Sequence

import torch

from kvpop_vllm.calibration.statistics import QueryStatistics
from kvpop_vllm.config import ConfigError
from kvpop_vllm.model_hook import Attend, Dense, check_rotation, hidden_states
from kvpop_vllm.model_shape import rope_of, shape_of
from kvpop_vllm.rope import band_norms, check_rope, inverse_frequencies, rope_at, turned

ADVICE = "choose another model, or another policy"


class QuerySums:
    """Sums over the queries of every layer, as they would be at position 0; an :class:`Attend`.

    Rows begin at position 0. Sums are float64, on the model's device.

    Args:
        rope: rope parameters of the model.
        attend: attention of the layers.

    Attributes:
        tokens: number of tokens of each layer so far.
        mean: ``[Hq, D]``, sum of the queries of each layer.
        norm: ``[Hq, F]``, sum of their norms in each band.
    """

    def __init__(self, rope: dict, attend: Attend | None = None):
        self.rope, self.attend = rope, attend or Dense()
        self.tokens: dict[int, int] = {}
        self.mean: dict[int, torch.Tensor] = {}
        self.norm: dict[int, torch.Tensor] = {}

    def __call__(self, layer, q, k, v, scale):
        """Add a layer's queries ``[B, Hq, S, D]`` to its sums, and return its attention. See :class:`Attend`."""
        # back to position 0, since a row begins there
        base = turned(q.double(), -torch.arange(q.shape[2], device=q.device), rope_at(self.rope, layer))
        sums = {"mean": base.sum((0, 2)), "norm": band_norms(base, _pairs(self.rope, layer, q.shape[3])).sum((0, 2))}
        for name, added in sums.items():
            by_layer = getattr(self, name)
            by_layer[layer] = by_layer.get(layer, 0) + added
        self.tokens[layer] = self.tokens.get(layer, 0) + q.shape[0] * q.shape[2]
        return self.attend(layer, q, k, v, scale)


@torch.no_grad()
def query_statistics(model: torch.nn.Module, rows: Iterable[Sequence[int]]) -> QueryStatistics:
    """Return the statistics of a model's queries over rows of tokens.

    Args:
        model: from :func:`kvpop_vllm.model_hook.load_model`.
        rows: token ids of each row, which begins at position 0.

    Raises:
        ConfigError: a layer's rotation is not static or not what the model's config says, there are no rows, or a
            layer's queries are not finite.
    """
    shape, rope = shape_of(model.config, "the model's config"), rope_of(model.config)
    if rope is None:
        raise ConfigError(f"layers of this model have different rotary embeddings, or none: {ADVICE}")
    check_rope(rope, "the model's config")
    # the sums undo the rotation that the config describes
    check_rotation(model, rope)
    sums = QuerySums(rope)
    for row in filter(len, rows):
        hidden_states(model, row, range(len(row)), sums)
    if len(sums.tokens) != shape["num_layers"]:
        raise ConfigError(f"{len(sums.tokens)} of {shape['num_layers']} layers have attended: give texts, or {ADVICE}")
    sizes = {name: shape[name] for name in ("model_type", "num_layers", "num_heads", "num_kv_heads", "head_dim")}
    tensors = {
        name: [(by_layer[i] / sums.tokens[i]).float().cpu() for i in range(shape["num_layers"])]
        for name, by_layer in (("mean", sums.mean), ("norm", sums.norm))
    }
    sizes |= {"layers": shape.get("layers", ()), "rope": rope, "tokens": sums.tokens[0]}
    statistics = QueryStatistics(**sizes, **tensors)
    statistics.check("these statistics")
    return statistics


def _pairs(rope: dict, layer: int, head_dim: int) -> int:
    """Return the number of pairs of channels that a layer rotates."""
    rope = rope_at(rope, layer)
    return 0 if rope is None else len(inverse_frequencies(rope, head_dim))
