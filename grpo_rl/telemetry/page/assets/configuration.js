// What differs from the defaults, the whole on demand, and how to do it again.

function configuration(host) {
  const one = run();
  const found = one.configuration;
  const rows = found.different.map((each) => el('tr', { className: each.named ? 'named' : '' }, el('td', {}, el('code', {}, each.key)), el('td', {}, el('code', {}, each.value)), el('td', { className: 'muted' }, el('code', {}, each.default))));
  const search = el('input', { type: 'search', placeholder: 'search keys', 'aria-label': 'search keys', oninput: () => rows.forEach((row) => (row.hidden = !row.textContent.toLowerCase().includes(search.value.toLowerCase()))) });
  const whole = el('details', {}, el('summary', {}, 'the whole configuration'), el('div', { className: 'bar' }, el('button', { type: 'button', onclick: () => download('config.yaml', new Blob([found.whole], { type: 'text/yaml' })) }, 'save as YAML')), el('pre', { className: 'whole' }, found.whole));
  put(host, [
    RUNS.length > 1 ? card('What differs between the runs', differingKeys()) : null,
    card('Do it again', el('p', { className: 'muted' }, 'The same run under another name:'), code(found.repeat), one.status.state !== 'done' ? [el('p', { className: 'muted' }, 'Go on with this one from its last commit:'), code(found.resume)] : null),
    card('What differs from the defaults', el('div', { className: 'bar' }, search, el('span', { className: 'muted' }, `${found.different.length} keys; those of the command line are bold, the others are the recipe's`)), el('div', { className: 'scroll' }, el('table', { className: 'keys' }, el('tr', {}, el('th', {}, 'key'), el('th', {}, 'value'), el('th', {}, 'default')), rows))),
    card('', whole),
  ]);
}

// A key that a run has not changed has its default, which another run that changed it knows.
function differingKeys() {
  const defaults = new Map(RUNS.flatMap((one) => one.configuration.different.map((each) => [each.key, each.default])));
  const valuesOf = RUNS.map((one) => new Map(one.configuration.different.map((each) => [each.key, each.value])));
  const rows = [...defaults].map(([key, usual]) => [key, valuesOf.map((values) => values.get(key) ?? usual)]).filter(([, values]) => new Set(values).size > 1);
  return el('div', { className: 'scroll' }, el('table', { className: 'keys' }, el('tr', {}, el('th', {}, 'key'), RUNS.map((one) => el('th', {}, one.name))), rows.map(([key, values]) => el('tr', {}, el('td', {}, el('code', {}, key)), values.map((value) => el('td', {}, el('code', {}, value)))))));
}
