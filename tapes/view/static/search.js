// Search: texts go to a worker in batches. A batch over its time limit ends the worker and the search, so no pattern can
// hang the page.
"use strict";

const BATCH_SECONDS = 3;

T.pattern = (text, isRegex) => {
  const source = isRegex ? text : text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  const flags = /\p{Lu}/u.test(text) ? "gu" : "giu";
  new RegExp(source, flags); // throws a SyntaxError for an invalid pattern
  return { source, flags };
};

T.Search = class {
  constructor(text, isRegex) {
    this.pattern = T.pattern(text, isRegex);
    this.batch = 0;
    this.over = false;
  }

  // The hits in these texts: [[key, [[start, length], …]], …].
  async within(texts) {
    if (this.over) return [];
    if (!this.worker) this.worker = await T.source.worker();
    const batch = (this.batch += 1);
    return new Promise((done, failed) => {
      const end = (error) => { clearTimeout(timer); this.stop(); failed(error); };
      const timer = setTimeout(() => end(new Error(
        `the pattern took more than ${BATCH_SECONDS} s on one page of text and was stopped; make it simpler`)), BATCH_SECONDS * 1000);
      this.worker.onmessage = ({ data }) => {
        if (data.batch !== batch) return;
        clearTimeout(timer);
        done(data.hits);
      };
      this.worker.onerror = (event) => end(new Error(event.message || "the search could not run"));
      this.worker.postMessage({ batch, pattern: this.pattern.source, flags: this.pattern.flags, texts });
    });
  }

  stop() {
    this.over = true;
    if (this.worker) this.worker.terminate();
    this.worker = null;
  }
};
