// The plan, read: one object for each variable, the questions that can be asked of it, and what the reader has chosen.

const NO_RULE = -1;
const NOT_ASKED = -2;
const data = JSON.parse(byId("plan").textContent);

const mesh = {
  names: data.mesh.dims.map(([name]) => name),
  sizes: data.mesh.dims.map(([, size]) => size),
  devices: data.mesh.devices,
};
mesh.size = product(mesh.sizes);

const layouts = data.layouts.map(([specs, text]) => {
  const counts = shardCounts(mesh.sizes, specs);
  // A mesh dim of size 1 shards nothing.
  const dims = [...new Set(specs.flat())].filter((dim) => mesh.sizes[dim] > 1).sort((a, b) => a - b);
  return { specs, text, counts, dims, replicated: dims.length === 0 };
});
const rules = data.rules.map(([number, pattern, layout, uneven]) => ({ number, pattern, layout: layouts[layout], uneven }));
const severalModels = new Set(data.variables.map(([, , , , , more]) => more?.model).filter(Boolean)).size > 1;

const variables = data.variables.map(([path, form, kind, row, rule, more = {}], number) => {
  const [shape, dtype, layout, bytes, deviceBytes] = data.forms[form];
  const unmatched = rule === NO_RULE && (kind === "weight" || kind === "state");
  return {
    number, path, kind, row, shape, dtype, bytes, deviceBytes, ...more,
    layout: layouts[layout],
    fits: deviceBytes !== null,
    rule: rule >= 0 ? rules[rule] : null,
    noRule: unmatched && !more.rest,
    rest: unmatched && more.rest,
    asked: more.asked === undefined ? null : layouts[more.asked],
    others: (data.lists[more.others] ?? []).map((other) => rules[other]),
    near: data.lists[more.near] ?? [],
    globalInit: data.texts[more.global_init] ?? "",
    notAsked: rule === NOT_ASKED,
    inAStep: (more.step ?? []).map((text) => data.texts[text]),
    aliases: more.aliases ?? [],
    problems: [],
  };
});
const rows = data.rows.map(([path, rule, follows]) => ({ path, rule, follows, variables: [] }));
for (const v of variables) {
  v.parent = typeof v.parent === "number" ? variables[v.parent] : v.parent ?? null;
  rows[v.row].variables.push(v);
}
const problems = data.problems.map((problem) => ({ ...problem, variables: problem.variables.map((i) => variables[i]) }));
for (const problem of problems) for (const v of problem.variables) v.problems.push(problem);

for (const v of variables) {
  v.uneven = !v.fits || v.asked !== null || v.problems.some((p) => p.kind === "uneven" || p.kind === "rank");
  v.name = severalModels && v.model ? `${v.model}: ${v.path}` : v.path;
  const parent = v.parent && (v.parent.path ?? v.parent);
  v.ruleText = v.rule ? `${v.rule.number}` : v.rest ? "the rest" : v.noRule ? "no rule" : v.found ? "" : v.notAsked && parent ? `as ${parent}` : `(${v.kind})`;
  v.how = !v.fits ? "does not fit" : v.layout.replicated ? "replicated" : `sharded over ${v.layout.dims.map((dim) => mesh.names[dim]).join(", ")}`;
  v.haystack = [v.name, ...v.aliases, v.rule?.pattern ?? ""].join("\n");
  v.searched = v.haystack.toLowerCase();
}

/** Variables in groups: those of repeated blocks, alike in all but the numbers of their paths, are together. */
function blocksOf(all) {
  const groups = new Map();
  for (const v of all) {
    const key = JSON.stringify([v.model, v.path.replace(/\d+/g, "#"), v.kind, v.bytes, v.layout.text, v.shape, v.how, v.uneven]);
    (groups.get(key) ?? groups.set(key, []).get(key)).push(v);
  }
  return [...groups.values()];
}

/** What a variable may be filtered by, beside its kind and its rule; no rules laid out what is in a checkpoint. */
const FLAGS = {
  ...(!data.checkpoint && { "no rule": (v) => v.noRule }),
  replicated: (v) => v.fits && v.layout.replicated,
  ...(!data.checkpoint && { uneven: (v) => v.uneven, "global init": (v) => v.globalInit !== "" }),
  "has a problem": (v) => v.problems.some((p) => p.severity !== "note"),
};

/** A test for what is typed: text anywhere, or `/a regex/`; throws what is wrong with a regex. */
function searchTest(text) {
  const regex = /^\/(.*)\/(i?)$/s.exec(text.trim());
  if (regex && regex[1]) {
    const compiled = new RegExp(regex[1], regex[2]);
    return (v) => compiled.test(v.name) || v.aliases.some((a) => compiled.test(a)) || compiled.test(v.rule?.pattern ?? "");
  }
  const words = text.toLowerCase().trim();
  return (v) => v.searched.includes(words);
}

/** What the reader has chosen; every view draws itself anew when it changes. */
const chosen = { variable: null, device: null, offset: null };
const listeners = [];
const onChosen = (listener) => listeners.push(listener);

function tellChosen(by) {
  for (const listener of listeners) listener(by);
}

function chooseVariable(variable, by = "") {
  chosen.variable = variable;
  chosen.offset = variable && variable.fits && chosen.device !== null ? shardOffset(mesh.sizes, variable.layout.specs, chosen.device) : null;
  tellChosen(by);
}

/** A device, and with it the slice that it holds; null: none. */
function chooseDevice(device) {
  chosen.device = device;
  chooseVariable(chosen.variable, "device");
}

/** A slice, and with it all devices that hold it. */
function chooseOffset(offset) {
  chosen.device = null;
  chosen.offset = offset;
  tellChosen("slice");
}
