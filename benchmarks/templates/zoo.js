const columns = { model: "model", input: "input", folded: "folded", lost: "losses",
  faster: "times as fast", error: "error (eager's)", notes: "notes" };
const meanings = { input: "the smallest it takes", folded: "batch norms that went into a convolution",
  lost: "calls that lose channels last: as given \u2192 after the passes", faster: "than the model as it was given",
  error: "the largest difference from a float64 run, relative to the largest output; in brackets the model's own" };
const numbers = new Set(["folded", "lost", "faster", "error"]);
const state = { text: "", outcome: null, remark: null, sort: "model", down: false };

const text = (row) => `${row.model} ${row.notes}`.toLowerCase();
const found = (row) => text(row).includes(state.text);
const fits = (row) => found(row) && (!state.outcome || row.outcome === state.outcome)
  && (!state.remark || row.remarks.includes(state.remark));
const key = (row) => (numbers.has(state.sort) ? Number.parseFloat(row[state.sort]) || 0 : row[state.sort]);
const shown = {
  lost: (row) => [row.lost.replace("->", "\u2192")],
  notes: (row) => [row.outcome === "right" ? "" : make("b", { class: row.outcome }, row.outcome + "\n"), row.notes.replaceAll("; ", "\n")],
};

/** Buttons that filter by `kind`, one for each of `values`, with how many rows have it. */
const chips = (kind, values, has) => values.map((value) =>
  make("button", { class: value, "aria-pressed": String(state[kind] === value),
    onclick: () => { state[kind] = state[kind] === value ? null : value; draw(); } },
    make("b", {}, String(data.filter((row) => found(row) && has(row, value)).length)), value));

function draw() {
  const outcomes = [...new Set(data.map((row) => row.outcome))];
  const remarks = [...new Set(data.flatMap((row) => row.remarks))];
  const order = (all, has) => all.sort((a, b) => data.filter((r) => has(r, b)).length - data.filter((r) => has(r, a)).length);
  const is = (row, outcome) => row.outcome === outcome;
  const with_ = (row, remark) => row.remarks.includes(remark);
  $("#chips").replaceChildren(...chips("outcome", order(outcomes, is), is));
  $("#remarks").replaceChildren(...chips("remark", order(remarks, with_), with_));
  $("#table thead").replaceChildren(make("tr", {}, ...Object.entries(columns).map(([name, head]) =>
    make("th", { scope: "col", class: numbers.has(name) && "number", title: meanings[name],
      "aria-sort": state.sort === name && (state.down ? "descending" : "ascending") },
      make("button", { onclick: () => { state.down = state.sort === name && !state.down; state.sort = name; draw(); } }, head)))));
  const rows = data.filter(fits).sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (state.down ? -1 : 1));
  $("#table tbody").replaceChildren(...rows.map((row) => make("tr", {}, ...Object.keys(columns).map((name) =>
    make("td", { "data-head": columns[name], class: name === "model" ? row.outcome : numbers.has(name) && "number", title: name === "model" && row.outcome },
      ...(shown[name]?.(row) ?? [row[name]]))))));
  $("#count").textContent = `${rows.length} of ${data.length} models`;
}

$("#search").addEventListener("input", (event) => { state.text = event.target.value.trim().toLowerCase(); draw(); });
draw();
