"""Schemas of all kernels: one signature per op, shared by all implementations.

Axes in all docstrings::

    R  requests of a decode batch        L  tokens of a prefill chunk       S  tokens of a sequence
    H  KV heads                          G  query heads per KV head
    Hq = H * G query heads; KV head h serves query heads h * G .. h * G + G - 1
    D  head size                         B  budget: slots per head          N  slots per block
    p  tokens of a protected prefix      F  blocks of a protected prefix
    m  largest number of drafts          d  drafts of a request
    P  entries of a page-table row       M  hidden width of the MLP scorer
    F  features of the mLSTM             Dv value width of the mLSTM
    in training: B sequences, N samples

Symbols follow the paper (KVpop, arXiv version "Predictive Online Pruning"): ``s`` sinks, ``w`` window,
``k = B - s - w`` long-range slots, ``q`` the position of the current token, ``u = q - w`` the token leaving
the window, ``r_t`` raw scores.

Every op takes ``impl="auto" | "reference" | "cpp" | "triton"``. ``auto`` selects the fastest implementation
that supports the tensors (see :mod:`kvpop_vllm.kernels.dispatch`). An implementation requested by name never
falls back to another.
"""

from kvpop_vllm.kernels.ops.rules import (
    REPLAY,
    STATE_M_START,
    AttentionMass,
    ExpectedLogits,
    GateScore,
    KeyNorm,
    MomentResidual,
    NoScore,
    PromptMatching,
    PromptVotes,
    RandomDraw,
    Redundancy,
    RetentionRule,
    SampledMass,
    StepOrderError,
    TokenScorer,
)
from kvpop_vllm.kernels.ops.serving import (
    begin_tail,
    decode_step,
    fill_rows,
    online_topk,
    prefill_chunk,
    verify_step,
    write_tokens,
)
from kvpop_vllm.kernels.ops.training import (
    boundary_loss,
    delayed_mlstm,
    future_attention_mass,
    running_topk,
    sparse_attention,
)
