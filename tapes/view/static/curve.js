// The reward curve. A point is an update, and leads to the tapes that the update took. In a run without training a point
// is a stretch of tapes, in the order in which they began.
"use strict";

const STRETCHES = 60;
const MEAN_OF = 5;

T.Curve = class {
  constructor(app) {
    this.app = app;
    this.root = T.h("div", { class: "curve-view" });
    this.phase = null;
  }

  async open(phase, at) {
    if (phase) this.phase = phase;
    T.fill(this.root, T.loading("Reading the updates…"));
    try {
      const { points } = await T.source.curve();
      this.points = points;
      this.draw(Number(at));
    } catch (error) { T.fill(this.root, T.failed(error)); }
  }

  stretches() {
    const { rows } = this.app;
    const order = rows.select({ sort: "oldest" });
    const size = Math.max(1, Math.ceil(order.length / STRETCHES));
    const found = [];
    for (let at = 0; at < order.length; at += size) {
      const part = order.slice(at, at + size);
      const scored = part.map((row) => rows.columns.reward[row]).filter((reward) => reward !== null);
      found.push({ from: at + 1, tapes: part.length, scored: scored.length, label: `tapes ${T.count(at + 1)} to ${T.count(at + part.length)}`,
        reward: scored.length ? scored.reduce((a, b) => a + b, 0) / scored.length : null });
    }
    return found;
  }

  draw(at) {
    const phases = [...new Set(this.points.map((point) => point.phase))];
    if (!phases.includes(this.phase)) this.phase = phases.includes("rl") ? "rl" : phases[0];
    const trained = phases.length > 0;
    const points = trained ? this.points.filter((point) => point.phase === this.phase) : this.stretches();
    if (!trained && this.app.rows.length < this.app.expected) { T.fill(this.root, T.loading("Reading the tapes…")); return; }
    if (!points.length) { T.fill(this.root, T.state("No point yet", "The run has no update and no scored tape yet.")); return; }
    const tabs = T.h("div", { class: "statuses", role: "group", "aria-label": "Phase" }, phases.map((phase) =>
      T.button(phase, () => { this.phase = phase; this.app.rename(this.address()); this.draw(); }, { class: "status-filter", "aria-pressed": String(phase === this.phase) })));
    const holes = points.filter((point) => point.reward === null).length;
    const skipped = points.filter((point) => point.skipped).length;
    const what = trained ? "Mean reward of the tapes that each update took" : "Mean reward of the tapes, in the order in which they began";
    this.sentenceLine = T.h("p", { class: "note", role: "status" }, "Point at the curve, or step along it with the arrow keys; Enter opens the tapes behind a point.");
    T.fill(this.root, T.h("h2", null, what), tabs, this.chart(points, trained, at), this.sentenceLine,
      T.h("p", { class: "note" }, `The thick line is the mean of ${MEAN_OF} points.`,
        holes ? ` ${T.plural(holes, "point")} without any scored tape: gaps.` : "", skipped ? ` ${T.plural(skipped, "update")} recorded but not applied: hollow.` : ""));
  }

  address(at) { return ["#/curve", this.phase || (at === undefined ? undefined : "tapes"), at].filter((part) => part !== undefined).map((part, k) => (k ? encodeURIComponent(part) : part)).join("/"); }

  chart(points, trained, chosen) {
    // The drawing is scaled to its place: in a narrow one, fewer units keep its numbers legible.
    const [width, height] = innerWidth > 720 ? [1000, 380] : [420, 300];
    const [left, bottom, top, right] = [52, 34, 14, 14];
    const known = points.map((point) => point.reward).filter((reward) => reward !== null);
    let low = Math.min(...known, 0);
    let high = Math.max(...known, low + 1e-9);
    if (high <= 1 && high > 0.3 && low >= 0) high = 1;
    if (!known.length) [low, high] = [0, 1];
    const x = (k) => left + (points.length < 2 ? 0.5 : k / (points.length - 1)) * (width - left - right);
    const y = (reward) => top + (1 - (reward - low) / (high - low)) * (height - top - bottom);
    const chart = T.svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", tabindex: "0", role: "application", "aria-label": "Reward curve" });
    for (let k = 0; k <= 4; k += 1) {
      const value = low + ((high - low) * k) / 4;
      chart.append(T.svg("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), class: "grid" }),
        T.svg("text", { x: left - 8, y: y(value) + 4, class: "tick end" }, T.number(value, 2)));
    }
    for (let k = 0; k < Math.min(7, points.length); k += 1) {
      const at = Math.round((k * (points.length - 1)) / Math.max(1, Math.min(6, points.length - 1)));
      chart.append(T.svg("text", { x: x(at), y: height - 10, class: "tick middle" }, T.count(trained ? points[at].update : at + 1)));
    }
    const path = (value) => points.map((point, k) => [k, value(point, k)])
      .reduce(([text, pen], [k, read]) => (read === null ? [text, "M"] : [`${text}${pen}${x(k).toFixed(1)},${y(read).toFixed(1)}`, "L"]), ["", "M"])[0];
    const mean = (point, k) => {
      const near = points.slice(Math.max(0, k - MEAN_OF + 1), k + 1).map((one) => one.reward).filter((reward) => reward !== null);
      return point.reward === null || !near.length ? null : near.reduce((a, b) => a + b, 0) / near.length;
    };
    chart.append(T.svg("path", { d: path((point) => point.reward), class: "thin" }), T.svg("path", { d: path(mean), class: "thick" }));
    points.forEach((point, k) => {
      if (point.reward !== null) chart.append(T.svg("circle", { cx: x(k), cy: y(point.reward), r: points.length > 150 ? 2 : 3.5, class: point.skipped ? "dot hollow" : "dot" }));
    });
    const cursor = T.svg("line", { y1: top, y2: height - bottom, x1: -9, x2: -9, class: "cursor" });
    chart.append(cursor);
    let at = -1;
    const point = (k) => {
      at = Math.max(0, Math.min(points.length - 1, k));
      cursor.setAttribute("x1", x(at));
      cursor.setAttribute("x2", x(at));
      this.sentenceLine.textContent = this.sentence(points[at], trained);
    };
    const place = (event) => {
      const box = chart.getBoundingClientRect();
      const inside = ((event.clientX - box.left) / box.width) * width;
      return Math.round(((inside - left) / (width - left - right)) * (points.length - 1)) || 0;
    };
    chart.addEventListener("pointermove", (event) => point(place(event)));
    chart.addEventListener("click", (event) => { point(place(event)); this.behind(points[at], trained); });
    chart.addEventListener("keydown", (event) => {
      if (event.key === "ArrowRight" || event.key === "ArrowLeft") { point(at + (event.key === "ArrowRight" ? 1 : -1)); this.app.rename(this.address(at)); event.preventDefault(); }
      if (event.key === "Enter" && at >= 0) this.behind(points[at], trained);
    });
    if (chosen >= 0) point(chosen);
    return chart;
  }

  sentence(point, trained) {
    const where = trained ? `update ${point.update} of lineage ${T.plain(point.lineage)}` : point.label;
    const mean = point.reward === null ? "no tape of it is scored" : `mean reward ${T.number(point.reward)} over ${T.count(point.scored)} scored`;
    return `${where}: ${mean}, ${T.plural(point.tapes, "tape")}${point.skipped ? `; not applied: ${T.plain(point.skipped)}` : ""}`;
  }

  behind(point, trained) {
    if (trained) { this.app.go(`#/?update=${point.k}`); return; }
    this.app.go(`#/?update=tapes-${point.from}-${point.from + point.tapes - 1}`);
  }

  close() {}
};
