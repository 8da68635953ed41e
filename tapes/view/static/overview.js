// The overview of a run: headline numbers, curves, held-out results, where time and tokens went, what ended episodes,
// tapes to read, commands to check. It is also the page that `report.html` opens with.
"use strict";

const SERIES = 6;
// A number of the overview; null where there is none (a gap of a curve comes as the text "NaN").
const known = (value) => (value === null || value === undefined || !Number.isFinite(Number(value)) ? null : Number(value));
const percent = (share) => `${T.number(100 * share, 1)} %`;

T.Overview = class {
  constructor(app) {
    this.app = app;
    this.root = T.h("div", { class: "overview-view" });
  }

  async open() {
    T.fill(this.root, T.loading("Reading the run…"));
    try {
      this.overview = await T.source.report();
      this.draw();
    } catch (error) { T.fill(this.root, T.failed(error)); }
  }

  draw() {
    const o = this.overview;
    const text = (value) => T.spelled(String(value));
    const when = (list, make) => (list.length ? make() : null);
    const section = (title, ...inside) => T.h("section", null, T.h("h2", null, title), ...inside);
    const commands = (lines) => T.h("ol", null, lines.map(([line, says]) => T.h("li", null, T.h("code", null, text(line)), says ? T.h("span", { class: "note" }, ` ${says}`) : null)));
    const wide = o.plots.filter((plot) => !plot.small);
    const small = o.plots.filter((plot) => plot.small);
    const whole = (title, values, unit, digits) => when(Object.keys(values), () => this.whole(title, Object.entries(values), unit, digits));
    T.fill(this.root,
      T.h("h2", { class: "title" }, text(o.title)), T.h("p", { class: "note" }, text(o.subtitle)),
      (this.app.overview.left_out || []).length ? T.h("p", { class: "note left-out" }, this.app.overview.left_out.join(" "), " ", T.h("code", null, "tapereel view"), " on the run shows all.") : null,
      o.notes.map((note) => T.h("p", { class: "card notice" }, text(note))),
      T.h("div", { class: "cards" }, o.facts.map((fact) => T.h("dl", { class: "card" }, T.h("dt", null, text(fact.label)), T.h("dd", null, text(fact.value)), fact.note ? T.h("dd", { class: "note" }, text(fact.note)) : null))),
      wide.map((plot) => section(text(plot.title), this.figure(plot))),
      when(o.scores, () => section("Held-out tasks", this.scores(o.scores))),
      when(small, () => section("Over the updates", T.h("div", { class: "cards" }, small.map((plot) => T.h("div", { class: "card" }, T.h("h3", null, text(plot.title)), this.figure(plot)))))),
      when([...Object.keys(o.seconds), ...Object.keys(o.tokens)], () => section("Where it went", T.h("div", { class: "cards" }, whole("Time", o.seconds, " s", 1), whole("Sampled tokens", o.tokens, "", 0)))),
      when(o.ends, () => section("What ended episodes", this.table(["ended", "cause", "#episodes"], o.ends.map((end) => [text(end.status), text(end.cause || ""), T.count(end.episodes)])),
        o.faults.map((fault) => T.h("p", { class: "bad" }, text(`${T.count(fault.episodes)} x error of the ${fault.cause}: ${fault.error.slice(0, 300)}${fault.raised_at ? ` at ${fault.raised_at}` : ""}, first on tape `), this.link(fault.tape))))),
      when(o.tapes, () => section("Tapes to read", T.h("ul", null, o.tapes.map(({ tape, caption }) => T.h("li", null, text(`${caption}: `), this.link(tape)))))),
      when(Object.keys(o.checks), () => section("How to check it", commands(Object.entries(o.checks)))),
      when(o.next, () => section("Next", commands(o.next.map((line) => [line])))),
      o.config ? section("Configuration", T.h("details", null, T.h("summary", null, "all settings, as the run resolved them"), T.h("pre", null, text(o.config)))) : null,
      when(Object.keys(o.versions), () => section("Versions", this.table(["name", "version"], Object.entries(o.versions).map(([name, version]) => [text(name), T.h("code", null, text(version))])))));
  }

  // A tape that this page holds is a link; of any other the id is text.
  link(tape) {
    return this.app.rows.number.has(tape) ? T.h("a", { href: `#/tape/${encodeURIComponent(tape)}` }, T.spelled(tape)) : T.h("code", null, T.spelled(tape));
  }

  table(heads, rows) {
    const side = (k) => ({ class: heads[k].startsWith("#") ? "n" : null });
    return T.h("div", { class: "scroll" }, T.h("table", null,
      T.h("thead", null, T.h("tr", null, heads.map((head, k) => T.h("th", side(k), head.replace("#", ""))))),
      T.h("tbody", null, rows.map((row) => T.h("tr", null, row.map((cell, k) => T.h("td", side(k), cell)))))));
  }

  scores(scores) {
    const value = (read) => {
      if (known(read) === null) return T.h("span", { class: "none" }, "not measured");
      const width = 100 * Math.min(1, Math.max(0, read));
      return T.h("span", { class: "meter" }, this.bar([[width, 1]], 100), T.number(read));
    };
    return this.table(["policy", "sampled", "greedy", "#scored"], scores.map((score) => [
      [T.spelled(score.name), score.note ? T.h("div", { class: "note" }, T.spelled(score.note)) : null], value(score.sampled), value(score.greedy), score.n === null ? "" : T.count(score.n)]));
  }

  // A bar of the parts [size, colour] of a whole.
  bar(parts, whole) {
    let at = 0;
    return T.svg("svg", { viewBox: "0 0 100 4", preserveAspectRatio: "none", class: "bar", "aria-hidden": "true" }, ...parts.map(([size, colour]) => {
      const width = whole ? (100 * size) / whole : 0;
      at += width;
      return T.svg("rect", { x: at - width, y: 0, width, height: 4, class: `fill${colour}` });
    }));
  }

  whole(title, parts, unit, digits) {
    const ordered = [...parts].sort((a, b) => b[1] - a[1]);
    const sum = ordered.reduce((total, [, value]) => total + value, 0);
    const shown = (value) => `${digits ? T.number(value, digits) : T.count(value)}${unit}`;
    const colour = (value, k) => (value ? 1 + (k % SERIES) : 0);
    return T.h("div", { class: "card" }, T.h("h3", null, title), this.bar(ordered.map(([, value], k) => [value, colour(value, k)]), sum),
      this.table(["part", "#amount", "#share"], [...ordered.map(([name, value], k) => [
        [T.svg("svg", { viewBox: "0 0 8 8", class: "key", "aria-hidden": "true" }, T.svg("rect", { width: 8, height: 8, class: `fill${colour(value, k)}` })), T.spelled(name.replaceAll("_", " "))],
        shown(value), sum ? percent(value / sum) : "–"]), ["together", shown(sum), ""]]));
  }

  figure(plot) {
    const [width, height, left, right, top, bottom] = plot.small || innerWidth <= 720 ? [420, 250, 56, 10, 10, 40] : [1000, 380, 56, 14, 14, 44];
    const curves = plot.curves.map((curve) => curve.x.map((x, k) => [Number(x), known(curve.y[k])]));
    const xs = curves.flat().map(([x]) => x);
    const values = [...curves.flat().map(([, y]) => y), ...plot.levels.map((level) => known(level.value))].filter((y) => y !== null);
    const chart = T.svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "figure", role: "img", "aria-label": T.plain(plot.title) });
    let [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
    // Rewards from 0 to 1 have that range as their frame: cut to the data, a small change would look large.
    if (low >= 0 && high <= 1) [low, high] = [0, 1];
    if (low === high) [low, high] = [low - 0.5, high + 0.5];
    const [first, last] = xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 1];
    const px = (x) => left + (first === last ? 0.5 : (x - first) / (last - first)) * (width - left - right);
    const py = (y) => top + (1 - (y - low) / (high - low)) * (height - top - bottom);
    for (let k = 0; k <= 4; k += 1) {
      const y = low + ((high - low) * k) / 4;
      chart.append(T.svg("line", { x1: left, x2: width - right, y1: py(y), y2: py(y), class: "grid" }), T.svg("text", { x: left - 8, y: py(y) + 4, class: "tick end" }, T.number(y, 2)));
    }
    for (const x of new Set([0, 1, 2, 3, 4].map((k) => Math.round(first + ((last - first) * k) / 4)))) {
      chart.append(T.svg("text", { x: px(x), y: height - bottom + 18, class: "tick middle" }, T.count(x)));
    }
    chart.append(T.svg("text", { x: (left + width - right) / 2, y: height - 6, class: "tick middle" }, T.plain(plot.xlabel)));
    const path = (points) => points.reduce(([line, pen], [x, y]) => (y === null ? [line, "M"] : [`${line}${pen}${px(x).toFixed(1)},${py(y).toFixed(1)}`, "L"]), ["", "M"])[0];
    plot.curves.forEach((curve, k) => {
      const colour = `line${1 + (k % SERIES)}`;
      const points = curves[k];
      const mean = points.map(([x], at) => {
        const near = points.slice(Math.max(0, at - curve.mean_of + 1), at + 1).map(([, y]) => y).filter((y) => y !== null);
        return [x, near.length ? near.reduce((a, b) => a + b, 0) / near.length : null];
      });
      if (curve.mean_of > 1) chart.append(T.svg("path", { d: path(points), class: `${colour} thin` }));
      chart.append(T.svg("path", { d: path(mean), class: colour }));
      if (curve.points || points.length < 3) for (const [x, y] of points) if (y !== null) chart.append(T.svg("circle", { cx: px(x), cy: py(y), r: 3.5, class: `fill${1 + (k % SERIES)}` }));
    });
    plot.levels.forEach((level, k) => {
      const y = known(level.value);
      if (y !== null) chart.append(T.svg("line", { x1: left, x2: width - right, y1: py(y), y2: py(y), class: `level level${k % 2}` }));
    });
    const name = (curve) => `${curve.name}${curve.mean_of > 1 ? ` (mean of ${curve.mean_of})` : ""}`;
    const swatch = (kind, text) => T.h("li", null, T.svg("svg", { viewBox: "0 0 20 8", class: "swatch", "aria-hidden": "true" }, T.svg("line", { x1: 0, x2: 20, y1: 4, y2: 4, class: kind })), T.spelled(text));
    return T.h("figure", null, chart, T.h("ul", { class: "legend" }, plot.curves.map((curve, k) => swatch(`line${1 + (k % SERIES)}`, name(curve))),
      plot.levels.map((level, k) => swatch(`level level${k % 2}`, `${level.name}: ${T.number(level.value)}`))), plot.caption ? T.h("figcaption", { class: "note" }, T.spelled(plot.caption)) : null);
  }

  // The list of tapes is read after the page that an address names: with the list, tapes become links.
  listed() { if (this.overview) this.draw(); }

  close() {}
};
