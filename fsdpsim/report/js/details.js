// ---- details.js: the selected op below the charts, with buttons that follow its dependencies.

const MOST_BUTTONS = 12;

class Details {
  constructor(root, app) {
    this.root = root;
    this.app = app;
    this.hint = [...root.children];
  }

  update() {
    const { app } = this, node = app.selected;
    this.root.classList.toggle("shown", node !== NOTHING);
    if (node === NOTHING) {
      this.root.replaceChildren(...this.hint);
      return;
    }
    const colour = app.facts.look(node).colour[app.theme][0];
    const title = make("h3", { children: [swatch(colour), app.facts.name(node)] });
    const facts = app.facts.of(node).filter(([label]) => label !== "waited for");
    this.root.replaceChildren(title, this._waited(node), factList(facts), this._links(node));
  }

  /** What it waited for, in a sentence, with the button that goes there. */
  _waited(node) {
    const { app } = this, before = app.chain.waitedFor(node);
    const words = app.chain.isTile(node) ? app.facts.of(node).find(([l]) => l === "waited for")?.[1]
      : app.facts.waited(node);
    const line = make("p", { css: "waited", children: [`Waited for ${words ?? "nothing"}. `] });
    if (before !== NOTHING) {
      const follow = make("button", { type: "button", text: "Go there (Enter)", css: "follow" });
      follow.addEventListener("click", () => app.follow());
      line.append(follow);
    }
    if (app.history.length) {
      const back = make("button", { type: "button", text: "Back (Backspace)", css: "back" });
      back.addEventListener("click", () => app.back());
      line.append(" ", back);
    }
    return line;
  }

  _links(node) {
    const { app } = this;
    if (app.chain.isTile(node)) return make("div");
    const rows = [
      ["Depends on", app.model.ops.deps[node]],
      ["Started when it ended", app.chain.released.get(node) ?? []],
      ["Depends on it", app.chain.needed.get(node) ?? []],
    ];
    const shown = rows.filter(([, nodes]) => nodes.length);
    return make("div", { css: "links", children: shown.map(([label, nodes]) => this._row(label, nodes)) });
  }

  _row(label, nodes) {
    const buttons = nodes.slice(0, MOST_BUTTONS).map((node) => this._button(node));
    const more = nodes.length - buttons.length;
    if (more > 0) buttons.push(` and ${more} more`);
    return make("p", { children: [make("b", { text: label }), ...buttons] });
  }

  _button(node) {
    const button = make("button", { type: "button", text: this.app.facts.name(node) });
    button.prepend(swatch(this.app.facts.look(node).colour[this.app.theme][0]));
    button.addEventListener("click", () => this.app.select(node));
    return button;
  }
}
