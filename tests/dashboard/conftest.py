"""Chromium, and a fake API for it to look at. Both are started once; each test has a page of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.dashboard.fake_api import ADMIN, Served, make_app
from tests.dashboard.fleet import Fleet
from whimbrel.coordination import free_port

_QUIET = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update"
_WAIT_MS = 15_000
expect.set_options(timeout=_WAIT_MS)


@dataclass
class Visit:
    """A page and what the browser had to say about it."""

    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def open(self, path: str) -> Page:
        """Go there and wait until the page has shown what it read."""
        self.page.goto(self.url + path)
        self.page.wait_for_selector("#link[data-state=live]", state="attached")
        return self.page


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """For this package only: while playwright is open, its event loop would keep other tests from starting theirs."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("NO CHROMIUM ON THIS MACHINE: apt-get install chromium; the dashboard is not tested without it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=[*_QUIET.split(), "--disable-sync"])
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def _server() -> Iterator[Served]:
    served = Served(make_app(Fleet(datetime.now(UTC))), free_port())
    yield served
    served.stop()


@pytest.fixture
def served(_server: Served) -> Served:
    """The fake API with a fresh fleet."""
    _server.app.state.fleet = Fleet(datetime.now(UTC))
    _server.app.state.posts.clear()
    return _server


@pytest.fixture
def fleet(served: Served) -> Fleet:
    return served.app.state.fleet


@pytest.fixture
def visit(browser: Browser, served: Served) -> Iterator[Callable[..., Visit]]:
    """Makes a logged-in visit in a theme and width."""
    contexts: list[BrowserContext] = []

    def make(theme: str = "light", width: int = 1440) -> Visit:
        context = browser.new_context(viewport={"width": width, "height": 860}, color_scheme=theme)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(_WAIT_MS)
        made = Visit(page, served.url)
        page.on(
            "console", lambda said: made.complaints.append(said.text) if said.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: made.complaints.append(str(error)))
        page.on("request", lambda request: made.hosts.add(request.url.split("/")[2]))
        context.request.post(f"{served.url}/login", form={"token": ADMIN})
        return made

    yield make
    for context in contexts:
        context.close()
