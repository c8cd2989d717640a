"""A Chromium for each module; without one, or without Playwright, these tests are skipped with the reason."""

import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # what asks for another host fails and is seen
)


@pytest.fixture(scope="module")
def chromium() -> Generator[Any]:
    """For one module: Playwright's event loop would be in the way of asynchronous tests."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium to test the page in a browser")
    from playwright.sync_api import sync_playwright  # the modules of the tests have skipped where it is missing

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a service that a module's tests share."""
    return tmp_path_factory.mktemp("run")
