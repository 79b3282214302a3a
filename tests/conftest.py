"""Hooks and fixtures for all tests."""

import csv
import hashlib
import os
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
_spent: dict[str, float] = {}  # seconds of the tests that have passed
LONGEST_FIRST = (
    "kernels/test_sanitizers.py",
    "engine/test_fidelity.py",
    "server/test_server.py",
    "server/test_several_servers.py",
    "engine/test_variants.py",
    "distill/test_trainer_processes.py",
    "distill/test_trainer.py",
    "engine/test_tensor_parallel.py",
    "kernels/test_triton_compiled.py",
    "kernels/test_prefill_chunk.py",
    "kernels/test_triton_interpreted.py",
    "engine/test_traffic.py",
    "evaluation/test_reasoner_comparison.py",
    "stress/test_soak.py",
    "server/test_faults.py",
    "server/test_observability.py",
    "server/test_readme.py",
    "engine/test_cartridges.py",
)
"""Modules that run first because they would leave other workers idle at the end.

``--no-loadscope-reorder`` keeps this order.
"""
SLOW = {
    "bench/test_gpu.py": ["test_all_is_right"],
    "bench/test_policy_table.py": ["test_policies_with_a_calibration"],
    "calibrate/test_command.py": ["test_a_full_checkpoint", "test_a_scorers_policy_decides", "may_decide[head"],
    "compaction/test_compact.py": [""],
    "compaction/test_trained.py": [""],
    "config/test_supported.py": ["test_the_document_of_models[memory]"],
    "distill/test_command.py": ["test_a_kill_changes_nothing"],
    "distill/test_eval_tasks.py": [""],
    "distill/test_gate_phases.py": [""],
    "distill/test_memory.py": ["test_two_processes"],
    "distill/test_trainer.py": [""],
    "distill/test_trainer_processes.py": [""],
    "engine/test_compiled.py": [""],
    "engine/test_cuda.py": [""],
    "engine/test_evaluation_backend.py": [""],
    "engine/test_fail_safe.py": ["[a renamed parameter]"],
    "engine/test_first_tokens.py": ["[h2o"],
    "engine/test_front_ends.py": ["test_engines_with_other_settings", "loaded_late"],
    "engine/test_full_checkpoint.py": ["test_it_equals_the_base_with_the_adapter[llama]"],
    "engine/test_inert.py": [""],
    "engine/test_kinds.py": ["test_preempted_requests", "[qwen3_next]", "[qwen3_5_text]"],
    "engine/test_kinds_together.py": ["test_chats_with_protected_tokens"],
    "engine/test_requests.py": ["[kvpop-more"],
    "engine/test_snapshots.py": ["test_the_pool_takes_blocks_back[h2o"],
    "engine/test_speculation.py": ["test_drafts_of_vllm"],
    "engine/test_traffic.py": ["[kvpop]"],
    "engine/test_variants.py": [""],
    "evaluation/test_corpus.py": ["test_the_command", "test_methods_differ"],
    "evaluation/test_reasoner.py": ["test_the_shipped_reasoner"],
    "evaluation/test_reasoner_comparison.py": ["test_a_failed_command"],
    "hf/test_kinds.py": ["[gemma4_text]", "test_attention_sinks"],
    "kernels/test_decode_step.py": ["test_every_isa"],
    "kernels/test_sanitizers.py": [""],
    "kernels/test_triton_compiled.py": [""],
    "kernels/test_triton_interpreted.py": [""],
    "scorers/test_published_code.py": ["test_no_command_runs_code"],
    "server/test_cartridge_server.py": [""],
    "server/test_server.py": [""],
}
"""Parts of the names of tests that `make test` leaves out, by module.

They take 20 s or more on a slow processor, or share what does. Other tests carry the marker ``slow`` themselves, or take
:data:`SLOW_SECONDS`.
"""
SECONDS = TESTS / "data" / "seconds.csv"
"""Seconds of tests without what they share. ``--record-seconds`` writes those that run and pass.

On another machine tests take other times, but as much longer than one another.
"""
SLOW_SECONDS = 1.5
"""Least seconds of a test that `make test` leaves out, unless it is of :data:`QUICK`."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""True in a process in which Triton's kernels run in its interpreter, where all tests are slow."""
QUICK = "imports"
"""Folder of the tests of documents, names and layers, which are never slow by their seconds."""
NIGHTLY = {
    "bench/test_benchmarks.py": ["test_one_round_of_real_engines"],
    "calibrate/test_serving.py": ["test_the_printed_command_serves"],
    "compaction/test_example.py": ["test_from_a_text_to_an_answer"],
    "compaction/test_shipped_compactor.py": ["test_passages_are_found_again"],
    "distill/test_demo_script.py": ["test_a_minute_of_it"],
    "distill/test_memory.py": [
        "[4B-8-True",
        "[8B-1-False",
        "[8B-8-True-",
    ],
    "distill/test_stream.py": ["test_two_processes_go_on_with_the_stream_of_one"],
    "distill/test_trainer_processes.py": [
        "test_another_number_of_processes_goes_on",
        "test_two_processes_equal_one_in_bfloat16",
        "test_a_kill_changes_nothing[base",
        "to_stop_saves_its_step[frozen",
    ],
    "engine/test_cuda.py": ["[nightly"],
    "engine/test_cuda_late.py": ["[rkv, pyramid", "[triattention-"],
    "engine/test_draft_models.py": ["test_a_chat_goes_on", "test_chunks_and_preemption"],
    "engine/test_executors.py": ["[h2o", "[streaming-llm", "[kvpop-options2", "test_two_data_parallel_engines"],
    "engine/test_first_tokens.py": ["[vase", "[random", "[h2o-pyramid"],
    "engine/test_kinds.py": ["qwen3_5_text-kvpop", "qwen3_5_text-h2o"],
    "engine/test_kinds_policies.py": ["[gemma4_text-"],
    "engine/test_speculation.py": [
        "[stateless]",
        "[recency]",
        "[newest mass]",
        "[moments]",
        "[mass, fixed shares]",
        "[state, fixed shares]",
        "[gate over hidden states]",
        "[rounds]",
        "[rounds, statistics]",
    ],
    "engine/test_tensor_parallel.py": [
        "[trimkv",
        "[kvpop-options0]",
        "[attention-matching",
        "[streaming-llm",
        "[dms-query",
    ],
    "engine/test_traffic.py": ["[h2o]", "[snapkv]", "[momentkv]", "[vase]"],
    "evaluation/test_reasoner_comparison.py": ["test_from_a_reasoner_to_a_table"],
    "kernels/test_sanitizers.py": ["test_make_sanitize"],
    "kernels/test_triton_interpreted.py": ["[nightly"],
    "server/test_published_server.py": ["[two API servers]"],
    "server/test_several_servers.py": [
        "[two API servers]",
        "[two engines]",
        "test_an_engine_of_another_node",
        "test_an_engine_without_the_policy",
        "test_nodes_with_engines_and_api_servers_of_their_own",
    ],
    "server/test_wheel_installed.py": ["test_an_installed_wheel_serves"],
    "stress/test_soak.py": ["test_a_minute_of_load"],
}
"""Parts of the names of tests that `make test-all` leaves out: minutes, and others make most of their claims."""
FUNCTION_SECONDS = 5
"""Most seconds of a function's slow parameter sets that `make test-all` runs, at least one set. Which ones their names draw."""


def pytest_addoption(parser):
    """Add ``--record-seconds``."""
    parser.addoption("--record-seconds", action="store_true", help=f"write {SECONDS.relative_to(TESTS.parent)}")


def read_seconds() -> dict[str, float]:
    """Return the recorded seconds of tests, by their ids relative to this folder."""
    with SECONDS.open(newline="", encoding="utf-8") as file:
        return {row["test"]: float(row["seconds"]) for row in csv.DictReader(file)}


def pytest_runtest_logreport(report):
    """Keep the seconds of a test that has passed."""
    if report.when == "call" and report.passed:
        _spent[report.nodeid.removeprefix(f"{TESTS.name}/")] = report.duration


def pytest_sessionfinish(session):
    """Record the seconds of the tests that have run. Workers leave it to the process that has started them."""
    if not session.config.option.record_seconds or hasattr(session.config, "workerinput"):
        return
    seconds = read_seconds() | _spent
    with SECONDS.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("test", "seconds"))
        rows.writerows((name, f"{seconds[name]:.1f}") for name in sorted(seconds) if seconds[name] >= SLOW_SECONDS)


def pytest_generate_tests(metafunc):
    """Refuse values in a set: each process orders strings by hashes of its own, and workers must collect equal lists."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        values = mark.args[1] if len(mark.args) > 1 else mark.kwargs["argvalues"]
        assert not isinstance(values, (set, frozenset)), f"{mark.args[0]}: a set has no order, name a list"


def pytest_collection_modifyitems(items):
    """Move the modules of `LONGEST_FIRST` to the front, and mark what is slow or nightly.

    Slow are those of `SLOW`, those that take long, every test of another implementation than the fastest one here, and
    what is nightly.
    """
    import torch  # noqa: F401  (the extension's libraries)

    from kvpop_vllm import _C

    missing = [name for name in (*LONGEST_FIRST, *SLOW, *NIGHTLY) if not (TESTS / name).is_file()]
    assert not missing, f"LONGEST_FIRST, SLOW and NIGHTLY name files that are gone: {missing}"
    order = {name: place for place, name in enumerate(LONGEST_FIRST)}
    slower, seconds = {"reference", *_C.isa_levels()[:-1]}, read_seconds()
    items.sort(key=lambda item: order.get(_module(item), len(order)))
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        nightly, slow = (any(part in item.name for part in table.get(_module(item), ())) for table in (NIGHTLY, SLOW))
        slow |= INTERPRETED
        if not _module(item).startswith(QUICK):
            slow |= seconds.get(item.nodeid.removeprefix(f"{TESTS.name}/"), 0) >= SLOW_SECONDS
        if nightly:
            item.add_marker("nightly")
        if nightly or slow or any(isinstance(value, str) and value in slower for value in parameters):
            item.add_marker("slow")
    _leave_to_the_night(items, seconds)


def _leave_to_the_night(items: list[pytest.Item], seconds: dict[str, float]) -> None:
    """Mark as nightly what of a function's slow parameter sets takes more than :data:`FUNCTION_SECONDS` together.

    Sets without a record take half of :data:`SLOW_SECONDS`, or in Triton's interpreter twice of it, so that one runs there.
    """
    sets: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("nightly"):
            sets.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_function in sets.values():
        total = 0.0
        # hashes draw the same sets in every process, and other sets than the first ones
        for item in sorted(of_function, key=lambda item: hashlib.sha256(item.nodeid.encode()).digest()):
            unrecorded = SLOW_SECONDS * (2 if INTERPRETED else 0.5)
            duration = seconds.get(item.nodeid.removeprefix(f"{TESTS.name}/"), unrecorded)
            if total and total + duration > FUNCTION_SECONDS:
                item.add_marker("nightly")
            else:
                total += duration


def pytest_runtest_setup(item):
    """Skip what is slow after the time ``KVPOP_SLOW_UNTIL``, in seconds since 1970.

    Processors differ by a factor of six. On a slow one `.ci/run` would exceed its time, and no test would count.
    """
    if item.get_closest_marker("slow") and time.time() > float(os.environ.get("KVPOP_SLOW_UNTIL", "inf")):
        pytest.skip("slow, and the time KVPOP_SLOW_UNTIL is over: run it without that variable")


def _module(item) -> str:
    return "/".join(item.path.parts[-2:])


@pytest.fixture
def run_kvpop(capfd):
    """Function that runs a command line of ``kvpop`` and returns status, output and errors."""
    from kvpop_vllm.cli import main

    def run(*words):
        try:
            status = main([str(word) for word in words])
        except SystemExit as stop:  # argparse
            status = stop.code
        return status, *capfd.readouterr()

    return run


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Folder of a tiny Qwen3 model, which no test changes."""
    from kvpop_vllm.testing import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture
def kvpop(folder, run_kvpop, monkeypatch):
    """Function that runs a command line in the folder of a package's tests. See ``run_kvpop``."""
    monkeypatch.chdir(folder)
    return run_kvpop


@pytest.fixture(scope="module", autouse=True)
def threads_of_the_process():
    """Give every module the same number of torch threads, because tests compare bits with other processes."""
    from threads import same_threads

    with same_threads():
        yield


@pytest.fixture(scope="module")
def few_threads():
    """Run a module on one torch thread, because tiny models gain nothing from more."""
    from threads import one_thread

    with one_thread():
        yield
