// One answer on the page: its text as markdown, each token coloured by where it came from, figures below.

import { Markdown, copyText, element } from "./markdown.js";

export const SOURCES = {
  model: "model",
  mtp: "MTP",
  mtp_second: "MTP’s second choice",
  ngram: "n-gram",
  suffix: "suffix",
  predicted: "prediction",
  grammar: "grammar",
  draft_model: "draft model",
  phrases: "phrases",
};
export const nameOf = (source) => SOURCES[source] ?? source;
export const classOf = (source) => (source in SOURCES ? source : "other");

// Text made of tokens, as markdown; each token in the colour of its source.
class Coloured {
  constructor(container) {
    this.text = "";
    this.ends = []; // where each token ends in the text
    this.origins = []; // and its source
    this.markdown = new Markdown(container, (parent, text, places) => this.emit(parent, text, places));
  }

  // Append `text` and say which of the `waiting` tokens it is made of. A token's text may come later, or never.
  add(text, waiting) {
    let end = this.text.length;
    this.text += text;
    const mark = (length, source) => {
      end += length;
      this.ends.push(end);
      this.origins.push(source);
      text = text.slice(length);
    };
    while (text) {
      const token = waiting[0];
      if (!token) mark(text.length, "model");
      else if (!token.text) waiting.shift();
      else if (text.startsWith(token.text)) {
        mark(token.text.length, token.source);
        waiting.shift();
      } else if (token.text.startsWith(text)) {
        const { length } = text;
        mark(length, token.source);
        token.text = token.text.slice(length);
      } else {
        const next = waiting.findIndex((other) => other.text && text.startsWith(other.text));
        if (next > 0) waiting.splice(0, next); // tokens that are not shown
        else mark(1, token.source);
      }
    }
  }

  emit(parent, text, places) {
    let i = 0;
    while (i < text.length) {
      const token = this.tokenAt(places[i]);
      let j = i + 1;
      while (j < text.length && places[j] < this.ends[token] && places[j] > places[j - 1]) j++;
      const piece = text.slice(i, j);
      const source = this.origins[token] ?? "model";
      if (source === "model") parent.append(piece);
      else parent.append(element("span", { class: `token ${classOf(source)}`, title: nameOf(source) }, piece));
      i = j;
    }
  }

  tokenAt(place) {
    let low = 0;
    let high = this.ends.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle] > place) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}

export class Answer {
  constructor(container) {
    this.tokenIds = [];
    this.counts = {}; // tokens by source
    this.arrivals = []; // [milliseconds, characters, tokens] after each chunk
    this.waiting = []; // tokens whose text has not come yet: it may be held back
    this.thoughts = element("div", { class: "prose" });
    this.thinking = element("details", { class: "thinking", open: "" }, element("summary", {}, "Thinking"), this.thoughts);
    this.body = element("div", { class: "prose", "aria-busy": "true" });
    this.figures = element("footer");
    container.append(this.body, this.figures);
    this.reasoning = new Coloured(this.thoughts);
    this.content = new Coloured(this.body);
    this.shownLength = null; // show only so much of it (replay)
    this.isDrawing = false;
    this.began = performance.now();
  }

  get text() {
    return this.content.text;
  }

  // Take a chunk of the stream.
  add(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.speculation) this.speculation = chunk.speculation;
    this.seed = chunk.seed;
    const choice = chunk.choices[0];
    if (!choice) return;
    const sources = choice.token_sources ?? [];
    sources.forEach((source, i) => {
      this.counts[source] = (this.counts[source] ?? 0) + 1;
      this.waiting.push({ text: choice.token_strs[i], source });
    });
    this.tokenIds.push(...(choice.token_ids ?? []));
    this.finishReason = choice.finish_reason ?? this.finishReason;
    this.reasoning.add(choice.delta.reasoning_content ?? "", this.waiting);
    this.content.add(choice.delta.content ?? "", this.waiting);
    if (sources.length) {
      const before = this.arrivals.at(-1)?.[2] ?? 0;
      this.arrivals.push([performance.now() - this.began, this.text.length, before + sources.length]);
    }
    this.draw();
  }

  draw() {
    if (this.isDrawing) return;
    this.isDrawing = true;
    requestAnimationFrame(() => {
      this.isDrawing = false;
      this.render();
    });
  }

  render() {
    const text = this.shownLength === null ? this.text : this.text.slice(0, this.shownLength);
    this.content.markdown.render(text);
    if (this.reasoning.text) {
      if (!this.thinking.isConnected) this.body.before(this.thinking);
      this.reasoning.markdown.render(this.reasoning.text);
    }
    this.onDraw?.();
  }

  // Tokens per second from the first chunk to the last; null while unknown.
  get speed() {
    if (this.arrivals.length < 2) return null;
    const [first, last] = [this.arrivals[0], this.arrivals.at(-1)];
    return (last[2] - first[2]) / ((last[0] - first[0]) / 1000);
  }

  // The answer is complete, or `note` says why it is not.
  finish(note) {
    this.body.setAttribute("aria-busy", "false");
    this.render();
    this.figures.replaceChildren(this.shares(), this.line(note), this.accepted(), this.buttons());
  }

  shares() {
    const total = Object.values(this.counts).reduce((sum, count) => sum + count, 0);
    const bar = element("div", { class: "shares", role: "img", "aria-label": this.sharesInWords(total) });
    for (const source of Object.keys(SOURCES).filter((name) => this.counts[name])) {
      const part = element("i", { class: source, title: `${nameOf(source)}: ${this.counts[source]} of ${total} tokens` });
      part.style.flexGrow = this.counts[source];
      bar.append(part);
    }
    return bar;
  }

  sharesInWords(total) {
    const parts = Object.entries(this.counts).map(([source, count]) => `${nameOf(source)} ${count}`);
    return `${total} tokens: ${parts.join(", ")}`;
  }

  line(note) {
    const line = element("p", { class: "numbers" });
    if (note) line.append(element("strong", {}, note));
    if (this.speed !== null) line.append(element("span", { class: "speed" }, `${this.speed.toFixed(1)} tok/s`));
    const count = this.usage?.completion_tokens ?? this.arrivals.at(-1)?.[2] ?? 0;
    line.append(element("span", {}, `${count} tokens`));
    const stats = this.speculation;
    if (stats?.draft_tokens) {
      line.append(element("span", {}, `${stats.mean_acceptance_length.toFixed(2)} a step`));
    }
    if (this.arrivals.length) line.append(element("span", {}, `first after ${(this.arrivals[0][0] / 1000).toFixed(2)} s`));
    if (this.finishReason === "length") line.append(element("span", {}, "cut at max tokens"));
    return line;
  }

  accepted() {
    const sources = Object.entries(this.speculation?.by_source ?? {}).filter(([, counts]) => counts.draft_tokens);
    const line = element("p", { class: "accepted" });
    if (sources.length) line.append(element("span", {}, "accepted"));
    for (const [source, counts] of sources) {
      const title = `${counts.accepted_tokens} of ${counts.draft_tokens} tokens that ${nameOf(source)} drafted`;
      const text = `${nameOf(source)} ${counts.accepted_tokens}/${counts.draft_tokens}`;
      line.append(element("span", { title }, element("i", { class: `dot ${classOf(source)}` }), text));
    }
    return line;
  }

  buttons() {
    const copy = element("button", { type: "button", class: "quiet" }, "Copy");
    copy.addEventListener("click", () => copyText(this.text, copy));
    const seed = element("span", { class: "seed", title: "the same seed gives the same answer" }, `seed ${this.seed ?? "none"}`);
    return element("p", { class: "tools" }, copy, seed);
  }
}
