"""Every page, in both themes and widths: it shows what it read, and nothing complains, overflows or comes from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from api.dashboard.pages import STATIC_DIR
from tests.dashboard.conftest import Visit
from tests.dashboard.fake_api import Served
from tests.dashboard.fleet import Fleet
from tests.dashboard.shapes import RUN

pytestmark = pytest.mark.browser

PAGES = {
    "/": "#runs tbody tr",
    f"/runs/{RUN}": "#plots canvas",
    f"/runs/{RUN}/versions": "#versions tbody tr",
    f"/runs/{RUN}/workers/trainer/logs": "#tabs a[aria-current]",
    "/nodes": "#nodes tbody tr",
    "/incidents": "#incidents tbody tr",
    "/incidents/incident_trainer": "#decisions li",
}
"""Path to what is there once the page has read its data."""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_renders_without_complaint_or_overflow(
    visit: Callable[..., Visit], served: Served, theme: str
) -> None:
    visited = visit(theme)
    page = visited.page
    for path, shown in PAGES.items():
        page.set_viewport_size({"width": 1440, "height": 860})
        visited.open(path)
        page.wait_for_selector(shown)
        assert page.evaluate("document.documentElement.dataset.theme") == theme
        assert page.locator("h1").inner_text().strip()
        for width in (1440, 390):
            page.set_viewport_size({"width": width, "height": 860})
            over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert over <= 0, f"{path} is {over} px wider than a window of {width} px"
    assert visited.complaints == []
    assert visited.hosts == {served.url.removeprefix("http://")}


def test_the_login_page_has_the_same_look_and_says_what_was_wrong(visit: Callable[..., Visit], served: Served) -> None:
    visited = visit("dark", 390)
    page = visited.page
    page.context.clear_cookies()
    page.goto(f"{served.url}/nodes")
    assert page.url.endswith("/login?next=/nodes")
    page.get_by_label("Admin token").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("does not log in")
    assert page.evaluate("getComputedStyle(document.body).display") == "flex"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_state_is_told_by_colour_shape_and_word(visit: Callable[..., Visit]) -> None:
    page = visit().open("/")
    pills = page.locator("#runs .pill")
    expect(pills).to_have_count(5)
    looks = {
        (pill.inner_text(), pill.locator("use").get_attribute("href"), pill.get_attribute("data-tone"))
        for pill in pills.all()
    }
    assert {word for word, _, _ in looks} == {"running", "recovering", "paused", "completed", "failed"}
    assert len({shape for _, shape, _ in looks}) == 5


def test_the_empty_page_says_how_to_start_a_run(visit: Callable[..., Visit], fleet: Fleet) -> None:
    fleet.runs = []
    page = visit("light", 390).open("/")
    expect(page.locator("#empty")).to_contain_text("whimbrel run start deploy/examples/quickstart.toml")
    expect(page.locator("#empty")).to_contain_text("whimbrel up deploy/examples/quickstart.toml")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_timeline_brackets_each_incident_with_its_times(visit: Callable[..., Visit]) -> None:
    page = visit().open(f"/runs/{RUN}")
    bracket = page.get_by_role("link", name="Worker exit trainer")
    expect(bracket).to_have_attribute("aria-label", "Worker exit trainer: detect 1.2 s, decide 0.5 s, recover 20.5 s")
    expect(bracket).to_contain_text("22.2 s")
    page.get_by_role("button", name="2 min").click()
    expect(bracket).to_have_count(0)  # it lies further back
    page.get_by_role("button", name="All").click()
    bracket.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Worker exit · trainer")


def test_a_node_that_was_long_not_seen_is_shown_in_red(visit: Callable[..., Visit]) -> None:
    page = visit().open("/nodes")
    expect(page.locator("#nodes .late")).to_have_text("1 min ago")


def test_names_and_messages_are_text_never_markup(visit: Callable[..., Visit], fleet: Fleet) -> None:
    hostile = "<img src=/static/none.png onerror=document.title=1>"
    fleet.runs[0]["name"] = fleet.runs[0]["status"]["reason"] = hostile
    fleet.incidents[0]["cause"] = fleet.incidents[0]["log_tail"] = hostile
    fleet.tell("note", "info", hostile)
    page = visit().open(f"/runs/{RUN}")
    expect(page.locator("#reason")).to_have_text(hostile)
    expect(page.locator("#events li").first).to_contain_text(hostile)
    assert page.locator("img").count() == 0


def test_an_unknown_run_is_said_in_the_api_s_own_words(visit: Callable[..., Visit]) -> None:
    page = visit().open("/runs/nothing")
    expect(page.locator("#notice")).to_contain_text("There is no run nothing. See `whimbrel run ls`.")


def test_every_asset_is_local_and_nothing_is_inline() -> None:
    own = [path for path in STATIC_DIR.rglob("*") if path.is_file() and "vendor" not in path.parts]
    for path in own + list((STATIC_DIR.parent / "templates").glob("*.html")):
        text = (
            path.read_text()
            .replace('xmlns="http://www.w3.org/2000/svg"', "")
            .replace('"http://www.w3.org/2000/svg"', "")
        )
        assert not re.search(r"https?://", text), path
        if path.suffix == ".html":
            assert not re.search(r"<style|<script>|\sstyle=|\son[a-z]+=", text), path
