// The head of the page, and the tab that answers: what was trained, did it work, is it well?

const STATES = {
  running: ['running', 'blue'],
  done: ['done', 'green'],
  failed: ['failed', 'red'],
  preempted: ['stopped, saved', 'amber'],
  lost: ['ended without a word', 'red'],
};

function stateOf(one) {
  if (one.status.state === 'preempted' && !one.status.last_commit) return ['stopped, nothing saved', 'amber'];
  return STATES[one.status.state] || [one.status.state || 'unknown', 'grey'];
}

function health(one) {
  const grave = one.findings.filter((finding) => finding.weight === 'ill').length;
  const watched = one.findings.filter((finding) => finding.weight === 'watch').length;
  if (grave) return ['red', `${grave} illness${grave > 1 ? 'es' : ''}`];
  if (watched) return ['amber', `${watched} to watch`];
  return one.undecided ? ['grey', 'too few steps to judge'] : ['green', 'healthy'];
}

function head(one) {
  const { status } = one;
  const [state, hue] = stateOf(one);
  const total = status.total;
  const step = status.step || one.num_steps;
  const { pace } = paceOf(one);
  const left = status.state === 'running' && total && pace ? (total - step) * pace : null;
  const facts = [
    ['step', total ? `${number(step)} of ${number(total)}` : number(step)],
    status.state === 'running' ? ['phase', status.phase] : null,
    left !== null ? ['time left', duration(left)] : null,
    pace ? ['a step takes', duration(pace)] : null,
    ['last commit', status.last_commit ? `step ${status.last_commit}` : 'none'],
    Object.keys(status.restarts || {}).length ? ['restarts', number(Object.values(status.restarts).reduce((a, b) => a + b, 0))] : null,
  ].filter(Boolean);
  const [light, word] = health(one);
  return el(
    'div',
    { className: 'head' },
    el('div', { className: 'title' }, el('h1', {}, one.name), el('span', { className: `chip ${hue}` }, state), el('button', { className: `chip ${light}`, type: 'button', onclick: () => show('overview', 'health') }, word)),
    total ? el('div', { className: 'progress', role: 'progressbar', 'aria-valuenow': step, 'aria-valuemax': total }, el('i', { style: { width: `${Math.min(100, (100 * step) / total)}%` }, className: hue })) : null,
    el('dl', { className: 'facts' }, facts.map(([name, value]) => el('div', {}, el('dt', {}, name), el('dd', {}, value)))),
    status.error ? el('p', { className: 'error' }, status.error.message) : null,
    status.state !== 'done' ? el('details', { className: 'resume', open: status.state !== 'running' }, el('summary', {}, status.last_commit ? `the command that goes on from step ${status.last_commit}` : 'the command that starts it again (no step is saved)'), code(one.configuration.resume)) : null,
    status.state === 'running' && Date.now() / 1000 - DATA.written > 20 * (pace || 60) + 60
      ? el('p', { className: 'muted' }, `This page was written ${duration(Date.now() / 1000 - DATA.written)} ago; the run may be further on, or gone.`)
      : null,
  );
}

function overview(host) {
  const one = run();
  const left = el('div', { className: 'column' }, resultsCard(one), rewardCard(one), lossCard(one), compareCard());
  if (!left.children.length) left.append(card('Before and after', el('p', { className: 'muted' }, 'Nothing was measured: the run ended before its first validation and its first step, or has not come so far.')));
  // The objective has a card of its own.
  if (one.plan) left.append(card('What was trained', el('pre', { className: 'plan' }, one.plan.replace(OBJECTIVE, ''))));
  const right = el('div', { className: 'column' }, healthCard(one), objectiveCard(one), filesCard(one));
  put(host, [el('div', { className: 'columns' }, left, right)]);
}

function resultsCard(one) {
  if (!one.results.length) return null;
  const rows = one.results.map((result) => {
    const { before, after } = result;
    const isOne = before.step === after.step;
    const difference = result.change || (isOne || before.value === null || after.value === null ? null : { mean: after.value - before.value });
    return el(
      'div',
      { className: 'result' },
      el('div', { className: 'name' }, result.name, result.prompts ? el('small', {}, ` ${number(result.prompts)} prompts`) : null),
      isOne ? null : bounded(before, `step ${before.step}`),
      isOne ? null : el('span', { className: 'arrow' }, '→'),
      bounded(after, `step ${after.step}`, isOne),
      difference && difference.mean !== null ? el('div', { className: 'difference' }, el('b', {}, signed(difference.mean, 3)), Number.isFinite(difference.low) ? el('small', {}, `[${signed(difference.low, 2)}, ${signed(difference.high, 2)}]`) : null) : null,
    );
  });
  const hasIntervals = one.results.some((result) => Number.isFinite(result.after.low));
  return card('Before and after', rows, hasIntervals ? el('p', { className: 'muted' }, 'In brackets: 95 % intervals over prompts; that of the change pairs the prompts.') : null);
}

function bounded(point, label, isOnly) {
  return el('div', { className: isOnly ? 'value only' : 'value' }, el('b', {}, number(point.value, 3)), el('small', {}, Number.isFinite(point.low) ? `[${number(point.low, 2)}, ${number(point.high, 2)}] ${label}` : label));
}

function onSteps(steps, series, name) {
  const at = new Map(series.steps.map((step, place) => [step, series[name][place]]));
  return steps.map((step) => (at.has(step) ? at.get(step) : null));
}

function curveOf(one, name) {
  const column = one.metrics.columns[name];
  return column ? { steps: one.metrics.steps, mean: column } : null;
}

// A chart of series over all of their steps: {label, found: {steps, mean, low, high}, colour, ...}.
function seriesCard(one, title, parts) {
  const shown = parts.filter((part) => part.found);
  if (!shown.length) return null;
  const steps = [...new Set(shown.flatMap((part) => part.found.steps))].sort((a, b) => a - b);
  const series = shown.map(({ found, bounds = found, ...rest }) => ({
    ...rest,
    values: onSteps(steps, found, 'mean'),
    ...(bounds && bounds.low ? { low: onSteps(steps, bounds, 'low'), high: onSteps(steps, bounds, 'high') } : {}),
  }));
  const box = card(title);
  const marks = one.alarms.map(([step]) => ({ x: step, colour: colour('--red') }));
  whenShown(box, () => namedChart(box, { x: steps, series, height: 300, marks }));
  if (one.alarms.length) {
    box.append(el('p', { className: 'alarms' }, 'Alarms: ', one.alarms.map(([step, name], place) => [place ? ', ' : '', el('b', {}, name.replaceAll('_', ' ')), ` at step ${step}`])));
  }
  return box;
}

function rewardCard(one) {
  const banded = one.rewards.all || Object.values(one.rewards)[0] || null;
  const parts = [{ label: 'training reward', found: curveOf(one, 'reward/mean'), bounds: banded, colour: HUES[0] }];
  const audits = Object.keys(one.metrics.columns).filter((name) => /^audit\/[^/]+\/num_prompts$/.test(name)).map((name) => name.split('/')[1]);
  audits.forEach((name, place) => {
    parts.push({ label: `audit by ${name}`, found: curveOf(one, `audit/${name}`), colour: HUES[HUES.length - 1 - (place % (HUES.length - 1))], dash: [2, 3], width: 2 });
  });
  Object.entries(one.validation).forEach(([name, found], place) => {
    parts.push({ label: `validation ${name}`, found, colour: HUES[1 + (place % (HUES.length - 1))], points: true, ...(found.value === 'reward' ? { dash: [5, 4], width: 1.4 } : { width: 2.2 }) });
  });
  return seriesCard(one, one.metrics.columns['reward/mean'] ? 'Reward and validation' : 'Validation', parts);
}

function lossCard(one) {
  return seriesCard(one, 'Loss', [
    { label: 'training', found: curveOf(one, 'train/loss'), colour: HUES[0] },
    { label: 'validation', found: curveOf(one, 'val/loss'), colour: HUES[1], points: true, width: 2.2 },
  ]);
}

// A chart needs its width, which it has once it is on the page and near the screen.
function whenShown(node, draw) {
  const watcher = new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) {
      watcher.disconnect();
      draw();
    }
  }, { rootMargin: '300px' });
  watcher.observe(node);
}

function compareCard() {
  if (RUNS.length < 2) return null;
  const short = (name) => name.replace(/^training reward .*/, 'training reward, last steps');
  const names = [...new Set(RUNS.flatMap((one) => one.results.map((result) => short(result.name))))];
  const resultOf = (one, name) => one.results.find((result) => short(result.name) === name);
  const rows = RUNS.map((one, place) => {
    const cells = names.map((name) => {
      const result = resultOf(one, name);
      return el('td', {}, result ? [number(result.after.value, 3), Number.isFinite(result.after.low) ? el('small', {}, ` [${number(result.after.low, 2)}, ${number(result.after.high, 2)}]`) : null] : '–');
    });
    return el('tr', {}, el('th', { className: 'name' }, el('i', { className: 'dot', style: { background: HUES[place % HUES.length] } }), one.name), el('td', {}, stateOf(one)[0]), el('td', {}, number(one.num_steps)), cells);
  });
  const means = repeated().map((members) => {
    const cells = names.map((name) => {
      const values = members.map((one) => resultOf(one, name)?.after.value ?? null);
      return el('td', {}, values.includes(null) ? '–' : `${number(mean(values), 3)} ± ${number(deviation(values), 2)}`);
    });
    return el('tr', {}, el('th', { className: 'name' }, ofSeeds(members)), el('td', {}), el('td', {}), cells);
  });
  const note = means.length ? el('p', { className: 'muted' }, '±: the standard deviation over the runs.') : null;
  return card('The runs', el('div', { className: 'scroll' }, el('table', {}, el('tr', {}, ['run', 'state', 'steps', ...names].map((name) => el('th', {}, name))), rows, means)), note);
}

function healthCard(one) {
  const box = card('Health');
  box.id = 'health';
  if (one.undecided) {
    box.append(el('p', { className: 'light' }, el('i', { className: 'lamp grey' }), el('span', {}, `${number(one.num_steps)} training steps are too few to judge; nothing is wrong so far.`)));
  } else if (health(one)[0] === 'green') {
    box.append(el('p', { className: 'light' }, el('i', { className: 'lamp green' }), el('span', {}, `Nothing is wrong with this run, as far as ${one.num_rules} rules see in ${number(one.num_steps)} steps.`)));
  }
  const lamps = { ill: 'red', watch: 'amber' };
  one.findings.forEach((finding, place) => {
    const advice = finding.advice.map((text) => el('li', {}, text));
    box.append(
      el(
        'details',
        { open: place === 0, className: 'finding' },
        el('summary', { className: 'light' }, el('i', { className: `lamp ${lamps[finding.weight]}`, title: finding.weight }), el('span', {}, finding.title, el('small', {}, ` ${finding.name.replaceAll('_', ' ')}, since step ${finding.since}`))),
        el('dl', {}, el('dt', {}, 'seen'), el('dd', {}, finding.evidence), el('dt', {}, 'means'), el('dd', {}, finding.meaning), el('dt', {}, 'to change'), el('dd', {}, el('ul', {}, advice)), el('dt', {}, 'source'), el('dd', { className: 'muted' }, finding.source)),
      ),
    );
  });
  return box;
}

// The plan's section: a line has a symbol and what it stands for.
const OBJECTIVE = /^objective\n((?: .*\n?)+)/m;

function objectiveCard(one) {
  const section = OBJECTIVE.exec(one.plan || '');
  if (!section) return null;
  const lines = section[1].trim().split(/\n {2}(?=\S)/).map((line) => /^(\S+)\s+([^]*)$/.exec(line)).filter(Boolean);
  return card('The objective', el('dl', { className: 'objective' }, lines.map(([, symbol, meaning]) => [el('dt', {}, symbol), el('dd', {}, meaning.replace(/\s+/g, ' '))])));
}

function filesCard(one) {
  return card('Files', el('p', { className: 'muted' }, one.folder), el('ul', { className: 'files' }, one.written.map(([name, place]) => el('li', {}, el('span', {}, name), el('a', { href: encodeURI(`${one.base}/${place}`) }, place)))));
}
