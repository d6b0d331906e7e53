// ---- main.js: the page's state, and how its parts hear of changes.

const OTHER_ITERATION = 0.3;
const NOT_FOUND = 0.13;

class App {
  constructor(data) {
    this.model = new Model(data);
    this.style = data.style;
    this.memory = new Memory(data.memory, this.model);
    this.chain = new Chain(this.model);
    this.gaps = new Gaps(this.model);
    this.theme = "light";
    this.clock = this.memory.clock;
    this.selected = NOTHING;
    this.history = [];
    this.path = [];
    this.critical = false;
    this.found = null;
    this.plots = document.getElementById("plots");
    const iterations = this.model.iterations;
    this.span = new Span(iterations.at(-2) ?? iterations.at(-1), () => this.redraw());
    this.facts = new Facts(this.model, this.chain, this.span);
  }

  /** Make the charts, once their place is visible. */
  start() {
    this.overview = new Overview(document.getElementById("overview"), this);
    this.timeline = new TimelineChart(document.getElementById("timeline"), this);
    this.memoryChart = new MemoryChart(document.getElementById("memory"), this);
    this.details = new Details(document.getElementById("details"), this);
    this.tooltip = new Tooltip(document.getElementById("tooltip"));
    this.memoryChart.trimLegend();
    this.showPeaks();
    this.draw();
  }

  // ---- looks

  colour(name) {
    return this.style[name][this.theme];
  }

  lineColour(name) {
    return this.style[name].colour[this.theme];
  }

  /** Width of the charts in CSS pixels. */
  width() {
    return Math.max(this.plots.clientWidth, 480);
  }

  /** How opaque each bar of `lane` is: less for other iterations, and for what a search left out. */
  strength(lane) {
    const { found, span } = this, shown = span.iteration.name;
    return (i) => {
      const other = shown !== "all" && lane.iteration[i] !== Number(shown) - 1;
      const left = found !== null && !this.isFound(lane, i);
      return (other ? OTHER_ITERATION : 1) * (left ? NOT_FOUND : 1);
    };
  }

  isFound(lane, i) {
    return this.found.units.has(lane.unit[i]) ||
      (!lane.isHost && this.found.names.has(this.model.ops.name[lane.item[i]]));
  }

  // ---- drawing

  /** Draw all in the next frame, however often it is asked for. */
  redraw() {
    if (!this.timeline || this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.waiting = false;
    this.timeline.update();
    this.memoryChart.update();
    this.overview.update();
  }

  resize() {
    const width = this.width();
    for (const chart of [this.overview, this.timeline, this.memoryChart]) chart.resize(width);
    this.draw();
  }

  /** Fill the peaks of the shown iteration into the legend. */
  showPeaks() {
    if (!this.memory.hasBytes) return;
    for (const [name, bytes] of this.memoryChart.peaks()) {
      document.getElementById(`peak-${name}`).textContent = `, peak ${showBytes(bytes)}`;
    }
  }

  // ---- what is shown

  setIteration(number) {
    this.span.setIteration(this.model.iterations[number]);
    document.getElementById("iteration").value = String(number);
    this.changeCurve();
    this._tracePath();
  }

  setClock(clock) {
    this.clock = clock;
    this.changeCurve();
  }

  changeCurve() {
    this.memoryChart.setCurve();
    this.showPeaks();
    this.redraw();
  }

  setTheme(theme) {
    this.theme = theme;
    document.documentElement.dataset.theme = theme;
    document.getElementById("theme").textContent = theme === "dark" ? "Light" : "Dark";
    if (!this.timeline) return;
    for (const chart of [this.timeline, this.memoryChart]) chart.plot.redraw(true, true);
    this.details.update();
    this.redraw();
  }

  /** What a search finds: units and kernels whose name has the text; null shows everything. */
  find(text) {
    const wanted = text.trim().toLowerCase();
    const { strings, ops } = this.model;
    const named = (columns) => new Set(columns.filter((s) => strings[s].toLowerCase().includes(wanted)));
    this.found = wanted ? { units: named(ops.unit), names: named(ops.name) } : null;
    this.redraw();
    return this.found && this._foundOps();
  }

  _foundOps() {
    const { ops } = this.model, { units, names } = this.found;
    const found = range(0, ops.count).filter((op) => units.has(ops.unit[op]) || names.has(ops.name[op]));
    const shown = this.span.iteration.name;
    return found.filter((op) => shown === "all" || ops.iteration[op] === Number(shown) - 1);
  }

  // ---- the selection

  /** Select `node`. `remember`: Backspace returns to what was selected; `reveal`: move to it. */
  select(node, { remember = true, reveal = true } = {}) {
    if (remember && this.selected !== NOTHING) this.history.push(this.selected);
    this.selected = node;
    if (reveal && node !== NOTHING) this._reveal(node);
    this._tracePath();
    this.details.update();
    this.redraw();
  }

  _reveal(node) {
    const start = this.chain.start(node), end = this.chain.end(node);
    const [low, high] = this.span.limits;
    if (end < low || start > high) this.setIteration(this.chain.iteration(node));
    this.span.reveal(start, end);
  }

  /** The binding waits that led to the selected op; or else the critical path, if asked for. */
  _tracePath() {
    const { start, name } = this.span.iteration, until = Math.max(start, 0);
    if (this.selected !== NOTHING) this.path = this.chain.path(this.selected, until);
    else if (!this.critical) this.path = [];
    else {
      const last = name === "all" ? Infinity : Number(name) - 1;
      this.path = this.chain.path(this.chain.lastOp(last), this.span.iteration.origin);
    }
  }

  follow() {
    if (this.selected === NOTHING) return;
    const before = this.chain.waitedFor(this.selected);
    if (before !== NOTHING) this.select(before);
  }

  back() {
    if (this.history.length) this.select(this.history.pop(), { remember: false });
  }

  clear() {
    this.history = [];
    this.search.value = "";
    this.search.dispatchEvent(new Event("input"));
    this.select(NOTHING, { remember: false });
  }

  toggleCritical() {
    this.critical = !this.critical;
    document.getElementById("critical").setAttribute("aria-pressed", String(this.critical));
    if (this.critical && this.selected !== NOTHING) this.select(NOTHING);
    this._tracePath();
    this.redraw();
  }

  fitSelected() {
    if (this.selected === NOTHING) return;
    this.span.fit(this.chain.start(this.selected), this.chain.end(this.selected));
  }

  /** The time that keys zoom at: the selected op's if it is in sight, else the middle. */
  middle() {
    const { span, chain, selected } = this;
    const time = selected === NOTHING ? NaN : (chain.start(selected) + chain.end(selected)) / 2;
    return time > span.low && time < span.high ? time : (span.low + span.high) / 2;
  }

  /** Select the next or previous bar of the selected one's lane. */
  selectBeside(way) {
    const lane = this.model.lanes[this._laneNumber()];
    const i = nearest(lane, this._time(), Infinity) + (this.selected === NOTHING ? 0 : way);
    if (i >= 0 && i < lane.count) this._selectBar(lane, i);
  }

  /** Select the nearest bar on the next lane, down or up, that has any. */
  selectLane(way) {
    const { lanes } = this.model;
    let number = this._laneNumber() + (this.selected === NOTHING ? 0 : way);
    while (lanes[number] && !lanes[number].count) number += way;
    const lane = lanes[number];
    if (lane) this._selectBar(lane, nearest(lane, this._time(), Infinity));
  }

  _selectBar(lane, i) {
    this.select(lane.isHost ? -2 - lane.item[i] : lane.item[i]);
  }

  _laneNumber() {
    const { model, selected, chain } = this;
    return selected === NOTHING ? model.lanes.indexOf(model.compute) : chain.lane(selected);
  }

  _time() {
    const { chain, selected, span } = this;
    if (selected === NOTHING) return (span.low + span.high) / 2;
    return (chain.start(selected) + chain.end(selected)) / 2;
  }

  /** Zoom to the next idle time of the compute stream, or to the one before. */
  showGap(way) {
    const { span } = this;
    const gap = this.gaps.beside((span.low + span.high) / 2, way);
    if (gap && gap.end > span.limits[0] && gap.start < span.limits[1]) span.fit(gap.start, gap.end);
  }

  // ---- focus, and the stretch that a pointer marks

  focus() {
    this.plots.focus({ preventScroll: true });
  }

  hasFocus() {
    return document.activeElement === this.plots;
  }

  markSelection(low, high) {
    const { plot } = this.timeline;
    const at = (time) => this.span.share(time) * plot.over.clientWidth;
    const [left, right] = low === null ? [0, 0] : [at(Math.min(low, high)), at(Math.max(low, high))];
    for (const chart of [this.timeline, this.memoryChart]) {
      const { clientHeight: height } = chart.plot.over;
      chart.plot.setSelect({ left, width: right - left, top: 0, height }, false);
    }
  }
}
