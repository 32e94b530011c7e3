// The tab of rollouts: groups by step, filtered, one of them side by side; and the same prompts at two steps.

const ROWS = 60;
const OUTCOMES = [['', 'any outcome'], ['mixed', 'rewards differ'], ['equal', 'all rewards equal'], ['best', 'all at the best reward'], ['none', 'none above the lowest'], ['failed', 'a reward failed'], ['cut', 'a response was cut']];
let openGroup = () => {};

async function rollouts(host) {
  const one = run();
  if (!one.num_rollouts) {
    put(host, [card('', el('p', {}, 'No rollout of this run was logged (trainer.save_rollouts).'))]);
    return;
  }
  put(host, [el('p', { className: 'muted' }, 'loading …')]);
  let all;
  try {
    all = await store(one).ready();
  } catch (error) {
    refill(host, card('', el('p', { className: 'error' }, error.message)));
    return;
  }
  if (chosen.tab !== 'rollouts' || run() !== one) return;
  const kind = all.steps[chosen.kind] && all.steps[chosen.kind].length ? chosen.kind : all.steps.rollouts.length ? 'rollouts' : 'val';
  const kinds = [['rollouts', 'training'], ['val', 'validation']].filter(([name]) => all.steps[name].length);
  const list = el('div', { className: 'list' });
  const detail = el('div', { className: 'detail' });
  const modes = el('span', { className: 'modes' }, [['', 'one step'], ['two', 'two steps']].map(([name, text]) => el('button', { type: 'button', className: (chosen.mode || '') === name ? 'on' : '', onclick: () => { choose({ mode: name, group: null }); show('rollouts'); } }, text)));
  const bar = el('div', { className: 'bar' }, select(kinds, kind, (value) => { choose({ kind: value, step: null, group: null, from: null, to: null }); show('rollouts'); }, 'training or validation'), all.steps[kind].length > 1 ? modes : null);
  refill(host, bar, el('div', { className: 'browser' }, list, detail));
  if (chosen.mode === 'two' && all.steps[kind].length > 1) twoSteps(bar, list, detail, all, kind);
  else oneStep(bar, list, detail, all, kind);
}

function oneStep(bar, list, detail, all, kind) {
  const steps = all.steps[kind];
  const wanted = chosen.step === 'all' ? null : steps.includes(Number(chosen.step)) && chosen.step !== undefined ? Number(chosen.step) : steps[steps.length - 1];
  const numeric = (text) => (text === undefined || text === '' || !Number.isFinite(Number(text)) ? null : Number(text));
  let shown = [];
  let turn = 0;
  const note = el('span', { className: 'muted' });
  const change = (changes) => { choose(changes); update(); };
  const box = select([...(steps.length > 1 ? [['all', 'all steps']] : []), ...steps.map((step) => [step, `step ${step}`])], wanted === null ? 'all' : wanted, (value) => change({ step: value, group: null }), 'step');
  const moved = (by) => {
    const at = steps.indexOf(Number(box.value)) + by;
    if (at < 0 || at >= steps.length) return;
    box.value = String(steps[at]);
    change({ step: steps[at], group: null });
  };
  const source = all.sources.length > 1 ? select([['', 'any source'], ...all.sources.map((name, place) => [place, name])], chosen.source || '', (value) => change({ source: value }), 'source') : null;
  const outcome = select(OUTCOMES, chosen.outcome || '', (value) => change({ outcome: value }), 'outcome');
  const field = (name, label) => el('input', { type: 'number', step: 'any', placeholder: label, value: chosen[name] || '', 'aria-label': label, className: 'short', onchange: (event) => change({ [name]: event.target.value }) });
  const text = el('input', { type: 'search', placeholder: 'text in prompts and responses', value: chosen.text || '', 'aria-label': 'text', onchange: () => change({ text: text.value }) });
  const sort = select([['', 'in order'], ['low', 'lowest reward first'], ['high', 'highest reward first'], ['long', 'longest first']], chosen.sort || '', (value) => change({ sort: value }), 'order of groups');
  put(bar, [el('span', { className: 'stepper' }, el('button', { type: 'button', 'aria-label': 'earlier step', onclick: () => moved(-1) }, '‹'), box, el('button', { type: 'button', 'aria-label': 'later step', onclick: () => moved(1) }, '›')), source, outcome, field('low', 'reward ≥'), field('high', 'reward ≤'), text, sort, note]);

  async function update() {
    const mine = ++turn;
    const conditions = { kind, step: box.value === 'all' ? null : Number(box.value), source: numeric(chosen.source), outcome: chosen.outcome || '', low: numeric(chosen.low), high: numeric(chosen.high), text: chosen.text || '' };
    const progress = (share, kept) => {
      if (mine !== turn || !list.isConnected) return false;
      note.textContent = `searching … ${Math.round(100 * share)} %, ${kept.length} found`;
      return true;
    };
    const groups = await found(all, conditions, progress);
    if (groups === null || mine !== turn) return;
    const keys = { low: (group) => group.mean ?? Infinity, high: (group) => -(group.mean ?? -Infinity), long: (group) => -Math.max(...group.lengths) };
    if (keys[chosen.sort]) groups.sort((a, b) => keys[chosen.sort](a) - keys[chosen.sort](b));
    shown = groups;
    const count = groups.reduce((sum, group) => sum + group.rewards.length, 0);
    note.textContent = `${number(groups.length)} groups, ${number(count)} rollouts`;
    groupList(list, all, shown, box.value === 'all');
    const named = shown.find((group) => `${group.step}.${group.place}` === chosen.group);
    if (named || shown.length) openGroup(named || shown[0], true);
    else refill(detail, el('p', { className: 'muted' }, 'No group meets all of these conditions.'));
  }

  openGroup = async (group, quietly) => {
    choose({ group: `${group.step}.${group.place}` });
    for (const row of list.querySelectorAll('.row')) row.classList.toggle('here', row.dataset.group === chosen.group);
    let texts;
    try {
      texts = await all.texts(group);
    } catch (error) {
      refill(detail, el('p', { className: 'error' }, error.message));
      return;
    }
    if (chosen.group !== `${group.step}.${group.place}`) return;
    forgetCharts();
    refill(detail);
    groupView(detail, all, group, texts);
    if (!quietly && innerWidth < 900) detail.scrollIntoView({ behavior: 'smooth' });
  };
  update();
}

function squares(all, group) {
  const failed = new Set(group.failures.map(([place]) => place));
  const cut = new Set(group.cut);
  return el('span', { className: 'squares' }, group.rewards.slice(0, 64).map((reward, place) => el('i', { className: `square${failed.has(place) ? ' failed' : ''}${cut.has(place) ? ' cut' : ''}`, title: `#${place}: ${reward === null ? 'no reward' : number(reward)}${cut.has(place) ? ', cut' : ''}${failed.has(place) ? ', failed' : ''}`, style: { background: all.hue(reward) } })));
}

// Prompts of two rows may have the same text, such as games with one opening.
function promptName(all, group) {
  const [, text, row] = all.prompts[group.prompt];
  return [row ? el('small', {}, `${row} `) : null, text];
}

function groupList(list, all, groups, withSteps) {
  refill(list);
  let count = 0;
  const more = el('button', { type: 'button', onclick: () => add() }, 'more');
  function add() {
    const rows = groups.slice(count, count + ROWS).map((group) => el('button', { type: 'button', className: `row${`${group.step}.${group.place}` === chosen.group ? ' here' : ''}`, 'data-group': `${group.step}.${group.place}`, onclick: () => openGroup(group) }, el('span', { className: 'preview' }, withSteps ? el('b', {}, `${group.step} `) : null, promptName(all, group)), squares(all, group), el('span', { className: 'mean' }, number(group.mean, 3))));
    count += rows.length;
    more.remove();
    list.append(...rows);
    if (count < groups.length) {
      more.textContent = `${number(groups.length - count)} more`;
      list.append(more);
    }
  }
  add();
}

function twoSteps(bar, list, detail, all, kind) {
  const steps = all.steps[kind];
  const options = steps.map((step) => [step, `step ${step}`]);
  const pick = (name, otherwise) => (steps.includes(Number(chosen[name])) && chosen[name] !== undefined ? Number(chosen[name]) : otherwise);
  const from = pick('from', steps[0]);
  const to = pick('to', steps[steps.length - 1]);
  const before = new Map(all.groups.filter((group) => group.kind === kind && group.step === from).map((group) => [group.prompt, group]));
  const pairs = all.groups.filter((group) => group.kind === kind && group.step === to && before.has(group.prompt)).map((after) => ({ before: before.get(after.prompt), after, change: (after.mean ?? 0) - (before.get(after.prompt).mean ?? 0) }));
  pairs.sort((a, b) => Math.abs(b.change) - Math.abs(a.change) || a.change - b.change);
  const better = pairs.filter((pair) => pair.change > 0).length;
  const worse = pairs.filter((pair) => pair.change < 0).length;
  put(bar, [select(options, from, (value) => { choose({ from: value }); show('rollouts'); }, 'first step'), el('span', {}, '→'), select(options, to, (value) => { choose({ to: value }); show('rollouts'); }, 'second step'), el('span', { className: 'muted' }, `${number(pairs.length)} prompts at both: ${number(better)} better, ${number(worse)} worse, ${number(pairs.length - better - worse)} the same`)]);
  if (!pairs.length) {
    list.append(el('p', { className: 'muted' }, 'No prompt was answered at both steps.'));
    return;
  }
  const rows = pairs.slice(0, 500).map((pair) => el('button', { type: 'button', className: 'row', 'data-group': `${pair.after.place}`, onclick: () => open(pair) }, el('span', { className: 'preview' }, promptName(all, pair.after)), el('span', { className: 'squares' }, squares(all, pair.before), el('span', { className: 'arrow' }, '→'), squares(all, pair.after)), el('span', { className: `mean ${pair.change > 0 ? 'up' : pair.change < 0 ? 'down' : ''}` }, signed(pair.change, 3))));
  put(list, [rows, pairs.length > 500 ? el('p', { className: 'muted' }, 'the 500 that changed most') : null]);
  async function open(pair) {
    for (const row of list.querySelectorAll('.row')) row.classList.toggle('here', row.dataset.group === String(pair.after.place));
    const [first, second] = await Promise.all([all.texts(pair.before), all.texts(pair.after)]);
    forgetCharts();
    refill(detail, promptBox(second));
    const count = Math.min(first.rollouts.length, second.rollouts.length);
    for (let place = 0; place < count; place += 1) {
      const sides = [first.rollouts[place], second.rollouts[place]];
      detail.append(el('div', { className: 'pair' }, sides.map((rollout, at) => el('article', { className: 'rollout' }, el('header', {}, el('span', { className: 'muted' }, `step ${at ? to : from} #${rollout.sample ?? place}`), el('span', { className: 'reward', style: { background: all.hue(rollout.reward ?? null) } }, number(rollout.reward)), el('span', { className: 'muted' }, `${number(rollout.response_length)} tokens`)), longText(rollout.response ?? '')))));
    }
  }
  open(pairs[0]);
}
