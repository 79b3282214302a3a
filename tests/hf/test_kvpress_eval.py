"""kvpress's pipeline with our policies in the place of presses (`examples/kvpress_eval.py`), in kvpress's environment."""

import json
import os
import subprocess

import pytest
from harness import DEMO_MODEL, PEERS, ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PEERS.exists(), reason="needs kvpress in build/peers: `make peers` installs it"),
]

CHILD = """
import json, sys
import kvpress, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from kvpress_eval import PolicyPress

folder, text, scorer = sys.argv[1:]
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
pipe = pipeline("kv-press-text-generation", model=model, tokenizer=AutoTokenizer.from_pretrained(folder))
context, one, two = open(text).read()[:700], "Who speaks first?", "Name a place."


def ask(*questions, press=None):
    return pipe(context, questions=list(questions), press=press, max_new_tokens=6)["answers"]


presses = {
    "no press": None,
    "kvpress, nothing evicted": kvpress.StreamingLLMPress(compression_ratio=0.0),
    "full": PolicyPress("full"),
    "streaming-llm": PolicyPress("streaming-llm", None, 0.75),
    "snapkv": PolicyPress("snapkv", None, 0.5),
    "kvpop": PolicyPress("kvpop", scorer, 0.5),
}
answers = {name: [ask(one, two, press=press), ask(one, press=press) + ask(two, press=press)] for name, press in presses.items()}
cache = PolicyPress("streaming-llm", None, 0.75).cache(model, 400)
print(json.dumps({"answers": answers, "budget": cache.policy.retention.budget}))
"""


def test_policies_and_presses_answer_the_same_questions():
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", "HF_HUB_OFFLINE": "1"}
    files = [str(DEMO_MODEL), str(ROOT / "tests" / "data" / "hamlet.txt")]
    files.append(str(ROOT / "examples" / "scorers" / "smollm2-135m-kvpop"))
    child = subprocess.run([str(PEERS), "-c", CHILD, *files], env=env, capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr[-3000:]
    report = json.loads(child.stdout.splitlines()[-1])
    answers = report["answers"]
    for name, (together, alone) in answers.items():
        assert together == alone, f"{name}: an answer leaves something for the next question"
    assert answers["full"] == answers["no press"] == answers["kvpress, nothing evicted"]
    assert answers["streaming-llm"] != answers["no press"]
    assert report["budget"] == 100
