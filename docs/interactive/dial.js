// Lessons 04 and 06: the dial of staleness. The sampler gets new weights every I steps and works m batches ahead.
"use strict";

// v(n) = I·max(0, ⌊(n−m−1)/I⌋): updates that the sampler had seen for the batch of step n, from 1. I = null: never.
function rolloutVersion(step, { interval, offset }) {
  return interval === null ? 0 : interval * Math.max(0, Math.floor((step - offset - 1) / interval));
}

function staleness(step, dial) {
  return step - 1 - rolloutVersion(step, dial);
}

// What a trainer does: refresh the sampler when it is time, fill the queue, take the oldest batch. One entry a step:
// the queue as the trainer finds it, [batch, version of its sampler], and the batch that it takes.
function simulate({ interval, offset }, steps) {
  const queue = [], log = [];
  let version = 0;
  for (let step = 1; step <= steps; step++) {
    const refreshed = interval !== null && (step - 1) % interval === 0;
    if (refreshed) version = step - 1;
    while (queue.length <= offset) queue.push({ batch: step + queue.length, version });
    const found = [...queue];
    const taken = queue.shift();
    log.push({ step, refreshed, version, queue: found, taken, staleness: step - 1 - taken.version });
  }
  return log;
}

if (typeof module !== "undefined") {
  module.exports = { rolloutVersion, staleness, simulate };
} else {
  Draw.mount("dial", ({ panels, controls, words }) => {
    const { colours, svg, panel, draggable, slider } = Draw;
    const STEPS = 24, NEVER = 25;
    const dial = { interval: 4, offset: 2 };
    let now = 5, timer = null;
    const ticks = { 1: 1, 5: 5, 10: 10, 15: 15, 20: 20, 24: 24 };
    const p = panel(panels, { title: "which weights sampled the batch of each step (drag the step)",
                              width: 560, height: 300,
                              x: { from: 0.3, to: STEPS + 0.7, ticks, label: "training step n" },
                              y: { from: 0, to: STEPS, ticks: { 0: 0, 5: 5, 10: 10, 15: 15, 20: 20 },
                                   label: "updates seen" } });
    const store = panel(panels, { title: "the queue at this step: the trainer takes the first", width: 560, height: 130,
                                  x: { from: 0, to: 11, ticks: {} }, y: { from: 0, to: 1, ticks: {} } });
    const shown = (v) => v === NEVER ? "never" : String(v);
    slider(controls, "I, refresh every", { min: 1, max: NEVER, step: 1, value: 4, show: shown },
           (v) => { dial.interval = v === NEVER ? null : v; draw(); });
    slider(controls, "m, batches ahead", { min: 0, max: 10, step: 1, value: 2, show: String },
           (v) => { dial.offset = v; draw(); });
    const moveStep = slider(controls, "step n", { min: 1, max: STEPS, step: 1, value: now, show: String },
                            (v) => { now = v; draw(); });
    const button = Draw.html("button", { type: "button" }, controls, "step by step");
    const stop = () => { clearInterval(timer); timer = null; button.textContent = "step by step"; };
    button.addEventListener("click", () => {
      if (timer) return stop();
      now = now === STEPS ? 1 : now;
      button.textContent = "stop";
      timer = setInterval(() => {
        if (now < STEPS) { now += 1; moveStep(now); draw(); } else stop();
      }, 700);
    });
    draggable(p, ([x]) => { now = Math.max(1, Math.min(STEPS, Math.round(x))); moveStep(now); draw(); });

    function draw() {
      const log = simulate(dial, STEPS), here = log[now - 1];
      p.clear();
      for (const { step, taken, staleness: age } of log) {
        const current = step === now;
        svg("line", { x1: p.X(step), x2: p.X(step), y1: p.Y(taken.version), y2: p.Y(step - 1),
                      stroke: current ? colours.reinforce : "#e3b393", "stroke-width": current ? 7 : 5 }, p.layer);
        svg("circle", { cx: p.X(step), cy: p.Y(step - 1), r: 4, fill: "black" }, p.layer);
        svg("circle", { cx: p.X(step), cy: p.Y(taken.version), r: 4, fill: colours.clip }, p.layer);
        svg("text", { x: p.X(step), y: p.Y(step - 1) - 8, "text-anchor": "middle",
                      "font-weight": current ? "bold" : "normal" }, p.layer, age);
      }
      svg("text", { x: p.left + 8, y: p.top + 14 }, p.layer,
          "● the trainer’s weights; above them the staleness");
      svg("text", { x: p.left + 8, y: p.top + 30, fill: colours.clip }, p.layer,
          "● the weights that sampled the batch");
      store.clear();
      here.queue.forEach(({ batch, version }, i) => {
        const x = store.X(i), width = store.X(1) - store.X(0) - 4;
        svg("rect", { x, y: 38, width, height: 46, rx: 4, fill: i ? "#dcebf5" : "#f6dcc9" }, store.layer);
        const middle = { x: x + width / 2, "text-anchor": "middle" };
        svg("text", { ...middle, y: 57 }, store.layer, batch);
        svg("text", { ...middle, y: 75, fill: colours.clip }, store.layer, `v ${version}`);
      });
      svg("text", { x: store.left, y: 112 }, store.layer,
          "each box: number of the batch, and v, the sampler’s version");
      words.textContent = `Step ${now}: the trainer has made ${now - 1} updates. It takes batch ${here.taken.batch}, ` +
        `sampled by weights that had seen ${here.taken.version}. Staleness s(${now}) = ${now - 1} − ` +
        `${here.taken.version} = ${here.staleness}. ` + (here.refreshed ? "The sampler is just refreshed. " : "") +
        (dial.interval === 1 && dial.offset === 0 ? "This is on-policy: every ratio is 1, no clip acts." : "");
    }
    draw();
  });
}
