// One chart for each group of figures, of all runs that are shown, with one crosshair and one zoom for all of them.
/* global uPlot */

const RUNS = ["--r0", "--r1", "--r2", "--r3"];
const KEYS = ["--r0", "--k1", "--k2", "--k3", "--k4", "--k5"];
// Figures of every n-th step: a line goes over the steps between, which have none.
const SPARSE = new Set(["grpo_actor/entropy/avg"]);
const MEAN_OVER = 10;
const WINDOWS_ACROSS = 50;
const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800];

class Chart {
  // `zoom(first, last)` is called where a person selected steps, `pick(step)` where one clicked.
  constructor(definition, { zoom, pick }) {
    this.definition = definition;
    this.isReward = definition.keys.includes("rollout/reward");
    const keys = "arrow keys: another step; Enter: what was written there; Escape: all steps";
    this.plotted = el("div", { class: "plot", tabindex: 0, role: "img", "aria-label": `${definition.title}; ${keys}` });
    this.plotted.addEventListener("keydown", (event) => this.pressed(event));
    this.legend = el("div", { class: "legend" });
    this.readout = el("div", { class: "readout" });
    const unit = definition.unit && !this.isReward ? el("span", { class: "faint" }, ` ${definition.unit}`) : "";
    this.note = el("p", { class: "faint", hidden: true });
    const head = el("h2", {}, definition.title, unit);
    this.root = el("section", { class: this.isReward ? "card chart lead" : "card chart" });
    this.root.append(head, this.plotted, this.readout, this.legend, this.note);
    this.zoom = zoom;
    this.pick = pick;
    this.shape = "";
    new ResizeObserver(() => this.plot && this.plot.setSize(this.size())).observe(this.plotted);
  }

  size() {
    const wide = Math.max(this.plotted.clientWidth, 200);
    return { width: wide, height: this.isReward ? Math.min(340, Math.max(230, wide * 0.36)) : 170 };
  }

  show(runs, span) {
    this.runs = runs;
    this.span = span;
    // Held-out accuracy after the last step lies one step further; a point on the edge itself would be cut in half.
    const isBeyond = runs.some((run) => run.evals.some(([step]) => step === span[1] + 1));
    this.right = Math.max(isBeyond ? span[1] + 1 + (span[1] + 1 - span[0]) * 0.01 : span[1], span[0] + 1);
    const { series, tables } = this.collect(runs);
    const data = tables.length ? uPlot.join(tables) : [[]];
    const marks = this.isReward ? marksOf(runs) : [];
    const shape = JSON.stringify([series.map((one) => [one.label, one.color]), marks]);
    if (!this.plot || shape !== this.shape) {
      this.shape = shape;
      if (this.plot) this.plot.destroy();
      this.series = series;
      this.plot = new uPlot(this.options(series), data, this.plotted);
      this.showLegend(series, marks);
    } else {
      this.plot.setData(data);
    }
    const bad = runs.flatMap((run) =>
      this.definition.keys
        .map((key) => [key, run.curves.series[key]?.not_finite || 0])
        .filter(([, count]) => count)
        .map(([key, count]) => `${count} values of ${key} in ${run.title} are infinite and not drawn`),
    );
    this.note.textContent = bad.join("; ");
    this.note.hidden = !bad.length;
  }

  collect(runs) {
    const series = [];
    const tables = [];
    const add = (x, columns) => {
      tables.push([x, ...columns.map((one) => one.values)]);
      for (const { values, ...rest } of columns) series.push(rest);
    };
    runs.forEach((run, at) => {
      const name = runs.length > 1 ? `${run.title}: ` : "";
      const columns = [];
      const thinned = run.curves.width > 1;
      this.definition.keys.forEach((key, index) => {
        const found = run.curves.series[key];
        if (!found) return;
        const color = css(runs.length > 1 ? RUNS[at % 4] : KEYS[index % 6]);
        const dash = runs.length > 1 && index ? [3 + index, 3] : undefined;
        const own = this.isReward ? "reward" : shortName(key, this.definition.keys);
        const label = name && this.definition.keys.length === 1 && !this.isReward ? run.title : name + own;
        if (thinned) {
          columns.push({ label: `${label}, lowest`, color, kind: "edge", values: found.low });
          columns.push({ label: `${label}, highest`, color, kind: "edge", values: found.high });
        }
        if (this.isReward) {
          const mean = runningMean(found.mean, run.curves.width, run.curves.steps);
          if (!thinned) columns.push({ label: `${label} of a step`, color, kind: "dot", values: found.mean });
          columns.push({ label: `${label}, mean of the last steps`, color, kind: "line", values: mean });
        } else {
          columns.push({ label, color, dash, kind: SPARSE.has(key) ? "sparse" : "line", values: found.mean });
        }
      });
      if (columns.length) add(run.curves.x, columns);
      if (this.isReward) this.addBeside(run, name, runs.length > 1 ? css(RUNS[at % 4]) : "", add);
    });
    return { series, tables };
  }

  // Steps that a restore undid, and held-out accuracy; each on steps of its own.
  addBeside(run, name, color, add) {
    const undone = new Map(run.curves.undone || []);
    if (undone.size) {
      const steps = [...undone.keys()].sort((a, b) => a - b);
      const label = `${name}undone by a restore`;
      add(steps, [{ label, color: color || css("--bad"), kind: "pale", values: steps.map((step) => undone.get(step)) }]);
    }
    const evals = run.evals.filter(([step]) => step >= this.span[0] && step <= this.span[1] + 1);
    if (evals.length) {
      const steps = evals.map(([step]) => step);
      const curve = (words, kind, values) => ({ label: `${name}held-out, ${words}`, color: color || css(`--${kind}`), kind, values });
      const datasets = [...new Set(evals.flatMap((one) => Object.keys(one[3])))].sort();
      add(steps, ["sampled", "greedy"].flatMap((kind, at) => [
        curve(kind, kind, evals.map((one) => one[1 + at])),
        ...datasets.map((set) => curve(`${kind}, ${set}`, kind, evals.map((one) => one[3][set]?.[at] ?? null))),
      ]));
    }
  }

  options(series) {
    const axis = axisStyle();
    const bands = [];
    series.forEach((one, at) => {
      if (one.kind === "edge" && series[at + 1]?.kind === "edge" && one.label.endsWith("lowest")) {
        bands.push({ series: [at + 2, at + 1], fill: `${one.color}2b` });
      }
    });
    return {
      ...this.size(),
      bands,
      legend: { show: false },
      padding: [this.isReward ? 18 : 10, 10, 0, 0],
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false, setScale: false }, focus: { prox: 24 }, points: { size: 6 } },
      scales: {
        x: { time: false, range: () => [this.span[0], this.right] },
        y: { range: (_, low, high) => valueSpan(low, high, this.isReward || this.definition.unit === "share") },
      },
      axes: [
        { ...axis, size: 26, values: (_, splits) => splits.map((at) => (Number.isInteger(at) ? number(at) : "")) },
        { ...axis, size: 54, values: (_, splits) => splits.map((at) => number(at, 3)) },
      ],
      series: [{}, ...series.map(style)],
      hooks: {
        draw: [(plot) => this.drawMarks(plot)],
        setCursor: [(plot) => this.read(plot)],
        setSelect: [(plot) => this.selected(plot)],
        ready: [(plot) => plot.over.addEventListener("click", () => this.clicked(plot))],
      },
    };
  }

  // The keyboard moves the crosshair of all charts.
  pressed(event) {
    const { plot } = this;
    if (!plot || !plot.data[0].length) return;
    const x = plot.data[0];
    const inView = x.map((_, at) => at).filter((at) => x[at] >= this.span[0] && x[at] <= this.right);
    const now = plot.cursor.left >= 0 && plot.cursor.idx !== null ? inView.indexOf(plot.cursor.idx) : -1;
    const to = { ArrowLeft: now < 0 ? inView.length - 1 : now - 1, ArrowRight: now + 1, Home: 0, End: inView.length - 1 }[event.key];
    if (to !== undefined) {
      const at = inView[Math.min(Math.max(to, 0), inView.length - 1)];
      plot.setCursor({ left: plot.valToPos(x[at], "x"), top: 10 }, true, true);
    } else if (event.key === "Enter" && now >= 0) this.pick(Math.max(0, Math.round(x[inView[now]])));
    else if (event.key === "Escape") this.zoom(null, null);
    else return;
    event.preventDefault();
  }

  selected(plot) {
    const { left, width } = plot.select;
    if (width < 8) return;
    const ends = [left, left + width].map((at) => Math.round(plot.posToVal(at, "x")));
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (ends[1] > ends[0]) this.zoom(Math.max(0, ends[0]), ends[1]);
    this.justZoomed = performance.now();
  }

  clicked(plot) {
    if (performance.now() - (this.justZoomed || -1e9) < 400 || plot.cursor.left < 0) return;
    this.pick(Math.max(0, Math.round(plot.posToVal(plot.cursor.left, "x"))));
  }

  // Incidents as lines with a sign at the top, restores dashed.
  drawMarks(plot) {
    const { ctx, bbox } = plot;
    const ratio = devicePixelRatio || 1;
    ctx.save();
    const inView = this.runs.flatMap((run) => run.incidents).filter((one) => one.step >= this.span[0] && one.step <= this.span[1]);
    const isCrowded = inView.length > plot.width / 40;
    for (const run of this.runs) {
      ctx.lineWidth = ratio;
      if (this.isReward) this.drawCheckpoints(plot, run.checkpoints);
      for (const [step] of isCrowded ? [] : run.restores) this.vertical(plot, step + 0.5, css("--faint"), [4 * ratio, 4 * ratio]);
      for (const one of run.incidents) {
        const color = css(one.is_over ? "--warn" : "--bad");
        const at = this.vertical(plot, one.step, color, [], isCrowded ? 6 * ratio : bbox.height);
        if (at === null || !this.isReward) continue;
        ctx.fillStyle = color;
        ctx.beginPath();
        ctx.moveTo(at - 4 * ratio, bbox.top - 11 * ratio);
        ctx.lineTo(at + 4 * ratio, bbox.top - 11 * ratio);
        ctx.lineTo(at, bbox.top - 3 * ratio);
        ctx.fill();
      }
    }
    ctx.restore();
  }

  // Ticks above the axis, 3 pixels apart, or a run that saves at each step draws a wall.
  drawCheckpoints(plot, { steps, bad_steps: bad }) {
    const { ctx, bbox } = plot;
    const ratio = devicePixelRatio || 1;
    let drawn = -10 * ratio;
    ctx.setLineDash([]);
    for (const step of steps) {
      const at = plot.valToPos(step, "x", true);
      if (step < this.span[0] || step > this.right || at - drawn < 3 * ratio) continue;
      drawn = at;
      ctx.strokeStyle = css(bad.includes(step) ? "--bad" : "--faint");
      ctx.beginPath();
      ctx.moveTo(at, bbox.top + bbox.height - 7 * ratio);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
    }
  }

  // `height` from the top of the plot.
  vertical(plot, step, color, dash, height = plot.bbox.height) {
    if (step < this.span[0] || step > this.span[1] + 1) return null;
    const at = Math.round(plot.valToPos(step, "x", true));
    plot.ctx.strokeStyle = color;
    plot.ctx.globalAlpha = this.isReward ? 0.6 : 0.4;
    plot.ctx.setLineDash(dash);
    plot.ctx.beginPath();
    plot.ctx.moveTo(at, plot.bbox.top);
    plot.ctx.lineTo(at, plot.bbox.top + height);
    plot.ctx.stroke();
    plot.ctx.globalAlpha = 1;
    return at;
  }

  read(plot) {
    const { idx, left } = plot.cursor;
    if (idx === null || idx === undefined || left < 0) {
      this.readout.textContent = "";
      return;
    }
    const parts = [`step ${number(Math.round(plot.data[0][idx]))}`];
    this.series.forEach((one, at) => {
      const value = plot.data[at + 1][idx];
      if (one.kind !== "edge" && value !== null && value !== undefined) parts.push(`${one.label} ${number(value)}`);
      else if (one.kind === "sparse" && value === null) parts.push(`${one.label}: no value`);
    });
    for (const run of this.isReward ? this.runs : []) {
      for (const [step, back, reason] of run.restores) {
        if (Math.abs(plot.valToPos(step + 0.5, "x") - left) > 6) continue;
        const where = step < 0 ? "at the beginning" : `after step ${number(step)}`;
        parts.push(`restored: continues ${where}, ${back ? counted(back, "step") : "no step"} undone; ${reason}`);
      }
      for (const one of run.incidents) {
        if (Math.abs(plot.valToPos(one.step, "x") - left) > 6) continue;
        const took = one.repaired_s === null ? "" : ` after ${seconds(one.repaired_s)}`;
        parts.push(`incident ${one.number}: ${one.title}, ${one.how}${took}`);
      }
    }
    this.readout.textContent = parts.join(" · ");
  }

  showLegend(series, marks) {
    const shown = series.filter((one) => one.kind !== "edge");
    const entries = shown.length < 2 && !this.isReward ? [] : shown.map((one) => entry(one.color, one.kind, one.label));
    if (this.isReward && series.some((one) => one.kind === "edge")) {
      entries.push(entry(series[0].color, "edge", "lowest to highest of a point's steps"));
    }
    this.legend.replaceChildren(...entries, ...marks.map((one) => entry(...one)));
  }
}

// Color, sign and words of what `drawMarks` draws, where there is any.
function marksOf(runs) {
  const incidents = runs.flatMap((run) => run.incidents);
  const marks = [];
  if (runs.some((run) => run.restores.length)) marks.push([css("--faint"), "restore", "restored to here"]);
  if (incidents.some((one) => one.is_over)) marks.push([css("--warn"), "incident", "incident, over"]);
  if (runs.some((run) => run.checkpoints.steps.length)) marks.push([css("--faint"), "save", "checkpoint"]);
  if (incidents.some((one) => !one.is_over)) marks.push([css("--bad"), "incident", "incident, not repaired"]);
  return marks;
}

function entry(color, kind, label) {
  const sign = el("i", { class: `sign ${kind}` });
  sign.style.background = color;
  return el("span", {}, sign, label);
}

function axisStyle() {
  return { stroke: css("--faint"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
}

function style({ color, dash, kind }) {
  const points = (size, filled) => ({ show: true, size, width: 1, stroke: color, fill: filled ? color : css("--card") });
  switch (kind) {
    case "edge":
      return { stroke: "transparent", width: 0, points: { show: false } };
    case "dot":
      return { stroke: "transparent", width: 0, points: { ...points(3, true), fill: `${color}66`, stroke: `${color}66` } };
    case "pale":
      return { stroke: "transparent", width: 0, points: { ...points(4, true), fill: `${color}77`, stroke: `${color}77` } };
    case "sampled":
    case "greedy":
      return { stroke: color, width: 1.2, dash: [2, 4], spanGaps: true, points: points(kind === "greedy" ? 8 : 6, kind === "greedy") };
    case "sparse":
      return { stroke: color, width: 1.7, dash, spanGaps: true, points: points(4, true) };
    default:
      return { stroke: color, width: 1.7, dash, points: { show: false } };
  }
}

// A key without what the keys of its chart have in common.
function shortName(key, keys) {
  if (keys.length < 2) return key;
  const parts = keys.map((one) => one.split("/"));
  let common = 0;
  while (parts.every((one) => one.length > common + 1 && one[common] === parts[0][common])) common += 1;
  return key.split("/").slice(common).join("/");
}

function runningMean(values, width, steps) {
  const most = Math.max(1, Math.ceil(Math.max(MEAN_OVER, steps / WINDOWS_ACROSS) / width));
  return values.map((_, at) => {
    const known = values.slice(Math.max(0, at + 1 - most), at + 1).filter((value) => value !== null);
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  });
}

function valueSpan(low, high, isShare) {
  if (low === null || low === undefined || (low === 0 && high === 0)) return [0, 1];  // of zeros alone a span has no size
  if (isShare && low >= 0 && high <= 1 && high > 0.25) return [-0.02, 1.02];
  const room = Math.max((high - low) * 0.08, high - low < Math.abs(high) * 1e-6 ? Math.abs(high) / 2 : 0, 1e-12);
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

// Memory over the time of a run, as shares of what there is, so that the host and GPUs have one axis.
function memoryChart(run, home) {
  const names = Object.keys(run.memory.series);
  const axis = axisStyle();
  const shares = names.map((name, at) => ({ label: name, ...style({ color: css(KEYS[at % 6]) }) }));
  const borders = run.attempts.slice(1).map((one) => one.at_s);
  const options = {
    width: Math.max(home.clientWidth, 200),
    height: 180,
    legend: { show: false },
    cursor: { points: { size: 6 } },
    scales: { x: { time: false }, y: { range: [0, 1] } },
    axes: [
      { ...axis, size: 26, incrs: TIME_STEPS, values: (_, splits) => splits.map(clock) },
      { ...axis, size: 54, values: (_, splits) => splits.map(percent) },
    ],
    series: [{}, ...shares],
    hooks: { draw: [(plot) => drawBorders(plot, borders)] },
  };
  const plot = new uPlot(options, [run.memory.x, ...names.map((name) => run.memory.series[name])], home);
  new ResizeObserver(() => plot.setSize({ width: Math.max(home.clientWidth, 200), height: 180 })).observe(home);
}

// Where another attempt begins.
function drawBorders(plot, borders) {
  const { ctx, bbox } = plot;
  ctx.strokeStyle = css("--faint");
  ctx.setLineDash([2, 4]);
  for (const border of borders) {
    const at = plot.valToPos(border, "x", true);
    ctx.beginPath();
    ctx.moveTo(at, bbox.top);
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
  }
}
