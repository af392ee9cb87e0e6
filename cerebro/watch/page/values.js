"use strict";
// Writes numbers, times and text, and makes elements. Everything that comes from a run passes
// through `plain` and becomes a text node or an attribute's value: nothing is parsed as HTML.

const $ = (id) => document.getElementById(id);

// Characters that have no look of their own, or that turn the direction of the text around them.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u202a-\u202e\u2028\u2029\u2060-\u2069\ufeff]/g;

function plain(value, most = 2000) {
  const text = String(value);
  const cut = text.length > most ? text.slice(0, most) + "…" : text;
  return cut.replace(UNSEEN, (sign) => "\\u" + sign.charCodeAt(0).toString(16).padStart(4, "0"));
}

// Make an element: attributes by name, `on` for its listeners, then its children.
function node(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, call] of Object.entries(value)) made.addEventListener(event, call);
    else if (name === "text") made.textContent = plain(value);
    else made.setAttribute(name, value === true ? "" : plain(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) made.append(child instanceof Node ? child : plain(child));
  }
  return made;
}

function shape(tag, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (parent) parent.append(made);
  return made;
}

// Write a label into a drawing.
function label(parent, text, attributes) {
  const made = shape("text", attributes, parent);
  made.textContent = plain(text, 60);
  return made;
}

// Change an element's text only if it differs, so that a selection in it stays.
function setText(element, value) {
  const text = plain(value);
  if (element.textContent !== text) element.textContent = text;
}

function setAttribute(element, name, value) {
  if (value === null || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

// A setting's value: at most three digits.
function short(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return plain(value, 60);
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  if (size >= 0.001 && size < 100000) return String(+value.toPrecision(3));
  return value.toExponential(1).replace("e+", "e").replace(".0e", "e");
}

// The value as it would be typed: all of its digits.
const exact = (value) => (value === null ? "null" : String(value));

function metric(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 10000)) return value.toExponential(3).replace("e+", "e");
  return value.toFixed(4);
}

function clock(seconds) {
  const all = Math.max(0, Math.round(seconds || 0));
  const [hours, minutes, rest] = [Math.floor(all / 3600), Math.floor(all / 60) % 60, all % 60];
  const two = (part) => String(part).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const heading = (name) => name.replaceAll("_", " ");

// A word for a shell: quoted only if it must be.
const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : "'" + word.replaceAll("'", "'\\''") + "'");

const ICONS = {
  pause: [["path", { d: "M4.5 3v8M9.5 3v8", stroke: "currentColor", "stroke-width": 2, "stroke-linecap": "round" }]],
  unpause: [["path", { d: "M4 2.8v8.4L11 7z", fill: "currentColor" }]],
  stop: [["rect", { x: 3.2, y: 3.2, width: 7.6, height: 7.6, rx: 1.6, fill: "currentColor" }]],
  clone: [
    ["path", { d: "M3.5 2v10M3.5 8.500c0-3.500 7-1.500 7-5", fill: "none", stroke: "currentColor", "stroke-width": 1.5, "stroke-linecap": "round" }],
    ["circle", { cx: 10.5, cy: 2.900, r: 1.6, fill: "currentColor" }],
  ],
  check: [["path", { d: "M2.500 7.500 5.500 10.500 11.500 3.500", fill: "none", stroke: "currentColor", "stroke-width": 1.8, "stroke-linecap": "round" }]],
  theme: [
    ["circle", { cx: 7, cy: 7, r: 5, fill: "none", stroke: "currentColor", "stroke-width": 1.5 }],
    ["path", { d: "M7 2a5 5 0 0 1 0 10z", fill: "currentColor" }],
  ],
};

function icon(name) {
  const drawn = shape("svg", { width: 14, height: 14, viewBox: "0 0 14 14", "aria-hidden": "true" });
  for (const [tag, attributes] of ICONS[name]) shape(tag, attributes, drawn);
  return drawn;
}

// A row of buttons of which one is pressed; `choose` gets its key.
function tabs(box, keys, chosen, choose) {
  const wanted = JSON.stringify([keys, chosen]);
  if (box.dataset.made === wanted) return;
  box.dataset.made = wanted;
  const focused = box.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  box.replaceChildren(...keys.map(([key, text, count]) =>
    node("button", { type: "button", "data-key": key, "aria-pressed": String(key === chosen), on: { click: () => choose(key) } },
      text, count === undefined ? null : node("span", { class: "dim" }, " " + count.toLocaleString("en")))));
  if (focused !== null) [...box.children].find((child) => child.dataset.key === focused)?.focus();
}

function toast(text) {
  const box = $("toast");
  box.textContent = plain(text, 400);
  box.classList.add("in");
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => box.classList.remove("in"), 5000);
}

// Round numbers between two ends, about `most` of them.
function ticks(low, high, most) {
  if (!(high > low)) return [low];
  const power = Math.pow(10, Math.floor(Math.log10((high - low) / most)));
  const step = [1, 2, 5, 10].map((k) => k * power).find((k) => (high - low) / k <= most) || 10 * power;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(+(i * step).toPrecision(12));
  return found;
}
