// The page: its views put together, its colours, and its address, which says what is chosen and asked.

byId("title").textContent = data.checkpoint ? data.checkpoint.where : `${counted(variables.length, "variable")} on ${mesh.names.map((name, dim) => `${name}=${mesh.sizes[dim]}`).join(", ") || "one device"}`;

byId("totals").append(...[
  ["variables", countText(variables.length), ""],
  [data.checkpoint ? "devices it was saved from" : "devices", countText(mesh.size), ""],
  ["total", sizeText(data.bytes[0]), ""],
  ["variables per device", sizeText(data.bytes[1]), ""],
  ...(data.cost ? [["a step on " + data.cost.machine, data.cost.step, ""]] : []),
  ...(data.checkpoint ? [data.checkpoint.verified ? ["damage", problemsText() || "none", problems.length ? "bad" : "well"] : ["damage", "not verified", "doubt"]] : []),
].map(([name, value, mood]) => make("div", { class: mood }, make("dt", {}, name), make("dd", {}, value))));

const theme = byId("theme");
const isDark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
function tellTheme() {
  theme.textContent = isDark() ? "Light" : "Dark";
  theme.setAttribute("aria-label", `${theme.textContent} colours`);
}

theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  tellTheme();
  redrawAll();
});
tellTheme();

// -- the address

let ready = false;
let waiting = 0;

/** Soon, and once for many keys: browsers refuse an address that changes all the time. */
function writeAddress() {
  clearTimeout(waiting);
  if (ready) waiting = setTimeout(writeAddressNow, 120);
}

function writeAddressNow() {
  const address = new URLSearchParams();
  const set = (name, value) => value && address.set(name, value);
  if (chosen.variable) {
    set("variable", chosen.variable.path);
    if (severalModels) set("model", chosen.variable.model);
  }
  if (chosen.device !== null) address.set("device", `${chosen.device}`);
  for (const name of ["search", "kind", "rule", "sort"]) set(name, asked[name]);
  set("flags", [...asked.flags].join(","));
  if (asked.down) address.set("down", "1");
  if (!asked.collapsed) address.set("all", "1");
  history.replaceState(null, "", `#${address}`);
}

function readAddress() {
  const address = new URLSearchParams(location.hash.slice(1));
  const path = address.get("variable");
  const named = path === null ? null : variables.find((v) => (v.path === path || v.aliases.includes(path)) && (!address.has("model") || v.model === address.get("model")));
  for (const name of ["search", "kind", "rule", "sort"]) asked[name] = address.get(name) ?? "";
  asked.flags = new Set((address.get("flags") ?? "").split(",").filter((name) => name in FLAGS));
  [asked.down, asked.collapsed] = [address.has("down"), !address.has("all")];
  const device = /^\d+$/.test(address.get("device") ?? "") ? Number(address.get("device")) : mesh.size;
  chosen.device = device < mesh.size ? device : null;
  chosen.variable = named ?? null;
}

/** What is shown first where the address names nothing: the largest variable that is sharded, or else the largest. */
const usual = () => [...variables].sort((a, b) => b.fits - a.fits || a.layout.replicated - b.layout.replicated || b.bytes - a.bytes)[0] ?? null;

// -- all of it

if (data.verdict) verdictView(byId("verdict"), byId("verdict-panel"));
problemsView(byId("problems"), byId("problems-panel"));
if (data.checkpoint) checkpointView(byId("checkpoint"), byId("checkpoint-panel"));
else memoryView(byId("memory"));
if (data.cost) costView(byId("cost"), byId("cost-panel"));
if (data.explained) explainedView(byId("explained"), byId("explained-panel"));
readAddress();
const refreshTable = tableView(byId("table"), writeAddress);
treemapView(byId("treemap"));
if (!data.checkpoint) couldShardView(byId("could-shard"), byId("could-shard-panel"));
activationsView(byId("activations"), byId("activations-panel"));
detailsView(byId("chosen-name"), byId("details"));
slicesView(byId("slices"));
meshView(byId("mesh"));
onChosen((by) => {
  writeAddress();
  const narrow = !matchMedia("(min-width: 1100px)").matches;
  if (narrow && ["table", "treemap", "problem"].includes(by)) {
    byId("chosen").scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  }
});
refreshTable();
chooseVariable(chosen.variable ?? usual());
ready = true;
addEventListener("hashchange", () => {
  readAddress();
  refreshTable();
  chooseVariable(chosen.variable ?? usual());
});

// For the tests of the arithmetic; nothing on the page reads it.
window.layoutmap = { shardCounts, shardOffset, slicesOf, shardWeights, devicesOf, squarify, mergedPath, MeshTiles };
// When the first picture is there: the views have asked for theirs before this.
requestAnimationFrame(() => setTimeout(() => performance.mark("drawn")));
