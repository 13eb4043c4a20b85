// A treemap of squarish tiles, after Bruls, Huizing and van Wijk, "Squarified Treemaps" (2000).

/** Rectangles for items with a `weight`, the largest first; calls `place(item, x, y, width, height)` for each. */
function squarify(items, x, y, width, height, place) {
  const sorted = items.filter((item) => item.weight > 0).sort((a, b) => b.weight - a.weight);
  let left = sorted.reduce((sum, item) => sum + item.weight, 0);
  for (let start = 0; start < sorted.length; ) {
    const side = Math.min(width, height);
    const scale = (width * height) / left; // area of a unit of weight
    let sum = 0;
    let best = Infinity;
    let end = start;
    // A row takes the next item for as long as that makes its worst tile squarer.
    for (; end < sorted.length; end++) {
      const grown = sum + sorted[end].weight;
      const thick = (grown * scale) / side;
      const worst = Math.max(aspect(sorted[start].weight * scale, thick), aspect(sorted[end].weight * scale, thick));
      if (end > start && worst > best) break;
      [sum, best] = [grown, worst];
    }
    const thick = (sum * scale) / side;
    let at = 0;
    for (const item of sorted.slice(start, end)) {
      const long = (side * item.weight) / sum;
      if (width >= height) place(item, x, y + at, thick, long);
      else place(item, x + at, y, long, thick);
      at += long;
    }
    if (width >= height) [x, width] = [x + thick, width - thick];
    else [y, height] = [y + thick, height - thick];
    left -= sum;
    start = end;
  }
}

const aspect = (area, thick) => Math.max((thick * thick) / area, area / (thick * thick));
