"use strict";

/** What reaches beyond the page's right edge, or beyond a box that hides what does not fit. */
function cutOff() {
  const scrolls = (e) => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
  const out = [];
  if (document.documentElement.scrollWidth > innerWidth) out.push("the page scrolls sideways");
  for (const e of document.querySelectorAll("body *")) {
    const box = e.getBoundingClientRect();
    if (!box.width || !e.checkVisibility()) continue;
    let edge = innerWidth;
    for (let p = e.parentElement; p; p = p.parentElement) {
      if (scrolls(p)) { edge = Infinity; break; }
      if (getComputedStyle(p).overflowX === "hidden") edge = Math.min(edge, p.getBoundingClientRect().right);
    }
    if (box.right > edge + 1) out.push(`${e.tagName}.${e.className} ${e.textContent.slice(0, 40)}`);
  }
  return out;
}

/** Texts whose contrast is below 4.5, or below 3 where they are large, as WCAG 2 counts it. */
function faint() {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], below) => [r, g, b].map((c, i) => c * a + below[i] * (1 - a));
  const ground = (e) => {
    if (!e) return [255, 255, 255];
    const style = getComputedStyle(e), color = rgba(style.backgroundColor);
    const below = ground(e.parentElement);
    return color[3] ? over([...color.slice(0, 3), color[3] * style.opacity], below) : below;
  };
  const light = (color) => {
    const [r, g, b] = color.map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const out = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    const style = getComputedStyle(e), size = parseFloat(style.fontSize);
    if (!text || !size || ["SCRIPT", "STYLE", "OPTION"].includes(e.tagName)) continue;
    if (!e.checkVisibility() || !e.getClientRects().length) continue;
    let shown = 1;
    for (let p = e; p; p = p.parentElement) shown *= getComputedStyle(p).opacity;
    const back = ground(e), color = rgba(style.color);
    const front = over([...color.slice(0, 3), color[3] * shown], back);
    const [high, low] = [light(front), light(back)].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) out.push(`${ratio.toFixed(2)} ${e.tagName}.${e.className}: ${text.slice(0, 40)}`);
  }
  return out;
}
