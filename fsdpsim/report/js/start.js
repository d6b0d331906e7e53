// ---- start.js: binds the page's controls to the state, and starts.

/** Options of the iteration selector and of the search. */
function fillControls(app) {
  const { iterations, units } = app.model, last = iterations.length - 2;
  const names = iterations.map(({ name }, i) => (i > last ? "all" : `${name} of ${last + 1}`));
  const select = document.getElementById("iteration");
  select.append(...names.map((text, i) => make("option", { text, value: String(i) })));
  select.value = String(Math.max(last, 0));
  select.addEventListener("change", () => app.setIteration(Number(select.value)));
  document.getElementById("units").append(...units.map((value) => make("option", { value })));
  const clock = document.getElementById("clock");
  clock.value = app.clock;
  clock.addEventListener("change", () => { app.setClock(clock.value); noteClock(app); });
  noteClock(app);
}

/** Whose time the memory chart has. */
function noteClock(app) {
  document.getElementById("memory-note").textContent = app.clock === "host"
    ? "Allocations and frees are drawn when the CPU thread makes them."
    : "Allocations and frees are drawn where the GPU runs the kernel that the CPU thread issued next.";
}

function bindButtons(app) {
  const actions = {
    "zoom-in": () => app.span.zoom(1.5, app.middle()),
    "zoom-out": () => app.span.zoom(1 / 1.5, app.middle()),
    reset: () => app.span.reset(),
    "idle-before": () => app.showGap(-1),
    "idle-after": () => app.showGap(1),
    critical: () => app.toggleCritical(),
    theme: () => app.setTheme(app.theme === "dark" ? "light" : "dark"),
  };
  for (const [id, action] of Object.entries(actions)) {
    document.getElementById(id).addEventListener("click", action);
  }
}

/** Search as one types; Enter goes from one find to the next. */
function bindSearch(app) {
  const output = document.getElementById("found");
  let found = null, next = 0;
  app.search = document.getElementById("search");
  app.search.addEventListener("input", () => {
    found = app.find(app.search.value);
    next = 0;
    output.textContent = found ? counted(found.length, "op") : "";
  });
  app.search.addEventListener("keydown", (event) => {
    if (event.key === "Escape") app.clear();
    if (event.key === "Enter" && found?.length) app.select(found[next++ % found.length]);
  });
}

/** Hovering, clicking and dragging on both charts. */
function bindCharts(app) {
  const { timeline, memoryChart, tooltip } = app;
  const over = timeline.plot.over;
  const hit = (event) => timeline.hit(event.offsetX, event.offsetY);
  new Gestures(over, app, {
    clicked: (event) => app.select(hit(event)?.node ?? NOTHING, { reveal: false }),
    doubleClicked: (event) => {
      const at = hit(event);
      if (at?.gap) app.span.fit(at.gap.start, at.gap.end);
      else if (at) app.span.fit(app.chain.start(at.node), app.chain.end(at.node));
    },
  });
  new Gestures(memoryChart.plot.over, app, {});
  over.addEventListener("pointermove", (event) => {
    const at = event.buttons ? null : hit(event);
    over.style.cursor = at?.node === undefined ? "" : "pointer";
    if (!at) tooltip.hide();
    else tooltip.show(event, ...(at.gap ? gapTip(app, at.gap) : nodeTip(app, at.node)));
  });
  memoryChart.plot.over.addEventListener("pointermove", (event) => {
    const entry = event.buttons ? -1 : memoryChart.hit(event.offsetX);
    if (entry < 0) tooltip.hide();
    else tooltip.show(event, ...memoryTip(app, entry));
  });
  for (const chart of [timeline, memoryChart]) {
    chart.plot.over.addEventListener("pointerleave", () => tooltip.hide());
  }
}

/** Paper is white and as wide as it is. */
function bindPrinting(app) {
  let before = null;
  window.addEventListener("beforeprint", () => {
    before = app.theme;
    document.documentElement.classList.add("printing");
    app.setTheme("light");
    app.resize();
  });
  window.addEventListener("afterprint", () => {
    document.documentElement.classList.remove("printing");
    app.setTheme(before);
    app.resize();
  });
}

function start() {
  const app = new App(JSON.parse(document.getElementById("data").textContent));
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  app.setTheme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => app.setTheme(dark.matches ? "dark" : "light"));
  document.getElementById("charts").hidden = false;
  app.start();
  fillControls(app);
  bindButtons(app);
  bindSearch(app);
  bindCharts(app);
  bindKeys(app.plots, chartKeys(app));
  bindPrinting(app);
  new ResizeObserver(() => app.resize()).observe(app.plots);
  return app;
}

const report = start();
