"""Policies of the naive oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import torch

from .oracle_coupled import corrected_attention, masked_attention, retained_by_attention
from .oracle_online import retained_by_scores
from .oracle_random import retained_by_draws
from .oracle_rounds import EXPECTED_LOGITS, REDUNDANCY, SAMPLED_MASS, retained_by_rounds
from .oracle_scores import (
    MEAN_MASS,
    MOMENT_RESIDUAL,
    NEWEST_MASS,
    PROMPT_VOTES,
    RANDOM_DRAW,
    RECENCY,
    log_gamma,
    raw_scores,
    read_scorer,
)
from .oracle_statistics import read_query_statistics
from .oracle_votes import divided_slots, vote_scores


@dataclass(frozen=True, eq=False)
class LayerDecisions:
    """Decisions of one layer.

    Attributes:
        visible: bool ``[H, S, S]``. ``visible[h, q]`` is the retained set at step ``q``.
        margins: float64 ``[H, S]``, see :func:`retained_by_ranking`.
        scores: raw ``r_t``, ``[H, S]``, NaN where undefined. For attention masses, which change with ``q``,
            ``[H, S, 2]`` over queries: the scores of the best evicted token and of the worst retained one.
        lost: int64 ``[H, S]``, the best of the tokens evicted at ``q``, -1 if there is none.
    """

    visible: torch.Tensor
    margins: torch.Tensor
    scores: torch.Tensor
    lost: torch.Tensor


def shared_slots(shares: Sequence[Sequence[float]], topk: int) -> tuple[tuple[int, ...], ...]:
    """Return the long-range slots of each head of each layer, ``topk`` in the mean, in proportion to ``shares``.

    All heads up to one have together the nearest whole number of slots.
    """
    # fractions, since sums of floats depend on their order
    fractions = [Fraction(part) for layer in shares for part in layer]
    upto = [round(sum(fractions[: i + 1]) / sum(fractions) * len(fractions) * topk) for i in range(len(fractions))]
    slots = iter(b - a for a, b in zip([0, *upto], upto, strict=False))
    return tuple(tuple(next(slots) for _ in layer) for layer in shares)


@dataclass(frozen=True, eq=False)
class OraclePolicy:
    """Retention policy per KV head. ``B = sinks + window + topk``.

    Attributes:
        scorer: ``"recency"``, ``"key norm"``, ``"newest mass"``, ``"mean mass"`` or ``"moment residual"``
            (:func:`retained_by_attention`), ``"random draw"`` (:func:`retained_by_draws`), ``"sampled mass"``,
            ``"redundancy"`` or ``"expected logits"`` (:func:`retained_by_rounds`), ``"prompt votes"``
            (:func:`vote_scores`), or the result of :func:`read_scorer`.
        sinks: ``s``.
        window: ``w``.
        topk: ``k``, or k of each layer if they differ, or of each head of each layer.
        step: ``n``, positions per decay step.
        log_gamma: decay in nats per step, ``[layer][head]``. ``None`` takes the scorer's own (0 for the
            others).
        corrected: True if outputs are corrected by the moments of evicted tokens.
        ages: True if a token's score is multiplied by its age (TRIM-KV).
        threshold: a token with a lower score is evicted when it leaves the window (DMS).
        protect: ``p``, tokens at the beginning that every query sees, instead of sinks, 0 for sinks only.
        replay: ``R``. With protected tokens a recurrent scorer begins at token ``max(cartridge_slots, p - R)``.
        cartridge_slots: number of the first tokens that are slots of cartridges.
        seeds: seeds of draws, the server's and the request's.
        prompt: number of prompt tokens that are held until the last of them, if the prompt votes.
        adaptive_head_budgets: True if the heads of a layer divide their k at that point.
        statistics: folder with statistics of the model's queries, None if nothing is ranked by them.
    """

    scorer: str | dict
    sinks: int
    window: int
    topk: int | tuple[int, ...] | tuple[tuple[int, ...], ...]
    step: int = 1
    log_gamma: Sequence[Sequence[float]] | None = None
    corrected: bool = False
    ages: bool = False
    threshold: float | None = None
    protect: int = 0
    replay: int = 1024
    seeds: tuple[int, int] = (0, 0)
    prompt: int = 0
    adaptive_head_budgets: bool = False
    cartridge_slots: int = 0
    statistics: str | Path | None = None

    @classmethod
    def from_scorer(cls, folder: str | Path, **changes: int) -> OraclePolicy:
        """Return the policy of a scorer folder. ``changes`` override its fields.

        If the config has shares, k is the mean of the heads.
        """
        scorer = read_scorer(folder)
        config = scorer["config"]
        fields = {name: config[name] for name in ("sinks", "window", "topk")}
        fields["step"] = config["decay"]["step"] if "decay" in config else 1
        fields["ages"] = config["scorer"] == "trimkv"
        fields["threshold"] = 0.0 if config["scorer"] == "dms" else None
        fields |= changes
        if "shares" in config:
            fields["topk"] = shared_slots(config["shares"], fields["topk"])
        return cls(scorer=scorer, **fields)

    @classmethod
    def streaming(cls, sinks: int, window: int, topk: int) -> OraclePolicy:
        """Return StreamingLLM: long-range tokens are ranked by position."""
        return cls(RECENCY, sinks, window, topk)

    @classmethod
    def full(cls) -> OraclePolicy:
        """Return a policy that keeps everything."""
        return cls(RECENCY, sinks=0, window=2**62, topk=0)  # no token ever leaves this window

    @property
    def budget(self) -> int:
        """``B`` in tokens per KV head. The smallest if layers differ."""
        return min(self.budgets(1))

    def budgets(self, layers: int) -> list[int]:
        """Return the smallest ``B`` of each of ``layers`` layers, or of all layers that have their own ``k``."""
        topk = self.topk if isinstance(self.topk, tuple) else (self.topk,) * layers
        return [self.sinks + self.window + min(k if isinstance(k, tuple) else (k,)) for k in topk]

    @property
    def mean_topk(self) -> int:
        """Mean ``k`` of all heads of all layers. All layers have as many heads."""
        by_layer = self.topk if isinstance(self.topk, tuple) else (self.topk,)
        heads = [k for layer in by_layer for k in (layer if isinstance(layer, tuple) else (layer,))]
        return sum(heads) // len(heads)

    @property
    def never_evicted(self) -> int:
        """Number of tokens at the beginning that are never evicted: p, or s without protection."""
        return self.protect or self.sinks

    def protecting(self, protect: bool | int, prompt: int, cartridge_slots: int = 0) -> OraclePolicy:
        """Return the policy for a prompt of ``prompt`` tokens after ``cartridge_slots`` slots.

        The first ``protect`` tokens of prompt and answer are protected, True for the prompt, and so are the slots. If
        the prompt votes, it is held until its end instead.
        """
        if self.scorer == PROMPT_VOTES:
            return replace(self, prompt=prompt)
        protected = cartridge_slots + (prompt if protect is True else protect)
        return replace(self, protect=protected, cartridge_slots=cartridge_slots)

    def decay(self, layer: int, heads: int) -> list[float]:
        """Return ``log gamma`` of each head of one layer."""
        if self.log_gamma is not None:
            return list(self.log_gamma[layer])
        undecayed = isinstance(self.scorer, str) or "decay" not in self.scorer["config"]
        return [0.0] * heads if undecayed else log_gamma(self.scorer, layer)

    @property
    def borrows(self) -> bool:
        """True if a gate reads the last channel of each KV head's first query. The query then has 0 there."""
        return isinstance(self.scorer, dict) and self.scorer["config"].get("reads") == "query"

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        visible: torch.Tensor,
        added: torch.Tensor | None = None,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return outputs ``[S, H * G * D]`` under the retained sets ``[H, S, S]``.

        Biases ``added [H, S]`` and logits of attention sinks ``[H * G]`` are as in :func:`masked_attention`.
        """
        attention = corrected_attention if self.corrected else masked_attention
        return attention(query, key, value, visible, added, sink_logits)

    def decide(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        forced: torch.Tensor | None = None,
        bias: Sequence[tuple[int, int, float]] = (),
        hidden: torch.Tensor | None = None,
        channel: torch.Tensor | None = None,
        added: torch.Tensor | None = None,
        sink_logits: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> LayerDecisions:
        """Decide which tokens of a whole sequence a layer retains.

        Args:
            layer: layer index.
            query: ``[H * G, S, D]``.
            key: ``[H, S, D]``, as cached.
            value: ``[H, S, D]``.
            forced: judge these retained sets, bool ``[H, S, S]``, instead of making them.
            bias: ``(head, token, by)``: add ``by`` to the token's score when sets are made. Margins are
                computed without it.
            hidden: see :func:`raw_scores`.
            channel: see :func:`raw_scores`.
            added: biases of logits, see :func:`masked_attention`.
            sink_logits: ``[H * G]``, likewise.
            scale: see :func:`retained_by_attention`.
        """
        decay = self.decay(layer, len(key))
        topk = self.topk[layer] if isinstance(self.topk, tuple) else self.topk
        shape = (self.never_evicted, self.window, topk)
        if self.scorer in (NEWEST_MASS, MEAN_MASS, MOMENT_RESIDUAL):
            if self.step != 1 or self.log_gamma is not None:
                raise ValueError("the oracle knows no decay of attention masses")
            inputs = query, key, value, self.scorer, *shape
            options = {"added": added, "sink_logits": sink_logits, "scale": scale, "forced": forced, "bias": bias}
            return LayerDecisions(*retained_by_attention(*inputs, **options))
        if self.scorer == RANDOM_DRAW:
            return LayerDecisions(*retained_by_draws(layer, *key.shape[:2], self.seeds, *shape, forced=forced))
        if self.scorer in (SAMPLED_MASS, REDUNDANCY, EXPECTED_LOGITS):
            statistics = None if self.statistics is None else read_query_statistics(self.statistics)[layer]
            settings = layer, self.seeds, self.protect, self.sinks, self.window, topk, statistics, self.mean_topk
            inputs = query, key, value, self.scorer, *settings
            return LayerDecisions(*retained_by_rounds(*inputs, sink_logits=sink_logits, forced=forced, bias=bias))
        begins = max(self.cartridge_slots, self.protect - self.replay)
        if self.scorer == PROMPT_VOTES:
            scores = vote_scores(query, key, self.prompt, self.window, sink_logits)
        else:
            scores = raw_scores(self.scorer, layer, key, value, self.window, hidden, channel, begins)
        biased, divide = scores.double().numpy().copy(), math.inf
        for head, token, by in bias:
            biased[head, token] += by
        if self.adaptive_head_budgets:
            topk, divide = divided_slots(biased, self.prompt, *shape)
        rule = {"step": self.step, "ages": self.ages, "threshold": self.threshold, "first_eviction": self.prompt}
        # sets are made with the biases, and judged without them
        if forced is None:
            forced = retained_by_scores(biased, decay, *shape[:2], topk, **rule)[0]
        _, margins, _, lost = retained_by_scores(scores.numpy(), decay, *shape[:2], topk, **rule, forced=forced)
        # the comparison across heads is a decision of the prompt's last token
        margins[:, self.prompt : self.prompt + 1].clamp_max_(divide)
        return LayerDecisions(forced, margins, scores, lost)
