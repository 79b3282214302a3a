"""Start-up and decode steps of vLLM with the plugin loaded and no policy, against vLLM without it, paired.

It is a measure of engines.py.

In each round two fresh processes start an engine one after another, one with VLLM_PLUGINS="" and one with
VLLM_PLUGINS=kvpop. Then both decode the same prompts in turns. Which one is first changes with every round and turn.
Engines run in the process that starts them, so the plugin is loaded once; vLLM's default loads it in a second process
too. When compiled, a round before the first is not counted. Nothing is compared unless both give the same greedy
tokens. Rows are appended to benchmarks/results/plain.csv.
"""

import statistics

import record
from child import WARM_UP
from harness import Configuration, conclude, differs, engines, median_interval, parser_of_any, say, setting

from kvpop_vllm.argument_types import positive

PLUGINS = {"without": "", "with": "kvpop"}
"""``VLLM_PLUGINS`` of each configuration."""
TURNS = 4
"""Turns of decode steps of each engine in a round."""
MEASURES = ("startup_s", "step_ms")


def main(arguments: list[str] | None = None) -> int:
    """Measure and return the exit code."""
    options, rows, file = parse_arguments(arguments), [], record.RESULTS / "plain.csv"
    for turn in range(options.eager, options.rounds + 1):
        values, problem = one_round(list(PLUGINS)[:: 1 if turn % 2 else -1], options)
        if problem:
            return conclude([problem], "", [], file, options)
        shown = ", ".join(f"{name} {v['startup_s']:.1f} s and {v['step_ms']:.2f} ms" for name, v in values.items())
        say(f"round {turn}: {shown}" if turn else f"not counted: {shown}")
        common = {"context": options.context, "requests": options.requests, "round": turn}
        for name in values if turn else ():
            columns = {key: f"{values[name][key]:.3f}" for key in MEASURES}
            rows.append(setting(options, Configuration(name)) | common | columns)
    return conclude([], "\n".join(summary(rows, measure) for measure in MEASURES), rows, file, options)


def parse_arguments(arguments: list[str] | None):
    """Return the options of the command line."""
    parser = parser_of_any("plain", __doc__, rounds=8)
    parser.add_argument("--requests", type=positive, default=4, help="requests decoded together")
    parser.add_argument("--context", type=positive, default=500, help="tokens of each prompt")
    parser.add_argument("--steps", type=positive, default=24, help="counted steps of a turn")
    parser.set_defaults(budget="")
    options = parser.parse_args(arguments)
    if options.context + TURNS * (options.steps + WARM_UP) > 8000:
        parser.error("context and generated tokens exceed the demo model's 8192 positions: lower --context or --steps")
    options.most_requests, options.pool_tokens = options.requests, 1.15 * options.requests * 8192
    return options


def one_round(order: list[str], options) -> tuple[dict, str | None]:
    """Return the measures of each configuration, or what is wrong.

    Args:
        order: names of the configurations in the order of their starts.
        options: options of the command line.
    """
    chosen = [Configuration(name, settings={"policy": None, "env": {"VLLM_PLUGINS": PLUGINS[name]}}) for name in order]
    with engines(options, chosen) as by_configuration:
        started = {configuration.policy: engine for configuration, engine in by_configuration.items()}
        for engine in started.values():  # neither process imports while the other starts
            engine.ask("random_tokens", seed=0, length=0)
        replies = {name: engine.ask("start") for name, engine in started.items()}  # one after another
        loaded = [name for name, reply in replies.items() if reply["plugin"]]
        if loaded != ["with"]:
            return {}, f"the plugin is loaded in {loaded}, not in ['with']: install kvpop_vllm where vLLM is"
        short = {name: engine.ask("short") for name, engine in started.items()}
        if problem := differs("with", short["without"], short["with"]):
            return {}, problem
        for engine in started.values():
            engine.ask("prefill", lengths=[options.context] * options.requests, new=8192 - options.context)
        times = {name: [] for name in order}
        for turn in range(TURNS):
            for name in order[:: -1 if turn % 2 else 1]:
                times[name] += started[name].ask("steps", requests=options.requests, steps=options.steps)["ms"]
    return {
        name: {"startup_s": replies[name]["seconds"], "step_ms": statistics.mean(times[name])} for name in order
    }, None


def summary(rows: list[dict], measure: str) -> str:
    """Return a line with the medians of a measure, and the median ratio of the rounds with a 95% interval."""
    values = {name: [float(row[measure]) for row in rows if row["configuration"].policy == name] for name in PLUGINS}
    ratios = [ours / stock for ours, stock in zip(values["with"], values["without"], strict=True)]
    medians = ", ".join(f"{name} {statistics.median(numbers):.2f}" for name, numbers in values.items())
    low, high = median_interval(ratios)
    return (
        f"{measure}: {medians}; with / without {statistics.median(ratios):.4f} (95% interval {low:.4f} to {high:.4f})"
    )
