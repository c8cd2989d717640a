// The service from a page: events, pictures, settings. A service that is away is asked for again until it answers.
//
// Always true: at most one event stream is open, at most one request for a picture is under way, and a picture is asked
// for at most once in its interval. Times are the service's; this machine's clock only measures how long ago they came.

const RETRY_S = [0.5, 1, 2, 3, 5]; // a restart takes seconds; the last is repeated
const SILENT_S = 6; // the service speaks once a second: longer is a dead connection that looks alive
const INTERVAL_S = { timeline: 2, tail: 5, moments: 3, steps: 1, ratio: 3 };

const root = new URL(`${document.documentElement.dataset.root ?? "."}/`, document.baseURI);
const time = { at: null, since: 0 };

/** The address of a path of the service, below whatever prefix the page was loaded from. */
export const address = (path) => new URL(path, root).href;

/** The service's time in seconds since the epoch, or null before it said one. */
export const serviceNow = () => (time.at === null ? null : time.at + (performance.now() - time.since) / 1000);

/** The service said what time it is. */
export function setServiceTime(at) {
  Object.assign(time, { at, since: performance.now() });
}

/** JSON from the service; an Error with its sentence otherwise. */
export async function ask(path, options = {}) {
  const response = await fetch(address(path), { ...options, headers: { Accept: "application/json", ...options.headers } });
  const body = await response.json().catch(() => null);
  if (!response.ok) throw Object.assign(new Error(body?.detail ?? `the service answered ${response.status}`), { status: response.status });
  return body;
}

/** Changes live settings. */
export const patchSettings = (changes) =>
  ask("v1/settings", { method: "PATCH", body: JSON.stringify(changes), headers: { "Content-Type": "application/json" } });

/** Follows the service: `on` has status(status), changed(names), away(why, forSeconds) and back(). */
export function follow(on) {
  let [source, tries, spoke, awaySince, retry] = [null, 0, performance.now(), null, null];
  const lost = (why) => {
    source?.close();
    source = null;
    awaySince ??= performance.now();
    on.away(why, (performance.now() - awaySince) / 1000);
    clearTimeout(retry);
    retry = setTimeout(connect, 1000 * RETRY_S[Math.min(tries, RETRY_S.length - 1)]);
    tries += 1;
  };
  const connect = () => {
    spoke = performance.now();
    source = new EventSource(address("v1/events"));
    source.addEventListener("status", (event) => {
      spoke = performance.now();
      if (awaySince !== null || tries > 0) on.back();
      [awaySince, tries] = [null, 0];
      on.status(JSON.parse(event.data));
    });
    source.addEventListener("changed", (event) => on.changed(JSON.parse(event.data)));
    source.addEventListener("unavailable", (event) => {
      spoke = performance.now();
      awaySince ??= performance.now();
      on.away(JSON.parse(event.data), (performance.now() - awaySince) / 1000);
    });
    source.onerror = () => lost(null);
  };
  connect();
  setInterval(() => {
    if (source && performance.now() - spoke > 1000 * SILENT_S) lost("it has not spoken for some seconds");
    else if (awaySince !== null) on.away(null, (performance.now() - awaySince) / 1000);
  }, 1000);
}

/** Fetches pictures when they have changed; `draw` has a function for each name. */
export class Pictures {
  constructor(draw, onError) {
    this.draw = draw;
    this.onError = onError;
    this.wanted = new Set();
    this.asked = {};
    this.timer = null;
    this.busy = false;
  }

  /** These pictures have changed. While the page is hidden nothing is fetched. */
  want(names) {
    for (const name of names) if (this.draw[name]) this.wanted.add(name);
    this.plan();
  }

  plan() {
    if (this.timer !== null || this.busy || !this.wanted.size || document.hidden) return;
    const due = (name) => (this.asked[name] ?? -Infinity) + 1000 * (INTERVAL_S[name] ?? 1);
    const next = [...this.wanted].sort((a, b) => due(a) - due(b))[0];
    this.timer = setTimeout(() => { this.timer = null; this.fetch(next); }, Math.max(0, due(next) - performance.now()));
  }

  async fetch(name) {
    this.busy = true;
    this.wanted.delete(name);
    this.asked[name] = performance.now();
    try {
      this.draw[name](await ask(`v1/pictures/${name}`));
    } catch (error) {
      this.wanted.add(name);
      this.onError(name, error);
    }
    this.busy = false;
    this.plan();
  }
}
