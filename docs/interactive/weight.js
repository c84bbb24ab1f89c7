// Lesson 04, sections 1 and 6: the weight M·W·A that a token's ∇log π gets. Choose a clip, drag ρ, see which row it is.
"use strict";

// The rows of 06 whose token weight is M·W·A with one ratio a token; a test holds this table equal to ALGORITHMS.
const ROWS = {
  "reinforce": { clip: "none", weight: "one" },
  "reinforce-is": { clip: "none", weight: "ratio" },
  "grpo": { clip: "one_side", weight: "ratio" },
  "rec-oneside-is": { clip: "one_side", weight: "ratio" },
  "rec-oneside-nois": { clip: "one_side", weight: "one" },
  "rec-twoside-is": { clip: "two_side", weight: "ratio" },
  "rec-twoside-nois": { clip: "two_side", weight: "one" },
  "rec-ring-is": { clip: "ring", weight: "ratio" },
  "rec-ring-nois": { clip: "ring", weight: "one" },
  "red-drop": { clip: "none", weight: "one" },
  "rloo": { clip: "none", weight: "one" },
  "dr-grpo": { clip: "one_side", weight: "ratio" },
  "cispo": { clip: "none", weight: "ratio", cap: 1.2 },
  "tis": { clip: "none", weight: "ratio", cap: 2 },
  "reinforce-plus-plus": { clip: "one_side", weight: "ratio" },
  "ngrpo": { clip: "one_side", weight: "ratio", epsLow: 0.16, epsHigh: 0.24 },
  "dapo": { clip: "one_side", weight: "ratio", epsHigh: 0.28 },
  "noise-corrected-grpo": { clip: "one_side", weight: "ratio" },
  "sgpo": { clip: "one_side", weight: "ratio" },
};
const DEFAULTS = { clip: "none", weight: "one", epsLow: 0.2, epsHigh: 0.2, outerLow: 0.6, outerHigh: 2, cap: Infinity };

// M: does a token with this ratio and advantage still take part? clip_mask of lesson 04.
function clipMask(ratio, advantage, { clip, epsLow, epsHigh, outerLow, outerHigh }) {
  const above = ratio > 1 + epsHigh, below = ratio < 1 - epsLow;
  const raised = advantage > 0, lowered = advantage < 0;
  if (clip === "none") return true;
  if (clip === "one_side") return !((raised && above) || (lowered && below));
  if (clip === "two_side") return !((raised || lowered) && (above || below));
  return !((raised && (above || (below && ratio > 1 - outerLow))) ||
           (lowered && (below || (above && ratio < 1 + outerHigh))));
}

// M·W·A: what multiplies ∇log π of the token.
function gradientWeight(ratio, advantage, options) {
  const o = { ...DEFAULTS, ...options };
  if (!clipMask(ratio, advantage, o)) return 0;
  return (o.weight === "ratio" ? Math.min(ratio, o.cap) : 1) * advantage;
}

// Rows with these settings; what a clip does not use does not count.
function rowsLike(options) {
  const used = (o) => {
    const s = { ...DEFAULTS, ...o };
    const bounds = s.clip === "none" ? [] : [s.epsLow, s.epsHigh];
    const outer = s.clip === "ring" ? [s.outerLow, s.outerHigh] : [];
    return JSON.stringify([s.clip, s.weight, ...bounds, ...outer, s.weight === "ratio" ? String(s.cap) : ""]);
  };
  return Object.keys(ROWS).filter((name) => used(ROWS[name]) === used(options));
}

if (typeof module !== "undefined") {
  module.exports = { ROWS, DEFAULTS, clipMask, gradientWeight, rowsLike };
} else {
  Draw.mount("weight", ({ panels, controls, words }) => {
    const { colours, svg, panel, line, draggable, slider, choice } = Draw;
    const state = { ...DEFAULTS, clip: "one_side", weight: "ratio" };
    let advantage = 1, ratio = Math.exp(0.4);
    const p = panel(panels, { title: "drag ρ: the weight of a token", width: 560, height: 320,
                              x: { from: 0.1, to: 5, log: true, label: "ρ = π_θ/π_old of the token (log scale)",
                                   ticks: { ".1": 0.1, ".4": 0.4, ".8": 0.8, 1.2: 1.2, 3: 3, 5: 5 } },
                              y: { from: -4, to: 4, label: "M·W·A",
                                   ticks: { "−4": -4, "−2": -2, 0: 0, 2: 2, 4: 4 } } });
    const start = choice(controls, "a row to begin with", Object.fromEntries(Object.keys(ROWS).map((n) => [n, n])),
                         "rec-oneside-is", (name) => set({ ...DEFAULTS, ...ROWS[name] }));
    const controlsOf = {
      clip: choice(controls, "clip", { none: "none", one_side: "one-side", two_side: "two-side", ring: "ring" },
                   state.clip, (v) => set({ clip: v })),
      weight: choice(controls, "W", { one: "1 (no IS)", ratio: "ρ (IS)" }, state.weight, (v) => set({ weight: v })),
      epsLow: slider(controls, "ε_low", { min: 0, max: 0.9, step: 0.01, value: 0.2 }, (v) => set({ epsLow: v })),
      epsHigh: slider(controls, "ε_high", { min: 0, max: 3, step: 0.01, value: 0.2 }, (v) => set({ epsHigh: v })),
      outerLow: slider(controls, "outer_low (ring)", { min: 0.01, max: 0.99, step: 0.01, value: 0.6 },
                       (v) => set({ outerLow: v })),
      outerHigh: slider(controls, "outer_high (ring)", { min: 0.01, max: 4, step: 0.01, value: 2 },
                        (v) => set({ outerHigh: v })),
    };
    slider(controls, "A", { min: -2, max: 2, step: 0.05, value: 1 }, (v) => { advantage = v; draw(); });
    const moveRatio = slider(controls, "ρ", { min: -2.3, max: 1.6, step: 0.01, value: Math.log(ratio),
                                              show: (v) => Math.exp(v).toFixed(2) },
                             (v) => { ratio = Math.exp(v); draw(); });
    draggable(p, ([x]) => {
      ratio = Math.exp(Math.round(100 * Math.log(x)) / 100);
      moveRatio(Math.log(ratio));
      draw();
    });

    function set(change) {
      Object.assign(state, change);
      state.outerLow = Math.max(state.outerLow, state.epsLow + 0.01);  // a ring's outer bounds lie outside
      state.outerHigh = Math.max(state.outerHigh, state.epsHigh + 0.01);
      for (const [name, move] of Object.entries(controlsOf)) move(state[name]);
      draw();
    }

    function draw() {
      p.clear();
      const xs = [...Array(801).keys()].map((i) => 0.1 * 50 ** (i / 800));
      for (let i = 0, from = null; i <= xs.length; i++) {  // grey where nothing is learned
        const out = i < xs.length && !clipMask(xs[i], advantage, state);
        if (out && from === null) from = xs[i];
        if (!out && from !== null) {
          const to = xs[Math.min(i, xs.length - 1)];
          svg("rect", { x: p.X(from), y: p.top, width: p.X(to) - p.X(from), height: p.bottom - p.top, fill: "#eeeeee" },
              p.layer);
          from = null;
        }
      }
      const ys = xs.map((v) => gradientWeight(v, advantage, state));
      const gaps = ys.map((v, i) => i && Math.abs(v - ys[i - 1]) > 0.15 ? NaN : v);
      line(p, xs, gaps, { stroke: state.weight === "one" ? colours.clip : "#E69F00", "stroke-width": 3 });
      const w = gradientWeight(ratio, advantage, state), kept = clipMask(ratio, advantage, state);
      svg("line", { x1: p.X(ratio), x2: p.X(ratio), y1: p.top, y2: p.bottom, stroke: "black",
                    "stroke-dasharray": "3 3" }, p.layer);
      svg("circle", { cx: p.X(ratio), cy: p.Y(w), r: 7, fill: "black" }, p.layer);
      const rows = rowsLike(state);
      if (rows.length) start(rows.includes("rec-oneside-is") ? "rec-oneside-is" : rows[0]);
      const what = advantage === 0 ? "nothing to learn: A = 0" : !kept ? "clipped: it teaches nothing"
        : w > 0 ? "pushed up" : "pushed down";
      const capped = state.cap < Infinity && state.weight === "ratio" ? ` The ratio counts at most ${state.cap}.` : "";
      words.textContent = `At ρ = ${ratio.toFixed(2)} and A = ${advantage.toFixed(2)} the token is ${what}. ` +
        `M·W·A = ${kept ? 1 : 0} · ${(state.weight === "ratio" ? Math.min(ratio, state.cap) : 1).toFixed(2)} · ` +
        `${advantage.toFixed(2)} = ${w.toFixed(3)}.${capped} ` + (rows.length
        ? `These are M and W of: ${rows.join(", ")}${rows.length > 1 ? " (they differ in A, N or the data)" : ""}.`
        : "No named row has just these bounds: write it down as a new one.");
    }
    set({});
  });
}
