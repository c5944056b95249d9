
// One limit or one key.

const showLimitOverrides = makeTable(
  byId("limit-overrides"),
  "Overrides of this limit, its keys and its tenants",
  [linkColumn("Of", (row) => targetText(row, known.details?.keys.rows), (row) => limitHref(row.limit, row.key)), ...overrideColumns],
  overrideKey,
  "None: what is declared holds."
);

const keyColumn = linkColumn("Key", caller, (row) => limitHref(known.details.limit, row.key), "code");

const showKeys = makeTable(
  byId("keys"),
  "Keys in use",
  [
    keyColumn,
    useColumn,
    { title: "Left", name: "number", text: leftText },
    { title: "Waiting", name: "number", text: (row) => atLeast(row, row.waiting) },
    { title: "Oldest wait", name: "number", text: (row) => ("oldest_wait_ms" in row ? duration(row.oldest_wait_ms) : "") },
    { title: "Replicas", name: "number", text: (row) => String(row.replicas) },
    { title: "Paused", text: pauseText },
    { title: "Adaptive", text: paceText },
    { title: "Recovering", text: (row) => (row.recovering ? "yes" : "") },
    buttonColumn(caller, [
      ["Set value", (row) => openChange("set", aboutKey(row)), mayChange],
      ["Revoke", revokeKey, (row) => mayChange() && row.held > 0],
      ["Resume", (row) => openResume(aboutKey(row), pauseText(row)), (row) => mayChange() && "pause_ends_in_ms" in row],
      ["Explain", explain],
    ]),
  ],
  (row) => row.key,
  "No key is in use."
);

const showTenants = makeTable(
  byId("tenants"),
  "Tenants, the longest queues first",
  [
    { title: "Tenant", name: "code", text: tenantText },
    { title: "Share", name: "number", text: (row) => row.share.toLocaleString("en") },
    { title: "Held", name: "number", text: (row) => atLeast(row, row.held) },
    { title: "Waiting", name: "number", text: (row) => atLeast(row, row.waiting) },
    { title: "Oldest wait", name: "number", text: (row) => ("oldest_wait_ms" in row ? duration(row.oldest_wait_ms) : "") },
    { title: "Debt", name: "number", text: debtText },
    { title: "Replicas", name: "number", text: (row) => String(row.replicas) },
    buttonColumn(tenantText, [
      ["Set share", (row) => openChange("share", { ...aboutTenant(row), share: row.share }), (row) => mayChange() && row.tenant_text !== ""],
      ["Remove share", (row) => openChange("unset", aboutTenant(row)), (row) => mayChange() && aboutTenant(row).seen.length > 0],
    ]),
  ],
  (row) => row.tenant,
  "No tenant holds a slot or waits."
);

const permitColumns = [
  keyColumn,
  { title: "Tenant", name: "code", text: tenantText },
  { title: "What", text: (row) => row.label ?? "" },
  { title: "Replica", text: (row) => row.replica_label },
  { title: "Id", name: "code", text: (row) => row.id },
];

const showHolders = makeTable(
  byId("holders"),
  "Holders, the oldest first",
  [
    { title: "Holds for", text: (row) => duration(row.age_ms) },
    ...permitColumns,
    buttonColumn((row) => row.id, [["Revoke", revokePermit, mayChange]]),
  ],
  (row) => row.id,
  "Nobody holds a slot."
);

const showWaiters = makeTable(
  byId("waiters"),
  "Waiters, the oldest first",
  [
    { title: "Waits for", text: (row) => duration(row.age_ms) },
    { title: "Joined at place", name: "number", text: (row) => (row.place ? String(row.place) : "") },
    ...permitColumns,
  ],
  (row) => row.id,
  "Nobody waits."
);

const showRefusals = makeTable(
  byId("refusals"),
  "Last refusals, the latest first",
  [
    { title: "Ago", text: (row) => duration(row.age_ms) },
    { title: "Why", text: (row) => reasonText(row.reason) },
    { title: "In use", name: "number", text: (row) => `${row.in_use} of ${row.max}` },
    { title: "Queued", name: "number", text: (row) => String(row.waiting) },
    { title: "Had waited", name: "number", text: (row) => (row.waited_ms > 0 ? duration(row.waited_ms) : "") },
    { title: "Key", name: "code", text: (row) => caller(row) },
    { title: "What", text: (row) => row.label ?? "" },
    { title: "Replica", text: (row) => row.replica_label },
  ],
  (row, at) => at,
  "None of late."
);

const limitButtons = [
  ["Set value", () => openChange("set", aboutRoute()), mayChange],
  ["Set mode", () => openChange("mode", aboutRoute()), () => mayChange() && !route.key],
  ["Pause", () => openChange("pause", aboutRoute()), () => mayChange() && !route.key],
  ["Resume", resumeRoute, () => mayChange() && (route.key ? "pause_ends_in_ms" in ownKey() : limitOf(route.limit)?.paused_keys > 0)],
  ["Remove overrides", () => openChange("unset", aboutRoute()), () => mayChange() && overridesOf(route).length > 0],
  ["Explain", () => explain(ownKey()), () => route.key !== null],
].map(([label, act, has]) => ({ node: button(label, act), has }));
byId("limit-buttons").append(...limitButtons.map(({ node }) => node));

function revokePermit(row) {
  const facts = [
    ["Key", caller(row)],
    ["Held", `for ${duration(row.age_ms)}, on ${row.replica_label}`],
  ];
  if (row.label) facts.push(["What", row.label]);
  openRevoke(`permit ${row.id}`, { permit: row.id }, facts);
}

function revokeKey(row) {
  const held = `${row.partial ? "at least " : ""}${count(row.held, "permit")}`;
  const facts = [["Held", `${held}, on ${count(row.replicas, "replica")}`]];
  openRevoke(`all permits of ${caller(row)}`, { key: { limit: route.limit, key: row.key } }, facts);
}

// Ends the pause of a key, or the pauses of all keys of the selected limit.
function openResume({ target, name }, paused) {
  openChange("resume", { target, name, facts: [["Paused", paused]] });
}

function resumeRoute() {
  if (route.key) openResume(aboutRoute(), pauseText(ownKey()));
  else openResume(aboutRoute(), count(limitOf(route.limit).paused_keys, "key"));
}

// Why a request of this caller would wait or be refused now.
async function explain(row) {
  const now = route;
  const parameters = new URLSearchParams({ limit: route.limit, key: row.key });
  const why = await answer(`api/explain?${parameters}`).then(explanationText, (problem) => problem.message);
  if (now === route) put(byId("why"), `${caller(row)}: ${why}`);
}

// The selected key, which may not be in use.
function ownKey() {
  return known.details?.keys.rows.find(({ key }) => key === route.key) ?? { key: route.key };
}

function aboutKey(row) {
  const target = { limit: route.limit, key: row.key };
  return aboutTarget(target, targetText(target, [row]), limitOf(route.limit), row);
}

function aboutTenant({ tenant }) {
  return aboutRow({ limit: route.limit, tenant });
}

// The selected limit or key.
function aboutRoute() {
  if (!route.key) return aboutRow({ limit: route.limit });
  const value = overridesOf(route).find(({ setting }) => setting === "value")?.to;
  const max = value ?? limitOf(route.limit)?.max ?? 1;
  return aboutKey({ max, ...ownKey() });
}

function limitFacts(limit) {
  const facts = [
    ["Value", valueText(limit.max, limit), limit.max === limit.declared_max ? "" : "warn"],
    ["Declared", declaredText(limit)],
    ["Mode", modeText(limit), isUnusual(limit) ? "warn" : ""],
    ["Held", limit.held.toLocaleString("en")],
    ["Waiting", limit.waiting.toLocaleString("en")],
    ["Keys", limit.keys.toLocaleString("en")],
    ["Queue", limit.wait_ms > 0 ? `up to ${duration(limit.wait_ms)}, ${count(limit.max_waiters, "request")}` : "none"],
  ];
  if (limit.fair) facts.push(["Order", "fair among tenants"]);
  if (limit.pace) facts.push(["Adaptive", paceText(limit)]);
  if (limit.oldest_wait_ms !== null) facts.push(["Oldest wait", duration(limit.oldest_wait_ms)]);
  const applies = isRate(limit) ? "each charges by its own" : "the largest value applies";
  if (limit.differs) facts.push(["Replicas", `differ in value, mode or fairness: ${applies}`, "warn"]);
  return facts;
}

const NOT_YET = "Not known yet.";

function showLimit() {
  const limit = limitOf(route.limit);
  put(byId("limit-name"), route.limit);
  byId("limit-key").hidden = !route.key;
  byId("limit-all-keys").setAttribute("href", limitHref(route.limit));
  putFacts(byId("limit-facts"), limit ? limitFacts(limit) : []);
  limitButtons.forEach(({ node, has }) => (node.hidden = !has()));
  const ofLimit = (known.status?.overrides?.rows ?? []).filter((row) => row.limit === route.limit);
  const ofKey = route.key ? ofLimit.filter((row) => !row.key || row.key === route.key) : ofLimit;
  showLimitOverrides(ofKey, known.status ? unknownOverrides(known.status) : NOT_YET);
  showDetails(limit);
}

function showDetails(limit) {
  const details = known.details;
  const rows = details?.permits.rows ?? [];
  const [holders, waiters] = ["held", "waiting"].map((state) => rows.filter((row) => row.state === state));
  const own = details?.keys.rows.find(({ key }) => key === route.key);
  put(byId("limit-key-name"), route.key ? `Only key ${caller(ownKey())}.` : "");
  const all = route.key ? own : limit;
  showChart(route.limit, route.key);
  showKeys(details?.keys.rows ?? [], details ? moreText(details.keys) : NOT_YET);
  byId("tenants").hidden = !limit?.fair;
  showTenants(details?.tenants?.rows ?? [], details?.tenants ? moreText(details.tenants) : NOT_YET);
  // A heavy permit holds several slots.
  const held = holders.reduce((sum, { weight = 1 }) => sum + weight, 0);
  showHolders(holders, details ? restText(details.permits, held, all?.held ?? held) : NOT_YET);
  showWaiters(waiters, details ? restText(details.permits, waiters.length, all?.waiting ?? waiters.length) : NOT_YET);
  showRefusals(details?.refusals.rows ?? [], details ? moreText(details.refusals) : NOT_YET);
  byId("more").hidden = !details || route.count > 100 || details.permits.left_out + details.keys.left_out === 0;
}

async function find(event) {
  event.preventDefault();
  const { limit } = route;
  try {
    const { key } = await send("api/digest", { limit, key: byId("find").key.value });
    location.hash = limitHref(limit, key);
  } catch (problem) {
    say(problem.message);
  }
}

byId("find").addEventListener("submit", find);
byId("more").addEventListener("click", () => {
  route.count = 500;
  refresh();
});
