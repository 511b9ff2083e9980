// One episode as a conversation, its tokens coloured by what is chosen.
import { PALETTE, fold, make, number } from "view/dom.js";

export const COLOURS = {
  logprobs: "log-prob",
  versions: "version",
  lags: "lag",
  advantages: "advantage",
  stale: "masked (too old)",
  none: "nothing",
};

export function draw(episode, colour) {
  const result = episode.result;
  const step = episode.step === null ? "not in a batch" : `in batch ${episode.step}`;
  const parts = Object.entries(result.components).map(([name, value]) => `${name} ${number(value)}`);
  const facts = [
    [`reward ${number(result.reward)}`, parts.length ? `(${parts.join(", ")})` : "", result.shaping ? `of which shaping ${number(result.shaping)}` : ""].filter(Boolean).join(" "),
    `${episode.state}${episode.reason ? `: ${episode.reason}` : ""}`,
    `ended: ${episode.landed ? result.end : "not yet"}`,
    step,
    `versions ${episode.oldest} to ${episode.newest}`,
    `${number(result.tokens)} model tokens of ${number(episode.tokens)}`,
    `${number(episode.stats.seconds)} s, ${number(episode.stats.tool_s)} s in tools`,
    episode.failures || episode.losses ? `${episode.failures} attempts failed, ${episode.losses} lost` : "",
  ];
  return make(
    "article",
    { "data-uid": episode.uid },
    make("h3", {}, `Episode ${episode.uid}${episode.greedy ? " (greedy)" : ""}, group ${episode.group}, sample ${episode.sample.row} of ${episode.sample.source}`),
    make("p", {}, facts.filter(Boolean).join(" · ")),
    make("p", { class: "dim" }, `ground truth: ${episode.sample.truth}`),
    episode.missing ? make("p", { class: "alert" }, episode.missing) : null,
    colour === "advantages" && episode.no_advantage ? make("p", { class: "alert" }, `no advantages: ${episode.no_advantage}`) : null,
    fold(`${episode.sample.prompt.length} messages of the sample`, true, ...episode.sample.prompt.map(message)),
    ...episode.turns.map((turn) => drawTurn(turn, colour, result)),
  );
}

function message(one) {
  return make("div", {}, make("b", {}, `${one.role}: `), make("span", { class: "text" }, one.content));
}

function drawTurn(turn, colour, result) {
  const paint = painter(turn[colour], colour);
  const earned = result.turn_rewards?.[turn.index];
  const facts = [`turn ${turn.index + 1}`, turn.row ? `row ${turn.row + 1}` : "", turn.agent, `stop: ${turn.stop}`, `${number(turn.seconds)} s`, earned === undefined ? "" : `reward ${number(earned)}`];
  const context = make("div", { class: "text" }, ...turn.context.texts.map((text, at) => make("span", { title: `id ${turn.context.ids[at]}` }, visible(text))));
  return make(
    "div",
    { class: "turn" },
    make("div", { class: "dim" }, facts.filter(Boolean).join(" · ")),
    fold(`${turn.context.ids.length} tokens of context`, false, context),
    make("div", { class: "text model" }, ...turn.texts.map((text, at) => token(turn, at, text, paint))),
    ...turn.replies.map(reply),
    turn.observation ? fold(`environment${turn.observation.reward ? `, reward ${number(turn.observation.reward)}` : ""}${turn.observation.done ? ", done" : ""}`, false, ...turn.observation.messages.map(message)) : null,
  );
}

function token(turn, at, text, paint) {
  const more = [
    `id ${turn.ids[at]}`,
    `log-prob of the engine ${number(turn.logprobs[at], 4)}`,
    `version ${turn.versions[at]}${turn.kv_versions[at] === turn.versions[at] ? "" : `, keys and values from ${turn.kv_versions[at] < 0 ? "?" : turn.kv_versions[at]} on`}`,
    turn.lags ? `lag ${turn.lags[at]}${turn.stale[at] ? ", masked" : ""}` : "",
    turn.advantages ? `advantage ${number(turn.advantages[at], 4)}` : "",
    turn.rewards?.[at] ? `reward ${number(turn.rewards[at])}` : "",
  ];
  const stale = turn.stale?.[at] ? "stale" : null;
  return make("span", { title: more.filter(Boolean).join("\n"), class: stale, style: { background: paint(at) } }, visible(text));
}

// An empty text, or one of line breaks only, has still a place to point at.
function visible(text) {
  return text === "" ? "·" : text.replace(/^(\n+)$/, "↵$1");
}

function reply(one) {
  const failed = one.error ? ` — failed: ${one.error}` : one.refused ? " — refused" : "";
  return fold(`${one.call.name}(${one.call.arguments})${failed} · ${number(one.seconds)} s`, false, make("div", { class: "text" }, one.content));
}

function painter(values, colour) {
  if (!values) return () => "";
  const largest = Math.max(1e-9, ...values.map(Math.abs));
  const shade = (share, hue) => `color-mix(in srgb, ${hue} ${Math.round(70 * Math.min(1, share))}%, transparent)`;
  switch (colour) {
    case "logprobs":
      return (at) => shade(-values[at] / 5, PALETTE[1]); // full at a probability of e^-5
    case "versions":
      return (at) => shade(0.5, PALETTE[values[at] % PALETTE.length]);
    case "lags":
      return (at) => shade(values[at] / 4, PALETTE[0]);
    case "stale":
      return (at) => (values[at] ? shade(0.8, PALETTE[5]) : "");
    default:
      return (at) => shade(Math.abs(values[at]) / largest, values[at] < 0 ? PALETTE[5] : PALETTE[0]);
  }
}
