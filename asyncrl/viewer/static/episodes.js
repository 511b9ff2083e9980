// The tab of episodes: facets, a list, and beside it the reader of the chosen one; or what the tools did.
// Everything that is chosen is in the address: where, order, search, start, uid, colour, side, sub.
import { fail, fold, make, meter, number, percent, redraw, seconds, table } from "view/dom.js";
import { address, go, route } from "view/route.js";
import { ask, isFile } from "view/source.js";
import { asText, copied } from "view/copy.js";
import { sideBySide } from "view/group.js";
import { draw, line } from "view/reader.js";

const PAGE = 100;
const FRESH = 2500; // milliseconds for which a list is not asked for again
const KEPT = 40; // episodes in memory
const SIDE = 16; // members side by side, at most
const INLINE = 5; // values of a facet that are always shown
const WAIT = 400; // milliseconds without a key, after which a search begins
const OVER = ["trained", "filtered", "dropped", "failed"];
const ALL = { where: null, search: null, start: null, uid: null, side: null };
const COLUMNS = [
  ["question", "answer", "truth"], ["score"], ["turns", "tokens"], ["lag", "newest"], ["end", "step"],
];

const answers = new Map(); // of a question: [when, answer]
const loaded = new Map(); // episodes, by run and uid
let listed = { episodes: [], total: 0, start: 0 };
let names = {}; // facets' labels by column
let members = []; // uids of the group of the episode that is open

async function asked(name, query) {
  const key = JSON.stringify([name, query]), known = answers.get(key);
  if (known && (isFile || Date.now() - known[0] < FRESH)) return known[1];
  const answer = await ask(name, query);
  if (answers.size > 8) answers.clear();
  answers.set(key, [Date.now(), answer]);
  return answer;
}

export async function show(place, now, state, current) {
  if (!place.firstChild) place.append(...skeleton());
  const parts = {};
  place.querySelectorAll("[data-part]").forEach((one) => (parts[one.dataset.part] = one));
  const search = document.getElementById("search");
  if (document.activeElement !== search) search.value = now.search ?? "";
  const { run, where, order, start } = now;
  const answer = await asked("episodes", { run, where, order, start, search: now.search });
  if (!current()) return;
  listed = answer;
  names = Object.fromEntries(answer.facets.map((facet) => [facet.column, facet.label]));
  const tools = now.sub === "tools";
  redraw(parts.facets, [answer.facets, now], () => facets(answer.facets, conditions(now)));
  redraw(parts.active, [now, answer.total, answer.searched], () => active(answer, now));
  [parts.panes.hidden, parts.tools.hidden] = [tools, !tools];
  if (tools) {
    const found = await ask("tools", { run, where });
    if (current()) redraw(parts.tools, [found, now], () => toolTable(found));
  } else if (!now.uid && answer.episodes.length) {
    if (alike(route(), now)) go({ uid: answer.episodes[0].uid }, true); // unless somebody has gone elsewhere
  } else {
    redraw(parts.list, [answer, now], () => list(answer, now));
    const moved = parts.list.dataset.uid !== now.uid;
    if (moved) parts.list.querySelector('[aria-selected="true"]')?.scrollIntoView({ block: "nearest" });
    parts.list.dataset.uid = now.uid;
    await read(parts.reader, now, current);
  }
}

function skeleton() {
  let waiting;
  const searched = (event) => {
    clearTimeout(waiting);
    const here = location.hash, changes = { search: event.target.value, start: null, uid: null };
    waiting = setTimeout(() => location.hash === here && go(changes, true), WAIT);
  };
  const part = (name, attributes, ...inside) => make("div", { "data-part": name, ...attributes }, ...inside);
  const pane = (name, label) => part(name, { id: name, tabindex: 0, role: "region", "aria-label": label });
  return [
    make("div", { class: "bar" },
      make("input", { type: "search", id: "search", oninput: searched, "aria-label": "search",
        placeholder: "words in question, answer, transcript  ( / )" }),
      part("active", { class: "bar", id: "active" })),
    part("facets", { class: "facets" }),
    part("panes", { class: "panes" }, pane("list", "Episodes"), pane("reader", "Episode")),
    part("tools", { id: "tools", class: "card" }),
  ];
}

// -- what is chosen -----------------------------------------------------------------------------------------

function conditions(now) {
  try {
    return JSON.parse(now.where || "[]");
  } catch {
    return [];
  }
}

const alike = (one, other) => JSON.stringify(one) === JSON.stringify(other);

/** The address with a condition put in, or taken out where it is in. */
function toggled(where, condition) {
  const without = where.filter((one) => !alike(one, condition));
  const next = without.length < where.length ? without : [...where, condition];
  return address({ start: null, uid: null, side: null, where: next.length ? JSON.stringify(next) : null });
}

const chip = (href, on, attributes, ...children) =>
  make("a", { class: "chip", href, "aria-current": on ? "true" : null, ...attributes }, ...children);

function facets(some, where) {
  return some.map(({ column, label, values }) => {
    const chosen = (value) => where.some((one) => alike(one, [column, "=", value]));
    const known = values.filter((one) => one.count || chosen(one.value));
    const earned = where.length && column === "score"; // also said where all that fit have the same
    const apart = known.length > 1 || known.some((one) => chosen(one.value));
    if (!apart && !earned) return null;
    const chips = known.map((one) => {
      const shown = { id: `facet-${column}-${one.label}`, "data-facet": column, "data-value": one.value };
      return chip(toggled(where, [column, "=", one.value]), chosen(one.value), shown,
        `${line(String(one.label), 40)} `, make("b", {}, number(one.count)));
    });
    const rest = chips.slice(INLINE);
    const more = fold(`${rest.length} more`, false, ...rest);
    return make("div", { class: "facet", role: "group", "aria-label": label },
      make("span", { class: "dim" }, label), ...chips.slice(0, INLINE), rest.length ? more : null);
  });
}

/** How many fit, and what they have to fit, each to be taken out again. */
function active({ total, searched }, now) {
  const where = conditions(now), remove = { title: "remove" };
  const chips = where.map((one) => chip(toggled(where, one), true, remove, `${said(one)} ✕`));
  const words = chip(address({ search: null, uid: null }), true, remove, `“${line(now.search ?? "", 40)}” ✕`);
  if (now.search) chips.push(words);
  const sub = (name, label) => chip(address({ sub: name }), (now.sub ?? "") === name, {}, label);
  const far = searched && `searched: questions and answers of all, transcripts of `
    + `${number(searched.transcripts)} of ${number(searched.of)}`;
  return [
    make("b", { id: "count" }, `${number(total)} episode${total === 1 ? "" : "s"}`),
    far ? make("span", { class: "dim", id: "searched" }, far) : null, ...chips,
    chips.length > 1 ? make("a", { href: address(ALL) }, "clear all") : null,
    make("span", { class: "push" }, sub("", "list"), sub("tools", "tools")),
  ];
}

function said([column, operator, value]) {
  const name = names[column] ?? column, sign = operator === "=" ? "" : `${operator} `;
  if (!Array.isArray(value)) return `${name} ${sign}${value === "" || value === null ? "none" : value}`;
  const [low, high] = value;
  return `${name} ${low === null ? `< ${high}` : high === null ? `≥ ${low}` : `${low} to ${high}`}`;
}

// -- the list -----------------------------------------------------------------------------------------------

function list(answer, now) {
  const { episodes, start, total } = answer, order = now.order ?? "";
  if (!episodes.length) {
    return make("p", { class: "empty" }, now.where || now.search ? "No episode fits." : "No episode yet.");
  }
  const sort = (column) => {
    const down = order === `-${column}`, up = order === column;
    const [next, arrow] = down ? [column, " ▾"] : up ? [null, " ▴"] : [`-${column}`, ""];
    const attributes = { href: address({ order: next, start: null }), id: `sort-${column}` };
    return make("a", attributes, `${column === "newest" ? "version" : column}${arrow}`);
  };
  const head = COLUMNS.map((some) => {
    const sorted = some.includes(order.replace("-", ""));
    const by = order.startsWith("-") ? "descending" : "ascending";
    const links = some.flatMap((one, at) => (at ? [" · ", sort(one)] : [sort(one)]));
    return make("th", { "aria-sort": sorted ? by : null }, ...links);
  });
  const largest = {};
  episodes.flatMap((one) => Object.entries(one.components))
    .forEach(([name, value]) => (largest[name] = Math.max(largest[name] ?? 1, Math.abs(value))));
  const page = (by, label) => (start + by < 0 || start + by >= total ? null
    : make("a", { href: address({ start: start + by || null, uid: null }), id: label }, label));
  return [
    table(head, episodes.map((one) => row(one, now, largest))),
    total <= PAGE ? null : make("p", { class: "bar pager" }, page(-PAGE, "‹ before"),
      `${start + 1} to ${start + episodes.length} of ${number(total)}`, page(PAGE, "next ›")),
  ];
}

function row(one, now, largest) {
  const { oldest, newest, components, kind, step, calls, failed_calls: failed } = one;
  const versions = newest === null ? "" : oldest === newest ? `v${newest}` : `v${oldest}–${newest}`;
  const under = (...texts) => make("div", { class: "dim" }, ...texts);
  const code = (text) => make("code", {}, line(text, 200));
  const bars = Object.entries(components).slice(0, 6).map(([name, value]) => {
    const hue = value < 0 ? "var(--bad)" : undefined;
    const bar = meter(Math.abs(value) / largest[name], `${name} ${number(value)}`, hue);
    return Object.assign(bar, { ariaLabel: bar.title, role: "img" });
  });
  const why = { class: "bad", title: `${failed} of ${calls} calls failed: ${one.failed_tool}` };
  const wrong = failed ? make("span", why, ` ✗${failed}`) : "";
  const when = step === null ? one.state : `${kind === "train" ? "step" : kind} ${step}`;
  const choose = { "aria-selected": String(one.uid === now.uid), onclick: () => go({ uid: one.uid }) };
  return make("tr", { "data-uid": one.uid, ...choose }, ...[
    [make("a", { href: address({ uid: one.uid }) }, line(one.question, 200) || one.uid),
      under(code(one.answer || "–"), ...(one.truth ? [" · truth ", code(one.truth)] : []))],
    [make("b", {}, number(one.score)), make("div", { class: "parts" }, ...bars)],
    [number(one.turns), wrong, under(number(one.tokens))],
    [number(one.lag), under(versions)],
    [one.end || one.state, under(when)],
  ].map((cell) => make("td", {}, ...cell)));
}

// -- tools --------------------------------------------------------------------------------------------------

function toolTable(found) {
  if (!found.length) return make("p", { class: "empty" }, "No tool was called.");
  const rows = found.map((one) => {
    const share = one.failed / one.calls;
    const [which, title] = one.failed
      ? [{ where: JSON.stringify([["failed_tool", "=", one.tool]]) }, "episodes in which it failed first"]
      : [{ search: one.tool }, "episodes in whose text its name is"];
    return [
      make("a", { href: address({ ...ALL, sub: null, ...which }), title }, one.tool),
      `${number(one.calls)}${one.refused ? `, ${number(one.refused)} refused` : ""}`,
      make("span", { class: share ? "bad" : "dim" }, percent(share)),
      meter(share, percent(share), "var(--bad)"), seconds(one.p50), seconds(one.p95),
      one.error ? `${line(one.error, 200)} (×${number(one.errors)})` : "–",
    ];
  });
  const heading = make("h2", {}, `Tools, of ${isFile ? "the whole run" : "the episodes that fit"}`);
  return [heading, table(["tool", "calls", "failed", "", "p50", "p95", "most frequent error"], rows)];
}

// -- the reader ---------------------------------------------------------------------------------------------

async function load(run, uid) {
  const key = `${run} ${uid}`, known = loaded.get(key);
  const row = listed.episodes.find((one) => one.uid === uid);
  const stamp = JSON.stringify(row && [row.state, row.turns, row.step]);
  const over = known && (uid.startsWith("val") || OVER.includes(known.state));
  if (over || (row && known?.stamp === stamp)) return known;
  const episode = Object.assign(await ask("episode", { run, uid }), { stamp });
  loaded.set(key, episode);
  if (loaded.size > KEPT) loaded.delete(loaded.keys().next().value);
  return episode;
}

/** Members of its group; of a held-out episode those of the same question, at all validations. */
async function group(run, { kind, group: number, sample, mode }) {
  const same = [["sample", "=", sample], ["kind", "=", kind], ["mode", "=", mode]];
  const where = JSON.stringify(kind === "train" ? [["group", "=", number]] : same);
  const found = await asked("episodes", { run, where, order: kind === "train" ? "member" : "step" });
  return found.episodes.map((one) => one.uid);
}

async function read(place, now, current) {
  const { run, uid, colour, side } = now;
  const empty = (text, kind) => redraw(place, text, () => make("p", { class: kind }, text));
  if (!uid) return empty("Nothing to read.", "empty");
  try {
    const first = await load(run, uid);
    members = await group(run, first.listed);
    const uids = side ? [uid, ...members.filter((one) => one !== uid)].slice(0, SIDE) : [uid];
    const some = await Promise.all(uids.map((one) => load(run, one)));
    if (!current()) return;
    redraw(place, [now, some.map((one) => one.stamp)],
      () => (side ? sideBySide(some, colour) : draw(first, colour, buttons(first))));
    place.parentElement.classList.toggle("side", Boolean(side));
    if (place.dataset.uid !== uid) place.scrollTop = 0;
    place.dataset.uid = uid;
  } catch (error) {
    if (current()) empty(error.message, "alert");
  }
}

function buttons(episode) {
  const button = (label, title, act) => make("button", { title, onclick: act, "data-act": label }, label);
  const copy = (label, text) => button(label, `copy the episode as ${label}`, ({ target }) => {
    copied(text()).then(() => (target.textContent = `✓ ${label}`), (error) => fail(error.message));
  });
  return [
    button("‹", "previous: key k", () => next(-1)), button("›", "next: key j", () => next(1)),
    members.length > 1 ? button(`group of ${members.length}`, "side by side: key g", side) : null,
    copy("text", () => asText(episode)), copy("JSON", () => JSON.stringify(episode, null, 1)),
  ];
}

// -- keys ---------------------------------------------------------------------------------------------------

function next(by) {
  const at = listed.episodes.findIndex((one) => one.uid === route().uid) + by;
  if (listed.episodes[at]) return go({ uid: listed.episodes[at].uid });
  const start = listed.start + by * PAGE;
  if (start >= 0 && start < listed.total) go({ start: start || null, uid: null });
}

const side = () => go({ side: route().side ? null : "1" });
const sibling = () => go({ uid: members[(members.indexOf(route().uid) + 1) % members.length] });
const search = () => document.getElementById("search")?.select();

export const keys = { j: () => next(1), k: () => next(-1), n: sibling, g: side, "/": search };
