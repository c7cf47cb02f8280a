"use strict";

/** Light or dark, as the page around the frames is now. */
function theme() {
  const chosen = document.body.dataset.theme;
  if (chosen === "light" || chosen === "dark") return chosen;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

/** Reports stand in frames of their own: they are told the theme, and tell how tall they are. */
function tellReports() {
  for (const frame of document.querySelectorAll("iframe")) {
    if (frame.srcdoc) {
      const root = frame.contentDocument && frame.contentDocument.documentElement;
      if (root) root.dataset.theme = theme();
    } else frame.contentWindow.postMessage({ nhwcTheme: theme() }, "*");
  }
}

addEventListener("message", (event) => {
  const height = event.data && event.data.nhwcHeight;
  if (typeof height !== "number") return;
  for (const frame of document.querySelectorAll("iframe.report")) {
    if (frame.contentWindow !== event.source) continue;
    // A short report takes what it needs; a long one scrolls inside of its frame.
    frame.style.height = `min(${Math.ceil(height) + 2}px, max(480px, 80vh))`;
    tellReports();
  }
});

addEventListener("DOMContentLoaded", () => {
  new MutationObserver(tellReports).observe(document.body, { attributes: true, attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tellReports);
  for (const frame of document.querySelectorAll("iframe")) frame.addEventListener("load", tellReports);

  // A number that is pointed at is lit wherever it lies, in every drawing of its block.
  for (const block of document.querySelectorAll(".drawn")) {
    const light = (numbers) => {
      for (const cell of block.querySelectorAll(".m-cell")) {
        cell.classList.toggle("m-lit", cell.dataset.n.split(" ").some((n) => numbers.includes(n)));
      }
    };
    const of = (event) => event.target.closest(".m-cell")?.dataset.n.split(" ") ?? [];
    for (const kind of ["pointerover", "pointerdown"]) block.addEventListener(kind, (event) => light(of(event)));
    block.addEventListener("pointerleave", () => light([]));
  }
});
