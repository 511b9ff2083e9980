// One episode as a conversation, its tokens coloured by what is chosen.
import { FULL, PALETTE, fold, make, number } from "view/dom.js";

export const COLOURS = {
  logprobs: "log-prob",
  versions: "version",
  lags: "lag",
  ratios: "pi/mu",
  advantages: "advantage",
  masked: "masked",
  none: "nothing",
};

const LEGENDS = {
  logprobs: "full: the engine's log-prob is -5 or less",
  versions: "a colour for each version, again after seven",
  lags: "full: the lag is buffer.max_staleness or more",
  ratios: "blue: the policy in training makes the token likelier than the engine did, full from 2 on; orange: less likely, full from 1/2 on",
  advantages: "blue: above 0, orange: below; full: the largest of the turn",
  masked: "red and struck out: it was not trained on",
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
    colour === "ratios" && !episode.turns.some((turn) => turn.ratios) ? make("p", { class: "alert" }, "no pi/mu: it is recorded of trained episodes whose transcript is kept: the first 4 of one group a batch") : null,
    colour === "advantages" && episode.no_advantage ? make("p", { class: "alert" }, `no advantages: ${episode.no_advantage}`) : null,
    make("p", { class: "dim" }, LEGENDS[colour] ?? ""),
    fold(`${episode.sample.prompt.length} messages of the sample`, true, ...episode.sample.prompt.map(message)),
    ...episode.turns.map((turn) => drawTurn(turn, colour, episode)),
  );
}

function message(one) {
  return make("div", {}, make("b", {}, `${one.role}: `), make("span", { class: "text" }, one.content));
}

function drawTurn(turn, colour, { result, bound }) {
  const masked = turn.ids.map((_, at) => [turn.stale?.[at] && "too old", turn.dropped?.[at] && "dropped by the correction"].filter(Boolean).join(", "));
  const paint = painter(colour === "masked" ? masked : turn[colour], colour, bound);
  const earned = result.turn_rewards?.[turn.index];
  const facts = [`turn ${turn.index + 1}`, turn.row ? `row ${turn.row + 1}` : "", turn.agent, `stop: ${turn.stop}`, `${number(turn.seconds)} s`, earned === undefined ? "" : `reward ${number(earned)}`];
  const context = make("div", { class: "text" }, ...turn.context.texts.map((text, at) => make("span", { title: `id ${turn.context.ids[at]}` }, visible(text))));
  return make(
    "div",
    { class: "turn" },
    make("div", { class: "dim" }, facts.filter(Boolean).join(" · ")),
    fold(`${turn.context.ids.length} tokens of context`, false, context),
    make("div", { class: "text model" }, ...turn.texts.map((text, at) => token(turn, at, text, paint, masked[at]))),
    ...turn.replies.map(reply),
    turn.observation ? fold(`environment${turn.observation.reward ? `, reward ${number(turn.observation.reward)}` : ""}${turn.observation.done ? ", done" : ""}`, false, ...turn.observation.messages.map(message)) : null,
  );
}

function token(turn, at, text, paint, masked) {
  const more = [
    `id ${turn.ids[at]}`,
    `log-prob of the engine ${number(turn.logprobs[at], 4)}`,
    `version ${turn.versions[at]}${turn.kv_versions[at] === turn.versions[at] ? "" : `, keys and values from ${turn.kv_versions[at] < 0 ? "?" : turn.kv_versions[at]} on`}`,
    turn.lags ? `lag ${turn.lags[at]}` : "",
    masked && `masked: ${masked}`,
    turn.ratios ? `pi/mu ${number(turn.ratios[at], 4)}` : "",
    turn.advantages ? `advantage ${number(turn.advantages[at], 4)}` : "",
    turn.rewards?.[at] ? `reward ${number(turn.rewards[at])}` : "",
  ];
  return make("span", { title: more.filter(Boolean).join("\n"), class: masked ? "masked" : null, style: { background: paint(at) } }, visible(text));
}

// An empty text, or one of line breaks only, has still a place to point at.
function visible(text) {
  return text === "" ? "·" : text.replace(/^(\n+)$/, "↵$1");
}

function reply(one) {
  const failed = one.error ? ` — failed: ${one.error}` : one.refused ? " — refused" : "";
  return fold(`${one.call.name}(${one.call.arguments})${failed} · ${number(one.seconds)} s`, false, make("div", { class: "text" }, one.content));
}

// What a full colour stands for is said in LEGENDS.
function painter(values, colour, bound) {
  if (!values) return () => "";
  const largest = values.reduce((most, value) => Math.max(most, Math.abs(value)), 1e-9);
  const shade = (share, hue) => `color-mix(in srgb, ${hue} ${Math.round(FULL * Math.min(1, share))}%, transparent)`;
  switch (colour) {
    case "logprobs":
      return (at) => shade(-values[at] / 5, PALETTE[1]); // full at a probability of e^-5
    case "versions":
      return (at) => shade(0.7, PALETTE[values[at] % PALETTE.length]);
    case "lags":
      return (at) => shade(values[at] / Math.max(1, bound), PALETTE[0]);
    case "masked":
      return (at) => (values[at] ? shade(0.8, PALETTE[5]) : "");
    case "ratios":
      return (at) => (values[at] > 0 ? shade(Math.abs(Math.log2(values[at])), values[at] < 1 ? PALETTE[5] : PALETTE[0]) : "");
    default:
      return (at) => shade(Math.abs(values[at]) / largest, values[at] < 0 ? PALETTE[5] : PALETTE[0]);
  }
}
