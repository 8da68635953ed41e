// Text as people read it: tool calls and their results, JSON as a tree, Markdown and code. Every word becomes a text
// node, and no address becomes a link. Text that is too long, or that has no markup, stays as it is.
"use strict";

const FORMATTED = 100_000; // characters of a text that is formatted
const ENTRIES = 100; // entries of an object or array that are built at once
const SHORT_CALL = 100;

// JSON

class Digits { constructor(source) { this.source = source; } }

// The value of a text that is a JSON object or array, or null. Numbers keep the digits that they are written with.
T.json = (text) => {
  if (text.length > FORMATTED || !/^\s*[[{][^]*[\]}]\s*$/.test(text)) return null;
  try { return JSON.parse(text, (_, value, context) => (typeof value === "number" ? new Digits(context ? context.source : String(value)) : value)); } catch { return null; }
};

// The first entries in a line; what is nested is left out.
const brief = (value) => {
  const list = Array.isArray(value);
  const scalar = (one) => (one instanceof Digits ? one.source : one !== null && typeof one === "object" ? "…" : JSON.stringify(one).slice(0, 40));
  const found = (list ? value.slice(0, 6) : Object.entries(value).slice(0, 6)).map((one) => (list ? scalar(one) : `${one[0].slice(0, 40)}: ${scalar(one[1])}`));
  return `${list ? "[" : "{"}${found.join(", ").slice(0, 70)}${list ? "]" : "}"}`;
};

T.tree = (value, open = true) => {
  if (value instanceof Digits) return T.h("span", { class: "number" }, value.source);
  if (value === null || typeof value !== "object") {
    const text = JSON.stringify(value);
    return T.h("span", { class: typeof value === "string" ? "string" : "number" }, T.spelled(text.slice(0, 2000)), text.length > 2000 ? T.h("span", { class: "note" }, ` … ${T.plural(text.length, "character")}`) : null);
  }
  const entries = Array.isArray(value) ? value : Object.entries(value);
  if (!entries.length) return T.h("span", null, Array.isArray(value) ? "[]" : "{}");
  const inside = T.h("div", { class: "entries" });
  let at = 0;
  const more = (event) => {
    if (event) event.currentTarget.remove();
    for (const last = Math.min(entries.length, at + ENTRIES); at < last; at += 1) {
      const [name, one] = Array.isArray(value) ? [String(at), entries[at]] : entries[at];
      inside.append(T.h("div", null, T.h("span", { class: "key-of" }, T.spelled(name), ": "), T.tree(one, false)));
    }
    if (at < entries.length) inside.append(T.button(`${T.count(entries.length - at)} more`, more, { class: "link" }));
  };
  if (open) more();
  return T.h("details", { class: "tree", open, ontoggle: () => { if (!at) more(); } },
    T.h("summary", null, T.count(entries.length), Array.isArray(value) ? " in a list " : entries.length === 1 ? " field " : " fields ", T.h("span", { class: "brief" }, T.spelled(brief(value)))), inside);
};

// Markdown. A star or underscore within a word is no markup, so `2*3*4` and `snake_case` stay.

const INLINE = new RegExp([
  /`([^`\n]{1,600})`/, /\*\*(?=\S)([^\n]{1,600}?\S)\*\*/, /(?<![\p{L}\p{N}_])__(?=\S)([^\n]{1,600}?\S)__(?![\p{L}\p{N}_])/,
  /(?<![\p{L}\p{N}*])\*(?![\s*])([^*\n]{1,600}?(?<!\s))\*(?![\p{L}\p{N}*])/, /(?<![\p{L}\p{N}_])_(?![\s_])([^_\n]{1,600}?(?<!\s))_(?![\p{L}\p{N}_])/,
  /!?\[([^\]\n]{0,600})\]\(([^()\s]{1,600})\)/,
].map((one) => one.source).join("|"), "gu");

const inline = (text, depth = 0) => {
  const made = [];
  let at = 0;
  if (depth < 3) {
    for (const found of text.matchAll(INLINE)) {
      const [whole, code, bold, strong, star, line, label, address] = found;
      made.push(T.spelled(text.slice(at, found.index)));
      if (code !== undefined) made.push(T.h("code", null, T.spelled(code)));
      else if (address !== undefined) made.push(T.h("span", { class: "address" }, inline(label, depth + 1), " (", T.spelled(address), ")"));
      else if ((bold ?? strong) !== undefined) made.push(T.h("strong", null, inline(bold ?? strong, depth + 1)));
      else made.push(T.h("em", null, inline(star ?? line, depth + 1)));
      at = found.index + whole.length;
    }
  }
  made.push(T.spelled(text.slice(at)));
  return made;
};

const FENCE = /^ {0,3}(`{3,}|~{3,}) *([\w+#.-]{0,30})[^`]*$/;
const HEADING = /^ {0,3}(#{1,6}) +(?=[\p{L}\p{N}*_`"'([])(.*[^\s#])\s*$/u;
const ENTRY = /^( {0,12})([-*+•]|\d{1,4}[.)]) +(\S.*)$/u;
const WORD = /[\p{L}\p{N}]{2}/u; // a board of single characters is no list
const QUOTE = /^ {0,3}> ?(.*)$/;
const ROW = /^ {0,3}\|.*\|\s*$/;

// The blocks of a Markdown text, or null for a text without any markup.
T.markdown = (text) => {
  if (text.length > FORMATTED) return null;
  const lines = text.split("\n");
  const blocks = [];
  let kind = "";
  let marked = false;
  const put = (name, made) => { kind = name; marked = true; blocks.push(made); };
  const last = () => blocks.at(-1);
  for (let k = 0; k < lines.length; k += 1) {
    const line = lines[k].replace(/\r$/, "");
    const [fence, heading, entry, quote] = [FENCE, HEADING, ENTRY, QUOTE].map((one) => (line.length > 2000 ? null : one.exec(line)));
    if (fence) {
      const inside = [];
      const end = fence[1];
      for (k += 1; k < lines.length && !(lines[k].trim().startsWith(end) && !lines[k].trim().slice(end.length).replaceAll(end[0], "")); k += 1) inside.push(lines[k]);
      put("code", T.h("pre", { class: "code", title: T.plain(fence[2]) || null }, T.h("code", null, T.spelled(inside.join("\n")))));
    } else if (heading) put("heading", T.h("p", { class: `heading${Math.min(3, heading[1].length)}` }, inline(heading[2])));
    else if (entry && (kind === "list" || WORD.test(entry[3]))) {
      const level = Math.min(3, Math.floor(entry[1].length / 2));
      if (kind !== "list") put("list", T.h("div", { class: "entries" }));
      last().append(T.h("p", { class: `entry level${level}` }, T.h("span", { class: "point" }, /\d/.test(entry[2]) ? entry[2] : "•"), T.h("span", null, inline(entry[3]))));
    } else if (quote) {
      if (kind !== "quote") put("quote", T.h("blockquote"));
      last().append(T.h("p", null, inline(quote[1])));
    } else if (ROW.test(line)) {
      if (kind !== "rows") put("rows", T.h("pre", { class: "code" }));
      else last().append("\n");
      last().append(T.spelled(line));
    } else if (!line.trim()) kind = "";
    else {
      const made = inline(line);
      if (made.length > 1) marked = true;
      if (kind === "text") last().append("\n", ...made);
      else { blocks.push(T.h("p", null, made)); kind = "text"; }
    }
  }
  return marked ? T.h("div", { class: "markdown" }, blocks) : null;
};

// One text: a tree, Markdown, or null where it has neither.
T.formatted = (text) => {
  const value = T.json(text);
  return value === null ? T.markdown(text) : T.tree(value);
};

// A tool call. Arguments that are long or have several lines are listed below it.
T.called = (part, given) => {
  const [name, rest] = [part.tool, part.text.slice(part.tool.length)];
  const line = (text) => T.h("code", { class: "called" }, T.h("strong", null, T.spelled(name)), T.broken(text));
  const lines = Math.max(0, ...Object.values(given || {}).map((value) => (typeof value === "string" ? value.split("\n").length : 0)));
  if (!given || (lines < 2 && part.text.length <= SHORT_CALL)) return T.h("div", { class: "fragment" }, line(rest));
  const value = (one) => (typeof one === "string" ? T.h("pre", { class: "code" }, T.spelled(one)) : T.tree(one));
  return T.h("details", { class: "fragment", open: part.text.length < 1200 && lines <= 16 }, T.h("summary", null, line(rest.length > SHORT_CALL ? `${rest.slice(0, SHORT_CALL)}…` : rest)),
    T.h("dl", { class: "given" }, Object.entries(given).map(([key, one]) => [T.h("dt", null, T.spelled(key)), T.h("dd", null, value(one))])));
};

// Text that may break after punctuation, so that names stay whole in a narrow column.
T.broken = (text) => text.split(/(?<=[,.;:/_=(){}[\]&?-])(?=.)/su).flatMap((piece, k) => (k ? [T.h("wbr"), T.spelled(piece)] : [T.spelled(piece)]));
