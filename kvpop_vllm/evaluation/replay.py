"""Replay: a long text as a prompt, and a policy's divergence from dense predictions by position."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvpop_vllm.distill.hook import POSITIONS
from kvpop_vllm.evaluation.backends import Run

MEASURES = ("nll", "kl", "agreement")


def predictions(run: Run, tokens: torch.Tensor) -> torch.Tensor:
    """Return hidden states ``[S - 1, E]`` that predict all tokens of a row ``[S]`` but the first."""
    return run.hidden(tokens[:-1])


def compare(run: Run, tokens: torch.Tensor, dense: torch.Tensor, bucket: int) -> dict:
    """Compare predictions of a row under a policy with those of the dense model.

    Args:
        run: the model under the policy.
        tokens: ``[S]``.
        dense: hidden states of the dense model (:func:`predictions`).
        bucket: positions of a bucket.

    Returns:
        Means over all positions: ``nll`` of the next token in nats, ``kl`` = ``KL(dense || policy)`` in nats
        over the whole vocabulary, ``agreement``, the share of positions with the same most likely token.
        ``*_by_position``: lists of means over buckets of the query's position; the last bucket is shorter if
        they do not divide S - 1. ``bucket`` itself.
    """
    own = predictions(run, tokens)
    found = torch.cat([_at(run, own, dense, tokens[1:], a) for a in range(0, len(own), POSITIONS)], 1)
    means = {name: values.mean().item() for name, values in zip(MEASURES, found, strict=True)}
    by_position = {
        f"{name}_by_position": [part.mean().item() for part in values.split(bucket)]
        for name, values in zip(MEASURES, found, strict=True)
    }
    return means | by_position | {"bucket": bucket}


def _at(run: Run, own: torch.Tensor, dense: torch.Tensor, expected: torch.Tensor, a: int) -> torch.Tensor:
    """Return :data:`MEASURES` ``[3, n]`` of the positions from ``a`` on, in float64."""
    cut = slice(a, a + POSITIONS)
    logp, exact = (run.logits(hidden[cut]).log_softmax(-1) for hidden in (own, dense))
    nll = F.nll_loss(logp, expected[cut].to(logp.device), reduction="none")
    kl = F.kl_div(logp, exact, reduction="none", log_target=True).sum(-1)
    return torch.stack([nll, kl, (logp.argmax(-1) == exact.argmax(-1)).float()]).double().cpu()
