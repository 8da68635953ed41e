// The runs of a folder, and two of them compared task by task. Names come as text and become text nodes. Rows arrive one
// after the other, since a run that was never opened has to be read first.
"use strict";

const LOOK_SECONDS = 5;
const SHOWN = 500;
const RUN_COLUMNS = [["name", "Run"], ["state", "State"], ["model", "Model"], ["recipe", "Recipe"], ["tapes", "Tapes"], ["updates", "Updates"], ["reward", "Reward"], ["after", "Held out"]];
const STATES = {
  running: ["good", "being written"], finished: ["", "closed"], stopped: ["warn", "closed before its last update: the same command with --resume continues it"],
  died: ["bad", "not closed, and its writer is gone: --resume continues it"], "not sealed": ["warn", "not closed; it is unknown whether its writer lives"], broken: ["bad", "bytes changed, or can't be read"],
};

T.Runs = class {
  constructor(app) {
    this.app = app;
    this.root = T.h("div", { class: "overview-view runs-view" });
    this.rows = new Map();
    this.entries = app.overview.runs;
    this.load();
    this.follow();
  }

  // Facts of the runs that have none yet, and of those that may have changed.
  async load() {
    for (const { key } of this.entries) {
      const known = this.rows.get(key);
      if (known && known.state !== "running" && known.state !== "died") continue;
      try { this.rows.set(key, await T.source.row(key)); } catch (error) { this.rows.set(key, { state: "broken", problems: [error.message] }); }
      if (!this.pair) this.drawRows();
    }
  }

  async follow() {
    for (;;) {
      await new Promise((done) => setTimeout(done, LOOK_SECONDS * 1000));
      if (document.hidden) continue;
      try {
        this.entries = (await T.source.run()).runs;
        this.app.pulse.textContent = "";
        await this.load();
        if (!this.pair) this.drawRows();
      } catch (error) { this.app.pulse.textContent = "not connected"; this.app.pulse.title = error.message; this.app.pulse.className = "pulse bad"; }
    }
  }

  async open(parts, query) {
    const asked = new URLSearchParams(query);
    if (parts[0] === "compare" && parts[2]) { await this.compare(parts[1], parts[2], asked); return; }
    this.pair = null;
    this.sought = asked.get("find") || "";
    this.sort = asked.get("sort") || "name";
    this.chosen = (asked.get("chosen") || "").split(",").filter(Boolean);
    this.at = asked.get("row");
    this.draw();
  }

  // The list

  address() {
    const query = new URLSearchParams();
    for (const [name, value] of [["find", this.sought], ["sort", this.sort === "name" ? "" : this.sort], ["chosen", this.chosen.join(",")], ["row", this.at || ""]]) if (value) query.set(name, value);
    const text = query.toString();
    return (this.app.lastList = text ? `#/?${text}` : "#/");
  }

  draw() {
    const { overview } = this.app;
    const find = T.h("input", { type: "search", id: "search", placeholder: "name of a run", "aria-label": "Name of a run", value: this.sought,
      oninput: (event) => { this.sought = event.target.value; this.changed(); } });
    this.button = T.button("Compare the two chosen runs", () => this.goCompare(), { title: "compare (c)", "aria-keyshortcuts": "c" });
    this.place = T.h("div", { class: "scroll" });
    T.fill(this.root, T.h("h2", { class: "title" }, T.spelled(overview.run)), T.h("p", { class: "note" }, T.spelled(overview.path)), T.h("div", { class: "line" }, find, this.button), this.place);
    this.drawRows();
    this.address();
  }

  changed() { this.app.rename(this.address()); this.drawRows(); }

  get found() {
    const value = ({ key, name }) => (this.sort === "name" ? name : (this.rows.get(key) || {})[this.sort]);
    const sought = this.sought.toLowerCase();
    const before = (a, b) => {
      const [one, other] = [value(a), value(b)];
      if (one === other) return a.name < b.name ? -1 : 1;
      if (one === null || one === undefined) return 1;
      if (other === null || other === undefined) return -1;
      return typeof one === "string" ? (one < other ? -1 : 1) : other - one;
    };
    return this.entries.filter(({ name }) => name.toLowerCase().includes(sought)).sort(before);
  }

  drawRows() {
    const found = this.found;
    this.button.disabled = this.chosen.length !== 2;
    if (!found.length) {
      T.fill(this.place, this.entries.length ? T.state("No run fits", "No run has this name.") : T.state("No run yet", "There is no run on the first two levels of this folder. A run that begins here appears."));
      return;
    }
    if (!found.some(({ key }) => key === this.at)) this.at = null;
    const heads = RUN_COLUMNS.map(([name, label]) => T.h("th", { class: `r-${name}`, "aria-sort": this.sort === name ? "other" : "none" }, T.button(label, () => { this.sort = name; this.changed(); }, { class: "heading" })));
    T.fill(this.place, T.h("table", null, T.h("thead", null, T.h("tr", null, T.h("th"), heads)), T.h("tbody", null, found.map((entry, k) => this.row(entry, k)))));
  }

  row({ key, name }, k) {
    const row = this.rows.get(key);
    const current = this.at ? this.at === key : k === 0;
    const pick = T.h("input", { type: "checkbox", "aria-label": `Choose ${T.plain(name)}`, checked: this.chosen.includes(key), onchange: () => this.mark(key) });
    const link = T.h("a", { href: `run/${key}/` }, T.spelled(name));
    if (!row) return T.h("tr", { "data-run": name, class: current ? "chosen" : "" }, T.h("td", null, pick), T.h("td", null, link), T.h("td", { colspan: RUN_COLUMNS.length - 1, class: "none" }, "reading…"));
    const [kind, says] = STATES[row.state] || ["warn", ""];
    const number = (value) => T.h("span", { class: value === null || value === undefined ? "none" : "" }, T.number(value));
    const cells = {
      name: link, state: T.chip(row.state, kind, says), model: T.spelled(row.model || "–"), recipe: T.spelled(row.recipe || "–"),
      tapes: T.count(row.tapes), updates: row.updates_planned ? `${T.count(row.updates)} of ${T.count(row.updates_planned)}` : "–", reward: number(row.reward),
      after: (row.before ?? row.after ?? null) === null ? "–" : [number(row.before), " → ", number(row.after)],
    };
    const problems = row.problems || [];
    return [T.h("tr", { "data-run": name, class: current ? "chosen" : "" }, T.h("td", null, pick), RUN_COLUMNS.map(([column]) => T.h("td", { class: `r-${column}` }, cells[column]))),
      problems.length ? T.h("tr", { class: "problems" }, T.h("td"), T.h("td", { colspan: RUN_COLUMNS.length }, problems.slice(0, 3).map((problem) => T.h("p", { class: "hole" }, T.spelled(problem))))) : null];
  }

  mark(key) {
    if (this.pair) return;
    const wanted = key || this.at || (this.found[0] || {}).key;
    if (!wanted) return;
    this.chosen = this.chosen.includes(wanted) ? this.chosen.filter((one) => one !== wanted) : [...this.chosen, wanted].slice(-2);
    this.changed();
  }

  move(by) {
    if (this.pair) return;
    const found = this.found;
    const next = found[Math.max(0, Math.min(found.length - 1, found.findIndex(({ key }) => key === this.at) + by + (this.at || by < 0 ? 0 : 1)))];
    if (!next) return;
    this.at = next.key;
    this.changed();
    const row = this.place.querySelector("tr.chosen");
    if (row) row.scrollIntoView({ block: "nearest" });
  }

  openChosen() {
    if (this.pair) return;
    const link = this.place.querySelector("tr.chosen a");
    if (link) link.click();
  }

  goCompare() { if (!this.pair && this.chosen.length === 2) this.app.go(`#/compare/${this.chosen.join("/")}`); }

  // Two runs

  async compare(first, second, asked) {
    const pair = (this.pair = {});
    T.fill(this.root, T.loading("Comparing the runs…"));
    let read;
    try { read = await T.source.compare(first, second, asked.get("split"), asked.get("against")); } catch (error) { if (pair === this.pair) T.fill(this.root, T.failed(error)); return; }
    if (pair !== this.pair) return;
    const keys = [first, second];
    const names = read.names.map((name) => T.plain(name));
    const go = (a, b, splits) => this.app.go(`#/compare/${a}/${b}?${new URLSearchParams({ split: splits[0], against: splits[1] })}`);
    const choice = (k) => {
      const pick = T.h("select", { "aria-label": `Split of ${names[k]}`, onchange: (event) => go(first, second, k ? [read.chosen[0], event.target.value] : [event.target.value, read.chosen[1]]) },
        T.h("option", { value: "" }, "all tapes"), read.splits[k].map((split) => T.h("option", { value: split }, T.plain(split))));
      pick.value = read.chosen[k];
      return pick;
    };
    const rank = ({ change }) => (change < -1e-12 ? 0 : change > 1e-12 ? 1 : 2);
    const both = read.tasks.filter((task) => task.rewards.every((reward) => reward !== null)).map((task) => ({ ...task, change: task.rewards[0] - task.rewards[1] })).sort((a, b) => rank(a) - rank(b) || Math.abs(b.change) - Math.abs(a.change));
    const only = [0, 1].map((k) => read.tasks.filter((task) => task.rewards[k] !== null && task.rewards[1 - k] === null));
    const neither = read.tasks.length - both.length - only[0].length - only[1].length;
    const [lower, higher] = [0, 1].map((wanted) => both.filter((task) => rank(task) === wanted).length);
    T.fill(this.root,
      T.h("p", null, T.h("a", { href: this.app.lastList || `#/?chosen=${first},${second}` }, "all runs")),
      T.h("h2", { class: "title" }, T.spelled(read.names[0]), " against ", T.spelled(read.names[1])),
      T.h("div", { class: "line" }, [0, 1].map((k) => T.h("label", { class: "note" }, T.h("a", { href: `run/${keys[k]}/` }, T.spelled(read.names[k])), ", split ", choice(k))), T.button("Swap", () => go(second, first, [read.chosen[1], read.chosen[0]]), { title: "swap the runs (s)", "aria-keyshortcuts": "s" })),
      read.problems.map((problem) => T.h("p", { class: "hole" }, T.spelled(problem))),
      read.scores ? this.scores(read.scores, names) : null,
      T.h("p", { class: "note counts" }, `${T.plural(both.length, "task")} scored by both: ${T.count(higher)} higher in the first run, ${T.count(lower)} lower, ${T.count(both.length - higher - lower)} equal. ${T.count(only[0].length)} only in the first, ${T.count(only[1].length)} only in the second${neither ? `, ${T.count(neither)} scored by neither` : ""}.`),
      this.tasks("Task by task, the losses of the first run first", both, keys, names),
      [0, 1].map((k) => this.tasks(`Only in ${names[k]}`, only[k], keys, names)));
  }

  scores({ scores, against_scores: other, difference }, names) {
    const span = (part) => (part ? `${T.number(part.value)}${part.low === null ? "" : ` [${T.number(part.low)}, ${T.number(part.high)}]`}` : "–");
    const rows = [["reward", scores.reward, other && other.reward, difference && difference.reward], ...Object.keys((difference || {}).pass_at || {}).map((k) => [`pass@${k}`, scores.pass_at[k], other.pass_at[k], difference.pass_at[k]])];
    const clear = (part) => part && part.low !== null && (part.low > 0 || part.high < 0);
    return T.h("section", null, T.h("h2", null, "With 95 % intervals"), T.h("div", { class: "scroll" }, T.h("table", { class: "scores" },
      T.h("thead", null, T.h("tr", null, ["", ...names, "difference, paired by task"].map((head) => T.h("th", null, head)))),
      T.h("tbody", null, rows.map(([name, first, second, change]) => T.h("tr", null, T.h("td", null, name), T.h("td", null, span(first)), T.h("td", null, span(second)),
        T.h("td", { class: clear(change) ? (change.value > 0 ? "good" : "bad") : "" }, span(change), change ? T.h("small", null, ` ${T.plural(change.tasks, "task")}${clear(change) ? "" : ", not distinguishable from 0"}`) : null)))))));
  }

  tasks(title, tasks, keys, names, shown = SHOWN) {
    if (!tasks.length) return null;
    const cell = (task, k) => T.h("td", { class: "n" }, task.rewards[k] === null ? T.h("span", { class: "none" }, "–") : T.h("a", { href: `run/${keys[k]}/#/tape/${encodeURIComponent(task.tapes[k])}`, title: T.plural(task.attempts[k], "attempt") }, T.number(task.rewards[k])));
    const made = T.h("section", null, T.h("h2", null, `${title} (${T.count(tasks.length)})`), T.h("div", { class: "scroll" }, T.h("table", { class: "tasks" },
      T.h("thead", null, T.h("tr", null, T.h("th", null, "task"), names.map((name) => T.h("th", { class: "n" }, name)), T.h("th", { class: "n" }, "difference"))),
      T.h("tbody", null, tasks.slice(0, shown).map((task) => T.h("tr", null, T.h("td", null, T.spelled(task.task)), cell(task, 0), cell(task, 1),
        T.h("td", { class: `n ${task.change > 1e-12 ? "good" : task.change < -1e-12 ? "bad" : ""}` }, task.change === undefined ? "–" : T.number(task.change))))))),
      tasks.length > shown ? T.button(`show all ${T.count(tasks.length)}`, () => made.replaceWith(this.tasks(title, tasks, keys, names, tasks.length)), { class: "link", title: "show all (a)", "aria-keyshortcuts": "a" }) : null);
    return made;
  }
};
