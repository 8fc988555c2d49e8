// The race: one prompt, answered without speculation and with it.
//
// The two runs take turns, because side by side they would share the machine and measure each other. Each
// gets a cache salt of its own, so that neither finds what the other left behind. Afterwards both are shown
// again at the same time, at the pace at which their tokens came.

import { Answer } from "./answer.js";
import { element } from "./markdown.js";

export class Race {
  constructor(container) {
    this.verdict = element("p", { class: "verdict", role: "status" }, "Plain decoding runs first, then speculation.");
    this.lanes = ["Speculation off", "Speculation on"].map((title) => {
      const clock = element("output", {}, "waiting");
      const section = element("section", { class: "lane" }, element("h3", {}, title, clock));
      return { section, clock };
    });
    const grid = element("div", { class: "lanes" }, ...this.lanes.map((lane) => lane.section));
    container.append(this.verdict, grid);
    this.container = container;
  }

  // `generate(answer, fields)` streams one answer into the page. Both runs get the same seed. Returns the text.
  async run(generate, seed = crypto.getRandomValues(new Uint32Array(1))[0]) {
    const salt = crypto.getRandomValues(new Uint32Array(2)).join("-");
    const overrides = ["off", undefined];
    for (const [i, lane] of this.lanes.entries()) {
      lane.answer = new Answer(lane.section);
      const ticking = setInterval(() => this.tick(lane), 100);
      const fields = { speculation: overrides[i], cache_salt: `race ${salt} ${i}`, return_token_ids: true };
      try {
        await generate(lane.answer, { ...fields, seed });
      } finally {
        clearInterval(ticking);
        this.tick(lane);
      }
    }
    this.judge();
    return this.lanes[1].answer.text;
  }

  tick(lane, text) {
    const speed = lane.answer.speed;
    lane.clock.textContent = text ?? (speed === null ? "…" : `${speed.toFixed(1)} tok/s`);
  }

  judge() {
    const [off, on] = this.lanes.map((lane) => lane.answer);
    const place = off.tokenIds.findIndex((id, i) => id !== on.tokenIds[i]);
    const isEqual = place < 0 && off.tokenIds.length === on.tokenIds.length && off.text === on.text;
    this.verdict.classList.add(isEqual ? "equal" : "different");
    const mark = element("strong", {}, isEqual ? "The texts are equal" : "The texts differ");
    const detail = isEqual
      ? `, all ${on.tokenIds.length} tokens.`
      : ` from token ${(place < 0 ? Math.min(off.tokenIds.length, on.tokenIds.length) : place) + 1} on.`;
    this.verdict.replaceChildren(mark, detail);
    if (off.speed && on.speed) {
      const ratio = element("span", { class: "ratio" }, `${(on.speed / off.speed).toFixed(2)}×`);
      this.verdict.append(" ", ratio, ` the speed: ${off.speed.toFixed(1)} → ${on.speed.toFixed(1)} tok/s.`);
    }
    const again = element("button", { type: "button", class: "quiet" }, "Replay side by side");
    again.addEventListener("click", () => this.replay(again));
    this.verdict.append(" ", again);
  }

  replay(button) {
    button.disabled = true;
    const began = performance.now();
    const ends = this.lanes.map((lane) => lane.answer.arrivals.at(-1)[0]);
    const frame = () => {
      const now = performance.now() - began;
      for (const lane of this.lanes) {
        const seen = lane.answer.arrivals.filter(([at]) => at <= now).at(-1);
        lane.answer.shownLength = seen?.[1] ?? 0;
        lane.answer.render();
        this.tick(lane, `${(Math.min(now, lane.answer.arrivals.at(-1)[0]) / 1000).toFixed(1)} s`);
      }
      if (now < Math.max(...ends)) return requestAnimationFrame(frame);
      for (const lane of this.lanes) {
        lane.answer.shownLength = null;
        lane.answer.render();
        this.tick(lane);
      }
      button.disabled = false;
    };
    frame();
  }
}
