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

// The same conditions as the server's (store/listing.py), over the episodes in the file.
function filtered(answer, query) {
  const of = (e, name) => (name.startsWith("components.") ? (e.components[name.slice(11)] ?? null) : e[name]);
  const within = (value, [low, high]) => value !== null && (low === null || value >= low) && (high === null || value < high);
  const same = (value, other) => (Array.isArray(other) ? within(value, other) : value === other);
  const where = JSON.parse(query.where || "[]");
  const equal = Object.groupBy(where.filter((one) => one[1] === "="), (one) => one[0]);
  const found = answer.episodes.filter(
    (e) =>
      Object.entries(equal).every(([name, some]) => some.some((one) => same(of(e, name), one[2]))) &&
      where.every(([name, operator, value]) => operator === "=" || (of(e, name) !== null && (operator === ">=" ? of(e, name) >= value : of(e, name) <= value))),
  );
  const order = query.order || "";
  const [name, sign] = order.startsWith("-") ? [order.slice(1), -1] : [order, 1];
  const compare = (a, b) => (a === null) - (b === null) || sign * (a > b ? 1 : a < b ? -1 : 0);
  if (name) found.sort((a, b) => compare(of(a, name), of(b, name)));
  return { ...answer, episodes: found, total: found.length, start: 0 };
}
