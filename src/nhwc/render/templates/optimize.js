const stageNames = { input: "as it was given", graph: "after the passes", plan: "with chosen kernels" };

function describeResult() {
  $("#name").textContent = `${data.name}  ${data.inputs.join(", ")}`;
  $("#where").textContent = data.where;
  const verdict = $("#verdict");
  if (data.chosen === "input") {
    verdict.append(make("b", { class: "even" }, "Unchanged."), ...prose(data.reason + "."));
    return;
  }
  const [low, high] = data.interval.map((x) => x.toFixed(2));
  verdict.append(make("b", { class: data.verdict === "faster" ? "good" : "even" }, data.ratio.toFixed(2) + "×"),
    ...prose(`as fast (99 % interval ${low} to ${high}): ${data.verdict}${data.busy ? ", on a busy machine" : ""}${data.reason ? "; " + data.reason : ""}.`));
}

function drawStages() {
  // Each is drawn as a share of the input's time in its own turns.
  const shares = { input: [1, 1, 1] };
  for (const [stage, before] of Object.entries(data.befores)) {
    const [low, high] = data.quartiles[stage];
    shares[stage] = [low, data.medians[stage], high].map((seconds) => seconds / before);
  }
  const longest = Math.max(...Object.values(shares).flat());
  const part = (share) => (share / longest) * 100 + "%";
  for (const [stage, [low, median, high]] of Object.entries(shares)) {
    const timed = stage in data.medians;
    const title = timed ? `quartiles ${data.quartiles[stage].map(ms).join(" to ")}` : "the time that the others are held against";
    const spread = make("div", { class: "spread", style: `left:${part(low)};width:${part(high - low)}` });
    $("#stages").append(make("div", { class: "stage" + (stage === data.chosen ? " chosen" : "") },
      make("span", {}, stageNames[stage] ?? stage),
      make("div", { class: "track", title }, make("div", { class: "bar", style: `width:${part(median)}` }), timed ? spread : ""),
      make("span", { class: "ms" }, timed ? ms(data.medians[stage]) : ""),
      make("span", { class: "ratio" }, timed ? `${data.ratios[stage].toFixed(2)}x of ${ms(data.befores[stage])}` : "")));
  }
  $("#stages").append(make("div", { class: "soft" },
    (data.remembered ? "Remembered from an earlier run with the same graph, shapes and kernels." : `${data.rounds}; the thin bars span the quartiles.`)
    + " Each bar is a share of the time that the model as it was given took in the same turns."));
}

const tones = { loses: "lost", misreads: "lost", converts: "pays", restores: "pays", keeps: "last", plain: "plain" };
const formats = { loses: "loses the format", misreads: "loses the format", converts: "converts", restores: "converts", keeps: "channels last", plain: "contiguous" };

function drawAudits() {
  if (!Object.keys(data.audits).length) { $("#audits-part").remove(); return; }
  for (const [stage, audit] of Object.entries(data.audits)) {
    const strip = make("div", { class: "strip" });
    const shown = audit.calls.filter((call) => call.effect !== "views");
    const total = shown.reduce((sum, call) => sum + call.seconds, 0) || 1;
    drawBar(strip, `memory format ${stage}, from input to output`, shown.map((call) =>
      [tones[call.effect] ?? "neutral", call.seconds / total, `${call.module} ${call.operator}: ${formats[call.effect] ?? "no image"}, ${ms(call.seconds)}`]));
    const lost = audit.counts.loses + audit.counts.misreads;
    const says = audit.clean ? "clean" : `${plural(lost, "call")} ${lost === 1 ? "loses" : "lose"} the format`;
    $("#audits").append(make("div", { class: "audit" }, make("span", {}, stage, make("small", {}, `${plural(shown.length, "operator")}, ${says}`)), strip));
  }
  const legend = [["last", "channels last"], ["plain", "contiguous"], ["neutral", "no image"], ["lost", "loses the format"], ["pays", "converts or copies"]];
  for (const [name, text] of legend) $("#formats").append(make("span", {}, make("i", { class: name }), text));
}

function drawPasses() {
  const idle = data.passes.filter((pass) => !pass.sites.length).map((pass) => pass.name);
  for (const pass of data.passes) {
    if (!pass.sites.length) continue;
    const applied = pass.sites.filter((site) => site.applied), left = pass.sites.length - applied.length;
    const list = make("ul");
    for (const site of pass.sites) {
      const text = site.applied ? site.what : `${site.what}: left alone, ${site.reason}`;
      list.append(make("li", { class: site.applied ? "" : "skipped" }, make("span", { class: "mono" }, site.where || "the model"), " ", ...prose(text)));
    }
    const row = make("summary", {}, make("span", { class: "mono" }, pass.name),
      make("span", { class: applied.length ? "applied" : "soft" }, applied.length ? plural(applied.length, "change") : "nothing to do"),
      make("span", { class: "soft" }, (left ? `${left} left alone, ` : "") + ms(pass.seconds)));
    $("#passes").append(make("details", { class: "more" }, row, list));
  }
  if (idle.length) $("#passes").append(make("p", { class: "soft" }, `Nothing to do: ${idle.join(", ")}.`));
  for (const part of data.opaque) $("#passes").append(make("p", { class: "soft" }, ...prose(`${part.path || "the model"} (${part.kind}) stays as it is: ${part.reason}`)));
}

/** Torch is grey; the hues of the others stand a golden angle apart, however many there are, and none is red. */
const layersOf = data.plans.flatMap((plan) => plan.layers);
const kernelNames = [...new Set(layersOf.flatMap((layer) => [layer.chosen, ...layer.kernels].map((k) => k.kernel)))].filter((name) => name !== "torch").sort();
const colorOf = (kernel) => {
  const place = kernelNames.indexOf(kernel);
  return "background:" + (place < 0 ? "#7a8290" : `hsl(${25 + ((149 + 137.508 * place) % 310)} 58% ${[40, 52, 34][place % 3]}%)`);
};
const gainOf = (layer) => {
  const own = layer.kernels.find((k) => k.kernel === "torch" && k.layout === "contiguous");
  return own && layer.chosen.seconds ? own.seconds / layer.chosen.seconds : 0;
};

function drawPlan(plan) {
  const part = $("#plans");
  part.append(make("h2", {}, `Layers ${plan.part ? `of ${plan.part} ` : ""}for ${plan.inputs.map(brief).join(", ")}`));
  if (plan.reason) { part.append(make("div", { class: "card" }, ...prose(`Not planned: ${plan.reason}.`))); return; }
  if (plan.opened.length) part.append(make("p", { class: "soft" }, forTheseSizes(plan)));
  const strip = make("div", { class: "strip tall" });
  const timed = plan.layers.map((layer, index) => [layer, index]).filter(([layer]) => layer.chosen.seconds);
  const total = timed.reduce((sum, [layer]) => sum + layer.chosen.seconds, 0) || 1;
  const rows = new Map();
  drawBar(strip, "layers by time, coloured by kernel", timed.map(([layer, index]) => [
    "", layer.chosen.seconds / total, `${layer.name}: ${layer.chosen.kernel}, ${layer.chosen.layout}, ${ms(layer.chosen.seconds)}`,
    () => choose(rows.get(index)), colorOf(layer.chosen.kernel)]));
  const legend = make("div", { class: "legend" });
  for (const name of new Set(timed.map(([layer]) => layer.chosen.kernel))) legend.append(make("span", {}, make("i", { style: colorOf(name) }), name));
  legend.append(make("span", {}, `${plural(plan.conversions, "conversion")} between layouts`), make("span", {}, (plan.measured ? `${plan.measured} entries measured` : "all times remembered") + (plan.renewed ? `, ${plan.renewed} measured again` : "")));
  part.append(strip, legend);
  if (plan.sureness) part.append(make("p", { class: "soft" }, ...prose(plan.sureness)));
  drawFallbacks(plan);
  part.append(layerTable(plan, rows));
}

/** What torch computes, the most costly first. */
function drawFallbacks(plan) {
  const rows = plan.fallbacks.filter((one) => one.share >= 0.01).map((one) => make("tr", {},
    make("td", { class: "number" }, ms(one.seconds)), make("td", { class: "number" }, `${(one.share * 100).toFixed(0)} %`),
    make("td", { class: "mono" }, one.operator), make("td", { class: "mono soft wide", title: one.places.join(", ") }, one.places.length > 1 ? `${one.places[0]} and ${one.places.length - 1} more` : one.places[0]),
    make("td", { class: "wide" }, ...prose(one.reason))));
  if (!rows.length) return;
  const head = make("tr", {}, ...["time", "of a call", "left to torch", "where", "why"].map((text, index) => make("th", { class: index > 2 && "wide" }, text)));
  $("#plans").append(make("div", { class: "card scroll fallbacks" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))));
}

const brief = (text) => (text.length <= 72 ? text : `${text.slice(0, 72)}...`);

function forTheseSizes(plan) {
  const parts = plan.opened.map((one) => one.path || "the model");
  const changes = plan.passes.reduce((sum, one) => sum + one.sites.filter((site) => site.applied).length, 0);
  const shapes = plan.counts ? "shapes and numbers" : "shapes";
  const others = plan.counts ? "Others run as the graph" : "Other shapes run without a plan";
  return `For these ${shapes} alone, with sizes known: ${parts.join(", ")} can be opened, and ${plural(changes, "more change")} made. ${others}.`;
}

function drawUnplanned(plans) {
  if (!plans.length) return;
  const rows = plans.map((plan) => make("p", { class: "soft" }, make("span", { class: "mono" }, plan.part), ...prose(` ${plan.inputs.join(", ")}: ${plan.reason}`)));
  $("#plans").append(make("h2", {}, "Graphs without a plan"), make("div", { class: "card unplanned" }, ...rows));
}

function layerTable(plan, rows) {
  const body = make("tbody");
  plan.layers.forEach((layer, index) => { rows.set(index, layerRow(layer)); body.append(rows.get(index)); });
  const search = make("input", { type: "search", placeholder: "layer, shape or kernel", "aria-label": "search layers" });
  const count = make("span", { class: "soft" }, plural(plan.layers.length, "layer"));
  search.addEventListener("input", () => {
    let shown = 0;
    for (const row of body.rows) {
      row.hidden = !row.textContent.toLowerCase().includes(search.value.toLowerCase());
      shown += !row.hidden;
    }
    count.textContent = `${shown} of ${plural(plan.layers.length, "layer")}`;
  });
  const order = (key) => () => {
    const sorted = plan.layers.map((layer, index) => [key(layer, index), index]).sort((a, b) => a[0] - b[0]);
    body.append(...sorted.map(([, index]) => rows.get(index)));
  };
  const head = make("tr", {},
    make("th", {}, make("button", { onclick: order((l, i) => i) }, "layer")), make("th", { class: "wide" }, "what it computes"), make("th", { class: "wide" }, "kernels"),
    make("th", {}, make("button", { onclick: order((l) => -l.chosen.seconds) }, "time")),
    make("th", {}, make("button", { onclick: order((l) => -gainOf(l)) }, "of torch's own")), make("th", { class: "wide" }, "how sure"));
  const table = make("table", {}, make("thead", {}, head), body);
  return make("div", {}, make("div", { class: "tools" }, search, count), make("div", { class: "card layers" }, table));
}

function layerRow(layer) {
  const slowest = Math.max(...layer.kernels.map((k) => k.seconds)) || 1;
  const options = make("div", { class: "options" });
  for (const kernel of [...layer.kernels].sort((a, b) => a.seconds - b.seconds)) {
    const won = kernel.kernel === layer.chosen.kernel && kernel.layout === layer.chosen.layout;
    options.append(make("div", { class: "option" + (won ? " won" : "") },
      make("span", {}, `${kernel.kernel}, ${kernel.layout.replace("channels_last", "NHWC").replace("contiguous", "NCHW")}`),
      make("span", { class: "track" }, make("i", { style: `${colorOf(kernel.kernel)};width:${(kernel.seconds / slowest) * 100}%` })),
      make("span", { class: "ms", title: kernel.turns ? `the least of ${plural(kernel.turns, "turn")}; their median lies ${(kernel.spread * 100).toFixed(0)} % above` : "" }, kernel.seconds ? ms(kernel.seconds) : "")));
  }
  const gain = gainOf(layer);
  return make("tr", {}, make("td", { class: "mono name" }, layer.name), make("td", { class: "mono soft wide" }, layer.what),
    make("td", { class: "wide" }, options), make("td", { class: "number" }, layer.chosen.seconds ? ms(layer.chosen.seconds) : "not timed"),
    make("td", { class: "number" }, gain ? gain.toFixed(1) + "×" : ""),
    make("td", { class: "soft wide" }, layer.sureness));
}

function choose(row) {
  for (const other of document.querySelectorAll("tr.chosen")) other.classList.remove("chosen");
  row.classList.add("chosen");
  row.hidden = false;
  row.scrollIntoView({ block: "nearest" });
}

function drawVerification() {
  const checks = data.verification.checks;
  const against = data.verification.in_float64 ? "a float64 run of the original" : "the original; it does not run in float64";
  const rows = checks.map((check) => make("tr", {}, make("td", {}, String(check.input)), make("td", { class: "mono" }, check.output),
    ...[check.error, check.eager_error, check.allowed].map((x) => make("td", { class: "number" }, science(x)))));
  $("#verified").append(make("p", { class: "soft" }, `Held against ${against}. ${data.verification.remembered ? "That was an earlier run with these weights, inputs and kernels; this time it was the original in float32. " : ""}${data.verification.constant ? "The model answers the same to every input, as one does whose last weights are zeros, so this shows little: load its weights first. " : ""}Errors are relative to the largest value of the output.`),
    make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...["input", "output", "error", "the original's own", "allowed"].map((t, i) => make("th", { class: i > 1 && "number" }, t)))), make("tbody", {}, ...rows))));
  $("#made").textContent = `Set up in ${data.setup_s.toFixed(1)} s${data.exact ? ", exact kernels only" : ""}. ${data.doubt}`;
}

describeResult();
drawStages();
drawAudits();
drawPasses();
const unplanned = data.plans.filter((plan) => plan.part && plan.reason);
data.plans.filter((plan) => !unplanned.includes(plan)).forEach(drawPlan);
drawUnplanned(unplanned);
drawVerification();
