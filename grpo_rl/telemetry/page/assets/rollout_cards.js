// One group side by side: each response with its reward, parts, advantage and length, its tokens coloured where they are logged.

const LONGEST_SHOWN = 6000;
const COLOURS = { none: 'no colours', logprob: 'log-prob of each token', advantage: 'advantage' };

function groupView(host, all, group, texts) {
  const history = all.history(group);
  const order = texts.rollouts.map((_, place) => place);
  if (chosen.order === 'reward') order.sort((a, b) => (texts.rollouts[b].reward ?? -Infinity) - (texts.rollouts[a].reward ?? -Infinity));
  if (chosen.order === 'length') order.sort((a, b) => texts.rollouts[b].response_length - texts.rollouts[a].response_length);
  const longest = Math.max(1, ...texts.rollouts.map((rollout) => rollout.response_length || 0));
  const spread = Math.max(1e-9, ...texts.rollouts.map((rollout) => Math.abs(rollout.advantage || 0)));
  const hasTokens = texts.rollouts.some((rollout) => rollout.tokens);
  const hasEpisodes = texts.rollouts.some((rollout) => rollout.episode);
  const again = () => { refill(host); groupView(host, all, group, texts); };
  const cards = order.map((place) => rolloutCard(all, texts, place, { longest, spread }));
  put(host, [
    el('div', { className: 'bar' }, el('b', {}, `${group.kind === 'val' ? 'validation at' : ''} step ${group.step}, ${texts.rollouts.length} ${hasEpisodes ? 'episode' : 'response'}${texts.rollouts.length > 1 ? 's' : ''}, mean reward ${number(group.mean)}`), el('span', { className: 'grow' }), labelled('order', select([['', 'as sampled'], ['reward', 'by reward'], ['length', 'by length']], chosen.order || '', (value) => { choose({ order: value }); again(); }, 'order of responses')), labelled('colour', select(Object.entries(COLOURS), chosen.colour || 'logprob', (value) => { choose({ colour: value }); again(); }, 'colour of tokens'))),
    promptBox(texts),
    historyBox(all, group, history),
    legend(hasTokens),
    hasEpisodes ? el('p', { className: 'muted' }, el('i', { className: 'bar-of-turns' }), ' turns that the policy sampled, which are trained; what stands between them is context.') : null,
    el('div', { className: hasEpisodes ? 'cards long' : 'cards' }, cards),
  ]);
}

// What the colours of the tokens mean, or why there are none.
function legend(hasTokens) {
  if ((chosen.colour || 'logprob') !== 'logprob') return null;
  if (!hasTokens) return el('p', { className: 'muted' }, 'Single tokens are logged for the first groups of each step (trainer.log_token_groups).');
  return el('p', { className: 'muted' }, 'Colour: how unlikely the policy found the token when it sampled it; ', el('span', { className: 'scale' }), ' likely to unlikely.');
}

function promptBox(texts) {
  const rows = [['prompt', texts.prompt]];
  if (texts.ground_truth !== null && texts.ground_truth !== undefined) rows.push(['truth', typeof texts.ground_truth === 'string' ? texts.ground_truth : JSON.stringify(texts.ground_truth)]);
  return el('dl', { className: 'prompt' }, rows.map(([name, text]) => el('div', {}, el('dt', {}, name), el('dd', {}, longText(text)))));
}

function longText(text) {
  const whole = String(text);
  const box = el('pre', {}, whole.length > LONGEST_SHOWN ? whole.slice(0, LONGEST_SHOWN) : whole);
  if (whole.length > LONGEST_SHOWN) box.append(el('button', { type: 'button', onclick: () => refill(box, whole) }, `… ${number(whole.length - LONGEST_SHOWN)} more characters`));
  return box;
}

function historyBox(all, group, history) {
  if (history.length < 2) return null;
  const box = el('details', { className: 'history', open: true }, el('summary', {}, `This prompt at ${history.length} ${group.kind === 'val' ? 'validations' : 'steps'}`));
  whenShown(box, () => {
    const plot = namedChart(box, {
      x: history.map((one) => one.step),
      series: [{ label: 'mean reward', values: history.map((one) => one.mean), colour: HUES[0], points: true }, { label: 'best', values: history.map((one) => Math.max(...one.rewards.filter((reward) => reward !== null))), colour: HUES[2], width: 1, dash: [4, 4] }],
      height: 110,
      marks: [{ x: group.step, colour: colour('--muted') }],
    });
    plot.over.addEventListener('click', () => plot.cursor.idx !== null && openGroup(history[plot.cursor.idx]));
  });
  box.append(el('div', { className: 'steps' }, history.slice(0, 200).map((one) => el('button', { type: 'button', className: one === group ? 'here' : 'quiet', title: `step ${one.step}: mean reward ${number(one.mean)}`, onclick: () => openGroup(one) }, el('i', { className: 'square', style: { background: all.hue(one.mean) } }), one.step))));
  return box;
}

function rolloutCard(all, texts, place, scale) {
  const rollout = texts.rollouts[place];
  const parts = shownParts(rollout);
  const isCut = rollout.finish_reason === 'length';
  const said = (one) => JSON.stringify(one.episode?.messages);
  const twin = texts.rollouts.findIndex((other) => other.response === rollout.response && said(other) === said(rollout));
  const advantage = rollout.advantage;
  const half = advantage === null || advantage === undefined ? 0 : (50 * Math.abs(advantage)) / scale.spread;
  const facts = [
    advantage !== undefined && advantage !== null ? el('div', { className: 'fact' }, el('span', {}, 'advantage'), el('span', { className: 'both' }, el('i', { className: advantage < 0 ? 'minus' : 'plus', style: { width: `${half}%` } })), el('b', {}, signed(advantage, 3))) : null,
    el('div', { className: 'fact' }, el('span', {}, 'length'), el('span', { className: 'one' }, el('i', { className: isCut ? 'cut' : '', style: { width: `${(100 * (rollout.response_length || 0)) / scale.longest}%` } })), el('b', {}, number(rollout.response_length))),
  ];
  const small = rollout.episode ? episodeFacts(rollout.episode) : [];
  if (rollout.rollout_logprob_mean !== undefined && rollout.rollout_logprob_mean !== null) small.push(`log-prob ${number(rollout.rollout_logprob_mean, 3)}`);
  if (rollout.baseline !== undefined) small.push(`baseline ${number(rollout.baseline)}`);
  if (rollout.weight_version !== undefined && rollout.weight_version !== null) small.push(rollout.weight_versions ? `weights ${rollout.weight_versions.map(([version]) => version).join(', ')}` : `weights ${rollout.weight_version}`);
  return el(
    'article',
    { className: 'rollout' },
    el('header', {}, el('span', { className: 'muted' }, `#${rollout.sample ?? place}`), el('span', { className: 'reward', style: { background: all.hue(rollout.reward ?? null) } }, rollout.reward === undefined || rollout.reward === null ? 'no reward' : number(rollout.reward)), rollout.episode ? el('span', { className: 'muted' }, `${number(rollout.episode.spans.length)} turn${rollout.episode.spans.length === 1 ? '' : 's'}`) : null, isCut || LIMITS[rollout.episode?.ended] ? el('span', { className: 'chip amber', title: isCut ? 'it reached data.max_response_length' : 'a limit ended it, not the environment' }, LIMITS[rollout.episode?.ended] || 'cut') : null, rollout.failure ? el('span', { className: 'chip red' }, rollout.failure) : null, rollout.finish_reason === 'abort' ? el('span', { className: 'chip red' }, 'aborted') : null, twin < place ? el('span', { className: 'muted' }, `= #${texts.rollouts[twin].sample ?? twin}`) : null),
    facts,
    parts.length ? el('div', { className: 'parts' }, parts.map(([name, value]) => el('span', {}, name, ' ', el('b', {}, number(value))))) : null,
    response(rollout, scale),
    rollout.failure_cause ? el('p', { className: 'error' }, rollout.failure_cause) : null,
    small.length ? el('p', { className: 'muted small' }, small.join(' · ')) : null,
  );
}

// The parts of a reward, without what says the same again: the second name of a component's own key, a component that is the
// whole reward, and its accuracy where that is its score.
function shownParts(rollout) {
  const parts = Object.entries(rollout.reward_parts || {});
  const own = parts.filter(([name]) => !parts.some(([other]) => other.endsWith(`/${name}`)));
  const components = own.filter(([name]) => !name.includes('/'));
  const isWhole = ([name, value]) => components.length === 1 && name === components[0][0] && value === rollout.reward;
  const isScore = ([name, value]) => name.includes('/') && value === (rollout.reward_parts[name.split('/')[0]] ?? null) && name.endsWith('/acc');
  return own.filter((part) => !isWhole(part) && !isScore(part));
}

function response(rollout, scale) {
  const way = chosen.colour || 'logprob';
  const text = (content, start, end) => {
    if (rollout.tokens && way === 'logprob') return colouredTokens(rollout, start, end);
    const box = longText(content);
    if (way === 'advantage' && rollout.advantage) {
      const strength = 0.08 + (0.3 * Math.abs(rollout.advantage)) / scale.spread;
      box.style.background = rollout.advantage > 0 ? `rgb(34 160 90 / ${strength})` : `rgb(220 60 60 / ${strength})`;
    }
    return box;
  };
  return rollout.episode ? conversation(rollout.episode, text) : text(rollout.response ?? '', 0, rollout.tokens?.length);
}

function colouredTokens(rollout, start, end) {
  const box = el('pre', { className: 'tokens' });
  const fill = (stop) => rollout.tokens.slice(start, stop).map((text, place) => {
    const logprob = rollout.logprobs[start + place];
    return el('span', { title: `log-prob ${number(logprob, 3)}, probability ${number(Math.exp(logprob), 3)}`, style: { background: `rgb(234 120 20 / ${(0.75 * Math.min(1, -logprob / 4)).toFixed(3)})` } }, text);
  });
  const first = Math.min(end, start + 3000);
  put(box, [fill(first)]);
  if (end > first) box.append(el('button', { type: 'button', onclick: () => refill(box, fill(end)) }, `… ${number(end - first)} more tokens`));
  return box;
}

// ---- episodes of several turns ----------------------------------------------------------------------------------------

const LIMITS = { turns: 'out of turns', tokens: 'out of tokens', time: 'out of time' };
const MOST_TURNS = 40;

// Turn by turn. Those of the policy have a bar at their side: their tokens were sampled and are trained, all others are context.
function conversation(episode, sampled) {
  let at = 0;
  const turns = episode.messages.map((message) => {
    if (message.role !== 'assistant') return turn('', [message.name ? `${message.role} ${message.name}` : message.role], longText(message.content ?? ''));
    const [start, length] = episode.spans[at] || [0, 0];
    at += 1;
    const facts = [`turn ${at}`, `${number(length)} token${length === 1 ? '' : 's'}`];
    if (message.reward !== undefined && message.reward !== null) facts.push(`reward ${number(message.reward)}`);
    const box = sampled(message.content ?? '', start, start + length);
    return turn('trained', facts, box);
  });
  const box = el('div', { className: 'conversation' }, turns.slice(0, MOST_TURNS));
  const rest = turns.slice(MOST_TURNS);
  if (rest.length) box.append(el('button', { type: 'button', onclick: (event) => event.target.replaceWith(...rest) }, `… ${number(rest.length)} more messages, to the end of the episode`));
  return box;
}

function turn(kind, facts, box) {
  return el('div', { className: `turn ${kind}` }, el('span', { className: 'muted small' }, facts.join(' · ')), box);
}

// How an episode went, in words: tool calls and what failed of them, waiting, what the environment says of it.
function episodeFacts(episode) {
  const counts = Object.entries(episode.counts || {}).filter(([, count]) => count).map(([name, count]) => `${name.replaceAll('_', ' ')} ${number(count)}`);
  const info = Object.entries(episode.info || {}).map(([name, value]) => `${name} ${number(value)}`);
  return [...counts, ...info, ...(episode.wait_s >= 0.01 ? [`waited ${number(episode.wait_s)} s`] : [])];
}
