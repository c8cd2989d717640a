// The live page: the service's events and pictures into the sections.

import { byId, el, fill, setText } from "./dom.js";
import { NOTHING, clock, count, duration, number } from "./format.js";
import { Pictures, address, ask, follow, patchSettings, serviceNow, setServiceTime } from "./live.js";
import { drawLedger, drawMoments, drawRounds, drawSteps, drawTail } from "./pictures.js";
import { drawRatio, drawSettings, listenToRatio } from "./ratio.js";
import { drawStatus } from "./status.js";
import { drawTimeline } from "./timeline.js";

const NAMES = ["timeline", "tail", "moments", "steps", "ratio"];
const MAX_GROUPS = 30; // of the newest: a list is for reading

const groupAddress = (group) => address(`dashboard/groups/${encodeURIComponent(group)}`);

const pictures = new Pictures({
  timeline: (picture) => {
    setServiceTime(picture.now);
    drawTimeline(picture, groupAddress);
    drawRounds(picture);
    drawGroups(picture);
  },
  tail: drawTail,
  moments: drawMoments,
  steps: drawSteps,
  ratio: drawRatio,
}, (name, error) => {
  if (error.status === 401) globalThis.location.href = address("dashboard/login");
});

let audited = null; // live settings as the list of changes was last fetched for

function onStatus(status) {
  drawStatus(status, serviceNow());
  drawLedger(status.ledger, status.ledger_error);
  const live = JSON.stringify([status.service_epoch, status.settings, status.autotune?.mode]);
  if (live === audited) return;
  audited = live;
  ask("v1/settings").then(drawSettings).catch(() => { audited = null; });
}

function drawGroups(timeline) {
  const groups = new Map();
  for (const [sample, group, prompt, reward, failed, attempts] of timeline.samples) {
    const found = groups.get(group) ?? { group, prompt, samples: 0, running: 0, rewards: [], failed: 0, versions: new Set(), began: Infinity };
    groups.set(group, found);
    found.samples += 1;
    if (reward !== null) found.rewards.push(reward);
    if (failed !== null) found.failed += 1;
    const last = attempts[attempts.length - 1];
    if (last && last[4] === "running") found.running += 1;
    for (const attempt of attempts) for (const segment of attempt[7]) found.versions.add(segment[0]);
    if (attempts.length) found.began = Math.min(found.began, attempts[0][2]);
  }
  const newest = [...groups.values()].sort((a, b) => b.began - a.began).slice(0, MAX_GROUPS);
  const columns = [{ label: "Group" }, { label: "Prompt" }, { label: "Began" }, { label: "Samples", numeric: true }, { label: "Running", numeric: true }, { label: "Failed", numeric: true }, { label: "Mean reward", numeric: true }, { label: "Versions", numeric: true }];
  fill(byId("groups-table"), columns, newest.map((g) => [
    el("a", { href: groupAddress(g.group) }, g.group), g.prompt, clock(g.began), count(g.samples), count(g.running), count(g.failed),
    g.rewards.length ? number(g.rewards.reduce((a, b) => a + b, 0) / g.rewards.length) : NOTHING, [...g.versions].sort((a, b) => a - b).join(", ") || NOTHING,
  ]), "No group yet.");
}

function setAway(why, forSeconds) {
  document.body.classList.add("away");
  byId("link").dataset.link = "away";
  setText(byId("link-text"), "away");
  const banner = byId("away");
  banner.hidden = false;
  setText(banner, `The service has been away for ${duration(Math.floor(forSeconds))}${why ? `: ${why}` : ""}. What is shown is from before; the page goes on by itself when it is back.`);
}

function setBack() {
  document.body.classList.remove("away");
  byId("away").hidden = true;
}

follow({
  status: (status) => {
    byId("link").dataset.link = "live";
    setText(byId("link-text"), "live");
    setBack();
    onStatus(status);
  },
  changed: (names) => pictures.want(names),
  away: setAway,
  back: () => {
    setBack();
    pictures.want(NAMES);
  },
});
pictures.want(NAMES);
document.addEventListener("visibilitychange", () => pictures.plan());
listenToRatio(patchSettings);
