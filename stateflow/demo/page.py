"""The page of the report, a :class:`string.Template`: its ``$names`` are filled by ``report.render``."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>stateflow demo: $headline</title>
<style>
:root {
  --page: #f4f5f8; --card: #ffffff; --ink: #14181f; --soft: #5b6472; --line: #d9dde4; --grid: #e8ebf0;
  --p50: #8fbdf2; --p99: #2372d9; --max: #123f7d; --batch: #a3abb8; --move: #e06c00;
  --good: #1a7f37; --bad: #c9252d;
  --a: #4e84c4; --b: #58a89a; --c: #a98bc9; --d: #c9a24a; --e: #c9798f; --f: #8c96a5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0e1116; --card: #171b22; --ink: #e8ebf0; --soft: #9aa4b2; --line: #333a45; --grid: #262c36;
    --p50: #2f6cb3; --p99: #5ea8ff; --max: #c4e0ff; --batch: #6b7583; --move: #ff9a3c;
    --good: #4cc26b; --bad: #ff6b6b;
    --a: #4a7db8; --b: #4a9486; --c: #8f74ad; --d: #ab8a3f; --e: #ad687b; --f: #6b7583;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: clamp(1.4rem, 3.4vw, 2.1rem); line-height: 1.2; margin: 0 0 8px; letter-spacing: -0.015em; }
h1::before { content: ""; display: inline-block; width: .5em; height: .5em; border-radius: 50%;
  margin-right: .4em; vertical-align: .1em; background: var(--good); }
h1.bad::before { background: var(--bad); }
.subtitle { color: var(--soft); margin: 0 0 22px; }
.cards { display: grid; grid-template-columns: repeat(5, 1fr); gap: 12px; }
.card, .panel { background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
.card { padding: 14px 16px 12px; }
.card h2 { font-size: .82rem; font-weight: 500; color: var(--soft); margin: 0; }
.card .value { font-size: 1.65rem; font-weight: 650; line-height: 1.25; margin: 2px 0 0;
  font-variant-numeric: tabular-nums; letter-spacing: -0.01em; }
.card .note { font-size: .86rem; color: var(--soft); margin: 0; }
.card.good .value { color: var(--good); }
.card.bad .value { color: var(--bad); }
.panel { padding: 18px 18px 10px; margin-top: 16px; min-width: 0; }
.panel h2 { font-size: 1.08rem; margin: 0; }
.panel > p { color: var(--soft); font-size: .92rem; margin: 2px 0 8px; max-width: 105ch; }
.panel.bad { border-color: var(--bad); }
.panel.bad h2 { color: var(--bad); }
.panel ul { margin: 6px 0; padding-left: 20px; overflow-wrap: anywhere; }
.two { display: grid; grid-template-columns: 1fr 1fr; gap: 0 16px; }
.scroll { overflow-x: auto; margin: 0 -18px; padding: 0 18px 8px; }
table { border-collapse: collapse; width: 100%; font-size: .89rem; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th { color: var(--soft); font-weight: 500; vertical-align: bottom; }
th:first-child, td:first-child { padding-left: 0; color: var(--soft); }
tr:last-child td { border-bottom: 0; }
.number { text-align: right; }
.strong { font-weight: 650; }
td.state { color: var(--soft); white-space: normal; min-width: 8em; }
td.bad { color: var(--bad); }
details { margin-top: 16px; }
summary { cursor: pointer; font-weight: 600; padding: 2px 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 10px 0; font-size: .9rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 900px) {
  .cards { grid-template-columns: repeat(2, 1fr); }
  .card:last-child { grid-column: 1 / -1; }
  .two { grid-template-columns: minmax(0, 1fr); }
}
@media (max-width: 600px) {
  main { padding: 18px 10px 32px; }
  .card { padding: 10px 12px; }
  .card .value { font-size: 1.35rem; }
  .panel { padding: 14px 10px 6px; }
  .scroll { margin: 0 -10px; padding: 0 10px 8px; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: 8px; }
}
@media print { .panel, .card { break-inside: avoid; } }
</style>
</head>
<body>
<main>
<h1 class="$verdict">$headline</h1>
<p class="subtitle">$subtitle</p>
<div class="cards">$cards</div>
$differences
<section class="panel">
<h2>Timeline</h2>
<p>Requests to replicas in windows of 250 ms, each micro-batch at its end, each move at the moment of its
pause. The bars in the middle show how long every move took; below are the rows each replica worked off. Drag
to zoom, double-click to return, point at a mark for details.</p>
<noscript><p>The charts need JavaScript; the picture next to this file shows the timeline.</p></noscript>
<div id="timeline" role="img" aria-label="Latency, moves and throughput over time"></div>
</section>
<div class="two">
<section class="panel">
<h2>Pause of each move</h2>
<p>Bar: how long the partition's rows had to wait. Tick: what was predicted before the move was let into its
pause.</p>
<div id="pauses" role="img" aria-label="Pause per move against its prediction"></div>
</section>
<section class="panel">
<h2>Bytes of each move</h2>
<p>The bulk is copied while the source goes on serving, or is already there from an earlier stay; what follows
are only the changes made meanwhile.</p>
<div id="bytes" role="img" aria-label="Bytes copied warm and as changes per move"></div>
</section>
</div>
<section class="panel">
<h2>Moves</h2>
<div class="scroll"><table>
<thead><tr>
<th class="number">#</th><th class="number">partition</th><th>from → to</th>
<th class="number">start, s</th><th class="number">took, s</th>
<th class="number">warm</th><th class="number">reused</th><th class="number">delta</th>
<th class="number">rounds</th>
<th class="number">predicted, ms</th><th class="number">pause, ms</th><th>state</th>
</tr></thead>
<tbody>$moves</tbody>
</table></div>
</section>
<details class="panel"><summary>Settings and versions</summary>
<div class="two"><dl>$settings</dl><dl>$versions</dl></div></details>
</main>
<script>$plotly</script>
<script type="application/json" id="figures">$figures</script>
<script>
(function () {
  "use strict";
  var source = document.getElementById("figures").textContent;
  var scheme = window.matchMedia("(prefers-color-scheme: dark)");
  var narrow = window.matchMedia("(max-width: 600px)");
  function draw() {
    var style = getComputedStyle(document.documentElement);
    var coloured = source.replace(/"var\\((--[a-z0-9]+)\\)"/g, function (_, name) {
      return JSON.stringify(style.getPropertyValue(name).trim());
    });
    var figures = JSON.parse(coloured);
    Object.keys(figures).forEach(function (id) {
      var layout = figures[id].layout;
      if (narrow.matches) {
        layout.font.size = 11;
        layout.legend.font.size = 11;
        layout.margin.l = 44;
        layout.legend.entrywidth = 0.48;
        layout.legend.entrywidthmode = "fraction";
        layout.dragmode = false;
        figures[id].data.forEach(function (trace) {
          if (trace.mode === "lines+markers") { trace.mode = "lines"; }
          if (trace.marker && trace.marker.size) { trace.marker.size *= 0.65; }
        });
      }
      var options = { responsive: true, displaylogo: false, displayModeBar: false };
      Plotly.react(id, figures[id].data, layout, options);
    });
  }
  draw();
  scheme.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
})();
</script>
</body>
</html>
"""
