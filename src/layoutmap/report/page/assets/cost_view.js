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

  /** A collective: what it is of, what runs how often over what, and its figures. */
  const line = (row) => {
    const [overlaps, first] = row.slice(-2);
    const [kind, times, over, network, tensor, sent, takes, cause, phase] = row;
    const path = pathNode(cause);
    const of = first === null ? path : make("button", { type: "button", class: "link", onclick: () => chooseVariable(variables[first], "problem") }, path);
    const figure = (name, text) => make("td", { class: "number", "data-name": name }, text);
    return make("tr", {},
      make("td", {}, of, make("small", {}, phase)),
      make("td", {}, `${kind}${times === "1" ? "" : ` × ${times}`}`, make("small", {}, `over ${over}, ${network}`)),
      figure("tensor", tensor), figure("sent", sent), figure("takes", overlaps ? `${takes} (overlaps)` : takes));
  };
  const table = (lines) => make("table", { class: "plain travels" },
    make("thead", {}, make("tr", {}, ["because of", "collective", "tensor", "sent", "takes"].map((name, i) => make("th", i > 1 ? { scope: "col", class: "number" } : { scope: "col" }, name)))),
    make("tbody", {}, lines));

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
