// The tab of rollouts: groups by step, filtered, one of them side by side.

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
  const bar = el('div', { className: 'bar' }, select(kinds, kind, (value) => { choose({ kind: value, step: null, group: null }); show('rollouts'); }, 'training or validation'));
  refill(host, bar, el('div', { className: 'browser' }, list, detail));
  oneStep(bar, list, detail, all, kind);
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
  let typing = 0;
  // While somebody types: a search through all rollouts for each letter would come too late.
  const soon = (changes) => { clearTimeout(typing); typing = setTimeout(() => change(changes), 200); };
  const field = (name, label) => el('input', { type: 'number', step: 'any', placeholder: label, value: chosen[name] || '', 'aria-label': label, className: 'short', oninput: (event) => soon({ [name]: event.target.value }) });
  const text = el('input', { type: 'search', placeholder: 'text in prompts and responses', value: chosen.text || '', 'aria-label': 'text', oninput: () => soon({ text: text.value }) });
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
