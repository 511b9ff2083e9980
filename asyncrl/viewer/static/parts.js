// What texts are made of: messages by the marks of a template, words, thoughts and calls of a turn, rows that
// share their beginning.

const MARK = new RegExp([
  /<\|im_start\|>(\w+)\n?/, /<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*/, /<start_of_turn>(\w+)\n?/,
  /<\|(system|user|assistant|tool|observation|developer)\|>\n?/,
].map((one) => one.source).join("|"), "g");
const END = /\s*(<\|im_end\|>|<\|eot_id\|>|<\|eom_id\|>|<end_of_turn>|<\|end\|>)\s*$/;
const CALLS = [
  /<tool_call>[^]*?(?:<\/tool_call>|$)/, /<function=[^]*?(?:<\/function>|$)/, /\[TOOL_CALLS\][^]*/,
  /<\|python_tag\|>[^]*/, /<｜tool▁calls▁begin｜>[^]*?(?:<｜tool▁calls▁end｜>|$)/,
  /<\|tool_calls_section_begin\|>[^]*?(?:<\|tool_calls_section_end\|>|$)/,
];
const MARKED = new RegExp(`(<think>[^]*?(?:</think>|$))|${CALLS.map((one) => one.source).join("|")}`, "g");
const ENDING = /^(<\|[^|]*\|>|<\/s>|<end_of_turn>|<｜[^｜]*｜>)$/; // a token that only ends a turn
const CLOSE = "</think>";
const SLACK = 64; // characters by which a prompt may end otherwise, in a row that begins anew

/** The messages of a rendered text; a template whose marks are not known makes one. */
export function messages(text) {
  const marks = [...text.matchAll(MARK)];
  const found = marks.map((mark, at) => {
    const content = text.slice(mark.index + mark[0].length, marks[at + 1]?.index).replace(END, "");
    return { role: mark.slice(1).find(Boolean), content };
  });
  const before = { role: "context", content: text.slice(0, marks[0]?.index).replace(END, "") };
  const all = before.content.trim() ? [before, ...found] : found;
  return all.at(-1)?.content.trim() ? all : all.slice(0, -1); // the last one is the model's to write
}

/** A turn as [{kind: words | thought | call, text, from, to}]: a text, and the tokens of it. */
export function parts(turn) {
  const whole = turn.texts.join(""), last = turn.texts.at(-1) ?? "";
  const closed = whole.indexOf(CLOSE), opened = whole.indexOf("<think>");
  const begun = closed >= 0 && (opened < 0 || opened > closed); // by the prompt
  const inside = begun ? closed + CLOSE.length : 0;
  const marked = [...whole.slice(inside).matchAll(MARKED)].map((one) => {
    const start = inside + one.index;
    return { kind: one[1] ? "thought" : "call", start, end: start + one[0].length };
  });
  if (inside) marked.unshift({ kind: "thought", start: 0, end: inside });
  const found = [];
  let place = 0;
  for (const one of [...marked, { start: whole.length }]) {
    const between = whole.slice(place, one.start).trim();
    if (between && !(ENDING.test(between) && found.length)) {
      found.push({ kind: "words", start: place, end: one.start });
    }
    if (one.kind) found.push(one);
    place = one.end;
  }
  let to = 0, read = 0;
  return found.map((one, at) => {
    const from = to, all = at === found.length - 1;
    for (; to < turn.texts.length && (all || read < one.end); to++) read += turn.texts[to].length;
    const ends = one.end === whole.length && one.kind === "words" && ENDING.test(last.trim());
    return { kind: one.kind, text: whole.slice(one.start, one.end - (ends ? last.length : 0)), from, to };
  });
}

/** Rows in order of their first turns: which one each shares most with (`parent`), how many characters, after
    how many of its turns; `aside`: another conversation than the episode's own, such as a sub-agent's. */
export function branches(turns) {
  const rows = [], sizes = new Map();
  for (const turn of turns) {
    let row = rows.find((one) => one.row === turn.row);
    if (!row) rows.push((row = begun(turn, rows)));
    row.text += turn.context.text + turn.texts.join("");
    row.turns.push(turn);
    row.ends.push(row.text.length);
    sizes.set(row.root, (sizes.get(row.root) ?? 0) + 1);
  }
  const main = rows.find((row) => sizes.get(row.root) === Math.max(...sizes.values()))?.root;
  const system = main && (messages(main.text)[0]?.content ?? "");
  for (const row of rows) {
    const same = row.root.text.slice(0, system.length + SLACK).includes(system); // a history that was cut
    row.aside = row.root !== main && !same;
  }
  return rows;
}

function begun(turn, rows) {
  const { row: number, agent, context: { text } } = turn;
  const place = { parent: null, shared: 0, after: 0, depth: 0 };
  const row = { row: number, agent, text: "", turns: [], ends: [], ...place };
  let most = 0;
  for (const other of rows) {
    const alike = common(other.text, text), prompt = other.turns[0].context.text.length;
    if (alike >= most && alike >= prompt - SLACK) [row.parent, most] = [other, alike];
  }
  if (row.parent) {
    row.after = row.parent.ends.filter((end) => end <= most + SLACK).length;
    const whole = [...text.matchAll(MARK)].findLast((mark) => mark.index <= most); // messages
    row.shared = whole?.index ?? most;
    row.depth = row.parent.depth + (row.after < row.parent.turns.length ? 1 : 0);
  }
  row.root = row.parent?.root ?? row;
  row.title = messages(text).filter((one) => one.role !== "system").at(-1)?.content ?? "";
  return row;
}

/** How many characters two texts begin with alike. */
function common(one, other) {
  const most = Math.min(one.length, other.length), step = 4096;
  let at = 0;
  while (at + step <= most && one.slice(at, at + step) === other.slice(at, at + step)) at += step;
  while (at < most && one[at] === other[at]) at += 1;
  return at;
}
