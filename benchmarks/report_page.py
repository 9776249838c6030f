"""The template of the report's page. ``report.render`` fills the ``$names`` in it."""

from stateflow.demo.charts import page

_BODY = """<div class="cards">$cards</div>
<section class="panel">
<h2>Targets</h2>
<p>Targets right of the dotted line are met. Bars show the range over the runs where the record has one; the axis is
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
"""

_NARROWED = """  function wrapped(name) {
    var lines = [""];
    name.split(" ").forEach(function (word) {
      var last = lines[lines.length - 1];
      if (last && (last + " " + word).length > 24) { lines.push(word); }
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
      layout.height = layout.height * 1.9;
      layout.yaxis.categoryarray = layout.yaxis.categoryarray.map(wrapped);
      figure.data.forEach(function (trace) { trace.y = trace.y.map(wrapped); });
    }
  }
"""

_STYLE = """:root { --a: #2372d9; --b: #e06c00; --c: #1d8f7a; --d: #8a5cc2; --e: #b8860b; --f: #c2477f; }
@media (prefers-color-scheme: dark) {
  :root { --a: #5ea8ff; --b: #ff9a3c; --c: #4cc9b0; --d: #b794f4; --e: #e0b84c; --f: #f27eb2; }
}
td.good { color: var(--good); }
td.bad, .wrong { color: var(--bad) !important; }
.panel { padding-bottom: 14px; scroll-margin-top: 8px; }
.panel h3 { font-size: .95rem; font-weight: 600; margin: 18px 0 2px; }
.scroll { margin-top: 10px; }
td.name { white-space: normal; min-width: 15em; }
th:first-child, td:first-child { color: inherit; }
a { color: var(--p99); text-decoration: none; }
pre { overflow-x: auto; font-size: .78rem; line-height: 1.35; max-height: 30em; }
dl { grid-template-columns: max-content minmax(0, 1fr); }
"""

PAGE = page("stateflow evaluation", _BODY, narrowed=_NARROWED, width="1100px", columns=4, style=_STYLE)
