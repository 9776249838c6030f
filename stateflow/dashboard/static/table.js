// Tables whose rows stay the same elements while their figures change, page by page where they are many.
import { h, keyed, say } from "./dom.js";
import { count, plural } from "./format.js";

const PAGE = 25;

/** columns: {head, num, cell(row) → text or element, sub(row) → text}; acts: {label, tone, shown(row), act(row)}. */
export class Table {
  constructor({ label, columns, keyOf, acts = [], empty, filter = null }) {
    Object.assign(this, { columns, keyOf, acts, empty, filter, rows: [], page: 0, words: "" });
    const heads = columns.map((column) =>
      h("th", { scope: "col", class: column.num ? "num" : null, text: column.head }),
    );
    if (acts.length) heads.push(h("th", { scope: "col" }, h("span", { class: "hidden-text", text: "Actions" })));
    this.body = h("tbody");
    this.table = h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
      h(
        "table",
        {},
        h("caption", { class: "hidden-text", text: label }),
        h("thead", {}, h("tr", {}, ...heads)),
        this.body,
      ),
    );
    this.none = h("p", { class: "empty" });
    this.place = h("span", { class: "num" });
    this.before = h("button", { type: "button", text: "Previous", on: { click: () => this.turn(-1) } });
    this.after = h("button", { type: "button", text: "Next", on: { click: () => this.turn(1) } });
    this.pager = h("div", { class: "pager" }, this.place, this.before, this.after);
    const parts = [];
    if (filter) {
      this.input = h("input", {
        type: "search",
        placeholder: filter,
        "aria-label": filter,
        on: {
          input: () => {
            this.words = this.input.value.toLowerCase();
            this.page = 0;
            this.draw();
          },
        },
      });
      parts.push(h("div", { class: "row" }, h("div", {}, this.input)));
    }
    this.element = h("div", {}, ...parts, this.none, this.table, this.pager);
  }

  show(rows) {
    this.rows = rows;
    this.draw();
  }

  turn(by) {
    this.page += by;
    this.draw();
  }

  draw() {
    const words = this.words.split(/\s+/).filter(Boolean);
    const found = words.length
      ? this.rows.filter((row) => {
          const text = JSON.stringify(row).toLowerCase();
          return words.every((word) => text.includes(word));
        })
      : this.rows;
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    this.page = Math.min(Math.max(0, this.page), pages - 1);
    const shown = found.slice(this.page * PAGE, (this.page + 1) * PAGE);
    this.none.hidden = shown.length > 0;
    say(this.none, this.rows.length ? "No row contains these words." : this.empty);
    this.table.hidden = !shown.length;
    this.pager.hidden = pages === 1;
    say(this.place, `${plural(found.length, "row")}, page ${count(this.page + 1)} of ${count(pages)}`);
    this.before.disabled = this.page === 0;
    this.after.disabled = this.page === pages - 1;
    keyed(
      this.body,
      shown,
      this.keyOf,
      () => this.make(),
      (element, row) => this.update(element, row),
    );
  }

  make() {
    const row = h("tr", {}, ...this.columns.map((column) => h("td", { class: column.num ? "num" : null })));
    if (this.acts.length) {
      const buttons = this.acts.map((each) =>
        h("button", { type: "button", class: each.tone, text: each.label, on: { click: () => each.act(row.data) } }),
      );
      row.append(h("td", { class: "act" }, ...buttons));
    }
    return row;
  }

  update(element, row) {
    element.data = row;
    this.columns.forEach((column, number) => {
      const cell = element.children[number];
      if (column.draw) return column.draw(cell, row);
      const text = column.cell(row),
        sub = column.sub ? column.sub(row) : "";
      if (cell.said === text && cell.saidSub === sub) return;
      cell.said = text;
      cell.saidSub = sub;
      cell.replaceChildren(text, ...(sub ? [h("span", { class: "sub", text: sub })] : []));
    });
    if (this.acts.length) {
      const name = String(this.keyOf(row));
      this.acts.forEach((each, number) => {
        const button = element.lastChild.children[number];
        button.hidden = !each.shown(row);
        if (button.title !== name) {
          button.title = name;
          button.setAttribute("aria-label", `${each.label} ${name}`);
        }
      });
    }
  }
}

/** Draws a state with a coloured light. */
export function stateCell(tones, stateOf) {
  return (cell, row) => {
    const state = stateOf(row);
    if (cell.said === state) return;
    cell.said = state;
    cell.replaceChildren(
      h("span", {
        class: "state",
        data: { tone: tones[state] ?? "none" },
        text: state.toLowerCase().replaceAll("_", " "),
      }),
    );
  };
}

/** Draws `done` of `total` as a bar, with words. */
export function meterCell(of) {
  return (cell, row) => {
    const { done, total, words } = of(row);
    if (!cell.meter) {
      cell.meter = h("progress", { max: "1", "aria-label": "done" });
      cell.words = h("span", { class: "num" });
      cell.append(h("div", { class: "meter" }, cell.meter, cell.words));
    }
    cell.meter.value = total ? done / total : 0;
    say(cell.words, words);
  };
}
