// What the time of a round goes to: colours and names, the same wherever causes are drawn.

/** Colour of each cause, in the order in which they are drawn. */
export const CAUSE_COLOURS = {
  generating: "c0", tail: "c1", rewards: "c3", trainer: "c7", weight_sync: "c2", lag: "c5", caps: "c4", cut: "v8", redis: "c6", engines: "v9", paused: "parked",
};

/** What a cause is called where people read it. */
export const causeText = (cause) => CAUSE_TEXTS[cause] ?? cause.replaceAll("_", " ");

const CAUSE_TEXTS = {
  tail: "waiting for the tail", rewards: "waiting for scores", trainer: "waiting for the trainer", weight_sync: "weight sync", lag: "held by max_lag", caps: "buffer full",
  cut: "cut and offer", redis: "waiting for Redis", engines: "no engine",
};
