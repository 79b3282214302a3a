"""Six questions of a newcomer are answered from README within two links, and what the answers say is so."""

import re
import shlex

import pytest
import readme

from kvpop_vllm import policies
from kvpop_vllm.cli import main
from kvpop_vllm.supported import FAMILIES

ANSWERS = {
    "How do I serve gpt-oss with a budget of 2,048?": (
        ["docs/models.md"],
        "vllm serve openai/gpt-oss-20b --kv-policy streaming-llm --kv-budget 2048",
    ),
    "What does it cost?": (
        ["docs/models.md"],
        "kvpop plan --model docs/configs/gpt-oss-20b --kv-memory 16GiB --budget 2048 --max-model-len 32000",
    ),
    "Which policy without a scorer?": (
        ["docs/policies.md"],
        "| Nothing can be trained, quality matters, prompts may be read slowly | `h2o`, with a [calibration](#calibration) by `--policy h2o` | "
        "| Nothing can be trained, prompts must be read fast | `triattention` or `streaming-llm`, as a [calibration](#calibration) finds |",
    ),
    "How do I add one?": (["docs/adding_a_policy.md"], "class ValueNorm(Policy):"),
    "Where in the code is a token evicted?": (
        ["DESIGN.md", "csrc/include/kvpop/retain.h"],
        "int64_t place(int64_t u, float score_, int64_t used, int64_t q, const float* factors) const {",
    ),
    "What is not supported?": (["docs/operating.md#what-is-refused"], "| KV connectors, KV offloading |"),
}
"""For each question the targets of the links from README to its answer, and a passage of the answer."""


def reached(links: list[str]) -> str:
    """Follow links from README, each of which must be printed where the one before leads; return the text at the end."""
    page, text = readme.ROOT / "README.md", readme.README
    for target in links:
        assert f"]({target})" in text, f"{page.name} has no link to {target}"
        file, _, part = target.partition("#")
        page = (page.parent / file).resolve()
        text = readme.section(page.read_text(encoding="utf-8"), part)
    return text


@pytest.mark.parametrize("question", ANSWERS)
def test_the_answer_is_two_links_away(question):
    links, passage = ANSWERS[question]
    assert len(links) <= 2
    assert " ".join(passage.split()) in " ".join(reached(links).split())


@pytest.mark.slow
def test_the_command_that_serves_is_accepted(capsys, monkeypatch):
    """`kvpop doctor` takes its options and resolves the policy as a server does, with the model's config for its weights."""
    program, serve, model, *options = shlex.split(ANSWERS["How do I serve gpt-oss with a budget of 2,048?"][1])
    assert [program, serve] == ["vllm", "serve"] and model in {family.model for family in FAMILIES}
    monkeypatch.chdir(readme.ROOT)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    assert main(["doctor", f"docs/configs/{model.rpartition('/')[2]}", *options]) == 0
    assert "--kv-policy streaming-llm: 2048 tokens per KV head" in capsys.readouterr().out


def test_the_cost_is_what_the_command_prints(capsys, monkeypatch):
    links, command = ANSWERS["What does it cost?"]
    monkeypatch.chdir(readme.ROOT)
    assert main(shlex.split(command)[1:]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    (dense,) = (row for row in rows if row[0] == "dense,")
    (window,) = (row for row in rows if row[0] == "streaming-llm")
    answer = " ".join(reached(links).split())
    assert f"holds {window[4]} MiB under `streaming-llm`, and {dense[6]} MiB with a dense cache" in answer
    assert f"{window[-1]} times as many requests fit" in answer


def test_policies_without_a_scorer_need_none(capsys):
    assert main(["policies"]) == 0
    printed = capsys.readouterr().out
    for name in re.findall(r"\| `([\w-]+)`", ANSWERS["Which policy without a scorer?"][1]):
        assert name in printed and policies.POLICIES[name].scorer_kind is None
