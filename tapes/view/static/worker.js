// Searches texts for a pattern in a worker. The page ends the worker where a batch takes too long.
"use strict";

const MATCHES = 20;

onmessage = ({ data: { batch, pattern, flags, texts } }) => {
  const hits = [];
  const sought = new RegExp(pattern, flags);
  for (const [key, text] of texts) {
    const found = [];
    sought.lastIndex = 0;
    for (let match = sought.exec(text); match !== null && found.length < MATCHES; match = sought.exec(text)) {
      if (match[0] === "") sought.lastIndex += 1;
      else found.push([match.index, match[0].length]);
      if (sought.lastIndex > text.length) break;
    }
    if (found.length) hits.push([key, found]);
  }
  postMessage({ batch, hits });
};
