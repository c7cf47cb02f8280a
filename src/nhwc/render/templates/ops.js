const order = Object.keys(data.meaning);
const style = (outcome) => ({ "wrong values": "wrong", "sometimes loses": "sometimes", "converts inside": "converts", "no format": "none", "not checked": "unchecked" })[outcome] ?? outcome;

/** A row of the file is [aspect, dims, outcome, cases, of, example, dtypes]. */
const operators = data.operators.map((op) => ({
  ...op,
  title: op.variant ? `${op.name} (${op.variant})` : op.name,
  rows: op.rows.map(([aspect, dims, outcome, cases, of, example, dtypes]) => ({ aspect, dims, outcome, cases, of, example, dtypes })),
  speeds: (op.speeds ?? []).map(([label, shape, dtype, nchw, nhwc, ratio, interval]) => ({ label, shape, dtype, nchw, nhwc, ratio, slower: interval[1] < 0.9 })),
}));

/** What is shown at first, and again after a reset. */
const everything = { text: "", outcome: null, dims: operators.some((op) => op.rows.some((row) => row.dims === 4)) ? 4 : 5, dtype: data.dtypes[0], group: "", slower: false };
const state = { ...everything, aspect: "forward", sort: "title", down: false, open: new Set() };
const find = (op, aspect) => op.rows.find((row) => row.aspect === aspect && row.dims === state.dims && row.dtypes.includes(state.dtype));
const worst = (op) => op.speeds.reduce((least, speed) => (least && least.ratio <= speed.ratio ? least : speed), undefined);

/** Whether an operator is shown; `free` names one filter to leave out, for the numbers beside it. */
function shown(op, free) {
  if (!op.rows.some((row) => row.dims === state.dims && row.dtypes.includes(state.dtype)) && !op.problem) return false;
  if (state.group && op.group !== state.group) return false;
  if (state.slower && !op.speeds.some((speed) => speed.slower)) return false;
  if (free !== "outcome" && state.outcome && (find(op, state.aspect)?.outcome ?? "not checked") !== state.outcome) return false;
  const text = state.text.trim().toLowerCase();
  return !text || op.title.toLowerCase().includes(text) || op.rows.some((row) => row.example.toLowerCase().includes(text));
}

function key(op) {
  if (state.sort === "title" || state.sort === "group") return op[state.sort];
  if (state.sort === "speed") return worst(op)?.ratio ?? 1e9;
  const row = find(op, state.sort);
  return row ? order.indexOf(row.outcome) : 99;
}

function drawChips() {
  const visible = operators.filter((op) => shown(op, "outcome"));
  const counts = order.map((outcome) => [outcome, visible.filter((op) => find(op, state.aspect)?.outcome === outcome).length]);
  const present = counts.filter(([outcome, n]) => n || outcome === state.outcome);
  $("#chips").replaceChildren(...present.map(([outcome, n]) =>
    make("button", { class: style(outcome), "aria-pressed": String(state.outcome === outcome), title: data.meaning[outcome], "data-outcome": outcome,
      onclick: () => { state.outcome = state.outcome === outcome ? null : outcome; draw(); } },
    make("b", {}, String(n)), make("span", {}, outcome))));
  $("#bar").replaceChildren(...present.map(([outcome, n]) => make("i", { class: style(outcome), style: `flex: ${n}`, title: `${outcome}: ${n}` })));
  $("#bar").setAttribute("aria-label", present.map(([outcome, n]) => `${outcome}: ${n}`).join(", "));
}

function pill(row) {
  return row ? make("span", { class: `pill ${style(row.outcome)}`, title: row.example || data.meaning[row.outcome] }, row.outcome === "no format" ? "·" : row.outcome) : "";
}

function speed(op) {
  const found = worst(op);
  if (!found) return "";
  const tone = found.slower ? "slow" : found.ratio > 1.15 ? "fast" : "";
  return make("span", { class: `speed ${tone}`, title: `${found.label}, ${found.shape}` }, `${found.ratio.toFixed(2)}×`);
}

const columns = ["title", "group", ...data.aspects, "speed"];
const heads = { title: "operator", speed: "NHWC speed" };

function drawHead() {
  $("#table thead").replaceChildren(make("tr", {}, ...columns.map((name) =>
    make("th", { "aria-sort": state.sort === name ? (state.down ? "descending" : "ascending") : undefined, scope: "col" },
      make("button", { "data-sort": name, onclick: () => {
        state.down = state.sort === name ? !state.down : false;
        state.sort = name;
        draw();
      } }, heads[name] ?? name)))));
}

function detail(op) {
  const rows = op.rows.map((row) => make("tr", {}, make("td", {}, `${row.dims}-D ${row.aspect}`), make("td", {}, pill(row)),
    make("td", {}, `${row.cases} of ${row.of}`), make("td", {}, row.dtypes.join(" ")), make("td", { class: "why" }, ...prose(row.example))));
  const speeds = op.speeds.map((s) => make("tr", {}, make("td", {}, "speed"), make("td", {}, make("span", { class: `speed ${s.slower ? "slow" : ""}` }, `${s.ratio.toFixed(2)}×`)),
    make("td", {}, ""), make("td", {}, s.dtype), make("td", { class: "why" }, `${s.label}, ${s.shape}: NCHW ${ms(s.nchw)}, NHWC ${ms(s.nhwc)}`)));
  const problem = op.problem ? make("p", {}, ...prose(`Not checked in full: ${op.problem}`)) : "";
  const head = make("tr", {}, ...["", "", "calls", "dtypes", "why"].map((word) => make("th", {}, word)));
  return make("tr", { class: "detail" }, make("td", { colspan: columns.length }, problem, make("table", {}, head, ...rows, ...speeds)));
}

function drawRows() {
  const found = operators.filter((op) => shown(op));
  const keyed = found.map((op) => [key(op), op]);
  keyed.sort(([a, p], [b, q]) => (a < b ? -1 : a > b ? 1 : p.title < q.title ? -1 : 1) * (state.down ? -1 : 1));
  const rows = keyed.flatMap(([, op]) => {
    const toggle = () => { state.open.has(op) ? state.open.delete(op) : state.open.add(op); drawRows(); };
    const name = make("button", { "aria-expanded": String(state.open.has(op)) }, op.name, op.variant ? make("small", {}, ` ${op.variant}`) : "");
    const row = make("tr", { class: "op", onclick: toggle }, make("td", { class: "name" }, name), make("td", { class: "group" }, op.group),
      ...data.aspects.map((aspect) => make("td", {}, pill(find(op, aspect)))), make("td", {}, speed(op)));
    return state.open.has(op) ? [row, detail(op)] : [row];
  });
  $("#table tbody").replaceChildren(...rows);
  $("#count").textContent = `${found.length} of ${operators.length}`;
  $("#empty").hidden = found.length > 0;
}

function draw() {
  drawChips();
  drawHead();
  drawRows();
  for (const button of $("#dims").children) button.setAttribute("aria-pressed", String(Number(button.dataset.dims) === state.dims));
  $("#slower").setAttribute("aria-pressed", String(state.slower));
}

function choices(id, values, words) {
  $(id).replaceChildren(...values.map((value) => make("option", { value }, words(value))));
  $(id).addEventListener("change", (event) => { state[id.slice(1)] = event.target.value; draw(); });
}

function drawFrame() {
  $("#where").textContent = `${data.where} · ${data.device} · measured in ${Math.round(data.seconds)} s`;
  $("#dims").append(...[4, 5].map((n) => make("button", { "data-dims": n, onclick: () => { state.dims = n; draw(); } }, `${n}-D`)));
  choices("#dtype", data.dtypes, (value) => value);
  choices("#group", ["", ...new Set(operators.map((op) => op.group))], (value) => value || "every group");
  choices("#aspect", data.aspects, (value) => `count ${value}`);
  $("#search").addEventListener("input", (event) => { state.text = event.target.value; draw(); });
  $("#slower").addEventListener("click", () => { state.slower = !state.slower; draw(); });
  $("#reset").addEventListener("click", () => {
    Object.assign(state, everything);
    $("#search").value = $("#group").value = "";
    $("#dtype").value = state.dtype;
    draw();
  });
  const left = Object.entries(data.left_out);
  const reasons = new Map();
  for (const [title, reason] of left) reasons.set(reason, [...(reasons.get(reason) ?? []), title]);
  $("#left summary").textContent = `${plural(left.length, "operator")} left out, and why`;
  $("#left dl").append(...[...reasons].flatMap(([reason, titles]) => [make("dt", {}, reason), make("dd", {}, titles.join(", "))]));
  $("#left").hidden = left.length === 0;
  const meaning = order.flatMap((outcome) => [make("dt", {}, make("span", { class: `pill ${style(outcome)}` }, outcome)), make("dd", {}, data.meaning[outcome])]);
  $("#foot").append(make("dl", {}, ...meaning), ...data.notes.map((note) => make("p", {}, note)));
}

drawFrame();
draw();
