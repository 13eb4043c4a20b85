// Problems and findings, errors first, as the terminal groups them; each leads to its variables.

/** How many problems there are, by what they are: `1 error, 2 warnings, 1 finding of lint`. */
function problemsText() {
  const count = (of) => problems.filter(of).reduce((sum, p) => sum + p.count, 0);
  return [
    ["error", (p) => p.severity === "error"],
    ["warning", (p) => p.severity === "warning" && !p.lint && p.kind !== "not built"],
    ["note", (p) => p.severity === "note"],
    ["finding", (p) => p.lint],
  ].map(([noun, of]) => count(of) && `${counted(count(of), noun)}${noun === "finding" ? " of lint" : ""}`).filter(Boolean).join(", ");
}

/** One problem; where `linked`, with the way to its variables. */
function problemNode(problem, linked) {
  const facts = [...problem.facts.filter(([, value]) => value), ...["why", "fix"].filter((name) => problem[name]).map((name) => [name, problem[name]])];
  const first = problem.variables[0];
  const ways = linked && first
    ? [make("button", { type: "button", class: "link", onclick: () => chooseVariable(first, "problem") },
        problem.variables.length > 1 ? `Show the first of ${counted(problem.variables.length, "variable")}` : "Show the variable")]
    : [];
  return make("article", { class: `problem ${problem.severity}` },
    make("p", { class: "what" }, make("span", { class: "severity" }, problem.lint ? "lint" : problem.severity), ` ${problem.what}`),
    make("dl", { class: "facts" }, facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, make("code", {}, value))])),
    ...ways);
}

/** Variables without a rule, shown as one, as there are many and all are shown alike. */
function noRuleNode(found) {
  const count = found.reduce((sum, { count }) => sum + count, 0);
  return make("article", { class: "problem warning" },
    make("p", { class: "what" }, make("span", { class: "severity" }, "warning"),
      ` no rule matches these ${countText(count)}, so they are replicated; add rules, or set layout_map.rest = "replicated"`),
    make("dl", { class: "facts listed" }, found.flatMap(({ subject, fix, variables: [first] }) => [
      make("dt", {}, first ? make("button", { type: "button", class: "link", onclick: () => chooseVariable(first, "problem") }, pathNode(subject)) : pathNode(subject)),
      make("dd", {}, make("code", {}, fix)),
    ])));
}

const SHOWN_PROBLEMS = 5;

function problemsView(holder, panel) {
  if (!problems.length) return;
  panel.hidden = false;
  byId("problems-heading").append(make("span", { class: "tally" }, ` ${problemsText()}`));
  const noRule = problems.filter(({ kind, severity }) => kind === "no rule" && severity === "warning");
  const nodes = problems.flatMap((problem) => {
    if (noRule.length < 2 || !noRule.includes(problem)) return [problemNode(problem, true)];
    return problem === noRule[0] ? [noRuleNode(noRule)] : [];
  });
  holder.append(...nodes.slice(0, SHOWN_PROBLEMS));
  const rest = nodes.slice(SHOWN_PROBLEMS);
  if (rest.length) holder.append(make("details", {}, make("summary", {}, `${counted(rest.length, "more problem")}`), rest));
}

function couldShardView(holder, panel) {
  if (!data.could_be_sharded.length) return;
  panel.hidden = false;
  const line = ([path, axis, dim, saved, members]) => make("tr", {},
    make("td", {}, make("button", { type: "button", class: "link", onclick: () => chooseVariable(variables[members[0]], "problem") }, pathNode(path))),
    make("td", { class: "number" }, countText(members.length)),
    make("td", { class: "number" }, sizeText(saved)),
    make("td", {}, `axis ${axis} over ${dim}`));
  const table = (lines) => make("div", { class: "sideways", tabindex: "0", role: "region", "aria-label": "What could be sharded" }, make("table", { class: "plain" },
    make("thead", {}, make("tr", {}, ["variable", "times", "a device would save", "could be sharded"].map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, lines)));
  holder.append(make("p", { class: "note" }, "What would save most comes first."), table(data.could_be_sharded.slice(0, 10).map(line)));
  if (data.could_be_sharded.length > 10) holder.append(make("details", {}, make("summary", {}, `${countText(data.could_be_sharded.length - 10)} more`), table(data.could_be_sharded.slice(10).map(line))));
}

function activationsView(holder, panel) {
  if (!data.activations.length) return;
  panel.hidden = false;
  holder.append(make("div", { class: "sideways", tabindex: "0", role: "region", "aria-label": "Layers' outputs" }, make("table", { class: "plain" },
    make("thead", {}, make("tr", {}, ["layer's output", "times", "layout", "rule"].map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, data.activations.map((cells) => make("tr", {}, cells.map((cell, i) => make("td", {}, i === 0 ? pathNode(cell) : cell))))))));
}
