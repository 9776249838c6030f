"""A cluster with load, its live page, and a browser to look at it."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from random import Random

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, sync_playwright

from stateflow.dashboard import Dashboard, DashboardOptions
from stateflow.testing import LocalCluster
from tests.integration.operators import Tally

#: without it, a key file of the user who runs the tests would be created
os.environ.setdefault("STATEFLOW_CODE_KEY", "of tests and of nothing else")
KEYS = 400
PAUSE_S = 0.05
WAIT_MS = 60_000
#: a key that is HTML, as any client of a gateway may send one
MEAN = "<img src=x onerror=alert(1)>"


def chromium() -> str:
    for name in (os.environ.get("STATEFLOW_TEST_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"):
        if name and (found := shutil.which(name)):
            return found
    pytest.skip("there is no Chromium: `apt-get install chromium`, or set STATEFLOW_TEST_CHROMIUM")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for one module: while Playwright runs, nothing else in this thread can have an event loop."""
    path = chromium()
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        opened = playwright.chromium.launch(executable_path=path, args=arguments)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def local(browser: Browser) -> Iterator[LocalCluster]:
    """A cluster that receives rows until the module ends."""
    over = threading.Event()
    with LocalCluster(Tally, sites={"cloud": 1, "edge-1": 1, "edge-2": 1}, partitions=12) as cluster:
        gateway = threading.Thread(target=_send, args=(cluster, over), daemon=True)
        gateway.start()
        yield cluster
        over.set()
        gateway.join()


def _send(cluster: LocalCluster, over: threading.Event) -> None:
    random = Random(7)
    with cluster.stream("Tally", "gateway") as stream:
        stream.send([{"k": MEAN, "v": 1}])
        while not over.wait(PAUSE_S):
            stream.send([{"k": f"key-{random.randrange(KEYS)}", "v": random.randrange(10)} for _ in range(20)])


@pytest.fixture(scope="module")
def dashboard(local: LocalCluster) -> Iterator[Dashboard]:
    checkpoints = str(local.data_dir / "checkpoints")
    with Dashboard(DashboardOptions(local.address, ledger=local.ledger, checkpoints=checkpoints)) as page:
        yield page


@pytest.fixture
def context(browser: Browser, dashboard: Dashboard) -> Iterator[BrowserContext]:
    made = browser.new_context(base_url=dashboard.url, viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    made.set_default_timeout(WAIT_MS)
    yield made
    made.close()


#: what the browser logs for requests that are refused or find no controller; the page shows these itself
SHOWN = ("the server responded with a status of 400", "the server responded with a status of 503")


@pytest.fixture
def page(context: BrowserContext, dashboard: Dashboard) -> Iterator[Page]:
    """The opened page, with the map drawn. Fails at the end if the browser logged an error or a warning."""
    opened, wrong = context.new_page(), list[str]()

    def heard(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not any(status in message.text for status in SHOWN):
            wrong.append(message.text)

    opened.on("console", heard)
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.goto(dashboard.url)
    opened.locator(".replica").first.wait_for()
    yield opened
    assert wrong == []
