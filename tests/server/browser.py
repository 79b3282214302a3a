"""A headless Chromium, driven by Selenium, that reaches this machine alone."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

REQUIRED = "KVPOP_REQUIRE_BROWSER"
"""Environment variable that makes a missing browser an error."""


def required() -> None:
    """Skip the test where there is no Chromium, or fail where it is required."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if missing and os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{' and '.join(missing)} not found: run `make browser`, or unset {REQUIRED}")
    if missing:
        pytest.skip(f"{' and '.join(missing)} not found: `make browser` installs them")


@contextmanager
def chromium(width: int = 1280, height: int = 1300) -> Iterator:
    """Yield a browser with a window of this size."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = shutil.which("chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for argument in (
            "--headless=new",
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
        ):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
        driver = Chrome(options, Service(shutil.which("chromedriver")))
        try:
            yield driver
        finally:
            driver.quit()


def fetched(driver) -> set[str]:
    """Return the addresses of everything that the browser has asked for since the last call."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return {
        argument["params"]["request"]["url"] for argument in events if argument["method"] == "Network.requestWillBeSent"
    }
