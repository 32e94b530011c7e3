// Elements, numbers and state. Whatever a model wrote becomes text nodes here: nothing is ever parsed as HTML.

const DATA = JSON.parse(document.getElementById('data').textContent);
const RUNS = DATA.runs;

// Controls, marks that reorder a line, and lone surrogates, which a browser would obey or hide.
const UNSAFE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

function visible(text) {
  return String(text).replace(UNSAFE, (char) => '\\u' + char.charCodeAt(0).toString(16).padStart(4, '0'));
}

function el(name, properties, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith('on')) node.addEventListener(key.slice(2), value);
    else if (key === 'style') Object.assign(node.style, value);
    else if (key in node && key !== 'list') node[key] = value;
    else node.setAttribute(key, value);
  }
  put(node, children);
  return node;
}

function put(node, children) {
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return node;
}

function refill(node, ...children) {
  node.replaceChildren();
  return put(node, children);
}

function number(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return '–';
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString('en');
  if (size >= 1e5 || (size < 1e-4 && size > 0)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

function signed(value, digits) {
  return (value >= 0 ? '+' : '−') + number(Math.abs(value), digits);
}

function duration(seconds) {
  if (!Number.isFinite(seconds)) return '–';
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${Math.floor(seconds / 60)} min ${String(Math.round(seconds % 60) % 60).padStart(2, '0')} s`;
  if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, '0')} min`;
  return `${(minutes / 1440).toFixed(1)} days`;
}

function mean(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

function deviation(values) {
  const middle = mean(values);
  return Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1));
}

function grouped(items, keyOf) {
  const groups = new Map();
  for (const item of items) {
    const members = groups.get(keyOf(item));
    if (members) members.push(item);
    else groups.set(keyOf(item), [item]);
  }
  return groups;
}

// The groups of runs that differ in nothing but their seeds.
function repeated() {
  return [...grouped(RUNS, (one) => one.setting).values()].filter((members) => members.length > 1);
}

function ofSeeds(members) {
  return `mean of ${members.map((one) => one.name).join(', ')}`;
}

// ---- what is chosen, in the address, so that it survives a reload and can be shared ----------------------------------

const chosen = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

function choose(changes) {
  for (const [key, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === '') delete chosen[key];
    else chosen[key] = String(value);
  }
  try {
    history.replaceState(null, '', '#' + new URLSearchParams(chosen));
  } catch {
    // Some browsers forbid it for files.
  }
}

function run() {
  return RUNS[Number(chosen.run) || 0] || RUNS[0];
}

// ---- parts that many tabs use ------------------------------------------------------------------------------------------

function card(title, ...children) {
  return el('section', { className: 'card' }, title ? el('h2', {}, title) : null, children);
}

function code(text) {
  const button = el('button', { className: 'quiet', type: 'button', onclick: () => copy(text, button) }, 'copy');
  return el('div', { className: 'command' }, el('code', {}, text), button);
}

function copy(text, button) {
  const area = el('textarea', { value: text, style: { position: 'fixed', opacity: 0 } });
  document.body.append(area);
  area.select();
  document.execCommand('copy'); // the clipboard's own interface is closed to files
  area.remove();
  button.textContent = 'copied';
  setTimeout(() => (button.textContent = 'copy'), 1500);
}

function select(options, value, onchange, label) {
  const box = el('select', { onchange: () => onchange(box.value), 'aria-label': label, title: label });
  for (const [key, text] of options) box.append(el('option', { value: key, selected: String(key) === String(value) }, text));
  return box;
}

function labelled(text, ...controls) {
  return el('label', { className: 'control' }, el('span', {}, text), controls);
}

function download(name, content) {
  const link = el('a', { href: URL.createObjectURL(content), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function csv(rows) {
  const cell = (value) => {
    const text = value === null || value === undefined ? '' : String(value);
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return new Blob([rows.map((row) => row.map(cell).join(',')).join('\n') + '\n'], { type: 'text/csv' });
}
