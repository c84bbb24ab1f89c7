// What the interactive pictures share: an SVG with axes, a row of controls, things that can be dragged. No mathematics.
"use strict";

const Draw = (() => {
  const colours = { reinforce: "#D55E00", clip: "#0072B2", green: "#009E73", pink: "#CC79A7", grey: "#777777" };

  function svg(tag, attributes, parent, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.appendChild(node);
    return node;
  }

  function html(tag, attributes, parent, text) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.appendChild(node);
    return node;
  }

  // A panel with axes. x and y: {from, to, log, ticks: {text: place}, label}. X and Y turn numbers into places;
  // `clear` empties the layer that everything is drawn on.
  function panel(parent, { title, x, y, width = 400, height = 280 }) {
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title }, parent);
    if (width > 450) root.classList.add("wide-panel");  // it has the row to itself
    const left = 46, right = width - 12, top = 30, bottom = height - 40;
    const share = (axis, v) => axis.log ? Math.log(v / axis.from) / Math.log(axis.to / axis.from)
      : (v - axis.from) / (axis.to - axis.from);
    const inside = (v) => Math.max(0, Math.min(1, v));
    const X = (v) => left + inside(share(x, v)) * (right - left);
    const Y = (v) => bottom - inside(share(y, v)) * (bottom - top);
    const back = (axis, s) => axis.log ? axis.from * (axis.to / axis.from) ** s : axis.from + s * (axis.to - axis.from);
    svg("text", { x: (left + right) / 2, y: 17, "text-anchor": "middle", class: "title" }, root, title);
    for (const [text, place] of Object.entries(x.ticks)) {
      svg("line", { x1: X(place), x2: X(place), y1: bottom, y2: bottom + 4, class: "axis" }, root);
      svg("text", { x: X(place), y: bottom + 16, "text-anchor": "middle" }, root, text);
    }
    for (const [text, place] of Object.entries(y.ticks)) {
      svg("line", { x1: left, x2: right, y1: Y(place), y2: Y(place), class: "grid" }, root);
      svg("text", { x: left - 5, y: Y(place) + 4, "text-anchor": "end" }, root, text);
    }
    svg("line", { x1: left, x2: right, y1: bottom, y2: bottom, class: "axis" }, root);
    svg("text", { x: (left + right) / 2, y: height - 8, "text-anchor": "middle" }, root, x.label || "");
    const turn = (y.label || "").length > 2 ? { transform: `rotate(-90 12 ${(top + bottom) / 2})` } : {};
    svg("text", { x: 12, y: (top + bottom) / 2, "text-anchor": "middle", ...turn }, root, y.label || "");
    const layer = svg("g", {}, root);
    const at = (event) => {
      const box = root.getBoundingClientRect();
      const px = (event.clientX - box.left) / box.width * width, py = (event.clientY - box.top) / box.height * height;
      return [back(x, inside((px - left) / (right - left))), back(y, inside((bottom - py) / (bottom - top)))];
    };
    return { root, layer, X, Y, at, left, right, top, bottom, clear: () => layer.replaceChildren() };
  }

  function line(p, xs, ys, attributes) {
    let path = "", up = true;
    xs.forEach((v, i) => {
      if (Number.isNaN(ys[i])) { up = true; return; }
      path += `${up ? "M" : "L"}${p.X(v).toFixed(1)} ${p.Y(ys[i]).toFixed(1)}`;
      up = false;
    });
    return svg("path", { d: path, fill: "none", "stroke-width": 2, ...attributes }, p.layer);
  }

  // Call moved([x, y]) while the pointer is down on the panel; on a phone the page must not scroll meanwhile.
  function draggable(p, moved) {
    p.root.classList.add("draggable");
    let down = false;
    p.root.addEventListener("pointerdown", (event) => {
      down = true;
      p.root.setPointerCapture(event.pointerId);
      moved(p.at(event), true);
    });
    p.root.addEventListener("pointermove", (event) => { if (down) moved(p.at(event), false); });
    for (const end of ["pointerup", "pointercancel"]) p.root.addEventListener(end, () => { down = false; });
  }

  // A labelled slider that shows its value; returns a function that sets it without calling changed.
  function slider(parent, name, { min, max, step, value, show = (v) => v.toFixed(2) }, changed) {
    const label = html("label", {}, parent);
    html("span", {}, label, name);
    const input = html("input", { type: "range", min, max, step }, label);
    input.value = value;
    const output = html("output", {}, label, show(Number(input.value)));
    input.addEventListener("input", () => {
      output.textContent = show(Number(input.value));
      changed(Number(input.value));
    });
    return (v) => { input.value = v; output.textContent = show(v); };
  }

  function choice(parent, name, options, value, changed) {
    const label = html("label", {}, parent);
    html("span", {}, label, name);
    const select = html("select", {}, label);
    for (const [key, text] of Object.entries(options)) html("option", { value: key }, select, text);
    select.value = value;
    select.addEventListener("change", () => changed(select.value));
    return (v) => { select.value = v; };
  }

  const mount = (name, build) => document.querySelectorAll(`[data-picture="${name}"]`).forEach((place) => {
    const panels = html("div", { class: "panels" }), controls = html("div", { class: "controls" });
    const words = html("p", { class: "words", "aria-live": "polite" });
    place.replaceChildren(panels, controls, words);
    build({ panels, controls, words });
  });

  return { colours, svg, html, panel, line, draggable, slider, choice, mount };
})();
