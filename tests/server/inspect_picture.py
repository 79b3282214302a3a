"""Take the picture of the inspect page in docs/operating.md: ``python tests/server/inspect_picture.py docs/inspect.png``."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]

import openai  # noqa: E402
from server.browser import chromium  # noqa: E402
from server.test_inspect_page import KEY, MODEL, OPTIONS, PROMPT, wait  # noqa: E402
from serving import Server  # noqa: E402

TOKENS = 200
"""Tokens of the answer that are written when the picture is taken."""


def main(file: str) -> None:
    """Serve the demo model with the shipped scorer, ask a long question, and save what the page shows of the answer."""
    from PIL import Image
    from selenium.webdriver.common.by import By

    name = Path(MODEL).name
    question = f"{PROMPT}\n\nExplain in your own words what this licence allows, and what it asks for."
    with Server(MODEL, *OPTIONS, "--served-model-name", name) as server, chromium(1240, 1165) as driver:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, timeout=900)
        chat = dict(model=name, temperature=0, stream=True, extra_body={"ignore_eos": True})
        streams = [
            client.chat.completions.create(**chat, max_tokens=max_tokens, messages=[{"role": "user", "content": text}])
            for text, max_tokens in (("What is a licence?", 60), (question, 5000))
        ]
        list(streams[0])
        for _ in range(TOKENS):
            next(streams[1])
        driver.get(f"{server.url}/inspect")
        driver.execute_script(f"sessionStorage.setItem('key', {KEY!r})")
        driver.get(f"{server.url}/inspect")
        wait(lambda: driver.find_elements(By.CSS_SELECTOR, "#requests button"), "table")[0].click()
        wait(lambda: driver.find_elements(By.CSS_SELECTOR, "#text span"), "text")
        driver.save_screenshot(file)
        streams[1].close()
    Image.open(file).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
