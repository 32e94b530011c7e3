// Charts by uPlot, in the page's colours, as wide as their place.

const HUES = ['#2563eb', '#d97706', '#0f9d76', '#c2255c', '#7c3aed', '#0b7285', '#a16207', '#be123c'];
const WHOLE = [1, 2, 5].flatMap((one) => [0, 1, 2, 3, 4, 5, 6, 7].map((power) => one * 10 ** power)).sort((a, b) => a - b);
const charts = new Set();

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function faded(hex, share) {
  return hex + Math.round(share * 255).toString(16).padStart(2, '0');
}

// series: {label, values, colour, width, dash, points, low, high}; all over the same x.
function chart(host, settings) {
  const { x, series, height = 220, xLabel = 'step', sync, marks = [], onCursor } = settings;
  const axis = { stroke: colour('--muted'), grid: { stroke: colour('--grid'), width: 1 }, ticks: { show: false }, font: '11px system-ui' };
  const lines = [{ label: xLabel, value: (_, value) => number(value) }];
  const columns = [x];
  const bands = [];
  for (const one of series) {
    if (one.low) {
      const place = lines.length;
      for (const edge of [one.high, one.low]) {
        lines.push({ label: '', stroke: 'transparent', points: { show: false }, spanGaps: true });
        columns.push(edge);
      }
      bands.push({ series: [place, place + 1], fill: faded(one.colour, 0.16) });
    }
    lines.push({
      label: one.label,
      stroke: one.colour,
      width: one.width || 1.8,
      dash: one.dash,
      spanGaps: true,
      value: (_, value) => number(value),
      points: { show: one.points || one.values.filter((value) => value !== null && value !== undefined).length < 3, size: 5, fill: one.colour },
    });
    columns.push(one.values);
  }
  const options = {
    width: Math.max(80, host.clientWidth),
    height,
    scales: { x: { time: false }, y: settings.range ? { range: settings.range, dir: -1 } : { range: padded } },
    axes: [{ ...axis, size: 28, incrs: xLabel === 'step' ? WHOLE : undefined, values: (_, splits) => splits.map((value) => number(value)) }, { ...axis, size: settings.yAxis || 52, ...(settings.ySplits ? { splits: () => settings.ySplits } : {}), values: settings.yValues || ((_, splits) => ticks(splits)) }],
    series: lines,
    bands,
    legend: { show: false },
    cursor: { sync: sync ? { key: sync } : undefined, points: { size: 6 }, drag: { x: true, y: false }, y: false },
    hooks: {
      draw: [(plot) => marks.forEach((mark) => drawMark(plot, mark)), ...(settings.draw || [])],
      setCursor: onCursor ? [onCursor] : [],
    },
  };
  const plot = new uPlot(options, columns, host);
  const watcher = new ResizeObserver(() => {
    const width = Math.max(80, host.clientWidth);
    if (width !== plot.width) plot.setSize({ width, height });
  });
  watcher.observe(host);
  plot.forget = () => {
    watcher.disconnect();
    plot.destroy();
    charts.delete(plot);
  };
  charts.add(plot);
  return plot;
}

// The numbers of an axis, with as many digits as tell them apart.
function ticks(splits) {
  for (let digits = 3; digits < 9; digits += 1) {
    const texts = splits.map((value) => number(value, digits));
    if (new Set(texts).size === texts.length) return texts;
  }
  return splits.map((value) => number(value, 9));
}

function padded(plot, low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === high) return low === 0 ? [-0.1, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  const room = (high - low) * 0.06;
  return [low - room, high + room];
}

function drawMark(plot, mark) {
  const { left, top, width, height } = plot.bbox;
  const x = plot.valToPos(mark.x, 'x', true);
  if (x < left || x > left + width) return;
  const context = plot.ctx;
  context.save();
  context.strokeStyle = mark.colour;
  context.setLineDash([4, 4]);
  context.lineWidth = devicePixelRatio;
  context.beginPath();
  context.moveTo(x, top);
  context.lineTo(x, top + height);
  context.stroke();
  context.restore();
}

function forgetCharts() {
  for (const plot of [...charts]) plot.forget();
}

// A chart with a line above it that names the series and shows their values where the pointer is.
function namedChart(host, settings) {
  const shown = settings.series.filter((one) => !one.quiet);
  const values = shown.map(() => el('b', {}));
  const place = el('span', { className: 'muted' });
  const keys = shown.map((one, at) => el('span', { className: 'key' }, el('i', { style: { background: one.colour } }), one.label, ' ', values[at]));
  const at = (index) => {
    settings.series.forEach((one) => {
      const spot = shown.indexOf(one);
      if (spot < 0) return;
      let found = index === null || index === undefined ? one.values.length - 1 : index;
      while (found >= 0 && (one.values[found] === null || one.values[found] === undefined)) found -= 1;
      const value = found >= 0 ? one.values[found] : null;
      const bounds = one.low && found >= 0 && Number.isFinite(one.low[found]) ? ` [${number(one.low[found], 3)}, ${number(one.high[found], 3)}]` : '';
      values[spot].textContent = number(value) + bounds;
    });
    place.textContent = index === null || index === undefined ? '' : `${settings.xLabel || 'step'} ${number(settings.x[index])}`;
  };
  const legend = el('div', { className: 'legend' }, keys, place);
  const area = el('div', { className: 'plot' });
  put(host, [legend, area]);
  at(null);
  const plot = chart(area, { ...settings, onCursor: (one) => at(one.cursor.idx) });
  return plot;
}

function smoothed(values, share) {
  // An exponential average, corrected for its beginning as Adam's moments are (Kingma and Ba 2015, section 3).
  if (!share) return values;
  let total = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    total = share * total + (1 - share) * value;
    weight = share * weight + (1 - share);
    return total / weight;
  });
}
