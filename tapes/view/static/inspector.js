// Details of one item. Of a call: its exact request, the difference to the call before, its tokens and their use in
// training. Of a step: its call and its reward.
"use strict";

const SIDES = 300;

T.fact = (name, ...value) => [T.h("dt", null, name), T.h("dd", null, ...value)];
T.facts = (...pairs) => T.h("dl", { class: "facts" }, pairs);
T.box = (text, kind) => T.h("pre", { class: `box ${kind || ""}` }, T.spelled(text));
T.fold = (title, open, ...inside) => T.h("details", { open }, T.h("summary", null, title), ...inside);

T.Inspector = class {
  constructor(tape) {
    this.tape = tape;
    this.root = T.h("aside", { class: "inspector", "aria-label": "Inspector", tabindex: "-1" });
    this.colour = "logprob";
    this.tab = "Request";
    this.clear();
  }

  closing() { return T.button("✕", () => this.tape.inspect(false), { class: "icon close", title: "close the inspector (i)", "aria-label": "Close the inspector", "aria-keyshortcuts": "i" }); }

  clear() { T.fill(this.root, T.h("h2", null, this.closing()), T.state("Nothing chosen", "Choose a step or a call to see its exact request, its tokens and their use in training.")); }

  async show(item) {
    const asked = (this.asked = {});
    const parts = [this.title(item)];
    if (item.t === "step") parts.push(this.step(item));
    else if (item.t === "begin") parts.push(this.begin(item));
    else if (item.t === "hole") parts.push(T.h("p", { class: "hole" }, T.spelled(item.why)), T.box(item.raw));
    else if (item.t === "end") parts.push(this.end(item));
    else if (item.t !== "call") parts.push(T.box(JSON.stringify(item, null, 1)));
    if (item.cut) parts.push(this.longText(item));
    const last = item.t === "call" ? [item.call, null] : (item.calls || []).length ? [item.calls.at(-1)[0], item.calls.at(-1)] : null;
    const place = T.h("div");
    T.fill(this.root, parts, last ? place : null);
    if (!last) return;
    T.fill(place, T.h("p", { class: "note" }, "Reading the call…"));
    try {
      const explained = this.explained();
      const call = await T.source.call(this.tape.id, last[0]);
      if (asked !== this.asked) return;
      this.call(place, call, { asking: true, missing: "The facts of training for this tape are being computed." }, last[1]);
      const more = await explained;
      if (asked !== this.asked) return;
      if (!call.pieces && more.decodes) T.source.forget(this.tape.id);
      this.call(place, call.pieces || !more.decodes ? call : await T.source.call(this.tape.id, last[0]), more, last[1]);
    } catch (error) { if (asked === this.asked) T.fill(place, T.h("p", { class: "hole" }, T.spelled(error.message))); }
  }

  // The facts of training come late, or not at all; nothing waits for them.
  async explained() {
    try { return await T.source.explain(this.tape.id); } catch (error) { return { missing: error.message }; }
  }

  title(item) {
    const names = { begin: "Begin", call: "Call", end: "End", reward: "Reward layer", label: "Label layer", tokens: "Token layer", hole: "Hole" };
    const name = item.t === "step" ? `${item.role[0].toUpperCase()}${item.role.slice(1)} · step ${item.step}` : names[item.t] || item.t;
    return T.h("h2", null, name, this.closing(), item.inherited ? T.chip("inherited", "", "belongs to the tape that this tape was forked from") : null);
  }

  step(item) {
    const calls = item.calls.map(([call, start, end]) => [
      T.h("a", { href: `#/tape/${encodeURIComponent(this.tape.id)}/call/${encodeURIComponent(call)}` }, T.spelled(this.tape.short(call))), ` tokens ${start} to ${end} `]);
    return [
      T.facts(T.fact("kind", T.spelled(item.kind)), T.fact("by", T.spelled(item.by)), T.fact("turn", String(item.turn)), T.fact("at", T.time(item.at)),
        T.fact("from", calls.length ? calls : item.by === "env" ? "the environment" : "no call: written by code"),
        (item.rewards || []).map(([name, value, weight]) => T.fact(weight ? "reward" : "metric", T.spelled(name), ` ${T.number(value)}`, weight && weight !== 1 ? ` × ${T.number(weight)}` : ""))),
      item.fields ? T.fold("Fields", item.calls.length === 0, T.box(item.fields)) : null,
    ];
  }

  begin(item) {
    const who = (one) => [T.spelled(one.name), one.cls ? T.h("small", null, " ", T.spelled(one.cls)) : null, one.effect ? T.chip(one.effect) : null];
    return [
      T.facts(T.fact("task", T.spelled(item.task || "without a name")), T.fact("task hash", T.h("code", null, item.task_hash.slice(0, 16))), T.fact("agent", who(item.agent)), T.fact("environment", who(item.env)),
        T.fact("split", T.spelled(item.split)), T.fact("group", item.group ? T.h("a", { href: `#/group/${encodeURIComponent(item.group)}` }, T.spelled(`${item.group} #${item.attempt}`)) : "none"),
        T.fact("environment seed", T.h("code", null, item.env_seed)), T.fact("sampling seed", T.h("code", null, item.seed)), T.fact("began", T.time(item.at)),
        Object.entries(item.versions).map(([name, value]) => T.fact(T.plain(name), T.h("code", { title: T.plain(value) }, T.spelled(value.slice(0, 16))))),
        item.parent ? T.fact("forked from", T.h("a", { href: `#/tape/${encodeURIComponent(item.parent.tape)}` }, T.spelled(item.parent.tape)), ` after turn ${item.parent.turn}`) : []),
      item.public === null ? null : T.fold("Task, as the agent saw it", true, T.box(item.public)),
      item.private === null ? null : T.fold("Task, the private part", false, T.h("p", { class: "note" }, "The agent never saw this."), T.box(item.private)),
      item.sampling ? T.fold("Requested sampling", false, T.box(item.sampling)) : null,
      item.limits ? T.fold("Limits", false, T.box(item.limits)) : null,
      item.agent.config ? T.fold("Agent's configuration", false, T.box(item.agent.config)) : null,
      item.env.config ? T.fold("Environment's configuration", false, T.box(item.env.config)) : null,
    ];
  }

  end(item) {
    const cause = item.cause || {};
    return T.facts(T.fact("status", T.status(item.status, cause.type)), T.fact("took", T.seconds(item.seconds)), T.fact("at", T.time(item.at)),
      cause.error ? T.fact("error", T.spelled(cause.error)) : [], cause.message ? T.fact("message", T.spelled(cause.message)) : [], cause.frame ? T.fact("raised at", T.h("code", null, T.spelled(cause.frame))) : []);
  }

  longText(item) {
    const place = T.h("div");
    let piece = 0;
    const more = async (event) => {
      const button = event.currentTarget;
      button.disabled = true;
      try {
        const { piece: size } = await T.overview;
        const read = await T.source.text(this.tape.id, item.record, piece);
        place.append(T.box(read.text));
        piece += 1;
        button.disabled = false;
        if (piece * size >= read.length) button.remove();
      } catch (error) { place.append(T.h("p", { class: "hole" }, T.spelled(error.message))); }
    };
    return T.fold(`The whole text: ${T.plural(item.cut, "character")}`, true, place, T.button("Read on", more));
  }

  call(place, call, more, range) {
    const own = { advantages: more.advantages ? more.advantages[call.call] : null, ratios: more.ratios ? more.ratios[call.call] : null, weights: more.weights, missing: more.missing, asking: more.asking, decodes: more.decodes };
    const tabs = { Request: () => this.request(call), Changes: () => this.changes(call), Tokens: () => this.tokens(call, own, range), Training: () => this.training(call, more) };
    if (range && this.tab === "Request" && !this.picked) this.tab = "Tokens";
    const pane = T.h("div", { class: "tab-pane", role: "tabpanel" });
    const bar = T.h("div", { class: "tabs", role: "tablist" });
    const pick = (name) => {
      this.tab = name;
      T.fill(bar, Object.keys(tabs).map((one) => T.button(one, () => { this.picked = true; pick(one); bar.querySelector('[aria-selected="true"]').focus(); }, { role: "tab", "aria-keyshortcuts": String(Object.keys(tabs).indexOf(one) + 1), "aria-selected": String(one === name) })));
      T.fill(pane, tabs[name]());
    };
    const cost = call.usage.cost === null ? null : `$${T.number(call.usage.cost, 4)}`;
    T.fill(place,
      range ? T.h("h3", null, "Read from call ", T.spelled(this.tape.short(call.call))) : null,
      T.facts(T.fact("call", T.h("code", null, T.spelled(call.call))), T.fact("by", T.spelled(call.by), call.conversation ? [", conversation ", T.spelled(call.conversation)] : ""), T.fact("engine", T.spelled(call.engine || "–")),
        T.fact("prompt", call.prompt === null ? "text only: no token ids" : `${T.plural(call.prompt, "token")}, ${T.count(call.kept)} kept from ${call.base ? T.plain(this.tape.short(call.base)) : "nothing"}`),
        T.fact("completion", call.completion === null ? "text only" : T.plural(call.completion, "token"), ` · ${call.finish}`),
        call.split ? T.fact("new row", T.chip(T.plain(call.split), "warn")) : [], T.fact("took", T.seconds(call.seconds), cost ? ` · ${cost}` : "", call.retries ? T.chip(T.plural(call.retries, "retry").replace("retrys", "retries"), "warn") : null),
        call.errors.map((error) => T.fact("error", T.h("span", { class: "bad" }, T.spelled(error))))),
      bar, pane);
    this.turnTo = (k) => { const name = Object.keys(tabs)[k]; if (name && bar.isConnected) { this.picked = true; pick(name); this.tape.inspect(true); } };
    pick(this.tab);
  }

  // Show tab k of the call in view; without a call there is none.
  turnTo() {}

  request(call) {
    const place = T.h("div", { class: "messages" });
    const put = (one) => T.fill(place, one.from > 0 ? T.button(`${T.plural(one.from, "earlier message")}`, async (event) => {
      event.currentTarget.disabled = true;
      try { put(await T.source.call(this.tape.id, call.call, Math.max(0, one.from - 200))); } catch (error) { T.toast(error.message); }
    }, { class: "link" }) : null, one.messages.map((message) => this.message(message)));
    put(call);
    const sampling = Object.entries(call.sampling).filter(([, value]) => value !== null && !(typeof value === "object" && !Object.keys(value).length)).map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`);
    return [place,
      T.h("h3", null, "Answer"), T.h("div", { class: "message assistant" }, T.h("div", { class: "body" }, T.spelled(call.text || "(no text)")), call.tool_calls ? T.box(call.tool_calls) : null),
      T.h("h3", null, "Asked with"), T.facts(T.fact("sampling", T.spelled(sampling.join(", "))), T.fact("seed", T.h("code", null, call.seed ?? "none")),
        call.form ? T.fact("form of the answer", T.spelled([call.form.schema ? "JSON" : null, ...call.form.tools].filter(Boolean).join(" or ") + (call.form.enforced ? ", enforced" : ", not enforced"))) : null),
      call.form && call.form.schema ? T.fold("Schema of the answer", false, T.box(call.form.schema)) : null,
      call.tools ? T.fold("Tools", false, call.tools.schemas ? T.box(call.tools.schemas) : T.h("p", { class: "hole" }, "Their definitions are on an earlier call that is not in this page: ", call.tools.hash.slice(0, 16))) : null,
      call.new_total === null ? null : T.fold(`New prompt tokens (${T.count(call.new_total)})`, false,
        call.new_total > call.new_ids.length ? T.h("p", { class: "note" }, `the last ${T.count(call.new_ids.length)} of them`) : null,
        T.h("div", { class: "tokens" }, this.folded(call, call.new_ids.map((id, k) => T.h("span", { class: `tok context${call.new_pieces ? "" : " id"}`, title: `id ${id}` }, T.spelled(call.new_pieces ? call.new_pieces[k] || "∅" : String(id)))))))];
  }

  // The tokens of each picture as one chip.
  folded(call, spans) {
    for (const [at, length, says] of call.new_places) {
      spans.fill(null, Math.max(0, at), at + length);
      spans[Math.max(0, at)] = T.chip(`picture, ${T.plural(length, "token")}`, "picture", T.plain(says));
    }
    return spans;
  }

  message(message, kind, marks) {
    const known = ["system", "user", "assistant", "tool"].includes(message.role);
    return T.h("div", { class: `message ${known ? message.role : ""} ${kind || ""}` }, T.h("div", { class: "role" }, kind === "gone" ? "− " : kind === "fresh" ? "+ " : "", T.spelled(message.role)),
      T.h("div", { class: "body" }, T.visible(message.text, marks)), message.cut ? T.h("p", { class: "note" }, `cut: ${T.plural(message.cut, "character")}`) : null, message.more ? T.box(message.more) : null);
  }

  // The equal words at both ends of two texts, and the difference between them.
  marks(text, other) {
    let start = 0;
    while (start < Math.min(text.length, other.length) && text[start] === other[start]) start += 1;
    let end = 0;
    while (end < Math.min(text.length, other.length) - start && text.at(-1 - end) === other.at(-1 - end)) end += 1;
    const length = text.length - end - start;
    return length > 0 && start + end > 0 ? [[start, length]] : [];
  }

  changes(call) {
    if (!call.diff) return T.h("p", { class: "note" }, "The first call of its path: there is no call to compare with.");
    const { same, removed, before } = call.diff;
    const added = call.messages.slice(Math.max(0, same - call.from));
    const pair = (k, own, other) => (other[k] && own[k] && other[k].role === own[k].role ? this.marks(own[k].text, other[k].text) : []);
    return [
      T.h("p", { class: "note" }, "Against ", T.h("a", { href: `#/tape/${encodeURIComponent(this.tape.id)}/call/${encodeURIComponent(before)}` }, T.spelled(this.tape.short(before))),
        `: ${T.plural(same, "message")} unchanged, ${removed.length} gone, ${added.length} new. `, call.prompt === null ? "" : `${T.count(call.kept)} of ${T.plural(call.prompt, "prompt token")} kept.`),
      call.split ? T.h("p", null, T.chip("new row", "warn"), " ", T.spelled(call.split)) : null,
      T.h("div", { class: "messages" }, removed.map((one, k) => this.message(one, "gone", pair(k, removed, added))), added.map((one, k) => this.message(one, "fresh", pair(k, added, removed)))),
    ];
  }

  tokens(call, own, range) {
    const place = T.h("div");
    const draw = (colour) => { this.colour = colour; T.fill(place, T.tokenPane(call, own, colour, draw, range ? [range[1], range[2]] : null)); };
    draw(this.colour);
    return place;
  }

  training(call, more) {
    const uses = this.tape.head.taken;
    const rows = (more.rows || []).map((row, k) => T.h("tr", null, T.h("td", null, String(k)), T.h("td", null, T.spelled(this.tape.short(row.begins))), T.h("td", null, T.count(row.tokens)), T.h("td", null, T.count(row.own)), T.h("td", null, T.count(row.repeated)), T.h("td", null, T.spelled(row.split || "–"))));
    return [
      more.missing ? T.h("p", { class: "hole" }, T.spelled(more.missing)) : null,
      more.verdict ? T.h("p", null, T.spelled(more.verdict)) : null,
      (more.notes || []).map((note) => T.h("p", { class: "hole" }, T.spelled(note))),
      T.h("h3", null, "Updates that took this tape"),
      uses.length ? T.h("ul", null, uses.slice(-50).map((use) => T.h("li", null, `${T.plain(use.phase)} update ${use.update} of `, T.spelled(use.lineage), use.skipped ? T.chip(`not applied: ${T.plain(use.skipped)}`, "warn") : null))) : T.h("p", { class: "note" }, "None."),
      rows.length ? [T.h("h3", null, "Rows"), T.h("table", { class: "plain" }, T.h("thead", null, T.h("tr", null, ["row", "begins", "tokens", "own", "repeated", "why it begins anew"].map((name) => T.h("th", null, name)))), T.h("tbody", null, rows))] : null,
    ];
  }
};
