// What is below the curves: states over time, incidents, completions, settings.
import { get } from "./api.js";
import { age, el, find, number } from "./dom.js";

const FIRST_INCIDENTS = 8;

export function showLanes(runs) {
  const blocks = runs.map((run) => {
    const rows = run.lanes.map((lane) => {
      const bar = el("div", { class: "lane" });
      for (const [from, to, look, text] of lane.spans) {
        const span = el("span", { class: `span ${look}`, title: text });
        span.style.left = `${100 * from}%`;
        span.style.width = `${Math.max(100 * (to - from), 0.15)}%`;
        bar.append(span);
      }
      return el("div", { class: "row" }, el("b", {}, lane.name), bar);
    });
    const ends = el("div", { class: "row faint" }, el("b", {}), el("div", { class: "ends" }, el("span", {}, "0"), el("span", {}, age(run.ran_s))));
    return el("div", {}, runs.length > 1 ? el("h3", {}, run.title) : "", ...rows, ends);
  });
  const looks = [["running", "running, ready"], ["starting", "starting"], ["repairing", "repairing"], ["restoring", "restoring"], ["paused", "paused"], ["bad", "dead, abandoned"]];
  const legend = looks.map(([look, words]) => el("span", {}, el("i", { class: `sign span ${look}` }), words));
  find("#lanes > div").replaceChildren(...blocks, el("div", { class: "legend" }, ...legend));
}

export function showIncidents(runs) {
  const blocks = runs.map((run) => {
    const head = runs.length > 1 ? el("h3", {}, run.title) : "";
    if (!run.incidents.length) return el("div", {}, head, el("p", { class: "faint" }, "No incident was noticed so far."));
    const newest = [...run.incidents].reverse();
    const rest = newest.slice(FIRST_INCIDENTS);
    const parts = [incidentTable(newest.slice(0, FIRST_INCIDENTS))];
    if (rest.length) {
      const more = el("details", {}, el("summary", {}, `${rest.length} earlier ones`), incidentTable(rest));
      more.open = find("#incidents details")?.open ?? false;
      parts.push(more);
    }
    if (run.incidents_left_out) parts.push(el("p", { class: "faint" }, `${run.incidents_left_out} still earlier ones are in events.jsonl.`));
    return el("div", {}, head, ...parts);
  });
  find("#incidents > div").replaceChildren(...blocks);
}

function incidentTable(incidents) {
  const names = ["", "step", "what", "detected", "repaired", "steps undone"];
  const rows = incidents.map((one) => {
    const look = one.is_over ? "good" : "bad";
    const doing = one.doing ? el("p", { class: look }, `${one.how}: ${one.doing}`) : el("p", { class: look }, one.how);
    const cells = [`#${one.number}`, number(one.step), el("div", {}, one.what, doing), seconds(one.detected_s), seconds(one.repaired_s), number(one.steps_back)];
    return el("tr", {}, ...cells.map((cell, at) => el("td", { "data-label": names[at], class: at === 2 ? "words" : "" }, cell)));
  });
  const head = el("thead", {}, el("tr", {}, ...names.map((name) => el("th", {}, name))));
  return el("div", { class: "wide" }, el("table", {}, head, el("tbody", {}, ...rows)));
}

function seconds(value) {
  return value === null ? "—" : value < 120 ? `${number(value, 2)} s` : age(value);
}

// The completions of one step of one run; `step` null follows the newest.
export class Samples {
  constructor() {
    this.run = null;
    this.step = null;
    this.shownFor = "";
    this.choice = el("select", { "aria-label": "run", onchange: () => this.choose(this.choice.value, this.step) });
    this.input = el("input", { type: "number", min: 0, placeholder: "newest", "aria-label": "step" });
    this.input.addEventListener("change", () => this.choose(this.run, this.input.value === "" ? null : Number(this.input.value)));
    const move = (by) => () => this.at !== undefined && this.choose(this.run, Math.max(0, this.at + by));
    find("#samples .bar").append(
      this.choice,
      el("label", {}, "step ", this.input),
      el("button", { type: "button", onclick: move(-1) }, "earlier"),
      el("button", { type: "button", onclick: move(1) }, "later"),
      el("button", { type: "button", onclick: () => this.choose(this.run, null) }, "newest"),
      el("span", { class: "faint" }, "or click a step on a curve"),
    );
  }

  offer(runs) {
    const names = runs.map((run) => run.run);
    this.choice.replaceChildren(...runs.map((run) => el("option", { value: run.run }, run.title)));
    this.choice.hidden = runs.length < 2;
    if (!names.includes(this.run)) this.run = names[0] ?? null;
    this.choice.value = this.run;
  }

  choose(run, step) {
    this.run = run;
    this.step = step;
    this.input.value = step ?? "";
    this.shownFor = "";
    return this.refresh("asked");
  }

  // `newest`: what the newest step is known by; nothing is asked again while it is the same.
  async refresh(newest) {
    const wanted = `${this.run} ${this.step ?? `newest ${newest}`}`;
    if (!this.run || wanted === this.shownFor) return;
    this.shownFor = wanted;
    const { samples } = await get("/api/samples", { run: this.run, step: this.step });
    if (wanted === this.shownFor) this.show(samples);
  }

  show(samples) {
    if (!samples.length) {
      const none = this.step === null ? "No completion is kept (stats_logger.samples)." : `No completion of step ${this.step} or before is kept.`;
      find("#samples .list").replaceChildren(el("p", { class: "faint" }, none));
      this.at = this.step ?? undefined;
      return;
    }
    this.at = this.step ?? samples[0].global_step;
    const isOther = this.step !== null && samples[0].global_step !== this.step;
    const note = isOther ? [el("p", { class: "notice" }, `Of step ${number(this.step)} none is kept; these are of step ${number(samples[0].global_step)}.`)] : [];
    find("#samples .list").replaceChildren(...note, el("div", { class: "grid" }, ...samples.map(sample)));
  }
}

function sample(one) {
  const reward = typeof one.reward === "number" ? one.reward : null;
  const parts = one.parts && typeof one.parts === "object" ? Object.entries(one.parts) : [];
  const facts = [
    `step ${number(one.global_step)}`,
    `${number(one.tokens)} tokens`,
    one.finish_reason === "length" ? "cut off" : String(one.finish_reason ?? ""),
    `weights of version ${number(one.weight_version)}`,
    ...parts.map(([name, value]) => `${name} ${number(value)}`),
  ];
  return el(
    "article",
    { class: "sample" },
    el("div", { class: "top" }, el("b", { class: reward === null ? "word" : reward > 0 ? "word good" : "word bad" }, `reward ${number(reward)}`), el("span", { class: "faint" }, facts.join(" · "))),
    el("pre", { class: "prompt" }, one.prompt ?? ""),
    el("pre", {}, one.completion ?? ""),
  );
}

export async function showSettings(runs) {
  const { rows } = await get("/api/settings", { run: runs.map((run) => run.run) });
  const differing = rows.filter((row) => row.differs);
  const parts = [];
  if (runs.length > 1) {
    parts.push(el("p", {}, differing.length ? `${differing.length} of ${rows.length} settings differ:` : "All settings are the same."));
    if (differing.length) parts.push(settingsTable(differing, runs));
  }
  const filter = el("input", { type: "search", placeholder: "part of a name", "aria-label": "filter settings" });
  const all = el("div", {}, settingsTable(rows, runs));
  filter.addEventListener("input", () => all.replaceChildren(settingsTable(rows.filter((row) => row.key.includes(filter.value)), runs)));
  parts.push(rows.length ? el("details", {}, el("summary", {}, `all ${rows.length} settings`), filter, all) : el("p", { class: "faint" }, "config.yaml is not there, or can't be read."));
  find("#settings > div").replaceChildren(...parts);
}

function settingsTable(rows, runs) {
  const head = el("thead", {}, el("tr", {}, el("th", {}, "setting"), ...runs.map((run) => el("th", {}, run.title))));
  const body = rows.map((row) => el("tr", {}, el("td", {}, row.key), ...row.values.map((value, at) => el("td", { "data-label": runs[at].title, class: row.differs ? "differs" : "" }, value ?? "—"))));
  return el("div", { class: "wide" }, el("table", {}, head, el("tbody", {}, ...body)));
}
