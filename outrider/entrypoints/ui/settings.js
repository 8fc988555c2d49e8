// What the user has set; kept in this browser, except for the key.

import { key } from "./api.js";

const KEPT = "outrider.settings";
const DEFAULTS = {
  system: "", temperature: 0.7, max_tokens: 512, seed: "", theme: "auto", speculation: "on", colours: true, live: null,
};

const load = () => {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(KEPT)) };
  } catch {
    return { ...DEFAULTS };
  }
};

export const settings = load();

export function keep() {
  localStorage.setItem(KEPT, JSON.stringify(settings));
}

// The request fields that the settings ask for.
export function fields() {
  const number = (text) => (String(text).trim() === "" ? undefined : Number(text));
  const asked = { max_tokens: number(settings.max_tokens), temperature: number(settings.temperature), seed: number(settings.seed) };
  if (settings.speculation === "off") asked.speculation = "off";
  return asked;
}

function apply() {
  if (settings.theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = settings.theme;
  document.body.classList.toggle("plain", !settings.colours);
}

export function wireSettings(onKey) {
  const dialog = document.getElementById("settings");
  document.getElementById("settings-button").addEventListener("click", () => dialog.showModal());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  for (const name of Object.keys(DEFAULTS)) {
    const field = dialog.querySelector(`#${name}`);
    if (!field) continue;
    const part = field.type === "checkbox" ? "checked" : "value";
    field[part] = settings[name];
    field.addEventListener("change", () => {
      if (!field.checkValidity()) field[part] = settings[name];
      settings[name] = field[part];
      keep();
      apply();
    });
  }
  const keyField = document.getElementById("api_key");
  keyField.value = key.get();
  keyField.addEventListener("change", () => {
    key.set(keyField.value.trim());
    onKey();
  });
  apply();
}

// Ask for a key, because the server wants one.
export function askForKey() {
  document.getElementById("key-field").hidden = false;
  const dialog = document.getElementById("settings");
  if (!dialog.open) dialog.showModal();
  document.getElementById("api_key").focus();
}
