"use strict";

const of = (id) => document.getElementById(id);
let image = null; // the file that is shown
let answered = null; // the answer for it

function headers(more = {}) {
  const key = sessionStorage.getItem("lakevision-key");
  return key ? { Authorization: `Bearer ${key}`, ...more } : more;
}

function show(problem) {
  of("problem").textContent = problem;
  of("problem").hidden = !problem;
}

// Return the response, or null after its problem is shown.
async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(options.headers) });
  } catch {
    show("The service does not answer: try again.");
    return null;
  }
  of("key-form").hidden = response.status !== 401;
  if (response.ok) return response;
  const found = await response.json().catch(() => ({}));
  show(found.detail || `The service answered with status ${response.status}.`);
  return null;
}

async function loadModel() {
  const response = await ask("/model");
  if (!response) return;
  show("");
  const found = await response.json();
  of("model").textContent = `${found.model}, version ${found.model_version}`;
  // Names are texts, never markup: a class may be called anything.
  of("classes").replaceChildren(...found.classes.map((name) => new Option(name, name)));
}

async function predict(file) {
  show("");
  of("thanks").textContent = "";
  of("answer").hidden = true;
  of("heat").removeAttribute("src");
  const body = new FormData();
  body.append("image", file, file.name || "pasted");
  const response = await ask("/predict?top_k=5", { method: "POST", body });
  if (!response) return;
  const found = await response.json();
  image = file;
  answered = { id: found.request_id, ...found.predictions[0] };
  of("model").textContent = `${found.model}, version ${answered.model_version}`;
  of("label").textContent = answered.label;
  of("top").replaceChildren(...answered.top.map(row));
  of("answer").hidden = false;
  await explain(answered.top[0].label);
}

function row({ label, probability }) {
  const button = document.createElement("button");
  const [name, value, bar] = ["span", "span", "meter"].map((kind) => document.createElement(kind));
  name.textContent = label;
  value.textContent = `${(100 * probability).toFixed(1)} %`;
  bar.value = probability;
  button.type = "button";
  button.append(name, value, bar);
  button.addEventListener("click", () => explain(label));
  const item = document.createElement("li");
  item.append(button);
  return item;
}

async function explain(label) {
  const shown = image;
  const options = { method: "POST", body: shown, headers: { "Content-Type": "application/octet-stream" } };
  const response = await ask(`/explain?label=${encodeURIComponent(label)}`, options);
  if (!response || image !== shown) return;
  const heat = of("heat");
  URL.revokeObjectURL(heat.src);
  heat.src = URL.createObjectURL(await response.blob());
  of("caption").textContent = `Bright: speaks for ${label}`;
  for (const button of of("top").querySelectorAll("button")) {
    button.setAttribute("aria-pressed", String(button.firstChild.textContent === label));
  }
}

async function sendFeedback(event) {
  event.preventDefault();
  const feedback = { request_id: answered.id, image: answered.image, label: of("right").value };
  const options = { method: "POST", body: JSON.stringify(feedback), headers: { "Content-Type": "application/json" } };
  show("");
  if (await ask("/feedback", options)) {
    of("right").value = "";
    of("thanks").textContent = `Thank you: noted as ${feedback.label}.`;
  }
}

function take(files) {
  const found = [...files].find((file) => file.type.startsWith("image/")) || [...files][0];
  if (found) predict(found);
}

of("file").addEventListener("change", (event) => {
  take(event.target.files);
  event.target.value = ""; // The same file may be chosen again.
});
of("wrong").addEventListener("submit", sendFeedback);
of("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("lakevision-key", of("key").value);
  loadModel();
});
for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    of("drop").classList.toggle("over", name === "dragenter" || name === "dragover");
    if (name === "drop") take(event.dataTransfer.files);
  });
}
document.addEventListener("paste", (event) => take(event.clipboardData.files));
of("drop").addEventListener("keydown", (event) => {
  if (event.key === "Enter" || event.key === " ") of("file").click();
});
loadModel();
