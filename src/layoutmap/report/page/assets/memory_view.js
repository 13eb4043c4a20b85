// What one device holds, by use, beside the whole model; and what a device of a size that the reader names would hold.

const PRESETS = [16, 24, 40, 80, 96, 141, 192];

function memoryView(holder) {
  // What a step holds at its peak, where that was counted: gradients are among what it holds beside weights and slots.
  const { cost, verdict } = data;
  const held = cost ? { ...data.memory.device, gradients: 0, activations: cost.beside } : data.memory.device;
  const uses = [...Object.keys(data.memory.device), "activations"];
  const sum = (parts) => uses.reduce((all, use) => all + (parts[use] ?? 0), 0);
  const { needed } = verdict;

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
  const budget = make("input", { type: "number", id: "budget", min: "1", step: "any", value: verdict.available ? `${Number((verdict.available / 2 ** 30).toPrecision(3))}` : "" });
  const presets = PRESETS.map((gib) => make("button", { type: "button", class: "chip", onclick: () => {
    budget.value = gib;
    tell();
  } }, `${gib}`));
  const answer = make("p", { class: "readout", id: "what-if", "aria-live": "polite" });
  const fitting = make("div", { class: "fitting" });

  function tell() {
    const gib = Number(budget.value);
    presets.forEach((preset, i) => preset.setAttribute("aria-pressed", `${PRESETS[i] === gib}`));
    if (!(gib > 0)) {
      answer.textContent = "Type how much memory a device has.";
      fitting.replaceChildren();
      return;
    }
    const has = gib * 2 ** 30;
    const scale = Math.max(has, needed);
    const limit = make("span", { class: "limit" });
    limit.style.left = `${(100 * has) / scale}%`;
    const filled = bar(held, scale, `${sizeText(needed)} of ${gib} GiB`);
    filled.append(limit);
    fitting.replaceChildren(filled);
    const rest = [cost ? "" : "activations", verdict.so_far ? "what is not planned yet" : ""].filter(Boolean).join(" and ");
    answer.textContent = needed > has
      ? `Of ${gib} GiB, ${sizeText(needed - has)} are missing${rest && `, before ${rest}`}.`
      : `Of ${gib} GiB, ${sizeText(has - needed)} would be left${rest && ` for ${rest}`}.`;
  }
  budget.addEventListener("input", tell);

  holder.append(
    make("p", { class: "lead" },
      mesh.size === 1 ? "The device holds " : `Each of the ${countText(mesh.size)} devices holds `,
      make("strong", {}, sizeText(needed)), verdict.so_far ? " so far" : "", cost
        ? ` ${verdict.moment}: activations, gradients, the batch and what is gathered are counted.`
        : `, gradients among them, ${verdict.moment}, which are not counted here.`,
      data.memory.host.all ? ` ${sizeText(data.memory.host.all)} more are in the host's memory for each of them.` : "",
      unfit ? ` ${counted(unfit, "variable")} that ${unfit === 1 ? "does" : "do"} not fit ${unfit === 1 ? "its" : "their"} layout ${unfit === 1 ? "is" : "are"} not counted.` : ""),
    line("Whole model", data.memory.model, Math.max(sum(data.memory.model), needed)),
    line(mesh.size === 1 ? "The device" : "Each device", held, Math.max(sum(data.memory.model), needed)),
    make("ul", { class: "legend" }, uses.filter((use) => held[use]).map((use) =>
      make("li", {}, make("span", { class: `swatch use ${use}` }), `${use} ${sizeText(held[use])}`))),
    make("h3", {}, "On a device of another size"),
    make("div", { class: "controls" }, make("label", {}, "A device has ", budget, " GiB"), make("span", { class: "chips", role: "group", "aria-label": "Usual sizes in GiB" }, presets)),
    fitting, answer);
  tell();
}
