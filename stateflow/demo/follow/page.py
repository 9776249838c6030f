"""The page of a drive, a :class:`string.Template`: its ``$names`` are filled by ``report.render``."""

from stateflow.demo.document import page
from stateflow.demo.page import NARROWED, STYLE, moves_of

_BODY = """<div class="cards">$cards</div>
$differences
<section class="panel">
<h2>The drive</h2>
<p>Above: what a gateway waited for each batch of readings, from when it was sent until its outputs were there, by where
the state was meanwhile. Middle: for each convoy, the site its vehicles are nearest to, and below it the site its state
is at. Below: the share of readings that were answered at the site they come from. Everything is measured; links between
sites are proxies that hold every piece back for half a round trip. They stand between gateways and replicas of other
sites; replicas reach each other, and Spark reaches them, without.</p>
<noscript><p>The charts need JavaScript; the picture next to this file shows them.</p></noscript>
<div id="timeline" role="img" aria-label="Waiting of gateways, places of vehicles and state, share served near"></div>
</section>
<section class="panel">
<h2>Pause of each move</h2>
<p>How long a partition's rows had to wait, against the budget that the autopilot was given.</p>
<div id="pauses" role="img" aria-label="Pause per move against the budget"></div>
</section>
"""

PAGE = page(
    "stateflow demo --follow", _BODY + moves_of("convoy"), narrowed=NARROWED, width="1240px", columns=5, style=STYLE
)
