// Rollouts: the index of all groups, and chunks with their texts, which are unpacked when they are looked at.

const MOST_CHUNKS = 64;
const stores = new Map();
const waiting = new Map();

// Every chunk beside the page is a script that calls this.
window.__chunk = (name, packed) => {
  const script = document.currentScript;
  const found = script && waiting.get(script);
  if (found) found(packed);
};

function loadScript(path) {
  return new Promise((resolve, reject) => {
    const script = document.createElement('script');
    const end = (act) => { waiting.delete(script); script.remove(); act(); };
    waiting.set(script, (packed) => end(() => resolve(packed)));
    script.onerror = () => end(() => reject(new Error(`${path} is not there: keep the folder beside the page`)));
    script.onload = () => waiting.has(script) && end(() => reject(new Error(`${path} is no chunk`)));
    script.src = path;
    document.head.append(script);
  });
}

async function unpacked(packed) {
  const bytes = Uint8Array.from(atob(packed), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return JSON.parse(await new Response(stream).text());
}

function store(one) {
  if (!stores.has(one)) stores.set(one, new Store(one));
  return stores.get(one);
}

class Store {
  constructor(one) {
    this.chunks = one.chunks;
    this.cache = new Map();
  }

  // The groups of all steps: {kind, step, place, chunk, offset, prompt, source, rewards, lengths, cut, failures, mean}.
  ready() {
    if (!this.loading) this.loading = this.load();
    return this.loading;
  }

  async load() {
    const folder = this.chunks.folder;
    const index = this.chunks.index || (await unpacked(await loadScript(`${encodeURI(folder)}/index.js?v=${DATA.version}`)));
    this.prompts = index.prompts;
    this.sources = index.sources;
    this.failures = index.failures;
    this.groups = [];
    this.steps = { rollouts: [], val: [] };
    this.low = Infinity;
    this.high = -Infinity;
    for (const entry of index.steps) {
      this.steps[entry.kind].push(entry.step);
      for (const [name, first, count] of entry.chunks) {
        for (let offset = 0; offset < count; offset += 1) {
          const [prompt, source, rewards, lengths, cut, failures] = entry.groups[first + offset];
          for (const reward of rewards) {
            if (reward === null) continue;
            if (reward < this.low) this.low = reward;
            if (reward > this.high) this.high = reward;
          }
          this.groups.push({ kind: entry.kind, step: entry.step, place: first + offset, chunk: name, offset, prompt, source, rewards, lengths, cut, failures, mean: mean(rewards) });
        }
      }
    }
    for (const kind of Object.keys(this.steps)) this.steps[kind].sort((a, b) => a - b);
    return this;
  }

  async chunk(name) {
    if (this.cache.has(name)) {
      const found = this.cache.get(name);
      this.cache.delete(name); // the last one used is the last to go
      this.cache.set(name, found);
      return found;
    }
    const inlined = this.chunks.inlined[name];
    const found = (async () => unpacked(inlined || (await loadScript(`${encodeURI(this.chunks.folder)}/${name}.js?v=${DATA.version}`))))();
    this.cache.set(name, found);
    found.catch(() => this.cache.delete(name));
    if (this.cache.size > MOST_CHUNKS) this.cache.delete(this.cache.keys().next().value);
    return found;
  }

  async texts(group) {
    return (await this.chunk(group.chunk))[group.offset];
  }

  history(group) {
    return this.groups.filter((other) => other.prompt === group.prompt && other.kind === group.kind).sort((a, b) => a.step - b.step);
  }

  hue(reward) {
    if (reward === null) return 'var(--grid)';
    const share = this.high > this.low ? (reward - this.low) / (this.high - this.low) : 0.5;
    return `hsl(${Math.round(8 + share * 140)} 62% ${Math.round(52 - 8 * share)}%)`;
  }
}

// Groups that meet the conditions: {kind, step, source, outcome, low, high, text}. `text` looks into chunk after chunk.
async function found(all, conditions, onProgress) {
  const { kind, step, source, outcome, low, high, text } = conditions;
  const inRange = (reward) => (low === null || (reward !== null && reward >= low)) && (high === null || (reward !== null && reward <= high));
  const groups = all.groups.filter((group) => {
    if (group.kind !== kind || (step !== null && group.step !== step) || (source !== null && group.source !== source)) return false;
    if ((low !== null || high !== null) && !group.rewards.some(inRange)) return false;
    const known = group.rewards.filter((reward) => reward !== null);
    const isEqual = known.every((reward) => reward === known[0]);
    if (outcome === 'equal') return isEqual;
    if (outcome === 'mixed') return !isEqual;
    if (outcome === 'failed') return group.failures.length > 0;
    if (outcome === 'cut') return group.cut.length > 0;
    if (outcome === 'none') return known.every((reward) => reward <= all.low);
    if (outcome === 'best') return known.length > 0 && known.every((reward) => reward >= all.high);
    return true;
  });
  if (!text) return groups;
  const wanted = text.toLowerCase();
  const kept = [];
  let done = 0;
  const byChunk = grouped(groups, (group) => group.chunk);
  for (const [name, members] of byChunk) {
    const texts = await all.chunk(name);
    for (const group of members) {
      const one = texts[group.offset];
      const holds = (value) => String(value || '').toLowerCase().includes(wanted);
      if (holds(one.prompt) || holds(one.ground_truth) || one.rollouts.some((rollout) => holds(rollout.response))) kept.push(group);
    }
    done += 1;
    if (onProgress && onProgress(done / byChunk.size, kept) === false) return null;
  }
  return kept;
}
