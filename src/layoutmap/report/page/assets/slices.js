// Which device holds which slice: integer arithmetic, the same as that of layoutmap.Layout.
//
// A mesh is the list of its sizes, a layout a list for each axis of the mesh dims over which it is sharded, major to minor.

const product = (numbers) => numbers.reduce((all, n) => all * n, 1);

/** The place in the grid of one device, row-major: the last mesh dim runs fastest. */
function coordsOf(sizes, device) {
  const coords = new Array(sizes.length);
  for (let i = sizes.length - 1; i >= 0; i--) {
    coords[i] = device % sizes[i];
    device = Math.floor(device / sizes[i]);
  }
  return coords;
}

/** The device at a place in the grid. */
const deviceAt = (sizes, coords) => coords.reduce((device, at, i) => device * sizes[i] + at, 0);

/** The number of shards along each axis. */
const shardCounts = (sizes, layout) => layout.map((dims) => product(dims.map((dim) => sizes[dim])));

/** Which shard one device holds: one number for each axis. */
function shardOffset(sizes, layout, device) {
  const coords = coordsOf(sizes, device);
  return layout.map((dims) => dims.reduce((number, dim) => number * sizes[dim] + coords[dim], 0));
}

/** From where to where along each axis a shard reaches. */
function slicesOf(counts, shape, offset) {
  return shape.map((n, axis) => [(n / counts[axis]) * offset[axis], (n / counts[axis]) * (offset[axis] + 1)]);
}

/** The number of a shard when all are counted row-major. */
const shardNumber = (counts, offset) => offset.reduce((number, at, axis) => number * counts[axis] + at, 0);

/** What a shard fixes of its devices: mesh dim -> place; the dims that are not in it are free. */
function placesOf(sizes, layout, offset) {
  const places = new Map();
  layout.forEach((dims, axis) => {
    let rest = offset[axis];
    for (const dim of [...dims].reverse()) {
      places.set(dim, rest % sizes[dim]);
      rest = Math.floor(rest / sizes[dim]);
    }
  });
  return places;
}

/** The devices that hold a shard, in mesh order. */
function devicesOf(sizes, layout, offset) {
  const places = placesOf(sizes, layout, offset);
  let found = [0];
  sizes.forEach((size, dim) => {
    const at = places.has(dim) ? [places.get(dim)] : [...Array(size).keys()];
    found = found.flatMap((device) => at.map((place) => device * size + place));
  });
  return found;
}

/** How much one step along each mesh dim adds to the number of the shard: numbers of all devices without their offsets. */
function shardWeights(sizes, layout) {
  const weights = sizes.map(() => 0);
  let weight = 1;
  for (const dims of [...layout].reverse()) {
    for (const dim of [...dims].reverse()) {
      weights[dim] = weight;
      weight *= sizes[dim];
    }
  }
  return weights;
}
