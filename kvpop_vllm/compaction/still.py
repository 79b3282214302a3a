"""STILL, a trained compactor: a small network per layer that turns the cache of any corpus into P slots.

STILL (Baseten's *Towards Infinite Context Windows*) trains one network per layer, shared by the KV heads, once for many
corpora. Latents, one for each slot, read the keys and values by cross-attention. Compaction of a corpus is then one
prefill and one pass. Departures from it:

- Latents are shared by all layers, and queries and keys of the compactor have few channels. Values are not projected
  before the weighted sum: with a single head, the projection after it is the product of both. A compactor for 30
  layers of D = 64 is then 7 MB in float16.
- At the start a latent reads the token at its position alone, so an untrained compactor keeps evenly spaced tokens.
  Its own queries and keys have rotary embeddings of type default, whatever the model's are.
- RMSNorm takes the size of a latent away. The size of what the first block reads is a factor on keys and values.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from kvpop_vllm.compaction.cartridge import Layer
from kvpop_vllm.rope import rope_at, turned

BLOCKS = 2
"""Pairs of cross- and self-attention."""
WIDTH = 32
"""Channels of the compactor's queries and keys by default."""
ROPE = {"rope_type": "default", "rope_theta": 1e4}
"""Rotary embeddings of the compactor's queries and keys."""
PEAK = 8.0
"""Logit of a latent at its own position per rotated pair of channels, at the start."""


def latent_positions(tokens: int, slots: int) -> torch.Tensor:
    """Return the positions ``[P]`` of the latents, spread evenly from the first token to the last, int64."""
    return torch.linspace(0, tokens - 1, slots, dtype=torch.float64).round().long()


class Attention(nn.Module):
    """Attention of latents, with one head. Queries and keys are rotated. Values are the memory itself.

    At the start, queries and keys do not depend on what they are made from: weights are largest where positions are
    equal.

    Args:
        size: channels of latents and memory.
        width: channels of queries and keys.
        reads: True if the output is at first what is read, False if it is 0.
    """

    def __init__(self, size: int, width: int, reads: bool):
        super().__init__()
        self.query, self.key = nn.Linear(size, width), nn.Linear(size, width)
        self.out = nn.Linear(size, size, bias=False)
        # constant queries and keys: at the start a latent attends by distance alone
        start = torch.zeros(width)
        # q . k / sqrt(width) is then PEAK for each pair, where positions are equal
        start[: width // 2] = (PEAK * width**0.5) ** 0.5
        with torch.no_grad():
            for projection in (self.query, self.key):
                projection.weight.zero_()
                projection.bias.copy_(start)
            # the first block copies what it reads, and later ones add nothing at the start
            self.out.weight.copy_(torch.eye(size) if reads else torch.zeros(size, size))

    def forward(self, latents, memory, query_positions, key_positions) -> torch.Tensor:
        """Return ``[H, P, 2D]``.

        Args:
            latents: ``[H, P, 2D]``.
            memory: ``[H, T, 2D]``.
            query_positions: ``[P]``.
            key_positions: ``[T]``.
        """
        q = turned(self.query(latents), query_positions, ROPE)
        k = turned(self.key(memory), key_positions, ROPE)
        return self.out(scaled_dot_product_attention(q[None], k[None], memory[None])[0])


class Block(nn.Module):
    """Cross-attention to the tokens and self-attention of the latents, each with a residual and an RMSNorm after it."""

    def __init__(self, size: int, width: int, first: bool):
        super().__init__()
        self.cross, self.self = Attention(size, width, reads=first), Attention(size, width, reads=False)
        self.cross_norm, self.self_norm = nn.RMSNorm(size, eps=1e-6), nn.RMSNorm(size, eps=1e-6)

    def forward(self, latents, memory, places, tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the latents ``[H, P, 2D]``, and the root mean square of each before the first norm ``[H, P, 1]``."""
        latents = latents + self.cross(latents, memory, places, tokens)
        size = (latents.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        latents = self.cross_norm(latents)
        return self.self_norm(latents + self.self(latents, latents, places, places)), size


class LayerCompactor(nn.Module):
    """Compactor of one layer, shared by its KV heads.

    Args:
        head_dim: D.
        width: channels of queries and keys of the compactor.
        rope: rope parameters of the layer, None if it does not rotate.
    """

    def __init__(self, head_dim: int, width: int, rope: Mapping | None):
        super().__init__()
        size, self.rope = 2 * head_dim, rope
        self.blocks = nn.ModuleList(Block(size, width, first=i == 0) for i in range(BLOCKS))
        self.k, self.v = nn.Linear(size, head_dim, bias=False), nn.Linear(size, head_dim, bias=False)
        self.bias = nn.Linear(size, 1)
        # a buffer, because it is measured and stored, and not trained
        self.register_buffer("scale", torch.ones(2))
        with torch.no_grad():
            for head, half in zip((self.k, self.v), torch.eye(size).split(head_dim), strict=True):
                # the first half of a latent's channels is the key, the second the value
                head.weight.copy_(half)
            self.bias.weight.zero_()
            self.bias.bias.zero_()

    def forward(self, k: torch.Tensor, v: torch.Tensor, latents: torch.Tensor) -> Layer:
        """Return keys, values ``[H, P, D]`` in their dtype, and biases ``[H, P]`` float32.

        Args:
            k: rotated keys ``[H, T, D]`` of positions 0 to T - 1.
            v: values ``[H, T, D]``.
            latents: ``[P, 2D]``.
        """
        tokens = torch.arange(k.shape[1], device=k.device)
        places = latent_positions(k.shape[1], len(latents)).to(k.device)
        k_scale, v_scale = self.scale
        # keys without their rotation, which depends on the position in the corpus
        memory = torch.cat([turned(k.float(), -tokens, self.rope) / k_scale, v.float() / v_scale], -1)
        hidden, sizes = latents.expand(k.shape[0], -1, -1), []
        for block in self.blocks:
            hidden, size = block(hidden, memory, places, tokens)
            sizes.append(size)
        # the norm took away the size of what the first block read: sizes[0] restores it
        own_k = turned(self.k(hidden) * sizes[0] * k_scale, places, self.rope)
        own_v = self.v(hidden) * sizes[0] * v_scale
        return own_k.to(k.dtype), own_v.to(v.dtype), self.bias(hidden).squeeze(-1)


class Compactor(nn.Module):
    """Compactor of all layers of a model.

    Args:
        layers: layers of the model.
        head_dim: D.
        slots: P.
        rope: rope parameters of the model.
        width: channels of the compactor's queries and keys.
    """

    def __init__(self, layers: int, head_dim: int, slots: int, rope: Mapping, width: int = WIDTH):
        super().__init__()
        self.latents = nn.Parameter(torch.zeros(slots, 2 * head_dim))
        self.layers = nn.ModuleList(LayerCompactor(head_dim, width, rope_at(rope, i)) for i in range(layers))

    def forward(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Layer]:
        """Return the slots of every layer. See :class:`LayerCompactor`.

        Args:
            caches: keys and values ``[H, T, D]`` of every layer, of a text that begins at position 0.
        """
        return [layer(k, v, self.latents) for layer, (k, v) in zip(self.layers, caches, strict=True)]

    @torch.no_grad()
    def measure(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Set the unit of each layer's keys and of its values to their root mean square in ``caches``."""
        for layer, layer_caches in zip(self.layers, caches, strict=True):
            layer.scale.copy_(torch.stack([part.float().square().mean().sqrt() for part in layer_caches]))
