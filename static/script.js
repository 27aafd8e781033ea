// The page that tries the interface: a form made from openapi.json, and what came of sending it.
"use strict";

const HEADERS = ["X-Request-ID", "WWW-Authenticate", "Retry-After"];
const URL_OF_PLANTS = new URL("plants", location.href).href;
const $ = (id) => document.getElementById(id);
const token = $("token");
let fields = []; // {name, schema, input}, in the order of the form

start();

async function start() {
  token.value = sessionStorage.getItem("token") ?? "";
  $("form").addEventListener("submit", send);
  $("form").addEventListener("input", ({ target }) => { showProblem(target, ""); showCode(); });
  $("reveal").addEventListener("change", showCode);
  for (const button of document.querySelectorAll(".copy")) button.addEventListener("click", copy);
  try {
    const api = await (await fetch(new URL("openapi.json", location.href))).json();
    const content = api.paths["/plants"].post.requestBody.content["application/json"];
    fields = properties(content.schema, api).map(addField);
  } catch {
    showAnswer("The service can't be reached. Load this page again later.", true);
  }
  showCode();
}

// The members of a schema: those of its own come before those it refers to.
function properties(schema, api) {
  if (schema.$ref) {
    const path = schema.$ref.slice(2).split("/");
    return properties(path.reduce((part, step) => part[step], api), api);
  }
  const own = Object.entries(schema.properties ?? {}).map(([name, member]) => (
    { name, schema: member, required: schema.required?.includes(name) }
  ));
  return [...own, ...[...schema.allOf ?? []].reverse().flatMap((part) => properties(part, api))];
}

function addField({ name, schema, required }) {
  const input = element("input", {
    id: `field-${name}`, autocomplete: "off", required, placeholder: schema.examples?.[0] ?? "",
    inputMode: schema.type === "integer" ? "numeric" : "text",
  });
  input.setAttribute("aria-describedby", `${input.id}-about ${input.id}-problem`);
  const label = element("label", { htmlFor: input.id }, name);
  if (!required) label.append(element("span", { className: "optional" }, " (optional)"));
  $("fields").append(element("div", { className: "field" }, label, input,
    element("p", { className: "about", id: `${input.id}-about` }, schema.description ?? ""),
    element("p", { className: "problem", id: `${input.id}-problem` })));
  return { name, schema, input };
}

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// The body, written by hand: a JavaScript number would lose digits of an id beyond 2**53.
function body() {
  const members = fields.filter(({ input }) => input.value !== "").map(({ name, schema, input }) => (
    `${JSON.stringify(name)}: ${schema.type === "string" ? JSON.stringify(input.value) : literal(input.value)}`
  ));
  return `{${members.join(", ")}}`;
}

function literal(text) {
  try {
    JSON.parse(text);
    return text.trim();
  } catch {
    return JSON.stringify(text); // the service says what it should have been
  }
}

async function send(event) {
  event.preventDefault();
  sessionStorage.setItem("token", token.value);
  showProblems("");
  if (!/^[!-~]*$/.test(token.value)) return showProblem(token, "has a character that no token has").focus();
  const button = event.target.querySelector("[type=submit]");
  const sent = body();
  button.disabled = true;
  let answer, text;
  try {
    answer = await fetch(URL_OF_PLANTS, {
      method: "POST",
      headers: { "Authorization": `Bearer ${token.value}`, "Content-Type": "application/json" },
      body: sent,
    });
    text = await answer.text();
  } catch {
    answer = null;
  }
  button.disabled = false; // which has taken the focus from it
  if (document.activeElement === document.body) button.focus();
  remember(answer?.status ?? "—", sent);
  if (!answer) {
    return showAnswer("No answer: the service can't be reached. It is safe to send the same plant again.", true);
  }
  showAnswer(`${answer.status} ${answer.statusText}`, !answer.ok, answer.headers, text);
  if (!answer.ok) showProblems(parse(text)?.message ?? "", answer.status);
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined; // it is from something between here and the service
  }
}

function showAnswer(status, failed, headers = new Headers(), text = "") {
  const list = element("dl", {});
  for (const name of HEADERS.filter((name) => headers.has(name))) {
    list.append(element("dt", {}, name), element("dd", {}, headers.get(name)));
  }
  $("answer").replaceChildren(element("p", { className: `status ${failed ? "failed" : ""}` }, status), list);
  const json = JSON.stringify(parse(text), null, 2);
  if (text) $("answer").append(element("pre", { tabIndex: 0 }, json ?? text));
  $("answer").scrollIntoView({ block: "nearest" });
}

// Each part of a message that names a field goes beside that field.
function showProblems(message, status) {
  const values = /"(?:[^"\\…]|\\.)*["…]/g; // in them, "; " does not part anything
  const parts = message.replace(values, (value) => value.replaceAll("; ", ";\u00a0")).split("; ");
  const wrong = fields.filter(({ name, input }) => {
    const part = parts.find((part) => part.startsWith(`${name}: `));
    showProblem(input, part?.slice(name.length + 2) ?? "");
    return part;
  });
  showProblem(token, status === 401 ? message : "");
  (status === 401 ? token : wrong[0]?.input)?.focus();
}

function showProblem(input, problem) {
  const place = $(`${input.id}-problem`);
  if (place) place.textContent = problem;
  input.setAttribute("aria-invalid", String(problem !== ""));
  return input;
}

function remember(status, sent) {
  $("sent").querySelector(".about")?.remove();
  const mark = element("span", { className: status === 200 ? "status" : "status failed" }, String(status));
  $("sent").prepend(element("li", {}, mark, sent.length > 200 ? `${sent.slice(0, 200)}…` : sent));
  $("sent").children[10]?.remove();
}

function showCode() {
  const bearer = `Authorization: Bearer ${$("reveal").checked ? token.value : "TOKEN"}`;
  const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  $("curl").textContent = `curl ${quote(URL_OF_PLANTS)} -H 'Content-Type: application/json' \\
  -H ${quote(bearer)} \\\n  -d ${quote(body())}`;
  const [name, value] = bearer.split(": ");
  $("fetch").textContent = `await fetch(${JSON.stringify(URL_OF_PLANTS)}, {
  method: "POST",
  headers: {
    "Content-Type": "application/json",
    ${JSON.stringify(name)}: ${JSON.stringify(value)},
  },
  body: ${JSON.stringify(body())},
})`;
}

async function copy({ target }) {
  const code = $(target.dataset.copies);
  try {
    await navigator.clipboard.writeText(code.textContent);
    target.textContent = "Copied";
  } catch { // not allowed to write: the person can
    getSelection().selectAllChildren(code);
    target.textContent = "Selected";
  }
  setTimeout(() => { target.textContent = "Copy"; }, 2000);
}
