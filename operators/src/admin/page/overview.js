
// The first screen.

const limitHref = (limit, key = null) => {
  const parameters = new URLSearchParams({ limit });
  if (key) parameters.set("key", key);
  return `#${parameters}`;
};

const mayChange = () => known.status?.author !== null && known.status?.author !== undefined;

function modeText(limit) {
  const parts = [limit.paused ? "paused" : limit.mode];
  if (limit.paused_keys > 0) parts.push(`${count(limit.paused_keys, "key")} paused`);
  if (limit.recovering) parts.push("recovering");
  return parts.join(", ");
}

const isUnusual = (limit) => limit.paused || limit.paused_keys > 0 || limit.recovering || limit.mode !== "enforce";

// Whether the replica reaches the store; and whether newcomers wait because permits return to the store.
function storeState(replica) {
  if (!replica.store_up) return ["down", "bad"];
  return replica.recovering ? ["recovering", "warn"] : ["up", "good"];
}

const showLimits = makeTable(
  byId("limits"),
  "Limits, with what all replicas hold and wait for",
  [
    linkColumn("Limit", (row) => row.limit, (row) => limitHref(row.limit)),
    { title: "Value", text: (row) => valueText(row.max, row) },
    { title: "Declared", text: (row) => (row.max === row.declared_max ? "" : valueText(row.declared_max, row)) },
    {
      title: "Mode",
      make: () => element("span"),
      update: (node, row) => {
        put(node, modeText(row) + (row.differs ? ", replicas differ" : ""));
        putClass(node, isUnusual(row) || row.differs ? "warn" : "");
      },
    },
    { title: "Held", name: "number", text: (row) => row.held.toLocaleString("en") },
    { title: "Waiting", name: "number", text: (row) => row.waiting.toLocaleString("en") },
    { title: "Oldest wait", name: "number", text: (row) => (row.oldest_wait_ms === null ? "" : duration(row.oldest_wait_ms)) },
    { title: "Keys", name: "number", text: (row) => row.keys.toLocaleString("en") },
  ],
  (row) => row.limit,
  "No limit is in use."
);

const overrideColumns = [
  { title: "What", text: (row) => settingText(row, limitOf(row.limit)) + (row.recorded ? "" : ", not recorded: the store has lost it") },
  { title: "Ends in", name: "number", text: (row) => duration(endsIn(row)) },
  { title: "By", text: (row) => row.author },
  { title: "Reason", text: (row) => row.reason },
  buttonColumn(targetText, [["Remove", (row) => openChange("unset", aboutRow(row)), mayChange]]),
];

const overrideKey = (row) => row.token;

const showOverrides = makeTable(
  byId("overrides"),
  "Overrides in force",
  [linkColumn("Limit", targetText, (row) => limitHref(row.limit, row.key)), ...overrideColumns],
  overrideKey,
  "None: what is declared holds."
);

function aboutRow({ limit, key, tenant }) {
  const target = { limit };
  if (key) target.key = key;
  if (tenant) target.tenant = tenant;
  return aboutTarget(target, targetText(target), limitOf(limit));
}

const showReplicas = makeTable(
  byId("replicas"),
  "Replicas",
  [
    { title: "Replica", text: (row) => row.label },
    { title: "Id", name: "code", text: (row) => row.replica },
    { title: "Version", text: (row) => row.version },
    { title: "Up for", name: "number", text: (row) => duration(row.uptime_ms) },
    { title: "Held", name: "number", text: (row) => row.held.toLocaleString("en") },
    { title: "Waiting", name: "number", text: (row) => row.waiting.toLocaleString("en") },
    {
      title: "Store",
      make: () => element("span"),
      update: (node, row) => {
        const [text, name] = storeState(row);
        put(node, text);
        putClass(node, name);
      },
    },
    { title: "Lease", name: "number", text: (row) => duration(row.lease_ms) },
    buttonColumn((row) => row.label, [["Revoke", revokeReplica, (row) => mayChange() && row.held > 0]]),
  ],
  (row) => row.replica,
  "None has answered."
);

function revokeReplica(row) {
  const facts = [["Held", `${count(row.held, "permit")}, of all limits`]];
  openRevoke(`all permits of replica ${row.label}`, { replica: row.replica }, facts);
}

const showLog = makeTable(
  byId("log"),
  "Last changes, the latest first",
  [
    { title: "When", text: (row) => new Date(row.at_ms).toLocaleString() },
    { title: "What", text: loggedTarget },
    { title: "Before", text: (row) => (row.edited ? loggedText(row.edited.before) : "") },
    { title: "After", text: (row) => (row.edited ? loggedText(row.edited.after) : row.what) },
    { title: "By", text: (row) => row.author },
    { title: "Reason", text: (row) => row.reason },
  ],
  (row) => `${row.id} ${row.at}`,
  "None in the last 30 days."
);

function loggedTarget(row) {
  return row.edited ? targetText(row.edited) : row.subject;
}

// One row for each override in a change, and for each order to revoke permits or to end pauses.
function logRows(entries) {
  return entries.flatMap((entry) => {
    if (entry.subject) return [{ ...entry, edited: null, at: 0 }];
    return entry.edits
      .filter(({ before, after }) => before !== null || after !== null)
      .map((edited, at) => ({ ...entry, edited, at }));
  });
}

// What is not known of the overrides.
function unknownOverrides({ overrides, overrides_problem: problem }) {
  if (problem) return `Not known: ${problem.detail}`;
  return overrides?.ignored > 0 ? `${overrides.ignored} cannot be read, and are ignored` : "";
}

function showOverview() {
  const { status, log } = known;
  if (!status) return;
  showLimits(status.limits.rows, moreText(status.limits));
  showOverrides(status.overrides?.rows ?? [], unknownOverrides(status));
  showReplicas(status.replicas.rows, moreText(status.replicas));
  showLog(log ? logRows(log.rows) : [], known.logProblem ? `Not known: ${known.logProblem}` : "");
}
