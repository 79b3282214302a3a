"""A vLLM that the package does not fit starts stock servers, and refuses a policy in one line.

Each vLLM here really is another: a copy of the installed one with a change.
"""

import json
from importlib import metadata

import pytest
from engine.broken_vllm import copy, run, serve
from engine.tiny_engine import generate

from kvpop_vllm.testing import write_tiny_model

CORE, SELECTOR, ENGINE_POLICY = (
    "v1/engine/core.py",
    "v1/attention/selector.py",
    "kvpop_vllm.vllm_glue.start.engine_policy",
)
RELEASED = metadata.version("vllm").removesuffix("+cpu")
PREPROCESS = "def preprocess_add_request(self, request: EngineCoreRequest) -> tuple[Request, int]:"
BROKEN = {
    "a missing function": (
        {SELECTOR: ("_cached_get_attn_backend", "_chosen_attn_backend")},
        "this vLLM lacks vllm.v1.attention.selector:_cached_get_attn_backend(*, backend, attn_selector_config), which "
        "kvpop_vllm relies on: install a stock vllm>=0.32,<0.34",
    ),
    "a renamed parameter": (
        {CORE: (PREPROCESS, PREPROCESS.replace("self, request:", "self, new:") + "\n        request = new")},
        "this vLLM lacks vllm.v1.engine.core:EngineCore.preprocess_add_request(self, request), which kvpop_vllm relies on: "
        "install a stock vllm>=0.32,<0.34",
    ),
    "an unsupported version": (
        {"_version.py": (f"'{RELEASED}'", "'0.34.0'")},
        "vLLM 0.34.0 is not supported: install vllm>=0.32,<0.34",
    ),
    "a module that cannot be imported": (
        {},
        f"ModuleNotFoundError: import of {ENGINE_POLICY} halted; None in sys.modules: "
        "install kvpop_vllm and vllm>=0.32,<0.34 again",
    ),
}
"""Changes of vLLM, and the reason that is given; without changes a module of the glue is missing."""
QUICK = "a renamed parameter"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


@pytest.mark.parametrize("name", [key if key == QUICK else pytest.param(key, marks=pytest.mark.slow) for key in BROKEN])
def test_a_stock_engine_starts_with_one_warning_and_a_policy_is_refused(name, model, tmp_path):
    changes, reason = BROKEN[name]
    report = run(copy(tmp_path, changes), model, "" if changes else ENGINE_POLICY)
    assert not changes or report["vllm"].startswith(str(tmp_path))
    assert report["outputs"] == json.loads(json.dumps(generate(model, None, tokens=4)))
    (warning,) = report["warnings"]
    assert warning.endswith(f"kvpop_vllm does nothing: {reason}")
    assert report["ours"] == [f"vllm.config.vllm:VllmConfig.{method}" for method in ("__init__", "__setstate__")]
    assert report["refusal"] == f"--kv-policy cannot be served: {reason}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--kv-policy=h2o"],
        ["--additional-config", '{"kv_policy": {"policy": "h2o", "budget": 64}}'],
    ],
    ids=str,
)
def test_a_server_is_refused_in_one_line(options, model, tmp_path):
    changes, reason = BROKEN["an unsupported version"]
    ended = serve(copy(tmp_path, changes), model, *options)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == f"kvpop: error: --kv-policy cannot be served: {reason}"
    assert "Traceback" not in ended.stdout + ended.stderr


@pytest.mark.slow
def test_what_only_a_policy_imports_does_not_concern_a_stock_engine(model, tmp_path):
    """A name that only engines with a policy import is looked for when one is asked for."""
    users = (
        "exceptions.py",
        "entrypoints/serve/engine/serving.py",
        "entrypoints/serve/exception_handling/error_response.py",
    )
    report = run(copy(tmp_path, dict.fromkeys(users, ("VLLMNotFoundError", "NotFoundError"))), model)
    assert report["warnings"] == [] and "vllm.config.vllm:VllmConfig.__init__" not in report["ours"]
    assert report["refusal"] == (
        "this vLLM lacks vllm.exceptions.VLLMNotFoundError, which kvpop_vllm relies on: install a stock vllm>=0.32,<0.34"
    )
