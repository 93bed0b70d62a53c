// Wires the page together: asks for the state once a second, for the experts every five.

import { get, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { HeatMap } from "./heat.js";
import { Live } from "./live.js";

const STATE_MS = 1000;
const EXPERTS_MS = 5000;

const $ = (id) => document.getElementById(id);
const live = new Live($("tiles"), $("rate"));
const heat = new HeatMap($("experts"), $("experts-note"), $("experts-hint"));
const chat = new Chat($("log"), () => ({
  thinking: $("thinking").checked,
  tools: $("tools").checked,
  limit: Math.max(1, Number($("limit").value) || 1),
}));

function showState(name, text) {
  $("state").dataset.state = name;
  $("state").textContent = text;
}

function failed(error) {
  $("key-form").hidden = error.status !== 401;
  if (error.status === undefined) showState("unreachable", "the server does not answer");
  else showState(error.status === 503 ? "loading" : "unreachable", error.message);
}

// Hidden tabs ask for nothing.
function every(milliseconds, work) {
  const round = async () => {
    try {
      if (!document.hidden) await work();
    } catch (error) {
      failed(error);
    }
    setTimeout(round, milliseconds);
  };
  round();
}

every(STATE_MS, async () => {
  const state = await get("live");
  $("key-form").hidden = true;
  if (!state.info || !state.stats) {
    showState(state.state, `${state.state} (${state.stage}, ${Math.round(100 * state.progress)} %)`);
    return;
  }
  $("model").textContent = `${state.models[0]} · ${state.info.max_model_len.toLocaleString("en")} tokens · experts ${state.info.precision} · v${state.version}`;
  if (state.silent_s) showState("late", `the engine has been silent for ${Math.round(state.silent_s)} s`);
  else if (state.late_step) showState("late", `a step takes too long: ${state.late_step}`);
  else showState(state.state, state.state);
  live.show(state);
});

every(EXPERTS_MS, async () => heat.show(await get("moe/stats")));

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value);
  $("key").value = "";
});

async function send() {
  const text = $("text").value.trim();
  if (!text || !$("stop").disabled) return;
  $("text").value = "";
  $("send").disabled = true;
  $("stop").disabled = false;
  await chat.ask(text);
  $("send").disabled = false;
  $("stop").disabled = true;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
$("stop").addEventListener("click", () => chat.stop());
$("clear").addEventListener("click", () => chat.clear());
