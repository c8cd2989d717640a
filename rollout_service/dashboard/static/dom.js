// Building elements: text is only ever set as text, so nothing that a model wrote can become markup.

export const byId = (id) => document.getElementById(id);

/** An element with attributes and children; strings become text. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Writes text only where it differs, so that a selection and a screen reader are left in peace. */
export function setText(element, text) {
  if (element && element.textContent !== text) element.textContent = text;
}

/** A table of `columns` [{label, numeric}] over `rows` of texts or elements; the first cell of a row names it. */
export function table(columns, rows, caption) {
  const head = el("tr", {}, ...columns.map((c) => el("th", { scope: "col", class: c.numeric ? "n" : null }, c.label)));
  const body = rows.map((row) =>
    el("tr", {}, ...row.map((cell, i) =>
      i === 0 ? el("th", { scope: "row", class: columns[i].numeric ? "n" : null }, cell) : el("td", { class: columns[i].numeric ? "n" : null }, cell))));
  return el("table", {}, caption ? el("caption", { class: "hidden" }, caption) : null, el("thead", {}, head), el("tbody", {}, ...body));
}

/** Puts a table, or a sentence if it has no rows, into `box`. */
export function fill(box, columns, rows, empty) {
  if (!box) return;
  box.replaceChildren(rows.length ? table(columns, rows) : el("p", { class: "empty" }, empty));
}

/** Numbers in boxes: [label, value, note?, bad?]. */
export function fillStats(box, entries) {
  if (!box) return;
  box.replaceChildren(...entries.map(([label, value, note, bad]) =>
    el("div", { class: bad ? "stat bad" : "stat" }, el("dt", {}, label), el("dd", {}, value, note ? el("small", {}, note) : null))));
}

/** A colour of the theme in force. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Calls `act` now and whenever the theme changes. */
export function onTheme(act) {
  document.documentElement.addEventListener("april:theme", act);
}
