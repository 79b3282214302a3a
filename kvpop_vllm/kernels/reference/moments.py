"""Moments of a head's evicted tokens in plain torch, float32 (MomentKV, section 4; DESIGN "Scores from attention, and corrections")."""

import torch

from kvpop_vllm.cache.pages import moment_floats
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.kernels.reference.paging import HeadSlots


class HeadMoments:
    """Moments of one request and head in its pages during the step at ``q``.

    Attributes:
        count: n, number of tokens evicted so far; it follows from the position and the slots in use.
    """

    def __init__(self, slots: HeadSlots, rule: RetentionRule, q: int, in_use: int, scale: float):
        self.slots, self.scale = slots, scale
        self.size = slots.pages.layout.head_size
        self.count = max(0, q - rule.first - rule.first_long) - max(0, in_use - rule.first_long)
        self.first = rule.scorer.state_floats

    def _load(self):
        """Return mean key and value ``[D]`` and the sum of products of deviations ``[D, D]``.

        The sum has one row per key channel.
        """
        if self.count == 0:
            zeros = torch.zeros(self.size)
            return zeros, zeros.clone(), torch.zeros(self.size, self.size)
        flat = self.slots.load_state(moment_floats(self.size), self.first)
        return flat[: self.size], flat[self.size : 2 * self.size], flat[2 * self.size :].view(self.size, self.size)

    def take_in(self, slot: int) -> None:
        """Add the token in ``slot`` to the moments (Welford's update)."""
        key, value, products = self._load()
        k, v = self.slots.k(slot).float(), self.slots.v(slot).float()
        self.count += 1
        deviation = v - value
        key, value = key + (k - key) / self.count, value + deviation / self.count
        products = products + torch.outer(k - key, deviation)
        self.slots.store_state(torch.cat([key, value, products.flatten()]), self.first)

    def residuals(self, slots: torch.Tensor) -> torch.Tensor:
        """Return ``|v - vb - scale Sig k|`` of the tokens in ``slots [n]`` (eq. 10)."""
        _, value, products = self._load()
        keys, values = (x.float() for x in self.slots.gather(slots))
        return (values - value - self.scale / max(1, self.count) * keys @ products).norm(dim=-1)

    def correct(self, out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Return ``out [G, D]`` with the estimated contribution of the evicted tokens (eqs. 9, 11, 12).

        Args:
            out: attention over the retained tokens.
            lse: ``[G]`` log-sum-exps over the retained tokens.
            q: ``[G, D]`` queries.
        """
        if self.count == 0:
            return out
        key, value, products = self._load()
        evicted = value + self.scale / self.count * q.float() @ products
        mass = torch.log(torch.tensor(float(self.count))) + self.scale * q.float() @ key
        share = torch.sigmoid(mass - lse).unsqueeze(-1)
        return out + share * (evicted - out)
