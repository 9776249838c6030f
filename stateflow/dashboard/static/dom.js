// Elements from data. Nothing that comes from the cluster is ever markup: it is text, or an attribute's value.
const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

/** Makes an element. props: class, text, data, on (listeners by event), and attributes. children: elements or text. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function s(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "class") element.setAttribute("class", value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Changes the text only if it differs: a screen reader repeats text that is written again. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function set(element, name, value) {
  const text = String(value);
  if (element.getAttribute(name) !== text) element.setAttribute(name, text);
}

/** Makes the children of `parent` match `items`, by key. The element of a known key is kept, and with it its focus. */
export function keyed(parent, items, keyOf, make, update) {
  const known = parent.keyedChildren ?? (parent.keyedChildren = new Map());
  const kept = new Set();
  let before = null;
  for (const item of items) {
    const key = keyOf(item);
    if (kept.has(key)) continue;
    kept.add(key);
    let child = known.get(key);
    if (!child) known.set(key, (child = make(item)));
    update(child, item);
    const next = before ? before.nextSibling : parent.firstChild;
    if (next !== child) parent.insertBefore(child, next);
    before = child;
  }
  for (const [key, child] of known)
    if (!kept.has(key)) {
      child.remove();
      known.delete(key);
    }
}

export const swatch = (number) => {
  const element = h("span", { class: "swatch", "aria-hidden": "true" });
  element.style.background = colour(number);
  return element;
};

export const COLOURS = 8;
export const colour = (number) => `var(--op-${((number % COLOURS) + COLOURS) % COLOURS})`;
export const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
