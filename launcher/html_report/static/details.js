// What is below the curves: incidents, completions, states over time, memory, ledger, checkpoints, settings.

const FIRST_INCIDENTS = 8;
const LOOKS = [
  ["running", "running, ready"],
  ["starting", "starting"],
  ["repairing", "repairing, incident"],
  ["restoring", "restoring"],
  ["paused", "paused"],
  ["bad", "dead, abandoned, not repaired"],
];

function showLanes(runs) {
  blocks("#lanes", runs, (run) => {
    const borders = run.attempts.slice(1).map((one) => one.at_s / run.ran_s);
    const rows = run.lanes.map((lane) => {
      const bar = el("div", { class: "lane" });
      for (const [from, to, look, text] of lane.spans) {
        const span = el("span", { class: `span ${look}`, title: text });
        span.style.left = `${100 * from}%`;
        span.style.width = `${Math.max(100 * (to - from), 0.15)}%`;
        bar.append(span);
      }
      for (const at of borders) {
        const border = el("span", { class: "border", title: "another attempt begins" });
        border.style.left = `${100 * at}%`;
        bar.append(border);
      }
      return el("div", { class: "row" }, el("b", {}, lane.name), bar);
    });
    const ends = el("div", { class: "ends" }, el("span", {}, "0"), el("span", {}, clock(run.ran_s)));
    return [...rows, el("div", { class: "row faint" }, el("b", {}), ends)];
  });
  const used = new Set(runs.flatMap((run) => run.lanes.flatMap((lane) => lane.spans.map((span) => span[2]))));
  const legend = LOOKS.filter(([look]) => used.has(look));
  const signs = legend.map(([look, words]) => el("span", {}, el("i", { class: `sign span ${look}` }), words));
  find("#lanes > div").append(el("div", { class: "legend" }, ...signs));
}

// `see(run, step)` shows the completions of a step.
function showIncidents(runs, see) {
  const isOpen = find("#incidents details")?.open ?? false;
  blocks("#incidents", runs, (run) => {
    if (!run.incidents.length) return [el("p", { class: "faint" }, "No incident was noticed so far.")];
    const newest = [...run.incidents].reverse();
    const rest = newest.slice(FIRST_INCIDENTS);
    const parts = [causeTable(run.causes), incidentTable(run, newest.slice(0, FIRST_INCIDENTS), see)];
    if (rest.length) {
      const more = el("details", {}, el("summary", {}, `${rest.length} earlier ones`), incidentTable(run, rest, see));
      more.open = isOpen;
      parts.push(more);
    }
    if (run.incidents_left_out) parts.push(el("p", { class: "faint" }, `${run.incidents_left_out} still earlier ones are in events.jsonl.`));
    return parts;
  });
}

function causeTable(causes) {
  const names = ["cause", "incidents", "repaired", "detected", "repaired after", "next step after", "steps undone", "batches rejected"];
  const rows = causes.map((one) => [
    el("b", {}, one.cause),
    number(one.incidents),
    number(one.repaired),
    spread(one.detected_s),
    spread(one.repaired_s),
    spread(one.next_step_s),
    number(one.steps_back),
    number(one.batches_rejected),
  ]);
  return table(names, rows);
}

// The median, and the range where there is one.
function spread(three) {
  if (!three) return "—";
  const [middle, least, most] = three.map(seconds);
  return least === most ? middle : `${middle} (${least} to ${most})`;
}

function incidentTable(run, incidents, see) {
  const names = ["", "step", "what", "detected", "repaired", "next step", "steps undone", "written then"];
  const rows = incidents.map((one) => {
    const look = one.is_over ? "good" : "bad";
    const words = [el("p", {}, one.what), el("p", { class: look }, one.doing ? `${one.how}: ${one.doing}` : one.how)];
    if (one.actions) words.push(el("p", { class: "faint" }, one.actions));
    const name = `#${one.number}`;
    const folder = one.has_folder && source.isFile ? el("a", { href: `incidents/${one.number}/` }, name) : name;
    const button = el("button", { type: "button", "aria-label": `completions around step ${one.step}` }, "completions");
    button.addEventListener("click", () => see(run.run, one.step));
    const times = [one.detected_s, one.repaired_s, one.next_step_s].map(seconds);
    return [folder, number(one.step), el("div", {}, ...words), ...times, number(one.steps_back), button];
  });
  return table(names, rows, ["", "", "words"]);
}

function showMemory(runs) {
  const isThere = runs.some((run) => run.memory.x.length > 1);
  find("#memory").hidden = !isThere;
  blocks("#memory", runs, (run) => {
    if (run.memory.x.length < 2) return [el("p", { class: "faint" }, "Memory was not sampled twice yet.")];
    const peaks = Object.entries(run.memory.peaks).map(([name, [used, there]]) => `${name}: at most ${gib(used)} of ${gib(there)} GiB`);
    const signs = peaks.map((words, at) => entry(css(KEYS[at % 6]), "line", words));
    return [el("div", { class: "plot memory" }), el("div", { class: "legend" }, ...signs)];
  });
  const homes = document.querySelectorAll("#memory .memory");
  runs.filter((run) => run.memory.x.length > 1).forEach((run, at) => memoryChart(run, homes[at]));
}

function showLedger(runs) {
  blocks("#ledger", runs, ({ ledger, rollouts }) => {
    if (!ledger) return [el("p", { class: "faint" }, "There is no ledger to audit yet.")];
    const { problems, violations, complete_until: until } = ledger;
    const parts = [];
    if (violations) {
      const more = violations > problems.length ? [`and ${violations - problems.length} more`] : [];
      const list = [...problems, ...more].map((one) => el("li", {}, one));
      parts.push(el("p", { class: "bad" }, el("b", {}, counted(violations, "violation"))), el("ul", {}, ...list));
    } else if (until !== null) {
      const upTo = until === ledger.steps - 1 ? "" : ` up to step ${number(until)}`;
      const sound = ": each step once, each prompt once in its epoch, each on its own weights.";
      parts.push(el("p", {}, el("b", { class: "good" }, `It is complete${upTo}`), sound));
    } else parts.push(el("p", {}, "Nothing is doubled or stale in it."));
    parts.push(...ledger.not_known.map((one) => el("p", {}, `Not known: ${one}`)));
    const filtered = ledger.filtered ? ` ${number(ledger.filtered)} times a prompt was used for a group without a signal, which was left out.` : "";
    const distance = isKnown(ledger.largest_distance) ? `${number(ledger.largest_distance)} nats` : "not measured";
    parts.push(el("p", { class: "faint" }, `${ledger.counts}. ${number(ledger.undone)} lines were undone.${filtered}`));
    parts.push(el("p", { class: "faint" }, `Rollouts: ${number(rollouts.failed)} failed, ${number(rollouts.retried)} retried. Largest mean distance between the server's and the trainer's log-probs: ${distance}.`));
    return parts;
  });
}

function showCheckpoints(runs) {
  blocks("#checkpoints", runs, ({ checkpoints: { made, there, condemned, newest } }) => {
    if (!made) return [el("p", { class: "faint" }, "No checkpoint so far.")];
    const bad = condemned ? `, ${number(condemned)} condemned` : "";
    const rows = newest.map(([step, at, took, fate]) => [number(step), when(at), seconds(took), fate || "there"]);
    return [el("p", {}, `${number(made)} were made, ${number(there)} are there${bad}.`), table(["step", "saved", "took", "state"], rows)];
  });
}

function showSettings(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))];
  const rows = keys.map((key) => ({ key, values: runs.map((run) => run.settings[key] ?? null) }));
  const differing = rows.filter(({ values }) => new Set(values).size > 1);
  const settingsTable = (some) =>
    table(["setting", ...runs.map((run) => run.title)], some.map(({ key, values }) => [key, ...values.map((value) => value ?? "—")]));
  const parts = [];
  if (runs.length > 1) {
    parts.push(el("p", {}, differing.length ? `${differing.length} of ${rows.length} settings differ:` : "All settings are the same."));
    if (differing.length) parts.push(settingsTable(differing));
  }
  const filter = el("input", { type: "search", placeholder: "part of a name", "aria-label": "filter settings" });
  const all = el("div", {});
  const list = () => all.replaceChildren(settingsTable(rows.filter(({ key }) => key.includes(filter.value))));
  filter.addEventListener("input", list);
  const more = el("details", {}, el("summary", {}, `all ${rows.length} settings`), filter, all);
  more.addEventListener("toggle", list, { once: true });
  parts.push(rows.length ? more : el("p", { class: "faint" }, "config.yaml is not there, or can't be read."));
  find("#settings > div").replaceChildren(...parts);
}

// What the shares of the time mean, with the figures, and in a file the files beside it.
function showFooter(runs) {
  const meanings = [
    ["detected", "from when a failure began, as well as the run itself can know it, to the moment its journal reported it"],
    ["repaired", "from when it began until its subject worked again; a server: until it served the current weights"],
    ["next step", "from when it began to the next committed step"],
    ["ETTR", "time of the steps that were kept, as a share of the time of all attempts"],
    ["strict", "the same, where a step during an incident counts as no longer than the usual one: waiting is lost"],
    ["semantic", "ETTR without the steps that were trained on what turned out to be bad, and were not undone"],
    ["start-up", "from the beginning of each attempt to that of its first step"],
    ["what incidents cost", "their time beyond usual steps, and the steps that a restore during one undid; in money by run.price_per_hour"],
  ];
  const shares = runs.map(({ title, time }) => {
    const lost = isKnown(time.lost_steps_per_incident) ? `; ${number(time.lost_steps_per_incident, 3)} usual steps lost per incident, by the strict measure` : "";
    const bad = time.bad_steps ? `; ${counted(time.bad_steps, "kept step")} trained on bad data` : "";
    const name = runs.length > 1 ? `${title}: ` : "";
    return el("p", {}, `${name}ETTR ${percent(time.ettr)}, strict ${percent(time.strict)}, semantic ${percent(time.semantic)}${lost}${bad}`);
  });
  const list = meanings.flatMap(([word, words]) => [el("dt", {}, word), el("dd", {}, words)]);
  const isOpen = find("footer details")?.open ?? false;
  const summary = el("summary", {}, "measures of the lost time, and what they mean");
  const parts = [el("details", { class: "card", open: isOpen }, summary, ...shares, el("dl", {}, ...list))];
  if (source.isFile && written.files.length) {
    const links = written.files.flatMap((name) => [" ", el("a", { href: name }, name)]);
    parts.push(el("p", { class: "faint" }, "Beside this file:", ...links));
  }
  find("footer").replaceChildren(...parts);
}

// The completions of one step of one run and of the one before; `step` null follows the newest.
class Samples {
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
      el("span", { class: "faint" }, "or choose an incident, or a step on a curve"),
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
    this.choice.value = run;
    this.input.value = step ?? "";
    this.shownFor = "";
    return this.refresh("asked");
  }

  // `newest`: what the newest step is known by; nothing is asked again while it is the same.
  async refresh(newest) {
    const wanted = `${this.run} ${this.step ?? `newest ${newest}`}`;
    if (!this.run || wanted === this.shownFor) return;
    this.shownFor = wanted;
    const samples = await source.samples(this.run, this.step);
    if (wanted === this.shownFor) this.show(samples);
  }

  show(samples) {
    const list = find("#samples .list");
    if (!samples.length) {
      const none = this.step === null ? "No completion is kept (stats_logger.samples)." : `No completion of step ${this.step} or before is kept${source.isFile ? " in this file" : ""}.`;
      list.replaceChildren(el("p", { class: "faint" }, none));
      this.at = this.step ?? undefined;
      return;
    }
    const [first] = samples;
    this.at = this.step ?? first.global_step;
    const isOther = this.step !== null && first.global_step !== this.step;
    const kept = source.isFile ? "in this file" : "kept";
    const parts = isOther ? [el("p", { class: "notice" }, `Of step ${number(this.step)} none is ${kept}; the nearest before it is step ${number(first.global_step)}.`)] : [];
    for (const [step, those] of groups(samples, (one) => one.global_step)) {
      parts.push(el("h3", {}, step === first.global_step - 1 ? `Step ${number(step)}, the one before` : `Step ${number(step)}`));
      const prompts = groups(those, (one) => one.prompt_id ?? one.prompt);
      parts.push(el("div", { class: "groups" }, ...[...prompts.values()].map(groupOf)));
    }
    list.replaceChildren(...parts);
  }
}

// In the order of their first.
function groups(list, keyOf) {
  const found = new Map();
  for (const one of list) {
    const key = keyOf(one);
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(one);
  }
  return found;
}

// The completions of one prompt side by side.
function groupOf(group) {
  return el("article", { class: group.length > 1 ? "group several" : "group" }, el("pre", { class: "prompt" }, group[0].prompt ?? ""), el("div", { class: "side" }, ...group.map(sample)));
}

function sample(one) {
  const reward = typeof one.reward === "number" ? one.reward : null;
  const parts = one.parts && typeof one.parts === "object" ? Object.entries(one.parts) : [];
  const facts = [
    `${number(one.tokens)} tokens`,
    one.finish_reason === "length" ? "cut off" : String(one.finish_reason ?? ""),
    `weights of version ${number(one.weight_version)}`,
    ...parts.map(([name, value]) => `${name} ${number(value)}`),
  ];
  const look = reward === null ? "word" : reward > 0 ? "word good" : "word bad";
  return el(
    "div",
    { class: "sample" },
    el("p", {}, el("b", { class: look }, `reward ${number(reward)}`), " ", el("span", { class: "faint" }, facts.join(" · "))),
    el("pre", {}, one.completion ?? ""),
  );
}
