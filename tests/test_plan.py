"""`kvpop plan` prints the numbers of the engine's accounting, which are the numbers that vLLM reports."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvpop_vllm import policies
from kvpop_vllm.argument_types import memory
from kvpop_vllm.cli import main
from kvpop_vllm.testing import write_random_scorer, write_tiny_model

ROOT = Path(__file__).parents[1]
DEMO = dict(model_type="llama", num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, hidden_size=576, dtype="bfloat16")  # fmt: skip
QWEN3_8B = dict(model_type="qwen3", num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096, head_dim=128, dtype="bfloat16")  # fmt: skip


@pytest.fixture
def planned(tmp_path, capsys):
    """Return ``run(config, *options)``, which returns the output lines and ``{(policy, tokens): cells}``."""

    def run(config, *options):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert main(["plan", "--model", str(tmp_path), *options]) == 0, capsys.readouterr().err
        lines = capsys.readouterr().out.splitlines()
        rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[2:]]
        return lines, {(row[0], int(row[1])): row[2:] for row in rows if len(row) == 6}

    return run


def test_the_demo_models_numbers(planned):
    """The plan has the numbers that `make demo` prints next to vLLM's own.

    512 MiB hold 20.8 requests with the mLSTM's state, 22.1 without a state, and 2.8 dense ones.
    """
    _, rows = planned(DEMO, "--max-model-len", "8192", "--kv-memory", "512MiB", "--budget", "1024")
    assert rows["dense, stock vLLM", 8192] == ["180.0 MiB", "180.0 MiB", "2.8", "1.00"]
    assert rows["kvpop", 1024] == ["22.5 MiB", "24.7 MiB", "20.8", "7.30"]
    assert rows["streaming-llm", 1024] == rows["h2o", 1024] == ["22.5 MiB", "23.2 MiB", "22.1", "7.76"]
    assert rows["momentkv", 1024] == ["22.5 MiB", "24.7 MiB", "20.8", "7.30"]
    assert {name for name, _ in rows} == {*policies.known(), "dense, stock vLLM"} - {"full", "triattention"}
    # a prompt of 8,192 tokens, its last 256 queries (12 blocks), made slots and window; then the last two
    at_its_end = (128 + 12 + 16) * 64 * 264 * 3 * 30 / 2**20
    assert rows["attention-matching", 1024][:2] == ["202.5 MiB", f"{at_its_end:.1f} MiB"]
    _, rows = planned(
        DEMO, "--max-model-len", "8192", "--kv-memory", "512MiB", "--budget", "1000", "--prompt-length", "9"
    )
    assert rows["attention-matching", 1000][1] == f"{16 * 64 * 264 * 3 * 30 / 2**20:.1f} MiB"


@pytest.mark.parametrize("protect, blocks", [(0, 16), (2000, 48), (2048, 48), (4000, 79)])
def test_protected_tokens_may_be_of_answers(planned, protect, blocks):
    """Blocks of 64: the first N tokens, whatever the prompt's length, and a tail of 1,020 tokens or, without them, 1,024."""
    options = "--max-model-len", "8192", "--kv-memory", "512MiB", "--budget", "1024", "--protect-prompt", str(protect)
    for length in ((), ("--prompt-length", "500")):
        _, rows = planned(DEMO, *options, *length)
        assert rows["streaming-llm", 1024][1] == f"{blocks * 64 * 264 * 3 * 30 / 2**20:.1f} MiB"


def test_drafts(planned):
    """Four staged drafts take a block, with queries or without. A state of 64 x 65 + 1 floats leaves room for none.

    The queries of `rkv` and `vase`, 8 and 64 of three query heads, leave room in their last block.
    """
    options = "--max-model-len", "8192", "--kv-memory", "512MiB", "--budget", "1024"
    _, plain = planned(DEMO, *options)
    lines, rows = planned(DEMO, *options, "--drafts", "4")
    block = 64 * 264 * 3 * 30 / 2**20
    for policy, blocks in (("streaming-llm", 17), ("h2o", 17), ("kvpop", 18)):
        assert rows[policy, 1024][:2] == [plain[policy, 1024][0], f"{blocks * block:.1f} MiB"]
    assert all(rows[policy, 1024] == plain[policy, 1024] for policy in ("rkv", "vase"))
    assert "snapkv" not in {name for name, _ in rows}
    assert "snapkv, 1024 tokens: no speculative decoding, since it compresses prompts" in lines


def test_a_window_that_no_request_exceeds(planned):
    options = "--max-model-len", "4096", "--kv-memory", "512MiB", "--budget", "1024"
    assert planned(DEMO | {"sliding_window": 4096}, *options) == planned(DEMO, *options)


def test_layers_that_a_policy_does_not_act_on(planned):
    """Windows of 1,024 tokens in 27 of 36 layers: 9 blocks of 128 each, in pages of 128 of a policy's slots."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    windows = {"layer_types": kinds * 9, "use_sliding_window": True, "sliding_window": 1024}
    options = "--max-model-len", "32768", "--kv-memory", "8GiB", "--budget", "2048"
    lines, rows = planned(QWEN3_8B | windows, *options)
    assert lines[0].startswith("9 layers with full attention of 36, 8 KV heads of 128, bfloat16; requests of 32768")
    assert lines[0].endswith("128 slots a block")
    page, token, mib = 8 * 128 * 520, 2 * 8 * 128 * 2, 2**20
    assert "in every row are the 27 layers of sliding_attention, in which a request holds 123.4 MiB at its end" in lines
    canonical, blocks = (9 * 2048 + 27 * 1024) * token, 16 + 3 * 9
    stock = 256 + 3 * 9
    assert rows["dense, stock vLLM", 32768][2] == f"{2**33 // (9 * 128 * token) / stock:.1f}"
    assert rows["streaming-llm", 2048][:3] == [
        f"{canonical / mib:.1f} MiB",
        f"{9 * blocks * page / mib:.1f} MiB",
        f"{2**33 // (9 * page) / blocks:.1f}",
    ]
    assert not any("padding" in line for line in lines)
    assert rows["trimkv", 2048][:3] == rows["streaming-llm", 2048][:3]


def test_groups_are_padded_to_one_number_of_layers(planned):
    """Two layers of full attention next to five of windows form one and three groups of two. One layer is padding."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"]
    windows = {"layer_types": kinds, "num_hidden_layers": 7, "use_sliding_window": True, "sliding_window": 1024}
    options = "--max-model-len", "32768", "--kv-memory", "8GiB", "--budget", "2048"
    lines, rows = planned(QWEN3_8B | windows, *options)
    page, mib = 8 * 128 * 520, 2**20
    assert rows["streaming-llm", 2048][1] == f"{2 * (16 + 3 * 9) * page / mib:.1f} MiB"
    assert "vLLM forms 4 cache groups of 2 layers, 1 of which are padding" in lines


def test_stages_of_layers_of_several_kinds(planned):
    """Numbers are those of one stage: the one with most pages in a block. Blocks are those of all groups."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    windows = {"layer_types": kinds * 9, "use_sliding_window": True, "sliding_window": 1024}
    options = "--max-model-len", "32768", "--kv-memory", "8GiB", "--budget", "2048"
    lines, rows = planned(QWEN3_8B | windows, *options, "--pipeline-parallel-size", "2")
    # of layers 3, 7, .. stage 0 has 4 and stage 1 has 5; of each group of windows both have at most 5
    page, token, mib = 8 * 128 * 520, 2 * 8 * 128 * 2, 2**20
    assert lines[0].startswith("5 layers with full attention of 36 a stage of 2")
    assert rows["streaming-llm", 2048][:2] == [
        f"{(5 * 2048 + 13 * 1024) * token / mib:.1f} MiB",
        f"{5 * (16 + 3 * 9) * page / mib:.1f} MiB",
    ]


def test_blocks_as_large_as_a_recurrent_state(planned):
    """Nemotron-H 8B: a block of four layers has the least multiple of 16 slots that holds a state; the waste is printed."""
    model = json.loads((ROOT / "docs/configs/Nemotron-H-8B-Base-8K/config.json").read_text())
    options = "--max-model-len", "8000", "--kv-memory", "16GiB", "--budget", "1500"
    lines, rows = planned(model, *options, "--mamba-ssm-cache-dtype", "float32")
    state = 128 * 64 * 128 * 4 + 3 * (128 * 64 + 2 * 8 * 128) * 2  # in float32, and the convolution's in bfloat16
    slot, mib = 8 * (2 * 2 * 128 + 8), 2**20
    slots = -(-state // (16 * slot)) * 16
    block, blocks, canonical = 4 * slots * slot, 2 + 24 // 4, 4 * 1500 * 2 * 8 * 128 * 2 + 24 * state
    assert rows["streaming-llm", 1500][:2] == [f"{canonical / mib:.1f} MiB", f"{blocks * block / mib:.1f} MiB"]
    (line,) = (line for line in lines if "streaming-llm, " in line and "blocks are as large" in line)
    assert all(f" {gate}," in line for gate in ("trimkv", "dms", "kvzap"))
    assert line.endswith(
        f"1500 tokens: blocks are as large as a recurrent state ({slots} slots, {block / mib:.1f} MiB); a request holds 2 for"
        f" slots and 6 for other layers, {100 * (1 - canonical / (blocks * block)):.0f}% of them unused; {2 * slots} tokens"
        " cost the same"
    )


def test_positions_of_gemma_3(planned):
    """Its positions are those of the stretched rotation already, as in vLLM."""
    text = dict(model_type="gemma3_text", num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=64, hidden_size=256, dtype="bfloat16", sliding_window=512)  # fmt: skip
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    rope = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    lines, _ = planned(text | {"rope_parameters": rope}, "--kv-memory", "8GiB", "--budget", "2048")
    assert "requests of 131072 tokens" in lines[0]


def test_positions_of_a_stretched_rotation(planned):
    """Without --max-model-len requests have all positions of the model, as an engine would give them."""
    stretched = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "rope_theta": 1e4}
    model = DEMO | {"max_position_embeddings": 2048, "rope_parameters": stretched}
    assert "requests of 8192 tokens" in planned(model, "--kv-memory", "512MiB", "--budget", "1024")[0][0]


def test_the_extract_in_the_documents(planned):
    """Each line of the extract is a line of its command's output, up to blanks."""
    text = (ROOT / "docs" / "operating.md").read_text()
    command, extract = re.search(r"```bash\nkvpop plan (.*?)```.*?```\n(.*?)```", text, re.DOTALL).groups()
    _, *options = shlex.split(command.replace("models/SmolLM2-135M-Instruct", "").replace("\\\n", " "))
    options[options.index("--scorer") + 1] = str(ROOT / "examples" / "scorers" / "smollm2-135m-kvpop")
    lines, _ = planned(DEMO, *options)
    shown = {" ".join(line.split()) for line in lines}
    assert len(extract.splitlines()) > 5 and all(" ".join(line.split()) in shown for line in extract.splitlines())


def test_a_reader_that_has_seen_enough(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DEMO))
    command = [sys.executable, "-m", "kvpop_vllm.cli", "plan", "--model", str(tmp_path), "--kv-memory", "1GiB"]
    command += ["--max-model-len", "8192"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        stderr = process.stderr.read()
        assert process.wait() == 141 and "kvpop:" not in stderr and "Traceback" not in stderr


def test_no_stdout_at_all():
    done = subprocess.run(
        f"{sys.executable} -m kvpop_vllm.cli policies >&-", shell=True, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr


def test_a_broken_pipe_elsewhere_is_an_error(monkeypatch, capsys):
    def broken(options):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("kvpop_vllm.plan.plan", broken)
    assert main(["plan", "--model", "m", "--kv-memory", "1GiB"]) == 2
    assert capsys.readouterr().err == "kvpop: [Errno 32] Broken pipe\n"


def test_a_file_of_shares_serves_every_policy_that_takes_shares(planned, tmp_path):
    (tmp_path / "shares.json").write_text(json.dumps({"shares": [[1, 2, 1]] * 30}))
    size = "--max-model-len", "8192", "--kv-memory", "512MiB", "--budget", "1024"
    lines, rows = planned(DEMO, *size, "--calibration", str(tmp_path / "shares.json"))
    assert {("h2o", 1024), ("rkv", 1024), ("vase", 1024)} <= set(rows)
    assert [line for line in lines if line.startswith("attention-matching, 1024 tokens")] == [
        "attention-matching, 1024 tokens: --policy attention-matching compresses prompts, for which nothing is calibrated:"
        " leave --calibration out"
    ]
    assert not any(line.startswith("unequal shares") for line in lines), "one rank"


def unused(lines: list[str]) -> int:
    """Return the largest part of a request's blocks that is unused, in percent."""
    (line,) = (line for line in lines if line.startswith("unequal shares"))
    return int(re.search(r"in every rank, .*?(\d+)% of them unused", line)[1])


def test_what_ranks_and_stages_waste(planned, tmp_path):
    """Blocks are those of the rank that needs most. The line says how many of all ranks' blocks are unused.

    With 1 to 3 slots of 4 for the heads of three ranks, k = 512 of 1,024 and N = 64, a rank needs 1, 2 or 3 times 4
    pages of long-range slots, and 8 of sinks and window.
    """
    (tmp_path / "shares.json").write_text(json.dumps({"shares": [[0.5, 1, 1.5]] * 30}))
    size = "--max-model-len", "8192", "--kv-memory", "512MiB", "--budget", "1024"
    shared = *size, "--calibration", str(tmp_path / "shares.json")
    lines, rows = planned(DEMO, *shared, "--tensor-parallel", "3")
    assert lines[0].startswith("30 layers, 1 KV heads of 64 a rank of 3, bfloat16")
    assert rows["h2o", 1024][1] == f"{(8 + 12) * 64 * 264 * 30 / 2**20:.1f} MiB"
    assert 25 < unused(lines) < 40
    _, staged = planned(DEMO, *shared, "--tensor-parallel-size", "3", "--pipeline-parallel-size", "4")
    assert staged["h2o", 1024][1] == f"{(8 + 12) * 64 * 264 * 8 / 2**20:.1f} MiB", "a stage has at most 8 of 30 layers"
    balanced = json.dumps({"shares": [[0.5, 0.5, 0.5], [1.5, 1.5, 1.5]] * 15})
    (tmp_path / "shares.json").write_text(balanced)
    lines, rows = planned(DEMO, *shared, "--tensor-parallel", "3")
    assert unused(lines) < 8, "what is left is whole pages"
    assert main(["plan", "--model", str(tmp_path), *size, "--pipeline-parallel", "31"]) == 2


def test_what_no_policy_can_use_is_the_error(tmp_path, capsys):
    """The last policy lacks statistics, which is not why the others are refused."""
    (tmp_path / "config.json").write_text(json.dumps(DEMO))
    (tmp_path / "shares.json").write_text(json.dumps({"shares": [[1, 2]] * 2}))
    words = ["--kv-memory", "512MiB", "--budget", "1024", "--calibration", str(tmp_path / "shares.json")]
    assert main(["plan", "--model", str(tmp_path), "--max-model-len", "8192", *words]) == 2
    error = capsys.readouterr().err
    assert "shares must be 30 lists of 3 numbers" in error and "statistics" not in error, error


def test_corrections_allocators_and_budgets(planned):
    size = "--max-model-len", "8192", "--kv-memory", "512MiB"
    lines, rows = planned(DEMO | {"max_position_embeddings": 8192}, *size[2:])
    assert sorted({tokens for _, tokens in rows}) == [1024, 2048, 4096, 8192]
    assert lines[0].startswith("30 layers, 3 KV heads of 64, bfloat16; requests of 8192 tokens, 512.0 MiB of KV memory")
    _, corrected = planned(DEMO, *size, "--correction", "moment", "--budget", "1024")
    blocks = {name: float(cells[1].split()[0]) for (name, _), cells in corrected.items()}
    plain = {name: float(cells[1].split()[0]) for (name, tokens), cells in rows.items() if tokens == 1024}
    page = 3 * 16896 * 30 / 2**20
    assert blocks["streaming-llm"] == pytest.approx(plain["streaming-llm"] + page, abs=0.1)
    assert blocks["kvpop"] == pytest.approx(plain["kvpop"] + page, abs=0.1)
    assert blocks["momentkv"] == plain["momentkv"]
    _, shared = planned(DEMO, *size, "--allocator", "pyramid", "--budget", "1024")
    part_pages = float(shared["h2o", 1024][1].split()[0]) - plain["h2o"]  # layers round up to whole pages
    assert 0 < part_pages <= page + 0.1
    _, wide = planned(DEMO, *size, "--block-size", "256", "--budget", "1000", "--dtype", "float32")
    assert wide["streaming-llm", 1000][1] == f"{4 * 256 * 520 * 3 * 30 / 2**20:.1f} MiB"


def test_a_budget_that_some_cannot_have(planned):
    """A policy that cannot use a budget has no row but a line with the reason. The other rows are printed."""
    lines, rows = planned(DEMO, "--max-model-len", "8192", "--kv-memory", "512MiB", "--budget", "5", "1024")
    assert ("tova", 5) in rows and ("kvpop", 1024) in rows and ("streaming-llm", 5) not in rows
    refusals = [line for line in lines if line.startswith("streaming-llm, 5 tokens:")]
    assert refusals == [
        "streaming-llm, 5 tokens: a budget of 5 is too small for 4 sinks + window 1 + 1: raise --budget to at least 6"
    ]


def test_a_scorers_own_size(planned, tmp_path):
    shown = dict(format="kvpop-scorer", version=1, model_type="llama", num_layers=30, num_kv_heads=3, head_dim=64, scorer="mlstm", sinks=4, window=256, topk=764, decay=dict(step=1, min=0.999, max=0.999999), feature_map="softmax", gate_softcap=None, norm=False, skip=False, delayed=True)  # fmt: skip
    size = "--max-model-len", "8192", "--kv-memory", "512MiB", "--budget", "1024"
    scorer = write_random_scorer(tmp_path / "scorer", write_tiny_model(tmp_path / "model", "llama"), "mlstm", topk=1000)
    tiny = json.loads((tmp_path / "model/config.json").read_text())
    for config, options, default in (
        (DEMO, [], True),
        (DEMO | {"model_type": "llama_kvpop", "kvpop": shown}, [], False),
        (tiny, [], True),
        (tiny, ["--scorer", str(scorer)], False),
    ):
        lines, _ = planned(config, *size, *options)
        assert any("kvpop's state is that of a scorer of default size" in line for line in lines) == default


def test_ranks_hold_their_heads(planned):
    size = "--max-model-len", "32768", "--kv-memory", "40GB", "--budget", "4096"
    _, one_rank = planned(QWEN3_8B, *size)
    lines, half = planned(QWEN3_8B, *size, "--tensor-parallel", "2")
    assert one_rank["dense, stock vLLM", 32768][0] == "4.5 GiB" and half["dense, stock vLLM", 32768][0] == "2.2 GiB"
    assert "4 KV heads of 128 a rank of 2" in lines[0]
    assert float(half["kvpop", 4096][2]) == pytest.approx(2 * float(one_rank["kvpop", 4096][2]), rel=0.01)
    lines, sharded_lines = planned(QWEN3_8B, *size, "--tensor-parallel", "16")
    assert "1 KV heads" in lines[0]


@pytest.mark.parametrize("text, size", [("536870912", 2**29), ("512MiB", 2**29), ("512Mi", 2**29), ("1.5 GB", 1500000000), ("2k", 0), ("", 0), ("0", 0), ("-1", 0)])  # fmt: skip
def test_sizes(text, size):
    if size:
        assert memory(text) == size
    else:
        with pytest.raises(Exception, match="is not a size such as"):
            memory(text)


@pytest.mark.parametrize(
    "config, options, message",
    [
        (DEMO, ["--budget", "1"], "a budget of 1 is too small"),
        (DEMO | {"num_hidden_layers": 0}, [], "num_layers is 0"),
        (
            DEMO | {"num_hidden_layers": None},
            [],
            "transformers refuses it (Validation error for field 'num_hidden_layers'",
        ),
        (
            DEMO | {"num_key_value_heads": "3"},
            [],
            "transformers refuses it (Validation error for field 'num_key_value_heads'",
        ),
        (DEMO | {"head_dim": 10}, [], "head size 10, which no policy serves"),
        (
            DEMO | {"sliding_window": 4096, "max_position_embeddings": 4097},
            [],
            "layers other than full attention, which no policy serves",
        ),
        (DEMO | {"kv_lora_rank": 512}, [], "latent attention (MLA), which no policy serves"),
        (DEMO | {"kvpop": {"format": "x"}}, [], "config.json, section kvpop says format 'x'"),
        (DEMO, ["--block-size", "60"], "slots per block must be a positive multiple of 16"),
        (DEMO, ["--tensor-parallel-size", "2"], "--tensor-parallel-size 2 does not divide 3 KV heads"),
        (DEMO | {"dtype": "float16"}, [], "give --dtype bfloat16 or float32"),
        (DEMO | {"dtype": None}, [], "config.json names the dtype None: give --dtype"),
        ({"num_hidden_layers": 2}, [], "config.json has no 'model_type'"),
        ({"model_type": "new", "num_hidden_layers": 2}, [], "config.json has no 'num_attention_heads'"),
        (DEMO | {"model_type": "new", "num_key_value_heads": "3"}, [], "num_kv_heads is '3'"),
        ([], [], "is not a model's config: give the folder of a decoder-only language model"),
        (DEMO, ["--scorer", "nowhere"], "nowhere"),
        (
            DEMO | {"model_type": "new"},
            ["--max-model-len", None],
            "config.json has no max_position_embeddings: give --max-model-len",
        ),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, config, options, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    size = [] if None in options else ["--max-model-len", "8192", *options]
    assert main(["plan", "--model", str(tmp_path), "--kv-memory", "512MiB", *size]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
