// All that the plan says of the chosen variable.

function detailsView(name, holder) {
  const row = (name, ...value) => [make("dt", {}, name), make("dd", {}, ...value)];
  const link = (v) => make("button", { type: "button", class: "link", onclick: () => chooseVariable(v, "link") }, pathNode(v.path));
  const ruleNode = (rule) => [`rule ${rule.number} `, make("code", {}, rule.pattern)];

  function reasonOf(v) {
    if (v.rule) return [...ruleNode(v.rule), v.rule.uneven === "error" ? "" : ` (uneven: ${v.rule.uneven})`];
    if (v.found) return ["it is as it was found: no map was asked"];
    if (v.notAsked) return [v.parent ? "it follows its parent" : `a ${v.kind} is not asked of the rules`];
    return [`no rule matches, so it is replicated${v.rest ? ', as layout_map.rest = "replicated" says' : ""}`];
  }

  function rowsOf(v) {
    const found = [
      row("what", `${v.kind}, ${v.dtype}, ${shapeText(v.shape)}`),
      row("layout", make("code", {}, v.layout.text), ` ${v.how}`),
    ];
    if (v.asked) found.push(row("its rule asks", make("code", {}, v.asked.text)));
    found.push(row("bytes", v.fits ? `${sizeText(v.deviceBytes)} per device, of ${sizeText(v.bytes)}` : sizeText(v.bytes)));
    if (v.fits) found.push(row("shard", shapeText(v.shape.map((n, axis) => n / v.layout.counts[axis]))));
    if (!data.checkpoint) found.push(row("because", ...reasonOf(v))); // it says where variables were, and not why
    for (const rule of v.others) found.push(row("also matches", ...ruleNode(rule), `: would give ${rule.layout.text}`));
    for (const pattern of v.near) found.push(row("near miss", make("code", {}, pattern)));
    for (const text of v.inAStep) found.push(row(...text.split(/: (.*)/s).slice(0, 2)));
    if (v.parent) found.push(row("parent", typeof v.parent === "string" ? pathNode(v.parent) : link(v.parent)));
    for (const alias of v.aliases) found.push(row("also at", pathNode(alias)));
    if (severalModels && v.model) found.push(row("model", v.model));
    if (v.globalInit) found.push(row("global init", v.globalInit));
    return found.flat();
  }

  function stepper(v) {
    const alike = rows[v.row].variables;
    if (alike.length < 2) return null;
    const at = alike.indexOf(v);
    const step = (to, text, label) =>
      make("button", { type: "button", class: "quiet", "aria-label": label, disabled: !alike[to], onclick: () => {
        chooseVariable(alike[to], "link");
        byId("chosen-name").querySelector(`[aria-label="${label}"]:enabled`)?.focus();
      } }, text);
    return make("p", { class: "stepper" }, step(at - 1, "‹", "the one before of these"), make("span", {}, `${countText(at + 1)} of ${countText(alike.length)} like it`), step(at + 1, "›", "the next of these"));
  }

  onChosen(() => {
    const v = chosen.variable;
    if (!v) {
      name.replaceChildren(make("p", { class: "note" }, "None. Choose one in the table or the treemap."));
      holder.replaceChildren();
      return;
    }
    name.replaceChildren(make("p", { id: "chosen-path" }, pathNode(v.name)), ...[stepper(v)].filter(Boolean));
    holder.replaceChildren(
      make("dl", { class: "facts" }, rowsOf(v)),
      ...v.problems.map((problem) => problemNode(problem, false)),
    );
  });
}
