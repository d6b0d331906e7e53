// ---- memory.js: the chart of memory over time, below the timeline.

const MEMORY_HEIGHT = 236;
const UNITS_HEIGHT = 140;
const IN_SIGHT = 2.5; // a line higher than this many times the rest would flatten it
const NOTEWORTHY = 0.003;

class MemoryChart {
  constructor(root, app) {
    this.app = app;
    this.memory = app.memory;
    this.bands = this.memory.hasBytes ? this._bands() : [];
    const options = chartOptions(app, this.memory.hasBytes ? MEMORY_HEIGHT : UNITS_HEIGHT);
    options.padding[0] = 10;
    options.scales.y = { auto: false, range: () => [0, this.top] };
    options.axes = [timeAxis(app, 2), this._sizes()];
    options.series = [{}, ...(this.memory.hasBytes ? this._layers() : this._counts())];
    options.hooks = { draw: [() => this._marks()] };
    this.setCurve();
    this.plot = new uPlot(options, this._data(), root);
  }

  /** Take layers out of the legend that are too thin to be seen. */
  trimLegend() {
    const seen = this.bands.map(({ name }) => `memory-${name}`);
    for (const item of document.querySelectorAll("[data-look^='memory-']")) {
      item.hidden = !seen.includes(item.dataset.look);
    }
  }

  // ---- what is drawn

  /** Layers of the stack from the bottom up, as the chart on paper has them. */
  _bands() {
    const { categories, pending, rounding } = this.app.style;
    const live = Object.keys(categories).map((name) => ({ name, look: categories[name] }));
    const bands = [...live, { name: "rounding", look: rounding }, { name: "pending", look: pending }];
    const columns = this.memory.curve(this.memory.clock).columns;
    const least = NOTEWORTHY * columns.reserved[highest(columns.reserved)];
    const thick = (name) => columns[name] === undefined || columns[name].some((v) => v > least);
    return bands.filter(({ name }) => thick(name));
  }

  /** Each layer is filled down to zero, the highest first, so that lower ones cover it. */
  _layers() {
    const bands = [...this.bands].reverse().map(({ name, look }) => ({
      ...this._step(),
      width: 0,
      fill: () => (name === "pending" ? this._hatch(look) : look.colour[this.app.theme][0]),
    }));
    const levels = [...LEVEL_NAMES].reverse().map((name) => {
      const { dash, width } = this.app.style.levels[name];
      return {
        ...this._step(),
        width: width * 1.2,
        dash,
        stroke: () => this.app.style.levels[name].colour[this.app.theme],
      };
    });
    return [...bands, ...levels];
  }

  /** Without bytes: how many units are unsharded. */
  _counts() {
    const { all_gather: look } = this.app.style.categories;
    const fill = () => `${look.colour[this.app.theme][0]}8c`;
    return [{ ...this._step(), width: 1.2, stroke: () => this.app.colour("ink"), fill }];
  }

  _step() {
    return { paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } };
  }

  _hatch(look) {
    const size = Math.round(7 * uPlot.pxRatio), tile = document.createElement("canvas");
    tile.width = tile.height = size;
    const context = tile.getContext("2d");
    context.fillStyle = look.colour[this.app.theme][0];
    context.fillRect(0, 0, size, size);
    context.strokeStyle = this.app.style.hatch.colour[this.app.theme][0];
    context.lineWidth = uPlot.pxRatio;
    for (const shift of [-size, 0, size]) {
      context.moveTo(shift, size);
      context.lineTo(shift + size, 0);
    }
    context.stroke();
    return this.plot.ctx.createPattern(tile, "repeat");
  }

  /** Ticks at round numbers of a binary unit, or of units. */
  _sizes() {
    const unit = () => (this.memory.hasBytes ? byteUnit(this.top) : ["", 1]);
    return {
      ...axis(this.app),
      size: GUTTER,
      splits: () => roundSteps(this.top / unit()[1], this.memory.hasBytes).map((n) => n * unit()[1]),
      values: (plot, ticks) => ticks.map((tick) => this._label(tick / unit()[1], unit()[0])),
    };
  }

  _label(number, unit) {
    if (this.memory.hasBytes) return number ? `${number} ${unit}` : "0";
    return number ? counted(number, "unsharded unit") : "0";
  }

  // ---- data

  /** Take the curve of the chosen clock; the axis reaches what the shown iteration needs. */
  setCurve() {
    const { span } = this.app;
    this.curve = this.memory.curve(this.app.clock);
    if (!this.memory.hasBytes) {
      this.top = 1.25 * Math.max(this.curve.most("unsharded", ...span.limits), 1);
      return;
    }
    const { active, allocated, reserved } = Object.fromEntries(this.peaks());
    const highestShown = reserved <= IN_SIGHT * active ? reserved : active;
    const { capacity } = this.memory;
    const above = capacity !== null && capacity <= IN_SIGHT * highestShown ? capacity : 0;
    this.top = 1.14 * Math.max(highestShown, above);
    this.peakName = active > 1.05 * allocated ? "active" : "allocated";
  }

  /** The highest of each level in the shown iteration. */
  peaks() {
    const { memory } = this, { name } = this.app.span.iteration;
    return LEVEL_NAMES.map((level) => [level, memory.levels[level][memory.peak(level, name)]]);
  }

  update() {
    if (!this.curve.length) return;
    this.plot.setData(this._data(), false);
    showSpan(this.plot, this.app.span);
  }

  resize(width) {
    this.plot.setSize({ width, height: this.plot.height });
  }

  /** Columns for uPlot: times from the origin, layers from the top down, levels. */
  _data() {
    const { span } = this.app, { curve } = this;
    const entries = curve.thinned(span.low, span.high, this.app.width());
    if (!entries.length) return [[0, 1], ...this._columns([])];
    const times = entries.map((i) => Math.max(curve.time[i], span.low) - span.origin);
    const end = Math.max(span.high - span.origin, times.at(-1));
    return [[...times, end], ...this._columns([...entries, entries.at(-1)])];
  }

  _columns(entries) {
    const { columns } = this.curve;
    const pick = (name) => entries.map((i) => columns[name][i]);
    if (!this.memory.hasBytes) return [pick("unsharded")];
    const stack = [];
    let base = entries.map(() => 0);
    for (const { name } of this.bands) {
      base = entries.map((i, at) => this._height(name, i, base[at]));
      stack.unshift(base);
    }
    return [...stack, ...[...LEVEL_NAMES].reverse().map(pick)];
  }

  /** The top of a layer on `base` at entry i; rounding fills up to `allocated`. */
  _height(name, i, base) {
    const { columns } = this.curve;
    if (name === "rounding") return Math.max(base, columns.allocated[i]);
    return base + columns[name][i];
  }

  // ---- marks

  _marks() {
    const { app, plot } = this, ratio = uPlot.pxRatio;
    const { oom } = this.memory;
    for (const { stepEnd } of app.model.iterations.slice(0, -1)) {
      markTime(plot, app.span, stepEnd, app.colour("quiet"), ratio);
    }
    if (oom) markTime(plot, app.span, oom.time, app.lineColour("capacity"), ratio, []);
    if (this.memory.hasBytes) {
      this._capacity(ratio);
      this._peak(ratio);
    }
  }

  _capacity(ratio) {
    const { capacity } = this.memory, { ctx: context, bbox } = this.plot;
    if (capacity === null || capacity > this.top) return;
    const y = this.plot.valToPos(capacity, "y", true);
    const { dash, width } = this.app.style.capacity;
    context.save();
    context.strokeStyle = this.app.lineColour("capacity");
    context.setLineDash(dash.map((length) => length * ratio));
    context.lineWidth = width * ratio;
    context.beginPath();
    context.moveTo(bbox.left, y);
    context.lineTo(bbox.left + bbox.width, y);
    context.stroke();
    context.restore();
    this._text(`capacity ${showBytes(capacity)}`, bbox.left + 6 * ratio, y - 4 * ratio, "left", ratio);
  }

  peakEntry() {
    return this.curve.entry(this.memory.peak(this.peakName, this.app.span.iteration.name));
  }

  _peak(ratio) {
    const { span } = this.app, { ctx: context, bbox } = this.plot;
    const entry = this.peakEntry();
    const reached = this.curve.time[entry], time = Math.max(reached, span.limits[0]);
    if (time < span.low || time > span.high) return;
    const x = bbox.left + span.share(time) * bbox.width;
    const bytes = this.curve.columns[this.peakName][entry];
    const y = this.plot.valToPos(bytes, "y", true);
    context.save();
    context.beginPath();
    context.arc(x, y, 4 * ratio, 0, 2 * Math.PI);
    context.fillStyle = this.app.colour("ink");
    context.fill();
    context.lineWidth = 1.5 * ratio;
    context.strokeStyle = this.app.colour("paper");
    context.stroke();
    context.restore();
    const right = x > bbox.left + bbox.width / 2;
    const earlier = time > reached ? `, ${showSeconds(time - reached)} earlier` : "";
    const text = `peak ${this.peakName} ${showBytes(bytes)}${earlier}`;
    this._text(text, x + (right ? -8 : 8) * ratio, y - 7 * ratio, right ? "right" : "left", ratio);
  }

  _text(text, x, y, align, ratio) {
    const { ctx: context } = this.plot;
    context.save();
    context.font = FONT.replace("12px", `${11.5 * ratio}px`);
    context.textAlign = align;
    context.textBaseline = "alphabetic";
    context.lineWidth = 4 * ratio;
    context.lineJoin = "round";
    context.strokeStyle = this.app.colour("paper");
    context.strokeText(text, x, y);
    context.fillStyle = this.app.colour("ink");
    context.fillText(text, x, y);
    context.restore();
  }

  // ---- pointing

  /** The entry at `left` CSS pixels of the plotting area; the peak draws the pointer to itself. */
  hit(left) {
    const { span } = this.app, width = this.plot.over.clientWidth;
    if (!this.curve.length) return -1;
    if (this.memory.hasBytes) {
      const peak = this.peakEntry(), at = span.share(Math.max(this.curve.time[peak], span.limits[0])) * width;
      if (Math.abs(at - left) <= 5) return peak;
    }
    return this.curve.at(span.low + (left / width) * span.length);
  }
}

/** Round numbers from 0 to `top`, four or five steps. */
function roundSteps(top, fractions) {
  const rough = top / 5, power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough);
  if (!fractions) step = Math.max(1, Math.round(step));
  return range(0, Math.floor(top / step) + 1).map((i) => Number((i * step).toPrecision(6)));
}
