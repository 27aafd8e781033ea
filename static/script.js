// The page that tries the interface: a form made from openapi.json, and the answer to what it sends.
"use strict";

const HEADERS = ["X-Request-ID", "WWW-Authenticate", "Retry-After"]; // shown with an answer
const URL_OF_PLANTS = new URL("plants", location.href).href;
const $ = (id) => document.getElementById(id);
let fields = []; // {type, input}, in the order of the form

$("form").addEventListener("submit", send);
$("form").addEventListener("input", ({ target }) => { showProblem(target, ""); showCurl(); });
$("reveal").addEventListener("change", showCurl);
$("copy").addEventListener("click", copy);
load();

async function load() {
  try {
    const api = await (await fetch("openapi.json")).json();
    const { schema } = api.paths["/plants"].post.requestBody.content["application/json"];
    fields = members(schema, api).map(addField);
  } catch {
    $("unavailable").textContent = "The form can't be made: openapi.json did not come. Reload this page to try again.";
    return;
  }
  $("columns").hidden = false;
  showCurl();
}

// The members of a schema: those of its own come before those it refers to.
function members(schema, api) {
  if (schema.$ref) {
    const steps = schema.$ref.slice(2).split("/");
    return members(steps.reduce((part, step) => part[step], api), api);
  }
  const { properties = {}, required = [], allOf = [] } = schema;
  const own = Object.entries(properties).map(([name, member]) => (
    { ...member, name, required: required.includes(name) }
  ));
  return [...own, ...[...allOf].reverse().flatMap((part) => members(part, api))];
}

function addField({ name, type, description, examples, required }) {
  const id = `field-${name}`;
  const inputMode = type === "integer" ? "numeric" : "text";
  const input = element("input", { id, name, required, inputMode, placeholder: examples[0], autocomplete: "off" });
  input.setAttribute("aria-describedby", `${id}-about ${id}-problem`);
  const kind = `${type}, ${required ? "required" : "optional"}`;
  $("fields").append(element("div", { className: "field" },
    element("label", { htmlFor: id }, `${name} `, element("span", { className: "kind" }, kind)),
    input,
    element("p", { className: "about", id: `${id}-about` }, description),
    element("p", { className: "problem", id: `${id}-problem` })));
  return { type, input };
}

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// The body, put together as text: a JavaScript number would lose digits of an id beyond 2**53.
// What can't be a value of its type is sent as a string, so that the service says what is wrong.
function body(valueOf) {
  const texts = fields.filter(valueOf).map((field) => {
    const value = valueOf(field);
    const isText = field.type === "string" || parse(value) === undefined;
    return `${JSON.stringify(field.input.name)}: ${isText ? JSON.stringify(value) : value}`;
  });
  return `{${texts.join(", ")}}`;
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

async function send(event) {
  event.preventDefault();
  if ($("send").ariaDisabled === "true") return; // a request is under way
  const token = $("token").value.trim();
  if (!/^[!-~]+$/.test(token)) { // the browser would send no header with it
    showAnswer("Not sent", "failed");
    return showProblems("token: enter a token, without spaces or other words");
  }
  $("send").ariaDisabled = "true";
  showAnswer("Sending…", "");
  const [answer, text] = await request(token).catch(() => []);
  $("send").ariaDisabled = "false";
  if (!answer) return showAnswer("No answer. It is safe to send the same plant again.", "failed");
  const shown = HEADERS.filter((name) => answer.headers.has(name));
  const lines = shown.map((name) => `${name}: ${answer.headers.get(name)}\n`);
  const pretty = JSON.stringify(parse(text), null, 2) ?? text.trimEnd(); // a proxy's answer is no JSON
  showAnswer(`${answer.status} ${answer.statusText}`, answer.ok ? "good" : "failed", `${lines.join("")}\n${pretty}`);
  const message = answer.ok ? "" : String(parse(text)?.message ?? "");
  showProblems(answer.status === 401 ? `token: ${message}` : message);
}

async function request(token) {
  const headers = { "Authorization": `Bearer ${token}`, "Content-Type": "application/json" };
  const sent = body(({ input }) => input.value);
  const answer = await fetch(URL_OF_PLANTS, { method: "POST", headers, body: sent });
  return [answer, await answer.text()];
}

function showAnswer(status, outcome, details = "") {
  $("answer").replaceChildren(element("p", { className: `status ${outcome}` }, status));
  if (details) {
    const properties = { tabIndex: 0, role: "group", ariaLabel: "Headers and body" };
    $("answer").append(element("pre", properties, ...isolated(details)));
  }
  $("answer").scrollIntoView({ block: "nearest" });
}

// A character that turns the direction of text turns nothing but the value that it is in.
function isolated(text) {
  return text.split('"').flatMap((part, index) => [index ? '"' : "", element("bdi", {}, part)]);
}

// Each part of a message that begins with the name of a field goes beside that field.
function showProblems(message) {
  const parts = message.split("; ");
  const inputs = [...$("form").querySelectorAll("input")];
  for (const input of inputs) {
    const part = parts.find((each) => each.startsWith(`${input.name}: `)) ?? "";
    showProblem(input, part.slice(input.name.length + 2));
  }
  inputs.find(({ ariaInvalid }) => ariaInvalid === "true")?.focus();
}

function showProblem(input, problem) {
  $(`${input.id}-problem`).textContent = problem;
  input.ariaInvalid = String(problem !== "");
}

// Examples stand for what is required and missing.
function showCurl() {
  const sent = body(({ input }) => input.value || (input.required ? input.placeholder : ""));
  const token = ($("reveal").checked && $("token").value.trim()) || "TOKEN";
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  $("curl").replaceChildren(...isolated(`curl ${quoted(URL_OF_PLANTS)} \\
  -H ${quoted(`Authorization: Bearer ${token}`)} \\
  -H 'Content-Type: application/json' \\
  -d ${quoted(sent)}`));
}

async function copy({ target }) {
  try {
    await navigator.clipboard.writeText($("curl").textContent);
    target.textContent = "Copied";
  } catch { // The browser forbids it, but the person can copy what is selected.
    getSelection().selectAllChildren($("curl"));
    target.textContent = "Selected";
  }
  setTimeout(() => { target.textContent = "Copy"; }, 2000);
}
