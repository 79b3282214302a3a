"""Chunkwise-parallel mLSTM with a delayed readout, in plain torch, differentiable by autograd."""

import torch
import torch.nn.functional as F

from kvpop_vllm.kernels.ops import STATE_M_START

READOUT_EPS = 1e-6
State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def readout_denominator(qz: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """Return the denominator ``q.z + eps`` of a readout, with eps = 1e-6 before stabilisation.

    Args:
        qz: ``q.z`` of the stored state, which is the true state times ``exp(-m)``.
        m: stabiliser.
    """
    return qz + READOUT_EPS * torch.exp(-m.clamp(-60.0, 60.0))


def empty_state(k: torch.Tensor, v: torch.Tensor) -> State:
    """Return the empty state for features ``k [B, H, S, F]`` and values ``v [B, H, S, Dv]``.

    C and z are 0, m is ``STATE_M_START``.
    """
    lead = k.shape[:2]
    c = k.new_zeros(*lead, k.shape[-1], v.shape[-1])
    return c, k.new_zeros(*lead, k.shape[-1]), k.new_full(lead, STATE_M_START)


def _chunk_step(q, k, v, igate, log_f, state: State):
    """Run one chunk of l tokens; return readouts ``[B, H, l, Dv]`` and the state after it."""
    c, z, m = state
    decay = log_f.cumsum(-1)  # log of the product of forget gates up to and including each token
    causal = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()
    pair = decay.unsqueeze(-1) - decay.unsqueeze(-2) + igate.unsqueeze(-2)
    pair = pair.masked_fill(~causal, -torch.inf)
    # the largest exponent of a row is taken out of all its terms, so that none overflows
    m_row = torch.maximum(pair.amax(-1), decay + m.unsqueeze(-1))
    old = torch.exp(decay + m.unsqueeze(-1) - m_row)
    weight = (q @ k.transpose(-1, -2)) * torch.exp(pair - m_row.unsqueeze(-1))
    numerator = weight @ v + old.unsqueeze(-1) * (q @ c)
    qz = weight.sum(-1) + old * (q @ z.unsqueeze(-1)).squeeze(-1)
    h = numerator / readout_denominator(qz, m_row).unsqueeze(-1)

    total = decay[..., -1]
    write = total.unsqueeze(-1) - decay + igate
    m_new = torch.maximum(total + m, write.amax(-1))
    keep, gain = torch.exp(total + m - m_new), torch.exp(write - m_new.unsqueeze(-1))
    kg = k * gain.unsqueeze(-1)
    c = keep[..., None, None] * c + kg.transpose(-1, -2) @ v
    z = keep.unsqueeze(-1) * z + kg.sum(-2)
    return h, (c, z, m_new)


def delayed_mlstm(q, k, v, igate, fgate, *, delay, state=None, chunk=64):
    """Implement :func:`kvpop_vllm.kernels.ops.delayed_mlstm`."""
    if state is not None and delay > 0:
        raise ValueError("a state can only be continued with delay=0: pass the features of the tokens to read")
    q, k, v, igate, fgate = (t if t.dtype == torch.float64 else t.float() for t in (q, k, v, igate, fgate))
    length = k.shape[-2]
    reads = F.pad(q, (0, 0, delay, 0))[..., :length, :]  # row q holds the features of token q - delay
    log_f = F.logsigmoid(fgate)
    state = empty_state(k, v) if state is None else state
    rows = []
    for a in range(0, length, chunk):
        cut = slice(a, min(a + chunk, length))
        h, state = _chunk_step(
            reads[..., cut, :], k[..., cut, :], v[..., cut, :], igate[..., cut], log_f[..., cut], state
        )
        rows.append(h)
    h = torch.cat(rows, dim=-2)
    return F.pad(h[..., min(delay, length) :, :], (0, 0, 0, min(delay, length))), state
