"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (selector, root = document) => root.querySelector(selector);

/** Make an element: make("p", {class: "soft"}, "text", child). Text is never read as HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== undefined && child !== ""));
  return element;
}

const root = document.documentElement;
const night = matchMedia("(prefers-color-scheme: dark)");
const follow = () => { root.dataset.theme = night.matches ? "dark" : "light"; };
follow();
if (location.hash === "#dark" || location.hash === "#light") root.dataset.theme = location.hash.slice(1);
// In a frame the notebook's theme decides, which frame.js looks up.
else if (parent === window) night.addEventListener("change", follow);
$("#theme").addEventListener("click", () => {
  night.removeEventListener("change", follow);
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
});

const ms = (s) => (s * 1e3).toFixed(s >= 0.1 ? 0 : s >= 0.01 ? 1 : s >= 1e-5 || s === 0 ? 2 : 3) + " ms";
const bytes = (n) => (n < 1e3 ? n + " B" : n < 1e6 ? (n / 1e3).toFixed(1) + " kB" : n < 1e9 ? (n / 1e6).toFixed(1) + " MB" : (n / 1e9).toFixed(1) + " GB");
const percent = (x) => (x * 100).toFixed(x < 0.1 ? 1 : 0) + " %";
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

/** Text as children of an element: what stands between `backticks` is code. */
const prose = (text) => text.split("`").map((part, i, all) => (i % 2 && i < all.length - 1 ? make("code", {}, part) : (i % 2 ? "`" : "") + part));

const science = (x) => (x === null ? "not a number" : x.toExponential(1));

/** Shows `text()` beside what is pointed at, or above what has the focus. */
function tell(text, x, y) {
  const tip = $("#tip");
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.textContent = text;
  tip.style.left = Math.max(8, Math.min(x + 12, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = (y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 18) + "px";
}

/**
 * A bar of pieces, each [class, share, text, choose, style]. The tab key reaches the bar once, arrows go from
 * piece to piece, and Enter or a click chooses one.
 */
function drawBar(bar, label, pieces) {
  bar.setAttribute("role", "group");
  bar.setAttribute("aria-label", `${label}; arrow keys go from piece to piece`);
  pieces.forEach(([tone, share, text, choose, style = ""], i) => {
    const piece = make("button", { class: `piece ${tone}`, style: `flex:${Math.max(share, 1e-4)} 1 0;${style}`, "aria-label": text, tabindex: i ? -1 : 0 });
    piece.addEventListener("mousemove", (event) => tell(text, event.clientX, event.clientY));
    piece.addEventListener("mouseleave", () => tell(""));
    piece.addEventListener("focus", () => { const box = piece.getBoundingClientRect(); tell(text, box.left, box.bottom - 10); });
    piece.addEventListener("blur", () => tell(""));
    if (choose) piece.addEventListener("click", () => choose(piece));
    bar.append(piece);
  });
  bar.addEventListener("keydown", (event) => {
    const all = [...bar.children], at = all.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined || at < 0) return;
    event.preventDefault();
    const next = all[Math.max(0, Math.min(to, all.length - 1))];
    all[at].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}
