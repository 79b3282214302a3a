"""The inspect page of a real server, in a real browser: live table, shades, sliders, and whom it refuses."""

import asyncio
import base64
import time
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from engine.tiny_engine import configure
from fastapi import FastAPI
from server.browser import chromium, fetched, required
from serving import Server

from kvpop_vllm.vllm_glue.extras import cartridge_routes, inspect_routes

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "models" / "SmolLM2-135M-Instruct")
SCORER = str(ROOT / "examples" / "scorers" / "smollm2-135m-kvpop")
KEY, BUDGET, SINKS, WINDOW, HEADS = "secret", 256, 4, 64, 90
PROMPT = " ".join((ROOT / "LICENSE").read_text().split())[:4000]
LINE = "the inspect page answers this machine alone: open http://localhost:"
POLICY = {"policy": "h2o", "budget": 64}
OPTIONS = (
    *("--kv-policy", "kvpop", "--kv-scorer", SCORER, "--kv-budget", str(BUDGET), "--kv-inspect", "--api-key", KEY),
    *("--max-model-len", "8192", "--kv-cache-memory-bytes", str(256 << 20), "--enforce-eager"),
)


def wait(condition, event: str, seconds: float = 300):
    """Return what ``found()`` returns as soon as that is true."""
    end = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < end, f"in {seconds} s there was no {event}"
        time.sleep(0.2)
    return answer


def ask(server, path: str = "", key: str | None = KEY, **headers) -> httpx.Response:
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    return httpx.get(f"{server.url}/v1/kv_inspect{path}", headers=headers, timeout=300)


def details(server, name: str) -> tuple[np.ndarray, dict]:
    """Return when each token left, ``[layers, H, tokens]``, and the whole answer."""
    summary, record = ask(server).json(), ask(server, f"/{name}").json()
    left = np.frombuffer(base64.b64decode(record["left"]), "<i4")
    return left.reshape(summary["layers"], summary["heads"], len(record["tokens"])), record


@pytest.fixture(scope="module")
def served():
    """Yield a server, and the id of a request that is being answered."""
    with Server(MODEL, *OPTIONS) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, timeout=900)
        completion = dict(model=MODEL, prompt=PROMPT, max_tokens=6500, temperature=0, stream=True)
        # left unread: a thread that reads all the time would keep this one from running on a busy machine
        with client.completions.create(**completion, extra_body={"ignore_eos": True}):
            (name,) = wait(
                lambda: [
                    request["id"] for request in ask(server).json()["requests"] if request["generated_tokens"] > 4
                ],
                "token",
            )
            yield server, name


@pytest.mark.slow
def test_the_data_needs_the_key(served):
    server, name = served
    for path in ("", f"/{name}", "/nobody"):
        assert [ask(server, path, key).status_code for key in (None, "wrong")] == [401, 401]
    assert ask(server, "/nobody").status_code == 404
    for path in ("inspect", "inspect/inspect.js", "inspect/inspect.css"):  # these hold no data
        page = httpx.get(f"{server.url}/{path}")
        assert page.status_code == 200 and "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert httpx.get(f"{server.url}/inspect/other").status_code == 404
    assert f"inspect page: http://localhost:{server.port}/inspect" in server.log()


@pytest.mark.slow
def test_names_and_pages_of_others_are_refused(served):
    """A foreign page cannot read the data, neither across origins nor by a name of its own for this machine."""
    server, _ = served
    own_origin = f"http://127.0.0.1:{server.port}"
    assert ask(server, Origin=own_origin).status_code == ask(server, Host=f"localhost:{server.port}").status_code == 200
    foreign_headers = {"Origin": "http://example.com"}, {"Origin": "null"}, {"Host": f"example.com:{server.port}"}
    for headers in (*foreign_headers, {"X-Forwarded-For": "127.0.0.1"}, {"Forwarded": "for=127.0.0.1"}):
        refused = ask(server, **headers)
        assert refused.status_code == 403 and LINE in refused.json()["error"]["message"]


def statuses(vllm_config, requests: list[tuple], address: str = "::1") -> list[int]:
    """Return the status of each request to an app whose engine has a config, with all routes of this package."""
    app = FastAPI()
    app.state.vllm_config = vllm_config
    for routes in (inspect_routes, cartridge_routes):
        app.include_router(routes.router)

    async def answers() -> list[int]:
        transport = httpx.ASGITransport(app, client=(address, 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [(await client.request(method, path, json=body)).status_code for method, path, body in requests]

    return asyncio.run(answers())


@pytest.mark.parametrize("address, status", [("192.0.2.1", 403), ("::2", 403), ("::ffff:127.0.0.1", 200), ("::1", 200)])
def test_other_machines_are_refused(model, address, status):
    requests = [("GET", path, None) for path in ("/inspect", "/inspect/inspect.js")]
    assert statuses(configure(model, POLICY | {"inspect": True}), requests, address) == [status, status]


@pytest.mark.parametrize("policy", [None, POLICY], ids=["stock", "no page"])
def test_an_app_of_another_engine_has_no_page(model, policy):
    """A process may serve an engine with the page and one without it."""
    requests = [("GET", path, None) for path in ("/inspect", "/v1/kv_inspect", "/v1/kv_inspect/x")]
    assert statuses(configure(model, policy), requests) == [404, 404, 404]


def test_an_app_of_a_stock_engine_loads_no_cartridges(model):
    bodies = {"load": {"name": "a", "path": "b"}, "unload": {"name": "a"}}
    requests = [("POST", f"/v1/{verb}_kv_cartridge", body) for verb, body in bodies.items()]
    assert statuses(configure(model, None), requests) == [404, 404]


@pytest.mark.slow
def test_what_the_heads_hold(served):
    """Sinks and window are held by all heads, their budgets are used up, and each step evicts a token of each head."""
    server, name = served
    left, record = details(server, name)
    length, prompt = left.shape[2], record["prompt_tokens"]
    assert (record["policy"], record["state"], record["error"]) == ("kvpop", "running", None)
    assert "".join(record["tokens"]).startswith(PROMPT) and length > prompt > 2 * BUDGET
    assert not left[..., :SINKS].any() and not left[..., length - WINDOW :].any()
    held_counts = (left == 0).sum(-1)
    assert held_counts.sum() == HEADS * BUDGET and held_counts.min() < BUDGET < held_counts.max()
    times, counts = np.unique(left[left > 0], return_counts=True)
    assert times.tolist() == list(range(prompt, length + 1)) and set(counts[1:]) == {HEADS}


def shares(driver) -> np.ndarray:
    script = "return [...document.querySelectorAll('#text span')].map((span) => span.dataset.share)"
    return np.array(driver.execute_script(script), float)


def events(driver) -> str:
    """Return the text of the list of events, read at once because the page redraws the list."""
    return driver.execute_script("return document.getElementById('events').innerText")


def table(driver) -> list[list[str]]:
    script = "return [...document.querySelectorAll('#requests tbody tr')].map((row) => [...row.cells].map((c) => c.textContent))"
    return driver.execute_script(script)


@pytest.mark.slow
def test_the_page(served):
    required()
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    server, name = served
    with chromium() as driver:
        driver.set_page_load_timeout(300)
        driver.set_script_timeout(300)
        find = lambda id: driver.find_element(By.ID, id)  # noqa: E731
        driver.get(f"{server.url}/inspect")
        wait(lambda: find("state").text == "the server asks for its API key", "question for the key")
        assert not table(driver) and not find("details").is_displayed()
        find("key").send_keys("wrong" + Keys.ENTER)
        wait(lambda: find("state").text == "the key is wrong", "refusal")
        find("key").clear()
        find("key").send_keys(KEY + Keys.ENTER)
        wait(lambda: table(driver), "table")
        assert find("state").text == "live" and not find("key").is_displayed()

        row = table(driver)[0]
        assert row[:3] == [name, "running", f"{ask(server).json()['requests'][0]['prompt_tokens']:,}"]
        wait(lambda: table(driver)[0][3] != row[3], "change in the live table")
        driver.find_element(By.CSS_SELECTOR, "#requests button").click()
        wait(lambda: len(shares(driver)), "text")
        assert PROMPT[:200] in find("text").get_property("textContent")

        # the cache as it was some steps ago, which stays as it is
        left, record = details(server, name)
        moment = record["prompt_tokens"] + 3
        slide = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))"
        wait(lambda: int(find("time").get_property("max")) > moment, "tokens")
        driver.execute_script(slide, find("time"), moment)
        held_mask = ((left == 0) | (left > moment))[..., :moment]
        assert shares(driver)[:moment] == pytest.approx(held_mask.mean((0, 1)), abs=1e-3)
        assert not shares(driver)[moment:].any()
        find("layer").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
        assert shares(driver)[:moment] == pytest.approx(held_mask[1].mean(0), abs=1e-3)
        find("head").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
        assert (shares(driver)[:moment] == held_mask[1, 2]).all()
        spans = driver.find_elements(By.CSS_SELECTOR, "#text span")
        evicted, held_token = int(np.flatnonzero(~held_mask[1, 2])[0]), int(np.flatnonzero(held_mask[1, 2])[-1])
        colours = [spans[t].value_of_css_property("background-color") for t in (evicted, held_token)]
        assert colours[0] == "rgba(0, 0, 0, 0)" != colours[1]
        assert [("gone" in spans[t].get_attribute("class")) for t in (evicted, held_token)] == [True, False]

        # what was evicted when: in the last steps, and of one token
        lines = events(driver).splitlines()
        last = int(np.flatnonzero(left[1, 2] == moment)[0])
        assert lines[0].startswith(f"after {moment:,}") and record["tokens"][last].strip() in lines[0]
        spans[evicted].click()
        assert f"after {left[1, 2, evicted]:,}" in events(driver)
        spans[evicted].click()
        assert driver.execute_script("return document.getElementById('map').height") == len(left)

        urls = {url for url in fetched(driver) if not url.startswith(("chrome://", "data:"))}
        assert all(url.startswith(f"{server.url}/") for url in urls) and f"{server.url}/inspect/inspect.js" in urls
        errors = [
            entry["message"] for entry in driver.get_log("browser") if "401 (Unauthorized)" not in entry["message"]
        ]
        assert not errors
