"""The page of the report, a :class:`string.Template`: its ``$names`` are filled by ``report.render``."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>stateflow evaluation: $headline</title>
<style>
:root {
  --page: #f4f5f8; --card: #ffffff; --ink: #14181f; --soft: #5b6472; --line: #d9dde4; --grid: #e8ebf0;
  --p99: #2372d9; --good: #1a7f37; --bad: #c9252d;
  --a: #2372d9; --b: #e06c00; --c: #1d8f7a; --d: #8a5cc2; --e: #b8860b; --f: #c2477f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0e1116; --card: #171b22; --ink: #e8ebf0; --soft: #9aa4b2; --line: #333a45; --grid: #262c36;
    --p99: #5ea8ff; --good: #4cc26b; --bad: #ff6b6b;
    --a: #5ea8ff; --b: #ff9a3c; --c: #4cc9b0; --d: #b794f4; --e: #e0b84c; --f: #f27eb2;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: clamp(1.4rem, 3.4vw, 2.1rem); line-height: 1.2; margin: 0 0 8px; letter-spacing: -0.015em; }
h1::before { content: ""; display: inline-block; width: .5em; height: .5em; border-radius: 50%;
  margin-right: .4em; vertical-align: .1em; background: var(--good); }
h1.bad::before { background: var(--bad); }
.subtitle { color: var(--soft); margin: 0 0 22px; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(4, 1fr); gap: 12px; }
.card, .panel { background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
.card { padding: 14px 16px 12px; }
.card h2 { font-size: .82rem; font-weight: 500; color: var(--soft); margin: 0; }
.card .value { font-size: 1.65rem; font-weight: 650; line-height: 1.25; margin: 2px 0 0;
  font-variant-numeric: tabular-nums; }
.card .note { font-size: .86rem; color: var(--soft); margin: 0; overflow-wrap: anywhere; }
.card.good .value, td.good { color: var(--good); }
.card.bad .value, td.bad, .wrong { color: var(--bad) !important; }
.panel { padding: 18px 18px 14px; margin-top: 16px; min-width: 0; scroll-margin-top: 8px; }
.panel h2 { font-size: 1.12rem; margin: 0; }
.panel h3 { font-size: .95rem; font-weight: 600; margin: 18px 0 2px; }
.panel > p { color: var(--soft); font-size: .92rem; margin: 2px 0 8px; max-width: 105ch; }
.panel ul { margin: 6px 0; padding-left: 20px; overflow-wrap: anywhere; }
.two { display: grid; grid-template-columns: 1fr 1fr; gap: 0 16px; }
.scroll { overflow-x: auto; margin: 10px -18px 0; padding: 0 18px 8px; }
table { border-collapse: collapse; width: 100%; font-size: .89rem; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--grid); }
td.name { white-space: normal; min-width: 15em; }
th { color: var(--soft); font-weight: 500; vertical-align: bottom; }
th:first-child, td:first-child { padding-left: 0; }
tr:last-child td { border-bottom: 0; }
a { color: var(--p99); text-decoration: none; }
.number { text-align: right; }
details { margin-top: 12px; }
summary { cursor: pointer; font-weight: 600; font-size: .9rem; padding: 2px 0; }
pre { overflow-x: auto; font-size: .78rem; line-height: 1.35; max-height: 30em; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 10px 0; font-size: .88rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; min-width: 0; }
@media (max-width: 900px) {
  .cards { grid-template-columns: repeat(2, 1fr); }
  .two { grid-template-columns: minmax(0, 1fr); }
}
@media (max-width: 600px) {
  main { padding: 18px 10px 32px; }
  .card { padding: 10px 12px; }
  .card .value { font-size: 1.35rem; }
  .panel { padding: 14px 10px 8px; }
  .scroll { margin: 8px -10px 0; padding: 0 10px 8px; }
  dl { grid-template-columns: minmax(0, 1fr); gap: 0; }
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
<section class="panel">
<h2>Targets</h2>
<p>Right of the dotted line a target is met. Bars are the range over the runs where the record tells one; the axis is
logarithmic. Verdicts are computed from the figures.</p>
<noscript><p>The charts need JavaScript; the table below does not.</p></noscript>
$overview
<div class="scroll"><table>
<thead><tr><th></th><th>target</th><th class="number">bound</th><th class="number">figure</th>
<th class="number">range</th><th>verdict</th></tr></thead>
<tbody>$table</tbody>
</table></div>
</section>
$sections
</main>
<script>$plotly</script>
<script type="application/json" id="figures">$figures</script>
<script>
(function () {
  "use strict";
  var source = document.getElementById("figures").textContent;
  var scheme = window.matchMedia("(prefers-color-scheme: dark)");
  var narrow = window.matchMedia("(max-width: 600px)");
  function wrapped(name) {
    var lines = [""];
    name.split(" ").forEach(function (word) {
      var last = lines[lines.length - 1];
      if (last && (last + " " + word).length > 20) { lines.push(word); }
      else { lines[lines.length - 1] = last ? last + " " + word : word; }
    });
    return lines.join("<br>");
  }
  function narrowed(figure) {
    var layout = figure.layout;
    layout.font.size = 10;
    layout.margin.l = 40;
    layout.legend.font.size = 10;
    layout.dragmode = false;
    if (layout.yaxis.type === "category") {
      layout.height = layout.height * 1.5;
      layout.yaxis.categoryarray = layout.yaxis.categoryarray.map(wrapped);
      figure.data.forEach(function (trace) { trace.y = trace.y.map(wrapped); });
    }
  }
  function draw() {
    var style = getComputedStyle(document.documentElement);
    var coloured = source.replace(/"var\\((--[a-z0-9]+)\\)"/g, function (_, name) {
      return JSON.stringify(style.getPropertyValue(name).trim());
    });
    var figures = JSON.parse(coloured);
    Object.keys(figures).forEach(function (id) {
      if (narrow.matches) { narrowed(figures[id]); }
      var options = { responsive: true, displaylogo: false, displayModeBar: false };
      Plotly.react(id, figures[id].data, figures[id].layout, options);
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
