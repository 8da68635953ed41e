// The application: the address and its view, the keys, the badge of the verification, and the live tail.
"use strict";

const POLL_SECONDS = 1;
const KEYS = [
  ["j / k", "next and previous row, step or attempt"], ["Enter", "open the chosen row; on a phone, inspect the chosen step"], ["[ / ]", "previous and next tape of the list"],
  ["n / N", "next and previous match; without a search the next and previous failed tape"], ["/", "search"], ["f", "the filters"], ["x", "clear the filters; in a list of runs, choose a run"], ["c", "the columns; in a list of runs, compare the two chosen"],
  ["m", "texts formatted, or raw"], ["l", "show more or less of the chosen step"], ["i", "open or close the inspector"], ["1 / 2 / 3 / 4", "request, changes, tokens and training of a call"], ["y", "copy a link"], ["a", "all attempts of a group, all tasks of a comparison"], ["s", "swap two compared runs"],
  ["g o", "the overview"], ["g t", "the tapes"], ["g c", "the reward curve"], ["g g", "the group of this tape"],
  ["v", "verify every byte"], ["b", "what was verified"], ["u", "back up: from a tape to the list, and from the list to the runs of a folder"], ["Esc", "leave the search, close this"], ["d", "light or dark"], ["?", "these keys"],
];

class App {
  constructor() {
    this.rows = new T.Rows();
    this.expected = 0;
    this.main = document.getElementById("main");
    this.table = new T.Table(this);
    this.curve = new T.Curve(this);
    this.overviewPage = new T.Overview(this);
    this.group = new T.Group(this);
    this.tape = new T.Tape(this);
    this.view = null;
    this.badge = T.h("details");
    addEventListener("click", (event) => { if (!event.composedPath().includes(this.badge)) this.badge.open = false; });
    addEventListener("beforeprint", () => {
      this.folded = [];
      // A tree builds its next level when it unfolds.
      for (let found; (found = document.querySelectorAll("main details:not([open])")).length && this.folded.length < 5000;) for (const one of found) { one.open = true; one.dispatchEvent(new Event("toggle")); this.folded.push(one); }
    });
    addEventListener("afterprint", () => { for (const one of this.folded || []) one.open = false; });
    this.inFolder = T.source.live && /\/run\/[0-9a-f]{12}\/$/.test(location.pathname);
    this.theme(localStorage.getItem("theme"));
    addEventListener("hashchange", () => this.route());
    addEventListener("keydown", (event) => this.key(event));
  }

  async start() {
    this.bar();
    try {
      T.overview = T.source.run();
      this.overview = await T.overview;
    } catch (error) { T.fill(this.main, T.failed(error)); return; }
    const { tapes, shard, run, rev, runs } = this.overview;
    if (runs) {
      document.title = `${run} · Tapereel`;
      this.bar();
      this.runs = new T.Runs(this);
      await this.route();
      return;
    }
    this.rev = rev;
    this.expected = tapes;
    document.title = `${run} · Tapereel`;
    this.integrity = this.overview.integrity;
    this.bar();
    this.drawBadge();
    try {
      // A page that the address names does not wait for the table; the table is shown as soon as it fills a page.
      if (!location.hash && (this.overview.trains || !T.source.live)) history.replaceState(null, "", "#/overview");
      const own = /^#\/(tape|group|curve|overview)/.test(location.hash);
      if (own) this.route();
      const shards = Math.ceil(tapes / shard);
      for (let k = 0; k < shards; k += 1) {
        this.rows.take(await T.source.table(k));
        if (k === shards - 1) this.expected = this.rows.length;
        if (!own && k === Math.min(1, shards - 1)) await this.route();
        else if (own ? k === shards - 1 : k > 1) this.filled();
      }
      if (!shards && !own) this.route();
    } catch (error) { T.fill(this.main, T.failed(error)); return; }
    if (this.view === this.group) this.route();
    if (T.source.live) this.follow();
  }

  // New rows have arrived: draw again what depends on them.
  filled() {
    if (!this.table.filters.contains(document.activeElement)) this.table.drawFilters();
    if (this.table.base) this.table.select();
    if (this.view === this.curve && this.curve.points && !this.curve.points.length) this.curve.draw();
    if (this.view === this.overviewPage) this.overviewPage.listed();
  }

  bar() {
    const o = this.overview || { run: "", path: "" };
    this.box = T.h("input", { type: "search", id: "find", placeholder: "find in this tape", "aria-label": "Find in this tape", spellcheck: "false", hidden: true,
      onkeydown: (event) => { if (event.key === "Enter") { this.tape.search(this.box.value, this.regex.checked); this.box.blur(); this.main.focus(); event.preventDefault(); } } });
    this.regex = T.h("input", { type: "checkbox", id: "find-regex" });
    this.regexLabel = T.h("label", { class: "check", hidden: true }, this.regex, "regex");
    this.found = T.h("span", { class: "note", role: "status" });
    this.pulse = T.h("span", { class: "pulse", role: "status" });
    const tab = (name, label) => T.h("a", { href: `#/${name}`, "data-view": name }, label);
    T.fill(document.getElementById("bar"), T.h("a", { href: "#/", class: "brand" }, "Tapereel"), T.h("span", { class: "run", title: o.path }, T.spelled(o.run)),
      T.h("nav", { "aria-label": "Views" }, this.inFolder ? T.h("a", { href: "../../" }, "Runs") : null, o.runs ? tab("", "Runs") : [tab("overview", "Overview"), tab("", "Tapes"), tab("curve", "Curve")]), this.pulse, T.h("span", { class: "grow" }), this.integrity ? this.badge : null, this.found, this.box, this.regexLabel,
      T.button("◐", () => this.theme("other"), { class: "icon", title: "light or dark (d)", "aria-keyshortcuts": "d", "aria-label": "Light or dark" }), T.button("?", () => this.help(), { class: "icon", title: "keys (?)", "aria-keyshortcuts": "?", "aria-label": "Keys" }));
  }

  showFound(text) { this.found.textContent = T.plain(text); }

  // The badge of the verification. Its details open below it.

  drawBadge() {
    const found = this.integrity;
    const kinds = { holds: ["good", "✓", "Verified"], broken: ["bad", "✗", "Broken: some bytes changed"], undecided: ["warn", "?", "Undecided"] };
    const holes = found.holes.length > 0;
    const { state } = this.overview;
    const [kind, mark, label] = kinds[found.verdict] || (state === "died" ? ["warn", "!", "Not closed"] : holes ? ["warn", "!", T.plural(found.holes.length, "hole")] : ["plain", "◇", "Lines checked"]);
    const titles = { holds: "Every byte is as it was written", broken: "Broken: some bytes changed, or can't be read", undecided: "The check could not decide whether this run is whole" };
    const part = (title, lines) => (lines.length ? [T.h("h3", null, title), T.h("ul", null, lines.slice(0, 60).map((line) => T.h("li", null, T.spelled(line))), lines.length > 60 ? T.h("li", null, `and ${T.count(lines.length - 60)} more`) : null)] : null);
    this.badge.className = `badge ${kind}`;
    T.fill(this.badge, T.h("summary", { title: "what was verified (b)", "aria-keyshortcuts": "b" }, T.h("span", { class: "verdict" }, mark, T.h("span", { class: "label" }, ` ${label}`))),
      T.h("div", { class: "badge-body" },
        T.h("h2", null, titles[found.verdict] || "Each line was checked as it was read", found.at ? T.h("small", null, ` at ${T.time(found.at)}`) : null),
        T.source.live ? T.button(this.verifying ? "Verifying…" : found.kind === "verify" ? "Verify again" : "Verify every byte", () => this.verify(), { disabled: Boolean(this.verifying), "aria-keyshortcuts": "v" }) : null,
        part("Broken", found.broken), part("Holes", found.holes), part("Checked", found.checked), part("Not checked", found.not_checked),
        part({ running: "Being written", died: "Not sealed: their writer is gone" }[state] || "Not sealed: still being written, or their writer died", found.live), part("Not in this file", this.overview.left_out || []),
        found.head ? [T.h("h3", null, "Head"), T.h("code", null, T.spelled(found.head))] : null));
  }

  async verify() {
    this.verifying = true;
    this.drawBadge();
    try { this.integrity = await T.source.verify(); } catch (error) { T.toast(error.message); }
    this.verifying = false;
    this.drawBadge();
  }

  // The live tail

  async follow() {
    for (;;) {
      await new Promise((done) => setTimeout(done, POLL_SECONDS * 1000));
      if (document.hidden) continue;
      try { await this.look(); } catch (error) { this.pulse.textContent = "not connected"; this.pulse.title = error.message; this.pulse.className = "pulse bad"; }
    }
  }

  async look() {
    const found = await T.source.changes(this.rev);
    this.rev = found.rev;
    this.pulse.className = "pulse";
    if (found.reset) { location.reload(); return; }
    this.pulse.textContent = found.integrity ? "live" : this.pulse.textContent === "not connected" ? "" : this.pulse.textContent;
    if (found.integrity && this.integrity.kind === "quick" && !this.verifying) { this.integrity = found.integrity; this.drawBadge(); }
    else if (found.integrity && this.integrity.kind === "verify" && !this.stale) {
      this.stale = true;
      this.integrity = { ...this.integrity, not_checked: ["records written since the verification", ...this.integrity.not_checked] };
      this.drawBadge();
    }
    if (!found.n) { this.pulse.classList.toggle("quiet", true); return; }
    this.pulse.textContent = "live";
    this.rows.take(found);
    this.expected = Math.max(this.expected, this.rows.length);
    if (!this.table.filters.contains(document.activeElement)) this.table.drawFilters();
    if (this.view === this.table) this.table.select();
    if (this.view === this.tape && found.id.includes(this.tape.id)) await this.tape.grown();
    else for (const id of found.id) T.source.forget(id);
  }

  // Addresses and views

  go(address) { if (location.hash === address) this.route(); else location.hash = address; }

  rename(address) { if (location.hash !== address) history.replaceState(null, "", address); }

  beside(by) {
    const next = this.table.beside(this.tape.id, by);
    if (next === null) T.toast(by > 0 ? "the last tape of the list" : "the first tape of the list");
    else this.go(`#/tape/${encodeURIComponent(next)}`);
  }

  show(view) {
    if (this.view !== view) {
      if (this.view && this.view.close) this.view.close();
      this.view = view;
      T.fill(this.main, view.root);
    }
    const inTape = view === this.tape;
    this.box.hidden = !inTape;
    this.regexLabel.hidden = !inTape;
    if (!inTape) this.showFound("");
    const name = view === this.overviewPage ? "overview" : view === this.curve ? "curve" : view === this.table || view === this.runs ? "" : null;
    document.querySelectorAll("#bar nav a").forEach((link) => { if (link.dataset.view === name) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current"); });
  }

  async route() {
    const [path, query] = location.hash.slice(1).split("?");
    let parts;
    try { parts = path.split("/").slice(1).map(decodeURIComponent); } catch { parts = [""]; }
    try {
      if (this.runs) { this.show(this.runs); await this.runs.open(parts, query); }
      else if (parts[0] === "tape" && parts[1]) { if (!this.table.base) await this.table.set(""); this.show(this.tape); await this.tape.open(parts[1], parts[2], parts[3]); }
      else if (parts[0] === "group" && parts[1]) {
        this.show(this.group);
        // The attempts of a group may be anywhere in the table, so all of it is read first.
        if (this.rows.length < this.expected) T.fill(this.group.root, T.loading("Reading the tapes…"));
        else await this.group.open(parts[1], parts[2]);
      }
      else if (parts[0] === "overview") { this.show(this.overviewPage); await this.overviewPage.open(); }
      else if (parts[0] === "curve") { this.show(this.curve); await this.curve.open(parts[1], parts[2]); }
      else { this.show(this.table); await this.table.set(query || ""); }
    } catch (error) { T.toast(error.message); }
  }

  // Keys

  key(event) {
    const writing = event.target.closest("input, select, textarea");
    if (event.key === "Escape") {
      const dialog = document.querySelector("dialog");
      if (dialog) dialog.close();
      else if (this.badge.open) this.badge.open = false;
      else if (writing) { writing.blur(); this.main.focus(); }
      else if (this.view === this.tape) { this.box.value = ""; this.tape.search("", false); }
      return;
    }
    if (writing || event.ctrlKey || event.metaKey || event.altKey) return;
    if (this.going) {
      this.going = false;
      if (this.runs) return;
      if (event.key === "t") this.go("#/");
      else if (event.key === "o") this.go("#/overview");
      else if (event.key === "c") this.go("#/curve");
      else if (event.key === "g" && this.view === this.tape && this.tape.head && this.tape.head.group) this.go(`#/group/${encodeURIComponent(this.tape.head.group)}`);
      return;
    }
    const inTape = this.view === this.tape;
    const does = {
      j: () => this.view.move && this.view.move(1), k: () => this.view.move && this.view.move(-1),
      Enter: () => (this.view === this.table ? this.table.open() : inTape ? this.tape.inspect(true) : this.view.openChosen && this.view.openChosen()),
      n: () => this.next(1), N: () => this.next(-1), g: () => { this.going = true; }, d: () => this.theme("other"), "?": () => this.help(),
      u: () => { if (this.view !== this.table) this.go(this.runs ? this.lastList || "#/" : this.table.address()); else if (this.inFolder) location.assign("../../"); },
      l: () => (inTape ? this.tape.fold(this.tape.at) : null),
      f: () => this.table.unfold("select"), c: () => (this.runs ? this.runs.goCompare() : this.table.unfold(".columns input")), ...(this.runs ? { x: () => this.runs.mark() } : {}),
      v: () => (T.source.live && !this.verifying ? this.verify() : null), b: () => { this.badge.open = !this.badge.open; },
      ...Object.fromEntries(["1", "2", "3", "4"].map((key) => [key, () => this.tape.inspector.turnTo(Number(key) - 1)])),
      "/": () => { const box = this.view === this.tape ? this.box : document.getElementById("search"); if (box) { box.focus(); box.select(); } },
    }[event.key] || this.button(event.key);
    if (!does || !this.view || (event.key === "Enter" && event.target.closest("button, a, summary, svg"))) return;
    event.preventDefault();
    does();
  }

  // Every other key presses the button in view that names it.
  button(key) {
    const found = [...document.querySelectorAll("button[aria-keyshortcuts]")].find((one) => one.getAttribute("aria-keyshortcuts") === key && one.checkVisibility() && !one.disabled);
    return found && (() => found.click());
  }

  next(by) {
    if (this.view === this.table) this.table.failed(by);
    else if (this.view === this.tape && !this.tape.next(by)) {
      const { table } = this;
      table.at = Math.max(0, table.found.indexOf(this.rows.number.get(this.tape.id)));
      const before = table.at;
      table.failed(by);
      if (table.at !== before) table.open();
    }
  }

  help() {
    const dialog = T.h("dialog", { "aria-label": "Keys", onclose: () => dialog.remove() }, T.h("h2", null, "Keys"),
      T.h("dl", { class: "keys" }, KEYS.map(([key, what]) => [T.h("dt", null, key.split(" ").map((one) => (one === "/" && key !== "/" ? " / " : T.h("kbd", null, one)))), T.h("dd", null, what)])),
      T.button("Close", () => dialog.close()));
    document.body.append(dialog);
    dialog.showModal();
  }

  theme(wanted) {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    if (wanted === "other") { root.dataset.theme = dark ? "light" : "dark"; localStorage.setItem("theme", root.dataset.theme); }
    else if (wanted === "light" || wanted === "dark") root.dataset.theme = wanted;
  }
}

T.app = new App();
T.app.start();
