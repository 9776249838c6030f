// The tables below the map: operators, nodes, batches and jobs, a key's state, the ledger, checkpoints.
import { $, h, say, swatch } from "./dom.js";
import { TONES, about, ago, bytes, count, ms, pace, plural, rate, seconds, time } from "./format.js";
import { get, post } from "./api.js";
import { Table, meterCell, stateCell } from "./table.js";

const SAID = {
  pause: "paused",
  resume: "resumed",
  cancel: "is cancelled",
  retry: "is tried again",
  run: "runs",
};

/** Makes a function that notes a question, and returns whether no later one was asked: only then is its answer shown. */
function questions() {
  let asked = 0;
  return () => {
    const own = (asked += 1);
    return () => own === asked;
  };
}

export class Panels {
  /** me: the user, and what the user may do. tell: shows that something was done, or why not. */
  constructor({ me, tell, open, begin }) {
    Object.assign(this, { me, tell, open });
    const change = (name, label, verb, shown, tone = "") => ({
      label,
      tone,
      shown,
      act: (row) => this.change(name, row, verb),
    });
    this.operators = new Table({
      label: "Operators",
      keyOf: (row) => row.name,
      empty: "No operator is deployed yet: stateflow deploy package.module:Class",
      columns: [
        {
          head: "Operator",
          draw: (cell, row) => {
            if (cell.said !== row.name) {
              cell.said = row.name;
              cell.replaceChildren(h("span", { class: "state" }), h("span", { class: "sub mono", text: row.target }));
              cell.firstChild.replaceWith(h("span", {}, swatch(row.number), ` ${row.name}`));
              cell.querySelector(".swatch").style.display = "inline-block";
            }
          },
        },
        { head: "Partitions", num: true, cell: (row) => count(row.partitions) },
        { head: "Rows/s", num: true, cell: (row) => rate(row.rows_per_s) },
        { head: "Median", num: true, cell: (row) => ms(row.p50_ms) },
        { head: "p99", num: true, cell: (row) => ms(row.p99_ms) },
        { head: "Entries", num: true, cell: (row) => about(row.entries) },
        { head: "On disk", num: true, cell: (row) => bytes(row.bytes) },
        {
          head: "Hot partitions",
          cell: (row) =>
            row.hot.map((each) => `${each.partition} (${rate(each.rows_per_s)}/s, ${each.owner})`).join(", ") || "–",
        },
        {
          head: "Slowest calls of 5 min",
          cell: (row) =>
            row.slow
              .slice(0, 3)
              .map((each) => `${ms(each.total_ms)}, ${plural(each.rows, "row")} (${each.replica})`)
              .join("; ") || "–",
        },
        {
          head: "Standbys",
          cell: (row) =>
            row.standbys
              ? `${count(row.standbys)}, ` +
                (row.standbys_behind ? `${row.standbys_behind} not ready` : `${bytes(row.standby_lag_bytes)} behind`)
              : "none",
        },
      ],
      acts: [
        { label: "Move…", shown: () => this.me.may.migrate, act: (row) => begin("migrate", { operator: row.name }) },
      ],
    });
    this.nodes = new Table({
      label: "Nodes",
      keyOf: (row) => row.name,
      filter: "Filter by name, site, address or state",
      empty: "No replica has joined yet: stateflow replica --site edge-1 --data-dir ./edge-1",
      columns: [
        { head: "Replica", cell: (row) => row.name, sub: (row) => row.address },
        { head: "Site", cell: (row) => row.site },
        { head: "State", draw: stateCell(TONES, (row) => row.state) },
        { head: "Heard", num: true, cell: (row) => ago(row.heard_s) },
        { head: "Partitions", num: true, cell: (row) => count(row.partitions) },
        { head: "Copies", num: true, cell: (row) => count(row.standbys) },
        { head: "Rows/s", num: true, cell: (row) => rate(row.rows_per_s) },
        { head: "Entries", num: true, cell: (row) => about(row.entries) },
        { head: "Room", num: true, cell: (row) => bytes(row.room_bytes) },
        { head: "Weight", num: true, cell: (row) => count(row.weight) },
        { head: "Version", cell: (row) => row.version, sub: (row) => (row.resting ? "in maintenance" : "") },
      ],
      acts: [
        { label: "Look", shown: () => true, act: (row) => open(row.name) },
        {
          label: "Drain…",
          shown: (row) => this.me.may.drain && row.partitions > 0,
          act: (row) => begin("drain", { to: row.name }),
        },
      ],
    });
    this.links = new Table({
      label: "Links between sites",
      keyOf: (row) => `${row.source} → ${row.target}`,
      empty: "No link was measured yet. The controller measures links that policies need, and moves measure theirs.",
      columns: [
        { head: "From", cell: (row) => row.source },
        { head: "To", cell: (row) => row.target },
        { head: "Round trip", num: true, cell: (row) => ms(row.rtt_ms) },
        {
          head: "Measured by moves",
          num: true,
          cell: (row) => (row.bytes_per_s === null ? "–" : `${bytes(row.bytes_per_s)}/s`),
        },
      ],
    });
    const open_ = (row) => row.state === "RUNNING" || row.state === "PAUSED";
    this.reconfigurations = new Table({
      label: "Reconfigurations",
      keyOf: (row) => row.id,
      empty: "Nothing was moved yet.",
      columns: [
        {
          head: "Reconfiguration",
          cell: (row) => row.id,
          sub: (row) => `${row.kind} of ${row.operator}, by ${row.by || "a controller"}`,
        },
        { head: "State", draw: stateCell(TONES, (row) => row.state) },
        {
          head: "Moves",
          draw: meterCell((row) => ({
            done: row.completed + row.failed + row.cancelled,
            total: row.moves,
            words: `${row.completed} of ${row.moves}${row.failed ? `, ${row.failed} failed` : ""}`,
          })),
        },
        { head: "Sent", num: true, cell: (row) => bytes(row.bytes_sent) },
        { head: "Longest pause", num: true, cell: (row) => ms(row.pause_ms) },
        {
          head: "Left",
          num: true,
          cell: (row) => (row.remaining_s === null ? "–" : `about ${seconds(row.remaining_s)}`),
        },
        { head: "Began", num: true, cell: (row) => time(row.created_us) },
      ],
      acts: [
        change("batch", "Pause", "pause", (row) => row.state === "RUNNING" && this.me.may.pause),
        change("batch", "Resume", "resume", (row) => row.state === "PAUSED" && this.me.may.resume),
        change("batch", "Cancel", "cancel", (row) => open_(row) && this.me.may.cancel, "danger"),
        change("batch", "Retry", "retry", (row) => row.state === "FAILED" && this.me.may.retry),
      ],
    });
    const ended = (row) => ["DONE", "FAILED", "CANCELLED"].includes(row.status);
    const own = (row) => !row.bid.includes("/");
    this.batches = new Table({
      label: "Other batches",
      keyOf: (row) => row.bid,
      empty:
        "No other batch is in the ledger. Restarts, checkpoints of everything, verifications and your own batches appear here.",
      columns: [
        { head: "Batch", cell: (row) => row.bid, sub: (row) => row.name },
        { head: "State", draw: stateCell(TONES, (row) => row.status) },
        {
          head: "Done",
          draw: meterCell((row) => ({
            done: row.succeeded + row.failed + row.cancelled,
            total: row.total_entities,
            words:
              `${count(row.succeeded)} of ${count(row.total_entities)}` +
              (row.failed ? `, ${count(row.failed)} failed` : ""),
          })),
        },
        { head: "Pace", num: true, cell: (row) => pace(row.pace) },
        { head: "Will end", num: true, cell: (row) => time(row.eta) },
        { head: "Began", num: true, cell: (row) => time(row.created_us) },
      ],
      acts: [
        change("batch", "Pause", "pause", (row) => own(row) && row.status === "IN_PROGRESS" && this.me.may.batch),
        change("batch", "Resume", "resume", (row) => own(row) && row.status === "PAUSED" && this.me.may.batch),
        change(
          "batch",
          "Cancel",
          "cancel",
          (row) => !ended(row) && this.me.may[row.bid.startsWith("restores/") ? "restore" : "batch"],
          "danger",
        ),
      ],
    });
    this.jobs = new Table({
      label: "Jobs",
      keyOf: (row) => row.name,
      empty: 'Nothing is done by itself: stateflow job create nightly --schedule "every 3600" --do checkpoint',
      columns: [
        { head: "Job", cell: (row) => row.name, sub: (row) => `${row.do} ${row.operator || "all operators"}` },
        { head: "Schedule", cell: (row) => row.schedule },
        { head: "Next", num: true, cell: (row) => (row.paused ? "paused" : time(row.next_us)) },
        { head: "Last run", draw: stateCell(TONES, (row) => row.runs[0]?.state ?? "none yet") },
        { head: "Outcome", cell: (row) => row.error || (row.runs[0]?.note ?? "") },
      ],
      acts: [
        change("job", "Run now", "run", () => this.me.may.job),
        change("job", "Pause", "pause", (row) => !row.paused && this.me.may.job),
        change("job", "Resume", "resume", (row) => row.paused && this.me.may.job),
      ],
    });
    this.build();
  }

  async change(name, row, verb) {
    const called = row.bid ?? (name === "job" ? row.name : `reconfiguration/${row.id}`);
    try {
      await post(name, { name: called, change: verb });
      this.tell(`${called}: ${SAID[verb]}`);
    } catch (error) {
      this.tell(error.line ?? String(error), true);
    }
  }

  build() {
    $("panel-operators").replaceChildren(this.operators.element);
    $("panel-nodes").replaceChildren(this.nodes.element, h("h3", { text: "Links between sites" }), this.links.element);
    this.noBatches = h("p", {
      class: "empty",
      text: "Batches are in the ledger, which this page does not know: start the dashboard with --ledger.",
    });
    this.autopilot = h("p", { class: "hint" });
    $("panel-work").replaceChildren(
      this.autopilot,
      h("h3", { text: "Reconfigurations" }),
      this.reconfigurations.element,
      h("h3", { text: "Other batches" }),
      this.noBatches,
      this.batches.element,
      h("h3", { text: "Jobs" }),
      this.jobs.element,
    );
    this.buildState();
    this.buildLedger();
    this.buildCheckpoints();
  }

  show(snapshot) {
    this.snapshot = snapshot;
    const shown = (id) => !$(id).hidden;
    if (shown("panel-operators"))
      this.operators.show(snapshot.operators.map((operator, number) => ({ ...operator, number })));
    if (shown("panel-nodes")) {
      this.nodes.show(snapshot.replicas);
      this.links.show(snapshot.links);
    }
    if (shown("panel-work")) {
      this.reconfigurations.show(snapshot.reconfigurations);
      say(this.autopilot, followed(snapshot.autopilot));
      this.noBatches.hidden = snapshot.batches !== null;
      this.batches.element.hidden = snapshot.batches === null;
      this.batches.show(snapshot.batches ?? []);
      this.jobs.show(snapshot.jobs ?? []);
    }
    const names = snapshot.operators.map((operator) => operator.name);
    if (this.offered !== names.join("\n")) {
      this.offered = names.join("\n");
      this.offerOperators(names);
    }
  }

  // -- a key's state ------------------------------------------------------------------------------------------

  buildState() {
    this.askStates = questions();
    this.askEntries = questions();
    this.operator = h("select", { id: "state-operator", on: { change: () => this.offerStates() } });
    this.state = h("select", { id: "state-state" });
    this.key = h("input", { id: "state-key", autocomplete: "off", spellcheck: "false", required: true });
    this.keyHint = h("p", { class: "hint", id: "key-hint" });
    this.key.setAttribute("aria-describedby", "key-hint");
    this.entries = new Table({
      label: "Entries of the key",
      keyOf: (row) => row.number,
      empty: "",
      columns: [
        { head: "Map key", cell: (row) => row.map_key },
        { head: "Value", cell: (row) => row.value },
      ],
    });
    this.entries.element.hidden = true;
    this.answer = h("p", { class: "empty", role: "status" });
    const form = h(
      "form",
      {
        class: "row",
        on: {
          submit: (event) => {
            event.preventDefault();
            this.lookUp();
          },
        },
      },
      h("div", {}, h("label", { for: "state-operator", text: "Operator" }), this.operator),
      h("div", {}, h("label", { for: "state-state", text: "State" }), this.state),
      h("div", {}, h("label", { for: "state-key", text: "Key" }), this.key),
      h("button", { class: "primary", type: "submit", text: "Look up" }),
    );
    $("panel-state").replaceChildren(
      ...(this.me.may.state
        ? [form, this.keyHint]
        : [h("p", { class: "empty", text: "State is read with a token of the role query, data or admin." })]),
      this.answer,
      this.entries.element,
    );
  }

  offerOperators(names) {
    const before = this.operator.value;
    this.operator.replaceChildren(...names.map((name) => h("option", { value: name, text: name })));
    if (names.includes(before)) this.operator.value = before;
    if (names.length && this.me.may.state) this.offerStates();
  }

  async offerStates() {
    const newest = this.askStates();
    try {
      const found = await get("states", { operator: this.operator.value });
      if (!newest()) return;
      this.state.replaceChildren(
        ...found.states.map((each) => h("option", { value: each.name, text: `${each.name} (${each.kind})` })),
      );
      say(this.keyHint, `Keys are of ${found.key.join(", ")}: as text, or as JSON for other types, such as 7 or ["a", 1].`);
    } catch (error) {
      if (newest()) say(this.answer, error.line ?? String(error));
    }
  }

  async lookUp() {
    const newest = this.askEntries();
    say(this.answer, "…");
    this.entries.element.hidden = true;
    const asked = { operator: this.operator.value, state: this.state.value, key: this.key.value };
    try {
      const found = await post("state", asked);
      if (!newest()) return;
      if (!found.entries.length)
        return say(this.answer, `${asked.operator} has nothing in ${asked.state} for the key ${asked.key}.`);
      const operator = this.snapshot?.operators.find((each) => each.name === asked.operator);
      const owner = this.snapshot?.replicas[operator?.owners[found.partition]]?.name;
      say(
        this.answer,
        `Partition ${found.partition}${owner ? `, at ${owner}` : ""}: ` +
          `${plural(found.entries.length, "entry", "entries")}${found.more ? ", and more" : ""}.`,
      );
      this.entries.element.hidden = false;
      this.entries.show(found.entries.map((entry, number) => ({ ...entry, number })));
    } catch (error) {
      if (newest()) say(this.answer, error.line ?? String(error));
    }
  }

  // -- ledger, checkpoints ------------------------------------------------------------------------------------

  buildLedger() {
    const words = h("input", {
      id: "ledger-words",
      type: "search",
      autocomplete: "off",
      placeholder: "an item, or words: FAILED edge-1",
    });
    const answer = h("p", {
      class: "empty",
      role: "status",
      text: "The ledger records all decisions and their outcomes. Search its newest records, or name an item.",
    });
    const records = new Table({
      label: "Records",
      keyOf: (row) => row.record,
      empty: "",
      columns: [
        { head: "Record", num: true, cell: (row) => count(row.record) },
        { head: "Time", num: true, cell: (row) => time(row.at_us) },
        { head: "State", draw: stateCell({ ...TONES, PROCESSING: "busy", NEW: "busy" }, (row) => row.state) },
        { head: "Item", cell: (row) => row.item, sub: (row) => `${row.application}, by ${row.author}` },
        { head: "What", cell: (row) => (row.payload.length > 280 ? `${row.payload.slice(0, 280)}…` : row.payload) },
      ],
    });
    records.element.hidden = true;
    const ask = questions();
    const search = async () => {
      const newest = ask();
      try {
        const found = await get("ledger", { q: words.value });
        if (!newest()) return;
        say(
          answer,
          found.item
            ? `${found.item}: ${found.state.toLowerCase()}, ${plural(found.records.length, "record")}.`
            : `${plural(found.records.length, "record")} of the newest ${count(found.searched)}.`,
        );
        records.element.hidden = !found.records.length;
        records.show(found.records);
      } catch (error) {
        if (!newest()) return;
        records.element.hidden = true;
        say(answer, error.line ?? String(error));
      }
    };
    const form = h(
      "form",
      {
        class: "row",
        role: "search",
        on: {
          submit: (event) => {
            event.preventDefault();
            search();
          },
        },
      },
      h("div", {}, h("label", { for: "ledger-words", text: "Search" }), words),
      h("button", { class: "primary", type: "submit", text: "Search" }),
    );
    $("panel-ledger").replaceChildren(
      ...(this.me.ledger
        ? [form, answer, records.element]
        : [
            h("p", {
              class: "empty",
              text: "This page knows no ledger: start the dashboard with --ledger, or on the controller.",
            }),
          ]),
    );
  }

  buildCheckpoints() {
    const answer = h("p", { class: "empty", role: "status" });
    const table = new Table({
      label: "Checkpoints",
      keyOf: (row) => row.operator,
      empty: "There is no checkpoint yet.",
      columns: [
        { head: "Operator", cell: (row) => row.operator },
        { head: "Partitions with a checkpoint", num: true, cell: (row) => count(row.partitions) },
        { head: "Checkpoints", num: true, cell: (row) => count(row.checkpoints) },
        { head: "Newest", num: true, cell: (row) => time(row.newest_us) },
        { head: "Oldest of the partitions' newest checkpoints", num: true, cell: (row) => time(row.oldest_us) },
      ],
    });
    const look = h("button", {
      type: "button",
      text: "Read the store",
      on: {
        click: async () => {
          try {
            const found = await get("checkpoints");
            table.show(found.operators);
            say(
              answer,
              found.savepoints.length ? `Savepoints: ${found.savepoints.join(", ")}` : "There are no savepoints.",
            );
          } catch (error) {
            say(answer, error.line ?? String(error));
          }
        },
      },
    });
    const sweep = (chore, label) =>
      h("button", {
        type: "button",
        text: label,
        on: {
          click: async () => {
            try {
              this.tell(`${(await post("sweep", { chore })).batch} has begun: see Batches and jobs`);
            } catch (error) {
              this.tell(error.line ?? String(error), true);
            }
          },
        },
      });
    const row = h(
      "div",
      { class: "row" },
      this.me.checkpoints ? look : null,
      ...(this.me.may.sweep
        ? [sweep("checkpoint", "Take a checkpoint of everything"), sweep("verify", "Verify all state")]
        : []),
    );
    const none = h("p", {
      class: "empty",
      text: "This page knows no checkpoint store: start the dashboard with --checkpoints.",
    });
    $("panel-checkpoints").replaceChildren(
      row,
      this.me.checkpoints ? answer : none,
      ...(this.me.checkpoints ? [table.element] : []),
    );
    if (this.me.checkpoints) this.lookIntoStore = () => look.click();
  }
}

function followed(orders) {
  if (!orders) return "";
  if (!orders.policies.length) return "The autopilot is off: stateflow autopilot --policy locality,load turns it on.";
  const budget = orders.max_pause_ms === null ? "no pause budget" : `pauses within ${ms(orders.max_pause_ms)}`;
  const rests = `a partition that has moved rests for ${seconds(orders.cool_down_s)}`;
  return `The autopilot follows ${orders.policies.join(", ")}: ${budget}, ${rests}.`;
}
