// The map: sites with their replicas, a dot for each partition, and dots that walk while their state moves.
import { $, colour, h, keyed, s, say, set, still, swatch } from "./dom.js";
import { about, bytes, ms, plural, rate, ranges } from "./format.js";
import { along, bow, layout, slot } from "./layout.js";
import { walked } from "./moves.js";

const WALK_MS = 1100,
  SHUFFLE_MS = 350,
  LABELLED_MAX = 12;

export class Map_ {
  constructor(canvas, { open }) {
    this.canvas = canvas;
    this.open = open;
    this.dots = new Map();
    this.walking = new Set();
    this.svg = s("svg", { role: "group", "aria-label": "Sites, replicas and partitions" });
    this.areas = s("g");
    this.boxes = s("g");
    this.ways = s("g", { "aria-hidden": "true" });
    this.copies = s("g", { "aria-hidden": "true" });
    this.dotLayer = s("g", { "aria-hidden": "true" });
    this.ghosts = s("g", { "aria-hidden": "true" });
    this.svg.append(this.areas, this.boxes, this.copies, this.ways, this.dotLayer, this.ghosts);
    this.none = h("p", { class: "empty" });
    this.none.hidden = true;
    canvas.append(this.svg, this.none);
    new ResizeObserver(() => this.snapshot && canvas.clientWidth !== this.width && this.draw(this.snapshot)).observe(
      canvas,
    );
  }

  draw(snapshot) {
    this.snapshot = snapshot;
    this.width = this.canvas.clientWidth;
    if (this.width < 120) return;
    this.none.hidden = snapshot.replicas.length > 0;
    this.svg.toggleAttribute("hidden", !snapshot.replicas.length);
    if (!snapshot.replicas.length) {
      say(
        this.none,
        "No replica has joined yet. Start one: stateflow replica --site edge-1 --data-dir ./edge-1 --controller " +
          snapshot.controller,
      );
      this.dots.clear();
      this.dotLayer.replaceChildren();
      return;
    }
    const made = layout(snapshot, this.width);
    const key = JSON.stringify([
      this.width,
      made.kind,
      made.box,
      snapshot.replicas.map((replica) => [replica.name, replica.site]),
    ]);
    this.same = key === this.layoutKey;
    this.layoutKey = key;
    this.made = made;
    this.radius = made.box.pitch / 2 - 2.4;
    this.at = new Map();
    for (const site of made.sites) for (const replica of site.replicas) this.at.set(replica.number, replica);
    this.siteAt = new Map(made.sites.map((site) => [site.name, site]));
    set(this.svg, "viewBox", `0 0 ${this.width} ${Math.ceil(made.height)}`);
    set(this.svg, "height", Math.ceil(made.height));
    this.drawAreas();
    this.drawBoxes();
    if (made.kind === "dots") this.drawDots();
    else {
      this.dotLayer.replaceChildren();
      this.dots.clear();
      keyed(this.copies, [], String, null, null);
    }
    this.drawMoves();
  }

  drawAreas() {
    const byName = new Map(this.snapshot.sites.map((site) => [site.name, site]));
    keyed(
      this.areas,
      this.made.sites,
      (site) => site.name,
      () => {
        const group = s("g");
        group.append(
          s("rect", { class: "site-area", rx: 16 }),
          s("text", { class: "site-name" }),
          s("text", { class: "site-note" }),
        );
        return group;
      },
      (group, site) => {
        const [rect, name, note] = group.children,
          told = byName.get(site.name);
        place(rect, site);
        text(name, site.x + 14, site.y + 21, short(site.name, site.w / 9));
        const replicas =
          told.alive === told.replicas
            ? plural(told.replicas, "replica")
            : `${told.alive} of ${plural(told.replicas, "replica")}`;
        text(note, site.x + 14, site.y + 37, short(`${replicas} · ${rate(told.rows_per_s)} rows/s`, site.w / 6.4));
        if (this.made.kind === "sites") {
          note.replaceChildren(
            ...[replicas, plural(told.partitions, "partition"), `${rate(told.rows_per_s)} rows/s`].map((line, number) =>
              s("tspan", { x: site.x + 14, y: site.y + 41 + 16 * number, text: line }),
            ),
          );
        }
      },
    );
  }

  drawBoxes() {
    const shown = this.made.kind === "sites" ? [] : [...this.at.values()];
    keyed(
      this.boxes,
      shown,
      (box) => this.snapshot.replicas[box.number].name,
      (box) => {
        const name = this.snapshot.replicas[box.number].name;
        const group = s("g", {
          class: "replica",
          tabindex: "0",
          role: "button",
          "aria-roledescription": "replica",
          on: {
            click: () => this.open(name),
            keydown: (event) => {
              if (event.key === "Enter" || event.key === " ") {
                event.preventDefault();
                this.open(name);
              }
            },
          },
        });
        group.append(
          s("rect", { class: "replica-box", rx: 10 }),
          s("circle", { class: "lamp", r: 3.6 }),
          s("text", { class: "replica-name" }),
          s("text", { class: "replica-note" }),
          s("g"),
        );
        return group;
      },
      (group, box) => {
        const replica = this.snapshot.replicas[box.number];
        const [rect, lamp, name, note, bars] = group.children;
        group.dataset.state = replica.state;
        place(rect, box);
        set(lamp, "cx", box.x + 14);
        set(lamp, "cy", box.y + 16);
        text(name, box.x + 24, box.y + 20, `${short(replica.name, (box.w - 34) / 7.4)} `);
        const words = noteOf(replica);
        text(note, box.x + 10, box.y + 36, short(words, (box.w - 16) / 6.3));
        this.drawBars(bars, box);
      },
    );
  }

  /** Draws a bar for each operator, its share of the replica's partitions, if there are too many for dots. */
  drawBars(group, box) {
    const operators = this.made.kind === "bars" ? this.snapshot.operators.slice(0, 4) : [];
    const most = Math.max(
      1,
      ...operators.map((operator) => operator.partitions / Math.max(1, this.snapshot.replicas.length)),
    );
    keyed(
      group,
      operators,
      (operator) => operator.name,
      () => s("rect", { rx: 2, height: 6 }),
      (bar, operator) => {
        const number = this.snapshot.operators.indexOf(operator);
        const owned = operator.owners.reduce((sum, owner) => sum + (owner === box.number), 0);
        set(bar, "x", box.x + 10);
        set(bar, "y", box.y + 46 + 11 * number);
        set(bar, "width", Math.max(0, Math.min(1, owned / (2 * most)) * (box.w - 20)).toFixed(1));
        bar.style.fill = colour(number);
      },
    );
  }

  drawDots() {
    const { snapshot, made } = this;
    const used = new Map(),
      seen = new Set();
    const leaving = new Set(snapshot.moves.map((move) => `${move.operator}/${move.partition}`));
    snapshot.operators.forEach((operator, kind) => {
      const unserved = new Set(operator.unserved.flatMap((each) => each.partitions));
      const hot = new Set(
        operator.hot
          .filter((each) => each.rows_per_s > 3 * (operator.rows_per_s / operator.partitions))
          .map((each) => each.partition),
      );
      operator.owners.forEach((owner, partition) => {
        const box = this.at.get(owner);
        if (!box) return;
        const key = `${operator.name}/${partition}`,
          number = used.get(owner) ?? 0;
        used.set(owner, number + 1);
        seen.add(key);
        const to = slot(box, made.box, number);
        let dot = this.dots.get(key);
        if (!dot) {
          dot = { element: s("circle", { r: this.radius }), owner, x: to.x, y: to.y, tx: to.x, ty: to.y };
          dot.title = s("title");
          dot.element.append(dot.title);
          this.dots.set(key, dot);
          this.dotLayer.append(dot.element);
          put(dot.element, dot);
        }
        dot.element.style.fill = dot.element.style.color = colour(kind);
        set(
          dot.element,
          "class",
          ["dot", leaving.has(key) && "leaving", unserved.has(partition) && "unserved", hot.has(partition) && "hot"]
            .filter(Boolean)
            .join(" "),
        );
        const entries = operator.stored[partition];
        say(
          dot.title,
          `${operator.name}, partition ${partition}, at ${snapshot.replicas[owner].name}` +
            (entries === null ? "" : `: ${about(entries)} entries`),
        );
        const moved = dot.owner !== owner;
        dot.owner = owner;
        if (to.x === dot.tx && to.y === dot.ty) return;
        dot.tx = to.x;
        dot.ty = to.y;
        if (still() || !this.same || document.hidden) {
          this.walking.delete(dot);
          dot.x = to.x;
          dot.y = to.y;
          put(dot.element, dot);
          return;
        }
        const ghost = moved ? this.ghostOf(key) : null;
        const from = ghost ?? { x: dot.x, y: dot.y };
        this.walk(dot, from, to, moved ? WALK_MS * (ghost ? 0.5 : 1) : SHUFFLE_MS, moved);
      });
    });
    this.drawCopies(used);
    for (const [key, dot] of this.dots)
      if (!seen.has(key)) {
        dot.element.remove();
        this.walking.delete(dot);
        this.dots.delete(key);
      }
  }

  /** Draws a ring, behind the dots of a replica, for each copy that follows there, to take over. */
  drawCopies(used) {
    const { snapshot, made } = this;
    const copies = snapshot.operators.flatMap((operator, kind) =>
      operator.copies.map(([partition, holder, ready]) => ({
        key: `${operator.name}/${partition}/${holder}`,
        kind,
        holder,
        ready,
        name: operator.name,
        partition,
      })),
    );
    keyed(
      this.copies,
      copies.filter((copy) => this.at.has(copy.holder)),
      (copy) => copy.key,
      () => s("circle", { class: "copy" }, s("title")),
      (ring, copy) => {
        const number = used.get(copy.holder) ?? 0;
        used.set(copy.holder, number + 1);
        const at = slot(this.at.get(copy.holder), made.box, number);
        set(ring, "r", this.radius - 1.5);
        put(ring, at);
        ring.style.stroke = colour(copy.kind);
        ring.style.strokeDasharray = copy.ready ? "none" : "2 2";
        say(
          ring.firstChild,
          `${copy.name}, a copy of partition ${copy.partition}${copy.ready ? "" : ", not ready yet"}`,
        );
      },
    );
  }

  walk(dot, from, to, lasts, bowed) {
    Object.assign(dot, {
      from,
      to,
      by: bowed ? bow(from, to) : { x: (from.x + to.x) / 2, y: (from.y + to.y) / 2 },
      lasts,
      began: performance.now(),
    });
    if (bowed) this.dotLayer.append(dot.element);
    this.walking.add(dot);
    if (!this.frame) this.frame = requestAnimationFrame((now) => this.step(now));
  }

  step(now) {
    this.frame = 0;
    for (const dot of this.walking) {
      const share = Math.min(1, Math.max(0, (now - dot.began) / dot.lasts));
      const eased = share < 0.5 ? 2 * share * share : 1 - (2 - 2 * share) ** 2 / 2;
      Object.assign(dot, along(dot.from, dot.by, dot.to, eased));
      put(dot.element, dot);
      set(dot.element, "r", (this.radius + 2.6 * Math.sin(Math.PI * share) * (dot.lasts > SHUFFLE_MS)).toFixed(2));
      if (share === 1) this.walking.delete(dot);
    }
    if (this.walking.size) this.frame = requestAnimationFrame((next) => this.step(next));
  }

  ghostOf(key) {
    const ghost = this.ghosts.keyedChildren?.get(key);
    return ghost ? { x: ghost.px, y: ghost.py } : null;
  }

  /** Draws a bow between the replicas or sites of a move and, if there are dots, one on it as far along as the copy. */
  drawMoves() {
    const { snapshot, made } = this;
    const number = new Map(snapshot.replicas.map((replica, index) => [replica.name, index]));
    const placeOf = (name) => {
      const index = number.get(name);
      if (index === undefined) return null;
      const site = this.siteAt.get(snapshot.replicas[index].site),
        box = made.kind === "dots" ? this.at.get(index) : site;
      return box && site ? { x: box.x + box.w / 2, site } : null;
    };
    const ways = new Map(),
      least = snapshot.totals.moving > snapshot.moves.length ? "at least " : ""; // a snapshot has not all of many moves
    for (const move of snapshot.moves) {
      const [from, to] = ends(placeOf(move.source), placeOf(move.target));
      if (!from || !to || (from.x === to.x && from.y === to.y)) continue;
      const key = `${from.x},${from.y}>${to.x},${to.y}`;
      const way = ways.get(key) ?? { key, from, to, count: 0, bytes: 0 };
      way.count += 1;
      way.bytes += move.bytes_sent;
      ways.set(key, way);
    }
    keyed(
      this.ways,
      [...ways.values()],
      (way) => way.key,
      () => s("g", {}, s("path", { class: "way" }), s("text", { class: "way-note", "text-anchor": "middle" })),
      (group, way) => {
        const by = bow(way.from, way.to),
          at = along(way.from, by, way.to, 0.5),
          back = way.from.y > way.to.y || (way.from.y === way.to.y && way.from.x > way.to.x);
        set(group.firstChild, "d", `M${way.from.x} ${way.from.y} Q${by.x} ${by.y} ${way.to.x} ${way.to.y}`);
        text(
          group.lastChild,
          at.x,
          at.y + (back ? 13 : -7), // a way in the other direction has its words on the other side
          ways.size > LABELLED_MAX ? "" : `${least}${plural(way.count, "partition")} · ${bytes(way.bytes)}`,
        );
      },
    );
    const walkers =
      made.kind === "dots"
        ? snapshot.moves.filter(
            (move) =>
              this.dots.has(`${move.operator}/${move.partition}`) &&
              ends(placeOf(move.source), placeOf(move.target))[1],
          )
        : [];
    keyed(
      this.ghosts,
      walkers,
      (move) => `${move.operator}/${move.partition}`,
      (move) => {
        const dot = s("circle", { class: "ghost", r: this.radius + 1.4 });
        dot.share = 0;
        return dot;
      },
      (ghost, move) => {
        const dot = this.dots.get(`${move.operator}/${move.partition}`),
          to = ends(placeOf(move.source), placeOf(move.target))[1];
        ghost.style.fill = colour(snapshot.operators.findIndex((operator) => operator.name === move.operator));
        ghost.share = Math.max(ghost.share, walked(move));
        const at = along(dot, bow(dot, to), to, ghost.share);
        ghost.px = at.x;
        ghost.py = at.y;
        ghost.style.transition = still() ? "none" : "transform 1s linear";
        ghost.style.transform = `translate(${at.x.toFixed(1)}px, ${at.y.toFixed(1)}px)`;
      },
    );
  }
}

/** The ends of a bow: on the facing edges of sites in two rows, above both sites within one row. */
function ends(from, to) {
  if (!from || !to) return [null, null];
  const above = (place) => ({ x: place.x, y: place.site.y - 3 }),
    below = (place) => ({ x: place.x, y: place.site.y + place.site.h + 3 });
  if (from.site.y + from.site.h < to.site.y) return [below(from), above(to)];
  if (to.site.y + to.site.h < from.site.y) return [above(from), below(to)];
  return [above(from), above(to)];
}

function noteOf(replica) {
  const words = [plural(replica.partitions, "partition")];
  if (replica.resting) words.push("maintenance");
  if (replica.state === "alive") words.push(`${rate(replica.rows_per_s)} rows/s`);
  else words.push(replica.state);
  return words.join(" · ");
}

const short = (words, most) => (words.length > most ? `${words.slice(0, Math.max(3, Math.floor(most) - 1))}…` : words);
function place(rect, { x, y, w, h: height }) {
  set(rect, "x", x);
  set(rect, "y", y);
  set(rect, "width", w);
  set(rect, "height", height);
}
function put(element, { x, y }) {
  element.setAttribute("cx", x.toFixed(1));
  element.setAttribute("cy", y.toFixed(1));
}
function text(element, x, y, words) {
  set(element, "x", x);
  set(element, "y", y);
  say(element, words);
}

export function drawLegend(snapshot) {
  keyed(
    $("legend"),
    snapshot.operators,
    (operator) => operator.name,
    (operator) =>
      h(
        "li",
        {},
        swatch(snapshot.operators.indexOf(operator)),
        h("span", { text: operator.name }),
        h("span", { class: "muted num" }),
      ),
    (item, operator) => {
      item.firstChild.style.background = colour(snapshot.operators.indexOf(operator));
      const lost = operator.unserved.flatMap((each) => each.partitions);
      say(
        item.lastChild,
        lost.length
          ? `not served: ${ranges(lost)}`
          : `${plural(operator.partitions, "partition")}` +
              (operator.p99_ms === null ? "" : `, p99 ${ms(operator.p99_ms)}`),
      );
    },
  );
}
