const columns = ["model", "outcome", "input", "folded", "lost", "faster", "error", "notes"];
const numbers = new Set(["folded", "lost", "faster", "error"]);
const state = { text: "", outcome: null, sort: "model", down: false };

const text = (row) => `${row.model} ${row.notes}`.toLowerCase();
const fits = (row) => text(row).includes(state.text) && (!state.outcome || row.outcome === state.outcome);
const key = (row) => (numbers.has(state.sort) ? Number.parseFloat(row[state.sort]) || 0 : row[state.sort]);

function draw() {
  const outcomes = [...new Set(data.map((row) => row.outcome))].sort();
  const count = (outcome) => data.filter((row) => row.outcome === outcome && text(row).includes(state.text)).length;
  $("#chips").replaceChildren(...outcomes.map((outcome) =>
    make("button", { class: outcome, "aria-pressed": String(state.outcome === outcome),
      onclick: () => { state.outcome = state.outcome === outcome ? null : outcome; draw(); } },
      make("b", {}, String(count(outcome))), outcome)));
  $("#table thead").replaceChildren(make("tr", {}, ...columns.map((name) =>
    make("th", { scope: "col", "aria-sort": state.sort === name && (state.down ? "descending" : "ascending") },
      make("button", { onclick: () => { state.down = state.sort === name && !state.down; state.sort = name; draw(); } }, name)))));
  const rows = data.filter(fits).sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (state.down ? -1 : 1));
  $("#table tbody").replaceChildren(...rows.map((row) => make("tr", {}, ...columns.map((name) =>
    make("td", { class: name === "outcome" && `outcome ${row.outcome}` }, row[name])))));
  $("#count").textContent = `${rows.length} of ${data.length} models`;
}

$("#search").addEventListener("input", (event) => { state.text = event.target.value.trim().toLowerCase(); draw(); });
draw();
