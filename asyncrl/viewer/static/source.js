// Answers: of the server, or those that a page in a file has inside.

const recorded = JSON.parse(document.getElementById("recorded").textContent);
const DEADLINE = 65000; // milliseconds; the server's own is shorter

export const isFile = recorded !== null;
export const saved = recorded?.saved ?? ""; // when a page in a file was written

export async function ask(name, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const parameters = new URLSearchParams(given).toString();
  const address = parameters ? `${name}?${parameters}` : name;
  const answer = isFile ? fromFile(name, address, query) : await fromServer(address);
  if (answer.error) throw new Error(answer.error);
  return answer;
}

async function fromServer(address) {
  try {
    return await (await fetch(`api/${address}`, { signal: AbortSignal.timeout(DEADLINE) })).json();
  } catch (error) {
    throw new Error(`no answer (${error.message}): does asyncrl view still run?`);
  }
}

function fromFile(name, address, query) {
  const plain = recorded[name === "episodes" ? `episodes?run=${query.run}` : address];
  if (!plain) return { error: "this is not in the file: asyncrl view, without --html, shows all" };
  return name === "episodes" && !plain.error ? filtered(plain, query) : plain;
}

// The same filters as the server's (episodes.py), over the episodes in the file; not by tool.
function filtered(answer, query) {
  const between = (value, low, high) =>
    (!low || (value !== null && value >= Number(low))) && (!high || (value !== null && value <= Number(high)));
  const orders = { reward: ["reward", 1], "-reward": ["reward", -1], length: ["tokens", 1], "-length": ["tokens", -1], "-lag": ["lag", -1] };
  const found = answer.episodes.filter(
    (e) =>
      ["state", "reason", "end"].every((key) => !query[key] || e[key] === query[key]) &&
      (!query.group || e.group === Number(query.group)) &&
      between(e.step, query.step_from, query.step_to) &&
      between(e.reward, query.reward_from, query.reward_to) &&
      between(e.tokens, query.length_from, query.length_to),
  );
  const [key, sign] = orders[query.order] ?? [null, 1];
  if (key) found.sort((a, b) => sign * ((a[key] ?? -Infinity) - (b[key] ?? -Infinity)));
  return { ...answer, episodes: found, total: found.length, start: 0 };
}
