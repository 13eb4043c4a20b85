// Numbers and lists as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

function sizeText(bytes) {
  let unit = 0;
  for (; bytes >= 1024 && unit < UNITS.length - 1; unit++) bytes /= 1024;
  return unit ? `${bytes.toFixed(1)} ${UNITS[unit]}` : `${bytes} B`;
}

const countText = (n) => n.toLocaleString("en-US");
const counted = (n, noun) => `${countText(n)} ${noun}${n === 1 ? "" : "s"}`;
const shapeText = (shape) => shape.map((n) => countText(n)).join(" × ") || "scalar";
const slicesText = (slices) => (slices.length ? `[${slices.map(([a, b]) => `${a}:${b}`).join(", ")}]` : "all of it: a scalar has no axes");
const offsetText = (offset) => (offset.length === 1 ? `${offset[0]}` : `(${offset.join(", ")})`);

/** Devices in few words: `0 to 7`, `0, 4, 8 .. 4092 (1,024 of them)`. */
function devicesText(devices) {
  const n = devices.length;
  if (n === 1) return `device ${devices[0]}`;
  const step = devices[1] - devices[0];
  const even = devices.every((device, i) => device === devices[0] + i * step);
  if (even && step === 1 && n > 2) return `devices ${devices[0]} to ${devices[n - 1]}${n > 8 ? ` (${countText(n)} of them)` : ""}`;
  if (n <= 8) return `devices ${devices.join(", ")}`;
  return `devices ${devices.slice(0, 3).join(", ")} .. ${devices[n - 1]} (${countText(n)} of them)`;
}

const ranges = (numbers) => {
  const sorted = [...new Set(numbers)].sort((a, b) => a - b);
  if (sorted.length === 1) return `${sorted[0]}`;
  const runs = [];
  for (const n of sorted) {
    if (runs.length && runs.at(-1)[1] === n - 1) runs.at(-1)[1] = n;
    else runs.push([n, n]);
  }
  return `{${runs.map(([from, to]) => (from === to ? from : `${from}..${to}`)).join(",")}}`;
};

/** Paths that differ only in numbers, as one: `blocks.{0..31}.kernel`. */
function mergedPath(paths) {
  const columns = paths.map((path) => path.match(/\d+/g) ?? []);
  let column = 0;
  return paths[0].replace(/\d+/g, () => {
    const texts = [...new Set(columns.map((numbers) => numbers[column]))];
    column++;
    if (texts.length === 1) return texts[0];
    return texts.some((text) => text.length > 15) ? `{${texts.join(",")}}` : ranges(texts.map(Number));
  });
}

/** What is made of tags, attributes and text; text is never read as markup. */
function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && typeof value !== "string") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

const byId = (id) => document.getElementById(id);

/** A path that may be broken after each dot. */
const pathNode = (path) => make("code", { class: "path" }, path.split(/(?<=[._])/).flatMap((part) => [part, make("wbr")]));
