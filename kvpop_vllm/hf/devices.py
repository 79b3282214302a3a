"""Choose the device that attends under a policy: the model's, if it has kernels for it.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.kernels import dispatch
from kvpop_vllm.kernels.ops import RetentionRule


def check_kernels(k: torch.Tensor, rule: RetentionRule) -> None:
    """Check that a layer's device has kernels for keys ``k [R, H, L, D]`` under its rule. A CPU and `meta` always have."""
    reason = _without_kernels(k, rule)
    if reason is not None:
        raise ConfigError(reason)


def kernel_device(k: torch.Tensor, rule: RetentionRule) -> torch.device:
    """Return the device that attends to keys ``k [.., D]`` under a rule: theirs if it has kernels, or the CPU."""
    return k.device if _without_kernels(k, rule) is None else torch.device("cpu")


def _without_kernels(k: torch.Tensor, rule: RetentionRule) -> str | None:
    """Return why the device of keys ``k [.., D]`` has no kernels for a rule, None if it has."""
    if k.device.type in ("cpu", "meta"):
        return None
    if k.device.type != "cuda":
        return no_kernels(k.device)
    if rule.rounds is not None:
        return "this policy recomputes its scores in rounds, which only a CPU does: move the model to the CPU"
    if rule.compresses:
        return "this policy compresses prompts at their end, which only a CPU does: move the model to the CPU"
    if torch.version.hip is not None or torch.cuda.get_device_capability(k.device) < (8, 0):
        return "GPU kernels are for NVIDIA's from compute capability 8.0 on: move the model to another GPU or the CPU"
    if {dispatch.select(op, k) for op in ("prefill_chunk", "decode_step")} != {"triton"}:
        return (
            f"there are no GPU kernels for keys of {k.dtype} and size {k.shape[-1]}: Triton must be there, and takes float32, float16"
            " and bfloat16 of up to 256; change the model's dtype, or move it to the CPU"
        )
    return None


def no_kernels(device: torch.device) -> str:
    """Return the error of a device of another type than the kernels are for."""
    return f"there are no kernels of a fixed-size cache for {device.type}: move the model to a GPU or the CPU"
