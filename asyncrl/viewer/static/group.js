// Episodes side by side, turn beside turn; what the others say otherwise than the first one is marked.
import { make, number } from "view/dom.js";
import { address, link } from "view/route.js";
import { parts } from "view/parts.js";
import { bounded, called, drawTurn, escaped, gist, line, painter, unfolds } from "view/reader.js";

const MOST = 20000; // characters of a text that are compared
const WORDS = 1500; // of it that are compared one by one

export function sideBySide(episodes, colour) {
  const [first] = episodes, most = Math.max(...episodes.map((one) => one.turns.length));
  const rows = Array.from({ length: most }, (_, at) => {
    const turns = episodes.map((one) => one.turns[at]);
    const same = turns.every((turn) => turn && told(turn) === told(turns[0]));
    if (!same || colour) {
      return turns.map((turn, column) => cell(turn, column ? turns[0] : null, episodes[column], colour));
    }
    const title = `turn ${at + 1}, the same in all: ${gist(turns[0])}`;
    const draw = () => drawTurn(turns[0], null, first, painter(first, colour));
    return make("div", { class: "same" }, unfolds(title, `same-${at}`, false, draw));
  });
  const middle = { block: "center", inline: "center" };
  const seek = () => document.querySelector(".differs")?.scrollIntoView(middle);
  const style = { gridTemplateColumns: `repeat(${episodes.length}, minmax(19rem, 1fr))` };
  return [
    make("div", { class: "bar" },
      make("button", { onclick: seek, id: "first-difference" }, "first difference"),
      make("span", { class: "dim" }, `marked: what ${first.uid} does not say`),
      link({ side: null }, "one episode (key g)")),
    make("div", { class: "beside", style }, ...episodes.map((one) => head(one, first)), ...rows.flat()),
  ];
}

const told = (turn) => JSON.stringify([turn.texts.join(""), turn.replies.map((one) => one.content)]);

function head(one, first) {
  const { uid, score, answer, end, state, turns } = one.listed;
  const dim = (text) => make("div", { class: "dim" }, text);
  const at = one.turns.findIndex((turn, n) => !first.turns[n] || told(turn) !== told(first.turns[n]));
  const apart = one === first ? "the others are compared with it"
    : at < 0 ? "the same, turn by turn" : `differs from turn ${at + 1} on`;
  return make("article", { class: "column", "data-uid": uid },
    make("a", { href: address({ uid, side: null }) }, uid), make("b", {}, ` score ${number(score)}`),
    ` · ${end || state} · ${turns} turns`,
    dim(`answer: ${line(answer || "–", 80)}`), dim(apart));
}

function cell(turn, reference, episode, colour) {
  if (!turn) return make("div", { class: "turn dim" }, "(no such turn)");
  if (colour) return drawTurn(turn, null, episode, painter(episode, colour));
  const shown = (of) => {
    const text = of(turn), other = reference ? of(reference) : text;
    return text === other ? bounded(text) : marked(text, other);
  };
  const replies = turn.replies.map((one, at) => make("div", { class: "role tool" },
    make("span", { class: "who" }, one.call.name), shown((some) => some.replies[at]?.content ?? "")));
  return make("div", { class: "turn" }, make("h4", {}, `turn ${turn.index + 1}`),
    make("div", { class: "role model" }, shown(words)), ...replies);
}

/** What the model says in a turn; calls that were read, as calls. */
function words(turn) {
  const some = parts(turn), calls = some.filter((part) => part.kind === "call");
  const read = (part) => calls.length === turn.replies.length && turn.replies[calls.indexOf(part)]?.call;
  return some.map((part) => (read(part) ? called(read(part), MOST) : part.text)).join("\n");
}

/** A text, with the words marked that the other one has not. */
function marked(text, other) {
  const found = differences(text.slice(0, MOST), other.slice(0, MOST));
  const more = make("p", { class: "dim" }, `and ${number(text.length - MOST)} characters more`);
  const shown = ([same, some]) => (same ? escaped(some) : make("mark", { class: "differs" }, escaped(some)));
  return make("div", { class: "text" }, ...found.map(shown), text.length > MOST ? more : null);
}

/** [[same, text], …]: the longest common words, between what both texts begin and end with. */
function differences(text, other) {
  const [a, b] = [text, other].map((one) => one.match(/\s+|\w+|[^\s\w]/g) ?? []), found = [];
  const add = (same, word) => {
    if (found.at(-1)?.[0] === same) found.at(-1)[1] += word;
    else found.push([same, word]);
  };
  let start = 0, end = 0;
  while (start < a.length && a[start] === b[start]) start += 1;
  while (end < Math.min(a.length, b.length) - start && a.at(-1 - end) === b.at(-1 - end)) end += 1;
  const x = a.slice(start, a.length - end), y = b.slice(start, b.length - end);
  a.slice(0, start).forEach((word) => add(true, word));
  const most = x.length > WORDS || y.length > WORDS ? 0 : y.length; // of longer ones nothing is the same
  const left = Array.from({ length: x.length + 1 }, () => new Uint16Array(most + 1)); // common words to come
  for (let i = x.length - 1; most && i >= 0; i--) {
    const [row, next] = [left[i], left[i + 1]];
    for (let j = most - 1; j >= 0; j--) {
      row[j] = x[i] === y[j] ? next[j + 1] + 1 : Math.max(next[j], row[j + 1]);
    }
  }
  for (let i = 0, j = 0; i < x.length;) {
    if (j < most && x[i] === y[j]) [i, j] = [i + 1, j + 1, add(true, x[i])];
    else if (j < most && left[i][j + 1] >= left[i + 1][j]) j += 1;
    else add(false, x[i++]);
  }
  a.slice(a.length - end).forEach((word) => add(true, word));
  return found;
}
