// ---- paint.js: bars of a lane and the texts on them, at any zoom, on a canvas in device pixels.
//
// A box is { left, top, width, height }. `strength(i)` says how opaque bar i is, from 0 to 1.

/** Draw the bars of `lane` that are in `span`. */
function paintBars(context, lane, box, span, theme, ratio, strength) {
  const pixel = (time) => box.left + span.share(time) * box.width;
  const right = box.left + box.width;
  const column = new PixelColumn();
  const fill = (from, to, i) => {
    context.fillStyle = lane.looks[i].colour[theme][lane.shade[i]];
    context.globalAlpha = strength(i);
    context.fillRect(from, box.top, to - from, box.height);
  };
  for (let i = firstAbove(lane.end, span.low); i < lane.count && lane.start[i] < span.high; i++) {
    const low = Math.max(pixel(lane.start[i]), box.left), high = Math.min(pixel(lane.end[i]), right);
    const from = Math.round(low), to = Math.round(high);
    if (to > from) {
      column.flush(fill);
      const gap = to - from >= 4 * ratio ? Math.round(ratio) : 0;
      fill(from + gap, to, i);
    } else {
      if (column.at !== from) column.flush(fill);
      column.add(from, i, high - low, lane.looks[i]);
    }
  }
  column.flush(fill);
  context.globalAlpha = 1;
}

/** Bars narrower than a pixel, in one column of pixels: the look with most time in it is drawn. */
class PixelColumn {
  constructor() {
    this.at = -1;
    this.widths = new Map();
  }

  add(at, i, width, look) {
    this.at = at;
    const seen = this.widths.get(look);
    if (seen) seen.width += width;
    else this.widths.set(look, { width, i });
  }

  flush(fill) {
    if (!this.widths.size) return;
    let best = null;
    for (const each of this.widths.values()) if (!best || each.width > best.width) best = each;
    fill(this.at, this.at + 1, best.i);
    this.widths.clear();
    this.at = -1;
  }
}

/** Write on the bars of `lane`: kernels' names where most fit, else units, else whole phases. */
class LabelPainter {
  constructor(context, model, font) {
    this.context = context;
    this.model = model;
    this.font = font;
    this.widths = new Map();
  }

  paint(lane, box, span, theme, ratio, strength, phases) {
    this.context.font = this.font;
    this.context.textAlign = "center";
    this.context.textBaseline = "middle";
    this.frame = { lane, box, span, theme, strength, least: 9 * ratio, padding: 6 * ratio };
    const found = [];
    let seen = 0, labelled = 0;
    for (const [first, last] of this._visible(lane.groups)) {
      const texts = this._room(first, last) > 0 ? this._group(first, last) : [];
      if (this._numbered(first)) {
        seen += 1;
        if (texts.length) labelled += 1;
      }
      found.push(...texts);
    }
    const few = 2 * labelled < seen;
    // A bare number here and there would look like a mistake, not like a label.
    const lonely = (label) => phases ? this._numbered(label.first) : /^\d/.test(label.text);
    for (const label of found) if (!few || !lonely(label)) this._write(label);
    if (few && phases) this._phases();
  }

  _numbered(i) {
    return ["F", "F′", "B"].includes(this.frame.lane.looks[i].letter);
  }

  /** The stretches of bars in sight, as first and last index. */
  *_visible(firsts) {
    const { lane, span } = this.frame;
    for (let g = Math.max(firstAbove(firsts, firstAbove(lane.end, span.low)) - 1, 0); g < firsts.length; g++) {
      const last = (firsts[g + 1] ?? lane.count) - 1;
      if (lane.start[firsts[g]] >= span.high) return;
      yield [firsts[g], last];
    }
  }

  /** Where the stretch is on the canvas, as far as it is in sight. */
  _extent(first, last) {
    const { lane, box, span } = this.frame;
    const share = (time) => Math.min(Math.max(span.share(time), 0), 1);
    return [share(lane.start[first]), share(lane.end[last])].map((at) => box.left + at * box.width);
  }

  /** Pixels for text. */
  _room(first, last) {
    const [left, right] = this._extent(first, last);
    return right - left < this.frame.least ? 0 : right - left - this.frame.padding;
  }

  /** Labels of one unit: its kernels' names, or its own. */
  _group(first, last) {
    const kernels = last > first ? this._kernels(first, last) : [];
    if (kernels.length) return kernels;
    const text = this._fitting(this._room(first, last), this._texts(first));
    return text ? [{ first, last, text }] : [];
  }

  /** Names of the kernels from first to last, if those that fit cover half of their time. */
  _kernels(first, last) {
    const { lane, span } = this.frame;
    const found = [];
    let covered = 0, whole = 0;
    for (let i = first; i <= last && lane.start[i] < span.high; i++) {
      const seen = Math.min(lane.end[i], span.high) - Math.max(lane.start[i], span.low);
      if (seen <= 0) continue;
      whole += seen;
      const text = this._fitting(this._room(i, i), kernelNames(this._name(i)));
      if (!text) continue;
      found.push({ first: i, last: i, text });
      covered += seen;
    }
    return 2 * covered < whole ? [] : found;
  }

  _name(i) {
    const { lane } = this.frame;
    const { ops, host } = this.model;
    return this.model.text(lane.isHost ? host.cause[lane.item[i]] : ops.name[lane.item[i]]);
  }

  /** From the fullest to the shortest. */
  _texts(i) {
    const { lane } = this.frame;
    const { letter, label } = lane.looks[i];
    const name = this.model.text(lane.unit[i]), unit = this.model.short.get(name) ?? name;
    if (lane.isHost) return [label.replace("wait: ", "")];
    if (!letter) return [this._name(i).replaceAll("_", " ")];
    if (!unit) return [label, letter];
    return /^\d/.test(unit) ? [letter + unit, unit] : [`${letter} ${unit}`, unit, letter];
  }

  /** One word for all that a phase runs, where its units are too narrow for theirs. */
  _phases() {
    const { lane } = this.frame;
    for (const [first, last] of this._visible(lane.runs)) {
      const text = this.model.text(this.model.ops.phase[lane.item[first]]);
      const kind = this.model.style.kinds[text];
      if (kind && this._fitting(this._room(first, last), [text])) this._halo({ first, last, text }, kind);
    }
  }

  _fitting(room, texts) {
    return room > 0 ? texts.find((text) => text && this._width(text) <= room) : undefined;
  }

  _width(text) {
    if (!this.widths.has(text)) this.widths.set(text, this.context.measureText(text).width);
    return this.widths.get(text);
  }

  _middle({ first, last }) {
    const { box } = this.frame, [left, right] = this._extent(first, last);
    return [(left + right) / 2, box.top + box.height / 2 + 0.5];
  }

  _write(label, look = this.frame.lane.looks[label.first]) {
    const { lane, theme, strength } = this.frame;
    this.context.globalAlpha = Math.max(strength(label.first), 0.25);
    this.context.fillStyle = look.ink[theme][lane.shade[label.first]];
    this.context.fillText(label.text, ...this._middle(label));
    this.context.globalAlpha = 1;
  }

  /** Write over bars of several colours. */
  _halo(label, look) {
    const { box, theme } = this.frame;
    this.context.lineWidth = box.height / 5;
    this.context.lineJoin = "round";
    this.context.strokeStyle = look.colour[theme][0];
    this.context.strokeText(label.text, ...this._middle(label));
    this._write(label, look);
  }
}

/** The whole name, or what of it follows the module's. */
function kernelNames(name) {
  return [name, name.slice(name.indexOf(".") + 1)];
}
