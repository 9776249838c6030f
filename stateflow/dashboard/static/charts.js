// Time lines: rows a second, and latency, with a line wherever partitions changed hands.
import { $, say } from "./dom.js";
import { ms, onAxis, plural, rate } from "./format.js";

const POINTS = 1800;
const columns = { at: [], rows_per_s: [], p50_ms: [], p99_ms: [] };
let marks = [];
let plots = [];

const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function options(element, series, words) {
  const ink = colourOf("--muted"),
    grid = { stroke: colourOf("--grid"), width: 1 };
  const axis = { stroke: ink, grid, ticks: { show: false }, font: "11px system-ui" };
  return {
    width: element.clientWidth || 400,
    height: element.clientHeight || 190,
    padding: [8, 6, 0, 0],
    cursor: { y: false, points: { size: 7 } },
    legend: { show: false },
    scales: { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(1, high * 1.15)] } },
    axes: [
      { ...axis, space: 80, size: 28, values: (_, values) => values.map(clock) },
      { ...axis, size: 52, values: (_, values) => values.map(words) },
    ],
    series: [
      {},
      ...series.map(({ name, fill }) => ({
        stroke: colourOf(name),
        width: 1.8,
        fill: fill ? `${colourOf(name)}1f` : undefined,
        points: { show: false },
        spanGaps: false,
      })),
    ],
    hooks: { drawClear: [drawMarks] },
  };
}

function drawMarks(plot) {
  const { ctx, bbox } = plot,
    { min, max } = plot.scales.x;
  if (min === null || max === null) return;
  ctx.save();
  ctx.strokeStyle = colourOf("--op-1");
  ctx.lineWidth = devicePixelRatio;
  ctx.globalAlpha = 0.6;
  ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const mark of marks) {
    const at = mark.at_us / 1e6;
    if (at < min || at > max) continue;
    const x = Math.round(plot.valToPos(at, "x", true)) + 0.5;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

export function buildCharts() {
  for (const { plot } of plots) plot.destroy();
  const make = (id, names, series, words) => {
    const element = $(id);
    element.replaceChildren();
    return {
      element,
      names,
      plot: new globalThis.uPlot(
        options(element, series, words),
        names.map((name) => columns[name]),
        element,
      ),
    };
  };
  plots = [
    make("rate", ["at", "rows_per_s"], [{ name: "--accent", fill: true }], rate),
    make("latency", ["at", "p50_ms", "p99_ms"], [{ name: "--op-2" }, { name: "--op-4" }], onAxis),
  ];
}

export function resizeCharts() {
  for (const { element, plot } of plots) {
    if (element.clientWidth && element.clientWidth !== plot.width)
      plot.setSize({ width: element.clientWidth, height: element.clientHeight });
  }
}

export function startLines(lines) {
  for (const name of Object.keys(columns)) columns[name] = [...lines[name]];
  draw();
}

/** Adds points to columns. Points that are not earlier go: the server's clock was set back after them. */
export function joined(before, points) {
  const first = points.at[0] ?? Infinity;
  let kept = before.at.length;
  while (kept && before.at[kept - 1] >= first) kept -= 1;
  const names = Object.keys(before);
  return Object.fromEntries(
    names.map((name) => [name, [...before[name].slice(0, kept), ...points[name]].slice(-POINTS)]),
  );
}

export function addPoints(points, snapshot) {
  Object.assign(columns, joined(columns, points));
  marks = snapshot.marks;
  draw();
}

function draw() {
  if (!plots.length) buildCharts();
  for (const { names, plot } of plots) plot.setData(names.map((name) => columns[name]));
  const last = (name) => columns[name].at(-1);
  say($("rate-now"), `${rate(last("rows_per_s"))} rows/s now`);
  say($("latency-now"), `median ${ms(last("p50_ms"))}, p99 ${ms(last("p99_ms"))}`);
  const moved = marks.reduce((sum, mark) => sum + mark.moves, 0);
  const longest = marks.length ? Math.max(...marks.map((mark) => mark.pause_ms)) : null;
  const crossed = moved
    ? `${plural(moved, "partition")} changed hands in this time, the longest pause was ${ms(longest)}.`
    : "No partition has changed hands in this time.";
  say(
    $("chart-caption"),
    `A dashed line is a moment at which partitions changed hands. ${crossed} Latency is of the requests of the last ` +
      "5 seconds: green the median, yellow the 99th percentile.",
  );
  $("rate").setAttribute("aria-label", `Rows a second over time: ${rate(last("rows_per_s"))} now. ${crossed}`);
  $("latency").setAttribute(
    "aria-label",
    `Latency of requests over time: median ${ms(last("p50_ms"))}, 99th percentile ${ms(last("p99_ms"))} now.`,
  );
}
