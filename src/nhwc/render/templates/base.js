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
root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
if (location.hash === "#dark" || location.hash === "#light") root.dataset.theme = location.hash.slice(1);
$("#theme").addEventListener("click", () => {
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
});

const ms = (s) => (s * 1e3 >= 100 ? (s * 1e3).toFixed(0) : s * 1e3 >= 10 ? (s * 1e3).toFixed(1) : (s * 1e3).toFixed(2)) + " ms";
const bytes = (n) => (n < 1e3 ? n + " B" : n < 1e6 ? (n / 1e3).toFixed(1) + " kB" : n < 1e9 ? (n / 1e6).toFixed(1) + " MB" : (n / 1e9).toFixed(1) + " GB");
const percent = (x) => (x * 100).toFixed(x < 0.1 ? 1 : 0) + " %";
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
