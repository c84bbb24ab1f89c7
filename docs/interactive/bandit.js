// Lesson 03, section 7: three arms, data from π_b for ever. Drag the data and the rewards; see where REINFORCE ends.
"use strict";

function mean(probs, values) {
  return probs.reduce((sum, p, i) => sum + p * values[i], 0);
}

function softmax(logits) {
  const largest = Math.max(...logits), exps = logits.map((v) => Math.exp(v - largest));
  const total = exps.reduce((sum, v) => sum + v, 0);
  return exps.map((v) => v / total);
}

// c = π_b·(r − μ), equation (3.13): the mean update of the logits, the same at every step.
function drift(behaviour, rewards) {
  const mu = mean(behaviour, rewards);
  return behaviour.map((p, i) => p * (rewards[i] - mu));
}

// How frequent the best arm must be in the data, so that its drift is the largest, when the others keep their
// proportions w. With m = Σ w·r of the others, r* − μ = (1−q)·(r* − m) and r_j − μ = r_j − m − q·(r* − m); so c* > c_j
// reads q > w_j·(r_j − m) / ((1 + w_j)·(r* − m)).
function threshold(behaviour, rewards) {
  const best = rewards.indexOf(Math.max(...rewards));
  const rest = 1 - behaviour[best];
  const others = [0, 1, 2].filter((i) => i !== best);
  const w = others.map((i) => rest > 0 ? behaviour[i] / rest : 0.5);
  const m = mean(w, others.map((i) => rewards[i]));
  if (rewards[best] - m <= 0) return 0;
  return Math.max(0, ...others.map((i, n) => w[n] * (rewards[i] - m) / ((1 + w[n]) * (rewards[best] - m))));
}

// J before each mean update of size 1, from logits 0, and after the last. After `refreshEvery` steps the data come from
// the policy; refreshEvery = 1 is what the exact importance weight gives on any data (3.14).
function expectedRewards(behaviour, rewards, { steps, refreshEvery = Infinity }) {
  let theta = [0, 0, 0], data = behaviour;
  const values = [];
  for (let step = 0; step <= steps; step++) {
    values.push(mean(softmax(theta), rewards));
    if (step && step % refreshEvery === 0) data = softmax(theta);
    const c = drift(data, rewards);
    theta = theta.map((v, i) => v + c[i]);
  }
  return values;
}

// Set one probability, and scale the others to what is left.
function withProbability(probs, arm, value) {
  const v = Math.min(0.98, Math.max(0.01, value)), rest = 1 - probs[arm];
  return probs.map((p, i) => i === arm ? v : rest > 0 ? p / rest * (1 - v) : (1 - v) / 2);
}

if (typeof module !== "undefined") {
  module.exports = { drift, threshold, expectedRewards, withProbability };
} else {
  Draw.mount("bandit", ({ panels, controls, words }) => {
    const { colours, svg, panel, line, draggable, slider } = Draw;
    let behaviour = [0.3, 0.6, 0.1], rewards = [0, 0.8, 1], held = 0;
    const arms = { from: 0.5, to: 3.5, ticks: { "arm 1": 1, "arm 2": 2, "arm 3": 3 } };
    const unit = (label) => ({ from: 0, to: 1, ticks: { 0: 0, ".5": 0.5, 1: 1 }, label });
    const data = panel(panels, { title: "drag: the data π_b", x: arms, y: unit("probability") });
    const pay = panel(panels, { title: "drag: the rewards r", x: arms, y: unit("reward") });
    const push = panel(panels, { title: "drift c = π_b·(r − μ): the largest wins", x: arms,
                                 y: { from: -0.25, to: 0.25, ticks: { "−.2": -0.2, 0: 0, ".2": 0.2 }, label: "c" } });
    const path = panel(panels, { title: "expected reward J while training",
                                 x: { from: 1, to: 2000, log: true, ticks: { 1: 1, 10: 10, 100: 100, 1000: 1000 },
                                      label: "steps (η = 1)" }, y: unit("J") });
    const move = [0, 1, 2].map((arm) => [
      slider(controls, `π_b of arm ${arm + 1}`, { min: 0.01, max: 0.98, step: 0.01, value: behaviour[arm] },
             (v) => { behaviour = withProbability(behaviour, arm, v); draw(); }),
      slider(controls, `reward of arm ${arm + 1}`, { min: 0, max: 1, step: 0.01, value: rewards[arm] },
             (v) => { rewards[arm] = v; draw(); })]);
    const grab = (place, set) => draggable(place, ([x, y], first) => {
      if (first) held = Math.max(0, Math.min(2, Math.round(x) - 1));
      set(held, y);
      draw();
    });
    grab(data, (arm, y) => { behaviour = withProbability(behaviour, arm, y); });
    grab(pay, (arm, y) => { rewards[arm] = Math.round(y * 100) / 100; });

    function bars(place, values, colour) {
      place.clear();
      values.forEach((v, i) => {
        const top = place.Y(Math.max(0, v)), height = place.Y(Math.min(0, v)) - top;
        svg("rect", { x: place.X(i + 0.72), y: top, width: place.X(i + 1.28) - place.X(i + 0.72),
                      height: Math.max(1, height), fill: colour(i) }, place.layer);
        svg("text", { x: place.X(i + 1), y: v < 0 ? place.Y(v) + 14 : top - 5, "text-anchor": "middle" }, place.layer,
            v.toFixed(3).replace("-", "−").replace(/0$/, ""));
      });
    }

    function draw() {
      const c = drift(behaviour, rewards), winner = c.indexOf(Math.max(...c));
      const best = rewards.indexOf(Math.max(...rewards)), need = threshold(behaviour, rewards);
      bars(data, behaviour, () => colours.clip);
      bars(pay, rewards, () => colours.green);
      bars(push, c, (i) => i === winner ? colours.reinforce : "#bbbbbb");
      svg("line", { x1: data.X(best + 0.6), x2: data.X(best + 1.4), y1: data.Y(need), y2: data.Y(need),
                    stroke: "black", "stroke-width": 2, "stroke-dasharray": "4 3" }, data.layer);
      path.clear();
      const times = [...Array(2000).keys()].map((n) => n + 1);
      const runs = [[Infinity, colours.reinforce, ""], [1, "#E69F00", "6 4"]];
      for (const [refreshEvery, stroke, dash] of runs) {
        const values = expectedRewards(behaviour, rewards, { steps: 2000, refreshEvery }).slice(1);
        line(path, times, values, { stroke, "stroke-dasharray": dash });
      }
      svg("text", { x: path.right - 4, y: path.bottom - 22, "text-anchor": "end", fill: colours.reinforce }, path.layer,
          "— fixed data");
      svg("text", { x: path.right - 4, y: path.bottom - 8, "text-anchor": "end", fill: "#8a5f00" }, path.layer,
          "- - fresh data, or the exact ratio");
      behaviour.forEach((p, i) => { move[i][0](p); move[i][1](rewards[i]); });
      const right = rewards[winner] === rewards[best];
      words.textContent = `μ = ${mean(behaviour, rewards).toFixed(3)}. On these data for ever REINFORCE ends on arm ` +
        `${winner + 1}, ${right ? "the best one" : `though arm ${best + 1} pays more`}. With the others in the same ` +
        `proportion, arm ${best + 1} wins once its share of the data is above ${need.toFixed(4)} (dashed).`;
    }
    draw();
  });
}
