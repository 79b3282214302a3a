"""Training ops by definition, in the dtype of their inputs; shares no code with the kernels."""

import torch


def kept_sets(priority, sinks, window, topk):
    """Return the ``[B, H, S, S]`` mask of tokens each query sees, by a sort per query (DESIGN "The rule")."""
    batch, heads, length = priority.shape
    visible = torch.zeros(batch, heads, length, length, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            row = priority[b, h].tolist()
            for q in range(length):
                eligible = sorted(range(sinks, max(sinks, q - window + 1)), key=lambda t: (-row[t], -t))
                near = [t for t in range(q + 1) if t < sinks or t > q - window]
                visible[b, h, q, eligible[:topk] + near] = True
    return visible


def visible_keys(rank, cutoff, sinks, window):
    """Return the mask ``[B, H, S, S]`` that ``rank`` and ``cutoff`` describe."""
    t = torch.arange(rank.shape[-1], device=rank.device)
    q = t.unsqueeze(1)
    return ((t < sinks) | (t > q - window) | (rank.unsqueeze(-2) <= cutoff.unsqueeze(-1))) & (t <= q)


def masked_attention(q, k, v, visible, scale):
    """Return ``out, lse`` of softmax attention under ``visible [B, H, S, S]``."""
    group = q.shape[1] // k.shape[1]
    k, v, visible = (x.repeat_interleave(group, 1) for x in (k, v, visible))
    logits = (q @ k.transpose(-1, -2) * scale).masked_fill(~visible, -torch.inf)
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


def future_mass(q, k, lse, window, scale, lookahead, first=0):
    """Return the log of the attention that each key receives from the queries, the ``first`` and so on, after its window."""
    logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * scale - lse.unsqueeze(-1)
    age = first + torch.arange(q.shape[2], device=q.device).unsqueeze(1) - torch.arange(k.shape[2], device=q.device)
    last = first + q.shape[2] if lookahead is None else window + lookahead
    return logits.masked_fill((age < window) | (age > last), -torch.inf).logsumexp(-2)


def recurrence(q, k, v, igate, fgate, delay, start=None):
    """Return readouts of u at u + delay, zero beyond the end, and the last C and z, unstabilised.

    ``start`` is a state to continue from.
    """
    c, z, m = (0.0, 0.0, None) if start is None else (x.to(q) for x in start)
    if m is not None:
        c, z = c * m.exp()[..., None, None], z * m.exp()[..., None]
    h = [torch.zeros_like(v[:, :, 0])] * k.shape[2]
    for t in range(k.shape[2]):
        f, i = torch.sigmoid(fgate[..., t, None]), torch.exp(igate[..., t, None])
        c = f[..., None] * c + (i * k[..., t, :])[..., None] * v[..., t, None, :]
        z = f * z + i * k[..., t, :]
        if t >= delay:
            u = q[..., t - delay, :]
            h[t - delay] = torch.einsum("bhf,bhfv->bhv", u, c) / ((u * z).sum(-1, keepdim=True) + 1e-6)
    nothing = 0 * (q.sum() + k.sum() + v.sum() + igate.sum() + fgate.sum())  # a graph even if nothing is read
    return torch.stack(h, 2) + nothing, c, z
