// The page that tries the interface: a form made from openapi.json, and the answer to what it sends.
"use strict";

const HEADERS = ["X-Request-ID", "WWW-Authenticate", "Retry-After"]; // shown with an answer
const URL_OF_PLANTS = new URL("plants", location.href).href;
const $ = (id) => document.getElementById(id);
const token = $("token");
let storage = {};
let fields = []; // {name, schema, required, input, row}, in the order of the form

try {
  storage = sessionStorage ?? {};
} catch {
  // The browser lets the page store nothing: then the token is forgotten with the page.
}
token.value = storage.token ?? "";
$("form").addEventListener("submit", send);
$("form").addEventListener("input", ({ target }) => { showProblem(target, ""); showCode(); });
$("reveal").addEventListener("change", showCode);
$("retry").addEventListener("click", async () => { await load(); token.focus(); });
for (const button of document.querySelectorAll("[data-copies]")) button.addEventListener("click", copy);
load();

async function load() {
  $("reason").textContent = ""; // so that the same text is announced again
  try {
    build(await (await fetch(new URL("openapi.json", location.href))).json());
  } catch {
    $("unavailable").hidden = false;
    $("reason").textContent = "The description of the interface, openapi.json, can't be loaded.";
    return;
  }
  $("unavailable").hidden = true;
  $("columns").hidden = false;
  showCode();
}

function build(api) {
  const { description, requestBody, responses } = api.paths["/plants"].post;
  const members = ({ content }) => properties(content["application/json"].schema, api);
  const answered = members(responses[200]).map(({ name }) => name); // all but the id
  fields = members(requestBody).map((member) => field(member, !answered.includes(member.name)));
  $("fields").replaceChildren(...fields.map(({ row }) => row));
  $("operation").textContent = description;
  $("answers").replaceChildren(...Object.entries(responses).flatMap(([status, answer]) => [
    element("dt", {}, status === "default" ? "other" : status),
    element("dd", {}, resolve(answer, api).description.replace(/\. .*/s, ".")), // its first sentence
  ]));
}

function resolve(part, api) {
  if (!part.$ref) return part;
  return resolve(part.$ref.slice(2).split("/").reduce((found, step) => found[step], api), api);
}

// The members of a schema: those of its own come before those it refers to.
function properties(schema, api) {
  const { properties: members = {}, required = [], allOf = [] } = resolve(schema, api);
  const own = Object.entries(members).map(([name, schema]) => ({ name, schema, required: required.includes(name) }));
  return [...own, ...[...allOf].reverse().flatMap((part) => properties(part, api))];
}

function field({ name, schema, required }, isId) {
  const choices = schema.type === "boolean" ? [true, false] : schema.enum;
  const input = element(choices ? "select" : "input", {
    id: `field-${name}`, autocomplete: "off", required, placeholder: schema.examples[0],
    inputMode: schema.type === "integer" ? "numeric" : "text",
  });
  if (choices) input.append(...["", ...choices].map((choice) => element("option", {}, choice)));
  if (schema.type !== "string") input.addEventListener("input", () => { input.value = input.value.trim(); });
  input.setAttribute("aria-describedby", `${input.id}-about ${input.id}-problem`);
  const entry = element("div", { className: "entry" }, input);
  if (isId) {
    const onclick = () => {
      input.value = Math.floor(Math.random() * 2 ** 53) + 1;
      input.dispatchEvent(new Event("input", { bubbles: true }));
    };
    entry.append(element("button", { type: "button", className: "small", onclick }, `New ${name}`));
  }
  const kind = `${schema.type}, ${required ? "required" : "optional"}`;
  const row = element("div", { className: "field" },
    element("label", { htmlFor: input.id }, `${name} `, element("span", { className: "kind" }, kind)), entry,
    element("p", { className: "about", id: `${input.id}-about` }, schema.description),
    element("p", { className: "problem", id: `${input.id}-problem` }));
  return { name, schema, required, input, row };
}

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// The token, also where it was copied together with the rest of its header.
function bearer() {
  return token.value.trim().replace(/^Bearer(\s+|$)/i, "");
}

// What is wrong with the token, or "".
function tokenMistake() {
  if (!bearer()) return "enter a token";
  return /^[!-~]+$/.test(bearer()) ? "" : "has a character that no token has";
}

// What is wrong with the value of a field, or "". Text that is no number would not even be JSON.
function mistake({ schema: { type }, required, input: { value } }) {
  if (!value) return required ? "required but missing" : "";
  if (type === "number" && typeof parse(value) !== "number") return "must be a number, like 1.5";
  if (type !== "integer") return "";
  if (!/^-?(0|[1-9]\d*)$/.test(value)) return "must be an integer: only digits, no spaces, no zeros in front";
  return BigInt.asIntN(64, BigInt(value)) === BigInt(value) ? "" : "must be an integer of 64 bits";
}

// The body, put together as text: a JavaScript number would lose digits of an id beyond 2**53.
function body(valueOf) {
  const members = fields.map((field) => [field, valueOf(field)]).filter(([, value]) => value !== "");
  const texts = members.map(([{ name, schema }, value]) => (
    `${JSON.stringify(name)}: ${schema.type === "string" ? JSON.stringify(value) : value}`
  ));
  return `{${texts.join(", ")}}`;
}

async function send(event) {
  event.preventDefault();
  storage.token = token.value = bearer();
  if (showProblems([[token, tokenMistake()], ...fields.map((each) => [each.input, mistake(each)])])) {
    return $("answer").replaceChildren(element("p", { className: "status failed" }, "Not sent"));
  }
  const sent = body(({ input }) => input.value);
  $("send").disabled = true;
  showAnswer("Sending…", "");
  const [answer, text] = await request(sent).catch(() => []);
  $("send").disabled = false;
  // A button that is disabled loses the focus.
  if (document.activeElement === document.body) $("send").focus({ preventScroll: true });
  remember(answer?.status ?? "no answer", sent);
  if (!answer) return showAnswer("No answer. It is safe to send the same plant again.", "failed");
  const { status, statusText, ok, headers } = answer;
  showAnswer(`${status} ${statusText}`, ok ? "good" : "failed", headers, text);
  showProblems(complaints(status, ok ? "" : String(parse(text)?.message ?? "")));
}

async function request(body) {
  const headers = { "Authorization": `Bearer ${token.value}`, "Content-Type": "application/json" };
  const answer = await fetch(URL_OF_PLANTS, { method: "POST", headers, body });
  return [answer, await answer.text()];
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined; // it is from something between here and the service
  }
}

function showAnswer(status, outcome, headers = new Headers(), text = "") {
  const shown = HEADERS.filter((name) => headers.has(name));
  const list = shown.flatMap((name) => [element("dt", {}, name), element("dd", {}, headers.get(name))]);
  $("answer").replaceChildren(element("p", { className: `status ${outcome}` }, status), element("dl", {}, ...list));
  if (text) {
    const pretty = JSON.stringify(parse(text), null, 2) ?? text.trimEnd();
    $("answer").append(element("pre", { tabIndex: 0, role: "group", ariaLabel: "Body" }, pretty));
  }
  $("answer").scrollIntoView({ block: "nearest" });
}

// Each part of a message that names a field goes beside that field.
function complaints(status, message) {
  const parts = message.split("; ");
  return [[token, status === 401 ? message : ""], ...fields.map(({ name, input }) => (
    [input, parts.find((part) => part.startsWith(`${name}: `))?.slice(name.length + 2) ?? ""]
  ))];
}

// Each pair is an input and what is wrong with it, or "". Returns whether anything is.
function showProblems(problems) {
  for (const [input, problem] of problems) showProblem(input, problem);
  const first = problems.find(([, problem]) => problem);
  first?.[0].focus();
  return Boolean(first);
}

function showProblem(input, problem) {
  $(`${input.id}-problem`).textContent = problem;
  input.setAttribute("aria-invalid", String(problem !== ""));
}

function remember(status, sent) {
  $("sent").querySelector(".about")?.remove();
  const mark = element("span", { className: `status ${status === 200 ? "good" : "failed"}` }, String(status));
  $("sent").prepend(element("li", {}, mark, sent.length > 200 ? `${sent.slice(0, 200)}…` : sent));
  $("sent").children[10]?.remove();
}

// The code is a request that would succeed: examples stand for what is missing or wrong.
function showCode() {
  const empty = fields.every(({ input }) => !input.value);
  const sent = body((field) => (
    empty || mistake(field) ? String(field.schema.examples[0]) : field.input.value
  ));
  const credentials = `Bearer ${$("reveal").checked && !tokenMistake() ? bearer() : "TOKEN"}`;
  const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  $("curl").textContent = `curl ${shell(URL_OF_PLANTS)} \\
  -H ${shell(`Authorization: ${credentials}`)} \\
  -H 'Content-Type: application/json' \\
  -d ${shell(sent)}`;
  const js = (text) => `'${text.replace(/[\\']/g, "\\$&")}'`;
  $("fetch").textContent = `await fetch(${js(URL_OF_PLANTS)}, {
  method: 'POST',
  headers: {
    'Authorization': ${js(credentials)},
    'Content-Type': 'application/json',
  },
  body: ${js(sent)},
})`;
}

async function copy({ target }) {
  const code = $(target.dataset.copies);
  try {
    await navigator.clipboard.writeText(code.textContent);
    target.textContent = "Copied";
  } catch { // The browser forbids it, but the person can copy what is selected.
    getSelection().selectAllChildren(code);
    target.textContent = "Selected";
  }
  setTimeout(() => { target.textContent = "Copy"; }, 2000);
}
