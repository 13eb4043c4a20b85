// The mesh: which device holds which slice of the chosen variable; a device is chosen by pointer, by keys or by number.

const deviceWords = (device) => coordsOf(mesh.sizes, device).map((at, dim) => `${mesh.names[dim]}=${at}`).join(", ");

function meshView(holder) {
  const bySize = mesh.sizes.map((_, dim) => dim).sort((a, b) => mesh.sizes[b] - mesh.sizes[a]);
  let [across = null, down = null] = bySize;
  let placed = null;
  let cursor = chosen.device ?? 0;
  let hovered = null;

  const readout = make("p", { class: "readout", id: "mesh-readout", "aria-live": "polite" });
  const number = make("input", { type: "number", id: "device", min: "0", max: `${mesh.size - 1}`, placeholder: "none" });
  const words = `A mesh of ${data.mesh.dims.map(([name, size]) => `${name}=${size}`).join(", ")}: ${counted(mesh.size, "device")}. ` +
    "Arrow keys go from device to device, page up and down from tile to tile, Enter chooses one, Escape none.";
  const view = drawnCanvas({ id: "mesh-canvas", role: "application", "aria-label": words, "aria-describedby": "mesh-readout" }, (width) => {
    placed = new MeshTiles(mesh, down, across, width - 3, 300);
    return placed.height;
  }, draw);
  const { canvas } = view;

  function draw(context) {
    const v = chosen.variable;
    // The number of a device's slice is a sum over its coordinates; nothing is asked of each device.
    const weights = shardWeights(mesh.sizes, v?.fits ? v.layout.specs : []);
    const [byRow, byColumn] = [down, across].map((dim) => (dim === null ? 0 : weights[dim]));
    const total = product(v?.fits ? v.layout.counts : []);
    const lit = v?.fits && chosen.offset ? shardNumber(v.layout.counts, chosen.offset) : null;
    const { cell } = placed;
    const side = cell - (cell > 6 ? 2 : 1);
    const numbered = cell >= 22 && mesh.size <= 1000;
    context.fillStyle = colour("muted");
    for (const { words, x, y, columns } of placed.tiles) if (words) fittedText(context, words, x, y - 4, Math.max(placed.pitch, columns * cell));
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const tile of placed.tiles) {
      const base = coordsOf(mesh.sizes, tile.first).reduce((sum, at, dim) => sum + at * weights[dim], 0);
      for (let row = 0; row < placed.rows; row++) {
        for (let column = 0; column < tile.columns; column++) {
          const shard = base + row * byRow + column * byColumn;
          const { fill, ink } = sliceFill(shard, total, lit !== null && shard !== lit);
          const [x, y] = [tile.x + column * cell, tile.y + row * cell];
          context.fillStyle = fill;
          context.fillRect(x, y, side, side);
          if (!numbered) continue;
          context.fillStyle = ink;
          context.fillText(tile.first + row * placed.rowStride + column * placed.columnStride, x + side / 2, y + side / 2 + 0.5);
        }
      }
    }
    const ring = (device, ink) => {
      const [x, y] = placed.placeOf(device);
      context.strokeStyle = colour(ink);
      context.lineWidth = 2;
      context.strokeRect(x - 1, y - 1, side + 2, side + 2);
    };
    if (document.activeElement === canvas) ring(cursor, "accent");
    if (hovered !== null) ring(hovered, "muted");
    if (chosen.device !== null) ring(chosen.device, "mark");
  }

  function tell(device) {
    const name = mesh.devices?.[device];
    readout.textContent = device === null
      ? `${counted(mesh.size, "device")}${down === null ? "" : `; ${mesh.names[down]} goes down, ${mesh.names[across]} across`}. The colours are those of the slices.`
      : `Device ${device}: ${deviceWords(device) || "the only one"}${name ? `, ${name}` : ""}`;
  }

  const deviceUnder = (event) => placed?.deviceAt(...pointOn(canvas, event)) ?? null;
  const hover = (device) => {
    if (device === hovered) return;
    hovered = device;
    tell(device ?? chosen.device);
    view.ask();
  };
  canvas.addEventListener("pointermove", (event) => hover(deviceUnder(event)));
  canvas.addEventListener("pointerleave", () => hover(null));
  canvas.addEventListener("click", (event) => {
    const device = deviceUnder(event);
    if (device !== null) chooseDevice(device === chosen.device ? null : device);
  });
  canvas.addEventListener("focus", view.ask);
  canvas.addEventListener("blur", view.ask);
  canvas.addEventListener("keydown", (event) => {
    const others = bySize.filter((dim) => dim !== down && dim !== across);
    const steps = { ArrowRight: [across, 1], ArrowLeft: [across, -1], ArrowDown: [down, 1], ArrowUp: [down, -1], PageDown: [others[0], 1], PageUp: [others[0], -1] };
    if (event.key in steps) {
      const [dim, step] = steps[event.key];
      const coords = coordsOf(mesh.sizes, cursor);
      if (dim !== null && dim !== undefined) coords[dim] = Math.min(mesh.sizes[dim] - 1, Math.max(0, coords[dim] + step));
      cursor = deviceAt(mesh.sizes, coords);
      tell(cursor);
      view.ask();
    } else if (event.key === "Enter" || event.key === " ") chooseDevice(cursor);
    else if (event.key === "Escape") chooseDevice(null);
    else return;
    event.preventDefault();
  });
  number.addEventListener("change", () => {
    const device = number.value === "" ? null : Math.min(mesh.size - 1, Math.max(0, Math.trunc(Number(number.value))));
    chooseDevice(device);
  });

  const controls = make("div", { class: "controls" }, make("label", {}, "Device ", number));
  if (mesh.sizes.length > 1) {
    const pick = (label, get, set) => {
      const select = make("select", {}, mesh.names.map((name, dim) => make("option", { value: `${dim}` }, name)));
      select.value = `${get()}`;
      select.addEventListener("change", () => {
        set(Number(select.value));
        selects.forEach(([each, read]) => (each.value = `${read()}`));
        tell(chosen.device);
        view.ask();
      });
      controls.append(make("label", {}, label, select));
      return [select, get];
    };
    // A dim that is asked for and is the other one already changes places with it.
    const selects = [
      pick("Down ", () => down, (dim) => ([down, across] = [dim, dim === across ? down : across])),
      pick("Across ", () => across, (dim) => ([across, down] = [dim, dim === down ? across : down])),
    ];
  }
  holder.append(controls, view.holder, readout);
  onChosen(() => {
    if (chosen.device !== null) cursor = chosen.device;
    number.value = chosen.device ?? "";
    tell(chosen.device);
    view.ask();
  });
}
