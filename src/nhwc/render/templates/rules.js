const state = { text: "", word: null };
const words = { pass: "holds", FAIL: "fails", skip: "not tried" };

function shown(rule) {
  if (state.word && rule.word !== state.word) return false;
  const text = state.text.trim().toLowerCase();
  return !text || [rule.claim, rule.program, rule.outcome, rule.section].some((part) => part.toLowerCase().includes(text));
}

/** A tensor of the program: its name, where its memory came from, and the drawing, which Python wrote as HTML. */
function drawTensor({ name, came, shape, picture }) {
  const box = make("div", { class: "drawn", "data-shape": shape.join() }, make("p", {}, make("code", {}, name), came && ` is ${came}`));
  const frame = make("div");
  frame.innerHTML = data.pictures[picture];
  box.append(frame);
  return box;
}

function drawRule(rule) {
  const code = make("pre", {}, `${rule.program}\n`, make("b", {}, `# ${rule.outcome}`));
  const top = make("div", { class: "top" }, make("h3", {}, rule.claim), make("span", { class: `word ${rule.word}` }, words[rule.word]));
  return make("article", { class: `rule card ${rule.word}` }, make("div", {}, top, code),
    make("div", { class: "pictures" }, ...rule.drawn.map(drawTensor)));
}

/** Marks a number in every drawing of its card that has the same shape, or takes the marks away. */
function light(cell) {
  for (const lit of document.querySelectorAll(".m-lit")) lit.classList.remove("m-lit");
  const box = cell?.closest(".drawn");
  if (!box) return;
  const numbers = cell.dataset.n.split(" ");
  for (const other of box.parentElement.querySelectorAll(`.drawn[data-shape="${box.dataset.shape}"] .m-cell`)) {
    if (other.dataset.n.split(" ").some((number) => numbers.includes(number))) other.classList.add("m-lit");
  }
}

const sections = [...new Set(data.rules.map((rule) => rule.section))];
const cards = data.rules.map((rule) => [rule, drawRule(rule)]);
const parts = sections.map((title, i) => {
  const box = make("div", { class: "rules" }, ...cards.filter(([rule]) => rule.section === title).map(([, card]) => card));
  return make("section", { id: `s${i}` }, make("h2", {}, title), box);
});

function draw() {
  for (const [rule, card] of cards) card.hidden = !shown(rule);
  for (const part of parts) part.hidden = ![...part.querySelectorAll(".rule")].some((card) => !card.hidden);
  const count = data.rules.filter(shown).length;
  $("#count").textContent = count === data.rules.length ? data.summary : `${count} of ${plural(data.rules.length, "rule")}`;
  $("#empty").hidden = count > 0;
  for (const button of $("#words").children) button.setAttribute("aria-pressed", button.dataset.word === (state.word ?? ""));
}

document.head.append(make("style", {}, data.styles));
$("#where").textContent = data.where;
for (const word of ["", ...Object.keys(words).filter((word) => data.rules.some((rule) => rule.word === word))]) {
  $("#words").append(make("button", { "data-word": word, onclick: () => { state.word = word || null; draw(); } }, words[word] ?? "all"));
}
sections.forEach((title, i) => $("#sections").append(make("a", { href: `#s${i}` }, title)));
$("#rules").append(...parts);
$("#search").addEventListener("input", (event) => { state.text = event.target.value; draw(); });
$("#reset").addEventListener("click", () => { state.text = $("#search").value = ""; state.word = null; draw(); });
document.addEventListener("mouseover", (event) => light(event.target.closest(".m-cell")));
$("#foot").textContent = "Made by nhwc ops --rules. nhwc.show(tensor) draws a tensor of your own.";
draw();
