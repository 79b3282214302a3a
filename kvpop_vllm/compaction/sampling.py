"""Sampling of answers after a shared prefix in transformers, for models loaded by :mod:`kvpop_vllm.model_hook`."""

from collections.abc import Sequence

import torch

from kvpop_vllm.compaction.conversations import TEMPERATURE, TOP, Answer
from kvpop_vllm.compaction.reference import read_corpus


class Branches:
    """Attention of R sequences that go on after one prefix, whose keys and values are in memory once.

    Args:
        prefix: keys and values ``[H, T, D]`` of every layer.

    Attributes:
        is_token: ``[R, S]`` booleans of the S tokens after the prefix, the running pass included. Padding is False.
    """

    def __init__(self, prefix: list[tuple[torch.Tensor, torch.Tensor]]):
        self.prefix, self.branches = prefix, [None] * len(prefix)
        self.is_token: torch.Tensor | None = None

    def __call__(self, layer, q, k, v, scale):
        """Return the attention of one layer. See :class:`kvpop_vllm.model_hook.Attend`."""
        if self.branches[layer] is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(self.branches[layer], (k, v), strict=True))
        self.branches[layer] = k, v
        far_k, far_v = self.prefix[layer]
        rows, new, branch_length = q.shape[0], q.shape[2], k.shape[2]
        by_head = q.unflatten(1, (k.shape[1], -1)).transpose(0, 1).flatten(1, 3)  # [H, R * G * new, D]
        near_q = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # [R, H, G * new, D]
        # all rows share the prefix, so that one product per head reads its keys once
        far = (by_head @ far_k.mT).unflatten(1, (rows, -1)).transpose(0, 1)
        # causal among the branch's own tokens
        order = torch.arange(branch_length - new, branch_length, device=q.device).unsqueeze(1) >= torch.arange(
            branch_length, device=q.device
        )
        hidden = ~(order & self.is_token.unsqueeze(1))  # [R, new, branch_length]
        near = (near_q @ k.mT).unflatten(2, (-1, new)).masked_fill(hidden[:, None, None], -torch.inf).flatten(2, 3)
        weights = (torch.cat([far, near], -1).float() * scale).softmax(-1).to(v.dtype)
        far, near = weights.split([far.shape[-1], branch_length], -1)
        out = (far.transpose(0, 1).flatten(1, 2) @ far_v).unflatten(1, (rows, -1)).transpose(0, 1) + near @ v
        return out.unflatten(2, (-1, new)).flatten(1, 2)

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with some rows alone, given as booleans ``[R]``."""
        self.branches = [(k[rows], v[rows]) for k, v in self.branches]
        self.is_token = self.is_token[rows]


class TransformersSampler:
    """Sampler that runs the model in this process. See :class:`kvpop_vllm.compaction.conversations.Sampler`.

    The last prefix is kept, so that it is read once for questions and answers.

    Args:
        model: from :func:`kvpop_vllm.model_hook.load_model`.
        stop: ids that end an answer.
    """

    def __init__(self, model: torch.nn.Module, stop: set[int]):
        self.model, self.stop, self.tokens, self.prefix = model, stop, None, []

    @torch.inference_mode()
    def __call__(self, prefix, prompts, new, seeds) -> list[Answer]:
        """Return an answer to each prompt."""
        # questions and answers about a chunk have the same prefix
        if self.tokens != list(prefix):
            self.tokens = list(prefix)
            self.prefix = read_corpus(self.model, self.tokens)
        device = next(self.model.parameters()).device
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device).unsqueeze(1)
        places = torch.arange(width, device=device) - width + lengths  # [R, width], negative for padding
        attend, draws = Branches(self.prefix), [torch.Generator().manual_seed(seed) for seed in seeds]
        attend.is_token = places >= 0
        answers = [Answer([], [], []) for _ in prompts]
        going = list(range(len(prompts)))
        for _ in range(new):
            hidden = self.model.get_decoder()(
                input_ids=ids,
                # pads are masked, and may have any valid position
                position_ids=len(self.tokens) + places.clamp_min(0),
                use_cache=False,
                attend=attend,
            ).last_hidden_state[:, -1]
            logp = self.model.get_output_embeddings()(hidden).float().log_softmax(-1).cpu()
            # drawn on the CPU, so that a seed means the same on every device
            chances = (logp / TEMPERATURE).softmax(-1)
            ids = torch.stack([row.multinomial(1, generator=draws[i]) for row, i in zip(chances, going, strict=True)])
            _add([answers[i] for i in going], ids, logp)
            ended = torch.tensor([int(token) in self.stop for token in ids])
            if ended.all():
                break
            if ended.any():
                going = [i for i, end in zip(going, ended.tolist(), strict=True) if not end]
                # rows that have ended leave the batch
                attend.keep(~ended.to(device))
                ids, places = ids[~ended], places[~ended.to(device)]
            ids, places = ids.to(device), places[:, -1:] + 1
            attend.is_token = torch.cat([attend.is_token, torch.ones_like(places, dtype=torch.bool)], 1)
        return answers


def _add(answers: Sequence[Answer], tokens: torch.Tensor, logp: torch.Tensor) -> None:
    """Add a sampled token and its position's candidates to each answer.

    Args:
        answers: of each row.
        tokens: ``[R, 1]``.
        logp: ``[R, V]``.
    """
    best = logp.topk(min(TOP, logp.shape[-1]), -1)
    true = logp.gather(1, tokens)
    for row, answer in enumerate(answers):
        ids, values, token = best.indices[row].tolist(), best.values[row].tolist(), int(tokens[row])
        # the sampled token counts even where it is not among the likeliest
        if token not in ids:
            ids, values = [*ids, token], [*values, float(true[row])]
        answer.tokens.append(token)
        answer.top.append(ids)
        answer.logp.append([round(value, 5) for value in values])
