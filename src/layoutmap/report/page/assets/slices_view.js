// The chosen variable as its slices: a strip for one axis, a grid for two; of more axes two are drawn, the others stepped.

function axisText(v, axis) {
  const [n, count] = [v.shape[axis], v.layout.counts[axis]];
  const dims = v.layout.specs[axis].map((dim) => mesh.names[dim]);
  if (count === 1) return `axis ${axis}: ${countText(n)}, unsharded`;
  const over = dims.length > 1 ? `${dims.join(", then ")}` : dims[0];
  return `axis ${axis}: ${countText(n)} over ${over}, ${countText(count)} shards of ${countText(n / count)}`;
}

/** What a slice fixes of its devices, in words. */
function holdersText(v, offset) {
  const places = [...placesOf(mesh.sizes, v.layout.specs, offset)].filter(([dim]) => mesh.sizes[dim] > 1);
  if (!places.length) return "every device";
  places.sort(([a], [b]) => a - b);
  return `${product(v.layout.counts) === mesh.size ? "the device" : "every device"} with ${places.map(([dim, at]) => `${mesh.names[dim]}=${at}`).join(", ")}`;
}

function slicesView(holder) {
  const controls = make("div", { class: "controls" });
  const legend = make("p", { class: "note", id: "slices-legend" });
  const readout = make("p", { class: "readout", id: "slices-readout", "aria-live": "polite" });
  let drawn = null; // the variable
  let axes = []; // the one drawn down, the one drawn across; null where there is none
  let fixed = []; // the shard shown of each axis that is not drawn

  const inputs = new Map(); // axis -> the input for its shard

  const rank = () => drawn?.shape.length ?? 0;
  const count = (axis) => (axis === null ? 1 : drawn.layout.counts[axis]);
  const view = drawnCanvas(
    { id: "slices-canvas", role: "application", "aria-describedby": "slices-readout" },
    (width) => {
      if (!drawn || rank() < 2) return 56;
      const [down, across] = axes.map((axis) => Math.max(1, drawn.shape[axis]));
      return Math.min(Math.max((width * down) / across, 72), width, 200);
    },
    draw,
  );
  const { canvas } = view;

  function offsetOf(row, column) {
    const offset = [...fixed];
    if (axes[0] !== null) offset[axes[0]] = row;
    if (axes[1] !== null) offset[axes[1]] = column;
    return offset;
  }

  function draw(context, width, height) {
    if (!drawn?.fits) return;
    const [rows, columns] = axes.map(count);
    const [wide, high] = [width / columns, height / rows];
    const total = product(drawn.layout.counts);
    const lit = chosen.offset && shardNumber(drawn.layout.counts, chosen.offset);
    const [gapX, gapY] = [wide > 4 ? 2 : 0, high > 4 ? 2 : 0];
    context.textAlign = "center";
    context.textBaseline = "middle";
    // Of slices that are thinner than the screen can show one is drawn for several.
    const [stepRow, stepColumn] = [high, wide].map((side) => Math.max(1, Math.floor(1 / side)));
    for (let row = 0; row < rows; row += stepRow) {
      for (let column = 0; column < columns; column += stepColumn) {
        const offset = offsetOf(row, column);
        const number = shardNumber(drawn.layout.counts, offset);
        const { fill, ink } = sliceFill(number, total, chosen.offset !== null && number !== lit);
        context.fillStyle = fill;
        context.fillRect(column * wide, row * high, wide * stepColumn - gapX, high * stepRow - gapY);
        if (high < 15 || wide < 15) continue;
        const text = total > 1 ? offsetText(offset) : "all of it";
        if (context.measureText(text).width < wide - 6) {
          context.fillStyle = ink;
          context.fillText(text, (column + 0.5) * wide - gapX / 2, (row + 0.5) * high);
        }
      }
    }
    if (chosen.offset) {
      const [row, column] = axes.map((axis) => (axis === null ? 0 : chosen.offset[axis]));
      context.strokeStyle = colour("mark");
      context.lineWidth = 2;
      context.strokeRect(column * wide + 1, row * high + 1, Math.max(3, wide - gapX - 2), Math.max(3, high - gapY - 2));
    }
  }

  function tell() {
    const v = drawn;
    if (!v) return "Choose a variable in the table or the treemap.";
    if (!v.fits) return "It does not fit its layout, so it has no slices; its problems say why.";
    const total = product(v.layout.counts);
    const each = mesh.size / total;
    if (!chosen.offset) {
      if (total === 1) return mesh.size === 1 ? "The only device holds all of it." : `Each of the ${countText(mesh.size)} devices holds all of it. Choose one below.`;
      return `${counted(total, "slice")} of ${sizeText(v.deviceBytes)}, each held by ${counted(each, "device")}. Choose a slice, or a device below.`;
    }
    const where = slicesText(slicesOf(v.layout.counts, v.shape, chosen.offset));
    if (total === 1 && chosen.device === null) return `${mesh.size === 1 ? "The only device" : "Every device"} holds ${where}.`;
    if (chosen.device !== null) {
      const others = each > 1 ? ` So do ${counted(each - 1, "other")}: ${holdersText(v, chosen.offset)}.` : "";
      return `Device ${chosen.device} (${deviceWords(chosen.device) || "the only one"}) holds ${where}.${others}`;
    }
    return `Slice ${offsetText(chosen.offset)} is ${where}, held by ${devicesText(devicesOf(mesh.sizes, v.layout.specs, chosen.offset))}: ${holdersText(v, chosen.offset)}.`;
  }

  function choose(offset) {
    if (drawn?.fits) chooseOffset(offset);
  }

  canvas.addEventListener("click", (event) => {
    if (!drawn?.fits) return;
    const [x, y] = pointOn(canvas, event);
    const [rows, columns] = axes.map(count);
    const row = Math.min(rows - 1, Math.floor((y / canvas.clientHeight) * rows));
    const column = Math.min(columns - 1, Math.floor((x / canvas.clientWidth) * columns));
    choose(offsetOf(Math.max(0, row), Math.max(0, column)));
  });
  canvas.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: [1, 1], ArrowLeft: [1, -1], ArrowDown: [0, 1], ArrowUp: [0, -1] };
    if (event.key === "Escape") choose(null);
    else if (event.key in steps && drawn?.fits) {
      const [which, step] = steps[event.key];
      const offset = [...(chosen.offset ?? offsetOf(0, 0))];
      const axis = axes[which];
      if (axis !== null && chosen.offset) offset[axis] = Math.min(count(axis) - 1, Math.max(0, offset[axis] + step));
      choose(offset);
    } else return;
    event.preventDefault();
  });

  /** The axes to draw of many: those of most shards, then the longest, in their order. */
  function usualAxes(v) {
    const axisOrder = v.shape.map((_, axis) => axis).sort((a, b) => v.layout.counts[b] - v.layout.counts[a] || v.shape[b] - v.shape[a]);
    const two = axisOrder.slice(0, 2).sort((a, b) => a - b);
    return two.length === 2 ? two : [null, two[0] ?? null];
  }

  function controlsOf(v) {
    controls.replaceChildren();
    inputs.clear();
    if (!v?.fits || v.shape.length < 3) return;
    for (const [which, label] of [[0, "Down "], [1, "Across "]]) {
      const select = make("select", { id: `slices-axis-${which}` }, v.shape.map((n, axis) => make("option", { value: `${axis}` }, `axis ${axis} (${countText(n)})`)));
      select.value = `${axes[which]}`;
      select.addEventListener("change", () => {
        const axis = Number(select.value);
        if (axes[1 - which] === axis) axes[1 - which] = axes[which];
        axes[which] = axis;
        controlsOf(v);
        byId(select.id).focus();
        tellLegend(v);
        view.ask();
      });
      controls.append(make("label", {}, label, select));
    }
    v.shape.forEach((_, axis) => {
      if (axes.includes(axis) || count(axis) === 1) return;
      const input = make("input", { type: "number", min: "0", max: `${count(axis) - 1}`, value: `${fixed[axis]}` });
      inputs.set(axis, input);
      input.addEventListener("change", () => {
        fixed[axis] = Math.min(count(axis) - 1, Math.max(0, Math.trunc(Number(input.value))));
        if (chosen.offset) choose(chosen.offset.map((at, i) => (i === axis ? fixed[axis] : at)));
        view.ask();
      });
      controls.append(make("label", {}, `Shard along axis ${axis}, 0 to ${count(axis) - 1} `, input));
    });
  }

  function tellLegend(v) {
    const ways = v?.shape.length > 1 ? new Map([[axes[0], "down, "], [axes[1], "across, "]]) : new Map();
    legend.replaceChildren(...(v?.fits ? v.shape.map((_, axis) => make("span", {}, `${ways.get(axis) ?? ""}${axisText(v, axis)}`)) : []));
  }

  holder.append(controls, legend, view.holder, readout);
  onChosen(() => {
    const v = chosen.variable;
    if (v !== drawn) {
      drawn = v;
      axes = v ? usualAxes(v) : [];
      fixed = v ? v.shape.map(() => 0) : [];
      controlsOf(v);
      tellLegend(v);
    }
    if (chosen.offset) fixed = [...chosen.offset];
    for (const [axis, input] of inputs) input.value = `${fixed[axis]}`;
    view.holder.hidden = !v?.fits;
    canvas.setAttribute("aria-label", v?.fits ? `The slices of ${v.path}. Arrow keys go from slice to slice, Escape chooses none.` : "No slices");
    readout.textContent = tell();
    view.ask();
  });
}
