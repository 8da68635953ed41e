// The table of tapes with its filters, failures first.
"use strict";

const COLUMNS = [
  ["status", "Status", "worst"], ["reward", "Reward", "best"], ["task", "Task", "task"], ["split", "Split", "split"],
  ["group", "Group", "group"], ["turns", "Turns", "turns"], ["tokens", "Tokens", "tokens"], ["version", "Version", "version"],
  ["agent", "Agent", "agent"], ["begun", "Began", "newest"],
];
const FILTERS = ["status", "split", "agent", "task", "group", "version", "checks", "min", "max", "unscored", "sort", "update", "text", "re"];

const AT_ONCE = 40;

T.Table = class {
  constructor(app) {
    this.app = app;
    this.filter = {};
    this.at = 0;
    this.found = [];
    this.filters = T.h("div", { class: "filters", role: "search", "aria-label": "Filters" });
    this.note = T.h("p", { class: "note", role: "status" });
    this.headings = T.h("div", { class: "trow headings", role: "row" });
    this.place = T.h("div", { class: "rows" });
    this.root = T.h("div", { class: "table-view" }, this.filters, this.note,
      T.h("div", { class: "table", role: "presentation" }, this.headings, this.place));
    this.list = new T.List(this.place, { draw: (k) => this.draw(k), height: 34, fixed: true, role: "grid", label: "Tapes" });
    this.place.addEventListener("click", (event) => {
      const row = event.target.closest("[data-k]");
      if (row && !event.target.closest("a")) this.open(Number(row.dataset.k));
    });
    this.drawFilters();
  }

  // The filters of a link: `?status=error&reward…`.
  set(query) {
    this.filter = {};
    this.chosen = new URLSearchParams(query).get("row");
    for (const [name, value] of new URLSearchParams(query)) {
      if (!FILTERS.includes(name) || value === "") continue;
      this.filter[name] = name === "min" || name === "max" ? Number(value) : value;
      if (Number.isNaN(this.filter[name])) delete this.filter[name];
    }
    this.drawFilters();
    return this.apply();
  }

  change(changes) {
    this.filter = { ...this.filter, ...changes };  // the address changes a moment later, and another change may come before
    this.app.go(this.address());
  }

  // The list with its filters, its order and the row that the user chose.
  address() {
    const query = new URLSearchParams();
    for (const [name, value] of [...FILTERS.map((name) => [name, this.filter[name]]), ["row", this.chosen]]) {
      if (value !== undefined && value !== null && value !== "" && value !== false) query.set(name, value);
    }
    const text = query.toString();
    return text ? `#/?${text}` : "#/";
  }

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
    if (this.chosen) this.list.show(this.at);
    if (filter.text) await this.search(filter, asked);
  }

  // Select the rows that fit the filters. The row that the user chose stays chosen; without one it is the first.
  select() {
    const { rows } = this.app;
    const filter = { ...this.base };
    const [, from, to] = /^tapes-(\d+)-(\d+)$/.exec(filter.update) || [];
    if (from) filter.among = new Set(rows.select({ sort: "oldest" }).slice(from - 1, to).map((row) => rows.ids[row]));
    if (this.hits) filter.among = filter.among ? new Set([...filter.among].filter((id) => this.hits.has(id))) : this.hits;
    this.found = rows.select(filter);
    this.at = Math.max(0, this.found.indexOf(rows.number.get(this.chosen)));
    this.tell();
    this.drawStatus();
    if (this.list.count !== this.found.length) this.list.setCount(this.found.length);
    else this.list.redraw();
    this.place.setAttribute("aria-rowcount", this.found.length);
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
      " ", Object.keys(this.filter).length ? T.button("Clear filters", () => this.app.go("#/"), { class: "link" }) : null);
    this.empty();
  }

  empty() {
    const old = this.place.querySelector(".state");
    if (old) old.remove();
    if (this.found.length || this.running) return;
    const none = this.app.rows.length === 0;
    this.place.append(none
      ? T.state("No tape yet", "The run has no episode on tape. A running experiment appears here as it records.")
      : T.state("No tape fits", "No tape fits these filters.", T.button("Clear filters", () => this.app.go("#/"))));
  }

  drawFilters() {
    const { rows } = this.app;
    const f = this.filter;
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
    T.fill(this.filters, T.h("div", { class: "fields" }, this.statuses, search),
      T.h("div", { class: "fields" }, choice("split", "Split"), choice("agent", "Agent"),
        rows.counts("checks").some(([word]) => word) ? choice("checks", "Check") : null, box("task", "task"), box("group", "group"), box("version", "version"),
        T.h("span", { class: "range" }, "reward ", box("min", "from", "short", "text"), " – ", box("max", "to", "short", "text")),
        order));
    this.drawStatus();
    T.fill(this.headings, COLUMNS.map(([name, label, sort]) => T.h("span", { class: `c-${name}`, role: "columnheader", "aria-sort": (f.sort || "worst") === sort ? "other" : "none" },
      T.button(label, () => this.change({ sort: sort === "worst" ? "" : sort }), { class: "heading" }))));
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
    const group = row.group ? T.h("a", { href: `#/group/${encodeURIComponent(row.group)}`, title: row.group, tabindex: "-1" }, T.spelled(`${row.group}/${row.attempt}`)) : "";
    const cells = {
      status: [T.status(row.status, row.cause), " ", T.checks(row.checks)], reward: T.h("span", { class: row.reward === null ? "none" : "" }, T.number(row.reward)),
      task: T.spelled(row.task), split: T.spelled(row.split), group, turns: T.count(row.turns), tokens: T.count(row.tokens),
      version: T.spelled(row.version || "–"), agent: T.spelled(row.agent), begun: T.time(row.begun),
    };
    return T.h("div", { class: `trow${k === this.at ? " chosen" : ""}`, role: "row", "data-k": k, "data-tape": row.id, "aria-rowindex": k + 1, "aria-selected": String(k === this.at) },
      COLUMNS.map(([name]) => T.h("span", { class: `c-${name}`, role: "gridcell" }, cells[name])));
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

  move(by) {
    if (!this.found.length) return;
    this.choose(Math.max(0, Math.min(this.found.length - 1, this.at + by)));
  }

  choose(k) {
    const before = this.at;
    this.take(k);
    this.list.refresh(before, before + 1);
    this.list.refresh(k, k + 1);
    this.list.show(k);
  }

  // Row k is the one that the user chose. Its address survives a reload.
  take(k) {
    this.at = k;
    this.chosen = this.app.rows.ids[this.found[k]];
    if (this.app.view === this) this.app.rename(this.address());
  }

  failed(by) {
    for (let k = this.at + by; k >= 0 && k < this.found.length; k += by) if (this.app.rows.rank(this.found[k]) < 2) { this.choose(k); return; }
    T.toast("no other tape in this list failed");
  }

  open(k = this.at) {
    if (this.found[k] === undefined) return;
    this.take(k);
    this.app.go(`#/tape/${encodeURIComponent(this.app.rows.ids[this.found[k]])}`);
  }

  // The tape before or after this one in the list.
  beside(tape, by) {
    const k = this.found.indexOf(this.app.rows.number.get(tape));
    const next = this.found[k + by];
    if (k < 0 || next === undefined) return null;
    this.take(k + by);
    return this.app.rows.ids[next];
  }
};
