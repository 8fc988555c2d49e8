// Live figures beside the conversation, from /v1/speculation and /metrics.

import { getJson, getText } from "./api.js";
import { classOf, nameOf } from "./answer.js";
import { bars, columns, line, places, scatter } from "./charts.js";
import { element } from "./markdown.js";

const PERIOD_MS = 1000;
const KEPT = 120; // values of a line: two minutes
const at = (id) => document.getElementById(id);
const history = { speed: [], profit: [] };
let last = null; // { at, tokens } of the reading before

const push = (values, value) => {
  values.push(value);
  if (values.length > KEPT) values.shift();
};

// The sample of a metric without labels.
export function sample(text, name) {
  const found = new RegExp(`^outrider:${name} (\\S+)$`, "m").exec(text);
  return found ? Number(found[1]) : 0;
}

async function read() {
  const [speculation, metrics] = await Promise.all([getJson("v1/speculation"), getText("metrics")]);
  const now = performance.now();
  const tokens = speculation.emitted_tokens;
  if (last && tokens >= last.tokens) push(history.speed, (tokens - last.tokens) / ((now - last.at) / 1000));
  last = { at: now, tokens };
  if (speculation.profit) push(history.profit, speculation.profit.ratio);
  draw(speculation, metrics);
}

function draw(speculation, metrics) {
  const percent = (value) => `${(100 * value).toFixed(0)} %`;
  at("figures").replaceChildren(
    figure("running", sample(metrics, "num_requests_running")),
    figure("waiting", sample(metrics, "num_requests_waiting")),
    figure("tokens a step", speculation.mean_acceptance_length.toFixed(2)),
    figure("cache", percent(sample(metrics, "kv_cache_usage_perc"))),
  );
  line(at("speed"), history.speed, { unit: "tok/s", digits: 0, room: KEPT });
  line(at("profit"), history.profit, { unit: "×", digits: 2, room: KEPT, base: 1 });
  const sources = Object.entries(speculation.sources).map(([source, counts]) => ({
    name: nameOf(source),
    kind: classOf(source),
    part: counts.accepted_tokens,
    whole: counts.draft_tokens,
    byPlace: (counts.draft_tokens_per_position ?? []).map((drafted, i) => ({
      part: counts.accepted_tokens_per_position?.[i] ?? 0,
      whole: drafted,
    })),
  }));
  bars(at("sources"), sources);
  places(at("positions"), sources);
  columns(at("decisions"), speculation.decisions);
  scatter(at("guesses"), Object.entries(speculation.survival).map(([source, depths]) => ({
    name: nameOf(source),
    kind: classOf(source),
    points: depths.flatMap(({ curve }) => curve),
  })));
}

const figure = (name, value) => element("div", {}, element("dt", {}, name), element("dd", {}, String(value)));

export function startLive() {
  const turn = async () => {
    const isSeen = !document.hidden && document.body.classList.contains("with-live");
    let wait = PERIOD_MS;
    if (isSeen) {
      try {
        await read();
      } catch {
        last = null;
        wait = 5 * PERIOD_MS; // no key, loading or gone: the conversation says which
      }
    }
    setTimeout(turn, wait);
  };
  turn();
}
