// Markdown to DOM nodes. Text goes in as text nodes only, so nothing that a model writes can become markup.
//
// Every character that is shown knows its place in the source text, so that tokens can be coloured
// whatever the markup around them. A text is handled as ranges of lines, [start, end), from which the
// marks of quotes and lists have been cut; `Flat` joins such ranges and remembers where each character was.

export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

class Flat {
  constructor(source, lines) {
    this.text = "";
    this.at = [];
    lines.forEach(([start, end], i) => {
      if (i) this.push("\n", start - 1);
      for (let k = start; k < end; k++) this.push(source[k], k);
    });
  }

  push(character, place) {
    this.text += character;
    this.at.push(place);
  }
}

const FENCE = /^(\s{0,3})(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^\s{0,3}(#{1,6})\s+/;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const QUOTE = /^\s{0,3}>\s?/;
const ROW = /^\s*\|.*\|\s*$/;
const DASHES = /^\s*\|(\s*:?-+:?\s*\|)+\s*$/;

function linesOf(source) {
  const lines = [];
  let start = 0;
  for (let end = source.indexOf("\n"); end >= 0; end = source.indexOf("\n", start)) {
    lines.push([start, end]);
    start = end + 1;
  }
  if (start < source.length) lines.push([start, source.length]);
  return lines;
}

// The blocks of some lines: [{ kind, lines, ... }].
function blocksOf(source, lines) {
  const text = ([start, end]) => source.slice(start, end);
  const blocks = [];
  let i = 0;
  const takeWhile = (test) => {
    const first = i;
    while (i < lines.length && test(text(lines[i]), i - first)) i++;
    return lines.slice(first, i);
  };
  while (i < lines.length) {
    const line = text(lines[i]);
    const fence = FENCE.exec(line);
    if (!line.trim()) i++;
    else if (fence) {
      i++;
      const mark = fence[2];
      const inner = takeWhile((t) => !(t.trim().startsWith(mark) && !t.trim().slice(mark.length).replaceAll(mark[0], "")));
      blocks.push({ kind: "code", language: fence[3], lines: inner, closed: i < lines.length });
      i++;
    } else if (HEADING.test(line)) {
      const mark = HEADING.exec(line);
      blocks.push({ kind: "heading", level: mark[1].length, lines: [[lines[i][0] + mark[0].length, lines[i][1]]] });
      i++;
    } else if (RULE.test(line)) {
      blocks.push({ kind: "rule", lines: [lines[i++]] });
    } else if (QUOTE.test(line)) {
      const quoted = takeWhile((t) => QUOTE.test(t));
      blocks.push({ kind: "quote", lines: quoted.map(([s, e]) => [s + QUOTE.exec(source.slice(s, e))[0].length, e]) });
    } else if (ITEM.test(line)) {
      const first = ITEM.exec(line);
      const ordered = /\d/.test(first[2]);
      blocks.push({ kind: "list", ordered, lines: takeWhile((t, n) => n === 0 || continuesList(t, ordered, first[1].length)) });
    } else if (ROW.test(line) && i + 1 < lines.length && DASHES.test(text(lines[i + 1]))) {
      blocks.push({ kind: "table", lines: takeWhile((t) => ROW.test(t)) });
    } else {
      blocks.push({ kind: "text", lines: takeWhile((t, n) => t.trim() && (n === 0 || !startsBlock(t))) });
    }
  }
  return blocks;
}

const startsBlock = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((mark) => mark.test(line));

// Items of the same kind, and whatever is indented deeper. A blank line may lie between items.
function continuesList(line, ordered, indent) {
  const item = ITEM.exec(line);
  if (item && item[1].length <= indent) return item[1].length === indent && /\d/.test(item[2]) === ordered;
  return Boolean(item) || /^\s+\S/.test(line) || !line.trim();
}

function itemsOf(source, lines) {
  const indent = ITEM.exec(source.slice(...lines[0]))[1].length;
  const items = [];
  for (const [start, end] of lines) {
    const line = source.slice(start, end);
    const mark = ITEM.exec(line);
    if (mark && mark[1].length === indent) items.push([[start + mark[0].length, end]]);
    else items.at(-1).push([Math.min(end, start + Math.min(line.length - line.trimStart().length, indent + 3)), end]);
  }
  return items;
}

export class Markdown {
  // `emit(parent, text, places)` puts text into the page; `places` are the offsets of its characters.
  constructor(container, emit) {
    this.container = container;
    this.emit = emit;
    this.shown = [];
  }

  // Show `source`. What has been shown of it before and is the same block still stays as it is.
  render(source) {
    this.source = source;
    const blocks = blocksOf(source, linesOf(source));
    blocks.forEach((block, i) => {
      const end = block.lines.at(-1)?.[1] ?? 0;
      const id = `${block.kind} ${block.lines[0]?.[0]} ${end} ${block.closed}`;
      if (this.shown[i] === id) return;
      this.shown[i] = id;
      const node = this.block(block);
      const old = this.container.childNodes[i];
      if (old) old.replaceWith(node);
      else this.container.append(node);
    });
    while (this.container.childNodes.length > blocks.length) this.container.lastChild.remove();
    this.shown.length = blocks.length;
  }

  block(block) {
    const { kind, lines } = block;
    if (kind === "code") return this.code(block);
    if (kind === "rule") return element("hr");
    if (kind === "quote") return this.into(element("blockquote"), lines);
    if (kind === "list") {
      const list = element(block.ordered ? "ol" : "ul");
      const first = /\d+/.exec(this.source.slice(...lines[0]));
      if (block.ordered && first) list.setAttribute("start", first[0]);
      for (const item of itemsOf(this.source, lines)) list.append(this.into(element("li"), item));
      return list;
    }
    if (kind === "table") return this.table(lines);
    // Headings of an answer lie below those of the page.
    const node = element(kind === "heading" ? `h${Math.min(6, block.level + 2)}` : "p");
    this.inline(node, new Flat(this.source, lines));
    return node;
  }

  into(parent, lines) {
    const blocks = blocksOf(this.source, lines);
    blocks.forEach((block, i) => {
      const isPlain = parent.tagName === "LI" && block.kind === "text" && i === 0;
      if (isPlain) this.inline(parent, new Flat(this.source, block.lines));
      else parent.append(this.block(block));
    });
    return parent;
  }

  code({ language, lines }) {
    const code = element("code");
    const flat = new Flat(this.source, lines);
    this.emit(code, flat.text, flat.at);
    const copy = element("button", { type: "button", class: "quiet" }, "Copy");
    copy.addEventListener("click", () => copyText(flat.text, copy));
    const pre = element("pre", { tabindex: "0" }, code);
    return element("figure", { class: "code" }, element("figcaption", {}, element("span", {}, language || "text"), copy), pre);
  }

  table(lines) {
    const table = element("table");
    lines.forEach(([start, end], i) => {
      if (i === 1) return; // the dashes
      const row = table.appendChild(element("tr"));
      const bars = [];
      for (let k = start; k < end; k++) if (this.source[k] === "|" && this.source[k - 1] !== "\\") bars.push(k);
      for (let k = 0; k + 1 < bars.length; k++) {
        const cell = row.appendChild(element(i ? "td" : "th"));
        const text = this.source.slice(bars[k] + 1, bars[k + 1]);
        const left = bars[k] + 1 + text.length - text.trimStart().length;
        this.inline(cell, new Flat(this.source, [[left, left + text.trim().length]]));
      }
    });
    return element("div", { class: "scroll", tabindex: "0" }, table);
  }

  inline(parent, flat, start = 0, end = flat.text.length) {
    let plain = start;
    const flush = (to) => {
      if (to > plain) this.emit(parent, flat.text.slice(plain, to), flat.at.slice(plain, to));
    };
    let i = start;
    while (i < end) {
      const span = spanAt(flat.text, i, end);
      if (!span) {
        i++;
        continue;
      }
      flush(i);
      if (span.tag) {
        const node = parent.appendChild(element(span.tag, span.attributes));
        if (span.raw) this.emit(node, flat.text.slice(span.from, span.to), flat.at.slice(span.from, span.to));
        else this.inline(node, flat, span.from, span.to);
      }
      i = span.next;
      plain = span.from === undefined ? span.keep ?? i : i;
    }
    flush(end);
  }
}

const ESCAPED = /^\\([\\`*_{}[\]()#+\-.!~|<>])/;
const LINK = /^!?\[([^\]\n]*)\]\(\s*<?([^\s)>]*)>?(?:\s+"[^"\n]*")?\s*\)/;
const URL = /^https?:\/\/[^\s<>"'`)\]]*[^\s<>"'`)\].,;:!?]/;
const SAFE = /^(https?:\/\/|mailto:)/i;
const PAIRS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const isWord = (character) => /[\p{L}\p{N}]/u.test(character ?? "");

// The inline element that begins at `i`, if one does: its tag, its content [from, to), where to go on.
function spanAt(text, i, end) {
  const character = text[i];
  if (!"\\\n`![*_~h".includes(character)) return null;
  if (character === "\n") return { tag: "br", from: i, to: i, next: i + 1 };
  const rest = text.slice(i, end);
  if (ESCAPED.test(rest)) return { next: i + 2, keep: i + 1 };
  if (character === "`") return codeAt(text, i, end);
  const link = LINK.exec(rest);
  if (link && SAFE.test(link[2])) {
    const from = i + rest.indexOf("[") + 1;
    return { tag: "a", attributes: linkTo(link[2]), from, to: from + link[1].length, next: i + link[0].length };
  }
  const url = isWord(text[i - 1]) ? null : URL.exec(rest);
  if (url) return { tag: "a", attributes: linkTo(url[0]), raw: true, from: i, to: i + url[0].length, next: i + url[0].length };
  for (const [mark, tag] of PAIRS) {
    if (!rest.startsWith(mark)) continue;
    const to = closing(text, i, end, mark);
    if (to > 0) return { tag, from: i + mark.length, to, next: to + mark.length };
  }
  return null;
}

const linkTo = (href) => ({ href, target: "_blank", rel: "noopener noreferrer" });

function codeAt(text, i, end) {
  const marks = /^`+/.exec(text.slice(i, end))[0];
  for (let to = text.indexOf(marks, i + marks.length); to >= 0 && to < end; to = text.indexOf(marks, to + 1)) {
    if (text[to + marks.length] === "`" || text[to - 1] === "`") continue;
    return { tag: "code", raw: true, from: i + marks.length, to, next: to + marks.length };
  }
  return null;
}

// Where the mark that opens at `i` closes; 0 if it does not open anything.
function closing(text, i, end, mark) {
  const from = i + mark.length;
  if (/\s/.test(text[from] ?? " ") || (mark[0] === "_" && isWord(text[i - 1]))) return 0;
  for (let to = text.indexOf(mark, from + 1); to >= 0 && to + mark.length <= end; to = text.indexOf(mark, to + 1)) {
    const after = text[to + mark.length];
    const isSplit = mark.length === 1 && (after === mark || text[to - 1] === mark);
    if (!isSplit && !/\s/.test(text[to - 1]) && !(mark[0] === "_" && isWord(after))) return to;
  }
  return 0;
}

export async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed here"; // browsers copy on https and localhost only
  }
  setTimeout(() => (button.textContent = "Copy"), 1500);
}
