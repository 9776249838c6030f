"""The page of a drive, a :class:`string.Template`: its ``$names`` are filled by ``report.render``."""

from stateflow.demo.document import page
from stateflow.demo.page import NARROWED, STYLE, moves_of

_BODY = """<div class="cards">$cards</div>
$differences
<section class="panel">
<h2>The drive</h2>
<p>Top: how long a gateway waited for each batch of readings, from sending it to receiving its outputs, by where the
state was. Middle: for each convoy, the site nearest to its vehicles, and below it the site of its state. Bottom: the
share of readings answered at the site they come from. Everything is measured; links between sites are proxies that
delay every piece of data by half a round trip. They sit between gateways and replicas of other sites; replicas reach
each other, and Spark reaches them, without proxies.</p>
<noscript><p>The charts need JavaScript; the picture next to this file shows them.</p></noscript>
<div id="timeline" role="img" aria-label="Gateway wait times, sites of vehicles and state, share served locally"></div>
</section>
<section class="panel">
<h2>Pause of each move</h2>
<p>How long a partition's rows waited, against the autopilot's budget.</p>
<div id="pauses" role="img" aria-label="Pause per move against the budget"></div>
</section>
"""

PAGE = page(
    "stateflow demo --follow", _BODY + moves_of("convoy"), narrowed=NARROWED, width="1240px", columns=5, style=STYLE
)
