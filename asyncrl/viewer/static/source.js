// Answers: of the server, or those that a page in a file has inside.

const recorded = JSON.parse(document.getElementById("recorded").textContent);
const DEADLINE = 65000; // milliseconds; the server's own is shorter

export const isFile = recorded !== null;
export const saved = recorded?.saved ?? ""; // when a page in a file was written

export async function ask(name, query = {}) {
  const given = Object.entries(query).filter(([, value]) => !["", null, undefined].includes(value));
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

// Lists and tools are in the file once for a run, whatever is asked of them.
const ONCE = { episodes: found, tools: (answer) => answer };

function fromFile(name, address, query) {
  const answer = recorded[ONCE[name] ? `${name}?run=${query.run ?? 0}` : address];
  if (!answer) return { error: "this is not in the file: asyncrl view, without --html, shows all" };
  return answer.error || !ONCE[name] ? answer : ONCE[name](answer, query);
}

// -- episodes in the file, as the server lists those of the run (store/listing.py) --------------------------

function value(one, column) {
  return (column.startsWith("components.") ? one.components[column.slice(11)] : one[column]) ?? null;
}

/** "=": a value, or [low, high], where null is open and high is not in. */
function meets(one, [column, operator, wanted]) {
  const has = value(one, column);
  if (operator === "=" && !Array.isArray(wanted)) return has === wanted;
  if (has === null) return false;
  if (operator === ">=") return has >= wanted;
  if (operator === "<=") return has <= wanted;
  const [low, high] = wanted;
  return (low === null || has >= low) && (high === null || has < high);
}

/** Conditions "=" on one column are alternatives. `but`: a column that may be as it likes. */
function fits(one, where, but = "") {
  const equal = where.filter(([column, operator]) => operator === "=" && column !== but);
  return where.every((each) => each[1] === "=" || meets(one, each))
    && equal.every(([column]) => equal.some((each) => each[0] === column && meets(one, each)));
}

function said(one, run) {
  const turns = recorded[`episode?${new URLSearchParams({ run, uid: one.uid })}`]?.turns ?? [];
  const told = turns.flatMap((turn) => [turn.texts.join(""), ...turn.replies.map((each) => each.content)]);
  return [one.question, one.answer, one.truth, ...told].join("\n").toLowerCase();
}

function found(answer, { run = 0, where, order, search }) {
  const conditions = JSON.parse(where || "[]");
  const words = (search ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const known = answer.episodes.filter((one) => words.every((word) => said(one, run).includes(word)));
  const count = (column, wanted) =>
    known.filter((one) => fits(one, conditions, column) && meets(one, [column, "=", wanted])).length;
  const facets = answer.facets.map((facet) => {
    const values = facet.values.map((each) => ({ ...each, count: count(facet.column, each.value) }));
    return { ...facet, values };
  });
  const episodes = known.filter((one) => fits(one, conditions)), column = (order ?? "").replace("-", "");
  const sign = order?.startsWith("-") ? -1 : 1;
  const compared = (a, b) => (a === null) - (b === null) || sign * ((a > b) - (a < b));
  if (column) episodes.sort((one, other) => compared(value(one, column), value(other, column)));
  const transcripts = Object.keys(recorded).filter((name) => name.startsWith(`episode?run=${run}&`)).length;
  const searched = words.length ? { transcripts, of: answer.episodes.length } : null;
  return { episodes, facets, total: episodes.length, start: 0, searched };
}
