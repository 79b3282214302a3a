"""Loads one server for a while, and checks that nothing is lost, nothing leaks, and an answer stays the same to the bit.

Usage: ``python tests/stress/soak.py --minutes 60 --model MODEL -- OPTIONS...`` with options of ``vllm serve``. Rounds
of load alternate with quiet points. In a round, client processes send twice as many requests at once as --max-num-seqs
admits: mixed prompts, answers, budgets, protections, seeds and cartridges, chats of several turns, streams that are
cut, requests that are aborted, requests that must be refused. One client is killed and restarted. At a quiet point no
request runs. It asks the canaries, counts blocks and measures memory. The server keeps its promises if

- every request is answered in full, or refused in one line where it must be, unless its client went away;
- every canary's tokens and log-probabilities are those of its first answer (alone: in a batch a CPU rounds otherwise);
- as many blocks are in use at each quiet point as before the load;
- no process of the server ends, and the memory of each is flat: its median over the last fifth of the quiet points is
  within --percent of that over the second fifth. Memory is anonymous and shared memory, by its share of each page;
  pages of files are left out, since they depend on other programs of the machine.

Before the load, prompts of every length up to --max-num-batched-tokens are answered one by one: on a CPU, vLLM's matrix
products, with a policy or without, keep compiled code for each number of tokens in a step that they have met. Chats
repeat a few hundred texts, since a tokenizer remembers the last ten thousand words that it met.

Broken promises are printed in one line each, and the exit code is then 1.
"""

import argparse
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("benchmarks", "examples")]
import record  # noqa: E402
from serving import Server, ServerError  # noqa: E402

PROCESSES, PATIENCE_S = 4, 900
"""Client processes, and the seconds after which a request without an answer is lost."""
LEAST = 5
"""Fewest quiet points that memory is judged by; rounds go on until there are as many."""
OUTCOMES = "answered", "refused", "aborted", "killed", "lost"
ENDING = [3, 4]
"""Tokens with which half of the prompts of later turns end, and which the turn after them leaves out."""
SERVED = "--kv-policy streaming-llm --kv-budget 256 --kv-max-budget 512 --kv-max-protect all --max-model-len 2048"
"""Options of the server if none are given. The pool holds about six of the largest requests."""
SERVED += " --kv-cache-memory-bytes 268435456"


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = parse_arguments(arguments)
    if options.client:
        client(json.loads(options.client))
        return 0
    load, rows = load_of(options), []
    try:
        with Server(str(options.model), *options.server) as server, options.record.open("w") as file:
            load |= {"url": server.url}
            for row in soak(server, load, options.minutes * 60, options.seed):
                rows.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(line_of(row), flush=True)
            total = summary(rows) | record.KEY | {"model": str(options.model), "server": options.server}
            total["broken"] = broken_promises(rows, options.percent)
            file.write(json.dumps(total) + "\n")
    except (ServerError, OSError, psutil.Error) as error:  # the server has ended
        print(f"broken: {' '.join(str(error).split())[-1000:]}", file=sys.stderr)
        return 1
    for process, (before, after) in total["MiB"].items():
        print(
            f"{process}: {before:.1f} MiB, then {after:.1f}"
            + (f" ({100 * (after / before - 1):+.2f}%)" if before else "")
        )
    print(
        ", ".join(f"{total[name]} {name}" for name in OUTCOMES)
        + f"; {total['preemptions']:.0f} preemptions, {total['cached_tokens']:.0f} tokens cached"
    )
    print(f"canaries under load: {total['same_in_batch']} of {total['asked_in_batch']} same to the bit (not promised)")
    for line in total["broken"]:
        print(f"broken: {line}", file=sys.stderr)
    return min(1, len(total["broken"]))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = record.parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="least minutes of load, quiet points included")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct", help="folder")
    parser.add_argument("--seed", type=int, default=0, help="of all requests")
    parser.add_argument("--percent", type=float, default=2, help="most change of a process's memory")
    parser.add_argument("--record", type=Path, default=Path("soak.jsonl"), help="file of quiet points and the summary")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("server", nargs="*", default=SERVED.split(), metavar="-- OPTIONS", help="of vllm serve")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error("--minutes must be above 0")
    if not (options.model / "config.json").is_file():
        parser.error(f"{options.model} holds no model: run 'make model' or give a folder with --model")
    return options


def load_of(options: argparse.Namespace) -> dict:
    """Return what clients need to know to draw requests that this server answers."""
    from vllm.utils.argparse_utils import human_readable_int, human_readable_int_or_auto

    parser = argparse.ArgumentParser()
    for name in ("policy", "protect-prompt", "max-protect"):
        parser.add_argument(f"--kv-{name}")
    parser.add_argument("--max-model-len", type=human_readable_int_or_auto, default=-1)
    parser.add_argument("--served-model-name", nargs="+")
    for name in ("kv-budget", "kv-max-budget"):
        parser.add_argument(f"--{name}", type=human_readable_int, default=0)
    for name in ("seqs", "batched-tokens"):
        parser.add_argument(f"--max-num-{name}", type=human_readable_int)
    parser.add_argument("--kv-cartridge", nargs="+", default=[])
    words = (re.match(r"(--[^=]*|)(.*)", word, re.DOTALL).groups() for word in options.server)
    served, _ = parser.parse_known_args([name.replace("_", "-") + value for name, value in words])
    if served.served_model_name:
        parser.error("requests name the model by its folder: leave --served-model-name out")
    for name, value, usual in (
        ("seqs", served.max_num_seqs, 8),
        ("batched-tokens", served.max_num_batched_tokens, 256),
    ):
        options.server = options.server if value else [*options.server, f"--max-num-{name}", str(usual)]
    config = json.loads((options.model / "config.json").read_text())
    return {
        "model": str(options.model),
        "cartridges": [cartridge.partition("=")[0] for cartridge in served.kv_cartridge],
        "vocabulary": config["vocab_size"],
        "length": config["max_position_embeddings"] if served.max_model_len < 1 else served.max_model_len,
        "budgets": [(served.kv_budget or served.kv_max_budget // 2) // 2, served.kv_max_budget],
        "protects": bool(served.kv_protect_prompt or served.kv_max_protect),
        "draws": served.kv_policy in ("random", "vase"),
        "policy": bool(served.kv_policy or served.kv_cartridge),
        "step": served.max_num_batched_tokens or 256,
        "threads": -(-2 * (served.max_num_seqs or 8) // PROCESSES),
    }


def soak(server: Server, load: dict, seconds: float, seed: int):
    """Load a server for some seconds, and yield one row for each quiet point, the first before any load."""
    canaries, draw = canaries_of(load, seed), random.Random(seed)
    for length in range(1, min(load["step"], load["length"] - 1) + 1):
        ask(load, canaries[0] | {"prompt": tokens(draw, load, length), "max_tokens": 1})
    first = [ask(load, body) for body in canaries]
    seconds_of_round, deadline = min(60.0, seconds / 10), time.monotonic() + seconds
    yield {"round": 0} | dict.fromkeys(OUTCOMES, 0) | quiet(server, load, canaries, first)
    number = 0
    while number < LEAST - 1 or time.monotonic() + seconds_of_round / 2 < deadline:
        number += 1
        done = one_round(server, load, canaries, first, seconds_of_round, f"{seed}-{number}")
        yield {"round": number} | done | quiet(server, load, canaries, first)


def one_round(server: Server, load: dict, canaries: list[dict], first: list, seconds: float, seed: str) -> dict:
    """Run the clients once, kill and restart one of them, and return the outcomes of their requests."""
    began, draw = time.time(), random.Random(seed)
    running = [start_client(load, seconds, f"{seed}-{n}") for n in range(PROCESSES)]
    kill_at, victim = began + draw.uniform(0.3, 0.6) * seconds, None
    waiting, batch = 0.0, []
    try:
        while any(process.poll() is None for process, _ in running):
            busy = [pair for pair in running if os.fstat(pair[1].fileno()).st_size]
            if victim is None and busy and time.time() > kill_at:
                victim = draw.choice(busy)
                victim[0].kill()
                running.append(start_client(load, seconds / 2, f"{seed}-again"))
                batch = [ask(load, body) == answer for body, answer in zip(canaries, first, strict=True)]
            if time.time() > began + 2 * seconds + PATIENCE_S:
                break
            waiting = max(waiting, gauge(server, "num_requests_waiting"))
            time.sleep(0.5)
    finally:
        for process, _ in running:
            process.kill()
            process.wait()
    outcomes, details = Counter(dict.fromkeys(OUTCOMES, 0)), []
    for process, output in running:
        events = events_of(output)
        outcomes.update(event["outcome"] for event in events if event)
        details += [event["detail"] for event in events if event and event["outcome"] == "lost"]
        unanswered = sum(not event for event in events)
        if process is not (victim and victim[0]):
            details += ["no answer when its client ended"] * unanswered
            outcomes["lost"] += unanswered
            if process.returncode:
                details.append(f"a client ended with code {process.returncode}")
        else:
            outcomes["killed"] += unanswered
    return dict(outcomes) | {"details": details, "waiting": waiting, "in_batch": batch}


def events_of(output) -> list[dict]:
    """Return the outcome of each request that a client began, {} for those that it did not see to their end."""
    output.seek(0)
    begun: dict[str, dict] = {}
    for line in output.read().splitlines():
        try:
            event = json.loads(line)
        except ValueError:  # the line that a killed client was writing
            continue
        begun[event.pop("name")] = event
    output.close()
    return list(begun.values())


def quiet(server: Server, load: dict, canaries: list[dict], first: list) -> dict:
    """Wait until nothing runs, and return what the server holds and whether canaries answer as at first."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        ask(load, canaries[0] | {"max_tokens": 1})  # gauges are set by steps
        if not gauge(server, "num_requests_running") + gauge(server, "num_requests_waiting"):
            break
        time.sleep(1)
    return {
        "time": time.time(),
        "canaries": [ask(load, body) == answer for body, answer in zip(canaries, first, strict=True)],
        "running": gauge(server, "num_requests_running") + gauge(server, "num_requests_waiting"),
        "blocks": server.blocks_in_use(),
        "preemptions": gauge(server, "num_preemptions_total"),
        "cached": gauge(server, "prefix_cache_hits_total"),
        "memory": memory_of(server.process.pid),
    }


def gauge(server: Server, name: str) -> float:
    """Return one of vLLM's metrics.

    Raises:
        ServerError: the server has ended, or has no such metric.
    """
    try:
        match = re.search(rf"^vllm:{name}{{[^}}]*}} (\S+)", server.metrics(), re.MULTILINE)
    except OSError:
        raise ServerError(f"the server does not answer any more: {server.tail()}") from None
    if match is None:
        raise ServerError(f"/metrics has no vllm:{name}")
    return float(match[1])


def memory_of(pid: int) -> dict[str, int]:
    """Return bytes of anonymous and shared memory of each process of a tree, by its title and id."""
    root, memory = psutil.Process(pid), {}
    for process in [root, *root.children(recursive=True)]:
        try:
            title = (process.cmdline() or [process.name()])[0].rpartition("/")[2]
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except (psutil.Error, OSError):  # it has ended since
            continue
        sizes = re.findall(r"^(?:Pss_Anon|Pss_Shmem|SwapPss): +(\d+) kB", text, re.MULTILINE)
        memory[f"{title} {process.pid}"] = 1024 * sum(map(int, sizes))
    return memory


def canaries_of(load: dict, seed: int) -> list[dict]:
    """Return requests that are repeated all along: a greedy and a drawn one, and one after a cartridge if there is one."""
    draw = random.Random(f"{seed}-canary")
    length = min(2 * max(load["budgets"][0] * 2, 64), load["length"] // 2)
    body = {"prompt": tokens(draw, load, length), "max_tokens": min(48, load["length"] // 4), "logprobs": 3}
    body |= {"model": load["model"], "ignore_eos": True, "return_tokens_as_token_ids": True}
    bodies = [body | {"temperature": 0}, body | {"temperature": 1, "seed": 7}]
    if load["cartridges"]:
        chat = {"messages": messages(draw, 40), "max_tokens": 24, "logprobs": True, "top_logprobs": 3, "temperature": 0}
        bodies.append(chat | {"model": load["cartridges"][0], "ignore_eos": True, "return_tokens_as_token_ids": True})
    return bodies


def ask(load: dict, body: dict) -> object:
    """Return the log-probabilities of an answer, tokens included; no cached prefix is hit.

    After a prompt of tokens those of a short next turn follow, which goes on from what the first one held.

    Raises:
        ServerError: there is no answer.
    """

    def logprobs(options: dict) -> dict:
        try:
            reply = httpx.post(f"{load['url']}{path_of(body)}", json=salted | options, timeout=PATIENCE_S, verify=False)
            reply.raise_for_status()
        except httpx.HTTPError as error:
            raise ServerError(f"a canary has no answer: {error!r}") from None
        return reply.json()["choices"][0]["logprobs"]

    salted = body | {"cache_salt": f"{time.time_ns()}"}
    first = logprobs({})
    if "prompt" not in body or body["max_tokens"] == 1:  # a chat, or a request that only warms up
        return first
    answer = [int(token.removeprefix("token_id:")) for token in first["tokens"]]
    return first, logprobs({"prompt": [*body["prompt"], *answer, *body["prompt"][:4]], "max_tokens": 4})


def path_of(body: dict) -> str:
    """Return the endpoint of a request."""
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def start_client(load: dict, seconds: float, seed: str) -> tuple[subprocess.Popen, object]:
    """Start a client process; return it with the file of its output."""
    output = tempfile.TemporaryFile("w+")
    client_load = json.dumps(load | {"seconds": seconds, "seed": seed})
    command = [sys.executable, __file__, "--model", load["model"], "--client", client_load]
    return subprocess.Popen(command, stdout=output), output


def client(load: dict) -> None:
    """Send requests from several threads for some seconds, at least one each, and print when each begins and how it ends."""
    lock = threading.Lock()

    def say(**event) -> None:
        with lock:
            print(json.dumps(event), flush=True)

    def work(thread: int) -> None:
        draw = random.Random(f"{load['seed']}-{thread}")
        with httpx.Client(base_url=load["url"], verify=False) as http:
            until, chat = time.time() + load["seconds"], {}
            for number in itertools.count():
                way, body = next_turn(draw, load, chat) or drawn(draw, load)
                say(name=f"{thread}-{number}")
                outcome, detail, answer = send(http, way, body, draw)
                if answer:
                    chat = body | {"prompt": without_ending(body["prompt"]) + answer}
                say(name=f"{thread}-{number}", outcome=outcome, detail=detail)
                if time.time() > until:
                    return

    threads = [threading.Thread(target=work, args=(n,)) for n in range(load["threads"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def drawn(draw: random.Random, load: dict) -> tuple[str, dict]:
    """Return how a random request is sent ("whole", "stream", "cut", "abort" or "bad"), and its body."""
    way = draw.choice(("whole", "whole", "stream", "stream", "cut", "cut", "abort", "bad"))
    prompt = log_uniform(draw, load["length"] * 3 // 4)
    new = log_uniform(draw, min(load["length"] // 8, load["length"] - prompt))
    body = {"model": load["model"], "max_tokens": new, "ignore_eos": True, "temperature": draw.choice((0, 0.7, 1))}
    if draw.random() < 0.3:
        body |= {"seed": draw.randrange(2**31)}
    if body["temperature"] and draw.random() < 0.2:
        body |= {"n": 2}
    if load["cartridges"] and draw.random() < 0.5:
        body |= {"model": draw.choice(load["cartridges"]), "messages": messages(draw, draw.randint(1, 60))}
        body |= {"max_tokens": min(new, load["length"] // 8)}
    else:
        # half of the prompts begin as others do, for the prefix cache
        shared = tokens(random.Random(draw.randrange(4)), load, prompt // 2) if draw.random() < 0.5 else []
        body |= {"prompt": shared + tokens(draw, load, prompt - len(shared))}
    asks = {}
    if load["budgets"][1] and draw.random() < 0.6:
        asks |= {"kv_budget": draw.randint(*load["budgets"])}
    if load["protects"] and draw.random() < 0.4:
        asks |= {"kv_protect_prompt": draw.choice(("all", draw.randint(0, 2 * prompt)))}
    if load["draws"] and draw.random() < 0.5:
        asks |= {"kv_seed": draw.randrange(2**63)}
    if load["policy"] and draw.random() < 0.3:
        asks |= {"kv_report": 1}
    if way == "bad":
        bad = [{"model": "no-such-model"}]
        if "prompt" in body:
            bad.append({"prompt": tokens(draw, load, load["length"] + 1)})
        if load["policy"]:
            bad += [
                {"vllm_xargs": asks | wrong} for wrong in ({"kv_budget": 2**40}, {"kv_nothing": 1}, {"kv_report": 7})
            ]
        return way, body | draw.choice(bad)
    if way == "whole" and "prompt" in body and "n" not in body:
        body |= {"return_token_ids": True}  # a chat may go on with them
    return way, body | ({"vllm_xargs": asks} if asks else {})


def next_turn(draw: random.Random, load: dict, chat: dict) -> tuple[str, dict] | None:
    """Return a request that goes on with a chat, None where another one is to be sent.

    Args:
        draw: source of choices.
        load: what clients know.
        chat: body of the chat's last request with its answer as part of the prompt, empty for none.
    """
    room = load["length"] - len(chat.get("prompt", ()))
    if not chat or room < 8 or draw.random() < 0.5:
        return None
    added = tokens(draw, load, log_uniform(draw, room // 2))
    if room > len(added) + len(ENDING) and draw.random() < 0.5:
        added += ENDING
    new = log_uniform(draw, min(load["length"] // 8, room - len(added)))
    return "whole", chat | {"prompt": chat["prompt"] + added, "max_tokens": new}


def without_ending(prompt: list[int]) -> list[int]:
    """Return a prompt as the next turn of its chat has it."""
    return prompt[: -len(ENDING)] if prompt[-len(ENDING) :] == ENDING else prompt


def log_uniform(draw: random.Random, largest: int) -> int:
    """Return a number from 1 to ``largest``; small ones are as likely as large ones."""
    return min(largest, round(largest ** draw.random()))


def tokens(draw: random.Random, load: dict, count: int) -> list[int]:
    """Return random tokens; the first ids are left out because many models have special ones there."""
    low = load["vocabulary"] // 100
    return [draw.randrange(low, load["vocabulary"] - low) for _ in range(count)]


def messages(draw: random.Random, words: int) -> list[dict]:
    """Return a chat of one message."""
    words_draw = random.Random(f"{words} {draw.randrange(4)}")
    return [{"role": "user", "content": " ".join(f"{words_draw.randrange(1000)}" for _ in range(words))}]


def send(http: httpx.Client, way: str, body: dict, draw: random.Random) -> tuple[str, str, list[int]]:
    """Send a request and return its outcome, with a detail if it is lost and the answer's tokens if they were asked for."""
    usage = {"stream": True, "stream_options": {"include_usage": True}} if way in ("stream", "cut") else {}
    limit = draw.uniform(0.05, 3) if way == "abort" else PATIENCE_S
    most_events = draw.randint(1, 20) if way == "cut" else None
    try:
        with http.stream("POST", path_of(body), json=body | usage, timeout=limit) as reply:
            if reply.status_code != 200:
                return *refusal(way, reply.status_code, reply.read().decode()), []
            if way == "bad":
                return "lost", f"{json.dumps(body)[:300]} was not refused", []
            if usage:
                return *read_stream(reply, body, most_events), []
            answer = json.loads(reply.read())
            return *finished(answer, body), answer["choices"][0].get("token_ids") or []
    except httpx.TimeoutException as error:
        late = ("lost", f"no answer within {PATIENCE_S} s: {error!r}")
        return *(("aborted", "") if way == "abort" else late), []
    except httpx.HTTPError as error:
        return "lost", f"{error!r}", []


def refusal(way: str, status: int, text: str) -> tuple[str, str]:
    """Return the outcome of a request that was not answered."""
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = ""
    if way == "bad" and status in (400, 404) and message and "\n" not in message:
        return "refused", ""
    return "lost", f"status {status}: {' '.join(text.split())[:300]}"


def read_stream(reply: httpx.Response, body: dict, most_events: int | None) -> tuple[str, str]:
    """Read a stream, or only its first ``most_events``, and return the outcome."""
    last = {}
    for line in reply.iter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            return finished(last, body)
        last = json.loads(line.removeprefix("data: "))
        if "error" in last:
            return "lost", f"an error in a stream: {last['error']}"
        if most_events is not None:
            most_events -= 1
            if most_events == 0:
                return "aborted", ""
    return "lost", "a stream ended before its end"


def finished(answer: dict, body: dict) -> tuple[str, str]:
    """Return the outcome of an answer: it has all tokens of its own prompt and answer, or it is lost."""
    usage, new = answer["usage"], body["max_tokens"] * body.get("n", 1)
    right = usage["completion_tokens"] == new
    if "prompt" in body:
        right = right and usage["prompt_tokens"] == len(body["prompt"])
    return ("answered", "") if right else ("lost", f"{usage} for {new} tokens of {len(body.get('prompt', []))}")


def fifths(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """Return the second and the last fifth of the rows."""
    fifth = max(1, len(rows) // 5)
    return rows[fifth : 2 * fifth] or rows, rows[-fifth:]


def summary(rows: list[dict]) -> dict:
    """Return the sums over all rounds, and each process's memory in MiB in the second and in the last fifth."""
    total = {name: sum(row[name] for row in rows) for name in OUTCOMES}
    batch = [same for row in rows for same in row.get("in_batch", ())]
    total |= {"rounds": len(rows) - 1, "minutes": round((rows[-1]["time"] - rows[0]["time"]) / 60, 1)}
    total |= {"same_in_batch": sum(batch), "asked_in_batch": len(batch), "preemptions": rows[-1]["preemptions"]}
    total["cached_tokens"] = rows[-1]["cached"] - rows[0]["cached"]
    total |= {"most_waiting": max(row.get("waiting", 0) for row in rows), "MiB": {}}
    before, after = fifths(rows)
    for process in rows[0]["memory"]:
        sizes = [[row["memory"].get(process, 0) / 2**20 for row in part] for part in (before, after)]
        total["MiB"][process] = [round(statistics.median(part), 2) for part in sizes]
    return total


def broken_promises(rows: list[dict], percent: float) -> list[str]:
    """Return one line for each promise that the server broke."""
    broken, first = [], rows[0]
    for row in rows:
        place = f"after round {row['round']}"
        if lost := row["lost"]:
            broken.append(f"{lost} requests lost {place}: {row['details'][0]}")
        elif row.get("details"):
            broken.append(f"{row['details'][0]} {place}")
        if not all(row["canaries"]):
            broken.append(f"canary {row['canaries'].index(False)} answered otherwise than at first {place}")
        if row["blocks"] != first["blocks"] or row["running"]:
            broken.append(
                f"{row['blocks']} blocks are in use and {row['running']:.0f} requests are left {place}, "
                f"{first['blocks']} and 0 before the load"
            )
        for gone in first["memory"].keys() - row["memory"].keys():
            broken.append(f"{gone} has ended {place}")
        for new in row["memory"].keys() - first["memory"].keys():
            broken.append(f"{new} is a new process {place}")
    total = summary(rows)
    for process, (before, after) in total["MiB"].items():
        if before and abs(after / before - 1) > percent / 100:
            broken.append(f"memory of {process} went from {before:.1f} to {after:.1f} MiB, more than {percent:g}%")
    if not total["answered"]:
        broken.append("no request was answered: raise --minutes")
    return broken


def line_of(row: dict) -> str:
    """Return the progress line of a quiet point."""
    outcomes = ", ".join(f"{row[name]} {name}" for name in OUTCOMES if row[name]) or "no load"
    memory = " + ".join(f"{size >> 20}" for size in row["memory"].values())
    same = "same" if all(row["canaries"]) else "CHANGED"
    return f"round {row['round']}: {outcomes}; canaries {same}; {row['blocks']} blocks; {memory} MiB"


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # an exception, so that the server is stopped
    sys.exit(main())
