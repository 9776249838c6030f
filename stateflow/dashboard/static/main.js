// The page: listens to the cluster, and makes each part draw the new data.
import { $, h, keyed, say } from "./dom.js";
import { count, ms, ranges, rate } from "./format.js";
import { get, post } from "./api.js";
import { addPoints, buildCharts, resizeCharts, startLines } from "./charts.js";
import { beginDialog, replicaDialog } from "./dialogs.js";
import { Map_, drawLegend } from "./map.js";
import { announce, drawMoves } from "./moves.js";
import { Panels } from "./panels.js";

const SILENT_MS = 12_000,
  CARES_MAX = 20;
let me = null,
  snapshot = null,
  panels = null,
  heardAt = 0;

const map = new Map_($("canvas"), { open: (name) => snapshot && replicaDialog(name, snapshot, me, begin) });
const begin = (kind, given) => snapshot && beginDialog(kind, snapshot, tell, given);

function tell(words, failed = false) {
  const toast = h("p", { class: "toast", text: words });
  $("toasts").append(toast);
  setTimeout(() => toast.remove(), failed ? 12_000 : 5_000);
}

// -- what is shown ------------------------------------------------------------------------------------------

function drawTotals({ totals }) {
  const lost = totals.unserved;
  const figures = [
    ["Sites", count(totals.sites)],
    [
      "Replicas that answer",
      count(totals.alive),
      `of ${count(totals.replicas)}`,
      totals.alive < totals.replicas && "bad",
    ],
    lost
      ? ["Partitions not served", count(lost), `of ${count(totals.partitions)}`, "bad"]
      : ["Partitions served", count(totals.partitions)],
    ["Rows a second", rate(totals.rows_per_s)],
    ["p99 latency", ...split(ms(totals.p99_ms))],
    [
      "Moving now",
      count(totals.moving),
      totals.waiting ? `${count(totals.waiting)} wait` : "",
      totals.moving && "busy",
    ],
  ];
  keyed(
    $("totals"),
    figures,
    (_, __) => figures.indexOf(_),
    () => h("div", {}, h("dt"), h("dd", {}, h("span"), h("small"))),
    (element, [name, value, unit = "", tone = ""]) => {
      element.className = tone || "";
      say(element.firstChild, name);
      say(element.lastChild.firstChild, value);
      say(element.lastChild.lastChild, unit);
    },
  );
}

/** Draws what needs attention, such as unserved partitions, refused nodes and damage, each with its remedy. */
function drawCares(found) {
  const cares = [
    ...found.operators.flatMap((operator) =>
      operator.unserved.map((each) => [`${operator.name} ${ranges(each.partitions)}`, each.error]),
    ),
    ...found.refused.map((each) => [`${each.name} at ${each.address}`, each.error]),
    ...found.damaged.map((each) => [`${each.operator} ${each.partition} at ${each.replica}`, each.error]),
    ...found.missing.map((each) => [`The data on ${each.what} is not up to date`, each.error]),
    ...found.deploying.map((each) => [
      each.name,
      each.tried === null
        ? `is being deployed: ${count(each.created)} of ${count(each.partitions)} partitions are created`
        : `has a new version, tried on the state of ${count(each.tried)} of ${count(each.partitions)} partitions`,
    ]),
  ];
  const more = cares.splice(CARES_MAX).length;
  if (more) cares.push([`${count(more)} more are not shown here:`, "stateflow status"]);
  $("cares").hidden = !cares.length;
  keyed(
    $("cares-list"),
    cares,
    ([what, why]) => `${what} ${why}`,
    ([what, why]) => h("li", {}, h("b", { text: what }), ` ${why}`),
    () => {},
  );
}

const split = (text) => text.split(" ");

function drawTrouble(error, what = "The controller does not answer") {
  const box = $("trouble");
  box.hidden = !error;
  $("live").classList.toggle("stale", Boolean(error));
  if (!error) return;
  const words = `${error.code}: ${error.what}`;
  const remedy = error.remedy ? `What to do: ${error.remedy}.` : "";
  if (box.said === words + remedy) return;
  box.said = words + remedy;
  box.replaceChildren(
    h("p", {}, h("b", { text: what }), words),
    h("p", { text: `${remedy} The page shows the last known state, and tries again by itself.` }),
  );
}

function pill(state, words) {
  $("pill").dataset.state = state;
  say($("pill"), words);
}

function heard(found) {
  heardAt = performance.now();
  say($("controller"), found.controller);
  if (found.error) {
    pill("away", "away");
    return drawTrouble(
      found.error,
      found.error.code === "unavailable" ? "The controller does not answer" : "The cluster's state cannot be read",
    );
  }
  drawTrouble(null);
  $("trouble").said = "";
  pill(found.follower ? "following" : "live", found.follower ? "nobody leads" : "live");
  snapshot = found;
  $("live").hidden = false;
  drawTotals(found);
  drawCares(found);
  drawLegend(found);
  map.draw(found);
  drawMoves(found, (operator) => found.operators.findIndex((each) => each.name === operator));
  announce(found);
  addPoints(found.points, found);
  panels.show(found);
}

function listen() {
  // a browser opens six connections to a server: streams of hidden tabs would leave none to the others
  if (document.hidden) return document.addEventListener("visibilitychange", listen, { once: true });
  const events = new EventSource("api/events");
  let over = false;
  function end(next, afterMs) {
    if (over) return; // several errors were reported while the first one was looked into
    over = true;
    document.removeEventListener("visibilitychange", hide);
    events.close();
    setTimeout(next, afterMs);
  }
  function hide() {
    heardAt = 0; // the silence of a hidden page is no fault
    end(listen, 0);
  }
  document.addEventListener("visibilitychange", hide);
  events.addEventListener("lines", (event) => startLines(JSON.parse(event.data)));
  events.addEventListener("snapshot", (event) => heard(JSON.parse(event.data)));
  events.addEventListener("error", async () => {
    pill("away", "no connection");
    try {
      const now = await get("me");
      if (now.version !== me.version) return location.reload(); // this page's code may not understand the server
      if (now.sign_in) return end(start, 0); // which listens again when somebody has signed in
    } catch (error) {
      drawTrouble({ code: error.code, what: error.message, remedy: error.remedy }, "The page's server does not answer");
    }
    if (events.readyState === EventSource.CLOSED) end(listen, 2000);
  });
}

setInterval(() => {
  if (heardAt && performance.now() - heardAt > SILENT_MS) pill("away", "silent");
}, 2000);

// -- who looks ----------------------------------------------------------------------------------------------

/** Shows the page to its user. Returns true if the user has to sign in first. */
async function start() {
  try {
    me = await get("me");
  } catch (error) {
    drawTrouble({ code: error.code, what: error.message, remedy: error.remedy }, "The page's server does not answer");
    setTimeout(start, 2000);
    return false;
  }
  drawTrouble(null);
  say($("version"), `stateflow ${me.version}`);
  $("sign-in").hidden = !me.sign_in;
  $("sign-out").hidden = !me.can_sign_out;
  if (me.sign_in) {
    $("live").hidden = true;
    pill("waiting", "sign in");
    $("token").focus();
    return true;
  }
  say($("who"), me.can_sign_out ? me.who : "");
  $("actions").hidden = !(me.may.migrate || me.may.drain || me.may.rebalance);
  panels = new Panels({ me, tell, begin, open: map.open });
  listen();
  return false;
}

$("sign-in-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const token = $("token").value.trim();
  $("token").value = "";
  try {
    await post("sign-in", token);
    const unknown = await start();
    say($("sign-in-error"), unknown ? "The browser did not keep the sign-in: allow cookies for this page, and try again." : "");
  } catch (error) {
    say($("sign-in-error"), error.line ?? String(error));
  }
});
$("sign-out").addEventListener("click", async () => {
  try {
    await post("sign-out", {});
    location.reload();
  } catch (error) {
    tell(error.line ?? String(error), true);
  }
});
for (const kind of ["migrate", "drain", "rebalance"]) $(`do-${kind}`).addEventListener("click", () => begin(kind));

// -- tabs, theme, size --------------------------------------------------------------------------------------

const tabs = [...document.querySelectorAll('[role="tab"]')];
function choose(tab, focus) {
  for (const each of tabs) {
    const own = each === tab;
    each.setAttribute("aria-selected", own);
    each.tabIndex = own ? 0 : -1;
    $(each.getAttribute("aria-controls")).hidden = !own;
  }
  if (focus) tab.focus();
  if (snapshot) panels.show(snapshot);
  if (tab.id === "tab-checkpoints") panels?.lookIntoStore?.();
}
tabs.forEach((tab, number) => {
  tab.addEventListener("click", () => choose(tab, false));
  tab.addEventListener("keydown", (event) => {
    const to = { ArrowRight: number + 1, ArrowLeft: number - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(tabs[(to + tabs.length) % tabs.length], true);
  });
});

const theme = () => document.documentElement.dataset.theme;
function themed() {
  say($("theme"), theme() === "dark" ? "Light" : "Dark");
  $("theme").setAttribute("aria-label", `Switch to ${theme() === "dark" ? "light" : "dark"} colours`);
  if (snapshot) {
    buildCharts();
    resizeCharts();
  }
}
$("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = theme() === "dark" ? "light" : "dark";
  try {
    localStorage.setItem("stateflow-theme", theme());
  } catch {
    /* the choice lasts until the page is left */
  }
});
new MutationObserver(themed).observe(document.documentElement, { attributeFilter: ["data-theme"] });
new ResizeObserver(resizeCharts).observe($("rate"));
themed();
start();
