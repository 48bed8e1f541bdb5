// Asks the server of this page, with the token of the link. The token stays in this tab.

const given = new URLSearchParams(location.hash.slice(1));
if (given.get("token")) sessionStorage.setItem("token", given.get("token"));
export const firstRun = given.get("run") || "";

async function answer(path, options) {
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

export function get(path, values = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(values)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined) query.append(key, one);
    }
  }
  return answer(`${path}?${query}`, { signal: AbortSignal.timeout(30000) });
}

export function ask(run, what, reason) {
  const body = JSON.stringify({ run, what, reason });
  return answer("/api/ask", { method: "POST", body, headers: { "Content-Type": "application/json" } });
}
