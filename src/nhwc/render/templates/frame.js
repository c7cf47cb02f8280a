const frame = this, page = frame.contentDocument, root = page.documentElement;
frame.previousElementSibling.remove();
const around = [];
for (let box = frame.parentElement; box; box = box.parentElement) around.push(getComputedStyle(box).backgroundColor);
const [red, green, blue] = around.map((color) => color.match(/[\d.]+/g).map(Number)).find((color) => (color[3] ?? 1) > 0.5) ?? [];
if (red !== undefined) root.dataset.theme = 0.3 * red + 0.6 * green + 0.1 * blue < 128 ? "dark" : "light";
const fit = () => { frame.style.height = root.offsetHeight + "px"; };
new frame.contentWindow.ResizeObserver(fit).observe(page.body);
fit();
