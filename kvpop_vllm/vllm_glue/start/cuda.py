"""Checks and settings for an engine with a policy on NVIDIA GPUs; imports no kernel."""

import importlib.util
from typing import Any

import torch
from vllm import envs
from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvpop_vllm.config import ConfigError
from kvpop_vllm.vllm_glue.start.refusals import refuse

logger = init_logger("vllm.kvpop_vllm")

BACKEND = "kvpop_vllm.vllm_glue.start.backend_choice.CudaBackend"
"""Path that vLLM's backend CUSTOM is registered with."""
ATTENTION_OP = "kvpop_vllm::attention_with_gate_scores"
"""Name of the op of :mod:`kvpop_vllm.vllm_glue.run.gated_attention`."""
PHASE_SECONDS = 15e-6
"""Time that a token takes in one layer where prompts are prefilled token by token, apart from reading keys and values.

One program for each head goes through the phases of a decode step. By reckoning these are some 25 loads and barriers
that wait for each other.
"""
READ_RATE = 100e9
"""Bytes of keys and values that one multiprocessor reads a second, from the L2 cache, by reckoning."""
RESIDUAL_RATE = 2e12
"""Operations a second of one multiprocessor in the products of MomentKV's residuals, by reckoning."""
STEP_SECONDS = 2
"""Time of the attention of one request's tokens above which a step is cut, by reckoning, where these go one by one.

Requests in decoding wait for the whole step. A step has room for a token of each of ``--max-num-seqs`` whatever that
takes.
"""
SLOW = 2000
"""Tokens a second of prefill below which a server says so when it starts."""
GRAPH_STRIDE = 32
"""Difference between sizes of CUDA graphs above vLLM's own, in requests."""
_WORKERS = ("auto", "vllm.v1.worker.gpu_worker.Worker")


def chooses_graphs(engine_args: Any) -> bool:
    """Return whether the user says which CUDA graphs are captured."""
    names, compilation = ("cudagraph_capture_sizes", "max_cudagraph_capture_size"), engine_args.compilation_config
    return any(getattr(config, name) is not None for config in (engine_args, compilation) for name in names)


def prepare(vllm_config: Any, policy: Any, graphs_chosen: bool) -> None:
    """Configure an engine for our attention backend on a GPU.

    Select the backend CUSTOM, run the gated attention op outside of piecewise graphs, capture graphs for as many
    requests as may run together, and bound the tokens of a step where prompts are prefilled token by token.

    Args:
        vllm_config: a ``vllm.config.VllmConfig``.
        policy: the engine's policy.
        graphs_chosen: True to leave the sizes of CUDA graphs as they are.

    Raises:
        ConfigError: one line with every reason why the config cannot be served.
    """
    _check(vllm_config, policy)
    attention = vllm_config.attention_config
    if policy.model.kinds:
        attention.backend_per_kind = {"full_attention": AttentionBackendEnum.CUSTOM}
    else:
        attention.backend = AttentionBackendEnum.CUSTOM
    splits = vllm_config.compilation_config.splitting_ops
    if policy.gated and splits and ATTENTION_OP not in splits:
        splits.append(ATTENTION_OP)
    scheduler = vllm_config.scheduler_config
    if not graphs_chosen:
        _capture_all(vllm_config.compilation_config, scheduler.max_num_seqs, 1 + vllm_config.num_speculative_tokens)
    # an image may be longer than a step
    cuts = scheduler.enable_chunked_prefill and not scheduler.disable_chunked_mm_input
    if not _one_by_one(policy):
        return
    model = vllm_config.model_config
    layers = min(model.get_num_layers(vllm_config.parallel_config), policy.model.num_layers)
    seconds = _token_seconds(policy, model) * layers
    tokens = max(int(STEP_SECONDS / seconds), scheduler.max_num_seqs)
    if scheduler.max_num_scheduled_tokens is None and cuts and tokens < scheduler.max_num_batched_tokens:
        scheduler.max_num_scheduled_tokens = tokens
        logger.info("--kv-policy %s: at most %d tokens a step (--max-num-scheduled-tokens)", policy.name, tokens)
    if 1 / seconds < SLOW:
        logger.warning(
            "--kv-policy %s: prompts are prefilled token by token, by reckoning at %.0f tokens a second for each of the"
            " requests that are prefilled together",
            policy.name,
            1 / seconds,
        )


def _token_seconds(policy: Any, model: Any) -> float:
    """Return the time that a token takes in one layer where prompts are prefilled token by token, by reckoning.

    Protected tokens, which take as long as slots, and the state of a scorer with a correction (some 6 us) are left out.

    Args:
        policy: the engine's policy.
        model: a ``vllm.config.ModelConfig``.
    """
    from kvpop_vllm.policies.base import Order

    size = policy.model.head_dim
    slot = 2 * size * model.dtype.itemsize / READ_RATE
    if policy.order is Order.COUPLED and policy.layer_rule(0, slice(None)).scorer.keeps_moments:
        slot += 3 * 2 * size**2 / RESIDUAL_RATE  # three products of TF32 for one of float32
    return PHASE_SECONDS + policy.max_budget * slot


def _capture_all(compilation: Any, requests: int, tokens: int) -> None:
    """Add sizes of CUDA graphs up to as many requests as run together; vLLM's own end at 512 tokens on most GPUs.

    A dense cache is full long before so many requests run, a small one is not.

    Args:
        compilation: a ``vllm.config.CompilationConfig``.
        requests: most requests that run together.
        tokens: tokens of one request, its drafts included.
    """
    sizes, largest = compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size
    limit, stride = requests * tokens, GRAPH_STRIDE * tokens
    if sizes and largest < limit:
        sizes += [*range(largest + stride, limit, stride), limit]
        compilation.max_cudagraph_capture_size = limit


def _one_by_one(policy: Any) -> bool:
    """Return whether prompts are prefilled token by token.

    Only the rule of a gated policy is built for this, because no other one depends on the files of a scorer.
    """
    from kvpop_vllm.policies.base import Order

    if policy.order is Order.COUPLED or policy.uses_moment_correction:
        return True
    return policy.gated and policy.layer_rule(0, slice(None)).sequential


def _check(vllm_config: Any, policy: Any) -> None:
    """Check that nothing excludes the policy on a GPU.

    Raises:
        ConfigError: one line with every reason.
    """
    from kvpop_vllm.policies.base import Order

    attention, worker = vllm_config.attention_config, vllm_config.parallel_config.worker_cls
    chosen = getattr(attention.backend, "name", None)
    custom = AttentionBackendEnum.CUSTOM
    path = custom.get_path() if custom.is_overridden() else None
    drafts = vllm_config.num_speculative_tokens
    lacking = _ops_without_kernels(vllm_config.model_config.dtype, policy.model.head_dim, drafts)
    mixed = bool(policy.model.kinds)  # then the config's backend, which some models choose, is that of the other layers
    allowed = chosen != "CUSTOM" if mixed else chosen in (None, "CUSTOM")
    refuse(
        {
            f"the attention backend {chosen}: leave --attention-backend out": not allowed,
            "attention backends by kind of layer: leave backend_per_kind out": attention.backend_per_kind,
            f"the attention backend CUSTOM of another plugin ({path}): set VLLM_PLUGINS=kvpop": path != BACKEND,
            "an installation without Triton: install the package triton": importlib.util.find_spec("triton") is None,
            f"what has no kernel in Triton ({', '.join(lacking)}): serve on a CPU": lacking,
            f"the worker {worker}, which does not say what requests ask for: leave --worker-cls out": (
                worker not in _WORKERS
            ),
            "drafts under a policy that reads attention or corrects outputs, whose largest number there is 0: leave"
            " --speculative-config out, or choose another policy": (
                drafts and (policy.order is Order.COUPLED or policy.uses_moment_correction)
            ),
            "drafts under a policy that compresses prompts or ranks tokens in rounds: leave --speculative-config out, or"
            " choose another policy": drafts and (policy.compresses or policy.order is Order.ROUNDS),
            "batch-invariant kernels: unset VLLM_BATCH_INVARIANT": envs.VLLM_BATCH_INVARIANT,
        },
        f"--kv-policy {policy.name} on a GPU",
    )
    check_drafts(vllm_config, policy.retention.window, "--kv-window")


def check_drafts(vllm_config: Any, window: int, budget: str) -> None:
    """Check that no draft of a request leaves its window before it is accepted, which the kernels of a GPU cannot take.

    Args:
        vllm_config: a ``vllm.config.VllmConfig``.
        window: w of the request.
        budget: name of the option or key from which it follows.

    Raises:
        ConfigError: the window is smaller than the number of drafts.
    """
    drafts = vllm_config.num_speculative_tokens
    if vllm_config.device_config.device_type == "cuda" and drafts > window:
        raise ConfigError(
            f"{drafts} drafts do not fit into a window of {window} tokens, which on a GPU they must: set"
            f" num_speculative_tokens of --speculative-config to at most {window}, or raise {budget}"
        )


def _ops_without_kernels(dtype: torch.dtype, size: int, drafts: int) -> list[str]:
    """Return the serving ops without a Triton kernel for heads of this dtype and size.

    They would run as the reference, which waits for the device at every step.
    """
    from kvpop_vllm.kernels.dispatch import TRITON_DTYPES, TRITON_LARGEST_HEAD

    return [
        f"{op} of {str(dtype).removeprefix('torch.')} heads of {size}"
        for op in ("verify_step" if drafts else "decode_step", "prefill_chunk")
        if dtype not in TRITON_DTYPES.get(op, ()) or size > TRITON_LARGEST_HEAD.get(op, size)
    ]
