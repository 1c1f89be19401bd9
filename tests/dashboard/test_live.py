"""What changes while one looks: updates without reload or jumps, a lost controller, keyboard and theme."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.dashboard.conftest import Visit
from tests.dashboard.fake_api import Served
from tests.dashboard.fleet import Fleet
from tests.dashboard.shapes import RUN

pytestmark = pytest.mark.browser

_COUNT_SHIFTS = """() => {
  window.shifts = 0;
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shifts += entry.value;
  }).observe({ type: "layout-shift" });
}"""


def _ready(page: Page) -> None:
    page.wait_for_selector("#plots canvas")
    expect(page.locator("#progress")).to_contain_text("version 60")


def test_an_event_changes_the_page_without_reload_jump_or_lost_focus(visit: Callable[..., Visit], fleet: Fleet) -> None:
    page = visit().open(f"/runs/{RUN}")
    _ready(page)
    page.wait_for_timeout(300)
    page.evaluate(_COUNT_SHIFTS)
    page.get_by_role("button", name="Pause").focus()
    for version in (61, 62):
        fleet.commit()
        expect(page.locator("#progress")).to_contain_text(f"step {version} of 80")
        expect(page.locator("#events li").first).to_contain_text(f"Version {version} is committed.")
    expect(page.locator(".plot").first).to_contain_text("version 62")
    assert page.evaluate("document.activeElement.textContent") == "Pause"
    assert page.evaluate("window.shifts") < 0.01


def test_a_lost_controller_is_told_and_its_return_brings_what_was_missed(
    visit: Callable[..., Visit], served: Served, fleet: Fleet
) -> None:
    page = visit().open(f"/runs/{RUN}")
    _ready(page)
    served.stop()
    try:
        expect(page.locator("#link")).to_have_text("reconnecting…")
        expect(page.locator("#notice")).to_contain_text("The controller does not answer")
        expect(page.locator(".tile .value").first).to_contain_text("0.")  # greyed, not blank
        expect(page.locator("body")).to_have_attribute("data-link", "lost")
        fleet.commit()
    finally:
        served.start()
    expect(page.locator("#link")).to_have_text("live")
    expect(page.locator("#notice")).to_contain_text("The controller is back.")
    expect(page.locator("#events li").first).to_contain_text("Version 61 is committed.")
    expect(page.locator("#progress")).to_contain_text("version 61")


def test_the_keyboard_reaches_actions_and_grave_ones_ask_first(visit: Callable[..., Visit], served: Served) -> None:
    page = visit().open("/nodes")
    page.wait_for_selector("#nodes tbody tr")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Drain":
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_contain_text("Drain node-1?")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert served.app.state.posts == []
    page.keyboard.press("Enter")
    page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    expect(page.locator("#notice")).to_have_text("node-1 is draining.")
    assert served.app.state.posts == ["nodes/node-1/drain"]


def test_a_chosen_theme_is_kept(visit: Callable[..., Visit]) -> None:
    page = visit("light").open("/")
    page.get_by_role("button", name="Switch between light and dark").click()
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(231, 236, 238)"
