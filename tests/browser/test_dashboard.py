"""The live page in a browser, on real processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from stateflow.dashboard import Dashboard
from stateflow.testing import LocalCluster
from tests.browser.conftest import MEAN, WAIT_MS
from tests.integration.operators import Tally

pytestmark = [pytest.mark.browser, pytest.mark.processes]
expect.set_options(timeout=WAIT_MS)
AXE = (Path(__file__).parent / "axe.min.js").read_text()


def owners(local: LocalCluster) -> tuple[str, ...]:
    return local.cluster.status().operators[0].owners


def dots(page: Page, replica: str) -> Any:
    return page.locator(".dot", has=page.locator("title", has_text=re.compile(rf"at {replica}(:|$)")))


def test_it_shows_sites_replicas_partitions_and_what_they_do(page: Page, local: LocalCluster) -> None:
    expect(page.locator(".site-name")).to_have_text(["cloud", "edge-1", "edge-2"])
    expect(page.locator(".dot")).to_have_count(12)
    for replica in ("cloud-0", "edge-1-0", "edge-2-0"):
        expect(page.get_by_role("button", name=re.compile(f"^{replica} "))).to_be_visible()
        expect(dots(page, replica)).to_have_count(owners(local).count(replica))
    expect(page.locator("#pill")).to_have_text("live")
    expect(page.locator("#totals")).to_contain_text(
        re.compile(r"3of 3\s*Replicas that answer|Replicas that answer\s*3of 3")
    )
    expect(page.locator("#rate-now")).to_have_text(re.compile(r"^[1-9][\d.,]* rows/s now$"))
    expect(page.locator("#latency-now")).to_have_text(re.compile(r"^median [\d.]+ ms, p99 [\d.,]+ ms$"))
    expect(page.locator("#rate canvas")).to_be_visible()
    local.cluster.checkpoint("Tally")  # entries that are in no file yet are not counted
    titles = page.locator(".dot title", has_text=re.compile(r": ≈ [1-9][\d,]* entries$"))
    expect(titles).to_have_count(12)
    expect(page.get_by_role("table", name="Operators").locator("tbody tr")).to_contain_text(re.compile("≈ [1-9]"))
    page.get_by_role("tab", name="Nodes").click()
    expect(page.get_by_role("table", name="Nodes").locator("tbody tr")).to_have_count(3)
    expect(page.get_by_role("table", name="Nodes").locator("tbody tr").first).to_contain_text(re.compile("≈ [1-9]"))
    page.get_by_placeholder("Filter by name").fill("edge-2")
    expect(page.get_by_role("table", name="Nodes").locator("tbody tr")).to_have_count(1)


def test_a_move_is_tried_dry_begun_and_shown(page: Page, local: LocalCluster) -> None:
    moved = next(number for number, owner in enumerate(owners(local)) if owner != "edge-2-0")
    page.get_by_role("button", name="Move…", exact=True).first.click()
    dialog = page.get_by_role("dialog", name="Move partitions")
    dialog.get_by_label("Partitions").fill("99")
    dialog.get_by_label("To", exact=True).select_option("edge-2")
    dialog.get_by_role("button", name="Dry run").click()
    expect(dialog.get_by_role("alert").first).to_contain_text("unknown_partition")
    dialog.get_by_label("Partitions").fill(str(moved))
    dialog.get_by_role("button", name="Dry run").click()
    plan = dialog.get_by_role("table", name="Planned moves").locator("tbody tr")
    expect(plan).to_have_count(1)
    expect(plan).to_contain_text("edge-2-0")
    assert owners(local)[moved] != "edge-2-0", "a dry run moves nothing"
    dialog.get_by_role("button", name="Move 1 partition").click()
    expect(page.locator("#moves li").first).to_contain_text(re.compile(rf"Tally {moved}.*edge-2-0"))
    expect(page.locator("#moves li").first).to_contain_text("paused")
    expect(page.locator(".dot", has=page.locator("title", has_text=f"partition {moved}, at edge-2-0"))).to_have_count(1)
    expect(page.locator("#said")).to_contain_text("completed")
    assert owners(local)[moved] == "edge-2-0"


def test_a_drain_and_a_rebalance_are_tried_dry(page: Page, local: LocalCluster) -> None:
    before = owners(local)
    page.get_by_role("button", name="Drain…", exact=True).first.click()
    dialog = page.get_by_role("dialog", name="Drain a replica")
    dialog.get_by_label("Replica").select_option("edge-2-0")
    dialog.get_by_role("button", name="Dry run").click()
    expect(dialog.get_by_role("button", name=f"Move {before.count('edge-2-0')} partitions")).to_be_focused()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Rebalance…", exact=True).click()
    dialog = page.get_by_role("dialog", name="Rebalance")
    dialog.get_by_label("Policy").select_option("ring")
    dialog.get_by_role("button", name="Dry run").click()
    expect(dialog).to_contain_text("A dry run: nothing has moved yet.")
    dialog.get_by_role("button", name="Back").click()
    expect(dialog.get_by_role("button", name="Dry run")).to_be_focused()
    dialog.get_by_role("button", name="Close").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert owners(local) == before


def test_who_only_reads_sees_no_buttons(page: Page) -> None:
    told = page.request.get("api/me").json()
    nothing = dict.fromkeys(told["may"], False)
    page.route("**/api/me", lambda route: route.fulfill(json={**told, "may": nothing}))
    page.reload()
    page.locator(".replica").first.wait_for()
    for name in ("Move…", "Drain…", "Rebalance…"):
        expect(page.get_by_role("button", name=name)).to_have_count(0)
    page.get_by_role("tab", name="Look up a key").click()
    expect(page.locator("#panel-state")).to_contain_text("a token of the role query, data or admin")


def test_who_has_to_say_who_they_are_is_asked_for_a_token(page: Page) -> None:
    sent: list[str] = []

    def refuse(route: Route) -> None:
        sent.append(f"{route.request.headers.get('x-stateflow')} {route.request.post_data}")
        error = {"code": "bad_certificate", "what": "the token was revoked", "remedy": "issue another one", "where": {}}
        route.fulfill(status=400, json={"error": error})

    page.route("**/api/me", lambda route: route.fulfill(json={"version": "1", "sign_in": True, "can_sign_out": False}))
    page.route("**/api/sign-in", refuse)
    page.reload()
    expect(page.get_by_label("Token")).to_be_focused()
    expect(page.locator("#live")).to_be_hidden()
    page.keyboard.type(" sftoken1_x ")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert").filter(has_text="revoked")).to_have_text(
        "bad_certificate: the token was revoked: issue another one"
    )
    expect(page.get_by_label("Token")).to_have_value("")
    assert sent == ["1 sftoken1_x"]
    assert not findings(page)


def test_a_batch_is_paused_goes_on_and_is_cancelled(page: Page, local: LocalCluster) -> None:
    away = [number for number, owner in enumerate(owners(local)) if owner != "cloud-0"]
    begun = local.cluster.migrate("Tally", away, to="cloud", max_bandwidth=1.0, limit=1)  # it takes for ever
    page.get_by_role("tab", name="Batches and jobs").click()
    row = page.get_by_role("table", name="Reconfigurations").locator("tbody tr", has_text=begun.id)
    row.get_by_role("button", name=re.compile("^Pause")).click()
    expect(row).to_contain_text("paused")
    row.get_by_role("button", name=re.compile("^Resume")).click()
    expect(row).to_contain_text("running")
    row.get_by_role("button", name=re.compile("^Cancel")).click()
    expect(row).to_contain_text("cancelled")
    assert begun.wait().state == "CANCELLED"


def test_a_batch_of_the_board_and_the_ledger(page: Page, local: LocalCluster) -> None:
    page.get_by_role("tab", name="Checkpoints").click()
    page.get_by_role("button", name="Take a checkpoint of everything").click()
    expect(page.locator("#toasts")).to_contain_text("sweep/")
    page.get_by_role("tab", name="Batches and jobs").click()
    row = page.get_by_role("table", name="Other batches").locator("tbody tr", has_text="sweep/").first
    expect(row).to_contain_text("done")
    page.get_by_role("tab", name="Checkpoints").click()
    page.get_by_role("button", name="Read the store").click()
    expect(page.get_by_role("table", name="Checkpoints").locator("tbody tr")).to_contain_text(["Tally"])
    page.get_by_role("tab", name="Ledger").click()
    page.get_by_label("Search").fill("sweep")
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_role("table", name="Records").locator("tbody tr").first).to_contain_text("sweep/")


def test_a_key_is_looked_up_and_what_it_is_called_is_only_text(page: Page) -> None:
    page.get_by_role("tab", name="Look up a key").click()
    page.get_by_label("State", exact=True).select_option("total")
    page.get_by_label("Key", exact=True).fill(MEAN)
    page.get_by_role("button", name="Look up").click()
    expect(page.locator("#panel-state")).to_contain_text(re.compile(r"Partition \d+, at .*: 1 entry"))
    page.get_by_label("Key", exact=True).fill(f"{MEAN} no")
    page.get_by_role("button", name="Look up").click()
    expect(page.locator("#panel-state")).to_contain_text(f"has nothing in total for the key {MEAN} no")
    assert page.locator("#panel-state img").count() == 0


def test_it_is_used_by_keyboard(page: Page) -> None:
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the map")).to_be_focused()
    page.get_by_role("tab", name="Operators").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Nodes")).to_be_focused()
    expect(page.locator("#panel-nodes")).to_be_visible()
    replica = page.get_by_role("button", name=re.compile("^cloud-0 "))
    replica.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Replica cloud-0")
    expect(dialog).to_be_visible()
    for _ in range(8):
        page.keyboard.press("Tab")
        inside = page.evaluate("document.activeElement === document.body || !!document.activeElement.closest('dialog')")
        assert inside, "what is behind a dialog is not reached"
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(replica).to_be_focused()


@pytest.mark.parametrize("looks", ["light", "dark", "phone"])
def test_everybody_can_use_it(browser: Browser, dashboard: Dashboard, local: LocalCluster, looks: str) -> None:
    size: Any = {"width": 390, "height": 844} if looks == "phone" else {"width": 1280, "height": 900}
    scheme: Any = "dark" if looks == "dark" else "light"
    context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
    page = context.new_page()
    page.goto(dashboard.url)
    page.locator(".replica").first.wait_for(timeout=WAIT_MS)
    found: list[str] = []
    for tab in page.get_by_role("tab").all():
        tab.click()
    page.locator("#panel-checkpoints tbody tr, #panel-checkpoints .empty:visible").first.wait_for(timeout=WAIT_MS)
    page.evaluate("document.querySelectorAll('[role=tabpanel]').forEach((panel) => { panel.hidden = false; })")
    found += findings(page)
    page.get_by_role("button", name="Move…", exact=True).first.click()
    page.get_by_role("textbox", name="Partitions").fill("all")
    page.get_by_role("button", name="Dry run").click()
    page.get_by_text("A dry run: nothing has moved yet.").wait_for(timeout=WAIT_MS)
    found += findings(page)
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    context.close()
    assert not found, "\n".join(sorted(set(found)))
    assert wide <= 0, "nobody scrolls sideways"


def findings(page: Page) -> list[str]:
    """Returns what axe-core finds serious or critical: the rule, and where."""
    page.evaluate(AXE)
    said = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{rule['id']}: {node['target']} {node['failureSummary']}"
        for rule in said["violations"]
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]


def test_what_nobody_serves_is_said_with_what_to_do(page: Page, local: LocalCluster) -> None:
    local.cluster.deploy(Tally, 12, failover="manual")
    lost = owners(local).count("edge-1-0")
    local.kill("edge-1-0")
    expect(page.locator(".dot.unserved")).to_have_count(lost)
    expect(page.get_by_role("region", name="Needs attention")).to_contain_text("edge-1-0")
    expect(page.locator(".replica[data-state=silent]")).to_contain_text("edge-1-0")
    local.restart("edge-1-0")
    expect(page.locator(".dot.unserved")).to_have_count(0)
    expect(page.get_by_role("region", name="Needs attention")).to_be_hidden()


def test_a_controller_that_is_away_is_said_to_be_and_comes_back(page: Page, local: LocalCluster) -> None:
    local.kill("controller")
    expect(page.locator("#trouble")).to_contain_text("unavailable")
    expect(page.locator("#trouble")).to_contain_text("What to do")
    expect(page.locator("#pill")).to_have_text("away")
    expect(page.locator(".dot")).to_have_count(12)
    local.restart("controller")
    expect(page.locator("#pill")).to_have_text("live")
    expect(page.locator("#trouble")).to_be_hidden()
