// The reader: one episode as a conversation; its tokens coloured by what is chosen.
import {
  FULL, MEANINGS, PALETTE, badge, byId, counted, fold, make, meter, number, percent, seconds, swatch, table,
  tell, tip,
} from "view/dom.js";
import { address } from "view/route.js";
import { ask } from "view/source.js";
import { branches, escaped, line, messages, parts } from "view/parts.js";

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
    name: "version", values: (turn) => turn.versions, says: () => "the version that sampled the token",
    paint: (value) => shade(0.7, PALETTE[value % PALETTE.length]),
    scale: ({ episode }) => {
      const all = episode.turns.flatMap((turn) => turn.versions);
      const count = (version) => counted(all.filter((one) => one === version).length, "token");
      return [...new Set(all)].slice(0, VERSIONS).map((one) => [one, `version ${one}: ${count(one)}`]);
    },
  },
  lags: {
    name: "lag", values: (turn) => turn.lags,
    paint: (value, { bound }) => shade(value / Math.max(1, bound), UP),
    scale: ({ bound }) => [[0, "0"], [bound / 2, number(bound / 2)], [bound, `${bound} or more`]],
    says: ({ bound }) => "how many steps older than the batch the sampling policy was; the token is "
      + `masked above a lag of ${bound} (buffer.max_staleness)`,
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
    says: () => "the token's probability under the trained policy, divided by its probability in the engine",
    none: "no π/μ: recorded only for episodes used for training whose transcript is kept (4 from one group per batch)",
  },
  advantages: {
    name: "advantage", values: (turn) => turn.advantages,
    paint: (value, { largest }) => shade(Math.abs(value) / largest, value < 0 ? DOWN : UP),
    scale: ({ largest }) => [-1, -0.5, 0, 0.5, 1].map((part) => [part * largest, number(part * largest)]),
    says: () => "how much better the episode did than its group, before scaling by the batch",
  },
  masked: {
    name: "mask", values: (turn) => turn.ids.map((_, at) => maskOf(turn, at)),
    paint: (value) => (value ? shade(0.8, DOWN) : ""), scale: () => [[true, "not trained"]],
    says: () => "tokens that were too old or dropped by the correction; all colourings strike them out",
  },
};

function maskOf(turn, at) {
  const why = [turn.stale?.[at] && "too old", turn.dropped?.[at] && "dropped by the correction"];
  return why.filter(Boolean).join(", ");
}

const maskedOf = (turn) => turn.ids.filter((_, at) => maskOf(turn, at)).length;

/** A colour with what it needs to know of an episode, for all its turns alike. */
export function painter(episode, name) {
  const known = name === "advantages" ? episode.turns.flatMap((turn) => turn.advantages ?? []) : [];
  const largest = known.reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1;
  return { ...(COLOURS[name] ?? COLOURS[""]), bound: episode.bound, largest, episode };
}

// -- an episode ---------------------------------------------------------------------------------------------

export function draw(episode, colour, buttons) {
  const paint = painter(episode, colour), rows = branches(episode.turns), long = episode.turns.length >= MANY;
  const turns = make("div", { class: "turns" },
    ...rows.map((row) => drawRow(row, rows, episode, paint)),
    episode.missing ? make("p", { class: "alert" }, episode.missing) : null,
    ...messages(episode.text).map((one) => message(one, one.role === "system"))); // all that was kept of it
  return make("article", { "data-uid": episode.uid },
    head(episode, buttons), colours(episode, paint, colour ?? ""),
    make("div", { class: long ? "long" : null }, long ? contents(episode, rows) : null, turns));
}

/** The question, what came of it, what it earned. */
function head(episode, buttons) {
  const { listed, result, oldest, newest, turns, stats } = episode, train = listed.kind === "train";
  const masked = turns.reduce((sum, turn) => sum + maskedOf(turn), 0);
  const facts = [
    listed.step === null ? "not in a batch" : `${train ? "batch" : "validation at step"} ${listed.step}`,
    listed.end ? `ended: ${listed.end}` : "unfinished", counted(listed.turns, "turn"),
    counted(listed.tokens, "token"),
    oldest < 0 ? "" : `version ${oldest}${newest > oldest ? ` to ${newest}` : ""}`,
    listed.lag === null ? "" : `lag ${listed.lag}`,
    seconds(listed.seconds) + (stats.tool_s ? `, ${seconds(stats.tool_s)} in tools` : ""),
    episode.failures || episode.losses ? `${episode.failures} attempts failed, ${episode.losses} lost` : "",
    result.shaping ? `shaping ${number(result.shaping)}` : "",
  ];
  const question = JSON.stringify([["sample", "=", listed.sample], ["kind", "=", listed.kind]]);
  const same = address({ where: question, order: "-step", search: null, start: null });
  const masks = { href: address({ colour: "masked" }), id: "masked" };
  const components = Object.entries(listed.components).map(([name, value]) =>
    [name, make("td", {}, make("span", {}, number(value)), meter(value, `${name} ${number(value)}`))]);
  const came = [["answer", bounded(listed.answer || "–", 400)], ["truth", bounded(listed.truth || "–", 400)],
    ["score", make("b", {}, number(listed.score))], ...components];
  return make("div", {},
    make("div", { class: "bar" }, make("b", {}, episode.uid),
      ...[listed.kind, listed.state, listed.reason, listed.mode]
        .filter((one) => one && one !== "landed").map((one) => badge(one)),
      make("span", { class: "push" }, ...buttons)),
    make("h3", {}, line(listed.question, 400) || "(no question)"),
    table(null, came, { class: "outcome" }),
    make("p", { class: "dim" }, facts.filter(Boolean).join(" · "),
      masked ? make("a", masks, ` · ${counted(masked, "token")} masked`) : null),
    make("a", { href: same, id: "same-question" },
      train ? "all episodes of this question" : "this question in every validation"));
}

export const chip = (href, on, attributes, ...children) =>
  make("a", { class: "chip", href, "aria-current": on ? "true" : null, ...attributes }, ...children);

/** The choice of a colour, and what its strength says. */
function colours(episode, paint, chosen) {
  const chips = Object.entries(COLOURS).map(([key, { name }]) =>
    chip(address({ colour: key }), key === chosen, { id: `colour-${key}`, title: MEANINGS[name] }, name));
  const patches = () => paint.scale(paint).map(([value, label]) =>
    make("span", {}, swatch(paint.paint(value, paint)), label));
  const none = chosen === "advantages" ? `no advantages: ${episode.no_advantage}`
    : paint.none ?? "not recorded for this episode";
  return make("div", { class: "colours" },
    make("div", { class: "bar" }, make("span", { class: "dim" }, "colour"), ...chips),
    !paint.values ? null : !episode.turns.some((turn) => paint.values(turn)?.length)
      ? make("p", { class: "alert" }, none)
      : make("p", { class: "legend dim" }, `${paint.says(paint)}: `, ...patches()));
}

/** Every turn in a line, to go there. */
function contents({ uid, turns }, rows) {
  const aside = rows.flatMap((row) => (row.aside ? row.turns : []));
  const go = ({ index }) => {
    const place = byId(`turn-${uid}-${index}`);
    place.closest(".aside > details")?.setAttribute("open", "");
    place.scrollIntoView();
  };
  return make("nav", { class: "contents", "aria-label": "Turns" }, ...turns.map((turn) => {
    const failed = turn.replies.some((one) => one.error), click = { onclick: () => go(turn) };
    return make("button", { ...click, class: failed ? "bad" : null },
      `${turn.index + 1} ${aside.includes(turn) ? "↳ " : ""}${failed ? "✗ " : ""}${gist(turn)}`);
  }));
}

// -- turns --------------------------------------------------------------------------------------------------

function drawRow(row, rows, episode, paint) {
  const { turns, parent, after, shared, aside, agent } = row;
  const drawn = turns.map((turn, at) => drawTurn(turn, at ? null : row, episode, paint));
  if (aside) {
    const more = `${counted(turns.length, "turn")}, from turn ${turns[0].index + 1} onward`;
    const title = `sub-agent ${agent}: ${line(row.title, LINE)} (${more})`;
    return make("div", { class: "row aside" }, fold(title, false, ...drawn));
  }
  const where = after ? `continues after turn ${parent.turns[after - 1].index + 1} of` : "starts from the prompt of";
  const from = parent && ` · ${where} conversation ${parent.row + 1}; ${number(shared)} shared characters`;
  return make("div", { class: "row", style: { marginLeft: `${1.2 * Math.min(DEEP, row.depth)}rem` } },
    rows.length > 1 && make("p", { class: "row-head dim" },
      `conversation ${row.row + 1}`, agent && `, agent ${agent}`, from), ...drawn);
}

/** `row`: the one that it begins, whose context is shown from where it leaves others on. */
export function drawTurn(turn, row, episode, paint) {
  const { index, observation } = turn;
  const earned = episode.result.turn_rewards?.[index];
  const facts = [turn.agent, counted(turn.ids.length, "token"), seconds(turn.seconds),
    turn.stop === "stop" ? "" : `stopped by ${turn.stop}`, earned ? `reward ${number(earned)}` : "",
    maskedOf(turn) ? `${maskedOf(turn)} masked` : "",
    observation?.reward ? `${number(observation.reward)} of it from the environment` : ""];
  const read = turn.agent || row ? messages(turn.context.text.slice(row?.shared ?? 0)) : [];
  return make("section", { class: "turn", id: `turn-${episode.uid}-${index}` },
    make("h4", {}, `turn ${index + 1}`,
      make("span", { class: "dim" }, ` of ${episode.turns.length} · ${facts.filter(Boolean).join(" · ")}`)),
    ...(row ? history(read) : read.map((one) => message(one, true))),
    ...turn.context.images.map((digest) => picture(episode.run, digest)),
    role("model", "model", ...model(turn, paint)),
    ...(observation?.messages ?? []).map((one) => message(one, false)),
    make("div", { class: "context" }, fold(
      `model input: ${counted(turn.context.ids.length, "token")}`, false,
      () => bounded(turn.context.text))));
}

/** An image that the model read before its turn. */
function picture(run, digest) {
  const image = make("img", { class: "picture", alt: `image ${digest}` });
  ask("image", { run, digest }).then(({ url }) => image.setAttribute("src", url))
    .catch(({ message: reason }) => image.setAttribute("alt", `[${reason}]`));
  return image;
}

/** The model's words; its thoughts and calls folded to a line each, with what answered a call. */
function model(turn, paint) {
  const found = parts(turn), open = Boolean(paint.values);
  const calls = found.filter((part) => part.kind === "call");
  const read = calls.length === turn.replies.length; // which reply is of which call
  const shown = found.map((part) => {
    const body = () => (open ? tokens(turn, part, paint) : bounded(part.text));
    if (part.kind === "words") return body();
    const size = counted(part.to - part.from, "token");
    if (part.kind === "thought") return fold(`thinking · ${size}`, open, body);
    if (!read) return fold(`call: ${line(part.text, LINE)}`, open, body);
    const reply = turn.replies[calls.indexOf(part)];
    return answered(reply, open, open ? body : () => bounded(given(reply.call).join("\n")));
  });
  return read ? shown : [...shown, ...turn.replies.map((reply) => answered(reply, false))];
}

function answered(reply, open, ...body) {
  const failed = Boolean(reply.error || reply.refused);
  const gave = `${failed ? "✗" : "→"} ${line(reply.error || reply.content, LINE) || "(empty)"}`;
  const title = make("span", {}, make("code", {}, called(reply.call)),
    make("span", { class: failed ? "bad" : "dim" }, ` ${gave}`), ` · ${seconds(reply.seconds)}`);
  const inside = role("tool", reply.refused ? "refused" : "tool",
    reply.error ? make("div", { class: "bad" }, bounded(reply.error, 2000)) : null, bounded(reply.content));
  return fold(title, open || failed, ...body, () => inside);
}

/** The arguments of a call, as `name: value`; of a single one the value. */
function given(call) {
  try {
    const some = Object.entries(JSON.parse(call.arguments));
    const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
    return some.map(([name, value]) => (some.length > 1 ? `${name}: ${text(value)}` : text(value)));
  } catch {
    return [call.arguments];
  }
}

const called = (call, most = LINE) => line(`${call.name} ${given(call).join(", ")}`, most);

/** What a turn did, in a few words. */
export function gist(turn) {
  if (turn.replies.length) return called(turn.replies[0].call);
  const said = parts(turn).filter((part) => part.kind !== "thought").map((part) => part.text.trim());
  return line(said.find(Boolean) ?? "thinking only", LINE);
}

// -- messages -----------------------------------------------------------------------------------------------

/** What a row begins with: messages before the last one are folded. */
function history(some) {
  const before = some.slice(0, -1), first = before[0];
  const title = () => `${before.length} earlier: ${first.role} ${line(said(first), LINE)}`;
  const folded = before.length > 0 && fold(title(), false, ...before.map((one) => () => message(one, false)));
  return [folded, ...some.slice(-1).map((one) => message(one, false))];
}

/** The text of a message, and what it calls. */
function said({ content, tool_calls: calls }) {
  const text = typeof content === "string" ? content : JSON.stringify(content);
  return [text, ...(calls ?? []).map((one) => called(one.function, 4000))].filter(Boolean).join("\n");
}

const who = (name) => make("span", { class: "who" }, name);
export const role = (kind, name, ...said) =>
  make("div", { class: `role ${kind}` }, name && who(name), ...said);

/** Folded: a line that says who and begins to say what. */
function message(one, folded) {
  const text = said(one);
  const more = text.length > LINE ? ` · ${number(text.length)} characters` : "";
  const title = make("span", {}, who(one.role), ` ${line(text, LINE)}${more}`);
  return folded ? role(one.role, "", fold(title, false, () => bounded(text)))
    : role(one.role, one.role, bounded(text));
}

// -- texts of others, and tokens of them --------------------------------------------------------------------

/** What `draw` makes of a stretch, first of its first `most`: nodes of megabytes would hold up the page. */
function pieces(draw, from, to, most, unit) {
  const end = Math.min(to, from + most), next = Math.min(to - end, 10 * most);
  const more = ({ target }) => target.replaceWith(...pieces(draw, end, to, next, unit));
  const text = `show ${number(next)} more of ${number(to)} ${unit}`;
  return [...draw(from, end), ...(next ? [make("button", { onclick: more }, text)] : [])];
}

export const bounded = (text, most = MOST) => make("div", { class: "text" },
  ...pieces((from, to) => [escaped(text.slice(from, to))], 0, text.length, most, "characters"));

function tokens(turn, { from, to }, paint) {
  const values = paint.values(turn) ?? [];
  const token = (at) => {
    const background = (values[at] ?? null) === null ? "" : paint.paint(values[at], paint);
    const seen = { "data-at": at, class: maskOf(turn, at) ? "masked" : null, style: { background } };
    // An empty text, or one of line breaks only, has still a place to point at.
    return make("span", seen, escaped(turn.texts[at]).replace(/^(\n+)$/, "↵$1") || "·");
  };
  const draw = (start, end) => turn.texts.slice(start, end).map((_, at) => token(start + at));
  const heard = { onpointermove: (event) => point(event, turn), onpointerleave: () => tip.remove() };
  return make("div", { class: "text", ...heard }, ...pieces(draw, from, to, MOST_TOKENS, "tokens"));
}

/** All that is known of the token under the pointer. */
function point(event, turn) {
  const { at } = event.target.dataset;
  const of = (name, values) => (values?.length ? `${name} ${number(values[at], 4)}` : "");
  if (at === undefined) return tip.remove();
  const kv = turn.kv_versions[at], version = turn.versions[at], logprob = turn.logprobs[at];
  tell(event, [
    `id ${turn.ids[at]}`, `engine log-prob ${number(logprob, 4)} (${percent(Math.exp(logprob))})`,
    `version ${version}${kv === version ? "" : `, KV cache from version ${kv < 0 ? "?" : kv} onward`}`,
    of("lag", turn.lags), maskOf(turn, at) && `masked: ${maskOf(turn, at)}`, of("π/μ", turn.ratios),
    of("advantage", turn.advantages), turn.rewards?.[at] ? of("reward", turn.rewards) : "",
  ].filter(Boolean).join("\n"));
}
