// A list that draws only its visible rows. A row's height is measured when the row is drawn. Where all rows together are
// taller than a browser can scroll, the scroll bar is proportional, and the wheel still moves by pixels.
"use strict";

const TALLEST = 8e6;
const OVERSCAN = 400;
const PRINTED = 5000;

T.List = class {
  // `draw(k)` gives the element of row k; `height` is the estimate for a row that is not measured yet.
  constructor(place, { draw, height, fixed = false, label, role = "list", onmove }) {
    Object.assign(this, { place, draw, height, fixed, onmove, count: 0, top: 0, drawn: new Map(), last: 0, moves: 0 });
    place.classList.add("list");
    place.setAttribute("role", role);
    place.setAttribute("tabindex", "0");
    if (label) place.setAttribute("aria-label", label);
    place.setAttribute("aria-busy", "true"); // until it has a row
    this.canvas = T.h("div", { class: "canvas", role: "presentation" });
    T.fill(place, this.canvas);
    place.addEventListener("scroll", () => this.scrolled(), { passive: true });
    this.watch = new ResizeObserver(() => { if (place.isConnected) { this.remeasure = true; this.paint(); } });
    this.watch.observe(place);
    // A row may grow after it was drawn: a picture arrives, or a fold opens.
    this.grown = fixed ? null : new ResizeObserver((seen) => {
      if (this.printing || !place.isConnected || !seen.some(({ target }) => target.isConnected && Math.abs(target.offsetHeight - this.heights[target.listed]) >= 0.5)) return;
      this.remeasure = true;
      this.paint();
    });
    addEventListener("beforeprint", () => this.print(true));
    addEventListener("afterprint", () => this.print(false));
  }

  // Paper doesn't scroll: while the page is printed, rows are drawn one below the other, up to a number of them.
  print(printing) {
    this.printing = printing;
    if (this.place.isConnected) this.redraw();
  }

  setCount(count) {
    if (count !== this.count && !this.fixed) {
      const heights = new Float32Array(count).fill(this.height);
      if (this.heights) heights.set(this.heights.subarray(0, Math.min(count, this.count)));
      this.heights = heights;
      this.tree = new Float64Array(count + 1);
      for (let k = 1; k <= count; k += 1) {
        this.tree[k] += heights[k - 1];
        const above = k + (k & -k);
        if (above <= count) this.tree[above] += this.tree[k];
      }
    }
    this.count = count;
    this.redraw();
  }

  // Remove all drawn rows, and draw again.
  redraw() {
    for (const [k, made] of this.drawn) this.drop(k, made);
    this.paint();
  }

  refresh(from, to) {
    for (const k of [...this.drawn.keys()]) if (k >= from && k < to) this.drop(k, this.drawn.get(k));
    this.paint();
  }

  offset(k) {
    if (this.fixed) return k * this.height;
    let sum = 0;
    for (let at = k; at > 0; at -= at & -at) sum += this.tree[at];
    return sum;
  }

  at(offset) {
    if (this.fixed) return Math.max(0, Math.min(this.count - 1, Math.floor(offset / this.height)));
    let at = 0;
    let left = offset;
    for (let step = 2 ** Math.floor(Math.log2(this.count || 1)); step >= 1; step /= 2) {
      if (at + step <= this.count && this.tree[at + step] <= left) { at += step; left -= this.tree[at]; }
    }
    return Math.min(at, this.count - 1);
  }

  get total() { return this.offset(this.count); }
  get view() { return this.place.clientHeight; }
  get scaled() { return this.total > TALLEST; }

  resize(k, height) {
    const change = height - this.heights[k];
    if (Math.abs(change) < 0.5) return 0;
    this.heights[k] = height;
    for (let at = k + 1; at <= this.count; at += at & -at) this.tree[at] += change;
    return change;
  }

  scrolled() {
    if (this.read() && !this.asked) this.asked = requestAnimationFrame(() => { this.asked = 0; this.paint(); });
  }

  // Read the scroll position; true where the user has moved it. Must run before this list sets the position itself: the
  // scroll event comes later, and the user's move would be lost.
  read() {
    const now = this.place.scrollTop;
    const moved = now - this.last;
    if (moved === 0) return false;
    this.last = now;
    this.moves += 1; // a move by the user: moves of this list have set `last` already
    if (!this.scaled) this.top = now;
    else if (Math.abs(moved) < 2 * this.view && now > 0 && now < TALLEST - this.view - 1) {
      this.top = Math.max(0, Math.min(this.total - this.view, this.top + moved));
      clearTimeout(this.settling);
      this.settling = setTimeout(() => this.paint(), 200);
    } else this.top = (now / (TALLEST - this.view)) * (this.total - this.view);
    return true;
  }

  // Set the scroll bar to the place of the shown rows among all rows.
  settle() {
    const height = this.scaled ? TALLEST : this.total;
    this.canvas.style.height = `${Math.max(height, 1)}px`;
    const most = Math.max(0, this.total - this.view);
    this.top = Math.max(0, Math.min(this.top, most));
    const wanted = this.scaled ? (this.top / most) * (TALLEST - this.view) : this.top;
    if (Math.abs(this.place.scrollTop - wanted) > 0.5) this.place.scrollTop = wanted;
    this.last = this.place.scrollTop;
    this.put();
  }

  put() {
    for (const [k, made] of this.drawn) made.style.transform = `translateY(${this.last + this.offset(k) - this.top}px)`;
  }

  paint() {
    if (!this.place.isConnected) return;
    if (this.printing) { this.keep(0, Math.min(this.count, PRINTED) - 1); return; }
    if (!this.view) return;
    if (!this.count) { this.canvas.style.height = "0"; return; }
    this.read();
    for (let round = 0; round < 4; round += 1) {
      const anchor = this.at(this.top);
      const within = this.top - this.offset(anchor);
      const first = this.at(Math.max(0, this.top - OVERSCAN));
      const last = this.at(Math.min(this.total, this.top + this.view + OVERSCAN));
      const fresh = this.keep(first, last);
      if (this.fixed || (!fresh.length && !this.remeasure)) break;
      const measured = (this.remeasure ? [...this.drawn.keys()] : fresh).map((k) => [k, this.drawn.get(k).offsetHeight]);
      this.remeasure = false;
      let changed = 0;
      for (const [k, height] of measured) changed += Math.abs(this.resize(k, height));
      this.top = this.offset(anchor) + within;
      if (!changed) break;
    }
    clearTimeout(this.settling);
    if (this.scaled) {
      this.canvas.style.height = `${TALLEST}px`;
      this.put();
      this.settling = setTimeout(() => (this.read() ? this.paint() : this.settle()), 200);
    } else this.settle();
    if (this.onmove) this.onmove(this.at(this.top + 1));
  }

  keep(first, last) {
    for (const [k, made] of this.drawn) if (k < first || k > last) this.drop(k, made);
    const fresh = [];
    let next = null;
    for (let k = last; k >= first; k -= 1) {
      let made = this.drawn.get(k);
      if (!made) {
        made = this.draw(k);
        made.classList.add("row");
        made.listed = k;
        if (this.fixed) made.style.height = `${this.height}px`;
        this.drawn.set(k, made);
        this.canvas.insertBefore(made, next); // elements are in the order of the list, for screen readers and the Tab key
        if (this.grown) this.grown.observe(made);
        fresh.push(k);
      }
      next = made;
    }
    this.place.setAttribute("aria-busy", String(!this.drawn.size));
    return fresh;
  }

  drop(k, made) {
    if (this.grown) this.grown.unobserve(made);
    made.remove();
    this.drawn.delete(k);
  }

  // Bring row k into view: to the top where `where` is "top", else by the smallest move.
  show(k, where) {
    if (k < 0 || k >= this.count) return;
    this.read();
    for (let round = 0; round < 3; round += 1) {
      const start = this.offset(k);
      const end = this.offset(k + 1);
      const before = this.top;
      if (where === "top" || start < this.top) this.top = start - (where === "top" ? 12 : 4);
      else if (end > this.top + this.view) this.top = Math.min(start, end - this.view + 4);
      this.top = Math.max(0, Math.min(this.top, this.total - this.view));
      this.paint();
      this.settle();
      if (Math.abs(before - this.top) < 1) break;
    }
  }

  close() { this.watch.disconnect(); clearTimeout(this.settling); }
};
