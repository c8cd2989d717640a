// The page of a group: each response token by token, tinted by version or by log-prob.

import { colour, el, onTheme, setText } from "./dom.js";
import { number } from "./format.js";

const NUM_VERSION_TINTS = 10;
const LOWEST_LOGPROB = -5; // e⁻⁵ is 0.7 %: what is rarer is as red as it gets
const DEEPEST_ALPHA = 128; // of 255: text on it keeps a contrast of 4.5 in both themes
const responses = [];

function tint(token, by) {
  if (by === "version") return `${colour(`v${token.version % NUM_VERSION_TINTS}`)}66`;
  if (by === "logprob" && token.logprob !== null) {
    const depth = Math.min(1, token.logprob / LOWEST_LOGPROB);
    return `${colour("c6")}${Math.round(DEEPEST_ALPHA * depth).toString(16).padStart(2, "0")}`;
  }
  return "transparent";
}

function say(response, i) {
  const token = response.tokens[i];
  response.spans[response.at]?.classList.remove("at");
  response.at = i;
  response.spans[i].classList.add("at");
  setText(response.readout, `token ${i + 1} of ${response.tokens.length}: ${JSON.stringify(token.text)}, id ${token.id}, version ${token.version}, log-prob ${number(token.logprob)}, probability ${number(Math.exp(token.logprob))}`);
}

function build(pre) {
  const data = JSON.parse(pre.parentElement.querySelector(".token-data").textContent);
  const tokens = data.ids.map((id, i) => ({ id, text: data.texts[i], version: data.versions[i], logprob: data.logprobs[i] }));
  const spans = tokens.map((token, i) => el("span", { class: "t", "data-i": String(i) }, token.text));
  pre.replaceChildren(...spans);
  const response = { tokens, spans, at: -1, readout: pre.parentElement.querySelector(".readout") };
  responses.push(response);
  pre.addEventListener("pointerover", (event) => {
    const i = event.target.dataset?.i;
    if (i !== undefined) say(response, Number(i));
  });
  pre.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    say(response, Math.max(0, Math.min(tokens.length - 1, response.at + step)));
    spans[response.at].scrollIntoView({ block: "nearest" });
  });
}

function paint() {
  const by = document.querySelector('input[name="tint"]:checked').value;
  for (const { tokens, spans } of responses) tokens.forEach((token, i) => { spans[i].style.backgroundColor = tint(token, by); });
  const mark = (background, label) => {
    const swatch = el("i", { class: "swatch" });
    swatch.style.background = background;
    return el("span", {}, swatch, label);
  };
  const versions = [...new Set(responses.flatMap((r) => r.tokens.map((t) => t.version)))].sort((a, b) => a - b);
  document.getElementById("token-legend").replaceChildren(...(by === "version" ? versions.map((v) => mark(tint({ version: v }, by), `version ${v}`))
    : by === "logprob" ? [0, -1, -3, LOWEST_LOGPROB].map((p) => mark(tint({ logprob: p }, by), p === LOWEST_LOGPROB ? `${p} and less` : String(p))) : []));
}

for (const pre of document.querySelectorAll("pre.tokens")) build(pre);
if (responses.length) {
  document.getElementById("tint").hidden = false;
  document.getElementById("tint").addEventListener("change", paint);
  onTheme(paint);
  paint();
}
