// ---- overview.js: the whole iteration in a strip, and the window on it that the charts show.

const OVERVIEW_HEIGHT = 44;
const GRIP = 7;

class Overview {
  constructor(root, app) {
    this.app = app;
    this.canvas = document.createElement("canvas");
    this.canvas.height = OVERVIEW_HEIGHT;
    root.append(this.canvas);
    this.resize(app.width());
    this._listen();
  }

  resize(width) {
    const ratio = uPlot.pxRatio;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(OVERVIEW_HEIGHT * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${OVERVIEW_HEIGHT}px`;
    this.update();
  }

  /** The strip as a span of its own. */
  _whole() {
    const [low, high] = this.app.span.limits;
    return { low, high, share: (time) => (time - low) / (high - low) };
  }

  update() {
    const { app, canvas } = this, ratio = uPlot.pxRatio;
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, canvas.width, canvas.height);
    const lanes = app.model.lanes.filter((lane) => !lane.isHost);
    const left = GUTTER * ratio, width = canvas.width - (GUTTER + RIGHT) * ratio;
    const height = (canvas.height - 8 * ratio) / lanes.length;
    lanes.forEach((lane, number) => {
      const top = Math.round(4 * ratio + number * height);
      const box = { left, top, width, height: Math.max(Math.round(height) - 1, 1) };
      paintBars(context, lane, box, this._whole(), app.theme, ratio, app.strength(lane));
    });
    this._window(context, left, width, ratio);
  }

  /** Veil what the charts do not show, and frame what they do. */
  _window(context, left, width, ratio) {
    const whole = this._whole(), { span } = this.app;
    const [low, high] = [span.low, span.high].map((time) => left + whole.share(time) * width);
    const { height } = this.canvas;
    context.fillStyle = this.app.colour("paper");
    context.globalAlpha = 0.72;
    context.fillRect(left, 0, low - left, height);
    context.fillRect(high, 0, left + width - high, height);
    context.globalAlpha = 1;
    context.strokeStyle = this.app.colour("quiet");
    context.lineWidth = ratio;
    context.strokeRect(low + 0.5, 0.5, Math.max(high - low - 1, 2 * ratio), height - 1);
  }

  // ---- dragging

  _time(event) {
    const { left, width } = this.canvas.getBoundingClientRect();
    const share = (event.clientX - left - GUTTER) / (width - GUTTER - RIGHT);
    const [low, high] = this.app.span.limits;
    return low + Math.min(Math.max(share, 0), 1) * (high - low);
  }

  /** Near an edge of the window: that edge; inside: the window; else a new window. */
  _handle(time) {
    const { span } = this.app, whole = span.limits[1] - span.limits[0];
    const grip = (GRIP / (this.canvas.clientWidth - GUTTER - RIGHT)) * whole;
    if (span.length > 0.999 * whole) return "new";
    if (Math.abs(time - span.low) < grip) return "low";
    if (Math.abs(time - span.high) < grip) return "high";
    return time > span.low && time < span.high ? "window" : "new";
  }

  _listen() {
    let drag = null;
    this.canvas.addEventListener("pointerdown", (event) => {
      const time = this._time(event), { low, high } = this.app.span;
      drag = { handle: this._handle(time), time, low, high };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      const cursors = { low: "ew-resize", high: "ew-resize", window: "grab", new: "crosshair" };
      if (drag) this._drag(drag, this._time(event));
      else this.canvas.style.cursor = cursors[this._handle(this._time(event))];
    });
    for (const end of ["pointerup", "pointercancel"]) {
      this.canvas.addEventListener(end, () => { drag = null; });
    }
  }

  _drag({ handle, time, low, high }, now) {
    const { span } = this.app, step = now - time;
    if (handle === "window") span.show(low + step, high + step);
    else if (handle === "low") span.show(Math.min(now, high), Math.max(now, high));
    else if (handle === "high") span.show(Math.min(now, low), Math.max(now, low));
    else if (Math.abs(step) > span.least) span.show(Math.min(time, now), Math.max(time, now));
  }
}
