"""Compiled models, vLLM's default, keep the same tokens as eager ones, and later starts load what was compiled."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from engine import kinds
from engine.driving import Job, watched
from engine.matrix import BUDGET, make_case, policy_of

from kvpop_vllm.scorers.export import export_checkpoint
from kvpop_vllm.testing import KindsOracle, write_mixed_model, write_tiny_model

LENGTHS = (1, 17, 64, 130, 3 * BUDGET, 40, 41, 99)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def compiler_cache(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(folder / "vllm"))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        yield


def check(case, eager: bool, counts: tuple[int, int]) -> None:
    """Serve eight requests together, with prompts in chunks of 64, and compare them with the oracle.

    Args:
        case: what to serve.
        eager: True to compile nothing.
        counts: expected numbers of models that are compiled and loaded.
    """
    sizes = {"max_model_len": 512, "max_num_seqs": 8, "long_prefill_token_threshold": 64}
    with compiling(counts), watched(case.model, case.settings, case.judge, enforce_eager=eager, **sizes) as engine:
        engine.check(engine.serve([Job(length, new=30) for length in LENGTHS]))


@contextmanager
def compiling(counts: tuple[int, int]) -> Iterator[None]:
    """Check that so many models are compiled, and so many loaded, in the context."""
    from vllm.compilation.counter import compilation_counter as counter

    before = counter.num_aot_compiles, counter.num_aot_artifacts_loaded
    yield
    after = counter.num_aot_compiles, counter.num_aot_artifacts_loaded
    assert (after[0] - before[0], after[1] - before[1]) == counts


def test_compiled_equals_eager_and_the_oracle(folder, compiler_cache):
    """Compiled and eager runs equal the oracle, and other weights load the compiled model."""
    model = str(write_tiny_model(folder / "llama", "llama", layers=2))
    case, other_case = (make_case(model, folder / f"trimkv-{seed}", "trimkv", seed=seed) for seed in (0, 1))
    for judged, eager, counts in ((case, False, (1, 0)), (case, True, (0, 0)), (other_case, False, (0, 1))):
        check(judged, eager, counts)


def test_another_budget_loads_what_the_first_compiled(folder, compiler_cache):
    model = str(write_tiny_model(folder / "plain", "llama", layers=1))
    for budget, counts in ((BUDGET, (1, 0)), (2 * BUDGET, (0, 1))):
        check(make_case(model, folder, "streaming-llm", budget=budget), False, counts)


def test_a_full_checkpoint_compiled(folder, compiler_cache):
    """A compiled full checkpoint of Qwen3 with a borrowed channel equals the oracle.

    The gate comes with the model's weights.
    """
    model = str(write_tiny_model(folder / "qwen3", "qwen3", layers=1))
    case = make_case(model, folder / "query", "dms-query")
    export_checkpoint(model, folder / "query", folder / "full")
    check(case._replace(model=str(folder / "full"), settings={"policy": "dms"}), False, (1, 0))


def test_the_shim_is_still_needed():
    """The shim in compile_cache.py is needed as long as torch's class lacks this method.

    See the ledger in vllm_glue/ledger.py.
    """
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable

    assert not hasattr(BundledAOTAutogradSerializableCallable, "finalize_loading")


def test_gates_of_another_make_are_compiled_again(folder, compiler_cache, monkeypatch):
    from vllm.compilation import caching
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    from kvpop_vllm.vllm_glue.install import install
    from kvpop_vllm.vllm_glue.ledger import WORKER
    from kvpop_vllm.vllm_glue.start.engine_policy import engine_policy

    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())
    model = str(write_tiny_model(folder / "one", "llama", layers=1))

    def factors(name, **options):
        settings = make_case(model, folder / f"{name}-{len(options)}", name, **options).settings
        arguments = EngineArgs(model, skip_tokenizer_init=True, additional_config={"kv_policy": settings})
        config = arguments.create_engine_config()
        install(WORKER, engine_policy(config))
        return str(caching.aot_compile_hash_factors(config))

    hashes = [factors("trimkv"), factors("trimkv", mlp_width=24), factors("trimkv-kv"), factors("dms")]
    hashes.extend([factors("kvzap"), factors("kvzap", mlp_width=24), factors("kvzap-early")])
    assert len(set(hashes)) == 7 and factors("trimkv", seed=3, topk=50, mlp_width=24) == hashes[1]


@pytest.mark.slow
def test_a_gate_next_to_windows_compiled(folder, compiler_cache):
    """Layers with windows have no gate. Another start loads what was compiled."""
    model = str(write_mixed_model(folder / "gemma3", "gemma3_text"))
    settings, exact, *_ = policy_of(model, folder / "gemma3-query", "dms-query")
    oracle, sizes = KindsOracle(model), {"max_model_len": 512, "max_num_seqs": 8}
    for counts in ((1, 0), (0, 1)):
        with compiling(counts), kinds.serving(model, settings, enforce_eager=False, **sizes) as engine:
            jobs = [Job(length, new=30, scored=False) for length in LENGTHS]
            kinds.Served(engine, oracle, exact, by_inputs=True).serve(jobs, 64)
