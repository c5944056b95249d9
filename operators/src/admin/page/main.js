
// The page's location, and its periodic updates.

// Time between two updates, in ms. The service shares its answers among all pages.
const INTERVAL = 2000;
const LOG_INTERVAL = 10000;
const TIMEOUT = 15000;

// The service may be nested at a path with or without a trailing slash.
const base = location.pathname.replace(/\/?$/, "/");

async function answer(path, options = {}) {
  const response = await fetch(base + path, { ...options, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT) }).catch(() => {
    throw new Error("this page cannot reach its service");
  });
  const body = await response.json().catch(() => null);
  if (response.ok && body !== null) return body;
  const words = body ? problemText(body) : `the service answers with status ${response.status}`;
  throw Object.assign(new Error(words), { kind: body?.kind });
}

function send(path, body) {
  const headers = { "content-type": "application/json", "x-turnstile": "page" };
  return answer(path, { method: "POST", headers, body: JSON.stringify(body) });
}

function readRoute() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  return { limit: parameters.get("limit"), key: parameters.get("key"), count: 100 };
}

function go() {
  route = readRoute();
  known.details = null;
  known.detailsProblem = null;
  say("");
  put(byId("why"), "");
  show();
  const heading = route.limit === null ? document.querySelector("#limits h2") : byId("limit-name");
  heading.focus();
  scrollTo(0, 0);
  refresh();
}

function limitOf(name) {
  return known.status?.limits.rows.find(({ limit }) => limit === name);
}

function overridesOf({ limit, key = null, tenant = null }) {
  const rows = known.status?.overrides?.rows ?? [];
  return rows.filter((row) => row.limit === limit && (row.key ?? null) === key && (row.tenant ?? null) === tenant);
}

// Counted by the store's clock up to the answer, and by this computer's since then.
function endsIn(row) {
  return Math.max(0, row.until_ms - known.status.overrides.read_at_ms - age());
}

function age() {
  return known.status.age_ms + (performance.now() - known.received);
}

function logIsOld() {
  known.logReceived = -Infinity;
}

async function readLog() {
  if (route.limit !== null || performance.now() - known.logReceived < LOG_INTERVAL) return;
  try {
    known.log = await answer("api/changes");
    known.logProblem = null;
    known.logReceived = performance.now();
  } catch (problem) {
    known.logProblem = problem.message;
  }
}

async function readDetails() {
  const { limit, key, count } = route;
  if (limit === null) return;
  const parameters = new URLSearchParams({ limit, count });
  if (key) parameters.set("key", key);
  const now = route;
  try {
    const details = await answer(`api/limit?${parameters}`);
    if (now !== route) return;
    known.details = details;
    if (key) rememberKey(details);
    known.detailsProblem = problemText(details.problem);
  } catch (problem) {
    if (now === route) known.detailsProblem = problem.message;
  }
}

async function readStatus() {
  try {
    known.status = await answer("api/status");
    known.received = performance.now();
    rememberStatus(known.status);
    known.problem = problemText(known.status.problem);
  } catch (problem) {
    known.problem = problem.message;
  }
}

function show() {
  const isOverview = route.limit === null;
  byId("overview").hidden = !isOverview;
  byId("limit").hidden = isOverview;
  document.title = isOverview ? "Limits" : `${shown(route.limit)} - Limits`;
  showState();
  if (isOverview) showOverview();
  else showLimit();
}

const STORE = {
  up: ["up", "good"],
  partly: ["down for some replicas", "warn"],
  down: ["down", "bad"],
};

function showState() {
  const { status } = known;
  const problem = known.problem ?? known.detailsProblem;
  const silence = status ? silenceText(status) : "";
  put(byId("trouble"), problem ? `No new answers: ${problem}.${status ? " What is shown is from before." : ""}` : silence);
  if (!status) return;
  const [store, name] = known.problem && status.store === "up" ? ["not known", "warn"] : STORE[status.store];
  put(byId("store"), store);
  putClass(byId("store"), name);
  const answers = status.limits;
  const isGood = !known.problem && isWhole(answers);
  put(byId("answered"), answeredText(answers) + (known.problem ? " before" : ""));
  putClass(byId("answered"), isGood ? "good" : "warn");
  put(byId("you"), mayChange() ? status.author : "read-only");
  showAge();
}

function showAge() {
  if (!known.status) return;
  const old = age();
  put(byId("age"), old < 1000 ? "just now" : `${duration(old)} old`);
  putClass(byId("age"), old > 10000 ? "bad" : "");
}

let timer = null;
let asking = false;
let again = false;

// One update at a time. A hidden page is not updated.
async function refresh() {
  clearTimeout(timer);
  if (asking) {
    again = true;
    return;
  }
  asking = true;
  await Promise.all([readStatus(), readDetails(), readLog()]);
  asking = false;
  try {
    show();
  } finally {
    if (again) {
      again = false;
      refresh();
    } else if (!document.hidden) {
      timer = setTimeout(refresh, INTERVAL);
    }
  }
}

addEventListener("hashchange", go);
document.addEventListener("visibilitychange", () => document.hidden || refresh());
setInterval(showAge, 1000);
route = readRoute();
show();
refresh();
