// The mesh as a grid: one dim across, one down, each combination of the others a tile of its own; long rows are folded.

const GAP = 7;
const LABEL = 13;

/** The most of `n` that `room` takes, in equal parts where that does not halve it. */
function evenPart(n, room) {
  if (n <= room) return n;
  for (let part = room; part > room / 2; part--) if (n % part === 0) return part;
  return Math.ceil(n / Math.ceil(n / room));
}

/** The tiles of a mesh in a width: for each the place, the device of its first cell, and its rows and columns. */
function meshTiles(sizes, down, across, width, mostHeight) {
  const size = (dim) => (dim === null ? 1 : sizes[dim]);
  const stride = (dim) => (dim === null ? 0 : product(sizes.slice(dim + 1)));
  const others = sizes.map((_, dim) => dim).filter((dim) => dim !== down && dim !== across);
  const numTiles = product(others.map(size));
  const [numRows, numColumns] = [size(down), size(across)];
  const placed = (cell) => {
    const columns = evenPart(numColumns, Math.max(1, Math.floor(width / cell)));
    const folds = Math.ceil(numColumns / columns);
    const labelled = folds > 1 || numTiles > 1;
    const high = numRows * cell + (labelled ? LABEL : 0) + GAP;
    const most = Math.max(1, Math.floor((width + GAP) / (columns * cell + GAP)));
    const abreast = Math.ceil((numTiles * folds) / Math.ceil((numTiles * folds) / most));
    return { folds, columns, labelled, high, abreast, height: Math.ceil((numTiles * folds) / abreast) * high - GAP };
  };
  let cell = 26;
  while (cell > 5 && (placed(cell).height > mostHeight || (placed(cell).folds > 1 && cell > 14))) cell--;
  const { folds, columns, labelled, high, abreast, height } = placed(cell);
  const tiles = [];
  for (let number = 0; number < numTiles; number++) {
    const coords = coordsOf(others.map(size), number);
    const first = others.reduce((device, dim, i) => device + coords[i] * stride(dim), 0);
    for (let fold = 0; fold < folds; fold++) {
      const from = fold * columns;
      const to = Math.min(numColumns, from + columns);
      const words = others.map((dim, i) => `${mesh.names[dim]}=${coords[i]}`);
      if (folds > 1) words.push(`${mesh.names[across]} ${from} to ${to - 1}`);
      const x = (tiles.length % abreast) * (columns * cell + GAP);
      const y = Math.floor(tiles.length / abreast) * high + (labelled ? LABEL : 0);
      tiles.push({ x, y, first: first + from * stride(across), columns: to - from, label: words.join(", ") });
    }
  }
  return { tiles, cell, height, rows: numRows, rowStride: stride(down), columnStride: stride(across), labelled };
}

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
    placed = meshTiles(mesh.sizes, down, across, width - 3, 300);
    return placed.height;
  }, draw);
  const { canvas } = view;

  const cells = (visit) => {
    for (const tile of placed.tiles)
      for (let row = 0; row < placed.rows; row++)
        for (let column = 0; column < tile.columns; column++)
          visit(tile.first + row * placed.rowStride + column * placed.columnStride, tile.x + column * placed.cell, tile.y + row * placed.cell);
  };

  function draw(context) {
    const v = chosen.variable;
    const cut = v?.fits ? v.layout.cut : [];
    const weights = shardWeights(mesh.sizes, cut);
    const total = product(v?.fits ? v.layout.counts : []);
    const lit = v?.fits && chosen.offset ? shardNumber(v.layout.counts, chosen.offset) : null;
    const plain = colour("neutral");
    const side = placed.cell - (placed.cell > 6 ? 2 : 1);
    const fills = new Map();
    context.fillStyle = colour("muted");
    for (const tile of placed.tiles) if (placed.labelled) context.fillText(tile.label, tile.x, tile.y - 4);
    context.textAlign = "center";
    context.textBaseline = "middle";
    cells((device, x, y) => {
      const shard = coordsOf(mesh.sizes, device).reduce((sum, at, dim) => sum + at * weights[dim], 0);
      const dim = lit !== null && shard !== lit;
      const key = dim ? -1 - shard : shard;
      if (!fills.has(key)) fills.set(key, total > 1 ? rgb(rampColour(shard, total), dim ? 0.22 : 1) : plain);
      context.fillStyle = fills.get(key);
      context.fillRect(x, y, side, side);
      if (placed.cell >= 22 && mesh.size <= 1000) {
        context.fillStyle = total > 1 && !dim ? inkOn(rampColour(shard, total)) : colour("ink");
        context.fillText(device, x + side / 2, y + side / 2 + 0.5);
      }
    });
    const ring = (device, ink, out) => cells((at, x, y) => {
      if (at !== device) return;
      context.strokeStyle = ink;
      context.lineWidth = 2;
      context.strokeRect(x - out, y - out, side + 2 * out, side + 2 * out);
    });
    if (document.activeElement === canvas) ring(cursor, colour("accent"), 1);
    if (hovered !== null) ring(hovered, colour("muted"), 1);
    if (chosen.device !== null) ring(chosen.device, colour("mark"), 1);
  }

  function tell(device) {
    const name = mesh.devices?.[device];
    readout.textContent = device === null
      ? `${counted(mesh.size, "device")}; ${down === null ? "one row" : `${mesh.names[down]} goes down, ${mesh.names[across]} across`}.`
      : `Device ${device}: ${deviceWords(device) || "the only one"}${name ? `, ${name}` : ""}`;
  }

  function deviceUnder(event) {
    const [px, py] = pointOn(canvas, event);
    for (const tile of placed?.tiles ?? []) {
      const [column, row] = [Math.floor((px - tile.x) / placed.cell), Math.floor((py - tile.y) / placed.cell)];
      if (column >= 0 && column < tile.columns && row >= 0 && row < placed.rows)
        return tile.first + row * placed.rowStride + column * placed.columnStride;
    }
    return null;
  }

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
