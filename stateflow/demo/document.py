"""Pages that stand alone: a heading, cards and charts, in light and dark, on a desk and on a telephone.

``page`` returns the text of a :class:`string.Template`. The code that renders it fills ``$headline``, ``$verdict``,
``$subtitle``, ``$cards``, ``$figures``, ``$plotly`` (the rest of a script element after its name: ``src="…">``, or
``>`` and the program) and the names that its own body has.
"""

from __future__ import annotations

from string import Template

_DOCUMENT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>@title: $headline</title>
<style>
:root {
  --page: #f4f5f8; --card: #ffffff; --ink: #14181f; --soft: #5b6472; --line: #d9dde4; --grid: #e8ebf0;
  --p50: #8fbdf2; --p99: #2372d9; --max: #123f7d; --batch: #a3abb8; --move: #e06c00;
  --good: #1a7f37; --bad: #c9252d;
  --a: #4e84c4; --b: #58a89a; --c: #a98bc9; --d: #c9a24a; --e: #c9798f; --f: #8c96a5;
}
@@media (prefers-color-scheme: dark) {
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
main { max-width: @width; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: clamp(1.4rem, 3.4vw, 2.1rem); line-height: 1.2; margin: 0 0 8px; letter-spacing: -0.015em; }
h1::before { content: ""; display: inline-block; width: .5em; height: .5em; border-radius: 50%;
  margin-right: .4em; vertical-align: .1em; background: var(--good); }
h1.bad::before { background: var(--bad); }
.subtitle { color: var(--soft); margin: 0 0 22px; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(@columns, 1fr); gap: 12px; }
.card, .panel { background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
.card { padding: 14px 16px 12px; }
.card h2 { font-size: .82rem; font-weight: 500; color: var(--soft); margin: 0; }
.card .value { font-size: 1.65rem; font-weight: 650; line-height: 1.25; margin: 2px 0 0;
  font-variant-numeric: tabular-nums; letter-spacing: -0.01em; }
.card .note { font-size: .86rem; color: var(--soft); margin: 0; overflow-wrap: anywhere; }
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
@@media (max-width: 900px) {
  .cards { grid-template-columns: repeat(2, 1fr); }
  .two { grid-template-columns: minmax(0, 1fr); }
}
@@media (max-width: 600px) {
  main { padding: 18px 10px 32px; }
  .card { padding: 10px 12px; }
  .card .value { font-size: 1.35rem; }
  .panel { padding: 14px 10px 6px; }
  .scroll { margin: 0 -10px; padding: 0 10px 8px; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: 8px; }
}
@@media print { .panel, .card { break-inside: avoid; } }
@style</style>
</head>
<body>
<main>
<h1 class="$verdict">$headline</h1>
<p class="subtitle">$subtitle</p>
@body</main>
<script $plotly</script>
<script type="application/json" id="figures">$figures</script>
<script>
(function () {
  "use strict";
  var source = document.getElementById("figures").textContent;
  var scheme = window.matchMedia("(prefers-color-scheme: dark)");
  var narrow = window.matchMedia("(max-width: 600px)");
@narrowed  function draw() {
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


class _Document(Template):
    delimiter = "@"


def page(title: str, body: str, *, narrowed: str, width: str, columns: int, style: str = "") -> str:
    """Returns the text of a page.

    Args:
        narrowed: JavaScript, ``function narrowed(figure)`` that fits a figure to a telephone.
    """
    parts = {"title": title, "body": body, "narrowed": narrowed, "width": width, "columns": columns, "style": style}
    return _Document(_DOCUMENT).substitute(parts)
