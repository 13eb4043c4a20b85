// What one device holds, by use, beside the whole model, and whether it fits a device of a size that the reader names.

const PRESETS = [16, 24, 40, 80, 96, 141, 192];

function memoryView(holder) {
  // What a step holds at its peak, where that was counted: gradients are among what it holds beside weights and slots.
  const { cost } = data;
  const peak = cost && { ...data.memory.device, gradients: 0, activations: cost.beside };
  const uses = [...Object.keys(data.memory.device), "activations"];
  const sum = (parts) => uses.reduce((all, use) => all + (parts[use] ?? 0), 0);
  const [device, model] = [sum(data.memory.device), sum(data.memory.model)];

  function bar(parts, scale, words) {
    const segments = uses.filter((use) => parts[use]).map((use) => {
      const segment = make("span", { class: `use ${use}`, title: `${use} ${sizeText(parts[use])}` });
      segment.style.width = `${(100 * parts[use]) / scale}%`;
      return segment;
    });
    return make("div", { class: "bar", role: "img", "aria-label": words }, segments);
  }
  const listed = (parts) => uses.filter((use) => parts[use]).map((use) => `${use} ${sizeText(parts[use])}`).join(", ") || "nothing";
  const line = (name, parts, scale) => make("div", { class: "bar-row" },
    make("span", { class: "bar-name" }, name),
    bar(parts, scale, `${name}: ${listed(parts)}`),
    make("span", { class: "bar-total" }, sizeText(sum(parts))));

  const unfit = variables.filter((v) => !v.fits).length;
  const share = model ? `${((100 * device) / model).toPrecision(2).replace(/\.0$/, "")} % of the whole model` : "nothing";
  const budget = make("input", { type: "number", id: "budget", min: "1", step: "any", value: cost ? `${Math.round((10 * cost.memory) / 2 ** 30) / 10}` : "80" });
  const presets = PRESETS.map((gib) => make("button", { type: "button", class: "chip", onclick: () => {
    budget.value = gib;
    tell();
  } }, `${gib}`));
  const verdict = make("p", { class: "readout", id: "verdict", "aria-live": "polite" });
  const fitting = make("div", { class: "fitting" });

  function tell() {
    const gib = Number(budget.value);
    presets.forEach((preset, i) => preset.setAttribute("aria-pressed", `${PRESETS[i] === gib}`));
    if (!(gib > 0)) {
      verdict.textContent = "Type how much memory a device has.";
      fitting.replaceChildren();
      return;
    }
    const has = gib * 2 ** 30;
    const needed = cost ? cost.peak : device;
    const fits = needed <= has;
    const scale = Math.max(has, needed);
    const limit = make("span", { class: "limit" });
    limit.style.left = `${(100 * has) / scale}%`;
    const left = bar(peak ?? data.memory.device, scale, `${sizeText(needed)} of ${gib} GiB`);
    left.append(limit);
    fitting.replaceChildren(left);
    verdict.replaceChildren(
      make("strong", { class: fits ? "well" : "bad" }, fits ? "It fits. " : "It does not fit. "),
      cost
        ? `${sizeText(needed)} of ${gib} GiB are taken at the peak of a step: ${sizeText(needed - cost.beside)} of weights, slots and state, and ${sizeText(cost.beside)} of activations, gradients, the batch and what is gathered.`
        : fits
          ? `${sizeText(device)} of ${gib} GiB are taken, and ${sizeText(has - device)} are left for activations, which are not counted here.`
          : `${sizeText(device)} are needed, ${sizeText(device - has)} more than ${gib} GiB, before any activations, which are not counted here.`);
  }
  budget.addEventListener("input", tell);

  holder.append(
    make("p", { class: "lead" },
      mesh.size === 1 ? "The only device holds " : `Axes divide evenly, so each of the ${countText(mesh.size)} devices holds the same: `,
      make("strong", {}, sizeText(device)), `, gradients among them: ${share}.`,
      unfit ? ` ${counted(unfit, "variable")} that ${unfit === 1 ? "does" : "do"} not fit ${unfit === 1 ? "its" : "their"} layout ${unfit === 1 ? "is" : "are"} not counted.` : ""),
    line("Whole model", data.memory.model, model),
    line(mesh.size === 1 ? "The device" : "Each device", data.memory.device, model),
    make("ul", { class: "legend" }, uses.filter((use) => data.memory.model[use]).map((use) =>
      make("li", {}, make("span", { class: `swatch use ${use}` }), `${use} ${sizeText(data.memory.device[use])}`))),
    make("h3", {}, "Does it fit?"),
    make("div", { class: "controls" }, make("label", {}, "A device has ", budget, " GiB"), make("span", { class: "chips", role: "group", "aria-label": "Usual sizes in GiB" }, presets)),
    fitting, verdict);
  tell();
}
