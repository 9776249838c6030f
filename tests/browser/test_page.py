"""The page's own code in a browser, on snapshots that a test writes; no process besides the browser runs."""

from __future__ import annotations

import json
import mimetypes
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from stateflow.dashboard.serving import STATIC
from stateflow.dashboard.view import MOVES_MAX, Rates, Seen, lines, snapshot
from stateflow.errors import InvalidArgument
from stateflow.reports import JobReport, MoveReport, Reconfiguration
from stateflow.status import ClusterStatus, OperatorStatus, RefusedReplica, ReplicaStatus
from tests.browser.conftest import WAIT_MS

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_MS)
ADDRESS = "http://page.example/"
ME = {"version": "1", "sign_in": False, "can_sign_out": False, "who": "admin/everybody", "ledger": True}


def replica(name: str, site: str = "cloud", **more: Any) -> ReplicaStatus:
    return ReplicaStatus(name, site, "127.0.0.1:1", 1, True, **{"last_heartbeat_s": 0.5, "partitions": 2, **more})


def operator(name: str, *owners: str) -> OperatorStatus:
    return OperatorStatus(name, "m:Op", len(owners), 1, owners, (1,) * len(owners))


def told(status: ClusterStatus, **more: Any) -> dict[str, Any]:
    """Returns the snapshot of a status, as the server sends it."""
    now = {"at_us": 1, "controller": "127.0.0.1:7070", "error": None, "missing": [], "points": lines(())}
    return {**now, **snapshot(Seen(status), Rates(), 0.0), **more}


CLUSTER = ClusterStatus((replica("a"), replica("b", "edge")), (operator("Op", "a", "b"), operator("Other", "b")), ())


class Stage:
    """A page whose server is the test: ``answers`` has the answer to each request of the page, by its name."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.answers: dict[str, Callable[[Route], None]] = {}
        self.me: dict[str, Any] = {**ME, "may": dict.fromkeys(("migrate", "drain", "state", "job", "batch"), True)}
        self.streams: list[str] = []
        page.route("**/*", self._answer)

    def open(self, *snapshots: dict[str, Any], retry_ms: int = 3_600_000) -> Page:
        """Opens the page. Its event stream sends these snapshots and breaks; after ``retry_ms`` it is asked again."""
        events = [("lines", lines(())), *(("snapshot", each) for each in snapshots)]
        text = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)
        self.streams = [f"retry: {retry_ms}\n\n{text}"]
        self.page.goto(ADDRESS)
        self.page.locator("#live").wait_for(timeout=WAIT_MS)
        return self.page

    def _answer(self, route: Route) -> None:
        path = route.request.url.removeprefix(ADDRESS).partition("?")[0]
        if not path.startswith("api/"):
            found = STATIC / (path or "index.html")
            return route.fulfill(body=found.read_bytes(), content_type=mimetypes.guess_type(found)[0])
        name = path.removeprefix("api/")
        if name in self.answers:
            return self.answers[name](route)
        if name == "events":
            return route.fulfill(body=self.streams[0], content_type="text/event-stream")
        nothing = {"states": [], "key": [], "operators": [], "savepoints": []}
        return route.fulfill(json=self.me if name == "me" else nothing)


@pytest.fixture
def stage(browser: Browser) -> Iterator[Stage]:
    """A page in New York, in winter. Fails at the end if its code raised an error."""
    context = browser.new_context(timezone_id="America/New_York", viewport={"width": 1280, "height": 900})
    context.set_default_timeout(WAIT_MS)
    page, wrong = context.new_page(), list[str]()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield Stage(page)
    context.close()
    assert wrong == []


def formatted(page: Page, call: str) -> Any:
    return page.evaluate(f"import('/format.js').then((format) => format.{call})")


def test_a_time_has_the_date_of_its_time_zone(stage: Stage) -> None:
    page = stage.open(told(CLUSTER))
    assert formatted(page, "time(Date.UTC(2026, 0, 6, 2, 30) * 1000)") == "2026-01-05 21:30:00"
    assert formatted(page, "time(Date.UTC(2026, 6, 6, 2, 30) * 1000)") == "2026-07-05 22:30:00"


def test_a_time_that_is_too_far_away_for_a_date_is_a_dash(stage: Stage) -> None:
    assert formatted(stage.open(told(CLUSTER)), "time(1e19)") == "–"


def test_time_lines_are_in_order_when_the_clock_of_the_server_is_set_back(stage: Stage) -> None:
    page = stage.open(told(CLUSTER))
    before = {name: [1, 2, 5, 6] for name in lines(())}
    after = {name: [4, 5] for name in lines(())}
    call = "([before, after]) => import('/charts.js').then((charts) => charts.joined(before, after))"
    assert page.evaluate(call, [before, after]) == {name: [1, 2, 4, 5] for name in lines(())}
    assert page.evaluate(call, [before, lines(())]) == before, "no point was added"


@pytest.mark.parametrize(
    ("ms", "shown"), [(0, "0 ms"), (0.4, "0.4 ms"), (750, "750 ms"), (1500, "1.5 s"), (3e6, "3000 s")]
)
def test_an_axis_of_milliseconds_stays_narrow(stage: Stage, ms: float, shown: str) -> None:
    assert formatted(stage.open(told(CLUSTER)), f"onAxis({ms})") == shown


@pytest.mark.parametrize(
    ("pace", "shown"), [("null", "–"), (0.016, "0.016/s"), (12.34, "12/s"), (1234, "1,234/s"), (2e6, "2 M/s")]
)
def test_the_pace_of_a_batch_is_readable(stage: Stage, pace: Any, shown: str) -> None:
    assert formatted(stage.open(told(CLUSTER)), f"pace({pace})") == shown


def test_what_needs_attention_is_counted_where_not_all_of_it_fits(stage: Stage) -> None:
    fault = InvalidArgument("no", remedy="mend it")
    refused = tuple(RefusedReplica(f"r{number}", "h:1", "d", fault, 1.0) for number in range(50))
    page = stage.open(told(replace(CLUSTER, refused=refused)))
    rows = page.locator("#cares-list li")
    expect(rows).to_have_count(21)
    expect(rows.last).to_have_text("30 more are not shown here: stateflow status")


def test_a_replica_that_was_never_heard_has_no_time_of_it(stage: Stage) -> None:
    page = stage.open(told(ClusterStatus((replica("a", last_heartbeat_s=-1.0),), (), ())))
    page.get_by_role("button", name=re.compile("^a ")).click()
    expect(page.get_by_role("dialog").locator("dl")).to_contain_text("Heard–")


def test_a_long_name_fits_a_narrow_screen(stage: Stage) -> None:
    name = "n" * 128
    stage.page.set_viewport_size({"width": 320, "height": 700})
    page = stage.open(told(ClusterStatus((replica(name, name),), (operator(name, name),), ())))
    expect(page.locator("#legend li")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    cell = page.get_by_role("table", name="Operators").locator("tbody td").first
    assert cell.bounding_box()["width"] < 400, "the other columns are not far away"  # type: ignore[index]
    page.get_by_role("tab", name="Nodes").click()
    site = page.get_by_role("table", name="Nodes").locator("tbody td").nth(1)
    assert site.bounding_box()["width"] < 600  # type: ignore[index]


def test_an_answer_that_another_question_has_overtaken_is_not_shown(stage: Stage) -> None:
    held: list[Route] = []

    def states(route: Route) -> None:
        if "operator=Op" in route.request.url and not held:
            held.append(route)
        else:
            route.fulfill(json={"key": ["k"], "states": [{"name": "new", "kind": "value"}]})

    stage.answers["states"] = states
    page = stage.open(told(CLUSTER))
    page.get_by_role("tab", name="Look up a key").click()
    page.get_by_label("Operator", exact=True).select_option("Other")
    choice = page.get_by_label("State", exact=True)
    expect(choice).to_have_text("new (value)")
    with page.expect_response("**/states?operator=Op"):
        held[0].fulfill(json={"key": ["k"], "states": [{"name": "old", "kind": "value"}]})
    page.evaluate("new Promise((done) => setTimeout(done))")  # what waits for the answer has run
    expect(choice).to_have_text("new (value)")


def test_a_page_of_another_version_is_loaded_anew(stage: Stage) -> None:
    page = stage.open(told(CLUSTER), retry_ms=50)
    page.evaluate("document.documentElement.dataset.kept = 'yes'")
    stage.me["version"] = "2"
    expect(page.locator("#version")).to_have_text("stateflow 2")
    assert page.evaluate("document.documentElement.dataset.kept") is None


def test_a_sign_in_that_the_browser_does_not_keep_is_said(stage: Stage) -> None:
    stage.me = {"version": "1", "sign_in": True, "can_sign_out": False}
    stage.answers["sign-in"] = lambda route: route.fulfill(json={"who": "operate/alice"})
    stage.page.goto(ADDRESS)
    stage.page.get_by_label("Token").fill("sftoken1_x")
    stage.page.get_by_role("button", name="Sign in").click()
    expect(stage.page.locator("#sign-in-error")).to_contain_text("cookie")


def test_a_sign_out_that_fails_is_said(stage: Stage) -> None:
    stage.me["can_sign_out"] = True
    stage.answers["sign-out"] = lambda route: route.abort()
    page = stage.open(told(CLUSTER))
    page.get_by_role("button", name="Sign out").click()
    expect(page.locator("#toasts")).to_contain_text("the page's server does not answer")


def test_a_job_whose_record_cannot_be_read_says_so(stage: Stage) -> None:
    job = JobReport("nightly", "every 3600", "checkpoint", "", (), (), "", False, 0, (), error="illegal_record: no")
    page = stage.open(told(CLUSTER, jobs=snapshot(Seen(CLUSTER, jobs=[job]), Rates(), 0.0)["jobs"]))
    page.get_by_role("tab", name="Batches and jobs").click()
    expect(page.get_by_role("table", name="Jobs").locator("tbody tr")).to_contain_text("illegal_record: no")


def test_a_stream_that_breaks_again_while_the_server_is_asked_why_is_opened_once(stage: Stage) -> None:
    page, asked, opened, later = stage.page, list[Route](), list[Route](), list[Route]()

    def events(route: Route) -> None:
        opened.append(route)
        if len(opened) == 1:  # it breaks; the next one is refused
            route.fulfill(body=stage.streams[0], content_type="text/event-stream")
        else:
            route.fulfill(status=503)

    stage.answers["events"] = events
    stage.answers["me"] = lambda route: asked.append(route) if opened else route.fulfill(json=stage.me)
    page.clock.install()
    stage.open(told(CLUSTER), retry_ms=10)
    while len(asked) < 2:
        page.title()  # lets requests arrive
    stage.answers["events"] = later.append
    for route in asked:
        route.fulfill(json=stage.me)
    page.evaluate("fetch('api/states').then((answer) => answer.text())")  # the page has read the answers before
    page.clock.run_for(10_000)
    while not later:
        page.title()
    page.evaluate("fetch('api/states').then((answer) => answer.text())")
    assert len(later) == 1


def test_a_hidden_tab_opens_its_stream_again_when_it_is_shown(stage: Stage) -> None:
    """Streams of hidden tabs took the connections that a browser opens to a server."""
    page = stage.open(told(CLUSTER))
    become = """(hidden) => {
        Object.defineProperty(document, "hidden", { configurable: true, value: hidden });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(become, True)
    with page.expect_request(f"{ADDRESS}api/events"):
        page.evaluate(become, False)


def test_moves_beyond_those_of_the_snapshot_are_not_passed_over(stage: Stage) -> None:
    moves = tuple(MoveReport(f"m{n}", n, "a", "b", "WARMING", "warm-up", base_bytes=9) for n in range(MOVES_MAX + 100))
    owners = ("a",) * len(moves)
    status = replace(CLUSTER, operators=(operator("Op", *owners),))
    page = stage.open(told(replace(status, reconfigurations=(Reconfiguration("r", "Op", "RUNNING", moves, 9.0),))))
    expect(page.locator("#moves-count")).to_have_text("300 under way")
    expect(page.locator(".way-note")).to_have_text("at least 200 partitions · 0 B")


@pytest.mark.parametrize("width", [320, 1280])
def test_figures_of_moves_in_both_directions_do_not_cover_each_other(stage: Stage, width: int) -> None:
    stage.page.set_viewport_size({"width": width, "height": 800})
    there = MoveReport("m0", 0, "a", "b", "WARMING", "warm-up")
    back = MoveReport("m1", 1, "b", "a", "WARMING", "warm-up")
    moves = (Reconfiguration("r", "Op", "RUNNING", (there, back), 9.0),)
    page = stage.open(told(replace(CLUSTER, reconfigurations=moves)))
    notes = page.locator(".way-note")
    expect(notes).to_have_count(2)
    upper, lower = sorted((each.bounding_box() for each in notes.all()), key=lambda box: box["y"])  # type: ignore
    assert lower["y"] - upper["y"] >= 15, "the letters are 11 px high, and have a border"
