"""One KV head of one request by definition, token by token in float64; shares no code with the kernels."""

from dataclasses import dataclass, field

import torch

from kvpop_vllm.kernels import ops
from kvpop_vllm.scorers.linear import LinearWeights
from kvpop_vllm.scorers.mlp import MLPWeights


@dataclass
class Exact:
    """Retained tokens, raw scores, and an unstabilised mLSTM state that begins with token ``begins``.

    The logits of the first tokens get a ``bias``. ``sinks`` are the logits of the query heads' attention sinks.
    """

    rule: ops.RetentionRule
    head: int
    budget: int
    tokens: dict = field(default_factory=dict)  # position -> (k, v)
    score: dict = field(default_factory=dict)
    state: tuple = (0.0, 0.0)
    gone: list = field(default_factory=list)  # (k, v) of all evicted tokens
    begins: int = 0
    bias: tuple = ()
    sinks: tuple = ()

    def weight(self, name):
        tensor = getattr(self.rule.scorer, name)
        return None if tensor is None else tensor[self.head].double()

    def phi(self, a):
        return (
            torch.cat([a.softmax(0), (-a).softmax(0)]) if self.rule.scorer.feature_map == "hedgehog" else a.softmax(0)
        )

    def gate(self, x, name):
        a, cap = self.weight(f"{name}_weight") @ x + self.weight(f"{name}_bias"), self.rule.scorer.gate_softcap
        return a if cap is None else cap * torch.tanh(a / cap)

    def update(self, x):
        w, size = self.rule.scorer, len(x) // 2
        value = x[size:] if w.v_proj is None else x @ self.weight("v_proj")
        key = self.phi(x @ self.weight("k_proj"))
        i, f = torch.exp(self.gate(x, "igate")), torch.sigmoid(self.gate(x, "fgate"))
        self.state = f * self.state[0] + i * torch.outer(key, value), f * self.state[1] + i * key

    def read(self, x):
        query = self.phi(x @ self.weight("q_proj"))
        h = (query @ self.state[0]) / (query @ self.state[1] + 1e-6)
        if self.rule.scorer.norm_weight is not None:
            h = h / torch.sqrt((h * h).mean() + 1e-6) * self.weight("norm_weight")
        r = self.weight("out_weight") @ (h * torch.sigmoid(h)) + self.weight("out_bias")
        return float(r if self.rule.scorer.skip_weight is None else r + self.weight("skip_weight") @ x)

    def raw_score(self, x):
        w = self.rule.scorer
        if isinstance(w, ops.NoScore):
            return 0.0
        if isinstance(w, ops.KeyNorm):
            return -float(x[: len(x) // 2].norm())
        if isinstance(w, LinearWeights):
            return float(self.weight("weight") @ x + self.weight("bias"))
        if isinstance(w, MLPWeights):
            hidden = x @ self.weight("fc1_weight") + self.weight("fc1_bias")
            return float(self.weight("fc2_weight") @ (hidden * torch.sigmoid(hidden)) + self.weight("fc2_bias"))
        return self.read(x)

    def step(self, position, q, k, v, scale, gate_scores=None):
        """Advance the head by one token.

        Returns:
            Output ``[G, D]``, log-sum-exp ``[G]``, weighted mean of the values' magnitudes ``[G, D]``, and
            margin of the decision.
        """
        rule, margin = self.rule, float("inf")
        k, v, q = k.double(), v.double(), q.double()
        x = torch.cat([k, v])
        if rule.scorer.recurrent and position >= self.begins:
            self.update(x)
            if not rule.scorer.delayed:
                self.score[position] = self.read(x)
        self.tokens[position] = (k, v)
        leaving = position - rule.window
        if gate_scores is not None:
            self.score[position] = float(gate_scores)
        if leaving >= rule.sinks and leaving not in self.score:
            self.score[leaving] = self.raw_score(torch.cat(self.tokens[leaving]))
        for t in [t for t in self.tokens if self.below(t, leaving)]:
            self.gone.append(self.tokens.pop(t))
        novelty = self.novelty(scale) if isinstance(rule.scorer, ops.MomentResidual) else {}
        ranked = sorted(
            (
                self.ranked_by(t, position) * novelty.get(t, 1.0)
                + (position - t) // rule.decay_step * float(rule.log_gamma[self.head]),
                t,
            )
            for t in self.tokens
            if rule.sinks <= t <= leaving
        )
        surplus = len(ranked) - (self.budget - rule.sinks - rule.window)
        if 0 < surplus < len(ranked):
            margin = ranked[surplus][0] - ranked[surplus - 1][0]
        for _, t in ranked[: max(0, surplus)]:
            self.gone.append(self.tokens.pop(t))
        keys, values = (torch.stack(rows) for rows in zip(*self.tokens.values(), strict=True))
        bias = [float(self.bias[t]) if t < len(self.bias) else 0.0 for t in self.tokens]
        logits = q @ keys.T * scale + torch.tensor(bias, dtype=torch.float64)
        if self.sinks:  # one more key, of value 0
            logits = torch.cat([logits, torch.tensor(self.sinks, dtype=torch.float64).unsqueeze(-1)], -1)
        weights = logits.softmax(-1)[:, : len(keys)]
        if isinstance(rule.scorer, ops.AttentionMass | ops.MomentResidual):
            for t, mass in zip(self.tokens, weights.mean(0).tolist(), strict=True):
                self.score[t] = mass + (self.score.get(t, 0.0) if self.mean else 0.0)
        out, lse, magnitude = weights @ values, logits.logsumexp(-1), weights @ values.abs()
        if rule.moment_correction and self.gone:
            out, magnitude = self.corrected(out, lse, magnitude, q, scale)
        return out, lse, magnitude, margin

    def below(self, t, leaving):
        """Return whether a token left the window with too low a score to stay, even if slots are free."""
        scorer, sinks = self.rule.scorer, self.rule.sinks
        threshold = scorer.threshold if isinstance(scorer, ops.GateScore) else None
        return threshold is not None and sinks <= t <= leaving and self.score[t] < threshold

    def evicted(self):
        """Return number, mean key, mean value and value-key covariance ``[D, D]`` of all evicted tokens."""
        keys, values = (torch.stack(rows) for rows in zip(*self.gone, strict=True))
        outer = torch.einsum("tv,tk->vk", values, keys) / len(keys)
        return len(keys), keys.mean(0), values.mean(0), outer - torch.outer(values.mean(0), keys.mean(0))

    def corrected(self, out, lse, magnitude, q, scale):
        count, key, value, covariance = self.evicted()
        weight = (count * torch.exp(scale * q @ key - lse)).unsqueeze(-1)  # relative to what is retained
        added = value + scale * q @ covariance.T
        largest = value.abs() + scale * q.abs() @ covariance.abs().T
        return (out + weight * added) / (1 + weight), (magnitude + weight * largest) / (1 + weight)

    @property
    def mean(self):
        return isinstance(self.rule.scorer, ops.AttentionMass) and self.rule.scorer.mean

    def ranked_by(self, t, position):
        """Return the score of token t without its decay, before the query at ``position`` attends."""
        if isinstance(self.rule.scorer, ops.GateScore) and self.rule.scorer.ages:
            return self.score[t] * (position - t)
        return self.score[t] / (position - t) if self.mean else self.score[t]

    def novelty(self, scale):
        """Return each value's distance from the one predicted by the moments of the evicted tokens."""
        if not self.gone:
            return {t: float(v.norm()) for t, (_, v) in self.tokens.items()}
        _, _, value, covariance = self.evicted()
        return {t: float((v - value - scale * covariance @ k).norm()) for t, (k, v) in self.tokens.items()}

    def long_range(self, position):
        """Return the tokens in long-range slots after step ``position``, with their scores."""
        return {t: self.score[t] for t in self.tokens if self.rule.sinks <= t <= position - self.rule.window}
