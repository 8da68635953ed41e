// Builds the page from values. Text becomes text nodes, never markup. An address is a fragment of this page, a run of
// this folder or the way back to it, a media file of this run, or a picture in a report. Control characters, and characters that reverse or hide text, are spelled out (`U+202E`).
"use strict";

const T = {};

T.h = (tag, props, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "href" || name === "src") made.setAttribute(name, T.address(value));
    else if (name === "value" || name === "checked" || name === "disabled" || name === "open") made[name] = value;
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
};

T.address = (value) => {
  if (!/^(run\/[0-9a-f]{12}\/|\.\.\/\.\.\/)?(#|$)|^media\/[0-9a-f]{64}(\.[a-z0-9]{1,12})?$|^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]*$/.test(value)) throw new Error(`not an address of this page: ${value}`);
  return value;
};

T.svg = (tag, props, ...children) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, String(value));
  }
  made.append(...children);
  return made;
};

T.fill = (parent, ...children) => {
  parent.replaceChildren(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return parent;
};

// All invisible characters, except line breaks, tabs and the two joiners that scripts and emoji need.
const HIDDEN = /(?:(?![\n\t\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\u2028\u2029])+/gu;
const SPELLED = 24;

T.spell = (characters) => {
  const names = [];
  let more = 0;
  for (const character of characters) {
    if (names.length >= SPELLED) more += 1;
    else {
      const code = character.codePointAt(0);
      if (code < 32) names.push(String.fromCodePoint(0x2400 + code));
      else names.push(`U+${code.toString(16).toUpperCase().padStart(4, "0")}`);
    }
  }
  return names.join(" ") + (more ? ` and ${more} more` : "");
};

// The nodes of a text; `marks` are [start, length] of what a search found in it.
T.visible = (text, marks) => {
  const made = document.createDocumentFragment();
  let at = 0;
  for (const [start, length] of marks || []) {
    if (start < at || start >= text.length) continue;
    made.append(T.spelled(text.slice(at, start)), T.h("mark", null, T.spelled(text.slice(start, start + length))));
    at = start + length;
  }
  made.append(T.spelled(text.slice(at)));
  return made;
};

T.spelled = (text) => {
  const made = document.createDocumentFragment();
  let at = 0;
  for (const found of text.matchAll(HIDDEN)) {
    if (found.index > at) made.append(text.slice(at, found.index));
    made.append(T.h("span", { class: "hidden-char", title: "an invisible character" }, T.spell(found[0])));
    at = found.index + found[0].length;
  }
  if (at < text.length) made.append(text.slice(at));
  return made;
};

// The same as plain text, for attributes, which take no nodes.
T.plain = (text) => String(text).replace(HIDDEN, (found) => T.spell(found));

T.number = (value, digits = 3) => {
  if (value === null || value === undefined) return "–";
  const read = Number(value);
  if (!Number.isFinite(read)) return String(value);
  if (Number.isInteger(read)) return T.count(read);
  const shown = Math.abs(read) >= 0.001 ? read.toFixed(digits).replace(/\.?0+$/, "") : read.toExponential(1);
  return shown.replace("-", "−");
};

T.count = (value) => (value === null || value === undefined ? "–" : Number(value).toLocaleString("en").replace("-", "−"));

T.time = (seconds) => {
  const read = new Date(Number(seconds) * 1000);
  if (seconds === null || Number.isNaN(read.getTime())) return "–";
  const two = (value) => String(value).padStart(2, "0");
  return `${read.getFullYear()}-${two(read.getMonth() + 1)}-${two(read.getDate())} ` +
    `${two(read.getHours())}:${two(read.getMinutes())}:${two(read.getSeconds())}`;
};

T.seconds = (value) => {
  if (value === null || value === undefined) return "–";
  const read = Number(value);
  if (read < 1) return `${Math.round(read * 1000)} ms`;
  if (read < 120) return `${read.toFixed(1)} s`;
  return `${Math.floor(read / 60)} min ${Math.round(read % 60)} s`;
};

T.plural = (n, word) => `${T.count(n)} ${word}${n === 1 ? "" : "s"}`;

T.chip = (text, kind, title) => T.h("span", { class: `chip ${kind || ""}`, title }, T.spelled(String(text)));

// A reward: zero has no colour.
T.earned = (value, name, counts = true) => {
  const kind = !counts || value === null || Number(value) === 0 ? "" : value < 0 ? "low" : "reward";
  return T.chip(name === undefined ? T.number(value) : `${T.plain(name)} ${T.number(value)}`, kind, counts ? null : "a metric: weight 0");
};

T.status = (status, cause) => {
  const known = ["finished", "running", "truncated", "limit", "cancelled", "crashed", "error"];
  const kind = known.includes(status) ? status : "error";
  return T.h("span", { class: `status ${kind}` }, T.spelled(cause ? `${status} · ${cause}` : String(status)));
};

// The outcome of a check: its mark and its colour.
const OUTCOMES = { diverged: ["✗", "bad"], unverifiable: ["?", "warn"], verified: ["✓", "good"] };

T.check = (verb, outcome) => T.chip(`${verb} ${(OUTCOMES[outcome] || ["?"])[0]}`, (OUTCOMES[outcome] || ["", "warn"])[1]);

// Several checks: a mark for each, in the colour of the worst outcome; the title names them.
T.checks = (words) => {
  if (!words) return null;
  const outcomes = words.split(", ").map((one) => one.split(" ")[1]);
  const worst = Object.keys(OUTCOMES).find((one) => outcomes.includes(one));
  return T.chip(outcomes.map((one) => (OUTCOMES[one] || ["?"])[0]).join(" "), worst ? OUTCOMES[worst][1] : "warn", T.plain(words));
};

T.button = (text, act, props) => T.h("button", { type: "button", ...props, onclick: act }, text);

T.state = (title, ...rest) => T.h("div", { class: "state" }, T.h("h2", null, title), rest.map((one) =>
  typeof one === "string" ? T.h("p", null, T.spelled(one)) : one));

T.loading = (text) => T.h("p", { class: "state loading", role: "status" }, text);

T.failed = (error) => T.state("That can't be shown", String(error && error.message ? error.message : error));

T.phone = matchMedia("screen and (max-width: 720px)");

let toastTimer = 0;
T.toast = (text) => {
  const place = document.getElementById("toast");
  place.textContent = T.plain(text);
  place.classList.add("shown");
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => place.classList.remove("shown"), 4000);
};
