"""An installed wheel brings the command, the C++ kernels and vLLM's plugin to a folder outside of the repository."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpop_vllm.testing import write_tiny_model

ROOT = Path(__file__).parents[2]
GENERATE = """
import sys
import kvpop_vllm.kernels.triton
from kvpop_vllm.kernels.dispatch import load_extension
from vllm import LLM, SamplingParams

for module in (kvpop_vllm, kvpop_vllm.kernels.triton, load_extension()):
    assert module.__file__.startswith(sys.argv[1]), module.__file__
policy = {"policy": "streaming-llm", "budget": 64}
sizes = dict(max_model_len=256, max_num_seqs=1, kv_cache_memory_bytes=1 << 24, enforce_eager=True)
llm = LLM(sys.argv[2], skip_tokenizer_init=True, additional_config={"kv_policy": policy}, **sizes)
params = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
(answer,) = llm.generate({"prompt_token_ids": [1 + i % 50 for i in range(100)]}, params)
assert len(answer.outputs[0].token_ids) == 4
"""


@pytest.mark.slow
def test_an_installed_wheel_serves(tmp_path):
    """The wheel is built as `make wheel` does, and found before the installation of the environment."""

    def run(*command, **changes):
        environment = os.environ | changes
        outcome = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert outcome.returncode == 0, outcome.stdout[-3000:] + outcome.stderr[-3000:]
        return outcome.stdout + outcome.stderr

    pip, site = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"), tmp_path / "site"
    run(*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", str(tmp_path), str(ROOT), KVPOP_REQUIRE_EXT="1")
    (wheel,) = tmp_path.glob("kvpop_vllm-*.whl")
    run(*pip, "install", "--no-deps", "--target", str(site), str(wheel))
    model = write_tiny_model(tmp_path / "model")
    assert "streaming-llm" in run(str(site / "bin" / "kvpop"), "policies", PYTHONPATH=str(site))
    output = run(sys.executable, "-c", GENERATE, str(site), str(model), PYTHONPATH=str(site))
    assert "decoding with the cpp kernels" in output
