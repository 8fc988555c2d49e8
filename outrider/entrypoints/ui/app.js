// The page: a conversation with the served model.

import { ApiError, getJson, key, stream } from "./api.js";
import { Answer } from "./answer.js";
import { startLive } from "./live.js";
import { element } from "./markdown.js";
import { Race } from "./race.js";
import { askForKey, fields, keep, settings, wireSettings } from "./settings.js";

const EXAMPLES = [
  "Why is the sky blue?",
  "Write a Python function that reads a CSV file and returns its rows as dictionaries.",
  "Repeat this list three times: apple, banana, cherry, date, elderberry.",
  "Write a JSON object with five cities, their countries and populations.",
];

const at = (id) => document.getElementById(id);
const log = at("log");
const prompt = at("prompt");
let messages = [];
let running = null; // the AbortController of the answer that is being made

// --- conversation ---

async function send(text) {
  at("welcome").hidden = true;
  const isRace = at("race").checked;
  addMessage(text);
  const entry = log.appendChild(element("article", { class: isRace ? "answer race" : "answer", "aria-label": "Answer" }));
  follow(true);
  const asked = [...messages, { role: "user", content: text }];
  setRunning(new AbortController());
  try {
    const answered = isRace ? await race(entry, asked) : await answer(entry, asked);
    messages = [...asked, { role: "assistant", content: answered }];
  } catch (error) {
    if (error.name !== "AbortError") showError(entry, error);
  } finally {
    setRunning(null);
    follow();
  }
}

function addMessage(text) {
  log.append(element("article", { class: "question", "aria-label": "You" }, element("p", {}, text)));
}

async function answer(entry, asked) {
  const shown = new Answer(entry);
  try {
    await generate(shown, asked, {});
  } catch (error) {
    if (error.name !== "AbortError" || !shown.text) throw error; // a stopped answer is part of the conversation
  }
  return shown.text;
}

async function race(entry, asked) {
  return new Race(entry).run((shown, extra) => generate(shown, asked, extra), fields().seed);
}

// Stream an answer into `shown`.
async function generate(shown, asked, extra) {
  const system = settings.system.trim();
  const body = {
    messages: system ? [{ role: "system", content: system }, ...asked] : asked,
    stream: true,
    stream_options: { include_usage: true },
    return_speculation: "detailed",
    ...fields(),
    ...extra,
  };
  shown.onDraw = () => follow();
  let note = "stopped";
  try {
    for await (const chunk of stream("v1/chat/completions", body, running.signal)) shown.add(chunk);
    note = "";
  } catch (error) {
    if (error.name !== "AbortError") note = "broken off";
    throw error;
  } finally {
    shown.finish(note);
    at("status").textContent = note ? `Answer ${note}.` : `Answer finished, ${(shown.speed ?? 0).toFixed(0)} tokens per second.`;
  }
}

function showError(entry, error) {
  if (error.status === 401) askForKey();
  const text = error instanceof ApiError ? error.message : `The page failed: ${error.message}`;
  entry.append(element("p", { class: "error", role: "alert" }, text));
}

function setRunning(controller) {
  running = controller;
  at("stop").hidden = !controller;
  at("send").disabled = Boolean(controller);
}

// Keep the end in sight, unless the reader has scrolled away from it.
let isFollowing = true;
log.addEventListener("scroll", () => (isFollowing = log.scrollHeight - log.scrollTop - log.clientHeight < 60));
function follow(force = false) {
  if (force) isFollowing = true;
  if (isFollowing) log.scrollTop = log.scrollHeight;
}

// --- controls ---

function submit() {
  const text = prompt.value.trim();
  if (!text || running) return;
  prompt.value = "";
  grow();
  send(text);
}

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, 220)}px`;
}

function stop() {
  running?.abort();
  prompt.focus();
}

function showLive(isShown) {
  document.body.classList.toggle("with-live", isShown);
  at("live-button").setAttribute("aria-expanded", String(isShown));
}

const isNarrow = () => matchMedia("(max-width: 60rem)").matches;

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
prompt.addEventListener("input", grow);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || at("settings").open) return;
  if (running) stop();
  else if (isNarrow()) showLive(false);
});
at("stop").addEventListener("click", stop);
at("new-chat").addEventListener("click", () => {
  running?.abort();
  messages = [];
  log.replaceChildren(at("welcome"));
  at("welcome").hidden = false;
  prompt.focus();
});
at("live-button").addEventListener("click", () => {
  settings.live = !document.body.classList.contains("with-live");
  showLive(settings.live);
  if (!isNarrow()) keep();
});
for (const text of EXAMPLES) {
  const button = element("button", { type: "button" }, text);
  button.addEventListener("click", () => running || send(text));
  at("examples").append(element("li", {}, button));
}

async function greet() {
  try {
    const [model] = (await getJson("v1/models")).data;
    at("model").textContent = model.id;
    at("model").title = `context of ${model.max_model_len} tokens`;
    at("max_tokens").max = model.max_model_len;
    if (key.get()) at("key-field").hidden = false;
  } catch (error) {
    at("model").textContent = error.status === 401 ? "needs a key" : "not ready";
    if (error.status === 401) askForKey();
    else setTimeout(greet, 1000);
  }
}

wireSettings(greet);
showLive(isNarrow() ? false : settings.live ?? true);
greet();
startLive();
