"""Trained model: a causal language model with its scorers, and the loss of one row of tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from kvpop_vllm.distill.gates import DMSAttend, KVzapAttend, TrimKVAttend, eviction_target
from kvpop_vllm.distill.losses import RetentionLoss, top_kl
from kvpop_vllm.distill.recipe import Recipe
from kvpop_vllm.distill.sparse_attention import Sparse, recency
from kvpop_vllm.kernels.ops.rules import REPLAY
from kvpop_vllm.model_hook import POSITIONS, Attend, Dense, borrow_channel, decoder_of
from kvpop_vllm.policies.allocators import proportional
from kvpop_vllm.roles import Retention
from kvpop_vllm.scorers import Gate, Scorer, Signals

Teacher = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""Teacher function: ``teacher(tokens [1, S], row) -> (logits [1, S, K], indices [1, S, K])``.

It returns the top K tokens of every position. What it returns besides is not read.
"""


class LayerScorer(nn.Module):
    """Scorer or gate of a layer, evaluated in one call so that sharded parameters are gathered once.

    Args:
        scorer: the scorer or gate.
        recompute: True if its activations are computed again in the backward pass.

    Attributes:
        finite: whether all scores of the last call were finite.
    """

    def __init__(self, scorer: Scorer | Gate, recompute: bool = False):
        super().__init__()
        self.scorer, self.recompute = scorer, recompute
        self.finite = torch.tensor(True)

    def forward(self, *inputs, **options) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the scores and, for a scorer, log_gamma ``[H]``, float32 or better for any dtype of the model.

        Scores that are infinite or NaN are replaced; :attr:`finite` says so without a wait for the device.
        """
        run = self.scorer
        if self.recompute and torch.is_grad_enabled():
            run = functools.partial(checkpoint, self.scorer, use_reentrant=False)
        score = run(*inputs, **options)
        self.finite = score.detach().isfinite().all()
        score = score.nan_to_num()
        return score if isinstance(self.scorer, Gate) else (score, self.scorer.log_gamma())


class Student(nn.Module):
    """Causal language model from :func:`kvpop_vllm.model_hook.load_model` with one scorer per layer.

    Args:
        base: the model; for phases with gates, after :func:`kvpop_vllm.model_hook.show_hidden_states`.
        scorers: one scorer or gate per layer; none for phases that train the base alone.
        recipe: see :class:`Recipe`.
    """

    def __init__(self, base: nn.Module, scorers: list[Scorer] | list[Gate], recipe: Recipe):
        super().__init__()
        self.base, self.recipe = base, recipe
        recomputed = recipe.activation_checkpointing
        self.scorers = nn.ModuleList(LayerScorer(s, recomputed and not isinstance(s, Gate)) for s in scorers)

    def roles(self, row: int, prompt: int = 0) -> Retention:
        """Return the budget of a row; rows take the recipe's budgets in turn.

        A protected prompt takes the place of the sinks (DESIGN "A prefix and a tail").
        """
        r = self.recipe
        window, topk = r.trained[row % len(r.trained)]
        sinks = prompt if r.protect_prompt and prompt else r.sinks
        return Retention(sinks + window + topk, sinks, window, step=r.decay_step)

    def topk(self, roles: Retention) -> list[list[int]] | None:
        """Return k ``[layers][H]`` of each head under the recipe's shares, None without shares.

        Serving divides the slots of a request with this budget in the same way (DESIGN "Unequal shares").
        """
        if (shares := self.recipe.shares) is None:
            return None
        return (proportional(shares, roles, len(shares), len(shares[0])) - roles.first_long).tolist()

    def score(self, layer: int, k: torch.Tensor, v: torch.Tensor, roles: Retention):
        """Return scores of one layer; see :data:`kvpop_vllm.distill.sparse_attention.Score`.

        As in serving, a scorer's state begins at most ``REPLAY`` tokens before a protected prompt's end.
        """
        first = max(0, roles.sinks - REPLAY) if self.recipe.protect_prompt else 0
        score, log_gamma = self.scorers[layer](k[:, :, first:], v[:, :, first:], window=roles.window)
        return F.pad(score, (first, 0)), log_gamma

    def gate_scores(self, layer: int, signals: Signals) -> torch.Tensor:
        """Return gate scores of one layer; see :data:`kvpop_vllm.distill.gates.GateScores`."""
        return self.scorers[layer](signals)

    def gated(self, row: int, prompt: int, step: int) -> TrimKVAttend | DMSAttend | KVzapAttend:
        """Return the attention of one row, at an optimiser step, in a phase that trains gates."""
        recipe, roles = self.recipe, self.roles(row, prompt)
        if recipe.phase == "kvzap":
            return KVzapAttend(self.gate_scores, roles, recipe)
        if recipe.phase == "trimkv":
            protected = roles.sinks if recipe.protect_prompt else 0
            return TrimKVAttend(self.gate_scores, roles.budget - protected, protected)
        target = eviction_target(step, recipe.steps, recipe.compression)
        if recipe.gate_reads == "query":
            borrow_channel(self.base, min(1.0, (step + 1) / recipe.borrow_steps) if recipe.borrow_steps else 1.0)
        return DMSAttend(self.gate_scores, roles, target, recipe.gumbel_tau, seed=recipe.seed * 1_000_003 + row)

    def first_position(self, row: int) -> int:
        """Return the first position of a row.

        Attention does not depend on it, as RoPE is relative. Scorers do, because they read rotated keys and
        generalise badly to positions that they were not trained at. A share of ``length / positions`` of the
        rows begins at 0, as all texts do; otherwise the first positions would hardly occur.
        """
        length, positions = self.recipe.length, self.recipe.positions
        if not self.recipe.moves_rows:
            return 0
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + row)
        return max(0, int(torch.randint(-length, positions - length + 1, (), generator=generator)))

    def read(self, tokens: torch.Tensor, attend: Attend, row: int) -> torch.Tensor:
        """Return hidden states ``[B, S, hidden]`` of ``[B, S]`` tokens at the positions of a row.

        Args:
            tokens: ``[B, S]``.
            attend: attention of the layers.
            row: number of the row.
        """
        first = self.first_position(row)
        positions = torch.arange(first, first + tokens.shape[1], device=tokens.device).unsqueeze(0)
        return decoder_of(self.base)(input_ids=tokens, position_ids=positions, attend=attend).last_hidden_state

    def forward(
        self,
        tokens: torch.Tensor,
        row: int,
        top: tuple[torch.Tensor, torch.Tensor] | None = None,
        prompt: int = 0,
        held_out_at: int | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of a micro-batch of rows.

        Args:
            tokens: ``[B, S]``.
            row: number of the first row in the global order of data, which seeds the positions drawn.
            top: what a :data:`Teacher` returns of the rows, for recipes with a KL, else None.
            prompt: number of tokens of the row's prompt, which losses at the output leave out.
            held_out_at: optimiser step at which held-out rows are judged; None for rows that are trained on.

        Returns:
            The scalar loss, NaN if a score is not finite, and its parts. Those of held-out rows have ``accuracy``, the
            share of tokens after the prompt that were the most probable one under evictions (KVpop Figure 5), unless
            the pass has none.
        """
        recipe, observer = self.recipe, None
        if recipe.trains_gates:
            attend = self.gated(row, prompt, row // recipe.batch if held_out_at is None else held_out_at)
        elif recipe.phase == "uptrain":
            attend = Dense()
        elif recipe.phase == "streaming-plus":
            roles = self.roles(row, prompt)
            attend = Sparse(recency, roles, topk=self.topk(roles))
        else:
            roles = self.roles(row, prompt)
            observer = RetentionLoss(roles, recipe, seed=recipe.seed * 1_000_003 + row)
            attend = Sparse(self.score, roles, observer, self.topk(roles))
        hidden = self.read(tokens, attend, row)
        loss, parts = self._distillation(hidden, tokens, top, prompt) if recipe.distils else (0.0, {})
        if recipe.trains_gates:
            cost, metrics = attend.loss()
            loss = loss + (recipe.capacity if recipe.phase == "trimkv" else 1.0) * cost
            parts |= metrics
        if observer is not None:
            retention = observer.total()
            loss = loss + retention
            parts |= {"retention": retention.detach(), "recall": observer.recall()}
        if held_out_at is not None and not recipe.attends_densely:
            parts |= {"accuracy": self._accuracy(hidden, tokens, prompt)}
        return torch.where(self.finite(), loss, torch.nan) if len(self.scorers) else loss, parts

    def finite(self) -> torch.Tensor:
        """Return whether all scores of the last pass were finite."""
        return torch.stack([scorer.finite for scorer in self.scorers]).all()

    def _distillation(self, hidden, tokens, top, prompt):
        recipe, first = self.recipe, max(0, prompt - 1)
        batch, length = tokens.shape[0], tokens.shape[1] - first
        use_kl = recipe.phase != "uptrain" and recipe.kl > 0
        logits, indices = top if use_kl else (None, None)
        kl = ce = 0.0
        for a in range(first, tokens.shape[1], POSITIONS):
            cut = slice(a, a + POSITIONS)
            following = tokens[:, a + 1 : a + POSITIONS + 1]
            target = (logits[:, cut], indices[:, cut]) if use_kl else None
            # logits of a slice are formed again in the backward pass: those of all positions would not fit
            part = checkpoint(self._slice, hidden[:, cut], following, target, use_reentrant=False)
            kl, ce = kl + part[0], ce + part[1]
        # the last token of a row has no following one
        kl, ce = kl / length, ce / (batch * (length - 1))
        weight = 1.0 if recipe.phase == "uptrain" else recipe.ce
        loss = recipe.kl * kl + weight * ce if use_kl else weight * ce
        return loss, {"ce": ce.detach()} | ({"kl": kl.detach()} if use_kl else {})

    def _accuracy(self, hidden, tokens, prompt):
        """Return the share of tokens after the prompt, or the first one, that are the most probable after those before."""
        first, right = max(1, prompt), torch.zeros((), device=tokens.device)
        for a in range(first, tokens.shape[1], POSITIONS):
            following = tokens[:, a : a + POSITIONS]
            logits = self.base.get_output_embeddings()(hidden[:, a - 1 : a - 1 + following.shape[1]])
            right += (logits.argmax(-1) == following).sum()
        return right / (tokens.shape[0] * (tokens.shape[1] - first))

    def _slice(self, hidden, following, top):
        """Return sums of KL and cross-entropy over a slice of positions."""
        logits = self.base.get_output_embeddings()(hidden).float()
        ce = F.cross_entropy(logits[:, : following.shape[1]].flatten(0, 1), following.flatten(), reduction="sum")
        kl = top_kl(logits, *top, self.recipe.kl_focus) * hidden.shape[1] if top is not None else ce.new_zeros(())
        return kl, ce
