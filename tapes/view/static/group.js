// The attempts of a group side by side: reward by component, and the action of each turn.
"use strict";

const ATTEMPTS = 16;

T.Group = class {
  constructor(app) {
    this.app = app;
    this.root = T.h("div", { class: "group-view" });
  }

  async open(group, at) {
    const { rows } = this.app;
    const code = rows.columns.group.number.get(group);
    const found = [];
    rows.columns.group.at.forEach((at, row) => { if (at === code) found.push(rows.row(row)); });
    if (code === undefined || !found.length) { T.fill(this.root, T.state("No such group", `No tape of group ${group} is in this run.`)); return; }
    found.sort((a, b) => a.attempt - b.attempt || a.begun - b.begun);
    this.found = found;
    this.shown = Math.min(found.length, ATTEMPTS);
    this.at = Math.max(0, Math.min(this.shown - 1, Number(at) || 0));
    this.group = group;
    T.fill(this.root, T.loading("Reading the attempts…"));
    await this.draw(group);
  }

  async draw(group) {
    const asked = (this.asked = {});
    let read;
    try {
      read = await Promise.all(this.found.slice(0, this.shown).map(async (row) => {
        const [head, { turns }] = await Promise.all([T.source.head(row.id), T.source.turns(row.id, 0)]);
        return { row, head, turns };
      }));
    } catch (error) { T.fill(this.root, T.failed(error)); return; }
    if (asked !== this.asked) return;
    const scored = this.found.map((row) => row.reward).filter((reward) => reward !== null);
    const mean = scored.length ? scored.reduce((a, b) => a + b, 0) / scored.length : null;
    const names = [...new Map(read.flatMap(({ head }) => head.components.map(([name, , counts]) => [`${name}|${counts}`, [name, counts]]))).values()];
    const lines = Math.max(0, ...read.map(({ turns }) => turns.length));
    const cell = (...inside) => T.h("td", null, ...inside);
    const line = (label, of) => T.h("tr", null, T.h("th", { scope: "row" }, label), read.map((one) => cell(of(one))));
    const best = Math.max(...scored);
    const earned = (head, [name, counts]) => head.components.find(([other, , counted]) => other === name && counted === counts);
    const table = T.h("table", { class: "attempts" },
      T.h("thead", null, T.h("tr", null, T.h("th", { scope: "col" }, "Attempt"), read.map(({ row }, k) =>
        T.h("th", { scope: "col", class: k === this.at ? "chosen" : "" },
          T.h("a", { href: `#/tape/${encodeURIComponent(row.id)}`, title: row.id }, `#${row.attempt}`))))),
      T.h("tbody", null,
        line("status", ({ row }) => T.status(row.status, row.cause)),
        line("reward", ({ row }) => T.h("strong", { class: row.reward === null ? "none" : row.reward === best && scored.length > 1 ? "good" : "" }, T.number(row.reward))),
        line("against the mean", ({ row }) => (row.reward === null || mean === null ? "–" : T.number(row.reward - mean))),
        names.map((name) => line(T.h("span", null, T.spelled(name[0]), name[1] ? "" : T.h("small", null, " metric")), ({ head }) => {
          const found = earned(head, name);
          return found ? T.number(found[1]) : T.h("span", { class: "none", title: "this attempt has no such component" }, "–");
        })),
        line("version", ({ row }) => T.h("small", null, T.spelled(row.version || "–"))),
        line("tokens", ({ row }) => T.count(row.tokens))),
      T.h("tbody", { class: "turns" }, Array.from({ length: lines }, (_, turn) => {
        const texts = read.map(({ turns }) => (turns[turn] ? turns[turn].text : null));
        const common = texts.every((text) => text === null || text === texts.find((one) => one !== null));
        return T.h("tr", { class: common ? "same" : "" }, T.h("th", { scope: "row" }, `turn ${turn}`), read.map(({ row, turns }) => {
          const one = turns[turn];
          if (!one) return cell(T.h("span", { class: "none" }, "ended"));
          if (one.step === null) return cell(T.h("span", { class: "hole" }, "no action"));
          return cell(T.h("a", { class: "act", href: `#/tape/${encodeURIComponent(row.id)}/step/${one.step}` }, one.text ? T.broken(one.text) : "(empty)"),
            one.result === null ? null : T.h("div", { class: `result${one.failed ? " bad" : ""}` }, "→ ", T.broken(one.result)), " ",
            one.reward === null ? null : T.earned(one.reward));
        }));
      })));
    const flat = scored.length > 1 && scored.every((reward) => reward === scored[0]);
    T.fill(this.root,
      T.h("h2", null, "Group ", T.spelled(group)),
      T.h("p", { class: "note" }, `${T.plural(this.found.length, "attempt")} at `, T.spelled(this.found[0].task), ` · mean reward ${T.number(mean)} over ${T.count(scored.length)} scored`,
        flat ? " · all rewards are equal: a group without an advantage" : "",
        this.found.length > this.shown ? T.button(`show all ${this.found.length}`, () => this.all(), { class: "link", "aria-keyshortcuts": "a", title: "show all attempts (a)" }) : null),
      T.h("div", { class: "scroll", tabindex: "0", "aria-label": "Attempts side by side" }, table));
  }

  all() {
    if (!this.found || this.shown === this.found.length) return;
    this.shown = this.found.length;
    this.draw(this.found[0].group);
  }

  move(by) {
    if (!this.found) return;
    this.at = Math.max(0, Math.min(this.shown - 1, this.at + by));
    this.app.rename(`#/group/${encodeURIComponent(this.group)}/${this.at}`);
    this.root.querySelectorAll("thead th").forEach((heading, k) => {
      heading.classList.toggle("chosen", k === this.at + 1);
      if (k === this.at + 1) heading.scrollIntoView({ block: "nearest", inline: "nearest" });
    });
  }

  openChosen() { if (this.found) this.app.go(`#/tape/${encodeURIComponent(this.found[this.at].id)}`); }
  close() {}
};
