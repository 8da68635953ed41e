// One tape: outline, transcript and inspector. Links name steps and calls, so they stay valid when a run is indexed again.
"use strict";

const THUMBNAIL = 160;

T.Tape = class {
  constructor(app) {
    this.app = app;
    this.id = null;
    this.pages = new Map();
    this.hits = new Map();
    this.open_texts = new Set();
    this.whole = new Map();
    this.raw = localStorage.getItem("raw") === "1";
    this.top = T.h("div", { class: "tape-head" });
    this.outline = T.h("nav", { class: "outline", "aria-label": "Outline" });
    this.transcript = T.h("div", { class: "transcript" });
    this.inspector = new T.Inspector(this);
    this.root = T.h("div", { class: "tape-view" }, this.top, T.h("div", { class: "panes" }, this.outline, this.transcript, this.inspector.root));
    this.inspect(!T.phone.matches);
    this.list = new T.List(this.transcript, { draw: (k) => this.draw(k), height: 72, label: "Transcript", role: "feed", onmove: (k) => this.follow(k) });
    this.turnList = new T.List(this.outline, { draw: (k) => this.drawTurn(k), height: 46, fixed: true, label: "Turns" });
    this.transcript.addEventListener("click", (event) => this.clicked(event));
    this.outline.addEventListener("click", (event) => { const row = event.target.closest("[data-item]"); if (row) this.choose(Number(row.dataset.item), "top"); });
    this.transcript.addEventListener("toggle", () => { this.list.remeasure = true; this.list.paint(); }, true); // a folded part changes its row's height
  }

  // Open or close the inspector. On a phone it covers the transcript.
  inspect(open = !this.root.classList.contains("inspecting")) { this.root.classList.toggle("inspecting", open); }

  // Show texts formatted, or raw: character by character.
  format() {
    this.raw = !this.raw;
    localStorage.setItem("raw", this.raw ? "1" : "");
    this.list.redraw();
    if (this.head) this.drawHead();
  }

  short(call) { return call.startsWith(`${this.id}.`) ? call.slice(this.id.length) : call; }

  async open(id, what, name) {
    const asked = (this.asked = {});
    if (id !== this.id) {
      this.id = id;
      this.pages.clear();
      this.hits.clear();
      this.open_texts.clear();
      this.whole.clear();
      this.at = -1;
      this.turn = undefined;
      this.head = null;
      this.list.setCount(0);
      this.turnList.setCount(0);
      this.list.top = 0;
      this.inspector.clear();
      T.fill(this.top, T.h("p", { class: "note" }, "Opening the tape…"));
      try { this.head = await T.source.head(id); } catch (error) {
        if (asked === this.asked) { this.id = null; T.fill(this.top, T.failed(error)); }
        return;
      }
      if (asked !== this.asked) return;
      this.size = (await T.overview).page;
      this.drawHead();
      this.turnList.setCount(this.head.outline);
      this.list.setCount(this.head.items);
      if (this.query) this.search(this.query.text, this.query.regex);
    }
    if (!this.head) return;
    let item = 0;
    if (what === "item") item = Number(name);
    else if (what === "step" || what === "call") {
      try { item = await T.source.find(id, what === "step" ? { step: Number(name) } : { call: name }); } catch (error) { T.toast(error.message); }
    } else if (this.at >= 0) return;
    if (asked === this.asked) this.choose(Math.max(0, Math.min(item, this.head.items - 1)), what ? "top" : "", false);
  }

  // A running tape has grown.
  async grown() {
    const id = this.id;
    if (!id) return;
    T.source.forget(id);
    const head = await T.source.head(id);
    if (id !== this.id || !this.head) return;
    const atEnd = this.list.top + this.list.view > this.list.total - 60;
    const from = Math.floor(this.head.items / this.size);
    for (const page of [...this.pages.keys()]) if (page >= from - 1) this.pages.delete(page);
    this.head = head;
    this.drawHead();
    this.turnList.setCount(head.outline);
    this.list.setCount(head.items);
    if (atEnd) this.list.show(head.items - 1);
  }

  drawHead() {
    const h = this.head;
    const beside = (by, label) => T.button(by < 0 ? "←" : "→", () => this.app.beside(by), { title: label, "aria-label": label, "aria-keyshortcuts": by < 0 ? "[" : "]", class: "icon" });
    const { question, expected, given } = h.gist;
    const cause = h.end && h.end.cause ? [h.end.cause.error, h.end.cause.message].filter(Boolean).join(": ") : "";
    const gist = (name, text, kind) => (text === null ? null : T.h("div", { class: kind }, T.h("dt", null, name), T.h("dd", { title: T.plain(text) }, text.trim() ? T.spelled(text) : T.h("span", { class: "none" }, "(empty)"))));
    T.fill(this.top,
      T.h("div", { class: "line" }, beside(-1, "previous tape of the list ["), beside(1, "next tape of the list ]"),
        T.h("h1", null, T.spelled(this.id)), T.status(h.status, h.cause),
        T.h("span", { class: "reward-big", title: h.components.map(([name, value]) => `${T.plain(name)} ${T.number(value)}`).join("\n") }, "reward ", T.h("strong", { class: h.reward === null ? "none" : "" }, h.reward === null ? "not scored" : T.number(h.reward))),
        T.h("span", { class: "grow" }),
        T.button("Raw", () => this.format(), { "aria-pressed": String(this.raw), "aria-keyshortcuts": "m", title: "texts formatted, or raw (m)" }),
        T.button("Inspector", () => this.inspect(), { "aria-keyshortcuts": "i", title: "open or close the inspector (i)" }),
        T.button("Copy link", () => this.copy(), { class: "copy", "aria-keyshortcuts": "y", title: "copy a link to the chosen item (y)" })),
      T.h("dl", { class: "gist" }, gist("Question", question), gist("Expected", expected), gist("Given", given, expected !== null && given !== null && h.reward === 0 ? "bad" : ""), gist("Failed", cause || null, "bad")),
      T.h("details", { class: "more", open: this.wantsFacts ?? !T.phone.matches, ontoggle: (event) => { this.wantsFacts = event.currentTarget.open; } }, T.h("summary", null, "Details"), T.h("div", { class: "line note" }, [T.h("span", null, T.spelled(h.agent), " in ", T.spelled(h.env)), T.h("span", null, "task ", T.spelled(h.task || h.task_hash.slice(0, 12))), T.h("span", null, "split ", T.spelled(h.split)),
        T.h("span", null, T.plural(h.turns, "turn")), T.h("span", null, T.plural(h.calls, "call")), T.h("span", null, T.plural(h.sampled, "token")), T.h("span", null, T.plural(h.records, "record")),
        h.group ? T.h("a", { href: `#/group/${encodeURIComponent(h.group)}` }, "group ", T.spelled(`${h.group} #${h.attempt}`)) : null,
        h.parent ? T.h("a", { href: `#/tape/${encodeURIComponent(h.parent)}` }, "forked from ", T.spelled(h.parent)) : null,
        h.children.length ? T.h("span", null, T.plural(h.children.length, "fork"), ": ", h.children.slice(0, 6).map((child) => [T.h("a", { href: `#/tape/${encodeURIComponent(child)}` }, T.spelled(child.slice(-8))), " "])) : null])),
      h.episode.length || h.components.length > 1 ? T.h("div", { class: "line" }, h.components.map(([name, value, counts]) => T.earned(value, name, counts))) : null,
      this.checks(h.checks),
      h.holes.map((hole) => T.h("p", { class: "hole" }, T.spelled(hole))),
      h.status === "running" ? T.h("p", { class: "hole" }, "This tape has no end yet: it is being recorded, or its writer died and no recovery has run.") : null);
  }

  // The verdicts of checks on this tape: the newest of each verb, older ones folded.
  checks(all) {
    const where = (one) => (one.call ? `call/${encodeURIComponent(one.call)}` : one.step !== null && one.step !== undefined ? `step/${one.step}` : null);
    const line = (one) => T.h("div", { class: "checked" }, T.check(one.verb, one.outcome), " ", T.spelled(one.says), " ",
      where(one) ? T.h("a", { href: `#/tape/${encodeURIComponent(this.id)}/${where(one)}` }, "go there") : null, one.where ? [" at ", T.spelled(one.where)] : null, " ",
      one.fits === false ? T.chip("of other content than the tape has now", "warn") : null,
      T.h("span", { class: "when" }, [one.turn === null ? null : `turn ${one.turn} alone`, ...Object.entries(one.given).map(([name, value]) => `${name} ${value}`), T.time(one.at)].filter(Boolean).map((part) => [" · ", T.spelled(part)])),
      one.diff && one.diff.length ? T.h("details", null, T.h("summary", null, `likely cause: ${one.cause}; `, T.spelled(one.field)), T.box(one.diff.join("\n"))) : null);
    const newest = all.filter((one, k) => one.turn === null && all.findIndex((other) => other.verb === one.verb && other.turn === null) === k);
    const rest = all.filter((one) => !newest.includes(one));
    return [newest.map(line), rest.length ? T.h("details", { class: "checked" }, T.h("summary", null, T.plural(rest.length, newest.length ? "other check" : "check"), newest.length ? ", older or of one turn" : " of one turn"), rest.map(line)) : null];
  }

  page(k, kind) {
    const key = `${kind}${k}`;
    const store = kind === "items" ? this.pages : (this.turnPages = this.turnPages || new Map());
    const id = this.id;
    if (store.owner !== id) { store.clear(); store.owner = id; }
    let found = store.get(k);
    if (!found) {
      found = { rows: null, error: null };
      store.set(k, found);
      while (store.size > 12 && !this.list.printing) store.delete(store.keys().next().value);
      T.source[kind](id, k).then((read) => { found.rows = kind === "items" ? read.items : read.turns; }, (error) => { found.error = error; })
        .then(() => { if (id === this.id) (kind === "items" ? this.list : this.turnList).refresh(k * this.size, (k + 1) * this.size); });
    } else { store.delete(k); store.set(k, found); }
    return { ...found, key };
  }

  async item(k) {
    const page = Math.floor(k / this.size);
    const read = await T.source.items(this.id, page);
    return read.items[k - read.from];
  }

  drawTurn(k) {
    const { rows, error } = this.page(Math.floor(k / this.size), "turns");
    const turn = rows ? rows[k % this.size] : null;
    if (!turn) return T.h("div", { class: "turn waiting", role: "listitem" }, error ? error.message : "");
    return T.h("button", { type: "button", class: `turn${k === this.turn ? " chosen" : ""}`, "data-item": turn.item, "data-turn": k, role: "listitem", tabindex: "-1" },
      T.h("span", { class: "k" }, String(k)), T.h("span", { class: "what" }, turn.step === null ? T.h("span", { class: "none" }, this.head.status === "running" ? "no action yet" : "no action") : [T.h("span", null, T.spelled(turn.text.slice(0, 80) || turn.kind || "")), turn.result === null ? null : T.h("span", { class: turn.failed ? "bad" : "result" }, "→ ", T.spelled(turn.result.slice(0, 80)))]),
      turn.reward === null ? null : T.earned(turn.reward));
  }

  draw(k) {
    const { rows, error } = this.page(Math.floor(k / this.size), "items");
    const item = rows ? rows[k % this.size] : null;
    if (!item) return T.h("article", { class: "item waiting", "data-k": k }, error ? T.h("p", { class: "hole" }, T.spelled(error.message)) : "");
    const made = T.h("article", { class: `item ${item.t} ${item.role || ""}${item.failed ? " failed" : ""}${k === this.at ? " chosen" : ""}${item.inherited ? " inherited" : ""}${this.hits.has(k) ? " hit" : ""}`,
      "data-k": k, "aria-posinset": k + 1, "aria-setsize": this.head.items }, this.inside(item, k));
    return made;
  }

  inside(item, k) {
    const marks = this.hits.get(k);
    const away = item.at !== undefined && this.head.begin && this.head.begin.at !== undefined ? `+${T.seconds(Math.max(0, item.at - this.head.begin.at))}` : "";
    const head = (...inside) => T.h("header", null, inside, T.h("span", { class: "when" }, away));
    if (item.t === "hole") return [T.h("p", { class: "hole" }, T.spelled(item.why)), T.box(item.raw.slice(0, 300))];
    if (item.t === "begin") return [head(T.h("strong", null, k === 0 ? "begin" : "forked here"), T.h("span", null, T.spelled(item.task || "task without a name"))), item.public === null ? null : this.text(item.public, k, marks, null, "mono", this.raw || marks ? null : T.formatted(item.public)), this.files(item)];
    if (item.t === "call") {
      const found = marks ? this.text(item.text, k, marks, item.cut) : null;
      return [head(T.h("strong", null, "call ", T.spelled(this.short(item.call))), T.h("span", null, item.prompt === null ? "text only" : `${T.count(item.prompt)} prompt (${T.count(item.kept)} kept) → ${T.count(item.completion)} tokens`),
        T.h("span", { class: item.finish === "stop" || item.finish === "tool_calls" ? "" : "bad" }, item.finish), T.h("span", null, `T ${T.number(item.temperature)}`), item.mean_logprob === null ? null : T.h("span", null, `log-prob ${T.number(item.mean_logprob)}`),
        item.spans.length > 1 ? T.chip(T.plural(item.spans.length, "version"), "warn", item.spans.map(([version, a, b]) => `${T.plain(version)} [${a}, ${b})`).join("\n")) : null,
        item.unknown ? T.chip(`${T.count(item.unknown)} log-probs unknown`, "hole") : null, item.split ? T.chip("new row", "warn", T.plain(item.split)) : null, item.errors.length ? T.chip(T.plural(item.errors.length, "error"), "bad", T.plain(item.errors.join("\n"))) : null), found, this.files(item)];
    }
    if (item.t === "end") return head(T.h("strong", null, "end"), T.status(item.status, item.cause && item.cause.type), item.cause && item.cause.message ? T.h("span", { class: "bad" }, T.visible([item.cause.error, item.cause.message].filter(Boolean).join(": ").slice(0, 600), marks)) : null, T.h("span", null, T.seconds(item.seconds)));
    if (item.t === "reward") return head(T.h("strong", null, "reward layer"), T.earned(item.value * (item.weight || 1), item.name, Boolean(item.weight)), T.h("span", null, item.of === null ? "for the episode" : `for step ${item.of}`, item.layer ? [", layer ", T.spelled(item.layer)] : null));
    if (item.t !== "step") return head(T.h("strong", null, `${item.t} layer`), T.h("span", null, T.spelled(this.short(item.call))));
    return [
      head(T.h("strong", null, T.spelled(item.by === "env" ? "environment" : item.by)), T.h("span", null, item.parts && item.parts[0].tool ? T.spelled([...new Set(item.parts.map((part) => part.tool))].join(", ")) : T.spelled(item.kind)), item.failed ? T.chip("error", "bad") : null, T.h("a", { class: "step", href: `#/tape/${encodeURIComponent(this.id)}/step/${item.step}`, title: "link to this step" }, `step ${item.step}`),
        (item.rewards || []).map(([name, value, weight]) => T.earned(weight ? value * weight : value, name, Boolean(weight)))),
      this.text(item.text, k, marks, item.cut, "", this.raw || marks ? null : this.parts(item, k)), this.files(item),
    ];
  }

  // The formatted nodes of a step, or null if its text has no structure.
  parts(item, k) {
    const { parts } = item;
    if (!parts) return T.formatted(this.whole.get(k) ?? item.text);
    const calls = item.role === "action" ? this.calls(item) : [];
    return parts.map((part, n) => {
      if (item.role === "action") return T.called(part, calls[n]);
      const text = parts.length === 1 ? this.whole.get(k) ?? part.text : part.text;
      return T.h("div", { class: `fragment${part.error ? " failed" : ""}` }, parts.length > 1 ? T.h("strong", null, T.spelled(part.tool), " → ") : null,
        (part.error ? null : T.formatted(text)) || T.h("div", { class: "plain" }, T.spelled(text)), part.cut && text === part.text ? T.h("span", { class: "note" }, " …") : null);
    });
  }

  // The arguments of each tool call of a step; none where the record is too long to be read here.
  calls(item) {
    try { return JSON.parse(item.fields).calls.map((call) => call.arguments); } catch { return []; }
  }

  text(start, k, marks, cut, kind = "", made = null) {
    const text = this.whole.get(k) ?? start;
    const body = T.h("div", { class: `body ${made ? "rich" : kind}` }, made || T.visible(text, marks));
    const shown = body.textContent; // of a tree only what is unfolded
    const folds = shown.length > 1200 || shown.split("\n").length > 16;
    const open = this.open_texts.has(k) || (marks && marks.some(([at]) => at > 800));
    const left = cut && cut > text.length;
    body.classList.toggle("clamped", folds && !open);
    return [body,
      folds || left ? T.h("button", { type: "button", class: "link", "data-fold": k, "aria-keyshortcuts": "l" }, open && !(left && !this.whole.has(k)) ? "show less" : "show more") : null,
      left ? T.h("p", { class: "note" }, `cut here; the whole text has ${T.plural(cut, "character")}: see the inspector`) : null];
  }

  // Unfold or fold the text of item k. The first time, the rest of a text that was cut is read.
  async fold(k) {
    if (!this.head || k < 0) return;
    if (!this.open_texts.delete(k)) this.open_texts.add(k);
    const id = this.id;
    try {
      const item = await this.item(k);
      if (item && item.cut && !this.whole.has(k)) {
        this.open_texts.add(k);
        const { text } = await T.source.text(id, item.record, 0);
        if (id === this.id) this.whole.set(k, text);
      }
    } catch (error) { T.toast(error.message); }
    if (id === this.id) this.list.refresh(k, k + 1);
  }

  // The files of an item in a row. Frames of a video have times.
  files(item) {
    return item.media ? T.h("div", { class: "files" }, item.media.map((name, k) => this.media(name, (item.times || [])[k], (item.sizes || [])[k]))) : null;
  }

  media(name, time, size) {
    if (!T.source.media(name)) return T.h("p", { class: "note" }, `media file ${name.slice(0, 12)}…${name.slice(64)} is not in this file`);
    const made = /\.(png|jpe?g|gif|webp)$/.test(name)
      ? this.picture(name, time, size)
      : T.h("a", { href: `media/${name}`, download: true }, `media file ${name.slice(0, 12)}…${name.slice(64)}`);
    made.addEventListener("error", () => made.replaceWith(T.h("p", { class: "hole" }, `media file ${name.slice(0, 12)}… is gone or does not hold what its name says`)), true); // an image's error doesn't bubble
    return made;
  }

  // A thumbnail; a click on a server's page shows the whole file. It takes its place before the file arrives: at the
  // recorded size, scaled to the thumbnail's height, or in a square if the size isn't recorded.
  picture(name, time, size) {
    const [width, height] = size || [THUMBNAIL, THUMBNAIL];
    const scale = Math.min(1, THUMBNAIL / height);
    const source = T.source.media(name);
    const image = T.h("img", { src: source, alt: "an image of this record", loading: "lazy", class: size ? "media" : "media unsized", width: Math.max(1, Math.round(width * scale)), height: Math.max(1, Math.round(height * scale)) });
    const when = typeof time === "number" ? `${time.toFixed(1)} s ` : "";
    const says = T.h("figcaption", { class: "note" }, when + name.slice(0, 12));
    image.addEventListener("load", () => { says.textContent = `${when}${image.naturalWidth}x${image.naturalHeight} ${name.slice(0, 12)}`; });
    return T.h("figure", { class: "media" }, T.source.live ? T.h("a", { href: source, target: "_blank", rel: "noopener", title: name }, image) : image, says);
  }

  clicked(event) {
    const fold = event.target.closest("[data-fold]");
    const row = event.target.closest("[data-k]");
    if (fold) this.fold(Number(fold.dataset.fold));
    else if (row && !event.target.closest("a, button, summary") && !String(window.getSelection())) {
      this.choose(Number(row.dataset.k));
      if (T.phone.matches) this.inspect(true);
    }
  }

  // Choose an item; the address then names its step or call.
  async choose(k, where = "", rename = true) {
    if (!this.head || k < 0 || k >= this.head.items) return;
    const before = this.at;
    this.at = k;
    for (const one of [before, k]) { const made = this.list.drawn.get(one); if (made) made.classList.toggle("chosen", one === k); } // not drawn again: what is unfolded stays so
    this.list.show(k, where);
    const { moves } = this.list;
    try {
      const item = await this.item(k);
      if (this.at !== k || !item) return;
      this.list.read();
      if (moves === this.list.moves) this.list.show(k, where); // its height is known now; but the list never moves after the user has scrolled
      this.chosen = item;
      this.inspector.show(item);
      if (rename) this.app.rename(this.address(item));
    } catch (error) { T.toast(error.message); }
  }

  address(item) {
    const base = `#/tape/${encodeURIComponent(this.id)}`;
    if (item.step !== undefined) return `${base}/step/${item.step}`;
    return item.t === "call" ? `${base}/call/${encodeURIComponent(item.call)}` : base;
  }

  async copy() {
    try { await navigator.clipboard.writeText(location.href); T.toast("The link is on the clipboard."); } catch { T.toast(location.href); }
  }

  // The outline follows the chosen item while that is in view, else the item at the top.
  follow(k) {
    const { list } = this;
    const chosen = this.at >= 0 && list.offset(this.at + 1) > list.top && list.offset(this.at) < list.top + list.view;
    const shown = chosen ? this.at : k;
    const page = this.pages.get(Math.floor(shown / this.size));
    const item = page && page.rows ? page.rows[shown % this.size] : null;
    if (!item || item.turn === this.turn) return;
    const before = this.turn;
    this.turn = item.turn;
    if (before !== undefined) this.turnList.refresh(before, before + 1);
    this.turnList.refresh(this.turn, this.turn + 1);
    this.turnList.show(this.turn);
  }

  move(by) { this.choose(this.at + by); }

  // Find in this tape: page by page, until the end or until another search begins.
  async search(text, regex) {
    if (this.searching) this.searching.stop();
    this.query = text ? { text, regex } : null;
    this.hits.clear();
    this.order = [];
    this.list.redraw();
    this.app.showFound("");
    if (!text) return;
    let search;
    try { search = new T.Search(text, regex); } catch (error) { this.app.showFound(`invalid pattern: ${error.message}`); return; }
    this.searching = search;
    const id = this.id;
    let short = 0;
    try {
      for (let page = 0, pages = 1; page < pages; page += 1) {
        const read = await T.source.texts(id, page);
        pages = read.pages;
        short += read.short;
        const hits = await search.within(read.texts);
        if (search.over || id !== this.id) return;
        const first = !this.order.length && hits.length;
        for (const [k, marks] of hits) { this.hits.set(k, marks); this.order.push(k); this.list.refresh(k, k + 1); }
        if (first) this.choose(this.order[0]);
        this.app.showFound(`${T.plural(this.order.length, "match").replace("matchs", "matches")}${page + 1 < pages ? `, ${T.count(page + 1)} of ${T.count(pages)} pages read` : ""}${short ? `; of ${T.plural(short, "long text")} the first part only` : ""}`);
      }
    } catch (error) { this.app.showFound(error.message); }
    if (search === this.searching) search.stop();
  }

  // Go to the next match, or to the one before.
  next(by) {
    if (!this.order || !this.order.length) return false;
    const after = by > 0 ? this.order.find((k) => k > this.at) : this.order.findLast((k) => k < this.at);
    this.choose(after ?? (by > 0 ? this.order[0] : this.order.at(-1)));
    return true;
  }

  close() { if (this.searching) this.searching.stop(); this.asked = null; }
};
