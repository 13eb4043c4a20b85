// The mesh as a grid on a page: where each device's cell lies.
//
// One mesh dim goes across, one down, and each combination of the others is a tile of its own; long rows are folded.

const GAP = 7;
const LABEL = 13;

/** The most of `n` that `room` takes, in equal parts where that does not halve it. */
function evenPart(n, room) {
  if (n <= room) return n;
  for (let part = room; part > room / 2; part--) if (n % part === 0) return part;
  return Math.ceil(n / Math.ceil(n / room));
}

/** The tiles of a mesh in a width; `down` or `across` is null where the mesh has no such dim. */
class MeshTiles {
  constructor({ names, sizes }, down, across, width, mostHeight) {
    this.sizes = sizes;
    const size = (dim) => (dim === null ? 1 : sizes[dim]);
    const stride = (dim) => (dim === null ? 0 : product(sizes.slice(dim + 1)));
    Object.assign(this, { down, across, rows: size(down), numColumns: size(across), rowStride: stride(down), columnStride: stride(across) });
    this.others = sizes.map((_, dim) => dim).filter((dim) => dim !== down && dim !== across);
    this.numTiles = product(this.others.map(size));
    // What stands above a tile, in a letter's usual width.
    this.wordsWidth = 6.2 * this.others.reduce((letters, dim) => letters + names[dim].length + `${sizes[dim] - 1}`.length + 3, 0);
    const fits = (cell) => {
      this.#fold(width, cell);
      return this.height <= mostHeight && (this.folds === 1 || cell <= 14);
    };
    let cell = 26;
    while (cell > 5 && !fits(cell)) cell--;
    // Where it is too high in any case, the cells are as large as these folds allow.
    const folds = this.folds;
    while (cell < 8 && Math.floor(width / (cell + 1)) >= this.columns) cell++;
    this.#fold(width, cell);
    if (this.folds !== folds) this.#fold(width, 5);
    this.tiles = [...Array(this.numTiles * this.folds).keys()].map((number) => {
      const coords = coordsOf(this.others.map(size), Math.floor(number / this.folds));
      const from = (number % this.folds) * this.columns;
      const columns = Math.min(this.columns, this.numColumns - from);
      const words = this.others.map((dim, i) => `${names[dim]}=${coords[i]}`);
      if (this.folds > 1) words.push(`${names[across]} ${from} to ${from + columns - 1}`);
      return {
        x: (number % this.abreast) * (this.pitch + GAP),
        y: Math.floor(number / this.abreast) * this.high + this.label,
        first: this.others.reduce((device, dim, i) => device + coords[i] * stride(dim), from * this.columnStride),
        columns,
        words: words.join(", "),
      };
    });
  }

  /** How the tiles lie if a cell is so large. */
  #fold(width, cell) {
    this.cell = cell;
    this.columns = evenPart(this.numColumns, Math.max(1, Math.floor(width / this.cell)));
    this.folds = Math.ceil(this.numColumns / this.columns);
    const count = this.numTiles * this.folds;
    this.label = count > 1 ? LABEL : 0;
    this.high = this.rows * this.cell + this.label + GAP;
    this.pitch = Math.min(width, Math.max(this.columns * cell, count > 1 && this.folds === 1 ? this.wordsWidth : 0));
    const most = Math.max(1, Math.floor((width + GAP) / (this.pitch + GAP)));
    this.abreast = Math.ceil(count / Math.ceil(count / most));
    this.height = Math.ceil(count / this.abreast) * this.high - GAP;
  }

  /** Where a device's cell lies. */
  placeOf(device) {
    const coords = coordsOf(this.sizes, device);
    const [row, column] = [this.down, this.across].map((dim) => (dim === null ? 0 : coords[dim]));
    const tile = deviceAt(this.others.map((dim) => this.sizes[dim]), this.others.map((dim) => coords[dim]));
    const { x, y } = this.tiles[tile * this.folds + Math.floor(column / this.columns)];
    return [x + (column % this.columns) * this.cell, y + row * this.cell];
  }

  /** The device whose cell is at a point; null: none. */
  deviceAt(x, y) {
    for (const tile of this.tiles) {
      const [column, row] = [Math.floor((x - tile.x) / this.cell), Math.floor((y - tile.y) / this.cell)];
      if (column >= 0 && column < tile.columns && row >= 0 && row < this.rows)
        return tile.first + row * this.rowStride + column * this.columnStride;
    }
    return null;
  }
}
