// Lesson 03, sections 1 to 5: τ → π*, the pairwise loss over all policies on three arms, and its single step.
"use strict";

const REWARDS = [0, 0.8, 1];

// π* = π_t·exp(r/τ)/Z, equation (3.2).
function optimum(anchor, rewards, tau) {
  const largest = Math.max(...rewards);
  const tilted = anchor.map((p, i) => p * Math.exp((rewards[i] - largest) / tau));
  const z = tilted.reduce((sum, v) => sum + v, 0);
  return tilted.map((v) => v / z);
}

// a_i = r_i − τ·(log π_i − log π_t,i), and its mean under the data.
function adjusted(policy, anchor, rewards, tau) {
  return rewards.map((r, i) => r - tau * Math.log(policy[i] / anchor[i]));
}

// L̂ = Var_{y~data}(a) / (1+τ)², equation (3.11).
function pairwiseLoss(policy, anchor, rewards, data, tau) {
  const a = adjusted(policy, anchor, rewards, tau);
  let sum = 0;
  for (let i = 0; i < 3; i++) for (let j = 0; j < i; j++) sum += data[i] * data[j] * (a[i] - a[j]) ** 2;
  return sum / (1 + tau) ** 2;
}

// ∇L̂ with respect to the logits: −2τ/(1+τ)²·Σ_i data_i·(a_i − ā)·(e_i − π), as (3.9); Σ_i data_i·(a_i − ā) = 0.
function gradient(policy, anchor, rewards, data, tau) {
  const a = adjusted(policy, anchor, rewards, tau);
  const average = a.reduce((sum, v, i) => sum + data[i] * v, 0);
  return a.map((v, i) => -2 * tau / (1 + tau) ** 2 * data[i] * (v - average));
}

// The policy after one step of descent on the logits.
function step(policy, slope, size) {
  const logits = policy.map((p, i) => Math.log(p) - size * slope[i]);
  const largest = Math.max(...logits), exps = logits.map((v) => Math.exp(v - largest));
  const total = exps.reduce((sum, v) => sum + v, 0);
  return exps.map((v) => v / total);
}

if (typeof module !== "undefined") {
  module.exports = { optimum, pairwiseLoss, gradient, step };
} else {
  Draw.mount("pairs", ({ panels, controls, words }) => {
    const { colours, svg, panel, line, draggable, slider, choice } = Draw;
    const sources = { anchor: null, uniform: [1 / 3, 1 / 3, 1 / 3], third: [0.1, 0.1, 0.8] };
    let anchor = [0.3, 0.6, 0.1], tau = 0.5, source = "anchor";
    // A policy is a point: its share of arm 3 to the right, its share of arm 2 upwards, the rest is arm 1.
    const share = (label) => ({ from: 0, to: 1, ticks: { 0: 0, ".5": 0.5, 1: 1 }, label });
    const p = panel(panels, { title: "drag π_t: dark is a small loss", x: share("π(arm 3), reward 1"),
                              y: share("π(arm 2), reward .8"), width: 400, height: 380 });
    const bars = panel(panels, { title: "π_t and π* = π_t·exp(r/τ)/Z",
                                 x: { from: 0.5, to: 3.5, ticks: { "arm 1": 1, "arm 2": 2, "arm 3": 3 } },
                                 y: share("probability"), width: 400, height: 380 });
    slider(controls, "τ", { min: -3.5, max: 3, step: 0.01, value: Math.log(tau), show: (v) => Math.exp(v).toFixed(2) },
           (v) => { tau = Math.exp(v); draw(); });
    choice(controls, "who made the data", { anchor: "the anchor itself", uniform: "uniform", third: "mostly arm 3" },
           source, (v) => { source = v; draw(); });
    draggable(p, ([third, second]) => {
      const low = 0.02, x = Math.max(low, third), y = Math.max(low, second), scale = Math.min(1, (1 - low) / (x + y));
      anchor = [1 - (x + y) * scale, y * scale, x * scale];
      draw();
    });

    function draw() {
      const data = sources[source] || anchor, target = optimum(anchor, REWARDS, tau);
      p.clear();
      const cells = 40, values = [];
      for (let i = 0; i < cells; i++) for (let j = 0; i + j < cells; j++) {
        const policy = [0, (j + 0.33) / cells, (i + 0.33) / cells];
        policy[0] = 1 - policy[1] - policy[2];
        values.push([i, j, Math.log(pairwiseLoss(policy, anchor, REWARDS, data, tau))]);
      }
      const sorted = values.map(([, , v]) => v).sort((a, b) => a - b), shade = (v) => {
        const rank = (v - sorted[0]) / (sorted[sorted.length - 1] - sorted[0]);
        return `hsl(205, 45%, ${Math.round(45 + 52 * rank)}%)`;
      };
      const size = p.X(1 / cells) - p.X(0) + 0.5, tall = p.Y(0) - p.Y(1 / cells) + 0.5;
      for (const [i, j, v] of values) {
        svg("rect", { x: p.X(i / cells), y: p.Y((j + 1) / cells), width: size, height: tall, fill: shade(v) }, p.layer);
      }
      const path = [anchor];
      for (let n = 0; n < 4000; n++) {
        const at = path[path.length - 1];
        path.push(step(at, gradient(at, anchor, REWARDS, data, tau), 0.5 / tau));
      }
      line(p, path.map((q) => q[2]), path.map((q) => q[1]), { stroke: "black", "stroke-dasharray": "4 3" });
      const slope = gradient(anchor, anchor, REWARDS, data, tau), length = Math.hypot(...slope) || 1;
      const tip = step(anchor, slope, 0.7 / length);  // the learning rate sets the length
      line(p, [anchor[2], tip[2]], [anchor[1], tip[1]], { stroke: colours.reinforce, "stroke-width": 4 });
      svg("circle", { cx: p.X(tip[2]), cy: p.Y(tip[1]), r: 4, fill: colours.reinforce }, p.layer);
      svg("circle", { cx: p.X(anchor[2]), cy: p.Y(anchor[1]), r: 7, fill: "black" }, p.layer);
      svg("text", { x: p.X(target[2]), y: p.Y(target[1]) + 8, "text-anchor": "middle", "font-size": 24 }, p.layer, "★");
      svg("text", { x: p.right, y: p.top + 14, "text-anchor": "end" }, p.layer, "● π_t   ★ π*");
      svg("text", { x: p.right, y: p.top + 30, "text-anchor": "end", fill: colours.reinforce }, p.layer,
          "— REINFORCE: the single step");
      svg("text", { x: p.right, y: p.top + 46, "text-anchor": "end" }, p.layer, "- - many steps on L̂");
      bars.clear();
      [[anchor, 0.62, "black", "π_t"], [target, 1.02, colours.clip, "π*"]].forEach(([probs, from, fill, name]) => {
        probs.forEach((v, i) => {
          const x = bars.X(i + from), width = bars.X(1.36) - bars.X(1), top = bars.Y(v);
          svg("rect", { x, y: top, width, height: bars.bottom - top, fill }, bars.layer);
          svg("text", { x: x + width / 2, y: top - 5, "text-anchor": "middle" }, bars.layer, v.toFixed(2));
          if (i === 0) svg("text", { x: x + width / 2, y: top - 20, "text-anchor": "middle" }, bars.layer, name);
        });
      });
      const numbers = (values) => `(${values.map((v) => v.toFixed(3).replace("-", "−")).join(", ")})`;
      words.textContent = `τ = ${tau.toFixed(2)}: π* = ${numbers(target)}. L̂ at π_t is ` +
        `${pairwiseLoss(anchor, anchor, REWARDS, data, tau).toFixed(4)}, at π* 0. The step −∇L̂ on the logits is ` +
        `${numbers(slope.map((v) => -v))}. Change who made the data: ★ stays, the step turns.`;
    }
    draw();
  });
}
