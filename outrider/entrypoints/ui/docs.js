// The API's routes and fields, from this server's own OpenAPI description.

import { element } from "./markdown.js";

const named = (schema) => (schema.$ref ? schema.$ref.split("/").pop() : null);
const kind = (schema) =>
  named(schema) ??
  (schema.anyOf ? schema.anyOf.map(kind).join(" | ")
  : schema.enum ? schema.enum.map((value) => JSON.stringify(value)).join(" | ")
  : schema.const !== undefined ? JSON.stringify(schema.const)
  : schema.type === "array" ? `list of ${kind(schema.items ?? {})}`
  : schema.type ?? "any");

const SIGNS = [["minimum", "≥"], ["exclusiveMinimum", ">"], ["maximum", "≤"], ["exclusiveMaximum", "<"]];
const bounds = (schema) => SIGNS.filter(([key]) => schema[key] !== undefined).map(([key, sign]) => `${sign} ${schema[key]}`).join(", ");

function fields(schema) {
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const limits = [field, ...(field.anyOf ?? [])].map(bounds).filter(Boolean).join(", ");
    return element("tr", {}, element("td", {}, element("code", {}, name)), element("td", {}, kind(field)), element("td", {}, limits));
  });
  return element("table", {}, ...rows);
}

function folded(title, text, ...content) {
  return element("details", {}, element("summary", {}, element("code", {}, title), ` ${text}`), ...content);
}

const api = await (await fetch("openapi.json")).json();
const main = document.querySelector("main");
for (const [path, operations] of Object.entries(api.paths)) {
  for (const [method, operation] of Object.entries(operations)) {
    const body = operation.requestBody?.content["application/json"].schema;
    const content = body ? [fields(api.components.schemas[named(body)])] : [];
    main.append(folded(`${method.toUpperCase()} ${path}`, operation.description ?? "", ...content));
  }
}
main.append(element("h2", {}, "Parts"));
for (const [name, schema] of Object.entries(api.components?.schemas ?? {})) main.append(folded(name, "", fields(schema)));
