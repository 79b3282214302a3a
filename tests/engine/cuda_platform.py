"""A plugin that makes vLLM take this process for one with an Ampere GPU; load it with ``-p`` before vLLM.

Only queries of the device itself are replaced. Configs, backends, runners and graph managers are vLLM's own,
and tensors stay in CPU memory.
"""

import importlib
import sys
import types

for _name in (
    "_C_stable_libtorch",
    "_moe_C_stable_libtorch",
    "vllm_flash_attn._vllm_fa2_C",
    "vllm_flash_attn._vllm_fa3_C",
):
    sys.modules.setdefault(f"vllm.{_name}", types.ModuleType(_name))

import vllm.platforms as platforms  # noqa: E402
from vllm.platforms import cuda  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402


class Ampere(cuda.NonNvmlCudaPlatform):
    """Answers that the driver of an Ampere GPU would give."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(8, 0)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "an Ampere GPU that is not there"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 80 << 30

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False


platforms._current_platform = Ampere()

from triton.backends import backends  # noqa: E402

backends["cpu"] = types.SimpleNamespace(driver=None)  # lets vLLM import Triton for its interpreter
importlib.import_module("vllm.triton_utils")
del backends["cpu"]
from vllm import _custom_ops  # noqa: E402

# called at import time for kernels that do not exist here
for _name in [name for name in vars(_custom_ops) if name.startswith("cutlass_") and "_supports_" in name]:
    setattr(_custom_ops, _name, lambda *capability: False)
