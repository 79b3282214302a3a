"""Replay: a long text as a prompt, and a policy's divergence from dense predictions by position."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kvpop_vllm.evaluation.backends import Run
from kvpop_vllm.model_hook import POSITIONS

MEASURES = ("nll", "kl", "agreement")


class Predictions(NamedTuple):
    """Predictions of all tokens of a row but the first.

    Attributes:
        hidden: ``[S - 1, E]``, hidden states that predict.
        logits: returns float32 logits ``[n, V]`` of hidden states ``[n, E]``.
    """

    hidden: torch.Tensor
    logits: Callable[[torch.Tensor], torch.Tensor]


def predictions(run: Run, tokens: torch.Tensor) -> Predictions:
    """Return the predictions of a row ``[S]`` under ``run``."""
    return Predictions(run.hidden(tokens[:-1]), run.logits)


def compare(predictions: Predictions, tokens: torch.Tensor, dense: Predictions, bucket: int) -> dict:
    """Compare predictions of a row under a policy with those of the dense model.

    Args:
        predictions: those under the policy.
        tokens: ``[S]``.
        dense: predictions of the dense model.
        bucket: positions of a bucket.

    Returns:
        ``tokens``, the number of predicted ones. Means over them: ``nll`` of the next token in nats, ``kl`` =
        ``KL(dense || policy)`` in nats over the whole vocabulary, ``agreement``, the share of positions with the
        same most likely token. ``*_by_position``: lists of means over buckets of the query's position. The last
        bucket is shorter if they do not divide S - 1. ``bucket`` itself.
    """
    measures = token_measures(predictions, tokens, dense)
    means = {name: measures[name].mean().item() for name in MEASURES}
    by_position = {
        f"{name}_by_position": [part.mean().item() for part in measures[name].split(bucket)] for name in MEASURES
    }
    return {"tokens": len(tokens) - 1} | means | by_position | {"bucket": bucket}


def token_measures(
    predictions: Predictions, tokens: torch.Tensor, dense: Predictions | None = None
) -> dict[str, torch.Tensor]:
    """Return measures of the predictions of all tokens but the first, each ``[S - 1]`` float64 on the CPU.

    Args:
        predictions: those to measure.
        tokens: ``[S]``.
        dense: predictions of the dense model, or None.

    Returns:
        ``nll`` in nats, ``accuracy`` of the most likely token and, with ``dense``, ``kl`` and ``agreement`` as in
        :func:`compare`.
    """
    blocks = []
    for a in range(0, len(predictions.hidden), POSITIONS):
        cut = slice(a, a + POSITIONS)
        logp = predictions.logits(predictions.hidden[cut]).log_softmax(-1)
        expected = tokens[1:][cut].to(logp.device)
        part = {"nll": F.nll_loss(logp, expected, reduction="none"), "accuracy": logp.argmax(-1) == expected}
        if dense is not None:
            exact = dense.logits(dense.hidden[cut]).log_softmax(-1)
            part["kl"] = F.kl_div(logp, exact, reduction="none", log_target=True).sum(-1)
            part["agreement"] = logp.argmax(-1) == exact.argmax(-1)
        blocks.append(part)
    return {name: torch.cat([part[name].double().cpu() for part in blocks]) for name in blocks[0]}
