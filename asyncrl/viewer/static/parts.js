// What texts are made of: messages by the marks of a template, words, thoughts and calls of a turn, rows that
// share their beginning. And how they are shown: nothing in them is obeyed.

const MARK = new RegExp([
  /<\|im_start\|>(\w+)\n?/, /<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*/, /<start_of_turn>(\w+)\n?/,
  /<\|(system|user|assistant|tool|observation|developer)\|>\n?/,
].map((one) => one.source).join("|"), "g");
const CALLS = [
  /<tool_call>[^]*?(?:<\/tool_call>|$)/, /<function=[^]*?(?:<\/function>|$)/,
  /(?:\[TOOL_CALLS\]|<\|python_tag\|>)[^]*/,
  /<｜tool▁calls▁begin｜>[^]*?(?:<｜tool▁calls▁end｜>|$)/,
  /<\|tool_calls_section_begin\|>[^]*?(?:<\|tool_calls_section_end\|>|$)/,
];
const THOUGHT = /<think>[^]*?(?:<\/think>|$)|^(?:(?!<think>)[^])*?<\/think>/; // the prompt may have begun it
const MARKED = new RegExp(`(${THOUGHT.source})|${CALLS.map((one) => one.source).join("|")}`, "g");
const ENDING = /(?<!\s)\s*(<\|[^|]*\|>|<\/s>|<end_of_turn>|<｜[^｜]*｜>)\s*$/; // a token that only ends a turn
const SLACK = 64; // characters by which a prompt may end otherwise, in a row that begins anew

/** The messages of a rendered text; a template whose marks are not known makes one. */
export function messages(text) {
  const marks = [...text.matchAll(MARK)];
  const found = marks.map((mark, at) => {
    const content = text.slice(mark.index + mark[0].length, marks[at + 1]?.index).replace(ENDING, "");
    return { role: mark.slice(1).find(Boolean), content };
  });
  const before = { role: "context", content: text.slice(0, marks[0]?.index).replace(ENDING, "") };
  const all = before.content.trim() ? [before, ...found] : found;
  return all.at(-1)?.content.trim() ? all : all.slice(0, -1); // the last one is the model's to write
}

/** A turn as [{kind: words | thought | call, text, from, to}]: a text, and the tokens of it. */
export function parts(turn) {
  const whole = turn.texts.join(""), found = [];
  let place = 0, to = 0, read = 0;
  const add = (kind, end) => {
    const text = whole.slice(place, end);
    if (kind !== "words" || text.replace(ENDING, "").trim()) found.push({ kind, text, end });
    place = end;
  };
  for (const one of whole.matchAll(MARKED)) {
    add("words", one.index);
    add(one[1] ? "thought" : "call", one.index + one[0].length);
  }
  add("words", whole.length);
  return found.map(({ kind, text, end }, at) => {
    const from = to, all = at === found.length - 1;
    for (; to < turn.texts.length && (all || read < end); to++) read += turn.texts[to].length;
    return { kind, text: kind === "words" ? text.replace(ENDING, "") : text, from, to };
  });
}

/** Rows in order of their first turns: which one each shares most with (`parent`), how many characters, after
    how many of its turns; `aside`: another conversation than the episode's own, such as a sub-agent's. */
export function branches(turns) {
  const rows = [];
  for (const turn of turns) {
    const row = rows.find((one) => one.row === turn.row) ?? begun(turn, rows);
    row.text += turn.context.text + turn.texts.join("");
    row.turns.push(turn);
    row.ends.push(row.text.length);
    row.root.size += 1;
  }
  const system = (row) => messages(row.text)[0]?.content; // the same where a history was rewritten
  const [main] = rows.toSorted((one, other) => other.size - one.size), own = main && system(main);
  rows.forEach((row) => (row.aside = row.root !== main && system(row.root) !== own));
  return rows;
}

function begun({ row: number, agent, context: { text } }, rows) {
  const title = messages(text).filter((one) => one.role !== "system").at(-1)?.content ?? "";
  const row = { row: number, agent, title, text: "", turns: [], ends: [], size: 0, after: 0, depth: 0 };
  let most = 0;
  for (const other of rows) {
    const alike = common(other.text, text), prompt = other.turns[0].context.text.length;
    if (alike >= most && alike >= prompt - SLACK) [row.parent, most] = [other, alike];
  }
  if (row.parent) {
    row.after = row.parent.ends.filter((end) => end <= most + SLACK).length;
    const message = [...text.matchAll(MARK)].findLast((mark) => mark.index <= most); // which differs first
    row.shared = message?.index ?? most;
    row.depth = row.parent.depth + (row.after < row.parent.turns.length ? 1 : 0);
  }
  row.root = row.parent?.root ?? row;
  rows.push(row);
  return row;
}

/** How many characters two texts begin with alike. */
function common(one, other) {
  let at = 0;
  while (at < one.length && one[at] === other[at]) at += 1;
  return at;
}

/** An episode as text, as the model read and wrote it. */
export const asText = ({ uid, listed, result, turns, text }) => [
  `episode ${uid} (${listed.kind}, ${listed.state} ${listed.reason})`,
  ...["question", "answer", "truth", "score"].map((name) => `${name}: ${listed[name]}`),
  ...Object.entries(listed.components).map((pair) => pair.join(": ")), `ended: ${result.end}`,
  ...turns.flatMap((turn) => [`--- turn ${turn.index + 1} ${turn.agent}`, turn.context.text, "--- model",
    turn.texts.join("")]), text,
].join("\n");

// Characters that control a terminal or turn the direction of what follows are shown, not obeyed.
const HIDDEN = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const shown = (code) => (code < 128 ? `^${String.fromCharCode(code ^ 64)}` : `⟨${code.toString(16)}⟩`);
export const escaped = (text) => text.replace(HIDDEN, (one) => shown(one.charCodeAt(0)));

export function line(text, most) {
  const short = escaped(text.slice(0, 4 * most)).replace(/\s+/g, " ").trim();
  return short.length > most || text.length > 4 * most ? `${short.slice(0, most - 1)}…` : short;
}
