// From samples to bars in lanes. A sample keeps one lane from its first stay in an engine to its last; lanes are reused.
//
// Always true: the bars of a lane follow each other in time and don't overlap, so what is visible is found by bisection.

export const SEGMENT = 0;
export const PARKED = 1;
export const WAITING = 2;

const [WORKER, ROUND, START, END, HOW, BEFORE, WAITED, SEGMENTS] = [0, 1, 2, 3, 4, 5, 6, 7];

/** A sample of the timeline picture with names instead of places. */
export function readSample([sample, group, prompt, reward, failed, attempts]) {
  return { sample, group, prompt, reward, failed, attempts: attempts.map((a) => ({
    worker: a[WORKER], round: a[ROUND], start: a[START], end: a[END], how: a[HOW], before: a[BEFORE], waited: a[WAITED],
    segments: a[SEGMENTS].map(([version, tokens, start, end]) => ({ version, tokens, start, end })),
  })) };
}

/**
 * Bars of all samples: {samples, laneOf, lanes, offsets, starts, ends, kinds, versions, owners, from, to}. Bar i of lane
 * l has offsets[l] ≤ i < offsets[l + 1]. A time that runs backwards, of a clock that jumped, becomes a bar of no length.
 */
export function layOut(picture) {
  const samples = picture.samples.filter((s) => s[5].length > 0).sort((a, b) => a[5][0][START] - b[5][0][START]);
  const lanes = [];
  const laneOf = new Int32Array(samples.length);
  const busy = new Heap((a, b) => a[0] - b[0]);
  const free = new Heap((a, b) => a - b);
  let [from, to, total] = [Infinity, -Infinity, 0];
  samples.forEach((sample, owner) => {
    const bars = barsOf(sample, picture.now);
    const [begin, end] = [bars[0][0], bars[bars.length - 1][1]];
    while (busy.size && busy.least[0] <= begin) free.push(busy.pop()[1]);
    const lane = free.size ? free.pop() : lanes.push([]) - 1;
    laneOf[owner] = lane;
    for (const bar of bars) lanes[lane].push(bar, owner);
    busy.push([end, lane]);
    [from, to, total] = [Math.min(from, begin), Math.max(to, end), total + bars.length];
  });
  return { ...flatten(lanes, total), samples, laneOf, lanes: lanes.length, from, to };
}

/** [start, end, kind, version] of one sample, in order. */
function barsOf(sample, now) {
  const bars = [];
  let at = sample[5][0][START];
  const add = (end, kind, version) => {
    const stop = Math.max(at, end);
    if (stop > at || kind === SEGMENT) bars.push([at, stop, kind, version]);
    at = stop;
  };
  sample[5].forEach((attempt, i) => {
    if (i > 0) add(attempt[START], PARKED, -1);
    const segments = attempt[SEGMENTS];
    const end = attempt[HOW] === "running" ? Math.max(now, attempt[END]) : attempt[END];
    add(segments.length ? segments[0][2] : end, WAITING, -1);
    segments.forEach((segment, k) => add(k + 1 < segments.length ? segments[k + 1][2] : end, SEGMENT, segment[0]));
  });
  if (sample[5][sample[5].length - 1][HOW] === "parked" && sample[4] === null) add(now, PARKED, -1);
  return bars.length ? bars : [[at, at, WAITING, -1]];
}

function flatten(lanes, total) {
  const flat = {
    offsets: new Int32Array(lanes.length + 1), starts: new Float64Array(total), ends: new Float64Array(total),
    kinds: new Uint8Array(total), versions: new Int32Array(total), owners: new Int32Array(total),
  };
  let i = 0;
  lanes.forEach((bars, lane) => {
    for (let k = 0; k < bars.length; k += 2, i += 1) {
      [flat.starts[i], flat.ends[i], flat.kinds[i], flat.versions[i]] = bars[k];
      flat.owners[i] = bars[k + 1];
    }
    flat.offsets[lane + 1] = i;
  });
  return flat;
}

/** The first bar of a lane that ends after `at`. */
export function firstAfter(model, lane, at) {
  let [low, high] = [model.offsets[lane], model.offsets[lane + 1]];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (model.ends[middle] > at) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** The sample at a time in a lane, or -1; `slack`: seconds beside a bar that still count as it where there is none. */
export function sampleAt(model, lane, at, slack) {
  if (lane < 0 || lane >= model.lanes) return -1;
  const end = model.offsets[lane + 1];
  const under = firstAfter(model, lane, at);
  if (under < end && model.starts[under] <= at) return model.owners[under];
  const beside = firstAfter(model, lane, at - slack);
  return beside < end && model.starts[beside] <= at + slack ? model.owners[beside] : -1;
}

class Heap {
  constructor(compare) {
    this.items = [];
    this.compare = compare;
  }
  get size() { return this.items.length; }
  get least() { return this.items[0]; }
  push(item) {
    const { items, compare } = this;
    let i = items.push(item) - 1;
    while (i > 0) {
      const parent = (i - 1) >> 1;
      if (compare(items[parent], items[i]) <= 0) break;
      [items[parent], items[i]] = [items[i], items[parent]];
      i = parent;
    }
  }
  pop() {
    const { items, compare } = this;
    const top = items[0];
    const last = items.pop();
    if (items.length) {
      items[0] = last;
      for (let i = 0; ;) {
        let least = i;
        for (const child of [2 * i + 1, 2 * i + 2]) if (child < items.length && compare(items[child], items[least]) < 0) least = child;
        if (least === i) break;
        [items[least], items[i]] = [items[i], items[least]];
        i = least;
      }
    }
    return top;
  }
}
