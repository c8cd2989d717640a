// Paints bars into pixels. Writing pixels costs the same whatever the number of bars per pixel, which 2D calls do not.

import { PARKED, SEGMENT, firstAfter } from "./timeline_layout.js";

const WIDE = 24; // pixels: from here on fill() is quicker than a loop; with everything in view most bars are a few
const SPACED_FROM = 4; // rows at least this high, in pixels, are set apart by one

/** #rgb… as a pixel of an ImageData on a little-endian machine. */
export function pixelOf(hex) {
  const [r, g, b] = [1, 3, 5].map((i) => Number.parseInt(hex.slice(i, i + 2), 16));
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

/**
 * Paints what lies in `view` {from, to, top, row}: times, first lane (may be a fraction), height of a lane in pixels.
 * Lanes that share a row of pixels are merged: the first is drawn. In a lane, what ends in a column that is painted
 * already is passed over. `colours`: {ground, parked, waiting, versions}.
 */
export function paintBars(model, view, pixels, width, height, colours) {
  pixels.fill(colours.ground);
  const scale = width / (view.to - view.from);
  const first = Math.max(0, Math.floor(view.top));
  const last = Math.min(model.lanes, Math.ceil(view.top + height / view.row));
  let painted = -1;
  for (let lane = first; lane < last; lane += 1) {
    const y0 = Math.max(0, Math.floor((lane - view.top) * view.row));
    if (y0 === painted) continue;
    painted = y0;
    const bottom = Math.floor((lane + 1 - view.top) * view.row) - (view.row >= SPACED_FROM ? 1 : 0);
    paintLane(model, lane, view, pixels, width, y0, Math.min(height, Math.max(y0 + 1, bottom)), scale, colours);
  }
}

function paintLane(model, lane, view, pixels, width, y0, y1, scale, colours) {
  const { starts, ends, kinds, versions } = model;
  const end = model.offsets[lane + 1];
  const thin = Math.max(1, Math.round((y1 - y0) / 5));
  const thinTop = ((y0 + y1) >> 1) - (thin >> 1);
  let column = 0;
  for (let bar = firstAfter(model, lane, view.from); bar < end && starts[bar] < view.to; bar += 1) {
    const x1 = Math.min(width, Math.max(1, Math.ceil((ends[bar] - view.from) * scale)));
    if (x1 <= column) continue;
    const x0 = Math.max(column, Math.floor((starts[bar] - view.from) * scale));
    column = x1;
    const kind = kinds[bar];
    const colour = kind === SEGMENT ? colours.versions[versions[bar] % colours.versions.length] : kind === PARKED ? colours.parked : colours.waiting;
    const top = kind === PARKED ? thinTop : y0;
    const bottom = kind === PARKED ? Math.min(y1, thinTop + thin) : y1;
    for (let y = top; y < bottom; y += 1) {
      const last = y * width + x1;
      if (x1 - x0 > WIDE) pixels.fill(colour, y * width + x0, last);
      else for (let at = y * width + x0; at < last; at += 1) pixels[at] = colour;
    }
  }
}
