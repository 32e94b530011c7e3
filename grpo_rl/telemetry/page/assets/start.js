// The frame: head, tabs, and the look for a newer version of this page.

const TABS = { overview: ['Overview', overview], curves: ['Curves', curves], rollouts: ['Rollouts', rollouts], time: ['Time', time], configuration: ['Configuration', configuration] };
const root = document.getElementById('page');
const content = el('main', {});
const header = el('div', {});
const tabs = el('nav', { className: 'tabs' });
const newer = el('button', { type: 'button', className: 'newer', hidden: true, onclick: () => location.reload() }, 'newer data: reload');

function remembered(name, value) {
  try {
    if (value !== undefined) localStorage.setItem(name, value);
    return localStorage.getItem(name);
  } catch {
    return null; // a browser may forbid it for files
  }
}

function show(tab, anchor) {
  const name = TABS[tab] ? tab : 'overview';
  choose({ tab: name });
  forgetCharts();
  refill(header, head(run()));
  refill(tabs, Object.entries(TABS).map(([key, [text]]) => el('button', { type: 'button', className: key === name ? 'on' : '', onclick: () => show(key) }, text)));
  const page = el('div', { className: `tab ${name}` });
  refill(content, page);
  TABS[name][1](page);
  if (anchor) document.getElementById(anchor)?.scrollIntoView({ behavior: 'smooth' });
}

function runChoice() {
  if (RUNS.length < 2) return null;
  return select(RUNS.map((one, place) => [place, one.name]), chosen.run || 0, (value) => { choose({ run: value, step: null, group: null }); show(chosen.tab); }, 'run');
}

// While a run goes on, a small file beside the page says how new the page is; the same from disk and when served.
function follow() {
  if (!DATA.live) return;
  const look = async () => {
    try {
      const version = Number(await loadScript(`${encodeURI(DATA.live)}?t=${Date.now()}`));
      if (version > DATA.version) {
        if (chosen.tab === 'rollouts') newer.hidden = false; // not under the eyes of a reader
        else {
          remembered('grpo_rl.scroll', String(scrollY));
          location.reload();
        }
      }
    } catch {
      // The page was moved without its files: it stays as it is.
    }
    setTimeout(look, 5000);
  };
  setTimeout(look, 5000);
}

put(root, [el('div', { className: 'top' }, el('div', { className: 'brand' }, 'grpo_rl', runChoice(), newer, el('span', { className: 'grow' }), el('span', { className: 'muted' }, `written ${new Date(DATA.written * 1000).toLocaleString('en-GB', { dateStyle: 'medium', timeStyle: 'short' })}`)), header, tabs), content]);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => show(chosen.tab));
show(chosen.tab || 'overview');
const scroll = Number(remembered('grpo_rl.scroll'));
if (scroll) {
  remembered('grpo_rl.scroll', '');
  scrollTo(0, scroll);
}
follow();
