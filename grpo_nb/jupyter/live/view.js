// The page of panels: legend, hover, zoom, theme. Every text of a run is set as textContent.

const LABEL = 32; // characters of a name in a legend before it is cut

const MOST_ROWS = 100; // of the table

const told = (value) => (Number.isNaN(value) || value === undefined ? "" : plain(value));

/** A new element with a class and a text, in its parent. */
function put(parent, tag, kind, text = "") {
  const made = document.createElement(tag);
  made.className = `gnb-${kind}`;
  made.textContent = text;
  parent.append(made);
  return made;
}

const short = (name) => (name.length > LABEL ? `${name.slice(0, LABEL)}…` : name);

/** The view of one model on one page. */
class View {
  constructor(model, el) {
    this.model = model;
    this.rows = new Rows();
    this.hidden = new Set();
    this.zoom = null;
    this.crosshair = null;
    this.plots = [];
    this.root = put(el, "div", "live");
    this.legend = put(this.root, "div", "legend");
    this.grid = put(this.root, "div", "grid");
    this.table = put(this.root, "details", "table");
    put(this.table, "summary", "summary", "Table, one row a step");
    this.cells = put(put(this.table, "div", "scroll"), "table", "cells");
    this.table.addEventListener("toggle", () => this.schedule());
    this.foot = put(this.root, "div", "foot");
    this.tip = put(this.root, "div", "tip");
    this.tip.hidden = true;
    this.redraw = this.redraw.bind(this);
    this.schedule = () => (this.due ??= requestAnimationFrame(this.redraw));
  }

  start() {
    const { model } = this, lay = () => this.lay();
    const take = (message, buffers) => this.take(message, buffers);
    const laid = ["change:page", "change:pages"].map((what) => [what, lay]);
    const watching = [...laid, ["msg:custom", take], ["change:frame", this.schedule]];
    watching.forEach(([what, done]) => model.on(what, done));
    const sized = new ResizeObserver(this.schedule), dressed = new MutationObserver(this.schedule);
    sized.observe(this.root);
    dressed.observe(document.body, { attributes: true });
    this.offer();
    this.lay();
    model.send({ kind: "all" });
    return () => {
      watching.forEach(([what, done]) => model.off(what, done));
      sized.disconnect();
      dressed.disconnect();
      cancelAnimationFrame(this.due);
    };
  }

  take(message, buffers) {
    if (message.kind === "file") this.download(message.name, buffers[0]);
    else if (!this.rows.add(message, buffers)) this.model.send({ kind: "all" });
    else this.schedule();
  }

  /** What can be had at the end: a page to keep, a word when the run has ended. */
  offer() {
    const report = put(this.foot, "button", "button", "Download report");
    report.addEventListener("click", () => {
      this.model.send({ kind: "report" });
      report.disabled = true;
      this.offered = report;
    });
    if (!("Notification" in window)) return;
    const notify = put(this.foot, "button", "button", "Notify me at the end");
    notify.setAttribute("aria-pressed", "false");
    notify.addEventListener("click", async () => {
      this.notifies = (await Notification.requestPermission()) === "granted";
      notify.setAttribute("aria-pressed", String(this.notifies));
      notify.textContent = this.notifies ? "Notifies at the end" : "Notifications are blocked by the browser";
    });
  }

  download(name, bytes) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([bytes], { type: "text/html" }));
    link.download = name;
    link.click();
    URL.revokeObjectURL(link.href);
    if (this.offered) this.offered.disabled = false;
  }

  /** Once, when a run that was seen active is no longer. */
  announce(ended) {
    if (this.active && ended && this.notifies) new Notification(ended);
    this.active = !ended;
  }

  /** The newest rows, newest first, by the keys of metrics.jsonl; only while it is open. */
  tabulate() {
    if (!this.table.open) return;
    const known = (key) => this.rows.get(key).some((v) => !Number.isNaN(v));
    const keys = this.rows.columns.filter((key) => key !== "status" && known(key));
    const newest = this.rows.steps.map((_, i) => i).slice(-MOST_ROWS).reverse();
    const head = document.createElement("tr"), body = newest.map(() => document.createElement("tr"));
    ["step", ...keys].forEach((key) => put(head, "th", "th", key));
    newest.forEach((place, i) => {
      put(body[i], "td", "td", String(this.rows.steps[place]));
      keys.forEach((key) => put(body[i], "td", "td", told(this.rows.get(key)[place])));
    });
    this.cells.replaceChildren(head, ...body);
  }

  /** A canvas for each panel of the page that was chosen. */
  lay() {
    this.grid.replaceChildren();
    const { panels, across } = this.model.get("pages")[this.model.get("page")] ?? { panels: [], across: 3 };
    this.grid.style.setProperty("--across", across);
    this.plots = panels.map((panel) => {
      const box = put(this.grid, "section", "panel");
      put(box, "h4", "title", panel.title);
      if (panel.unit) put(box, "div", "unit", panel.unit);
      const names = put(box, "div", "names");
      for (const [name, colour] of panel.own) this.chip(names, name, colour, `${panel.title}/${name}`);
      const plot = new Plot(put(box, "canvas", "canvas"));
      Object.assign(plot, { panel, box });
      this.listen(plot);
      return plot;
    });
    this.schedule();
  }

  /** A name that a click hides or shows; `what` is hidden. */
  chip(parent, name, colour, what) {
    const chip = put(parent, "button", "chip", short(name));
    chip.type = "button";
    chip.title = `${name}: click to hide or show`;
    chip.style.setProperty("--colour", colour);
    chip.setAttribute("aria-pressed", String(!this.hidden.has(what)));
    chip.addEventListener("click", () => {
      if (!this.hidden.delete(what)) this.hidden.add(what);
      chip.setAttribute("aria-pressed", String(!this.hidden.has(what)));
      this.schedule();
    });
    return chip;
  }

  redraw() {
    this.due = undefined;
    const { objectives, inks, resumed, turned, end, ended } = this.model.get("frame");
    if (!objectives) return;
    this.announce(ended);
    if (!this.root.clientWidth) return;
    this.tabulate();
    this.head(objectives, resumed);
    const themeInks = themed(this.root, inks), [from, to] = this.zoom ?? [0, end];
    const font = `11px ${getComputedStyle(this.root).fontFamily}`;
    this.root.classList.toggle("gnb-dark", themeInks.paper === DARK.paper);
    for (const role of ["paper", "ink", "muted"]) this.root.style.setProperty(`--gnb-${role}`, themeInks[role]);
    for (const plot of this.plots) {
      const own = new Map(plot.panel.own);
      const hidden = (panel, group) => this.hidden.has(own.has(group) ? `${panel.title}/${group}` : group);
      plot.prepare(plot.panel, this.rows, hidden, from, to);
      plot.draw(themeInks, font, resumed, turned);
      this.cursor(plot, themeInks);
      this.describe(plot);
    }
    this.root.dataset.step = this.rows.last;
    this.root.dataset.drawn = 1 + Number(this.root.dataset.drawn ?? 0);
  }

  /** The objectives with the mean of their newest rewards, and what the picture is zoomed to. */
  head(objectives, resumed) {
    if (!this.note) {
      this.names = objectives.map(([name, colour]) => this.chip(this.legend, name, colour, name));
      this.note = put(this.legend, "span", "note");
    }
    objectives.forEach(([name, , key], i) => {
      const newest = this.rows.get(key).filter((v) => !Number.isNaN(v)).slice(-5);
      const mean = newest.reduce((sum, v) => sum + v, 0) / newest.length;
      this.names[i].textContent = newest.length ? `${short(name)}  reward ${mean.toFixed(2)}` : short(name);
    });
    const told = [];
    const [from, to] = (this.zoom ?? []).map(Math.round);
    if (this.zoom) told.push(`steps ${from} to ${to}; double-click shows all`);
    if (resumed.length) told.push("dotted upright: resumed here");
    this.note.textContent = told.join(" · ");
  }

  /** What a screen reader says of a panel. */
  describe(plot) {
    const found = plot.at(this.rows.last).slice(0, 12).map(([key, , value]) => `${key} ${plain(value)}`);
    const newest = `step ${this.rows.last}: ${found.join(", ") || "nothing yet"}`;
    plot.canvas.setAttribute("role", "img");
    plot.canvas.setAttribute("aria-label", [plot.panel.title, plot.panel.unit, newest].filter(Boolean).join("; "));
  }

  // Hover and zoom

  listen(plot) {
    const { canvas } = plot, place = (event) => plot.step(event.offsetX);
    canvas.tabIndex = 0;
    canvas.addEventListener("pointerdown", (event) => {
      this.drag = { plot, from: place(event), to: place(event) };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (this.drag) this.drag.to = place(event);
      this.point(plot, place(event));
    });
    canvas.addEventListener("pointerup", () => this.release());
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("dblclick", () => this.all());
    canvas.addEventListener("blur", () => this.point(null));
    canvas.addEventListener("keydown", (event) => this.key(event, plot));
  }

  release() {
    const [from, to] = [this.drag?.from, this.drag?.to].sort((a, b) => a - b);
    this.drag = null;
    if (to - from >= 1) this.zoom = [Math.max(0, from), to];
    this.schedule();
  }

  all() {
    this.zoom = this.drag = null;
    this.schedule();
  }

  /** Arrow keys move the cursor by a row, Escape shows all steps again. */
  key(event, plot) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.all();
    if (!by || !this.rows.steps.length) return;
    event.preventDefault();
    event.stopPropagation();
    const at = nearest(this.rows.steps, this.crosshair?.step ?? this.rows.last);
    this.point(plot, this.rows.steps[Math.min(Math.max(at + by, 0), this.rows.steps.length - 1)]);
  }

  point(plot, step) {
    const steps = this.rows.steps;
    this.crosshair = plot && steps.length ? { plot, step: steps[nearest(steps, step)] } : null;
    this.tell();
    this.schedule();
  }

  /** The values at the cursor, beside it. */
  tell() {
    this.tip.hidden = !this.crosshair;
    if (!this.crosshair) return;
    const { plot, step } = this.crosshair;
    this.tip.replaceChildren();
    put(this.tip, "b", "step", `step ${step}`);
    for (const [key, colour, value] of plot.at(step)) {
      const line = put(this.tip, "div", "value", `${key}  ${plain(value)}`);
      line.style.setProperty("--colour", colour);
    }
    const x = plot.canvas.offsetLeft + plot.x(step), right = plot.x(step) > plot.width / 2;
    this.tip.style.top = `${plot.canvas.offsetTop}px`;
    this.tip.style.left = right ? "" : `${x + 12}px`;
    this.tip.style.right = right ? `${this.root.clientWidth - x + 12}px` : "";
  }

  cursor(plot, inks) {
    const foot = HEIGHT - PAD.bottom;
    if (this.crosshair) {
      const x = plot.x(this.crosshair.step);
      if (x >= PAD.left) plot.rule(x, PAD.top, x, foot, inks.muted, 1);
    }
    if (this.drag?.plot === plot) {
      const sides = [this.drag.from, this.drag.to].map((step) => [[plot.x(step), PAD.top], [plot.x(step), foot]]);
      plot.area(sides[0], sides[1], inks.muted, 0.2);
    }
  }
}

export default { render: ({ model, el }) => new View(model, el).start() };
