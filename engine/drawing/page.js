"use strict";
(() => {
  const root = document.documentElement;
  let errors = 0;
  const count = () => { root.dataset.errors = String(++errors); };
  addEventListener("error", count);
  document.addEventListener("securitypolicyviolation", count);

  const { runs, plots } = JSON.parse(document.getElementById("data").textContent);
  const state = { axis: 0, smooth: 0, hidden: new Set(), zoom: null };
  const axes = ["step", "tokens", "time"];
  const [left, right, top, bottom] = [58, 14, 12, 28];
  const SVG = "http://www.w3.org/2000/svg";

  const element = (name, attributes, text) => {
    const made = document.createElementNS(SVG, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    return made;
  };

  const short = (value, digits = 4) => {
    const size = Math.abs(value);
    if (size === 0 || !isFinite(size)) return String(value);
    for (const [unit, letter, scale] of [[1e12, "T", 1e12], [1e9, "G", 1e9], [1e6, "M", 1e6], [1e4, "k", 1e3]])
      if (unit <= size && size < 1e15) return +(value / scale).toPrecision(digits) + letter;
    return size >= 1e-3 && size < 1e4 ? String(+value.toPrecision(digits))
      : (+value.toPrecision(3)).toExponential().replace("+", "");
  };

  const units = [[172800, 86400, "d"], [7200, 3600, "h"], [120, 60, "min"], [0, 1, "s"]];
  const unit = (high) => units.find((each) => high >= each[0]);
  const place = (x, digits) => {
    if (state.axis < 2) return `${axes[state.axis]} ${x.toLocaleString("en")}`;
    const [, seconds, name] = unit(x);
    return `${short(x / seconds, digits)} ${name}`;
  };

  const ticks = (low, high, wanted) => {
    const rough = (high - low) / Math.max(1, wanted);
    if (!(rough > 0) || !isFinite(rough)) return [];
    const base = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * base).find((s) => s >= rough * (1 - 1e-9));
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n <= high / step + 1e-9 && found.length < 50; n++) found.push(n * step);
    return found;
  };

  const logTicks = (low, high) => {
    const decades = high - low;
    if (decades < 1) return ticks(10 ** low, 10 ** high, 4).filter((tick) => tick > 0).map(Math.log10);
    const found = [];
    for (let exponent = Math.floor(low); exponent <= Math.ceil(high); exponent += Math.ceil(decades / 6))
      for (const mark of decades < 3 ? [1, 2, 5] : [1]) found.push(exponent + Math.log10(mark));
    return found.filter((tick) => tick >= low && tick <= high);
  };

  // Of all values, unless a few lie far above all the others.
  const visible = (values) => {
    const sorted = values.sort((a, b) => a - b);
    const low = sorted[0], usual = sorted[Math.floor(0.98 * (sorted.length - 1))];
    let high = sorted[sorted.length - 1];
    if (usual > low && high - usual > 4 * (usual - low)) high = usual + 0.25 * (usual - low);
    return [low, high];
  };

  // An exponential mean without the pull of its start; gaps stay gaps.
  const smoothed = (values) => {
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = state.smooth * sum + (1 - state.smooth) * value;
      weight = state.smooth * weight + (1 - state.smooth);
      return sum / weight;
    });
  };

  class Plot {
    constructor(figure) {
      this.figure = figure;
      this.data = plots[+figure.dataset.plot];
      this.svg = figure.querySelector("svg:not(.swatch)");
      this.log = figure.querySelector(".log");
      this.log.parentElement.hidden = false;
      this.log.addEventListener("change", () => this.draw());
      this.svg.addEventListener("pointermove", (event) => this.move(event));
      this.svg.addEventListener("pointerleave", () => all.forEach((each) => each.point(null)));
      this.svg.addEventListener("pointerdown", (event) => this.press(event));
      this.svg.addEventListener("pointerup", (event) => this.release(event));
      this.svg.addEventListener("dblclick", () => zoom(null));
      this.svg.removeAttribute("viewBox");
    }

    series() { return this.data.series.filter((one) => !state.hidden.has(one.run)); }

    draw() {
      this.width = Math.max(200, this.figure.clientWidth - 24);
      this.height = this.figure.classList.contains("hero") ? Math.min(330, 150 + this.width / 5) : 230;
      this.svg.setAttribute("width", this.width);
      this.svg.setAttribute("height", this.height);
      this.svg.style.width = `${this.width}px`;
      this.svg.style.height = `${this.height}px`;
      this.svg.replaceChildren();
      this.measure();
      this.grid();
      const clip = `clip${this.figure.dataset.plot}`;
      const box = element("clipPath", { id: clip });
      box.append(element("rect", { x: left, y: 0, width: this.width - left - right, height: this.height - bottom }));
      const lines = element("g", { "clip-path": `url(#${clip})` });
      this.svg.append(box, lines);
      for (const one of this.series()) this.lines(lines, one);
      if (this.cut !== null)
        this.svg.append(element("text", { class: "tick end", x: this.width - right, y: top }, `↑ up to ${short(this.cut)}`));
      this.over = element("g", {});
      this.svg.append(this.over);
    }

    measure() {
      const logarithmic = this.log.checked;
      let [x0, x1] = state.zoom ?? [Infinity, -Infinity];
      if (!state.zoom)
        for (const one of this.series()) {
          const xs = one.x[state.axis];
          x0 = Math.min(x0, xs[0]);
          x1 = Math.max(x1, xs[xs.length - 1]);
        }
      const seen = [], whole = [];
      for (const one of this.series())
        one.y.forEach((y, i) => {
          if (y === null || (logarithmic && y <= 0)) return;
          const x = one.x[state.axis][i];
          whole.push(y);
          if (x >= x0 && x <= x1) seen.push(y);
        });
      this.scale = logarithmic && whole.length ? Math.log10 : (y) => y;
      const values = seen.length ? seen : whole;
      const most = values.reduce((a, b) => Math.max(a, b), -Infinity);
      const range = values.length ? visible(values) : [0, 1];
      this.cut = most > range[1] ? most : null;
      let [y0, y1] = range.map(this.scale);
      const room = 0.06 * (y1 - y0) || 0.06 * Math.abs(y1) || 0.5;
      this.y = [y0 - room, y1 + room];
      this.x = isFinite(x0) ? [x0, x1 > x0 ? x1 : x0 + 1] : [0, 1];
    }

    across(x) { return left + ((x - this.x[0]) / (this.x[1] - this.x[0])) * (this.width - left - right); }
    down(y) {
      const [low, high] = this.y, floor = this.height - bottom;
      return floor - ((this.scale(y) - low) / (high - low)) * (floor - top);
    }

    grid() {
      const floor = this.height - bottom, end = this.width - right;
      for (const tick of this.log.checked ? logTicks(...this.y) : ticks(...this.y, 4)) {
        const y = floor - ((tick - this.y[0]) / (this.y[1] - this.y[0])) * (floor - top);
        this.svg.append(
          element("path", { class: "grid", d: `M${left} ${y.toFixed(1)}H${end}` }),
          element("text", { class: "tick end", x: left - 8, y: y + 3.5 }, short(this.log.checked ? 10 ** tick : tick)));
      }
      const [, seconds, name] = state.axis === 2 ? unit(this.x[1]) : [0, 1, ""];
      for (const tick of ticks(this.x[0] / seconds, this.x[1] / seconds, Math.floor(this.width / 110)))
        this.svg.append(element("text", { class: "tick mid", x: this.across(tick * seconds).toFixed(1), y: floor + 18 },
          short(tick) + (name && ` ${name}`)));
      this.svg.append(element("path", { class: "axis", d: `M${left} ${floor}H${end}` }));
    }

    lines(group, one) {
      const colour = `c${one.colour}${one.dashed ? " dashed" : ""}`, xs = one.x[state.axis];
      const path = (values, kind) => {
        let d = "", pen = "M", points = 0;
        values.forEach((y, i) => {
          if (y === null || (this.log.checked && y <= 0)) { pen = "M"; return; }
          d += `${pen}${this.across(xs[i]).toFixed(1)} ${Math.max(-500, Math.min(999, this.down(y))).toFixed(1)}`;
          pen = "L";
          points++;
        });
        group.append(element("path", { class: `line ${colour}${kind}`, d }));
        return points;
      };
      const smooth = state.smooth > 0 && one.noisy;
      const points = path(one.y, smooth ? " faint" : "");
      if (smooth) path(smoothed(one.mean.length ? one.mean : one.y), "");
      xs.forEach((x, i) => {
        if (one.y[i] === null)
          group.append(element("text", { class: `odd c${one.colour}`, x: this.across(x).toFixed(1), y: top + 2 }, "×"));
        else if (points <= 60 && (one.dashed || points === 1))
          group.append(element("circle", { class: `dot ${colour}`, cx: this.across(x).toFixed(1), cy: this.down(one.y[i]).toFixed(1), r: 2.5 }));
      });
    }

    at(event) {
      const pixel = event.clientX - this.svg.getBoundingClientRect().left;
      const share = Math.min(1, Math.max(0, (pixel - left) / (this.width - left - right)));
      return this.x[0] + share * (this.x[1] - this.x[0]);
    }

    press(event) {
      if (event.button) return;
      this.from = this.at(event);
      this.svg.setPointerCapture(event.pointerId);
    }

    release(event) {
      const ends = [this.from, this.at(event)].sort((a, b) => a - b);
      this.from = undefined;
      if (this.across(ends[1]) - this.across(ends[0]) > 6) zoom(ends);
    }

    move(event) {
      const x = this.at(event);
      all.forEach((each) => each.point(x));
      if (this.from !== undefined) {
        const ends = [this.from, x].map((each) => this.across(each)).sort((a, b) => a - b);
        this.over.append(element("rect", { class: "zoom", x: ends[0], y: top, width: ends[1] - ends[0], height: this.height - top - bottom }));
      }
      this.tell(x, event);
    }

    nearest(x) {
      return this.series().map((one) => {
        const xs = one.x[state.axis];
        let low = 0, high = xs.length - 1;
        while (low < high) {
          const middle = (low + high) >> 1;
          if (xs[middle] < x) low = middle + 1; else high = middle;
        }
        if (low && x - xs[low - 1] < xs[low] - x) low--;
        return { one, x: xs[low], y: one.y[low] };
      });
    }

    point(x) {
      if (!this.over) return;
      this.over.replaceChildren();
      if (x === null) { tip.hidden = true; return; }
      if (x < this.x[0] || x > this.x[1]) return;
      this.over.append(element("path", { class: "cross", d: `M${this.across(x).toFixed(1)} ${top}V${this.height - bottom}` }));
      for (const near of this.nearest(x)) {
        const y = near.y === null ? NaN : this.down(near.y);
        if (y >= 0 && y <= this.height - bottom && near.x >= this.x[0] && near.x <= this.x[1])
          this.over.append(element("circle", { class: `dot c${near.one.colour}`, cx: this.across(near.x), cy: y, r: 3.5 }));
      }
    }

    tell(x, event) {
      const mixed = this.data.series.some((one) => one.dashed);
      const table = document.createElement("table");
      const found = this.nearest(x).sort((a, b) => (a.y ?? Infinity) - (b.y ?? Infinity)).slice(0, 16);
      for (const near of found) {
        const row = table.insertRow();
        const swatch = element("svg", { class: "swatch", viewBox: "0 0 18 10" });
        swatch.append(element("path", { class: `line c${near.one.colour}${near.one.dashed ? " dashed" : ""}`, d: "M1 5H17" }));
        row.insertCell().append(swatch, runs[near.one.run] + (near.one.label && ` ${near.one.label}`) + (mixed ? (near.one.dashed ? ", validation" : ", training") : ""));
        row.insertCell().textContent = near.y === null ? "not finite" : short(near.y, 5) + (this.data.unit && ` ${this.data.unit}`);
        row.insertCell().textContent = place(near.x, 3);
      }
      tip.replaceChildren(table);
      tip.hidden = !found.length;
      const frame = this.figure.getBoundingClientRect();
      this.figure.append(tip);
      const pixel = event.clientX - frame.left;
      tip.style.left = `${pixel + 16 + tip.offsetWidth > frame.width ? Math.max(4, pixel - 16 - tip.offsetWidth) : pixel + 16}px`;
      tip.style.top = `${Math.max(30, event.clientY - frame.top - 20 - tip.offsetHeight / 2)}px`;
    }
  }

  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  const all = [...document.querySelectorAll(".plot")].map((figure) => new Plot(figure));
  const draw = () => all.forEach((each) => each.draw());
  const reset = document.getElementById("reset");
  const zoom = (range) => {
    state.zoom = range;
    reset.disabled = !range;
    draw();
  };

  document.querySelector(".knobs").hidden = !all.length;
  reset.addEventListener("click", () => zoom(null));
  document.querySelectorAll("input[name=axis]").forEach((input) => input.addEventListener("change", () => {
    state.axis = +input.value;
    zoom(null);
  }));
  document.querySelectorAll("[data-run]").forEach((input) => input.addEventListener("change", () => {
    state.hidden[input.checked ? "delete" : "add"](+input.dataset.run);
    draw();
  }));
  document.getElementById("smooth").addEventListener("input", (event) => {
    state.smooth = +event.target.value;
    document.getElementById("smoothed").textContent = event.target.value;
    draw();
  });
  const theme = document.getElementById("theme");
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  let width = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth !== width) { width = document.body.clientWidth; draw(); }
  }).observe(document.body);
  draw();
  root.dataset.errors = String(errors);
  root.dataset.drawn = String(document.querySelectorAll(".plot > svg path.line, .plot > svg g path.line").length);
})();
