// Completion tokens, shaded by the chosen quantity. An unknown value is hatched, never shown as a number.
"use strict";

const TOKENS_AT_ONCE = 1500;
T.COLOURS = [["logprob", "log-prob"], ["ratio", "ratio"], ["advantage", "advantage"], ["label", "label"], ["version", "version"]];

// The class of token k for each quantity.
const shade = {
  logprob: (call, k) => {
    const value = call.logprobs ? call.logprobs[k] : null;
    if (value === null) return "unknown";
    return `p${Math.min(5, Math.floor((-value / 3) * 5))}`;
  },
  ratio: (call, k, more) => {
    const value = more.ratios ? more.ratios[k] : null;
    if (value === null || value === undefined) return "unknown";
    const away = Math.min(4, Math.floor(Math.abs(Math.log(value)) / 0.1) + (Math.abs(Math.log(value)) > 0.01 ? 1 : 0));
    return away === 0 ? "p0" : value > 1 ? `up${away}` : `down${away}`;
  },
  advantage: (call, k, more) => {
    const value = more.advantages ? more.advantages[k] : null;
    if (value === null || value === undefined) return "unknown";
    const size = Math.min(4, Math.ceil(Math.abs(value) * 2));
    return size === 0 ? "p0" : value > 0 ? `up${size}` : `down${size}`;
  },
  label: (call, k) => {
    const fate = call.fates[k];
    if (fate === null) return call.logprobs === null ? "authored" : "unused";
    return ["trained", "stale", "filtered", "context"].includes(fate) ? fate : "unused";
  },
  version: (call, k) => {
    const versions = [...new Set(call.token_versions)];
    return call.token_versions[k] === null ? "unknown" : `v${versions.indexOf(call.token_versions[k]) % 6}`;
  },
};

const LEGENDS = {
  logprob: [["p0", "likely"], ["p3", "unlikely"], ["p5", "below 5 %"], ["unknown", "unknown"]],
  ratio: [["down3", "less likely now"], ["p0", "the same"], ["up3", "more likely now"], ["unknown", "unknown"]],
  advantage: [["down3", "negative"], ["p0", "zero"], ["up3", "positive"], ["unknown", "none or unknown"]],
  label: [["trained", "trained"], ["stale", "stale"], ["filtered", "filtered"], ["context", "context"], ["unused", "in no update"], ["authored", "authored"]],
};

T.tokenPane = (call, more, chosen, choose, range) => {
  const details = T.h("p", { class: "details", role: "status" }, "Point at a token.");
  const place = T.h("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Completion tokens" });
  const missing = { ratio: !more.ratios, advantage: !more.advantages };
  const pick = T.h("select", { "aria-label": "Colour tokens by", onchange: (event) => choose(event.target.value) },
    T.COLOURS.map(([value, label]) => T.h("option", { value }, missing[value] && !more.asking ? `${label} (none here)` : label)));
  pick.value = chosen;
  const versions = [...new Set(call.token_versions.filter((version) => version !== null))];
  const legend = chosen === "version" ? [...versions.map((version, k) => [`v${k % 6}`, version]), ["unknown", "unknown"]] : LEGENDS[chosen];
  const tell = (k) => {
    const parts = [`token ${k}`, `id ${call.ids[k]}`];
    const logprob = call.logprobs ? call.logprobs[k] : null;
    parts.push(logprob === null ? "log-prob unknown" : `log-prob ${T.number(logprob, 4)} (${T.number(Math.exp(logprob) * 100, 2)} %)`);
    if (call.token_versions[k] !== null) parts.push(`sampled by ${T.plain(call.token_versions[k])}`);
    parts.push(call.fates[k] === null ? "in no update" : call.fates[k]);
    if (call.weights[k] !== null) parts.push(`weight ${T.number(call.weights[k], 6)}`);
    if (more.advantages && more.advantages[k] !== null && more.advantages[k] !== undefined) parts.push(`advantage ${T.number(more.advantages[k], 4)}`);
    if (more.ratios && more.ratios[k] !== null && more.ratios[k] !== undefined) parts.push(`ratio ${T.number(more.ratios[k], 4)}`);
    details.textContent = parts.join(" · ");
  };
  let end = 0;
  const extend = (button) => {
    if (button) button.remove();
    const last = Math.min(call.ids.length, end + TOKENS_AT_ONCE);
    for (; end < last; end += 1) {
      const piece = call.pieces ? call.pieces[end] : String(call.ids[end]);
      const inside = range && end >= range[0] && end < range[1] ? " within" : "";
      place.append(T.h("span", { class: `tok ${shade[chosen](call, end, more)}${inside}${call.pieces ? "" : " id"}`, "data-k": end }, T.spelled(piece.replace(/\n/g, "⏎\n") || "∅")));
    }
    if (end < call.ids.length) place.append(T.button(`${T.count(call.ids.length - end)} more tokens`, (event) => extend(event.currentTarget), { class: "link" }));
  };
  extend(null);
  for (const name of ["pointerover", "click"]) {
    place.addEventListener(name, (event) => {
      const token = event.target.closest("[data-k]");
      if (token) tell(Number(token.dataset.k));
    });
  }
  let at = -1;
  place.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    event.preventDefault();
    at = Math.max(0, Math.min(end - 1, at + (event.key === "ArrowRight" ? 1 : -1)));
    place.querySelectorAll(".tok.at").forEach((one) => one.classList.remove("at"));
    const token = place.querySelector(`[data-k="${at}"]`);
    if (token) { token.classList.add("at"); tell(at); }
  });
  if (!call.ids.length) T.fill(place, T.h("p", { class: "hole" }, call.completion === null ? "This engine returned text without token ids." : "The completion has no tokens."));
  const why = missing[chosen] ? T.h("p", { class: "hole" }, T.spelled(chosen === "ratio"
    ? more.missing || "No ratio: a tape holds the log-probs at sampling only. `tapereel view RUN --weights CHECKPOINT` compares with those weights."
    : more.missing || "No advantage: no update has taken this call, or it can't be computed again.")) : null;
  return T.h("div", { class: "token-pane" },
    T.h("div", { class: "line" }, T.h("label", null, "colour by ", pick), T.h("span", { class: "legend" }, legend.map(([kind, label]) => T.h("span", null, T.h("i", { class: `tok ${kind}` }, " "), T.spelled(label))))),
    why, chosen === "ratio" && more.weights ? T.h("p", { class: "note" }, "probability by ", T.spelled(more.weights), " over that at sampling") : null, place, details,
    call.pieces || !call.ids.length ? null : T.h("p", { class: "note" }, more.asking ? "Loading the tokenizer: tokens are shown by id until then." : more.decodes === false ? "The run has no tokenizer here, so tokens are shown by id." : "Tokens are shown by id."));
};
