// The page: which runs are shown and which steps. Of a server it asks what is new, and says so where no answer comes; a
// file of a live run is read again now and then.

const EVERY_MS = 2000;
const LIST_EVERY_MS = 10000;
const FILE_EVERY_MS = 20000;
const MOST_RUNS = 4;

// What is below the curves, each with the facts that it shows: it is made anew only where these have changed, or whatever
// a person opened or wrote there would be gone with the next step.
const DETAILS = [
  [showIncidents, (run) => [run.incidents, run.causes]],
  [showLanes, (run) => run.lanes],
  [showMemory, (run) => run.memory],
  [showLedger, (run) => [run.ledger, run.rollouts]],
  [showCheckpoints, (run) => run.checkpoints],
  [showSettings, (run) => run.settings],
  [showFooter, (run) => run.time],
];
const detailsOf = new Map();
const runs = new Map(); // by name: what is known of each run that is shown
const heads = new Map();
const charts = new Map(); // by title
const samples = new Samples();
let known = []; // all runs below the fileroot
let chosen = source.firstRun ? [source.firstRun] : [];
let range = { first: null, last: null, newest: null };
let answeredAt = null;
let listedAt = -Infinity;
let problem = "";
let factsOf = "";

function shown() {
  return chosen.map((name) => runs.get(name)).filter(Boolean);
}

async function turn() {
  try {
    if (performance.now() - listedAt > LIST_EVERY_MS) await list();
    const found = await Promise.all(chosen.map(async (name) => [name, await source.facts(asked(name))]));
    for (const [name, said] of found) take(name, said);
    answeredAt = Date.now();
    problem = "";
    draw();
    opened();
    await samples.refresh(runs.get(samples.run)?.last_step);
  } catch (error) {
    if (source.isFile) throw error;  // no server is to blame
    problem = error.status ? error.message : "The server of this page does not answer.";
    document.title = "not known now";
  }
  notice();
}

async function list() {
  known = await source.runs();
  listedAt = performance.now();
  if (!chosen.length && known.length) chosen = [(known.find((one) => one.live) || known[0]).run];
  find("#picker").hidden = source.isFile;
  find("#picker summary").textContent = known.length > 1 ? `${known.length} runs, ${chosen.length} shown` : "one run";
  const chips = known.map((one) => {
    const box = el("input", { type: "checkbox", onchange: () => choose(one.run, box.checked) });
    box.checked = chosen.includes(one.run);
    box.disabled = !box.checked && chosen.length >= MOST_RUNS;
    const how = one.live ? "live" : one.live === null ? "on another machine" : `${age(one.age_s)} old`;
    const steps = one.steps === null ? "" : `, ${number(one.steps)} steps`;
    return el("label", { class: "chip" }, box, one.title, el("span", { class: "faint" }, ` ${how}${steps}`));
  });
  find("#picker .chips").replaceChildren(...chips);
}

function choose(name, isShown) {
  chosen = isShown ? [...chosen, name].slice(0, MOST_RUNS) : chosen.filter((one) => one !== name);
  for (const gone of [...runs.keys()].filter((one) => !chosen.includes(one))) runs.delete(gone);
  listedAt = -Infinity;
  again();
}

function asked(name) {
  const run = runs.get(name);
  const { first, last } = range;
  if (!run) return { run: name, first, last };
  const x = run.curves.x;
  const since = x.length ? Math.floor(x[x.length - 1]) : null;
  return { run: name, first, last, generation: run.generation, facts: run.facts, since, width: run.curves.width };
}

function take(name, said) {
  const before = runs.get(name) || {};
  const curves = "undone" in said.curves || !before.curves ? said.curves : joined(before.curves, said.curves);
  runs.set(name, { ...before, ...said, curves, run: name, isNewer: true });
}

// The curves with what is new of them, which begins with the bin that was not complete.
function joined(old, fresh) {
  const from = fresh.x.length ? old.x.findIndex((at) => at >= fresh.x[0]) : -1;
  const kept = from < 0 ? old.x.length : from;
  const series = {};
  for (const key of new Set([...Object.keys(old.series), ...Object.keys(fresh.series)])) {
    series[key] = { not_finite: (fresh.series[key] || old.series[key]).not_finite };
    for (const part of ["mean", "low", "high"]) {
      if (!(old.series[key]?.[part] || fresh.series[key]?.[part])) continue;
      const earlier = old.series[key]?.[part]?.slice(0, kept) || Array(kept).fill(null);
      series[key][part] = [...earlier, ...(fresh.series[key]?.[part] || Array(fresh.x.length).fill(null))];
    }
  }
  const x = [...old.x.slice(0, kept), ...fresh.x];
  const steps = x.length ? Math.max(old.steps, x[x.length - 1] - x[0] + 1) : 0;
  return { ...old, x, series, steps };
}

function draw() {
  const all = shown();
  for (const name of [...heads.keys()].filter((one) => !runs.has(one))) {
    heads.get(name).root.remove();
    heads.delete(name);
  }
  all.forEach((run, at) => {
    if (!heads.has(run.run)) {
      heads.set(run.run, new RunHead(run.run, css(RUNS[at])));
      find("#runs").append(heads.get(run.run).root);
    }
    heads.get(run.run).show(run, run.isNewer);
    run.isNewer = false;
  });
  document.title = all.length === 1 ? `${all[0].status[0]} · ${all[0].title}` : `${all.length} runs`;
  drawCharts(all);
  const facts = all.map((run) => `${run.run} ${run.generation} ${run.facts}`).join("|");
  if (facts === factsOf) return;
  factsOf = facts;
  samples.offer(all);
  for (const [show, partOf] of DETAILS) {
    const content = JSON.stringify(all.map((run) => [run.run, partOf(run)]));
    if (content === detailsOf.get(show)) continue;
    detailsOf.set(show, content);
    show(all, see);
  }
}

function drawCharts(all) {
  const definitions = new Map();
  for (const one of all.flatMap((run) => run.charts)) {
    const before = definitions.get(one.title);
    definitions.set(one.title, before ? { ...one, keys: [...new Set([...before.keys, ...one.keys])] } : one);
  }
  for (const [title, chart] of charts) {
    const now = definitions.get(title);
    if (now && now.keys.join() === chart.definition.keys.join()) continue;
    chart.root.remove();
    charts.delete(title);
  }
  const further = find("#further");
  const count = [...definitions.values()].filter((one) => one.is_further).length;
  further.hidden = !count;
  further.querySelector("summary").textContent = `${count} further figures`;
  const span = stepsShown(all);
  let place = null;
  for (const [title, definition] of definitions) {
    if (definition.is_further && !further.open) continue;
    const home = definition.is_further ? further.querySelector(".grid") : find("#curves");
    if (!charts.has(title)) {
      const chart = new Chart(definition, { zoom, pick });
      charts.set(title, chart);
      if (place && place.parentNode === home) place.after(chart.root);
      else home[place ? "append" : "prepend"](chart.root);
    }
    place = charts.get(title).root;
    charts.get(title).show(all, span);
  }
  if (!definitions.size) find("#curves").replaceChildren(el("p", { class: "card faint" }, "No step was committed yet."));
  else for (const one of document.querySelectorAll("#curves > p")) one.remove();
  showRange(all);
}

function stepsShown(all) {
  const ends = all.flatMap((run) => {
    const x = run.curves.x;
    const half = (run.curves.width - 1) / 2;
    return x.length ? [x[0] - half, x[x.length - 1] + half] : [];
  });
  return [range.first ?? Math.min(0, ...ends), range.last ?? Math.max(1, ...ends)];
}

function showRange(all) {
  const button = (label, isOn, action) => el("button", { type: "button", "aria-pressed": String(isOn), onclick: action }, label);
  const isAll = range.first === null && range.last === null;
  const parts = [button("all steps", isAll, () => select({ first: null, last: null, newest: null }))];
  for (const newest of [1000, 100]) parts.push(button(`last ${number(newest)}`, range.newest === newest, () => select({ ...lastOf(newest), newest })));
  if (!isAll && range.newest === null) parts.push(el("span", { class: "faint" }, `steps ${number(range.first)} to ${number(range.last)}`));
  find("#range").replaceChildren(...parts);
  const thinned = all.filter((run) => run.curves.width > 1).map((run) => `${run.title}: each point is the mean of ${run.curves.width} steps`);
  find("#thinned").textContent = thinned.length ? `${thinned.join("; ")}, with the range behind it. Drag over a curve to look closer.` : "";
}

function lastOf(newest) {
  const step = Math.max(...shown().map((run) => run.last_step ?? 0));
  return { first: Math.max(0, step - newest + 1), last: null };
}

// Of `the last n` the window follows, in jumps, so that not every step asks for all of it again.
function follow() {
  if (range.newest === null) return;
  const now = lastOf(range.newest);
  if (now.first - range.first > range.newest / 20) range = { ...now, newest: range.newest };
}

// Both null: all steps.
function zoom(first, last) {
  select({ first, last, newest: null });
}

function pick(step) {
  return samples.choose(samples.run, step).catch((error) => {
    problem = error.message;
    notice();
  });
}

// From an incident to what was written there.
async function see(run, step) {
  samples.run = run;
  await pick(step);
  find("#samples").scrollIntoView({ block: "start" });
  find("#samples").focus({ preventScroll: true });
}

function select(wanted) {
  range = wanted;
  again();
}

function notice() {
  const box = find("#notice");
  const since = answeredAt === null ? "" : ` What is below was seen ${age((Date.now() - answeredAt) / 1000)} ago.`;
  box.textContent = problem ? problem + since : "";
  box.hidden = !problem;
  document.body.classList.toggle("stale", Boolean(problem));
}

// For whoever measures how long the page takes: milliseconds until everything was drawn once.
function opened() {
  const root = document.documentElement;
  if (!root.dataset.opened && charts.size) requestAnimationFrame(() => { root.dataset.opened ||= performance.now().toFixed(0); });
}

let timer = null;
let isAsking = false;
let isDue = false;

async function again() {
  clearTimeout(timer);
  if (isAsking) {
    isDue = true;
    return;
  }
  isAsking = true;
  follow();
  if (!document.hidden) await turn();
  isAsking = false;
  if (isDue) {
    isDue = false;
    again();
  } else if (!source.isFile) timer = setTimeout(again, EVERY_MS);
}

setInterval(() => {
  for (const head of heads.values()) head.tick(Boolean(problem));
  notice();
}, 1000);
find("#further").addEventListener("toggle", draw);
find("h1").textContent = source.isFile ? "Run" : "Runs";
document.addEventListener("dblclick", (event) => event.target.closest(".plot") && select({ first: null, last: null, newest: null }));
document.addEventListener("visibilitychange", () => document.hidden || source.isFile || again());
if (source.isFile && written.life.live) setInterval(() => document.hidden || location.reload(), FILE_EVERY_MS);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload());
again();
