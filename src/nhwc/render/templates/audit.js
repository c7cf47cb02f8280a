const calls = data.calls;
const short = (name) => name.split(/\.|::/).pop();
const labels = { batch_norm: "bn", max_pool2d: "maxpool", adaptive_avg_pool2d: "avgpool", layer_norm: "ln", relu_: "relu", hardtanh: "relu6" };
const bad = { loses: "lost", misreads: "lost", converts: "pays", restores: "pays" };
const inFinding = new Map();
data.findings.forEach((finding, f) => {
  for (const i of [...finding.calls, ...finding.payers]) if (!inFinding.has(i)) inFinding.set(i, f);
});

/** The colour of a call: what it did wrong, else the format it left behind. */
function tone(call) {
  if (bad[call.effect]) return bad[call.effect];
  const finding = data.findings[inFinding.get(call.index)];
  if (finding && finding.kind === "copies") return "pays";
  return { keeps: "last", plain: "plain", views: "neutral" }[call.effect] ?? "neutral";
}

const words = {
  keeps: "keeps channels last", views: "view, moves no data", loses: "loses channels last",
  misreads: "misreads an ambiguous tensor", converts: "converts on request",
  restores: "pays to restore channels last", plain: "contiguous in and out", neutral: "no image here",
};

function describeRun() {
  const shapes = data.inputs.map((shape) => shape.join("x")).join(", ");
  $("#name").textContent = `${data.model}  ${shapes}`;
  $("#where").textContent = data.where;
  const verdict = $("#verdict");
  if (!calls.length) {
    verdict.append(make("b", {}, "Nothing seen. "), "The model calls no operator, or calls them in threads of its own.");
    $("#findings-part").remove();
    document.querySelectorAll(".of-calls").forEach((part) => { part.hidden = true; });
    return;
  }
  const total = `${plural(calls.length, "operator")}, ${ms(data.run_s)} a run${data.busy ? " on a busy machine" : ""}`;
  if (data.clean) {
    verdict.append(make("b", { class: "good" }, data.judged ? "Clean. " : "Nothing to judge. "), `${total}: ${data.clean_words}.`);
    $("#findings-part").remove();
    return;
  }
  const lost = data.counts.loses + data.counts.misreads;
  verdict.append(make("b", { class: lost ? "bad" : "" }, lost ? `${plural(lost, "call")} ${lost === 1 ? "loses" : "lose"} the format. ` : "No operator loses the format. "));
  const paying = data.counts.restores;
  verdict.append(`${total}; ${paying ? `${paying} ${paying === 1 ? "pays" : "pay"} to convert; ` : ""}conversions cost ${ms(data.cost_s)} (${percent(data.cost_s / data.run_s)}).`);
}

function describe(call) {
  const out = call.outputs[0];
  return `#${call.index} ${call.operator}, ${words[call.effect]}, ${ms(call.seconds)}` + (out ? ` → ${out.shape.join("×")} ${out.format}` : "") + (call.site.module ? ` in ${call.site.module}` : "");
}

const pieces = new Map();
function drawStrip() {
  const shown = calls.filter((call) => call.effect !== "views");
  const total = calls.reduce((sum, call) => sum + call.seconds, 0) || 1;
  drawBar($("#strip"), "the run from input to output, coloured by format",
    shown.map((call) => [tone(call), call.seconds / total, describe(call), () => choose(call.index, true)]));
  shown.forEach((call, i) => pieces.set(call.index, $("#strip").children[i]));
  const legend = [["last", "channels last"], ["plain", "contiguous"], ["neutral", "no image"], ["lost", "loses the format"], ["pays", "converts or copies"]];
  for (const [name, text] of legend) $("#legend").append(make("span", {}, make("i", { class: name }), text));
}

function drawFindings() {
  data.findings.forEach((finding, f) => {
    const times = finding.calls.length > 1 ? ` × ${finding.calls.length}` : "";
    const cost = finding.cost_s ? `${ms(finding.cost_s)}, ${percent(finding.share)}` : "";
    const what = data.kinds[finding.kind] + (finding.payers.length ? `; ${plural(finding.payers.length, "later call")} ${finding.payers.length === 1 ? "pays" : "pay"} to convert${finding.kind === "unconverted" ? "" : " back"}` : "") + (finding.copied_bytes ? `; ${bytes(finding.copied_bytes)} copied` : "");
    const card = make("div", { class: `card finding is-${finding.kind}`, role: "button", tabindex: 0, "data-f": f, "aria-pressed": "false" },
      make("div", { class: "head" }, make("span", {}, finding.operator + times), make("span", { class: "cost" }, cost)),
      make("p", {}, ...prose(what[0].toUpperCase() + what.slice(1) + ".")),
      finding.site.file ? make("div", { class: "place", title: finding.site.file }, finding.place) : "",
      finding.site.source ? make("pre", {}, finding.site.source) : "",
      make("p", {}, ...prose(finding.remedy)));
    const pick = () => chooseFinding(f);
    card.addEventListener("click", pick);
    card.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(); } });
    $("#findings").append(card);
  });
}

/** Rows of the network: calls in order, a new row where the outer module changes. */
function stages() {
  const rows = [];
  const deep = calls.length > 60 ? 2 : 1;
  for (const call of calls) {
    const parts = call.site.module.split(".");
    const label = (call.backward ? "backward " : "") + (parts[0] ? parts.slice(0, deep).join(".") : "(model)");
    const row = rows.at(-1);
    if (row && row.label === label) row.calls.push(call);
    else rows.push({ label, calls: [call] });
  }
  return rows;
}

const formats = [["contiguous", "contiguous", "plain"], ["channels_last", "channels last", "last"]];
const copies = (p) => (p.kind !== "reorder" ? "computed" : p.role === "weight" ? "of-weight" : "of-image");
const secondsOf = (primitives) => primitives.reduce((sum, p) => sum + p.seconds, 0);

function describePrimitive(p) {
  const what = p.kind === "reorder" ? `${p.role || "tensor"} ${p.path}` : `${p.kind} by ${p.implementation}`;
  return `${what}, ${p.problem}, ${ms(p.seconds)}${p.site.module ? ` in ${p.site.module}` : ""}`;
}

/** A row for each call that ran in oneDNN: what each format spent on it. */
function primitivesTable(runs) {
  const rows = new Map();
  runs.forEach((primitives, side) => {
    for (const p of primitives) {
      const key = `${p.call} ${p.operator} ${p.site.module}`;
      if (!rows.has(key)) rows.set(key, { p, sides: [[], []] });
      rows.get(key).sides[side].push(p);
    }
  });
  const head = make("tr", {}, ...["layer", ...formats.flatMap(([, name]) => [`${name}: image`, "weight", "computed"])].map((text) => make("th", {}, text)));
  const table = make("table", {}, head);
  for (const { p, sides } of rows.values()) {
    const row = make("tr", {}, make("td", {}, p.site.module || p.operator || "(no call)"));
    for (const side of sides) {
      for (const kind of ["of-image", "of-weight", "computed"]) {
        const own = side.filter((other) => copies(other) === kind);
        row.append(make("td", { title: own.map(describePrimitive).join("\n") }, own.length ? ms(secondsOf(own)) : "–"));
      }
    }
    table.append(row);
  }
  return table;
}

function drawPrimitives() {
  if (!data.reorders) return $("#onednn-part").remove();
  const runs = formats.map(([key]) => data.reorders[key].primitives);
  const longest = Math.max(...runs.map(secondsOf)) || 1;
  formats.forEach(([, name, tone], side) => {
    const own = runs[side];
    const count = (kind) => { const of = own.filter((p) => copies(p) === kind); return of.length ? `${of.length} in ${ms(secondsOf(of))}` : "none"; };
    const bar = make("div", { class: "primitives", style: `width:${(100 * secondsOf(own)) / longest}%` });
    drawBar(bar, `${name}: what oneDNN ran, in order`, own.map((p) => [copies(p) === "computed" ? tone : copies(p), p.seconds / secondsOf(own), describePrimitive(p)]));
    $("#onednn").append(
      make("div", { class: "run" }, make("b", {}, name), ` images reordered: ${count("of-image")}; weights: ${count("of-weight")}; layers computed: ${count("computed")}`),
      make("div", {}, bar));
  });
  for (const [name, text] of [["of-image", "reorders an image"], ["of-weight", "reorders a weight"], ["plain", "computes, contiguous"], ["last", "computes, channels last"]]) {
    $("#onednn-legend").append(make("span", {}, make("i", { class: name }), text));
  }
  $("#onednn-table").append(primitivesTable(runs));
}

const cells = new Map();
function drawNetwork() {
  const network = $("#network");
  network.classList.toggle("dense", calls.length > 300);
  const longest = Math.max(...calls.map((call) => call.seconds), 1e-9);
  const reach = calls.length > 300 ? 60 : 150;
  for (const { label, calls: members } of stages()) {
    const seconds = members.reduce((sum, call) => sum + call.seconds, 0);
    const box = make("div", { class: "cells" });
    for (const call of members) {
      const view = call.effect === "views" || (call.effect === "neutral" && !call.moves_data);
      const loud = tone(call) === "lost" || tone(call) === "pays";
      const label = loud ? short(call.operator) : labels[short(call.operator)] ?? short(call.operator);
      const width = view ? 7 : Math.round((calls.length > 300 ? 7 : 15) + reach * Math.sqrt(call.seconds / longest));
      const fits = loud || (!view && width >= 8 + 6.2 * label.length);
      const cell = make("button", {
        class: `cell ${tone(call)}${view ? " view" : ""}`, "data-i": call.index,
        style: `min-width:${width}px`,
        "aria-label": `${call.operator} ${call.site.module}: ${words[call.effect]}`,
      }, fits ? label : "");
      cells.set(call.index, cell);
      box.append(cell);
    }
    network.append(make("div", { class: "stage" }, make("div", { class: "label" }, label, make("small", {}, ms(seconds))), box));
  }
}

function tensorRows(table, side, specs) {
  for (const spec of specs) {
    table.append(make("tr", {}, make("td", {}, side), make("td", {}, spec.shape.join("×") || "scalar"), make("td", {}, spec.strides.join(" ")), make("td", {}, spec.format)));
  }
}

function jump(indices) {
  const shown = indices.slice(0, 40).map((i) => make("button", { onclick: () => choose(i, true) }, `#${i} ${short(calls[i].operator)}`));
  return shown.length < indices.length ? [...shown, ` and ${indices.length - shown.length} more`] : shown;
}

function showCall(call) {
  const detail = $("#detail");
  const finding = data.findings[inFinding.get(call.index)];
  const table = make("table", {}, make("tr", {}, ...["", "shape", "strides", "format"].map((text) => make("th", {}, text))));
  tensorRows(table, "in", call.inputs);
  tensorRows(table, "out", call.outputs);
  detail.replaceChildren(
    make("h3", {}, `#${call.index} ${call.operator}`),
    make("p", {}, make("span", { class: `tag ${tone(call)}` }, words[call.effect]), ` ${ms(call.seconds)}${call.backward ? ", backward" : ""}`),
    make("div", {}, make("span", { class: "soft" }, "module "), make("code", {}, call.site.module || "(the model)"), " ", make("span", { class: "soft" }, call.site.module_type)),
    make("div", { class: "place", title: call.site.file }, call.place),
    call.site.source ? make("pre", {}, call.site.source) : "",
    make("div", { class: "scroll" }, table));
  for (const copy of call.copies) {
    detail.append(make("p", {}, `Copies ${bytes(copy.bytes)} inside its kernel in ${ms(copy.seconds)}: ${copy.shape.join("×")}, strides ${copy.source_strides.join(" ")} → ${copy.target_strides.join(" ")}.`));
  }
  if (call.origin !== null && call.origin !== undefined) detail.append(make("p", {}, "Follows from ", ...jump([call.origin])));
  const payers = calls.filter((other) => other.origin === call.index && other.effect === "restores").map((other) => other.index);
  if (payers.length) detail.append(make("p", {}, "Paid for by ", ...jump(payers)));
  if (finding) detail.append(make("p", {}, make("b", {}, "What to do: "), ...prose(finding.remedy)));
}

function mark(linked, chosen) {
  for (const [i, cell] of cells) {
    cell.classList.toggle("linked", linked.includes(i));
    cell.classList.toggle("chosen", i === chosen);
  }
  for (const [i, piece] of pieces) piece.classList.toggle("chosen", linked.includes(i) || i === chosen);
}

function choose(index, scroll) {
  const call = calls[index];
  const partners = calls.filter((other) => other.index === call.origin || (other.origin === index && other.effect === "restores")).map((other) => other.index);
  showCall(call);
  mark(partners, index);
  if (scroll) cells.get(index).scrollIntoView({ block: "center", behavior: "smooth" });
}

function chooseFinding(f) {
  const finding = data.findings[f];
  for (const card of document.querySelectorAll(".finding")) card.setAttribute("aria-pressed", String(+card.dataset.f === f));
  if (!finding.calls.length) return;
  choose(finding.calls[0], true);
  mark([...finding.calls, ...finding.payers], finding.calls[0]);
}

const kinds = [["all", () => true], ["loses", (c) => tone(c) === "lost"], ["converts or copies", (c) => tone(c) === "pays"], ["keeps", (c) => c.effect === "keeps"], ["contiguous", (c) => c.effect === "plain"]];
let filter = kinds[0][1];
function applyFilter() {
  const text = $("#search").value.trim().toLowerCase();
  let shown = 0;
  for (const call of calls) {
    const hay = `${call.operator} ${call.site.module} ${call.site.module_type} ${call.site.source} ${call.site.file}:${call.site.line}`.toLowerCase();
    const match = filter(call) && hay.includes(text);
    cells.get(call.index).classList.toggle("dim", !match);
    shown += match;
  }
  $("#count").textContent = shown === calls.length ? "" : `${shown} of ${calls.length}`;
}

function wire() {
  for (const [name, test] of kinds) {
    const count = calls.filter(test).length;
    if (!count) continue;
    const button = make("button", { "aria-pressed": String(name === "all") }, name === "all" ? "all" : `${name} ${count}`);
    button.addEventListener("click", () => {
      filter = test;
      for (const other of $("#filters").children) other.setAttribute("aria-pressed", String(other === button));
      applyFilter();
    });
    $("#filters").append(button);
  }
  $("#search").addEventListener("input", applyFilter);
  const network = $("#network");
  const callOf = (event) => calls[event.target.closest?.(".cell")?.dataset.i];
  network.addEventListener("pointermove", (event) => { const call = callOf(event); tell(call ? describe(call) : "", event.clientX, event.clientY); });
  network.addEventListener("pointerleave", () => tell(""));
  network.addEventListener("click", (event) => { const call = callOf(event); if (call) choose(call.index, false); });
}

describeRun();
drawStrip();
drawFindings();
drawPrimitives();
drawNetwork();
wire();
const first = data.findings.find((finding) => finding.calls.length);
if (first) choose(first.calls[0], false);
else if (calls.length) showCall(calls.reduce((best, call) => (call.seconds > best.seconds ? call : best), calls[0]));
if (!data.comparison_words.length) $("#formats-part").remove();
for (const text of data.comparison_words) $("#formats").append(make("p", {}, ...prose(`${text[0].toUpperCase()}${text.slice(1)}.`)));
if (data.converted) $("#unseen").append(make("p", {}, "Weights and input were converted to channels last for this run; the model itself was left as it was."));
for (const text of data.unseen) $("#unseen").append(make("p", {}, ...prose(`Not visible: ${text}.`)));
