"""Changes of the package to vLLM on a GPU; the first tests of their process, before any engine has a policy."""

from engine.cuda_engine import configure, group_of
from engine.vllm_changes import changed, load, state

from kvpop_vllm.vllm_glue import plugin
from kvpop_vllm.vllm_glue.ledger import EVERY, FRONT_END, LEDGER, WORKER


def test_what_differs_is_what_the_ledger_says(tiny_model):
    """With a policy, vLLM's own changes are those that a second config without one makes."""
    load(server=False, runner_v2=True)
    model, states = tiny_model("llama"), [state()]
    for step in (
        plugin.register,
        lambda: configure(model, None),
        lambda: configure(model, None),
        lambda: group_of(configure(model)),
    ):
        step()
        states.append(state())
    loaded, _, volatile = (changed(*pair) for pair in zip(states[:3], states[1:4], strict=True))
    assert loaded == {row.target for row in LEDGER if row.process == EVERY}
    rows = [row for row in LEDGER if row.process in (FRONT_END, WORKER)]
    assert {row.when for row in rows} >= {"model runner V2", "CPU"}
    expected = {row.target for row in rows if row.when in ("policy", "model runner V2")}
    assert changed(*states[3:], frozenset(volatile)) == expected
