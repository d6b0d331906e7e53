// ---- facts.js: what is known of one op, tile, or idle time, as [label, text] pairs.

/** Turns nodes into words. Times are shown from the start of the shown iteration. */
class Facts {
  constructor(model, chain, span) {
    this.model = model;
    this.chain = chain;
    this.span = span;
  }

  moment(time) {
    return showSeconds(time - this.span.origin);
  }

  /** `22.596 ms to 22.604 ms`. */
  stretch(start, end) {
    const show = (time) => showMoment(time - this.span.origin, end - start || Infinity);
    return `${show(start)} to ${show(end)}`;
  }

  name(node) {
    if (node === NOTHING) return "nothing";
    const unit = this.unit(node);
    return `${this.title(node)}${unit ? ` of ${unit}` : ""}`;
  }

  title(node) {
    const { host, ops } = this.model;
    if (!this.chain.isTile(node)) return this.model.text(ops.name[node]);
    const tile = this.chain.tile(node), cause = this.model.text(host.cause[tile]);
    if (host.op[tile] !== NOTHING) return `launch of ${this.model.text(ops.name[host.op[tile]])}`;
    return this.look(node).label.startsWith("wait: ") ? this.look(node).label : cause;
  }

  unit(node) {
    const { host, ops } = this.model;
    return this.model.text(this.chain.isTile(node) ? host.unit[this.chain.tile(node)] : ops.unit[node]);
  }

  look(node) {
    const { host, ops, style } = this.model;
    return this.chain.isTile(node)
      ? style.host[this.model.text(host.look[this.chain.tile(node)])]
      : style.kinds[this.model.text(ops.kind[node])];
  }

  /** Everything about a node. */
  of(node) {
    return this.chain.isTile(node) ? this._tile(node) : this._op(node);
  }

  _op(op) {
    const { ops } = this.model;
    const text = (column) => this.model.text(column[op]);
    return [
      ["kind", this.look(op).label],
      ["unit", text(ops.unit) || "none: the training loop"],
      ["phase", `${text(ops.phase)}, iteration ${ops.iteration[op] + 1}`],
      ["runs", this.stretch(ops.start[op], ops.end[op])],
      ["duration", showSeconds(ops.end[op] - ops.start[op])],
      ["issued", `${this.moment(ops.issued[op])}${this._delay(ops.start[op] - ops.issued[op])}`],
      ["stream", this.model.lanes[ops.lane[op] + 1].name],
      ...this._moved(ops.moved[op]),
      ["waited for", this.waited(op)],
    ];
  }

  _delay(seconds) {
    return seconds > 0 ? `, ${showSeconds(seconds)} before it starts` : ", and it starts at once";
  }

  /** What a collective moves. */
  _moved(number) {
    if (number === NOTHING) return [];
    const [communicator, bytes, shard, dtype, group, size, trigger, by] =
      this.model.ops.collectives[number];
    const share = shard ? `, ${showBytes(shard)} of this rank` : "";
    const found = [
      ["communicator", communicator],
      ["bytes", `${showBytes(bytes)} (${dtype})${share}`],
      ["group", `${group}, ${counted(size, "rank")}`],
    ];
    if (trigger) found.push(["issued on", trigger + (by ? `, by the hook of ${by}` : "")]);
    return found;
  }

  /** The binding constraint: what was last to allow the start. */
  waited(op) {
    const { ops } = this.model;
    const node = ops.bound[op];
    if (node === NOTHING) return "nothing: it could start at time zero";
    const late = this.chain.end(node) < ops.start[op] ? "; then for other ranks" : "";
    if (this.chain.isTile(node)) return `the CPU thread: ${this._issue(node)}${late}`;
    return `${this.name(node)} (${this._why(op, node)})${late}`;
  }

  _issue(node) {
    const tile = this.chain.tile(node), { host } = this.model;
    return host.op[tile] === NOTHING ? `it was in ${this.title(node)}` : "it started when issued";
  }

  _why(op, node) {
    const { ops } = this.model;
    if (ops.lane[op] === ops.lane[node]) return "before it on its stream";
    if (ops.deps[op].length === 0) return "event";
    const communicator = (i) => this.model.ops.collectives[ops.moved[i]]?.[0];
    const same = communicator(op) && communicator(op) === communicator(node);
    return same ? "before it on its communicator" : "an event of its stream";
  }

  _tile(node) {
    const { host } = this.model;
    const tile = this.chain.tile(node), awaited = host.awaited[tile];
    const found = [
      ["CPU thread", this.look(node).label],
      ["unit", this.unit(node) || "none: the training loop"],
      ["iteration", String(host.iteration[tile] + 1)],
      ["from", this.stretch(host.start[tile], host.end[tile])],
      ["duration", showSeconds(host.end[tile] - host.start[tile])],
    ];
    if (awaited !== NOTHING) found.push(["waited for", this.name(awaited)]);
    return found;
  }

  /** An idle time of the compute stream: its causes where they are known, else what came after. */
  idle(gap) {
    const found = [
      ["from", this.stretch(gap.start, gap.end)],
      ["duration", showSeconds(gap.end - gap.start)],
    ];
    for (const part of gap.parts) {
      found.push([showSeconds(part.end - part.start), part.words]);
    }
    if (gap.next !== NOTHING) found.push(["then", this.name(gap.next)]);
    return found;
  }
}
