"""Chunkwise-parallel mLSTM with a delayed readout and its gradients, all in float32 (formulas in docs/kernels.md).

At token p of the sequence, row ``p - delay`` of q is read. The states are recomputed in the backward pass, so that
memory between the passes is O(S), and the stabiliser is a constant there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from kvpop_vllm.kernels.triton import _delayed_mlstm_backward as backward
from kvpop_vllm.kernels.triton._constants import PRECISION
from kvpop_vllm.kernels.triton._delayed_mlstm_backward import chunk_of, pair_logs
from kvpop_vllm.kernels.triton._matrix_tiles import store_tile, tile
from kvpop_vllm.kernels.triton._prefill_plan import LARGEST_CHUNK, numbers_of
from kvpop_vllm.kernels.triton._serving_pages import state_at

EMPTY_M = tl.constexpr(-1e30)
EPS = tl.constexpr(1e-6)
INNER_TILE = 32  # chosen, with the options, by counting register spills
OPTIONS = {"num_warps": 8, "num_stages": 1}
TILES = "FEATURES", "WIDTH", "L", "BLOCK_F", "BLOCK_V", "PRECISION"


@triton.jit
def _store_state(c_states, z_states, m_states, state, c, z, m, f, column, FEATURES: tl.constexpr, WIDTH: tl.constexpr):
    """Store a program's tile of C at index ``state``, and z in the first column of tiles and m in the first tile."""
    features = f + tl.arange(0, z.shape[0])
    store_tile(c_states + state * FEATURES * WIDTH, c, f, FEATURES, column, WIDTH, c.shape[0], c.shape[1])
    tl.store(z_states + state * FEATURES + features, z, mask=features < tl.where(column == 0, FEATURES, 0))
    tl.store(m_states + state, m, mask=column + f == 0)


@triton.jit(do_not_specialize=["chunks", "segments"])
def _states(
    k, v,  # [rows, S, F] and [rows, S, DV]
    igate, decay,  # [rows, chunks * L]; gates are -inf past the end
    c_first, z_first, m_first,  # before each segment, or None
    c_states, z_states, m_states,  # [rows, chunks + segments, ...]: F and DV, F, nothing
    ends,  # [segments + 1], number of chunks before each segment, and in all
    cache, pieces,  # pages of states, and numbers of segments [segments, 16]; or None
    right,  # [R, H], 0 for a state that must stay as it is
    length, chunks, segments,
    P: tl.constexpr, FEATURES: tl.constexpr, WIDTH: tl.constexpr, L: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the state before each chunk of a segment and after its last; each program has one tile of C.

    States in pages are written there. Their z and m are in place ahead of a segment's first chunk.

    Grid: 64 features, 64 columns, rows times segments. 135 MB: 37 us, and more by 128 chunks one after another.
    """
    f, column = tl.program_id(0) * BLOCK_F, tl.program_id(1) * BLOCK_V
    number = tl.program_id(2).to(tl.int64)
    row, segment = number // segments, number % segments
    begin, end = tl.load(ends + segment), tl.load(ends + segment + 1)
    offset = row * (chunks + segments) + segment  # a chunk's state has this index plus the chunk's
    c = tl.zeros([BLOCK_F, BLOCK_V], tl.float32)
    z = tl.zeros([BLOCK_F], tl.float32)
    m = tl.full([], EMPTY_M, tl.float32)
    if c_first is not None:
        c = tile(c_first + number * FEATURES * WIDTH, f, FEATURES, column, WIDTH, BLOCK_F, BLOCK_V)
        features = f + tl.arange(0, BLOCK_F)
        z = tl.load(z_first + number * FEATURES + features, mask=features < FEATURES, other=0.0)
        m = tl.load(m_first + number)
    if cache is not None:
        numbers, heads = numbers_of(pieces, segment), tl.num_programs(2) // segments
        r, features, columns = numbers.request.to(tl.int64), f + tl.arange(0, BLOCK_F), column + tl.arange(0, BLOCK_V)
        has_tokens = features < tl.where(begin < end, FEATURES, 0)
        inside = has_tokens[:, None] & (columns < WIDTH)[None, :]
        word = features[:, None] * WIDTH + columns[None, :]
        width = tl.where(numbers.start + numbers.first > 0, WIDTH, 0)  # a first token finds no state
        stored = has_tokens[:, None] & (columns < width)[None, :]
        c = tl.load(state_at(cache, r, row, word, stored, P), mask=stored, other=0.0)
        z = tl.load(z_states + (offset + begin) * FEATURES + features, mask=has_tokens, other=0.0)
        m = tl.load(m_states + offset + begin)
    for chunk in range(begin, end):
        _store_state(c_states, z_states, m_states, offset + chunk, c, z, m, f, column, FEATURES, WIDTH)
        tokens = (row * chunks + chunk) * L + tl.arange(0, L)
        total = tl.load(decay + (row * chunks + chunk) * L + L - 1)
        write = total - tl.load(decay + tokens) + tl.load(igate + tokens)
        new_m = tl.maximum(total + m, tl.max(write, 0))
        keep = tl.exp(total + m - new_m)
        kg = tile(k + row * length * FEATURES, chunk * L, length, f, FEATURES, L, BLOCK_F)
        kg *= tl.exp(write - new_m)[:, None]
        block_v = tile(v + row * length * WIDTH, chunk * L, length, column, WIDTH, L, BLOCK_V)
        c = tl.dot(tl.trans(kg), block_v, c * keep, input_precision=PRECISION)
        z = z * keep + tl.sum(kg, 0)
        m = new_m
    if cache is None:
        _store_state(c_states, z_states, m_states, offset + end, c, z, m, f, column, FEATURES, WIDTH)
    else:
        width = tl.where(tl.load(right + r * heads + row) != 0, WIDTH, 0)
        inside = has_tokens[:, None] & (columns < width)[None, :]
        tl.store(state_at(cache, r, row, word, inside, P), c, mask=inside)
        has_z = features < tl.where((begin < end) & (column < tl.minimum(width, 1)), FEATURES, 0)
        tl.store(state_at(cache, r, row, FEATURES * WIDTH + features, has_z, P), z, mask=has_z)
        has_m = (begin < end) & (column + f < tl.minimum(width, 1))
        tl.store(state_at(cache, r, row, FEATURES * (WIDTH + 1), True, P), m, mask=has_m)


@triton.jit(do_not_specialize=["chunks", "segments"])
def _readout(
    q, k, v, igate, decay, c_states, z_states, m_states,
    h,  # [rows, S, DV]
    m_rows, denominators,  # [rows, chunks * L], or None
    segment_of,  # [chunks]
    delay, length, chunks, segments,
    FEATURES: tl.constexpr, WIDTH: tl.constexpr, L: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a block of columns of h for the tokens of a chunk, and their stabilisers and denominators.

    Grid: 64 columns, chunks, rows. 202 MB: 56 us.
    """
    column = tl.program_id(0) * BLOCK_V
    row, first, number, tokens, decays, gates = chunk_of(decay, igate, chunks, L)
    state = number + row * segments + tl.load(segment_of + tl.program_id(1))
    pair = pair_logs(decays, gates, L)
    from_state = decays + tl.load(m_states + state)
    m = tl.maximum(tl.max(pair, 1), from_state)
    old = tl.exp(from_state - m)

    products = tl.zeros([L, L], tl.float32)
    numerator = tl.zeros([L, BLOCK_V], tl.float32)
    qz = tl.zeros([L], tl.float32)
    for f in range(0, FEATURES, BLOCK_F):
        block_q = tile(q + row * length * FEATURES, first - delay, length - delay, f, FEATURES, L, BLOCK_F)
        block_k = tile(k + row * length * FEATURES, first, length, f, FEATURES, L, BLOCK_F)
        c = tile(c_states + state * FEATURES * WIDTH, f, FEATURES, column, WIDTH, BLOCK_F, BLOCK_V)
        features = f + tl.arange(0, BLOCK_F)
        z = tl.load(z_states + state * FEATURES + features, mask=features < FEATURES, other=0.0)
        products = tl.dot(block_q, tl.trans(block_k), products, input_precision=PRECISION)
        numerator = tl.dot(block_q, c, numerator, input_precision=PRECISION)
        qz += tl.sum(block_q * z[None, :], 1)
    weights = products * tl.exp(pair - m[:, None])
    block_v = tile(v + row * length * WIDTH, first, length, column, WIDTH, L, BLOCK_V)
    numerator = tl.dot(weights, block_v, numerator * old[:, None], input_precision=PRECISION)
    smallest = EPS * tl.exp(-tl.minimum(tl.maximum(m, -60.0), 60.0))
    denominator = tl.sum(weights, 1) + qz * old + smallest
    rows = numerator / denominator[:, None]
    store_tile(h + row * length * WIDTH, rows, first - delay, length - delay, column, WIDTH, L, BLOCK_V)
    if m_rows is not None:
        if column == 0:
            tl.store(m_rows + tokens, m)
            tl.store(denominators + tokens, denominator)


def _capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, or (9, 0) if kernels are interpreted."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def _largest_tile(device: torch.device) -> int:
    """Return the largest number of rows and columns of a tile.

    Only the tensor cores of compute capability 9 and 10 read operands from shared memory; elsewhere larger tiles spill.
    """
    return 64 if _capability(device)[0] in (9, 10) else 32


class Tiles:
    """Tiles of states of F features and ``width`` values.

    Attributes:
        f_blocks, v_blocks: numbers of tiles.
    """

    def __init__(self, features: int, width: int, chunk: int, device: torch.device, precision: str = PRECISION.value):
        self.sizes = features, width, chunk
        self.block_f, self.block_v = (
            min(_largest_tile(device), max(16, triton.next_power_of_2(n))) for n in (features, width)
        )
        self.f_blocks, self.v_blocks = triton.cdiv(features, self.block_f), triton.cdiv(width, self.block_v)
        self.precision = precision

    def constants(self, inner="") -> tuple:
        """Return the constants of a kernel, which loops over the axis ``inner``, F or V, in smaller blocks."""
        block_f = min(self.block_f, INNER_TILE) if inner == "F" else self.block_f
        block_v = min(self.block_v, INNER_TILE) if inner == "V" else self.block_v
        return *self.sizes, block_f, block_v, self.precision


class _Layout:
    """Sizes, tiles and gates of one call; all tensors have one row per sequence and head."""

    def __init__(self, q, v, igate, fgate, chunk, precision=PRECISION.value):
        (self.rows, self.length, self.features), self.width = q.shape, v.shape[-1]
        self.chunk = chunk
        self.chunks = triton.cdiv(self.length, chunk)
        self.of_states = Tiles(self.features, self.width, chunk, q.device, precision)
        self.f_blocks, self.v_blocks = self.of_states.f_blocks, self.of_states.v_blocks
        self.igate = self.padded(igate, -torch.inf)
        log_f = self.padded(F.logsigmoid(fgate), 0.0)
        self.decay = log_f.view(self.rows, self.chunks, chunk).cumsum(-1).view_as(log_f)

    def padded(self, x, value):
        """Pad ``[rows, S]`` to ``[rows, chunks * L]``."""
        more = self.chunks * self.chunk - self.length
        return (F.pad(x, (0, more), value=value) if more else x).contiguous()

    def tiles(self, inner=""):
        """Return block sizes and launch options; a kernel loops over the axis ``inner``, F or V, in smaller blocks."""
        return dict(zip(TILES, self.of_states.constants(inner), strict=True)) | OPTIONS

    def empty(self, *shape):
        return torch.empty(shape, dtype=torch.float32, device=self.igate.device)

    def states(self, k, v, state=None, ends=None):
        """Return C, z and m before each chunk and after the last, segment after segment; by default there is one."""
        if ends is None:
            ends = torch.arange(2, dtype=torch.int32, device=self.igate.device) * self.chunks
        segments = len(ends) - 1
        shape = self.rows, self.chunks + segments
        states = self.empty(*shape, self.features, self.width), self.empty(*shape, self.features), self.empty(*shape)
        of_pages, counts = (None, None, None), (self.length, self.chunks, segments)
        _states[self.f_blocks, self.v_blocks, self.rows * segments](
            k, v, self.igate, self.decay, *(state or (None, None, None)), *states, ends, *of_pages, *counts,
            P=None, **self.tiles(),
        )  # fmt: skip
        return states

    def readout(self, q, k, v, states, segment_of, delay):
        """Return h, and the stabilisers and denominators of its rows."""
        h, m_rows, denominators = torch.empty_like(v), torch.empty_like(self.igate), torch.empty_like(self.igate)
        segments = states[2].shape[1] - self.chunks
        _readout[self.v_blocks, self.chunks, self.rows](
            q, k, v, self.igate, self.decay, *states, h, m_rows, denominators, segment_of,
            delay, self.length, self.chunks, segments, **self.tiles("F"),
        )  # fmt: skip
        return h, m_rows, denominators


@torch.library.custom_op(
    "kvpop::delayed_mlstm",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor igate, Tensor fgate, Tensor[] state, int delay, int chunk, str precision)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _run(q, k, v, igate, fgate, state, delay, chunk, precision):
    """Return h, its stabilisers and denominators, and the last state, of contiguous float32 tensors.

    They are q, k ``[R, S, F]``, v ``[R, S, DV]``, gates ``[R, S]`` and a state of three tensors or none.
    """
    layout = _Layout(q, v, igate, fgate, chunk, precision)
    states = layout.states(k, v, state)
    segment_of = torch.zeros(layout.chunks, dtype=torch.int32, device=q.device)
    h, m_rows, denominators = layout.readout(q, k, v, states, segment_of, delay)
    h[:, max(0, layout.length - delay) :] = 0
    return h, m_rows, denominators, *(x[:, -1].clone() for x in states)


@_run.register_fake
def _(q, k, v, igate, fgate, state, delay, chunk, precision):
    rows, length, features = q.shape
    padded = q.new_empty(rows, triton.cdiv(length, chunk) * chunk)
    last = q.new_empty(rows, features, v.shape[-1]), q.new_empty(rows, features), q.new_empty(rows)
    return torch.empty_like(v), padded, torch.empty_like(padded), *last


@torch.library.custom_op(
    "kvpop::delayed_mlstm_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor igate, Tensor fgate, Tensor h, Tensor m_rows,"
    " Tensor denominators, Tensor[] state, int delay, int chunk, str precision)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _run_backward(grad, q, k, v, igate, fgate, h, m_rows, denominators, state, delay, chunk, precision):
    layout = _Layout(q, v, igate, fgate, chunk, precision)
    states = layout.states(k, v, state)
    grad = grad.contiguous()
    rows, chunks, reads = layout.rows, layout.chunks, max(0, layout.length - delay)
    counts = delay, layout.length, chunks
    qz_grad = F.pad(-(grad * h).sum(-1)[:, :reads], (layout.length - reads, 0))
    qz_grad = layout.padded(qz_grad, 0.0) / denominators

    c_grads = layout.empty(rows, chunks, layout.features, layout.width)
    z_grads = layout.empty(rows, chunks, layout.features)
    flow = layout.empty(layout.f_blocks * layout.v_blocks, rows, chunks)
    backward._backward_states[layout.f_blocks, layout.v_blocks, rows](
        q, grad, layout.decay, m_rows, denominators, qz_grad, *states, c_grads, z_grads, flow, *counts,
        **layout.tiles(),
    )  # fmt: skip
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dq[:, reads:] = 0
    q_dq, k_dk = (layout.empty(layout.f_blocks, *layout.igate.shape) for _ in range(2))
    backward._backward_features[layout.f_blocks, chunks, rows](
        q, k, v, grad, layout.igate, layout.decay, m_rows, denominators, qz_grad, *states, c_grads, z_grads,
        dq, dk, q_dq, k_dk, *counts, **layout.tiles("V"),
    )  # fmt: skip
    backward._backward_values[layout.v_blocks, chunks, rows](
        q, k, grad, layout.igate, layout.decay, m_rows, denominators, states[2], c_grads, dv, *counts,
        **layout.tiles("F"),
    )  # fmt: skip
    digate = k_dk.sum(0)
    dlog_f = (q_dq.sum(0) - digate).view(rows, chunks, layout.chunk).flip(-1).cumsum(-1).flip(-1)
    dlog_f = (dlog_f + flow.sum(0).unsqueeze(-1)).view(rows, -1)[:, : layout.length]
    dfgate = dlog_f * torch.sigmoid(-fgate)
    return dq, dk, dv, digate[:, : layout.length].contiguous(), dfgate


@_run_backward.register_fake
def _(grad, q, k, v, igate, fgate, h, m_rows, denominators, state, delay, chunk, precision):
    return tuple(map(torch.empty_like, (q, k, v, igate, fgate)))


def _save(ctx, inputs, output):
    *tensors, state, delay, chunk, precision = inputs
    ctx.save_for_backward(*tensors, *output[:3], *state)
    ctx.options = delay, chunk, precision
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx, grad, *_):
    saved = ctx.saved_tensors  # once, as checkpoints ask
    state = list(saved[8:])
    return *_run_backward(grad, *saved[:8], state, *ctx.options), [None] * len(state), None, None, None


_run.register_autograd(_gradients, setup_context=_save)


def states_of_segments(weights, tokens, none, ends):
    """Return the state after each of some segments that lie one after another and begin without a state.

    Args:
        weights: the mLSTM scorer.
        tokens: ``[H, P, 2D]``, keys and values; P is a multiple of :data:`LARGEST_CHUNK`.
        none: ``[P]``, mask of the rows that hold no token.
        ends: ``[S + 1]`` int32, number of chunks before each segment, and in all.
    """
    k, v, igate, fgate = weights.inputs(tokens.float())
    k, v = k.contiguous(), v.contiguous()
    layout = _Layout(k, v, igate.masked_fill(none, -torch.inf), fgate.masked_fill(none, torch.inf), LARGEST_CHUNK)
    states = layout.states(k, v, ends=ends)
    last = (ends[1:] + torch.arange(len(ends) - 1, device=ends.device)).long()
    return tuple(x[:, last].flatten(0, 1).unsqueeze(0) for x in states)


def delayed_mlstm(q, k, v, igate, fgate, *, delay, state=None, chunk=64):
    """Implement :func:`kvpop_vllm.kernels.ops.delayed_mlstm`.

    The returned state carries no gradient, and a passed state gets none. Products are as exact as torch's own of
    float32 (``torch.set_float32_matmul_precision``): three of TF32, or one below "highest".

    Raises:
        ValueError: a state with ``delay > 0`` or one that requires gradients, a chunk that is not a power of two of at
            least 16, or float64 inputs.
    """
    if state is not None and delay > 0:
        raise ValueError("a state can only be continued with delay=0: pass the features of the tokens to read")
    if chunk < 16 or chunk & (chunk - 1):
        raise ValueError(f"delayed_mlstm in Triton needs a power of two of at least 16 as chunk, got {chunk}")
    if any(t.dtype == torch.float64 for t in (q, k, v, igate, fgate)):
        raise ValueError("delayed_mlstm in Triton computes in float32, got float64: use impl='reference'")
    if state is not None and torch.is_grad_enabled() and any(t.requires_grad for t in state):
        raise ValueError("delayed_mlstm in Triton has no gradient for the state: detach it, or use impl='reference'")
    lead = k.shape[:2]
    inputs = [t.float().flatten(0, 1).contiguous() for t in (q, k, v, igate, fgate)]
    first = () if state is None else [t.float().flatten(0, 1).contiguous() for t in state]
    exact = torch.get_float32_matmul_precision() == "highest"
    options = delay, min(chunk, LARGEST_CHUNK), PRECISION.value if exact else "tf32"
    h, _, _, *last = _run(*inputs, list(first), *options)
    return h.unflatten(0, lead), tuple(t.unflatten(0, lead) for t in last)
