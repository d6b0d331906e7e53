// ---- timeline.js: the chart of lanes: the CPU thread and the streams.

const LANE_HEIGHT = 34;
const BAR_SHARE = 0.66;
const REACH = 3;
const MOST_LINKS = 60;

class TimelineChart {
  constructor(root, app) {
    this.app = app;
    this.lanes = app.model.lanes;
    const options = chartOptions(app, this.lanes.length * LANE_HEIGHT + 26);
    options.scales.y = { auto: false, range: () => [0, this.lanes.length], dir: -1 };
    options.series = [{}, { paths: () => null, points: { show: false } }];
    options.axes = [timeAxis(app, 0), this._names()];
    options.hooks = { draw: [() => this._draw()] };
    this.plot = new uPlot(options, [[0, 1], [0, 0]], root);
  }

  _names() {
    return {
      ...axis(this.app),
      size: GUTTER,
      gap: 8,
      stroke: () => this.app.colour("ink"),
      grid: { show: false },
      ticks: { show: false },
      splits: () => this.lanes.map((_, i) => i + 0.5),
      values: () => this.lanes.map((lane) => lane.name),
    };
  }

  update() {
    showSpan(this.plot, this.app.span);
  }

  resize(width) {
    this.plot.setSize({ width, height: this.plot.height });
  }

  // ---- drawing

  /** Where the bars of a lane are, in device pixels. */
  _box(number) {
    const { bbox } = this.plot;
    const height = bbox.height / this.lanes.length;
    const margin = (height * (1 - BAR_SHARE)) / 2;
    return {
      left: bbox.left,
      top: Math.round(bbox.top + number * height + margin),
      width: bbox.width,
      height: Math.round(height * BAR_SHARE),
    };
  }

  _draw() {
    const { app, plot } = this;
    const { ctx: context, bbox } = plot, ratio = uPlot.pxRatio;
    const labels = new LabelPainter(context, app.model, FONT.replace("12px", `${11.5 * ratio}px`));
    context.save();
    context.beginPath();
    context.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    context.clip();
    this.lanes.forEach((lane, number) => {
      const box = this._box(number), strength = app.strength(lane);
      paintBars(context, lane, box, app.span, app.theme, ratio, strength);
      this._ticks(context, lane, box, ratio);
      const phases = lane === app.model.compute && app.found === null;
      labels.paint(lane, box, app.span, app.theme, ratio, strength, phases);
      if (lane.isHost) this._absence(context, lane, box);
    });
    this._boundaries(ratio);
    new PathPainter(this, context, ratio).paint();
    context.restore();
  }

  /** Why the CPU thread's lane is empty: it may have issued all of this long before. */
  _absence(context, lane, box) {
    const { span, model, facts } = this.app, { ops } = model;
    const seen = (column) => column[firstAbove(column, span.low)] < span.high;
    if (seen(lane.ticks) || seen(lane.start) || seen(lane.end)) return;
    const shown = span.iteration.name;
    const times = ops.issued.filter((_, op) => shown === "all" || ops.iteration[op] === shown - 1);
    if (!times.length) return;
    context.textAlign = "left";
    context.fillStyle = this.app.colour("quiet");
    const [first, last] = [times[0], times.at(-1)].map((time) => facts.moment(time));
    const when = first === last ? `at ${first}` : `from ${first} to ${last}`;
    const text = `issued all of this ${when}`;
    context.fillText(text, box.left + box.height / 2, box.top + box.height / 2);
  }

  /** Launches that take no time. */
  _ticks(context, lane, box, ratio) {
    if (!lane.ticks?.length) return;
    const { span } = this.app;
    context.fillStyle = this.app.colour("ink");
    let before = -1;
    for (let i = firstAbove(lane.ticks, span.low); lane.ticks[i] < span.high; i++) {
      const x = Math.round(box.left + span.share(lane.ticks[i]) * box.width);
      if (x !== before) context.fillRect(x, box.top - 2 * ratio, ratio, box.height + 4 * ratio);
      before = x;
    }
  }

  _boundaries(ratio) {
    const { app } = this;
    for (const { stepEnd } of app.model.iterations.slice(0, -1)) {
      markTime(this.plot, app.span, stepEnd, app.colour("quiet"), ratio);
    }
    const { oom } = app.memory;
    if (oom) markTime(this.plot, app.span, oom.time, app.lineColour("capacity"), ratio, []);
  }

  // ---- pointing

  /** What is at (left, top) CSS pixels of the plotting area: a node, an idle time, or nothing. */
  hit(left, top) {
    const { span } = this.app;
    const { clientWidth: width, clientHeight: height } = this.plot.over;
    const number = Math.floor((top / height) * this.lanes.length);
    const lane = this.lanes[number];
    if (!lane) return null;
    const time = span.low + (left / width) * span.length;
    const i = nearest(lane, time, (REACH / width) * span.length);
    if (i >= 0) return { node: lane.isHost ? -2 - lane.item[i] : lane.item[i] };
    const gap = lane === this.app.model.compute ? this.app.gaps.at(time) : null;
    return gap ? { gap } : null;
  }
}

/** The bar at `time`, or the nearest within `reach` seconds; -1 if there is none. */
function nearest(lane, time, reach) {
  const i = firstAbove(lane.end, time);
  if (i < lane.count && lane.start[i] <= time) return i;
  const after = i < lane.count ? lane.start[i] - time : Infinity;
  const before = i > 0 ? time - lane.end[i - 1] : Infinity;
  if (Math.min(after, before) > reach) return -1;
  return after < before ? i : i - 1;
}

/** Idle times of the compute stream. */
class Gaps {
  constructor(model) {
    const { compute: lane, iterations, idle } = model;
    const ends = iterations.slice(0, -1).map((each) => each.stepEnd);
    this.all = [];
    let time = 0;
    const add = (start, end, next) => {
      const cuts = [start, ...ends.filter((at) => at > start && at < end), end];
      cuts.slice(1).forEach((cut, i) => {
        const parts = idle.filter((part) => part.start < cut && part.end > cuts[i]);
        this.all.push({ start: cuts[i], end: cut, next: cut === end ? next : NOTHING, parts });
      });
    };
    for (let i = 0; i < lane.count; i++) {
      if (lane.start[i] > time) add(time, lane.start[i], lane.item[i]);
      time = Math.max(time, lane.end[i]);
    }
    const last = ends.at(-1) ?? time;
    if (last > time) add(time, last, NOTHING);
    this.ends = Float64Array.from(this.all, (gap) => gap.end);
  }

  /** The idle time that includes `time`, or null. */
  at(time) {
    const gap = this.all[firstAbove(this.ends, time)];
    return gap && gap.start <= time ? gap : null;
  }

  /** The next one that begins after `time` (or, `way` -1, the last that ends before it). */
  beside(time, way) {
    const found = way > 0
      ? this.all.find((gap) => gap.start > time)
      : this.all.findLast((gap) => gap.end < time);
    return found ?? null;
  }
}

/** Lines over the bars: the selected op and what it waited for, or the critical path. */
class PathPainter {
  constructor(chart, context, ratio) {
    this.chart = chart;
    this.app = chart.app;
    this.context = context;
    this.ratio = ratio;
  }

  paint() {
    const { app } = this;
    if (app.path.length) this._path(app.path);
    if (app.selected === NOTHING) return;
    this._links(app.selected);
    this._outline(app.selected);
  }

  _x(time) {
    const { bbox } = this.chart.plot;
    const share = this.app.span.share(time);
    return bbox.left + Math.min(Math.max(share, -1), 2) * bbox.width; // canvases dislike huge numbers
  }

  /** Along the foot of each bar on the way, and from lane to lane where one waited for another. */
  _path(path) {
    const line = new Path2D(), heads = [];
    let before = null;
    for (const { node, start, end } of path) {
      const box = this.chart._box(this.app.chain.lane(node));
      const y = box.top + box.height + this.ratio;
      if (before !== null && before.y !== y) heads.push([this._x(end), y, before.y]);
      line.moveTo(this._x(start), y);
      line.lineTo(this._x(end), y);
      if (before !== null) line.lineTo(this._x(end), before.y);
      before = { y };
    }
    this._stroke(line, 5, this.app.colour("paper"));
    this._stroke(line, 2.5, this.app.colour("ink"));
    for (const [x, from, to] of heads) this._head(x, from, to);
  }

  _stroke(line, width, colour, dash = []) {
    const { context, ratio } = this;
    context.strokeStyle = colour;
    context.lineWidth = width * ratio;
    context.setLineDash(dash.map((length) => length * ratio));
    context.lineJoin = "round";
    context.stroke(line);
    context.setLineDash([]);
  }

  /** An arrow head at (x, to), coming from `from`. */
  _head(x, from, to) {
    const { context, ratio } = this, way = Math.sign(to - from) * 6 * ratio;
    context.fillStyle = this.app.colour("ink");
    context.beginPath();
    context.moveTo(x, to);
    context.lineTo(x - 4 * ratio, to - way);
    context.lineTo(x + 4 * ratio, to - way);
    context.fill();
  }

  /** Thin lines from all that the op depended on, and to all that started when it ended. */
  _links(node) {
    const { chain, model } = this.app;
    if (chain.isTile(node)) return;
    const before = model.ops.deps[node], after = chain.released.get(node) ?? [];
    const line = new Path2D();
    for (const dep of before.slice(0, MOST_LINKS)) this._link(line, dep, node);
    for (const op of after.slice(0, MOST_LINKS)) this._link(line, node, op);
    this._stroke(line, 3.5, this.app.colour("paper"));
    this._stroke(line, 1.2, this.app.colour("ink"), [4, 3]);
  }

  _link(line, source, target) {
    const { chain } = this.app;
    const middle = (node) => {
      const box = this.chart._box(chain.lane(node));
      return box.top + box.height / 2;
    };
    line.moveTo(this._x(chain.end(source)), middle(source));
    line.lineTo(this._x(chain.start(target)), middle(target));
  }

  _outline(node) {
    const { context, ratio, app } = this;
    const { top, height } = this.chart._box(app.chain.lane(node));
    const left = this._x(app.chain.start(node)), right = this._x(app.chain.end(node));
    const width = Math.max(right - left, 2 * ratio);
    for (const [colour, grow, thick] of [["paper", 3, 2], ["ink", 1.5, 2]]) {
      context.strokeStyle = app.colour(colour);
      context.lineWidth = thick * ratio;
      const more = grow * ratio;
      context.strokeRect(left - more, top - more, width + 2 * more, height + 2 * more);
    }
  }
}
