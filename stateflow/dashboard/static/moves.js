// Moves under way and the last ones that ended, with their progress and pauses.
import { $, h, keyed, say, swatch } from "./dom.js";
import { bytes, count, ms, seconds, plural, time } from "./format.js";

const PHASES = ["WARMING", "CATCHING_UP", "FENCED", "OWNED"];
const MEANS = {
  WAITING: "waits for its turn",
  PLANNED: "waits for its turn",
  WARMING: "its files are copied",
  CATCHING_UP: "catches up with changes",
  FENCED: "is handed over",
  OWNED: "is served by the target",
  COMPLETED: "moved",
  UNKNOWN: "is under way",
};

/** How far the dot of a move has walked, from 0 to 1, by the phase of the move. */
export function walked(move) {
  const phase = PHASES.indexOf(move.state);
  if (phase === 0) return 0.08 + 0.5 * (move.progress ?? 0.3);
  return [0.08, 0.72, 0.86, 0.97][phase] ?? 0.04;
}

export function drawMoves(snapshot, numberOf) {
  const rows = [...snapshot.moves, ...snapshot.ended];
  const { moving, waiting } = snapshot.totals;
  say($("moves-count"), moving || waiting ? `${count(moving)} under way${waiting ? `, ${count(waiting)} wait` : ""}` : "");
  if (!rows.length) rows.push({ id: "none" });
  keyed(
    $("moves"),
    rows.slice(0, 60),
    (move) => move.id,
    make,
    (element, move) => update(element, move, numberOf),
  );
}

function make(move) {
  if (move.id === "none") {
    return h(
      "li",
      { class: "empty" },
      "Nothing has moved yet. Press ",
      h("b", { text: "Move…" }),
      " above, or let ",
      h("code", { text: "stateflow autopilot" }),
      " bring state to where its rows are.",
    );
  }
  const element = h("li");
  element.what = h("span", { class: "what" });
  element.when = h("span", { class: "figures" });
  element.route = h("div", { class: "route" });
  element.bars = PHASES.map(() => h("b"));
  element.phases = h("div", { class: "phases", "aria-hidden": "true" }, ...element.bars.map((bar) => h("i", {}, bar)));
  element.figures = h("div", { class: "figures" });
  element.error = h("p", { class: "error" });
  element.append(
    h("div", { class: "line" }, element.what, element.when),
    element.route,
    element.phases,
    element.figures,
    element.error,
  );
  return element;
}

function update(element, move, numberOf) {
  if (move.id === "none") return;
  const going = move.stands === "in_progress";
  const name = `${move.operator} ${move.partition}`;
  if (element.named !== name) {
    element.named = name;
    element.what.replaceChildren(swatch(numberOf(move.operator)), name);
  }
  say(element.when, going ? seconds(move.duration_s) : time(move.started_us));
  say(element.route, `${move.source} → ${move.target}`);
  element.phases.hidden = !going;
  const phase = PHASES.indexOf(move.state);
  element.bars.forEach((bar, number) => {
    const share = number < phase ? 1 : number > phase ? 0 : number === 0 ? (move.progress ?? 0.3) : 0.6;
    bar.style.width = `${share * 100}%`;
  });
  say(
    element.figures,
    going
      ? `${MEANS[move.state] ?? "is under way"} · ${bytes(move.bytes_sent)} sent` +
          (move.predicted_pause_ms ? ` · pause of about ${ms(move.predicted_pause_ms)} expected` : "")
      : ended(move),
  );
  say(element.error, move.error);
}

function ended(move) {
  if (move.state !== "COMPLETED") return move.stands === "cancelled" ? "cancelled: it stayed" : "failed: it stayed";
  const expected = move.predicted_pause_ms ? `, ${ms(move.predicted_pause_ms)} expected` : "";
  const reused = move.bytes_reused ? `, ${bytes(move.bytes_reused)} were at the target already` : "";
  return `paused ${ms(move.pause_ms)}${expected} · ${bytes(move.bytes_sent)} sent${reused}`;
}

// -- said aloud ---------------------------------------------------------------------------------------------

let known = null;
let pending = [];

/** Tells a screen reader, in one sentence, which moves began and ended since the last snapshot. */
export function announce(snapshot) {
  const now = new Map([...snapshot.moves, ...snapshot.ended].map((move) => [move.id, move.stands]));
  if (known) {
    for (const move of [...snapshot.moves, ...snapshot.ended]) {
      if (known.get(move.id) !== move.stands) pending.push(move);
    }
  }
  known = now;
  if (!pending.length) return;
  const done = pending.filter((move) => move.stands === "completed");
  const begun = pending.filter((move) => move.stands === "in_progress");
  const failed = pending.filter((move) => move.stands === "failed");
  const words = [];
  if (begun.length) words.push(`${plural(begun.length, "move")} began, of ${begun[0].operator} to ${begun[0].target}`);
  if (done.length)
    words.push(
      `${plural(done.length, "move")} completed, longest pause ${ms(Math.max(...done.map((move) => move.pause_ms)))}`,
    );
  if (failed.length) words.push(`${plural(failed.length, "move")} failed`);
  pending = [];
  if (words.length) say($("said"), `${words.join("; ")}.`);
}
