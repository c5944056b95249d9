
// The last ten minutes of a limit or a key, as far as this page has seen them.

const HISTORY = 600000;
// Of all limits and keys; the oldest are forgotten.
const MAX_HISTORIES = 500;
const histories = new Map();

const historyOf = (limit, key) => histories.get(JSON.stringify([limit, key])) ?? [];

function remember(limit, key, { max, held, waiting, pace }) {
  const name = JSON.stringify([limit, key]);
  const now = performance.now();
  const seen = historyOf(limit, key).filter(({ at }) => now - at < HISTORY);
  const before = seen.at(-1)?.overloaded;
  const overloaded = pace?.overloaded ?? 0;
  // A replica that has left takes its number along.
  seen.push({ at: now, max, held, waiting, overloaded, more: Math.max(0, overloaded - (before ?? overloaded)) });
  histories.delete(name);
  histories.set(name, seen);
  if (histories.size > MAX_HISTORIES) histories.delete(histories.keys().next().value);
}

function rememberStatus({ limits }) {
  limits.rows.forEach((row) => remember(row.limit, null, row));
}

function rememberKey({ limit, key, keys }) {
  const own = keys.rows.find((row) => row.key === key);
  if (own) remember(limit, key, own);
}

const WIDTH = 600;
const HEIGHT = 120;
const drawn = (name, attributes) => {
  const node = document.createElementNS(byId("chart-lines").namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
};

const LINES = [
  ["value", "max"],
  ["in use", "held"],
  ["waiting", "waiting"],
];

function showChart(limit, key) {
  const home = byId("chart");
  const seen = historyOf(limit, key);
  home.hidden = seen.length < 2;
  if (home.hidden) return;
  const [now, last] = [performance.now(), seen.at(-1)];
  const top = Math.max(1, ...seen.flatMap(({ max, held, waiting }) => [max, held, waiting]));
  const x = (at) => (WIDTH * (1 - (now - at) / HISTORY)).toFixed(1);
  const y = (number) => (HEIGHT * (1 - number / top)).toFixed(1);
  const overloads = seen.filter(({ more }) => more > 0);
  const lines = LINES.map(([name, field]) =>
    drawn("polyline", { class: field, points: seen.map((one) => `${x(one.at)},${y(one[field])}`).join(" ") })
  );
  const marks = overloads.map(({ at }) => drawn("path", { class: "overloads", d: `M${x(at)} ${HEIGHT}v-8` }));
  byId("chart-lines").replaceChildren(drawn("path", { class: "axis", d: `M0 0V${HEIGHT}H${WIDTH}` }), ...marks, ...lines);
  const numbers = LINES.map(([name, field]) => `${name} ${last[field].toLocaleString("en")}`);
  const sum = overloads.reduce((all, { more }) => all + more, 0);
  const shownSince = duration(now - seen[0].at);
  byId("chart-lines").setAttribute("aria-label", `${numbers.join(", ")}; ${count(sum, "overload")} in ${shownSince}`);
  putFacts(byId("chart-facts"), [
    ...LINES.map(([name, field]) => [name, last[field].toLocaleString("en"), field]),
    ["overloads", sum.toLocaleString("en"), "overloads"],
    ["top", top.toLocaleString("en")],
    ["shown", `${shownSince} of ten minutes`],
  ]);
}
