
const single = data.rows.length === 1;
const shown = (row) =>
  single ? row.variants : [row.own, row.peer, "channels_last"]
    .filter((name, i, all) => name && all.indexOf(name) === i)
    .map((name) => row.variants.find((v) => v.variant === name)).filter(Boolean);
const compared = data.rows.flatMap(shown).filter((v) => v.interval);
const published = data.rows.map((row) => (row.published && row.published.high) || 0);
const longest = Math.max(1.2, ...compared.map((v) => v.ratio), ...published);
/* A noisy interval may be a hundred bars long: beside it they would be too short to see. */
const reach = Math.min(2 * longest, Math.max(longest, ...compared.map((v) => v.interval[1])));
const at = (ratio) => (100 * Math.min(ratio, reach)) / reach + "%";

function bar(variant) {
  const sure = variant.interval && variant.interval[0] !== variant.interval[1];
  const end = sure ? Math.max(variant.ratio, variant.interval[1]) : variant.ratio;
  return make("div", { class: `bar ${variant.kind}` },
    make("span", { title: variant.label }, variant.label),
    make("div", { class: "track" },
      make("i", { class: "fill", style: `width:${at(variant.ratio)}` }),
      sure ? make("i", { class: variant.interval[1] > reach ? "sure cut" : "sure", style: `left:${at(variant.interval[0])};right:calc(100% - ${at(variant.interval[1])})` }) : "",
      make("b", { style: `left:${at(end)}` }, `${variant.ratio.toFixed(2)}x` + (single ? `  ${variant.ms} ms` : ""))));
}

function chart(row) {
  const scale = make("div", { class: "scale" });
  const claim = row.published;
  if (claim && claim.low) {
    const width = Math.max(claim.high - claim.low, 0.01);
    scale.append(make("i", { class: "band", style: `left:${at(claim.low)};width:${at(width)}` }));
  }
  scale.append(make("i", { class: "one", style: `left:${at(1)}` }));
  const drawn = shown(row).filter((variant) => variant.ratio);
  return make("div", { class: "chart" }, scale, ...drawn.map(bar));
}

function table(row) {
  const head = ["variant", "ms", "quartiles", "images/s", "99 % sure", "verdict", "set-up s", "peak", "error"];
  const body = row.variants.map((v) => make("tr", {}, ...[
    v.label + (v.version ? ` ${v.version}` : ""), v.ms, v.quartiles, v.rate,
    v.verdict ? v.interval.map((x) => x.toFixed(2)).join(" - ") : "", v.verdict, v.setup, v.peak, v.error,
  ].map((cell) => make("td", {}, cell))));
  return make("table", {},
    make("thead", {}, make("tr", {}, ...head.map((name) => make("th", {}, name)))),
    make("tbody", {}, ...body));
}

function card(row) {
  const notes = [row.floor, row.propagation && `channels last: ${row.propagation}`,
    row.published && `published ${row.published.text}: ${row.judgement}`].filter(Boolean);
  return make("details", { class: `card row ${single ? "single" : ""}`, open: single },
    make("summary", { title: row.source },
      make("h3", {}, single ? row.case : row.name, ...notes.map((note) => make("small", {}, note))),
      chart(row)),
    make("div", { class: "scroll" }, table(row)));
}

function gain(row, name) {
  const variant = row.variants.find((v) => v.variant === (name === "own" ? row.own : name));
  return variant && variant.ratio ? variant.ratio : 0;
}

function draw() {
  const order = $("#order").value;
  const wanted = $("#search").value.toLowerCase();
  let rows = data.rows.filter((row) => row.case.toLowerCase().includes(wanted));
  if (order !== "given") rows = [...rows].sort((a, b) => gain(b, order) - gain(a, order));
  $("#rows").replaceChildren(...rows.map(card));
  $("#count").textContent = `${rows.length} of ${plural(data.rows.length, "case")}`;
}

$("#name").textContent = data.title;
$("#setting").textContent = data.setting;
$("#answer").append(...data.answer.map((line) => make("p", {}, line)));
$("#where").textContent = data.environment;
const key = (color, name) => make("span", { class: "named" }, make("i", { class: "key", style: `background:var(${color})` }), name, " ");
$("#legend").append(`longer is faster; 1 is ${data.baseline} `,
  ...[["--last", "nhwc"], ["--torch", "plain torch"], ["--peer", "others"]].map(([color, name]) => key(color, name)),
  ...(data.rows.some((row) => row.published && row.published.low) ? [key("--band", "published")] : []));
if (data.problems.length) {
  $("#problems").hidden = false;
  $("#problems ul").append(...data.problems.map(([what, why]) => make("li", {}, ...prose(`${what}: ${why}`))));
}
$("#tools").hidden = single || data.rows.length === 0;
$("#search").addEventListener("input", draw);
$("#order").addEventListener("change", draw);
draw();
