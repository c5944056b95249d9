
// Texts for data.

function duration(ms) {
  const seconds = Math.floor(ms / 1000);
  const both = (one, unit, other, small) => `${Math.floor(one)} ${unit}` + (Math.floor(other) ? ` ${Math.floor(other)} ${small}` : "");
  if (seconds < 1) return `${Math.round(ms)} ms`;
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return both(seconds / 60, "min", seconds % 60, "s");
  if (seconds < 86400) return both(seconds / 3600, "h", (seconds / 60) % 60, "min");
  return both(seconds / 86400, "d", (seconds / 3600) % 24, "h");
}

function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

// A caller, as far as the page may show it.
function caller(row) {
  if (row.key_text === "") return "all callers";
  return row.key_text ?? row.key ?? "unknown";
}

// A number of a key or tenant, without the part of any replica that has left the row out.
function atLeast(row, number) {
  const text = number.toLocaleString("en");
  return row.partial ? `at least ${text}` : text;
}

// A tenant, as far as the page may show it.
function tenantText(row) {
  if (row.tenant_text === "") return "no tenant";
  return row.tenant_text ?? row.tenant ?? "";
}

function isRate(limit) {
  return Boolean(limit) && limit.period_ms !== null;
}

// Who shares a value, as far as replicas know: an unused limit may be shared by all callers.
function forWhom(limit) {
  if (limit.shared) return " for all callers together";
  return limit.keys > 0 ? " per key" : "";
}

function valueText(value, limit) {
  if (!limit) return String(value);
  const rate = limit.period_ms === null ? "" : ` ${limit.unit ?? "requests"} in ${duration(limit.period_ms)}`;
  return `${value}${rate}${forWhom(limit)}`;
}

function settingText(one, limit) {
  if (one.setting === "value") {
    const burst = one.burst === undefined ? "" : `, burst ${one.burst}`;
    return (one.key ? String(one.to) : valueText(one.to, limit)) + burst;
  }
  if (one.setting === "share") return `share ${one.to}`;
  if (one.setting === "pause") return "paused: admits nobody";
  if (one.to === "off") return "off: admits everybody";
  if (one.to === "shadow") return "shadow: admits everybody";
  return one.setting === "mode" ? "enforced" : one.setting;
}

// A setting in the log: an override, or nothing.
function loggedText(setting) {
  return setting ? settingText(setting, null) : "as declared";
}

function targetText(target, rows = []) {
  if (target.tenant) {
    const tenant = known.details?.tenants?.rows.find((row) => row.tenant === target.tenant);
    return `${target.limit}, tenant ${tenantText(tenant ?? target)}`;
  }
  if (!target.key) return target.limit;
  const row = rows.find((row) => row.key === target.key);
  return `${target.limit}, key ${row ? caller(row) : target.key}`;
}

function answeredText(answers) {
  const parts = [`${answers.answered} of ${answers.replicas} answered`];
  if (answers.missing.length > 0) parts.push(`no answer: ${answers.missing.join(", ")}`);
  if (answers.busy.length > 0) parts.push(`asked too often: ${answers.busy.join(", ")}`);
  return parts.join("; ");
}

// Why an answer is missing, if it is.
function problemText(problem) {
  if (!problem) return null;
  return problem.kind === "unavailable" ? `the store does not answer: ${problem.detail}` : problem.detail;
}

// The number of rows omitted from a list.
function moreText(list) {
  return list.left_out > 0 ? `and ${list.left_out.toLocaleString("en")} more` : "";
}

// Holders or waiters omitted from the list of permits, which has both: the total less the displayed ones.
function restText(permits, shown, all) {
  const left = permits.left_out > 0 ? all - shown : 0;
  return left > 0 ? `and ${left.toLocaleString("en")} more` : "";
}

// Explains an empty answer, because a wrong namespace looks like a service without replicas.
function silenceText(status) {
  if (status.replicas.replicas > 0) return "";
  const { namespaces } = status;
  if (!namespaces) return "No operable replica is there.";
  if (namespaces.length === 0) return "No operable replica is there, and no namespace is in use in this database.";
  return `No operable replica is in this namespace. In use in this database: ${namespaces.join(", ")}.`;
}

// A key's remaining budget at a rate. Empty for slots.
function leftText(row) {
  if (!("burst" in row)) return "";
  return `${row.partial ? "at most " : ""}${row.remaining.toLocaleString("en")} of ${row.burst.toLocaleString("en")}`;
}

// How an adaptive limit has found its value. Empty for others.
function paceText({ pace }) {
  if (!pace) return "";
  const parts = [`${pace.floor} to ${pace.ceiling} from ${pace.declared}`, count(pace.cuts, "cut")];
  if ("cut_ms" in pace) parts.push(`the last ${duration(pace.cut_ms)} ago from ${pace.cut_from} to ${pace.cut_to}`);
  if ("wall" in pace) parts.push(`below ${pace.wall} for ${duration(pace.wall_ends_in_ms)}`);
  return parts.join(", ");
}

// A key's pause for an overloaded upstream. Empty if there is none.
function pauseText(row) {
  if (!("pause_ends_in_ms" in row)) return "";
  const replica = row.paused_by === "" ? "an upstream" : `the upstream of ${row.paused_by}`;
  return `for ${duration(row.pause_ends_in_ms)}, by ${replica}`;
}

// What a tenant owes the others. Empty if unknown.
function debtText(row) {
  if (!("debt_ms" in row)) return "";
  return row.debt_ms > 0 ? duration(row.debt_ms) : "none";
}

// Why requests of a tenant wait.
function tenantWhy(row) {
  const parts = [`${tenantText(row)} (share ${row.share}) holds ${atLeast(row, row.held)}, ${atLeast(row, row.waiting)} waiting`];
  if (row.debt_ms > 0) parts.push(`in debt by ${duration(row.debt_ms)}`);
  return parts.join(", ");
}

// By the codes of verdicts.
const VERDICTS = {
  admitted: "a request would be admitted",
  queued: "a request would queue",
  delayed: "a request would wait for the rate",
  too_soon: "a request would be refused: the rate is used up",
  full: "a request would be refused: all slots are in use",
  queue_full: "a request would be refused: all slots are in use, and the queue is full",
  paused: "a request would be refused: it is paused",
  recovering: "a request would wait until permits are back in the store, which has lost its data or was down",
};

// By the codes of refusals.
const REASONS = {
  full: "all slots were in use",
  queue_full: "the queue was full",
  timed_out: "no slot in time",
  too_soon: "the rate was used up",
  invalid_weight: "more slots than the limit has",
  invalid_cost: "a cost above the burst of the rate",
  unknown_rate: "a budget at a rate that the request does not have",
  unknown_limit: "a pause of a limit that the request does not have",
  unavailable: "the store did not answer",
  misconfigured: "the store refused: see the log of the replica",
  shut_down: "the replica was shutting down",
  paused: "the limit or the key was paused",
  no_runtime: "the replica had no runtime",
};

// A replica of another version may know reasons that this page does not.
function reasonText(code) {
  return REASONS[code] ?? code;
}

function explanationText(why) {
  const before = why.problem ? `no new answer (${why.problem.detail}); ${duration(why.age_ms)} ago: ` : "";
  const parts = [VERDICTS[why.verdict] ?? "no replica has charged this key lately: see its last refusals"];
  if (why.place !== null) parts[0] += ` at place ${why.place}`;
  if (why.wait_ms !== null) parts[0] += ` for ${duration(why.wait_ms)}`;
  if (why.verdict === "admitted" && why.mode !== "enforce") parts[0] += `, as the limit is ${why.mode}`;
  if (why.unit) {
    if (why.budget) parts.push(`${leftText(why.budget)} ${why.unit} left`);
  } else if (why.verdict) parts.push(`${why.in_use} of ${count(why.max, "slot")} in use, ${count(why.waiting, "request")} waiting`);
  if (why.pause) parts.push(`paused ${pauseText(why.pause)}`);
  if (why.pace) parts.push(`adaptive ${paceText(why)}`);
  const tenants = (why.tenants?.rows ?? []).filter((row) => row.waiting > 0);
  if (tenants.length > 0) parts.push(`tenants that wait: ${tenants.slice(0, 5).map(tenantWhy).join("; ")}`);
  if (why.unclaimed.length > 0) parts.push(`no replica has answered for ${count(why.unclaimed.length, "slot")}`);
  const [last] = why.refusals.rows;
  if (last) parts.push(`refused ${duration(last.age_ms)} ago: ${reasonText(last.reason)}`);
  return `${before}${parts.join("; ")}.`;
}

function revokedText({ ended, running, permits }) {
  const parts = [`${count(ended, "permit")} ended.`];
  if (running > 0) parts.push(`${count(running, "job")} still running: told, and holding on to slots until the end.`);
  return [...parts, ...silentText(permits)].join(" ");
}

function resumedText({ keys }) {
  const least = keys.left_out > 0 ? "At least " : "";
  return [`${least}${count(keys.rows.length, "key")} resumed.`, ...silentText(keys)].join(" ");
}

function isWhole(answers) {
  return answers.answered > 0 && answers.answered === answers.replicas && answers.busy.length === 0;
}

// Who has not answered, if anybody.
function silentText(answers) {
  return isWhole(answers) ? [] : [`${answeredText(answers)}.`];
}

function outcomeText(outcome) {
  if (outcome.outcome === "revoked") return revokedText(outcome);
  if (outcome.outcome === "resumed") return resumedText(outcome);
  if (outcome.outcome === "done") return `Done on ${outcome.replicas} of ${count(outcome.replicas, "replica")}.`;
  if (outcome.outcome === "unused") return `Done on ${outcome.replicas} of ${count(outcome.replicas, "replica")}. None has used this limit or tenant yet.`;
  const missing = outcome.missing.length > 0 ? ` Not yet: ${outcome.missing.join(", ")}.` : "";
  return (
    `Recorded, ${outcome.confirmed} of ${outcome.of} have confirmed it.${missing} ` +
    "The others apply it within a minute, or when they connect."
  );
}
