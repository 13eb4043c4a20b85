// What a training step costs: what it waits for, what travels because of what, and what the figures assume.

const SHOWN_COLLECTIVES = 8;

function costView(holder, panel) {
  const { cost } = data;
  panel.hidden = false;
  const total = cost.parts.reduce((sum, [, seconds]) => sum + seconds, 0);
  const share = (seconds) => `${Math.round((100 * seconds) / total)} %`;
  const segments = cost.parts.map(([what, seconds, text, kind]) => {
    const segment = make("span", { class: `use step-${kind}`, title: `${what}: ${text}, ${share(seconds)}` });
    segment.style.width = `${(100 * seconds) / total}%`;
    return segment;
  });
  const words = cost.parts.map(([what, seconds, text]) => `${what} ${text}, ${share(seconds)}`);
  const networks = cost.networks.map(([dim, network]) => `${dim} over ${network}`).join(", ");

  const line = (row) => {
    const [overlaps, first] = row.slice(-2);
    const cells = row.slice(0, -2);
    return make("tr", {}, cells.map((cell, i) => {
      const column = cost.columns[i];
      if (column === "because of") {
        const path = pathNode(cell);
        return make("td", {}, first === null ? path : make("button", { type: "button", class: "link", onclick: () => chooseVariable(variables[first], "problem") }, path));
      }
      const text = column === "takes" && overlaps ? `${cell} (overlaps)` : cell;
      return make("td", ["times", "tensor", "sent", "takes"].includes(column) ? { class: "number" } : {}, text);
    }));
  };
  const table = (lines) => make("div", { class: "sideways", tabindex: "0", role: "region", "aria-label": "What travels in a step" }, make("table", { class: "plain travels" },
    make("thead", {}, make("tr", {}, cost.columns.map((name) => make("th", ["times", "tensor", "sent", "takes"].includes(name) ? { scope: "col", class: "number" } : { scope: "col" }, name)))),
    make("tbody", {}, lines)));

  const rest = cost.rows.slice(SHOWN_COLLECTIVES);
  holder.append(
    make("p", { class: "lead" }, "At the peak figures of ", make("strong", {}, cost.machine), ` (${cost.about}), a step takes `,
      make("strong", {}, cost.step), `; without any overlap, ${cost.serial}.`),
    make("div", { class: "bar", role: "img", "aria-label": `A step: ${words.join("; ")}` }, segments),
    make("ul", { class: "legend" }, cost.parts.map(([what, seconds, text, kind]) =>
      make("li", {}, make("span", { class: `swatch step-${kind}` }), `${what} ${text}, ${share(seconds)}`))),
    make("h3", {}, "What travels"),
    cost.rows.length ? table(cost.rows.slice(0, SHOWN_COLLECTIVES).map(line)) : make("p", { class: "note" }, "Nothing."),
    ...(rest.length ? [make("details", {}, make("summary", {}, `${countText(rest.length)} more, which take less time`), table(rest.map(line)))] : []),
    make("details", {}, make("summary", {}, "What the figures count and assume"),
      make("ul", { class: "plain-list" }, [...cost.counts, ...(networks ? [`devices in the order of the mesh: ${networks}`] : []), ...cost.assumptions].map((text) => make("li", {}, text)))));
}
