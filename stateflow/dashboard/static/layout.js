// Layout of sites, replicas and partitions: computes positions from numbers, without touching the page.
const GAP = 26,
  PAD = 14,
  HEAD = 46,
  BOX_HEAD = 44,
  BOX_GAP = 10;
// More than DOTS_MAX partitions, or DOTTED_MAX replicas, are drawn as bars, one for each operator at a replica. With
// more than REPLICAS_MAX replicas, only sites are drawn.
const DOTS_MAX = 2048,
  DOTTED_MAX = 32,
  REPLICAS_MAX = 120;
const HUB = /cloud|core|central|hub|dc/i;

/** snapshot, width → {kind, width, height, sites: [{name, x, y, w, h, replicas: [{number, x, y, w, h, columns}]}]}. */
export function layout(snapshot, width) {
  const partitions = snapshot.totals.partitions;
  const kind =
    snapshot.replicas.length > REPLICAS_MAX
      ? "sites"
      : partitions > DOTS_MAX || snapshot.replicas.length > DOTTED_MAX
        ? "bars"
        : "dots";
  const owned = ownedBy(snapshot);
  const most = Math.max(1, ...owned);
  const pitch = partitions <= 96 ? 19 : partitions <= 400 ? 16 : 13;
  const by = new Map(snapshot.sites.map((site) => [site.name, []]));
  snapshot.replicas.forEach((replica, number) => by.get(replica.site)?.push(number));
  const box = boxOf(kind, most, width, snapshot.operators.length, pitch);
  const sites = snapshot.sites.map((site) => area(site.name, by.get(site.name) ?? [], box, kind, width));
  const rows = intoRows(sites, width);
  let y = GAP / 2;
  for (const row of rows) {
    const used = row.reduce((sum, site) => sum + site.w, 0);
    const space = (width - used) / (row.length + 1);
    let x = space;
    const tall = Math.max(...row.map((site) => site.h));
    for (const site of row) {
      place(site, x, y, box);
      x += site.w + space;
    }
    y += tall + GAP * 1.6;
  }
  return { kind, width, height: Math.max(160, y - GAP), sites, box };
}

/** The number of dots and rings of each replica. */
export function ownedBy(snapshot) {
  const owned = snapshot.replicas.map(() => 0);
  for (const operator of snapshot.operators) {
    for (const owner of operator.owners) if (owner >= 0) owned[owner] += 1;
    for (const [, holder] of operator.copies) if (holder >= 0) owned[holder] += 1;
  }
  return owned;
}

function boxOf(kind, most, width, operators, pitch) {
  if (kind === "sites") return { w: 0, h: 0, columns: 0, pitch };
  const wide = kind === "dots" ? 222 : 150;
  const w = Math.max(60, Math.min(width < 520 ? width - 4 * PAD : wide, width - 2 * PAD - 8));
  const columns = Math.max(1, Math.floor((w - 18) / pitch));
  const lines = kind === "dots" ? Math.max(2, Math.ceil(most / columns)) : 0;
  const h = kind === "dots" ? BOX_HEAD + lines * pitch + 8 : BOX_HEAD + Math.min(4, Math.max(1, operators)) * 11 + 8;
  return { w, h, columns, pitch };
}

function area(name, replicas, box, kind, width) {
  if (kind === "sites")
    return {
      name,
      replicas: replicas.map((number) => ({ number })),
      w: Math.min(200, width - 2 * PAD),
      h: 92,
      across: 1,
    };
  const most = Math.max(1, Math.floor((width - 2 * PAD + BOX_GAP) / (box.w + BOX_GAP)));
  const across = Math.min(
    most,
    Math.max(1, kind === "dots" ? Math.ceil(Math.sqrt(replicas.length * 1.4)) : Math.min(2, replicas.length)),
  );
  const down = Math.max(1, Math.ceil(replicas.length / across));
  const used = Math.min(across, Math.max(1, replicas.length));
  return {
    name,
    replicas: replicas.map((number) => ({ number })),
    across,
    w: 2 * PAD + used * box.w + (used - 1) * BOX_GAP,
    h: HEAD + down * box.h + (down - 1) * BOX_GAP + PAD,
  };
}

/** Puts the hub, if there is one, into the first row, and the other sites into rows below it. */
function intoRows(sites, width) {
  const hub = sites.length > 2 ? sites.find((site) => HUB.test(site.name)) : undefined;
  const rest = sites.filter((site) => site !== hub);
  const rows = hub ? [[hub]] : [];
  let row = [],
    used = 0;
  for (const site of rest) {
    if (row.length && used + site.w + GAP * (row.length + 1) > width) {
      rows.push(row);
      row = [];
      used = 0;
    }
    row.push(site);
    used += site.w;
  }
  if (row.length) rows.push(row);
  if (!hub && rows.length === 1 && sites.length === 4) return [sites.slice(0, 2), sites.slice(2)];
  return rows;
}

function place(site, x, y, box) {
  site.x = x;
  site.y = y;
  site.replicas.forEach((replica, number) => {
    replica.x = x + PAD + (number % site.across) * (box.w + BOX_GAP);
    replica.y = y + HEAD + Math.floor(number / site.across) * (box.h + BOX_GAP);
    replica.w = box.w;
    replica.h = box.h;
  });
}

/** The middle of the dot that is the `number`-th of its replica. */
export function slot(replica, box, number) {
  const { pitch, columns } = box;
  return {
    x: replica.x + 9 + pitch / 2 + (number % columns) * pitch,
    y: replica.y + BOX_HEAD + pitch / 2 + Math.floor(number / columns) * pitch,
  };
}

/** The control point of a bow (a quadratic Bézier curve) from one point to another. */
export function bow(from, to) {
  const dx = to.x - from.x,
    dy = to.y - from.y,
    far = Math.hypot(dx, dy) || 1;
  const lift = Math.min(90, far * 0.22),
    up = Math.abs(dy) < 20 ? lift : 0; // between two rows there is no room above
  const side = dx >= 0 ? 1 : -1;
  return { x: (from.x + to.x) / 2 + (dy / far) * lift * side, y: (from.y + to.y) / 2 - (Math.abs(dx) / far) * up };
}

/** The point at `share` of the way along a bow. */
export function along(from, by, to, share) {
  const rest = 1 - share;
  return {
    x: rest * rest * from.x + 2 * rest * share * by.x + share * share * to.x,
    y: rest * rest * from.y + 2 * rest * share * by.y + share * share * to.y,
  };
}
