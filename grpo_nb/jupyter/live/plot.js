// Rows and panels of a run on canvases. The kernel describes each panel (grpo_nb/plots/marks.py) and sends rows as
// numbers; smoothing and scales are computed here. view.js, which follows in the same module, puts them on the page.

const LONG = 30; // as plots/canvas.py
const PAD = { left: 50, right: 10, top: 8, bottom: 34 };
const HEIGHT = 200; // as view.css
const DASH = { solid: [], dashed: [6, 3], dotted: [1.5, 2.5] };
const DARK = {
  ink: "#E6EDF3", muted: "#9BA5B0", faint: "#6B747E", grid: "#30363D", alarm: "#FF8C82", paper: "#161B22",
};

// Rows

/** The rows of a run: those that stay, and the newest ones behind them, which the next message replaces. */
class Rows {
  constructor() {
    this.generation = 0;
    this.columns = [];
    this.kept = 0;
    this.steps = [];
    this.values = new Map();
  }

  /** Takes a message in; whether it follows on what is here. */
  add(message, buffers) {
    const { generation, first, kept, columns = this.columns } = message;
    if (message.kind === "all") {
      const values = new Map(columns.map((key) => [key, []]));
      Object.assign(this, { generation, columns, values, kept: 0, steps: [] });
    } else if (generation !== this.generation || first !== this.kept) {
      return false;
    }
    const steps = new Float64Array(aligned(buffers[0])), values = new Float32Array(aligned(buffers[1]));
    this.steps.length = this.kept;
    this.steps.push(...steps);
    this.columns.forEach((key, place) => {
      const column = this.values.get(key);
      column.length = this.kept;
      column.push(...values.subarray(place * steps.length, (place + 1) * steps.length));
    });
    this.kept += kept;
    return true;
  }

  get(key) {
    return this.values.get(key) ?? this.steps.map(() => NaN);
  }

  get last() {
    return this.steps.length ? this.steps[this.steps.length - 1] : 0;
  }
}

const aligned = (view) => view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);

/** A centred rolling mean or median over a twentieth of a long series; a short one as it is. */
function smooth(values, how) {
  if (!how || values.length < LONG) return values;
  const window = Math.max(5, Math.floor(values.length / 20));
  const before = Math.floor(window / 2), after = Math.floor((window - 1) / 2);
  const ends = values.map((_, i) => [Math.max(0, i - before), Math.min(values.length, i + after + 1)]);
  return how === "mean" ? means(values, ends) : ends.map(([from, to]) => median(values.slice(from, to)));
}

function means(values, ends) {
  const sums = [0], counts = [0];
  values.forEach((v, i) => {
    sums.push(sums[i] + (Number.isNaN(v) ? 0 : v));
    counts.push(counts[i] + (Number.isNaN(v) ? 0 : 1));
  });
  return ends.map(([from, to]) => (sums[to] - sums[from]) / (counts[to] - counts[from]));
}

function median(values) {
  const near = Float64Array.from(values.filter((v) => !Number.isNaN(v))).sort();
  return near.length ? (near[(near.length - 1) >> 1] + near[near.length >> 1]) / 2 : NaN;
}

/** What a panel draws of the rows, hidden groups left out: points with the numbers that the axis needs room for. */
function traced(panel, rows, hidden) {
  const shown = panel.marks.filter((mark) => !(mark.group && hidden(panel, mark.group)));
  return shown.map((mark) => {
    if (mark.kind === "curve") return curve(mark, rows);
    if (mark.kind === "band") return band(mark, rows);
    if (mark.kind === "stack") return stack(mark, rows, (group) => hidden(panel, group));
    return { mark, lines: [] };
  });
}

function curve(mark, rows) {
  const undone = rows.get("status");
  let steps = rows.steps, raw = rows.get(mark.key);
  if (!mark.undone) raw = raw.map((v, i) => (undone[i] === 2 ? NaN : v));
  if (mark.sparse) {
    const known = steps.map((_, i) => i).filter((i) => !Number.isNaN(raw[i]));
    [steps, raw] = [known.map((i) => steps[i]), known.map((i) => raw[i])];
  }
  return { mark, steps, raw, lines: [smooth(raw, mark.smooth)], needs: mark.raw || !mark.smooth ? raw : null };
}

function band(mark, rows) {
  const mean = smooth(rows.get(mark.mean), "mean"), spread = smooth(rows.get(mark.spread), "mean");
  const lines = [mean.map((v, i) => v - spread[i]), mean.map((v, i) => v + spread[i])];
  return { mark, steps: rows.steps, lines };
}

function stack(mark, rows, hidden) {
  const layers = mark.layers.filter((layer) => !hidden(layer.group));
  let foot = rows.steps.map(() => 0);
  const lines = layers.map((layer) => {
    const filled = rows.get(layer.key).map((v) => (Number.isNaN(v) ? 0 : v));
    return (foot = smooth(filled, mark.smooth).map((v, i) => v + foot[i]));
  });
  return { mark, layers, steps: rows.steps, lines };
}

// Scales

/** Ends and kind of the vertical axis, by the rules of `Scale` in plots/marks.py. */
function vertical(panel, traces, from, to) {
  const scale = panel.scale, seen = [];
  for (const trace of traces) {
    for (const line of trace.needs ? [trace.needs, ...trace.lines] : trace.lines) {
      line.forEach((v, i) => !Number.isNaN(v) && trace.steps[i] >= from && trace.steps[i] <= to && seen.push(v));
    }
  }
  const top = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
  const foot = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
  if (scale.high !== null) return { low: scale.low, high: scale.high, known: seen.length > 0 };
  if (scale.low === null) {
    if (!seen.length) return { low: 0, high: 1, known: false };
    const margin = 0.08 * (top(seen) - foot(seen)) || 0.05 * Math.abs(top(seen)) || 0.05;
    return { low: foot(seen) - margin, high: top(seen) + margin, known: true };
  }
  const all = [...scale.include, ...seen], positive = all.filter((v) => v > 0), known = seen.length > 0;
  if (scale.log && seen.some((v) => v > 0)) {
    const against = scale.log.against === "lowest" ? foot(positive) : median(seen), high = top(positive);
    if (high > scale.log.ratio * against) {
      const low = Math.max(foot(positive) / scale.log.below, high * 1e-20);
      return { low, high: scale.log.above * high, log: true, known };
    }
  }
  return { low: Math.min(scale.low, foot(all)), high: scale.room * Math.max(0, top(all)) || scale.empty, known };
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const stride = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) ?? rough;
  const found = [], end = high * (1 + 1e-9);
  for (let n = Math.ceil(low / stride); n * stride <= end && found.length < 20; n++) found.push(n * stride);
  return found;
}

function logTicks(low, high) {
  const decades = Math.log10(high / low), every = Math.ceil(decades / 7), found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const n of decades < 3 ? [1, 2, 5] : [1]) {
      const value = n * 10 ** power;
      if (value >= low && value <= high && (decades < 3 || power % every === 0)) found.push(value);
    }
  }
  return found;
}

function plain(value) {
  if (Math.abs(value) >= 1e4 && Math.abs(value) < 1e7) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

function numbers(kind) {
  if (kind === "percent") return (v) => `${Math.round(v * 100)}%`;
  const scientific = (v) => (v === 0 ? "0" : Number(v.toPrecision(3)).toExponential().replace("e+", "e"));
  if (kind === "scientific") return scientific;
  return plain;
}

// Drawing

/** Inks for the ground that the view stands on: a dark one gets light inks and paler curves. */
function themed(el, inks) {
  let at = el, ground = "";
  const clear = /^(|transparent|rgba\(.*, 0\))$/;
  while (at && clear.test((ground = getComputedStyle(at).backgroundColor))) at = at.parentElement;
  const [r, g, b] = (ground.match(/[\d.]+/g) ?? [255, 255, 255]).map(Number);
  if (!at || 0.3 * r + 0.59 * g + 0.11 * b > 128) return { ...inks, of: (colour) => colour };
  const roles = new Map(Object.entries(inks).map(([role, colour]) => [colour, DARK[role]]));
  return { ...DARK, of: (colour) => roles.get(colour) ?? paler(colour) };
}

function paler(colour) {
  const parts = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return `rgb(${parts.map((v) => Math.round(v + (255 - v) * 0.35)).join(",")})`;
}

/** One panel's canvas: `draw` paints it, and the places of its numbers stay known for hover and zoom. */
class Plot {
  constructor(canvas) {
    this.canvas = canvas;
  }

  /** Sizes the canvas for the device's pixels and computes both axes. */
  prepare(panel, rows, hidden, from, to) {
    const ratio = window.devicePixelRatio || 1, width = this.canvas.clientWidth;
    Object.assign(this, { panel, rows, from, to, width, traces: traced(panel, rows, hidden) });
    this.axis = vertical(panel, this.traces, from, to);
    const wanted = [Math.round(width * ratio), Math.round(HEIGHT * ratio)];
    if (this.canvas.width !== wanted[0]) this.canvas.width = wanted[0];
    if (this.canvas.height !== wanted[1]) this.canvas.height = wanted[1];
    this.pen = this.canvas.getContext("2d");
    this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.pen.clearRect(0, 0, width, HEIGHT);
  }

  x(step) {
    return PAD.left + ((step - this.from) / (this.to - this.from)) * (this.width - PAD.left - PAD.right);
  }

  step(x) {
    return this.from + ((x - PAD.left) / (this.width - PAD.left - PAD.right)) * (this.to - this.from);
  }

  y(value) {
    const { low, high, log } = this.axis;
    const share = log ? Math.log(Math.max(value, 1e-300) / low) / Math.log(high / low) : (value - low) / (high - low);
    return PAD.top + (1 - Math.min(Math.max(share, -9), 9)) * (HEIGHT - PAD.top - PAD.bottom);
  }

  draw(inks, font, resumed, turned) {
    this.font = font;
    this.frame(inks, resumed);
    this.pen.save();
    this.pen.beginPath();
    this.pen.rect(PAD.left, 0, this.width - PAD.left - PAD.right, HEIGHT - PAD.bottom + 1);
    this.pen.clip();
    for (const trace of this.traces) this[trace.mark.kind](trace, inks, turned);
    this.pen.restore();
    const missing = this.panel.missing && !this.axis.known ? this.panel.missing : "";
    this.words(this.rows.steps.length ? missing : "no steps yet", inks);
  }

  frame(inks, resumed) {
    const format = numbers(this.panel.scale.numbers), { low, high, log } = this.axis;
    const percent = this.panel.scale.numbers === "percent" ? [0, 0.25, 0.5, 0.75, 1] : null;
    for (const value of percent ?? (log ? logTicks(low, high) : ticks(low, high, 5))) {
      this.rule(PAD.left, this.y(value), this.width - PAD.right, this.y(value), inks.grid, 1);
      this.text(format(value), PAD.left - 6, this.y(value), inks.muted, "right", "middle");
    }
    const foot = HEIGHT - PAD.bottom;
    this.rule(PAD.left, foot, this.width - PAD.right, foot, inks.faint, 1);
    for (const step of ticks(this.from, this.to, 6).filter(Number.isInteger)) {
      this.text(plain(step), this.x(step), foot + 5, inks.muted, "center", "top");
    }
    this.text("step", (PAD.left + this.width - PAD.right) / 2, foot + 19, inks.muted, "center", "top");
    for (const step of resumed.filter((step) => step >= this.from && step <= this.to)) {
      this.rule(this.x(step + 0.5), PAD.top, this.x(step + 0.5), foot, inks.muted, 1, DASH.dotted);
    }
  }

  rule(x0, y0, x1, y1, colour, width, dash = []) {
    this.stroke([[x0, y0], [x1, y1]], colour, width, dash, 1);
  }

  stroke(points, colour, width, dash, opacity) {
    Object.assign(this.pen, { strokeStyle: colour, lineWidth: width, globalAlpha: opacity, lineJoin: "round" });
    this.pen.setLineDash(dash);
    this.pen.beginPath();
    let down = false;
    for (const [x, y] of points) {
      if (Number.isNaN(y)) down = false;
      else if (down) this.pen.lineTo(x, y);
      else { this.pen.moveTo(x, y); down = true; }
    }
    this.pen.stroke();
    this.pen.setLineDash([]);
    this.pen.globalAlpha = 1;
  }

  text(words, x, y, colour, align, baseline) {
    Object.assign(this.pen, { font: this.font, fillStyle: colour, textAlign: align, textBaseline: baseline });
    this.pen.fillText(words, x, y);
  }

  words(text, inks) {
    text.split("\n").forEach((line, i) => {
      this.text(line, (this.width + PAD.left) / 2, HEIGHT / 2 + 15 * (i - 1), inks.muted, "center", "middle");
    });
  }

  points(steps, values) {
    return values.map((v, i) => [this.x(steps[i]), this.y(v)]);
  }

  area(above, below, colour, opacity) {
    const outline = [...above, ...below.slice().reverse()].filter(([, y]) => !Number.isNaN(y));
    Object.assign(this.pen, { fillStyle: colour, globalAlpha: opacity });
    this.pen.beginPath();
    outline.forEach(([x, y]) => this.pen.lineTo(x, y));
    this.pen.fill();
    this.pen.globalAlpha = 1;
  }

  curve({ mark, steps, raw, lines }, inks) {
    const colour = inks.of(mark.colour);
    if (mark.raw && this.rows.steps.length >= LONG) this.stroke(this.points(steps, raw), colour, 0.8, [], 0.35);
    let line = this.points(steps, lines[0]);
    if (mark.steps) line = line.flatMap(([x, y], i) => [...(i ? [[x, line[i - 1][1]]] : []), [x, y]]);
    this.stroke(line, colour, mark.width, DASH[mark.look], mark.look === "solid" ? 1 : 0.85);
    if (steps.length < (mark.sparse ? 4 : 2)) line.forEach((point) => this.dot(point, colour));
  }

  dot([x, y], colour) {
    this.pen.fillStyle = colour;
    this.pen.beginPath();
    this.pen.arc(x, y, 3, 0, 7);
    this.pen.fill();
  }

  band({ mark, steps, lines }, inks) {
    const [low, high] = lines.map((line) => this.points(steps, line)), colour = inks.of(mark.colour);
    this.area(high, low, colour, mark.opacity);
    if (mark.edges) for (const edge of [low, high]) this.stroke(edge, colour, 0.8, [], 0.25);
  }

  stack({ mark, layers, steps, lines }, inks) {
    let below = steps.map((step) => [this.x(step), this.y(0)]);
    lines.forEach((line, i) => {
      const above = this.points(steps, line);
      this.area(above, below, inks.of(layers[i].colour), mark.opacity);
      below = above;
    });
  }

  limit({ mark }, inks) {
    const y = this.y(mark.value), right = this.width - PAD.right - 3;
    const [x, align] = mark.right ? [right, "right"] : [PAD.left + 3, "left"];
    this.rule(PAD.left, y, this.width - PAD.right, y, inks.muted, 1, DASH.dotted);
    this.text(mark.text, x, y - 2, inks.muted, align, "bottom");
  }

  span({ mark }, inks) {
    const sides = [mark.low, mark.high].map((v) => [[PAD.left, this.y(v)], [this.width - PAD.right, this.y(v)]]);
    this.area(sides[1], sides[0], inks.of(mark.colour), 0.1);
    for (const side of sides) this.stroke(side, inks.of(mark.colour), 0.8, DASH.dashed, 0.45);
  }

  turned({ mark }, inks, turned) {
    const values = this.rows.get(mark.key);
    for (const step of turned[mark.key] ?? []) {
      const at = this.rows.steps.findIndex((known) => known >= step);
      if (at >= 0) this.triangle(this.x(step), this.y(values[at]), inks.of(mark.colour));
    }
  }

  triangle(x, y, colour) {
    this.pen.fillStyle = colour;
    this.pen.beginPath();
    for (const [dx, dy] of [[-5, -5], [5, -5], [0, 5]]) this.pen.lineTo(x + dx, y + dy);
    this.pen.fill();
  }

  outcomes({ mark }, inks) {
    const status = this.rows.get("status"), values = this.rows.get(mark.key), foot = HEIGHT - PAD.bottom;
    this.rows.steps.forEach((step, i) => {
      const x = this.x(step), y = values[i] < this.axis.high ? this.y(values[i]) : PAD.top + 5;
      if (status[i] === 1) this.rule(x, foot - 8, x, foot - 2, inks.muted, 1);
      if (status[i] !== 2) return;
      for (const side of [-4, 4]) this.rule(x - 4, y - side, x + 4, y + side, inks.alarm, 2);
    });
  }

  /** The newest point at or before a place, by curve: key, colour, value. */
  at(step) {
    const found = [];
    for (const { mark, layers, steps, raw } of this.traces) {
      const place = steps ? nearest(steps, step) : -1;
      if (mark.kind === "curve" && place >= 0) found.push([mark.key, mark.colour, raw[place]]);
      for (const layer of layers ?? []) found.push([layer.key, layer.colour, this.rows.get(layer.key)[place] || 0]);
    }
    return found.filter(([, , value]) => !Number.isNaN(value) && value !== undefined);
  }
}

function nearest(steps, step) {
  let best = -1;
  steps.forEach((known, i) => (best < 0 || Math.abs(known - step) < Math.abs(steps[best] - step)) && (best = i));
  return best;
}
