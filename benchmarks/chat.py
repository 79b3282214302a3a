"""Chat turns and a shared system prompt with vLLM's prefix cache: stock and policies, prompts protected or not.

A conversation of some turns grows by a fixed number of tokens each. The times from the last turn's request to its first
and second token are measured with prefix caching on and, for policies that protect prompts, off as well. Then many
requests read one system prompt, and steps in which all of them decode are timed. With ``--strangers`` requests whose
prompts never repeat run to their end. Their CPU time is recorded too, because it depends less on a busy machine. The
engines take turns, and nothing is compared unless every policy gave stock's greedy tokens on short prompts. Rows are
appended to benchmarks/results/chat.csv.

With ``--history FIGURE`` every turn is recorded instead, in benchmarks/results/history.csv, and drawn.

    python benchmarks/chat.py --budget 512 --policies streaming-llm kvpop
    python benchmarks/chat.py --unprotected --turns 40 --turn 190 --requests 0 --history docs/history.png
"""

import statistics
import sys
from pathlib import Path

import record
from child import WARM_UP
from harness import NO_HITS, ask_all, check_budget, compare, parser_of, say, setting

from kvpop_vllm.bench.plot import CURVES
from kvpop_vllm.files import write_figure


def main(arguments: list[str] | None = None) -> int:
    """Measure and return the exit code."""
    options = parse_arguments(arguments)
    if options.history:
        rows: list[dict] = []

        def measure_turns(started: dict, options) -> list[dict]:
            rows.extend(histories(started, options))
            return rows

        code = compare(options, measure_turns, record.RESULTS / "history.csv", ("what", "turns"), "value")
        if code == 0:  # the rows have been written
            draw(rows, Path(options.history))
        return code
    return compare(options, measure, record.RESULTS / "chat.csv", ("what",), "ms")


def measure(started: dict, options) -> list[dict]:
    """Return the rows of requests that share nothing, or else of the conversations and of requests that share a prompt."""
    if options.strangers:
        return strangers(started, options)
    hitting = {name: engine for name, engine in started.items() if name.twin != NO_HITS}
    return chats(started, options) + (crowds(hitting, options) if options.requests else [])


def parse_arguments(arguments: list[str] | None):
    """Return the options of the command line."""
    parser = parser_of("chat", __doc__, budget=512, rounds=7)
    parser.add_argument("--turns", type=int, default=8, help="of a conversation")
    parser.add_argument("--turn", type=int, default=500, help="tokens of a turn, its answer among them")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--requests", type=int, default=32, help="that read one system prompt; 0: none")
    parser.add_argument("--system", type=int, default=2000, help="tokens of the system prompt")
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a round of these")
    parser.add_argument(
        "--strangers",
        type=int,
        default=0,
        help="measure this many requests of 2 turns' tokens that share nothing, alone",
    )
    parser.add_argument("--history", metavar="FIGURE", help="measure every turn and draw them into this PNG file")
    parser.add_argument("--unprotected", action="store_true", help="evict from prompts; turns go on from snapshots")
    options = parser.parse_args(arguments)
    if not 2 <= options.answer < options.turn:
        parser.error("a turn has a question and an answer of at least 2 tokens: lower --answer or raise --turn")
    if options.history and (options.strangers or options.requests):
        parser.error("--history measures turns alone: give --requests 0 and leave --strangers out")
    options.prefix_caching, options.protect_prompt = True, not options.unprotected
    options.without_hits = not options.history and (options.protect_prompt or options.strangers > 0)
    if options.unprotected:
        check_budget(parser, options)
    options.most_requests = max(1, options.requests)
    decoded = 64 + options.rounds * (options.steps + WARM_UP)
    options.pool_tokens = 1.3 * (
        options.turns * options.turn + options.system + options.most_requests * (decoded + options.budget + 256)
    )
    return options


def chats(started: dict, options) -> list[dict]:
    """Return the rows of the conversations: their last turn."""
    rows, note = [], ", unprotected" * options.unprotected
    for number, turns in talks(started, options):
        for name, replies in turns.items():
            for token in ("first", "second"):
                rows.append(row(f"{token} token{note}", name, number, replies[-1][token], replies[-1]["hit"], options))
    return rows


def ordered(started: dict, number: int) -> list[str]:
    """Return the engines of a round: every other round begins with the last, so that none always follows another."""
    return list(started)[:: 1 if number % 2 else -1]


def talks(started: dict, options):
    """Yield each counted round's number and, by engine, the turns of its conversation; the first round warms up."""
    talk = {"turns": options.turns, "tokens": options.turn, "answer": options.answer}
    for number in range(options.rounds + 1):
        turns = {name: started[name].ask("chat", **talk, seed=number + 1) for name in ordered(started, number)}
        if number:
            last = {name: replies[-1] for name, replies in turns.items()}
            say(f"round {number}: " + ", ".join(f"{n} {t['second']:.3f} s ({t['hit']} hit)" for n, t in last.items()))
            yield number, turns


def histories(started: dict, options) -> list[dict]:
    """Return the rows of every turn of the conversations."""
    rows = []
    for number, turns in talks(started, options):
        for name, replies in turns.items():
            for turn, reply in enumerate(replies, start=1):
                values = {"first, ms": 1e3 * reply["first"], "step, ms": 1e3 * reply["step"]}
                values |= {"held, MiB": reply["held_bytes"] / 2**20}
                size = setting(options, name) | {"turn": options.turn, "answer": options.answer, "turns": turn}
                rows += [
                    size | {"what": measure, "round": number, "value": f"{value:.3f}"}
                    for measure, value in values.items()
                ]
    return rows


def draw(rows: list[dict], path: Path) -> None:
    """Draw the medians of first tokens, decode steps and memory over the tokens of a conversation."""
    from matplotlib.figure import Figure

    panels = {"first, ms": "first token, ms", "step, ms": "decode step, ms", "held, MiB": "cache of a request, MiB"}
    drawing = Figure(figsize=(9, 3.2), layout="constrained", facecolor="white")
    for axis, (quantity, title) in zip(drawing.subplots(1, 3), panels.items(), strict=True):
        groups: dict[str, dict[int, list[float]]] = {}
        for line in (line for line in rows if line["what"] == quantity and line["configuration"].twin != NO_HITS):
            points = groups.setdefault(line["configuration"].policy, {})
            points.setdefault(line["turns"] * line["turn"], []).append(float(line["value"]))
        for name, points in groups.items():
            color, style, _ = CURVES.get(name, (None, "-", ""))
            y = [statistics.median(values) for values in points.values()]
            axis.plot(list(points), y, color=color, linestyle=style, linewidth=2, label=name)
        axis.set(title=title, xlabel="tokens of the conversation", ylim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
    drawing.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=len(groups))
    write_figure(path, drawing)


def strangers(started: dict, options) -> list[dict]:
    """Return the rows of requests whose prompts never repeat; preemptions are printed."""
    rows = []
    for number in range(options.rounds + 1):
        for name in ordered(started, number):
            batch = {"requests": options.strangers, "prompt": 2 * options.turn, "new": options.answer}
            reply = started[name].ask("drain", **batch, seed=1 + number)
            seconds, cpu = reply["seconds"], reply["cpu_seconds"]
            say(f"round {number}: {name} {seconds:.2f} s, {cpu:.2f} s of CPU, {reply['preemptions']} preemptions")
            if number:
                for measure, value in ("never repeated", seconds), ("never repeated, CPU time", cpu):
                    rows.append(row(measure, name, number, value, 0, options))
    return rows


def crowds(started: dict, options) -> list[dict]:
    """Return the rows of the decode steps after a shared system prompt."""
    new = 1 + options.rounds * (options.steps + WARM_UP) + options.requests
    for name, reply in ask_all(started, "prefill", lengths=[50] * options.requests, new=new, shared=options.system):
        say(f"{name}: {options.requests} requests decode after {reply['seconds']:.1f} s, engines side by side")
    rows = []
    for turn in range(1, options.rounds + 1):
        for name, engine in started.items():
            times = engine.ask("steps", requests=options.requests, steps=options.steps)["ms"]
            rows.append(row("step", name, turn, statistics.mean(times) / 1e3, options.system, options))
    return rows


def row(measure: str, name, turn: int, seconds: float, hit: int, options) -> dict:
    """Return one row of the CSV file."""
    size = {"turns": options.turns, "turn": options.turn, "requests": options.requests, "what": measure}
    return setting(options, name) | size | {"round": turn, "ms": f"{1e3 * seconds:.2f}", "hit": hit}


if __name__ == "__main__":
    from engines import main as measure_any

    sys.exit(measure_any(sys.argv[1:], "chat"))
