"""No code in a published checkpoint's folder runs, by any command that takes the folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scorers.spellings import SPELLINGS, write_code, write_spelling, write_tokenizer

TESTS = Path(__file__).resolve().parents[1]
COMMANDS = """
import json, sys
from pathlib import Path
full, trapped, out = map(Path, sys.argv[1:])
report = {}
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, GenerationConfig
for name, cls in {"AutoConfig": AutoConfig, "AutoTokenizer": AutoTokenizer, "AutoProcessor": AutoProcessor}.items():
    try:
        cls.from_pretrained(trapped / name, trust_remote_code=True)
    except Exception:
        pass
    report[name] = (trapped / f"{name}.trace").exists()
from kvpop_vllm.cli import main
text = out / "text.txt"
text.write_text("no code of a checkpoint runs " * 60)
lines = "".join(json.dumps({"text": text.read_text()}) + "\\n" for _ in range(12))
(out / "rows.jsonl").write_text(lines)
for name, words in {
    "import": [str(full), str(out / "scorer")],
    "inspect-checkpoint": [str(full), "--out", str(out / "map.json")],
    "plan": ["--model", str(full), "--kv-memory", "1GiB"],
    "check-checkpoint": [str(full), "--data", str(out / "rows.jsonl"), "--length", "200"],
}.items():
    report[name] = main([name, *words])
from kvpop_vllm.hf import KVpopCache, load_checkpoint
model = load_checkpoint(full)
AutoConfig.from_pretrained(full), AutoTokenizer.from_pretrained(full), GenerationConfig.from_pretrained(full)
inputs = AutoTokenizer.from_pretrained(full)("text", return_tensors="pt")
report["generate"] = len(model.generate(**inputs, past_key_values=KVpopCache(model, "kvpop"), max_new_tokens=2)[0])
try:
    AutoTokenizer.from_pretrained(full).apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    report["template"] = "rendered"
except Exception as error:
    report["template"] = type(error).__name__
(out / "report.json").write_text(json.dumps(report))
"""
"""First code that must run: transformers with trust, on folders of its own. Then all that must run none."""


@pytest.fixture
def full(tmp_path):
    """Return a checkpoint whose folder has code for every class that transformers can load from one."""
    *_, full = write_spelling(tmp_path / "spelt", SPELLINGS["mlstm_kernels"], vocab=258)
    write_tokenizer(full, full.parent / "trace")
    return full


def test_no_command_runs_code(full, tmp_path):
    trapped, out = tmp_path / "trapped", tmp_path / "out"
    out.mkdir()
    for name in ("AutoConfig", "AutoTokenizer", "AutoProcessor"):
        folder = trapped / name
        folder.mkdir(parents=True)
        write_tokenizer(folder, trapped / f"{name}.trace")
        write_code(folder, trapped / f"{name}.trace")
        if name == "AutoConfig":
            (folder / "config.json").write_text((full / "config.json").read_text())
    environment = os.environ | {"PYTHONPATH": str(TESTS), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-c", COMMANDS, str(full), str(trapped), str(out)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=full)
    assert ended.returncode == 0, ended.stderr[-3000:]
    report = json.loads((out / "report.json").read_text())
    assert report == {
        "AutoConfig": True, "AutoTokenizer": True, "AutoProcessor": True,
        "import": 0, "inspect-checkpoint": 0, "plan": 0, "check-checkpoint": 0, "generate": 6, "template": "SecurityError",
    }  # fmt: skip
    assert not (full.parent / "trace").exists()
