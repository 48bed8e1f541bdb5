// Where the facts come from: this file has those of one run in it, or the server of this page is asked for them.
// The link of a server has its token, which stays in this tab.

const written = JSON.parse(document.getElementById("facts").textContent);
const link = new URLSearchParams(location.hash.slice(1));
if (!written && link.get("token")) sessionStorage.setItem("token", link.get("token"));

async function answer(path, options = {}) {
  const headers = { Authorization: `Bearer ${sessionStorage.getItem("token") || ""}` };
  const response = await fetch(path, { ...options, headers: { ...headers, ...options.headers } });
  const said = await response.json();
  if (!response.ok) {
    const error = new Error(said.error + (said.hint ? ` — ${said.hint}` : ""));
    error.status = response.status;
    throw error;
  }
  return said;
}

function get(path, values = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(values)) {
    if (value !== null && value !== undefined) query.append(key, value);
  }
  return answer(`${path}?${query}`, { signal: AbortSignal.timeout(30000) });
}

const server = {
  isFile: false,
  firstRun: link.get("run") || "",
  runs: async () => (await get("/runs")).runs,
  facts: (asked) => get("/facts", asked),
  samples: async (run, step) => (await get("/samples", { run, step })).samples,
  ask: (run, what, reason) =>
    answer("/ask", { method: "POST", body: JSON.stringify({ run, what, reason }), headers: { "Content-Type": "application/json" } }),
};

// The completions of a step, or of the nearest one before that has some, and of the one before that.
function writtenSamples(step) {
  const steps = Object.keys(written.samples).map(Number).sort((a, b) => b - a);
  const upTo = (most) => steps.find((one) => one <= most);
  const at = upTo(step ?? Infinity);
  return at === undefined ? [] : [at, upTo(at - 1)].flatMap((one) => written.samples[one] ?? []);
}

const file = {
  isFile: true,
  firstRun: written?.title,
  runs: async () => [{ run: written.title, title: written.title }],
  facts: async () => written,
  samples: async (run, step) => writtenSamples(step),
};

const source = written ? file : server;
