// Answers: of the server, or those that a page in a file has inside.

const recorded = JSON.parse(document.getElementById("recorded").textContent);
const DEADLINE = 65000; // milliseconds; the server's own is shorter

export const isFile = recorded !== null;
export const saved = recorded?.saved ?? ""; // when a page in a file was written

export async function ask(name, query = {}) {
  const given = Object.entries(query).filter(([, value]) => !["", null, undefined].includes(value));
  const address = `${name}?${new URLSearchParams(given)}`.replace(/\?$/, "");
  const gone = ({ message }) => ({ error: `no answer (${message}): is asyncrl view still running?` });
  const answer = isFile ? fromFile(name, address, query)
    : await fetch(`api/${address}`, { signal: AbortSignal.timeout(DEADLINE) })
      .then((one) => one.json()).catch(gone);
  if (answer.error) throw new Error(answer.error);
  return answer;
}

function fromFile(name, address, query) {
  const once = ["episodes", "tools"].includes(name); // for a run, whatever is asked of them
  const answer = recorded[once ? `${name}?run=${query.run ?? 0}` : address];
  if (!answer) return { error: "not included in this file: run asyncrl view without --html to see everything" };
  return name === "episodes" && !answer.error ? found(answer, query) : answer;
}

// -- episodes in the file, as the server lists those of the run (store/listing.py) --------------------------

const turnsOf = (one, run) => recorded[`episode?${new URLSearchParams({ run, uid: one.uid })}`]?.turns ?? [];

function value(one, column) {
  return (column.startsWith("components.") ? one.components[column.slice(11)] : one[column]) ?? null;
}

/** `wanted`: a value, or [low, high], where null is open and high is not in. */
function meets(one, [column, operator, wanted], run) {
  const has = value(one, column), [low, high] = operator === ">=" ? [wanted, null] : [wanted].flat();
  const called = () => turnsOf(one, run).flatMap((turn) => turn.replies.map((each) => each.call.name));
  if (column === "tool") return called().includes(wanted);
  if (operator === "begins") return (has ?? "").toLowerCase().startsWith(wanted.toLowerCase());
  if (operator === "=" && !Array.isArray(wanted)) return has === wanted;
  return has !== null && (low === null || has >= low) && (high === null || has < high);
}

function said(one, run) {
  const replied = ({ call, content, error }) => [call.name, call.arguments, content, error ?? ""];
  const told = (turn) => [turn.texts.join(""), ...turn.replies.flatMap(replied)];
  return [one.question, one.answer, one.truth, ...turnsOf(one, run).flatMap(told)].join("\n").toLowerCase();
}

function found(answer, { run = 0, where, order, search }) {
  const conditions = JSON.parse(where || "[]");
  const words = (search ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const known = answer.episodes.filter((one) => words.every((word) => said(one, run).includes(word)));
  // Conditions on one column are alternatives. `but`: a column that may be as it likes.
  const fits = (one, but) => conditions.every(([column]) => column === but
    || conditions.some((each) => each[0] === column && meets(one, each, run)));
  const facets = answer.facets.map(({ column, label, values }) => {
    const count = ({ value: wanted }) =>
      known.filter((one) => fits(one, column) && meets(one, [column, "=", wanted], run)).length;
    return { column, label, values: values.map((each) => ({ ...each, count: count(each) })) };
  });
  const episodes = known.filter((one) => fits(one)), column = (order ?? "").replace("-", "");
  const sign = order?.startsWith("-") ? -1 : 1;
  const compared = (a, b) => (a === null) - (b === null) || sign * ((a > b) - (a < b));
  if (column) episodes.sort((one, other) => compared(value(one, column), value(other, column)));
  const transcripts = answer.episodes.filter((one) => turnsOf(one, run).length).length;
  const searched = words.length ? { transcripts, of: answer.episodes.length } : null;
  return { episodes, facets, total: episodes.length, start: 0, searched };
}
