// The engine's state: tiles of numbers and a curve of tokens per second.

const HISTORY = 120; // points of the curve, one a second

const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const share = (part, whole) => (whole > 0 ? `${short.format((100 * part) / whole)} %` : "–");
const bytes = (n) => (n >= 2 ** 30 ? `${short.format(n / 2 ** 30)} GiB` : `${short.format(n / 2 ** 20)} MiB`);

// The value that a share q of a histogram's observations does not exceed, as text.
function quantile(histogram, q) {
  const total = histogram.counts.reduce((a, b) => a + b, 0);
  if (total === 0) return "–";
  let seen = 0;
  for (let i = 0; i < histogram.counts.length; i++) {
    seen += histogram.counts[i];
    if (seen >= q * total) {
      return i < histogram.bounds.length ? `≤ ${seconds(histogram.bounds[i])}` : `> ${seconds(histogram.bounds.at(-1))}`;
    }
  }
  return "–";
}

function seconds(s) {
  return s < 1 ? `${short.format(1000 * s)} ms` : `${short.format(s)} s`;
}

export class Live {
  constructor(tiles, curve) {
    this.tiles = tiles;
    this.curve = curve;
    this.last = null;
    this.rates = [];
  }

  show(live) {
    const { stats, info } = live;
    const rates = this.ratesSince(live);
    this.rates.push(rates.generated);
    if (this.rates.length > HISTORY) this.rates.shift();
    this.draw();
    const drafted = stats.num_draft_tokens;
    this.tiles.replaceChildren(
      tile("generated", `${short.format(rates.generated)} tok/s`, `${number.format(stats.generation_tokens)} in all`),
      tile("prompts", `${short.format(rates.prompt)} tok/s`, `${number.format(stats.prompt_tokens)} in all`),
      tile("running", number.format(stats.num_running), `of ${info.num_seq_slots} places`),
      tile("waiting", number.format(stats.num_waiting), `${number.format(stats.num_preemptions)} preemptions`),
      tile("KV pages", share(stats.num_used_pages, info.num_pages),
        `${number.format(stats.num_cached_pages)} more cached, ${bytes(info.kv_cache_bytes)} in all`, stats.kv_cache_usage),
      tile("prefix hits", share(stats.prefix_hits, stats.prefix_queries),
        `${number.format(stats.cached_tokens)} tokens saved`,
        stats.prefix_queries ? stats.prefix_hits / stats.prefix_queries : 0),
      tile("drafts accepted", drafted ? share(stats.num_accepted_tokens, drafted) : "–", drafted ? `${number.format(drafted)} drafted` : "no drafting"),
      tile("first token, median", quantile(stats.time_to_first_token_s, 0.5), `95 %: ${quantile(stats.time_to_first_token_s, 0.95)}`),
      tile("step, median", quantile(stats.step_time_s, 0.5), `${number.format(stats.num_steps)} steps`),
      tile("calls mended", number.format(live.server.num_malformed), `in ${number.format(live.server.num_parsed)} chat answers`),
    );
  }

  ratesSince(live) {
    const last = this.last;
    this.last = live;
    const elapsed = last ? live.time - last.time : 0;
    if (elapsed <= 0) return { generated: 0, prompt: 0 };
    const rate = (name) => Math.max(0, live.stats[name] - last.stats[name]) / elapsed;
    return { generated: rate("generation_tokens"), prompt: rate("prompt_tokens") };
  }

  draw() {
    const canvas = this.curve;
    const width = (canvas.width = canvas.clientWidth * devicePixelRatio);
    const height = (canvas.height = canvas.clientHeight * devicePixelRatio);
    const top = Math.max(1, ...this.rates);
    const ink = getComputedStyle(canvas).color; // computed, as a canvas knows no light-dark()
    const pen = canvas.getContext("2d");
    const x = (i) => ((i + HISTORY - this.rates.length) / (HISTORY - 1)) * width;
    const y = (rate) => height - 4 - (rate / top) * (height - 24);
    pen.strokeStyle = ink;
    pen.lineWidth = 2 * devicePixelRatio;
    pen.beginPath();
    this.rates.forEach((rate, i) => (i ? pen.lineTo(x(i), y(rate)) : pen.moveTo(x(i), y(rate))));
    pen.stroke();
    pen.fillStyle = ink;
    pen.font = `${11 * devicePixelRatio}px system-ui`;
    pen.fillText(`${short.format(top)} tok/s`, 6 * devicePixelRatio, 14 * devicePixelRatio);
  }
}

function tile(name, value, more, filled = null) {
  const made = element("div", "tile");
  made.append(element("div", "name", name), element("div", "value", value), element("div", "more", more));
  if (filled !== null) {
    const bar = element("div", "bar");
    const inner = element("i");
    inner.style.width = `${Math.min(100, 100 * filled)}%`;
    bar.append(inner);
    made.append(bar);
  }
  return made;
}

export function element(kind, name = "", text = "") {
  const made = document.createElement(kind);
  made.className = name;
  made.textContent = text;
  return made;
}
