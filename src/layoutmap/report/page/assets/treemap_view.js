// Every variable as a tile as large as its bytes, inside the tiles of the modules that hold it.

const NUM_HUES = 6;

/** The ways in which variables are sharded, those with the most bytes first, each with the name of its colour. */
function waysOf(all) {
  const ways = new Map();
  for (const v of all) ways.set(v.how, (ways.get(v.how) ?? 0) + v.bytes);
  const sorted = [...ways].sort((a, b) => b[1] - a[1]).map(([how]) => how);
  const sharded = sorted.filter((how) => how.startsWith("sharded"));
  return new Map(sorted.map((how) => [how, how === "replicated" ? "neutral" : how === "does not fit" ? "bad-fill" : `hue-${sharded.indexOf(how) % NUM_HUES}`]));
}

/** Variables by the parts of their paths, each tile some that are alike; a module that holds only one other is one with it. */
function treeOf(groups) {
  const root = { name: "all", children: new Map(), parent: null };
  for (const group of groups) {
    const model = group[0].model;
    let node = root;
    // The dots in `blocks.{0..31}` part nothing.
    const parts = mergedPath(group.map((v) => v.path)).split(/\.(?![^{}]*\})/);
    for (const part of [...(severalModels && model ? [model] : []), ...parts]) {
      if (!node.children.has(part)) node.children.set(part, { name: part, children: new Map(), parent: node });
      node = node.children.get(part);
    }
    // A variable under whose path there are more has a tile beside theirs.
    node.children.set(` ${node.children.size}`, { name: node.name, children: new Map(), parent: node, group });
  }
  return joined(root);
}

function joined(node) {
  let children = [...node.children.values()].map(joined);
  while (children.length === 1 && !node.group && node.parent) {
    const [only] = children;
    if (only.group) return { ...only, name: only.name === node.name ? node.name : `${node.name}.${only.name}`, parent: node.parent };
    node = { ...only, name: `${node.name}.${only.name}`, parent: node.parent };
    children = only.children;
  }
  const made = { name: node.name, group: node.group ?? null, children, parent: node.parent };
  for (const child of children) child.parent = made;
  return made;
}

function treemapView(holder) {
  const blocks = blocksOf(variables);
  let together = blocks.length < variables.length;
  let root = null;
  const ways = waysOf(variables);
  let zoomed = null;
  let ofModel = false;
  let tiles = [];
  let heads = [];
  let hovered = null; // what the tile under the pointer is of
  let cursor = -1;

  const crumbs = make("nav", { class: "crumbs", "aria-label": "Modules" });
  const readout = make("p", { class: "readout", id: "treemap-readout", "aria-live": "polite" });
  const modes = [["Bytes on a device", false], ["Bytes of the whole model", true]].map(([text, value]) =>
    make("button", { type: "button", class: "chip", "aria-pressed": `${value === ofModel}`, onclick: () => {
      ofModel = value;
      modes.forEach((mode, i) => mode.setAttribute("aria-pressed", `${(i === 1) === ofModel}`));
      weigh(root);
      show();
    } }, text));
  const joining = make("input", { type: "checkbox", checked: together, onchange: () => {
    together = joining.checked;
    grow();
  } });
  const view = drawnCanvas(
    { id: "treemap-canvas", role: "application", "aria-describedby": "treemap-readout",
      "aria-label": "A treemap of bytes. Arrow keys go from tile to tile, Enter chooses the variable, Z zooms into its module, Escape zooms out. The table below has the same variables." },
    (width) => Math.min(460, Math.max(280, width * 0.5)), draw);
  const { canvas } = view;

  const bytesOf = (group) => group.reduce((sum, v) => sum + (ofModel ? v.bytes : v.deviceBytes ?? 0), 0);

  /** The tree anew: each variable for itself, or repeated blocks together. */
  function grow() {
    root = treeOf(together ? blocks : variables.map((v) => [v]));
    weigh(root);
    zoom(root);
  }

  function weigh(node) {
    node.weight = node.group ? bytesOf(node.group) : node.children.reduce((sum, child) => sum + weigh(child), 0);
    return node.weight;
  }

  function place(node, x, y, width, height, depth) {
    if (node.group) {
      tiles.push({ group: node.group, v: node.group[0], name: node.name, x, y, width, height });
      return;
    }
    const headed = depth > 0 && width >= 54 && height >= 34;
    const [edge, top] = depth === 0 ? [0, 0] : headed ? [2, 16] : width > 14 && height > 14 ? [1, 1] : [0, 0];
    if (depth > 0) heads.push({ node, x, y, width, height: headed ? 16 : 0, all: height, depth });
    squarify(node.children, x + edge, y + top, width - 2 * edge, height - top - edge, (child, ...box) => place(child, ...box, depth + 1));
  }

  function draw(context, width, height) {
    [tiles, heads] = [[], []];
    if (zoomed.group) place(zoomed, 0, 0, width, height, 1);
    else if (zoomed.weight) place(zoomed, 0, 0, width, height, 0);
    const fills = new Map([...ways].map(([how, name]) => [how, colour(name)]));
    const inks = new Map([...fills].map(([how, fill]) => [how, inkOn(fill.match(/\d+/g).map(Number))]));
    const ground = colour("panel");
    for (const head of heads) {
      context.fillStyle = colour(head.depth % 2 ? "group" : "group-2");
      context.fillRect(head.x, head.y, head.width - 1, head.all - 1);
    }
    context.fillStyle = colour("ink");
    for (const head of heads) if (head.height) fittedText(context, head.node.name, head.x + 4, head.y + 12, head.width - 8);
    for (const { group, v, name, x, y, width: w, height: h } of tiles) {
      const [gapX, gapY] = [w > 3 ? 1 : 0, h > 3 ? 1 : 0];
      context.fillStyle = fills.get(v.how);
      context.fillRect(x, y, w - gapX, h - gapY);
      if (v.uneven) hatch(context, x, y, w - gapX, h - gapY, inks.get(v.how));
      if (w > 40 && h > 17) {
        if (v.uneven) {
          context.fillStyle = fills.get(v.how);
          context.fillRect(x + 2, y + 3, Math.min(w - 6, context.measureText(name).width + 6), 15);
        }
        context.fillStyle = inks.get(v.how);
        fittedText(context, name, x + 5, y + 14, w - 10);
        if (h > 34 && w > 60) fittedText(context, sizeText(bytesOf(group)), x + 5, y + 29, w - 10);
      }
    }
    const ring = (tile, ink, thick) => {
      if (!tile) return;
      context.lineWidth = thick + 2;
      context.strokeStyle = ground;
      context.strokeRect(tile.x, tile.y, tile.width - 1, tile.height - 1);
      context.lineWidth = thick;
      context.strokeStyle = ink;
      context.strokeRect(tile.x, tile.y, tile.width - 1, tile.height - 1);
    };
    ring(tiles.find(({ group }) => group === hovered), colour("ink"), 1);
    if (document.activeElement === canvas) ring(tiles[cursor], colour("accent"), 2);
    ring(tileOf(chosen.variable), colour("mark"), 3);
  }

  const tileOf = (v) => tiles.find(({ group }) => group.includes(v));

  function tell(group) {
    if (!group?.[0]) {
      readout.replaceChildren("Choose a tile to see its slices, or the name of a module to zoom in.");
      return;
    }
    const [v] = group;
    const sum = (of) => sizeText(group.reduce((bytes, each) => bytes + of(each), 0));
    readout.replaceChildren(
      make("code", {}, group.length > 1 ? mergedPath(group.map((each) => each.name)) : v.name),
      ` ${group.length > 1 ? `${countText(group.length)} of ` : ""}${shapeText(v.shape)}, ${v.how}, ${v.fits ? `${sum((each) => each.deviceBytes)} per device, of ` : ""}${sum((each) => each.bytes)}`);
  }

  const choose = ({ group, v }) => chooseVariable(group.includes(chosen.variable) ? chosen.variable : v, "treemap");

  function show() {
    const line = [];
    for (let node = zoomed; node; node = node.parent) line.unshift(node);
    crumbs.replaceChildren(...line.flatMap((node, i) => [
      i ? make("span", { "aria-hidden": "true" }, "›") : null,
      i === line.length - 1
        ? make("span", { "aria-current": "true" }, node === root ? `All ${counted(variables.length, "variable")}` : node.name)
        : make("button", { type: "button", class: "link", onclick: () => zoom(node) }, node === root ? "All" : node.name),
      i === line.length - 1 ? make("span", { class: "note" }, sizeText(node.weight)) : null,
    ]).filter(Boolean));
    cursor = -1;
    view.ask();
  }

  function zoom(node) {
    zoomed = node ?? root;
    show();
  }

  const inside = (box, x, y, height) => x >= box.x && x < box.x + box.width && y >= box.y && y < box.y + height;
  const tileAt = ([x, y]) => tiles.find((tile) => inside(tile, x, y, tile.height));
  const headAt = ([x, y]) => heads.findLast((head) => inside(head, x, y, head.all));

  canvas.addEventListener("pointermove", (event) => {
    const point = pointOn(canvas, event);
    const tile = tileAt(point);
    const head = tile ? null : headAt(point);
    canvas.style.cursor = head ? "zoom-in" : "pointer";
    if (tile && tile.group === hovered) return;
    hovered = tile?.group ?? null;
    if (head) readout.textContent = `${head.node.name}: ${sizeText(head.node.weight)}. Click to zoom in.`;
    else tell(hovered ?? [chosen.variable]);
    view.ask();
  });
  canvas.addEventListener("pointerleave", () => {
    hovered = null;
    tell([chosen.variable]);
    view.ask();
  });
  canvas.addEventListener("click", (event) => {
    const point = pointOn(canvas, event);
    const tile = tileAt(point);
    if (tile) choose(tile);
    else if (headAt(point)) zoom(headAt(point).node);
  });
  canvas.addEventListener("focus", view.ask);
  canvas.addEventListener("blur", view.ask);
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step && tiles.length) {
      cursor = cursor < 0 ? Math.max(0, tiles.indexOf(tileOf(chosen.variable))) : (cursor + step + tiles.length) % tiles.length;
      tell(tiles[cursor].group);
      view.ask();
    } else if (event.key === "Enter" && tiles[cursor]) choose(tiles[cursor]);
    else if (event.key.toLowerCase() === "z") {
      const tile = tiles[cursor] ?? tileOf(chosen.variable);
      const of = tile && heads.find((head) => inside(head, tile.x + tile.width / 2, tile.y + tile.height / 2, head.all));
      if (of) zoom(of.node);
    } else if (event.key === "Escape" || event.key === "Backspace") zoom(zoomed.parent);
    else return;
    event.preventDefault();
  });

  const legend = make("ul", { class: "legend" }, [...ways].map(([how, name]) => {
    const swatch = make("span", { class: `swatch${how === "does not fit" ? " striped" : ""}` });
    swatch.style.backgroundColor = `var(--${name})`;
    return make("li", {}, swatch, how);
  }));
  if (variables.some((v) => v.uneven && v.fits)) legend.append(make("li", {}, make("span", { class: "swatch striped" }), "striped: uneven, so not sharded as its rule says"));
  holder.append(make("div", { class: "controls" }, make("span", { class: "chips", role: "group", "aria-label": "What a tile is as large as" }, modes), make("label", { class: "check" }, joining, " Repeated blocks in one tile")), crumbs, view.holder, readout, legend);
  grow();
  onChosen(() => {
    tell([chosen.variable]);
    view.ask();
  });
}
