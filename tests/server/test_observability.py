"""The board of examples/observability: a real Prometheus scrapes a real server, and every query returns its data."""

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import httpx
import openai
import pytest
import yaml
from serving import Server
from threads import DTYPE

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
EXAMPLE = ROOT / "examples" / "observability"
BOARD = json.loads((EXAMPLE / "grafana" / "dashboards" / "kvpop.json").read_text())
PANELS = {panel["title"]: panel for panel in BOARD["panels"] if panel["type"] != "row"}
VARIABLES = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
BUDGET, NAME = 256, "demo/model-1.0"
VIEWS = {"minutes": ("15s", "20s"), "weeks": ("3600s", "3602s")}
"""``$__interval`` and ``$__rate_interval`` of a view of some minutes, and of one whose every rate spans the whole test."""


def config(*names: str) -> dict:
    return yaml.safe_load(EXAMPLE.joinpath(*names).read_text())


def binary(name: str) -> str:
    built = ROOT / "build" / "prometheus" / "usr" / "bin" / name
    path = str(built) if built.exists() else shutil.which(name)
    if path is None:
        assert os.environ.get("KVPOP_REQUIRE_PROMETHEUS") != "1", f"there is no {name}: run `make prometheus`"
        pytest.skip(f"there is no {name}: run `make prometheus`")
    return path


def within(seconds: float, condition, message: str):
    """Return the first true value of ``condition()``. Fail with the message if there is none in time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, message
        time.sleep(0.3)
    return value


class Prometheus(NamedTuple):
    """HTTP API of a running Prometheus."""

    url: str

    def get(self, path: str, **parameters):
        """Return the data of a reply.

        Raises:
            AssertionError: Prometheus has refused it.
        """
        reply = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=60).json()
        assert reply["status"] == "success", (parameters, reply)
        return reply["data"]

    def value(self, query: str) -> float:
        """Return the sum of the series that a query returns now."""
        return sum(float(series["value"][1]) for series in self.get("query", query=query)["result"])


@contextlib.contextmanager
def prometheus(server: Server, folder: Path):
    """Run Prometheus with the example's configuration. Only target and interval are changed."""
    settings = config("prometheus.yml")
    settings["global"]["scrape_interval"] = "2s"
    settings["scrape_configs"][0]["static_configs"] = [{"targets": [server.url.removeprefix("http://")]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [binary("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)

    def ready() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://{address}/-/ready", timeout=5).is_success
        return False

    try:
        within(120, ready, "Prometheus is not ready")
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


class Measured(NamedTuple):
    """A Prometheus that has seen some requests, and what their responses say."""

    api: Prometheus
    instance: str
    start: float
    end: float
    reports: list[dict]
    usage: list

    def total(self, field: str) -> float:
        """Return the sum of a report's field, or of its mean where it has numbers per head."""
        values = [report[field] for report in self.reports]
        return sum(value["mean"] if isinstance(value, dict) else value for value in values)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    binary("prometheus")
    options = ["--kv-policy", "streaming-llm", "--kv-budget", str(BUDGET), "--kv-max-protect", "100"]
    options += ["--max-model-len", "2048", "--kv-cache-memory-bytes", str(256 << 20), "--enforce-eager"]
    options += ["--dtype", DTYPE]
    folder = tmp_path_factory.mktemp("prometheus")
    with Server(str(MODEL), *options, "--served-model-name", NAME) as server, prometheus(server, folder) as api:
        client, usage, reports = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none"), [], []
        seeds = itertools.count()

        def send(prompt: int, new: int, **settings) -> bool:
            seed = next(seeds)
            answer = client.completions.create(
                model=NAME,
                prompt=[(13 * i + 7 * seed) % 40_000 + 100 for i in range(prompt)],
                max_tokens=new,
                temperature=0,
                extra_body={"ignore_eos": True, "vllm_xargs": {"kv_report": 1} | settings},
            )
            usage.append(answer.usage)
            reports.append(answer.model_extra["kv_transfer_params"]["kv_report"])
            return True

        within(120, lambda: api.value("sum(count_over_time(vllm:kv_policy_info[1h]))") >= 1, "nothing is scraped")
        start = time.time()
        send(600, 40)  # evicts
        send(500, 40, kv_protect_prompt=100)
        send(40, 16)  # keeps everything
        scrapes_seen = "sum(count_over_time((vllm:kv_policy_bytes_held > 0)[1h:2s]))"
        within(300, lambda: send(600, 80) and api.value(scrapes_seen) >= 2, "no scrape has met a running request")
        tokens = sum(report["seen_tokens"] for report in reports)
        counted = "vllm:kv_policy_tokens_seen_total"
        within(120, lambda: api.value(counted) == tokens, f"{counted} is not {tokens}")
        scrapes = api.value("sum(count_over_time(up[1h]))") + 2
        within(120, lambda: api.value("sum(count_over_time(up[1h]))") >= scrapes, "scraping has ended")
        yield Measured(api, server.url.removeprefix("http://"), start, time.time(), reports, usage)


def rendered(text: str, measured: Measured, view: str = "weeks") -> str:
    """Return a query with its variables replaced as Grafana does."""
    values = dict(zip(("$__interval", "$__rate_interval"), VIEWS[view], strict=True)) | {"$__range": "3600s"}
    values["$model_name"] = NAME
    values["$instance"] = f"({re.escape(measured.instance)})".replace("\\", "\\\\")  # of several values: a regex
    text = re.sub(r"\$\w+", lambda match: values[match[0]], text)
    assert "$" not in text
    return text


def targets():
    return [pytest.param(t, id=f"{title}, {t['refId']}") for title, panel in PANELS.items() for t in panel["targets"]]


def series_of(target: dict, measured: Measured, view: str = "weeks") -> list[tuple[dict, dict[float, float]]]:
    """Return the labels of each series, and its finite values by time."""
    query = rendered(target["expr"], measured, view)
    if target.get("instant"):
        result = measured.api.get("query", query=query, time=measured.end)["result"]
        points = [(series["metric"], [series["value"]]) for series in result]
    else:
        span = {"start": measured.start, "end": measured.end, "step": 1}
        points = [(s["metric"], s["values"]) for s in measured.api.get("query_range", query=query, **span)["result"]]
    return [(labels, {t: float(v) for t, v in values if math.isfinite(float(v))}) for labels, values in points]


def lines(title: str, measured: Measured, view: str = "weeks") -> dict[str, dict[float, float]]:
    """Return the values of a panel's queries by legend, each of which is one series."""
    by_legend = {}
    for target in PANELS[title]["targets"]:
        ((_, by_legend[target.get("legendFormat", "")]),) = series_of(target, measured, view)
    return by_legend


def last(title: str, measured: Measured) -> dict[str, float]:
    """Return the last values of a panel in the view whose rates span the whole test."""
    return {legend: values[max(values)] for legend, values in lines(title, measured).items()}


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("target", targets())
def test_every_query_returns_numbers(measured, target, view):
    series = series_of(target, measured, view)
    assert series and all(any(values) for _, values in series)
    assert all(value >= 0 for _, values in series for value in values.values())


@pytest.mark.slow
def test_variables_list_the_model_and_the_server(measured):
    for name, value in (("model_name", NAME), ("instance", measured.instance)):
        query = rendered(VARIABLES[name]["query"]["query"], measured)
        selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()
        assert measured.api.get(f"label/{label}/values", **{"match[]": selector}) == [value]


@pytest.mark.slow
def test_the_policy_and_its_budget(measured):
    ((labels, values),) = series_of(PANELS["Policy"]["targets"][0], measured)
    assert list(values.values()) == [1]
    info = {"policy": "streaming-llm", "budget": str(BUDGET), "scorer": "none", "model_name": NAME}
    assert labels.items() >= (info | {"instance": measured.instance}).items()
    shown = PANELS["Policy"]["transformations"][0]["options"]
    assert set(labels) == set(shown["indexByName"]) | set(shown["excludeByName"]) - {"Time", "Value"}


@pytest.mark.slow
def test_tokens_are_those_of_the_reports(measured):
    rates = last("Tokens per second", measured) | last("Protected tokens per second", measured)
    assert rates["seen"] == pytest.approx(rates["kept"] + rates["evicted"], rel=1e-9)
    assert rates["evicted"] > rates["kept"] / 4 > 0
    fields = {"kept": "kept_tokens_per_head", "evicted": "evicted_tokens_per_head", "protected": "protected_tokens"}
    seen_tokens = measured.total("seen_tokens")
    for legend, field in fields.items():
        assert rates[legend] / rates["seen"] == pytest.approx(measured.total(field) / seen_tokens, rel=1e-9)
    assert measured.total("protected_tokens") == 100
    assert last("Tokens kept over seen", measured)[""] == pytest.approx(rates["kept"] / rates["seen"], rel=1e-9)


@pytest.mark.slow
def test_retained_shares_are_those_of_the_reports(measured):
    shares = sorted(report["kept_tokens_per_head"]["mean"] / report["seen_tokens"] for report in measured.reports)
    assert shares[0] < 0.5 and shares[-1] == 1 and shares[-2] < 0.999
    quantiles = last("Retained share", measured)
    assert quantiles["mean"] == pytest.approx(sum(shares) / len(shares), rel=1e-9)
    assert 0 < quantiles["P1"] <= quantiles["P10"] <= quantiles["P50"] < 1
    buckets = {
        labels["le"]: values
        for labels, values in series_of(PANELS["Requests by retained share"]["targets"][0], measured)
    }
    end = max(buckets["+Inf"])
    counts = {float(le): values[end] / buckets["+Inf"][end] for le, values in buckets.items()}
    for le, count in counts.items():
        assert count == pytest.approx(sum(share <= le for share in shares) / len(shares), rel=1e-9)


@pytest.mark.slow
def test_bytes_and_blocks_are_bounded(measured):
    """The ratio is that of the bytes at all times, and the blocks of a request of 680 tokens are at most its bound."""
    held_bytes, dense = lines("KV cache bytes", measured).values()
    busy = {time for time, value in dense.items() if value > 0}
    assert len(busy) >= 2 and {time for time, value in held_bytes.items() if value > 0} == busy
    for title in ("Bytes held over dense bytes", "Bytes held over dense bytes, by server"):
        (ratio,) = lines(title, measured).values()
        assert ratio == pytest.approx({time: held_bytes[time] / dense[time] for time in busy})
        assert 0 < min(ratio.values()) < 1
    blocks, bound = lines("KV cache blocks", measured).values()
    assert all(blocks[time] <= bound[time] for time in bound)
    assert max(bound.values()) in {report["blocks_bound"] for report in measured.reports}
    per_block = {report["bytes"] / report["blocks"] for report in measured.reports}
    assert per_block == {held_bytes[time] / blocks[time] for time in busy}
    assert 0 < max(lines("Cache usage", measured)["{{instance}}, engine {{engine}}"].values()) <= 1


@pytest.mark.slow
def test_panels_of_vllm(measured):
    """Latencies are in order, and tokens and ends of requests are those of the responses."""
    end_to_end, first, between = (
        last(title, measured) for title in ("End-to-end request latency", "Time to first token", "Inter-token latency")
    )
    for latency in (end_to_end, first, between):
        assert 0 < latency["P50"] <= latency["P95"] <= latency["P99"] and latency["mean"] > 0
    assert first["mean"] < end_to_end["mean"] < measured.end - measured.start
    phases = last("Queue, prefill and decode", measured)
    assert 0 < sum(phases.values()) <= end_to_end["mean"] and phases["decode"] > phases["queue"] >= 0
    tokens = last("Token throughput", measured)
    prompt, generated = (
        sum(getattr(usage, f"{kind}_tokens") for usage in measured.usage) for kind in ("prompt", "completion")
    )
    assert tokens["prompt"] / tokens["generation"] == pytest.approx(prompt / generated, rel=1e-9)
    running = lines("Requests", measured)
    assert set(running["running"].values()) == {0, 1} and set(running["waiting"].values()) == {0}
    ends = {
        labels["finished_reason"]: values[max(values)]
        for labels, values in series_of(PANELS["Requests ended per second"]["targets"][0], measured)
    }
    assert {reason for reason, rate in ends.items() if rate} == {"length"}
    assert tokens["generation"] / ends["length"] == pytest.approx(generated / len(measured.usage), rel=1e-9)
    assert last("Preemptions per second", measured) == {"preemptions": 0}


@pytest.mark.slow
def test_the_board_shows_all_metrics_of_the_policy(measured):
    names = [name for name in measured.api.get("label/__name__/values") if not name.endswith("_created")]
    ours = {re.sub("_(bucket|sum|count)$", "", name) for name in names if name.startswith("vllm:kv_policy_")}
    assert len(ours) == 13, ours
    text = json.dumps(BOARD)
    assert [name for name in ours if name not in text] == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="grafana-foundation-sdk needs Python 3.11")
def test_grafana_knows_every_key():
    """Grafana's own models read the board and write it again without loss: they drop keys that they do not know."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    assert lost(BOARD, json.loads(json.dumps(Dashboard.from_json(BOARD), cls=JSONEncoder))) == []
    wrong = BOARD | {"panels": [BOARD["panels"][1] | {"titel": "Policy"}]}
    assert lost(wrong, json.loads(json.dumps(Dashboard.from_json(wrong), cls=JSONEncoder))) == [".panels[0].titel"]


def lost(original, parsed, path: str = "") -> list[str]:
    """Return the paths of what is in ``there`` and not, or differently, in ``kept``, which may have more keys."""
    if isinstance(original, dict) and isinstance(parsed, dict):
        values = [(f"{path}.{key}", value, parsed.get(key)) for key, value in original.items()]
    elif isinstance(original, list) and isinstance(parsed, list) and len(original) == len(parsed):
        values = [(f"{path}[{i}]", *pair) for i, pair in enumerate(zip(original, parsed, strict=True))]
    else:
        return [] if original == parsed else [path]
    return [lost_path for name, old, new in values for lost_path in lost(old, new, name)]


def test_panels_have_their_place_and_the_chosen_data_source():
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == len({panel["title"] for panel in panels})
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and {x for x, _ in cells} == set(range(24))
    chosen = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
    assert VARIABLES["DS_PROMETHEUS"]["type"] == "datasource" and VARIABLES["DS_PROMETHEUS"]["query"] == chosen["type"]
    assert all(VARIABLES[name]["datasource"] == chosen for name in ("model_name", "instance"))
    for panel in PANELS.values():
        assert [holder["datasource"] for holder in (panel, *panel["targets"])] == [chosen] * (1 + len(panel["targets"]))
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0


def test_provisioning_and_containers_agree():
    """Each mounted path exists, Grafana finds the boards where they are mounted, and intervals are equal."""
    services = config("docker-compose.yml")["services"]
    mounted = {}
    for service in services.values():
        for volume in service["volumes"]:
            source, target, _ = volume.split(":")
            assert (EXAMPLE / source).exists()
            mounted[target] = source
    (provider,) = config("grafana", "provisioning", "dashboards", "kvpop.yml")["providers"]
    assert mounted[provider["options"]["path"]] == "./grafana/dashboards"
    (source,) = config("grafana", "provisioning", "datasources", "prometheus.yml")["datasources"]
    assert source["type"] == "prometheus" and source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == config("prometheus.yml")["global"]["scrape_interval"]


def test_prometheus_accepts_the_configuration():
    command = [binary("promtool"), "check", "config", str(EXAMPLE / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stdout + done.stderr
