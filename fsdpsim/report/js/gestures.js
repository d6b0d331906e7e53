// ---- gestures.js: pointer, wheel and keys move the span and the selection.

const WHEEL_SPEED = 0.0016;
const CLICK_REACH = 4;

/** Dragging, zooming and clicking on the plotting area of a chart; `clicked` gets its event. */
class Gestures {
  constructor(over, app, { clicked = () => {}, doubleClicked = () => {} }) {
    this.over = over;
    this.app = app;
    this.clicked = clicked;
    this.pointers = new Map();
    over.addEventListener("pointerdown", (event) => this._down(event));
    over.addEventListener("pointermove", (event) => this._move(event));
    for (const end of ["pointerup", "pointercancel"]) {
      over.addEventListener(end, (event) => this._up(event, end === "pointerup"));
    }
    over.addEventListener("dblclick", doubleClicked);
    over.addEventListener("wheel", (event) => this._wheel(event), { passive: false });
  }

  _time(x) {
    const { left, width } = this.over.getBoundingClientRect();
    return this.app.span.low + ((x - left) / width) * this.app.span.length;
  }

  _down(event) {
    if (event.button !== 0) return;
    this.over.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, event.clientX);
    const { low, high } = this.app.span;
    const mode = event.shiftKey ? "select" : "pan";
    this.drag = { mode, x: event.clientX, time: this._time(event.clientX), low, high, moved: false };
    this.app.focus();
  }

  _move(event) {
    if (!this.pointers.has(event.pointerId)) return;
    const before = this.pointers.get(event.pointerId);
    if (this.pointers.size === 2) this._pinch(event, before);
    this.pointers.set(event.pointerId, event.clientX);
    if (this.pointers.size > 1) return;
    const step = event.clientX - this.drag.x;
    if (Math.abs(step) > CLICK_REACH) this.drag.moved = true;
    if (!this.drag.moved) return;
    if (this.drag.mode === "pan") this._pan(step);
    else this.app.markSelection(this.drag.time, this._time(event.clientX));
  }

  _pan(step) {
    const seconds = (step / this.over.clientWidth) * (this.drag.high - this.drag.low);
    this.app.span.show(this.drag.low - seconds, this.drag.high - seconds);
  }

  /** Two fingers: the times under them stay under them. */
  _pinch(event, before) {
    const [other] = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
    const factor = Math.abs(event.clientX - other) / Math.max(Math.abs(before - other), 1);
    if (factor > 0.1) this.app.span.zoom(factor, this._time((event.clientX + other) / 2));
    this.drag.moved = true;
  }

  _up(event, completed) {
    if (!this.pointers.delete(event.pointerId) || this.pointers.size) return;
    const { mode, moved, time } = this.drag;
    if (completed && !moved) this.clicked(event);
    if (mode === "select") {
      this.app.markSelection(null);
      const now = this._time(event.clientX);
      if (completed && moved) this.app.span.show(Math.min(time, now), Math.max(time, now));
    }
  }

  /** The page keeps the plain wheel until a click says that it is meant for the charts. */
  _wheel(event) {
    const { span } = this.app;
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    if (!(event.ctrlKey || event.metaKey || this.app.hasFocus() || sideways)) return;
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 16 : 1;
    if (sideways && !event.ctrlKey) {
      span.pan(((event.deltaX || event.deltaY) * lines) / this.over.clientWidth);
    } else {
      span.zoom(Math.exp(-event.deltaY * lines * WHEEL_SPEED), this._time(event.clientX));
    }
  }
}

/** Keys while the charts have the focus: what each does. */
function chartKeys(app) {
  return {
    "+": () => app.span.zoom(1.5, app.middle()),
    "=": () => app.span.zoom(1.5, app.middle()),
    "-": () => app.span.zoom(1 / 1.5, app.middle()),
    ArrowLeft: () => app.span.pan(-0.15),
    ArrowRight: () => app.span.pan(0.15),
    ArrowUp: () => app.selectLane(-1),
    ArrowDown: () => app.selectLane(1),
    0: () => app.span.reset(),
    Home: () => app.span.reset(),
    n: () => app.selectBeside(1),
    p: () => app.selectBeside(-1),
    f: () => app.fitSelected(),
    i: () => app.showGap(1),
    I: () => app.showGap(-1),
    c: () => app.toggleCritical(),
    Enter: () => app.follow(),
    Backspace: () => app.back(),
    Escape: () => app.clear(),
    "/": () => app.search.focus(),
  };
}

/** Let `element` act on `keys` when it has the focus itself. */
function bindKeys(element, keys) {
  element.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== element) return;
    const action = keys[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
}
