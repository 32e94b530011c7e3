// Where the time goes: phases of the steps, which role was busy when, memory of the roles.

const ROLE_HUES = { rollout: '#2563eb', reward: '#60a5fa', weights: '#e0a800', reference: '#14b8a6', critic: '#862e9c', actor: '#d97706', engines: '#be185d', controller: '#7b8794', wait: '#b42318', step: '#94a3b8' };
const OTHER_HUES = { old_logprobs: '#0f766e', testing: '#94a3b8', values: '#c084fc' };

function time(host) {
  const one = run();
  put(host, [phaseCard(one), gradeCard(one), busyCard(one), memoryCard(one)]);
  if (!host.children.length) host.append(card('', el('p', {}, 'This run has measured no times.')));
}

const PHASE_NAMES = { gen: 'sampling', ref: 'reference', adv: 'advantages', testing: 'validation', reward: 'scoring', old_logprobs: 'old log-probs' };

function phaseName(name) {
  return PHASE_NAMES[name] || name.replaceAll('_', ' ');
}

function phasesOf(one) {
  const { columns } = one.metrics;
  return Object.keys(columns).filter((name) => name.startsWith('timing_s/') && !['timing_s/step', 'timing_s/rollout_waits_for_trainer'].includes(name));
}

// The last steps that were measured, without the first one of the run, which warms up, and the mean seconds of one.
function paceOf(one) {
  const seconds = one.metrics.columns['timing_s/step'] || [];
  const measured = seconds.map((value, at) => (value === null ? -1 : at)).filter((at) => at >= 0);
  const recent = (measured.length > 1 ? measured.slice(1) : measured).slice(-20);
  return { recent, pace: mean(recent.map((at) => seconds[at])) };
}

function phaseCard(one) {
  const { columns } = one.metrics;
  const names = phasesOf(one);
  if (!columns['timing_s/step'] || !names.length) return null;
  const { recent, pace: whole } = paceOf(one);
  const average = (name) => recent.reduce((sum, at) => sum + (columns[name][at] || 0), 0) / recent.length;
  const rows = names.map((name) => [name.slice(9), average(name)]).filter(([, seconds]) => seconds > 0).sort((a, b) => b[1] - a[1]);
  const rest = whole - rows.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (rest > 0) rows.push(['other', rest]);
  const hueOf = new Map(rows.map(([name], place) => [name, name === 'other' ? '#94a3b8' : HUES[place % HUES.length]]));
  const box = card('Phases of a step');
  box.append(
    el('div', { className: 'phases' }, rows.map(([name, seconds]) => el('div', { className: 'phase' }, el('span', {}, el('i', { className: 'dot', style: { background: hueOf.get(name) } }), phaseName(name)), el('span', { className: 'one' }, el('i', { style: { width: `${Math.min(100, (100 * seconds) / whole)}%`, background: hueOf.get(name) } })), el('b', {}, duration(seconds)), el('small', {}, `${Math.round((100 * seconds) / whole)} %`)))),
    el('p', { className: 'muted' }, `Seconds per step, the mean of ${recent.length === 1 ? 'one step' : `the last ${recent.length} steps`} without the first; a step takes ${duration(whole)}. Phases that run at the same time add up to more than a step.`),
  );
  return box;
}

function gradeCard(one) {
  if (!one.graded.length) return null;
  const rows = one.graded.map(([name, predicted, measured]) => [name, number(predicted, 3), number(measured, 3), `${signed(100 * (predicted / measured - 1), 2)} %`]);
  return card('A step by the plan', el('div', { className: 'scroll' }, el('table', {}, el('tr', {}, ['', 'predicted', 'measured', 'error'].map((name) => el('th', {}, name))), rows.map((row) => el('tr', {}, row.map((text) => el('td', {}, text)))))));
}

function busyCard(one) {
  const bars = one.timeline;
  if (!bars.length) return null;
  const roles = [...new Set(bars.map((bar) => bar.role))].filter((role) => role !== 'step' && role !== 'wait');
  const order = Object.keys(ROLE_HUES);
  roles.sort((a, b) => order.indexOf(a) - order.indexOf(b));
  const steps = bars.filter((bar) => bar.role === 'step');
  const first = Math.min(...bars.map((bar) => bar.start));
  const last = Math.max(...bars.map((bar) => bar.end));
  const window = steps.length ? [steps[Math.max(0, steps.length - 6)].start, Math.max(...steps.map((bar) => bar.end))] : [first, last];
  const box = card('Which role was busy when');
  const idle = roles.map((role) => [role, 1 - busy(bars.filter((bar) => bar.role === role), window) / Math.max(1e-9, window[1] - window[0])]);
  const place = el('div', { className: 'plot' });
  const hint = el('span', { className: 'muted' });
  const buttons = [['last steps', () => plot.setScale('x', { min: window[0], max: window[1] })], ['all', () => plot.setScale('x', { min: first, max: last })]].map(([text, act]) => el('button', { type: 'button', onclick: () => act() }, text));
  box.append(el('div', { className: 'bar' }, buttons, hint), place, el('p', { className: 'legend' }, idle.map(([role, share]) => el('span', { className: 'key' }, el('i', { style: { background: ROLE_HUES[role] || '#888' } }), `${role}: idle ${Math.round(100 * Math.max(0, share))} %`))), el('p', { className: 'muted' }, 'Seconds since the run began; drag to zoom, double-click for all. Thin red: one side waits for the other. Idle shares are those of the last steps.'));
  let plot;
  whenShown(box, () => {
    plot = laneChart(place, roles, bars, window, [first, last], hint);
  });
  return box;
}

function busy(bars, [start, end]) {
  let total = 0;
  let reached = start;
  for (const bar of bars.sort((a, b) => a.start - b.start)) {
    const from = Math.max(bar.start, reached);
    const to = Math.min(bar.end, end);
    if (to > from) { total += to - from; reached = to; }
  }
  return total;
}

function laneChart(host, roles, bars, window, [first, last], hint) {
  const height = 46 + 30 * roles.length;
  const lanes = (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const bar of bars) {
      const left = plot.valToPos(bar.start, 'x', true);
      const right = plot.valToPos(bar.end, 'x', true);
      if (right < bbox.left || left > bbox.left + bbox.width) continue;
      if (bar.role === 'step') {
        ctx.fillStyle = faded(colour('--ink'), 0.25);
        ctx.fillRect(left, bbox.top, devicePixelRatio, bbox.height);
        continue;
      }
      const lane = bar.role === 'wait' ? roles.length : roles.indexOf(bar.role);
      const top = plot.valToPos(lane - 0.36, 'y', true);
      const bottom = plot.valToPos(lane + (bar.role === 'wait' ? -0.2 : 0.36), 'y', true);
      ctx.fillStyle = OTHER_HUES[bar.what] || ROLE_HUES[bar.role] || '#888888';
      ctx.fillRect(left, Math.min(top, bottom), Math.max(devicePixelRatio, right - left - 0.5), Math.abs(bottom - top));
    }
    ctx.restore();
  };
  const plot = chart(host, { x: [first, last], series: [{ label: '', values: [0, 0], colour: 'transparent' }], height, xLabel: 'seconds', range: () => [-0.7, roles.length + 0.1], yAxis: 84, ySplits: roles.map((_, place) => place), yValues: (_, splits) => splits.map((value) => roles[value]), draw: [lanes], onCursor: (each) => {
    const { left, top } = each.cursor;
    if (left < 0) return;
    const at = each.posToVal(left, 'x');
    const role = roles[Math.round(each.posToVal(top, 'y'))];
    const bar = bars.find((one) => one.role === role && one.start <= at && at <= one.end);
    hint.textContent = bar ? `${role}: ${phaseName(bar.what)}, ${duration(bar.end - bar.start)}, step ${bar.step}` : '';
  } });
  plot.setScale('x', { min: window[0], max: window[1] });
  return plot;
}

function memoryCard(one) {
  const names = Object.keys(one.metrics.columns).filter((name) => /mem(ory)?([_/]|$)|_gib$|_gb$|rss/i.test(name));
  if (!names.length) return null;
  const box = card('Memory');
  whenShown(box, () => namedChart(box, { x: one.metrics.steps, series: names.map((name, place) => ({ label: name, values: one.metrics.columns[name], colour: HUES[place % HUES.length] })), height: 200 }));
  return box;
}
