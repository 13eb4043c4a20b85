// Canvases in the page's colours: sharp on any screen, drawn anew when the width or the colours change.

const redraws = [];

const colours = new Map(); // to ask the style sheet each time would take longer than to draw

/** The colour that a property of the style sheet has now. */
function colour(name) {
  if (colours.has(name)) return colours.get(name);
  const probe = byId("colour-probe") ?? document.body.appendChild(make("span", { id: "colour-probe", hidden: true }));
  probe.style.color = `var(--${name})`;
  colours.set(name, getComputedStyle(probe).color);
  return colours.get(name);
}

/** A canvas in a holder, which `draw(context, width)` fills; `height(width)` says how high it is. */
function drawnCanvas(attributes, height, draw) {
  const canvas = make("canvas", { tabindex: "0", ...attributes });
  const holder = make("div", { class: "drawn" }, canvas);
  let pending = false;
  let last = 0; // the width that it was drawn in
  const redraw = () => {
    pending = false;
    const width = holder.clientWidth;
    last = width;
    if (!width) return;
    const high = Math.max(1, Math.round(height(width)));
    const ratio = Math.min(window.devicePixelRatio || 1, 16000 / high);
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(high * ratio);
    canvas.style.height = `${high}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = getComputedStyle(canvas).font;
    draw(context, width, high);
  };
  const ask = () => {
    if (pending) return;
    pending = true;
    requestAnimationFrame(redraw);
  };
  redraws.push(ask);
  new ResizeObserver(() => {
    if (holder.clientWidth !== last) ask();
  }).observe(holder);
  return { holder, canvas, ask };
}

function redrawAll() {
  colours.clear();
  fills.clear();
  for (const ask of redraws) ask();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);

/** Where on a canvas a pointer is. */
function pointOn(canvas, event) {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

// From dark to light, so that the order shows without its hues.
const RAMP = [[43, 74, 120], [47, 113, 150], [66, 153, 157], [126, 189, 150], [196, 211, 144], [233, 216, 150]];

/** A colour for number `i` of `n` that are in order; a few lie closer together than many. */
function rampColour(i, n) {
  const spread = Math.min(1, 0.25 + n / 8);
  const at = ((1 - spread) * 0.4 + (n > 1 ? (i / (n - 1)) * spread : 0)) * (RAMP.length - 1);
  const low = Math.min(Math.floor(at), RAMP.length - 2);
  return RAMP[low].map((from, c) => Math.round(from + (RAMP[low + 1][c] - from) * (at - low)));
}


/** White or nearly black, whichever stands out more from a colour: by WCAG's relative luminance. */
function inkOn(parts) {
  const [r, g, b] = parts.map((part) => (part <= 10 ? part / 3295 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * r + 0.7152 * g + 0.0722 * b;
  return 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.06 ? "#ffffff" : "#101a24";
}

const MOST_FILLS = 256; // more can nobody tell apart
const fills = new Map();

/** What slice `i` of `n` is filled with, and the colour of letters on it; `faint` beside one that is chosen. */
function sliceFill(i, n, faint) {
  if (n === 1) return { fill: colour("neutral"), ink: colour("ink") };
  const [at, of] = n > MOST_FILLS ? [Math.round((i / (n - 1)) * (MOST_FILLS - 1)), MOST_FILLS] : [i, n];
  const key = (of * MOST_FILLS + at) * 2 + faint;
  if (!fills.has(key)) {
    const parts = rampColour(at, of);
    fills.set(key, { fill: `rgb(${parts.join(" ")} / ${faint ? 0.25 : 1})`, ink: faint ? colour("ink") : inkOn(parts) });
  }
  return fills.get(key);
}

/** Stripes over a rectangle: the mark of what does not fit, beside its colour. */
function hatch(context, x, y, width, height, ink) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = ink;
  context.lineWidth = 1;
  context.beginPath();
  for (let at = -height; at < width; at += 6) {
    context.moveTo(x + at, y + height);
    context.lineTo(x + at + height, y);
  }
  context.stroke();
  context.restore();
}

/** Text that is shortened to fit a width; nothing where none of it fits. */
function fittedText(context, text, x, y, width) {
  if (context.measureText(text).width > width) {
    let low = 0;
    for (let high = text.length; low < high; ) {
      const middle = Math.ceil((low + high) / 2);
      if (context.measureText(`${text.slice(0, middle)}…`).width > width) high = middle - 1;
      else low = middle;
    }
    if (low < 3) return;
    text = `${text.slice(0, low)}…`;
  }
  context.fillText(text, x, y);
}
