// The sources of data: a server on this machine, or the data block of a report. Both give the same answers. The newest
// pages of a server stay in memory, so memory does not grow while the user scrolls.
"use strict";

const KEPT_PAGES = 48;

T.policy = window.trustedTypes
  ? window.trustedTypes.createPolicy("tapereel", { createScriptURL: (address) => {
    if (address === "worker.js" || address.startsWith("blob:")) return address;
    throw new TypeError(`not a script of this page: ${address}`);
  } })
  : { createScriptURL: (address) => address };

class Cache {
  constructor(size) { this.size = size; this.kept = new Map(); }
  get(key, make) {
    let found = this.kept.get(key);
    if (found === undefined) found = make();
    this.kept.delete(key);
    this.kept.set(key, found);
    found.catch(() => this.kept.delete(key));
    while (this.kept.size > this.size) this.kept.delete(this.kept.keys().next().value);
    return found;
  }
  forget(start) { for (const key of [...this.kept.keys()]) if (key.startsWith(start)) this.kept.delete(key); }
}

class ServerSource {
  constructor() { this.live = true; this.cache = new Cache(KEPT_PAGES); }
  async ask(path) {
    let answer;
    try {
      answer = await fetch(path, { headers: { Accept: "application/json" }, credentials: "same-origin" });
    } catch {
      throw new Error("the viewer's server does not answer: start `tapereel view` again and reload this page");
    }
    let read;
    try { read = await answer.json(); } catch { throw new Error(`the viewer's server failed (${answer.status}); its terminal says why`); }
    if (!answer.ok) throw new Error(read.error || `${answer.status}`);
    return read;
  }
  kept(path) { return this.cache.get(path, () => this.ask(path)); }
  of(tape) { return `api/tape/${encodeURIComponent(tape)}`; }
  run() { return this.ask("api/run"); }
  table(shard) { return this.ask(`api/table/${shard}`); }
  changes(rev) { return this.ask(`api/changes?rev=${encodeURIComponent(rev)}`); }
  curve() { return this.ask("api/curve"); }
  report() { return this.ask("api/report"); }
  behind(k) { return this.ask(`api/behind/${k}`); }
  verify() { return this.ask("api/verify"); }
  row(run) { return this.ask(`api/runs/${run}`); }
  compare(first, second, split, against) {
    const asked = Object.entries({ split, against }).filter(([, value]) => value !== null);
    return this.ask(`api/compare/${encodeURIComponent(first)}/${encodeURIComponent(second)}?${new URLSearchParams(asked)}`);
  }
  media(name) { return `media/${name}`; }
  head(tape) { return this.kept(this.of(tape)); }
  items(tape, page) { return this.kept(`${this.of(tape)}/items/${page}`); }
  turns(tape, page) { return this.kept(`${this.of(tape)}/turns/${page}`); }
  texts(tape, page) { return this.ask(`${this.of(tape)}/texts/${page}`); }
  textsOf(tapes) { return this.ask(`api/texts?tapes=${tapes.map(encodeURIComponent).join(",")}`); }
  gists(tapes) { return this.ask(`api/gists?tapes=${tapes.map(encodeURIComponent).join(",")}`); }
  call(tape, call, from) {
    const more = from === undefined ? "" : `&from=${from}`;
    return this.kept(`${this.of(tape)}/call?call=${encodeURIComponent(call)}${more}`);
  }
  explain(tape) { return this.kept(`${this.of(tape)}/explain`); }
  text(tape, record, piece) { return this.ask(`${this.of(tape)}/text/${record}?piece=${piece}`); }
  async find(tape, { step, call }) {
    const asked = step === undefined ? `call=${encodeURIComponent(call)}` : `step=${step}`;
    return (await this.ask(`${this.of(tape)}/find?${asked}`)).item;
  }
  forget(tape) { this.cache.forget(this.of(tape)); }
  worker() { return new Worker(T.policy.createScriptURL("worker.js")); }
}

// The data block of a report maps a key to JSON text.
class ReportSource {
  constructor() { this.live = false; this.data = JSON.parse(document.getElementById("data").textContent); }
  async read(key) {
    const text = this.data[key];
    if (text === undefined) throw new Error("that is not in this report; `tapereel view` on the run shows it");
    return JSON.parse(text);
  }
  async part(tape, part) {
    if (this.data[`${tape}/head`] === undefined) throw new Error(`no tape ${tape} is in this report`);
    return this.read(`${tape}/${part}`);
  }
  run() { return this.read("run"); }
  table(shard) { return this.read(`table-${shard}`); }
  curve() { return this.read("curve"); }
  report() { return this.read("report"); }
  behind(k) { return this.read(`behind/${k}`); }
  head(tape) { return this.part(tape, "head"); }
  items(tape, page) { return this.part(tape, `items-${page}`); }
  turns(tape, page) { return this.part(tape, `turns-${page}`); }
  explain(tape) { return this.part(tape, "explain"); }
  gists() { return this.read("gists"); }
  textsOf(tapes) { return Promise.all(tapes.slice(0, 8).map((tape) => this.texts(tape, 0))); }
  async texts(tape, page) {
    const [head, read] = await Promise.all([this.head(tape), this.items(tape, page)]);
    const size = (await T.overview).page;
    const texts = read.items.map((item, k) => [read.from + k, item.text || item.raw || item.public || (item.cause && [item.cause.error, item.cause.message].filter(Boolean).join(": ")) || ""]).filter(([, text]) => text);
    return { texts, short: read.items.filter((item) => item.cut).length, pages: Math.ceil(head.items / size) };
  }
  async call(tape, call, from) {
    if (from !== undefined) throw new Error("a report holds the newest messages of a request only");
    const head = await this.head(tape);
    const page = head.call_pages.findIndex((calls) => calls.includes(call));
    if (page < 0) throw new Error(`tape ${tape} has no call ${call}`);
    return (await this.part(tape, `calls-${page}`))[call];
  }
  text() { throw new Error("a report holds the beginning of a long text only; `tapereel view` on the run shows it whole"); }
  async find(tape, { step, call }) {
    const [head, { page: size }] = await Promise.all([this.head(tape), T.overview]);
    for (let page = 0; page * size < head.items; page += 1) {
      const { from, items } = await this.items(tape, page);
      const at = items.findIndex((item) => (step === undefined ? item.t === "call" && item.call === call : item.step === step));
      if (at >= 0) return from + at;
    }
    throw new Error(`tape ${tape} has no ${step === undefined ? `call ${call}` : `step ${step}`}`);
  }
  // The address of a media file; null where this report doesn't hold it.
  media(name) { const found = this.data[`media/${name}`]; return found === undefined ? null : JSON.parse(found); }
  async verify() { throw new Error("a report can't be verified: verify the run"); }
  forget() {}
  async worker() {
    const code = await this.read("worker");
    const address = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
    return new Worker(T.policy.createScriptURL(address));
  }
}

T.source = document.documentElement.hasAttribute("data-report") ? new ReportSource() : new ServerSource();
