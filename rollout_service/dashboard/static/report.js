// The report of a run: the pictures of the live page from data that is in the file.

import { byId } from "./dom.js";
import { drawMoments, drawRounds, drawSteps, drawTail } from "./pictures.js";
import { drawRatio } from "./ratio.js";
import { drawTimeline } from "./timeline.js";
import { drawVerdict } from "./verdict.js";

const report = JSON.parse(byId("report-data").textContent);
drawVerdict(report.verdict);
drawTimeline(report.timeline, null);
drawRounds(report.timeline);
drawTail(report.tail);
drawMoments(report.moments);
drawSteps(report.steps);
if (report.ratio) drawRatio(report.ratio);
document.querySelector('[data-timeline="all"]').click();
document.querySelector('[data-timeline="follow"]').hidden = true; // nothing new will come
