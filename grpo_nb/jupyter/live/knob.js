// A number to type and a slider to move, for one knob. Both send a number when the hand lets go, never on the way.

/** A new element with its text, in its parent. */
function add(parent, tag, kind, text = "") {
  const made = document.createElement(tag);
  made.className = `gnb-${kind}`;
  made.textContent = text;
  parent.append(made);
  return made;
}

const short = (value) => String(Number(value.toPrecision(3)));

/** A labelled box; what is no number is sent as the text that it is. */
function box({ model, el }) {
  const label = add(el, "label", "name", model.get("description"));
  const input = add(label, "input", "box");
  label.title = model.get("tooltip") ?? "";
  Object.assign(input, { type: "text", inputMode: "decimal", autocomplete: "off", title: label.title });
  input.setAttribute("role", "spinbutton");
  let typed = false; // and not sent yet: a new value of the knob does not replace what is being typed
  const show = () => {
    if (typed) return;
    input.value = String(model.get("value"));
    input.setAttribute("aria-valuenow", input.value);
  };
  const send = (text) => {
    typed = false;
    const value = Number(text.trim().replace(",", "."));
    if (text.trim() && Number.isFinite(value)) model.set("value", value);
    else model.send({ kind: "refused", text: text.slice(0, 80) });
    model.save_changes();
    show();
  };
  input.addEventListener("input", () => (typed = true));
  input.addEventListener("change", () => send(input.value));
  input.addEventListener("blur", () => {
    typed = false;
    show();
  });
  input.addEventListener("keydown", (event) => {
    event.stopPropagation();
    const by = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    send(String(Number((Number(input.value) + by * model.get("step")).toPrecision(6))));
  });
  model.on("change:value", show);
  show();
  return () => model.off("change:value", show);
}

/** A slider over `low` to `high`, or over their powers of ten; the number beside it moves with the hand. */
function slider({ model, el }) {
  const [low, high, log] = ["low", "high", "log"].map((name) => model.get(name));
  const place = (value) => (log ? Math.log10(Math.max(value, 1e-300)) : value);
  const value = () => (log ? 10 ** Number(input.value) : Number(input.value));
  const frame = add(el, "span", "slider"), input = add(frame, "input", "range"), shown = add(frame, "output", "shown");
  Object.assign(input, { type: "range", min: place(low), max: place(high), step: model.get("step") });
  input.title = model.get("tooltip") ?? "";
  input.setAttribute("aria-label", `${model.get("description")}, slider`);
  const tell = () => {
    shown.textContent = short(value());
    input.setAttribute("aria-valuetext", short(value()));
  };
  const show = () => {
    input.value = place(model.get("value"));
    input.setAttribute("aria-valuetext", short(model.get("value")));
    shown.textContent = "";
  };
  input.addEventListener("input", tell);
  input.addEventListener("change", () => {
    model.set("value", value());
    model.save_changes();
    shown.textContent = "";
  });
  input.addEventListener("keydown", (event) => event.stopPropagation());
  model.on("change:value", show);
  show();
  return () => model.off("change:value", show);
}

export default { render: (view) => (view.model.get("shape") === "box" ? box(view) : slider(view)) };
