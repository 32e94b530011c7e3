// Every metric of every run, searched, grouped, smoothed, over steps, tokens or seconds.

const AXES = { steps: 'step', tokens: 'tokens', seconds: 'seconds of training' };

function curves(host) {
  const grid = el('div', { className: 'groups' });
  const search = el('input', { type: 'search', placeholder: 'search metrics, e.g. kl or val', value: chosen.find || '', 'aria-label': 'search metrics', oninput: () => { choose({ find: search.value }); draw(); } });
  const amount = el('input', { type: 'range', min: 0, max: 0.98, step: 0.02, value: chosen.smooth || 0, 'aria-label': 'smoothing', oninput: () => { choose({ smooth: Number(amount.value) || null }); shownSmooth.textContent = amount.value; later(); } });
  const shownSmooth = el('span', { className: 'muted' }, chosen.smooth || '0');
  let timer = null;
  const later = () => { clearTimeout(timer); timer = setTimeout(draw, 120); };
  const axis = select(Object.entries(AXES), chosen.axis || 'steps', (value) => { choose({ axis: value === 'steps' ? null : value }); draw(); }, 'horizontal axis');
  const spread = repeated().length ? labelled('mean over seeds', el('input', { type: 'checkbox', checked: chosen.seeds !== 'each', onchange: (event) => { choose({ seeds: event.target.checked ? null : 'each' }); draw(); } })) : null;
  const all = el('button', { type: 'button', onclick: () => saveAll() }, 'all as CSV');
  put(host, [el('div', { className: 'bar' }, search, labelled('over', axis), labelled('smoothing', amount, shownSmooth), spread, all), RUNS.length > 1 ? runKeys() : null, grid]);
  function draw() {
    forgetCharts();
    refill(grid);
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const names = metricNames().filter((name) => words.every((word) => name.toLowerCase().includes(word)));
    for (const [group, members] of grouped(names, groupOf)) grid.append(curveGroup(group, members, words.length > 0));
    if (!names.length) grid.append(el('p', { className: 'muted' }, 'No metric has this name.'));
    const every = Math.max(...RUNS.map((one) => one.metrics.every));
    if (every > 1) grid.append(el('p', { className: 'muted' }, `Of these long curves every ${every}th step is drawn; metrics.jsonl has all of them.`));
  }
  draw();
}

function groupOf(name) {
  return name.includes('/') ? name.split('/')[0] : 'other';
}

const FIRST = ['reward', 'val', 'train', 'actor', 'critic', 'advantage', 'rollout', 'rollout_corr', 'response_length', 'timing_s', 'perf'];

function metricNames() {
  const names = [...new Set(RUNS.flatMap((one) => Object.keys(one.metrics.columns)))];
  const rank = (name) => (FIRST.includes(groupOf(name)) ? FIRST.indexOf(groupOf(name)) : FIRST.length);
  const depth = (name) => name.split('/').length;
  const isMain = (name) => /^reward\/mean$|^val\/[^/]+\/(reward|mean@\d+)$|^(train|val|actor)\/loss$/.test(name);
  return names.sort((a, b) => rank(a) - rank(b) || isMain(b) - isMain(a) || depth(a) - depth(b) || a.localeCompare(b, 'en'));
}

function curveGroup(group, names, isSearched) {
  const box = el('details', { className: 'group', open: true }, el('summary', {}, group, el('small', {}, ` ${names.length}`)));
  const grid = el('div', { className: 'grid' });
  const still = isSearched ? [] : names.filter(isStill);
  const moving = names.filter((name) => !still.includes(name));
  // A reward of one function has the same curve under several names.
  const twins = isSearched ? [] : moving.filter((name, place) => moving.slice(0, place).some((other) => isSame(name, other)));
  for (const name of moving.filter((name) => !twins.includes(name))) {
    const place = el('section', { className: 'card small' });
    grid.append(place);
    whenShown(place, () => curveCard(place, name));
  }
  if (group !== 'other' && !isSearched && names.length > 40) box.open = false;
  box.append(grid);
  const listed = (what, members, text) => members.length && box.append(el('p', { className: 'still' }, el('small', {}, what), members.map((name) => el('button', { type: 'button', className: 'quiet', onclick: () => enlarge(name) }, text(name)))));
  listed('without a change: ', still, (name) => `${name} = ${number(valueOf(name))}`);
  listed('the same curve: ', twins, (name) => `${name} = ${moving.find((other) => isSame(name, other))}`);
  return box;
}

function isSame(name, other) {
  return RUNS.every(({ metrics: { columns } }) => (columns[name] || []).length === (columns[other] || []).length && (columns[name] || []).every((value, at) => value === columns[other][at]));
}

function valueOf(name) {
  return RUNS.flatMap((one) => one.metrics.columns[name] || []).find((value) => value !== null);
}

function isStill(name) {
  const values = RUNS.flatMap((one) => one.metrics.columns[name] || []).filter((value) => value !== null);
  return values.every((value) => value === values[0]);
}

function curveData(name) {
  const share = Number(chosen.smooth) || 0;
  const axis = chosen.axis || 'steps';
  const tables = [];
  const parts = [];
  // Steps alone are the same in all runs of a setting; their tokens and seconds differ.
  const means = axis === 'steps' && chosen.seeds !== 'each' ? repeated() : [];
  RUNS.forEach((one, place) => {
    if (means.flat().includes(one)) return;
    const column = one.metrics.columns[name];
    if (!column) return;
    const kept = column.map((value, at) => [one.metrics[axis][at], value]).filter(([, value]) => value !== null);
    const x = kept.map(([at]) => at);
    const raw = kept.map(([, value]) => value);
    tables.push(share ? [x, raw, smoothed(raw, share)] : [x, raw]);
    parts.push({ one, hue: HUES[place % HUES.length] });
  });
  const bands = means.map((members) => meanCurve(name, members, share)).filter(({ x }) => x.length);
  for (const { x, values, low, high } of bands) tables.push([x, values, low, high]);
  if (!tables.length) return null;
  const [x, ...columns] = tables.length === 1 ? tables[0] : uPlot.join(tables);
  const series = [];
  parts.forEach(({ one, hue }) => {
    if (share) series.push({ label: '', quiet: true, values: columns.shift(), colour: faded(hue, 0.25), width: 1 });
    series.push({ label: RUNS.length > 1 ? one.name : '', values: columns.shift(), colour: hue, points: x.length < 30 });
  });
  for (const { label, hue } of bands) series.push({ label, colour: hue, values: columns.shift(), low: columns.shift(), high: columns.shift() });
  return { x, series, xLabel: AXES[axis] };
}

// Mean and standard deviation over the runs of a setting, at the steps that all of them have.
function meanCurve(name, members, share) {
  const byStep = members.map((one) => new Map((one.metrics.columns[name] || []).map((value, at) => [one.metrics.steps[at], value])));
  const x = members[0].metrics.steps.filter((step) => byStep.every((values) => Number.isFinite(values.get(step))));
  const points = x.map((step) => byStep.map((values) => values.get(step)));
  const middle = smoothed(points.map(mean), share);
  const spreads = smoothed(points.map(deviation), share);
  const edge = (sign) => middle.map((value, at) => value + sign * spreads[at]);
  return { x, values: middle, low: edge(-1), high: edge(1), label: ofSeeds(members), hue: HUES[RUNS.indexOf(members[0]) % HUES.length] };
}

function curveCard(place, name, height = 150) {
  const data = curveData(name);
  refill(place, el('h3', { title: name }, name));
  if (!data) {
    place.append(el('p', { className: 'muted' }, 'no value'));
    return;
  }
  namedChart(place, { ...data, height, sync: 'curves', marks: RUNS.length === 1 ? run().alarms.map(([step]) => ({ x: atStep(step), colour: faded(colour('--red'), 0.5) })) : [] });
  const large = el('button', { className: 'quiet', type: 'button', title: 'larger', onclick: () => enlarge(name) }, 'larger');
  const table = el('button', { className: 'quiet', type: 'button', onclick: () => download(`${name.replace(/[^\w.-]+/g, '_')}.csv`, csv([[data.xLabel, ...data.series.map((one) => one.label || (one.quiet ? 'raw' : name))], ...data.x.map((x, at) => [x, ...data.series.map((one) => one.values[at])])])) }, 'CSV');
  place.append(el('div', { className: 'tools' }, height < 200 ? large : null, table));
}

function atStep(step) {
  const { metrics } = run();
  const at = metrics.steps.indexOf(step);
  return at < 0 ? -1 : metrics[chosen.axis || 'steps'][at];
}

function enlarge(name) {
  const place = el('section', { className: 'card' });
  const shade = el('div', { className: 'shade', onclick: (event) => event.target === shade && close() }, el('div', { className: 'large' }, el('button', { className: 'close', type: 'button', 'aria-label': 'close', onclick: () => close() }, '×'), place));
  const onKey = (event) => event.key === 'Escape' && close();
  const close = () => { shade.remove(); document.removeEventListener('keydown', onKey); };
  document.addEventListener('keydown', onKey);
  document.body.append(shade);
  curveCard(place, name, Math.max(260, innerHeight - 260));
}

function runKeys() {
  return el('div', { className: 'legend' }, RUNS.map((one, place) => el('span', { className: 'key' }, el('i', { style: { background: HUES[place % HUES.length] } }), one.name)));
}

function saveAll() {
  const names = metricNames();
  const rows = [['run', 'step', 'tokens', 'seconds', ...names]];
  for (const one of RUNS) {
    const { metrics } = one;
    metrics.steps.forEach((step, at) => rows.push([one.name, step, metrics.tokens[at], metrics.seconds[at], ...names.map((name) => (metrics.columns[name] ? metrics.columns[name][at] : null))]));
  }
  download('metrics.csv', csv(rows));
}
