// Episodes side by side, turn beside turn; what the others say otherwise than the first one is marked.
import { counted, fold, make, number } from "view/dom.js";
import { address, link } from "view/route.js";
import { branches, escaped, line, parts } from "view/parts.js";
import { bounded, drawTurn, gist, painter, role } from "view/reader.js";

const MOST = 20000; // characters of a text that are compared
const AHEAD = 100; // words, in which a shared one is looked for

export function sideBySide(episodes, colour) {
  const [first] = episodes, most = Math.max(...episodes.map((one) => one.turns.length));
  const aside = new Map(episodes.flatMap((one) => branches(one.turns)).filter((row) => row.aside)
    .flatMap((row) => row.turns.map((turn) => [turn, `sub-agent ${row.agent}: ${line(row.title, 60)}`])));
  const title = (turn) =>
    [`turn ${turn.index + 1}`, aside.get(turn) ?? turn.agent].filter(Boolean).join(" · ");
  const rows = Array.from({ length: most }, (_, at) => {
    const turns = episodes.map((one) => one.turns[at]);
    const same = turns.every((turn) => turn && told(turn) === told(turns[0]));
    if (!same || colour) {
      return turns.map((turn, column) =>
        cell(turn, turn && title(turn), column ? turns[0] : null, episodes[column], colour));
    }
    const draw = () => drawTurn(turns[0], null, first, painter(first, colour));
    return make("div", { class: "same" },
      fold(`${title(turns[0])}, identical in all: ${gist(turns[0])}`, false, draw));
  });
  const style = { gridTemplateColumns: `repeat(${episodes.length}, minmax(19rem, 1fr))` };
  return [
    make("div", { class: "bar" },
      make("span", { class: "dim" }, `highlighted: text that ${first.uid} does not contain`),
      link({ side: null }, "back to one episode (key g)")),
    make("div", { class: "beside", style }, ...episodes.map((one) => head(one, first)), ...rows.flat()),
  ];
}

const told = (turn) => JSON.stringify([turn.texts.join(""), turn.replies.map(outcome)]);

function head(one, first) {
  const { uid, score, answer, end, state, turns } = one.listed;
  const at = one.turns.findIndex((turn, n) => !first.turns[n] || told(turn) !== told(first.turns[n]));
  const apart = one === first ? "reference: the others are compared with this one"
    : at < 0 ? "identical turn by turn" : `differs from turn ${at + 1} onward`;
  return make("article", { class: "column", "data-uid": uid },
    make("a", { href: address({ uid, side: null }) }, uid), make("b", {}, ` score ${number(score)}`),
    ` · ${end || state} · ${counted(turns, "turn")}`,
    make("div", { class: "dim" }, `answer: ${line(answer || "–", 80)}`, make("br"), apart));
}

function cell(turn, title, reference, episode, colour) {
  if (!turn) return make("div", { class: "turn dim" }, "(no such turn)");
  if (colour) return drawTurn(turn, null, episode, painter(episode, colour));
  const shown = (of) => {
    const text = of(turn), other = reference ? of(reference) : text;
    return text === other ? bounded(text) : marked(text, other);
  };
  const replies = turn.replies.map((one, at) =>
    role("tool", one.call.name, shown((some) => outcome(some.replies[at]))));
  return make("div", { class: "turn" }, make("h4", {}, title), role("model", "", shown(words)), ...replies);
}

const outcome = ({ error, content } = {}) => (error ? `✗ ${error}\n${content}` : content ?? "");
const words = (turn) => parts(turn).map((part) => part.text).join("");

/** A text, with the words marked that the other one has not. */
function marked(text, other) {
  const found = differences(text.slice(0, MOST), other.slice(0, MOST)), left = text.length - MOST;
  const shown = ([same, some]) => (same ? escaped(some) : make("mark", { class: "differs" }, escaped(some)));
  return make("div", { class: "text" }, ...found.map(shown),
    left > 0 ? make("p", { class: "dim" }, `${number(left)} more characters`) : null);
}

/** [[same, text], …]: where a word differs, both go on at the nearest word that they share. */
function differences(text, other) {
  const [a, b] = [text, other].map((one) => one.match(/(\w+|[^\s\w])\s*|\s+/g) ?? []), found = [];
  const shared = (i, j) => {
    for (let far = 0; far < AHEAD; far++) {
      for (let n = 0; n <= far; n++) if (a[i + n] && a[i + n] === b[j + far - n]) return [n, far - n];
    }
    return [1, 1];
  };
  for (let i = 0, j = 0; i < a.length;) {
    const [own, others] = shared(i, j);
    const same = a[i + own] === b[j + others] ? 1 : 0;
    found.push([false, a.slice(i, i + own).join("")], [true, a.slice(i + own, i + own + same).join("")]);
    [i, j] = [i + own + same, j + others + same];
  }
  return found.filter(([, some]) => some);
}
