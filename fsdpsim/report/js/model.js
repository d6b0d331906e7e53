// ---- model.js: decodes the page's data block into columns. Times are seconds from the start.

const NOTHING = -1;
const GROUPED = ["forward", "recompute", "backward", "optimizer"];

/** First index of the sorted `column` whose value is greater than `value`. */
function firstAbove(column, value) {
  let low = 0, high = column.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Sums of differences, divided: integers add up exactly, so equal times stay equal. */
function summed(differences, divisor = 1) {
  const column = new Float64Array(differences.length);
  let sum = 0;
  differences.forEach((step, i) => {
    sum += step;
    column[i] = sum / divisor;
  });
  return column;
}

/** What a simulation did: ops, the CPU thread's tiles, lanes, iterations. */
class Model {
  constructor(data) {
    const source = data.timeline;
    this.perSecond = data.ticks_per_second;
    this.strings = data.strings;
    this.style = data.style;
    this.units = source.units;
    this.unitIndex = new Map(source.units.map((name, i) => [name, i]));
    this.short = new Map(source.units.map((name, i) => [name, source.short[i]]));
    this.iterations = source.iterations.map((each) => this._iteration(each));
    this.ops = this._ops(source.ops);
    this.host = this._host(source.host);
    this.idle = source.idle.map((each) => this._idle(each));
    this.lanes = [this._hostLane(source.host_lane)];
    source.lanes.forEach((name, i) => this.lanes.push(this._opLane(name, i)));
    this.compute = this.lanes.find((lane) => lane.name === source.compute) ?? this.lanes[0];
  }

  text(index) {
    return this.strings[index];
  }

  _iteration(each) {
    const seconds = (name) => each[name] / this.perSecond;
    return {
      name: each.name,
      start: seconds("start"),
      end: seconds("end"),
      origin: seconds("origin"),
      stepEnd: seconds("step_end"),
    };
  }

  _ops(source) {
    return {
      ...source,
      count: source.name.length,
      issued: summed(source.issued, this.perSecond),
      launch: source.launch.map((ticks) => ticks / this.perSecond),
      start: summed(source.start, this.perSecond),
      end: summed(source.end, this.perSecond),
    };
  }

  _host(source) {
    const end = summed(source.end, this.perSecond);
    const start = Float64Array.from(end, (_, i) => (i ? end[i - 1] : 0));
    return { ...source, count: end.length, start, end };
  }

  _idle([start, end, words, op, waitsFor]) {
    const at = (ticks) => ticks / this.perSecond;
    return { start: at(start), end: at(end), words: this.text(words), op, waitsFor };
  }

  /** Bars of one stream: `item` is the op of each. */
  _opLane(name, number) {
    const { ops } = this;
    const item = [];
    for (let op = 0; op < ops.count; op++) if (ops.lane[op] === number) item.push(op);
    const looks = item.map((op) => this.style.kinds[this.text(ops.kind[op])]);
    return this._lane(name, false, item, looks, ops);
  }

  /** Bars of the CPU thread: `item` is the tile of each; `ticks` are launches that take no time. */
  _hostLane(name) {
    const { host, ops } = this;
    const item = Array.from({ length: host.count }, (_, i) => i);
    const looks = item.map((tile) => this.style.host[this.text(host.look[tile])]);
    const ticks = ops.issued.filter((time, op) => !ops.launch[op] && time !== ops.issued[op - 1]);
    return { ...this._lane(name, true, item, looks, host), ticks };
  }

  _lane(name, isHost, item, looks, columns) {
    const pick = (column) => Float64Array.from(item, (i) => column[i]);
    const parity = (i) => (this.unitIndex.get(this.text(columns.unit[i])) ?? 0) % 2;
    const lane = {
      name,
      isHost,
      item,
      looks,
      count: item.length,
      start: pick(columns.start),
      end: pick(columns.end),
      shade: item.map((i) => (isHost ? 0 : parity(i))),
      iteration: item.map((i) => columns.iteration[i]),
      unit: item.map((i) => columns.unit[i]),
    };
    lane.groups = starts(lane, (i) => this._groupKey(lane, columns, i));
    lane.runs = starts(lane, (i) => `${isHost ? i : columns.phase[item[i]]} ${lane.iteration[i]}`);
    return lane;
  }

  /** Kernels of one unit and kind share a text; anything else has its own. */
  _groupKey(lane, columns, i) {
    if (lane.isHost || !GROUPED.includes(this.text(columns.kind[lane.item[i]]))) return i;
    return `${columns.kind[lane.item[i]]} ${lane.unit[i]} ${lane.iteration[i]}`;
  }
}

/** Where the key of a lane's bars changes: the first index of each stretch of equal keys. */
function starts(lane, keyOf) {
  const found = [];
  let before = null;
  for (let i = 0; i < lane.count; i++) {
    const key = keyOf(i);
    if (key !== before) found.push(i);
    before = key;
  }
  return found;
}
