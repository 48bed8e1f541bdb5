// The head of each run: its state, its age, the tiles, and what an operator may ask of it.

const SILENT_S = 15;
const LATE_STEPS = 10;

// What a person asks first: is it learning, is it healthy, what was lost; then the rest. Each: value, words, look.
function tilesOf(run) {
  const { learning, health, time, cost, tokens_per_s: tokens, ledger } = run;
  const total = run.total_steps === null ? "" : ` of ${number(run.total_steps)}`;
  const tiles = [learningTile(learning, run.evals), healthTile(health)];
  tiles.push([counted(run.steps.undone, "step"), `lost: undone by restores; rejected batches: ${number(run.steps.rejected)}`, ""]);
  tiles.push(timeTile(time));
  if (cost) {
    const of = `what incidents cost, of ${cost.of_all.toFixed(2)} in all, at ${number(cost.price_per_hour)} an hour`;
    tiles.push([cost.of_faults.toFixed(2), of, ""]);
  }
  tiles.push([`${number(run.steps.kept)}${total}`, "steps kept", ""]);
  const repaired = run.incidents.map((one) => one.repaired_s).filter(isKnown).sort((a, b) => a - b);
  if (repaired.length) tiles.push([seconds(repaired[Math.floor(repaired.length / 2)]), "time to repair, in the median", ""]);
  if (tokens) tiles.push([number(Math.round(tokens.lately)), `tokens/s lately; ${number(Math.round(tokens.median))} over all steps`, ""]);
  const peaks = Object.entries(run.memory.peaks).filter(([, [, there]]) => there > 0);
  peaks.sort(([, one], [, other]) => other[0] / other[1] - one[0] / one[1]);
  if (peaks.length) {
    const [name, [used, there]] = peaks[0];
    tiles.push([percent(used / there), `memory at most: ${name}, ${gib(used)} of ${gib(there)} GiB`, used / there > 0.95 ? "bad" : ""]);
  }
  tiles.push(ledgerTile(ledger));
  return tiles;
}

function learningTile({ first, last, over, steps }, evals) {
  if (first === null) return ["—", "learning: no reward seen yet", ""];
  const latest = evals[evals.length - 1];
  const without = latest?.[4] ? ` (${counted(latest[4], "prompt")} not scored)` : "";
  const ends = evals.length > 1 ? `; held-out, greedy ${number(evals[0][2], 3)} → ${number(latest[2], 3)}${without}` : "";
  if (steps <= over) return [number(last, 3), `learning: mean reward of ${counted(steps, "step")}${ends}`, ""];
  return [`${number(first, 3)} → ${number(last, 3)}`, `learning: mean reward of the first and the last ${over} steps${ends}`, ""];
}

function healthTile({ incidents, mended, over, open }) {
  if (!incidents) return ["0", "health: no incident was noticed", ""];
  const words = `health: of ${counted(incidents, "incident")}`;
  if (mended === incidents) return [`${mended} repaired`, words, ""];
  if (open) return [`${open} open`, words, "bad"];
  return over < incidents ? [`${incidents - over} not repaired`, words, "bad"] : [`${over} over`, words, ""];
}

function timeTile({ wall_s, kept_s, startup_s, undone_s, faults_s }) {
  if (!(wall_s > 0)) return ["—", "time: nothing has happened yet", ""];
  const undone = undone_s > 0 ? `, undone steps took ${seconds(undone_s)}` : "";
  // What incidents cost lies partly within the steps that count: beside it nothing is left over that has one name.
  const rest = `, evaluation, saving and ending ${seconds(Math.max(wall_s - kept_s - startup_s - undone_s, 0))}`;
  const faults = faults_s > 0 ? `, incidents cost ${seconds(faults_s)}` : rest;
  const words = `of ${seconds(wall_s)} went into steps that count; start-up took ${seconds(startup_s)}${undone}${faults}`;
  return [percent(Math.min(kept_s / wall_s, 1)), words, ""];
}

function ledgerTile(ledger) {
  if (!ledger) return ["—", "ledger: nothing to audit yet", ""];
  if (ledger.violations) return [number(ledger.violations), "violations in the ledger", "bad"];
  if (ledger.complete_until === null) return ["not known", "ledger: nothing doubled or stale; whether something is lost is not known", ""];
  const until = ledger.complete_until === ledger.steps - 1 ? "" : ` up to step ${number(ledger.complete_until)}`;
  return ["complete", `ledger: nothing lost, doubled or stale${until}`, "good"];
}

class RunHead {
  constructor(run, color) {
    this.run = run;
    this.seenAt = performance.now();
    this.title = el("h2", {});
    this.word = el("span", { class: "word" });
    this.line = el("p", { class: "faint" });
    this.reason = el("p", {});
    this.late = el("p", { class: "notice bad", hidden: true });
    this.tiles = el("div", { class: "tiles" });
    this.servers = el("p", { class: "faint" });
    this.said = el("p", { class: "faint", role: "status" });
    this.notRead = el("p", { class: "faint" });
    this.why = el("input", { type: "text", placeholder: "reason, for the journal", maxlength: 200, "aria-label": "reason" });
    this.buttons = [
      this.button("Pause", "pause"),
      this.button("Resume", "resume"),
      this.button("Add a server", "add_server"),
      this.button("Stop", "stop", "Save and end the run?"),
    ];
    this.asks = el("div", { class: "bar asks" }, ...this.buttons, this.why);
    const sign = el("i", { class: "sign line" });
    sign.style.background = color;
    this.root = el("section", { class: "card run" });
    this.root.append(el("div", { class: "top" }, sign, this.title, this.word), this.reason, this.line, this.late, this.tiles);
    this.root.append(this.servers, this.asks, this.said, this.notRead);
  }

  button(label, what, question = "") {
    let isSure = !question;
    const made = el("button", { type: "button" }, label);
    made.addEventListener("click", async () => {
      if (!isSure) {
        isSure = true;
        made.textContent = question;
        setTimeout(() => {
          isSure = false;
          made.textContent = label;
        }, 5000);
        return;
      }
      this.said.textContent = "…";
      try {
        const { asked } = await source.ask(this.run, what, this.why.value);
        this.said.textContent = `${label.toLowerCase()}: ${asked}. The state above says when it is done.`;
      } catch (error) {
        this.said.textContent = `not asked: ${error.message}`;
      }
    });
    return made;
  }

  show(run, isNewer) {
    this.data = run;
    if (isNewer) this.seenAt = performance.now();
    this.title.textContent = run.title;
    this.reason.textContent = run.status[2];
    this.reason.hidden = !run.status[2];
    this.asks.hidden = source.isFile || run.life.live === false;
    const tile = ([value, words, look]) => el("div", { class: "tile" }, el("b", { class: look }, value), el("span", {}, words));
    this.tiles.replaceChildren(...tilesOf(run).map(tile));
    const servers = (run.servers ?? []).map((one) => {
      const again = one.generation ? `, started ${one.generation + 1} times` : "";
      return `${one.name} ${one.state}, weights of version ${number(one.weight_version)}${again}`;
    });
    this.servers.textContent = servers.join(" · ");
    this.servers.hidden = !servers.length;
    this.notRead.textContent = run.not_read.length ? `Not read: ${run.not_read.join("; ")}.` : "";
    if (run.asked && !this.asks.hidden && !this.said.textContent) this.said.textContent = `asked last: ${run.asked}`;
    this.tick();
  }

  // Seconds go on between two answers of the server. `isStale`: the page gets none, so that nothing is known of now.
  tick(isStale = false) {
    if (!this.data) return;
    const [word, look] = this.data.status;
    this.word.textContent = isStale && look === "live" ? `${word} WHEN LAST SEEN` : word;
    this.word.className = isStale && look === "live" ? "word" : `word ${look}`;
    const since = source.isFile ? 0 : (performance.now() - this.seenAt) / 1000;
    const { last_step: step, last_step_age_s: stepAge, usual_step_s: usual, life, attempts } = this.data;
    const isOver = Boolean(this.data.status[0]) && ["good", "bad"].includes(look);
    const parts = [];
    const told = life.live === true ? "live" : life.live === false || isOver ? "not running" : "not known to live";
    parts.push(isStale ? `${told} when last seen` : told);
    if (step !== null) {
      const done = this.data.total_steps === null ? `step ${number(step)}` : `${number(step + 1)} of ${number(this.data.total_steps)} steps done`;
      parts.push(done + (stepAge === null || source.isFile ? "" : `, the last ${age(stepAge + since)} ago`));
    } else parts.push("no step yet");
    if (usual !== null) parts.push(`a usual step takes ${seconds(usual)}`);
    if (attempts.length) {
      const gap = this.data.idle_s >= 60 ? ` and ${seconds(this.data.idle_s)} between them` : "";
      const many = attempts.length > 1 ? ` in ${attempts.length} attempts${gap}` : "";
      parts.push(`began ${when(attempts[0].start_at)}, ran for ${seconds(this.data.ran_s)}${many}`);
    }
    if (source.isFile) parts.push(`this page was written ${when(written.written_at)}`);
    this.line.textContent = parts.join(" · ");
    const late = source.isFile ? fileLateness() : lateness(this.data, since, usual);
    this.late.textContent = late;
    this.late.hidden = !late;
  }
}

function lateness({ life, last_step_age_s: stepAge }, since, usual) {
  const late = [];
  const silent_s = life.silent_s + since;
  if (life.live && silent_s > SILENT_S) late.push(`Its driver is there and has written no status for ${age(silent_s)}.`);
  if (life.live && stepAge !== null && usual && stepAge + since > Math.max(60, LATE_STEPS * usual)) {
    late.push(`No step was committed for ${age(stepAge + since)}; a usual one takes ${seconds(usual)}.`);
  }
  return late.join(" ");
}

function fileLateness() {
  if (!written.life.live || Date.now() / 1000 - written.written_at <= written.patience_s) return "";
  return `This page has not been written for long: the run's driver may be gone. What is known now: ${written.command}`;
}
