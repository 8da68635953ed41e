// The table of tapes with its filters, failures first.
"use strict";

// Name: label, order that its heading chooses, width. The first eight are shown unless others are chosen.
const COLUMNS = {
  question: ["Question", null, "minmax(140px, 3fr)"], expected: ["Expected", null, "minmax(64px, 1fr)"], given: ["Given", null, "minmax(84px, 1.4fr)"],
  reward: ["Reward", "best", "62px"], status: ["Ended", "worst", "minmax(126px, 1fr)"], turns: ["Turns", "turns", "50px"], split: ["Split", "split", "58px"], begun: ["Began", "newest", "146px"],
  task: ["Task", "task", "minmax(80px, 1.2fr)"], id: ["Tape", null, "minmax(110px, 1.2fr)"], group: ["Group", "group", "minmax(90px, 1.2fr)"], agent: ["Agent", "agent", "minmax(64px, .8fr)"], env: ["Environment", "env", "minmax(84px, .8fr)"],
  version: ["Version", "version", "minmax(80px, 1fr)"], tokens: ["Tokens", "tokens", "68px"], calls: ["Calls", "calls", "54px"], seconds: ["Took", "seconds", "72px"],
};
const USUAL = Object.keys(COLUMNS).slice(0, 8);
const GISTS = ["question", "expected", "given"];
const FILTERS = ["status", "split", "agent", "task", "group", "version", "checks", "min", "max", "unscored", "update", "text", "re"];
const VIEW = ["sort", "cols"]; // parts of an address that exclude no tape

const AT_ONCE = 40;
const KEPT_GISTS = 2000;
const GISTS_AT_ONCE = 60;

// What the tapes in view were asked and answered. It is read when a row has come to rest in view, and kept until the
// row changes; the least recently shown is dropped first.
class Gists {
  constructor(list) { Object.assign(this, { list, kept: new Map(), wanted: new Map(), failed: "" }); }

  // The gist of a row; undefined until it has been read.
  of(row) {
    const key = `${row.id} ${row.status} ${row.turns}`;
    const found = this.kept.get(key);
    if (found) { this.kept.delete(key); this.kept.set(key, found); }
    else if (!this.failed) { this.wanted.set(row.id, key); this.soon(); }
    return found;
  }

  soon() { if (!this.timer) this.timer = setTimeout(() => this.read(), 60); }

  async read() {
    const { drawn } = this.list;
    const shown = new Set([...drawn.values()].map((made) => made.dataset.tape));
    for (const id of this.wanted.keys()) if (!shown.has(id)) this.wanted.delete(id);
    const keys = new Map([...this.wanted].slice(0, GISTS_AT_ONCE));
    const ids = [...keys.keys()];
    for (const id of ids) this.wanted.delete(id);
    try {
      const found = ids.length ? await T.source.gists(ids) : {};
      for (const [id, key] of keys) this.kept.set(key, found[id] || {});
    } catch (error) { this.failed = error.message; this.wanted.clear(); }
    while (this.kept.size > KEPT_GISTS) this.kept.delete(this.kept.keys().next().value);
    this.timer = 0;
    if (this.wanted.size) this.soon(); // more rows than are read at once, or drawn meanwhile
    if (this.failed) this.list.redraw(); // rows drawn meanwhile won't be read either
    else for (const [k, made] of [...drawn]) if (keys.has(made.dataset.tape)) this.list.refresh(k, k + 1);
  }
}

T.Table = class {
  constructor(app) {
    this.app = app;
    this.filter = {};
    this.at = 0;
    this.found = [];
    this.chosen = null; // the id of the row that the user chose
    this.fold = T.h("details", { open: !T.phone.matches });
    this.filters = T.h("div", { class: "filters", role: "search", "aria-label": "Filters" }, this.fold);
    this.note = T.h("p", { class: "note", role: "status" });
    this.headings = T.h("div", { class: "trow headings", role: "row" });
    this.place = T.h("div", { class: "rows" });
    this.root = T.h("div", { class: "table-view" }, this.filters, this.note,
      this.grid = T.h("div", { class: "table", role: "grid", "aria-label": "Tapes" }, T.h("div", { role: "rowgroup" }, this.headings), this.place));
    this.list = new T.List(this.place, { draw: (k) => this.draw(k), height: 34, fixed: true, role: "rowgroup" });
    this.gists = new Gists(this.list);
    this.place.addEventListener("click", (event) => {
      const row = event.target.closest("[data-k]");
      if (row && !event.target.closest("a")) this.open(Number(row.dataset.k));
    });
    this.narrow = matchMedia("screen and (max-width: 1080px)");
    addEventListener("click", (event) => { for (const open of this.fold.querySelectorAll(".columns[open]")) if (!event.composedPath().includes(open)) open.open = false; });
    T.phone.addEventListener("change", () => { this.fold.open = !T.phone.matches; this.drawFilters(); this.select(); });
    this.narrow.addEventListener("change", () => { this.drawFilters(); this.select(); });
    this.drawFilters();
  }

  // The columns that are shown.
  get columns() {
    const chosen = (this.filter.cols || "").split(",").filter((name) => Object.hasOwn(COLUMNS, name));
    return chosen.length ? chosen : this.narrow.matches ? USUAL.slice(0, 6) : USUAL;
  }

  // The filters of a link: `?status=error&reward…`.
  set(query) {
    this.filter = {};
    for (const [name, value] of new URLSearchParams(query)) {
      if (name === "row") this.chosen = value;
      if (![...FILTERS, ...VIEW].includes(name) || value === "") continue;
      this.filter[name] = name === "min" || name === "max" ? Number(value) : value;
      if (Number.isNaN(this.filter[name])) delete this.filter[name];
    }
    this.drawFilters();
    return this.apply();
  }

  // The address of the list, with its filters and its chosen row.
  address() {
    const query = new URLSearchParams();
    for (const name of [...FILTERS, ...VIEW]) if (this.filter[name] !== undefined && this.filter[name] !== "" && this.filter[name] !== false) query.set(name, this.filter[name]);
    if (this.chosen !== null) query.set("row", this.chosen);
    const text = query.toString().replaceAll("%2C", ",");
    return text ? `#/?${text}` : "#/";
  }

  change(changes) {
    this.filter = { ...this.filter, ...changes };  // the address changes a moment later, and another change may come before
    this.app.go(this.address());
  }

  clear() { this.change(Object.fromEntries(FILTERS.map((name) => [name, undefined]))); }

  get filtered() { return FILTERS.filter((name) => this.filter[name] !== undefined && this.filter[name] !== ""); }

  async apply() {
    const asked = (this.asked = {});
    this.stopSearch();
    const filter = { ...this.filter };
    if (filter.update !== undefined && !filter.update.startsWith("tapes-")) {
      const { tapes } = await T.source.behind(Number(filter.update));
      filter.among = new Set(tapes);
    }
    if (asked !== this.asked) return;
    this.base = filter;
    this.hits = null;
    this.select();
    if (this.chosen !== null) this.list.show(this.at);
    this.moves = this.list.moves;
    if (filter.text) await this.search(filter, asked);
  }

  // Select the rows that fit the filters. The row that the user chose stays chosen; before that it is the first one.
  select() {
    const { rows } = this.app;
    this.gists.failed = "";
    const filter = { ...this.base };
    const [, from, to] = /^tapes-(\d+)-(\d+)$/.exec(filter.update) || [];
    if (from) filter.among = new Set(rows.select({ sort: "oldest" }).slice(from - 1, to).map((row) => rows.ids[row]));
    if (this.hits) filter.among = filter.among ? new Set([...filter.among].filter((id) => this.hits.has(id))) : this.hits;
    this.found = rows.select(filter);
    this.at = Math.max(0, this.chosen === null ? 0 : this.found.indexOf(rows.number.get(this.chosen)));
    this.tell();
    this.drawStatus();
    if (this.list.count !== this.found.length) this.list.setCount(this.found.length);
    else this.list.redraw();
    // While rows arrive, the chosen row stays in view unless the user has scrolled.
    if (this.chosen !== null && this.moves === this.list.moves) this.list.show(this.at);
    this.grid.setAttribute("aria-rowcount", this.found.length);
    this.headings.style.paddingRight = `${14 + this.place.offsetWidth - this.place.clientWidth}px`;
  }

  tell() {
    const { rows } = this.app;
    let scored = 0;
    let sum = 0;
    for (const row of this.found) {
      const reward = rows.columns.reward[row];
      if (reward !== null) { scored += 1; sum += reward; }
    }
    const parts = [this.found.length === rows.length ? T.plural(rows.length, "tape") : `${T.count(this.found.length)} of ${T.plural(rows.length, "tape")}`];
    parts.push(scored ? `mean reward ${T.number(sum / scored)} over ${T.count(scored)} scored` : "none scored");
    if (rows.length < this.app.expected) parts.push(`${T.count(this.app.expected - rows.length)} still to be read`);
    T.fill(this.note, parts.join(" · "), this.searching ? ` · ${this.searching}` : "",
      " ", this.filtered.length ? T.button("Clear filters", () => this.clear(), { class: "link", "aria-keyshortcuts": "x", title: "clear the filters (x)" }) : null);
    this.empty();
  }

  empty() {
    const old = this.root.querySelector(".state");
    if (old) old.remove();
    this.grid.hidden = !this.found.length && !this.running;
    if (!this.grid.hidden) return;
    this.root.append(this.app.rows.length === 0
      ? T.state("No tape yet", "The run has no episode on tape. A running experiment appears here as it records.")
      : T.state("No tape fits", "No tape fits these filters.", T.button("Clear filters", () => this.clear(), { "aria-keyshortcuts": "x" })));
  }

  drawFilters() {
    const { rows } = this.app;
    const f = this.filter;
    const held = this.filters.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    const choice = (name, label) => {
      const made = T.h("select", { "aria-label": label, onchange: (event) => this.change({ [name]: event.target.value }) },
        T.h("option", { value: "" }, `any ${label.toLowerCase()}`));
      for (const [word, n] of rows.counts(name)) if (word) made.append(T.h("option", { value: word }, `${T.plain(word)} (${T.count(n)})`));
      made.value = f[name] || "";
      return made;
    };
    const box = (name, label, width, type = "search") => T.h("input", {
      type, "aria-label": label, placeholder: label, class: width, value: f[name] === undefined ? "" : String(f[name]),
      onchange: (event) => this.change({ [name]: event.target.value }),
    });
    this.statuses = T.h("div", { class: "statuses", role: "group", "aria-label": "Status" });
    this.text = box("text", "text of the tapes", "wide");
    this.text.setAttribute("id", "search");
    this.text.setAttribute("spellcheck", "false");
    const order = T.h("select", { "aria-label": "Order", onchange: (event) => this.change({ sort: event.target.value === "worst" ? "" : event.target.value }) },
      [["worst", "failures first"], ["newest", "newest first"], ["oldest", "oldest first"], ["best", "best first"], ["turns", "most turns"], ["tokens", "most tokens"], ["seconds", "longest"]]
        .map(([value, label]) => T.h("option", { value }, label)));
    order.value = f.sort || "worst";
    const search = T.h("span", { class: "search" }, this.text, T.h("label", { class: "check" },
      T.h("input", { type: "checkbox", checked: f.re === "1", onchange: (event) => this.change({ re: event.target.checked ? "1" : "" }) }), "regex"));
    const columns = this.columns;
    const chooser = T.phone.matches ? null : T.h("details", { class: "columns", open: this.choosing, onkeydown: (event) => { if (event.key === "Escape") event.currentTarget.open = false; }, ontoggle: (event) => { this.choosing = event.currentTarget.open; } }, T.h("summary", { "aria-keyshortcuts": "c", title: "choose columns (c)" }, "Columns"),
      T.h("div", null, Object.entries(COLUMNS).map(([name, [label]]) => T.h("label", { class: "check" }, T.h("input", { type: "checkbox", "aria-label": `column ${label}`, checked: columns.includes(name),
        onchange: (event) => { const on = Object.keys(COLUMNS).filter((one) => (one === name ? event.target.checked : columns.includes(one))); this.change({ cols: on.join() === USUAL.join() ? "" : on.join() }); } }), label))));
    T.fill(this.fold, T.h("summary", { "aria-keyshortcuts": "f" }, this.filtered.length ? `Filters: ${this.filtered.length} set` : "Filters"), T.h("div", { class: "fields" }, this.statuses, search),
      T.h("div", { class: "fields" }, choice("split", "Split"), choice("agent", "Agent"),
        rows.counts("checks").some(([word]) => word) ? choice("checks", "Check") : null, box("task", "task"), box("group", "group"), box("version", "version"),
        T.h("span", { class: "range" }, "reward ", box("min", "from", "short", "text"), " – ", box("max", "to", "short", "text")),
        order, chooser));
    this.drawStatus();
    this.grid.style.setProperty("--columns", columns.map((name) => COLUMNS[name][2]).join(" "));
    T.fill(this.headings, columns.map((name) => {
      const [label, sort] = COLUMNS[name];
      return T.h("span", { class: `c-${name}`, role: "columnheader", "aria-sort": sort && (f.sort || "worst") === sort ? "other" : null },
        sort ? T.button(label, () => this.change({ sort: sort === "worst" ? "" : sort }), { class: "heading", title: `order by ${label.toLowerCase()}` }) : T.h("span", { class: "heading" }, label));
    }));
    if (held) { const again = this.filters.querySelector(`[aria-label="${held}"]`); if (again) again.focus(); }
    this.list.height = T.phone.matches ? 58 : 34;
  }

  drawStatus() {
    const counts = this.app.rows.counts("status");
    const one = (word, n) => T.button([word ? T.status(word) : "all", T.h("span", { class: "n" }, T.count(n))],
      () => this.change({ status: word }), { class: "status-filter", "aria-pressed": String((this.filter.status || "") === word) });
    T.fill(this.statuses, one("", this.app.rows.length), counts.map(([word, n]) => one(word, n)),
      this.filter.update !== undefined ? T.button(["behind one point of the curve", " ✕"], () => this.change({ update: undefined }), { class: "status-filter", "aria-pressed": "true" }) : null,
      T.button("unscored", () => this.change({ unscored: this.filter.unscored ? "" : "1" }), { class: "status-filter", "aria-pressed": String(Boolean(this.filter.unscored)) }));
  }

  draw(k) {
    const row = this.app.rows.row(this.found[k]);
    const columns = T.phone.matches ? USUAL.slice(0, 5) : this.columns;
    const gist = columns.some((name) => GISTS.includes(name)) ? this.gists.of(row) : {};
    const part = (name) => {
      if (!gist) return this.gists.failed ? T.h("span", { class: "none", title: T.plain(this.gists.failed) }, "not read") : T.h("span", { class: "unread", role: "img", "aria-label": "loading" });
      return gist[name] === null || gist[name] === undefined ? T.h("span", { class: "none" }, "–") : gist[name].trim() === "" ? T.h("span", { class: "none" }, "(empty)") : T.h("span", { title: T.plain(gist[name]) }, T.spelled(gist[name].slice(0, 200)));
    };
    const cells = {
      status: () => [T.status(row.status, row.cause), " ", T.checks(row.checks)], reward: () => T.h("span", { class: row.reward === null ? "none" : "" }, T.number(row.reward)),
      id: () => T.spelled(row.id), version: () => T.spelled(row.version || "–"), begun: () => T.time(row.begun), seconds: () => T.seconds(row.seconds),
      group: () => (row.group ? T.h("a", { href: `#/group/${encodeURIComponent(row.group)}`, title: T.plain(row.group), tabindex: "-1" }, T.spelled(`${row.group}/${row.attempt}`)) : ""),
    };
    for (const name of GISTS) cells[name] = () => part(name);
    for (const name of ["turns", "calls", "tokens"]) cells[name] = () => T.count(row[name]);
    return T.h("div", { class: `trow${k === this.at ? " chosen" : ""}`, role: "row", "data-k": k, "data-tape": row.id, "aria-rowindex": k + 1, "aria-selected": String(k === this.at) },
      columns.map((name) => T.h("span", { class: `c-${name}`, role: "gridcell" }, cells[name] ? cells[name]() : T.spelled(row[name]))));
  }

  // Search the texts of the listed tapes, a few at a time, until the filters change.
  async search(filter, asked) {
    let search;
    try { search = new T.Search(filter.text, filter.re === "1"); } catch (error) { this.searching = `invalid pattern: ${error.message}`; this.tell(); return; }
    this.running = search;
    this.hits = new Set();
    const ids = this.found.map((row) => this.app.rows.ids[row]);
    this.searching = "searching…";
    this.select();
    let short = 0;
    let reported = 0;
    try {
      for (let at = 0; at < ids.length;) {
        const read = await T.source.textsOf(ids.slice(at, at + AT_ONCE));
        const hits = await search.within(read.flatMap(({ texts }, k) => texts.map(([, text]) => [ids[at + k], text])));
        if (asked !== this.asked) return;
        for (const [id] of hits) this.hits.add(id);
        for (const [k, one] of read.entries()) {
          short += one.short;
          for (let page = 1; page < one.pages && !this.hits.has(ids[at + k]); page += 1) {
            const more = await T.source.texts(ids[at + k], page);
            short += more.short;
            if ((await search.within(more.texts)).length) this.hits.add(ids[at + k]);
            if (asked !== this.asked) return;
          }
        }
        at += read.length;
        if (Date.now() - reported > 300) {
          reported = Date.now();
          this.searching = `searched ${T.count(at)} of ${T.count(ids.length)}`;
          this.select();
        }
      }
      this.searching = `searched ${T.plural(ids.length, "tape")}${short ? `, of ${T.plural(short, "long text")} the first part only` : ""}`;
    } catch (error) {
      if (asked !== this.asked) return;
      this.searching = `stopped: ${error.message}`;
    }
    search.stop();
    this.running = null;
    this.select();
  }

  stopSearch() {
    if (this.running) this.running.stop();
    this.running = null;
    this.searching = "";
  }

  // Open the part of the filters with this control, and go there.
  unfold(control) {
    if (this.app.view !== this) return;
    this.fold.open = true;
    const found = this.fold.querySelector(control);
    if (!found) return; // a phone has no columns to choose
    if (found.closest(".columns")) found.closest(".columns").open = true;
    found.focus();
  }

  move(by) {
    if (!this.found.length) return;
    this.choose(Math.max(0, Math.min(this.found.length - 1, this.at + by)));
  }

  choose(k) {
    const before = this.at;
    this.at = k;
    this.keep();
    this.list.refresh(before, before + 1);
    this.list.refresh(k, k + 1);
    this.list.show(k);
  }

  // Keep the chosen row in the address, once the user has stopped moving: browsers limit how often it may change.
  keep(wait = 150) {
    this.chosen = this.app.rows.ids[this.found[this.at]];
    this.moves = this.list.moves;
    clearTimeout(this.naming);
    const name = () => { if (this.app.view === this) this.app.rename(this.address()); };
    if (wait) this.naming = setTimeout(name, wait);
    else name();
  }

  failed(by) {
    for (let k = this.at + by; k >= 0 && k < this.found.length; k += by) if (this.app.rows.rank(this.found[k]) < 2) { this.choose(k); return; }
    T.toast("no other tape in this list failed");
  }

  open(k = this.at) {
    if (this.found[k] === undefined) return;
    this.at = k;
    this.keep(0);
    this.app.go(`#/tape/${encodeURIComponent(this.app.rows.ids[this.found[k]])}`);
  }

  // The tape before or after this one in the list.
  beside(tape, by) {
    const k = this.found.indexOf(this.app.rows.number.get(tape));
    const next = this.found[k + by];
    if (k < 0 || next === undefined) return null;
    this.at = k + by;
    this.chosen = this.app.rows.ids[next];
    return this.chosen;
  }
};
