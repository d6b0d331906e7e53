// ---- chain.js: who waited for whom. A node is an op (from 0), or a tile of the CPU thread (from -2
// down), or NOTHING.

class Chain {
  constructor(model) {
    this.model = model;
    this.released = this._released();
    this.needed = this._needed();
  }

  isTile(node) {
    return node <= -2;
  }

  tile(node) {
    return -2 - node;
  }

  start(node) {
    return this.isTile(node) ? this.model.host.start[this.tile(node)] : this.model.ops.start[node];
  }

  end(node) {
    return this.isTile(node) ? this.model.host.end[this.tile(node)] : this.model.ops.end[node];
  }

  iteration(node) {
    const { host, ops } = this.model;
    return this.isTile(node) ? host.iteration[this.tile(node)] : ops.iteration[node];
  }

  /** The number of the node's lane; the CPU thread is the first. */
  lane(node) {
    return this.isTile(node) ? 0 : this.model.ops.lane[node] + 1;
  }

  /** The op whose end let the blocked CPU thread go on in this tile; NOTHING if it was busy. */
  awaited(node) {
    return this.isTile(node) ? this.model.host.awaited[this.tile(node)] : NOTHING;
  }

  /** What `node` started at the end of. */
  before(node) {
    if (!this.isTile(node)) return this.model.ops.bound[node];
    const tile = this.tile(node);
    return tile > 0 ? -2 - (tile - 1) : NOTHING;
  }

  /** What a person follows: the CPU thread's wait leads to the op that it was for. */
  waitedFor(node) {
    const awaited = this.awaited(node);
    return awaited === NOTHING ? this.before(node) : awaited;
  }

  /** Ops that started at the end of each op, because of it. */
  _released() {
    const found = new Map();
    this.model.ops.bound.forEach((node, op) => {
      if (node >= 0) found.set(node, [...(found.get(node) ?? []), op]);
    });
    return found;
  }

  /** Ops that have each op among their dependencies. */
  _needed() {
    const found = new Map();
    this.model.ops.deps.forEach((deps, op) => {
      for (const dep of deps) found.set(dep, [...(found.get(dep) ?? []), op]);
    });
    return found;
  }

  /** The way back from the end of `node` to `until`: { node, start, end }, latest first, no gaps. */
  path(node, until) {
    const found = [];
    let time = this.end(node);
    while (node !== NOTHING && time > until) {
      time = Math.min(time, this.end(node)); // earlier: other ranks or contention came between
      const awaited = this.awaited(node);
      if (awaited !== NOTHING) {
        const drained = Math.min(Math.max(this.end(awaited), until), time);
        found.push({ node, start: drained, end: time });
        [node, time] = [awaited, drained];
        continue;
      }
      const start = Math.max(Math.min(this.start(node), time), until);
      found.push({ node, start, end: time });
      [node, time] = [this.before(node), start];
    }
    return found;
  }

  /** The op at whose end the work of the iterations up to `last` ends. */
  lastOp(last) {
    const { ops } = this.model;
    let best = NOTHING;
    for (let op = 0; op < ops.count; op++) {
      if (ops.iteration[op] <= last && (best === NOTHING || ops.end[op] >= ops.end[best])) best = op;
    }
    return best;
  }
}
