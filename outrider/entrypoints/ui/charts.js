// Small charts as SVG. Each function draws into a <figure> that has a caption, and replaces what it drew before.

import { element } from "./markdown.js";

const NS = "http://www.w3.org/2000/svg";
const WIDTH = 320;

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function show(figure, headline, label, ...content) {
  const caption = figure.querySelector("figcaption");
  caption.dataset.value = headline;
  figure.replaceChildren(caption, ...content);
  figure.setAttribute("role", "img");
  figure.setAttribute("aria-label", `${caption.textContent}: ${label}`);
}

const nothing = (text) => element("p", { class: "nothing" }, text);
const frame = (height, ...children) => svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, "aria-hidden": "true" }, ...children);

// A round number at or above `value`.
function ceiling(value) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return [1, 1.5, 2, 3, 5, 7.5, 10].find((step) => step * unit >= value) * unit;
}

// Values over time, the newest at the right edge; `base` draws a line that they are compared with.
export function line(figure, values, { unit, digits, room, base }) {
  if (!values.length) return show(figure, "", "no values yet", nothing("no values yet"));
  const height = 84;
  const [top, bottom] = [14, height - 4];
  const latest = values.at(-1);
  const headline = `${latest.toFixed(digits)} ${unit}`;
  const most = ceiling(Math.max(...values, base ?? 0, 1));
  const x = (i) => WIDTH - (values.length - 1 - i) * (WIDTH / (room - 1));
  const y = (value) => bottom - (value / most) * (bottom - top);
  const points = values.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`);
  const content = [
    svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y(most), y2: y(most) }),
    svg("line", { class: "axis", x1: 0, x2: WIDTH, y1: bottom, y2: bottom }),
    svg("text", { x: 0, y: top - 4 }, String(most)),
  ];
  if (base !== undefined) content.push(svg("line", { class: "base", x1: 0, x2: WIDTH, y1: y(base), y2: y(base) }));
  content.push(svg("circle", { cx: WIDTH - 2, cy: y(latest), r: 2.5 }));
  if (values.length > 1) {
    content.push(svg("path", { class: "area", d: `M${x(0)},${bottom} L${points.join(" L")} L${WIDTH},${bottom} Z` }));
    content.push(svg("path", { class: "line", d: `M${points.join(" L")}` }));
  }
  show(figure, headline, headline, frame(height, ...content));
}

// One bar a series: the part of a whole.
export function bars(figure, series) {
  if (!series.length) return show(figure, "", "no drafts yet", nothing("no drafts yet"));
  const rows = series.map(({ name, kind, part, whole }) => {
    const share = whole ? part / whole : 0;
    const content = [
      svg("rect", { class: "rest", x: 0, y: 2, width: WIDTH, height: 8, rx: 2 }),
      svg("rect", { class: `fill ${kind}`, x: 0, y: 2, width: (WIDTH * share).toFixed(1), height: 8, rx: 2 }),
    ];
    const label = element("p", {}, element("span", {}, name), element("span", {}, `${part} of ${whole}`), element("b", {}, `${(100 * share).toFixed(0)} %`));
    return element("div", { class: "bar" }, label, frame(12, ...content));
  });
  const words = series.map(({ name, part, whole }) => `${name} ${part} of ${whole}`).join(", ");
  show(figure, "", words, ...rows);
}

// Shares by place in the draft, a line for each series.
export function places(figure, series) {
  const most = Math.min(16, Math.max(0, ...series.map(({ byPlace }) => byPlace.length)));
  if (!most) return show(figure, "", "no drafts yet", nothing("no drafts yet"));
  const height = 108;
  const [top, bottom] = [14, height - 16];
  const slot = WIDTH / Math.max(most, 6);
  const x = (place) => (place + 0.5) * slot;
  const content = [
    svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: top, y2: top }),
    svg("text", { x: 0, y: top - 4 }, "100 %"),
    svg("line", { class: "axis", x1: 0, x2: WIDTH, y1: bottom, y2: bottom }),
  ];
  for (let place = 0; place < most; place++) {
    content.push(svg("text", { x: x(place), y: height - 3, "text-anchor": "middle" }, String(place + 1)));
  }
  for (const { name, kind, byPlace } of series) {
    const seen = byPlace.slice(0, most).map((counts, place) => ({ ...counts, place })).filter(({ whole }) => whole);
    const y = ({ part, whole }) => bottom - (part / whole) * (bottom - top);
    const points = seen.map((point) => `${x(point.place).toFixed(1)},${y(point).toFixed(1)}`);
    content.push(svg("path", { class: `trend ${kind}`, d: `M${points.join(" L")}` }));
    for (const point of seen) {
      const dot = svg("circle", { class: `solid ${kind}`, cx: x(point.place), cy: y(point), r: 2.5 });
      dot.append(svg("title", {}, `${name}, place ${point.place + 1}: ${point.part} of ${point.whole} accepted`));
      content.push(dot);
    }
  }
  show(figure, "", `${most} places`, frame(height, ...content));
}

// The controller's last decisions: what was proposed, and what of it was verified.
export function columns(figure, decisions) {
  if (!decisions.length) return show(figure, "", "no decisions yet", nothing("no decisions yet"));
  const recent = decisions.slice(-48);
  const height = 84;
  const [top, bottom] = [14, height - 4];
  const most = Math.max(4, ...recent.map((decision) => decision.proposed));
  const step = WIDTH / 48;
  const y = (value) => bottom - (value / most) * (bottom - top);
  const content = [
    svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: top, y2: top }),
    svg("text", { x: 0, y: top - 4 }, String(most)),
  ];
  recent.forEach(({ proposed, admitted, expected_gain: gain }, i) => {
    const x = WIDTH - (recent.length - i) * step + 0.75;
    const bar = (value, kind) => svg("rect", { class: kind, x, y: y(value), width: step - 1.5, height: bottom - y(value), rx: 1 });
    const both = svg("g", {}, bar(proposed, "rest"), bar(admitted, "fill accent"));
    both.append(svg("title", {}, `${admitted} of ${proposed} verified; ${gain} times plain decoding expected`));
    content.push(both);
  });
  content.push(svg("line", { class: "axis", x1: 0, x2: WIDTH, y1: bottom, y2: bottom }));
  const { admitted, proposed } = recent.at(-1);
  show(figure, `${admitted} of ${proposed}`, `the last step verified ${admitted} of ${proposed}`, frame(height, ...content));
}

// What was guessed of drafts against what came true: on the diagonal the guesses are right. Larger dots saw more.
export function scatter(figure, series) {
  const dots = series.flatMap(({ name, kind, points }) => points.map((point) => ({ name, kind, ...point })));
  if (!dots.length) return show(figure, "", "no drafts yet", nothing("no drafts yet"));
  const height = 132;
  const [left, top, right, bottom] = [0, 14, WIDTH, height - 16];
  const x = (value) => left + value * (right - left);
  const y = (value) => bottom - value * (bottom - top);
  const content = [
    svg("line", { class: "grid", x1: left, x2: right, y1: top, y2: top }),
    svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }),
    svg("line", { class: "base", x1: x(0), y1: y(0), x2: x(1), y2: y(1) }),
    svg("text", { x: left, y: top - 4 }, "100 % accepted"),
    svg("text", { x: left, y: height - 3 }, "0 % guessed"),
    svg("text", { x: right, y: height - 3, "text-anchor": "end" }, "100 %"),
  ];
  for (const { name, kind, guessed, accepted, outcomes } of dots) {
    const dot = svg("circle", { class: `hued ${kind}`, cx: x(guessed), cy: y(accepted), r: Math.min(7, 1.5 + Math.sqrt(outcomes) / 2) });
    dot.append(svg("title", {}, `${name}: guessed ${(100 * guessed).toFixed(0)} %, accepted ${(100 * accepted).toFixed(0)} % of ${Math.round(outcomes)}`));
    content.push(dot);
  }
  show(figure, "", `${dots.length} groups of drafts`, frame(height, ...content));
}
