// A compiled step: what its devices send, from which line and because of what, and which work they repeat.

function explainedView(holder, panel) {
  const { explained } = data;
  panel.hidden = false;
  const head = (names, firstFigure) => make("thead", {}, make("tr", {}, names.map((name, i) =>
    make("th", i >= firstFigure ? { scope: "col", class: "number" } : { scope: "col" }, name))));
  const figure = (name, text) => make("td", { class: "number", "data-name": name }, text);
  const named = new Map(variables.map((variable) => [variable.path, variable]));

  /** The argument that causes a collective, which leads to its variable where the plan has one of that path. */
  const causeNode = (cause) => {
    const keys = [...cause.matchAll(/\['?([^'\]]+)'?\]|\.(\w+)/g)].map(([, key, name]) => key ?? name).join(".");
    const variable = named.get(cause) ?? named.get(keys);
    return variable ? make("button", { type: "button", class: "link", onclick: () => chooseVariable(variable, "problem") }, pathNode(cause)) : pathNode(cause || "not known");
  };
  const collectives = explained.collectives.map((each) => make("tr", {},
    make("td", {}, causeNode(each.cause), make("small", {}, each.is_full_gather ? "gathered in full" : "")),
    make("td", {}, `${each.kind}${each.calls === 1 ? "" : ` × ${countText(each.calls)}`}`, make("small", {}, `over ${each.dims.join(", ")}`)),
    make("td", {}, make("code", {}, each.line || "?")),
    figure("result", shapeText(each.shape)), figure("sent", sizeText(each.sent_bytes))));
  const products = explained.products.map((each) => {
    const ratio = each.ideal_flops ? each.flops / each.ideal_flops : Infinity;
    return make("tr", ratio > 1.1 ? { class: "repeated" } : {},
      make("td", {}, make("code", {}, each.line || "all lines")), figure("FLOPs", countText(each.flops)),
      figure("share", countText(Math.round(each.ideal_flops))), figure("ratio", ratio.toFixed(2)));
  });
  const sizes = Object.entries(explained.mesh).map(([dim, size]) => `${dim}=${size}`).join(", ");
  holder.append(
    make("p", { class: "lead" }, make("code", {}, explained.step), ` on ${sizes}: each device sends `, make("strong", {}, sizeText(explained.sent_bytes)),
      `, and stores ${sizeText(explained.argument_bytes)} of arguments and ${sizeText(explained.temporary_bytes)} more.`),
    make("h3", {}, "What travels"),
    collectives.length ? make("table", { class: "plain travels" }, head(["because of", "collective", "line", "result", "sent"], 3), make("tbody", {}, collectives)) : make("p", { class: "note" }, "Nothing."),
    ...(products.length ? [make("h3", {}, "Matrix products of a device, next to its share"),
      make("table", { class: "plain products" }, head(["line", "FLOPs", "share", "ratio"], 1), make("tbody", {}, products)),
      make("p", { class: "note" }, "A ratio above 1: devices repeat each other's work.")] : []),
    make("h3", {}, "Compiled again"),
    explained.recompilations.length ? make("ul", { class: "plain-list" }, explained.recompilations.map((reason) => make("li", {}, reason))) : make("p", { class: "note" }, "Never."));
}
