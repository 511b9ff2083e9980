// The reader: one episode as a conversation; its tokens coloured by what is chosen.
import { FULL, PALETTE, badge, fold, make, meter, number, percent, seconds } from "view/dom.js";
import { address } from "view/route.js";
import { branches, messages, parts } from "view/parts.js";

const MOST = 20000; // characters of a text that are shown at once
const MOST_TOKENS = 8000; // of a turn that are drawn one by one, at once
const MANY = 4; // turns from which on there is a table of contents
const DEEP = 3; // rows are indented so far at most
const LINE = 90; // characters of a line for what is folded
const VERSIONS = 12; // in a legend
const UP = PALETTE[0], DOWN = PALETTE[5];
const shade = (share, hue) =>
  `color-mix(in srgb, ${hue} ${Math.round(FULL * Math.min(1, share))}%, transparent)`;

// Of each colour: values of a turn, the paint of one of them, values for a scale with labels, what it says.
const COLOURS = {
  "": { name: "none" },
  versions: {
    name: "version", values: (turn) => turn.versions, says: () => "the policy that wrote the token",
    paint: (value) => shade(0.7, PALETTE[value % PALETTE.length]),
    scale: ({ episode }) => [...counted(episode.turns.flatMap((turn) => turn.versions))].slice(0, VERSIONS)
      .map(([version, count]) => [version, `version ${version}: ${number(count)} tokens`]),
  },
  lags: {
    name: "lag", values: (turn) => turn.lags,
    paint: (value, { bound }) => shade(value / Math.max(1, bound), UP),
    scale: ({ bound }) => [[0, "0"], [bound / 2, number(bound / 2)], [bound, `${bound} or more`]],
    says: ({ bound }) => "by how many steps the policy that wrote the token was older than the batch; it is "
      + `masked above ${bound} (buffer.max_staleness)`,
  },
  logprobs: {
    name: "log-prob", values: (turn) => turn.logprobs, paint: (value) => shade(-value / 5, PALETTE[1]),
    scale: () => [[0, "0: certain"], [-2.5, "-2.5: 8%"], [-5, "-5: 0.7% or less"]],
    says: () => "the engine's log-probability of the token",
  },
  ratios: {
    name: "π/μ", values: (turn) => turn.ratios,
    paint: (value) => (value > 0 ? shade(Math.abs(Math.log2(value)), value < 1 ? DOWN : UP) : ""),
    scale: () => [[0.5, "½ or less"], [0.75, "¾"], [1, "1"], [1.5, "1.5"], [2, "2 or more"]],
    says: () => "the token's probability under the policy in training, over that under the engine",
    none: "no π/μ: it is recorded of trained episodes whose transcript is kept, 4 of one group a batch",
  },
  advantages: {
    name: "advantage", values: (turn) => turn.advantages,
    paint: (value, { largest }) => shade(Math.abs(value) / largest, value < 0 ? DOWN : UP),
    scale: ({ largest }) => [-1, -0.5, 0, 0.5, 1].map((part) => [part * largest, number(part * largest)]),
    says: () => "by how much it did better than its group, before the batch scales it",
  },
  masked: {
    name: "mask", values: (turn) => turn.ids.map((_, at) => maskOf(turn, at)),
    paint: (value) => (value ? shade(0.8, DOWN) : ""), scale: () => [[true, "not trained on"]],
    says: () => "tokens that were too old, or dropped by the correction; they are struck out in every colour",
  },
};

function maskOf(turn, at) {
  const why = [turn.stale?.[at] && "too old", turn.dropped?.[at] && "dropped by the correction"];
  return why.filter(Boolean).join(", ");
}

function counted(values) {
  const found = new Map();
  values.forEach((one) => found.set(one, (found.get(one) ?? 0) + 1));
  return new Map([...found].sort(([one], [other]) => one - other));
}

/** A colour with what it needs to know of an episode, for all its turns alike. */
export function painter(episode, name) {
  const known = name === "advantages" ? episode.turns.flatMap((turn) => turn.advantages ?? []) : [];
  const largest = known.reduce((most, value) => Math.max(most, Math.abs(value)), 1e-9);
  return { ...(COLOURS[name] ?? COLOURS[""]), bound: episode.bound, largest, episode };
}

// -- an episode ---------------------------------------------------------------------------------------------

export function draw(episode, colour, buttons) {
  const paint = painter(episode, colour), rows = branches(episode.turns), long = episode.turns.length >= MANY;
  const prompt = episode.turns[0]?.agent ? [] : history(episode.prompt, "prompt", "few-shot message");
  const drawn = rows.map((row) => drawRow(row, rows, episode, paint));
  const gone = episode.missing ? kept(episode) : [];
  const turns = make("div", { class: "turns" }, ...prompt, ...drawn, ...gone);
  return make("article", { "data-uid": episode.uid },
    head(episode, buttons), colours(episode, paint, colour ?? ""),
    make("div", { class: long ? "long" : null }, long ? contents(episode) : null, turns));
}

/** The question, what came of it, what it earned. */
function head(episode, buttons) {
  const { listed, result, oldest, newest, turns, stats } = episode, train = listed.kind === "train";
  const masked = turns.reduce((sum, turn) => sum + turn.ids.filter((_, at) => maskOf(turn, at)).length, 0);
  const facts = [
    listed.step === null ? "in no batch" : `${train ? "batch" : "validation at step"} ${listed.step}`,
    episode.landed ? `ended: ${result.end}` : "not over", `${number(listed.turns)} turns`,
    `${number(listed.tokens)} tokens`,
    oldest < 0 ? "" : `version ${oldest}${newest > oldest ? ` to ${newest}` : ""}`,
    listed.lag === null ? "" : `lag ${listed.lag}`,
    seconds(listed.seconds) + (stats.tool_s ? `, ${seconds(stats.tool_s)} in tools` : ""),
    episode.failures || episode.losses ? `${episode.failures} attempts failed, ${episode.losses} lost` : "",
    result.shaping ? `shaping ${number(result.shaping)}` : "",
  ];
  const question = JSON.stringify([["sample", "=", listed.sample], ["kind", "=", listed.kind]]);
  const same = address({ where: question, order: "-step", search: null, start: null });
  const pair = (name, ...values) => [make("dt", {}, name), make("dd", {}, ...values)];
  const components = Object.entries(listed.components).flatMap(([name, value]) =>
    pair(name, make("span", {}, number(value)), meter(value, `${name} ${number(value)}`)));
  const where = { href: address({ colour: "masked" }), id: "masked" };
  return make("div", {},
    make("div", { class: "bar" }, make("b", {}, episode.uid), badge(listed.kind), badge(listed.state),
      listed.reason ? badge(listed.reason) : null, listed.mode === "greedy" ? badge("greedy") : null,
      make("span", { class: "push" }, ...buttons)),
    make("h3", {}, line(listed.question, 400) || "(no question)"),
    make("dl", { class: "outcome" }, ...pair("answer", bounded(listed.answer || "–", 400)),
      ...pair("truth", bounded(listed.truth || "–", 400)),
      ...pair("score", make("b", {}, number(listed.score))), ...components),
    make("p", { class: "dim" }, facts.filter(Boolean).join(" · "), masked
      ? make("a", where, ` · ${number(masked)} tokens masked`) : null),
    make("p", {}, make("a", { href: same, id: "same-question" },
      train ? "all episodes of this question" : "this question at every validation")));
}

/** The choice of a colour, and what its strength says. */
function colours(episode, paint, chosen) {
  const links = Object.entries(COLOURS).map(([key, { name }]) => {
    const current = { "aria-current": key === chosen ? "true" : null, "data-colour": key };
    return make("a", { class: "chip", href: address({ colour: key }), ...current }, name);
  });
  const bar = make("div", { class: "bar" }, make("span", { class: "dim" }, "colour"), ...links);
  if (!paint.values) return make("div", { class: "colours" }, bar);
  const none = chosen !== "advantages" ? paint.none ?? "nothing is known of it, of this episode"
    : `no advantages: ${episode.no_advantage}`;
  if (!episode.turns.some((turn) => paint.values(turn)?.length))
    return make("div", { class: "colours" }, bar, make("p", { class: "alert" }, none));
  const patches = paint.scale(paint).map(([value, label]) => make("span", { class: "patch" },
    make("span", { class: "key", style: { background: paint.paint(value, paint) } }), label));
  const legend = make("p", { class: "legend dim" }, `${paint.says(paint)}: `, ...patches);
  return make("div", { class: "colours" }, bar, legend);
}

/** Every turn in a line, to go there. */
function contents({ uid, turns }) {
  const lines = turns.map((turn) => {
    const failed = turn.replies.some((one) => one.error);
    const go = () => {
      const place = () => document.getElementById(`turn-${uid}-${turn.index}`);
      if (!place()) document.querySelectorAll(".aside > details").forEach((one) => one.unfold());
      place().scrollIntoView();
    };
    return make("button", { onclick: go, class: failed ? "bad" : null },
      `${turn.index + 1} ${failed ? "✗ " : ""}${gist(turn)}`);
  });
  return make("nav", { class: "contents", "aria-label": "Turns" }, ...lines);
}

/** An episode whose turns are gone: the text that was kept of it, if one was. */
function kept({ missing, text }) {
  const shown = messages(text ?? "").map((one) => message(one, !["assistant", "user"].includes(one.role)));
  return [make("p", { class: "alert" }, missing), ...shown];
}

// -- turns --------------------------------------------------------------------------------------------------

function drawRow(row, rows, episode, paint) {
  const { turns, parent, after, shared, aside, agent } = row, id = `${episode.uid}-row-${row.row}`;
  const drawn = turns.map((turn, at) => () => drawTurn(turn, at ? null : row, episode, paint));
  if (aside) {
    const more = `${turns.length} turn${turns.length > 1 ? "s" : ""}, from turn ${turns[0].index + 1} on`;
    const title = `sub-agent ${agent}: ${line(row.title, LINE)} (${more})`;
    return make("div", { class: "row aside" }, unfolds(title, id, false, ...drawn));
  }
  const where = after ? `goes on after turn ${parent.turns[after - 1].index + 1}` : "begins anew";
  const same = `${number(shared)} characters are the same`;
  const from = parent ? ` · ${where} of row ${parent.row + 1}, rewritten; ${same}` : "";
  return make("div", { class: "row", style: { marginLeft: `${1.2 * Math.min(DEEP, row.depth)}rem` } },
    rows.length > 1 ? make("p", { class: "row-head dim" }, `row ${row.row + 1} ${agent}${from}`) : null,
    ...drawn.map((one) => one()));
}

/** `row`: the one that it begins, whose context is shown from where it leaves others on. */
export function drawTurn(turn, row, episode, paint) {
  const id = `${episode.uid}-${turn.index}`, { observation } = turn;
  const earned = episode.result.turn_rewards?.[turn.index];
  const masked = turn.ids.filter((_, at) => maskOf(turn, at)).length;
  const facts = [turn.agent, `${number(turn.ids.length)} tokens`, seconds(turn.seconds),
    turn.stop === "stop" ? "" : `stopped by ${turn.stop}`, earned ? `reward ${number(earned)}` : "",
    masked ? `${masked} masked` : "", observation?.reward ? `of it ${number(observation.reward)} here` : ""];
  const read = turn.agent ? messages(turn.context.text.slice(row?.shared ?? 0)) : [];
  return make("section", { class: "turn", id: `turn-${id}` },
    make("h4", {}, `turn ${turn.index + 1}`,
      make("span", { class: "dim" }, ` of ${episode.turns.length} · ${facts.filter(Boolean).join(" · ")}`)),
    ...(row ? history(read, id, "message before") : read.map((one) => message(one, true))),
    make("div", { class: "role model" }, make("span", { class: "who" }, "model"), ...model(turn, paint, id)),
    ...(observation?.messages ?? []).map((one) => message(one, false)),
    make("div", { class: "context" }, unfolds(`what the model read: ${number(turn.context.ids.length)}`
      + " tokens", `${id}-context`, false, () => bounded(turn.context.text))));
}

/** The model's words; its thoughts and calls folded to a line each, with what answered a call. */
function model(turn, paint, id) {
  const found = parts(turn), open = Boolean(paint.values);
  const calls = found.filter((part) => part.kind === "call");
  const read = calls.length === turn.replies.length; // which reply is of which call
  const shown = found.map((part, at) => {
    const body = () => (open ? tokens(turn, part, paint) : bounded(part.text)), name = `${id}-${at}`;
    if (part.kind === "words") return body();
    const thought = `thinking · ${number(part.to - part.from)} tokens`;
    if (part.kind === "thought") return unfolds(thought, name, open, body);
    const reply = read ? turn.replies[calls.indexOf(part)] : null;
    if (!reply) return unfolds(`call: ${line(part.text, LINE)}`, name, open, body);
    return answered(reply, name, open, open ? body : () => bounded(given(reply.call).join("\n")));
  });
  const others = read ? [] : turn.replies.map((reply, at) => answered(reply, `${id}-reply-${at}`, false));
  return [...shown, ...others];
}

function answered(reply, id, open, body) {
  const failed = Boolean(reply.error || reply.refused);
  const gave = `${failed ? "✗" : "→"} ${line(reply.error || reply.content, LINE) || "(nothing)"}`;
  const title = make("span", {}, make("code", {}, called(reply.call)),
    make("span", { class: failed ? "bad" : "dim" }, ` ${gave}`), ` · ${seconds(reply.seconds)}`);
  const inside = make("div", { class: "role tool" },
    make("span", { class: "who" }, reply.refused ? "refused" : "tool"),
    reply.error ? make("div", { class: "bad" }, bounded(reply.error, 2000)) : null, bounded(reply.content));
  return unfolds(title, id, open || failed, ...(body ? [body] : []), inside);
}

/** The arguments of a call, as `name: value`. */
function given(call) {
  try {
    const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
    return Object.entries(JSON.parse(call.arguments)).map(([name, value]) => `${name}: ${text(value)}`);
  } catch {
    return [call.arguments];
  }
}

/** A call in a line; a single argument without its name. */
export function called(call, most = LINE) {
  const some = given(call);
  return line(`${call.name} ${some.length === 1 ? some[0].replace(/^\w+: /, "") : some.join(", ")}`, most);
}

/** What a turn did, in a few words. */
export function gist(turn) {
  if (turn.replies.length) return called(turn.replies[0].call);
  const said = parts(turn).filter((part) => part.kind !== "thought").map((part) => part.text.trim());
  return line(said.find(Boolean) ?? "thinks only", LINE);
}

// -- messages -----------------------------------------------------------------------------------------------

/** What a row begins with: the system's message and those before the last one are folded. */
function history(some, id, what) {
  const first = some[0]?.role === "system" ? 1 : 0, last = some.slice(first).at(-1);
  const between = some.slice(first, -1), earlier = between.map((one) => () => message(one, false));
  const title = `${between.length} ${between.length > 1 ? what.replace("message", "messages") : what}`;
  return [
    first ? message(some[0], true) : null,
    between.length ? unfolds(title, `${id}-before`, false, ...earlier) : null,
    last ? message(last, false) : null,
  ].filter(Boolean);
}

/** Folded: a line that says who and begins to say what. */
function message({ role, content, tool_calls: calls }, folded) {
  const asked = (calls ?? []).map((one) => called(one.function, 4000));
  const said = typeof content === "string" ? content : JSON.stringify(content);
  const text = [said, ...asked].filter(Boolean).join("\n"), who = make("span", { class: "who" }, role);
  const more = text.length > LINE ? ` · ${number(text.length)} characters` : "";
  if (!folded) return make("div", { class: `role ${role}` }, who, bounded(text));
  return make("div", { class: `role ${role}` },
    unfolds(make("span", {}, who, ` ${line(text, LINE)}${more}`), null, false, () => bounded(text)));
}

// -- texts of others, and tokens of them --------------------------------------------------------------------

// Characters that control a terminal or turn the direction of what follows are shown, not obeyed.
const HIDDEN = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const shown = (code) => (code < 128 ? `^${String.fromCharCode(code ^ 64)}` : `⟨${code.toString(16)}⟩`);
export const escaped = (text) => text.replace(HIDDEN, (one) => shown(one.charCodeAt(0)));

export function line(text, most) {
  const short = escaped(text.slice(0, 4 * most)).replace(/\s+/g, " ").trim();
  return short.length > most || text.length > 4 * most ? `${short.slice(0, most - 1)}…` : short;
}

/** A text, at first only its beginning: a node of megabytes would hold up the page. */
export function bounded(text, most = MOST) {
  const place = make("div", { class: "text" }, escaped(text.slice(0, most)));
  let end = most;
  const more = make("button", { onclick: () => {
    more.before(escaped(text.slice(end, 10 * end)));
    end *= 10;
    offer();
  } });
  const offer = () => {
    const next = 10 * end < text.length ? `${number(9 * end)} more` : "all";
    more.textContent = `show ${next} of ${number(text.length)} characters`;
    if (end < text.length) place.append(more);
    else more.remove();
  };
  offer();
  return place;
}

/** A fold whose inside is made when it is opened: a function among its children is called then. */
export function unfolds(title, id, open, ...children) {
  const place = fold(title, open);
  let full = false;
  const fill = () => {
    if (!full) place.append(...children.map((child) => (typeof child === "function" ? child() : child)));
    full = true;
  };
  if (id) place.dataset.fold = id;
  else delete place.dataset.fold;
  if (open) fill();
  else place.addEventListener("toggle", fill, { once: true });
  place.unfold = () => (fill(), (place.open = true));
  return place;
}

function tokens(turn, { from, to }, paint) {
  const values = paint.values(turn) ?? [], place = make("div", { class: "text" });
  const add = (start) => {
    const end = Math.min(to, start + MOST_TOKENS);
    for (let at = start; at < end; at++) {
      const background = (values[at] ?? null) === null ? "" : paint.paint(values[at], paint);
      const seen = { "data-at": at, class: maskOf(turn, at) ? "masked" : null, style: { background } };
      place.append(make("span", seen, visible(turn.texts[at])));
    }
    const next = () => (more.remove(), add(end)), more = make("button", { onclick: next }, "more tokens");
    if (end < to) place.append(more);
  };
  add(from);
  place.addEventListener("pointermove", (event) => point(event, turn));
  place.addEventListener("pointerleave", () => tip.remove());
  return place;
}

// An empty text, or one of line breaks only, has still a place to point at.
const visible = (text) => (text === "" ? "·" : escaped(text).replace(/^(\n+)$/, "↵$1"));

// All that is known of the token under the pointer, at once: titles of thousands of elements come late.
const tip = make("div", { class: "tip" });
function point({ target, clientX, clientY }, turn) {
  const at = target.dataset?.at;
  const of = (name, values) => (values?.length ? `${name} ${number(values[at], 4)}` : "");
  if (at === undefined) return tip.remove();
  const kv = turn.kv_versions[at], version = turn.versions[at], logprob = turn.logprobs[at];
  tip.textContent = [
    `id ${turn.ids[at]}`, `log-prob of the engine ${number(logprob, 4)} (${percent(Math.exp(logprob))})`,
    `version ${version}${kv === version ? "" : `, keys and values from ${kv < 0 ? "?" : kv} on`}`,
    of("lag", turn.lags), maskOf(turn, at) && `masked: ${maskOf(turn, at)}`, of("π/μ", turn.ratios),
    of("advantage", turn.advantages), turn.rewards?.[at] ? of("reward", turn.rewards) : "",
  ].filter(Boolean).join("\n");
  const left = Math.min(clientX + 12, innerWidth - 260);
  Object.assign(tip.style, { left: `${left}px`, top: `${clientY + 14}px` });
  document.body.append(tip);
}
