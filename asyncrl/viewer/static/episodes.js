// The tab of episodes: facets, a list, and beside it the reader of the chosen one; or what the tools did.
// Everything that is chosen is in the address: where, order, search, start, uid, colour, side, sub.
import {
  MEANINGS, byId, counted, explained, fold, make, meter, number, percent, redraw, seconds, table,
} from "view/dom.js";
import { address, go, goLater, route } from "view/route.js";
import { ask, isFile } from "view/source.js";
import { sideBySide } from "view/group.js";
import { asText, line } from "view/parts.js";
import { chip, draw } from "view/reader.js";

const PAGE = 100;
const FRESH = 2500; // milliseconds for which a list is not asked for again
const KEPT = 40; // answers in memory
const SIDE = 16; // members side by side, at most
const INLINE = 5; // values of a facet that are always shown
const WAIT = 400; // milliseconds without a key, after which a search begins
const OVER = ["trained", "filtered", "dropped", "failed"];
const ANEW = { where: null, search: null, start: null, uid: null, side: null };
const COLUMNS = [
  ["question", "answer", "truth"], ["score"], ["turns", "tokens"], ["lag", "newest"], ["end", "step"],
];

const known = new Map(); // by what was asked: [until when it holds, answer]
let listed = { episodes: [], total: 0, start: 0 };
let entry = 0; // of a page, which episode is opened: -1 after a step back
let members = []; // uids of the group of the episode that is open

async function asked(name, query, holds = () => FRESH) {
  const key = JSON.stringify([name, query]), [until, old] = known.get(key) ?? [0];
  if (Date.now() < until) return old;
  const answer = await ask(name, query);
  known.set(key, [Date.now() + holds(answer), answer]);
  if (known.size > KEPT) known.delete(known.keys().next().value);
  return answer;
}

/** Asked for again as long as it changes. */
const load = (run, uid) => asked("episode", { run, uid },
  ({ state }) => (uid.startsWith("val") || OVER.includes(state) ? Infinity : 0));

export async function show(place, now, state, current) {
  if (!place.firstChild) place.append(...skeleton());
  const { run, where, order, start, search, sub } = now;
  if (document.activeElement !== byId("search")) byId("search").value = search ?? "";
  const answer = await asked("episodes", { run, where, order, start, search });
  if (!current()) return;
  listed = answer;
  redraw(byId("facets"), [answer.facets, now], () => facets(answer.facets, JSON.parse(now.where || "[]")));
  redraw(byId("active"), [now, answer.total, answer.searched], () => active(answer, now));
  [byId("panes").hidden, byId("tools").hidden] = [sub === "tools", sub !== "tools"];
  if (sub === "tools") {
    const found = await ask("tools", { run, where });
    if (current()) redraw(byId("tools"), [found, now], () => toolTable(found));
  } else if (!now.uid && answer.episodes.length) {
    go({ uid: answer.episodes.at(entry).uid }, true);
    entry = 0;
  } else {
    redraw(byId("list"), [answer, now], () => list(answer, now));
    const chosen = byId("list").querySelector('[aria-selected="true"]');
    if (byId("reader").dataset.uid !== now.uid) chosen?.scrollIntoView({ block: "nearest" });
    await read(byId("reader"), now, current);
  }
}

function skeleton() {
  const searched = ({ target }) => goLater({ search: target.value, start: null, uid: null }, WAIT);
  const pane = (id, label) => make("div", { id, tabindex: 0, role: "region", "aria-label": label });
  return [
    make("div", { class: "bar" },
      make("input", { type: "search", id: "search", oninput: searched, "aria-label": "search",
        placeholder: "search questions, answers, transcripts  ( / )" }),
      make("div", { class: "bar", id: "active" })),
    make("div", { class: "facets", id: "facets" }),
    make("div", { class: "panes", id: "panes" }, pane("list", "Episodes"), pane("reader", "Episode")),
    make("div", { class: "card", id: "tools" }),
  ];
}

// -- what is chosen -----------------------------------------------------------------------------------------

const alike = (one, other) => JSON.stringify(one) === JSON.stringify(other);

/** The address with a condition put in, or taken out where it is in. */
function toggled(where, condition) {
  const without = where.filter((one) => !alike(one, condition));
  const next = without.length < where.length ? without : [...where, condition];
  return address({ start: null, uid: null, side: null, where: next.length ? JSON.stringify(next) : null });
}

function facets(some, where) {
  return some.map(({ column, label, values }) => {
    const chosen = (value) => where.some((one) => alike(one, [column, "=", value]));
    const known = values.filter((one) => one.count || chosen(one.value));
    const earned = where.length && column === "score"; // also said where all that fit have the same
    if (known.length < 2 && !known.some((one) => chosen(one.value)) && !earned) return null;
    const chips = known.map((one) => {
      const shown = { id: `facet-${column}-${one.label}`, "data-facet": column, "data-value": one.value };
      return chip(toggled(where, [column, "=", one.value]), chosen(one.value), shown,
        `${line(String(one.label), 40)} `, make("b", {}, number(one.count)));
    });
    const rest = chips.slice(INLINE);
    return make("div", { class: "facet", role: "group", "aria-label": label },
      make("span", { class: "dim" }, explained(label)), ...chips.slice(0, INLINE),
      rest.length ? fold(`${rest.length} more`, false, ...rest) : null);
  });
}

/** How many fit, and what they have to fit, each to be taken out again. */
function active({ total, searched, facets: some }, now) {
  const where = JSON.parse(now.where || "[]"), { search, sub = "" } = now;
  const chips = where.map((one) => {
    const [column, operator, value] = one, facet = some.find((each) => each.column === column);
    const label = facet?.values.find((each) => alike(each.value, value))?.label ?? value ?? "none";
    return [toggled(where, one), `${facet?.label ?? column} ${operator === "=" ? "" : operator} ${label}`];
  });
  if (search) chips.push([address({ search: null, uid: null }), `“${line(search, 40)}”`]);
  const view = (name, label) => chip(address({ sub: name }), sub === name, {}, label);
  return [
    make("b", { id: "count" }, counted(total, "episode")),
    searched ? make("span", { class: "dim", id: "searched" }, "searched all questions and answers, and "
      + `the transcripts of ${number(searched.transcripts)} of ${number(searched.of)} episodes`) : null,
    ...chips.map(([href, text]) => chip(href, true, { title: "remove" }, `${text} ✕`)),
    chips.length > 1 ? make("a", { href: address(ANEW) }, "clear all") : null,
    make("span", { class: "push" }, view("", "list"), view("tools", "tools")),
  ];
}

// -- the list -----------------------------------------------------------------------------------------------

function list(answer, now) {
  const { episodes, start, total } = answer, order = now.order ?? "", by = order.replace("-", "");
  if (!episodes.length) {
    return make("p", { class: "empty" }, now.where || now.search ? "No episode matches." : "No episodes yet.");
  }
  const sort = (column) => {
    const [next, arrow] = by !== column ? [`-${column}`, ""] : order === by ? [null, " ▴"] : [by, " ▾"];
    const name = column === "newest" ? "version" : column;
    const link = { href: address({ order: next, start: null }), id: `sort-${column}`, title: MEANINGS[name] };
    return make("a", link, name + arrow);
  };
  const head = COLUMNS.map((some) => make("th", {
    "aria-sort": !some.includes(by) ? null : order === by ? "ascending" : "descending",
  }, ...some.flatMap((one) => [" · ", sort(one)]).slice(1)));
  const largest = {};
  episodes.flatMap((one) => Object.entries(one.components))
    .forEach(([name, value]) => (largest[name] = Math.max(largest[name] ?? 1, Math.abs(value))));
  const page = (first, label) => (first < 0 || first >= total ? null
    : make("a", { href: address({ start: first || null, uid: null }), id: label }, label));
  return [
    table(head, episodes.map((one) => row(one, now, largest))),
    total <= PAGE ? null : make("p", { class: "bar pager" }, page(start - PAGE, "‹ previous"),
      `${start + 1} to ${start + episodes.length} of ${number(total)}`, page(start + PAGE, "next ›")),
  ];
}

function row(one, now, largest) {
  const { uid, oldest, newest, kind, step, stale, calls, failed_calls: failed } = one;
  const versions = newest === null ? "" : oldest === newest ? `v${newest}` : `v${oldest}–${newest}`;
  const under = (...texts) => make("div", { class: "dim" }, ...texts);
  const code = (text) => make("code", {}, line(text, 200));
  const bars = Object.entries(one.components).slice(0, 6).map(([name, value]) =>
    meter(Math.abs(value) / largest[name], `${name} ${number(value)}`, value < 0 ? "var(--bad)" : undefined));
  const wrong = failed ? `${failed} of ${calls} calls failed, first in ${one.failed_tool}` : "";
  const masked = stale === "all" ? 1 : one.masked, share = masked ? percent(masked) : "some";
  const old = ["some", "all"].includes(stale) && `${share} of its tokens are older than buffer.max_staleness`;
  const flag = (text, title) => title && make("span", { class: "bad", title }, text);
  const choose = { "aria-selected": String(uid === now.uid), onclick: () => go({ uid }) };
  return make("tr", { "data-uid": uid, ...choose }, ...[
    [make("a", { href: address({ uid }), title: line(one.question, 400) }, line(one.question, 200) || uid),
      under(code(one.answer || "–"), ...(one.truth ? [" · truth ", code(one.truth)] : []))],
    [make("b", {}, number(one.score)), make("div", { class: "parts" }, ...bars)],
    [number(one.turns), flag(` ✗${failed}`, wrong), under(number(one.tokens))],
    [number(one.lag), flag(` ✂ ${share}`, old), under(versions)],
    [one.end || one.state, under(step === null ? one.state : `${kind === "train" ? "step" : kind} ${step}`)],
  ].map((cell) => make("td", {}, ...cell)));
}

// -- tools --------------------------------------------------------------------------------------------------

function toolTable(found) {
  if (!found.length) return make("p", { class: "empty" }, "No tool was called.");
  const rows = found.map((one) => {
    const share = one.failed / one.calls;
    const to = (column) => address({ ...ANEW, sub: null, where: JSON.stringify([[column, "=", one.tool]]) });
    const failures = { href: to("failed_tool"), class: "bad", title: "episodes whose first failed call was to this tool" };
    return [
      make("a", { href: to("tool"), title: "episodes that called this tool" }, line(one.tool, 60)),
      `${number(one.calls)}${one.refused ? `, ${number(one.refused)} refused` : ""}`,
      share ? make("a", failures, percent(share)) : percent(share),
      meter(share, percent(share), "var(--bad)"), seconds(one.p50), seconds(one.p95),
      one.error ? `${line(one.error, 200)} (×${number(one.errors)})` : "–",
    ];
  });
  const heading = make("h2", {}, `Tools in ${isFile ? "the whole run" : "the matching episodes"}`);
  return [heading, table(["tool", "calls", "failed", "", "p50", "p95", "most frequent error"], rows)];
}

// -- the reader ---------------------------------------------------------------------------------------------

/** Members of its group; of a held-out episode those of the same question, at all validations. */
async function group(run, { kind, group: number, sample, mode }) {
  const same = [["sample", "=", sample], ["kind", "=", kind], ["mode", "=", mode]];
  const where = JSON.stringify(kind === "train" ? [["group", "=", number]] : same);
  const found = await asked("episodes", { run, where, order: kind === "train" ? "member" : "step" });
  return found.episodes.map((one) => one.uid);
}

async function read(place, now, current) {
  const { run, uid, colour, side } = now;
  if (!uid) return redraw(place, "", () => make("p", { class: "empty" }, "No episode to show."));
  try {
    const first = await load(run, uid);
    members = await group(run, first.listed);
    const uids = side ? [...new Set([uid, ...members])].slice(0, SIDE) : [uid];
    const some = await Promise.all(uids.map((one) => load(run, one)));
    if (!current()) return;
    const top = place.dataset.uid === uid ? place.scrollTop : 0, shown = `${uid} ${colour}`;
    // Folds stay as they were, but for another episode or colour.
    if (place.dataset.shown !== shown) place.querySelectorAll("details").forEach((one) => one.remove());
    redraw(place, [now, some.map((one) => [one.uid, one.state, one.step, one.turns.length])],
      () => (side ? sideBySide(some, colour) : draw(first, colour, buttons(first))));
    place.parentElement.classList.toggle("side", Boolean(side));
    place.scrollTop = top;
    Object.assign(place.dataset, { uid, shown });
  } catch (error) {
    if (current()) redraw(place, error.message, () => make("p", { class: "alert" }, error.message));
  }
}

function buttons(episode) {
  const button = (label, title, act) => make("button", { title, onclick: act, "data-act": label }, label);
  const none = new Error("browsers allow copying only on https and localhost");
  const copy = (label, text) => button(label, `copy the episode as ${label}`, async ({ target }) => {
    target.textContent = await (navigator.clipboard?.writeText(text()) ?? Promise.reject(none))
      .then(() => `${label} copied`, ({ message }) => `not copied: ${message}`);
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
  if (start < 0 || start >= listed.total) return;
  entry = Math.min(0, by);
  go({ start: start || null, uid: null });
}

const side = () => go({ side: route().side ? null : "1" });

export const keys = {
  j: () => next(1), k: () => next(-1), g: side, "/": () => byId("search").select(),
  n: () => go({ uid: members[(members.indexOf(route().uid) + 1) % members.length] }),
};
