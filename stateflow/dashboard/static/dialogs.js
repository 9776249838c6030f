// Dialogs: move, drain, rebalance, each with its dry run first; and details of a replica.
import { h, say } from "./dom.js";
import { about, ago, bytes, count, ms, plural, ranges, rate } from "./format.js";
import { post } from "./api.js";
import { Table } from "./table.js";

const TITLES = { migrate: "Move partitions", drain: "Drain a replica", rebalance: "Rebalance" };
const WHAT = {
  migrate: "Their state is copied ahead while rows go on, then handed over in milliseconds.",
  drain: "All of its partitions move to other replicas, so that it can be stopped.",
  rebalance: "Partitions move to where a policy wants them, with as few moves as possible.",
};
let number = 0;

function field(label, input, hint = "") {
  const id = `field-${(number += 1)}`;
  input.id = id;
  const parts = [h("label", { for: id, text: label }), input];
  if (hint) {
    parts.push(h("p", { class: "hint", id: `${id}-hint`, text: hint }));
    input.setAttribute("aria-describedby", `${id}-hint`);
  }
  return h("div", {}, ...parts);
}

const options = (values, label = (value) => value) => values.map((value) => h("option", { value, text: label(value) }));

function opened(title, ...children) {
  const id = `dialog-${(number += 1)}`;
  const dialog = h("dialog", { "aria-labelledby": id }, h("h2", { id, text: title }), ...children);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

export function beginDialog(kind, snapshot, tell, given = {}) {
  const operators = snapshot.operators.map((operator) => operator.name);
  const operator = h(
    "select",
    {},
    ...(kind === "rebalance" ? [h("option", { value: "", text: "all operators" })] : []),
    ...options(operators),
  );
  const partitions = h("input", {
    value: given.partitions ?? "",
    placeholder: "3, 5-9 or all",
    autocomplete: "off",
    required: kind === "migrate",
  });
  const places =
    kind === "drain"
      ? options(snapshot.replicas.filter((each) => each.partitions).map((each) => each.name))
      : [
          h("optgroup", { label: "Sites" }, ...options(snapshot.sites.map((each) => each.name))),
          h("optgroup", { label: "Replicas" }, ...options(snapshot.replicas.map((each) => each.name))),
        ];
  const to = h("select", {}, ...places);
  const policy = h(
    "select",
    {},
    ...options(
      ["ring", "load", "locality", "locality,load"],
      (value) =>
        ({
          ring: "ring: each replica's share",
          load: "load: rows and bytes evenly",
          locality: "locality: near its rows",
          "locality,load": "locality, then load",
        })[value],
    ),
  );
  const pause = h("input", { type: "number", min: "1", step: "any", placeholder: "no budget" });
  if (given.operator) operator.value = given.operator;
  if (given.to) to.value = given.to;
  const error = h("p", { class: "error", role: "alert" });
  const next = h("button", { class: "primary", type: "submit", text: "Dry run" });
  const close = h("button", { type: "button", text: "Close", on: { click: () => dialog.close() } });
  const fields = {
    migrate: () => [
      field("Operator", operator),
      field("Partitions", partitions, "Numbers, ranges, or all."),
      field("To", to),
    ],
    drain: () => [field("Replica", to)],
    rebalance: () => [field("Operator", operator), field("Policy", policy)],
  }[kind]();
  const form = h(
    "form",
    {
      on: {
        submit: (event) => {
          event.preventDefault();
          dryRun();
        },
      },
    },
    h("p", { class: "muted", text: WHAT[kind] }),
    h(
      "div",
      { class: "two" },
      ...fields,
      field("Longest pause, ms", pause, "A partition is handed over only if its predicted pause is at most this long."),
    ),
    error,
    h("div", { class: "foot" }, close, next),
  );
  const planned = h("div");
  planned.hidden = true;
  const dialog = opened(TITLES[kind], form, planned);

  const asked = () => ({
    do: kind,
    operator: kind === "drain" ? "" : operator.value,
    partitions: kind === "migrate" ? partitions.value : "",
    to: kind === "rebalance" ? "" : to.value,
    policies: kind === "rebalance" ? policy.value.split(",") : [],
    max_pause_ms: pause.value ? Number(pause.value) : null,
  });

  async function dryRun() {
    say(error, "");
    next.disabled = true;
    try {
      showPlan(await post("plan", asked()));
    } catch (refused) {
      say(error, refused.line ?? String(refused));
    } finally {
      next.disabled = false;
    }
  }

  function showPlan(plan) {
    const table = new Table({
      label: "Planned moves",
      keyOf: (row) => `${row.operator} ${row.partition}`,
      empty: "No moves are needed: every partition is where it should be.",
      columns: [
        { head: "Operator", cell: (row) => row.operator },
        { head: "Partition", num: true, cell: (row) => count(row.partition) },
        { head: "From", cell: (row) => row.source },
        { head: "To", cell: (row) => row.target },
        { head: "Bytes", num: true, cell: (row) => bytes(row.bytes) },
        { head: "Why", cell: (row) => row.reason },
      ],
    });
    table.show(plan.moves);
    const facts = h(
      "dl",
      { class: "facts" },
      ...[
        ["Would move", plural(plan.count, "partition")],
        ["Bytes on disk", bytes(plan.bytes)],
        ["Expected pause of each", ms(plan.pause_ms)],
        ["… at most", plan.pause_ms_at_most === null ? "no limit" : ms(plan.pause_ms_at_most)],
      ].map(([name, value]) => h("div", {}, h("dt", { text: name }), h("dd", { text: value }))),
    );
    const warnings = [
      ...plan.lacking.map(
        (each) =>
          `There is no room at ${each.replicas.join(", ")}: they would receive ${bytes(each.coming_bytes)}, ` +
          `and ${bytes(each.free_bytes)} are free.`,
      ),
      ...(plan.silent.length
        ? [`No move involves these replicas, which did not report their partitions: ${plan.silent.join(", ")}.`]
        : []),
      ...(plan.left.length ? [`${plural(plan.left.length, "partition")} stay: ${plan.left[0].reason}.`] : []),
      ...(plan.moves.length < plan.count
        ? [`The first ${count(plan.moves.length)} of ${count(plan.count)} are shown.`]
        : []),
    ];
    const failed = h("p", { class: "error", role: "alert" });
    const back = h("button", {
      type: "button",
      text: "Back",
      on: {
        click: () => {
          planned.hidden = true;
          form.hidden = false;
          next.focus();
        },
      },
    });
    const go = h("button", {
      type: "button",
      class: "primary",
      text: `Move ${plural(plan.count, "partition")}`,
      on: { click: () => begin(go, failed) },
    });
    go.disabled = !plan.count;
    planned.replaceChildren(
      h("p", { class: "muted", text: "A dry run: nothing has moved yet." }),
      facts,
      table.element,
      ...warnings.map((words) => h("p", { class: "warning", text: words })),
      failed,
      h("div", { class: "foot" }, back, go),
    );
    form.hidden = true;
    planned.hidden = false;
    (plan.count ? go : back).focus();
  }

  async function begin(go, failed) {
    go.disabled = true;
    say(failed, "");
    try {
      const { begun } = await post("begin", asked());
      dialog.close();
      tell(begun.length ? `${TITLES[kind]}: ${begun.join(", ")} has begun` : "There was nothing to move");
    } catch (refused) {
      say(failed, refused.line ?? String(refused));
      go.disabled = false;
    }
  }
}

export function replicaDialog(name, snapshot, me, begin) {
  const replica = snapshot.replicas.find((each) => each.name === name);
  if (!replica) return;
  const own = partitionsAt(snapshot, name);
  const facts = [
    ["Site", replica.site],
    ["Address", replica.address],
    ["State", replica.state],
    ["Heard", ago(replica.heard_s)],
    ["Rows/s", rate(replica.rows_per_s)],
    ["Entries", about(replica.entries)],
    ["Room for state", bytes(replica.room_bytes)],
    ["Weight", count(replica.weight)],
    ["Copies of partitions owned elsewhere", count(replica.standbys)],
    ["Version", replica.version || "–"],
  ];
  const table = new Table({
    label: "Its partitions",
    keyOf: (row) => row.operator,
    empty: "It owns nothing now.",
    columns: [
      { head: "Operator", cell: (row) => row.operator },
      { head: "How many", num: true, cell: (row) => count(row.numbers.length) },
      { head: "Partitions", cell: (row) => row.words },
    ],
    acts: [
      {
        label: "Move…",
        shown: () => me.may.migrate,
        act: (row) => {
          dialog.close();
          begin("migrate", { operator: row.operator, partitions: row.words.replaceAll("–", "-") });
        },
      },
    ],
  });
  table.show(own);
  const close = h("button", { type: "button", class: "primary", text: "Close", on: { click: () => dialog.close() } });
  const drain = h("button", {
    type: "button",
    text: "Drain…",
    on: {
      click: () => {
        dialog.close();
        begin("drain", { to: name });
      },
    },
  });
  drain.hidden = !me.may.drain || !own.length;
  const dialog = opened(
    `Replica ${name}`,
    h(
      "dl",
      { class: "facts" },
      ...facts.map(([fact, value]) => h("div", {}, h("dt", { text: fact }), h("dd", { text: value }))),
    ),
    table.element,
    h("div", { class: "foot" }, drain, close),
  );
}

/** The partitions of a replica, by operator. */
function partitionsAt(snapshot, name) {
  const number = snapshot.replicas.findIndex((replica) => replica.name === name);
  return snapshot.operators
    .map((operator) => ({
      operator: operator.name,
      numbers: operator.owners.flatMap((owner, partition) => (owner === number ? [partition] : [])),
    }))
    .filter((each) => each.numbers.length)
    .map((each) => ({ ...each, words: ranges(each.numbers) }));
}
