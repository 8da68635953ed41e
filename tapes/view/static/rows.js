// The table of tapes in memory: columns, filters and order. Columns are arrays, so that 100,000 tapes stay small.
"use strict";

const CODED = ["status", "cause", "split", "task", "group", "agent", "env", "version", "parent", "checks"];
const PLAIN = ["reward", "attempt", "begun", "seconds", "turns", "calls", "tokens"];

class Words {
  constructor() { this.words = []; this.number = new Map(); this.at = []; }
  code(word) {
    let found = this.number.get(word);
    if (found === undefined) { found = this.words.length; this.words.push(word); this.number.set(word, found); }
    return found;
  }
}

T.Rows = class {
  constructor() {
    this.ids = [];
    this.number = new Map();
    this.columns = Object.fromEntries([...CODED.map((name) => [name, new Words()]), ...PLAIN.map((name) => [name, []])]);
  }

  get length() { return this.ids.length; }

  // Add a shard of the table: a row with a known id is replaced.
  take(shard) {
    const codes = Object.fromEntries(CODED.map((name) => [name, shard[name].words.map((word) => this.columns[name].code(word))]));
    for (let k = 0; k < shard.n; k += 1) {
      const id = shard.id[k];
      let row = this.number.get(id);
      if (row === undefined) { row = this.ids.length; this.ids.push(id); this.number.set(id, row); }
      for (const name of CODED) this.columns[name].at[row] = codes[name][shard[name].at[k]];
      for (const name of PLAIN) {
        const value = shard[name][k];
        this.columns[name][row] = value === null ? null : Number(value);
      }
    }
  }

  value(name, row) {
    const column = this.columns[name];
    return column instanceof Words ? column.words[column.at[row]] : column[row];
  }

  row(row) {
    return Object.fromEntries([["id", this.ids[row]], ...CODED.map((name) => [name, this.value(name, row)]),
      ...PLAIN.map((name) => [name, this.columns[name][row]])]);
  }

  counts(name, rows) {
    const column = this.columns[name];
    const counts = new Array(column.words.length).fill(0);
    if (rows) for (const row of rows) counts[column.at[row]] += 1;
    else for (const code of column.at) counts[code] += 1;
    return column.words.map((word, k) => [word, counts[k]]).filter(([, n]) => n);
  }

  // Rank of a row's end: failures first, then limits and cancellations, running tapes, finished tapes. Finished tapes
  // without a reward, such as demonstrations, come last.
  rank(row) {
    const status = this.value("status", row);
    if (status === "error" || status === "crashed") return 0;
    if (status === "cancelled") return 1;
    if (status === "limit") return this.value("cause", row) === "seconds" ? 1 : 2;
    if (status === "truncated") return 2;
    if (status === "running") return 3;
    return 4;
  }

  select(filter) {
    const tests = [];
    for (const name of ["status", "split", "agent", "env", "checks"]) {
      if (filter[name]) {
        const code = this.columns[name].number.get(filter[name]);
        const at = this.columns[name].at;
        tests.push((row) => at[row] === code);
      }
    }
    for (const name of ["task", "group", "version"]) {
      if (!filter[name]) continue;
      const sought = filter[name].toLowerCase();
      const { words, at } = this.columns[name];
      const fits = words.map((word) => word.toLowerCase().includes(sought));
      tests.push((row) => fits[at[row]]);
    }
    const reward = this.columns.reward;
    if (filter.min !== undefined) tests.push((row) => reward[row] !== null && reward[row] >= filter.min);
    if (filter.max !== undefined) tests.push((row) => reward[row] !== null && reward[row] <= filter.max);
    if (filter.unscored) tests.push((row) => reward[row] === null);
    if (filter.among) tests.push((row) => filter.among.has(this.ids[row]));
    const found = [];
    for (let row = 0; row < this.ids.length; row += 1) if (tests.every((test) => test(row))) found.push(row);
    return this.order(found, filter.sort || "worst");
  }

  order(found, sort) {
    const { begun, reward } = this.columns;
    const newest = (a, b) => begun[b] - begun[a] || b - a;
    const low = (row) => (reward[row] === null ? Infinity : reward[row]);
    if (sort === "worst") {
      const rank = new Map(found.map((row) => [row, this.rank(row)]));
      return found.sort((a, b) => rank.get(a) - rank.get(b) || (low(a) === low(b) ? 0 : low(a) - low(b)) || newest(a, b));
    }
    if (sort === "newest") return found.sort(newest);
    if (sort === "oldest") return found.sort((a, b) => newest(b, a));
    if (sort === "best") return found.sort((a, b) => (reward[b] ?? -Infinity) - (reward[a] ?? -Infinity) || newest(a, b));
    if (!Object.hasOwn(this.columns, sort)) return found.sort(newest);
    const column = this.columns[sort];
    if (column instanceof Words) return found.sort((a, b) => (this.value(sort, a) < this.value(sort, b) ? -1 : 1));
    return found.sort((a, b) => (column[b] ?? -Infinity) - (column[a] ?? -Infinity) || newest(a, b));
  }
};
