"""Entry point of the ``vllm.general_plugins`` group, called in every vLLM process, possibly twice."""

import functools
from pathlib import Path

from kvpop_vllm.config import ConfigError
from kvpop_vllm.supported import VLLM
from kvpop_vllm.vllm_glue.install import install
from kvpop_vllm.vllm_glue.ledger import EVERY, FALLBACK, FUNCTIONS
from kvpop_vllm.vllm_glue.start import contract, fallback


def register() -> None:
    """Register the late-resolving backends, the model types and classes of full checkpoints, and the flags.

    This has no effect on an engine without a policy, and it imports no kernel and no model: vLLM imports a
    class only when a checkpoint asks for it. Where it fails, the plugin stands aside, since vLLM does not catch what
    a plugin raises.
    """
    if fallback.reason is not None:
        return
    try:
        import vllm

        contract.check_version(vllm.__version__)
        contract.check_functions(Path(vllm.__file__).parent, FUNCTIONS)
        install(EVERY)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        reason = str(error) if isinstance(error, ConfigError) else f"{text}: install kvpop_vllm and vllm{VLLM} again"
        fallback.stand_aside(reason, functools.partial(install, FALLBACK))
