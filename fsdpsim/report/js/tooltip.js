// ---- tooltip.js: facts beside the pointer. Texts only: names in a scenario are never markup.

/** An element with text, a class, and children. */
function make(tag, { text, css, children = [], ...properties } = {}) {
  const element = Object.assign(document.createElement(tag), properties);
  if (text !== undefined) element.textContent = text;
  if (css) element.className = css;
  element.append(...children);
  return element;
}

/** A definition list of [label, text] facts. */
function factList(facts) {
  const items = facts.map(([label, text]) =>
    make("div", { children: [make("dt", { text: label }), make("dd", { text })] }));
  return make("dl", { children: items });
}

/** A swatch in a look's colour. */
function swatch(colour) {
  const element = make("i", { css: "swatch" });
  element.style.backgroundColor = colour;
  return element;
}

class Tooltip {
  constructor(element) {
    this.element = element;
  }

  hide() {
    this.element.hidden = true;
  }

  /** Show `content` near the pointer, inside the window. */
  show(event, ...content) {
    const { element } = this;
    element.replaceChildren(...content);
    element.hidden = false;
    const { width, height } = element.getBoundingClientRect();
    const room = document.documentElement;
    const right = event.clientX + 16 + width < room.clientWidth;
    const below = event.clientY + 18 + height < room.clientHeight;
    const left = right ? event.clientX + 16 : event.clientX - 12 - width;
    const top = below ? event.clientY + 18 : event.clientY - 12 - height;
    element.style.left = `${Math.max(left, 4)}px`;
    element.style.top = `${Math.max(top, 4)}px`;
  }
}

/** The tooltip of an op or a tile. */
function nodeTip(app, node) {
  const colour = app.facts.look(node).colour[app.theme][0];
  const title = make("h4", { children: [swatch(colour), app.facts.title(node)] });
  return [title, factList(app.facts.of(node))];
}

/** The tooltip of an idle time of the compute stream. */
function gapTip(app, gap) {
  return [make("h4", { text: `${app.model.compute.name} stream idle` }), factList(app.facts.idle(gap))];
}

/** The tooltip of the memory chart: what happened, the levels, and who holds the memory. */
function memoryTip(app, entry) {
  const { curve, memory } = app.memoryChart, { hasBytes } = memory;
  const at = curve.sample[entry], event = memory.events[at], buffer = Math.abs(event) - 1;
  const text = (column) => app.model.text(memory.buffers[column][buffer]);
  const owner = text("unit") ? ` of ${text("unit")}` : "";
  const deed = `${event > 0 ? "allocates" : "frees"} ${text("name")}${owner} (${text("phase")})`;
  const facts = [["CPU thread", deed]];
  const number = (name) => curve.columns[name][entry];
  if (!hasBytes) facts.push(["unsharded units", String(number("unsharded"))]);
  else for (const name of LEVEL_NAMES) facts.push([name, showBytes(number(name))]);
  if (hasBytes && number("unsharded")) facts.push(["unsharded units", String(number("unsharded"))]);
  const peak = hasBytes && entry === app.memoryChart.peakEntry() ? ": the peak" : "";
  const title = make("h4", { text: `memory at ${app.facts.moment(curve.time[entry])}${peak}` });
  return [title, factList(facts), ...(hasBytes ? [ownerTable(app, at)] : [])];
}

/** What fills the memory from the top of the stack down, with the largest owners of each category. */
function ownerTable(app, at) {
  const { memory, style } = app;
  const owners = memory.owners(at);
  const rows = Object.keys(style.categories).reverse().map((name) => {
    const units = owners[memory.categories.indexOf(name)];
    const bytes = units.reduce((sum, [, size]) => sum + size, 0);
    return ownerRow(app, style.categories[name], bytes, largest(app, units));
  });
  const waiting = memory.levels.active[at] - memory.levels.allocated[at];
  rows.unshift(ownerRow(app, style.pending, waiting, ""));
  return make("table", { children: rows.filter(Boolean) });
}

function largest(app, units) {
  const named = units.slice(0, 2).map(([unit, size]) =>
    `${app.model.text(unit) || "training loop"} ${showBytes(size)}`);
  if (units.length > 2) named.push(`${units.length - 2} more`);
  return named.join(", ");
}

function ownerRow(app, look, bytes, words) {
  if (!bytes) return null;
  return make("tr", { children: [
    make("td", { children: [swatch(look.colour[app.theme][0]), look.label] }),
    make("td", { text: showBytes(bytes), css: "number" }),
    make("td", { text: words, css: "quiet" }),
  ] });
}
