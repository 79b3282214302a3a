"""Real servers of several API servers, engines and nodes: each process has the settings of the command line.

Every request goes to a chosen API server, over a connection that the process of this API server holds open.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
from compaction.test_trained import write_model
from engine.test_cartridges import write
from serving import Server
from threads import core_for_each_of_two

from kvpop_vllm.testing import random_prompt

pytestmark = pytest.mark.slow

BUDGET, SLOTS, NEW = 128, 64, 9
POLICY = f"--kv-policy streaming-llm --kv-budget {BUDGET} --kv-max-budget 512".split()
SIZES = f"--max-model-len 2048 --max-num-seqs 4 --kv-cache-memory-bytes {32 << 20} --enforce-eager".split()
SIZES += ["--served-model-name", "base"]
# A stock engine in bfloat16 whose first request has one token ends with SIGILL on a processor with AMX (vLLM 0.32).
SIZES += ["--dtype", "float32"]
API_SERVERS, ENGINES = ["--api-server-count", "2"], ["--data-parallel-size", "2"]
KINDS = {  # options, number of API servers, number of engines
    "two API servers": ([*API_SERVERS, "--kv-inspect"], 2, 1),
    "two engines": ([*ENGINES, "--api-server-count", "1"], 1, 2),
    "both": (ENGINES, 2, 2),
}


class Front:
    """Connection to one of the API servers of a server, which stays open."""

    def __init__(self, server: Server):
        self.client = httpx.Client(base_url=server.url, timeout=300, limits=httpx.Limits(max_connections=1))
        self.port = self.port_of(self.client.get("/v1/models"))
        main = psutil.Process(server.process.pid)
        (self.pid,) = [process.pid for process in (main, *main.children(recursive=True)) if self.is_open_in(process)]

    def is_open_in(self, process: psutil.Process) -> bool:
        return any(
            connection.raddr and connection.raddr.port == self.port for connection in process.net_connections("tcp")
        )

    @staticmethod
    def port_of(reply: httpx.Response) -> int:
        return reply.extensions["network_stream"].get_extra_info("client_addr")[1]

    def get(self, path: str) -> httpx.Response:
        reply = self.client.get(path)
        assert self.port_of(reply) == self.port, "the connection was closed"
        return reply

    def ask(self, prompt: list[int], model: str = "base", engine: int = 0, **settings) -> httpx.Response:
        """Ask for a completion. ``settings`` are those of the request's cache."""
        body = {"model": model, "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
        body |= {"vllm_xargs": settings} if settings else {}
        reply = self.client.post("/v1/completions", json=body, headers={"X-data-parallel-rank": str(engine)})
        assert self.port_of(reply) == self.port, "the connection was closed"
        return reply


@contextmanager
def connected(server: Server, count: int) -> Iterator[list[Front]]:
    """Yield a connection to each API server of a server."""
    with ExitStack() as stack:
        fronts, deadline = {}, time.monotonic() + 120
        while len(fronts) < count:
            assert time.monotonic() < deadline, f"only the processes {list(fronts)} answer"
            front = Front(server)
            stack.callback(front.client.close)
            fronts.setdefault(front.pid, front)
        yield list(fronts.values())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("several") / "model"))


@pytest.fixture(scope="module")
def hand(tmp_path_factory, model):
    return write(tmp_path_factory.mktemp("cartridges") / "hand", model, "plain", slots=SLOTS)


def environment() -> dict[str, str]:
    return {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"} | core_for_each_of_two()


@pytest.fixture(scope="module", params=KINDS)
def served(request, model, hand):
    """Yield a server, a connection to each of its API servers, and the number of its engines."""
    options, api_servers, engines = KINDS[request.param]
    with (
        Server(model, *SIZES, *POLICY, "--kv-cartridge", f"hand={hand}", *options, env=environment()) as server,
        connected(server, api_servers) as fronts,
    ):
        yield server, fronts, engines


def everywhere(served) -> Iterator[tuple[Front, int]]:
    """Yield every pair of an API server and an engine."""
    _, fronts, engines = served
    yield from ((front, engine) for front in fronts for engine in range(engines))


def report(reply: httpx.Response) -> dict:
    assert reply.status_code == 200, reply.text
    return reply.json()["kv_transfer_params"]["kv_report"]


def test_requests_have_settings_everywhere(served):
    for front, engine in everywhere(served):
        prompt = random_prompt(300, seed=engine)
        for budget, settings in ((BUDGET, {}), (160, {"kv_budget": 160}), (512, {"kv_budget": 512})):
            kv_report = report(front.ask(prompt, engine=engine, kv_report=1, **settings))
            retained = min(budget, 300 + NEW - 1)
            assert (kv_report["budget"], kv_report["seen_tokens"]) == (budget, 300 + NEW - 1)
            assert kv_report["kept_tokens_per_head"] == {"min": retained, "mean": retained, "max": retained}
        for settings, line in (
            ({"kv_budget": 9999}, "kv_budget 9999 is more than this server allows: lower it to at most 512"),
            ({"kv_budgt": 160}, "kv_budgt"),
        ):
            refused = front.ask(prompt, engine=engine, **settings)
            assert refused.status_code == 400 and line in refused.json()["error"]["message"], refused.text


def test_cartridges_are_known_everywhere(served):
    _, fronts, _ = served
    for front in fronts:
        listed = {card["id"]: card["parent"] for card in front.get("/v1/models").json()["data"]}
        assert listed == {"base": None, "hand": "base"}
    answers = set()
    for front, engine in everywhere(served):
        by_model = front.ask([65], "hand", engine).json()
        by_option = front.ask([65], engine=engine, kv_cartridges=["hand"]).json()
        assert by_model["usage"]["prompt_tokens"] == by_option["usage"]["prompt_tokens"] == SLOTS + 1
        answers |= {by_model["choices"][0]["text"], by_option["choices"][0]["text"]}
        unknown = front.ask([65], engine=engine, kv_cartridges=["nobody"])
        assert unknown.status_code == 404
        assert "the cartridge 'nobody' does not exist: name one of hand" in unknown.json()["error"]["message"]
        assert front.ask([65], "nobody", engine).status_code == 404
    assert len(answers) == 1


def policy_metrics(front: Front) -> dict[str, dict[str, float]]:
    """Return the metrics of the policy by name and engine. The histogram has only sum and count."""
    text, metrics = front.get("/metrics").text, {}
    for name, engine, value in re.findall(r'^vllm:kv_policy_(\w+){[^}]*engine="(\d)"[^}]*} (\S+)$', text, re.M):
        if not name.endswith(("_bucket", "_created")):
            assert engine not in metrics.setdefault(name, {}), f"{name} has two values for an engine"
            metrics[name][engine] = float(value)
    return metrics


def test_metrics_count_each_request_once(served):
    _, fronts, engines = served
    before, reports = policy_metrics(fronts[0]), {str(engine): [] for engine in range(engines)}
    for front, engine in everywhere(served):
        reports[str(engine)].append(report(front.ask(random_prompt(200, seed=engine), engine=engine, kv_report=1)))
        reports[str(engine)].append(report(front.ask(random_prompt(40, seed=engine), engine=engine, kv_report=1)))
    assert before["info"] == dict.fromkeys(reports, 1)

    def grown(front: Front, name: str) -> dict[str, float]:
        after = policy_metrics(front)[name]
        return {engine: after[engine] - before[name][engine] for engine in reports}

    requests = {engine: len(engine_reports) for engine, engine_reports in reports.items()}
    deadline = time.monotonic() + 60
    while grown(fronts[-1], "retained_share_count") != requests:  # statistics travel after answers
        assert time.monotonic() < deadline, (grown(fronts[-1], "retained_share_count"), requests)
        time.sleep(0.2)
    for front in fronts:
        for metric, count in (
            ("tokens_seen_total", lambda kv_report: kv_report["seen_tokens"]),
            ("tokens_kept_total", lambda kv_report: kv_report["kept_tokens_per_head"]["mean"]),
            ("tokens_evicted_total", lambda kv_report: kv_report["evicted_tokens_per_head"]["mean"]),
        ):
            assert grown(front, metric) == {
                engine: sum(map(count, engine_reports)) for engine, engine_reports in reports.items()
            }
        for gauge in ("blocks_held", "bytes_held", "dense_bytes"):
            assert policy_metrics(front)[gauge] == dict.fromkeys(reports, 0)


def test_the_inspect_page_is_that_of_the_engine(served):
    server, fronts, engines = served
    if engines > 1:  # refused (tests/test_refusals.py), so these servers are started without it
        assert {front.get("/v1/kv_inspect").status_code for front in fronts} == {404}
        return
    for front in fronts:
        front.ask(random_prompt(200, seed=1))
    pages = [front.get("/v1/kv_inspect").json() for front in fronts]
    assert pages[0] == pages[1] and pages[0]["budget"] == BUDGET
    last = [entry for entry in pages[0]["requests"] if entry["seen_tokens"] == 200 + NEW - 1]
    assert len(last) >= 2 and all(entry["kept_tokens_per_head"]["max"] == BUDGET for entry in last)
    details = [front.get(f"/v1/kv_inspect/{last[0]['id']}").json() for front in fronts]
    assert details[0] == details[1] and len(details[0]["tokens"]) == 200 + NEW - 1


@contextmanager
def nodes_of(model: str, folder: Path, engines: int, options: list[list[str]]) -> Iterator[list[SimpleNamespace]]:
    """Yield the servers of nodes once those with an API server answer, or one has ended.

    A node has a URL, a process, and whether its server answers. Its log is ``node N`` in the folder.

    Args:
        model: folder of the model.
        folder: folder of the logs.
        engines: engines of each node.
        options: options of each node. The first node is that of the handshake.
    """
    command = [str(Path(sys.executable).with_name("vllm")), "serve", model, *SIZES, "--host", "127.0.0.1"]
    command += ["--data-parallel-size", str(engines * len(options)), "--data-parallel-size-local", str(engines)]
    command += ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port())]
    nodes, serving = [], []
    try:
        for i, words in enumerate(options):
            port, start = str(free_port()), ["--data-parallel-start-rank", str(engines * i)] if i else []
            with (folder / f"node {i}").open("w") as log:
                process = subprocess.Popen(
                    [*command, "--port", port, *start, *words],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=os.environ | environment(),
                )
            nodes.append(SimpleNamespace(url=f"http://127.0.0.1:{port}", process=process, answers=False))
            serving += [] if "--headless" in words else nodes[-1:]
        deadline = time.monotonic() + 600
        while not all(one.answers for one in serving) and all(one.process.poll() is None for one in serving):
            assert time.monotonic() < deadline, (folder / "node 0").read_text()[-3000:]
            time.sleep(0.5)
            for one in serving:
                one.answers = is_healthy(one.url)
        yield serving
    finally:
        for one in nodes:
            with suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()


def check_budgets(front: Front, engines: int) -> None:
    """Check that every engine of an API server keeps what a request asks for."""
    for engine in range(engines):
        kv_report = report(front.ask(random_prompt(300, seed=1), engine=engine, kv_budget=160, kv_report=1))
        assert kv_report["kept_tokens_per_head"]["max"] == kv_report["budget"] == 160
        assert front.ask([65], engine=engine, kv_budget=9999).status_code == 400


def test_an_engine_of_another_node(model, tmp_path):
    """Two API servers serve an engine of theirs and one of a node without API server."""
    with nodes_of(model, tmp_path, 1, [[*API_SERVERS, *POLICY], ["--headless", *POLICY]]) as (server,):
        assert server.answers, (tmp_path / "node 0").read_text()[-3000:]
        with connected(server, 2) as fronts:
            for front in fronts:
                check_budgets(front, 2)


def test_nodes_with_engines_and_api_servers_of_their_own(model, tmp_path):
    """Under hybrid load balancing each node is a server of its engines."""
    hybrid = ["--data-parallel-hybrid-lb", "--api-server-count", "1", *POLICY]
    with nodes_of(model, tmp_path, 2, [hybrid, hybrid]) as servers:
        for i, server in enumerate(servers):
            assert server.answers, (tmp_path / f"node {i}").read_text()[-3000:]
            with connected(server, 1) as (front,):
                check_budgets(front, 2)


def test_an_engine_without_the_policy(model, tmp_path):
    with nodes_of(model, tmp_path, 1, [POLICY, ["--headless"]]) as (server,):
        assert not server.answers
    line = "kvpop: error: an engine of this API server does not serve --kv-policy streaming-llm"
    assert line in (tmp_path / "node 0").read_text()


def test_an_api_server_without_the_policy(model, tmp_path):
    """Its own engine serves densely, as it asks. That of the other node refuses requests that nobody has checked."""
    with nodes_of(model, tmp_path, 1, [[], ["--headless", *POLICY]]) as (server,):
        assert server.answers, (tmp_path / "node 0").read_text()[-3000:]
        with connected(server, 1) as (front,):
            for settings in ({}, {"kv_budget": 9999}):
                assert front.ask([65], engine=0, **settings).status_code == 200
                assert front.ask([65], engine=1, **settings).status_code == 500
    line = "ConfigError: the front end that sent this request does not serve --kv-policy streaming-llm"
    assert (tmp_path / "node 1").read_text().count(line) == 2


def is_healthy(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=5).is_success
    return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
