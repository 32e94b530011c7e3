// What differs from the defaults, the whole on demand, and how to do it again.

function configuration(host) {
  const one = run();
  const found = one.configuration;
  const rows = found.different.map((each) => el('tr', { className: each.named ? 'named' : '' }, el('td', {}, el('code', {}, each.key)), el('td', {}, el('code', {}, each.value)), el('td', { className: 'muted' }, el('code', {}, each.default))));
  const search = el('input', { type: 'search', placeholder: 'search keys', 'aria-label': 'search keys', oninput: () => rows.forEach((row) => (row.hidden = !row.textContent.toLowerCase().includes(search.value.toLowerCase()))) });
  const whole = el('details', {}, el('summary', {}, 'the whole configuration'), el('div', { className: 'bar' }, el('button', { type: 'button', onclick: () => download('config.yaml', new Blob([found.whole], { type: 'text/yaml' })) }, 'save as YAML')), el('pre', { className: 'whole' }, found.whole));
  put(host, [
    card('Do it again', el('p', { className: 'muted' }, 'The same run under another name:'), code(found.repeat), one.status.state !== 'done' ? [el('p', { className: 'muted' }, 'Go on with this one from its last commit:'), code(found.resume)] : null),
    card('What differs from the defaults', el('div', { className: 'bar' }, search, el('span', { className: 'muted' }, `${found.different.length} keys; those of the command line are bold, the others are the recipe's`)), el('div', { className: 'scroll' }, el('table', { className: 'keys' }, el('tr', {}, el('th', {}, 'key'), el('th', {}, 'value'), el('th', {}, 'default')), rows))),
    card('', whole),
  ]);
}
