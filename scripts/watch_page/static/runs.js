// The head of each run: its state, its age, the tiles, and what an operator may ask of it.
import { ask } from "./api.js";
import { age, el, number } from "./dom.js";

const SILENT_S = 15;
const LATE_STEPS = 10;

export class RunHead {
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
    const sign = el("i", { class: "sign line" });
    sign.style.background = color;
    this.root = el("section", { class: "card run" });
    this.root.append(el("div", { class: "top" }, sign, this.title, this.word), this.reason, this.line, this.late, this.tiles);
    this.root.append(this.servers, el("div", { class: "bar asks" }, ...this.buttons, this.why), this.said, this.notRead);
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
        const { asked } = await ask(this.run, what, this.why.value);
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
    const reason = run.status[2];
    this.title.textContent = run.title;
    this.reason.textContent = reason;
    this.reason.hidden = !reason;
    const isOver = run.life.live === false;
    for (const one of this.buttons) one.disabled = isOver;
    this.root.querySelector(".asks").hidden = isOver;
    this.tiles.replaceChildren(
      ...run.tiles.map(([value, words, css]) => el("div", { class: "tile" }, el("b", { class: css }, value), el("span", {}, words))),
    );
    const servers = run.servers.map((one) => {
      const again = one.generation ? `, started ${one.generation + 1} times` : "";
      return `${one.name} ${one.state}, weights of version ${number(one.weight_version)}${again}`;
    });
    this.servers.textContent = servers.join(" · ");
    this.servers.hidden = !servers.length;
    this.notRead.textContent = run.not_read.length ? `Not read: ${run.not_read.join("; ")}.` : "";
    if (run.asked && !isOver && !this.said.textContent) this.said.textContent = `asked last: ${run.asked}`;
    this.tick();
  }

  // Seconds go on between two answers of the server.
  // `isStale`: the page gets no answer, so that nothing is known of now.
  tick(isStale = false) {
    if (!this.data) return;
    const [word, look] = this.data.status;
    this.word.textContent = isStale && look === "live" ? `${word} WHEN LAST SEEN` : word;
    this.word.className = isStale && look === "live" ? "word" : `word ${look}`;
    const since = (performance.now() - this.seenAt) / 1000;
    const { last_step: step, last_step_age_s: stepAge, usual_step_s: usual, life, total_steps: total } = this.data;
    const parts = [];
    const told = life.live === true ? "live" : life.live === false ? "not running" : "on another machine, not known to live";
    parts.push(isStale ? `${told} when last seen` : told);
    if (step !== null) {
      const done = total === null ? `step ${number(step)}` : `${number(step + 1)} of ${number(total)} steps done`;
      parts.push(done + (stepAge === null ? "" : `, committed ${age(stepAge + since)} ago`));
    } else parts.push("no step yet");
    if (usual !== null) parts.push(`a usual step takes ${number(usual, 3)} s`);
    if (this.data.started) {
      const attempts = this.data.attempts > 1 ? `, attempt ${this.data.attempts}` : "";
      parts.push(`began ${new Date(1000 * this.data.started).toLocaleString()}${attempts}`);
    }
    this.line.textContent = parts.join(" · ");
    const late = [];
    const silent_s = life.silent_s + since;
    if (life.live && silent_s > SILENT_S) late.push(`Its driver is there and has written no status for ${age(silent_s)}.`);
    if (life.live && stepAge !== null && usual && stepAge + since > Math.max(60, LATE_STEPS * usual)) {
      late.push(`No step was committed for ${age(stepAge + since)}; a usual one takes ${number(usual, 3)} s.`);
    }
    this.late.textContent = late.join(" ");
    this.late.hidden = !late.length;
  }
}
