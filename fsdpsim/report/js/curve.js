// ---- curve.js: adds up buffers to memory over time, on the CPU's clock or the GPU's.

const LEVEL_NAMES = ["requested", "allocated", "active", "reserved"];

/** What holds memory. Sizes are bytes. */
class Memory {
  constructor(data, model) {
    const { buffers, events } = data;
    this.model = model;
    this.categories = data.categories;
    this.buffers = buffers;
    this.events = events;
    this.count = buffers.name.length;
    this.clock = data.clock;
    this.capacity = data.capacity;
    this.first = data.first;
    this.oom = data.oom && { ...data.oom, time: data.oom.time / model.perSecond };
    this.pending = new Map(buffers.pending.map(([b, ticks]) => [b, ticks / model.perSecond]));
    this.gather = new Map(buffers.gather);
    this.time = { host: summed(data.host, model.perSecond), gpu: summed(data.gpu, model.perSecond) };
    this.levels = this._levels(data);
    this._lifetimes();
    this.curves = {};
    this.hasBytes = this.levels.reserved.some((bytes) => bytes > 0);
  }

  /** The curve on `clock`, made when it is first asked for. */
  curve(clock) {
    this.curves[clock] ??= new Curve(this, clock);
    return this.curves[clock];
  }

  size(buffer) {
    return this.buffers.nbytes[buffer] + this.buffers.rounding[buffer];
  }

  /** The allocator's levels after each sample. */
  _levels(data) {
    const levels = Object.fromEntries(
      LEVEL_NAMES.map((name) => [name, new Float64Array(this.events.length)]));
    const more = Object.fromEntries(
      ["requested", "active", "reserved"].map((name) => [name, held(data[name], this.events.length)]));
    let alive = 0, allocated = 0;
    this.events.forEach((event, i) => {
      const buffer = Math.abs(event) - 1, sign = Math.sign(event);
      alive += sign * this.buffers.nbytes[buffer];
      allocated += sign * this.size(buffer);
      levels.requested[i] = alive + more.requested[i];
      levels.allocated[i] = allocated;
      levels.active[i] = allocated + more.active[i];
      levels.reserved[i] = more.reserved[i];
    });
    return levels;
  }

  /**
   * The samples of an iteration as first and last: from the one before it, whose level it starts with.
   * Of all iterations, or of the only one: from the first.
   */
  samples(name) {
    const last = this.events.length - 1;
    if (name === "all" || this.first.length === 1) return [0, last];
    const next = this.first[Number(name)] ?? last + 1;
    return [Math.max(this.first[Number(name) - 1] - 1, 0), next - 1];
  }

  /** The sample of an iteration at which `level` is highest; the first of equals. */
  peak(level, name) {
    return highest(this.levels[level], ...this.samples(name));
  }

  /** The sample that allocates each buffer, and the one that frees it (or none ever does). */
  _lifetimes() {
    this.born = new Int32Array(this.count);
    this.freed = new Float64Array(this.count).fill(Infinity);
    this.events.forEach((event, i) => {
      if (event > 0) this.born[event - 1] = i;
      else this.freed[-event - 1] = i;
    });
  }

  /** Owners after sample `at`: bytes by category, and in each by unit, largest first. */
  owners(at) {
    const found = this.categories.map(() => new Map());
    for (let b = 0; b < this.count; b++) {
      if (this.born[b] > at || this.freed[b] <= at) continue;
      const units = found[this.buffers.category[b]], unit = this.buffers.unit[b];
      units.set(unit, (units.get(unit) ?? 0) + this.size(b));
    }
    return found.map((units) => [...units].sort((one, other) => other[1] - one[1]));
  }
}

/**
 * Columns over time: entry i holds from time[i] on.
 *
 * Of the changes at one instant only the last is kept, and the peaks of each level: the CPU may free a
 * block and allocate the next at once, and what is between lasts no time.
 */
class Curve {
  constructor(memory, clock) {
    const changes = sortedChanges(memory, memory.time[clock]);
    this.columns = stacked(memory, changes);
    for (const name of LEVEL_NAMES) {
      this.columns[name] = Float64Array.from(changes, ({ sample }) => memory.levels[name][sample]);
    }
    const kept = this._settled(changes, memory);
    this.length = kept.length;
    this.time = Float64Array.from(kept, (i) => changes[i].time);
    this.sample = Int32Array.from(kept, (i) => changes[i].sample);
    for (const [name, column] of Object.entries(this.columns)) {
      this.columns[name] = Float64Array.from(kept, (i) => column[i]);
    }
    this.watched = [...LEVEL_NAMES, "pending", "unsharded"].map((name) => this.columns[name]);
  }

  /** The last change of each instant, and the first that reaches a peak of an iteration. */
  _settled(changes, memory) {
    const last = (i) => changes[i + 1]?.time !== changes[i].time;
    const peaks = new Set(
      memory.model.iterations.flatMap(({ name }) => LEVEL_NAMES.map((level) => memory.peak(level, name))));
    return range(0, changes.length).filter((i) =>
      last(i) || (changes[i].pends !== "ends" && peaks.has(changes[i].sample)));
  }

  /** The entry that holds at `time`; -1 before the first. */
  at(time) {
    return firstAbove(this.time, time) - 1;
  }

  /** The first entry that shows sample number `sample`, or one after it. */
  entry(sample) {
    return firstAbove(this.sample, sample - 1);
  }

  /** The highest of `name` from `low` to `high` seconds. */
  most(name, low, high) {
    const column = this.columns[name];
    return column[highest(column, Math.max(this.at(low), 0), this.at(high))] ?? 0;
  }

  /** Entries to draw from `low` to `high`: each slice's last and the highest of what is watched. */
  thinned(low, high, slices) {
    const first = Math.max(this.at(low), 0), last = this.at(high);
    if (last - first < 2 * slices) return range(first, last + 1);
    const kept = new Set([first]);
    for (let i = first; i <= last; ) {
      const slice = Math.floor(((this.time[i] - low) / (high - low)) * slices);
      const end = firstAbove(this.time, low + ((slice + 1) / slices) * (high - low)) - 1;
      this._keep(kept, i, Math.max(end, i));
      i = Math.max(end, i) + 1;
    }
    return ascending(kept);
  }

  _keep(kept, first, last) {
    kept.add(last);
    for (const column of this.watched) kept.add(highest(column, first, last));
  }
}

/** Bytes by category and of pending buffers, and how many gatherings hold memory, after each change. */
function stacked(memory, changes) {
  const { buffers } = memory, names = [...memory.categories, "pending", "unsharded"];
  const columns = Object.fromEntries(names.map((name) => [name, new Float64Array(changes.length)]));
  const now = Object.fromEntries(names.map((name) => [name, 0]));
  const alive = new Map();
  changes.forEach(({ buffer, grows, pends }, i) => {
    const sign = grows ? 1 : -1;
    if (pends !== "ends") now[memory.categories[buffers.category[buffer]]] += sign * buffers.nbytes[buffer];
    if (pends) now.pending += (pends === "begins" ? 1 : -1) * memory.size(buffer);
    if (pends !== "begins") tally(alive, memory.gather.get(buffer), sign);
    now.unsharded = alive.size;
    for (const name of names) columns[name][i] = now[name];
  });
  return columns;
}

/** (position, value) changes as a column: each value holds until the next. */
function held(changes, length) {
  const column = new Float64Array(length);
  changes.forEach(([position, value], i) => {
    column.fill(value, position, changes[i + 1]?.[0] ?? length);
  });
  return column;
}

/** Allocations and frees by time, and the ends of frees that wait for the GPU. */
function sortedChanges(memory, times) {
  const released = [];
  const changes = memory.events.map((event, i) => {
    const buffer = Math.abs(event) - 1, end = memory.pending.get(buffer);
    const waits = event < 0 && end > times[i];
    if (waits) released.push({ time: end, buffer, grows: false, pends: "ends" });
    return { time: times[i], sample: i, buffer, grows: event > 0, pends: waits ? "begins" : "" };
  });
  released.sort((one, other) => one.time - other.time);
  return merged(changes, released);
}

/** Both lists in order of time, releases first; a release keeps the number of the sample before. */
function merged(changes, released) {
  const found = [];
  let next = 0, sample = 0;
  for (const change of changes) {
    while (next < released.length && released[next].time <= change.time) {
      found.push({ ...released[next++], sample });
    }
    sample = change.sample;
    found.push(change);
  }
  return found.concat(released.slice(next).map((release) => ({ ...release, sample })));
}

function tally(alive, key, step) {
  if (key === undefined) return;
  const number = (alive.get(key) ?? 0) + step;
  if (number) alive.set(key, number);
  else alive.delete(key);
}

/** The first index of the highest value from `first` to `last`, inclusive. */
function highest(column, first = 0, last = column.length - 1) {
  let best = first;
  for (let i = first; i <= last; i++) if (column[i] > column[best]) best = i;
  return best;
}

function ascending(numbers) {
  return [...numbers].sort((one, other) => one - other);
}

function range(low, high) {
  return Array.from({ length: Math.max(high - low, 0) }, (_, i) => low + i);
}
