// ---- axes.js: what the charts share: one time axis, one width for labels, one linked cursor.

const GUTTER = 126;
const RIGHT = 16;
const FONT_SIZE = 12;
const FONT = `${FONT_SIZE}px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif`;

/** Options of a uPlot chart over `app.span`, which the caller completes. */
function chartOptions(app, height) {
  return {
    width: app.width(),
    height,
    padding: [0, RIGHT, 0, 0],
    legend: { show: false },
    cursor: {
      x: true,
      y: false,
      points: { show: false },
      drag: { x: false, y: false, setScale: false },
      sync: { key: "time", setSeries: false, scales: ["x", null] },
      bind: { dblclick: () => null, mousedown: () => null, mouseup: () => null },
    },
    scales: { x: { time: false, auto: false }, y: { auto: false } },
  };
}

/** The time axis: on top of a chart (side 0) or below it (side 2). */
function timeAxis(app, side) {
  return {
    ...axis(app),
    side,
    size: 26,
    space: 92,
    values: (plot, ticks, index, space, step) => {
      const [name, size] = timeUnit(Math.max(...ticks.map(Math.abs), step));
      const digits = decimals(step / size);
      return ticks.map((tick) => (tick ? `${(tick / size).toFixed(digits)} ${name}` : "0"));
    },
  };
}

/** How many digits after the point tell multiples of `step` apart. */
function decimals(step) {
  const whole = (n) => Math.abs(n - Math.round(n)) < 1e-6 * Math.max(n, 1);
  return range(0, 12).find((digits) => whole(step * 10 ** digits)) ?? 12;
}

/** The look of any axis. */
function axis(app) {
  return {
    font: FONT,
    gap: 4,
    stroke: () => app.colour("quiet"),
    grid: { stroke: () => app.colour("grid"), width: 1 },
    ticks: { stroke: () => app.colour("grid"), width: 1, size: 5 },
  };
}

/** Let `plot` show the span. */
function showSpan(plot, span) {
  plot.setScale("x", { min: span.low - span.origin, max: span.high - span.origin });
}

/** A dashed vertical line at `time`, if it is in sight. */
function markTime(plot, span, time, colour, ratio, dash = [3, 3]) {
  if (time < span.low || time > span.high) return;
  const { ctx: context, bbox } = plot;
  const x = Math.round(bbox.left + span.share(time) * bbox.width) + 0.5;
  context.save();
  context.strokeStyle = colour;
  context.lineWidth = ratio;
  context.setLineDash(dash.map((length) => length * ratio));
  context.beginPath();
  context.moveTo(x, bbox.top);
  context.lineTo(x, bbox.top + bbox.height);
  context.stroke();
  context.restore();
}
