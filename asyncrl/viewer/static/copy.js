// An episode as text, and the way to the clipboard.
import { make } from "view/dom.js";

export function asText({ uid, listed, result, prompt, turns, text }) {
  const said = ({ role, content }) => `--- ${role}\n${content}`;
  const lines = turns.flatMap((turn) => [
    `--- turn ${turn.index + 1} ${turn.agent}`, ...(turn.agent ? [turn.context.text, "--- model"] : []),
    turn.texts.join(""),
    ...turn.replies.map((one) => `--- ${one.call.name} ${one.error ?? ""}\n${one.content}`),
    ...(turn.observation?.messages ?? []).map(said),
  ]);
  return [
    `episode ${uid} (${listed.kind}, ${listed.state} ${listed.reason})`, `question: ${listed.question}`,
    `answer: ${listed.answer}`, `ground truth: ${listed.truth}`, `ended: ${result.end}`,
    ...Object.entries({ score: listed.score, ...listed.components }).map((pair) => pair.join(": ")),
    ...(turns[0]?.agent ? [] : prompt.map(said)), ...lines, text,
  ].join("\n");
}

/** Also where the browser gives a page no clipboard, as from a file. */
export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea", {}, text);
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    if (!done) throw new Error("the browser gave no clipboard");
  }
}
