// ---- span.js: which stretch of time the charts show, within the limits of one iteration.

/** Seconds from `low` to `high`, and what the axis calls zero. Calls `changed` at every move. */
class Span {
  constructor(iteration, changed) {
    this.changed = changed;
    this.setIteration(iteration);
  }

  /** Show all of `iteration`. */
  setIteration(iteration) {
    const margin = 0.006 * (iteration.end - iteration.start);
    this.iteration = iteration;
    this.origin = iteration.origin;
    this.limits = [iteration.start - margin, iteration.end + margin];
    this.least = (this.limits[1] - this.limits[0]) * 1e-7;
    this.reset();
  }

  get length() {
    return this.high - this.low;
  }

  /** The time as a share of what is shown: 0 at its left edge, 1 at its right. */
  share(time) {
    return (time - this.low) / this.length;
  }

  reset() {
    this.show(...this.limits);
  }

  /** Show `low` to `high`, as far as the limits allow. */
  show(low, high) {
    const [first, last] = this.limits;
    const length = Math.max(high - low, this.least);
    if (length >= last - first) [this.low, this.high] = this.limits;
    else {
      this.low = Math.min(Math.max((low + high - length) / 2, first), last - length);
      this.high = this.low + length;
    }
    this.changed();
  }

  /** Zoom by `factor` (more than 1: closer) so that `time` stays where it is. */
  zoom(factor, time = (this.low + this.high) / 2) {
    const length = Math.max(this.length / factor, this.least);
    const low = time - this.share(time) * length;
    this.show(low, low + length);
  }

  /** Move by a share of what is shown. */
  pan(share) {
    const step = share * this.length;
    this.show(this.low + step, this.high + step);
  }

  /** Bring `start` to `end` into sight: moved if it is outside, zoomed if it would be a speck. */
  reveal(start, end) {
    const length = Math.max(end - start, this.least);
    const seen = start >= this.low && end <= this.high && length > this.length / 400;
    if (!seen) {
      const wide = length > this.length / 400 && length < this.length ? this.length : 12 * length;
      this.show((start + end - wide) / 2, (start + end + wide) / 2);
    }
  }

  /** Zoom so that `start` to `end` fills most of the width. */
  fit(start, end) {
    const margin = 0.15 * Math.max(end - start, this.least);
    this.show(start - margin, end + margin);
  }
}
