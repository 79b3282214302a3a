"""Combinations that a policy refuses, each in one line that names the option, before weights load.

None of the model folders has weights.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from engine.tiny_configs import FP8_CACHE, LLAMA, REFUSED, SERVED, text
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvpop_vllm.config import ConfigError
from kvpop_vllm.testing import write_random_scorer
from kvpop_vllm.vllm_glue import refusals

STREAMING = {"policy": "streaming-llm", "budget": 64}


@pytest.fixture(autouse=True)
def inspect_models_here(monkeypatch):
    """Let vLLM inspect model classes in this process.

    To avoid CUDA here it would start a process of 10 s for each class.
    """
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return ``write(name, config)``, which writes a model folder with a config only."""
    root = tmp_path_factory.mktemp("models")

    def write(name: str, config: dict) -> Path:
        (root / name).mkdir(exist_ok=True)
        (root / name / "config.json").write_text(json.dumps(config))
        return root / name

    return write


@pytest.fixture(scope="module")
def llama(folder):
    return folder("llama", LLAMA)


@pytest.fixture
def scorer(llama, tmp_path):
    return write_random_scorer(tmp_path / "scorer", llama, "mlstm", sinks=4, window=16, topk=44)


def configure(model, policy=STREAMING, **options):
    options = {"skip_tokenizer_init": True, "max_model_len": 256} | options
    additional = None if policy is None else {"kv_policy": policy}
    return EngineArgs(model=str(model), additional_config=additional or {}, **options).create_engine_config()


def refusal(model, policy=STREAMING, **options):
    with pytest.raises(ConfigError) as caught:
        configure(model, policy, **options)
    message = str(caught.value)
    assert message and "\n" not in message
    assert [f.name for f in Path(model).iterdir()] == ["config.json"]
    return message


@pytest.mark.parametrize("name", REFUSED)
def test_models(folder, name):
    """A policy refuses the model, and vLLM takes it without a policy, so the user sees the policy's line."""
    named, config = REFUSED[name]
    model = folder(name, config)
    message = refusal(model)
    assert named in message and "--kv-policy" in message
    configure(model, None)


@pytest.mark.parametrize("name", SERVED)
def test_models_that_are_served(folder, name):
    configure(folder(name, SERVED[name]))


def test_the_resolved_cache_dtype_counts(folder, llama):
    assert "(fp8" in refusal(llama, kv_cache_dtype="fp8")
    chosen = folder("fp8-cache", LLAMA | {"quantization_config": FP8_CACHE})
    assert "chosen by the checkpoint" in refusal(chosen)
    configure(chosen, dtype="bfloat16", kv_cache_dtype="bfloat16")


def test_a_cache_of_another_dtype_than_the_model(llama):
    assert "leave --kv-cache-dtype out" in refusal(llama, dtype="float32", kv_cache_dtype="bfloat16")


def test_other_platforms(llama):
    """A device that calls itself cuda is NVIDIA's only if vLLM's platform says so.

    test_cuda_contract tests platforms that do.
    """
    vllm_config = configure(llama)
    for platform, named in (
        ("cpu", None),
        ("cuda", "the CpuPlatform platform yet"),
        ("xpu", "the xpu platform yet: serve on a CPU or an NVIDIA GPU"),
    ):
        vllm_config.device_config.device_type = platform
        with pytest.raises(ConfigError, match=named) if named else nullcontext():
            refusals.check_config(vllm_config)


@pytest.mark.parametrize(
    "flag, options",
    [
        ("--enable-prefix-caching", {"enable_prefix_caching": True}),
        ("--speculative-config", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}),
        ("--kv-transfer-config", {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}),
        ("--kv-offloading-size", {"kv_offloading_size": 1.0}),
        ("--decode-context-parallel-size", {"decode_context_parallel_size": 2, "tensor_parallel_size": 2}),
        ("--prefill-context-parallel-size", {"prefill_context_parallel_size": 2}),
        ("--enable-dbo", {"enable_dbo": True}),
        ("--ubatch-size", {"ubatch_size": 2}),
        ("--kv-sharing-fast-prefill", {"kv_sharing_fast_prefill": True}),
        ("--runner pooling", {"runner": "pooling"}),
        ("--dtype bfloat16 or float32", {"dtype": "float16"}),
        ("--block-size 8", {"block_size": 8}),
    ],
)
def test_engine_arguments(llama, flag, options):
    assert flag in refusal(llama, **options)


def test_a_length_that_is_fitted_later(llama):
    """A ratio of a length that is not fixed yet is refused, but `full` keeps all tokens of any length."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    for asked in ("-1", "auto"):
        length = parser.parse_args(["--max-model-len", asked]).max_model_len
        message = refusal(llama, {"policy": "streaming-llm", "compression": 4}, max_model_len=length)
        assert "--kv-compression" in message and "fixed --max-model-len, or --kv-budget" in message
        for policy in (STREAMING, {"policy": "full"}):
            configure(llama, policy, max_model_len=length)
    configure(llama, {"policy": "streaming-llm", "compression": 4}, max_model_len=None)


def test_all_reasons_in_one_line(llama):
    message = refusal(llama, ubatch_size=2, enable_dbo=True, kv_offloading_size=1.0)
    assert all(flag in message for flag in ("--ubatch-size", "--enable-dbo", "--kv-offloading-size"))


@pytest.mark.parametrize(
    "protect, asked, caches",
    [(None, None, False), (None, False, False), (0, None, False), (False, False, False)]
    + [(protect, asked, asked is not False) for protect in ("all", True, 1, "40") for asked in (None, True, False)],
)
def test_prefixes_are_cached_where_prompts_are_protected(llama, monkeypatch, protect, asked, caches):
    """Prefix caching is on where prompts are protected, unless vLLM's own flag turns it off.

    If nobody asked, one log line says that it is off. caplog is not used, because the first config sets up
    vLLM's loggers anew.
    """
    said, line = [], "--kv-policy streaming-llm: prefix caching is off, prompts are not protected (--kv-protect-prompt)"
    monkeypatch.setattr(logging.getLogger("vllm.kvpop_vllm"), "info", lambda text, *args: said.append(text % args))
    policy = STREAMING | ({} if protect is None else {"protect_prompt": protect})
    assert configure(llama, policy, enable_prefix_caching=asked).cache_config.enable_prefix_caching is caches
    assert said.count(line) == (asked is None and not caches)
    worst = [text for text in said if text.startswith("protected: ")]
    assert len(worst) == (1 if protect else 0)


def test_without_a_policy_prefixes_are_cached(llama):
    assert configure(llama, None).cache_config.enable_prefix_caching is True


@pytest.mark.parametrize("protect", [None, 0, False])
def test_a_prefix_cache_without_protected_prompts_is_refused(llama, protect):
    policy = STREAMING if protect is None else STREAMING | {"protect_prompt": protect}
    message = refusal(llama, policy, enable_prefix_caching=True)
    assert message.startswith("--enable-prefix-caching has nothing to share while prompts are evicted from")
    assert "--kv-protect-prompt all" in message and "leave it out" in message


@pytest.mark.parametrize("given", ["some", "", "-1", -1, 1.5, "1.5", [1], 2**24 + 1])
def test_what_cannot_be_protected(llama, given):
    message = refusal(llama, STREAMING | {"protect_prompt": given})
    assert message.startswith("--kv-protect-prompt must be all or a number of tokens up to") and repr(given) in message


@pytest.mark.parametrize("given", ["all", "0", "40"])
def test_the_flag_of_protected_prompts(llama, given):
    """The flag is parsed by vLLM's own command and decides on prefix caching."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = ["--model", str(llama), "--kv-policy", "streaming-llm", "--kv-budget", "64", "--max-model-len", "256"]
    args = EngineArgs.from_cli_args(parser.parse_args([*flags, "--kv-protect-prompt", given]))
    args.skip_tokenizer_init = True
    assert args.create_engine_config().cache_config.enable_prefix_caching is (given != "0")
    switched = parser.parse_args([*flags, "--kv-protect-prompt", given, "--no-enable-prefix-caching"])
    args = EngineArgs.from_cli_args(switched)
    args.skip_tokenizer_init = True
    assert args.create_engine_config().cache_config.enable_prefix_caching is False


@pytest.mark.parametrize(
    "named, policy",
    [
        ("--kv-policy", {"policy": "h3o"}),
        ("--kv-policy", {"budget": 64}),
        ("--kv-allocator", {"policy": "h2o", "budget": 64, "allocator": "ada"}),
        ("'decide_every'", {"policy": "h2o", "budget": 64, "decide_every": 8}),
        ("'bugdet'", {"policy": "streaming-llm", "bugdet": 64}),
        ("additional_config", "streaming-llm"),
        ("--kv-budget", {"policy": "streaming-llm"}),
        ("--kv-budget to at least 6", {"policy": "streaming-llm", "budget": 5}),
        ("--kv-budget to at least 37", {"policy": "streaming-llm", "budget": 36, "sinks": 4, "window": 32}),
        ("--kv-compression", {"policy": "streaming-llm", "budget": 64, "compression": 4}),
        ("--kv-compression", {"policy": "streaming-llm", "compression": 0.5}),
        ("--kv-budget", {"policy": "full", "budget": 64}),
        ("--kv-scorer", {"policy": "streaming-llm", "budget": 64, "scorer": "somewhere"}),
        ("--kv-scorer", {"policy": "kvpop"}),
        ("--kv-scorer", {"policy": "kvpop-linear", "scorer": "nowhere-at-all"}),
    ],
)
def test_settings(llama, named, policy):
    assert named in refusal(llama, policy)


def test_a_good_scorer_is_taken(llama, scorer):
    configure(llama, {"policy": "kvpop", "scorer": str(scorer)})


def edit(folder, **changes):
    path = folder / "kvpop_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def truncate(folder):
    path = folder / "kvpop_scorer.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    "named, spoil",
    [
        ("kvpop_config.json is missing", shutil.rmtree),
        ("kvpop_scorer.safetensors is missing", lambda s: (s / "kvpop_scorer.safetensors").unlink()),
        ("complete safetensors", truncate),
        ("format 'other'", lambda s: edit(s, format="other")),
        ("version 2", lambda s: edit(s, version=2)),
        ("'wnidow'", lambda s: edit(s, wnidow=3)),
        ("model_type", lambda s: edit(s, model_type="qwen3")),
        ("has shape", lambda s: edit(s, num_kv_heads=4)),
        ("layers.2.decay_logit is missing", lambda s: edit(s, num_layers=3)),
    ],
)
def test_damaged_scorers(llama, scorer, named, spoil):
    spoil(scorer)
    assert named in refusal(llama, {"policy": "kvpop", "scorer": str(scorer)})


def test_a_scorer_of_another_model(folder, scorer):
    bigger = folder("bigger", LLAMA | {"num_key_value_heads": 1})
    message = refusal(bigger, {"policy": "kvpop", "scorer": str(scorer)})
    assert "num_kv_heads" in message and "--kv-scorer" in message


def test_a_scorer_of_another_kind_names_its_policy(llama, scorer):
    assert "--kv-policy kvpop" in refusal(llama, {"policy": "kvpop-mlp", "scorer": str(scorer)})


def test_models_that_do_not_hand_over_what_a_gate_sees(folder, llama, tmp_path):
    qwen2 = folder("qwen2", text("Qwen2ForCausalLM", "qwen2"))
    gates = {name: write_random_scorer(tmp_path / name, qwen2, name) for name in ("trimkv", "dms")}
    for name, scorer in gates.items():
        message = refusal(qwen2, {"policy": name, "scorer": str(scorer)})
        assert "hidden states" in message and "Qwen2ForCausalLM does not hand over" in message
    over_kv = write_random_scorer(tmp_path / "kv", llama, "trimkv", reads="kv")
    message = refusal(llama, {"policy": "trimkv", "scorer": str(over_kv)}, tensor_parallel_size=2)
    assert message.endswith("reads the keys and values of all heads: set --tensor-parallel-size 1")


@pytest.mark.parametrize("shifted", [False, True])
def test_dms_needs_a_window_of_two(llama, tmp_path, shifted):
    scorer = str(write_random_scorer(tmp_path / "own", llama, "dms", shifted=shifted))
    assert "set --kv-window to at least 2" in refusal(llama, {"policy": "dms", "scorer": scorer, "window": 1})


def test_another_window_than_a_delayed_scorers(llama, scorer):
    message = refusal(llama, {"policy": "kvpop", "scorer": str(scorer), "window": 32})
    assert "--kv-window 32" in message and "16" in message


def test_streaming_input(llama):
    """A streaming request is refused by the wrapper, and a plain one goes on to vLLM's own checks."""
    from vllm.v1.engine.input_processor import InputProcessor

    config = configure(llama)
    processor = InputProcessor.__new__(InputProcessor)
    processor.vllm_config = config
    with pytest.raises(ConfigError, match="streaming-input .* --kv-policy streaming-llm") as caught:
        processor.process_inputs("0", {"prompt_token_ids": [1]}, None, ("generate",), resumable=True)
    assert "\n" not in str(caught.value)
    with pytest.raises(TypeError, match="SamplingParams"):
        processor.process_inputs("0", {"prompt_token_ids": [1]}, None, ("generate",))


BENCH = ["--model", "MODEL", "--kv-policy", "streaming-llm", "--kv-budget", "5"]
COMMANDS = {
    "--kv-budget to at least 6": ["bench", "latency", *BENCH],
    "--kv-budget to at least 7": ["bench", "throughput", *BENCH, "--kv-sinks", "5", "--random-input-len", "8"],
}


def words_of(folder, words) -> list[str]:
    model = folder("with-tokenizer", LLAMA)
    write_tokenizer(model)
    vllm = str(Path(sys.executable).with_name("vllm"))
    return [vllm, *(str(model) if word == "MODEL" else word for word in words), "--max-model-len", "256"]


def test_a_command_prints_one_line_and_no_traceback_and_fails(folder):
    command = words_of(folder, ["serve", "MODEL", "--kv-policy", "h3o"])
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "WARNING"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert run.returncode not in (0, None) and "Traceback" not in run.stdout + run.stderr
    lines = [line for line in (run.stdout + run.stderr).splitlines() if "kvpop: error:" in line]
    assert len(lines) == 1 and run.stderr.rstrip().endswith(lines[0]), run.stderr
    assert lines[0].startswith("kvpop: error: ") and "--kv-policy takes" in lines[0]


@pytest.mark.parametrize("named", COMMANDS)
def test_other_commands(folder, monkeypatch, named):
    """Other commands print the same line; they run in this process, because a new one would mostly import."""
    from vllm.entrypoints.cli.main import main

    monkeypatch.setattr(sys, "argv", words_of(folder, COMMANDS[named]))
    with pytest.raises(SystemExit) as ended:
        main()
    message = ended.value.code
    assert message.startswith("kvpop: error: ") and "\n" not in message and named in message


def write_tokenizer(model: Path) -> None:
    """Write a tokenizer with one word per token.

    ``vllm bench throughput`` makes its prompts before it checks anything else.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(LLAMA["vocab_size"])}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
