"""The page of the demo, a :class:`string.Template`: its ``$names`` are filled by ``report.render``."""

from stateflow.demo.document import page


def moves_of(what: str) -> str:
    """Returns the table of moves, and below it all settings.

    Args:
        what: the kind of thing that moves.
    """
    return f"""<section class="panel">
<h2>Moves</h2>
<div class="scroll"><table>
<thead><tr>
<th class="number">#</th><th class="number">{what}</th><th>from → to</th>
<th class="number wide">start, s</th><th class="number wide">took, s</th>
<th class="number wide">warm</th><th class="number wide">reused</th><th class="number wide">delta</th>
<th class="number wide">rounds</th>
<th class="number">predicted, ms</th><th class="number">pause, ms</th><th>state</th>
</tr></thead>
<tbody>$moves</tbody>
</table></div>
</section>
<details class="panel"><summary>Settings and versions</summary>
<div class="two"><dl>$settings</dl><dl>$versions</dl></div></details>
"""


_BODY = """<div class="cards">$cards</div>
$differences
<section class="panel">
<h2>Timeline</h2>
<p>Requests to replicas in windows of 250 ms, each micro-batch at its end, each move at the moment of its
pause. The bars in the middle show how long every move took; below are the rows each replica processed. Drag to
zoom, double-click to reset, hover over a mark for details.</p>
<noscript><p>The charts need JavaScript; the picture next to this file shows the timeline.</p></noscript>
<div id="timeline" role="img" aria-label="Latency, moves and throughput over time"></div>
</section>
<div class="two">
<section class="panel">
<h2>Pause of each move</h2>
<p>Bar: how long the partition's rows waited. Tick: the expected pause, the median of similar moves. Dot: the promised
pause, which is checked against the budget; a pause longer than the tick is normal, one longer than the dot is not.</p>
<div id="pauses" role="img" aria-label="Pause per move against its prediction"></div>
</section>
<section class="panel">
<h2>Bytes of each move</h2>
<p>The bulk is copied while the source keeps serving, or is already at the target from an earlier stay; only the
changes made since then follow.</p>
<div id="bytes" role="img" aria-label="Bytes copied warm and as changes per move"></div>
</section>
</div>
"""

NARROWED = """  function narrowed(figure) {
    var layout = figure.layout;
    layout.font.size = 11;
    layout.legend.font.size = 11;
    layout.margin.l = 44;
    layout.legend.entrywidth = 0.48;
    layout.legend.entrywidthmode = "fraction";
    layout.dragmode = false;
    figure.data.forEach(function (trace) {
      if (trace.mode === "lines+markers") { trace.mode = "lines"; }
      if (trace.marker && trace.marker.size) { trace.marker.size *= 0.65; }
    });
  }
"""

STYLE = """@media (max-width: 900px) { .card:last-child { grid-column: 1 / -1; } }
@media (max-width: 600px) { .wide, th:first-child, td:first-child { display: none; }
  th, td { padding: 6px 4px; } td.state { min-width: 0; } }
"""

PAGE = page("stateflow demo", _BODY + moves_of("partition"), narrowed=NARROWED, width="1240px", columns=5, style=STYLE)
