// Elements from plain values, and numbers as short texts. What others wrote becomes text and never markup.

function el(name, options = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "class") made.className = value;
    else if (value !== false && value !== null) made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...children.map((one) => (one instanceof Node ? one : String(one))));
  return made;
}

const find = (selector) => document.querySelector(selector);

const isKnown = (value) => typeof value === "number" && Number.isFinite(value);

function number(value, digits = 4) {
  if (!isKnown(value)) return "—";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e7) ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
}

const counted = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

// How long something took.
function seconds(value) {
  if (!isKnown(value)) return "—";
  if (value < 0.1) return `${Math.round(1000 * Math.max(value, 0))} ms`;
  if (value < 120) return `${Number(value.toPrecision(value < 1 ? 2 : 3))} s`;
  return value < 7200 ? `${(value / 60).toFixed(1)} min` : `${(value / 3600).toFixed(1)} h`;
}

// How long ago something was.
function age(value) {
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (value >= 2 * length) return `${Math.round(value / length)} ${unit}`;
  }
  return `${Math.max(0, Math.round(value))} s`;
}

// A place in a run's time.
function clock(value) {
  const whole = Math.round(value);
  const two = (part) => String(Math.floor(part)).padStart(2, "0");
  return whole < 3600 ? `${Math.floor(whole / 60)}:${two(whole % 60)}` : `${Math.floor(whole / 3600)}:${two((whole % 3600) / 60)} h`;
}

const percent = (share) => (isKnown(share) ? `${Number((100 * share).toPrecision(3))} %` : "not known");

const gib = (bytes) => (bytes / 2 ** 30).toFixed(1);

const when = (at) => (isKnown(at) && at > 0 ? new Date(1000 * at).toLocaleString() : "at an unknown time");

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// One table; `names` are its heads, a row has as many cells. On a phone each cell stands beside its name.
function table(names, rows, kinds = []) {
  const cell = (content, at) => el("td", { "data-label": names[at], class: kinds[at] ?? "" }, content);
  const head = el("thead", {}, el("tr", {}, ...names.map((name) => el("th", { scope: "col" }, name))));
  return el("div", { class: "wide" }, el("table", {}, head, el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map(cell))))));
}

// Into a section: a block for each run, under its title where there are several.
function blocks(selector, runs, blockOf) {
  const made = runs.map((run) => el("div", {}, runs.length > 1 ? el("h3", {}, run.title) : "", ...blockOf(run)));
  find(`${selector} > div`).replaceChildren(...made);
}
