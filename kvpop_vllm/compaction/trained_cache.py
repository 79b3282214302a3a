"""Trainable cache of a frozen model, and its loss on conversations (arXiv:2506.06266, context distillation)."""

from collections.abc import Sequence

import torch

from kvpop_vllm.compaction.cache_attention import attend, log_probabilities
from kvpop_vllm.compaction.cartridge import Layer
from kvpop_vllm.compaction.conversations import Conversation, sparse_teacher

FROZEN = 1
"""First slots that are not trained, an anchor for attention as in HazyResearch/cartridges."""
PACK = 1024
"""Tokens of conversations in one pass, unless a single one is longer."""


class TrainedCache(torch.nn.Module):
    """Keys and values of every layer in float32, all but the first slot trainable. Biases stay as they are.

    Args:
        layers: keys and values ``[H, P, D]`` to start from, and biases ``[H, P]`` or None.
    """

    def __init__(self, layers: Sequence[Layer]):
        super().__init__()
        self.frozen = [tuple(part[:, :FROZEN].detach().clone() for part in layer[:2]) for layer in layers]
        self.bias = [layer[2] for layer in layers]
        self.dtype = layers[0][0].dtype
        for name, part in (("k", 0), ("v", 1)):
            # float32, because updates of the learning rate's size vanish in bfloat16
            trained = [torch.nn.Parameter(layer[part][:, FROZEN:].detach().float().clone()) for layer in layers]
            setattr(self, name, torch.nn.ParameterList(trained))

    def layers(self) -> list[Layer]:
        """Return keys, values ``[H, P, D]`` in the model's dtype, and biases ``[H, P]`` or None, of every layer."""
        rows = zip(self.frozen, self.k, self.v, self.bias, strict=True)
        return [
            (torch.cat([k, more_k.to(k.dtype)], 1), torch.cat([v, more_v.to(v.dtype)], 1), bias)
            for (k, v), more_k, more_v, bias in rows
        ]


class Packed:
    """Attention of conversations that are packed into one row, over a cache and each over itself.

    Args:
        layers: keys, values and biases of the cache.
        lengths: tokens of each conversation.
    """

    def __init__(self, layers: Sequence[Layer], lengths: Sequence[int]):
        self.layers, self.lengths = layers, list(lengths)

    def __call__(self, layer, q, k, v, scale):
        """Return the attention of one layer. See :class:`kvpop_vllm.model_hook.Attend`."""
        packed = zip(*(tensor.split(self.lengths, 2) for tensor in (q, k, v)), strict=True)
        return torch.cat([attend(*qkv, scale, *self.layers[layer]) for qkv in packed], 2)


def packs(conversations: Sequence[Conversation], max_tokens: int = PACK) -> list[list[Conversation]]:
    """Return the conversations in their order, in packs of at most ``max_tokens`` tokens, or of one conversation."""
    # greedily in order, so that the pack of a conversation depends on those before it alone
    packed, room = [], -1
    for conversation in conversations:
        size = len(conversation.prompt) + len(conversation.answer)
        if size > room:
            packed.append([])
            room = max_tokens
        packed[-1].append(conversation)
        room -= size
    return packed


def losses(model, layers: Sequence[Layer], pack: Sequence[Conversation], position: int) -> tuple[torch.Tensor, float]:
    """Return the sums over the answers' tokens of the cross-entropy and of the teacher's entropy, in nats.

    The student reads the conversations after the cache, without the chunk. The teacher is that of
    :func:`kvpop_vllm.compaction.conversations.sparse_teacher`. All tokens outside the candidates are one outcome, so
    that a cache that answers as the chunk does has the least loss. Candidates alone would draw their missing mass to
    them.

    Args:
        model: from :func:`kvpop_vllm.model_hook.load_model`.
        layers: keys, values and biases of the cache.
        pack: conversations.
        position: position of the first token after the cache.
    """
    device, tokens, places, used = layers[0][0].device, [], [], []
    for conversation in pack:
        # the position before an answer's first token predicts it
        first = len(tokens) + len(conversation.prompt) - 1
        used += range(first, first + len(conversation.answer))
        tokens += conversation.prompt + conversation.answer
        places += range(position, position + len(conversation.prompt) + len(conversation.answer))
    attend = Packed(layers, [len(conversation.prompt) + len(conversation.answer) for conversation in pack])
    logp = log_probabilities(model, tokens, places, attend, used)
    total, entropy, place = logp.new_zeros(()), 0.0, 0
    for conversation in pack:
        ids, chances, unlisted_chance = (tensor.to(device) for tensor in sparse_teacher(conversation))
        answer = logp[place : place + len(conversation.answer)]
        # all other tokens are one outcome, with the mass that the teacher left them
        rest_logp = answer.scatter(1, ids, -torch.inf).logsumexp(-1)
        total = total - (chances * answer.gather(1, ids)).sum() - (unlisted_chance * rest_logp).sum()
        entropy += float(torch.special.entr(chances).sum() + torch.special.entr(unlisted_chance).sum())
        place += len(conversation.answer)
    return total, entropy
