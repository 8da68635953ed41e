// The theme wraps wide tables after the page has loaded. With a tab stop, the arrow keys scroll them.
function reach() {
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) {
    table.tabIndex = 0;
    table.setAttribute("role", "region");
    table.setAttribute("aria-label", "Table");
  }
}
new MutationObserver(reach).observe(document.documentElement, { childList: true, subtree: true });
reach();
